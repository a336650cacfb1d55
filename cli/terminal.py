"""The person's terminal: whether there is one, how large, raw while a program in a sandbox has it, given
back always.

`Raw` changes the terminal's modes and changes them back: at the end of its block, and at the end of the
process if the block never ended. What a signal does is the stream's business; it leaves the block like
anything else.
"""

from __future__ import annotations

import atexit
import os
import re
import struct
import termios
import tty
from contextlib import suppress
from fcntl import ioctl

DEFAULT_SIZE = (24, 80)
LARGEST = 4096
DEFAULT_TERM = "xterm-256color"
_TERM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


def is_ours() -> bool:
    """Whether stdin and stdout are both terminals."""
    return all(_isatty(fd) for fd in (0, 1))


def size() -> tuple[int, int]:
    """Rows and columns of stdout's terminal, each within 1 and 4096; 24 by 80 where it does not know."""
    try:
        rows, cols, _, _ = struct.unpack("4H", ioctl(1, termios.TIOCGWINSZ, bytes(8)))
    except OSError:
        return DEFAULT_SIZE
    if not rows or not cols:
        return DEFAULT_SIZE
    return min(rows, LARGEST), min(cols, LARGEST)


def environment() -> dict[str, str]:
    """What a program needs to know to draw here: TERM, and COLORTERM where it says true colour."""
    term = os.environ.get("TERM", "")
    known = {"TERM": term if _TERM.fullmatch(term) else DEFAULT_TERM}
    if os.environ.get("COLORTERM") in ("truecolor", "24bit"):
        known["COLORTERM"] = os.environ["COLORTERM"]
    return known


def in_foreground(fd: int) -> bool:
    """Whether reading this terminal would not stop us; true for what is no terminal."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return True


class Raw:
    """Raw mode on `fd` for the length of a `with` block."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._before = termios.tcgetattr(fd)

    def __enter__(self) -> Raw:
        atexit.register(self.leave)
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        atexit.unregister(self.leave)

    def enter(self) -> None:
        # A window that closes sends CONT behind its HUP: then there is nothing left to change.
        with suppress(termios.error):
            tty.setraw(self._fd, termios.TCSANOW)

    def leave(self) -> None:
        with suppress(termios.error):
            termios.tcsetattr(self._fd, termios.TCSANOW, self._before)


def _isatty(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
