"""What must be true of the DNS answerer whatever the packet. `one` takes any bytes; an AssertionError is a finding."""

from __future__ import annotations

from egress.dns import Address, Empty, Failure, Framer, Ignore, NoSuchName, Question, Reply, framed, read, write

OUTCOMES = (Address("198.18.0.9"), Empty(), NoSuchName(), Failure())
_QUESTION = b"\7aLLowed\4TeSt\0\0\1\0\1"
SEEDS = [
    b"\0\7\1\0\0\1\0\0\0\0\0\0" + _QUESTION,
    b"\0\7\1\0\0\1\0\0\0\0\0\1" + _QUESTION + b"\0\0\x29\x10\0\0\0\x80\0\0\0",
    b"\0\7\1\0\0\1\0\0\0\0\0\1" + _QUESTION + b"\0\0\x29\x10\0\0\1\0\0\0\4\xfd\xe9\0\0",
    b"\0\7\1\0\0\2\0\0\0\0\0\0" + _QUESTION * 2,
    b"\0\7\1\0\0\1\0\0\0\0\0\0\xc0\x0c\0\1\0\1",
]


def one(packet: bytes) -> None:
    found = read(packet)
    if len(packet) >= 3 and packet[2] & 0x80:
        assert found == Ignore(), "an answer is never answered"
    match found:
        case Reply(data):
            _answers(data, packet)
            # Never more than was sent: nobody is flooded through us.
            assert len(data) <= len(packet)
        case Question():
            assert found.shown.isprintable() and len(found.shown) <= 1024
            for outcome in OUTCOMES:
                answer = write(found, outcome)
                _answers(answer, packet)
                assert len(answer) <= 512
                end = 12 + sum(len(label) + 1 for label in found.labels) + 1 + 4
                assert answer[12:end] == packet[12:end]
    _framed(packet)


def _answers(data: bytes, packet: bytes) -> None:
    assert len(data) >= 12 and data[:2] == packet[:2] and data[2] & 0x80


def _framed(packet: bytes) -> None:
    """The same however TCP cuts it."""
    stream = framed(packet[:4096]) + packet[:7]
    whole, bits = Framer(), Framer()
    packets = whole.feed(stream)
    assert packets[0] == packet[:4096]
    assert [got for at in range(len(stream)) for got in bits.feed(stream[at : at + 1])] == packets
    assert whole.broken == bits.broken
