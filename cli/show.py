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

CELL_LIMIT = 64
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
    """Text for a table's column: one safe piece, cut with a mark; `-` when there is none, a blank for a blank."""
    if text == " ":
        return text
    text = clean(text)
    return (text[: CELL_LIMIT - 1] + "…") if len(text) > CELL_LIMIT else text or "-"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two blanks apart, the last one not padded."""
    cells = [list(head), *([cell(text) for text in row] for row in rows)]
    widths = [max(_width(row[column]) for row in cells) for column in range(len(head))]
    lines = []
    for row in cells:
        padded = (text + " " * (width - _width(text)) for text, width in zip(row, widths, strict=True))
        lines.append("  ".join(padded).rstrip() + "\n")
    return "".join(lines)


def network(value: Network) -> str:
    """`none`, or the mode with how many names it allows."""
    if value.mode != "allowlist":
        return value.mode
    return f"allowlist ({len(value.allow or ()) + len(value.allow_tcp)})"


def labels(value: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value[key]}" for key in sorted(value))


def sandbox(value: Sandbox) -> dict[str, Any]:
    """A sandbox as the API's object."""
    mounts = [mount._asdict() for mount in value.volumes]
    return value._asdict() | {"network": value.network._asdict(), "volumes": mounts}


def time(stamp: str) -> str:
    """The API's time without its fraction, and still as UTC."""
    return f"{stamp[:19]}Z" if stamp else ""


def bytes_size(size: int) -> str:
    """1536 → 1.5 KiB."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def _width(text: str) -> int:
    """Columns a terminal gives it (UAX #11: wide and full-width take two, combining marks none)."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)
