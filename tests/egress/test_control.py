"""The socket between sandboxd and egress, over real socket pairs."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator

import pytest

from egress import control
from egress.control import Event, Fault, Frame, Inbox, Unacked

EVENT = Event(7, 1.5, control.DENIED, "sb1", "abcd2345", "other.test", 443, "not-listed", "tls", "no", 3, 0, 0, 0)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    a.settimeout(10)
    b.settimeout(10)
    with a, b:
        yield a, b


def read_until(inbox: Inbox, connection: socket.socket, count: int) -> list[Frame]:
    frames: list[Frame] = []
    while len(frames) < count:
        frames += inbox.read(connection)
    return frames


def identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def test_frames_come_out_as_they_went_in_one_byte_at_a_time_too() -> None:
    bodies = [{"seq": 1, "do": "hello"}, {}, {"x": "ä" * 1000}]
    data = b"".join(control.pack(body) for body in bodies)
    whole, dribbled = Inbox(), Inbox()
    assert [frame.body for frame in whole.feed(data)] == bodies
    assert [frame.body for byte in data for frame in dribbled.feed(bytes([byte]))] == bodies


def test_descriptors_arrive_with_their_frame(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = ends
    r1, w1 = os.pipe()
    r2, w2 = os.pipe()
    try:
        control.send(a, {"seq": 1}, [r1])
        control.send(a, {"seq": 2})
        control.send(a, {"seq": 3, "long": "x" * 20_000}, [r2, w2])
        frames = read_until(Inbox(), b, 3)
        assert [frame.body["seq"] for frame in frames] == [1, 2, 3]
        assert [len(frame.fds) for frame in frames] == [1, 0, 2]
        got = [identity(fd) for frame in frames for fd in frame.fds]
        assert got == [identity(fd) for fd in (r1, r2, w2)]
        assert not any(os.get_inheritable(fd) for frame in frames for fd in frame.fds)
        for frame in frames:
            for fd in frame.fds:
                os.close(fd)
    finally:
        for fd in (r1, w1, r2, w2):
            os.close(fd)


def test_descriptors_nobody_claims_are_closed(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = ends
    r, w = os.pipe()
    inbox = Inbox()
    # The frame is cut off behind its first bytes, with its descriptor already here.
    socket.send_fds(a, [control.pack({"seq": 1}, 1)[:6]], [w])
    os.close(w)
    assert inbox.read(b) == []
    inbox.close()
    assert os.read(r, 1) == b""  # no writer is left
    os.close(r)


def test_the_end_of_the_stream_is_said(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = ends
    a.close()
    with pytest.raises(EOFError):
        Inbox().read(b)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(struct.pack(">I", control.FRAME_LIMIT + 1), id="a length beyond the limit"),
        pytest.param(struct.pack(">I", 3) + b"abc", id="not JSON"),
        pytest.param(struct.pack(">I", 2) + b"[]", id="a list"),
        pytest.param(struct.pack(">I", 2) + b"\xff\xfe", id="not UTF-8"),
        pytest.param(struct.pack(">I", 200_000) + b"[" * 200_000, id="nested beyond reason"),
        pytest.param(control.pack({}, 1), id="descriptors that did not come"),
        pytest.param(struct.pack(">I", 10) + b'{"fds":-1}', id="a negative count"),
        pytest.param(struct.pack(">I", 12) + b'{"fds":true}', id="a count that is no number"),
    ],
)
def test_what_breaks_the_framing_is_a_fault(data: bytes) -> None:
    with pytest.raises(Fault):
        Inbox().feed(data)


def test_a_frame_of_ours_stays_below_the_limit() -> None:
    with pytest.raises(Fault):
        control.pack({"x": "y" * control.FRAME_LIMIT})


def test_an_event_survives_the_wire() -> None:
    assert Event.from_json(json.loads(json.dumps(EVENT.as_json()))) == EVENT


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"name": 5}, id="a name that is a number"),
        pytest.param({"count": True}, id="a count that is a truth value"),
        pytest.param({"count": -1}, id="a negative count"),
        pytest.param({"count": 1 << 63}, id="a count beyond 63 bits"),
        pytest.param({"at": "now"}, id="a time that is text"),
        pytest.param({"at": float("nan")}, id="a time that is no number"),
        pytest.param({"why": "x" * 513}, id="a text beyond the limit"),
        pytest.param({"kind": "granted"}, id="a kind nobody knows"),
        pytest.param({"extra": 1}, id="a key too many"),
    ],
)
def test_an_event_that_is_not_one_is_a_fault(change: dict[str, object]) -> None:
    with pytest.raises(Fault):
        Event.from_json({**EVENT.as_json(), **change})


def test_an_event_with_a_key_missing_is_a_fault() -> None:
    value = EVENT.as_json()
    del value["why"]
    for odd in (value, [], None, "event"):
        with pytest.raises(Fault):
            Event.from_json(odd)


def test_events_wait_until_they_are_acknowledged() -> None:
    unacked = Unacked()
    for _ in range(5):
        unacked.add(EVENT)
    assert [event.number for event in unacked.after(0, 10)] == [1, 2, 3, 4, 5]
    assert [event.number for event in unacked.after(2, 2)] == [3, 4]
    unacked.ack(3, 0.0)
    assert [event.number for event in unacked.after(0, 10)] == [4, 5]
    unacked.ack(99, 0.0)
    assert unacked.after(0, 10) == [] and unacked.last == 5


def test_when_nobody_takes_events_the_oldest_go_and_are_counted() -> None:
    unacked = Unacked(limit=3)
    for _ in range(10):
        unacked.add(EVENT)
    assert [event.number for event in unacked.after(0, 10)] == [8, 9, 10]
    unacked.ack(8, 2.0)
    *_, lost = unacked.after(0, 10)
    assert (lost.number, lost.kind, lost.count, lost.at) == (11, control.LOST, 7, 2.0)
    unacked.ack(11, 3.0)
    assert len(unacked) == 0
