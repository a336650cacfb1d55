"""The HTTP client against peers that split, lie, stop, flood and hurry."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd import unixhttp
from sandboxd.unixhttp import ProtocolError, Response, Upgraded
from tests.cli.rawserver import Read, ReadHead, Split, Step, Wait, serving

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
HEADERS = {"Host": "localhost"}


def get(path: str, timeout_s: float = 10, idle_timeout_s: float = 10) -> Response:
    return unixhttp.request(
        path, "GET", "/v1/x", headers=HEADERS, timeout_s=timeout_s, idle_timeout_s=idle_timeout_s
    )


GOOD: list[tuple[str, list[Step], int, bytes]] = [
    ("a length", [OK + b"Content-Length: 5\r\n\r\nhello"], 200, b"hello"),
    ("a length, byte by byte", [Split(OK + b"Content-Length: 5\r\n\r\nhello")], 200, b"hello"),
    ("no length: to the end", [OK + b"\r\nhello"], 200, b"hello"),
    ("an empty body", [OK + b"Content-Length: 0\r\n\r\n"], 200, b""),
    ("bytes behind the length are not ours", [OK + b"content-length: 2\r\n\r\nhello"], 200, b"he"),
    ("204 has no body whatever it says", [b"HTTP/1.1 204 No Content\r\n\r\n"], 204, b""),
    ("a status without a reason", [b"HTTP/1.1 404\r\nContent-Length: 1\r\n\r\nx"], 404, b"x"),
    ("HTTP/1.0", [b"HTTP/1.0 200 OK\r\n\r\nold"], 200, b"old"),
    (
        "chunks",
        [CHUNKED + b"5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\n\r\n"],
        200,
        b"hello world",
    ),
    (
        "chunks, byte by byte, with a trailer",
        [Split(OK + b"transfer-encoding: Chunked\r\n\r\nA\r\n0123456789\r\n0\r\nX: y\r\n\r\n")],
        200,
        b"0123456789",
    ),
    (
        "an interim answer before the real one",
        [b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nok"],
        200,
        b"ok",
    ),
]


@pytest.mark.parametrize(("steps", "status", "body"), [row[1:] for row in GOOD], ids=[row[0] for row in GOOD])
def test_bodies(tmp_path: Path, steps: list[Step], status: int, body: bytes) -> None:
    with serving(tmp_path / "s", [ReadHead(), *steps]) as server, get(server.path) as answer:
        assert (answer.status, answer.read(100)) == (status, body)


BAD: list[tuple[str, list[Step], str]] = [
    ("nothing at all", [], "ended inside the answer's head"),
    ("half a head", [OK + b"Content-"], "ended inside the answer's head"),
    ("another protocol", [b"SSH-2.0-OpenSSH_9.2\r\n\r\n"], "not HTTP/1.1"),
    ("HTTP/2", [b"HTTP/2 200 OK\r\n\r\n"], "not HTTP/1.1"),
    ("a status of two digits", [b"HTTP/1.1 20 OK\r\n\r\n"], "not HTTP/1.1"),
    ("a status of four digits", [b"HTTP/1.1 2000 OK\r\n\r\n"], "status line"),
    ("a status below 100", [b"HTTP/1.1 099 OK\r\n\r\n"], "status line"),
    ("an endless head", [OK + b"X: " + b"x" * 40_000], "longer than 32768"),
    ("a long head that does end", [OK + b"X: " + b"x" * 40_000 + b"\r\n\r\n"], "longer than 32768"),
    ("too many fields", [OK + b"X: y\r\n" * 101 + b"\r\n"], "more than 100"),
    ("a field without a colon", [OK + b"nothing\r\n\r\n"], "malformed header"),
    ("a field with a blank in its name", [OK + b"Content-Length : 5\r\n\r\nhello"], "malformed header"),
    ("a folded field", [OK + b"X: a\r\n b\r\n\r\n"], "malformed header"),
    ("a bare LF inside a field", [OK + b"X: a\nContent-Length: 5\r\n\r\nhello"], "malformed header"),
    ("a NUL inside a field", [OK + b"X: a\0\r\n\r\n"], "malformed header"),
    ("a length that is not a number", [OK + b"Content-Length: five\r\n\r\nhello"], "not a number"),
    ("a negative length", [OK + b"Content-Length: -5\r\n\r\nhello"], "not a number"),
    ("a signed length", [OK + b"Content-Length: +5\r\n\r\nhello"], "not a number"),
    ("an empty length", [OK + b"Content-Length:\r\n\r\nhello"], "not a number"),
    ("a length of other digits", [OK + b"Content-Length: \xb2\r\n\r\nhi"], "not a number"),
    ("a length of 19 digits", [OK + b"Content-Length: " + b"1" * 19 + b"\r\n\r\n"], "not a number"),
    ("two lengths", [OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!"], "not a number"),
    (
        "a length and chunks",
        [OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
        "no single length",
    ),
    ("a coding nobody knows", [OK + b"Transfer-Encoding: gzip\r\n\r\n"], "no single length"),
    ("a body that stops early", [OK + b"Content-Length: 50\r\n\r\nhello"], "ended inside the answer's body"),
    ("a body over the limit", [OK + b"Content-Length: 500\r\n\r\n" + b"x" * 500], "longer than 100"),
    ("an endless body over the limit", [OK + b"\r\n" + b"x" * 500_000], "longer than 100"),
    ("chunks that stop early", [CHUNKED + b"5\r\nhel"], "inside the answer"),
    ("chunks without their end", [CHUNKED + b"5\r\nhello\r\n"], "size line"),
    ("a chunk size of rubbish", [CHUNKED + b"0x5\r\nhello\r\n"], "not a number"),
    ("an empty chunk size", [CHUNKED + b"\r\nhello\r\n"], "not a number"),
    ("a huge chunk size", [CHUNKED + b"f" * 16 + b"\r\n"], "not a number"),
    ("a chunk longer than its size", [CHUNKED + b"2\r\nhello\r\n"], "end of a chunk"),
    ("an endless size line", [CHUNKED + b"1" * 5000], "size line is longer"),
    (
        "an endless trailer",
        [CHUNKED + b"0\r\n" + b"X: y\r\n" * 5000],
        "trailer is longer",
    ),
    ("an unasked switch", [b"HTTP/1.1 101 Go\r\nUpgrade: x\r\n\r\n"], "nobody asked"),
    ("interim answers without end", [b"HTTP/1.1 100 C\r\n\r\n" * 9], "interim"),
]


@pytest.mark.parametrize(("steps", "said"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_peer_that_lies_is_refused(tmp_path: Path, steps: list[Step], said: str) -> None:
    with serving(tmp_path / "s", [ReadHead(), *steps]) as server, pytest.raises(ProtocolError, match=said):
        get(server.path).read(100)


def test_lines_come_whole_however_they_are_cut(tmp_path: Path) -> None:
    chunks = [b"1\r\n{\r\n", b"3\r\n}\n{\r\n", b"2\r\n}\n\r\n", b"0\r\n\r\n"]
    script = [ReadHead(), OK + b"Transfer-Encoding: chunked\r\n\r\n", *chunks]
    with serving(tmp_path / "s", script) as server, get(server.path) as answer:
        assert list(answer.lines(100)) == [b"{}", b"{}"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        pytest.param(b"x" * 5000, "line of the answer is longer", id="a line without end"),
        pytest.param(b"{}\n{", "ends inside a line", id="half a line"),
    ],
)
def test_bad_lines(tmp_path: Path, body: bytes, said: str) -> None:
    script: list[Step] = [ReadHead(), OK + b"\r\n" + body]
    with serving(tmp_path / "s", script) as server, pytest.raises(ProtocolError, match=said):
        list(get(server.path).lines(1000))


def test_request_bytes(tmp_path: Path) -> None:
    script: list[Step] = [ReadHead(), OK + b"Content-Length: 0\r\n\r\n", Read(1000)]
    with serving(tmp_path / "s", script) as server:
        get(server.path).close()
    expected = b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert bytes(server.seen[0]) == expected


def test_a_body_with_a_known_length_and_one_without(tmp_path: Path) -> None:
    parts = [b"a" * 100_000, b"", b"b" * 100_000]
    common = HEADERS | {"Connection": "close"}
    first_size = len(unixhttp.request_head("PUT", "/f", common | {"Content-Length": "200000"})) + 200_000
    second_size = len(unixhttp.request_head("PUT", "/f", common | {"Transfer-Encoding": "chunked"})) + 200_023
    counted: list[Step] = [Read(first_size), OK + b"Content-Length: 0\r\n\r\n"]
    chunked: list[Step] = [Read(second_size), OK + b"Content-Length: 0\r\n\r\n"]
    with serving(tmp_path / "s", counted, chunked) as server:
        for length in (200_000, None):
            with unixhttp.request(
                server.path, "PUT", "/f", headers=HEADERS, body=iter(parts), length=length, idle_timeout_s=10
            ) as answer:
                assert answer.status == 200
    first, second = (bytes(seen).split(b"\r\n\r\n", 1) for seen in server.seen)
    assert b"Content-Length: 200000" in first[0]
    assert first[1] == b"".join(parts)
    assert b"Transfer-Encoding: chunked" in second[0]
    assert second[1] == b"186a0\r\n" + parts[0] + b"\r\n186a0\r\n" + parts[2] + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize("length", [5, 50], ids=["longer than said", "shorter than said"])
def test_a_body_that_is_not_its_length_is_our_fault(tmp_path: Path, length: int) -> None:
    script: list[Step] = [ReadHead(), Read(1000)]
    with serving(tmp_path / "s", script) as server, pytest.raises(ValueError, match="not the"):
        unixhttp.request(server.path, "PUT", "/f", headers=HEADERS, body=iter([b"0123456789"]), length=length)


@pytest.mark.parametrize("closes", [True, False], ids=["and closes", "and reads nothing more"])
def test_an_answer_in_the_middle_of_the_body_is_heard(tmp_path: Path, closes: bool) -> None:
    answer_early: list[Step] = [ReadHead(), b"HTTP/1.1 413 No\r\nContent-Length: 3\r\n\r\nbig"]
    with serving(tmp_path / "s", answer_early + ([] if closes else [Wait(1)])) as server:
        body: Iterator[bytes] = (b"x" * 65536 for _ in range(10_000))
        with unixhttp.request(
            server.path, "PUT", "/f", headers=HEADERS, body=body, length=655_360_000, idle_timeout_s=10
        ) as answer:
            assert (answer.status, answer.read(10)) == (413, b"big")


def test_timeouts(tmp_path: Path) -> None:
    slow_head: list[Step] = [ReadHead(), *[step for byte in OK for step in (bytes([byte]), Wait(0.1))]]
    # No byte of it is late, and after two seconds it would end: a dripping head does not extend the time.
    with serving(tmp_path / "a", slow_head) as server, pytest.raises(TimeoutError):
        get(server.path, timeout_s=0.3)
    slow_body: list[Step] = [ReadHead(), OK + b"Content-Length: 5\r\n\r\nhe", Wait(1)]
    with serving(tmp_path / "b", slow_body) as server, pytest.raises(TimeoutError):
        get(server.path, idle_timeout_s=0.2).read(10)
    with serving(tmp_path / "c", [Wait(1)]) as server, pytest.raises(TimeoutError):
        body = b"x" * 10_000_000
        unixhttp.request(server.path, "PUT", "/f", headers=HEADERS, body=body, idle_timeout_s=0.2)


SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: sbx-stream/1\r\n\r\n"


@pytest.mark.parametrize(
    ("steps", "early"),
    [
        pytest.param([SWITCH + b"early\r\n\r\nbytes"], b"early\r\n\r\nbytes", id="in one piece"),
        pytest.param([Split(SWITCH), Wait(0.05)], b"", id="byte by byte"),
        pytest.param([SWITCH.replace(b"Upgrade\r\n", b"keep-alive, upgrade\r\n", 1)], b"", id="a list"),
    ],
)
def test_bytes_behind_an_upgrade_are_kept(tmp_path: Path, steps: list[Step], early: bytes) -> None:
    with serving(tmp_path / "s", [ReadHead(), *steps, Read(10**6)]) as server:
        upgraded = unixhttp.upgrade(server.path, "/a", protocol="sbx-stream/1", headers=HEADERS)
        assert isinstance(upgraded, Upgraded)
        assert upgraded.early == early
        assert upgraded.sock.gettimeout() is None
        upgraded.sock.sendall(b"to the server")
        upgraded.sock.close()
    assert server.seen[0].endswith(b"to the server")
    assert b"Upgrade: sbx-stream/1\r\n" in server.seen[0]


def test_a_refused_upgrade_is_an_answer(tmp_path: Path) -> None:
    script: list[Step] = [ReadHead(), b"HTTP/1.1 409 Conflict\r\nContent-Length: 2\r\n\r\n{}"]
    with serving(tmp_path / "s", script) as server:
        answer = unixhttp.upgrade(server.path, "/a", protocol="sbx-stream/1", headers=HEADERS)
        assert isinstance(answer, Response)
        with answer:
            assert (answer.status, answer.read(10)) == (409, b"{}")


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(SWITCH.replace(b"sbx-stream/1", b"websocket"), id="another protocol"),
        pytest.param(SWITCH.replace(b"Connection: Upgrade\r\n", b""), id="no Connection field"),
        pytest.param(SWITCH.replace(b"Upgrade: sbx-stream/1\r\n", b""), id="no Upgrade field"),
    ],
)
def test_a_switch_to_something_else_is_refused(tmp_path: Path, head: bytes) -> None:
    with serving(tmp_path / "s", [ReadHead(), head]) as server, pytest.raises(ProtocolError, match="another"):
        unixhttp.upgrade(server.path, "/a", protocol="sbx-stream/1", headers=HEADERS)


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        pytest.param("/a b", {}, id="a blank in the target"),
        pytest.param("/a\r\nX: y", {}, id="a line end in the target"),
        pytest.param("/ä", {}, id="not ASCII"),
        pytest.param("/a", {"X": "y\r\nZ: z"}, id="a line end in a field"),
    ],
)
def test_a_head_that_would_hold_another_line_is_never_sent(target: str, headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        unixhttp.request_head("GET", target, headers)


def test_a_path_longer_than_a_socket_address(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    here = os.open(deep, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{here}/sock")
        os.close(here)
        listener.listen()
        with unixhttp.connect(str(deep / "sock"), 5) as sock:
            assert unixhttp.peer_uid(sock) == os.getuid()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        pytest.param(lambda path: None, FileNotFoundError, id="no file"),
        pytest.param(lambda path: path.write_text(""), ConnectionRefusedError, id="a plain file"),
    ],
)
def test_nothing_listens(tmp_path: Path, make: object, error: type[OSError]) -> None:
    assert callable(make)
    make(tmp_path / "s")
    with pytest.raises(error):
        get(str(tmp_path / "s"))
