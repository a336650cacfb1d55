"""What the daemon remembers across a restart: sandboxes, their processes and the volumes, in one SQLite file.

In and out: the frozen records below. It trusts the file (0600, in a state directory of the daemon's own) to be
nobody else's, and not to be whole: a damaged one stops the start, a record that another version wrote is told of and
left as it is. Of an environment it knows the names; a value has no column to go to. Every call is one short
transaction on the caller's thread; a write is safe against a killed daemon (WAL), not against a power cut in the same
second, and the machines it speaks of would not survive that either. Where the disk is full, what is only asked for is
refused, and what has happened already is owed: `catch_up` writes it later.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sandboxd.errors import Internal, SetupError
from sandboxd.lifecycle import State

SCHEMA = """
CREATE TABLE IF NOT EXISTS sandbox (id TEXT PRIMARY KEY, state TEXT NOT NULL, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS process (
    sandbox TEXT NOT NULL REFERENCES sandbox (id) ON DELETE CASCADE,
    pid INTEGER NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (sandbox, pid)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS volume (name TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID;
"""
VERSION = 2
_PUT = (
    "INSERT INTO sandbox VALUES (?, ?, ?)"
    " ON CONFLICT (id) DO UPDATE SET state = excluded.state, record = excluded.record"
)
_FORGET = "DELETE FROM sandbox WHERE id = ?"
_PUT_PROCESS = "INSERT OR REPLACE INTO process VALUES (?, ?, ?)"
_PUT_VOLUME = "INSERT OR REPLACE INTO volume VALUES (?, ?)"
_FORGET_VOLUME = "DELETE FROM volume WHERE name = ?"
_FORGET_PROCESS = "DELETE FROM process WHERE sandbox = ? AND pid = ?"

log = logging.getLogger("sandboxd")


@dataclass(frozen=True, slots=True)
class Network:
    """A network policy as it is in force. `allow` is None when no list applies."""

    mode: str
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    allow_tcp: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume's place in a sandbox. `path` is absolute and in normal form."""

    name: str
    path: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Bind:
    """A directory of the host at /workspace."""

    host_path: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class SandboxRecord:
    """One sandbox. Times are seconds since the epoch; `lifetime_secs` 0 means none, `uid` is its VMM's when root.

    `guest_version` is the protocol its guestd speaks. `created_boot_s` is its creation on the clock that nobody sets
    (CLOCK_BOOTTIME), which no machine outlives; 0 where it was not written down.
    """

    id: str
    name: str
    state: State
    image: str
    cpus: float
    memory_mb: int
    disk_mb: int
    env_names: tuple[str, ...]
    network: Network
    created_at: float
    idle_timeout_secs: int
    lifetime_secs: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    uid: int | None = None
    ended_because: str = ""
    guest_version: int = 1
    created_boot_s: float = 0.0
    volumes: tuple[Mount, ...] = ()
    bind: Bind | None = None


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process. `pid` is the server's counter; `session` names a kept process to the guest, empty for a
    run."""

    sandbox: str
    pid: int
    argv: tuple[str, ...]
    tty: bool
    session: str
    started_at: float
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that is not one of ours, and why. `name` is the sandbox's, `volumes` are the names of those it has, as
    far as it can be told."""

    id: str
    name: str
    why: str
    volumes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VolumeRecord:
    """One volume. Who uses it is in the sandboxes' records."""

    name: str
    size_mb: int
    created_at: float


class Store:
    """The open file. `close` when done. Raises `SetupError` where it cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owed: dict[tuple[str, int], tuple[str, tuple[Any, ...]]] = {}
        try:
            # Made by us first, so that SQLite never creates it with the wider mode of the umask.
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as fault:
            raise SetupError(f"the records in {path} cannot be used: {fault.strerror}") from None
        mode = os.fstat(fd).st_mode
        os.close(fd)
        if mode & 0o077:
            # They hold commands, and a command may hold a prompt. Who may have read them is not ours to forget.
            raise SetupError(f"the records in {path} are open to others (mode {mode & 0o7777:04o}): chmod 600 {path}")
        self._db = sqlite3.connect(path, isolation_level=None)
        try:
            self._open()
        except BaseException as fault:
            self._db.close()
            if isinstance(fault, sqlite3.Error):
                raise self._unusable(fault) from None
            raise

    def _open(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise SetupError(
                f"the records in {self._path} were written by a newer sandboxd (schema {version}, this one has"
                f" {VERSION}): start that version, or give this one a --state-dir of its own"
            )
        # A page that is damaged would show only when it is read, in the middle of something.
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise self._unusable(sqlite3.DatabaseError(found))
        if version < VERSION:
            self._db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")

    def _unusable(self, fault: sqlite3.Error) -> SetupError:
        """What a person can do depends on whether the file or only the place it is in is at fault."""
        if isinstance(fault, sqlite3.OperationalError):
            return SetupError(f"the records in {self._path} cannot be used: {fault}")
        name = self._path.name
        return SetupError(
            f"the records in {self._path} are damaged: {str(fault).splitlines()[-1]}. Nothing was changed. Put back a"
            f" copy, or save what can be read: `sqlite3 {name} .recover | sqlite3 new.sqlite`. To start without any"
            f" record, move {name}, {name}-wal and {name}-shm away, and sandboxes/*/scratch.img first if a disk is"
            " still wanted: machines without a record are ended and their disks removed."
        )

    def close(self) -> None:
        self._db.close()

    def put(self, record: SandboxRecord) -> None:
        """Written whole: new or changed. Raises `Internal` where it cannot be written."""
        self._write((record.id, 0), _PUT, _sandbox_row(record))

    def put_done(self, record: SandboxRecord) -> None:
        """Of one to which something has happened already: written now, or owed."""
        self._write_or_owe((record.id, 0), _PUT, _sandbox_row(record))

    def forget(self, sandbox_id: str) -> None:
        """The sandbox and its processes: now, or owed."""
        for key in [key for key in self._owed if key[0] == sandbox_id]:
            del self._owed[key]
        self._write_or_owe((sandbox_id, 0), _FORGET, (sandbox_id,))

    def sandboxes(self) -> tuple[list[SandboxRecord], list[Unreadable]]:
        """The records, oldest first; and those that cannot be read, or have a process that cannot."""
        records, unreadable = [], {}
        try:
            rows = self._db.execute("SELECT id, record FROM sandbox ORDER BY id").fetchall()
            processes = self._db.execute("SELECT sandbox, record FROM process").fetchall()
        except sqlite3.Error as fault:
            raise self._unusable(fault) from None
        for sandbox_id, text in processes:
            try:
                _read(text, ProcessRecord)
            except ValueError as fault:
                unreadable[sandbox_id] = f"a process of it: {fault}"
        for sandbox_id, text in rows:
            try:
                record = _read(text, SandboxRecord)
                if record.id != sandbox_id:
                    raise ValueError("it is another sandbox's")
                if sandbox_id not in unreadable:
                    records.append(record)
            except ValueError as fault:
                unreadable[sandbox_id] = str(fault)
        texts = dict(rows)
        left = [Unreadable(id, _name(texts[id]), why, _volume_names(texts[id])) for id, why in unreadable.items()]
        return sorted(records, key=lambda record: (record.created_at, record.id)), left

    def put_process(self, record: ProcessRecord) -> None:
        """Raises `Internal` where it cannot be written."""
        self._write((record.sandbox, record.pid), _PUT_PROCESS, _process_row(record))

    def note_process(self, record: ProcessRecord) -> None:
        """Of one that has ended, or whose starter waits for its end: written now, or owed."""
        self._write_or_owe((record.sandbox, record.pid), _PUT_PROCESS, _process_row(record))

    def forget_process(self, sandbox_id: str, pid: int) -> None:
        """Now, or owed."""
        self._write_or_owe((sandbox_id, pid), _FORGET_PROCESS, (sandbox_id, pid))

    def catch_up(self) -> None:
        """Writes what is owed, as far as it goes."""
        for key, (statement, values) in list(self._owed.items()):
            try:
                self._write(key, statement, values)
            except Internal:
                return
            log.info("%s: its record is written again", key[0])

    def _write(self, key: tuple[str, int], statement: str, values: tuple[Any, ...]) -> None:
        """One row: process 0 is the sandbox itself. What was owed of it before is out of date then."""
        try:
            self._db.execute(statement, values)
        except sqlite3.Error as fault:
            raise Internal(f"the state directory cannot be written: {fault}") from None
        self._owed.pop(key, None)

    def _write_or_owe(self, key: tuple[str, int], statement: str, values: tuple[Any, ...]) -> None:
        try:
            self._write(key, statement, values)
        except Internal as fault:
            if key not in self._owed:
                log.error("%s: %s; it is tried again", key[0], fault)
            self._owed[key] = (statement, values)

    def processes(self, sandbox_id: str) -> list[ProcessRecord]:
        """By pid."""
        query = "SELECT record FROM process WHERE sandbox = ? ORDER BY pid"
        rows = self._db.execute(query, (sandbox_id,)).fetchall()
        return [_read(text, ProcessRecord) for (text,) in rows]

    def put_volume(self, record: VolumeRecord) -> None:
        """Raises `Internal` where it cannot be written."""
        self._write((record.name, 0), _PUT_VOLUME, (record.name, _text(record)))

    def forget_volume(self, name: str) -> None:
        """Raises `Internal` where it cannot be written."""
        self._write((name, 0), _FORGET_VOLUME, (name,))

    def volumes(self) -> list[VolumeRecord]:
        """By name; without those that another version wrote, of which their files still tell."""
        found = []
        for name, text in self._db.execute("SELECT name, record FROM volume ORDER BY name").fetchall():
            try:
                found.append(_read(text, VolumeRecord))
            except ValueError as fault:
                log.warning("volume %s: its record was written by another version: %s", name, fault)
        return found


T = TypeVar("T", SandboxRecord, ProcessRecord, VolumeRecord)


def _read(text: str, kind: type[T]) -> T:
    """`ValueError` for what this version would not have written: to go on with it could lose what another one knows."""
    try:
        said = json.loads(text)
        record = msgspec.convert(said, kind)
    except (ValueError, RecursionError) as fault:     # msgspec's errors are ValueErrors
        raise ValueError(str(fault)) from None
    if strange := _unknown(said, msgspec.to_builtins(record)):
        raise ValueError(f"it has a field {strange!r} that this version does not know")
    return record


def _unknown(said: Any, known: Any) -> str:
    """The first field of `said` that is not in `known`, which was read from it."""
    if isinstance(said, dict):
        pairs = [(key, value, known.get(key)) for key, value in said.items()]
        if strange := next((key for key, _, _ in pairs if key not in known), ""):
            return strange
        return next((found for _, value, other in pairs if (found := _unknown(value, other))), "")
    if isinstance(said, list):
        return next((found for one, other in zip(said, known, strict=True) if (found := _unknown(one, other))), "")
    return ""


def _name(text: str) -> str:
    try:
        name = json.loads(text)["name"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return ""
    return name if isinstance(name, str) else ""


def _volume_names(text: str) -> tuple[str, ...]:
    try:
        return tuple(str(one["name"]) for one in json.loads(text)["volumes"])
    except (ValueError, RecursionError, LookupError, TypeError):
        return ()


def _sandbox_row(record: SandboxRecord) -> tuple[Any, ...]:
    return record.id, record.state.value, _text(record)


def _process_row(record: ProcessRecord) -> tuple[Any, ...]:
    return record.sandbox, record.pid, _text(record)


def _text(record: SandboxRecord | ProcessRecord | VolumeRecord) -> str:
    """ASCII: arguments that are no UTF-8 are lone surrogates here, which no encoding of msgspec's takes."""
    return json.dumps(msgspec.to_builtins(record))
