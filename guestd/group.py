"""Everything one command started, so that it can be ended as a whole.

A process may leave its process group and its session, but not its cgroup: in a guest a Group is a cgroup of
its own. On a host without one to spare (tests run by an ordinary user) it is the leader and what descends
from it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_numbers = iter(range(1, 1 << 62))
_lock: Final = threading.Lock()
_left_over: deque[str] = deque()      # cgroups whose leader is gone and that a child of it still lives in


class Group:
    """`procs` is the file whose writer joins, "" where there is no cgroup."""

    __slots__ = ("_leader", "_path", "procs")

    def __init__(self, parent: str) -> None:
        self._leader = 0
        self._path = ""
        self.procs = ""
        if parent:
            with _lock:
                self._path = f"{parent}/{next(_numbers)}"
            os.mkdir(self._path)
            self.procs = f"{self._path}/cgroup.procs"

    def lead(self, pid: int) -> None:
        self._leader = pid

    def kill(self) -> None:
        """SIGKILL to all of it. Not after `close`."""
        if self._path:
            with open(f"{self._path}/cgroup.kill", "wb", buffering=0) as file:
                file.write(b"1")
            return
        for pid in _descendants(self._leader):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """The leader has been reaped. A cgroup that others still live in is removed some other time."""
        if not self._path:
            return
        with _lock:
            # A few old ones are tried each time: what stays behind is bounded by what is alive.
            empty = [self._path, *(_left_over.popleft() for _ in range(min(4, len(_left_over))))]
            for path in empty:
                try:
                    os.rmdir(path)
                except OSError:
                    _left_over.append(path)


def _descendants(leader: int) -> list[int]:
    """The leader and its children's children, leader first, so that it starts no more while we look."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                parents.setdefault(parent, []).append(int(name))
    found = [leader]
    for pid in found:
        found += parents.get(pid, ())
    return found
