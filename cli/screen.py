"""What a program did to the person's terminal and did not undo. Pure.

In: the bytes a terminal was shown. Out: the bytes that turn off what is still on: the alternate screen,
mouse and paste modes, the hidden cursor, the enhanced keyboard. A program that is killed, or whose machine
is, leaves them. Modes are those of xterm's ctlseqs, "DEC Private Mode Set"; keyboard flags are kitty's `CSI
> u`.
"""

from __future__ import annotations

import re

CARRY_BYTES = 64

# The state a shell expects. The alternate screen comes last: what was shown before reappears clean.
_QUIET: dict[int, bool] = {
    1: False,  # application cursor keys
    25: True,  # cursor visible
    1000: False,  # mouse: clicks, then drags, all motion, focus and the coordinate encodings
    1002: False,
    1003: False,
    1004: False,
    1005: False,
    1006: False,
    1015: False,
    2004: False,  # bracketed paste
    2026: False,  # synchronized output
    47: False,  # the alternate screen, three ways
    1047: False,
    1049: False,
}
_SEQUENCE = re.compile(rb"\x1b\[(?:\?([0-9;]{1,32})([hl])|([>=<])[0-9;]{0,16}u)")
_RESET = b"\x1bc"


class Screen:
    """Follows the modes through the output, however it is cut."""

    def __init__(self) -> None:
        self._state = dict(_QUIET)
        self._keyboard = 0
        self._carry = b""

    def feed(self, data: bytes) -> None:
        data = self._carry + data
        reset = data.rfind(_RESET)
        if reset >= 0:
            self._state, self._keyboard = dict(_QUIET), 0
        end = max(reset, 0)
        for found in _SEQUENCE.finditer(data, end):
            end = found.end()
            modes, letter, keyboard = found.groups()
            if keyboard == b">":
                self._keyboard += 1
            elif keyboard == b"<":
                self._keyboard = max(0, self._keyboard - 1)
            elif modes is not None:
                for mode in modes.split(b";"):
                    if mode and (number := int(mode)) in self._state:
                        self._state[number] = letter == b"h"
        # A sequence may have been cut: keep from its ESC on, unless it is already too long to be one.
        start = data.rfind(b"\x1b", end)
        self._carry = data[start:] if start >= 0 and len(data) - start <= CARRY_BYTES else b""

    def undo(self) -> bytes:
        """What to write to the terminal now; empty when nothing was left on."""
        changes = [
            b"\x1b[?%d%b" % (mode, b"h" if quiet else b"l")
            for mode, quiet in _QUIET.items()
            if self._state[mode] is not quiet
        ]
        keyboard = b"\x1b[<%du" % self._keyboard if self._keyboard else b""
        return keyboard + b"".join(changes)
