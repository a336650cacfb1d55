"""Starting one command through guest-exec, and what can be done to it afterwards.

`start` comes back when the command has been executed, or raises Refused with the reason: no such command
and no such working directory are known exactly, because guest-exec reports them. Nothing of the request
reaches guestd's own environment or argument list.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import struct
import termios

from guestd.group import Group
from guestd.place import GID, UID

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Final

    from guestd.place import Place

# native/guest_exec.c, in its order
_BLOCK_FD: Final = 3
_REPORT_FD: Final = 4
_NAMESPACE_FD: Final = 5
_TTY, _IDENTITY, _NAMESPACE = 1, 2, 4
_MAGIC: Final = 0x31584547
_HEAD: Final = struct.Struct("=7I")
_REPORT: Final = struct.Struct("=2I")
_STEPS: Final = (
    "", "the block", "setsid", "its cgroup", "its OOM score", "its terminal", "its namespace", "its limits",
    "its identity", "its working directory", "the command",
)
_DIRECTORY_STEP: Final = 9
_COMMAND_STEP: Final = 10

# asm-generic/ioctls.h
_TIOCGPTPEER: Final = 0x5441
_TIOCSPTLCK: Final = 0x40045431

_NO_COMMAND: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR,
     errno.ELIBBAD, errno.EPERM}
)

LOWEST_FD: Final = 10
"""guestd keeps the numbers below this taken, so that putting descriptors in their places overwrites none."""


class Refused(Exception):
    """A request that cannot be served; `code` is one of protocol.ERROR_CODES."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Process:
    """A command that runs. `outputs` are the descriptors to read by stream, `stdin_fd` the one to write (-1
    once closed); on a terminal all are its master. None of them blocks."""

    __slots__ = (
        "_killed", "_oom_before", "_place", "group", "master_fd", "outputs", "pid", "pidfd", "stdin_fd",
    )

    def __init__(
        self, place: Place, group: Group, pid: int, stdin_fd: int, outputs: dict[str, int], master_fd: int,
        oom_before: int,
    ) -> None:
        self._place = place
        self._killed = False
        self._oom_before = oom_before
        self.group = group
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.stdin_fd = stdin_fd
        self.outputs = outputs
        self.master_fd = master_fd

    def signal(self, name: str) -> None:
        """One of protocol.SIGNALS. KILL reaches all it started, the others its process group; on a terminal
        the one in the foreground."""
        if name == "KILL":
            self.kill()
            return
        target = self.pid
        if self.master_fd >= 0:
            try:
                target = os.tcgetpgrp(self.master_fd) or self.pid
            except OSError:
                target = self.pid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(target, getattr(signal, "SIG" + name))

    def kill(self) -> None:
        self._killed = True
        self.group.kill()

    def resize(self, rows: int, cols: int) -> None:
        """The terminal's size; the kernel sends SIGWINCH to its foreground group when it changes."""
        if self.master_fd >= 0:
            fcntl.ioctl(self.master_fd, termios.TIOCSWINSZ, struct.pack("4H", rows, cols, 0, 0))

    def end_of_file_character(self) -> bytes:
        """What a terminal takes for the end of input (usually ^D)."""
        characters = termios.tcgetattr(self.master_fd)[6]
        return bytes(characters[termios.VEOF])

    def reap(self) -> int:
        """The exit code of a leader that has exited or was killed: 128 + n for signal n."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return code if code >= 0 else 128 - code

    def out_of_memory(self, exit_code: int) -> bool:
        """Whether it failed, and the kernel meanwhile ended a process of the sandbox for want of memory."""
        return exit_code != 0 and not self._killed and oom_kills(self._place) > self._oom_before

    def close_stdin(self) -> None:
        if self.stdin_fd >= 0 and self.master_fd < 0:
            os.close(self.stdin_fd)
        self.stdin_fd = -1


def oom_kills(place: Place) -> int:
    """How many processes of the sandbox the kernel killed for want of memory so far."""
    if not place.cgroup:
        return 0
    try:
        with open(f"{place.cgroup}/memory.events", "rb", buffering=0) as file:
            return int(file.read(4096).rpartition(b"oom_kill ")[2].split()[0])
    except FileNotFoundError:       # no memory controller here (tests on a host)
        return 0


def environment(place: Place, request: Mapping[str, str], tty: bool) -> dict[str, str]:
    merged = {**place.env, **request}
    if tty:
        merged.setdefault("TERM", "xterm-256color")
    return merged


def _block(
    flags: int, cgroup: str, cwd: str, argv: Sequence[str], env: Mapping[str, str]
) -> bytes:
    strings = [cgroup, cwd, *argv, *(f"{name}={value}" for name, value in env.items())]
    text = os.fsencode("\0".join(strings)) + b"\0"
    return _HEAD.pack(_MAGIC, flags, UID, GID, len(argv), len(env), len(text)) + text


def launch(
    place: Place, namespace_fd: int | None, argv: Sequence[str], env: Mapping[str, str], cwd: str,
    stdio: tuple[int, int, int], group: Group, tty: bool = False,
) -> int:
    """Executes a command on three descriptors, in `group`; its pid. The descriptors stay the caller's."""
    flags = (_TTY if tty else 0) | (_IDENTITY if place.switch_identity else 0)
    block = report_out = report_in = -1
    try:
        block = os.memfd_create("block")
        report_in, report_out = os.pipe()
        moves = [
            *((os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(stdio)),
            (os.POSIX_SPAWN_DUP2, block, _BLOCK_FD), (os.POSIX_SPAWN_DUP2, report_out, _REPORT_FD),
        ]
        if namespace_fd is not None:
            flags |= _NAMESPACE
            moves.append((os.POSIX_SPAWN_DUP2, namespace_fd, _NAMESPACE_FD))
        # pwrite leaves the position, which guest-exec shares, at the start.
        os.pwrite(block, _block(flags, group.procs, cwd, argv, env), 0)
        pid = os.posix_spawn(place.helper, ["guest-exec"], {}, file_actions=moves)
        group.lead(pid)
        os.close(report_out)
        report_out = -1
        report = os.read(report_in, _REPORT.size)
    finally:
        for fd in (block, report_out, report_in):
            if fd >= 0:
                os.close(fd)
    if report:
        os.waitpid(pid, 0)
        raise _refused(report, argv[0], cwd)
    return pid


def _refused(report: bytes, command: str, cwd: str) -> Refused:
    step, error = _REPORT.unpack(report)
    if step == _DIRECTORY_STEP:
        return Refused("no_such_cwd", f"no such working directory: {cwd}: {os.strerror(error)}")
    if step == _COMMAND_STEP and error in _NO_COMMAND:
        return Refused("no_such_command", f"no such command: {command}: {os.strerror(error)}")
    if error == errno.E2BIG:
        return Refused("too_large", "arguments and environment are longer than the kernel takes")
    return Refused("internal", f"the command did not start: {_STEPS[step]}: {os.strerror(error)}")


def start(
    place: Place, argv: Sequence[str], env: Mapping[str, str], cwd: str, size: tuple[int, int] | None
) -> Process:
    """`size` is (rows, cols) for a command on a terminal, None for one on pipes."""
    ours: list[int] = []        # closed when something fails
    theirs: list[int] = []      # closed in any case
    before = oom_kills(place)
    group: Group | None = None
    try:
        if size is None:
            stdin, stdin_fd = os.pipe()
            theirs.append(stdin)
            ours.append(stdin_fd)
            out, stdout = os.pipe()
            theirs.append(stdout)
            ours.append(out)
            err, stderr = os.pipe()
            theirs.append(stderr)
            ours.append(err)
            outputs = {"o": out, "E": err}
            master = -1
            stdio = (stdin, stdout, stderr)
        else:
            master, slave = _terminal(place)
            ours.append(master)
            theirs.append(slave)
            if size != (0, 0):
                fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("4H", *size, 0, 0))
            outputs = {"o": master}
            stdin_fd = master
            stdio = (slave, slave, slave)
        for fd in ours:
            os.set_blocking(fd, False)
        group = Group(place.cgroup)
        merged = environment(place, env, size is not None)
        pid = launch(place, place.namespace_fd, argv, merged, cwd, stdio, group, tty=size is not None)
        process = Process(place, group, pid, stdin_fd, outputs, master, before)
        ours.clear()
        return process
    except BaseException:
        if group is not None:
            group.close()
        raise
    finally:
        for fd in ours + theirs:
            os.close(fd)


def _terminal(place: Place) -> tuple[int, int]:
    """A new terminal in the processes' /dev/pts: (master, slave). The slave is opened through the master,
    so no name in the sandbox is trusted for it, and belongs to the user."""
    master = os.open("dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=place.root_fd)
    try:
        fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
        slave = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if place.switch_identity:
                os.fchown(slave, UID, -1)
            # UTF-8 input, so that erasing in a cooked terminal takes away a character and not a byte of it.
            attributes = termios.tcgetattr(slave)
            attributes[0] |= 0o40000
            termios.tcsetattr(slave, termios.TCSANOW, attributes)
        except BaseException:
            os.close(slave)
            raise
    except BaseException:
        os.close(master)
        raise
    return master, slave
