"""The DNS sockets of one sandbox: packets in, the question to whoever decides, its outcome back to the asker.

In: everything the guest sends to port 53, UDP and TCP. Out: answers `dns` wrote. Bounded: so many packets a wake-up,
so many connections, a deadline for each, nothing queued. An answer that the guest does not take is gone.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Final

from egress import dns
from egress.dns import Outcome, Question
from egress.loop import Loop

PACKETS: Final = 32  # a wake-up, so that one sandbox's flood leaves room for the others
SHORTEST: Final = 2 + 12 + 5  # over TCP: a length, a header, the root's name, type and class
CONNECTIONS: Final = 16
QUIET_S: Final = 10.0  # RFC 7766 §6.2.3 leaves it to the server

Done = Callable[[Outcome], None]
Decide = Callable[[Question, Done], None]


class Answers:
    """`decide` calls its second argument once, at once or later, or never."""

    def __init__(
        self, loop: Loop, udp: socket.socket, tcp: socket.socket, decide: Decide, clock: Callable[[], float]
    ) -> None:
        self._loop, self._udp, self._tcp, self._decide, self._clock = loop, udp, tcp, decide, clock
        self._streams: dict[int, _Stream] = {}
        for listening in (udp, tcp):
            listening.setblocking(False)
        loop.watch(udp.fileno(), self._datagrams)
        loop.watch(tcp.fileno(), self._accept)

    def close(self) -> None:
        for stream in list(self._streams.values()):
            self._drop(stream)
        for listening in (self._udp, self._tcp):
            self._loop.forget(listening.fileno())
            listening.close()

    def expire(self, now: float) -> None:
        for stream in [stream for stream in self._streams.values() if now - stream.at >= QUIET_S]:
            self._drop(stream)

    def _datagrams(self) -> None:
        for _ in range(PACKETS):
            try:
                packet, asker = self._udp.recvfrom(dns.LONGEST_QUERY + 1)
            except OSError:  # none left, or an ICMP error of an earlier answer
                return
            match dns.read(packet):
                case Question() as question:
                    self._decide(question, partial(self._reply, asker, question))
                case dns.Reply(data):
                    self._send(asker, data)

    def _reply(self, asker: object, question: Question, outcome: Outcome) -> None:
        self._send(asker, dns.write(question, outcome))

    def _send(self, asker: object, data: bytes) -> None:
        try:
            self._udp.sendto(data, asker)  # type: ignore[call-overload]  # as recvfrom gave it
        except OSError:
            return  # the guest asks again

    def _accept(self) -> None:
        for _ in range(PACKETS):
            try:
                connection, _ = self._tcp.accept()
            except OSError:
                return
            connection.setblocking(False)
            if len(self._streams) >= CONNECTIONS:
                self._drop(min(self._streams.values(), key=lambda stream: stream.at))
            stream = _Stream(connection, self._clock())
            self._streams[connection.fileno()] = stream
            self._loop.watch(connection.fileno(), partial(self._receive, stream))

    def _receive(self, stream: _Stream) -> None:
        try:
            data = stream.connection.recv(PACKETS * SHORTEST)  # what is left wakes us again
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(stream)
            return
        for packet in stream.framer.feed(data):
            stream.at = self._clock()
            match dns.read(packet):
                case Question() as question:
                    self._decide(question, partial(self._reply_stream, stream, question))
                case dns.Reply(reply):
                    self._write(stream, reply)
        if stream.framer.broken:
            self._drop(stream)

    def _reply_stream(self, stream: _Stream, question: Question, outcome: Outcome) -> None:
        self._write(stream, dns.write(question, outcome))

    def _write(self, stream: _Stream, packet: bytes) -> None:
        if not stream.open:
            return
        data = dns.framed(packet)
        try:
            whole = stream.connection.send(data) == len(data)
        except OSError:
            whole = False
        if not whole:  # who does not read his answers does not get any
            self._drop(stream)

    def _drop(self, stream: _Stream) -> None:
        if stream.open:
            stream.open = False
            fd = stream.connection.fileno()
            del self._streams[fd]
            self._loop.forget(fd)
            stream.connection.close()


class _Stream:
    __slots__ = ("at", "connection", "framer", "open")

    def __init__(self, connection: socket.socket, at: float) -> None:
        self.connection, self.at, self.framer, self.open = connection, at, dns.Framer(), True
