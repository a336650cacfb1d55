"""One connection and its requests, one at a time: the guard, the handler, the answer.

In: a stream that may be anybody's. Out: requests for `api.handle` that have passed the guard. A client that goes away
while its request is worked on cancels it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import anyio
import h11

from sandboxd import api, guard
from sandboxd.credentials import Credentials
from sandboxd.errors import ApiError, InvalidRequest, SandboxError, Unauthorized, Unavailable
from sandboxd.http1 import AHEAD_BYTES, Http1
from sandboxd.limits import Limits
from sandboxd.occupancy import Full, Occupancy
from sandboxd.routes import table
from sandboxd.routes.reply import ClientGone, Reply, Request, Switch
from sandboxd.service import Service

IMMEDIATE = frozenset({"health", "capabilities", "list", "get", "processes", "process"})
"""Routes that are answered from memory: nobody need watch for their clients to leave meanwhile."""

log = logging.getLogger("sandboxd")


@dataclass(frozen=True, slots=True)
class Shared:
    """What all connections have in common."""

    service: Service
    credentials: Credentials
    allowed_hosts: frozenset[str]
    limits: Limits
    occupancy: Occupancy[Connection]


class Connection:
    """`busy` while a request is worked on that a stop should wait for; `settled` is called after each."""

    def __init__(self, shared: Shared, settled: Callable[[], None]) -> None:
        self.scope = anyio.CancelScope()
        self.busy = False
        self._shared, self._settled = shared, settled

    async def serve(self, http: Http1) -> None:
        """Until the client goes, or has to."""
        again, kept = True, False
        while again:
            try:
                event = await http.request(kept)
            except h11.RemoteProtocolError as fault:
                reply = api.failure(InvalidRequest(f"not an HTTP request: {fault}"))
                if await http.refuse(Reply(fault.error_status_hint, reply.body)):
                    await http.linger()
                return
            if event is None:
                return
            self.busy = True
            again = await self._one(http, event)
            self.busy = False
            self._settled()
            kept = True

    async def refuse(self, http: Http1, fault: ApiError) -> None:
        """Before anything was read."""
        await http.answer(api.failure(fault), last=True)
        await http.linger()

    async def _one(self, http: Http1, event: h11.Request) -> bool:
        """True when the connection is good for another request."""
        body = Body(http, self, self._shared)
        try:
            request = self._admit(http, event, body)
        except ApiError as fault:
            await body.give_up()
            # Who does not know the token does not get to keep a connection, either.
            last = isinstance(fault, Unauthorized | Unavailable) or not body.ended.is_set()
            again = await http.answer(api.failure(fault), last)
            if not again:
                await http.linger()
            return again
        if request.route.name in IMMEDIATE and body.declared == 0:
            await body.begin()
            reply = await api.handle(self._shared.service, request)
            assert isinstance(reply, Reply)
            return await http.answer(reply, last=False)
        again, switch = False, None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, http, body, tasks.cancel_scope)
                await body.begin()
                answer = await api.handle(self._shared.service, request)
                if isinstance(answer, Switch):
                    switch = answer
                else:
                    await body.give_up()
                    again = await self._answer(http, answer, last=not body.ended.is_set())
                tasks.cancel_scope.cancel()
        finally:
            body.let_go()
        # Nobody watches any more: from here on this task alone reads.
        if switch is not None:
            await self._switch(http, switch)
        elif not again:
            await http.linger()
        return again

    def _admit(self, http: Http1, event: h11.Request, body: Body) -> Request:
        headers = list(event.headers)
        body.declared = guard.body_length(event.http_version, headers)
        admitted = guard.admit(
            event.method.decode("latin-1"), event.target.decode("latin-1"), headers, body.declared,
            self._shared.allowed_hosts, self._shared.credentials.tokens,
        )  # fmt: skip
        if admitted.token is not None:
            try:
                self._shared.occupancy.know(self, admitted.token)
            except Full as fault:
                raise Unavailable(str(fault)) from None
        body.kind = admitted.route.body
        return Request(admitted.route, admitted.path, admitted.query, admitted.headers, body, http.peer)

    async def _watch(self, http: Http1, body: Body, scope: anyio.CancelScope) -> None:
        """Cancels the request when its client goes away."""
        await body.ended.wait()
        await http.gone()
        scope.cancel()

    async def _answer(self, http: Http1, reply: Reply, last: bool) -> bool:
        if isinstance(reply.body, bytes):
            return await http.answer(reply, last)
        # A stream that only follows does not hold up the end of the daemon.
        self.busy = self.busy and reply.length is not None
        try:
            return await http.answer(reply, last)
        except (SandboxError, h11.LocalProtocolError) as fault:
            # The head is out: all that is left to say is that the body is not whole.
            log.warning("an answer broke off: %s", fault)
            raise ClientGone from None
        finally:
            with anyio.CancelScope(shield=True):
                await reply.body.aclose()

    async def _switch(self, http: Http1, switch: Switch) -> None:
        """The talk gets the connection in any case: it holds what has to be let go."""
        self.busy = False
        try:
            await http.upgrade(switch.protocol)
        except ClientGone:
            log.debug("a client left before it was attached")
        try:
            await switch.talk(http)
            await http.linger()
        except* (ClientGone, SandboxError):
            pass


class Body:
    """A request's body, pulled from its connection and held to the route's limits."""

    def __init__(self, http: Http1, connection: Connection, shared: Shared) -> None:
        self.ended = anyio.Event()
        self.declared: int | None = None
        self.kind = table.Body.JSON
        self._http, self._connection, self._shared = http, connection, shared
        self._taken = 0
        self._held = 0
        self._deadline = anyio.current_time() + shared.limits.json_s

    async def begin(self) -> None:
        """An absent body has ended before anybody asks."""
        if self.declared == 0:
            await self._http.event()
            self.ended.set()

    async def receive(self) -> bytes:
        if self.ended.is_set():
            return b""
        event = await self._event()
        if isinstance(event, h11.Data):
            self._taken += len(event.data)
            if self._taken > self.kind.cap:
                raise guard.too_large(self.kind)
            if self.kind is table.Body.JSON:
                self._hold(len(event.data))
            return bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise ClientGone
        self.ended.set()
        return b""

    async def give_up(self) -> None:
        """Takes a small rest that is surely on its way, so that the connection can be kept."""
        small = self.declared is not None and self.declared - self._taken <= AHEAD_BYTES
        try:
            if small and not self._http.waits_for_continue:
                with anyio.move_on_after(self._shared.limits.linger_s), suppress(ApiError):
                    while await self.receive():
                        pass
        finally:
            # Nobody reads it, so nothing of it is in memory.
            self.let_go()

    def let_go(self) -> None:
        """Of the memory it was counted with."""
        self._shared.occupancy.let_go(self._connection, self._held)
        self._held = 0

    async def aclose(self) -> None:
        """It ends with its request."""

    async def _event(self) -> h11.Event | type[h11.PAUSED]:
        limits = self._shared.limits
        if self.kind is table.Body.JSON:
            deadline, late = self._deadline, f"the whole body must come within {limits.json_s:.0f} s"
        else:
            deadline = anyio.current_time() + limits.raw_stall_s
            late = f"nothing of the body came for {limits.raw_stall_s:.0f} s"
        try:
            with anyio.CancelScope(deadline=deadline):
                return await self._http.event()
        except h11.RemoteProtocolError as fault:
            if self._http.ended:
                raise ClientGone from None
            raise InvalidRequest(f"the body is not what HTTP takes: {fault}") from None
        raise InvalidRequest(late)

    def _hold(self, size_bytes: int) -> None:
        try:
            self._shared.occupancy.hold(self._connection, size_bytes)
        except Full as fault:
            raise Unavailable(str(fault)) from None
        self._held += size_bytes
