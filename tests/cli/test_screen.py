"""What is undone on a terminal is exactly what was left on."""

from __future__ import annotations

import pytest

from cli.screen import CARRY_BYTES, Screen

E = b"\x1b"
CASES = [
    ("plain text", b"hello \x1b[31mred\x1b[0m", b""),
    ("nothing", b"", b""),
    ("the alternate screen left on", b"\x1b[?1049h", b"\x1b[?1049l"),
    ("on and off again", b"\x1b[?1049hvim\x1b[?1049l", b""),
    ("mouse and paste", b"\x1b[?1000;1006h\x1b[?2004h", b"\x1b[?1000l\x1b[?1006l\x1b[?2004l"),
    ("half of a list off", b"\x1b[?1000;1006h\x1b[?1000l", b"\x1b[?1006l"),
    ("a hidden cursor", b"\x1b[?25l", b"\x1b[?25h"),
    ("a cursor shown twice", b"\x1b[?25h\x1b[?25h", b""),
    ("application cursor keys", b"\x1b[?1h", b"\x1b[?1l"),
    ("the alternate screen goes last", b"\x1b[?1049h\x1b[?25l\x1b[?1003h", b"\x1b[?25h\x1b[?1003l\x1b[?1049l"),
    ("modes nobody needs undone", b"\x1b[?7l\x1b[?12h\x1b[4h", b""),
    ("a full reset", b"\x1b[?1049h\x1b[?25l\x1bc", b""),
    ("on again after a reset", b"\x1b[?25l\x1bc\x1b[?2004h", b"\x1b[?2004l"),
    ("keyboard flags pushed", b"\x1b[>1u", b"\x1b[<1u"),
    ("pushed twice, popped once", b"\x1b[>1u\x1b[>3u\x1b[<u", b"\x1b[<1u"),
    ("popped too often", b"\x1b[<u\x1b[<u", b""),
    ("rubbish", b"\x1b[?;;h\x1b[?h\x1b[?99999999999999999999h\x1b[?25", b""),
    ("an ESC before a sequence", b"\x1b\x1b[?25l", b"\x1b[?25h"),
]


@pytest.mark.parametrize(("output", "undo"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
@pytest.mark.parametrize("size", [10_000, 1, 3], ids=["at once", "byte by byte", "in threes"])
def test_undo(output: bytes, undo: bytes, size: int) -> None:
    screen = Screen()
    for start in range(0, len(output), size):
        screen.feed(output[start : start + size])
    assert screen.undo() == undo


def test_what_is_kept_of_a_cut_sequence_is_bounded() -> None:
    screen = Screen()
    for _ in range(1000):
        screen.feed(b"\x1b[?" + b"1" * 1000)
    assert len(screen._carry) <= CARRY_BYTES
