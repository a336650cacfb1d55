"""Uids of their own for the VMMs of a root daemon, one per sandbox, never shared between daemons of a
machine.

In: a base. Out: claims, each a uid that no other claim and no running process of the host has. A claim is a
lock on a file in a directory of root's, so two daemons cannot take the same; a daemon that was killed leaves
machines running, and those are seen by their processes. Claims end when they are closed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sandboxd.errors import SetupError, Unavailable

DEFAULT_BASE = 900_000
COUNT = 4096
IMAGE_IDS = 65536
LOCKS = Path("/run/sandboxd/uids")


@dataclass(frozen=True, slots=True)
class Claim:
    uid: int
    fd: int

    def close(self) -> None:
        os.close(self.fd)


class Uids:
    """`base` and the `COUNT` uids from it on, then egress's and the resolver's, then those that images are built with.
    Raises `SetupError` where they belong to somebody."""

    def __init__(self, base: int, locks: Path = LOCKS, subuid: str | None = None) -> None:
        every = image_uids(base).stop - base
        if not 1000 < base < (1 << 31) - every:
            raise SetupError(f"--uid-base {base} is not usable: take a number between 100000 and 2000000000")
        owner = overlapping(_read("/etc/subuid") if subuid is None else subuid, base, every)
        if owner is not None:
            raise SetupError(
                f"/etc/subuid gives uids from {base} on to {owner}; choose a free range with --uid-base"
            )
        self._base, self._locks = base, locks
        for part in reversed((locks, *locks.parents)):
            # Whatever the umask is: who could write above the locks could lead them elsewhere.
            part.mkdir(mode=0o700 if part == locks else 0o755, exist_ok=True)

    def claim(self) -> Claim:
        try:
            taken = running_uids()
        except OSError as fault:
            raise Unavailable(f"which uids are in use cannot be seen: {fault.strerror}") from None
        for uid in range(self._base, self._base + COUNT):
            if uid not in taken and (claim := self._lock(uid)) is not None:
                return claim
        raise Unavailable("every uid for a sandbox is in use")

    def reclaim(self, uid: int) -> Claim | None:
        """For a machine that was taken back; None where another daemon claims the uid."""
        return self._lock(uid)

    def _lock(self, uid: int) -> Claim | None:
        fd = os.open(self._locks / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return Claim(uid, fd)


def network_uids(base: int) -> tuple[int, int]:
    """Egress's and the resolver's: behind those of the VMMs."""
    return base + COUNT, base + COUNT + 1


def image_uids(base: int) -> range:
    """Those of the programs that build images, and of the files in them meanwhile."""
    return range(base + IMAGE_IDS, base + 2 * IMAGE_IDS)


def overlapping(subuid: str, base: int, count: int) -> str | None:
    """Who has some of the range, by the text of /etc/subuid (subuid(5): name:first:count)."""
    for line in subuid.splitlines():
        name, _, numbers = line.partition(":")
        first, _, length = numbers.partition(":")
        if first.isdigit() and length.isdigit():
            start = int(first)
            if start < base + count and base < start + int(length):
                return name
    return None


def running_uids() -> set[int]:
    """Real and effective uids of every process (proc(5): the `Uid:` line of status). Raises OSError where one cannot be
    looked at: its uid is in use all the same."""
    found: set[int] = set()
    for pid in _pids():
        try:
            status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        line = next((line for line in status.splitlines() if line.startswith("Uid:")), "")
        found.update(int(uid) for uid in line.split()[1:3])
    return found


def _pids() -> Iterable[str]:
    return (name for name in os.listdir("/proc") if name.isdigit())


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
