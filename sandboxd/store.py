"""What the daemon remembers across a restart: sandboxes and their processes, in one SQLite file.

In and out: the frozen records below. It trusts the file (0600, in a state directory of the daemon's own). Of
an environment it knows the names; a value has no column to go to. Every call is one short transaction on the
caller's thread; a write is safe against a killed daemon (WAL), not against a power cut in the same second,
and the machines it speaks of would not survive that either. Where the disk is full, what is only asked for is
refused, and what has happened already is owed: `catch_up` writes it later.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
"""
VERSION = 1
_PUT = (
    "INSERT INTO sandbox VALUES (?, ?, ?)"
    " ON CONFLICT (id) DO UPDATE SET state = excluded.state, record = excluded.record"
)
_FORGET = "DELETE FROM sandbox WHERE id = ?"
_PUT_PROCESS = "INSERT OR REPLACE INTO process VALUES (?, ?, ?)"
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
class SandboxRecord:
    """One sandbox. Times are seconds since the epoch; `lifetime_secs` 0 means none, `uid` is its VMM's when
    root."""

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


class Store:
    """The open file. `close` when done."""

    def __init__(self, path: Path) -> None:
        self._owed: dict[tuple[str, int], tuple[str, tuple[Any, ...]]] = {}
        # Made by us first, so that SQLite never creates it with the wider mode of the umask.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        self._db = sqlite3.connect(path, isolation_level=None)
        try:
            self._open()
        except sqlite3.Error as fault:
            self._db.close()
            raise SetupError(f"the records in {path} cannot be used: {fault}") from None
        except SetupError:
            self._db.close()
            raise

    def _open(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise SetupError(f"the state directory was written by another version (schema {version})")
        if version == 0:
            self._db.executescript(SCHEMA)
            if version != VERSION:      # a write, which a full disk would refuse
                self._db.execute(f"PRAGMA user_version = {VERSION}")

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

    def sandboxes(self) -> list[SandboxRecord]:
        """Oldest first."""
        rows = self._db.execute("SELECT record FROM sandbox").fetchall()
        records = [_sandbox(json.loads(text)) for (text,) in rows]
        return sorted(records, key=lambda record: (record.created_at, record.id))

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
        except sqlite3.OperationalError as fault:
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
        return [_process(json.loads(text)) for (text,) in rows]


def _sandbox(body: dict[str, Any]) -> SandboxRecord:
    network = body["network"]
    allow = None if network["allow"] is None else tuple(network["allow"])
    fields = body | {
        "state": State(body["state"]),
        "env_names": tuple(body["env_names"]),
        # An earlier version wrote no allow_tcp.
        "network": Network(network["mode"], allow, tuple(network["deny"]), tuple(network.get("allow_tcp", ()))),
    }
    return SandboxRecord(**fields)


def _process(body: dict[str, Any]) -> ProcessRecord:
    fields = body | {"argv": tuple(body["argv"])}
    return ProcessRecord(**fields)


def _sandbox_row(record: SandboxRecord) -> tuple[Any, ...]:
    body = asdict(record) | {"state": record.state.value}
    return record.id, record.state.value, json.dumps(body)


def _process_row(record: ProcessRecord) -> tuple[Any, ...]:
    return record.sandbox, record.pid, json.dumps(asdict(record))
