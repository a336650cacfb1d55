"""A QMP connection to one VMM: commands with a deadline, and the news that the guest has stopped.

In: a connected stream. Out: answers as values. No task runs in the background: whoever waits for something
reads for all who wait, and hands the reading on when it leaves, so cancelling one wait disturbs no other. A
VMM that floods is read slowly, one that breaks the protocol is not listened to any more (`lost`), and nothing
it says ends more than its own machine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
from anyio.abc import SocketStream, UNIXSocketStream

from sandboxd import unixpath
from sandboxd.vm.qmp import Answer, Decoder, Event, Fault, Greeting, Message, QmpError, command

CHUNK_BYTES = 64 * 1024
COMMAND_S = 5.0
EVENTS_PER_REST = 256  # after so many messages, or reads, or CHEAP_BYTES for each, the reader rests, for
REST_S = 0.05
CHEAP_BYTES = 256
_STOPPED_STATES = {"shutdown", "guest-panicked", "internal-error"}
_STOP_EVENTS = {"SHUTDOWN", "GUEST_PANICKED"}


class MonitorError(Exception):
    """A command was refused, not answered in time, or cannot be sent any more."""


class Monitor:
    """Use `connect`."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self._decoder = Decoder()
        self._sending = anyio.Lock()
        self._reading = False
        self._news = anyio.Event()
        self._greeted = False
        self._next_id = 0
        self._asked: set[int] = set()
        self._answers: dict[int, Answer | Fault] = {}
        self._work = 0
        self.stopped: str | None = None  # why the guest runs no more
        self.lost: str | None = None  # why nothing more is heard

    @classmethod
    async def connect(cls, path: Path) -> Monitor:
        """Greets the VMM that serves `path`. The deadline is the caller's. Raises OSError or MonitorError."""
        monitor = cls(await UNIXSocketStream.from_socket(unixpath.connect_now(path)))
        try:
            await monitor._until(lambda: monitor._greeted)
            await monitor.execute("qmp_capabilities")
            status = await monitor.execute("query-status")
            state = status.get("status") if isinstance(status, dict) else None
            if isinstance(state, str) and state in _STOPPED_STATES:
                monitor.stopped = monitor.stopped or state
        except BaseException:
            await monitor.close()
            raise
        return monitor

    async def execute(self, name: str, **arguments: object) -> object:
        """What the command returned. Raises MonitorError."""
        self._next_id += 1
        id = self._next_id
        self._asked.add(id)
        try:
            with anyio.fail_after(COMMAND_S):
                await self._send(command(id, name, arguments))
                await self._until(lambda: id in self._answers)
                answer = self._answers[id]
        except TimeoutError:
            raise MonitorError(f"{name}: no answer in {COMMAND_S:.0f} s") from None
        finally:
            self._asked.discard(id)
            self._answers.pop(id, None)
        if isinstance(answer, Fault):
            raise MonitorError(f"{name}: {answer.text}")
        return answer.value

    async def wait_stopped(self) -> bool:
        """True when the guest has shut down, reset or panicked; False when the monitor is lost before."""
        try:
            await self._until(lambda: self.stopped is not None)
        except MonitorError:
            return False
        return True

    async def close(self) -> None:
        if self.lost is None:
            self._lose("closed")
        await anyio.aclose_forcefully(self._stream)

    async def _send(self, data: bytes) -> None:
        async with self._sending:
            if self.lost is not None:
                raise MonitorError(self.lost)
            try:
                await self._stream.send(data)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                self._lose("the VMM closed its monitor")
                raise MonitorError("the VMM closed its monitor") from None
            except BaseException:
                self._lose("a command was sent in part")
                raise

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self.lost is not None:
                raise MonitorError(self.lost)
            if self._reading:
                await self._news.wait()
                continue
            self._reading = True
            try:
                await self._read()
            finally:
                self._reading = False
                self._tell()

    async def _read(self) -> None:
        if self._work >= EVENTS_PER_REST:
            await anyio.sleep(REST_S)
            self._work = 0
        try:
            data = await self._stream.receive(CHUNK_BYTES)
            messages = self._decoder.feed(data)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._lose("the VMM closed its monitor")
            return
        except QmpError as error:
            self._lose(str(error))
            return
        self._work += max(1, len(messages), len(data) // CHEAP_BYTES)
        for message in messages:
            self._take(message)

    def _take(self, message: Message) -> None:
        match message:
            case Greeting():
                self._greeted = True
            case Answer(id=id) | Fault(id=id):
                if id in self._asked:
                    self._answers[id] = message
            case Event(name=name, reason=reason):
                if name in _STOP_EVENTS and self.stopped is None:
                    self.stopped = reason or name

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()
