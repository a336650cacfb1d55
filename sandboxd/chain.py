"""The audit log's chain: what a line is, and whether lines follow from one another. Pure; bytes in, values out.

A line is one JSON object in ASCII that begins with `seq`, `prev`, `time` and `type`. `seq` counts all lines from 1,
across files. `prev` is the SHA-256 (hex) of the whole line before it, without its newline; that of the first line ever
is 64 zeros. A file begins with a line of type `audit.file`, whose `file` counts the files from 1 and whose `prev` is
the last hash of the file before: the oldest file that is kept says where the dropped ones ended. The `head`, kept
beside the files, names the last line: it may be a few lines behind, never before.

What the chain proves: whoever knows one hash of it knows whether any line up to there was changed. Whoever can write
the files can write all of it anew; only a hash that is kept elsewhere tells.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

MAX_LINE_BYTES = 64 << 10
FILE = "audit.file"
ZEROS = "0" * 64
MARK = "…"
CUTS = ((4096, 256), (512, 64), (64, 16))
"""Characters of a text and entries of a list; the next pair where a line is too long with the one before."""

_HEAD = re.compile(rb"(\d{20}) (\d{10}) ([0-9a-f]{64})\n\Z")
_HASH = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class Link:
    """A line's place: its number, the number of its file, its hash."""

    seq: int
    file: int
    hash: str


START = Link(0, 0, ZEROS)


@dataclass(frozen=True, slots=True)
class Line:
    """A line that was read: what it says of its own place, and all of its fields."""

    seq: int
    prev: str
    type: str
    hash: str
    body: dict[str, Any]

    @property
    def file(self) -> int:
        """The file that it begins; 0 where it begins none."""
        number = self.body.get("file")
        return number if self.type == FILE and isinstance(number, int) else 0


@dataclass(frozen=True, slots=True)
class Report:
    """`fault` is the first place where a line does not follow, empty where all do; `last` is the last good line's
    hash; `notes` are no faults."""

    lines: int
    files: int
    fault: str
    last: str
    notes: tuple[str, ...] = ()


def line(before: Link, body: Mapping[str, Any]) -> tuple[bytes, Link]:
    """The line after `before`, with its newline. `body` begins with `time` and `type`; what is too long in it is cut,
    with a mark."""
    file = body["file"] if body["type"] == FILE else before.file
    place = {"seq": before.seq + 1, "prev": before.hash}
    for text_chars, entries in CUTS:
        fields = place | {key: _cut(value, text_chars, entries) for key, value in body.items()}
        text = json.dumps(fields, separators=(",", ":")).encode("ascii")
        if len(text) < MAX_LINE_BYTES:
            break
    return text + b"\n", Link(before.seq + 1, file, digest(text))


def stamp(seconds: float) -> str:
    """Seconds since the epoch as a line says them: always of one length, so that they sort as text."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def digest(text: bytes) -> str:
    """Of a line without its newline."""
    return hashlib.sha256(text).hexdigest()


def read(raw: bytes) -> Line | None:
    """A whole line, newline included; None for what is none."""
    text = raw.removesuffix(b"\n")
    try:
        body = json.loads(text) if raw.endswith(b"\n") and len(raw) <= MAX_LINE_BYTES else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    seq, prev, kind = body.get("seq"), body.get("prev"), body.get("type")
    if type(seq) is not int or seq < 1 or not isinstance(kind, str):
        return None
    if not isinstance(prev, str) or not _HASH.match(prev):
        return None
    return Line(seq, prev, kind, digest(text), body)


def head_text(last: Link) -> bytes:
    """Of one length, so that writing it over the one before is one step."""
    return b"%020d %010d %s\n" % (last.seq, last.file, last.hash.encode("ascii"))


def read_head(text: bytes) -> Link | None:
    found = _HEAD.match(text)
    return None if found is None else Link(int(found[1]), int(found[2]), found[3].decode("ascii"))


def verify(files: Sequence[tuple[str, Iterable[bytes]]], head: Link | None, kept: int) -> Report:
    """`files` are (name, lines with their newlines), the oldest first. `kept` is how many of them there must be where
    older ones were dropped, 0 where they may be a part of a log. `head` is None where it is not known."""
    check = _Check(head)
    for position, (name, lines) in enumerate(files):
        fault = check.file(name, lines, newest=position == len(files) - 1)
        if fault:
            return Report(check.lines, position + 1, fault, check.last.hash, tuple(check.notes))
    fault = check.end(files[-1][0] if files else "", len(files), kept)
    return Report(check.lines, len(files), fault, check.last.hash, tuple(check.notes))


class _Check:
    """Where a check has got to."""

    def __init__(self, head: Link | None) -> None:
        self.lines = 0
        self.last = START
        self.notes: list[str] = []
        self._head = head
        self._first_file = 0

    def file(self, name: str, lines: Iterable[bytes], *, newest: bool) -> str:
        """The fault in it, or nothing."""
        rest = enumerate(lines, 1)
        number = 0
        for number, raw in rest:
            where = f"{name}, line {number}"
            if newest and not raw.endswith(b"\n") and len(raw) < MAX_LINE_BYTES:
                self.notes.append(f"{where}: cut off in the middle, as a crash leaves it; it is no event")
                return "" if number > 1 else f"{where}: the file has no whole line"
            found = read(raw)
            if found is None:
                return f"{where}: it is no line of an audit log: it was changed or put in"
            if fault := self._place(found, first=number == 1) or self._follows(found, number, rest):
                return f"{where}: {fault}"
            self.lines += 1
            self.last = Link(found.seq, found.file or self.last.file, found.hash)
            if self._head is not None and self._head.seq == found.seq and self._head.hash != found.hash:
                return f"{where}: it was changed: its hash is not the one that was kept of it"
        return "" if number else f"{name}: the file is empty"

    def end(self, name: str, files: int, kept: int) -> str:
        if not files:
            return f"the log is gone: {self._head.seq} lines are missing" if self._head is not None else ""
        if kept and self._first_file > 1 and files < kept:
            return f"file {self._first_file - 1} is missing: {files} files are there, and {kept} are kept"
        if self._head is not None and self._head.seq > self.last.seq:
            return f"{name}: the end is missing: {self._head.seq - self.last.seq} lines after number {self.last.seq}"
        return ""

    def _place(self, found: Line, *, first: bool) -> str:
        """A file's own line stands first in it, and nowhere else."""
        if first != (found.type == FILE):
            return "the line that begins a file is missing" if first else "a file begins in the middle of another"
        if not first:
            return ""
        if not found.file:
            return "the line that begins a file was changed"
        if not self._first_file:
            self._first_file = found.file
            if found.file > 1:
                self.notes.append(f"begins with line number {found.seq}: older ones were dropped by rotation")
                self.last = Link(found.seq - 1, found.file - 1, found.prev)
        if found.file != self.last.file + 1:
            return f"it begins file {found.file}, and file {self.last.file + 1} was to come"
        return ""

    def _follows(self, found: Line, number: int, rest: Iterator[tuple[int, bytes]]) -> str:
        wanted = self.last.seq + 1
        if found.seq > wanted:
            later = (one for _, raw in rest if (one := read(raw)) is not None)
            if any(one.seq == wanted for one in later):
                return f"number {found.seq} stands where {wanted} belongs, which comes later: the lines were swapped"
            return f"{found.seq - wanted} lines are missing before it (from number {wanted} on)"
        if found.seq < wanted:
            return f"number {found.seq} comes again: a line was put in here or before"
        if found.prev != self.last.hash:
            earlier = f"line {number - 1}" if number > 1 else "the last line of the file before"
            return f"it does not follow from {earlier}: one of the two was changed"
        return ""


def _cut(value: Any, text_chars: int, entries: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= text_chars else value[:text_chars] + MARK
    if isinstance(value, Mapping):
        kept = {str(_cut(key, text_chars, 0)): _cut(value[key], text_chars, entries) for key in [*value][:entries]}
        return kept | ({MARK: MARK} if len(value) > entries else {})
    if isinstance(value, list | tuple):
        kept_items = [_cut(one, text_chars, entries) for one in value[:entries]]
        return [*kept_items, MARK] if len(value) > entries else kept_items
    return value
