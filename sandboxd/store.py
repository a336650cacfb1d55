"""What the daemon remembers across a restart: sandboxes and their processes, in one SQLite file.

In and out: the frozen records below. It trusts the file (0600, in a state directory of the daemon's own). Of
an environment it knows the names; a value has no column to go to. Every call is one short transaction on the
caller's thread; a write is safe against a killed daemon (WAL), not against a power cut in the same second,
and the machines it speaks of would not survive that either.
"""

from __future__ import annotations

import json
import os
import sqlite3
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandboxd.errors import SetupError
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


@dataclass(frozen=True, slots=True)
class Network:
    """A network policy as it is in force. `allow` is None when no list applies."""

    mode: str
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()


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
        # Made by us first, so that SQLite never creates it with the wider mode of the umask.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            self._db.close()
            raise SetupError(f"the state directory was written by another version (schema {version})")
        self._db.executescript(SCHEMA)
        self._db.execute(f"PRAGMA user_version = {VERSION}")

    def close(self) -> None:
        self._db.close()

    def put(self, record: SandboxRecord) -> None:
        """Written whole: new or changed."""
        body = asdict(record) | {"state": record.state.value}
        self._db.execute(
            "INSERT INTO sandbox VALUES (?, ?, ?)"
            " ON CONFLICT (id) DO UPDATE SET state = excluded.state, record = excluded.record",
            (record.id, record.state.value, json.dumps(body)),
        )

    def forget(self, sandbox_id: str) -> None:
        """The sandbox and its processes."""
        self._db.execute("DELETE FROM sandbox WHERE id = ?", (sandbox_id,))

    def sandboxes(self) -> list[SandboxRecord]:
        """Oldest first."""
        rows = self._db.execute("SELECT record FROM sandbox").fetchall()
        records = [_sandbox(json.loads(text)) for (text,) in rows]
        return sorted(records, key=lambda record: (record.created_at, record.id))

    def put_process(self, record: ProcessRecord) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO process VALUES (?, ?, ?)",
            (record.sandbox, record.pid, json.dumps(asdict(record))),
        )

    def forget_process(self, sandbox_id: str, pid: int) -> None:
        self._db.execute("DELETE FROM process WHERE sandbox = ? AND pid = ?", (sandbox_id, pid))

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
        "network": Network(network["mode"], allow, tuple(network["deny"])),
    }
    return SandboxRecord(**fields)


def _process(body: dict[str, Any]) -> ProcessRecord:
    fields = body | {"argv": tuple(body["argv"])}
    return ProcessRecord(**fields)
