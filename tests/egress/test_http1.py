"""HTTP/1 heads and bodies."""

from __future__ import annotations

import time

import pytest

from egress.http1 import (
    EVERYTHING,
    MAX_CHUNK_LINE,
    MAX_HEAD,
    MAX_TRAILER,
    Body,
    Ends,
    Framing,
    Malformed,
    Request,
    Response,
    Scan,
    request,
    response,
)


def read(data: bytes, size: int = 1 << 20) -> tuple[Request, bytes] | None:
    """The request at the front and what follows it, fed by pieces."""
    scan, buffer = Scan(strict=True), bytearray()
    for at in range(0, len(data), size):
        buffer += data[at : at + size]
        if end := scan.end(buffer):
            return request(bytes(buffer[:end])), data[end:]
    return None


def lines(*texts: str | bytes) -> bytes:
    return b"".join((text if isinstance(text, bytes) else text.encode("latin-1")) + b"\r\n" for text in texts) + b"\r\n"


GET, HOST = "GET / HTTP/1.1", "Host: allowed.test"

REQUESTS = [
    pytest.param(lines(GET, HOST), Request("GET", "allowed.test", None, 0, False), id="a path and a host"),
    pytest.param(lines(GET, "hOST:ALLOWED.Test."), Request("GET", "allowed.test", None, 0, False), id="case, a dot"),
    pytest.param(lines(GET, "Host: allowed.test:80"), Request("GET", "allowed.test", None, 0, False), id="a port"),
    pytest.param(lines(GET, HOST + " \t "), Request("GET", "allowed.test", None, 0, False), id="blanks behind it"),
    pytest.param(lines("GET / HTTP/1.0", HOST), Request("GET", "allowed.test", None, 0, False), id="1.0 with a host"),
    pytest.param(lines("OPTIONS * HTTP/1.1", HOST), Request("OPTIONS", "allowed.test", None, 0, False), id="a star"),
    pytest.param(
        lines("GET /b\xfccher?x=[1]|2 HTTP/1.1", HOST),
        Request("GET", "allowed.test", None, 0, False),
        id="a path in raw bytes",
    ),
    pytest.param(
        lines("GET //other.test/ HTTP/1.1", HOST),
        Request("GET", "allowed.test", None, 0, False),
        id="a path that looks like a host",
    ),
    pytest.param(
        lines("GET http://allowed.test/x HTTP/1.1", HOST),
        Request("GET", "allowed.test", 80, 0, False),
        id="an absolute target that agrees",
    ),
    pytest.param(
        lines("GET HTTP://Allowed.Test:8080?x HTTP/1.1", "Host: allowed.test:8080"),
        Request("GET", "allowed.test", 8080, 0, False),
        id="one with a port, and no path",
    ),
    pytest.param(
        lines("POST / HTTP/1.1", HOST, "Content-Length: 12"),
        Request("POST", "allowed.test", None, 12, False),
        id="a length",
    ),
    pytest.param(
        lines("POST / HTTP/1.1", HOST, "Transfer-Encoding: Chunked"),
        Request("POST", "allowed.test", None, Ends.CHUNKED, False),
        id="chunked",
    ),
    pytest.param(
        lines(GET, HOST, "Connection: keep-alive, Upgrade", "Upgrade: websocket"),
        Request("GET", "allowed.test", None, 0, True),
        id="an upgrade",
    ),
    pytest.param(
        lines(GET, HOST, "Upgrade: websocket"),
        Request("GET", "allowed.test", None, 0, False),
        id="an upgrade that Connection does not name",
    ),
    pytest.param(
        lines("CONNECT allowed.test:443 HTTP/1.1", "Host: allowed.test"),
        Request("CONNECT", "allowed.test", 443, 0, False),
        id="CONNECT",
    ),
    pytest.param(
        lines("CONNECT allowed.test.:443 HTTP/1.1", "Host: proxy.test:3128"),
        Request("CONNECT", "allowed.test", 443, 0, False),
        id="CONNECT with the proxy as host",
    ),
    pytest.param(
        lines("CONNECT allowed.test:443 HTTP/1.0"),
        Request("CONNECT", "allowed.test", 443, 0, False),
        id="CONNECT without a host",
    ),
    pytest.param(
        lines("CONNECT allowed.test:443 HTTP/1.1", "Content-Length: 0"),
        Request("CONNECT", "allowed.test", 443, 0, False),
        id="CONNECT with a length of 0",
    ),
    pytest.param(
        lines(GET, HOST, *(f"X-{n}: {n}" for n in range(1000))),
        Request("GET", "allowed.test", None, 0, False),
        id="a thousand header lines",
    ),
    pytest.param(
        lines(GET, HOST, "X-Odd: a\tb \xff", "X-Empty:"),
        Request("GET", "allowed.test", None, 0, False),
        id="odd values",
    ),
]


@pytest.mark.parametrize(("data", "expected"), REQUESTS)
@pytest.mark.parametrize("size", [1 << 20, 7, 1], ids=["at once", "by sevens", "by one byte"])
def test_requests(data: bytes, expected: Request, size: int) -> None:
    assert read(data + b"body \0\n\r", size) == (expected, b"body \0\n\r")


MALFORMED = [
    pytest.param(lines(GET, HOST, HOST), "names-disagree", id="two hosts, the same"),
    pytest.param(lines(GET, HOST, "Host: other.test"), "names-disagree", id="two hosts"),
    pytest.param(lines(GET, "Host : allowed.test"), "malformed", id="a blank before the colon"),
    pytest.param(lines(GET, "Host: allowed.test", " .other.test"), "malformed", id="a folded host"),
    pytest.param(lines(GET, " Host: allowed.test"), "malformed", id="a folded request line"),
    pytest.param(lines(GET, "Host:\tallowed.test"), "malformed", id="a tab before the value"),
    pytest.param(b"GET / HTTP/1.1\nHost: allowed.test\n\n", "malformed", id="bare LF"),
    pytest.param(b"GET / HTTP/1.1\r\nHost: allowed.test\n\r\n", "malformed", id="one bare LF"),
    pytest.param(b"GET / HTTP/1.1\r\nHost: allowed.test\rX: y\r\n\r\n", "malformed", id="a bare CR"),
    pytest.param(b"GET / HTTP/1.1\r\nHost: allowed.test\r\r\n\r\n", "malformed", id="two CR"),
    pytest.param(lines(GET, HOST, "X: a\0b"), "malformed", id="a NUL"),
    pytest.param(lines(GET, HOST, "X: a\x0bb"), "malformed", id="a vertical tab"),
    pytest.param(lines("get / HTTP/1.1", HOST), "malformed", id="a lower-case method"),
    pytest.param(lines("GET / HTTP/1.2", HOST), "malformed", id="HTTP/1.2"),
    pytest.param(lines("GET / HTTP/2.0", HOST), "malformed", id="HTTP/2.0"),
    pytest.param(lines("GET / http/1.1", HOST), "malformed", id="a lower-case version"),
    pytest.param(lines("GET /", HOST), "malformed", id="no version"),
    pytest.param(lines("GET  / HTTP/1.1", HOST), "malformed", id="two blanks"),
    pytest.param(lines("GET\t/ HTTP/1.1", HOST), "malformed", id="a tab"),
    pytest.param(lines("GET / HTTP/1.1 ", HOST), "malformed", id="a blank at the end"),
    pytest.param(lines("GET /a b HTTP/1.1", HOST), "malformed", id="a blank in the target"),
    pytest.param(b"\r\n" + lines(GET, HOST), "malformed", id="an empty line first"),
    pytest.param(lines("PRI * HTTP/2.0") + b"SM\r\n\r\n", "malformed", id="HTTP/2 by prior knowledge"),
    pytest.param(lines(GET), "no-name", id="no host"),
    pytest.param(lines("GET / HTTP/1.0"), "no-name", id="no host on 1.0"),
    pytest.param(lines(GET, "Host:"), "no-name", id="an empty host"),
    pytest.param(lines(GET, "Host: :80"), "no-name", id="only a port"),
    pytest.param(lines(GET, "Host: 127.0.0.1"), "address", id="an address"),
    pytest.param(lines(GET, "Host: [::1]:80"), "address", id="an IPv6 address"),
    pytest.param(lines(GET, "Host: ::1"), "address", id="one without brackets"),
    pytest.param(lines(GET, "Host: 0x7f.1:80"), "address", id="an address in parts"),
    pytest.param(lines(GET, "Host: allowed.test.."), "malformed", id="two trailing dots"),
    pytest.param(lines(GET, "Host: allowed.test, other.test"), "malformed", id="a list of hosts"),
    pytest.param(lines(GET, "Host: allowed.test other.test"), "malformed", id="two hosts in a line"),
    pytest.param(lines(GET, "Host: alice@allowed.test"), "malformed", id="a user name"),
    pytest.param(lines(GET, "Host: allowed.test:"), "malformed", id="a colon and no port"),
    pytest.param(lines(GET, "Host: allowed.test:0"), "malformed", id="port 0"),
    pytest.param(lines(GET, "Host: allowed.test:99999"), "malformed", id="port 99999"),
    pytest.param(lines(GET, "Host: allowed.test:8o"), "malformed", id="a port of letters"),
    pytest.param(lines(GET, "Host: b\xfccher.test"), "malformed", id="raw bytes"),
    pytest.param(lines("GET http://other.test/ HTTP/1.1", HOST), "names-disagree", id="target and host disagree"),
    pytest.param(lines("GET http://allowed.test:81/ HTTP/1.1", HOST), "names-disagree", id="their ports disagree"),
    pytest.param(lines("GET http://allowed.test/ HTTP/1.1"), "no-name", id="a target and no host"),
    pytest.param(lines("GET http://a@allowed.test/ HTTP/1.1", HOST), "malformed", id="a user name in the target"),
    pytest.param(lines("GET http://allowed.test#@other.test/ HTTP/1.1", HOST), "malformed", id="a fragment"),
    pytest.param(lines(GET, HOST, "Content-Length: 1"), "malformed", id="GET with a body"),
    pytest.param(lines("HEAD / HTTP/1.1", HOST, "Transfer-Encoding: chunked"), "malformed", id="HEAD with a body"),
    pytest.param(lines("GET http://allowed.test\\@other.test/ HTTP/1.1", HOST), "malformed", id="a backslash"),
    pytest.param(lines("GET https://allowed.test/ HTTP/1.1", HOST), "malformed", id="an https target"),
    pytest.param(lines("GET allowed.test HTTP/1.1", HOST), "malformed", id="a target that is a host"),
    pytest.param(lines("GET * HTTP/1.1", HOST), "malformed", id="a star for GET"),
    pytest.param(lines("CONNECT allowed.test HTTP/1.1"), "malformed", id="CONNECT: no port"),
    pytest.param(lines("CONNECT allowed.test:0 HTTP/1.1"), "malformed", id="CONNECT: port 0"),
    pytest.param(lines("CONNECT allowed.test:99999 HTTP/1.1"), "malformed", id="CONNECT: port 99999"),
    pytest.param(lines("CONNECT 127.0.0.1:443 HTTP/1.1"), "address", id="CONNECT: an address"),
    pytest.param(lines("CONNECT [::1]:443 HTTP/1.1"), "address", id="CONNECT: an IPv6 address"),
    pytest.param(lines("CONNECT [::ffff:7f00:1]:443 HTTP/1.1"), "address", id="CONNECT: a mapped address"),
    pytest.param(lines("CONNECT 2130706433:443 HTTP/1.1"), "address", id="CONNECT: an address as one number"),
    pytest.param(lines("CONNECT 0177.0.0.1:443 HTTP/1.1"), "address", id="CONNECT: an octal address"),
    pytest.param(lines("CONNECT 0x7f.1:443 HTTP/1.1"), "address", id="CONNECT: an address in parts"),
    pytest.param(lines("CONNECT user@allowed.test:443 HTTP/1.1"), "malformed", id="CONNECT: a user name"),
    pytest.param(lines("CONNECT allowed.test:443@other.test:443 HTTP/1.1"), "malformed", id="CONNECT: two targets"),
    pytest.param(lines("CONNECT allowed.test:443 other HTTP/1.1"), "malformed", id="CONNECT: something behind it"),
    pytest.param(lines("CONNECT http://allowed.test:443 HTTP/1.1"), "address", id="CONNECT: a URL"),
    pytest.param(lines("CONNECT allowed.test:443 HTTP/1.1", "Content-Length: 5"), "malformed", id="CONNECT: a body"),
    pytest.param(lines(GET, HOST, "Content-Length: 5", "Content-Length: 5"), "malformed", id="two lengths"),
    pytest.param(lines(GET, HOST, "Content-Length: 5, 5"), "malformed", id="two lengths in a line"),
    pytest.param(lines(GET, HOST, "Content-Length: +5"), "malformed", id="a length with a sign"),
    pytest.param(lines(GET, HOST, "Content-Length: 0x5"), "malformed", id="a hexadecimal length"),
    pytest.param(lines(GET, HOST, "Content-Length:"), "malformed", id="an empty length"),
    pytest.param(lines(GET, HOST, "Content-Length: " + "9" * 19), "malformed", id="a length beyond counting"),
    pytest.param(
        lines(GET, HOST, "Content-Length: 5", "Transfer-Encoding: chunked"), "malformed", id="a length and chunked"
    ),
    pytest.param(lines(GET, HOST, "Transfer-Encoding: gzip, chunked"), "malformed", id="a list of codings"),
    pytest.param(lines(GET, HOST, "Transfer-Encoding: identity"), "malformed", id="identity"),
    pytest.param(lines(GET, HOST, "Transfer-Encoding: xchunked"), "malformed", id="xchunked"),
    pytest.param(lines(GET, HOST, "Transfer-Encoding: \x0bchunked"), "malformed", id="a coding behind a control"),
    pytest.param(
        lines(GET, HOST, "Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), "malformed", id="chunked twice"
    ),
    pytest.param(
        lines("GET / HTTP/1.0", HOST, "Transfer-Encoding: chunked"), "malformed", id="chunked on 1.0"
    ),
    pytest.param(lines(GET, HOST, "X Y: z"), "malformed", id="a blank in a header's name"),
    pytest.param(lines(GET, HOST, ": z"), "malformed", id="no header's name"),
    pytest.param(lines(GET, HOST, "nothing"), "malformed", id="no colon"),
    pytest.param(lines(GET, HOST, "X: " + "a" * 70_000), "malformed", id="70 KB"),
    pytest.param(b"GET /" + b"a" * 70_000, "malformed", id="a line without end"),
]


@pytest.mark.parametrize(("data", "rule"), MALFORMED)
@pytest.mark.parametrize("size", [1 << 20, 1], ids=["at once", "by one byte"])
def test_heads_that_could_be_read_in_two_ways(data: bytes, rule: str, size: int) -> None:
    with pytest.raises(Malformed) as caught:
        read(data, size)
    assert caught.value.rule == rule


def test_a_line_of_nonsense_is_refused_before_the_head_is_over() -> None:
    for data in (b"SSH-2.0-OpenSSH_9.2\r\n", b"GET / HTTP/1.1\n", b"G\0", b"EHLO x\r\n"):
        with pytest.raises(Malformed):
            read(data)


def test_a_head_that_is_not_over_waits() -> None:
    whole = lines(GET, HOST)
    for cut in range(len(whole)):
        assert read(whole[:cut], 3) is None


RESPONSES = [
    pytest.param(lines("HTTP/1.1 200 OK", "Content-Length: 5"), "GET", Response(200, 5, False, b""), id="a length"),
    pytest.param(lines("HTTP/1.1 200", "Content-Length: 5"), "GET", Response(200, 5, False, b""), id="no reason"),
    pytest.param(
        b"HTTP/1.1 200 OK\nContent-Length: 5\n\n", "GET", Response(200, 5, False, b""), id="bare LF, from a server"
    ),
    pytest.param(
        lines("HTTP/1.1 200 OK", "X: a", "  b", "Content-Length: 5"), "GET", Response(200, 5, False, b""), id="folded"
    ),
    pytest.param(
        lines("HTTP/1.1 200 OK", "Content-Length: 5, 5"),
        "GET",
        Response(200, 5, False, b""),
        id="the same length twice",
    ),
    pytest.param(
        lines("HTTP/1.1 200 OK", "Transfer-Encoding: gzip, chunked"),
        "GET",
        Response(200, Ends.CHUNKED, False, b""),
        id="chunked at last",
    ),
    pytest.param(
        lines("HTTP/1.1 200 OK", "Transfer-Encoding: gzip"),
        "GET",
        Response(200, Ends.WITH_CONNECTION, True, b""),
        id="another coding",
    ),
    pytest.param(lines("HTTP/1.1 200 OK"), "GET", Response(200, Ends.WITH_CONNECTION, True, b""), id="no length"),
    pytest.param(lines("HTTP/1.1 200 OK", "Content-Length: 5"), "HEAD", Response(200, 0, False, b""), id="to HEAD"),
    pytest.param(lines("HTTP/1.1 204 No Content"), "GET", Response(204, 0, False, b""), id="204"),
    pytest.param(lines("HTTP/1.1 304 X", "Content-Length: 5"), "GET", Response(304, 0, False, b""), id="304"),
    pytest.param(lines("HTTP/1.1 100 Continue"), "PUT", Response(100, 0, False, b""), id="100"),
    pytest.param(lines("HTTP/1.1 103 Early Hints", "Link: x"), "GET", Response(103, 0, False, b""), id="103"),
    pytest.param(
        lines("HTTP/1.1 101 X", "Upgrade: WebSocket", "Connection: Upgrade"),
        "GET",
        Response(101, 0, False, b"websocket"),
        id="101",
    ),
    pytest.param(
        lines("HTTP/1.1 200 OK", "Content-Length: 5", "Connection: Close"),
        "GET",
        Response(200, 5, True, b""),
        id="close",
    ),
    pytest.param(lines("HTTP/1.0 200 OK", "Content-Length: 5"), "GET", Response(200, 5, True, b""), id="1.0"),
    pytest.param(
        lines("HTTP/1.0 200 OK", "Content-Length: 5", "Connection: keep-alive"),
        "GET",
        Response(200, 5, False, b""),
        id="1.0 kept alive",
    ),
]


@pytest.mark.parametrize(("data", "method", "expected"), RESPONSES)
def test_responses(data: bytes, method: str, expected: Response) -> None:
    scan, buffer = Scan(strict=False), bytearray()
    for at in range(len(data)):
        buffer += data[at : at + 1]
        end = scan.end(buffer)
        assert (end > 0) == (at == len(data) - 1)
    assert response(bytes(buffer), method) == expected


@pytest.mark.parametrize(
    "data",
    [
        b"ICY 200 OK\r\n\r\n",
        b"\r\n",
        b"HTTP/1.1 999 X\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length : 5\r\n\r\n",
    ],
)
def test_responses_that_are_not_understood(data: bytes) -> None:
    with pytest.raises(Malformed):
        response(data, "GET")


def follow(framing: Framing, data: bytes, size: int, strict: bool = True) -> tuple[bytes, bool]:
    """What of the bytes is the body, and whether it is over."""
    body, buffer, taken = Body(framing, strict), bytearray(), b""
    for at in range(0, len(data), size):
        buffer += data[at : at + size]
        count = body.take(buffer, 0)
        taken += bytes(buffer[:count])
        del buffer[:count]
    return taken, body.done


CHUNKS = b"5\r\nhello\r\n00a;x=1\r\n0123456789\r\n0\r\n"

BODIES = [
    pytest.param(0, b"", id="none"),
    pytest.param(5, b"hello", id="a length"),
    pytest.param(Ends.CHUNKED, CHUNKS + b"\r\n", id="chunks"),
    pytest.param(Ends.CHUNKED, CHUNKS + b"X-Sum: 1\r\nY: 2\r\n\r\n", id="chunks and a trailer"),
    pytest.param(Ends.CHUNKED, b"0\r\n\r\n", id="no chunk"),
    pytest.param(Ends.CHUNKED, b"1C\r\nGET / HTTP/1.1\r\nHost: other.\r\n0\r\n\r\n", id="a chunk like a request"),
]


@pytest.mark.parametrize(("framing", "body"), BODIES)
@pytest.mark.parametrize("size", [1 << 20, 3, 1], ids=["at once", "by threes", "by one byte"])
def test_bodies_end_where_they_end(framing: Framing, body: bytes, size: int) -> None:
    behind = b"GET /next HTTP/1.1\r\n\r\n"
    assert follow(framing, body + behind, size) == (body, True)
    if body:
        assert follow(framing, body[:-1], size) == (body[:-1], False)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"5\nhello\r\n", id="bare LF"),
        pytest.param(b"5\r\nhello0\r\n", id="a chunk longer than its size"),
        pytest.param(b"5\r\nhello\n0\r\n", id="bare LF behind a chunk"),
        pytest.param(b"x\r\n", id="no number"),
        pytest.param(b"\r\n", id="an empty line"),
        pytest.param(b"+5\r\n", id="a sign"),
        pytest.param(b"0x5\r\n", id="a prefix"),
        pytest.param(b"5 \r\n", id="a blank behind the size"),
        pytest.param(b"-0\r\n", id="minus nothing"),
        pytest.param(b"1" * 16 + b"\r\n", id="beyond counting"),
        pytest.param(b"5;\x00\r\n", id="a NUL in an extension"),
        pytest.param(b"5;a\rb\r\n", id="a CR in an extension"),
        pytest.param(b"5;" + b"a" * MAX_CHUNK_LINE, id="an extension without end"),
        pytest.param(b"0\r\nnothing\r\n", id="a trailer without a colon"),
        pytest.param(b"0\r\n folded: x\r\n", id="a folded trailer"),
        pytest.param(b"0\r\n" + b"X: y\r\n" * (MAX_TRAILER // 6 + 1), id="a trailer without end"),
    ],
)
@pytest.mark.parametrize("size", [1 << 20, 1], ids=["at once", "by one byte"])
def test_chunks_that_could_be_read_in_two_ways(data: bytes, size: int) -> None:
    with pytest.raises(Malformed):
        follow(Ends.CHUNKED, data, size)


def test_a_server_may_write_blanks_behind_a_size() -> None:
    assert follow(Ends.CHUNKED, b"5  \r\nhello\r\n0 ;x y\r\n\r\n", 1, strict=False)[1]


def test_what_is_unseen_is_counted() -> None:
    body = Body(Ends.CHUNKED, strict=True)
    assert body.take(bytearray(b"10\r\nabc"), 0) == 7
    assert (body.unseen, body.done) == (13, False)
    body.leave(13)
    assert body.take(bytearray(b"\r\n0\r\n\r\nGET"), 0) == 7
    assert body.done
    body = Body(10, strict=True)
    body.leave(10)
    assert body.done
    assert Body(Ends.WITH_CONNECTION, strict=False).unseen == EVERYTHING


def test_the_limit_is_64_kib() -> None:
    room = MAX_HEAD - len(lines(GET, HOST, "X: "))
    assert read(lines(GET, HOST, "X: " + "a" * room)) is not None
    with pytest.raises(Malformed):
        read(lines(GET, HOST, "X: " + "a" * (room + 1)))


@pytest.mark.parametrize("blanks", [b" ", b"\t", b" \t"])
def test_blanks_without_end_cost_no_more_than_their_bytes(blanks: bytes) -> None:
    line = b"X: a" + blanks * (60_000 // len(blanks)) + b"b"
    began = time.process_time()
    assert read(lines(GET, HOST, line)) is not None
    assert response(lines("HTTP/1.1 200 OK", "Content-Length: 1", line), "GET").body == 1
    with pytest.raises(Malformed):
        Body(Ends.CHUNKED, strict=False).take(bytearray(b"0;" + blanks * (1000 // len(blanks)) + b"\xff\r\n"), 0)
    assert time.process_time() - began < 0.5


def test_blanks_around_a_value_are_not_part_of_it() -> None:
    found = read(lines(GET, "Host:  allowed.test \t ", "Content-Length: 0\t"))
    assert found is not None and found[0].name == "allowed.test"
