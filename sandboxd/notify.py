"""What the daemon tells the service manager that started it, if one did: sd_notify(3), Linux, no library.

Out: one datagram of `KEY=value` lines to the socket that NOTIFY_SOCKET names. Nothing comes back, and whatever goes
wrong is the service manager's loss: a daemon does not stop for it.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from sandboxd.termsafe import first_line


def ready() -> None:
    """The API answers and sandboxes can be created."""
    _send("READY=1\nSTATUS=ready")


def status(text: str) -> None:
    """One line for `systemctl status`."""
    _send(f"STATUS={first_line(text)}")


def starting(seconds: float) -> None:
    """Still at work: the manager's patience is to last so much longer from now on."""
    _send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")


def stopping() -> None:
    _send("STOPPING=1\nSTATUS=stopping; sandboxes go on")


def _send(text: str) -> None:
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    # An abstract address is written with @ and begins with NUL (unix(7)).
    address = "\0" + path[1:] if path.startswith("@") else path
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        sock.sendto(text.encode(errors="replace"), address)
