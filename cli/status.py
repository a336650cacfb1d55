"""One line on stderr that says what is being waited for: rewritten in place on a terminal, else said when
it changes."""

from __future__ import annotations

import os
import time

from cli import show
from sandboxd.termsafe import clean

QUIET_S = 5.0
LINE = 78
"""Of a terminal that does not say how wide it is."""


class Status:
    """Gone without a trace from a terminal at the end of its block."""

    def __init__(self) -> None:
        self._live = os.isatty(2) and os.environ.get("TERM") != "dumb"
        try:
            # A line that is wrapped could not be rewritten.
            self._width = (os.get_terminal_size(2).columns or LINE + 1) - 1
        except OSError:
            self._width = LINE
        self._said = self._noted = ""
        # What is over within a second needs no words in a log.
        self._last = time.monotonic() + 1 - QUIET_S

    def say(self, text: str) -> None:
        text = clean(text)
        if self._live:
            show.error(f"\r\x1b[K{show.cut(text, self._width)}")
        elif text != self._noted and (now := time.monotonic()) - self._last >= QUIET_S:
            self._last, self._noted = now, text
            show.note(text)
        self._said = text

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live and self._said:
            show.error("\r\x1b[K")
