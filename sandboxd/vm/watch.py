"""Waiting for processes to end, whoever else waits for the same ones."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial

import anyio

from sandboxd.vm import processes

LOOK_S = 1.0
"""How often a process is looked at that there is no descriptor to wait with for."""


def ends(stack: ExitStack, pidfds: Sequence[int]) -> list[Callable[[], Awaitable[None]]]:
    """One wait for each process's end, on a duplicate of its own: so any number may wait for the same one."""
    waits: list[Callable[[], Awaitable[None]]] = []
    for pidfd in pidfds:
        try:
            own = os.dup(pidfd)
        except OSError:
            # No descriptor is left: an end that nobody sees would be worse than one that is seen late.
            waits.append(partial(_look_for_end, pidfd))
        else:
            stack.callback(os.close, own)
            waits.append(partial(anyio.wait_readable, own))
    return waits


async def _look_for_end(pidfd: int) -> None:
    while not processes.wait_ended([pidfd], 0):  # noqa: ASYNC110 - there is no descriptor to wait on
        await anyio.sleep(LOOK_S)


async def first(*waits: Callable[[], Awaitable[None]]) -> None:
    """Returns when the first of `waits` has, and cancels the others."""
    async with anyio.create_task_group() as group:

        async def wait(one: Callable[[], Awaitable[None]]) -> None:
            await one()
            group.cancel_scope.cancel()

        for one in waits:
            group.start_soon(wait, one)
