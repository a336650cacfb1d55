"""Noticing that a guest has stopped answering, for the sake of those who wait for it.

In: what waits for the guest (connections of requests, and whatever else can be closed), and the guest to ask. Out: all
of it closed once the guest has been silent for so long, so that every caller gets an error in bounded time. Nothing
else comes of it: a guest that is silent keeps running, its kept processes stay attached, and what it has still to say
is heard when it goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio

from sandboxd.errors import GuestProtocolError
from sandboxd.guest import Guest, GuestGone, GuestRefused

QUIET_S = 15.0
"""How long something waits before the guest is asked whether it is there, and between two such questions."""
ATTEMPTS = 3
ATTEMPT_S = 10.0
"""A guest on a host that is far too busy may take seconds for a ping."""


class Heartbeat:
    """Of one sandbox."""

    def __init__(self) -> None:
        self.waiters: set[Any] = set()
        """Whatever has a `close` that makes it give up."""
        self._asking = False
        self._quiet_since: float | None = None

    def due(self) -> bool:
        """To be asked every second or so: whether it is time for `check`."""
        if not self.waiters or self._asking:
            self._quiet_since = None
            return False
        now = time.monotonic()
        self._quiet_since = self._quiet_since or now
        return now - self._quiet_since >= QUIET_S

    async def check(self, guest: Guest) -> bool:
        """Whether the guest answers. Where it does not, what has waited since before is closed."""
        self._asking = True
        try:
            waited = list(self.waiters)
            for _ in range(ATTEMPTS):
                try:
                    with anyio.move_on_after(ATTEMPT_S):
                        await guest.ping(ATTEMPT_S)
                        return True
                except GuestRefused:
                    return True
                except (GuestGone, GuestProtocolError):
                    await anyio.sleep(0.1)
            for waiter in waited:
                if waiter in self.waiters:
                    waiter.close()
            return False
        finally:
            self._asking, self._quiet_since = False, None

    @contextmanager
    def patience(self) -> Iterator[None]:
        """For a block that waits for the guest on somebody else's connection. Raises `GuestGone`."""
        with anyio.CancelScope() as scope:
            waiter = _Scope(scope)
            self.waiters.add(waiter)
            try:
                yield
            finally:
                self.waiters.discard(waiter)
        if scope.cancelled_caught:
            raise GuestGone("the guest has stopped answering")


class _Scope:
    def __init__(self, scope: anyio.CancelScope) -> None:
        self._scope = scope

    def close(self) -> None:
        self._scope.cancel()
