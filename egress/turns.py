"""Whose event comes next: each sandbox's in the order they came, the sandboxes by turns. Pure.

In: events with the sandbox they are about. Out: one after another. However many one sandbox causes, each of the others
waits for one of them at a time. Bounded by the relay: a pair waits for an answer before it says more.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    def __init__(self) -> None:
        self._queues: dict[int, deque[T]] = {}
        self._order: deque[deque[T]] = deque()  # those that are not empty

    def __bool__(self) -> bool:
        return bool(self._order)

    def add(self, sandbox: int, event: T) -> None:
        queue = self._queues.get(sandbox)
        if queue is None:
            queue = self._queues[sandbox] = deque()
        if not queue:
            self._order.append(queue)
        queue.append(event)

    def next(self) -> T:
        """IndexError where there is none."""
        order = self._order
        queue = order[0]
        event = queue.popleft()
        if not queue:
            order.popleft()
        elif len(order) > 1:
            order.rotate(-1)
        return event

    def forget(self, sandbox: int) -> None:
        """A sandbox that has gone; what is left of it is still handed out."""
        self._queues.pop(sandbox, None)
