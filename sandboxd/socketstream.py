"""Bytes over a connected socket, for tasks that may be cancelled at any moment.

A read that is cancelled has taken nothing; a write that is cancelled may have sent a part, so whoever can be cancelled
lets somebody else write. An end of stream is `b""`; every other end is a `BrokenStreamError`. A socket that is always
ready yields to other tasks now and then, not at every call: a short exchange is not made of turns of the event loop.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.lowlevel

from sandboxd import unixpath

YIELD_BYTES = 64 << 10
CALL_COST_BYTES = 2 << 10
"""What a call counts for beside its bytes."""


class BrokenStreamError(Exception):
    """The other side is gone, or this one was closed."""


class SocketStream:
    """Owns `sock`. One reader and one writer at a time. A write that makes no progress for `patience_s` breaks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.patience_s = math.inf
        self._unyielded = 0

    async def receive(self, limit_bytes: int) -> bytes:
        """What is there, at most `limit_bytes`; waits for the first byte."""
        while True:
            try:
                data = self.sock.recv(limit_bytes)
            except BlockingIOError:
                await self._wait(anyio.wait_readable)
            except OSError:
                raise BrokenStreamError from None
            else:
                await self._yield(len(data))
                return data

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                await self._wait_writable()
            except OSError:
                raise BrokenStreamError from None
        await self._yield(len(data))

    def send_eof(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            raise BrokenStreamError from None

    def close(self) -> None:
        """Idempotent; whoever waits on it is told."""
        if self.sock.fileno() >= 0:
            anyio.notify_closing(self.sock)
            self.sock.close()

    async def _yield(self, size_bytes: int) -> None:
        self._unyielded += CALL_COST_BYTES + size_bytes
        if self._unyielded >= YIELD_BYTES:
            self._unyielded = 0
            await anyio.lowlevel.cancel_shielded_checkpoint()

    async def _wait_writable(self) -> None:
        with anyio.move_on_after(self.patience_s):
            await self._wait(anyio.wait_writable)
            return
        raise BrokenStreamError

    async def _wait(self, until: Callable[[socket.socket], Awaitable[None]]) -> None:
        self._unyielded = 0
        try:
            await until(self.sock)
        except (anyio.ClosedResourceError, ValueError):
            raise BrokenStreamError from None


def connect(path: Path) -> SocketStream:
    """To a listening socket, by a path of any length. Raises OSError where nobody listens or the queue is full."""
    return SocketStream(unixpath.connect_now(path))
