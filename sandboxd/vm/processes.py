"""Which processes are whose, and ending them: records, marks on command lines, pidfds.

In: pids, the records in the sandboxes' directories, /proc. Out: processes ended. A pid alone proves nothing:
a process is the one that was recorded when boot id, pid and start time agree while a pidfd already holds it,
and only that pidfd is signalled. What was started before its record could be written is found by its mark
(`jail.marker`): the program's own path on its command line, or that path among the arguments of the
bubblewrap that starts it. A record also covers a program that has since rewritten its command line. Processes
of other uids are never touched.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sandboxd.vm.jail import MARK

RECORD = "vm.json"
RECORD_VERSION = 1
RECORD_LIMIT = 64 * 1024
END_S = 5.0
SETTLE_S = 0.2
_JAILERS = {b"prlimit", b"unshare", b"sh", b"bwrap", b"setpriv"}


@dataclass(frozen=True, slots=True)
class Process:
    """A process that was seen: `start_ticks` is field 22 of /proc/<pid>/stat, clock ticks after the boot."""

    role: str
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Record:
    """What `vm.json` says: whose processes, under which mark."""

    id: str
    marker: str
    processes: tuple[Process, ...]


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int:
    """Raises ProcessLookupError when there is no such process."""
    return int(_stat(pid)[19])


def parent(pid: int) -> int:
    """Raises ProcessLookupError when there is no such process."""
    return int(_stat(pid)[1])


def hold(process: Process) -> int | None:
    """A pidfd, if that very process still is there (dead and not yet waited for counts as gone)."""
    return _hold(process.pid, lambda: start_ticks(process.pid) == process.start_ticks)


def has_ended(process: Process) -> bool:
    """Dead and not yet waited for counts as ended."""
    pidfd = hold(process)
    if pidfd is not None:
        os.close(pidfd)
    return pidfd is None


def hold_child(pid: int, above: int) -> int | None:
    """A pidfd of the process `pid` if `above` is its parent."""
    return _hold(pid, lambda: parent(pid) == above)


def kill(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def wait_ended(pidfds: Collection[int], timeout_s: float) -> bool:
    """Waits until all have ended; False when the time is up."""
    deadline = time.monotonic() + timeout_s
    for pidfd in pidfds:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return False
    return True


def command_line(pid: int) -> list[bytes]:
    """[b""] for a process that is gone, or is the kernel's."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().rstrip(b"\0").split(b"\0")
    except OSError:
        return [b""]


def marked_id(arguments: list[bytes], instance: str) -> str | None:
    """The id of the machine a command line belongs to, or None when it is not one of `instance`."""
    mark = f"{MARK}/{instance}/".encode()
    own = arguments[0].startswith(mark)
    starting = os.path.basename(arguments[0]) in _JAILERS
    for argument in arguments[:1] if own else arguments if starting else []:
        if argument.startswith(mark):
            id, slash, _ = argument.removeprefix(mark).partition(b"/")
            if id and slash:
                return id.decode("ascii", "replace")
    return None


def marked(instance: str, uids: Collection[int]) -> Iterator[tuple[str, int]]:
    """(id, pid) of every process of `instance` that runs as one of `uids` or was started by one that does."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            pid = int(name)
            id = marked_id(command_line(pid), instance)
            if id is not None and _is_one_of(pid, instance, uids):
                yield id, pid


def end_marked(instance: str, ids: Callable[[str], bool], uids: Collection[int]) -> set[str]:
    """Ends the marked processes whose id is in `ids`; returns the ids that had any.

    It looks again until a look finds nothing: a parent that is dead starts no more children.
    """
    ended: set[str] = set()
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        held = []
        for id, pid in marked(instance, uids):
            if ids(id):
                pidfd = _hold(pid, partial(_is_marked, pid, instance, id))
                if pidfd is not None:
                    ended.add(id)
                    held.append(pidfd)
        if not held:
            return ended
        end(held)
    return ended


def sweep_marked(instance: str, ids: Callable[[str], bool], uids: Collection[int]) -> set[str]:
    """The same after a daemon was killed, by another one that holds the lock of the state directory. A child between
    fork and exec bears no mark yet, but it holds that lock until it closes what it will not pass on. Exec is the next
    thing it does, so a second look SETTLE_S later finds it marked."""
    ended = end_marked(instance, ids, uids)
    time.sleep(SETTLE_S)
    return ended | end_marked(instance, ids, uids)


def end(pidfds: Iterable[int]) -> bool:
    """Kills, waits, closes. False when one has not ended in END_S."""
    held = list(pidfds)
    try:
        for pidfd in held:
            kill(pidfd)
        return wait_ended(held, END_S)
    finally:
        for pidfd in held:
            os.close(pidfd)


def end_recorded(directory: Path) -> bool:
    """Ends what the record in `directory` names, and removes it. True when something was still there."""
    record = read_record(directory)
    held = [pidfd for pidfd in map(hold, record.processes if record else ()) if pidfd is not None]
    if end(held):
        remove_record(directory)
    return bool(held)


def write_record(directory: Path, record: Record) -> None:
    """By rename, so that a record is whole or not there. No sync: after a crash of the host it says nothing."""
    body = {
        "version": RECORD_VERSION,
        "boot_id": boot_id(),
        "id": record.id,
        "marker": record.marker,
        "processes": [{"role": p.role, "pid": p.pid, "start_ticks": p.start_ticks} for p in record.processes],
    }
    temporary = directory / f"{RECORD}.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(body, file)
    os.rename(temporary, directory / RECORD)


def read_record(directory: Path) -> Record | None:
    """None for a record that is missing, damaged, of another version or of an earlier boot."""
    try:
        with open(directory / RECORD, "rb") as file:
            value = json.loads(file.read(RECORD_LIMIT))
    except (OSError, ValueError, RecursionError):
        return None
    match value:
        case {"version": 1, "boot_id": str(boot), "id": str(id), "marker": str(mark), "processes": [*items]}:
            processes = tuple(p for p in map(_process, items) if p is not None)
            if boot == boot_id() and len(processes) == len(items):
                return Record(id, mark, processes)
    return None


def remove_record(directory: Path) -> None:
    for name in (RECORD, f"{RECORD}.new"):
        with suppress(FileNotFoundError):
            os.unlink(directory / name)


def _process(entry: object) -> Process | None:
    match entry:
        case {"role": str(role), "pid": int(pid), "start_ticks": int(ticks)} if pid > 1:
            return Process(role, pid, ticks)
    return None


def _is_marked(pid: int, instance: str, id: str) -> bool:
    return marked_id(command_line(pid), instance) == id


def _hold(pid: int, is_it: Callable[[], bool]) -> int | None:
    try:
        pidfd = os.pidfd_open(pid)
    except (ProcessLookupError, OSError):
        return None
    try:
        # Looked at after the pidfd is there: if it is the one now, the pidfd is that one's.
        if not wait_ended([pidfd], 0) and is_it():
            return pidfd
    except ProcessLookupError:
        pass
    os.close(pidfd)
    return None


def _is_one_of(pid: int, instance: str, uids: Collection[int]) -> bool:
    try:
        if _uid(pid) in uids:
            return True
        above = parent(pid)
        return _uid(above) in uids and marked_id(command_line(above), instance) is not None
    except ProcessLookupError:
        return False


def _uid(pid: int) -> int:
    """The real uid."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Uid:"):
                    return int(line.split()[1])
    except OSError:
        pass
    raise ProcessLookupError(pid)


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/<pid>/stat from the third on: the second, a name, may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        raise ProcessLookupError(pid) from None
