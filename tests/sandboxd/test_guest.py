"""The host's end of the guest protocol against guests that do not keep it: bounded, never hung, never repeated."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from guestd import protocol
from sandboxd.errors import GuestProtocolError
from sandboxd.guest import Guest, GuestGone, GuestRefused
from sandboxd.routes import files
from tests.sandboxd.rig import Rig

Script = Callable[[int, socket.socket], None]
PONG = b'{"ok":true,"version":%d,"configured":false}\n' % protocol.VERSION


class StandIn:
    """Greets or not, answers or not: `script` gets the number of the connection and the connection."""

    def __init__(self, path: Path, script: Script) -> None:
        self.path, self.requests = path, 0
        self._script = script
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(16)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self._listener.accept()
            self.requests += 1
            threading.Thread(target=self._one, args=(self.requests, client), daemon=True).start()

    def _one(self, number: int, client: socket.socket) -> None:
        with client:
            try:
                self._script(number, client)
            except OSError:
                return


def greeted(*answers: bytes, then_s: float = 0) -> Script:
    def script(_: int, client: socket.socket) -> None:
        client.recv(64)
        client.sendall(b"OK 1073741824\n")
        client.recv(1 << 20)
        for answer in answers:
            client.sendall(answer)
            time.sleep(0.002)
        time.sleep(then_s)

    return script


def greeting(said: bytes) -> Script:
    def script(_: int, client: socket.socket) -> None:
        client.recv(64)
        client.sendall(said)

    return script


def split(number: int, client: socket.socket) -> None:
    for byte in b"OK 5\n":
        client.sendall(bytes([byte]))
        time.sleep(0.002)
    client.recv(1000)
    for byte in PONG:
        client.sendall(bytes([byte]))


def glued(number: int, client: socket.socket) -> None:
    client.sendall(b"OK 1\n" + PONG)
    client.recv(1000)


def late(number: int, client: socket.socket) -> None:
    if number <= 5:
        return
    if number == 6:
        time.sleep(10)
        return
    greeted(PONG)(number, client)


@pytest.mark.parametrize("script", [split, glued, late], ids=["bytes apart", "in one piece", "closing, then silent"])
def test_a_guest_that_is_slow_to_come_up(place: Path, script: Script) -> None:
    stand_in = StandIn(place / "v", script)
    anyio.run(Guest(stand_in.path, protocol.VERSION).wait_booted, 12)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        pytest.param(lambda n, c: None, GuestGone, id="closes at once"),
        pytest.param(greeting(b"x" * 1_000_000), GuestProtocolError, id="1 MB and no newline"),
        pytest.param(greeting(b"NO 1\n"), GuestProtocolError, id="no OK"),
        pytest.param(greeting(b"OK x\n"), GuestProtocolError, id="a port that is none"),
        pytest.param(greeting(b"OK " + b"1" * 40 + b"\n"), GuestProtocolError, id="a long port"),
        pytest.param(greeted(), GuestGone, id="no answer"),
        pytest.param(greeted(b"x" * (1 << 20)), GuestProtocolError, id="an answer without end"),
        pytest.param(greeted(b"garbage\n"), GuestProtocolError, id="an answer that is no JSON"),
        pytest.param(greeted(b'{"ok":true,"what":1}\n'), GuestProtocolError, id="an unknown field"),
        pytest.param(greeted(b'{"ok":true,"size":-1}\n'), GuestProtocolError, id="a negative size"),
        pytest.param(greeted(b'{"ok":true,"size":99999999999}\n'), GuestProtocolError, id="a size beyond all limits"),
        pytest.param(greeted(b'{"ok":true,"size":100000000}\n'), GuestProtocolError, id="a size beyond this limit"),
        pytest.param(greeted(b"[" * 10000 + b"\n"), GuestProtocolError, id="deep nesting"),
        pytest.param(greeted(b'{"ok":false,"error":{"code":"x","message":"m"}}\n'), GuestRefused, id="an unknown code"),
        pytest.param(greeted(b'{"ok":true,"size":5}\n', b"123456"), GuestProtocolError, id="more than announced"),
        pytest.param(greeted(b'{"ok":true,"size":5}\n', b"1234"), GuestGone, id="less than announced"),
    ],
)
def test_hostile_answers(place: Path, script: Script, error: type[Exception]) -> None:
    stand_in = StandIn(place / "v", script)

    async def read() -> None:
        download = await Guest(stand_in.path, protocol.VERSION).read("/x")
        try:
            while await download.receive():
                pass
        finally:
            await download.aclose()

    with pytest.raises(error):
        anyio.run(read)
    assert stand_in.requests == 1, "a request is never sent twice"


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        pytest.param(b"o\xff\xff\xff\xff", GuestProtocolError, id="a frame of 4 GiB"),
        pytest.param(b"o\x00\x10\x00\x01", GuestProtocolError, id="one byte too long"),
        pytest.param(b"i\x00\x00\x00\x01x", GuestProtocolError, id="a frame of the other direction"),
        pytest.param(b"x\x00\x00\x00\x02\x00\x00", GuestProtocolError, id="an exit code of two bytes"),
        pytest.param(b"o\x00\x00\x00\x05123", None, id="a frame cut short is the end"),
        pytest.param(b"", None, id="nothing at all is the end"),
    ],
)
def test_hostile_frames(place: Path, frames: bytes, error: type[Exception] | None) -> None:
    stand_in = StandIn(place / "v", greeted(b'{"ok":true}\n' + frames))

    async def read() -> None:
        session = await Guest(stand_in.path, protocol.VERSION).execute(True, argv=("x",))
        try:
            assert await session.receive() == []
        finally:
            session.close()

    if error is None:
        anyio.run(read)
    else:
        with pytest.raises(error):
            anyio.run(read)


def test_no_socket_and_no_listener_are_a_guest_that_is_gone(place: Path) -> None:
    for name in ("none", "dead"):
        if name == "dead":
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(str(place / name))
        with pytest.raises(GuestGone):
            anyio.run(Guest(place / name, protocol.VERSION).ping)


def test_a_request_that_fits_no_line_is_refused_here(place: Path) -> None:
    with pytest.raises(GuestRefused) as caught:
        anyio.run(lambda: Guest(place / "none", protocol.VERSION).execute(True, argv=("x" * (1 << 20),)))
    assert caught.value.code == "too_large"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"garbage\n", id="garbage"),
        pytest.param(b"\n" * 10, id="empty lines"),
        pytest.param(b"ENDLESS x", id="a line without end"),
        pytest.param(b'{"ok":true}\n' + b"o\xff\xff\xff\xff", id="an oversized frame"),
        pytest.param(b'{"ok":true}\nENDLESS', id="rubbish for frames"),
        pytest.param(b'{"ok":true,"size":67108864}\n1234', id="a large promise"),
        pytest.param(b'{"ok":true,"size":16}\n{"entries":[{}]}', id="a listing that is none"),
        pytest.param(b'{"ok":true}\n', id="early close"),
        pytest.param(b'{"ok":false,"error":{"code":"internal","message":"\\u001b]0;x\\u0007"}}\n', id="hostile text"),
    ],
)
def test_g10_a_hostile_guest_costs_a_request_and_no_more(other: Rig, answer: bytes) -> None:
    other.knob("hostile", answer)
    path = f"/v1/sandboxes/{other.create()}"
    before = other.rss_kib()
    for method, rest, body in (
        ("POST", "run", {"argv": ["true"]}), ("POST", "processes", {"argv": ["true"]}),
        ("GET", "dirs?path=/tmp", None), ("PUT", "files?path=/x", b"x" * 100_000),
        ("POST", "workspace?branch=b", b"x" * 100_000), ("DELETE", "files?path=/x", None),
    ):  # fmt: skip
        said = other.call(method, f"{path}/{rest}", body)
        if said.status >= 400:
            assert said.status in (400, 500) and said.message.isprintable(), said
    # A file whose head was sent and whose bytes did not come is cut, not made up.
    said_raw = other.raw(f"GET {path}/files?path=/x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert b"HTTP/1.1 500" in said_raw or said_raw.count(b"1234") <= 1
    assert other.rss_kib() - before < 8 << 10
    assert other.call("DELETE", path).status == 204
    assert "\x1b" not in other.log.read_text()


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("a b", True), ("ü", True), ("\udcff", True), ("...", True), ("x" * 255, True), ("\n", True),
        ("", False), (".", False), ("..", False), ("a/b", False), ("a\0", False), ("\ud800", False), ("ü" * 128, False),
        (5, False),
    ],
)  # fmt: skip
def test_a_listing_holds_names_that_a_directory_can(name: object, is_one: bool) -> None:
    entry = {"name": name, "type": "file", "size": 0}
    assert files.is_listing(json.dumps({"entries": [entry]}).encode()) is is_one


def test_a_message_of_a_guest_is_one_clean_line(other: Rig) -> None:
    text = b"first\\u001b[31m line\\u202e\\nsecond" + b"x" * 4000
    other.knob("hostile", b'{"ok":false,"error":{"code":"bad_request","message":"%s"}}\n' % text)
    path = f"/v1/sandboxes/{other.create()}"
    answer = other.call("POST", f"{path}/run", {"argv": ["x"]})
    assert (answer.status, answer.message) == (400, "first [31m line")
    assert other.call("DELETE", path).status == 204
