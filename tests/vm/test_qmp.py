"""The monitor's protocol: every message whole, split at every byte, and what a hostile VMM may send instead."""

from __future__ import annotations

import json

import pytest

from sandboxd.vm import qmp
from sandboxd.vm.qmp import Answer, Decoder, Event, Fault, Greeting, Message, QmpError

MESSAGES: list[tuple[str, bytes, list[Message]]] = [
    (
        "greeting",
        b'{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}}, "capabilities": ["oob"]}}\r\n',
        [Greeting()],
    ),
    ("empty answer", b'{"return": {}, "id": 1}\r\n', [Answer(1, {})]),
    ("answer with a value", b'{"return": "YQ==", "id": 7}\n', [Answer(7, "YQ==")]),
    (
        "fault",
        b'{"id": 3, "error": {"class": "GenericError", "desc": "Device \'x\' not found"}}\r\n',
        [Fault(3, "Device 'x' not found")],
    ),
    (
        "shutdown with its reason",
        b'{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "SHUTDOWN", '
        b'"data": {"guest": true, "reason": "guest-reset"}}\r\n',
        [Event("SHUTDOWN", "guest-reset")],
    ),
    ("event without data", b'{"timestamp": {}, "event": "STOP"}\r\n', [Event("STOP", "")]),
    ("event with data of another kind", b'{"event": "X", "data": [1]}\n', [Event("X", "")]),
    ("reason of another kind", b'{"event": "X", "data": {"reason": 1}}\n', [Event("X", "")]),
    ("nothing between line ends", b"\r\n\n\r\n", []),
    ("long words of the VMM's are cut", b'{"event": "' + b"E" * 1000 + b'"}\n', [Event("E" * 64, "")]),
]
TABLE = pytest.mark.parametrize(("data", "expected"), [row[1:] for row in MESSAGES], ids=[row[0] for row in MESSAGES])


@TABLE
def test_a_message_is_read(data: bytes, expected: list[Message]) -> None:
    assert Decoder().feed(data) == expected


@TABLE
def test_a_message_is_read_byte_by_byte(data: bytes, expected: list[Message]) -> None:
    decoder = Decoder()
    assert [message for i in range(len(data)) for message in decoder.feed(data[i : i + 1])] == expected


def test_all_messages_are_read_at_once_and_in_order() -> None:
    assert Decoder().feed(b"".join(row[1] for row in MESSAGES)) == [m for row in MESSAGES for m in row[2]]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"hello\n", id="not JSON"),
        pytest.param(b"\xff\xfe{\x00}\x00\n", id="another encoding"),
        pytest.param(b"[]\n", id="an array"),
        pytest.param(b'"QMP"\n', id="a string"),
        pytest.param(b"{}\n", id="an empty object"),
        pytest.param(b'{"QMP": 1}\n', id="a greeting of another kind"),
        pytest.param(b'{"return": {}}\n', id="an answer to nothing"),
        pytest.param(b'{"return": {}, "id": "1"}\n', id="an id of another kind"),
        pytest.param(b'{"error": "no", "id": 1}\n', id="a fault of another kind"),
        pytest.param(b'{"event": 1}\n', id="an event of another kind"),
        pytest.param(b"[" * 100_000 + b"\n", id="deep nesting"),
        pytest.param(b'{"return": ' + b"9" * 10_000 + b', "id": 1}\n', id="a number of ten thousand digits"),
        pytest.param(b"x" * (qmp.LINE_LIMIT + 1), id="a line that does not end"),
        pytest.param(b"x" * (qmp.LINE_LIMIT + 1) + b"\n", id="a line over the limit"),
        pytest.param(b'{"event": "STOP"}\n' + b" " * (qmp.LINE_LIMIT + 1) + b"\n", id="blanks over the limit"),
    ],
)
def test_what_is_not_qmp_is_refused_for_good(data: bytes) -> None:
    decoder = Decoder()
    with pytest.raises(QmpError):
        decoder.feed(data)
    with pytest.raises(QmpError):
        decoder.feed(b'{"event": "STOP"}\n')


def test_a_line_of_the_limit_is_read_and_memory_stays_bounded() -> None:
    line = json.dumps({"return": "x" * (qmp.LINE_LIMIT - 100), "id": 1}).encode()
    decoder = Decoder()
    for _ in range(3):
        for start in range(0, len(line), 4096):
            assert decoder.feed(line[start : start + 4096]) == []
        (answer,) = decoder.feed(b"\n")
        assert isinstance(answer, Answer)


def test_a_command_is_one_line() -> None:
    line = qmp.command(4, "ringbuf-read", {"device": "a\nb", "size": 3})
    assert line.count(b"\n") == 1
    assert json.loads(line) == {
        "execute": "ringbuf-read",
        "arguments": {"device": "a\nb", "size": 3},
        "id": 4,
    }
