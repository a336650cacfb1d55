"""The guest protocol as tables: what is written, what is read, and what is refused at each end."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guestd import protocol
from guestd.protocol import FrameDecoder, GuestProtocolFault, LineReader, Request, SessionState

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "guest"

IDENTITY: dict[str, Any] = {
    "hostname": "sandbox-1", "machine_id": "0123456789abcdef" * 2, "time_ns": 1_700_000_000_000_000_000,
    "entropy": "00ff" * 16,
}

NETWORK: dict[str, Any] = {
    "address": "172.16.0.2/30", "gateway": "172.16.0.1", "resolver": "172.16.0.1", "mtu": 1500,
}
VOLUME: dict[str, Any] = {"path": "/v", "read_only": True}
FILE: dict[str, Any] = {"path": "/a", "mode": 0o600, "data": ""}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ping": ("ping", {}),
    "configure": ("configure", {**IDENTITY, "env": {"TOKEN": "a=b\nc"}}),
    "configure-everything": (
        "configure",
        {**IDENTITY, "network": NETWORK, "files": [{"path": "/etc/pip.conf", "mode": 0o644, "data": "W2dsb2JhbF0K"}]},
    ),
    "configure-with-volumes": (
        "configure",
        {**IDENTITY, "volumes": [{"path": "/data", "read_only": False}, {"path": "/b", "read_only": True}]},
    ),
    "exec-plain": ("exec", {"argv": ["true"]}),
    "exec-everything": (
        "exec",
        {"argv": ["a", "", "two words", "line\nbreak", "\udcff\udc80", "ü€😀"], "env": {"X": "", "Y": "=\n"},
         "cwd": "/workspace", "tty": True, "rows": 43, "cols": 132, "keep": True, "session": "p-1_A"},
    ),
    "attach": ("attach", {"session": "p-1", "offset_o": 5, "offset_E": (1 << 53) - 1}),
    "sessions": ("sessions", {}),
    "forget": ("forget", {"session": "p-1"}),
    "read": ("read", {"path": "/a/b"}),
    "write": ("write", {"path": "/a/\udcff", "size": 64 << 20}),
    "remove": ("remove", {"path": "/a"}),
    "list": ("list", {"path": "/"}),
    "bundle-in": ("bundle_in", {"branch": "sandbox", "size": 4 << 30}),
    "bundle-out": ("bundle_out", {"base": "0123456", "branch": "sandbox/checkpoint"}),
    "dial": ("dial", {"port": 65535}),
    "sync": ("sync", {"final": True}),
}

ANSWERS: dict[str, bytes] = {
    "ok": protocol.encode_ok(),
    "pong": protocol.encode_ok(version=1, configured=False),
    "size": protocol.encode_ok(size=4 << 30),
    "sessions": protocol.encode_ok(
        sessions=[SessionState("p-1", True, None, 0, 0), SessionState("p-2", False, 137, 1 << 40, 7)]
    ),
    "error": protocol.encode_error("no_such_cwd", "no such working directory: /\udcff"),
    "error-of-no-known-code": protocol.encode_error("surprise", "what"),
}

FRAMES: dict[str, bytes] = {
    "stdin": protocol.encode_frame("i", b"\x00\xff\n"),
    "stdin-end": protocol.encode_frame("e"),
    "signal": protocol.encode_signal("TERM"),
    "resize": protocol.encode_resize(43, 132),
    "stdout": protocol.encode_frame("o", b"out"),
    "stderr": protocol.encode_frame("E", b"err"),
    "exit": protocol.encode_exit(-1),
    "gap": protocol.encode_gap("E", 1 << 40),
}


def golden(name: str, lines: dict[str, bytes]) -> None:
    """Compares with a file of the golden folder; GOLDEN=write writes it instead."""
    text = "".join(f"{key}: {value!r}\n" for key, value in lines.items())
    path = GOLDEN / name
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert path.read_text() == text


def test_what_is_written_is_as_recorded() -> None:
    golden(
        "requests.txt",
        {key: protocol.encode_request(Request(op, **fields)) for key, (op, fields) in REQUESTS.items()},
    )
    golden("answers.txt", ANSWERS)
    golden("frames.txt", FRAMES)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_survives_the_wire(name: str) -> None:
    op, fields = REQUESTS[name]
    request = Request(op, **fields)
    line = protocol.encode_request(request)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    read = protocol.decode_request(line[:-1])
    assert read == Request(op, **fields)
    for field, value in fields.items():
        assert getattr(read, field) == value


def test_every_op_has_an_example() -> None:
    assert {op for op, _ in REQUESTS.values()} == set(protocol.FIELDS)


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


BAD_REQUESTS: dict[str, bytes] = {
    "nothing": b"",
    "not JSON": b"hello",
    "not an object": b"[]",
    "a string": b'"ping"',
    "not UTF-8": b'{"op":"ping\xff"}',
    "NaN": b'{"op":"sync","final":NaN}',
    "a duplicate name": b'{"op":"ping","op":"ping"}',
    "a duplicate variable": b'{"op":"exec","argv":["a"],"env":{"A":"1","A":"2"}}',
    "nested without end": b"[" * 100_000,
    "a number of a million digits": b'{"op":' + b"1" * 1_000_000 + b"}",
    "no op": b"{}",
    "an op that is no string": b'{"op":["exec"]}',
    "an unknown op": line(op="reboot"),
    "an unknown field": line(op="ping", extra=1),
    "a field of another op": line(op="ping", path="/"),
    "exec without argv": line(op="exec"),
    "an empty argv": line(op="exec", argv=[]),
    "an empty command": line(op="exec", argv=["", "a"]),
    "argv as a string": line(op="exec", argv="true"),
    "a number in argv": line(op="exec", argv=["a", 1]),
    "NUL in argv": line(op="exec", argv=["a\0b"]),
    "a surrogate that stands for no byte": b'{"op":"exec","argv":["\\ud800"]}',
    "an unnamed variable": line(op="exec", argv=["a"], env={"": "1"}),
    "= in a variable's name": line(op="exec", argv=["a"], env={"A=B": "1"}),
    "NUL in a variable": line(op="exec", argv=["a"], env={"A": "\0"}),
    "a variable that is a number": line(op="exec", argv=["a"], env={"A": 1}),
    "a relative cwd": line(op="exec", argv=["a"], cwd="tmp"),
    "an empty cwd": line(op="exec", argv=["a"], cwd=""),
    "tty as a number": line(op="exec", argv=["a"], tty=1),
    "rows as a flag": line(op="exec", argv=["a"], rows=True),
    "65536 rows": line(op="exec", argv=["a"], rows=65536),
    "-1 columns": line(op="exec", argv=["a"], cols=-1),
    "columns as text": line(op="exec", argv=["a"], cols="80"),
    "keep without session": line(op="exec", argv=["a"], keep=True),
    "session without keep": line(op="exec", argv=["a"], session="a"),
    "a session with a slash": line(op="exec", argv=["a"], keep=True, session="a/b"),
    "a session of 65 characters": line(op="exec", argv=["a"], keep=True, session="a" * 65),
    "a negative offset": line(op="attach", session="a", offset_o=-1),
    "an offset beyond 53 bits": line(op="attach", session="a", offset_o=1 << 53),
    "a relative path": line(op="read", path="etc/passwd"),
    "an empty path": line(op="read", path=""),
    "a path that goes up": line(op="read", path="/workspace/../etc"),
    "NUL in a path": line(op="read", path="/a\0b"),
    "a path beyond PATH_MAX": line(op="read", path="/" + "a" * 4095),
    "a negative size": line(op="write", path="/a", size=-1),
    "a fractional size": line(op="write", path="/a", size=1.5),
    "a branch like an option": line(op="bundle_out", base="main", branch="-x"),
    "a branch with two dots": line(op="bundle_out", base="main", branch="a..b"),
    "a branch ending .lock": line(op="bundle_out", base="main", branch="a.lock"),
    "a branch ending in a slash": line(op="bundle_out", base="main", branch="a/"),
    "a branch with a newline": line(op="bundle_out", base="main", branch="a\nb"),
    "a base with a caret": line(op="bundle_out", base="main^", branch="a"),
    "port 0": line(op="dial", port=0),
    "port 65536": line(op="dial", port=65536),
    "a short machine id": line(op="configure", **{**IDENTITY, "machine_id": "0"}),
    "entropy that is no hex": line(op="configure", **{**IDENTITY, "entropy": "z" * 64}),
    "a hostname with a dot": line(op="configure", **{**IDENTITY, "hostname": "a.b"}),
    "an empty network": line(op="configure", **IDENTITY, network={}),
    "a network with more": line(op="configure", **IDENTITY, network={**NETWORK, "search": "example.com"}),
    **{
        f"a network whose {name} is {value}": line(op="configure", **IDENTITY, network={**NETWORK, name: value})
        for name, value in [
            ("address", "172.16.0.2"), ("address", "172.16.0.2/33"), ("address", "172.16.0.2/0"),
            ("address", "172.16.0.2/030"), ("address", "fd00::2/64"), ("gateway", "172.16.0.256"),
            ("gateway", "172.16.0.01"), ("gateway", "172.16.1"), ("gateway", 1), ("resolver", "r.example"),
            ("resolver", "172.16.0.1\nsearch x"), ("mtu", 575), ("mtu", 65536), ("mtu", "1500"), ("mtu", True),
        ]
    },
    "files that are no list": line(op="configure", **IDENTITY, files={}),
    "a file without data": line(op="configure", **IDENTITY, files=[{"path": "/a", "mode": 0}]),
    "a file with an owner": line(op="configure", **IDENTITY, files=[{**FILE, "uid": 0}]),
    "a file with a relative path": line(op="configure", **IDENTITY, files=[{**FILE, "path": "a"}]),
    "a file on the way up": line(op="configure", **IDENTITY, files=[{**FILE, "path": "/etc/../a"}]),
    "a file that runs as its owner": line(op="configure", **IDENTITY, files=[{**FILE, "mode": 0o4755}]),
    "a file's mode as text": line(op="configure", **IDENTITY, files=[{**FILE, "mode": "644"}]),
    "a file of no base64": line(op="configure", **IDENTITY, files=[{**FILE, "data": "a b="}]),
    "a file of no ASCII": line(op="configure", **IDENTITY, files=[{**FILE, "data": "é"}]),
    "a file of a number": line(op="configure", **IDENTITY, files=[{**FILE, "data": 7}]),
    "33 files": line(op="configure", **IDENTITY, files=[FILE] * 33),
    "files beyond 256 KiB": line(op="configure", **IDENTITY, files=[{**FILE, "data": "AAAA" * (43 << 10)}] * 2),
    "a file beyond 256 KiB": line(op="configure", **IDENTITY, files=[{**FILE, "data": "AAAA" * (90 << 10)}]),
    "a volume as text": line(op="configure", **IDENTITY, volumes=["a"]),
    "nine volumes": line(op="configure", **IDENTITY, volumes=[{**VOLUME, "path": f"/{n}"} for n in range(9)]),
    "a volume nowhere": line(op="configure", **IDENTITY, volumes=[{"read_only": True}]),
    "a volume on the way up": line(op="configure", **IDENTITY, volumes=[{**VOLUME, "path": "/a/.."}]),
    "a volume that is half read-only": line(op="configure", **IDENTITY, volumes=[{**VOLUME, "read_only": 1}]),
    "a volume with more": line(op="configure", **IDENTITY, volumes=[{**VOLUME, "drive": "vda"}]),
    "volumes that are none": line(op="configure", **IDENTITY, volumes=None),
}


def test_as_many_files_and_bytes_as_are_taken() -> None:
    full = [{**FILE, "data": "AAAA" * ((256 << 10) // 3)}] + [FILE] * 31
    assert len(Request("configure", **IDENTITY, files=full).files) == 32


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_a_fault(name: str) -> None:
    with pytest.raises(GuestProtocolFault) as fault:
        protocol.decode_request(BAD_REQUESTS[name])
    assert fault.value.code == "bad_request"
    assert len(str(fault.value)) < 200


@pytest.mark.parametrize(
    ("op", "limit", "fields"),
    [("write", 64 << 20, {"path": "/a"}), ("bundle_in", 4 << 30, {"branch": "a"})],
)
def test_more_bytes_than_are_taken(op: str, limit: int, fields: dict[str, str]) -> None:
    assert Request(op, size=limit, **fields).size == limit
    with pytest.raises(GuestProtocolFault) as fault:
        Request(op, size=limit + 1, **fields)
    assert fault.value.code == "too_large"


def test_a_request_does_not_change() -> None:
    with pytest.raises(AttributeError):
        Request("ping").op = "exec"


def test_a_request_longer_than_a_line_is_not_written() -> None:
    with pytest.raises(GuestProtocolFault) as fault:
        protocol.encode_request(Request("exec", argv=["a", "b" * protocol.MAX_LINE_BYTES]))
    assert fault.value.code == "too_large"


def test_answers_are_read_as_written() -> None:
    assert protocol.decode_answer(ANSWERS["ok"][:-1]).ok
    pong = protocol.decode_answer(ANSWERS["pong"][:-1])
    assert (pong.version, pong.configured) == (1, False)
    assert protocol.decode_answer(ANSWERS["size"][:-1]).size == 4 << 30
    first, second = protocol.decode_answer(ANSWERS["sessions"][:-1]).sessions
    assert (first.session, first.running, first.exit_code) == ("p-1", True, None)
    assert (second.running, second.exit_code, second.bytes_o, second.bytes_E) == (False, 137, 1 << 40, 7)
    error = protocol.decode_answer(ANSWERS["error"][:-1])
    assert (error.ok, error.code, error.message) == (False, "no_such_cwd", "no such working directory: /\udcff")


@pytest.mark.parametrize("code", protocol.ERROR_CODES)
def test_every_error_code_survives(code: str) -> None:
    assert protocol.decode_answer(protocol.encode_error(code, "why")[:-1]).code == code


def test_an_error_of_another_version_is_internal() -> None:
    answer = protocol.decode_answer(b'{"ok":false,"error":{"code":"on_fire","message":"x"}}')
    assert answer.code == "internal"


@pytest.mark.parametrize(
    "bad",
    [
        b"", b"null", b"{}", b'{"ok":1}', b'{"ok":"true"}', b'{"ok":true,"extra":1}', b'{"ok":true,"size":-1}',
        b'{"ok":true,"size":4294967297}', b'{"ok":true,"size":true}', b'{"ok":true,"sessions":{}}',
        b'{"ok":true,"sessions":[1]}', b'{"ok":true,"sessions":[{"session":"a"}]}',
        b'{"ok":true,"sessions":[{"session":"a/b","running":true,"exit_code":null,"bytes_o":0,"bytes_E":0}]}',
        b'{"ok":true,"sessions":[{"session":"a","running":true,"exit_code":4294967296,"bytes_o":0,"bytes_E":0}]}',
        b'{"ok":true,"sessions":[' + b",".join([b"{}"] * 129) + b"]}",
        b'{"ok":false}', b'{"ok":false,"error":"no"}', b'{"ok":false,"error":{"code":1,"message":"x"}}',
        b'{"ok":false,"error":{"code":"internal","message":"x","more":1}}',
        b'{"ok":false,"error":{"code":"internal","message":"x"},"size":1}',
        b'{"ok":true,"version":0}', b'{"ok":true,"ok":true}', b"{" * 50_000,
    ],
)
def test_a_bad_answer_is_a_fault(bad: bytes) -> None:
    with pytest.raises(GuestProtocolFault):
        protocol.decode_answer(bad)


# ---- lines

@pytest.mark.parametrize("piece", [1, 3, 4096])
def test_a_line_arrives_in_pieces(piece: int) -> None:
    stream = b'{"op":"ping"}\nrest\nof it'
    reader, got = LineReader(), None
    at = 0
    while got is None:
        got = reader.feed(stream[at:at + piece])
        at += piece
    assert got == b'{"op":"ping"}'
    assert reader.rest() + stream[at:] == b"rest\nof it"
    assert reader.rest() == b""


@pytest.mark.parametrize("piece", [1, 7, 100])
def test_a_line_of_the_limit_is_read_and_one_byte_more_is_a_fault(piece: int) -> None:
    def feed(stream: bytes) -> bytes | None:
        reader = LineReader(16)
        for at in range(0, len(stream), piece):
            got = reader.feed(stream[at:at + piece])
            if got is not None:
                return got
        return None

    assert feed(b"a" * 15 + b"\n") == b"a" * 15
    with pytest.raises(GuestProtocolFault) as fault:
        feed(b"a" * 16 + b"\n")
    assert fault.value.code == "too_large"


def test_a_line_without_end_is_a_fault_before_it_is_stored() -> None:
    reader = LineReader()
    with pytest.raises(GuestProtocolFault):
        for _ in range(17):
            reader.feed(b"x" * 65536)


# ---- frames

SENT = [("o", b"out"), ("E", b""), ("o", bytes(range(256)) * 300), ("d", b"o" + bytes(8)), ("x", bytes(4))]
STREAM = b"".join(protocol.encode_frame(kind, payload) for kind, payload in SENT)


@pytest.mark.parametrize("piece", [1, 2, 5, 6, 4096, len(STREAM)])
def test_frames_arrive_in_pieces(piece: int) -> None:
    decoder = FrameDecoder(protocol.TO_HOST)
    got = []
    for at in range(0, len(STREAM), piece):
        got += decoder.feed(STREAM[at:at + piece])
    assert got == SENT
    assert decoder.idle


@pytest.mark.parametrize(
    ("kinds", "head"),
    [
        pytest.param(protocol.TO_HOST, b"i\0\0\0\0", id="a kind of the other direction"),
        pytest.param(protocol.TO_GUEST, b"o\0\0\0\0", id="a kind of the other direction, too"),
        pytest.param(protocol.TO_HOST, b"\0\0\0\0\0", id="a kind that is none"),
        pytest.param(protocol.TO_HOST, b"o\0\x10\0\x01", id="one byte more than a frame may have"),
        pytest.param(protocol.TO_HOST, b"o\xff\xff\xff\xff", id="four gigabytes"),
        pytest.param(protocol.TO_HOST, b"x\0\0\0\x03", id="a short exit code"),
        pytest.param(protocol.TO_HOST, b"x\0\0\0\x08", id="a long exit code"),
        pytest.param(protocol.TO_HOST, b"d\0\0\0\x08", id="a gap of no stream"),
        pytest.param(protocol.TO_GUEST, b"e\0\0\0\x01", id="an end with a payload"),
        pytest.param(protocol.TO_GUEST, b"r\0\0\0\x02", id="half a size"),
        pytest.param(protocol.TO_GUEST, b"s\0\0\0\x11", id="a signal's name of 17 bytes"),
    ],
)
@pytest.mark.parametrize("piece", [1, 5])
def test_a_bad_head_is_a_fault_before_its_payload_comes(kinds: dict[int, int], head: bytes, piece: int) -> None:
    decoder = FrameDecoder(kinds)
    with pytest.raises(GuestProtocolFault):
        for at in range(0, 5, piece):
            decoder.feed(head[at:at + piece])


def test_a_frame_of_the_limit_passes() -> None:
    frame = protocol.encode_frame("o", b"x" * protocol.MAX_FRAME_BYTES)
    assert len(FrameDecoder(protocol.TO_HOST).feed(frame)[0][1]) == protocol.MAX_FRAME_BYTES
    with pytest.raises(GuestProtocolFault):
        protocol.encode_frame("o", b"x" * (protocol.MAX_FRAME_BYTES + 1))


def test_payloads_say_what_was_meant() -> None:
    assert protocol.decode_resize(protocol.encode_resize(0, 65535)[5:]) == (0, 65535)
    assert protocol.decode_exit(protocol.encode_exit(-(1 << 31))[5:]) == -(1 << 31)
    assert protocol.decode_gap(protocol.encode_gap("o", (1 << 64) - 1)[5:]) == ("o", (1 << 64) - 1)
    for name in protocol.SIGNALS:
        assert protocol.decode_signal(protocol.encode_signal(name)[5:]) == name
    assert protocol.decode_signal(b"STOP") is None
    assert protocol.decode_signal(b"\xff\x00") is None
    with pytest.raises(GuestProtocolFault):
        protocol.decode_gap(b"x" + bytes(8))


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_rubbish_is_a_fault_or_nothing(rubbish: bytes) -> None:
    for read in (protocol.decode_request, protocol.decode_answer, FrameDecoder(protocol.TO_HOST).feed):
        with contextlib.suppress(GuestProtocolFault):
            read(rubbish)


@given(st.lists(st.binary(min_size=1, max_size=40).filter(lambda word: b"\0" not in word), min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_any_bytes_but_nul_travel_in_argv(words: list[bytes]) -> None:
    written = protocol.encode_request(Request("exec", argv=[os.fsdecode(word) for word in words]))
    assert [os.fsencode(word) for word in protocol.decode_request(written[:-1]).argv] == words
