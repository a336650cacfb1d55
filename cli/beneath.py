"""A directory that somebody else may be writing to, read through descriptors.

In: a descriptor of a directory and a name in it. Out: what is there, or None. No link is followed, nothing is opened
that would wait for somebody, and a name that is replaced meanwhile leads nowhere else.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NO_FOLLOW = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
HASHED_BYTES = 8 * 1024 * 1024  # a larger file is known by its size, inode and time of change


@contextmanager
def opened(fd: int, name: str) -> Iterator[int | None]:
    """The directory `name`, None where there is none; raises OSError where it may not be entered."""
    try:
        child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | NO_FOLLOW, dir_fd=fd)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        yield None
        return
    try:
        yield child
    finally:
        os.close(child)


@contextmanager
def reached(fd: int, path: str) -> Iterator[tuple[int, str, os.stat_result | None]]:
    """The last directory on the way to `path`, the last name, and what is there; None where the way ends before."""
    *parts, last = path.split("/")
    held = [os.dup(fd)]
    status = None
    try:
        with suppress(OSError):
            for part in parts:
                held.append(os.open(part, os.O_RDONLY | os.O_DIRECTORY | NO_FOLLOW, dir_fd=held[-1]))
            status = os.stat(last, dir_fd=held[-1], follow_symlinks=False)
        yield held[-1], last, status
    finally:
        for one in held:
            os.close(one)


def content(fd: int, name: str, limit: int) -> bytes | None:
    """None for what is no file, cannot be read or is larger than `limit` bytes."""
    try:
        file = os.open(name, os.O_RDONLY | NO_FOLLOW, dir_fd=fd)
    except OSError:
        return None
    with os.fdopen(file, "rb") as stream:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        try:
            found = stream.read(limit + 1)
        except OSError:
            return None
    return found if len(found) <= limit else None


def fingerprint(fd: int, name: str, status: os.stat_result, most: int = HASHED_BYTES) -> str:
    """Text that differs when the file does. A guest cannot set the time of change, as it can the other times."""
    found = content(fd, name, most) if status.st_size <= most else None
    mode = "x" if status.st_mode & 0o111 else "-"
    if found is None:
        return f"{mode} {status.st_size} {status.st_ino} {status.st_ctime_ns}"
    return f"{mode} {hashlib.sha256(found).hexdigest()}"


def target(fd: int, name: str) -> str:
    """Where a link leads, "" where it is none any more."""
    try:
        return os.readlink(name, dir_fd=fd)
    except OSError:
        return ""
