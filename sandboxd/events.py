"""What guests caused: the refusals and the uses of the network that egress tells of, in a file of their own.

In: events of `egress.control`, whose text a guest may have chosen. Out: one decision by its id, or all of a
sandbox's, of one that is gone too. The file is `audit/egress.jsonl`, one JSON object on a line, 0600 in a directory
0700; it and five older generations hold at most 8 MiB each, so that no guest can fill a disk or push out what is kept
elsewhere. Best effort: a file that cannot be written fails nothing. Every line holds the figures since the first one,
so the last line of an id is the truth and a line that comes twice does no harm.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from egress.control import DENIED, LOST, Event, is_row

FILE = "egress.jsonl"
MAX_BYTES = 8 << 20
GENERATIONS = 5
MAX_TEXT = 300
"""Characters of a name or a sentence; longer ones are cut, with a mark."""
MAX_LINE_BYTES = 16 << 10

log = logging.getLogger("sandboxd")


@dataclass(frozen=True, slots=True)
class Decision:
    """Everything known of one decision: `kind` is denied, allowed or lost, times are seconds since the epoch, the
    bytes are the sandbox's."""

    kind: str
    sandbox: str
    id: str
    name: str
    port: int
    rule: str
    by: str
    why: str
    count: int
    connections: int
    bytes_in: int
    bytes_out: int
    first_at: float
    last_at: float


class EventFile:
    """The file below `state`. Written on the caller's thread; read on any."""

    def __init__(self, state: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = state / "audit" / FILE
        self._max_bytes = max_bytes
        self._failed = False

    def add(self, event: Event) -> None:
        """Never raises: what cannot be written is said once and lost."""
        if event.kind == LOST:
            log.warning("%d decisions about names were not recorded", event.count)
        line = _line(event)
        try:
            self._write(line)
            self._failed = False
        except OSError as fault:
            if not self._failed:
                log.error("%s cannot be written: %s", self._path.name, fault.strerror)
            self._failed = True

    def find(self, event_id: str) -> Decision | None:
        """By the id that a person was shown."""
        found = self._read(f'"id":{json.dumps(event_id)}'.encode(), "id", event_id)
        return found.get(event_id)

    def of(self, sandbox_id: str) -> list[Decision]:
        """All of a sandbox's, in the order they first came."""
        found = self._read(f'"sandbox":{json.dumps(sandbox_id)}'.encode(), "sandbox", sandbox_id)
        return list(found.values())

    def _write(self, line: bytes) -> None:
        directory = self._path.parent
        directory.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size and size + len(line) > self._max_bytes:
                self._rotate()
                os.close(fd)
                fd = os.open(self._path, flags, 0o600)
                size = 0
            if os.write(fd, line) < len(line):
                os.ftruncate(fd, size)  # half a line would spoil the next one
        finally:
            os.close(fd)

    def _rotate(self) -> None:
        for number in range(GENERATIONS, 0, -1):
            with suppress(FileNotFoundError):
                os.rename(self._generation(number - 1), self._generation(number))

    def _generation(self, number: int) -> Path:
        return self._path.with_name(f"{FILE}.{number}") if number else self._path

    def _read(self, wanted: bytes, key: str, value: str) -> dict[str, Decision]:
        """Decisions by id. `wanted` stands in every line that is looked for; few others are parsed."""
        found: dict[str, Decision] = {}
        with ExitStack() as opened:
            files: list[BinaryIO] = []
            # The newest first: what is moved on meanwhile is then read twice, and not missed.
            for number in range(GENERATIONS + 1):
                with suppress(OSError):
                    files.append(opened.enter_context(self._generation(number).open("rb")))
            for file in reversed(files):
                for line in _lines(file):
                    if wanted in line and (one := _decision(line)) is not None and getattr(one, key) == value:
                        earlier = found.get(one.id)
                        found[one.id] = one if earlier is None else replace(one, first_at=earlier.first_at)
        return found


def decision(sandbox: str, row: Mapping[str, object]) -> Decision | None:
    """A row of egress's own report; None for one that is not what it should be."""
    if not is_row(row):
        return None
    fields: dict[str, Any] = dict(row)
    return Decision(kind=fields.pop("decision"), sandbox=sandbox, **fields)


def merged(decisions: Iterable[Decision]) -> list[Decision]:
    """One for each thing that was decided, the latest last; an egress that started anew gave some a second id."""
    found: dict[tuple[object, ...], Decision] = {}
    for one in sorted(decisions, key=lambda one: one.last_at):
        if one.kind == LOST:
            continue
        key = (one.kind, one.name, one.port, *((one.rule, one.by) if one.kind == DENIED else ()))
        earlier = found.pop(key, None)
        if earlier is not None:
            one = replace(
                one, count=earlier.count + one.count, connections=earlier.connections + one.connections,
                bytes_in=earlier.bytes_in + one.bytes_in, bytes_out=earlier.bytes_out + one.bytes_out,
                first_at=min(earlier.first_at, one.first_at),
            )  # fmt: skip
        found[key] = one
    return list(found.values())


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES):
        yield line


def _line(event: Event) -> bytes:
    body = {
        "time": event.at,
        "type": f"egress.{event.kind}",
        "sandbox": event.sandbox,
        "id": event.id,
        "name": _cut(event.name),
        "port": event.port,
        "rule": _cut(event.rule),
        "by": event.by,
        "why": _cut(event.why),
        "count": event.count,
        "connections": event.connections,
        "bytes_in": event.down_bytes,
        "bytes_out": event.up_bytes,
    }
    return json.dumps(body, separators=(",", ":")).encode("ascii") + b"\n"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def _decision(line: bytes) -> Decision | None:
    """None for a line that a full disk or a killed daemon left in pieces."""
    try:
        body: dict[str, Any] = json.loads(line)
        at = float(body.pop("time"))
        kind = str(body.pop("type")).removeprefix("egress.")
        return Decision(kind=kind, first_at=at, last_at=at, **body)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
