"""Files that hold an ext4 file system: made here, and looked at by a few bytes of their superblock.

In: paths. Out: sparse files, and whether one was left in order. What is in such a file is a guest's, and nothing on the
host ever mounts one.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
from pathlib import Path

import anyio

from sandboxd.errors import Internal
from sandboxd.termsafe import first_line

MESSAGE_CHARS = 500

# linux/fs/ext4/ext4.h, struct ext4_super_block
SUPERBLOCK_AT = 1024
MAGIC_AND_STATE = struct.Struct("<HH")
MAGIC_AT = 0x38
INCOMPAT_AT = 0x60
MAGIC = 0xEF53
VALID, ERRORS = 1, 2
NEEDS_RECOVERY = 4

log = logging.getLogger("sandboxd")


async def make(path: Path, size_mb: int, label: str, owner: int, what: str) -> None:
    """A sparse file that must not be there yet; its root directory is `owner`'s, a uid and gid. The file system's
    tables are written when they are needed, so a large one costs as little. `Internal` calls it `what`."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size_mb << 20)
    finally:
        os.close(fd)
    command = [
        "mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-L", label,
        "-E", f"lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner={owner}:{owner}",
        str(path),
    ]  # fmt: skip
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
    done = await anyio.run_process(command, check=False, env=environment)
    if done.returncode:
        log.error("mke2fs failed: %s", first_line(done.stderr.decode(errors="replace"))[:MESSAGE_CHARS])
        raise Internal(f"{what} could not be made")


def is_clean(path: Path) -> bool:
    """Whether the file system says that it was left in order. A lie costs its teller a mount that fails."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        head = os.pread(fd, 1024, SUPERBLOCK_AT)
    finally:
        os.close(fd)
    if len(head) < 1024:
        return False
    magic, state = MAGIC_AND_STATE.unpack_from(head, MAGIC_AT)
    (incompatible,) = struct.unpack_from("<I", head, INCOMPAT_AT)
    return magic == MAGIC and state & (VALID | ERRORS) == VALID and not incompatible & NEEDS_RECOVERY
