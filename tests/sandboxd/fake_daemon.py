"""A `sandboxd` whose machines are `tests/fake_vmm.py`: everything but the VMM is the product's own.

    python -m tests.sandboxd.fake_daemon STATE-DIR SOCKET [--network] [FLAG OF SANDBOXD...]

Started as a process of its own, so that it can be killed. Files in STATE-DIR/../knobs steer it: `boot_s` delays a
machine, `prepare_s` the images, `hostile` holds the bytes a stand-in guest answers every connection with; with
`no_end` machines say that they did not end (0), or that the kernel said no (its errno); `speaks` is the protocol
version the daemon is to have, `patience` its seconds of `heartbeat`, `measured_s` those between two looks at what
sandboxes use; `events` what the stand-in network tells, `report` what it answers, `no_open` and `no_update` let it
fail; `limits` (JSON) are other ones than the product's; `no_bind` says why no directory can be shared, `allowed` what
is known against the VMM, which with `falls_back` is another one in the end; `max_cpus` is what it gives a machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
from docopt import docopt

from egress.control import Event
from egress.network import EgressError, GuestNetwork, Link
from egress.policy import Policy
from guestd import protocol
from sandboxd import __main__ as daemon
from sandboxd import heartbeat, policy, supervision
from sandboxd.__main__ import run
from sandboxd.assembly import Parts
from sandboxd.assets.prepare import Assets, Progress, Report
from sandboxd.errors import BootFailed, SandboxError
from sandboxd.limits import Limits
from sandboxd.registries import Registries
from sandboxd.settings import Settings, read
from sandboxd.vm.machine import MAX_CPUS, Machine, MachineSpec, Program, Share
from sandboxd.vm.processes import start_ticks

ROOT = Path(__file__).resolve().parents[2]
FAKE_VMM = ROOT / "tests" / "fake_vmm.py"


class FakeMachine:
    """A fake_vmm process, found again by its record and its command line."""

    def __init__(self, directory: Path, spec_id: str, pid: int) -> None:
        self.spec_id = spec_id
        self.vsock_path = directory / "vsock.sock"
        self._no_end = directory.parents[2] / "knobs" / "no_end"
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)
        self.programs = (Program(pid, start_ticks(pid)),)

    async def console_tail(self, limit_bytes: int = 8192) -> bytes:
        return b"a line of the guest's \x1b[31mconsole\n"[-limit_bytes:]

    async def wait_exit(self) -> None:
        if self._pidfd < 0:
            return
        # Any number may wait: each on a descriptor of its own.
        own = os.dup(self._pidfd)
        try:
            await anyio.wait_readable(own)
        finally:
            os.close(own)

    async def terminate(self) -> None:
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            end(self._pid, pidfd)
            os.close(pidfd)
            if self._no_end.exists():
                if number := int(self._no_end.read_text()):
                    raise OSError(number, os.strerror(number))
                raise SandboxError(f"{self.spec_id}: a process did not end")


def end(pid: int, pidfd: int) -> None:
    """TERM, then KILL, then its process group: a child that was not yet tied to its parent is in it."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if not select.select([pidfd], [], [], 5)[0]:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], 5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


@dataclass(frozen=True)
class FakeBackend:
    knobs: Path
    name: str = "fake"
    silent: bool = False

    def knob(self, name: str) -> bytes:
        path = self.knobs / name
        return path.read_bytes() if path.exists() else b""

    async def start(self, spec: MachineSpec) -> Machine:
        await anyio.sleep(float(self.knob("boot_s") or 0))
        if hostile := self.knob("hostile"):
            return HostileMachine(spec, hostile)
        if self.knob("no_boot"):
            raise BootFailed("starting the VMM", 1, b"panic: \x1b]0;title\x07no root\n")
        return FakeMachine(spec.directory, spec.id, launch(spec.directory, spec.share))

    async def adopt(self, directory: Path, sandbox_id: str) -> Machine | None:
        pid = recorded(directory)
        return None if pid is None else FakeMachine(directory, sandbox_id, pid)

    async def recover(self, volume: Path, sandbox_id: str, uid: int | None) -> bool:
        await anyio.sleep(float(self.knob("recover_s") or 0))
        if self.knob("no_recover"):
            return False
        done = await anyio.run_process(["/usr/sbin/e2fsck", "-p", str(volume)], check=False)
        return done.returncode in (0, 1)

    def sweep(self, sandboxes: Path, known: frozenset[str]) -> None:
        for directory in sandboxes.iterdir():
            if directory.name not in known and (pid := recorded(directory) or marked(directory)) is not None:
                end(pid, os.pidfd_open(pid))


def marked(directory: Path) -> int | None:
    """The machine of a daemon that was killed before it had written down its pid."""
    mark = os.fsencode(directory / "root")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (entry / "cmdline").read_bytes().split(b"\0"):
                    return os.getpgid(int(entry.name))
    return None


def launch(directory: Path, share: Share | None) -> int:
    """The pid of a fake_vmm that outlives this process."""
    command = [sys.executable, str(FAKE_VMM)]
    command += ["--listen", str(directory / "vsock.sock"), "--root", str(directory / "root")]
    if share is not None:
        command += ["--workspace", os.readlink(f"/proc/self/fd/{share.directory_fd}")]
        command += ["--read-only"] if share.read_only else []
    with (directory / "vmm.log").open("wb") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    (directory / "vm.json").write_text(json.dumps({"pid": child.pid}))
    threading.Thread(target=child.wait, daemon=True).start()
    return child.pid


class HostileMachine:
    """Answers the ping and configure as it should, and everything after that with the given bytes."""

    def __init__(self, spec: MachineSpec, answer: bytes) -> None:
        self.spec_id = spec.id
        self.programs = (Program(os.getpid(), start_ticks(os.getpid())),)
        self.vsock_path = spec.directory / "vsock.sock"
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.vsock_path))
        self._listener.listen(16)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._answer_one, args=(client,), daemon=True).start()

    def _answer_one(self, client: socket.socket) -> None:
        with client:
            file = client.makefile("rb")
            file.readline(64)
            client.sendall(b"OK 1\n")
            request = file.readline(2 << 20)
            try:
                if b'"ping"' in request:
                    client.sendall(protocol.encode_ok(version=protocol.VERSION, configured=False))
                elif b'"configure"' in request:
                    client.sendall(b'{"ok":true}\n')
                elif self._answer.startswith(b"ENDLESS "):
                    pattern = self._answer.removeprefix(b"ENDLESS ") * 4096
                    while True:
                        client.sendall(pattern)
                else:
                    client.sendall(self._answer)
                    if self._answer.endswith(b"WAIT"):
                        time.sleep(60)
            except OSError:
                return

    async def console_tail(self, limit_bytes: int = 8192) -> bytes:
        return b""

    async def wait_exit(self) -> None:
        await anyio.sleep_forever()

    async def terminate(self) -> None:
        """It is a thread."""


def recorded(directory: Path) -> int | None:
    """The pid of a machine's process if it still is that process."""
    try:
        pid = int(json.loads((directory / "vm.json").read_text())["pid"])
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if os.fsencode(directory.name) in command else None


class FakeEgress:
    """`egress.network.Egress` without a network: what each sandbox may is a file, so that it outlives the daemon, and
    every call is a line in `calls`."""

    def __init__(self, place: Path, knobs: Path, on_event: Callable[[Event], None]) -> None:
        self._place, self._knobs, self._on_event = place, knobs, on_event
        self._tasks = anyio.create_task_group()

    async def __aenter__(self) -> FakeEgress:
        self._place.mkdir(exist_ok=True)
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._tell)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def open(self, sandbox_id: str, policy: Policy, names: Path) -> Link:
        self._called("open", sandbox_id, policy)
        if (self._knobs / "no_open").exists():
            raise EgressError("the namespace: no room\x1b[31m")
        os.close(os.open(names, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        self._file(sandbox_id).write_text(json.dumps(policy.as_json()))
        tap = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        guest = GuestNetwork("172.16.0.2/30", "172.16.0.1", "172.16.0.1", "06:00:ac:10:00:02", 1500)
        return Link(tap, guest, "tap0", Path("/run/netns/none"))

    async def adopt(self, sandbox_id: str, policy: Policy, names: Path) -> bool:
        self._called("adopt", sandbox_id, policy)
        if not self._file(sandbox_id).exists():
            return False
        if (self._knobs / "no_update").exists():
            raise EgressError("egress: it does not run")
        self._file(sandbox_id).write_text(json.dumps(policy.as_json()))
        return True

    async def update(self, sandbox_id: str, policy: Policy) -> None:
        self._called("update", sandbox_id, policy)
        await anyio.sleep(0.05)
        if (self._knobs / "no_update").exists():
            raise EgressError("egress: it does not run")
        self._file(sandbox_id).write_text(json.dumps(policy.as_json()))

    async def close(self, sandbox_id: str) -> None:
        self._called("close", sandbox_id)
        self._file(sandbox_id).unlink(missing_ok=True)

    async def report(self, sandbox_id: str) -> list[dict[str, object]]:
        path = self._knobs / "report"
        rows: list[dict[str, object]] = json.loads(path.read_text()) if path.exists() else []
        return rows

    async def traffic(self) -> dict[str, tuple[int, int]]:
        path = self._knobs / "traffic"
        told: dict[str, tuple[int, int]] = json.loads(path.read_text()) if path.exists() else {}
        return told

    async def sweep(self, known: Collection[str]) -> list[str]:
        swept = [path.stem for path in self._place.glob("*.json") if path.stem not in known]
        for sandbox_id in swept:
            await self.close(sandbox_id)
        return swept

    async def end(self) -> None:
        self._called("end", "")

    async def _tell(self) -> None:
        path = self._knobs / "events"
        while True:
            await anyio.sleep(0.02)
            if path.exists():
                told: list[dict[str, Any]] = json.loads(path.read_text())
                for body in told:
                    self._on_event(Event.from_json(body))
                path.unlink()

    def _file(self, sandbox_id: str) -> Path:
        return self._place / f"{sandbox_id}.json"

    def _called(self, verb: str, sandbox_id: str, policy: Policy | None = None) -> None:
        with (self._place / "calls").open("a") as file:
            file.write(" ".join([verb, sandbox_id, *([policy.mode.value] if policy else [])]) + "\n")


def parts(settings: Settings) -> Parts:
    knobs = settings.state_dir.parent / "knobs"
    backend = FakeBackend(knobs)

    def prepare(assets_dir: Path, build_dir: Path, report: Report) -> Assets:
        report(Progress("image", 42, "12 of 29 MiB"))
        time.sleep(float(backend.knob("prepare_s") or 0))
        files = [assets_dir / name for name in ("kernel", "initramfs", "runtime", "image")]
        assets_dir.mkdir(exist_ok=True)
        for path in files:
            path.touch()
        return Assets(*files, "key")

    async def settle(*_: object) -> str:
        if backend.knob("falls_back"):
            (knobs / "allowed").unlink()
        return "a stand-in for tests"

    def egress(on_event: Callable[[Event], None]) -> FakeEgress:
        return FakeEgress(settings.state_dir.parent / "net", knobs, on_event)

    def registries() -> Registries:
        return Registries(("registry.test",), {"/etc/pip.conf": b"[global]\nindex-url = https://registry.test/\n"})

    return Parts(
        backend, settle, prepare, egress, "a stand-in without one" if settings.no_network else "", registries,
        Limits(**json.loads(backend.knob("limits") or b"{}")), lambda: backend.knob("no_bind").decode(),
        int(backend.knob("max_cpus") or MAX_CPUS), lambda: backend.knob("allowed").decode(),
    )  # fmt: skip


def speak(knob: Path) -> None:
    """Makes this daemon one of another protocol version. Its guests run a guestd of their own, which is not."""
    if knob.exists():
        told = json.loads(knob.read_text())
        vars(protocol)["VERSION"] = told["version"]
        protocol.SINCE.update(told.get("since", {}))


def offer_nothing_to_install_from() -> None:
    """These guests mount no volume: an agent's tools would be installed in vain, and from the machine's own network."""
    built_in = policy.built_in
    vars(policy)["built_in"] = lambda *used: replace(built_in(*used), registries=(), registries_tcp=())


def main() -> None:
    state, path = Path(sys.argv[1]), Path(sys.argv[2])
    offer_nothing_to_install_from()
    speak(state.parent / "knobs" / "speaks")
    if (knob := state.parent / "knobs" / "patience").exists():
        vars(heartbeat).update(json.loads(knob.read_text()))
    if (knob := state.parent / "knobs" / "measured_s").exists():
        vars(supervision)["INTERVAL_S"] = int(knob.read_text())
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, format="%(levelname)s %(message)s")
    flags = [flag for flag in sys.argv[3:] if flag != "--network"]
    if "--network" not in sys.argv:
        flags.append("--no-network")
    given = docopt(daemon.__doc__ or "", ["--listen", f"unix://{path}", "--state-dir", str(state), *flags])
    settings = read(given, {}, os.geteuid())
    anyio.run(run, settings, parts)


if __name__ == "__main__":
    main()
