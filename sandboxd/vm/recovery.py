"""A file system whose machine ended without notice is brought in order: e2fsck, in a jail.

In: the file, whose bytes a guest's kernel wrote and which are hostile. Out: whether e2fsck got it in order. It runs
like a VMM: an empty root with that one file, no network, no capability, limits on memory, on what it may write and on
its time, and the uid of the sandbox that waits for it, which must be able to open the file. It bears the sandbox's
mark, so a daemon that is killed meanwhile ends it at its next start.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import anyio
import anyio.to_thread

from sandboxd.vm import jail, processes
from sandboxd.vm.child import spawn
from sandboxd.vm.jail import Jail, Limits, Program

DEADLINE_S = 120.0
MEMORY_BYTES = 1 << 30
OPEN_FILES = 32
THREADS = 8
SAID_LINES = 20
INSIDE = "/volume"
IN_ORDER = (0, 1)
"""e2fsck(8): nothing to do, or all of it done."""

log = logging.getLogger("sandboxd")


def find_e2fsck() -> Program:
    """Raises SetupError naming the package when it is missing."""
    return jail.program(jail.find("e2fsck", "e2fsprogs"))


def prison(
    path: Path, size_bytes: int, sandbox_id: str, uid: int | None, e2fsck: Program, instance: str, tools: jail.Tools
) -> Jail:
    return Jail(
        tools=tools,
        program=e2fsck,
        marker=jail.marker(instance, sandbox_id),
        uid=uid,
        limits=Limits(MEMORY_BYTES, size_bytes, OPEN_FILES, None if uid is None else THREADS),
        files=(),
        writable=((path, INSIDE),),
    )


async def recover(
    path: Path, sandbox_id: str, uid: int | None, e2fsck: Program, instance: str, tools: jail.Tools,
    deadline_s: float = DEADLINE_S,
) -> bool:  # fmt: skip
    """Replays the journal; where the file system says that it needs a check too, repairs what can be without loss.

    True says that nothing failed, not that all is well: bubblewrap's own failure has the code of a repair that was
    done, so the file is to be looked at again.
    """
    cell = prison(path, os.stat(path).st_size, sandbox_id, uid, e2fsck, instance, tools)
    try:
        child = spawn("e2fsck", cell, ["-p", INSIDE], ())
    except OSError as fault:
        log.error("%s: e2fsck could not be started: %s", sandbox_id, fault.strerror)
        return False
    # Of a child that nobody else waits for, so it is that one's whatever has become of it.
    pidfd = os.pidfd_open(child.pid)
    code = None
    try:
        with anyio.move_on_after(deadline_s):
            # bubblewrap ends after the program, with its exit code.
            await anyio.wait_readable(pidfd)
            code = child.exit_code()
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_end, pidfd, sandbox_id, uid, instance)
        said = child.errors().decode("ascii", "replace").splitlines()
        child.close()
    if code not in IN_ORDER:
        log.error("%s: e2fsck %s", sandbox_id, "did not end by itself" if code is None else f"exited with {code}")
        for line in said[:SAID_LINES]:
            log.error("%s: e2fsck: %s", sandbox_id, "".join(c if " " <= c <= "~" else "?" for c in line)[:200])
    return code in IN_ORDER


def _end(pidfd: int, sandbox_id: str, uid: int | None, instance: str) -> None:
    """Both processes: the jail's outer one, and by its mark the program, which does not end with it."""
    try:
        if not processes.wait_ended([pidfd], 0):
            uids = {os.getuid()} if uid is None else {os.getuid(), uid}
            processes.end_marked(instance, lambda id: id == sandbox_id, uids)
    finally:
        processes.end([pidfd])
