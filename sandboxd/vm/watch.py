"""Waiting for processes to end, whoever else waits for the same ones."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial

import anyio


def ends(stack: ExitStack, pidfds: Sequence[int]) -> list[Callable[[], Awaitable[None]]]:
    """One wait for each process's end, on a duplicate of its own: so any number may wait for the same one."""
    own = [os.dup(pidfd) for pidfd in pidfds]
    for fd in own:
        stack.callback(os.close, fd)
    return [partial(anyio.wait_readable, fd) for fd in own]


async def first(*waits: Callable[[], Awaitable[None]]) -> None:
    """Returns when the first of `waits` has, and cancels the others."""
    async with anyio.create_task_group() as group:

        async def wait(one: Callable[[], Awaitable[None]]) -> None:
            await one()
            group.cancel_scope.cancel()

        for one in waits:
            group.start_soon(wait, one)
