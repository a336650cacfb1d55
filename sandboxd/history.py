"""What an audit log says: a sandbox's events, and what a restart must know so that nothing is said twice.

In: the open files of a log, the oldest first, and decisions about names. Out: values. Called in a thread; a log has up
to 48 MiB, so a line is parsed only where its bytes say that it is meant.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from sandboxd.chain import stamp
from sandboxd.events import Decision
from sandboxd.generations import lines
from sandboxd.wire import AuditEvent

MAX_EVENTS = 5000
MAX_BYTES = 16 << 20
"""Of their lines."""
GUEST_EVENTS = 1000
"""Of those, how many may be what the guest caused, where there are more of the others."""
ID = re.compile(r"sbx_([a-z0-9][a-z0-9-]{0,30}_)?[0-9a-f]{16}\Z")

_FIELDS = frozenset(AuditEvent.__struct_fields__)
_NOTED = tuple(
    f'"type":"{kind}"'.encode("ascii")
    for kind in (
        "sandbox.created", "sandbox.network_updated", "sandbox.terminated", "process.started", "process.exited",
    )
)  # fmt: skip


@dataclass(slots=True)
class Past:
    """Of the sandboxes that were asked for: those whose creation is in the log, why those ended that have ended, the
    network each was given last, and the processes that were started and that have ended."""

    created: set[str] = field(default_factory=set)
    ended: dict[str, str] = field(default_factory=dict)
    networks: dict[str, Any] = field(default_factory=dict)
    started: dict[str, set[int]] = field(default_factory=dict)
    exited: dict[str, set[int]] = field(default_factory=dict)


def past(files: Iterable[BinaryIO], known: Collection[str]) -> Past:
    found = Past()
    ids = {sandbox.encode("ascii") for sandbox in known}
    for raw in _all(files):
        # The line's own field comes before any label that may be called the same.
        if raw.partition(b'"sandbox":"')[2].partition(b'"')[0] not in ids or not any(kind in raw for kind in _NOTED):
            continue
        body = _body(raw)
        sandbox = str(body.get("sandbox"))
        if sandbox not in known:
            continue
        match body.get("type"):
            case "sandbox.created":
                found.created.add(sandbox)
            case "sandbox.network_updated":
                found.networks[sandbox] = body.get("network")
            case "sandbox.terminated":
                found.ended[sandbox] = str(body.get("reason"))
            case "process.started":
                found.started.setdefault(sandbox, set()).add(_pid(body))
            case "process.exited":
                found.exited.setdefault(sandbox, set()).add(_pid(body))
    return found


def of_sandbox(files: Iterable[BinaryIO], sandbox_id: str) -> tuple[list[AuditEvent], bool]:
    """The newest of a sandbox's events in the order they were written, and whether there were more."""
    wanted = f'"sandbox":{json.dumps(sandbox_id)}'.encode("ascii")
    kept: deque[bytes] = deque()
    size, cut = 0, False
    for raw in _all(files):
        if wanted in raw:
            kept.append(raw)
            size += len(raw)
            while len(kept) > MAX_EVENTS or size > MAX_BYTES:
                size -= len(kept.popleft())
                cut = True
    return [event for raw in kept if (event := _event(_body(raw), sandbox_id)) is not None], cut


def merged(events: list[AuditEvent], decisions: Iterable[Decision]) -> tuple[list[AuditEvent], bool]:
    """Both by time, the newest of them, and whether some were left out. The order of `events` stays as it is, whatever
    the clock did; what a guest causes does not push them out."""
    caused = sorted((_decided(one) for one in decisions), key=lambda event: event.time)
    room = max(MAX_EVENTS - len(events), GUEST_EVENTS)
    caused, cut = caused[-room:], len(caused) > room
    most = MAX_EVENTS - len(caused)
    events, cut = events[-most:], cut or len(events) > most
    return [event for _, event in heapq.merge(_clocked(events), _clocked(caused), key=lambda pair: pair[0])], cut


def _clocked(events: Iterable[AuditEvent]) -> Iterator[tuple[str, AuditEvent]]:
    """Each with a time that is not before the one of the event before it."""
    latest = ""
    for event in events:
        latest = max(latest, event.time)
        yield latest, event


def _decided(one: Decision) -> AuditEvent:
    return AuditEvent(
        time=stamp(one.last_at), type=f"egress.{one.kind}", sandbox=one.sandbox, id=one.id, name=one.name,
        port=one.port, rule=one.rule, by=one.by, count=one.count,
    )  # fmt: skip


def _all(files: Iterable[BinaryIO]) -> Iterator[bytes]:
    for file in files:
        yield from lines(file)


def _body(raw: bytes) -> dict[str, Any]:
    """Empty for what is no line."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _event(body: dict[str, Any], sandbox_id: str) -> AuditEvent | None:
    if body.get("sandbox") != sandbox_id:
        return None
    try:
        return msgspec.convert({key: body[key] for key in body if key in _FIELDS}, AuditEvent)
    except msgspec.ValidationError:
        return None


def _pid(body: dict[str, Any]) -> int:
    pid = body.get("pid")
    return pid if isinstance(pid, int) else 0
