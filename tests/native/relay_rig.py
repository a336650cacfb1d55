"""A relay between sockets of the test: who dials is the guest, who is dialled the upstream."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from native.relay import FREE, Accepted, Closed, Data, Direction, Event, Limits, Opened, Relay

UP, DOWN = Direction.UP, Direction.DOWN
SANDBOX = 7
E = TypeVar("E")


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def receive(sock: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes, or what came before the end."""
    parts = []
    while count > 0 and (part := sock.recv(min(count, 1 << 20))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def receive_all(sock: socket.socket) -> bytes:
    return receive(sock, 1 << 40)


def is_reset(sock: socket.socket) -> bool:
    """Whether the other end has reset, or does so before the socket's timeout."""
    try:
        return not sock.recv(1) and False
    except ConnectionResetError:
        return True


class Rig:
    def __init__(self, limits: Limits | None = None, threads: int = 1, max_pairs: int = 4096) -> None:
        self.gate = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.origin = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.origin.settimeout(10)
        self.relay = Relay(threads, max_pairs)
        self.seen: list[Event] = []
        self._waiting: list[Event] = []
        self._sockets = [self.gate, self.origin]
        self.relay.listen(SANDBOX, self.gate.fileno(), limits or Limits())

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.relay.stop()
        for sock in self._sockets:
            sock.close()

    @property
    def upstream(self) -> tuple[str, int]:
        address: tuple[str, int] = self.origin.getsockname()
        return address

    def dial(self) -> socket.socket:
        guest = socket.create_connection(self.gate.getsockname(), timeout=10)
        guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets.append(guest)
        return guest

    def turned_away(self) -> bool:
        """A connection that is accepted and reset at once, which may show before the dialling is over."""
        try:
            return is_reset(self.dial())
        except ConnectionResetError:
            return True

    def accept(self) -> socket.socket:
        upstream, _ = self.origin.accept()
        upstream.settimeout(10)
        self._sockets.append(upstream)
        return upstream

    def take(self, timeout_s: float) -> None:
        ready, _, _ = select.select([self.relay.fd], [], [], timeout_s)
        if ready:
            batch = self.relay.take()
            self.seen += batch
            self._waiting += batch

    def wait(self, kind: type[E], timeout_s: float = 10, where: Callable[[E], bool] = lambda _: True) -> E:
        """The next event of this kind, in order of arrival; those of other kinds stay to be waited for."""
        end = time.monotonic() + timeout_s
        while True:
            for index, event in enumerate(self._waiting):
                if isinstance(event, kind) and where(event):
                    del self._waiting[index]
                    return event
            if time.monotonic() >= end:
                raise AssertionError(f"no {kind.__name__}; waiting: {self._waiting}")
            self.take(end - time.monotonic())

    def nothing(self, timeout_s: float = 0.2) -> list[Event]:
        """What came although nothing should have."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            self.take(left)
        return self._waiting

    def pair(self) -> tuple[socket.socket, int]:
        """Connected to the relay, and its Accepted is taken."""
        guest = self.dial()
        return guest, self.wait(Accepted).pair

    def joined(
        self, first: bytes = b"", up: int = FREE, down: int = FREE
    ) -> tuple[socket.socket, socket.socket, int]:
        """A guest, its upstream and the pair between them."""
        guest, pair = self.pair()
        self.relay.open(pair, [self.upstream], first, up, down)
        upstream = self.accept()
        self.wait(Opened)
        return guest, upstream, pair

    def data(self, pair: int, direction: Direction = UP) -> bytes:
        return self.wait(Data, where=lambda event: (event.pair, event.direction) == (pair, direction)).data

    def closed(self, pair: int, timeout_s: float = 10) -> Closed:
        return self.wait(Closed, timeout_s, lambda event: event.pair == pair)
