"""One TCP connection to the guest's own loopback, passed through as raw bytes; half-close is passed on."""

from __future__ import annotations

import select
import socket

from guestd import protocol
from guestd.process import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_BUFFER_BYTES: Final = 64 << 10     # held at most, each way
_LOOPBACK: Final = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


def dial(port: int, sock: socket.socket, received: bytes) -> None:
    """Serves `dial`; `received` came right behind the request."""
    server = _connect(port)
    try:
        sock.sendall(protocol.encode_ok())
        _relay(_Way(sock, server, received), _Way(server, sock, b""))
    finally:
        server.close()


def _connect(port: int) -> socket.socket:
    for family, address in _LOOPBACK:
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            server.connect((address, port))
        except OSError:
            server.close()
        else:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return server
    raise Refused("not_found", f"nothing listens on port {port}")


class _Way:
    """One direction: what was read and not yet written."""

    __slots__ = ("done", "ended", "source", "target", "waiting")

    def __init__(self, source: socket.socket, target: socket.socket, waiting: bytes) -> None:
        source.setblocking(False)
        self.source = source
        self.target = target
        self.waiting = memoryview(waiting)
        self.ended = False
        self.done = False

    def step(self, readable: bool) -> None:
        if readable and not self.waiting and not self.ended:
            try:
                data = self.source.recv(_BUFFER_BYTES)
            except BlockingIOError:
                return
            self.ended = not data
            self.waiting = memoryview(data)
        try:
            while self.waiting:
                self.waiting = self.waiting[self.target.send(self.waiting):]
        except BlockingIOError:
            return
        if self.ended and not self.done:
            self.done = True
            self.target.shutdown(socket.SHUT_WR)


def _relay(out: _Way, back: _Way) -> None:
    """Until both directions have ended. A reset of either end ends both, and so does the host's leaving."""
    ways = (out, back)
    host = out.source.fileno()
    try:
        while not (out.done and back.done):
            masks = {out.source.fileno(): 0, back.source.fileno(): 0}
            for way in ways:
                if way.waiting:
                    masks[way.target.fileno()] |= select.POLLOUT
                elif not way.ended:
                    masks[way.source.fileno()] |= select.POLLIN
            poll = select.poll()
            for fd, mask in masks.items():
                if mask or fd == host:
                    poll.register(fd, mask)
            events = dict(poll.poll())
            if out.done and events.get(host, 0) & (select.POLLHUP | select.POLLERR):
                return
            for way in ways:
                way.step(bool(events.get(way.source.fileno(), 0) & ~select.POLLOUT))
    except OSError:
        return
