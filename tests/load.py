"""Clients that put a load on a daemon's API and time it, each kind a process of its own so that they do not slow each
other.

    python -m tests.load list SOCKET CLIENTS PER-SECOND SECONDS
    python -m tests.load attach SOCKET CLIENTS PROCESS-PATH...
    python -m tests.load tunnel SOCKET CLIENTS SANDBOX-PATH PORT

`list` prints one JSON object: how long answers took, from the moment each was due, so that a stall counts for all that
it held up. The others run until their stdin ends, then print how many bytes came. Any answer that is not as it should
be ends the process with an error.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIECE = b"x" * 4096
PAUSE_S = 0.2


@dataclass(frozen=True)
class Figures:
    """Seconds; `answered` of the requests that were due."""

    answered: int
    p50_s: float
    p99_s: float
    worst_s: float


def measured(path: Path, *, clients: int, per_second: int, seconds: float) -> Figures:
    """`GET /v1/sandboxes` at a rate."""
    words = ["list", str(path), str(clients), str(per_second), str(seconds)]
    done = subprocess.run(_command(words), cwd=ROOT, capture_output=True, check=False, timeout=seconds * 3 + 60)
    assert done.returncode == 0, done.stderr.decode()
    return Figures(**json.loads(done.stdout))


@contextmanager
def busy(path: Path, *loads: Sequence[str]) -> Iterator[None]:
    """The daemon at work for other clients: each load's words without the socket. All of them must get bytes."""
    with ExitStack() as stack:
        started = []
        for kind, *words in loads:
            process = subprocess.Popen(
                _command([kind, str(path), *words]), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == b"ready\n", kind
            started.append(process)
        yield
        for process in started:
            said, _ = process.communicate(timeout=60)
            assert process.returncode == 0 and int(said) > 0


def _command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "tests.load", *words]


# ---- in the process


def list_sandboxes(path: str, clients: int, per_second: int, seconds: float) -> None:
    request = b"GET /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\n\r\n"
    poll = selectors.DefaultSelector()
    idle, due, took = [], {}, []
    for _ in range(clients):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        poll.register(sock, selectors.EVENT_READ)
        idle.append(sock)
    left: dict[socket.socket, int] = {}
    started = time.perf_counter()
    count, sent = int(per_second * seconds), 0
    while len(took) < count:
        now = time.perf_counter()
        while idle and sent < count and (when := started + sent / per_second) <= now:
            sock = idle.pop()
            sock.sendall(request)
            due[sock], left[sock] = when, -1
            sent += 1
        wait = max(0.0, started + sent / per_second - now) if idle and sent < count else 1.0
        for key, _ in poll.select(wait):
            sock = key.fileobj  # type: ignore[assignment]
            data = sock.recv(1 << 20)
            if left[sock] < 0:
                head, found, rest = data.partition(b"\r\n\r\n")
                if not found or not head.startswith(b"HTTP/1.1 200 "):
                    sys.exit(f"an answer began {data[:200]!r}")
                left[sock], data = int(head.lower().partition(b"content-length:")[2].split()[0]), rest
            left[sock] -= len(data)
            if left[sock] == 0:
                took.append(time.perf_counter() - due[sock])
                idle.append(sock)
    took.sort()
    figures = Figures(len(took), took[len(took) // 2], took[int(len(took) * 0.99)], took[-1])
    print(json.dumps(vars(figures)))


def upgraded(path: str, target: str, protocol: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(60)
    sock.connect(path)
    head = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n"
    sock.sendall(head.encode())
    said = b""
    while not said.endswith(b"\r\n\r\n"):
        piece = sock.recv(1)
        if not piece or not b"HTTP/1.1 101 ".startswith(said[:13]):
            sys.exit(f"{target} was answered {said!r}")
        said += piece
    return sock


def hold(socks: list[socket.socket], tick: Callable[[], None]) -> None:
    """Reads from all until stdin ends; `tick` every PAUSE_S."""
    poll = selectors.DefaultSelector()
    for sock in socks:
        poll.register(sock, selectors.EVENT_READ)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    print("ready", flush=True)
    came = 0
    following = time.monotonic()
    while not over.is_set():
        if (left := following - time.monotonic()) <= 0:
            tick()
            following += PAUSE_S
            continue
        for key, _ in poll.select(left):
            data = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
            if not data:
                sys.exit("a stream ended")
            came += len(data)
    print(came, flush=True)


def attach(path: str, clients: int, targets: list[str]) -> None:
    hold([upgraded(path, f"{targets[n % len(targets)]}/attach", "sbx-stream/1") for n in range(clients)], lambda: None)


def tunnel(path: str, clients: int, target: str, port: int) -> None:
    socks = [upgraded(path, f"{target}/tunnel?port={port}", "sbx-tunnel/1") for _ in range(clients)]

    def tick() -> None:
        for sock in socks:
            sock.sendall(PIECE)

    hold(socks, tick)


def main() -> None:
    kind, path, clients, *rest = sys.argv[1:]
    if kind == "list":
        list_sandboxes(path, int(clients), int(rest[0]), float(rest[1]))
    elif kind == "attach":
        attach(path, int(clients), rest)
    else:
        tunnel(path, int(clients), rest[0], int(rest[1]))
    os._exit(0)     # not waiting for the thread that reads stdin


if __name__ == "__main__":
    main()
