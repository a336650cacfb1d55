"""Session records: what a run was made of, so that its work can be brought back without it.

One file for a sandbox, `<config>/sessions/<sandbox>.json`, 0600 in a 0700 directory, replaced by rename
and never followed through a link. A record is written when the repository is in the sandbox and goes
when nothing of it is left to do. Undecodable bytes in a path travel as JSON escapes of lone surrogates.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

RECORD_BYTES = 1024 * 1024
SANDBOX_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class SessionError(SandboxError):
    """A record that cannot be read or written."""


@dataclass(frozen=True, slots=True)
class Session:
    """`base` is the commit that was sent, `branch` the name under refs/sandbox/ it comes back as.

    `started` and `checkpoint_at` are RFC 3339 in UTC, "" for never; `checkpoint` is a commit or "";
    `mirrored` are object names.
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
    mirrored: tuple[str, ...] = ()


TYPES: dict[str, Any] = get_type_hints(Session)


def prepare(config_dir: Path) -> None:
    """Raises `SessionError` where `save` would: a run whose record could not be kept is not begun."""
    path = config_dir / "sessions"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SessionError(f"{clean(str(path))} cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise SessionError(f"{clean(str(path))} cannot be written to by you; whose is it?")


def save(config_dir: Path, session: Session) -> None:
    path = _path(config_dir, session.sandbox)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                json.dump(dataclasses.asdict(session), file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise SessionError(f"{clean(str(path))} cannot be written: {error.strerror}") from None


def load(config_dir: Path, sandbox: str) -> Session | None:
    """The record of one sandbox, None where there is none."""
    path = _path(config_dir, sandbox)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SessionError(f"{clean(str(path))}: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        try:
            text = file.read(RECORD_BYTES + 1)
            if len(text) > RECORD_BYTES:
                raise ValueError("too large")
            session = _parse(json.loads(text))
        except (OSError, ValueError, RecursionError) as error:
            raise SessionError(f"{clean(str(path))} is not a session record: {clean(str(error))}") from None
    if session.sandbox != sandbox:
        raise SessionError(f"{clean(str(path))} is the record of another sandbox")
    return session


def every(config_dir: Path) -> list[Session]:
    """All records, oldest run first."""
    names = [file.stem for file in (config_dir / "sessions").glob("*.json")]
    found = (load(config_dir, name) for name in sorted(names) if SANDBOX_ID.fullmatch(name))
    return sorted((session for session in found if session), key=lambda session: session.started)


def forget(config_dir: Path, sandbox: str) -> None:
    with suppress(FileNotFoundError):
        _path(config_dir, sandbox).unlink()


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
    try:
        return Session(**values)
    except TypeError:
        raise ValueError("fields are missing") from None
