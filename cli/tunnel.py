"""Reach a port inside a sandbox from this machine.

Usage:
  sandbox-cli tunnel [options] SANDBOX PORT

PORT is a port of the sandbox's own loopback address, or LOCAL:PORT to listen
on another one here (0: any that is free). Listens on 127.0.0.1 only, until
Ctrl-C. A connection while nothing listens in the sandbox is reset, and said
so.

Options:
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address
  -h, --help     show this
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from threading import BoundedSemaphore, Thread
from typing import Any, NoReturn

from cli import context, show
from sandboxd.client import Client, Tunnel
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

READ_BYTES = 64 * 1024
HERE = "127.0.0.1"
ACCEPTED_AHEAD = 64
AT_ONCE = 100
"""Connections: less than half of what a daemon gives one person, and a process has descriptors for."""
PAUSE_S = 0.1


def main(args: dict[str, Any]) -> int:
    local, port = ports(args["PORT"])
    client = context.choose(args["--context"]).client
    sandbox = client.get(args["SANDBOX"])
    if sandbox.state != "running":
        raise SandboxError(f"{clean(args['SANDBOX'])} is {clean(sandbox.state)}, not running")
    with listen(local) as listener:
        show.line(f"{HERE}:{listener.getsockname()[1]} leads to port {port} of {sandbox.name or sandbox.id}")
        sys.stdout.flush()
        serve(listener, lambda accepted: carry(client, sandbox.id, port, accepted))


def serve(listener: socket.socket, each: Callable[[socket.socket], None]) -> NoReturn:
    """A thread for each connection, AT_ONCE of them; others wait in the kernel. Any local user can make them."""
    room = BoundedSemaphore(AT_ONCE)

    def one(accepted: socket.socket) -> None:
        try:
            each(accepted)
        finally:
            room.release()

    while True:
        room.acquire()
        try:
            accepted, _ = listener.accept()
        except OSError:
            # Out of descriptors, or the client has left already.
            room.release()
            time.sleep(PAUSE_S)
            continue
        Thread(target=one, args=(accepted,), daemon=True).start()


def ports(text: str) -> tuple[int, int]:
    """`[LOCAL:]PORT` → the port here and the one in the sandbox."""
    local, colon, port = text.rpartition(":")
    numbers = [int(one) if one.isascii() and one.isdigit() and len(one) < 6 else -1 for one in (local or port, port)]
    if (colon and not local) or not 0 <= numbers[0] < 65536 or not 1 <= numbers[1] < 65536:
        raise SandboxError(f"{clean(text)}: not a port from 1 to 65535, nor LOCAL:PORT")
    return numbers[0], numbers[1]


def listen(port: int) -> socket.socket:
    try:
        return socket.create_server((HERE, port), backlog=ACCEPTED_AHEAD)
    except OSError as fault:
        raise SandboxError(
            f"{HERE}:{port} cannot be listened on: {os.strerror(fault.errno or 0)}; choose another with LOCAL:PORT"
        ) from None


def carry(client: Client, sandbox: str, port: int, accepted: socket.socket) -> None:
    """One connection, to the end of what the sandbox says. Ours ends its own direction first, mostly."""
    with accepted:
        try:
            tunnel = client.tunnel(sandbox, port)
        except SandboxError as error:
            show.note(str(error))
            # A close alone would look like an answer that is empty.
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        with tunnel:
            Thread(target=_to_sandbox, args=(accepted, tunnel), daemon=True).start()
            with suppress(OSError):
                while data := tunnel.recv(READ_BYTES):
                    accepted.sendall(data)
            # Wakes the other thread, too.
            with suppress(OSError):
                accepted.shutdown(socket.SHUT_RDWR)


def _to_sandbox(accepted: socket.socket, tunnel: Tunnel) -> None:
    with suppress(OSError):
        while data := accepted.recv(READ_BYTES):
            tunnel.sendall(data)
        tunnel.end()
