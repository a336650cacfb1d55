"""Values to the person: tables, notes and errors as safe lines, or JSON.

Everything foreign goes through termsafe here, so a command hands over what it has. JSON is ASCII: a control
character or an undecodable byte stands in it as an escape, and the value is exact.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sandboxd.termsafe import clean

if TYPE_CHECKING:  # a command that asks no server does not load what speaks to one
    from sandboxd.client import Network, Sandbox

GAP = "  "
CELL_LEAST = 4
AGES = (("d", 86400), ("h", 3600), ("m", 60))
PROGRAM = "sandbox-cli"


def line(text: str) -> None:
    """A line of the command's own result, to stdout."""
    sys.stdout.write(clean(text) + "\n")


def note(text: str) -> None:
    """A line beside the result, to stderr."""
    error(f"{PROGRAM}: {clean(text)}\n")


def error(text: str) -> None:
    """To stderr as it is. A terminal that is gone is no reason to stop, and nothing waits in a buffer for one."""
    with suppress(OSError):
        os.write(2, text.encode())


def as_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def cell(text: str) -> str:
    """Text for a table's column: one safe piece; `-` when there is none, a blank for a blank."""
    return text if text == " " else clean(text) or "-"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, whole: Sequence[str] = (), drop: Sequence[str] = (),
    width: int | None = None,
) -> str:  # fmt: skip
    """Columns two blanks apart, the last one not padded, no wider than the terminal where there is one.

    What is too wide is first made narrower by leaving out columns, those of `drop` in their order; then the widest
    cells are cut with a mark, but not those of the columns in `whole`: an id that is cut is of no use.
    """
    width = width or columns()
    cells = [list(head), *([cell(text) for text in row] for row in rows)]
    kept = list(range(len(head)))
    while True:
        widths = [max(display_width(row[column]) for row in cells) for column in kept]
        spare = None if width is None else width - sum(widths) - len(GAP) * (len(kept) - 1)
        gone = next((head.index(name) for name in drop if head.index(name) in kept), None)
        if spare is None or spare >= 0 or gone is None:
            break
        kept.remove(gone)
    if width is not None and spare is not None and spare < 0:
        widths = _narrowed(widths, width - len(GAP) * (len(kept) - 1), [head[column] not in whole for column in kept])
    lines = []
    for row in cells:
        fitted = (cut(row[column], size) for column, size in zip(kept, widths, strict=True))
        padded = (text + " " * (size - display_width(text)) for text, size in zip(fitted, widths, strict=True))
        lines.append(GAP.join(padded).rstrip() + "\n")
    return "".join(lines)


def _narrowed(widths: Sequence[int], room: int, may: Sequence[bool]) -> list[int]:
    """Together no more than `room`, by taking from the widest that may be cut, none below `CELL_LEAST`."""
    found = [min(size, room) if able else size for size, able in zip(widths, may, strict=True)]
    while sum(found) > room:
        size, column = max((found[index] * able, index) for index, able in enumerate(may))
        if size <= CELL_LEAST:
            break
        found[column] -= 1
    return found


def columns() -> int | None:
    """How wide the terminal on stdout is; None where stdout is none, or does not know."""
    try:
        return os.get_terminal_size(1).columns or None if os.isatty(1) else None
    except OSError:
        return None


def cut(text: str, width: int) -> str:
    """What fits in `width` columns, with a mark at its end where something is missing."""
    if display_width(text) <= width:
        return text
    taken = 0
    for end, char in enumerate(text):
        taken += display_width(char)
        if taken >= width:
            return text[:end] + "…"
    return text


def some(names: Sequence[str], most: int) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def network(value: Network) -> str:
    """`none`, or the mode with how many names it allows."""
    if value.mode != "allowlist":
        return value.mode
    return f"allowlist ({len(value.allow or ()) + len(value.allow_tcp)})"


def labels(value: Mapping[str, str]) -> str:
    """Without the one that only `recover` reads."""
    return ",".join(f"{key}={value[key]}" for key in sorted(value) if key != "run.id")


def sandbox(value: Sandbox) -> dict[str, Any]:
    """A sandbox as the API's object."""
    mounts = [mount._asdict() for mount in value.volumes]
    return value._asdict() | {"network": value.network._asdict(), "volumes": mounts}


def time(stamp: str) -> str:
    """The API's time without its fraction, and still as UTC."""
    return f"{stamp[:19]}Z" if stamp else ""


def age(stamp: str) -> str:
    """How long ago the API's time was, in the largest unit that fits: 3h. The time itself where stdout is no terminal,
    or where it cannot be read."""
    if not os.isatty(1):
        return time(stamp)
    import calendar
    from time import strptime
    from time import time as now

    try:
        seconds = int(now() - calendar.timegm(strptime(stamp[:19], "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return time(stamp)
    unit, size = next(((unit, size) for unit, size in AGES if seconds >= size), ("s", 1))
    return f"{max(seconds, 0) // size}{unit} ago"


def bytes_size(size: int) -> str:
    """1536 → 1.5 KiB."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def display_width(text: str) -> int:
    """Columns a terminal gives it (UAX #11: wide and full-width take two, combining marks none)."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)
