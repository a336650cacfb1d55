"""Which processes are whose, and ending them: records, marks on command lines, pidfds.

In: pids, the records in the sandboxes' directories, /proc. Out: processes ended. A pid alone proves nothing:
a process is the one that was recorded when boot id, pid and start time agree while a pidfd already holds it,
and only that pidfd is signalled. What was started before its record could be written is found by its mark
(`jail.marker`): the program's own path on its command line, or that path among the arguments of the
bubblewrap that starts it. A record also covers a program that has since rewritten its command line. Processes
of other uids are never touched.

That a process is gone is only ever read from the kernel's word for it. Whatever else keeps it from being looked at, no
descriptor left for one, is raised as OSError: whoever took it for gone would give up a machine that runs.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sandboxd.vm.jail import MARK
from sandboxd.vm.machine import is_name

RECORD = "vm.json"
RECORD_VERSION = 1
RECORD_LIMIT = 64 * 1024
END_S = 5.0
SETTLE_S = 0.2
PID_LIMIT = 1 << 22
"""PID_MAX_LIMIT of the kernel (include/linux/threads.h)."""
_GONE = {errno.ENOENT, errno.ESRCH, errno.EPERM, errno.EACCES}
"""What /proc answers for a process that is not there (proc(5)), or that is another user's where `hidepid` hides it."""
_NOT_HELD = {errno.ESRCH, errno.ENOENT, errno.EINVAL}
"""What pidfd_open(2) answers where there is no process: the last two for a thread of one, by the kernel's version."""
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

    @property
    def instance(self) -> str:
        """Of the daemon that started them. Today's may be another, where its state directory was renamed."""
        return self.marker.split("/")[-2]


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int:
    """Raises ProcessLookupError when there is no such process."""
    return int(_stat(pid)[19])


def parent(pid: int) -> int:
    """Raises ProcessLookupError when there is no such process."""
    return int(_stat(pid)[1])


def hold(process: Process) -> int | None:
    """A pidfd, if that very process still is there (dead and not yet waited for counts as gone). Raises OSError where
    it cannot be looked at."""
    return hold_if(process.pid, lambda: start_ticks(process.pid) == process.start_ticks)


def hold_if(pid: int, is_it: Callable[[], bool]) -> int | None:
    """A pidfd of the process `pid` if `is_it` says so while it is held. Raises OSError where that cannot be seen."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as fault:
        if fault.errno in _NOT_HELD:
            return None
        raise
    with ExitStack() as unless_it_is:
        unless_it_is.callback(os.close, pidfd)
        with suppress(ProcessLookupError):
            # Looked at after the pidfd is there: if it is the one now, the pidfd is that one's.
            if not wait_ended([pidfd], 0) and is_it():
                unless_it_is.pop_all()
                return pidfd
    return None


def hold_all(processes: Iterable[Process]) -> list[tuple[Process, int]]:
    """Those that still are there, each with its pidfd. Raises OSError, and then none is held."""
    with ExitStack() as undo:
        held = []
        for process in processes:
            if (pidfd := hold(process)) is not None:
                undo.callback(os.close, pidfd)
                held.append((process, pidfd))
        undo.pop_all()
        return held


def has_ended(process: Process) -> bool:
    """Dead and not yet waited for counts as ended. Raises OSError where it cannot be looked at."""
    pidfd = hold(process)
    if pidfd is not None:
        os.close(pidfd)
    return pidfd is None


def hold_child(pid: int, above: int) -> int | None:
    """A pidfd of the process `pid` if `above` is its parent."""
    return hold_if(pid, lambda: parent(pid) == above)


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
    """[b""] for a process that is gone, or is the kernel's. Raises OSError where it cannot be looked at."""
    with suppress(ProcessLookupError):
        return _read(pid, "cmdline").rstrip(b"\0").split(b"\0")
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
            # First: a command line is read from its process's memory, and one of anybody's may keep its reader waiting.
            if _is_one_of(pid, instance, uids):
                id = marked_id(command_line(pid), instance)
                if id is not None:
                    yield id, pid


def end_marked(instance: str, ids: Callable[[str], bool], uids: Collection[int]) -> set[str]:
    """Ends the marked processes whose id is in `ids`; returns the ids that had any. Raises OSError where processes
    cannot be looked at.

    It looks again until a look finds nothing: a parent that is dead starts no more children.
    """
    ended: set[str] = set()
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        held: list[int] = []
        try:
            for id, pid in marked(instance, uids):
                if ids(id):
                    pidfd = hold_if(pid, partial(_is_marked, pid, instance, id))
                    if pidfd is not None:
                        ended.add(id)
                        held.append(pidfd)
        finally:
            end(held)
        if not held:
            return ended
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
    """Ends what the record in `directory` names, and removes it. True when something was still there. Raises OSError
    where that cannot be looked at."""
    record = read_record(directory)
    held = [pidfd for _, pidfd in hold_all(record.processes if record else ())]
    if end(held):
        remove_record(directory)
    return bool(held)


def unknown(sandboxes: Path, known: Collection[str]) -> list[Path]:
    """The directories of machines below `sandboxes` that are not of `known`."""
    with suppress(FileNotFoundError):
        found = sorted(sandboxes.iterdir())
        return [one for one in found if one.name not in known and one.is_dir() and not one.is_symlink()]
    return []


def write_record(directory: Path, record: Record) -> None:
    """By rename, so that a record is whole or not there. No sync: after a crash of the host it says nothing."""
    body = {
        "version": RECORD_VERSION,
        "boot_id": boot_id(),
        "id": record.id,
        "marker": record.marker,
        "directory": _identity(directory),
        "processes": [{"role": p.role, "pid": p.pid, "start_ticks": p.start_ticks} for p in record.processes],
    }
    temporary = directory / f"{RECORD}.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(body, file)
    os.rename(temporary, directory / RECORD)


def read_record(directory: Path) -> Record | None:
    """None for a record that is missing, damaged, of another version or of an earlier boot, and for a copy of another
    directory's: what it names is not this one's to take or to end. Raises OSError where it is there and cannot be
    read."""
    try:
        with open(directory / RECORD, "rb") as file:
            value = json.loads(file.read(RECORD_LIMIT))
            own = _identity(directory)
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    match value:
        case {"version": 1, "boot_id": str(boot), "id": str(id), "marker": str(mark), "processes": [*items]}:
            processes = tuple(p for p in map(_process, items) if p is not None)
            # Records of earlier versions do not say whose they are.
            ours = value.get("directory", own) == own
            if boot == boot_id() and len(processes) == len(items) and _is_marker(mark, id) and ours:
                return Record(id, mark, processes)
    return None


def remove_record(directory: Path) -> None:
    for name in (RECORD, f"{RECORD}.new"):
        with suppress(FileNotFoundError):
            os.unlink(directory / name)


def _identity(directory: Path) -> list[int]:
    """Kept when it is renamed, and no copy has it."""
    info = os.stat(directory)
    return [info.st_dev, info.st_ino]


def _process(entry: object) -> Process | None:
    match entry:
        case {"role": str(role), "pid": int(pid), "start_ticks": int(ticks)} if 1 < pid < PID_LIMIT:
            return Process(role, pid, ticks)
    return None


def _is_marker(text: str, id: str) -> bool:
    match text.removeprefix(f"{MARK}/").split("/"):
        case [instance, its] if text.startswith(f"{MARK}/"):
            return is_name(instance) and is_name(its) and its == id
    return False


def _is_marked(pid: int, instance: str, id: str) -> bool:
    return marked_id(command_line(pid), instance) == id


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
    for line in _read(pid, "status").splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    raise ProcessLookupError(pid)


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/<pid>/stat from the third on: the second, a name, may hold anything."""
    return _read(pid, "stat").rpartition(b")")[2].split()


def _read(pid: int, name: str) -> bytes:
    """A file of /proc/<pid>. Raises ProcessLookupError where the process is gone, OSError where it may not be."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError as fault:
        if fault.errno in _GONE:
            raise ProcessLookupError(pid) from None
        raise
