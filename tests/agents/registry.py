"""A registry in the tests' world that serves one package under an agent's name, and can be slow, or lie.

The program in it does what its first argument says, so that a test can be the agent. Format: npm's packument, as its
registry's API documents it.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import threading
from dataclasses import dataclass, field

from cli.agents.table import Agent, Npm
from tests.world.origin import Request

HOST = "npm.test"
PROGRAM = b'#!/bin/sh\necho "the agent is $0"\nexec sh -c "$1"\n'
HELD_S = 280.0

Reply = tuple[int, dict[str, str], bytes]


@dataclass
class Registry:
    """`held` keeps whoever fetches the package waiting until it is set; `forged` changes what is served, and nothing of
    what is said about it."""

    agent: Agent
    held: threading.Event = field(default_factory=threading.Event)
    forged: bool = False
    fetched: int = 0
    """How often the package was asked for."""

    def __post_init__(self) -> None:
        self.held.set()
        assert isinstance(self.agent.source, Npm)
        self._name, self._version = self.agent.source.package, self.agent.source.version
        self._tarball = self._pack(PROGRAM)

    def __call__(self, request: Request) -> Reply:
        if request.path.endswith(".tgz"):
            self.fetched += 1
            self.held.wait(HELD_S)
            return 200, {}, self._pack(PROGRAM + b"# and something else\n") if self.forged else self._tarball
        if request.path.lstrip("/") == self._name:
            return 200, {"Content-Type": "application/json"}, json.dumps(self._packument()).encode()
        return 404, {}, b"{}"

    def _packument(self) -> dict[str, object]:
        dist = {
            "tarball": f"https://{HOST}/-/{self._name}-{self._version}.tgz",
            "integrity": "sha512-" + base64.b64encode(hashlib.sha512(self._tarball).digest()).decode(),
            "shasum": hashlib.sha1(self._tarball).hexdigest(),
        }
        version = self._manifest() | {"dist": dist}
        return {"name": self._name, "dist-tags": {"latest": self._version}, "versions": {self._version: version}}

    def _manifest(self) -> dict[str, object]:
        return {"name": self._name, "version": self._version, "bin": {self.agent.binary: "program"}}

    def _pack(self, program: bytes) -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
            for name, data, mode in (
                ("package/package.json", json.dumps(self._manifest()).encode(), 0o644),
                ("package/program", program, 0o755),
            ):
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(data), mode
                archive.addfile(entry, io.BytesIO(data))
        return packed.getvalue()
