"""The two files of a saved machine: made ready for its VMM, taken out of its jail, and looked at before they are used.

In: the open root of a jail and, once its VMM has ended, a directory of ours. Out: files that nobody may write to any
more, or the reason why they are none. An ordinary user's VMM may have put anything in their place.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from sandboxd import trees
from sandboxd.errors import SandboxError
from sandboxd.vm.firecracker import Names

UNFINISHED = "snapshot.new"
"""In the machine's own directory, so that it goes with what else is there when nobody lived to finish it."""
STATE_BYTES = 10 << 20  # Firecracker has the same bound for what it reads (snapshot/mod.rs of its source)
NAMES = {Names.SNAPSHOT: "state", Names.MEMORY: "memory"}


def prepare(root: int, new: Path, directory: Path, uid: int | None, memory_mb: int) -> None:
    """An empty directory `new`, to become `directory`, on a disk that has room for both files; and where the jail is
    root's, the files themselves, since its VMM can make none. It opens what is there (persist.rs and vstate/vm.rs of
    Firecracker's source: create, and truncate what has another size). Raises SandboxError, OSError. Blocking."""
    if directory.exists():
        raise SandboxError("there is a snapshot of that name already")
    trees.remove(new)  # of a daemon that was killed
    unname(root)
    disk = os.statvfs(new.parent)
    if disk.f_bavail * disk.f_frsize < (memory_mb << 20) + STATE_BYTES:
        raise SandboxError(f"its {memory_mb} MiB of memory find no room on the disk")
    new.mkdir(mode=0o700)
    if uid is not None:
        for name in NAMES:
            # Never one that is there: a link of its VMM's would be followed to what it names.
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=root)
            try:
                os.fchown(fd, uid, uid)
            finally:
                os.close(fd)


def take_out(root: int, new: Path, directory: Path, uid: int | None, memory_mb: int) -> None:
    """Moves them to `new`, and that to `directory`, both on the jail's file system: what has that name is whole. Raises
    SandboxError, OSError. Blocking."""
    for name, what in NAMES.items():
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, dir_fd=root)
        try:
            if (why := _fault(name, os.fstat(fd), os.getuid() if uid is None else uid, memory_mb)) is not None:
                raise SandboxError(f"its {what}: {why}")
            if uid is not None:
                os.fchown(fd, 0, 0)
            os.fchmod(fd, 0o400 if uid is None else 0o444)
            os.rename(name, new / name, src_dir_fd=root)
        finally:
            os.close(fd)
    os.rename(new, directory)


def unname(root: int) -> None:
    """In the jail of a VMM that has read them, or that was to write them."""
    for name in NAMES:
        with suppress(OSError):
            os.unlink(name, dir_fd=root)


def discard(root: int, new: Path) -> None:
    """What there is of a snapshot that is not whole. Blocking."""
    unname(root)
    trees.remove(new)


def size_fault(name: Names, size: int, memory_mb: int) -> str | None:
    """What is wrong with the size of a file, where it is one of these. A guest would end where its memory's does."""
    memory = memory_mb << 20
    if name is Names.SNAPSHOT and not 0 < size <= STATE_BYTES:
        return f"it is {size} bytes, not 1 to {STATE_BYTES}"
    if name is Names.MEMORY and size != memory:
        return f"it is {size} bytes, and the machine's memory is {memory}"
    return None


def _fault(name: Names, found: os.stat_result, uid: int, memory_mb: int) -> str | None:
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    # A name of something else that it may read, say, whose owner and mode would change with it.
    if found.st_uid != uid or found.st_nlink != 1:
        return "it is not a file of its own"
    return size_fault(name, found.st_size, memory_mb)
