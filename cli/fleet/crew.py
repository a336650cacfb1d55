"""The processes of a fleet: so many at once until none is left, and a person's Ctrl-C to all of them.

In: orders, and descriptors that the tasks inherit. Out: nothing but the record, where each task writes for itself; what
is written here is that one was killed before it could. Tasks are in sessions of their own: the terminal's Ctrl-C
reaches only this process, which passes it on, once for each time, and starts no more of them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from cli import session, show, wakeup
from cli.fleet import plain, state
from cli.fleet.state import Store
from cli.fleet.task import Order
from cli.status import Status
from sandboxd.termsafe import clean

TICK_MS = 1000
TAIL_BYTES = 4096
BRANCH_COLUMNS = 16  # of 80, so that the rest has room
# -P: not from the current directory, which is a repository somebody else may have written.
COMMAND = (sys.executable, "-P", "-m", "cli.fleet.task")


class Crew:
    """At most `at_once` tasks at work; `inherit` stays open in them."""

    def __init__(self, store: Store, orders: Sequence[Order], at_once: int, inherit: Sequence[int]) -> None:
        self._store = store
        self._waiting = deque(orders)
        self._at_once = at_once
        self._inherit = inherit
        self._running: dict[int, tuple[Order, subprocess.Popen[bytes]]] = {}
        self._ended: Counter[str] = Counter()
        self._stopped = False
        self._began = time.monotonic()

    def work(self) -> None:
        """Until every task that was started has ended."""
        with wakeup.descriptor(wakeup.ENDING) as signals, Status() as status:
            while self._running or (self._waiting and not self._stopped):
                while self._waiting and not self._stopped and len(self._running) < self._at_once:
                    self._start(self._waiting.popleft())
                status.say(self._line())
                poll = select.poll()
                for fd in (signals, *self._running):
                    poll.register(fd, select.POLLIN)
                for fd, _ in poll.poll(TICK_MS):
                    if fd == signals:
                        self._interrupt(len(os.read(signals, 64)))
                    else:
                        self._end(fd)

    def _start(self, order: Order) -> None:
        with suppress(FileNotFoundError):
            order.log.unlink()
        log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        # A file in memory: it is whole when the task starts to read it, whoever is killed meanwhile.
        orders = os.memfd_create("order", os.MFD_CLOEXEC)
        with os.fdopen(orders, "w+b") as stdin, os.fdopen(log, "wb") as output:
            stdin.write(json.dumps(plain.dump(order)).encode("ascii"))
            stdin.flush()
            stdin.seek(0)
            process = subprocess.Popen(
                COMMAND, stdin=stdin, stdout=output, stderr=output, pass_fds=tuple(self._inherit),
                start_new_session=True,
            )  # fmt: skip
        self._running[os.pidfd_open(process.pid)] = order, process

    def _interrupt(self, times: int) -> None:
        self._stopped = True
        for _ in range(times):
            for pidfd in self._running:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGINT)

    def _end(self, pidfd: int) -> None:
        order, process = self._running.pop(pidfd)
        os.close(pidfd)
        code = process.wait()
        fleet = self._store.read()
        task = fleet.task(order.branch) if fleet else None
        if task is not None and task.state == state.RUNNING:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}, see its log"
            self._store.change(order.branch, state=state.LOST, detail=f"its process {how}", ended=session.now())
            self._ended[state.LOST] += 1
        elif task is not None and task.state == state.WAITING and not self._stopped:
            detail = "its process did not come up: see its log"
            self._store.change(order.branch, state=state.FAILED, detail=detail, ended=session.now())
            self._ended[state.FAILED] += 1
        elif task is not None:
            self._ended[task.state] += 1

    def _line(self) -> str:
        counts = [(len(self._running), "running"), *((self._ended[name], name) for name in sorted(self._ended))]
        counts.append((len(self._waiting), "waiting"))
        parts = ", ".join(f"{count} {name}" for count, name in counts if count)
        stopping = "interrupted, bringing back what there is: " if self._stopped else ""
        took = int(time.monotonic() - self._began)
        if not os.isatty(2):
            return f"fleet: {stopping}{parts}"  # what follows would make each line a new one, where lines are kept
        written = latest((order.branch, order.log) for order, _ in self._running.values())
        return f"fleet: {stopping}{parts} {took // 60}:{took % 60:02}" + (f"; {written}" if written else "")


def latest(logs: Iterable[tuple[str, Path]]) -> str:
    """The branch whose log was written to last, and the last line there; "" where there is none. It is a guest's word,
    mostly: one safe line, and for `Status` to cut."""
    found: tuple[int, str] = 0, ""
    for branch, path in logs:
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as log:
                about = os.fstat(log.fileno())
                log.seek(max(0, about.st_size - TAIL_BYTES))
                written = log.read(TAIL_BYTES).decode("utf-8", "replace").split("\n")
        except OSError:
            continue
        lines = [line for line in map(clean, written) if line]
        if lines and about.st_mtime_ns > found[0]:
            last = lines[-1].removeprefix(f"{show.PROGRAM}: ")
            found = about.st_mtime_ns, f"{show.cut(clean(branch), BRANCH_COLUMNS)}: {last}"
    return found[1]
