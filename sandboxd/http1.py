"""HTTP/1.1 on one connection: h11 on a stream, with limits on what a client may send, and when.

In: bytes of anybody who could connect. Out: heads and body events of one request after the other, and the bytes of a
connection that was upgraded. h11 is lenient where it may be; where two readers could differ about where a request ends,
this refuses. Nothing is read ahead but 64 KiB, so a slow side holds the other back.
"""

from __future__ import annotations

import re
import select

import anyio
import h11

from sandboxd.address import Peer, TcpPeer
from sandboxd.limits import Limits
from sandboxd.routes.reply import ClientGone, Reply
from sandboxd.socketstream import BrokenStreamError, SocketStream

AHEAD_BYTES = 64 << 10
HANGUP_CHECK_S = 0.25

_ALWAYS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
_FOLDED = re.compile(rb"\n[ \t]")
_CONTINUE = h11.InformationalResponse(status_code=100, headers=[])


class Http1:
    """One reader at a time; writers take turns. `ended`: the client's direction has."""

    def __init__(self, stream: SocketStream, peer: Peer, limits: Limits) -> None:
        self.peer = peer
        self.ended = False
        self._stream, self._limits = stream, limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.header_bytes)
        self._ahead = b""
        self._bodiless = False
        self._writing = anyio.Lock(fast_acquire=True)

    # -- what comes in

    async def request(self, kept: bool) -> h11.Request | None:
        """The next request's head; None when there is none, or too late. Raises `h11.RemoteProtocolError`."""
        if kept and not self._http.trailing_data[0]:
            data = b""
            with anyio.move_on_after(self._limits.idle_s):
                data = await self.receive()
            self._http.receive_data(data)
            if not data:
                return None
        with anyio.move_on_after(self._limits.header_s):
            return await self._head()
        return None

    async def _head(self) -> h11.Request | None:
        while True:
            before = self._http.trailing_data[0]
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self.receive())
                continue
            if not isinstance(event, h11.Request):
                return None
            head = before[: len(before) - len(self._http.trailing_data[0])]
            if _FOLDED.search(head):
                raise h11.RemoteProtocolError("a header goes on in a second line")
            self._bodiless = event.method == b"HEAD"
            if len(head) > self._limits.header_bytes or len(event.headers) > self._limits.header_fields:
                raise h11.RemoteProtocolError("too many headers", error_status_hint=431)
            return event

    async def event(self) -> h11.Event | type[h11.PAUSED]:
        """The next part of a request's body. Raises `h11.RemoteProtocolError`."""
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Event) or event is h11.PAUSED:
                return event
            if self._http.they_are_waiting_for_100_continue:
                await self._send(_CONTINUE)
            self._http.receive_data(await self.receive())

    @property
    def waits_for_continue(self) -> bool:
        return self._http.they_are_waiting_for_100_continue

    async def receive(self) -> bytes:
        """What came next; `b""` at the end of the client's direction."""
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        return await self._receive()

    async def gone(self) -> None:
        """While a request is worked on: keeps what the client sends ahead, and returns once it is gone."""
        while len(self._ahead) < AHEAD_BYTES:
            data = await self._receive()
            if not data:
                break
            self._ahead += data
        else:
            # No more is taken of it, so nobody reads as far as its end.
            await self._polled(select.POLLRDHUP)
        await self._probe()
        await self.hung_up()

    async def hung_up(self) -> None:
        """A client that only ended its own direction is still there: poll(2) tells the two apart by POLLHUP,
        which no event loop waits for once the end of the stream has been read. Over TCP it is there once something
        that was sent (a keepalive, if nothing else) was answered with a reset."""
        await self._polled(0)

    async def _polled(self, events: int) -> None:
        poller = select.poll()
        poller.register(self._stream.sock, events)
        while not poller.poll(0):  # noqa: ASYNC110
            await anyio.sleep(HANGUP_CHECK_S)

    async def _probe(self) -> None:
        """Over TCP a client that left and one that only ended its direction look alike, until one sends something.
        A 100 (Continue), which a client skips wherever it stands (RFC 9110, 15.2), is something."""
        old = self._http.their_http_version is None or self._http.their_http_version < b"1.1"
        if isinstance(self.peer, TcpPeer) and not old:
            async with self._writing:
                if self._http.our_state is h11.SEND_RESPONSE:
                    await self._write(self._http.send(_CONTINUE) or b"")

    async def _receive(self) -> bytes:
        try:
            data = await self._stream.receive(AHEAD_BYTES)
        except BrokenStreamError:
            raise ClientGone from None
        self.ended = self.ended or not data
        return data

    # -- what goes out

    async def answer(self, reply: Reply, last: bool) -> bool:
        """Sends it; True when the connection may be kept."""
        headers = [*_ALWAYS, *reply.headers]
        if reply.status != 204:
            headers.append((b"content-type", reply.media_type))
        length = len(reply.body) if isinstance(reply.body, bytes) else reply.length
        if length is not None and reply.status != 204:
            headers.append((b"content-length", b"%d" % length))
        if last:
            headers.append((b"connection", b"close"))
        self._stream.patience_s = self._limits.answer_stall_s if length is not None else self._limits.stream_stall_s
        head = h11.Response(status_code=reply.status, headers=headers)
        if isinstance(reply.body, bytes):
            body = () if self._bodiless else (h11.Data(data=reply.body),)
            await self._send(head, *body, h11.EndOfMessage())
        else:
            await self._send(head)
            while data := await reply.body.receive():
                await self._send(h11.Data(data=data))
            await self._send(h11.EndOfMessage())
        if last or self._http.our_state is h11.MUST_CLOSE:
            return False
        self._http.start_next_cycle()
        return True

    async def refuse(self, reply: Reply) -> bool:
        """The answer to what was no request; False where an answer cannot be told from what was sent before."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return False
        await self.answer(reply, last=True)
        return True

    async def upgrade(self, protocol: bytes) -> None:
        """From here on the bytes are `protocol`'s, those that came right behind the request included."""
        headers = [(b"connection", b"Upgrade"), (b"upgrade", protocol)]
        self._stream.patience_s = self._limits.stream_stall_s
        self._ahead = self._http.trailing_data[0] + self._ahead
        await self._send(h11.InformationalResponse(status_code=101, headers=headers))

    async def send(self, data: bytes) -> None:
        async with self._writing:
            await self._write(data)

    async def _send(self, *events: h11.Event) -> None:
        async with self._writing:
            await self._write(b"".join(self._http.send(event) or b"" for event in events))

    async def _write(self, data: bytes) -> None:
        if data:
            try:
                await self._stream.send(data)
            except BrokenStreamError:
                raise ClientGone from None

    async def linger(self) -> None:
        """Closing with unread bytes would take the answer from a client that is still sending."""
        with anyio.move_on_after(self._limits.linger_s):
            try:
                self._stream.send_eof()
                left = self._limits.linger_bytes
                while left > 0 and (data := await self.receive()):
                    left -= len(data)
            except (ClientGone, BrokenStreamError):
                return

    def close(self) -> None:
        self._stream.close()
