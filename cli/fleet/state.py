"""What became of a repository's fleet, on disk: told truly whoever was killed when.

In: the directory `<config>/fleet/<16 hex of the repository's SHA-256>/`, 0700. Out: a `Fleet`. `state.json` (0600) is
replaced by rename, each change of it under a lock of the directory; it is written by the fleet and by its tasks, which
are processes of their own and outlive it. What it says of a process is believed only while that very process lives:
its number, and its start in ticks of this boot (proc(5), field 22). `lock` is held by a fleet and inherited by its
tasks, so there is one fleet a repository at a time. Nothing is followed through a link.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from cli import private, session
from cli.fleet import plain
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

MAX_BYTES = 16 << 20
HOLD_S = 1.0  # whoever only looks whether the lock is held has it for an instant

WAITING, RUNNING = "waiting", "running"
VERIFIED, FAILED, REJECTED, LOST = "verified", "failed", "rejected", "lost"
UNSTARTED = "unstarted"  # never written: what waiting is once nobody is left to start it
STATES = (WAITING, RUNNING, VERIFIED, FAILED, REJECTED, LOST)


class StateError(SandboxError):
    """The record of a fleet cannot be read or written, or another fleet has it."""


@dataclass(frozen=True, slots=True)
class Task:
    """`name` is the sandbox's name and `sandbox` its id, once there is one; `code` the exit code once there is one;
    `commit` what came back, `landed` the merge of it, `before` what its ref held when the fleet began; times are RFC
    3339 in UTC; "" is for not yet, and for none."""

    branch: str
    agent: str
    checked: bool
    name: str
    state: str = WAITING
    pid: int = 0
    born: str = ""
    sandbox: str = ""
    code: int | None = None
    commit: str = ""
    commits: int | None = None
    detail: str = ""
    started: str = ""
    ended: str = ""
    landed: str = ""
    before: str = ""


@dataclass(frozen=True, slots=True)
class Fleet:
    """`base` is the commit every task started from, `on` the branch that was checked out then, "" for none."""

    repo: str
    base: str
    on: str
    context: str
    started: str
    pid: int
    born: str
    tasks: tuple[Task, ...]

    def task(self, branch: str) -> Task | None:
        return next((task for task in self.tasks if task.branch == branch), None)


def _check(fleet: Fleet) -> None:
    """Raises ValueError for what is of the right type and can be no such thing."""
    for task in fleet.tasks:
        if task.state not in STATES:
            raise ValueError(f"{task.state} is no state of a task")
        if b"\0" in os.fsencode(task.branch):
            raise ValueError("a branch holds a NUL")
        for at in (task.started, task.ended):
            if at:
                datetime.strptime(at, "%Y-%m-%dT%H:%M:%S%z")
    commits = (fleet.base, *(one for task in fleet.tasks for one in (task.commit, task.before, task.landed)))
    if not all(map(session.COMMIT.fullmatch, commits)):
        raise ValueError("one of its commits is none")


def truth(fleet: Fleet, alive: Callable[[int, str], bool]) -> Fleet:
    """The record, with what it says of processes that are gone put right."""
    started_by = alive(fleet.pid, fleet.born)

    def right(task: Task) -> Task:
        if task.state == RUNNING and not alive(task.pid, task.born):
            return replace(task, state=LOST, detail="its process was killed")
        if task.state == WAITING and not started_by:
            return replace(task, state=UNSTARTED)
        return task

    return replace(fleet, tasks=tuple(map(right, fleet.tasks)))


def born(pid: int) -> str:
    """When a process started, in a way no other process of that number has; "" where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot, open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()  # the name before it may hold anything
            return "" if fields[0] in (b"Z", b"X") else f"{boot.read().strip()}:{int(fields[19])}"
    except (OSError, ValueError, IndexError):
        return ""


def alive(pid: int, since: str) -> bool:
    return pid > 0 and since != "" and born(pid) == since


class Store:
    """One repository's record. `common_dir` is what all its worktrees share."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file = directory / "state.json"

    @classmethod
    def of(cls, config_dir: str, common_dir: Path) -> Store:
        key = hashlib.sha256(os.fsencode(common_dir)).hexdigest()[:16]
        return cls(Path(config_dir) / "fleet" / key)

    def prepare(self) -> Path:
        """Makes the directories; returns the one of the logs."""
        logs = self.directory / "logs"
        try:
            private.prepare(str(logs))
        except OSError as error:
            raise StateError(f"{clean(str(logs))} cannot be made: {error.strerror}") from None
        return logs

    def hold(self) -> int:
        """The lock of this repository's fleet, as a descriptor that children may inherit; raises with who has it."""
        return self._lock("lock", self._holder)

    def hold_landing(self) -> int:
        """The lock of who merges: of two at once one would find HEAD moved when its files are written already."""
        return self._lock("landing", lambda: "another sandbox-cli agent fleet land is at work in this repository")

    def _lock(self, name: str, holder: Callable[[], str]) -> int:
        path = self.directory / name
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StateError(f"{clean(str(path))} cannot be opened: {error.strerror}") from None
        deadline = time.monotonic() + HOLD_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise StateError(holder()) from None
            time.sleep(0.05)

    def _holder(self) -> str:
        fleet = self.read()
        if fleet is None:
            return "another fleet is being started in this repository"
        if alive(fleet.pid, fleet.born):
            return (
                f"another fleet is at work in this repository: process {fleet.pid}, since {fleet.started}; "
                "wait for it (sandbox-cli agent fleet status), or end it with Ctrl-C where it runs"
            )
        running = [task for task in truth(fleet, alive).tasks if task.state == RUNNING]
        if not running:
            return "another fleet is being started in this repository"
        names = " ".join(task.name for task in running)
        return f"tasks of a fleet that was killed are still at work: wait, or end them with sandbox-cli kill {names}"

    def read(self) -> Fleet | None:
        """None where no fleet was ever run."""
        text = private.read(str(self._file), MAX_BYTES)
        if text is None:
            return None
        try:
            fleet = plain.load(Fleet, json.loads(text))
            _check(fleet)
            return fleet
        except (ValueError, RecursionError) as error:
            raise StateError(f"{clean(str(self._file))} is not the record of a fleet: {clean(str(error))}") from None

    def write(self, fleet: Fleet) -> None:
        with private.alone(str(self.directory)):
            self._replace(fleet)

    def change(self, branch: str, **changes: Any) -> None:
        """Of one task; the others' are as another process may just have written them."""
        with private.alone(str(self.directory)):
            fleet = self.read()
            if fleet is None or fleet.task(branch) is None:
                raise StateError(f"{clean(str(self._file))} knows no task {clean(branch)} any more")
            tasks = (replace(task, **changes) if task.branch == branch else task for task in fleet.tasks)
            self._replace(replace(fleet, tasks=tuple(tasks)))

    def _replace(self, fleet: Fleet) -> None:
        private.write(str(self._file), json.dumps(plain.dump(fleet), indent=1).encode("ascii") + b"\n")
