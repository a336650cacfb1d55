"""The daemon's listening sockets: who may connect, TLS, how many at once, and an orderly end.

In: connections of any local process and, over TCP, of anybody. Out: a `Connection` each, in a task of its own. A unix
socket's peer is the daemon's user or root by SO_PEERCRED; a TCP peer is nobody until its token was seen.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import struct
import time
from collections.abc import Iterable

import anyio
import anyio.abc

from sandboxd import tlsstream
from sandboxd.address import Peer, TcpPeer, UnixPeer
from sandboxd.connection import Connection, Shared
from sandboxd.credentials import Credentials
from sandboxd.errors import Unavailable
from sandboxd.http1 import Http1
from sandboxd.limits import Limits
from sandboxd.listening import Listener
from sandboxd.occupancy import Full, Occupancy
from sandboxd.routes.reply import ClientGone
from sandboxd.service import Service
from sandboxd.socketstream import BrokenStreamError, SocketStream
from sandboxd.tlsstream import HandshakeError

SAID_S = 60.0
SAID_ABOUT = 1024
KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""A peer that vanished, or closed after it had ended its direction, is noticed in one to two minutes."""

_PEERCRED = struct.Struct("3i")

log = logging.getLogger("sandboxd")


class Server:
    """Serves listening sockets. `run` until cancelled; `stop` lets running requests end first."""

    def __init__(
        self, service: Service, credentials: Credentials, allowed_hosts: frozenset[str], limits: Limits
    ) -> None:
        self._limits, self._credentials = limits, credentials
        self._occupancy: Occupancy[Connection] = Occupancy(limits)
        self._shared = Shared(service, credentials, allowed_hosts, limits, self._occupancy)
        self._connections: set[Connection] = set()
        self._refused = 0
        self._accepting: anyio.CancelScope | None = None
        self._quiet = anyio.Event()
        self._said = Said()

    async def run(self, listeners: Iterable[Listener]) -> None:
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as self._accepting:
                async with anyio.create_task_group() as accepting:
                    for listener in listeners:
                        accepting.start_soon(self._accept, listener.socket, tasks)

    async def stop(self) -> None:
        """No new connection; requests in work get a moment, streams that only follow are cut."""
        if self._accepting is not None:
            self._accepting.cancel()
        with anyio.move_on_after(self._limits.grace_s):
            while any(connection.busy for connection in self._connections):
                self._quiet = anyio.Event()
                await self._quiet.wait()
        for connection in self._connections:
            connection.scope.cancel()

    async def _accept(self, listener: socket.socket, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            await anyio.wait_readable(listener)
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as fault:
                # Out of descriptors, for one: the queue keeps what waits.
                if self._said.may("accept"):
                    log.error("a connection could not be accepted: %s", fault.strerror)
                await anyio.sleep(0.1)
                continue
            self._admit(sock, tasks)

    def _admit(self, sock: socket.socket, tasks: anyio.abc.TaskGroup) -> None:
        """A task for it where there is room. Who has to go for it is told so by the end of its connection."""
        try:
            peer = peer_of(sock)
        except OSError:
            sock.close()        # gone before it was looked at
            return
        if isinstance(peer, UnixPeer) and peer.uid not in (0, os.geteuid()):
            sock.close()
            return
        connection = Connection(self._shared, self._settled)
        try:
            evicted = self._occupancy.enter(connection, peer)
        except Full as fault:
            self._refuse(connection, sock, peer, str(fault), tasks)
            return
        if evicted is not None:
            evicted.scope.cancel()
        self._connections.add(connection)
        tasks.start_soon(self._serve, connection, sock, peer)

    def _refuse(
        self, connection: Connection, sock: socket.socket, peer: Peer, why: str, tasks: anyio.abc.TaskGroup
    ) -> None:
        if self._refused >= self._limits.lingering:
            sock.close()
            return
        self._refused += 1

        async def tell() -> None:
            http = Http1(SocketStream(sock), peer, self._limits)
            try:
                with anyio.move_on_after(self._limits.linger_s):
                    await connection.refuse(http, Unavailable(why))
            except ClientGone:
                return
            finally:
                self._refused -= 1
                http.close()

        tasks.start_soon(tell)

    async def _serve(self, connection: Connection, sock: socket.socket, peer: Peer) -> None:
        stream: SocketStream | None = None
        try:
            with connection.scope:
                stream = await self._open(sock, peer)
                if stream is not None:
                    await _until_gone(connection, Http1(stream, peer, self._limits))
        except Exception:
            log.exception("a connection failed")
        finally:
            self._occupancy.leave(connection)
            self._connections.discard(connection)
            self._settled()
            if stream is not None:
                stream.close()

    async def _open(self, sock: socket.socket, peer: Peer) -> SocketStream | None:
        """The stream, behind TLS where it is asked for; None where the handshake failed, and all is closed."""
        if isinstance(peer, UnixPeer):
            return SocketStream(sock)
        for option, value in KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = self._credentials.tls
        return SocketStream(sock) if context is None else await self._handshake(sock, context, peer)

    async def _handshake(self, sock: socket.socket, context: ssl.SSLContext, peer: TcpPeer) -> SocketStream | None:
        stream: tlsstream.TlsStream | None = None
        try:
            stream = tlsstream.wrap(sock, context)
            with anyio.move_on_after(self._limits.handshake_s):
                await stream.handshake()
                done, stream = stream, None
                return done
            why = f"not done within {self._limits.handshake_s:.0f} s"
        except BrokenStreamError:
            why = "cut off"
        except HandshakeError as fault:
            why = str(fault)
        finally:
            if stream is not None:
                stream.close()
        if self._said.may(peer.network):
            log.warning("no TLS with %s: %s", peer.host, why)
        return None

    def _settled(self) -> None:
        """A request was answered, or a connection ended."""
        self._quiet.set()


async def _until_gone(connection: Connection, http: Http1) -> None:
    try:
        await connection.serve(http)
    except* ClientGone:
        pass


def peer_of(sock: socket.socket) -> Peer:
    """Who is connected (unix(7), SO_PEERCRED), or from where. Raises OSError where it is gone."""
    if sock.family == socket.AF_UNIX:
        _, uid, _ = _PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
        return UnixPeer(uid)
    return TcpPeer(sock.getpeername()[0])


class Said:
    """What may be said again: a subject once a minute, and of only so many subjects."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def may(self, subject: str) -> bool:
        now = time.monotonic()
        self._last = {one: at for one, at in self._last.items() if now - at < SAID_S}
        if subject in self._last or len(self._last) >= SAID_ABOUT:
            return False
        self._last[subject] = now
        return True
