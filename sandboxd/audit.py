"""The audit log as the rest of the daemon uses it: may this be done, this was done, what was done.

In: events by type, with names and never a value, an argument or a file's content. Out: lines of the journal, or
nothing where it is switched off. Where a line cannot be written, the request goes through and the loss is counted,
said once in the daemon's log and, when writing works again, in the audit log itself. With `required` nothing is begun
that could not be recorded, and what has happened by then waits in memory and is written first. Used on the event loop
alone, but for what a restart reads; later reads, which are long, run in threads.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec

from sandboxd import chain, history, journal
from sandboxd.chain import Report
from sandboxd.errors import Unavailable, Unsupported
from sandboxd.generations import Opened, lines
from sandboxd.history import Past
from sandboxd.journal import Journal
from sandboxd.wire import AuditEvent

T = TypeVar("T")

MAX_WAITING = 10_000
READERS = 2
"""At once: each is busy for as long as some ten MiB take."""
LOST = "audit.lost"

_FIELDS = frozenset(AuditEvent.__struct_fields__)

log = logging.getLogger("sandboxd")


class Audit:
    """`journal` is None where there is no audit log."""

    def __init__(self, journal: Journal | None, required: bool = False) -> None:
        self.past = Past()
        self._journal, self._required = journal, required
        self._waiting: deque[dict[str, Any]] = deque()
        self._lost = 0
        self._failing = self._full = False
        self._readers = anyio.CapacityLimiter(READERS)

    @property
    def enabled(self) -> bool:
        return self._journal is not None

    def recall(self, known: Collection[str]) -> None:
        """After a restart: `past` is what the log says of these sandboxes."""
        if self._journal is not None and known:
            try:
                with self._journal.files.opened() as opened:
                    self.past = history.past([file for _, file in opened.files], known)
            except OSError as fault:
                log.error("the audit log cannot be read: %s", fault.strerror or fault)

    def require(self) -> None:
        """Before an act that is recorded. Raises `Unavailable` where it must be recorded and could not be."""
        if self._journal is None or not self._required:
            return
        if not self.catch_up() or not self._has_room(self._journal):
            raise Unavailable(
                "the audit log cannot be written, and this server does nothing that it cannot record: its operator has "
                "to free disk space or repair the log (sandboxd's own log says what is wrong)"
            )

    def record(self, type: str, sandbox: str, **fields: Any) -> None:
        """Something has happened, or is certain to. Fields are those of `wire.AuditEvent`; None is left out. Never
        raises."""
        if self._journal is None:
            return
        body = {"time": journal.now(), "type": type} | ({"sandbox": sandbox} if sandbox else {})
        try:
            if unknown := fields.keys() - _FIELDS:
                raise TypeError(f"{type} has no field {', '.join(sorted(unknown))}")
            body |= {name: msgspec.to_builtins(value) for name, value in fields.items() if value is not None}
            if self.catch_up() and self._append(body):
                return
        except Exception:
            # A fault of ours in one event must not undo what was done.
            log.exception("an event was not recorded: %s", type)
        if self._required and len(self._waiting) < MAX_WAITING:
            self._waiting.append(body)
        else:
            self._lost += 1

    def catch_up(self) -> bool:
        """Writes what waits, and how much was lost. False where something still is to be written."""
        while self._waiting:
            if not self._append(self._waiting[0]):
                return False
            self._waiting.popleft()
        if self._lost:
            if not self._append({"time": journal.now(), "type": LOST, "count": self._lost}):
                return False
            log.warning("the audit log is written again; %d events are not in it", self._lost)
            self._lost = 0
        return True

    async def events(self, sandbox_id: str) -> tuple[list[AuditEvent], bool]:
        """A sandbox's newest, oldest first, and whether there were more. Raises `Unsupported`, `Unavailable`."""
        return await self._read(lambda opened: history.of_sandbox([file for _, file in opened.files], sandbox_id))

    async def check(self) -> Report:
        """Of the whole chain, up to what was written last at least. Raises `Unsupported`, `Unavailable`."""
        last = self._log().last
        return await self._read(
            lambda opened: chain.verify([(name, lines(file)) for name, file in opened.files], last, opened.kept)
        )

    def close(self) -> None:
        if self._journal is not None:
            self.catch_up()
            self._journal.close()

    async def _read(self, what: Callable[[Opened], T]) -> T:
        files = self._log().files

        def read() -> T:
            with files.opened() as opened:
                return what(opened)

        try:
            return await anyio.to_thread.run_sync(read, limiter=self._readers)
        except OSError as fault:
            log.error("the audit log cannot be read: %s", fault.strerror or fault)
            raise Unavailable("the audit log cannot be read") from None

    def _log(self) -> Journal:
        if self._journal is None:
            raise Unsupported("this endpoint keeps no audit log")
        return self._journal

    def _has_room(self, journal: Journal) -> bool:
        try:
            journal.reserve()
        except OSError as fault:
            if not self._full:
                log.error("the audit log has no room: %s; until it has, nothing is begun", fault.strerror or fault)
            self._full = True
            return False
        self._full = False
        return True

    def _append(self, body: dict[str, Any]) -> bool:
        written_to = self._log()
        try:
            written_to.append(body)
        except OSError as fault:
            if not self._failing:
                what = "nothing that it would hold is begun" if self._required else "events are lost"
                log.error("the audit log cannot be written: %s; until it can, %s", fault.strerror or fault, what)
            self._failing = True
            return False
        self._failing = False
        with suppress(OSError):     # only `require` has to know
            written_to.reserve()
        return True


def arguments(argv: Sequence[str]) -> dict[str, Any]:
    """The fields that stand for a process's arguments: its program, and how many more there were, hashed."""
    if len(argv) < 2:
        return {"program": argv[0]}
    digest = hashlib.sha256()
    for argument in argv[1:]:
        digest.update(argument.encode(errors="surrogateescape") + b"\0")
    return {"program": argv[0], "arg_count": len(argv) - 1, "args_sha256": digest.hexdigest()}
