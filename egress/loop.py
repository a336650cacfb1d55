"""Waiting for descriptors: epoll, and whom to call. One thread; a call does a bounded piece of work and returns."""

from __future__ import annotations

import select
from collections.abc import Callable
from select import EPOLLIN, EPOLLOUT

from egress.log import Log

IN, OUT = EPOLLIN, EPOLLOUT


class Loop:
    """Faults of those who are called go to `log`: one guest's bytes must not stop what serves all of them."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, call: Callable[[], None], what: int = IN) -> None:
        self._epoll.register(fd, what)
        self._calls[fd] = call

    def change(self, fd: int, what: int) -> None:
        self._epoll.modify(fd, what)

    def forget(self, fd: int) -> None:
        """Before the descriptor is closed."""
        del self._calls[fd]
        self._epoll.unregister(fd)

    def turn(self, timeout_s: float) -> None:
        """Waits at most so long, then calls everybody whose descriptor is ready, each once."""
        for fd, _ in self._epoll.poll(timeout_s):
            # Somebody called before may have forgotten this one.
            if (call := self._calls.get(fd)) is not None:
                try:
                    call()
                except Exception as fault:
                    self._log.fault("serving a descriptor", fault)
