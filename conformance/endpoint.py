"""A way to an endpoint of the API: requests, streams and upgrades, by the standard library alone.

In: an address a person wrote, and perhaps a token and certificates. Out: what the server said, byte for byte where it
matters. Nothing here corrects what a server does wrong, and every wait ends: a server that hangs is a failure.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

WAIT_S = 120.0
"""No answer takes longer; a create boots a machine."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        """The body, which must be one JSON value in UTF-8."""
        return json.loads(self.body.decode("utf-8"), parse_constant=_no_constant)

    @property
    def media_type(self) -> str:
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    def __str__(self) -> str:
        return f"{self.status} {self.body[:300]!r}"


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


@dataclass(frozen=True)
class Endpoint:
    """`unix:///path`, `http://host:port` or `https://host:port`."""

    url: str
    token: str = field(default="", repr=False)
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme == "unix":
            if parts.netloc or not parts.path.startswith("/"):
                raise ValueError(f"{self.url}: a socket is written unix:///path")
        elif parts.scheme not in ("http", "https") or not parts.hostname or parts.port is None or parts.path:
            raise ValueError(f"{self.url}: an endpoint is unix:///path, http://host:port or https://host:port")

    @property
    def is_unix(self) -> bool:
        return self.url.startswith("unix:")

    @property
    def is_tls(self) -> bool:
        return self.url.startswith("https:")

    @property
    def host(self) -> str:
        """What belongs in the Host header."""
        return "localhost" if self.is_unix else urlsplit(self.url).netloc

    def dial(self, timeout_s: float = WAIT_S) -> socket.socket:
        """A connection on which nothing has been said."""
        if self.is_unix:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(timeout_s)
            sock.connect(urlsplit(self.url).path)
            return sock
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        plain = socket.create_connection((parts.hostname, parts.port or 0), timeout_s)
        if not self.is_tls:
            return plain
        context = ssl.create_default_context(cafile=self.ca)
        if self.cert:
            context.load_cert_chain(self.cert, self.key)
        return context.wrap_socket(plain, server_hostname=parts.hostname)

    def call(
        self, method: str, target: str, body: Any = None, headers: dict[str, str] | None = None,
        timeout_s: float = WAIT_S,
    ) -> Answer:  # fmt: skip
        """One request on a connection of its own. `body`: bytes are octets, anything else is JSON."""
        given = dict(headers or {})
        if isinstance(body, bytes):
            given.setdefault("Content-Type", "application/octet-stream")
        elif body is not None:
            given.setdefault("Content-Type", "application/json")
            body = json.dumps(body).encode()
        if self.token:
            given.setdefault("Authorization", f"Bearer {self.token}")
        connection = http.client.HTTPConnection(self.host, timeout=timeout_s)
        connection.sock = self.dial(timeout_s)
        try:
            # It may answer before it has heard all; the answer is there to be read.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
                connection.request(method, target, body, given)
            return _read(connection.getresponse())
        finally:
            connection.close()

    def head(self, method: str, target: str, headers: dict[str, str]) -> bytes:
        """A request's head, with nothing in it but what is given, the Host and the token."""
        given = {"Host": self.host, **({"Authorization": f"Bearer {self.token}"} if self.token else {}), **headers}
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items() if value)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def say(self, data: bytes, timeout_s: float = 30.0) -> Answer:
        """These very bytes, and the answer to them."""
        with self.dial(timeout_s) as sock:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
                sock.sendall(data)
            response = http.client.HTTPResponse(sock)
            response.begin()
            return _read(response)

    def upgrade(self, target: str, protocol: str, behind: bytes = b"") -> Upgraded:
        """`behind` is sent in one piece with the request."""
        sock = self.dial(30.0)
        sock.sendall(self.head("GET", target, {"Connection": "Upgrade", "Upgrade": protocol}) + behind)
        return Upgraded(sock)


def _read(response: http.client.HTTPResponse) -> Answer:
    return Answer(response.status, response.headers, response.read())


class Upgraded:
    """A connection after its request. `status` is 101 where it was upgraded; otherwise `answer` is what was said."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._file = sock.makefile("rb")
        self.line = self._file.readline(4096).decode("latin-1").rstrip("\r\n")
        self.status = int(self.line.split(" ")[1])
        self.headers = http.client.parse_headers(self._file)

    def __enter__(self) -> Upgraded:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.sock.close()

    def refusal(self) -> Answer:
        assert self.status != 101, "the connection was upgraded"
        return Answer(self.status, self.headers, self._file.read(int(self.headers["Content-Length"])))

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        self.sock.sendall(frame(kind, payload))

    def end(self) -> None:
        """Our direction has ended; the other goes on."""
        self.sock.shutdown(socket.SHUT_WR)

    def frame(self) -> tuple[bytes, bytes] | None:
        """The next one; None when the server has closed."""
        head = self._file.read(5)
        if not head:
            return None
        length = int.from_bytes(head[1:], "big")
        payload = self._file.read(length)
        assert len(head) == 5 and len(payload) == length, "the connection was closed within a frame"
        assert length <= 1 << 20, f"a frame of {length} bytes"
        return head[:1], payload

    def frames(self) -> list[tuple[bytes, bytes]]:
        """All up to the close."""
        found = []
        while (one := self.frame()) is not None:
            found.append(one)
        return found

    def until(self, kind: bytes, text: bytes) -> None:
        """Reads until this much of the stream has come."""
        seen = b""
        while text not in seen:
            one = self.frame()
            assert one is not None, f"closed after {seen!r}"
            assert one[0] != b"x", f"the process ended after {seen!r}"
            seen += one[1] if one[0] == kind else b""

    def rest(self) -> bytes:
        """Raw bytes up to the close."""
        return self._file.read()


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    return kind + len(payload).to_bytes(4, "big") + payload


def token_of(path: str | None) -> str:
    return Path(path).read_text().strip() if path else ""
