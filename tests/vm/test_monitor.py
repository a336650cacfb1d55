"""The monitor connection against a peer of ours in the VMM's place: the well-behaved one and the hostile ones."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketStream

from sandboxd import unixpath
from sandboxd.vm import monitor as module
from sandboxd.vm.monitor import Monitor, MonitorError

GREETING = b'{"QMP": {"version": {}, "capabilities": []}}\r\n'
Speak = Callable[["Peer"], Awaitable[None]]


class Peer:
    """One client's conversation, from the VMM's side."""

    def __init__(self, stream: SocketStream) -> None:
        self.stream = stream
        self._lines: AsyncIterator[bytes] | None = None
        self._rest = b""

    async def say(self, data: bytes) -> None:
        await self.stream.send(data)

    async def asked(self) -> tuple[str, int]:
        while b"\n" not in self._rest:
            self._rest += await self.stream.receive()
        line, _, self._rest = self._rest.partition(b"\n")
        value = json.loads(line)
        return value["execute"], value["id"]

    async def answer(self, value: object = None) -> str:
        name, id = await self.asked()
        await self.say(json.dumps({"return": {} if value is None else value, "id": id}).encode() + b"\r\n")
        return name

    async def greet(self, status: str = "running") -> None:
        await self.say(GREETING)
        assert await self.answer() == "qmp_capabilities"
        assert await self.answer({"status": status, "running": True}) == "query-status"


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "qmp.sock"


@asynccontextmanager
async def serving(path: Path, speak: Speak) -> AsyncIterator[None]:
    dir_fd = os.open(path.parent, os.O_PATH)
    listener = unixpath.bind(dir_fd, path.name)
    os.close(dir_fd)

    async def serve() -> None:
        await anyio.wait_readable(listener)
        sock, _ = listener.accept()
        async with await SocketStream.from_socket(sock) as stream:
            await speak(Peer(stream))

    with listener:
        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            yield
            group.cancel_scope.cancel()


def talk(path: Path, speak: Speak, act: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with anyio.fail_after(20):
            async with serving(path, speak):
                await act()

    anyio.run(main)


def test_commands_are_answered(path: Path) -> None:
    async def speak(peer: Peer) -> None:
        await peer.greet()
        assert await peer.answer("YQ==") == "ringbuf-read"
        _, id = await peer.asked()
        await peer.say(json.dumps({"error": {"class": "GenericError", "desc": "no"}, "id": id}).encode() + b"\n")
        await anyio.sleep_forever()

    async def act() -> None:
        monitor = await Monitor.connect(path)
        assert await monitor.execute("ringbuf-read", device="console") == "YQ=="
        with pytest.raises(MonitorError, match="stop: no"):
            await monitor.execute("stop")
        assert monitor.lost is None
        await monitor.close()

    talk(path, speak, act)


@pytest.mark.parametrize("status", ["shutdown", "guest-panicked", "internal-error"])
def test_a_guest_that_stopped_before_is_seen_at_the_first_look(path: Path, status: str) -> None:
    async def speak(peer: Peer) -> None:
        await peer.greet(status)
        await anyio.sleep_forever()

    async def act() -> None:
        monitor = await Monitor.connect(path)
        assert await monitor.wait_stopped()
        assert monitor.stopped == status
        await monitor.close()

    talk(path, speak, act)


def test_any_number_wait_while_commands_are_answered(path: Path) -> None:
    async def speak(peer: Peer) -> None:
        await peer.greet()
        for _ in range(20):
            await peer.say(b'{"event": "RTC_CHANGE", "data": {}}\n')
            await peer.answer(1)
        await peer.say(b'{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-shutdown"}}\n')
        await anyio.sleep_forever()

    async def act() -> None:
        monitor = await Monitor.connect(path)
        stopped = []

        async def wait() -> None:
            stopped.append(await monitor.wait_stopped())

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(wait)
            # Waits that come and go, some of them as the one that reads, disturb nobody.
            for _ in range(20):
                with anyio.move_on_after(0.001):
                    await monitor.wait_stopped()
                assert await monitor.execute("query") == 1
        assert stopped == [True] * 5
        await monitor.close()

    talk(path, speak, act)


async def closes(peer: Peer) -> None:
    await peer.greet()


async def says_rubbish(peer: Peer) -> None:
    await peer.greet()
    await anyio.sleep(0.05)
    await peer.say(b"rubbish\n")
    await anyio.sleep_forever()


async def says_a_long_line(peer: Peer) -> None:
    await peer.greet()
    await anyio.sleep(0.05)
    while True:
        await peer.say(b"x" * 65536)


@pytest.mark.parametrize("speak", [closes, says_rubbish, says_a_long_line])
def test_a_vmm_that_breaks_the_protocol_is_lost_and_nobody_hangs(path: Path, speak: Speak) -> None:
    async def act() -> None:
        monitor = await Monitor.connect(path)
        assert not await monitor.wait_stopped()
        assert monitor.lost
        with pytest.raises(MonitorError):
            await monitor.execute("query-status")
        assert not await monitor.wait_stopped()
        await monitor.close()

    with_broken_pipes_allowed(path, speak, act)


@pytest.mark.parametrize(
    "said", [b"", b"rubbish\n", b'{"event": "SHUTDOWN"}\n', b'{"return": {}, "id": 1}\n'], ids=repr
)
def test_without_a_greeting_the_caller_decides_how_long_to_wait(path: Path, said: bytes) -> None:
    async def speak(peer: Peer) -> None:
        await peer.say(said)
        await anyio.sleep_forever()

    async def act() -> None:
        with pytest.raises((TimeoutError, MonitorError)), anyio.fail_after(0.2):
            await Monitor.connect(path)

    talk(path, speak, act)


def test_a_command_without_an_answer_ends_and_a_late_answer_is_dropped(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMAND_S", 0.2)

    async def speak(peer: Peer) -> None:
        await peer.greet()
        _, late = await peer.asked()
        _, id = await peer.asked()
        await peer.say(json.dumps({"return": "late", "id": late}).encode() + b"\n")
        await peer.say(json.dumps({"return": "now", "id": id}).encode() + b"\n")
        await anyio.sleep_forever()

    async def act() -> None:
        monitor = await Monitor.connect(path)
        with pytest.raises(MonitorError, match="no answer"):
            await monitor.execute("first")
        assert await monitor.execute("second") == "now"
        assert monitor._answers == {}
        await monitor.close()

    talk(path, speak, act)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b'{"event": "BLOCK_IO_ERROR", "data": {}}\n', id="events"),
        pytest.param(b'{"return": {}, "id": 999999}\n', id="answers nobody asked for"),
        pytest.param(b'{"return": [' + b"[]," * 4000 + b'0], "id": 999999}\n', id="large answers"),
        pytest.param(GREETING, id="greetings"),
        pytest.param(b"\n" * 40, id="empty lines"),
    ],
)
def test_a_flood_is_read_slowly(path: Path, line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST_S", 10)
    taken = 0

    async def speak(peer: Peer) -> None:
        nonlocal taken
        await peer.greet()
        flood = line * (1 + 4096 // len(line))
        while True:
            await peer.say(flood)
            taken += len(flood)

    async def act() -> None:
        monitor = await Monitor.connect(path)
        before = time.process_time()
        with anyio.move_on_after(1.0):
            await monitor.wait_stopped()
        assert taken < 640 << 10, "one portion, and what the socket holds"
        assert time.process_time() - before < 0.6, "two ends of the flood are in this process"
        assert monitor._answers == {}
        await monitor.close()

    with_broken_pipes_allowed(path, speak, act)


def with_broken_pipes_allowed(path: Path, speak: Speak, act: Callable[[], Awaitable[None]]) -> None:
    async def tolerant(peer: Peer) -> None:
        with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
            await speak(peer)

    talk(path, tolerant, act)


def test_a_vmm_that_takes_no_more_connections_is_not_waited_for(path: Path) -> None:
    async def connect() -> None:
        with anyio.fail_after(0.3):
            await Monitor.connect(path)

    dir_fd = os.open(path.parent, os.O_PATH)
    try:
        with unixpath.bind(dir_fd, path.name, backlog=0), unixpath.connect_now(path), pytest.raises(BlockingIOError):
            anyio.run(connect)
    finally:
        os.close(dir_fd)
