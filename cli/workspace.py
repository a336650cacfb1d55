"""The repository's way into a sandbox and back, and the record that outlives a killed command line."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from cli import bringback, collect, gate, place, repository, session
from cli.gather import BRANCH
from cli.plan import Packed, Plan
from cli.repository import Repository
from cli.session import Session
from sandboxd.client import Client, Sandbox
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

PIECE_BYTES = 256 * 1024


class Workspace:
    """The repository's way into a sandbox and back."""

    def __init__(self, name: str | None, agent: str, repo: Repository, packed: Packed | None = None) -> None:
        self._name = name
        self._agent = agent
        # What was packed earlier is clean, and its notes were made when that was done.
        self._repo = replace(repo, head_commit=packed.commit, dirty=False, notes=()) if packed else repo
        self._packed = packed
        self._bundle: tuple[IO[bytes], int] | None = None
        self._record: Session | None = None

    @classmethod
    def of(cls, asked: Plan) -> Workspace | None:
        """None outside a repository, unless one was asked for."""
        repo = repository.discover(asked.project or Path("."))
        if repo is None:
            if asked.project is not None:
                raise SandboxError(f"--project {clean(str(asked.project))}: not in a git repository")
            return None
        if asked.branch is None and asked.create.name is not None:
            bringback.check_name(asked.create.name)
        return cls(asked.branch or asked.create.name, asked.agent.name if asked.agent else "", repo, asked.packed)

    @property
    def notes(self) -> tuple[str, ...]:
        dirty = ("uncommitted changes stay here: the sandbox gets HEAD",) if self._repo.dirty else ()
        return dirty + self._repo.notes

    def pack(self) -> None:
        session.prepare(Path(place.config_dir()))
        if self._packed is None:
            self._bundle = bringback.bundle_head(self._repo)
        else:
            # Opened anew, so that its position is ours alone.
            bundle = open(f"/proc/self/fd/{self._packed.descriptor}", "rb")  # noqa: SIM115 - `send` closes it
            self._bundle = bundle, os.fstat(bundle.fileno()).st_size

    def send(self, client: Client, sandbox: Sandbox, where: str) -> None:
        """Clone it in the sandbox, and write down what would be needed to bring it back."""
        assert self._bundle is not None
        bundle, size = self._bundle
        with bundle:
            client.put_workspace(sandbox.id, BRANCH, iter(partial(bundle.read, PIECE_BYTES), b""), size)
        self._record = Session(
            sandbox=sandbox.id,
            context=where,
            repo=str(self._repo.top),
            base=self._repo.head_commit,
            branch=self._name or sandbox.id,
            agent=self._agent,
            started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        session.save(Path(place.config_dir()), self._record)

    def bring_back(
        self, client: Client, sandbox: str, left_behind: Callable[[Sequence[str]], None]
    ) -> dict[str, Any]:
        record = self._record
        assert record is not None
        gathered, received = collect.collect(client, sandbox, self._repo, record.base, record.branch)
        session.save(Path(place.config_dir()), replace(record, brought_back=True))
        review = gate.review(self._repo, record.base, received.commit) if received else gate.Review()
        collect.tell(gathered, received, record.base, review)
        if gathered.left:
            left_behind(gathered.left)
        return collect.result(received, review)

    def forget(self) -> None:
        """The sandbox is gone and with it all that the record was for."""
        if self._record is not None:
            session.forget(Path(place.config_dir()), self._record.sandbox)
