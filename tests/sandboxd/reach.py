"""A daemon's API by each of its transports: a unix socket, TCP, TLS. The bytes on them are the tests' own."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sandboxd.rig import Answer, Attached, Rig

TOKEN = "first-0123456789-CANARY"
SECOND = "second-0123456789-CANARY"


def token_files(directory: Path) -> list[str]:
    """Flags for two tokens, each in a file of its own."""
    flags = []
    for name, token in (("one", TOKEN), ("two", SECOND)):
        path = directory / name
        path.touch(mode=0o600)
        path.write_text(f"  {token}\n")
        flags += ["--token-file", str(path)]
    return flags


def ports(rig: Rig) -> dict[str, int]:
    """By host, from the start-up line."""
    line = next(line for line in reversed(rig.log.read_text().splitlines()) if "listening on" in line)
    return {host: int(port) for host, port in re.findall(r"https?://(\S+):(\d+)", line)}


class Tls(ssl.SSLSocket):
    """Python's raises at the end of the stream once its own direction has ended."""

    def read(self, len: int = 1024, buffer: Any = None) -> Any:
        try:
            return super().read(len, buffer)
        except ssl.SSLZeroReturnError:
            return b"" if buffer is None else 0


def trusting(authority: Path, certificate: Path | None = None) -> ssl.SSLContext:
    """A client's context, with a certificate of its own where one is given."""
    context = ssl.create_default_context(cafile=str(authority))
    context.sslsocket_class = Tls
    if certificate is not None:
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    return context


@dataclass(frozen=True)
class Reach:
    """One transport of `rig`. `source` is the local address to come from."""

    rig: Rig
    kind: str
    context: ssl.SSLContext | None = None
    token: str = TOKEN
    host: str = "127.0.0.1"
    source: str = ""

    def connect(self, timeout: float = 20) -> socket.socket:
        if self.kind == "unix":
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(timeout)
            sock.connect(str(self.rig.socket))
            return sock
        at = (self.host.strip("[]"), ports(self.rig)[self.host])
        sock = socket.create_connection(at, timeout, (self.source, 0) if self.source else None)
        return sock if self.context is None else self.context.wrap_socket(sock, server_hostname="localhost")

    def head(self, method: str, path: str, *fields: str, token: bool = True) -> bytes:
        """A request's head, Host and token in it."""
        own = ["Host: localhost", *([f"Authorization: Bearer {self.token}"] if token else [])]
        return "\r\n".join([f"{method} {path} HTTP/1.1", *own, *fields, "", ""]).encode()

    def raw(self, data: bytes, timeout: float = 20) -> bytes:
        """What the server says until it closes or falls silent."""
        with self.connect(timeout) as sock:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(data)
            return said_by(sock)

    def call(self, method: str, path: str, body: Any = None, *fields: str) -> Answer:
        """One request on a connection of its own."""
        text = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "octet-stream" if isinstance(body, bytes) else "json"
        given = [f"Content-Length: {len(text)}", f"Content-Type: application/{kind}"] if body is not None else []
        said = self.raw(self.head(method, path, "Connection: close", *given, *fields) + text)
        while said.startswith(b"HTTP/1.1 100 "):
            said = said.partition(b"\r\n\r\n")[2]
        head, _, rest = said.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        return Answer(int(lines[0].split(" ")[1]), headers, rest)

    def attach(self, process: str, early: bytes = b"") -> Attached:
        return Attached(self.connect(), process, early, f"Authorization: Bearer {self.token}\r\n")


def said_by(sock: socket.socket) -> bytes:
    """Until it closes, is reset, or falls silent."""
    said = b""
    with contextlib.suppress(TimeoutError, ConnectionResetError, ssl.SSLEOFError):
        while piece := sock.recv(65536):
            said += piece
    return said


def end_direction(sock: socket.socket) -> None:
    """Half-close: close_notify under TLS, FIN elsewhere. What comes can still be read."""
    if isinstance(sock, ssl.SSLSocket):
        timeout = sock.gettimeout()
        sock.setblocking(False)
        with contextlib.suppress(ssl.SSLWantReadError):
            sock.unwrap()
        sock.settimeout(timeout)
    else:
        sock.shutdown(socket.SHUT_WR)
