"""sandboxd's end of the control socket, for as long as one egress process lives.

In: calls, and the frames egress sends. Out: answers, events (each once), SessionLost. egress reads hostile bytes all
day, so what it says is checked and bounded here, and one word out of turn ends the session: whoever supervises then
ends the process and starts another.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio

from egress import control
from egress.control import Event, Fault, Frame
from egress.policy import Policy

CALL_S = 10.0
"""An egress that takes longer than this for a call is as good as dead."""


class EgressError(Exception):
    """A sandbox's network could not be made or changed; the text says which step."""


class SessionLost(Exception):
    """The process has ended, or does not keep to the protocol."""


class Refused(EgressError):
    """egress understood and said no."""


@dataclass(slots=True)
class _Waiting:
    done: anyio.Event
    answer: dict[str, Any] | None = None


class Session:
    """Made on a connected, non-blocking socket, which it closes. `run` must be running for calls to return."""

    def __init__(self, connection: socket.socket, on_event: Callable[[Event], None]) -> None:
        self.sandboxes: set[str] = set()
        self.lost = anyio.Event()
        self._socket = connection
        self._on_event = on_event
        self._inbox = control.Inbox()
        self._sending = anyio.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._seq = 0
        self._seen = 0
        self._events_came = anyio.Event()

    async def run(self) -> None:
        """Reads and acknowledges until the other end goes; then every call that waits raises SessionLost."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._acknowledge)
                with suppress(EOFError, OSError, Fault):
                    await self._read()
                tasks.cancel_scope.cancel()
        finally:
            self.lost.set()
            for waiting in self._waiting.values():
                waiting.done.set()
            self._inbox.close()
            anyio.notify_closing(self._socket)
            self._socket.close()

    async def hello(self, within_s: float) -> str:
        """The build of the process; afterwards `sandboxes` is what it has."""
        match await self.call("hello", within_s=within_s):
            case {"build": str(build), "sandboxes": [*ids]} if all(isinstance(id, str) for id in ids):
                self.sandboxes = set(ids)
                return build
        self.lost.set()
        raise SessionLost("an answer to hello that is none")

    async def ping(self) -> None:
        await self.call("hello")

    async def add(self, sandbox: str, policy: Policy, fds: Sequence[int]) -> None:
        await self.call("add", fds, sandbox=sandbox, policy=policy.as_json(), limits={})
        self.sandboxes.add(sandbox)

    async def update(self, sandbox: str, policy: Policy) -> None:
        await self.call("update", sandbox=sandbox, policy=policy.as_json())

    async def remove(self, sandbox: str) -> None:
        if sandbox in self.sandboxes:
            await self.call("remove", sandbox=sandbox)
            self.sandboxes.discard(sandbox)

    async def report(self, sandbox: str) -> list[dict[str, Any]]:
        answer = await self.call("report", sandbox=sandbox)
        rows = answer.get("names")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            self.lost.set()
            raise SessionLost("a report that is none")
        return rows

    async def resolver(self, fd: int) -> None:
        await self.call("resolver", [fd])

    async def call(
        self, do: str, fds: Sequence[int] = (), within_s: float = CALL_S, **fields: object
    ) -> dict[str, Any]:
        """Raises Refused or SessionLost. One that is not answered in time loses the session."""
        if self.lost.is_set():
            raise SessionLost("egress is gone")
        self._seq += 1
        seq = self._seq
        waiting = self._waiting[seq] = _Waiting(anyio.Event())
        try:
            with anyio.fail_after(within_s):
                await self._send({"seq": seq, "do": do, **fields}, fds)
                await waiting.done.wait()
        except (TimeoutError, OSError, anyio.ClosedResourceError) as fault:
            self.lost.set()
            raise SessionLost(f"{do}: {str(fault) or 'no answer in time'}") from None
        finally:
            del self._waiting[seq]
        if waiting.answer is None:
            raise SessionLost(f"egress went away during {do}")
        if waiting.answer.get("ok") is not True:
            raise Refused(f"{do}: {str(waiting.answer.get('error'))[:500]}")
        return waiting.answer

    async def _send(self, body: dict[str, object], fds: Sequence[int]) -> None:
        data = memoryview(control.pack(body, len(fds)))
        async with self._sending:
            # Half a frame would make nonsense of all that follow: a call that is given up is sent to its end.
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CALL_S) as scope:
                while data:
                    try:
                        sent = socket.send_fds(self._socket, [data], list(fds)) if fds else self._socket.send(data)
                    except BlockingIOError:
                        await anyio.wait_writable(self._socket)
                        continue
                    data, fds = data[sent:], ()
            if scope.cancelled_caught:
                raise TimeoutError("egress does not read")

    async def _read(self) -> None:
        while not self.lost.is_set():
            await anyio.wait_readable(self._socket)
            try:
                frames = self._inbox.read(self._socket)
            except BlockingIOError:
                continue
            for frame in frames:
                self._take(frame)

    def _take(self, frame: Frame) -> None:
        if frame.fds:
            raise Fault("descriptors from egress")
        match frame.body:
            case {"event": dict(event), "number": int(number)}:
                if number > self._seen:
                    self._seen = number
                    self._on_event(Event.from_json(event))
                self._events_came.set()
            case {"seq": int(seq)}:
                # An answer to a call that was given up is nobody's.
                if (waiting := self._waiting.get(seq)) is not None:
                    waiting.answer = frame.body
                    waiting.done.set()
            case _:
                raise Fault("a frame that is neither an answer nor an event")

    async def _acknowledge(self) -> None:
        while True:
            await self._events_came.wait()
            self._events_came = anyio.Event()
            with suppress(SessionLost, Refused):
                await self.call("ack", through=self._seen)
