"""One direction of plain HTTP: what it asks the relay for."""

from __future__ import annotations

from egress.command import Command, Direction, Pass, Read, Send
from egress.stream import CHUNK_BYTES, PASS_FROM, Stream

HEAD = b"POST / HTTP/1.1\r\nHost: allowed.test\r\n\r\n"


def begun(direction: Direction, body: int) -> Stream:
    stream = Stream(direction, CHUNK_BYTES)
    stream.add(HEAD)
    assert stream.head() == HEAD
    stream.accept(body)
    stream.advance()
    return stream


def test_a_body_passes_from_where_its_last_data_ended() -> None:
    asked: list[Command] = [
        Send(Direction.UP, HEAD), Pass(Direction.UP, 100_000), Read(Direction.UP, len(HEAD))
    ]  # fmt: skip
    assert begun(Direction.UP, 100_000).go_on() == asked


def test_the_last_byte_of_a_response_is_looked_at() -> None:
    stream = begun(Direction.DOWN, 100_000)
    assert Pass(Direction.DOWN, 99_999) in stream.go_on()
    assert not stream.advance()
    stream.add(b"x")
    assert stream.advance()


def test_a_small_body_is_read() -> None:
    assert not any(isinstance(command, Pass) for command in begun(Direction.UP, PASS_FROM - 1).go_on())


def test_nothing_passes_while_more_may_be_on_its_way_here() -> None:
    stream = begun(Direction.UP, 100_000)
    stream.read()                       # from here on the relay may have read on, and told us later
    assert stream.ahead() == 0
    stream.add(b"x" * 10)
    stream.advance()
    assert stream.ahead() == 99_990


def test_credit_is_filled_up_and_no_further() -> None:
    stream = Stream(Direction.DOWN, 0)
    assert stream.read() == Read(Direction.DOWN, CHUNK_BYTES)
    assert stream.read() == Read(Direction.DOWN, 0)
    stream.add(b"x" * 100)
    assert stream.read() == Read(Direction.DOWN, 100)
