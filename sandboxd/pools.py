"""Machines that were booted before anybody asked for them, kept until a create wants exactly what they are.

In: how many of what, and a way to boot one. Out: machines that wait, each with what ends it. One that waits has run
nothing but the guest agent and has been told nothing; nobody can name it, and nothing of it is written down, so what a
killed daemon leaves of it is found without a record and ended. One machine boots at a time, so that refilling does not
take the host from those who use it; a pool that cannot be filled is tried ever more seldom.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc

from sandboxd.errors import SandboxError
from sandboxd.policy import Policy, Spec
from sandboxd.store import Network
from sandboxd.termsafe import clean
from sandboxd.uids import Claim
from sandboxd.vm.machine import Machine

BACK_OFF_S = 5.0
"""Times the failures in a row."""
MAX_BACK_OFF_S = 30.0

log = logging.getLogger("sandboxd")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a create and a waiting machine must have the same. The rest is the server's, and is told to the guest when
    the machine is claimed."""

    image: str
    cpus: float
    memory_mb: int
    disk_mb: int
    network: Network


@dataclass(frozen=True, slots=True)
class Booted:
    """A machine whose guest answers and does not know yet whose it is. `network` is what it will be told of its link;
    None where it has none."""

    machine: Machine
    claim: Claim | None
    network: dict[str, Any] | None


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """`undo` ends it, and is its owner's from `take` on."""

    id: str
    booted: Booted
    undo: AsyncExitStack
    watch: anyio.CancelScope = field(default_factory=anyio.CancelScope)


Boot = Callable[[Shape, AsyncExitStack], Awaitable[tuple[str, Booted]]]
"""Boots one and gives it an id; raises with nothing on the stack's account that the stack does not undo."""


@dataclass(slots=True, eq=False)
class Pool:
    """`booting` is 1 while one boots."""

    shape: Shape
    size: int
    ready: list[Waiting] = field(default_factory=list)
    booting: int = 0
    failures: int = 0
    lacking: anyio.Event = field(default_factory=anyio.Event)


class Pools:
    """`run` keeps them full until it is cancelled or closed, and ends what nobody has claimed by then."""

    def __init__(self, pools: Iterable[Pool], boot: Boot) -> None:
        self.all = list(pools)
        self._boot = boot
        self._turn = anyio.Lock()
        self._running = anyio.CancelScope()
        self._ended = anyio.Event()
        self._tasks = anyio.create_task_group()

    async def run(self) -> None:
        try:
            with self._running:
                async with self._tasks:
                    for pool in self.all:
                        self._tasks.start_soon(self._keep_full, pool)
        finally:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as ending:
                    for waiting in [waiting for pool in self.all for waiting in pool.ready]:
                        ending.start_soon(_end, waiting)
                    for pool in self.all:
                        pool.ready.clear()
            self._ended.set()

    async def close(self) -> None:
        """Returns when no machine waits any more. `run` must have been started."""
        self._running.cancel()
        await self._ended.wait()

    def find(self, spec: Spec) -> Waiting | None:
        """The one that has waited longest, where a create wants just that and nothing that is fixed at boot beside it.
        It may be gone after the next await unless it is taken."""
        shape = Shape(spec.image, spec.cpus, spec.memory_mb, spec.disk_mb, spec.network)
        if spec.volumes or spec.bind is not None:
            return None
        return next((pool.ready[0] for pool in self.all if pool.shape == shape and pool.ready), None)

    def take(self, waiting: Waiting) -> None:
        """It is the caller's from now on, and another is booted in its place."""
        for pool in self.all:
            if waiting in pool.ready:
                pool.ready.remove(waiting)
                pool.lacking.set()
        waiting.watch.cancel()

    async def _keep_full(self, pool: Pool) -> None:
        while True:
            pool.lacking = anyio.Event()
            if len(pool.ready) >= pool.size:
                await pool.lacking.wait()
            elif pool.failures:
                await anyio.sleep(min(BACK_OFF_S * pool.failures, MAX_BACK_OFF_S))
                await self._add(pool)
            else:
                await self._add(pool)

    async def _add(self, pool: Pool) -> None:
        async with self._turn:
            pool.booting = 1
            try:
                async with AsyncExitStack() as undo:
                    id, booted = await self._boot(pool.shape, undo)
                    waiting = Waiting(id, booted, undo.pop_all())
            except Exception as fault:
                pool.failures += 1
                unexpected = None if isinstance(fault, SandboxError) else fault
                log.warning(
                    "the pool of %s lacks a machine: %s", pool.shape.image, clean(str(fault)), exc_info=unexpected
                )
                return
            finally:
                pool.booting = 0
        pool.failures = 0
        pool.ready.append(waiting)
        self._tasks.start_soon(self._watch, pool, waiting)

    async def _watch(self, pool: Pool, waiting: Waiting) -> None:
        """One that ends while it waits is replaced."""
        with waiting.watch:
            await waiting.booted.machine.wait_exit()
        if waiting in pool.ready:
            log.warning("%s: it ended while it waited in the pool of %s", waiting.id, pool.shape.image)
            pool.ready.remove(waiting)
            pool.failures += 1
            pool.lacking.set()
            await _end(waiting)


def of(policy: Policy) -> list[Pool]:
    """The pools an operator asks for: machines of the default size, with the default network."""
    return [
        Pool(
            Shape(
                one.image or policy.default_image, policy.cpus, policy.memory_mb, policy.disk_mb,
                policy.default_network,
            ),
            one.size,
        )
        for one in policy.pools
    ]


async def _end(waiting: Waiting) -> None:
    try:
        await waiting.undo.aclose()
    except Exception:
        log.exception("%s: ending it failed", waiting.id)
