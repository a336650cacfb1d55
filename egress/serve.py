"""egress's end of the control socket: the daemon's verbs to the proxy, decisions to the daemon.

In: connections of root or of who started this process, one at a time: a new one takes the place of the old. Out: an
answer for every request, in the order they are done, and events. What the daemon does not read waits here, within
bounds: events in their queue, answers up to a limit beyond which the connection is given up.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from egress import control
from egress.control import Fault, Frame, Inbox, Unacked
from egress.ledger import Ledger
from egress.log import Log
from egress.loop import IN, OUT, Loop
from egress.policy import Policy
from egress.proxy import Proxy
from native.relay import Limits

WAITING_BYTES: Final = 4 * control.FRAME_LIMIT
EVENTS_BYTES: Final = 1 << 18  # more than this unread, and events wait in their queue
READS: Final = 64  # of a wake-up
_FDS: Final = {"add": 4, "resolver": 1}
_PEER = struct.Struct("=3i")

Answer = dict[str, object]


class _Peer:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.inbox = Inbox()
        self.unsent = bytearray()
        self.told = 0  # the last event that was put into `unsent`
        self.waits_to_write = False


class Service:
    """`replace_resolver` takes a connected socket over."""

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        uids: frozenset[int],
        build: str,
        proxy: Proxy,
        ledger: Ledger,
        replace_resolver: Callable[[socket.socket], None],
        log: Log,
    ) -> None:
        self._log = log
        self._loop, self._listener, self._uids, self._build = loop, listener, uids, build
        self._proxy, self._ledger, self._replace_resolver = proxy, ledger, replace_resolver
        self._peer: _Peer | None = None
        self._events = Unacked()
        listener.setblocking(False)
        loop.watch(listener.fileno(), self._accept)

    @property
    def connected(self) -> bool:
        return self._peer is not None

    def tell(self, at: float) -> None:
        """Passes on what the ledger has due."""
        for event in self._ledger.due(at):
            self._keep(event)
        if self._peer is not None:
            self._fill(self._peer)

    def _keep(self, event: control.Event) -> None:
        self._events.add(event)
        if event.kind == control.DENIED and event.connections == 0:
            what = f"{event.name or '(no name)'}:{event.port}"
            self._log.line(
                f"{event.id} {event.sandbox} refused {what!r} {event.rule} by {event.by or '-'} count {event.count}"
            )

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid not in self._uids:
            connection.close()
            return
        self._drop()
        connection.setblocking(False)
        self._peer = _Peer(connection)
        self._loop.watch(connection.fileno(), partial(self._ready, self._peer))
        self._fill(self._peer)

    def _drop(self) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            self._loop.forget(peer.connection.fileno())
            peer.inbox.close()
            peer.connection.close()

    def _ready(self, peer: _Peer) -> None:
        self._write(peer)
        for _ in range(READS):
            if peer is not self._peer:
                return
            try:
                frames = peer.inbox.read(peer.connection)
            except BlockingIOError:
                break
            except (EOFError, OSError, Fault):
                self._drop()
                return
            for frame in frames:
                self._serve(peer, frame)
        self._fill(peer)

    def _serve(self, peer: _Peer, frame: Frame) -> None:
        body, fds = frame.body, list(frame.fds)
        seq, do = body.get("seq"), body.get("do")
        answer = partial(self._answer, peer, seq)
        try:
            if len(fds) != _FDS.get(str(do), 0):
                raise ValueError("not the descriptors that belong to it")
            match do:
                case "hello":
                    answer(self._hello())
                case "add":
                    limits = Limits(**_limits(body.get("limits", {})))
                    policy = Policy.from_json(body.get("policy"))
                    if not all(stat.S_ISSOCK(os.fstat(fd).st_mode) for fd in fds[:3]):
                        raise ValueError("not the descriptors that belong to it")
                    taken, fds = fds, []
                    self._proxy.add(_id(body), policy, limits, taken)
                    answer({})
                case "update":
                    self._proxy.update(_id(body), Policy.from_json(body.get("policy")))
                    answer({})
                case "remove":
                    self._proxy.remove(_id(body), partial(self._removed, _id(body), answer))
                case "report":
                    answer({"names": self._proxy.report(_id(body))})
                case "resolver":
                    resolver = socket.socket(fileno=fds.pop())
                    self._replace_resolver(resolver)
                    answer({})
                case "ack":
                    self._events.ack(_number(body), time.time())
                    answer({})
                case _:
                    raise ValueError("no such verb")
        except (ValueError, TypeError, OSError) as fault:
            answer({}, f"{fault}"[:500])
        finally:
            for fd in fds:
                os.close(fd)

    def _hello(self) -> Answer:
        return {
            "build": self._build,
            "pid": os.getpid(),
            "sandboxes": self._proxy.sandboxes,
            "events": self._events.last,
        }

    def _removed(self, id: str, answer: Callable[[Answer], None]) -> None:
        for event in self._ledger.removed(id):
            self._keep(event)
        answer({})

    def _answer(self, peer: _Peer, seq: object, fields: Answer, error: str = "") -> None:
        if peer is not self._peer:
            return
        peer.unsent += control.pack({"seq": seq, "error": error} if error else {"seq": seq, "ok": True, **fields})
        if len(peer.unsent) > WAITING_BYTES:
            self._drop()
        else:
            self._write(peer)

    def _fill(self, peer: _Peer) -> None:
        while len(peer.unsent) < EVENTS_BYTES and peer is self._peer:
            events = self._events.after(peer.told, 64)
            if not events:
                return
            for event in events:
                peer.unsent += control.pack({"event": event.as_json(), "number": event.number})
            peer.told = events[-1].number
            self._write(peer)

    def _write(self, peer: _Peer) -> None:
        if peer is not self._peer:
            return
        try:
            with suppress(BlockingIOError):
                while peer.unsent:
                    del peer.unsent[: peer.connection.send(peer.unsent)]
        except OSError:
            self._drop()
            return
        if peer.waits_to_write != bool(peer.unsent):
            peer.waits_to_write = bool(peer.unsent)
            self._loop.change(peer.connection.fileno(), IN | OUT if peer.waits_to_write else IN)


def _id(body: dict[str, Any]) -> str:
    id = body.get("sandbox")
    if not isinstance(id, str) or not 0 < len(id) <= 64:
        raise ValueError("sandbox: not an id")
    return id


def _number(body: dict[str, Any]) -> int:
    number = body.get("through")
    if type(number) is not int:
        raise ValueError("through: not a number")
    return number


def _limits(value: object) -> dict[str, int]:
    if not isinstance(value, dict) or not all(type(number) is int and number > 0 for number in value.values()):
        raise ValueError("limits: not an object of numbers above zero")
    return value
