"""One decision, one id: what each sandbox was refused and allowed, counted, and when somebody should be told.

In: decisions and the time they were made. Out: their ids, events that are due, rows for a report. Pure: the clock
comes in as seconds since the epoch; only the ids are random. Bounded whatever a guest does: so many entries a
sandbox, so many new ones an hour, and of each ever fewer events, so that nobody pushes others' out of the file.
"""

from __future__ import annotations

import base64
import secrets
from collections import OrderedDict
from heapq import heappop, heappush
from itertools import count

from egress import control
from egress.control import Event

ENTRIES_LIMIT = 1500  # of each kind, a sandbox; the one not touched for longest goes. A report fits in a frame
REFUSALS_AN_HOUR = 1000
NAMES_AN_HOUR = 1000  # that were allowed
UPDATE_S = 5.0  # until more of an entry is told; the next time twice as long
MOST_UPDATE_S = 3600.0
TOO_MANY = "too-many-refusals"
_TOO_MANY_WHY = f"more than {REFUSALS_AN_HOUR:,} different refusals in an hour; the rest are only counted"
REST = "more-names"  # allowed, beyond those that are told by name

Key = tuple[str, int, str, str]  # name, port, and for a refusal the rule and what it was decided by
_REST_KEY: Key = ("", 0, "", "")


class _Entry:
    __slots__ = (
        "by", "connections", "count", "decision", "down_bytes", "first_at", "id", "last_at", "name", "pending", "port",
        "rule", "sandbox", "up_bytes", "wait_s", "why",
    )  # fmt: skip

    def __init__(
        self, sandbox: str, decision: str, name: str, port: int, rule: str, by: str, why: str, id: str, at: float
    ) -> None:
        self.sandbox, self.decision, self.name, self.port = sandbox, decision, name, port
        self.rule, self.by, self.why, self.id = rule, by, why[: control.TEXT_LIMIT], id
        self.count = self.connections = self.up_bytes = self.down_bytes = 0
        self.first_at = self.last_at = at
        self.pending = False  # an event about it waits
        self.wait_s = UPDATE_S

    def event(self) -> Event:
        self.pending = False
        return Event(
            0, self.last_at, self.decision, self.sandbox, self.id, self.name, self.port, self.rule, self.by,
            self.why, self.count, self.up_bytes, self.down_bytes, self.connections,
        )  # fmt: skip

    def row(self) -> dict[str, object]:
        return {
            "id": self.id, "name": self.name, "port": self.port, "decision": self.decision, "rule": self.rule,
            "by": self.by, "why": self.why, "count": self.count, "connections": self.connections,
            "bytes_in": self.down_bytes, "bytes_out": self.up_bytes, "first_at": self.first_at,
            "last_at": self.last_at,
        }  # fmt: skip


class _Book:
    """The entries of one sandbox."""

    __slots__ = ("allowed", "denied", "fresh", "fresh_allowed", "hour_at")

    def __init__(self) -> None:
        self.denied: OrderedDict[Key, _Entry] = OrderedDict()
        self.allowed: OrderedDict[Key, _Entry] = OrderedDict()
        self.hour_at = 0.0
        self.fresh = self.fresh_allowed = 0

    def begin_hour(self, at: float) -> None:
        if _passed(self.hour_at, at, 3600.0):
            self.hour_at = at
            self.fresh = self.fresh_allowed = 0


class Ledger:
    """All sandboxes of the process. An id is unique in it; a repeated decision has the id it had before."""

    def __init__(self) -> None:
        self._books: dict[str, _Book] = {}
        self._ids: set[str] = set()
        self._now: list[_Entry] = []
        self._later: list[tuple[float, int, _Entry]] = []  # a heap, by when it is due
        self._turn = count()
        self._at = 0.0

    def denied(
        self, sandbox: str, name: str, port: int, rule: str, by: str, why: str, at: float, times: int = 1
    ) -> str:
        """Counts a refusal, or so many of the same; returns its id."""
        book = self._book(sandbox)
        key = (name, port, rule, by)
        entry = book.denied.get(key)
        if entry is None:
            book.begin_hour(at)
            if book.fresh >= REFUSALS_AN_HOUR:
                key, name, port, rule, by, why = ("", 0, TOO_MANY, ""), "", 0, TOO_MANY, "", _TOO_MANY_WHY
                entry = book.denied.get(key)
            else:
                book.fresh += 1
        if entry is None:
            entry = self._open(book.denied, key, _Entry(sandbox, control.DENIED, name, port, rule, by, why, "", at))
        else:
            self._touch(entry, at)
            book.denied.move_to_end(key)
        entry.count += times
        return entry.id

    def allowed(self, sandbox: str, name: str, port: int, rule: str, by: str, at: float) -> str:
        """Counts an upstream that was opened; returns the id of its name and port."""
        book = self._book(sandbox)
        key = (name, port, "", "")
        entry = book.allowed.get(key)
        if entry is None:
            book.begin_hour(at)
            if book.fresh_allowed >= NAMES_AN_HOUR:
                key, name, port, rule, by = _REST_KEY, "", 0, REST, ""
                entry = book.allowed.get(key)
            else:
                book.fresh_allowed += 1
        if entry is None:
            entry = self._open(book.allowed, key, _Entry(sandbox, control.ALLOWED, name, port, rule, by, "", "", at))
        else:
            self._touch(entry, at)
            book.allowed.move_to_end(key)
        entry.count += 1
        return entry.id

    def closed(self, sandbox: str, name: str, port: int, up_bytes: int, down_bytes: int, at: float) -> None:
        """Adds what a connection that was allowed has carried."""
        book = self._books.get(sandbox)
        if book is None:
            return
        entry = book.allowed.get((name, port, "", "")) or book.allowed.get(_REST_KEY)
        if entry is None:
            return
        entry.connections += 1
        entry.up_bytes += up_bytes
        entry.down_bytes += down_bytes
        self._touch(entry, at)

    def removed(self, sandbox: str) -> list[Event]:
        """Forgets a sandbox; returns what has not been told about it."""
        book = self._books.pop(sandbox, None)
        if book is None:
            return []
        entries = [*book.denied.values(), *book.allowed.values()]
        self._ids.difference_update(entry.id for entry in entries)
        return [entry.event() for entry in entries if entry.pending]

    def due(self, at: float) -> list[Event]:
        """What is to be told now: a first decision at once, more of it after five seconds, then ever more seldom."""
        events = [entry.event() for entry in self._now if entry.pending]
        self._now.clear()
        later, set_back = self._later, at < self._at
        while later and (set_back or later[0][0] <= at):
            entry = heappop(later)[2]
            if entry.pending:
                entry.wait_s = min(2 * entry.wait_s, MOST_UPDATE_S)
                events.append(entry.event())
        self._at = at
        return events

    def wait_s(self, at: float) -> float | None:
        """How long until something is due; None while nothing is."""
        if self._now:
            return 0.0
        if not self._later:
            return None
        return min(max(self._later[0][0] - at, 0.0), UPDATE_S)

    def report(self, sandbox: str) -> list[dict[str, object]]:
        """Everything known of a sandbox, oldest first; at most twice `ENTRIES_LIMIT` rows of `control.ROW`."""
        book = self._books.get(sandbox)
        if book is None:
            return []
        entries = [*book.denied.values(), *book.allowed.values()]
        return [entry.row() for entry in sorted(entries, key=lambda entry: entry.first_at)]

    def _book(self, sandbox: str) -> _Book:
        book = self._books.get(sandbox)
        if book is None:
            book = self._books[sandbox] = _Book()
        return book

    def _open(self, entries: OrderedDict[Key, _Entry], key: Key, entry: _Entry) -> _Entry:
        if len(entries) >= ENTRIES_LIMIT:
            _, oldest = entries.popitem(last=False)
            self._ids.discard(oldest.id)
        entry.id = self._fresh_id()
        entry.pending = True
        entries[key] = entry
        self._now.append(entry)
        return entry

    def _touch(self, entry: _Entry, at: float) -> None:
        entry.last_at = at
        if not entry.pending:
            entry.pending = True
            heappush(self._later, (at + entry.wait_s, next(self._turn), entry))

    def _fresh_id(self) -> str:
        while True:
            id = base64.b32encode(secrets.token_bytes(5)).decode().lower()
            if id not in self._ids:
                self._ids.add(id)
                return id


def _passed(since: float, at: float, span: float) -> bool:
    """Whether `span` has gone by. A clock that was set back counts as time gone by: late is worse than early."""
    return not 0.0 <= at - since < span
