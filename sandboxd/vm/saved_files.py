"""The two files of a saved machine: taken out of the jail where a VMM wrote them, and looked at before they are used.

In: the open root of a jail whose VMM has ended, and a directory of ours. Out: files that nobody may write to any more,
or the reason why they are none. The VMM may have put anything in their place.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from sandboxd import trees
from sandboxd.errors import SandboxError
from sandboxd.vm.firecracker import Names

STATE_BYTES = 10 << 20  # Firecracker has the same bound for what it reads (snapshot/mod.rs of its source)
NAMES = {Names.SNAPSHOT: "state", Names.MEMORY: "memory"}


def make_room(new: Path, directory: Path, memory_mb: int) -> None:
    """An empty directory `new`, to become `directory`, on a disk that has room for both files. Raises SandboxError,
    OSError. Blocking."""
    if directory.exists():
        raise SandboxError("there is a snapshot of that name already")
    trees.remove(new)  # of a daemon that was killed
    disk = os.statvfs(new.parent)
    if disk.f_bavail * disk.f_frsize < (memory_mb << 20) + STATE_BYTES:
        raise SandboxError(f"its {memory_mb} MiB of memory find no room on the disk")
    new.mkdir(mode=0o700)


def take_out(root: int, kept: Path, uid: int | None, memory_mb: int) -> None:
    """Moves them to `kept`, which is on the same file system. Raises SandboxError, OSError. Blocking."""
    for name, what in NAMES.items():
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, dir_fd=root)
        try:
            if (why := _fault(name, os.fstat(fd), os.getuid() if uid is None else uid, memory_mb)) is not None:
                raise SandboxError(f"its {what}: {why}")
            if uid is not None:
                os.fchown(fd, 0, 0)
            os.fchmod(fd, 0o400 if uid is None else 0o444)
            os.rename(name, kept / name, src_dir_fd=root)
        finally:
            os.close(fd)


def unname(root: int) -> None:
    """In the jail of a VMM that has read them: what it saves itself gets the same names."""
    for name in NAMES:
        with suppress(OSError):
            os.unlink(name, dir_fd=root)


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
