"""A real `sandboxd` for tests and benchmarks: own state directory, own socket, real VMs, shared assets.

What it starts it ends: after `stop` no process, socket or mount of it is left, and `leftovers` says what is.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from sandboxd.assembly import instance
from sandboxd.client import Client

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def assets_dir() -> Path:
    """Where `make` keeps the kernel, the image and the rest."""
    return Path(os.environ.get("SANDBOX_TEST_ASSETS", "/var/lib/sandboxd/assets"))


class Daemon:
    """`sandboxd` in a directory of its own.

    `prefix` is put before the command (for instance `setpriv …` to run it as an ordinary user); `flags` after it.
    """

    def __init__(
        self, directory: Path, *, prefix: tuple[str, ...] = (), flags: tuple[str, ...] = (),
        assets: Path | None = None, command: tuple[str, ...] = (str(BIN / "sandboxd"),),
    ) -> None:  # fmt: skip
        self.directory = directory
        self.state = directory / "state"
        self.socket = directory / "run" / "sandboxd.sock"
        self.log = directory / "sandboxd.log"
        self._prefix, self._flags, self._command = prefix, flags, command
        self._assets = assets or assets_dir()
        self.process: subprocess.Popen[bytes] | None = None
        self._said = 0

    def __enter__(self) -> Daemon:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(end_sandboxes=True)

    def start(self, timeout_s: float = 60) -> None:
        command = [
            *self._prefix, *self._command, "--listen", f"unix://{self.socket}",
            "--state-dir", str(self.state), "--assets-dir", str(self._assets), *self._flags,
        ]  # fmt: skip
        self.directory.mkdir(exist_ok=True)
        with self.log.open("ab") as log:
            self._said = log.tell()
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + timeout_s
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop(end_sandboxes=False)
                raise RuntimeError(f"sandboxd did not come up:\n{self.log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.1)

    @property
    def client(self) -> Client:
        return Client(str(self.socket))

    def _ready(self) -> bool:
        """It says so once the assets are there and what an earlier run left has been taken back."""
        return b"sandboxd: ready\n" in self.log.read_bytes()[self._said :]

    def kill(self) -> None:
        """`kill -9`, as a crash would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, *, end_sandboxes: bool) -> None:
        if self.process is not None:
            self._stop(self.process, end_sandboxes)
            self.process = None
        if end_sandboxes:
            self._end_egress()

    def _stop(self, process: subprocess.Popen[bytes], end_sandboxes: bool) -> None:
        if end_sandboxes and process.poll() is None:
            for sandbox in self.client.sandboxes():
                if sandbox.state != "terminated":
                    self.client.delete(sandbox.id)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _end_egress(self) -> None:
        """Egress and the resolver outlive the daemon; what it named after itself is ours to end."""
        for pid in self._marked(f"/sandboxd/{instance(self.state)}/egress/".encode()):
            with suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                try:
                    for number in (signal.SIGTERM, signal.SIGKILL):
                        signal.pidfd_send_signal(pidfd, number)
                        if select.select([pidfd], [], [], 5)[0]:
                            break
                finally:
                    os.close(pidfd)

    def environment(self) -> dict[str, str]:
        return os.environ | {"SANDBOX_CONTEXT": f"unix://{self.socket}"}

    def cli(
        self, *arguments: str, stdin: bytes | None = None, cwd: Path | None = None, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [str(BIN / "sandbox-cli"), *arguments],
            input=stdin if stdin is not None else b"",
            capture_output=True, env=self.environment(), cwd=cwd, timeout=timeout_s, check=False,
        )  # fmt: skip

    def leftovers(self) -> list[str]:
        """Processes that carry this daemon's mark, its namespaces, and what is left below `sandboxes/`."""
        mark = f"/sandboxd/{instance(self.state)}/".encode()
        marked = self._marked(mark)
        if self.process is not None and self.process.poll() is None:
            # Egress and the resolver belong to a daemon that runs.
            marked = {pid: command for pid, command in marked.items() if mark + b"egress/" not in command}
        found = [f"process {pid}: {command[:200]!r}" for pid, command in marked.items()]
        prefix = f"sbx-{instance(self.state)}-"
        with suppress(FileNotFoundError):
            found.extend(f"namespace {name}" for name in os.listdir("/run/netns") if name.startswith(prefix))
        sandboxes = self.state / "sandboxes"
        if sandboxes.exists():
            found.extend(f"left in the state directory: {entry.name}" for entry in sandboxes.iterdir())
        return found

    @staticmethod
    def _marked(marker: bytes) -> dict[int, bytes]:
        """Command lines by pid."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    command = (entry / "cmdline").read_bytes()
                    if marker in command:
                        found[int(entry.name)] = command
        return found
