"""Unix sockets by paths of any length, and the removal of stale ones.

In: a path, or an open directory and a name in it. Out: sockets. The kernel takes 107 bytes of path; here the
socket (or the directory it is made in) is opened as an O_PATH descriptor first and named through it, so a
state directory may lie as deep as it likes. The descriptor also pins the inode: what was looked at is what is
connected to. A socket somebody listens on is never unlinked. Standard library only: the command line imports
this too.

From anyio:

    stream = await UNIXSocketStream.from_socket(unixpath.connect_now(path))
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BACKLOG = 1024


class SocketInUseError(OSError):
    """Somebody listens on the name, or what has the name is not a socket. Nothing was changed."""


@contextmanager
def named(path: str | Path, dir_fd: int | None = None) -> Iterator[str]:
    """A short name for the socket at `path`, good inside the block. With `dir_fd`, `path` is a name in that directory:
    whoever may write there can put any socket in its place, and nothing that leads out.

    Raises FileNotFoundError and the other errors of open; OSError ENOTSOCK for anything but a socket, a
    symbolic link included.
    """
    if dir_fd is not None:
        _must_be_component(str(path))
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK), str(path))
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def connect_sync(path: str | Path, timeout_s: float | None = None) -> socket.socket:
    """A connected stream socket, in blocking mode with `timeout_s` as its timeout."""
    with named(path) as name:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(name)
        except BaseException:
            sock.close()
            raise
        return sock


def connect_now(path: str | Path, dir_fd: int | None = None) -> socket.socket:
    """A connected stream socket that does not block; `path` as in `named`. Raises BlockingIOError where the queue is
    full: nothing tells when it no longer is, and whoever waits as for other sockets asks without a pause, as
    `anyio.connect_unix` does. A hostile listener keeps it full."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        with named(path, dir_fd) as name:
            sock.connect(name)
    except BaseException:
        sock.close()
        raise
    return sock


def bind(dir_fd: int, name: str, backlog: int = BACKLOG) -> socket.socket:
    """A listening stream socket `name` in the directory `dir_fd`: non-blocking, and 0600 from its first
    moment.

    A stale socket of that name is removed first. SocketInUseError when somebody listens there or it is no
    socket.
    """
    _must_be_component(name)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # The name gets the mode of the socket's own inode: no moment with another one, and no umask to turn.
        os.fchmod(sock.fileno(), 0o600)
        at = f"/proc/self/fd/{dir_fd}/{name}"
        try:
            sock.bind(at)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            if not remove_stale(dir_fd, name):
                why = "somebody listens there, or it is not a socket"
                raise SocketInUseError(errno.EADDRINUSE, why, name) from None
            sock.bind(at)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def make_private(directory: Path) -> None:
    """What is missing of the path is made 0700; what exists is not changed."""
    for part in reversed((directory, *directory.parents)):
        part.mkdir(mode=0o700, exist_ok=True)


def remove_stale(dir_fd: int, name: str) -> bool:
    """Removes the socket `name` if a connection attempt proves that nobody listens. True: the name is free.

    The name is first moved aside and compared with the inode that was proved dead, so a socket bound to it
    between proof and removal is put back untouched.
    """
    _must_be_component(name)
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except FileNotFoundError:
        return True
    try:
        seen = os.fstat(fd)
        if not stat.S_ISSOCK(seen.st_mode) or _may_be_listening(f"/proc/self/fd/{fd}"):
            return False
        aside = f".{name}.{os.getpid()}.stale"
        try:
            os.rename(name, aside, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except FileNotFoundError:
            return True
        moved = os.stat(aside, dir_fd=dir_fd, follow_symlinks=False)
        proved = (moved.st_dev, moved.st_ino) == (seen.st_dev, seen.st_ino)
        if not proved:
            os.link(aside, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
        os.unlink(aside, dir_fd=dir_fd)
        return proved
    finally:
        os.close(fd)


def _may_be_listening(name: str) -> bool:
    """Only a clear refusal counts as nobody: no full backlog, no datagram socket, no lack of permission."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(name)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True


def _must_be_component(name: str) -> None:
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ValueError(f"not the name of a file: {name!r}")
