"""HTTP/1.1 on the daemon's unix socket: connections, the request guard, bodies that stream both ways.

In: bytes of any local process that got through to the socket; it is the owner's (or root's) by SO_PEERCRED,
and still may be a browser's page or a confused program, so every request passes the guard. Out: requests for
`api.handle`, one at a time per connection. A client that goes away while its request is worked on cancels it.
Nothing is read ahead of what a handler asks for but 64 KiB, so a slow side holds the other back.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import select
import socket
import struct
from collections.abc import Iterable

import anyio
import anyio.abc
import h11

from sandboxd import api, wire
from sandboxd.errors import (
    ApiError,
    BodyTooLarge,
    ForbiddenOrigin,
    InvalidRequest,
    MediaTypeRefused,
    NotFound,
    SandboxError,
    Unavailable,
)  # fmt: skip
from sandboxd.guest import Source
from sandboxd.routes import table
from sandboxd.routes.reply import ClientGone, Reply, Request, Switch
from sandboxd.service import Service
from sandboxd.unixstream import BrokenStreamError, UnixStream

HEADER_S = 10.0
IDLE_S = 60.0
"""Between the requests of a connection that is kept."""
HEADER_BYTES = 32 << 10
AHEAD_BYTES = 64 << 10
LINGER_S = 2.0
LINGER_BYTES = 8 << 20
HANGUP_CHECK_S = 0.25
MAX_CONNECTIONS = 512
GRACE_S = 10.0

_PEERCRED = struct.Struct("3i")
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?\Z")
_ORIGIN = re.compile(r"https?://(?P<host>[^/?#@\s]+)\Z")
_ALWAYS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]

log = logging.getLogger("sandboxd")


class Server:
    """Serves one listening socket. `run` until cancelled; `stop` lets running requests end first."""

    def __init__(self, service: Service, allowed_hosts: frozenset[str] = frozenset()) -> None:
        self.service, self.allowed_hosts = service, allowed_hosts
        self._clients: set[Client] = set()
        self._accepting: anyio.CancelScope | None = None
        self._quiet = anyio.Event()

    async def run(self, listener: socket.socket) -> None:
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as self._accepting:
                await self._accept(listener, tasks)

    async def stop(self) -> None:
        """No new connection; requests in work get a moment, streams that only follow are cut."""
        if self._accepting is not None:
            self._accepting.cancel()
        with anyio.move_on_after(GRACE_S):
            while any(client.busy for client in self._clients):
                self._quiet = anyio.Event()
                await self._quiet.wait()
        for client in self._clients:
            client.scope.cancel()

    async def _accept(self, listener: socket.socket, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            await anyio.wait_readable(listener)
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                continue
            except OSError as fault:
                log.error("a connection could not be accepted: %s", fault.strerror)
                await anyio.sleep(0.1)
                continue
            tasks.start_soon(self._client, sock)

    async def _client(self, sock: socket.socket) -> None:
        client = Client(self, UnixStream(sock))
        self._clients.add(client)
        try:
            with client.scope:
                await self._serve(client, sock)
        except Exception:
            log.exception("a connection failed")
        finally:
            self._clients.discard(client)
            self._quiet.set()
            client.close()

    async def _serve(self, client: Client, sock: socket.socket) -> None:
        try:
            if may_connect(sock):
                if len(self._clients) > MAX_CONNECTIONS:
                    await client.reply(api.failure(Unavailable("too many connections")), last=True)
                else:
                    await client.serve()
        except* ClientGone:
            pass

    def settled(self) -> None:
        """A request was answered."""
        self._quiet.set()


def may_connect(sock: socket.socket) -> bool:
    """The peer is this daemon's user or root (unix(7), SO_PEERCRED)."""
    _, uid, _ = _PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
    return uid in (0, os.geteuid())


class Client:
    """One connection and its requests."""

    def __init__(self, server: Server, stream: UnixStream) -> None:
        self.scope = anyio.CancelScope()
        self.busy = False
        self._server, self._stream = server, stream
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES)
        self._ahead = b""

    async def serve(self) -> None:
        kept = False
        while (event := await self._request(kept)) is not None:
            self.busy = True
            again = await self._one(event)
            self.busy = False
            self._server.settled()
            if not again:
                return
            kept = True

    async def _request(self, kept: bool) -> h11.Request | None:
        """The next request's head; None when there is none, or too late, or it is not HTTP."""
        if kept and not self._http.trailing_data[0]:
            data = b""
            with anyio.move_on_after(IDLE_S):
                data = await self.read()
            self._http.receive_data(data)
            if not data:
                return None
        try:
            with anyio.move_on_after(HEADER_S):
                event = await self.event()
                return event if isinstance(event, h11.Request) else None
        except h11.RemoteProtocolError as fault:
            await self._refuse(fault)
        return None

    async def _one(self, event: h11.Request) -> bool:
        """True when the connection is good for another request."""
        body = ClientBody(self, event)
        again = False
        try:
            request = admit(event, body, self._server.allowed_hosts)
        except ApiError as fault:
            await body.give_up()
            return await self.reply(api.failure(fault), last=not body.ended.is_set())
        switch: Switch | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, body, tasks.cancel_scope)
            await body.begin()
            answer = await api.handle(self._server.service, request)
            if isinstance(answer, Switch):
                switch = answer
            else:
                await body.give_up()
                again = await self._answer(answer, last=not body.ended.is_set())
            tasks.cancel_scope.cancel()
        # Nobody watches any more: from here on this task alone reads.
        if switch is not None:
            await self._switch(switch)
        elif not again:
            await self._linger()
        return again

    async def reply(self, reply: Reply, last: bool) -> bool:
        """Sends it; True when the connection may be kept."""
        again = await self._answer(reply, last)
        if not again:
            await self._linger()
        return again

    async def _answer(self, reply: Reply, last: bool) -> bool:
        headers = [*_ALWAYS, *reply.headers]
        if reply.status != 204:
            headers.append((b"content-type", reply.media_type))
        length = len(reply.body) if isinstance(reply.body, bytes) else reply.length
        if length is not None and reply.status != 204:
            headers.append((b"content-length", b"%d" % length))
        if last:
            headers.append((b"connection", b"close"))
        head = self._http.send(h11.Response(status_code=reply.status, headers=headers)) or b""
        if isinstance(reply.body, bytes):
            head += self._http.send(h11.Data(data=reply.body)) or b""
            await self.write(head + (self._http.send(h11.EndOfMessage()) or b""))
        else:
            self.busy = self.busy and reply.length is not None
            await self._stream_out(head, reply.body)
        if last or self._http.our_state is h11.MUST_CLOSE:
            return False
        self._http.start_next_cycle()
        return True

    async def _stream_out(self, head: bytes, source: Source) -> None:
        try:
            await self.write(head)
            while data := await source.receive():
                await self.write(self._http.send(h11.Data(data=data)) or b"")
            await self.write(self._http.send(h11.EndOfMessage()) or b"")
        except (SandboxError, h11.LocalProtocolError) as fault:
            # The head is out: all that is left to say is that the body is not whole.
            log.warning("an answer broke off: %s", fault)
            raise ClientGone from None
        finally:
            with anyio.CancelScope(shield=True):
                await source.aclose()

    async def _switch(self, switch: Switch) -> None:
        """The talk gets the connection in any case: it holds what has to be let go."""
        self.busy = False
        headers = [(b"connection", b"Upgrade"), (b"upgrade", switch.protocol)]
        head = self._http.send(h11.InformationalResponse(status_code=101, headers=headers)) or b""
        self._ahead = self._http.trailing_data[0] + self._ahead
        try:
            await self.write(head)
        except ClientGone:
            log.debug("a client left before it was attached")
        try:
            await switch.talk(self)
            await self._linger()
        except* (ClientGone, SandboxError):
            pass

    async def _refuse(self, fault: h11.RemoteProtocolError) -> None:
        """Bytes that are no request."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reply = api.failure(InvalidRequest(f"not an HTTP request: {fault}"))
            status = fault.error_status_hint
            await self.reply(Reply(status, reply.body, headers=reply.headers), last=True)

    async def _watch(self, body: ClientBody, scope: anyio.CancelScope) -> None:
        """Cancels the request when its client goes away; what a client sends ahead is kept for later."""
        await body.ended.wait()
        while len(self._ahead) < AHEAD_BYTES:
            data = await self._receive()
            if not data:
                await self.hung_up()
                scope.cancel()
                return
            self._ahead += data

    async def _linger(self) -> None:
        """Closing with unread bytes would take the answer from a client that is still sending."""
        with anyio.move_on_after(LINGER_S):
            try:
                self._stream.send_eof()
                left = LINGER_BYTES
                while left > 0 and (data := await self.read()):
                    left -= len(data)
            except (ClientGone, BrokenStreamError):
                return

    async def event(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Event) or event is h11.PAUSED:
                return event
            if self._http.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                await self.write(self._http.send(go_on) or b"")
            self._http.receive_data(await self.read())

    @property
    def waits_for_continue(self) -> bool:
        return self._http.they_are_waiting_for_100_continue

    # -- bytes; also the duplex of an upgraded connection

    async def read(self) -> bytes:
        """What came next; `b""` at the end of the client's direction."""
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        return await self._receive()

    receive = read

    async def write(self, data: bytes) -> None:
        if data:
            try:
                await self._stream.send(data)
            except BrokenStreamError:
                raise ClientGone from None

    send = write

    def close(self) -> None:
        self._stream.close()

    async def hung_up(self) -> None:
        """A client that only ended its own direction is still there: poll(2) tells the two apart by POLLHUP,
        which no event loop waits for once the end of the stream has been read."""
        poller = select.poll()
        poller.register(self._stream.sock, 0)
        while not poller.poll(0):  # noqa: ASYNC110
            await anyio.sleep(HANGUP_CHECK_S)

    async def _receive(self) -> bytes:
        try:
            return await self._stream.receive(AHEAD_BYTES)
        except BrokenStreamError:
            raise ClientGone from None


class ClientBody:
    """A request's body, pulled from its connection and held to the route's limit."""

    def __init__(self, client: Client, event: h11.Request) -> None:
        self.ended = anyio.Event()
        self.declared: int | None = 0
        self.cap = wire.JSON_CAP
        self.json = True
        self._client = client
        self._taken = 0
        for name, value in event.headers:
            if name == b"content-length":
                self.declared = int(value)
        # It is what h11 goes by where both stand.
        if any(name == b"transfer-encoding" for name, _ in event.headers):
            self.declared = None

    async def begin(self) -> None:
        """An absent body has ended before anybody asks."""
        if self.declared == 0:
            await self.receive()

    async def receive(self) -> bytes:
        if self.ended.is_set():
            return b""
        try:
            event = await self._client.event()
        except h11.RemoteProtocolError:
            raise ClientGone from None
        if isinstance(event, h11.Data):
            self._taken += len(event.data)
            if self._taken > self.cap:
                raise self.too_large()
            return bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise ClientGone
        self.ended.set()
        return b""

    async def give_up(self) -> None:
        """Takes a small rest that is surely on its way, so that the connection can be kept."""
        small = self.declared is not None and self.declared - self._taken <= AHEAD_BYTES
        if small and not self._client.waits_for_continue:
            with anyio.move_on_after(LINGER_S):
                try:
                    while await self.receive():
                        pass
                except BodyTooLarge:
                    return

    def too_large(self) -> SandboxError:
        if self.json:
            return InvalidRequest(f"the body is larger than {self.cap >> 20} MiB")
        return BodyTooLarge(f"the body is larger than {self.cap >> 20} MiB")

    async def aclose(self) -> None:
        """It ends with its request."""


def admit(event: h11.Request, body: ClientBody, allowed_hosts: frozenset[str]) -> Request:
    """The request guard, in the order of API §1.1, and the route."""
    target = event.target.decode("latin-1")
    headers = dict(event.headers)
    check_origin(target, list(event.headers), allowed_hosts)
    path, _, query = target.partition("?")
    found = table.match(event.method.decode("latin-1"), path)
    if found is None:
        raise NotFound("no such endpoint")
    route, segments = found
    if body.declared != 0:
        given = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
        if given != route.body.media_type:
            raise MediaTypeRefused(f"the body must be {route.body.media_type}")
    body.cap, body.json = route.body.cap, route.body is table.Body.JSON
    if body.declared is not None and body.declared > body.cap:
        raise body.too_large()
    return Request(route, segments, table.query(query), headers, body)


def check_origin(target: str, headers: Iterable[tuple[bytes, bytes]], allowed_hosts: frozenset[str]) -> None:
    """Steps 1 and 2. A page that had its name rebound to this machine has a foreign Host; another has an
    Origin."""
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
    if not target.startswith("/") or len(hosts) != 1 or not is_local(hosts[0], allowed_hosts):
        raise ForbiddenOrigin("the request is not addressed to this server")
    for origin in origins:
        parts = _ORIGIN.match(origin)
        if parts is None or parts["host"].lower() != hosts[0].lower():
            raise ForbiddenOrigin("requests of other origins are refused")


def is_local(host: str, allowed_hosts: frozenset[str]) -> bool:
    """Whether a Host header names this machine, or a name the operator allowed."""
    parts = _HOST.match(host)
    if parts is None:
        return False
    name = (parts["v6"] or parts["name"]).lower()
    if name == "localhost" or name in allowed_hosts:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
