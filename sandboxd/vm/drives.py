"""Disk images as a machine gets them: opened once, locked, and from then on what was opened.

In: a `Drive`. Out: a descriptor, or BootFailed with the reason. The lock is the open file's: as long as anybody has it
open, no other machine writes to it, and none reads what one writes.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import ExitStack

from sandboxd.errors import BootFailed
from sandboxd.vm.machine import Drive


def open_image(stack: ExitStack, what: str, drive: Drive) -> int:
    """A descriptor that is closed with `stack`. Raises BootFailed."""
    access = os.O_RDONLY if drive.read_only else os.O_RDWR
    try:
        fd = os.open(drive.path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise BootFailed(f"opening {what}: {error.strerror}", None, b"") from error
    stack.callback(os.close, fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise BootFailed(f"opening {what}: not a regular file", None, b"")
    try:
        # Of the open file and so of the VMM, whoever else ends; whatever a record says, two never write to one drive.
        fcntl.flock(fd, (fcntl.LOCK_SH if drive.read_only else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BootFailed(f"opening {what}: another machine has it", None, b"") from None
    return fd
