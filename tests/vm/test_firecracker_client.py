"""The API's client against scripted servers in the VMM's place: a well-behaved one, and each kind of hostile one."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import anyio
import h11
import pytest
from anyio.abc import SocketListener, SocketStream
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxd import unixpath
from sandboxd.vm.firecracker import Names, Request
from sandboxd.vm.firecracker_calls import State
from sandboxd.vm.firecracker_client import ANSWER_BYTES, CallFailed, CallRefused, Client, Exchange, Info
from sandboxd.vm.firecracker_versions import read

# As Firecracker's own server writes them.
NO_CONTENT = b"HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n"
INFO = {"id": "m", "state": "Running", "vmm_version": "1.16.1", "app_name": "Firecracker"}
PUT = Request("PUT", "/boot-source", {"kernel_image_path": "kernel", "boot_args": "a-private-word"}, 20)
HURRIED = replace(PUT, deadline_s=0.3)
GET = Request("GET", "/")
Speak = Callable[[SocketStream], Awaitable[None]]


def answer(status: int, value: object, phrase: str = "") -> bytes:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    head = f"HTTP/1.1 {status} {phrase}\r\nServer: Firecracker API\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@asynccontextmanager
async def serving(root: int, speak: Speak) -> AsyncIterator[Client]:
    async def serve(stream: SocketStream) -> None:
        async with stream:
            with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
                await speak(stream)

    with unixpath.bind(root, Names.API_SOCKET) as listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon((await SocketListener.from_socket(listener)).serve, serve)
            yield Client(root)
            tasks.cancel_scope.cancel()


def saying(*pieces: bytes) -> Speak:
    """Hears a request, says that, and leaves."""

    async def speak(stream: SocketStream) -> None:
        await stream.receive()
        for piece in pieces:
            await stream.send(piece)

    return speak


async def hearing(stream: SocketStream) -> tuple[h11.Request, bytes]:
    """A whole request, as another reader of HTTP understands it."""
    http = h11.Connection(h11.SERVER)
    request, body = None, b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await stream.receive())
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
        else:
            assert isinstance(event, h11.EndOfMessage) and request is not None
            return request, body


@pytest.mark.anyio
async def test_a_call_and_its_answer(root: int) -> None:
    heard = []

    async def speak(stream: SocketStream) -> None:
        heard.append(await hearing(stream))
        await stream.send(NO_CONTENT)

    async with serving(root, speak) as client:
        assert await client.send(PUT) is None
    ((request, body),) = heard
    assert (request.method, request.target) == (b"PUT", b"/boot-source")
    assert json.loads(body) == PUT.body
    assert dict(request.headers)[b"content-type"] == b"application/json"


@pytest.mark.anyio
async def test_a_vmm_that_takes_no_more_connections_is_not_waited_for(root: int) -> None:
    name = Names.API_SOCKET
    with unixpath.bind(root, name, backlog=0), unixpath.connect_now(name, root):
        with pytest.raises(CallFailed, match="no connection: Resource temporarily unavailable"):
            await Client(root).send(HURRIED)
        with anyio.fail_after(0.3), pytest.raises(CallFailed, match="connecting to the API: Resource temporarily"):
            await Client(root).listening()


@pytest.mark.anyio
async def test_a_get_has_no_body_and_its_answer_is_read(root: int) -> None:
    async def speak(stream: SocketStream) -> None:
        request, body = await hearing(stream)
        assert (request.method, body) == (b"GET", b"")
        await stream.send(answer(200, INFO))

    async with serving(root, speak) as client:
        assert await client.send(GET) == INFO
        assert await client.info() == Info(State.RUNNING, read("1.16.1"))


@pytest.mark.anyio
async def test_calls_are_made_in_order_and_end_with_the_first_that_fails(root: int) -> None:
    heard: list[bytes] = []

    async def speak(stream: SocketStream) -> None:
        request, _ = await hearing(stream)
        heard.append(request.target)
        await stream.send(NO_CONTENT if len(heard) < 3 else answer(400, {"fault_message": "no"}))

    async with serving(root, speak) as client:
        with pytest.raises(CallRefused, match=r"^PUT /c: refused: no$"):
            await client.send_all([Request("PUT", f"/{name}", {}) for name in "abcd"])
    assert heard == [b"/a", b"/b", b"/c"]


REFUSALS: dict[str, tuple[bytes, str]] = {
    "a reason": (
        answer(400, {"fault_message": "The kernel is missing."}), "refused: The kernel is missing."
    ),
    "a reason that is not fit for a terminal": (
        answer(400, {"fault_message": "a\x1b[2J\nb\u202ec\ud800"}), "refused: a [2J b c",
    ),
    "a reason without end": (answer(400, {"fault_message": "x" * 60000}), "refused: " + "x" * 300),
    "no reason": (answer(400, {}), "refused with status 400"),
    "a reason that is no text": (answer(400, {"fault_message": ["x"]}), "refused with status 400"),
    "an empty reason": (answer(400, {"fault_message": "\n"}), "refused with status 400"),
    "no JSON": (answer(500, b"<html>"), "refused with status 500"),
    "JSON without an end to its depth": (answer(400, b"[" * 60000), "refused with status 400"),
    "a number with too many digits": (answer(400, b"9" * 60000), "refused with status 400"),
    "another place to go to": (
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n", "refused with status 302"
    ),
}  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize(("said", "why"), REFUSALS.values(), ids=REFUSALS)
async def test_a_refusal_names_the_call_and_the_reason_in_one_line(root: int, said: bytes, why: str) -> None:
    async with serving(root, saying(said)) as client:
        with pytest.raises(CallRefused) as error:
            await client.send(PUT)
    assert (error.value.step, error.value.why) == ("PUT /boot-source", why)
    assert str(error.value) == f"PUT /boot-source: {why}"


INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
BROKEN: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "ended before"),
    "garbage": (b"\x00\xff\r\n\r\n" * 9, "not HTTP"),
    "another protocol": (b"OK 1024\n" * 99, "ended before"),
    "headers without an end": (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 5000, "not HTTP"),
    "a header without an end": (b"HTTP/1.1 200 OK\r\na: " + b"b" * 40000, "not HTTP"),
    "a body without an end": (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 200000, "longer than"),
    "chunks without an end": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20000, "in chunks"
    ),
    "a length that is a lie": (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}", "not HTTP"),
    "two lengths": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x", "not HTTP"),
    "a length below nothing": (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "not HTTP"),
    "one interim answer": (INTERIM, "ended before"),
    "interim answers without an end": (INTERIM * 2000, "goes on saying"),
    "another protocol to go on with": (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "not HTTP"),
    "a yes that says nothing": (answer(200, b""), "not a JSON object"),
    "a yes that is no JSON": (answer(200, b"yes"), "not a JSON object"),
    "a yes that is a list": (answer(200, []), "not a JSON object"),
}  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize(("said", "why"), BROKEN.values(), ids=BROKEN)
async def test_an_answer_that_is_none_is_a_failure_that_names_the_call(root: int, said: bytes, why: str) -> None:
    async with serving(root, saying(said)) as client:
        with pytest.raises(CallFailed, match=rf"^PUT /boot-source: .*{why}") as error:
            await client.send(PUT)
    assert not isinstance(error.value, CallRefused)
    assert "private" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.anyio
async def test_an_answer_after_interim_ones_is_read(root: int) -> None:
    async with serving(root, saying(INTERIM * 3 + NO_CONTENT)) as client:
        assert await client.send(PUT) is None


@pytest.mark.anyio
@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 2", INTERIM, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"])
async def test_a_vmm_that_hangs_is_not_waited_for(root: int, said: bytes) -> None:
    async def speak(stream: SocketStream) -> None:
        await stream.send(said)
        await anyio.sleep_forever()

    async with serving(root, speak) as client:
        start = time.monotonic()
        with pytest.raises(CallFailed, match=r"^PUT /boot-source: no answer in 0\.3 s$"):
            await client.send(HURRIED)
        assert 0.25 < time.monotonic() - start < 2


@pytest.mark.anyio
async def test_a_vmm_that_drips_is_not_waited_for(root: int) -> None:
    async def speak(stream: SocketStream) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\n")
        while True:
            await stream.send(b"a: b\r\n")
            await anyio.sleep(0.02)

    async with serving(root, speak) as client:
        with pytest.raises(CallFailed, match="no answer in"):
            await client.send(HURRIED)


@pytest.mark.anyio
async def test_a_vmm_that_takes_no_connections_is_not_waited_for(root: int) -> None:
    with unixpath.bind(root, Names.API_SOCKET, backlog=1), socket.socket(socket.AF_UNIX) as first:
        # Nobody accepts, and no more than two fit in.
        first.connect(f"/proc/self/fd/{root}/{Names.API_SOCKET}")
        for _ in range(3):
            with pytest.raises(CallFailed, match=r"^PUT /boot-source: no "):
                await Client(root).send(HURRIED)


@pytest.mark.anyio
async def test_a_vmm_that_is_gone_is_told(root: int, tmp_path: Path) -> None:
    with pytest.raises(CallFailed, match=r"^PUT /boot-source: no connection: No such file or directory$"):
        await Client(root).send(PUT)
    unixpath.bind(root, Names.API_SOCKET).close()
    with pytest.raises(CallFailed, match=r"^PUT /boot-source: no connection: Connection refused$"):
        await Client(root).send(PUT)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "file", "directory", "datagram socket"])
async def test_what_is_put_in_the_place_of_the_socket_is_not_followed(tmp_path: Path, root: int, kind: str) -> None:
    """A socket of the host's that would answer is what the link leads to."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    place = tmp_path / Names.API_SOCKET
    other = os.open(elsewhere, os.O_PATH | os.O_DIRECTORY)
    datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    match kind:
        case "link":
            place.symlink_to(elsewhere / Names.API_SOCKET)
        case "link to nothing":
            place.symlink_to("/nowhere")
        case "pipe":
            os.mkfifo(place)
        case "file":
            place.write_bytes(NO_CONTENT)
        case "directory":
            place.mkdir()
        case _:
            datagram.bind(str(place))
    async with serving(other, saying(NO_CONTENT)):
        with pytest.raises(CallFailed, match=r"^PUT /boot-source: no connection: "):
            await Client(root).send(PUT)
        with pytest.raises(CallFailed, match=r"^connecting to the API: "), anyio.fail_after(2):
            await Client(root).listening()
    datagram.close()
    os.close(other)


@pytest.mark.anyio
async def test_a_socket_that_comes_late_is_waited_for(root: int) -> None:
    path = f"/proc/self/fd/{root}/{Names.API_SOCKET}"
    with socket.socket(socket.AF_UNIX) as listener, anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Client(root).listening)
            await anyio.sleep(0.03)
            listener.bind(path)
            await anyio.sleep(0.03)
            listener.listen()


@pytest.mark.anyio
@pytest.mark.parametrize(
    "change", [{"state": "Halted"}, {"state": 1}, {"state": None}, {"state": ["Running"]}, {"vmm_version": "new"}, None]
)
async def test_a_state_and_a_version_that_are_none_are_a_failure(root: int, change: dict[str, object] | None) -> None:
    value = {} if change is None else INFO | change
    async with serving(root, saying(answer(200, value))) as client:
        with pytest.raises(CallFailed, match=r"^GET /: the answer names no state and version$"):
            await client.info()


@pytest.mark.anyio
async def test_no_connection_and_no_descriptor_is_left(root: int) -> None:
    before = os.listdir("/proc/self/fd")
    async with serving(root, saying(b"garbage\r\n\r\n")) as client:
        for _ in range(20):
            with pytest.raises(CallFailed):
                await client.send(PUT)
    await anyio.sleep(0.05)
    assert os.listdir("/proc/self/fd") == before


# -- the core, without a socket

GOOD = {
    "no content": (NO_CONTENT, None),
    "an object": (answer(200, INFO), INFO),
    "interim answers first": (INTERIM * 8 + NO_CONTENT, None),
}  # fmt: skip


@pytest.mark.parametrize(("said", "value"), GOOD.values(), ids=GOOD)
def test_an_answer_is_read_one_byte_at_a_time_and_whole_at_its_last(said: bytes, value: object) -> None:
    exchange = Exchange(PUT)
    assert [exchange.feed(said[i : i + 1]) for i in range(len(said))] == [False] * (len(said) - 1) + [True]
    assert exchange.result() == value


@pytest.mark.parametrize(("said", "value"), GOOD.values(), ids=GOOD)
def test_an_answer_that_is_cut_off_anywhere_is_a_failure(said: bytes, value: object) -> None:
    for end in range(len(said)):
        exchange = Exchange(PUT)
        with pytest.raises(CallFailed):
            assert not exchange.feed(said[:end])
            exchange.feed(b"")


def run(data: bytes, sizes: random.Random) -> object:
    """What comes of an answer in pieces of any size: a value or CallFailed, and nothing else."""
    exchange = Exchange(PUT)
    try:
        while data:
            size = sizes.randint(1, 4096)
            if exchange.feed(data[:size]):
                return exchange.result()
            data = data[size:]
        exchange.feed(b"")
        return exchange.result()
    except CallFailed as error:
        assert str(error).startswith("PUT /boot-source: ") and "private" not in str(error)
        assert str(error).isprintable() and len(str(error)) < 400
        return CallFailed


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=2000), st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 400 \r\n\r\n"]), st.randoms())
def test_garbage_is_a_failure_and_nothing_else(garbage: bytes, head: bytes, sizes: random.Random) -> None:
    run(head + garbage, sizes)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_an_answer_with_some_bytes_changed_is_an_answer_or_a_failure(data: st.DataObject) -> None:
    said = bytearray(
        data.draw(st.sampled_from([answer(400, {"fault_message": "no"}), *(row[0] for row in GOOD.values())]))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        said[data.draw(st.integers(0, len(said) - 1))] = data.draw(st.integers(0, 255))
    run(bytes(said), data.draw(st.randoms()))


def test_an_answer_of_any_size_is_read_in_bounded_time_and_memory() -> None:
    exchange = Exchange(PUT)
    assert not exchange.feed(b"HTTP/1.1 200 OK\r\n\r\n")
    start = time.process_time()
    with pytest.raises(CallFailed, match="longer than"):
        for _ in range(ANSWER_BYTES // 16 + 1):
            exchange.feed(b"x" * 16)
    assert time.process_time() - start < 5
