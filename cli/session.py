"""Session records: what a run was made of, so that its work can be brought back without it.

One file for a sandbox, `<config>/sessions/<sandbox>.json`, 0600 in a 0700 directory, replaced by rename and never
followed through a link. It is written before the repository goes in and goes when nothing of it is left to do. Before
there is a sandbox the record is `starting-<run>.json`: should its writer be killed between the server's yes and the
sandbox's own record, the label that the sandbox was made with leads back to it. Whoever changes a record reads it again
under a lock, so that two command lines on one sandbox lose neither's news, and a record that is gone stays gone.
Undecodable bytes in a path travel as JSON escapes of lone surrogates.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from cli import private
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

RECORD_BYTES = 1024 * 1024
MIRRORED = 200  # names of objects in a record
COMMIT = re.compile("[0-9a-f]*")
SANDBOX_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
RUN_LABEL = "run.id"
"""The label that a sandbox of a run with a repository is made with: the record's `run`."""
STARTING = "starting-"
LOCK_S = 10.0
TEMPORARY = ".new-"
STALE_S = 3600.0


class SessionError(SandboxError):
    """A record that cannot be read or written."""


@dataclass(frozen=True, slots=True)
class Session:
    """`base` is the commit that was sent, `branch` the name under refs/sandbox/ it comes back as.

    `sandbox` is "" and `branch` may be while the sandbox is being made. `context` is the endpoint's address. `started`
    and `checkpoint_at` are RFC 3339 in UTC, "" for never; `checkpoint` is a commit or ""; `mirrored` are object names.
    `brought_back`: it was asked at some time for what it holds, and `brought` is the name below refs/sandbox/ that this
    came back as, "" where there was nothing new. `done`: the run went to its end, with nothing left to do.
    """

    sandbox: str
    context: str
    repo: str
    base: str
    branch: str
    agent: str = ""
    started: str = ""
    checkpoint: str = ""
    checkpoint_at: str = ""
    done: bool = False
    brought_back: bool = False
    brought: str = ""
    mirrored: tuple[str, ...] = ()
    run: str = ""

    @property
    def key(self) -> str:
        """What its file is called."""
        return self.sandbox or f"{STARTING}{self.run}"


TYPES: dict[str, Any] = get_type_hints(Session)


def prepare(config_dir: Path) -> None:
    """Raises `SessionError` where `save` would: a run whose record could not be kept is not begun."""
    path = config_dir / "sessions"
    try:
        private.prepare(str(path))
    except OSError as error:
        raise SessionError(f"{clean(str(path))} cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise SessionError(f"{clean(str(path))} cannot be written to by you; whose is it?")
    for left in path.glob(f"{TEMPORARY}*"):
        with suppress(FileNotFoundError):
            if time.time() - left.lstat().st_mtime > STALE_S:
                left.unlink()  # a writer was killed


def save(config_dir: Path, session: Session) -> None:
    """A new record, or another one in its place."""
    os.close(hold(config_dir, session))


def hold(config_dir: Path, session: Session) -> int:
    """Like `save`; for as long as the descriptor it returns is open, `is_held` says that its writer lives."""
    path = _path(config_dir, session.key)
    try:
        private.prepare(str(path.parent))
        descriptor, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with os.fdopen(os.dup(descriptor), "w", encoding="ascii") as file:
                json.dump(dataclasses.asdict(session), file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(descriptor)
            os.replace(temporary, path)
        except BaseException:
            os.close(descriptor)
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise SessionError(f"{clean(str(path))} cannot be written: {error.strerror}") from None
    return descriptor


def is_held(config_dir: Path, session: Session) -> bool:
    try:
        descriptor = os.open(_path(config_dir, session.key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def update(config_dir: Path, sandbox: str, *, more_mirrored: str = "", **changes: Any) -> Session | None:
    """The record as it is now with these fields changed; None, and nothing is written, where there is none any more.

    `more_mirrored` is added to those names that are there then; of many, the last are kept.
    """
    with _locked(config_dir):
        present = load(config_dir, sandbox)
        if present is None:
            return None
        if more_mirrored:
            changes["mirrored"] = (*present.mirrored[1 - MIRRORED :], more_mirrored)
        changed = dataclasses.replace(present, **changes)
        save(config_dir, changed)
        return changed


def load(config_dir: Path, sandbox: str) -> Session | None:
    """The record of one sandbox, None where there is none."""
    path = _path(config_dir, sandbox)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SessionError(f"{clean(str(path))}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SessionError(f"{clean(str(path))} is not a session record: it is no file")
    with os.fdopen(descriptor, "rb") as file:
        try:
            text = file.read(RECORD_BYTES + 1)
            if len(text) > RECORD_BYTES:
                raise ValueError("too large")
            session = _parse(json.loads(text))
        except (OSError, ValueError, RecursionError) as error:
            raise SessionError(f"{clean(str(path))} is not a session record: {clean(str(error))}") from None
    if session.key != sandbox:
        raise SessionError(f"{clean(str(path))} is the record of another sandbox")
    return session


def every(config_dir: Path) -> tuple[list[Session], list[SessionError]]:
    """All records, oldest run first, and what is wrong with those that cannot be read."""
    found: list[Session] = []
    faults: list[SessionError] = []
    for name in sorted(file.stem for file in (config_dir / "sessions").glob("*.json")):
        try:
            session = load(config_dir, name) if SANDBOX_ID.fullmatch(name) else None
        except SessionError as fault:
            faults.append(fault)
            continue
        if session:
            found.append(session)
    return sorted(found, key=lambda session: session.started), faults


def forget(config_dir: Path, sandbox: str) -> bool:
    """Whether there was one."""
    path = _path(config_dir, sandbox)
    try:
        with _locked(config_dir):
            path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise SessionError(f"{clean(str(path))} cannot be removed: {error.strerror}") from None
    return True


def now() -> str:
    """The time as records have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@contextmanager
def _locked(config_dir: Path) -> Iterator[None]:
    """One change of a record at a time. The directory itself is locked: there is no file to leave behind."""
    path = config_dir / "sessions"
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SessionError(f"{clean(str(path))} is locked by another sandbox-cli") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _path(config_dir: Path, sandbox: str) -> Path:
    if not SANDBOX_ID.fullmatch(sandbox):
        raise SessionError(f"'{clean(sandbox)[:100]}' is not a sandbox id")
    return config_dir / "sessions" / f"{sandbox}.json"


def _parse(record: object) -> Session:
    if not isinstance(record, dict):
        raise ValueError("not an object")
    unknown = sorted(set(record) - set(TYPES))
    if unknown:
        raise ValueError(f"unknown {', '.join(unknown)}")
    values: dict[str, Any] = {}
    for name, value in record.items():
        wanted = TYPES[name]
        if wanted in (str, bool):
            if type(value) is not wanted:
                raise ValueError(f"{name} is not a {wanted.__name__}")
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            value = tuple(value)
        else:
            raise ValueError(f"{name} is not a list of texts")
        values[name] = value
    for name, value in values.items():
        # Each is an argument or a part of a path somewhere. What cannot be encoded for one is a ValueError too.
        if isinstance(value, str) and b"\0" in os.fsencode(value):
            raise ValueError(f"{name} holds a NUL")
        if name in ("base", "checkpoint") and not COMMIT.fullmatch(value):
            raise ValueError(f"{name} is no commit")
    try:
        return Session(**values)
    except TypeError:
        raise ValueError("fields are missing") from None
