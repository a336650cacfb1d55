"""Files of the person's own settings: read without following a link, replaced whole, for nobody else's eyes.

In: a path below the settings' directory. Out: its bytes, or a file 0600 in a directory 0700 that is the old one or the
new one at every moment. What somebody else may have written is not read: a line in it names a server and a token.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean


def read(path: str, limit_bytes: int) -> bytes | None:
    """None where there is no such file. Raises `SandboxError` for one that cannot be read or trusted."""
    shown = clean(path)
    try:
        # NONBLOCK: a FIFO there would otherwise be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as fault:
        why = "it is a link, and is not followed" if os.path.islink(path) else fault.strerror
        raise SandboxError(f"{shown}: {why}") from None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise SandboxError(f"{shown} is not a regular file")
        if info.st_uid not in (0, os.geteuid()):
            raise SandboxError(f"{shown} is uid {info.st_uid}'s, and is not used")
        if info.st_mode & 0o022:
            raise SandboxError(f"others may write to {shown}: look at what it says, then chmod 600 it")
        data = b""
        while len(data) <= limit_bytes and (piece := os.read(descriptor, limit_bytes + 1 - len(data))):
            data += piece
    except OSError as fault:
        raise SandboxError(f"{shown}: {fault.strerror}") from None
    finally:
        os.close(descriptor)
    if len(data) > limit_bytes:
        raise SandboxError(f"{shown} is larger than {limit_bytes} bytes")
    return data


def write(path: str, data: bytes) -> None:
    """By a new file beside it and a rename: never through a link, never half. Makes the directory where it lacks."""
    import tempfile  # which costs more than reading does, and most commands only read

    directory = os.path.dirname(path)
    try:
        prepare(directory)
        descriptor, temporary = tempfile.mkstemp(prefix=".", dir=directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            os.replace(temporary, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except OSError as fault:
        raise SandboxError(f"{clean(path)} cannot be written: {fault.strerror}") from None


def prepare(directory: str) -> None:
    """Missing directories are made 0700, the parents too (`os.makedirs` would make those by the umask)."""
    parent = os.path.dirname(directory)
    if parent and not os.path.isdir(parent):
        prepare(parent)
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        if not os.path.isdir(directory):
            raise


@contextmanager
def alone(directory: str) -> Iterator[None]:
    """One process at a time reads and replaces what is in `directory`; the lock is the directory's own (flock(2))."""
    try:
        prepare(directory)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as fault:
        raise SandboxError(f"{clean(directory)} cannot be used: {fault.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
