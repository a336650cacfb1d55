"""A small HTTP/1.1 client: one connection, one request.

In: a unix socket's path or what connects, a method, a target, headers, a body (bytes, or an iterator with or without
a known length). Out: a `Response` whose body is read as it comes, or, after an accepted `Upgrade`, the connected
socket and the bytes that arrived behind the answer's head. Nothing here knows what the API means.

The peer is not trusted to speak HTTP: heads, chunk lines and trailers are bounded, a length that is not a
plain number or contradicts another is refused, a body that ends before its length is an error and never a
short result. Whatever breaks raises `ProtocolError`; connecting and timing out raise `OSError`
(`TimeoutError`).

A path longer than the 107 bytes of `sockaddr_un` (unix(7)) works: the socket is opened with O_PATH and
connected through `/proc/self/fd`.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

HEAD_LIMIT_BYTES = 32 * 1024
HEADERS_LIMIT = 100
CHUNK_LINE_LIMIT_BYTES = 1024
TRAILER_LIMIT_BYTES = 8 * 1024
READ_BYTES = 64 * 1024
INTERIM_LIMIT = 8

_TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_DIGITS = frozenset("0123456789")
_UNFIT = frozenset("\r\n\0")
_HEX = frozenset("0123456789abcdefABCDEF")
_NO_BODY = (204, 304)


Where = str | Callable[[float | None], socket.socket]
"""A unix socket's path, or what makes a connected socket within so many seconds (and raises OSError)."""


class ProtocolError(Exception):
    """The peer did not speak HTTP/1.1, or stopped in the middle."""


class Head(NamedTuple):
    """Status and header fields of an answer; names are lower case, repeated ones joined with a comma."""

    status: int
    headers: Mapping[str, str]


def parse_head(head: bytes) -> Head:
    """Read a status line and header fields; `head` ends before the empty line."""
    lines = head.decode("latin-1").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    code = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or len(code) != 3 or not _DIGITS.issuperset(code):
        raise ProtocolError("the answer is not HTTP/1.1")
    if rest[3:4] not in ("", " ") or int(code) < 100:
        raise ProtocolError("the answer's status line is malformed")
    if len(lines) - 1 > HEADERS_LIMIT:
        raise ProtocolError(f"the answer has more than {HEADERS_LIMIT} header fields")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or not _TOKEN.issuperset(name) or not _UNFIT.isdisjoint(value):
            raise ProtocolError("the answer has a malformed header field")
        name, value = name.lower(), value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return Head(int(code), headers)


def body_length(head: Head) -> int | None:
    """Bytes of the body; -1 if it is chunked, None if it lasts to the end of the connection."""
    if head.status in _NO_BODY or head.status < 200:
        return 0
    coding, length = head.headers.get("transfer-encoding"), head.headers.get("content-length")
    if coding is not None:
        if coding.lower() != "chunked" or length is not None:
            raise ProtocolError("the answer's body has no single length")
        return -1
    if length is None:
        return None
    if len(length) > 18 or not length or not _DIGITS.issuperset(length):
        raise ProtocolError("the answer's Content-Length is not a number")
    return int(length)


def request_head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """The bytes of a request's head; refuses what would begin a second line."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    head = "\r\n".join(lines)
    if any(ord(char) < 0x20 or ord(char) > 0x7E for line in lines for char in line) or target.count(" "):
        raise ValueError("a request's head holds printable ASCII only")
    return f"{head}\r\n\r\n".encode("ascii")


def connect(path: str, timeout_s: float | None) -> socket.socket:
    """Connect to the socket at `path`, of whatever length."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        where = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            sock.connect(f"/proc/self/fd/{where}")
        finally:
            os.close(where)
    except BaseException:
        sock.close()
        raise
    return sock


def peer_uid(sock: socket.socket) -> int:
    """Who serves this socket, by SO_PEERCRED (unix(7): pid, uid, gid)."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


class _Reader:
    """Reads of a socket with what was read too far kept."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.kept = bytearray()

    def more(self) -> bool:
        """Read once; False at the end of the connection."""
        try:
            data = self._sock.recv(READ_BYTES)
        except ConnectionError:
            return False
        self.kept += data
        return bool(data)

    def until(self, mark: bytes, limit_bytes: int, what: str, deadline: float | None = None) -> bytes:
        """What stands before `mark`, which is consumed with it."""
        start = 0
        while (found := self.kept.find(mark, start)) < 0:
            if len(self.kept) >= limit_bytes + len(mark):
                raise ProtocolError(f"{what} is longer than {limit_bytes} bytes")
            start = max(0, len(self.kept) - len(mark) + 1)
            if deadline is not None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("timed out")
                self._sock.settimeout(left_s)
            if not self.more():
                raise ProtocolError(f"the connection ended inside {what}")
        if found > limit_bytes:
            raise ProtocolError(f"{what} is longer than {limit_bytes} bytes")
        text = bytes(self.kept[:found])
        del self.kept[: found + len(mark)]
        return text

    def take(self, limit_bytes: int) -> bytes:
        """Between one and `limit_bytes` bytes; none only at the end of the connection."""
        if not self.kept:
            try:
                return self._sock.recv(limit_bytes)
            except ConnectionError:
                return b""
        data = bytes(self.kept[:limit_bytes])
        del self.kept[:limit_bytes]
        return data


class Response:
    """An answer whose body has not been read yet. Closing it closes the connection."""

    def __init__(self, sock: socket.socket, reader: _Reader, head: Head) -> None:
        self.status = head.status
        self.headers = head.headers
        self._sock = sock
        self._reader = reader
        self._length = body_length(head)

    @property
    def length(self) -> int | None:
        """Bytes of the body where the head says so."""
        return None if self._length == -1 else self._length

    def chunks(self) -> Iterator[bytes]:
        """The body as it comes; raises `ProtocolError` if it ends before it is complete."""
        if self._length is None:
            while data := self._reader.take(READ_BYTES):
                yield data
        elif self._length >= 0:
            yield from self._exactly(self._length)
        else:
            yield from self._chunked()

    def read(self, limit_bytes: int) -> bytes:
        """The whole body, refused if it is longer than `limit_bytes`."""
        body = bytearray()
        for data in self.chunks():
            body += data
            if len(body) > limit_bytes:
                raise ProtocolError(f"the answer's body is longer than {limit_bytes} bytes")
        return bytes(body)

    def lines(self, limit_bytes: int) -> Iterator[bytes]:
        """The body's lines without their ends; one longer than `limit_bytes` is refused."""
        kept = bytearray()
        for data in self.chunks():
            kept += data
            *whole, rest = kept.split(b"\n") if b"\n" in data else [kept]
            for line in whole:
                yield bytes(line)
            kept = bytearray(rest)
            if len(kept) > limit_bytes:
                raise ProtocolError(f"a line of the answer is longer than {limit_bytes} bytes")
        if kept:
            raise ProtocolError("the answer ends inside a line")

    def _exactly(self, length: int) -> Iterator[bytes]:
        while length:
            if not (data := self._reader.take(min(length, READ_BYTES))):
                raise ProtocolError("the connection ended inside the answer's body")
            length -= len(data)
            yield data

    def _chunked(self) -> Iterator[bytes]:
        while True:
            line = self._reader.until(b"\r\n", CHUNK_LINE_LIMIT_BYTES, "a chunk's size line")
            digits = line.split(b";", 1)[0].strip(b" \t").decode("latin-1")
            if not digits or len(digits) > 15 or not _HEX.issuperset(digits):
                raise ProtocolError("a chunk's size is not a number")
            size = int(digits, 16)
            if size == 0:
                break
            yield from self._exactly(size)
            if self._reader.until(b"\r\n", 0, "the end of a chunk"):
                raise ProtocolError("a chunk is longer than its size")
        left = TRAILER_LIMIT_BYTES
        while line := self._reader.until(b"\r\n", left, "the trailer"):
            left = max(0, left - len(line) - 2)

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Response:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Upgraded(NamedTuple):
    """An accepted upgrade: the socket, and what the peer sent right behind its answer."""

    sock: socket.socket
    early: bytes


def request(
    where: Where,
    method: str,
    target: str,
    *,
    headers: Mapping[str, str],
    body: bytes | Iterable[bytes] = b"",
    length: int | None = None,
    timeout_s: float | None = None,
    idle_timeout_s: float | None = None,
) -> Response:
    """Send one request and read the answer's head.

    A body of bytes carries its length; an iterator is sent chunked unless `length` is given. `timeout_s`
    bounds connecting and the wait for the head; `idle_timeout_s` bounds each wait for more of the body, and
    for the peer to take more of ours. A peer that answers before it has taken the whole body is heard.
    """
    sock = connect(where, timeout_s) if isinstance(where, str) else where(timeout_s)
    try:
        fields = dict(headers) | {"Connection": "close"}
        if isinstance(body, bytes):
            parts: Iterable[bytes] = (body,) if body else ()
            if body or method in ("POST", "PUT", "PATCH"):
                fields["Content-Length"] = str(len(body))
        elif length is None:
            parts = _chunks_of(body)
            fields["Transfer-Encoding"] = "chunked"
        else:
            parts = _counted(body, length)
            fields["Content-Length"] = str(length)
        reader = _Reader(sock)
        _send(sock, request_head(method, target, fields), parts, idle_timeout_s)
        head = _final_head(reader, timeout_s)
        if head.status == 101:
            raise ProtocolError("the answer switches protocols and nobody asked")
        sock.settimeout(idle_timeout_s)
        return Response(sock, reader, head)
    except BaseException:
        sock.close()
        raise


def upgrade(
    where: Where, target: str, *, protocol: str, headers: Mapping[str, str], timeout_s: float | None = None
) -> Upgraded | Response:
    """Ask to switch to `protocol`; a `Response` is the refusal."""
    sock = connect(where, timeout_s) if isinstance(where, str) else where(timeout_s)
    try:
        fields = dict(headers) | {"Connection": "Upgrade", "Upgrade": protocol}
        reader = _Reader(sock)
        _send(sock, request_head("GET", target, fields), (), timeout_s)
        head = _final_head(reader, timeout_s)
        sock.settimeout(None)
        if head.status != 101:
            return Response(sock, reader, head)
        wanted = [part.strip() for part in head.headers.get("connection", "").lower().split(",")]
        if head.headers.get("upgrade", "").lower() != protocol.lower() or "upgrade" not in wanted:
            raise ProtocolError("the answer switches to another protocol")
        return Upgraded(sock, bytes(reader.kept))
    except BaseException:
        sock.close()
        raise


def _final_head(reader: _Reader, timeout_s: float | None) -> Head:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for _ in range(INTERIM_LIMIT):
        head = parse_head(reader.until(b"\r\n\r\n", HEAD_LIMIT_BYTES, "the answer's head", deadline))
        if head.status >= 200 or head.status == 101:
            return head
    raise ProtocolError("the answer does not come to an end of interim answers")


def _counted(parts: Iterable[bytes], length: int) -> Iterator[bytes]:
    left = length
    for part in parts:
        left -= len(part)
        if left < 0:
            break
        yield part
    if left:
        raise ValueError(f"the body is not the {length} bytes it was said to be")


def _chunks_of(parts: Iterable[bytes]) -> Iterator[bytes]:
    for part in parts:
        if part:
            yield b"%x\r\n%b\r\n" % (len(part), part)
    yield b"0\r\n\r\n"


def _send(sock: socket.socket, head: bytes, parts: Iterable[bytes], idle_timeout_s: float | None) -> None:
    """Send until all is taken, the peer answers early, or it closes (an answer may still be there to
    read)."""
    sock.setblocking(False)
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLOUT)
    try:
        for part in _heads_first(head, parts):
            view = memoryview(part)
            while view:
                ready = poll.poll(None if idle_timeout_s is None else idle_timeout_s * 1000)
                if not ready:
                    raise TimeoutError("timed out")
                if ready[0][1] & ~select.POLLOUT:
                    return
                try:
                    view = view[sock.send(view[:READ_BYTES]) :]
                except BlockingIOError:
                    continue
                except ConnectionError:
                    return
    finally:
        sock.setblocking(True)


def _heads_first(head: bytes, parts: Iterable[bytes]) -> Iterator[bytes]:
    yield head
    yield from parts
