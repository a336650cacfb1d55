"""What happens to sandboxes without anybody asking for it: machines that go away, times that are over, guests that fall
silent, and what they all use, measured.

In: the sandboxes, and clocks. Out: ends, warnings, samples. One sandbox's fault never ends the daemon, and with it the
hold on every other one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc
import anyio.to_thread

from sandboxd.audit import Audit
from sandboxd.boot import console
from sandboxd.ending import MACHINE, Ending
from sandboxd.lifecycle import State
from sandboxd.networks import Networks
from sandboxd.sandboxes import Live, Sandboxes
from sandboxd.store import Store
from sandboxd.usage import INTERVAL_S
from sandboxd.usage import read as read_usage

TICK_S = 1.0

log = logging.getLogger("sandboxd")


class Supervision:
    """One per daemon; all that it does runs in `tasks`."""

    def __init__(
        self, store: Store, audit: Audit, networks: Networks, sandboxes: Sandboxes, ending: Ending,
        tasks: anyio.abc.TaskGroup,
    ) -> None:  # fmt: skip
        self._store, self._audit, self._networks = store, audit, networks
        self._sandboxes, self._ending, self._tasks = sandboxes, ending, tasks

    def begin(self) -> None:
        self._tasks.start_soon(self._watch_clock)
        self._tasks.start_soon(self._watch_usage)

    def watch(self, live: Live) -> None:
        """One that runs, from now on."""
        self.start(self._watch_machine, live)

    def end(self, live: Live, reason: str) -> None:
        """Begins to; it goes on whatever becomes of whoever asked for it."""
        self.start(self._ending.end, live, reason)

    def start(self, act: Callable[..., Awaitable[None]], live: Live, *arguments: object) -> None:
        """Something for one sandbox, beside everything else."""
        self._tasks.start_soon(self._guarded, act, live, *arguments)

    async def _guarded(self, act: Callable[..., Awaitable[None]], live: Live, *arguments: object) -> None:
        try:
            await act(live, *arguments)
        except Exception:
            log.exception("%s: looking after it failed", live.record.id)

    async def _watch_machine(self, live: Live) -> None:
        """A machine that goes away by itself takes its sandbox along, but not its disk."""
        machine = live.machine
        assert machine is not None
        await machine.wait_exit()
        if not live.ended:
            last = console(await machine.console_tail())
            log.error("%s: its machine ended by itself%s", live.record.id, last)
            await self._ending.end(live, MACHINE)

    async def _watch_clock(self) -> None:
        while True:
            await anyio.sleep(TICK_S)
            self._store.catch_up()
            self._audit.catch_up()
            for live in self._sandboxes:
                if live.record.state in (State.RUNNING, State.SUSPENDED) and (reason := live.overdue()):
                    self.end(live, reason)
                elif live.record.state is State.RUNNING and live.heartbeat.due():
                    self.start(self._ask, live)

    async def _ask(self, live: Live) -> None:
        if not await live.heartbeat.check(live.guest) and live.record.state is State.RUNNING:
            log.warning("%s: its guest does not answer: what waited for it is given up, it is not", live.record.id)

    async def _watch_usage(self) -> None:
        while True:
            await anyio.sleep(INTERVAL_S - time.monotonic() % INTERVAL_S)
            try:
                await self._measure()
            except Exception:
                log.exception("what sandboxes use could not be measured")

    async def _measure(self) -> None:
        found = [(live, live.machine.programs) for live in self._sandboxes if live.machine is not None]
        if not found:
            return
        traffic = await self._networks.traffic()
        readings = await anyio.to_thread.run_sync(lambda: [read_usage(programs) for _, programs in found])
        at, monotonic = time.time(), time.monotonic()
        for (live, _), reading in zip(found, readings, strict=True):
            if reading is not None and not live.ended:
                cpus = math.ceil(live.record.cpus)
                sent = traffic.get(live.record.id)
                live.meter.add(reading, sent, cpus, live.processes.running, at, monotonic)
