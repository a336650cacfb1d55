"""A server that stands in front of an honest one and changes one thing of what it says.

In: connections on a unix socket, each with one request. Out: what the server behind answers, as it is, but for what the
lie is about. Without a lie it is a mere wire, half-closes and all.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Bytes = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Said:
    status: int
    media_type: str
    body: bytes

    def bytes(self) -> bytes:
        head = f"HTTP/1.1 {self.status} Said\r\nContent-Length: {len(self.body)}\r\nConnection: close\r\n"
        head += f"Content-Type: {self.media_type}\r\n" if self.media_type else ""
        return head.encode() + b"\r\n" + (b"" if self.status == 204 else self.body)


@dataclass(frozen=True)
class Lie:
    """What is untrue in the answers to requests whose `METHOD target` fits `on`. `tell` is also given everything that
    clients have sent so far. `ask` changes a request's head, `down` the bytes of an upgraded connection."""

    on: str
    tell: Callable[[Said, bytes], Said] | None = None
    ask: Bytes | None = None
    down: Bytes | None = None
    half_close: bool = True


def in_json(change: Callable[[Any], Any]) -> Callable[[Said, bytes], Said]:
    """A lie in a body of JSON, told where the answer is no error."""

    def tell(said: Said, _: bytes) -> Said:
        if said.status >= 400 or said.media_type != "application/json":
            return said
        return replace(said, body=json.dumps(change(json.loads(said.body))).encode())

    return tell


def status(honest: int, told: int) -> Callable[[Said, bytes], Said]:
    return lambda said, _: replace(said, status=told) if said.status == honest else said


def code(honest: str, told: str) -> Callable[[Said, bytes], Said]:
    old, new = f'"code":"{honest}"'.encode(), f'"code":"{told}"'.encode()
    return lambda said, _: replace(said, body=said.body.replace(old, new))


def text(honest: bytes, told: bytes) -> Callable[[Said, bytes], Said]:
    return lambda said, _: replace(said, body=said.body.replace(honest, told))


class Liar:
    """Listens on `front` until it is left."""

    def __init__(self, front: Path, back: Path, lie: Lie | None) -> None:
        self._back, self._lie = back, lie
        self._heard = b""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(front))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Liar:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._one, args=(client,), daemon=True).start()

    def _one(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(str(self._back))
            head, rest = self._head(client)
            line = head.partition(b" HTTP/")[0].decode("latin-1")
            lie = self._lie if self._lie is not None and re.search(self._lie.on, line) else None
            if lie is not None and lie.ask is not None:
                head = lie.ask(head)
            if lie is not None and lie.tell is not None:
                head = head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
            server.sendall(head + rest)
            self._heard += rest
            up = threading.Thread(target=self._up, args=(client, server, lie is None or lie.half_close), daemon=True)
            up.start()
            if lie is not None and lie.tell is not None:
                client.sendall(lie.tell(_read(server), self._heard).bytes())
            else:
                while data := server.recv(65536):
                    client.sendall(lie.down(data) if lie is not None and lie.down is not None else data)
            client.shutdown(socket.SHUT_WR)
            up.join()

    @staticmethod
    def _head(client: socket.socket) -> tuple[bytes, bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            more = client.recv(65536)
            if not more:
                raise ConnectionResetError
            data += more
        head, _, rest = data.partition(b"\r\n\r\n")
        return head + b"\r\n\r\n", rest

    def _up(self, client: socket.socket, server: socket.socket, half_close: bool) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                self._heard += data
                server.sendall(data)
            if half_close:
                server.shutdown(socket.SHUT_WR)


class _Heard:
    """Bytes as `http.client` wants them."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _read(server: socket.socket) -> Said:
    data = b""
    while more := server.recv(65536):
        data += more
    response = http.client.HTTPResponse(_Heard(data))  # type: ignore[arg-type]
    response.begin()
    return Said(response.status, response.headers.get("Content-Type", ""), response.read())
