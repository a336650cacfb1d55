"""The processes of one sandbox: started, fed, followed, and taken back after a restart.

In: checked requests, and the frames of a guest. Out: records, and the output in a spool that any number of
readers follow at their own pace. A kept process belongs to the sandbox and outlives whoever started it; a run
belongs to its caller and dies with the call. The server counts processes from 1; what the guest calls them
never leaves this file. A reader that falls behind holds the process back rather than lose a byte, as a full
pipe would.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from guestd import protocol
from sandboxd import audit as audits
from sandboxd import trees
from sandboxd.audit import Audit
from sandboxd.errors import Conflict, GuestProtocolError, Internal, NotFound, Unavailable, Unsupported
from sandboxd.guest import Guest, GuestGone, GuestRefused, Session
from sandboxd.spool import RUN_LIMIT, Budget, Chunk, Cursor, Spool
from sandboxd.store import ProcessRecord, Store

LOST = -1
"""Exit code of a process whose end nobody saw, and of a run that took too long."""
MAX_FINISHED = 1000
"""Finished processes remembered per sandbox; the oldest are forgotten first."""
KILLED = 137
TRIM_EVERY = 1 << 20
KILL_GRACE_S = 2.0
SIGNAL_WAIT_S = 1.0
CONNECTION_WAIT_S = 10.0
ABANDON_S = (0.0, 0.2, 2.0)
"""Pauses before the attempts to end what its starter has left."""
REATTACH_S = (0.2, 5.0)
"""First and longest pause between attempts to attach again."""

log = logging.getLogger("sandboxd")


@dataclass(frozen=True, slots=True)
class Command:
    """What to start. `env` holds values and is not kept; `rows` and `cols` 0 mean unknown."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    tty: bool = False
    rows: int = 0
    cols: int = 0


class Process:
    """One process as the daemon sees it. `record.exit_code` is None while it runs."""

    def __init__(self, record: ProcessRecord, spool: Spool) -> None:
        self.record = record
        self.spool = spool
        self.stdin_open = True
        self._killed = False
        self._session: Session | None = None
        self._connected = anyio.Event()
        self._news = anyio.Event()
        self._room = anyio.Event()
        self._fresh = 0

    @property
    def running(self) -> bool:
        return self.record.exit_code is None

    async def follow(self, cursor: Cursor) -> Chunk | None:
        """The cursor's next chunk, waiting for it; None once the process has ended and everything was
        read."""
        while True:
            news = self._news
            chunk = cursor.read()
            if chunk is not None:
                self._room.set()
                return chunk
            if not self.running:
                return None
            await news.wait()

    def left(self, cursor: Cursor) -> None:
        """A reader goes away: a process that waited for it goes on."""
        cursor.close()
        self._room.set()

    async def write(self, data: bytes) -> None:
        """To its stdin; waits while it does not read."""
        if not self.running:
            raise Conflict("the process has ended")
        if not self.stdin_open:
            raise Conflict("the process's stdin is closed")
        for start in range(0, len(data), protocol.CHUNK_BYTES):
            await self.send(protocol.STDIN, data[start : start + protocol.CHUNK_BYTES])

    async def end_stdin(self) -> None:
        """A terminal gets ^D and stays open, as terminals do."""
        if self.running and self.stdin_open:
            self.stdin_open = self.record.tty
            await self.send(protocol.STDIN_END)

    async def send(self, kind: str, payload: bytes = b"") -> None:
        """A frame to the guest. Nothing happens where the process has ended; `Unavailable` where it has not and
        cannot be reached."""
        # After a restart it takes a moment until it is attached again.
        if self._session is None and self.running:
            with anyio.move_on_after(CONNECTION_WAIT_S):
                await self._connected.wait()
        try:
            if self._session is not None:
                await self._session.send(kind, payload)
                return
        except GuestGone:
            # Its exit code may be on its way; what is left of a process that ends is told within a moment.
            with anyio.move_on_after(SIGNAL_WAIT_S):
                while self.running:
                    await self._news.wait()
        if self.running:
            raise Unavailable("the process cannot be reached at the moment")

    def kill_by_hanging_up(self) -> None:
        """For a run only: what it started dies with its connection."""
        self._killed = True
        if self._session is not None:
            self._session.close()

    async def read_frames(self, session: Session, budget: Budget, stdin: bytes = b"") -> int:
        """Feeds `stdin`, spools what comes until the exit code. `GuestGone` when the connection ends before
        it."""
        self._session = session
        self._connected.set()
        code = LOST
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.pump)
                if stdin:
                    tasks.start_soon(self._feed, stdin)
                code = await self._frames(session, budget)
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            fault = _first(group)
            if self._killed and isinstance(fault, GuestGone):
                return KILLED
            raise fault from None
        finally:
            self._session = None
            self._connected = anyio.Event()
            session.close()
        return code

    def end(self, code: int) -> None:
        if self.running:
            self.record = replace(self.record, exit_code=code)
            self.spool.seal()
            self._connected.set()
            self._room.set()
            self._tell()

    async def _feed(self, stdin: bytes) -> None:
        with contextlib.suppress(Conflict):
            await self.write(stdin)
            await self.end_stdin()

    async def _frames(self, session: Session, budget: Budget) -> int:
        while frames := await session.receive():
            for kind, payload in frames:
                if kind == protocol.EXIT:
                    return protocol.decode_exit(payload)
                if kind == protocol.GAP:
                    self.spool.skip(*_gap(payload))
                else:
                    await self._take(kind, payload, budget)
            self._tell()
        raise GuestGone("the guest hung up before the process ended")

    async def _take(self, stream: str, data: bytes, budget: Budget) -> None:
        while self.spool.holds(stream, len(data)):
            self._room = anyio.Event()
            self._tell()
            await self._room.wait()
        self.spool.append(stream, data)
        self._fresh += len(data)
        if self._fresh >= TRIM_EVERY:
            self._fresh = 0
            budget.trim()

    def _tell(self) -> None:
        news, self._news = self._news, anyio.Event()
        news.set()


@dataclass(frozen=True, slots=True)
class Finished:
    """A run's result. `exit_code` is -1 when it took too long, `truncated` when not all its output is
    kept."""

    exit_code: int
    timed_out: bool
    spool: Spool

    @property
    def truncated(self) -> bool:
        return self.spool.cut


class Processes:
    """All of one sandbox. What outlives a request runs in `tasks`."""

    def __init__(
        self, sandbox: str, directory: Path, store: Store, audit: Audit, tasks: anyio.abc.TaskGroup
    ) -> None:
        self._sandbox, self._directory, self._store, self._tasks = sandbox, directory, store, tasks
        self._audit = audit
        self._told = audit.past.exited.get(sandbox, set())
        """Processes whose exit is in the audit log, though their record may not have it yet."""
        self._scopes: set[anyio.CancelScope] = set()
        self._budget = Budget()
        self._known: dict[int, Process] = {}
        self._next = 1
        for record in store.processes(sandbox):
            process = self._add(record)
            if process.running and not record.session:
                # A run lived by the connection of the daemon that is gone.
                self._finish(process, LOST)
        started = audit.past.started.get(sandbox, set())
        self._next = max([self._next, *(pid + 1 for pid in started)])
        for pid in sorted(started - self._known.keys() - self._told):
            # The daemon before was killed between the event and the record; the guest is told to end it.
            audit.record("process.exited", sandbox, pid=pid, exit_code=LOST)

    @property
    def running(self) -> int:
        return sum(process.running for process in self._known.values())

    def all(self) -> list[ProcessRecord]:
        """By pid."""
        return [self._known[pid].record for pid in sorted(self._known)]

    def get(self, pid: str) -> Process:
        number = int(pid) if pid.isascii() and pid.isdigit() and len(pid) < 18 else 0
        if number not in self._known:
            raise NotFound("no such process")
        return self._known[number]

    async def start(self, guest: Guest, command: Command) -> ProcessRecord:
        """A kept process; it is running when this returns."""
        name = secrets.token_hex(8)
        session = None
        try:
            session = await guest.execute(False, **_fields(command), keep=True, session=name)
            process = self._enter(command, name)
        except (GuestRefused, Unsupported):
            raise
        except BaseException:
            # Its starter left, or it cannot be written down: nobody would ever hear of what may be running now.
            if session is not None:
                session.close()
            self._tasks.start_soon(self._abandon, guest, name)
            raise
        self._tasks.start_soon(self._keep, guest, process, session)
        return process.record

    @asynccontextmanager
    async def run(
        self, guest: Guest, command: Command, stdin: bytes, timeout_s: float
    ) -> AsyncIterator[Finished]:
        """Runs to the end, or kills it: after `timeout_s` (0: never) or when the caller leaves. The result's
        spool is whole inside the block."""
        session = await guest.execute(not stdin, **_fields(command))
        try:
            process = self._enter(command, "")
        except BaseException:
            session.close()
            raise
        process.stdin_open = bool(stdin)
        process.spool.pinned += 1
        try:
            code = LOST
            try:
                with anyio.move_on_after(timeout_s or None) as limit:
                    code = await process.read_frames(session, self._budget, stdin)
            finally:
                self._finish(process, code)
            yield Finished(code, limit.cancelled_caught, process.spool)
        finally:
            process.spool.pinned -= 1

    async def signal(self, guest: Guest, pid: str, name: str) -> None:
        """Delivered even where the process does not read its stdin. None to a process that has ended."""
        process = self.get(pid)
        if await _past_stdin(guest, process, protocol.SIGNAL, name.encode()):
            return
        if name != "KILL":
            raise Conflict("the process does not read its stdin; only KILL reaches it")
        process.kill_by_hanging_up()

    async def resize(self, guest: Guest, pid: str, size: bytes) -> None:
        """`size` is the frame's payload. Felt even where the process does not read its stdin."""
        await _past_stdin(guest, self.get(pid), protocol.RESIZE, size)

    async def take_back(self, guest: Guest) -> tuple[int, int]:
        """After a restart: (kept processes attached again, processes whose end nobody saw)."""
        known_to_guest = {state.session for state in await guest.sessions()}
        mine = {process.record.session: process for process in self._known.values() if process.running}
        # First, because a guest that is gone meanwhile is asked for all of it again: no process is followed twice.
        for name in known_to_guest - mine.keys():
            # Its starter was never told of it, or its end was recorded and only the guest still remembers.
            with contextlib.suppress(GuestRefused):
                await _send_aside(guest, name, (0, 0), protocol.SIGNAL, b"KILL")
                await guest.forget(name)
        for name, process in mine.items():
            if not process.running:
                continue  # the sandbox was ended meanwhile
            if name in known_to_guest:
                self._tasks.start_soon(self._keep, guest, process, None)
            else:
                self._finish(process, LOST)
        taken = len(mine.keys() & known_to_guest)
        return taken, len(mine) - taken

    def stop(self) -> None:
        """The machine is going, or gone: nothing of it is waited for any more, and what ran has ended."""
        for scope in self._scopes:
            scope.cancel()
        for process in self._known.values():
            if process.running:
                self._finish(process, LOST)

    def remove(self) -> None:
        """Every trace on disk, of a sandbox that is forgotten."""
        for process in self._known.values():
            process.spool.remove()
        trees.remove(self._directory)

    def _add(self, record: ProcessRecord) -> Process:
        directory = self._directory / str(record.pid)
        spool = Spool(directory) if record.session else Spool(directory, limit=RUN_LIMIT, keep_first=True)
        process = self._known[record.pid] = Process(record, spool)
        self._budget.add(record.pid, spool)
        self._next = max(self._next, record.pid + 1)
        return process

    def _enter(self, command: Command, session: str) -> Process:
        record = ProcessRecord(self._sandbox, self._next, command.argv, command.tty, session, time.time())
        self._next += 1
        # The event first: a daemon that is killed in between finds it, and tells the end of what has no record.
        self._audit.record(
            "process.started", self._sandbox, pid=record.pid, **audits.arguments(command.argv), cwd=command.cwd,
            env_names=sorted(command.env) or None,
        )  # fmt: skip
        # Whoever asked for a run hears of it in any case: on a full host work can still be looked at and brought back.
        write = self._store.put_process if session else self._store.note_process
        try:
            write(record)
        except Internal:
            self._tell_exit(record, LOST)
            raise
        process = self._add(record)
        if len(self._known) > MAX_FINISHED:
            self._forget_oldest()
        return process

    def _forget_oldest(self) -> None:
        for pid in sorted(self._known):
            process = self._known[pid]
            if not process.running and not process.spool.pinned:
                process.spool.remove()
                self._budget.discard(pid)
                self._store.forget_process(self._sandbox, pid)
                del self._known[pid]
                return

    def _tell_exit(self, record: ProcessRecord, code: int) -> None:
        if record.pid not in self._told:
            took_ms = max(0, round((time.time() - record.started_at) * 1000))
            self._audit.record("process.exited", self._sandbox, pid=record.pid, exit_code=code, duration_ms=took_ms)

    def _finish(self, process: Process, code: int) -> None:
        if process.running:
            self._tell_exit(process.record, code)
        process.end(code)
        self._store.note_process(process.record)

    async def _abandon(self, guest: Guest, name: str) -> None:
        """Ends a kept process that nobody knows of; the guest may be about to start it only now."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                for pause in ABANDON_S:
                    await anyio.sleep(pause)
                    with contextlib.suppress(GuestGone, GuestRefused, GuestProtocolError):
                        await _send_aside(guest, name, (0, 0), protocol.SIGNAL, b"KILL")
                        await guest.forget(name)
                        return
            finally:
                self._scopes.discard(scope)

    async def _keep(self, guest: Guest, process: Process, session: Session | None) -> None:
        """Follows a kept process to its end."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                self._finish(process, await self._to_its_end(guest, process, session))
                with contextlib.suppress(GuestGone, GuestRefused, GuestProtocolError):
                    await guest.forget(process.record.session)
            except Exception:
                # One process's bug must not end the daemon and with it every other one's.
                log.exception("%s: following process %d failed", self._sandbox, process.record.pid)
                self._finish(process, LOST)
            finally:
                self._scopes.discard(scope)

    async def _to_its_end(self, guest: Guest, process: Process, session: Session | None) -> int:
        """Its exit code; attaches again, from what is spooled on, where the connection was lost."""
        pause, longest = REATTACH_S
        while True:
            try:
                if session is None:
                    offsets = process.spool.total("o"), process.spool.total("E")
                    session = await guest.attach(process.record.session, *offsets)
                return await process.read_frames(session, self._budget)
            except GuestRefused:
                return LOST
            except GuestProtocolError as fault:
                log.warning("%s: process %d is given up: %s", self._sandbox, process.record.pid, fault)
                return LOST
            except GuestGone:
                session = None
                await anyio.sleep(pause)
                pause = min(pause * 2, longest)


async def _past_stdin(guest: Guest, process: Process, kind: str, payload: bytes) -> bool:
    """Sends a frame that does not wait for stdin. False: stdin is in its way, on the only connection a run has."""
    if not process.running:
        return True
    with anyio.move_on_after(SIGNAL_WAIT_S) as waited:
        await process.send(kind, payload)
    if not waited.cancelled_caught:
        return True
    if not process.record.session:
        return False
    offsets = process.spool.total("o"), process.spool.total("E")
    await _send_aside(guest, process.record.session, offsets, kind, payload)
    return True


async def _send_aside(guest: Guest, name: str, offsets: tuple[int, int], kind: str, payload: bytes) -> None:
    """A frame on a connection of its own, past whatever stdin still waits on the first one."""
    session = await guest.attach(name, *offsets, frame=protocol.encode_frame(kind, payload))
    try:
        if (kind, payload) == (protocol.SIGNAL, b"KILL"):
            with anyio.move_on_after(KILL_GRACE_S), contextlib.suppress(GuestGone):
                while frames := await session.receive():
                    if any(kind == protocol.EXIT for kind, _ in frames):
                        return
    finally:
        session.close()


def _fields(command: Command) -> dict[str, Any]:
    """A command in the protocol's terms."""
    fields: dict[str, Any] = {"argv": command.argv, "env": command.env, "cwd": command.cwd}
    if command.tty:
        fields |= {"tty": True, "rows": command.rows, "cols": command.cols}
    return fields


def _gap(payload: bytes) -> tuple[str, int]:
    try:
        return protocol.decode_gap(payload)
    except protocol.GuestProtocolFault as fault:
        raise GuestProtocolError(f"the guest sent {fault}") from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong first. A cancellation comes bare out of a task group, so a group holds faults."""
    fault: BaseException = group
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return fault
