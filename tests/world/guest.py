"""One networked sandbox of a daemon that runs in the world, and what is asked of it."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sandboxd.assembly import instance
from sandboxd.client import Create, Event, NetworkRequest, Process, RunResult, Sandbox
from tests.daemon import Daemon
from tests.world.capture import Capture
from tests.world.frames import Tap
from tests.world.spaces import within
from tests.world.world import World

HOME = "/sandbox/home"
PROBE = Path(__file__).with_name("probe.py")


class Told(NamedTuple):
    """The outcome of one action in the guest; see `probe.py`."""

    end: str
    ms: float
    came: bytes

    @property
    def figures(self) -> dict[str, Any]:
        found = json.loads(self.came)
        assert isinstance(found, dict)
        return found


class Guest:
    """A sandbox whose programs trust the world's authority because its host does. Node.js itself, unlike npm, trusts
    what it was built with and what a variable names."""

    def __init__(self, daemon: Daemon, world: World, network: NetworkRequest | None, name: str) -> None:
        self.daemon, self.world = daemon, world
        self.sandbox: Sandbox = daemon.client.create(Create(name=name, memory_mb=768, network=network))
        self.id = self.sandbox.id
        put = daemon.client.write_file
        put(self.id, f"{HOME}/probe.py", PROBE.read_bytes())
        put(self.id, f"{HOME}/key", world.ssh_key.read_bytes())
        self.run("chmod", "600", f"{HOME}/key")
        ssh = f"ssh -i {HOME}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        self.env = {"GIT_SSH_COMMAND": ssh, "NODE_EXTRA_CA_CERTS": "/etc/ssl/certs/ca-certificates.crt"}

    def run(self, *argv: str, env: Mapping[str, str] | None = None, timeout_s: float = 120) -> RunResult:
        return self.daemon.client.run(self.id, argv, env=env, cwd=HOME, timeout_secs=timeout_s)

    def sh(self, script: str, timeout_s: float = 120) -> RunResult:
        """A script, with the key for the world's SSH server."""
        return self.run("sh", "-c", script, env=self.env, timeout_s=timeout_s)

    def ask(self, *asks: Mapping[str, object], timeout_s: float = 120) -> list[Told]:
        """The actions one after another, by one process in the guest."""
        probe = ["python3", f"{HOME}/probe.py"]
        done = self.daemon.client.run(self.id, probe, stdin=json.dumps(asks).encode(), timeout_secs=timeout_s)
        assert done.exit_code == 0, done.stderr.decode(errors="replace")
        return told(done.stdout)

    def begin(self, ask: Mapping[str, object]) -> Process:
        """An action that goes on while the test does something else; `finish` has its outcome."""
        return self.daemon.client.start(self.id, ["python3", f"{HOME}/probe.py", json.dumps([ask])], cwd=HOME)

    def finish(self, process: Process) -> Told:
        pieces = list(self.daemon.client.output(self.id, process.pid))
        said = b"".join(piece.data for piece in pieces if piece.stream == "stdout")
        assert pieces[-1].exit_code == 0, b"".join(piece.data for piece in pieces)
        return told(said)[0]

    def allow(self, *names: str, tcp: Sequence[str] = (), deny: Sequence[str] = ()) -> None:
        """The allowlist from now on."""
        request = NetworkRequest(mode="allowlist", allow=names, deny=tuple(deny), allow_tcp=tuple(tcp))
        self.sandbox = self.daemon.client.update(self.id, network=request)

    def events(self, name: str) -> list[Event]:
        """The decisions about a name."""
        rows = self.daemon.client.egress(self.id).names
        return [self.daemon.client.event(row.id) for row in rows if row.name == name]

    @property
    def namespace(self) -> str:
        return f"sbx-{instance(self.daemon.state)}-{self.id.removeprefix('sbx_')}"

    def counters(self) -> dict[str, int]:
        """Packets by the named counters of the sandbox's rules."""
        shown = self.world.host.run("ip", "netns", "exec", self.namespace, "nft", "-j", "list", "counters")
        entries = [entry["counter"] for entry in json.loads(shown)["nftables"] if "counter" in entry]
        return {entry["name"]: entry["packets"] for entry in entries}

    def link(self) -> Capture:
        """Sees every packet of the sandbox's link; `outgoing` is what goes to the guest."""
        path = f"/proc/{self.world.host.pid}/root/run/netns/{self.namespace}"
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return Capture(lambda make: within(fd, make), "tap0")
        finally:
            os.close(fd)

    def tap(self) -> Tap:
        return Tap(self.id)


def told(output: bytes) -> list[Told]:
    return [Told(each["end"], each["ms"], base64.b64decode(each["came"])) for each in json.loads(output)]


def stream(to: str, port: int, *pieces: bytes | str, **more: object) -> dict[str, object]:
    """Connect and send; a text is what must have come before the next piece."""
    said = [{"after": piece} if isinstance(piece, str) else encoded(piece) for piece in pieces]
    return {"do": "stream", "to": [to, port], "pieces": said} | more


def datagram(to: str, port: int, data: bytes) -> dict[str, object]:
    return {"do": "datagram", "to": [to, port], "data": encoded(data)}


def get(host: str, path: str = "/", *, close: bool = True) -> bytes:
    """A plain request."""
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{'Connection: close' if close else 'X: y'}\r\n\r\n".encode()


def encoded(data: bytes) -> str:
    """Bytes as `probe.py` takes them."""
    return base64.b64encode(data).decode()
