"""HTTP/1 on the wire (RFC 9112), read only to know where messages end, whom they are for, and nothing more.

In: the bytes of one direction, in pieces of any size. Out: requests, responses and how much of what follows is their
body. Bytes are never rewritten: they are passed on as they came or not at all. Therefore a request that two readers
could read differently is a `Malformed`: bare CR or LF, folded lines, blanks before a colon, two lengths, any coding but
chunked, two hosts. Responses come from a server the guest may talk to, so they are read with more patience, and one
we do not understand is a body that ends with the connection.

A message: a start line, header lines, an empty line, each ended by CR LF; then a body as the head says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from egress.policy import unnamed, wire_name

MAX_HEAD: Final = 64 << 10
MAX_CHUNK_LINE: Final = 1024            # size and extensions
MAX_TRAILER: Final = 16 << 10
EVERYTHING: Final = 1 << 62             # longer than any connection lives

_CONTROL: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_REQUEST_LINE: Final = re.compile(rb"([A-Z][A-Z_-]{0,31}) ([!-~\x80-\xff]+) HTTP/1\.([01])")
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: .*)?", re.DOTALL)
# Nothing here may have two ways to take the same blanks: a failed match would try them all.
_FIELD: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):(?!\t) *(.*)", re.DOTALL)
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_PORT: Final = re.compile(rb"[0-9]{1,5}")
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t -~]*)?")
_CHUNK_STRICT: Final = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[!-~]*)?")


# No client needs one, and some servers take what is in it for the next request (RFC 9110 §9.3.1, §9.3.2, §9.3.8).
_BODILESS: Final = ("GET", "HEAD", "TRACE", "CONNECT")


class Malformed(Exception):
    def __init__(self, why: str, rule: str = "malformed", name: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.rule = rule                # as in policy.Deny
        self.name = name                # the host, where it was known by then


class Ends(Enum):
    """A body whose length its head does not say."""

    CHUNKED = "chunked"
    WITH_CONNECTION = "with the connection"


Framing: TypeAlias = int | Ends


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    name: str                           # the host, in normal form
    port: int | None                    # what CONNECT or an absolute target says; None: not said
    body: Framing
    upgrade: bool


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: Framing
    close: bool                         # the last of its connection
    upgrade: bytes                      # what a 101 goes over to, in lower case


class Scan:
    """Finds where a head ends in a buffer that grows, looking at each byte once."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._line = 0                  # where the line begins that is not complete
        self._seen = 0

    def end(self, buffer: bytearray) -> int:
        """The length of the head, its empty line included; 0 while that is not there."""
        if self._strict and _CONTROL.search(buffer, self._seen):
            # What follows the head in this piece may be a body, which may hold anything.
            end = self._lines(buffer)
            if not end or _CONTROL.search(buffer, 0, end):
                raise Malformed("a control character in the head")
            return end
        return self._lines(buffer)

    def _lines(self, buffer: bytearray) -> int:
        while (feed := buffer.find(b"\n", max(self._seen, self._line))) >= 0:
            line = bytes(buffer[self._line : feed])
            if self._strict:
                if not line.endswith(b"\r"):
                    raise Malformed("a line that does not end in CR LF")
                line = line[:-1]
                if self._line == 0 and not _REQUEST_LINE.fullmatch(line):
                    raise Malformed("the request line is none")
            if line in (b"", b"\r"):
                if feed >= MAX_HEAD:
                    break
                return feed + 1
            self._line = feed + 1
        self._seen = len(buffer)
        if len(buffer) > MAX_HEAD:
            raise Malformed("a head of more than 64 KiB")
        return 0


def request(head: bytes) -> Request:
    """A whole head, as `Scan` delimited it."""
    lines = head[:-4].split(b"\r\n")
    if b"\r" in head.replace(b"\r\n", b""):
        raise Malformed("a CR without its LF")
    start = _REQUEST_LINE.fullmatch(lines[0])
    if start is None:
        raise Malformed("the request line is none")
    fields = _Fields(lines[1:])
    method, target, old = start[1].decode("ascii"), start[2], start[3] == b"0"
    hosts = fields.all(b"host")
    if len(hosts) > 1:
        raise Malformed("more than one Host line", "names-disagree")
    tokens = fields.tokens(b"connection")
    body = _request_body(fields, old)
    if method in _BODILESS and body != 0:
        raise Malformed(f"{method} with a body")
    if method == "CONNECT":
        name, port = _authority(target)
        if port is None:
            raise Malformed("CONNECT without a port", name=name)
        # Whom Host names does not matter here: clients put the proxy there, or nothing.
        return Request(method, name, port, 0, False)
    port = None
    if target.startswith(b"/") or (method == "OPTIONS" and target == b"*"):
        name, _ = _authority(hosts[0] if hosts else b"")
    else:
        scheme, _, rest = target.partition(b"://")
        if scheme.lower() != b"http":
            raise Malformed("a target that is neither a path nor an http URL")
        if b"#" in rest:                # nobody may send one, and not everybody ends the host there
            raise Malformed("a fragment in the target")
        name, port = _authority(re.split(rb"[/?]", rest, maxsplit=1)[0])
        port = port or 80
        host, host_port = _authority(hosts[0] if hosts else b"")
        if (host, host_port or 80) != (name, port):
            raise Malformed("the target names another host than the Host line", "names-disagree", name)
    return Request(method, name, port, body, b"upgrade" in tokens and bool(fields.all(b"upgrade")))


def _authority(raw: bytes) -> tuple[str, int | None]:
    """Host and port of "host" or "host:port"."""
    if b"@" in raw:
        raise Malformed("user names have no place in a host name")
    host, port = raw, None
    colon = raw.rfind(b":")
    if colon >= 0 and (raw.count(b":") == 1 or raw[colon - 1 : colon] == b"]"):
        host = raw[:colon]
        if not _PORT.fullmatch(raw, colon + 1) or not 0 < int(raw[colon + 1 :]) <= 65535:
            raise Malformed("a port that is none")
        port = int(raw[colon + 1 :])
    name = wire_name(host)
    if name is None:
        refusal = unnamed(host)
        raise Malformed(refusal.why, refusal.rule)
    return name, port


def _request_body(fields: _Fields, old: bool) -> Framing:
    codings, lengths = fields.all(b"transfer-encoding"), fields.all(b"content-length")
    if codings:
        if lengths:
            raise Malformed("a length and a transfer coding")
        if old or len(codings) > 1 or codings[0].lower() != b"chunked":
            raise Malformed("a transfer coding other than chunked")
        return Ends.CHUNKED
    if not lengths:
        return 0
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
        raise Malformed("more than one length, or one that is no number")
    return int(lengths[0])


def response(head: bytes, method: str) -> Response:
    """A whole head; the method is that of the request it answers."""
    # Folded lines are old (RFC 9112 §5.2), but some servers still write them.
    lines = [line.removesuffix(b"\r") for line in re.sub(rb"\r?\n[ \t]+", b" ", head).split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    start = _STATUS_LINE.fullmatch(lines[0]) if lines else None
    if start is None:
        raise Malformed("the status line is none")
    status, old = int(start[2]), start[1] == b"0"
    fields = _Fields(lines[1:])
    tokens = fields.tokens(b"connection")
    close = b"close" in tokens or (old and b"keep-alive" not in tokens)
    body = 0 if method == "HEAD" or status < 200 or status in (204, 304) else _response_body(fields)
    upgrade = b",".join(fields.all(b"upgrade")).lower() if status == 101 else b""
    return Response(status, body, close or body is Ends.WITH_CONNECTION, upgrade)


def _response_body(fields: _Fields) -> Framing:
    codings = [token for value in fields.all(b"transfer-encoding") for token in _list(value)]
    if codings:
        if fields.all(b"content-length"):
            raise Malformed("a length and a transfer coding")
        return Ends.CHUNKED if codings[-1] == b"chunked" and codings.count(b"chunked") == 1 else Ends.WITH_CONNECTION
    lengths = {length for value in fields.all(b"content-length") for length in _list(value)}
    if not lengths:
        return Ends.WITH_CONNECTION
    length = lengths.pop()
    if lengths or not _LENGTH.fullmatch(length):
        raise Malformed("more than one length, or one that is no number")
    return int(length)


class _Fields:
    def __init__(self, lines: list[bytes]) -> None:
        self._fields: dict[bytes, list[bytes]] = {}
        for line in lines:
            field = _FIELD.fullmatch(line)
            if field is None:
                raise Malformed("a header line that is none")
            self._fields.setdefault(field[1].lower(), []).append(field[2].rstrip(b" \t"))

    def all(self, name: bytes) -> list[bytes]:
        return self._fields.get(name, [])

    def tokens(self, name: bytes) -> set[bytes]:
        return {token for value in self.all(name) for token in _list(value)}


def _list(value: bytes) -> list[bytes]:
    return [token for part in value.lower().split(b",") if (token := part.strip(b" \t"))]


class Body:
    """Follows a body through the bytes of its direction."""

    def __init__(self, framing: Framing, strict: bool) -> None:
        self._chunked = framing is Ends.CHUNKED
        self._grammar = _CHUNK_STRICT if strict else _CHUNK
        self._line = bytearray()        # of a chunk's size or the trailer, as far as it came
        self._trailer: int | None = None
        self._edge = False              # a chunk's data is over, its CR LF is not
        self.unseen = framing if isinstance(framing, int) else 0 if self._chunked else EVERYTHING
        """So many bytes more belong to it, whatever they are."""
        self.done = framing == 0

    def leave(self, count: int) -> None:
        """So many of the unseen bytes go past, and will not come here."""
        self.unseen -= count
        self.done = not self.unseen and not self._chunked

    def take(self, data: bytearray, start: int) -> int:
        """How far the body goes in what is there."""
        at = start
        while at < len(data) and not self.done:
            if self.unseen:
                step = min(self.unseen, len(data) - at)
                at, self.unseen = at + step, self.unseen - step
                self.done = not self.unseen and not self._chunked
                continue
            feed = data.find(b"\n", at)
            end = feed + 1 if feed >= 0 else len(data)
            self._line += data[at:end]
            at = end
            if len(self._line) > (MAX_CHUNK_LINE if self._trailer is None else MAX_TRAILER):
                raise Malformed("a chunk's size, or a trailer, without end")
            if feed >= 0:
                line, self._line = bytes(self._line), bytearray()
                self._follow(line)
        return at

    def _follow(self, line: bytes) -> None:
        if not line.endswith(b"\r\n") or _CONTROL.search(line) or b"\r" in line[:-2]:
            raise Malformed("a line among the chunks that does not end in CR LF")
        line = line[:-2]
        if self._edge:
            if line:
                raise Malformed("a chunk longer than its size")
            self._edge = False
        elif self._trailer is not None:
            self._trailer += len(line) + 2
            if self._trailer > MAX_TRAILER or (line and not _FIELD.fullmatch(line)):
                raise Malformed("a trailer line that is none")
            self.done = not line
        else:
            size = self._grammar.fullmatch(line)
            if size is None:
                raise Malformed("a chunk's size that is no number")
            self.unseen = int(size[1], 16)
            self._edge = self.unseen > 0
            self._trailer = None if self.unseen else 0
