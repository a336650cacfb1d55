"""A unix socket server that does exactly what a script tells it: the HTTP client's hostile or clumsy peer.

A script is a list of steps run for one connection: bytes are sent as they are, `Read(n)` waits for n bytes
in all, `ReadHead()` for a request's head, `ReadRequest()` for its body too, `Split(bytes)` sends one byte
at a time, `Wait(s)` sleeps. The connection is closed at the script's end. What was read is kept in `seen`.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Read:
    size: int


@dataclass(frozen=True)
class ReadHead:
    pass


@dataclass(frozen=True)
class ReadRequest:
    """A head and the body its Content-Length says."""


@dataclass(frozen=True)
class Split:
    data: bytes


@dataclass(frozen=True)
class Wait:
    seconds: float


Step = bytes | Read | ReadHead | ReadRequest | Split | Wait


class RawServer:
    """Listens at `path`; each connection gets the next script, the last one for ever."""

    def __init__(self, path: Path, scripts: Sequence[Sequence[Step]]) -> None:
        self.path = str(path)
        self.seen: list[bytearray] = []
        self._scripts = scripts
        self._closing = False
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.bind(self.path)
        self._sock.listen(16)
        self._sock.settimeout(20)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while True:
                conn, _ = self._sock.accept()
                if self._closing:
                    conn.close()
                    return
                script = self._scripts[min(number, len(self._scripts) - 1)]
                number += 1
                seen = bytearray()
                self.seen.append(seen)
                with conn, contextlib.suppress(OSError):
                    conn.settimeout(20)
                    for step in script:
                        self._step(conn, step, seen)

    def _step(self, conn: socket.socket, step: Step, seen: bytearray) -> None:
        match step:
            case bytes():
                conn.sendall(step)
            case Split(data):
                for index in range(len(data)):
                    conn.sendall(data[index : index + 1])
            case Wait(seconds):
                time.sleep(seconds)
            case Read(size):
                while len(seen) < size and (data := conn.recv(65536)):
                    seen += data
            case ReadRequest():
                self._step(conn, ReadHead(), seen)
                head, mark, _ = bytes(seen).partition(b"\r\n\r\n")
                length = re.search(rb"Content-Length: (\d+)", head)
                self._step(conn, Read(len(head + mark) + int(length[1] if length else 0)), seen)
            case ReadHead():
                while b"\r\n\r\n" not in seen and (data := conn.recv(65536)):
                    seen += data

    def close(self) -> None:
        self._closing = True
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self.path)
        self._thread.join(20)
        self._sock.close()


@contextlib.contextmanager
def serving(path: Path, *scripts: Sequence[Step]) -> Iterator[RawServer]:
    server = RawServer(path, scripts)
    try:
        yield server
    finally:
        server.close()
