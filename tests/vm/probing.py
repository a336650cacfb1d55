"""Starts a program in a VMM's or a device's jail, as root or as whoever runs this, and gives back what it said.

As a script (`python -m tests.vm.probing PROGRAM [ARGUMENT…]`) it does so for another user's tests: they print JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import anyio

from sandboxd.vm import jail, processes
from sandboxd.vm.child import spawn
from sandboxd.vm.jail import Jail, Limits

UID = 977_001
LIMIT_BYTES = 1 << 20


async def run(program: Path, arguments: list[str], fds: list[int], files: tuple[tuple[Path, str], ...] = ()) -> str:
    root = os.geteuid() == 0
    prison = Jail(
        tools=jail.find_tools(root),
        program=jail.program(program),
        marker=jail.marker("probe", f"p{os.getpid()}"),
        uid=UID if root else None,
        limits=Limits(1 << 30, LIMIT_BYTES, 256, 20 if root else None),
        files=files,
    )
    child = spawn("probe", prison, arguments, fds)
    try:
        with anyio.fail_after(30):
            await child.program_pid()
            pidfd = os.pidfd_open(child.pid)
            await anyio.wait_readable(pidfd)
            os.close(pidfd)
        return child.errors().decode()
    finally:
        processes.end_marked("probe", lambda id: id == f"p{os.getpid()}", {os.getuid(), UID})
        child.close()


if __name__ == "__main__":
    print(json.dumps(anyio.run(run, Path(sys.argv[1]), sys.argv[2:], [])))
