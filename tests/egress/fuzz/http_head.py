"""What must be true of the HTTP reader whatever the bytes. `one` takes any; an AssertionError is a finding."""

from __future__ import annotations

import h11

from egress.http1 import Body, Ends, Malformed, Request, Scan, request, response
from egress.policy import RULES, wire_name

_END = b"\r\n\r\n"
SEEDS = [
    b"GET / HTTP/1.1\r\nHost: allowed.test" + _END,
    b"POST /x HTTP/1.1\r\nHost: allowed.test:80\r\nContent-Length: 5" + _END + b"hello",
    b"POST /x HTTP/1.0\r\nHost: allowed.test\r\nConnection: close, upgrade\r\nUpgrade: a" + _END,
    b"PUT http://allowed.test/x HTTP/1.1\r\nHost: allowed.test\r\nTransfer-Encoding: chunked" + _END
    + b"5;x=1\r\nhello\r\n0\r\nSum: 1" + _END,
    b"CONNECT allowed.test:443 HTTP/1.1\r\nHost: x" + _END,
    b"GET / HTTP/1.1\r\nHost: allowed.test\r\nHost: other.test" + _END,
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close" + _END,
    b"HTTP/1.1 200 OK\nTransfer-Encoding: gzip, chunked\nX: a\n b\n\n",
]  # fmt: skip

Outcome = tuple[Request, int] | str | None


def one(data: bytes) -> None:
    whole = _read(data, len(data) or 1)
    bits = _read(data, 1)
    # In small pieces the first fault is found first, so only the fault's kind may differ.
    assert whole == bits or (isinstance(whole, str) and isinstance(bits, str))
    if isinstance(whole, str):
        assert whole in RULES
    if isinstance(whole, tuple):
        asked, end = whole
        assert wire_name(asked.name.encode()) == asked.name and asked.port != 0
        _as_h11(data[:end], asked)
        if asked.body is Ends.CHUNKED:
            assert _follow(data[end:], len(data)) == _follow(data[end:], 1)
    if data.startswith(b"HTTP/"):
        buffer = bytearray(data)
        try:
            if end := Scan(strict=False).end(buffer):
                response(data[:end], "GET")
        except Malformed:
            return


def _read(data: bytes, size: int) -> Outcome:
    scan, buffer = Scan(strict=True), bytearray()
    try:
        for at in range(0, len(data), size):
            buffer += data[at : at + size]
            if end := scan.end(buffer):
                return request(bytes(buffer[:end])), end
    except Malformed as fault:
        return fault.rule
    return None


def _as_h11(head: bytes, asked: Request) -> None:
    """Where another strict reader takes the head, it sees the same in it."""
    reader = h11.Connection(h11.SERVER)
    reader.receive_data(head)
    try:
        event = reader.next_event()
    except h11.RemoteProtocolError:
        return
    assert isinstance(event, h11.Request)
    assert event.method.decode() == asked.method
    fields = dict(event.headers)
    assert (fields.get(b"transfer-encoding") == b"chunked") == (asked.body is Ends.CHUNKED)
    if isinstance(asked.body, int):
        assert int(fields.get(b"content-length", b"0")) == asked.body
    if asked.method != "CONNECT":
        assert fields[b"host"].lower().split(b":")[0].removesuffix(b".") == asked.name.encode()


def _follow(data: bytes, size: int) -> tuple[int, bool] | None:
    body, buffer, taken = Body(Ends.CHUNKED, strict=True), bytearray(), 0
    try:
        for at in range(0, len(data), size):
            buffer += data[at : at + size]
            count = body.take(buffer, 0)
            taken += count
            del buffer[:count]
    except Malformed:
        return None
    return taken, body.done
