"""The rules of a session as scripts: events in, frames out, nothing else involved."""

from __future__ import annotations

import pytest

from guestd import protocol, session
from guestd.protocol import FrameDecoder, GuestProtocolFault
from guestd.session import Feed, Ring, Session


def frames(sent: list[bytes]) -> list[tuple[str, bytes]]:
    return FrameDecoder(protocol.TO_HOST).feed(b"".join(sent))


@pytest.mark.parametrize(
    ("op", "configured", "allowed"),
    [
        ("ping", False, True), ("ping", True, True), ("configure", False, True), ("configure", True, False),
        *((op, False, False) for op in protocol.FIELDS if op not in ("ping", "configure")),
        *((op, True, True) for op in protocol.FIELDS if op != "configure"),
    ],
)
def test_which_request_is_legal_when(op: str, configured: bool, allowed: bool) -> None:
    assert (session.refusal(op, configured) is None) == allowed


# ---- the ring

def test_a_ring_gives_back_what_it_was_given_from_any_offset() -> None:
    ring = Ring(1 << 20)
    whole = b""
    for size in (1, 5, 0, 20_000, 16_384, 1, 1):
        piece = bytes([size % 251]) * size
        if piece:
            ring.append(piece)
        whole += piece
    for offset in (0, 1, 6, 7, 20_005, 20_006, 36_389, 36_391, len(whole)):
        got = b""
        while offset + len(got) < ring.end:
            got += ring.read(offset + len(got))
        assert got == whole[offset:]


def test_a_ring_forgets_the_oldest_and_keeps_what_it_may() -> None:
    ring = Ring(100_000)
    for number in range(100):
        ring.append(bytes([number]) * 10_000)
        ring.trim(ring.end)
        assert ring.end - ring.start <= 100_000
    assert ring.end == 1_000_000
    assert ring.read(ring.start)[:1] in (b"\x5a", b"\x5b")
    with pytest.raises(ValueError):
        ring.read(ring.start - 1)


def test_a_ring_keeps_what_lies_behind_the_floor() -> None:
    ring = Ring(0)
    for _ in range(10):
        ring.append(b"x" * 20_000)
    ring.trim(50_000)
    assert 0 < ring.start <= 50_000
    ring.trim(ring.end)
    assert ring.start == ring.end


def test_single_bytes_do_not_become_a_million_pieces() -> None:
    ring = Ring(1 << 20)
    for _ in range(50_000):
        ring.append(b"x")
        ring.trim(ring.end)
    assert len(ring._pieces) < 10


# ---- one process

def test_output_and_exit_reach_the_connection_that_started_it() -> None:
    it, feed = Session(0), Feed(pinned=True)
    it.add(feed)
    it.output("o", b"out")
    it.output("E", b"err")
    assert frames(it.take(feed)) == [("o", b"out"), ("E", b"err")]
    it.closed("o")
    it.closed("E")
    assert it.take(feed) == []
    it.exited(3, 10.0, {})
    assert it.over
    assert frames(it.take(feed)) == [("x", b"\0\0\0\x03")]
    assert feed.done
    assert it.take(feed) == []


def test_the_exit_code_waits_for_the_last_output() -> None:
    it, feed = Session(0), Feed(pinned=True)
    it.add(feed)
    it.exited(0, 10.0, {"o": 4})
    assert not it.over
    it.output("o", b"last")
    it.closed("o")
    it.closed("E")
    assert frames(it.take(feed)) == [("o", b"last"), ("x", bytes(4))]


def test_a_child_that_keeps_the_pipe_is_waited_for_shortly() -> None:
    it, feed = Session(0), Feed(pinned=True)
    it.add(feed)
    it.exited(0, 10.0, {"o": 0, "E": 0})
    assert it.deadline_s() == pytest.approx(10.3)
    it.tick(10.2)
    assert not it.over
    it.output("o", b"late")
    it.tick(10.31)
    assert it.over
    assert it.deadline_s() is None
    assert frames(it.take(feed)) == [("o", b"late"), ("x", bytes(4))]


def test_what_was_in_the_pipe_at_the_exit_is_owed_however_late() -> None:
    it, feed = Session(0), Feed(pinned=True)
    it.add(feed)
    it.exited(0, 10.0, {"o": 5})
    it.tick(99.0)
    assert not it.over
    it.output("o", b"12345")
    it.tick(99.0)
    assert it.over


def test_time_spent_waiting_for_a_reader_does_not_count() -> None:
    it = Session(0)
    it.exited(0, 10.0, {})
    it.waited(5.0)
    it.tick(15.0)
    assert not it.over
    it.tick(15.31)
    assert it.over


def test_the_process_waits_for_who_started_it() -> None:
    it, feed = Session(protocol.RING_BYTES), Feed(pinned=True)
    it.add(feed)
    it.output("o", b"x" * session.AHEAD_BYTES)
    assert not it.wants("o")
    assert it.wants("E")
    it.take(feed)
    assert it.wants("o")
    it.output("o", b"x" * session.AHEAD_BYTES)
    it.remove(feed)
    assert it.wants("o"), "nobody is waited for when it has left"


def test_an_attached_connection_gets_the_start_and_then_what_follows() -> None:
    it, feed = Session(protocol.RING_BYTES), Feed()
    it.output("o", b"before")
    it.add(feed)
    assert frames(it.take(feed)) == [("o", b"before")]
    it.output("o", b"after")
    assert frames(it.take(feed)) == [("o", b"after")]


def test_an_attached_connection_goes_on_from_its_offsets() -> None:
    it, feed = Session(protocol.RING_BYTES), Feed(3, 1)
    it.output("o", b"abcdef")
    it.output("E", b"xyz")
    it.add(feed)
    assert frames(it.take(feed)) == [("o", b"def"), ("E", b"yz")]


def test_a_slow_connection_is_told_what_it_missed_and_holds_nobody_up() -> None:
    it, feed = Session(100_000), Feed()
    it.add(feed)
    for number in range(30):
        it.output("o", bytes([number]) * 10_000)
        assert it.wants("o")
    sent = frames(it.take(feed))
    assert sent[0][0] == "d"
    stream, lost = protocol.decode_gap(sent[0][1])
    assert stream == "o" and 200_000 <= lost < 210_000
    got = sent[1][1]
    while more := frames(it.take(feed)):
        got += more[0][1]
    assert lost + len(got) == 300_000
    assert got.endswith(bytes([29]) * 10_000)


def test_an_offset_that_does_not_exist_yet_is_a_fault() -> None:
    it = Session(protocol.RING_BYTES)
    it.output("o", b"abc")
    it.add(Feed(3, 0))
    with pytest.raises(GuestProtocolFault):
        it.add(Feed(4, 0))
    with pytest.raises(GuestProtocolFault):
        it.add(Feed(0, 1))


def test_a_finished_process_is_replayed_to_whoever_comes() -> None:
    it = Session(protocol.RING_BYTES)
    it.output("o", b"all of it")
    it.closed("o")
    it.closed("E")
    it.exited(143, 1.0, {})
    for _ in range(2):
        feed = Feed()
        it.add(feed)
        assert frames(it.take(feed)) == [("o", b"all of it"), ("x", b"\0\0\0\x8f")]
        it.remove(feed)
