"""A socket before a sandboxd's at which every request has to stop, if it is told to.

It passes bytes on as they are. Each request has a word for what it is in a run (`WORDS`); one of them can be stopped
when it is `asked`, before the daemon hears of it, or when it is `answered`, before the command line does. Whoever
waits for `reached` may then kill either of the two, and lets the request go on with `release`.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

WORDS = (
    "capabilities", "create", "workspace", "start", "attach", "checkpoint", "checkpoint's bundle", "gather", "bundle",
    "delete",
)  # fmt: skip
"""The requests of a run, in their order."""
_PATTERNS = (
    ("capabilities", rb"GET /v1/capabilities "),
    ("create", rb"POST /v1/sandboxes "),
    ("workspace", rb"POST \S+/workspace\?"),
    ("start", rb"POST \S+/processes "),
    ("attach", rb"GET \S+/attach "),
    ("checkpoint", rb"(?s)POST \S+/run .*sandbox-checkpoint"),
    ("gather", rb"POST \S+/run "),
    ("checkpoint's bundle", rb"GET \S+/workspace/bundle\?\S*checkpoint"),
    ("bundle", rb"GET \S+/workspace/bundle\?"),
    ("delete", rb"DELETE /v1/sandboxes/"),
)
PATIENCE_S = 60


class Toll:
    def __init__(self, path: Path, upstream: Path) -> None:
        self.path, self.upstream = path, upstream
        self.seen: list[str] = []
        self.reached = threading.Event()
        self._release = threading.Event()
        self._stop: tuple[str, str] | None = None
        self._lock = threading.Lock()
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.bind(str(path))
        self._sock.listen(32)
        threading.Thread(target=self._serve, daemon=True).start()

    def stop(self, word: str, moment: str) -> None:
        """The next request of this kind."""
        self._stop = word, moment
        self.reached.clear()
        self._release.clear()

    def release(self) -> None:
        self._release.set()

    def close(self) -> None:
        self._release.set()
        self._sock.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._sock.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(client,), daemon=True).start()

    def _one(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            head = _read(client)
            if not head:
                return  # somebody only looks whether anybody listens
            word = next((word for word, pattern in _PATTERNS if re.match(pattern, head)), "")
            self.seen.append(word)
            moment = self._taken(word)
            if moment == "asked":
                self._wait()
            with socket.socket(socket.AF_UNIX) as server:
                server.connect(str(self.upstream))
                server.sendall(head)
                self._pass(client, server, moment == "answered")

    def _taken(self, word: str) -> str:
        with self._lock:
            if self._stop is None or self._stop[0] != word:
                return ""
            moment, self._stop = self._stop[1], None
            return moment

    def _wait(self) -> None:
        self.reached.set()
        assert self._release.wait(PATIENCE_S)

    def _pass(self, client: socket.socket, server: socket.socket, stop: bool) -> None:
        other = {client: server, server: client}
        while other:
            for one in select.select(list(other), [], [])[0]:
                data = one.recv(65536)
                if one is server and stop:
                    stop = False
                    self._wait()
                if data:
                    (server if one is client else client).sendall(data)
                elif one is server:
                    return
                else:
                    server.shutdown(socket.SHUT_WR)
                    del other[client]
                    if self._gone(client):
                        return

    @staticmethod
    def _gone(client: socket.socket) -> bool:
        """A peer that was killed, other than one that has said all it wants to."""
        poll = select.poll()
        poll.register(client, select.POLLOUT)
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))


def _read(client: socket.socket) -> bytes:
    """A request's head; with its body where that says what it is."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = client.recv(65536)
        if not piece:
            return b""
        data += piece
    if re.match(rb"POST \S+/run ", data):
        head, _, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        left = int(length[1] if length else 0) - len(body)
        while left > 0 and (piece := client.recv(left)):
            data += piece
            left -= len(piece)
    return data


@contextlib.contextmanager
def toll_before(path: Path, upstream: Path) -> Iterator[Toll]:
    toll = Toll(path, upstream)
    try:
        yield toll
    finally:
        toll.close()
