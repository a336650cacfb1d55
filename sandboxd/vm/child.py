"""A program started in its jail, for as long as the one who started it lives.

In: a `Jail`, arguments, descriptors to inherit. Out: a `Child`: its pids, the first 64 KiB it wrote to
stderr, its exit status. The program goes on when its starter ends. What it writes goes to a pipe that never
blocks and is never stored: with nobody to read it the rest is dropped, however much a hostile program writes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import anyio

from sandboxd.vm import arch, jail, seccomp
from sandboxd.vm.jail import Jail

INFO_LIMIT = 4096
PIPE_BYTES = 1 << 20  # /proc/sys/fs/pipe-max-size, to which the program can raise it


class ChildError(Exception):
    """The jail could not be built, or the program ended before it could be named."""


class Child:
    """Made by `spawn`. `pid` is bubblewrap's, which stays outside the jail and ends with the program."""

    def __init__(self, role: str, popen: subprocess.Popen[bytes], info_fd: int, stderr_fd: int) -> None:
        self.role = role
        self.pid = popen.pid
        self._popen = popen
        self._info_fd = info_fd
        self._stderr_fd = stderr_fd

    async def program_pid(self) -> int:
        """The pid of the program itself. Raises ChildError. The deadline is the caller's."""
        text = b""
        while not text.rstrip().endswith(b"}") and len(text) < INFO_LIMIT:
            await anyio.wait_readable(self._info_fd)
            piece = os.read(self._info_fd, INFO_LIMIT)
            if not piece:
                raise ChildError("the jail could not be built")
            text += piece
        return int(json.loads(text)["child-pid"])

    def errors(self) -> bytes:
        """What the program has written to stderr since the last call."""
        text = b""
        with suppress(BlockingIOError):
            # As much as the pipe can hold, and no more: a hostile program may write as fast as this reads.
            for _ in range(PIPE_BYTES // 65536):
                if not (piece := os.read(self._stderr_fd, 65536)):
                    break
                text = (text + piece)[:65536]
        return text

    def last_line(self) -> str:
        """The last line of it, fit for a message."""
        return last_line(self.errors())

    def exit_code(self) -> int | None:
        """128 + n for a program that died of signal n, as a shell says it; None while it runs."""
        code = self._popen.poll()
        return 128 - code if code is not None and code < 0 else code

    def close(self) -> None:
        """For a child that has ended: waited for, descriptors closed."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=1.0)
        os.close(self._info_fd)
        os.close(self._stderr_fd)


def last_line(said: bytes) -> str:
    """Of what a process said: printable ASCII, one line."""
    lines = [line for line in said.decode("ascii", "replace").splitlines() if line.strip()]
    return "".join(c if " " <= c <= "~" else "?" for c in lines[-1])[:200] if lines else ""


def spawn(
    role: str, prison: Jail, arguments: Sequence[str], fds: Sequence[int], *, filter: bytes | None = None,
    directory: str = "/",
) -> Child:  # fmt: skip
    """Starts the program; `fds` keep their numbers. `filter` is its system calls', `directory` where what builds its
    jail starts. Raises OSError when not even prlimit can be started."""

    def command(info_fd: int, seccomp_fd: int) -> list[str]:
        return jail.argv(prison, info_fd, seccomp_fd, arguments)

    return launch(role, command, fds, filter or seccomp.program(arch.here()), directory)


def launch(
    role: str, command: Callable[[int, int], list[str]], fds: Sequence[int], filter: bytes, directory: str = "/"
) -> Child:
    """The same for any command in which bubblewrap is told where to say the program's pid, and where its filter is."""
    with ExitStack() as passed, ExitStack() as kept:
        info_read, info_write = _pipe(kept, passed, os.O_CLOEXEC)
        stderr_read, stderr_write = _pipe(kept, passed, os.O_CLOEXEC | os.O_NONBLOCK)
        filter_fd = os.memfd_create("seccomp", os.MFD_CLOEXEC)
        passed.callback(os.close, filter_fd)
        os.write(filter_fd, filter)
        os.lseek(filter_fd, 0, os.SEEK_SET)
        popen = subprocess.Popen(
            command(info_write, filter_fd),
            stdin=subprocess.DEVNULL,
            stdout=stderr_write,
            stderr=stderr_write,
            pass_fds=[*fds, info_write, filter_fd],
            env={},
            cwd=directory,
            start_new_session=True,
            # SIGPIPE stays ignored, as it is here: writing to stderr when the starter is gone must not end a
            # VMM.
            restore_signals=False,
        )
        kept.pop_all()
    return Child(role, popen, info_read, stderr_read)


def _pipe(reading: ExitStack, writing: ExitStack, flags: int) -> tuple[int, int]:
    read, write = os.pipe2(flags)
    reading.callback(os.close, read)
    writing.callback(os.close, write)
    return read, write
