"""A person at a shell: starts `sandbox-cli` as a process, at pipes or at a terminal, and looks at what it does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "import sys; from cli.__main__ import main; sys.exit(main())"]
PATIENCE_S = 60

Done = subprocess.CompletedProcess[bytes]


class Person:
    """Works in `home`, whose configuration is its own, with the sandboxd at `socket`."""

    def __init__(self, home: Path, socket: Path) -> None:
        self.home, self.socket = home, socket

    def environment(self, **more: str) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"], "HOME": str(self.home), "PYTHONPATH": str(ROOT), "TERM": "xterm",
            "SANDBOX_CONTEXT": f"unix://{self.socket}", "GIT_CONFIG_NOSYSTEM": "1",
        } | more  # fmt: skip

    def run(self, *args: str, cwd: Path | None = None, stdin: bytes = b"", **env: str) -> Done:
        return subprocess.run(
            [*COMMAND, *args], cwd=cwd or self.home, env=self.environment(**env), input=stdin,
            capture_output=True, check=False, timeout=60,
        )  # fmt: skip

    def start(self, *args: str, cwd: Path | None = None, **streams: int) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
        return subprocess.Popen(
            [*COMMAND, *args], cwd=cwd or self.home, env=self.environment(),
            stdin=pipes["stdin"], stdout=pipes["stdout"], stderr=pipes["stderr"],
        )  # fmt: skip


class Terminal:
    """`sandbox-cli` with a terminal of its own, which outlives it so that its modes can be looked at."""

    def __init__(self, person: Person, *args: str, rows: int = 43, cols: int = 132) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(rows, cols)
        self.before = termios.tcgetattr(self.slave)
        self.seen = b""

        def own_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [*COMMAND, *args], cwd=person.home, env=person.environment(), preexec_fn=own_terminal,
            stdin=self.slave, stdout=self.slave, stderr=self.slave,
        )  # fmt: skip

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("4H", rows, cols, 0, 0))

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def expect(self, text: bytes, patience_s: float = PATIENCE_S) -> None:
        """Read until `text` has been shown; what came before it is forgotten."""
        deadline = time.monotonic() + patience_s
        while text not in self.seen:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.master], [], [], left)[0]:
                raise AssertionError(f"{text!r} was not shown: {self.seen!r}")
            self.seen += os.read(self.master, 65536)
        self.seen = self.seen.partition(text)[2]

    def wait(self) -> int:
        """The exit code; what is shown meanwhile is read, so that nobody blocks on it."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"it does not end: {self.seen!r}")
            self._read()
            time.sleep(0.02)
        self._read()
        return self.process.returncode

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self.slave) == self.before

    def is_raw(self) -> bool:
        return not termios.tcgetattr(self.slave)[3] & (termios.ICANON | termios.ECHO)

    def until(self, raw: bool) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.is_raw() is not raw:
            assert time.monotonic() < deadline, f"raw: {self.is_raw()}"
            time.sleep(0.01)

    def _read(self) -> None:
        while select.select([self.master], [], [], 0)[0]:
            self.seen += os.read(self.master, 65536)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        for fd in (self.master, self.slave):
            with contextlib.suppress(OSError):
                os.close(fd)


@contextlib.contextmanager
def at_terminal(person: Person, *args: str, rows: int = 43, cols: int = 132) -> Iterator[Terminal]:
    terminal = Terminal(person, *args, rows=rows, cols=cols)
    try:
        yield terminal
    finally:
        terminal.close()
