"""A control group for each machine of a root daemon: limits on memory, processors and processes, and who is in it.

In: a daemon's instance, a machine's id, what the machine may use. Out: a group, its processes, its end. A process
leaves a group only by the hand of somebody who may write to the hierarchy, and no VMM may: so the group of a machine
says which processes are its own, whatever they call themselves. Version 2 where the host has its controllers there,
version 1 otherwise (cgroups(7); Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/ of the kernel). Groups are made
at the top of the hierarchy, not below the daemon's own: machines outlive the daemon.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sandboxd.errors import SetupError
from sandboxd.vm import processes
from sandboxd.vm.machine import is_name

CONTROLLERS = ("cpu", "memory", "pids")
PERIOD_US = 100_000
TRIES = 100
PAUSE_S = 0.01
"""Before a group is looked at again that will not be emptied, or removed, yet."""
_PREFIX = "sandboxd-"

log = logging.getLogger("sandboxd")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a machine's processes may use together. `cpus` is processors' worth of time, not which ones."""

    cpus: float
    memory_bytes: int
    processes: int


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where the controllers are mounted: `version` 2 has one directory, version 1 one for each controller."""

    version: int
    roots: tuple[Path, ...]

    def group(self, instance: str, id: str) -> Group:
        if not is_name(instance) or not is_name(id):
            raise ValueError(f"not names: {instance!r}, {id!r}")
        return Group(self.version, tuple(root / f"{_PREFIX}{instance}" / id for root in self.roots))

    def ids(self, instance: str) -> set[str]:
        """Of which machines of `instance` there are groups."""
        found: set[str] = set()
        for root in self.roots:
            with suppress(FileNotFoundError):
                found |= {entry.name for entry in os.scandir(root / f"{_PREFIX}{instance}") if entry.is_dir()}
        return {id for id in found if is_name(id)}

    def left(self, instance: str, known: Collection[str], directories: Iterable[Path]) -> list[Group]:
        """The groups of `instance` that are of no machine of `known`, and those that the records in `directories`
        name: of another instance, where the state directory had another name then. Raises OSError where a record cannot
        be read."""
        found = {(instance, id) for id in self.ids(instance) - set(known)}
        records = [(directory.name, processes.read_record(directory)) for directory in directories]
        found |= {(record.instance, id) for id, record in records if record is not None and record.id == id}
        return [self.group(*one) for one in sorted(found)]


def group(groups: Hierarchy | None, instance: str, id: str) -> Group | None:
    """Only root's machines have one."""
    return None if groups is None else groups.group(instance, id)


@dataclass(frozen=True, slots=True)
class Group:
    version: int
    directories: tuple[Path, ...]

    @property
    def id(self) -> str:
        return self.directories[0].name

    def make(self, limits: Limits) -> None:
        """With its limits in force, and nobody in it. A group of that name that an earlier machine left is emptied and
        made anew. Raises OSError with nothing left behind."""
        self.remove()
        try:
            wanted = dict(files(self.version, limits))
            for directory in self.directories:
                _make(directory, self.version)
                for name in list(wanted):
                    if (directory / name).exists():
                        (directory / name).write_text(wanted.pop(name))
            if lacking := set(wanted) - _MAY_LACK:
                raise OSError(errno.ENOENT, "the kernel has no such limit", sorted(lacking)[0])
        except BaseException:
            self.remove()
            raise

    def entering(self) -> list[str]:
        """A command in front of another that it then runs inside the group: nobody is ever started outside of it."""
        script = 'for procs; do shift; [ "$procs" = -- ] && break; echo 0 >"$procs" || exit 125; done; exec "$@"'
        return ["/bin/sh", "-c", script, "sh", *(str(d / "cgroup.procs") for d in self.directories), "--"]

    def pids(self) -> set[int]:
        """As seen from the daemon's process namespace, zombies left out. Empty for a group that is not there. Raises
        OSError where it is there and cannot be read."""
        found: set[int] = set()
        for directory in self.directories:
            try:
                found |= {int(line) for line in (directory / "cgroup.procs").read_text().split()}
            except OSError as fault:
                # ENODEV: it was removed between open and read (fs/kernfs/file.c).
                if fault.errno not in (errno.ENOENT, errno.ENODEV):
                    raise
        return found - {0}

    def holds(self, pid: int) -> bool:
        return pid in self.pids()

    def end(self) -> bool:
        """Kills whoever is in it, and waits. False when somebody has not ended in `processes.END_S`, or nobody can be
        looked at or held, for want of a descriptor say."""
        deadline = time.monotonic() + processes.END_S
        while True:
            with suppress(OSError):
                if not self._end_those_seen():
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_S)

    def _end_those_seen(self) -> bool:
        """Whether there was anybody. Raises OSError where not all could be held; those that could are ended."""
        pids = self.pids()
        held: list[int] = []
        try:
            for pid in pids:
                # Looked at again once it is held: a number that was free meanwhile may be anybody's by now.
                if (pidfd := processes.hold_if(pid, partial(self.holds, pid))) is not None:
                    held.append(pidfd)
        finally:
            processes.end(held)
        return bool(pids)

    def remove(self) -> bool:
        """Ends whoever is in it and removes it. False when it is still there, which is logged."""
        gone = self._remove()
        if not gone:
            left = ", ".join(str(directory) for directory in self.directories if directory.exists())
            log.error("a control group could not be removed: %s", left)
        return gone

    def _remove(self) -> bool:
        if not self.end():
            return False
        for directory in self.directories:
            deadline = time.monotonic() + processes.END_S
            while True:
                try:
                    os.rmdir(directory)
                except FileNotFoundError:
                    break
                except OSError as fault:
                    # The kernel takes a moment over processes that were waited for just now. Or one came meanwhile,
                    # on its way in when the daemon that started it was killed.
                    if fault.errno != errno.EBUSY or time.monotonic() > deadline or not self.end():
                        return False
                    time.sleep(PAUSE_S)
                else:
                    break
            # The instance's own, once its last machine is gone.
            with suppress(OSError):
                os.rmdir(directory.parent)
        return True


# A kernel without swap accounting, or without swap, has no file for it.
_MAY_LACK = {"memory.swap.max", "memory.memsw.limit_in_bytes"}


def files(version: int, limits: Limits) -> Mapping[str, str]:
    """What is written to which file of a group, in this order. Pure."""
    quota = max(1000, round(limits.cpus * PERIOD_US))
    if version == 2:
        return {
            "cpu.max": f"{quota} {PERIOD_US}",
            "memory.max": str(limits.memory_bytes),
            "memory.swap.max": "0",
            "memory.oom.group": "1",
            "pids.max": str(limits.processes),
        }
    return {
        "cpu.cfs_period_us": str(PERIOD_US),
        "cpu.cfs_quota_us": str(quota),
        "memory.limit_in_bytes": str(limits.memory_bytes),
        "memory.memsw.limit_in_bytes": str(limits.memory_bytes),
        "pids.max": str(limits.processes),
    }


def find(mounts: str | None = None) -> Hierarchy:
    """By the text of /proc/self/mounts. Raises SetupError where neither version has all of CONTROLLERS."""
    text = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    v1: dict[str, Path] = {}
    for line in text.splitlines():
        _, where, kind, options, *_ = line.split(" ")
        place = Path(where.replace("\\040", " "))
        if kind == "cgroup2" and set(CONTROLLERS) <= set(_read(place / "cgroup.controllers").split()):
            return Hierarchy(2, (place,))
        if kind == "cgroup":
            for controller in set(CONTROLLERS) & set(options.split(",")):
                v1.setdefault(controller, place)
    if lacking := [name for name in CONTROLLERS if name not in v1]:
        raise SetupError(
            f"this host has no control group for {', '.join(lacking)}, so nothing would limit what a machine uses; "
            "mount cgroup2 with these controllers on /sys/fs/cgroup"
        )
    return Hierarchy(1, tuple(dict.fromkeys(v1[name] for name in CONTROLLERS)))


def usable(mounts: str | None = None) -> Hierarchy:
    """What `find` finds, once a group was made there and removed again. Raises SetupError where none can be: in a
    container, say, control groups may be there to be read alone, or be full of processes."""
    found = find(mounts)
    trial = found.group("trial", str(os.getpid()))
    try:
        trial.make(Limits(1, 64 << 20, 16))
    except OSError as fault:
        raise SetupError(_unusable(found, fault)) from None
    trial.remove()
    return found


def _unusable(found: Hierarchy, fault: OSError) -> str:
    places = ", ".join(map(str, found.roots))
    said = f"no control group can be made below {places}, so nothing would limit what a machine uses: "
    if fault.errno == errno.EBUSY and found.version == 2:
        # cgroup-v2.rst, "No Internal Process Constraint"; the host's own root is free of it.
        return (
            f"{said}processes are in it itself, as in a container. Move them into one below: mkdir {places}/own; "
            f"for p in $(cat {places}/cgroup.procs); do echo $p > {places}/own/cgroup.procs; done"
        )
    closed = fault.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
    return f"{said}{fault.strerror or 'it fails'}{'; mount it so that root can write there' if closed else ''}"


def _make(directory: Path, version: int) -> None:
    parent = directory.parent
    for _ in range(TRIES):
        # Another machine's end may take the parent away, until there is something in it.
        with suppress(FileNotFoundError):
            parent.mkdir(mode=0o755, exist_ok=True)
            if version == 2:
                _enable(parent.parent)
                _enable(parent)
            directory.mkdir(mode=0o755)
            return
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(parent))


def _enable(directory: Path) -> None:
    control = directory / "cgroup.subtree_control"
    lacking = set(CONTROLLERS) - set(_read(control).split())
    if lacking:
        control.write_text(" ".join(f"+{name}" for name in sorted(lacking)))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
