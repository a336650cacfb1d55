"""An agent's login between its runs: small files that are saved after one and put back before the next.

In: a row of the table, a sandbox, the files of a guest that is taken to be hostile. Out: files below
`<config>/agents/<agent>/`, 0600 in directories of 0700, replaced by rename; and notes for the person. Only files that
the row names are looked at. No link below the configuration directory is followed, and what is none of a file is
left alone. A settings file that holds a login among other things is reduced to the login, both ways: a guest cannot
make the next one run a command at its start.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from cli import place, private
from cli.agents.table import Agent
from sandboxd.errors import NotFound, SandboxError
from sandboxd.termsafe import clean

if TYPE_CHECKING:
    from sandboxd.client import Client

HOME = "/sandbox/home"
LOGIN_BYTES = 4 << 20

# What is a login in a settings file, as paths of keys. Everything else in it is dropped.
LOGIN_KEYS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    ".claude.json": (
        ("oauthAccount",), ("userID",), ("hasCompletedOnboarding",), ("lastOnboardingVersion",), ("theme",),
        ("bypassPermissionsModeAccepted",),
    ),
    ".gemini/settings.json": (("security", "auth", "selectedType"), ("selectedAuthType",)),
}  # fmt: skip


class LoginRefused(SandboxError):
    """A login that is not saved or not put back, and why."""


def filtered(name: str, content: bytes) -> bytes:
    """What of a login file may cross, in either direction: credentials as they are, of settings the login alone.
    Raises `LoginRefused` for settings that are no JSON object."""
    keys = LOGIN_KEYS.get(name)
    if keys is None:
        return content
    try:
        settings = json.loads(content)
    except (ValueError, RecursionError):
        raise LoginRefused(f"{name} is not JSON") from None
    if not isinstance(settings, dict):
        raise LoginRefused(f"{name} is not a JSON object")
    kept: dict[str, Any] = {}
    for path in keys:
        found, value = _lookup(settings, path)
        if found:
            _put(kept, path, value)
    return json.dumps(kept, indent=2).encode("ascii") + b"\n"


def restore(client: Client, sandbox: str, agent: Agent) -> Iterator[str]:
    """Puts what is saved into the sandbox's home; yields what the person should know."""
    for name in agent.logins:
        try:
            if (content := _read(agent, name)) is not None:
                client.write_file(sandbox, f"{HOME}/{name}", filtered(name, content))
        except SandboxError as refused:
            yield f"the saved login of {agent.name} is not used: {refused}"


def save(client: Client, sandbox: str, agent: Agent) -> Iterator[str]:
    """Keeps the login files of the sandbox's home; yields what the person should know. A file that is not there
    leaves the saved one as it is."""
    for name in agent.logins:
        try:
            content = _fetch(client, sandbox, f"{HOME}/{name}")
            if content is not None:
                _write(agent, name, filtered(name, content))
        except SandboxError as refused:
            yield f"the login of {agent.name} was not saved: {refused}"


def saved(agent: Agent) -> bool:
    """Whether a login file of this agent is there."""
    top = os.path.join(place.config_dir(), "agents", agent.name)
    return any(os.path.isfile(os.path.join(top, name)) for name in agent.logins)


def _fetch(client: Client, sandbox: str, path: str) -> bytes | None:
    """A guest's file; None where there is none."""
    content = bytearray()
    try:
        for piece in client.stream_file(sandbox, path):
            content += piece
            if len(content) > LOGIN_BYTES:
                raise LoginRefused(f"{path} is larger than {LOGIN_BYTES >> 20} MiB")
    except NotFound:
        return None
    return bytes(content)


def _lookup(settings: dict[str, Any], path: tuple[str, ...]) -> tuple[bool, Any]:
    value: Any = settings
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return False, None
        value = value[key]
    return True, value


def _put(settings: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        settings = settings.setdefault(key, {})
    settings[path[-1]] = value


def _read(agent: Agent, name: str) -> bytes | None:
    """A saved file; None where there is none."""
    shown = _shown(agent, name)
    with _explained(shown):
        try:
            with _directory(agent, name) as directory:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                descriptor = os.open(os.path.basename(name), flags, dir_fd=directory)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise LoginRefused(f"{shown} is not a file")
            content = file.read(LOGIN_BYTES + 1)
    if len(content) > LOGIN_BYTES:
        raise LoginRefused(f"{shown} is larger than {LOGIN_BYTES >> 20} MiB")
    return content


def _write(agent: Agent, name: str, content: bytes) -> None:
    shown, last = _shown(agent, name), os.path.basename(name)
    with _explained(shown), _directory(agent, name, make=True) as directory:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(last, dir_fd=directory, follow_symlinks=False).st_mode):
                raise LoginRefused(f"{shown} is a link, or no file")
        draft = f".{os.urandom(8).hex()}.partial"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(draft, flags, 0o600, dir_fd=directory), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.rename(draft, last, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=directory)
            raise


def _shown(agent: Agent, name: str) -> str:
    return clean(os.path.join(place.config_dir(), "agents", agent.name, name))


@contextmanager
def _explained(shown: str) -> Iterator[None]:
    """What the system refuses, as a `LoginRefused`."""
    try:
        yield
    except OSError as fault:
        # Which of the two O_NOFOLLOW answers with depends on O_DIRECTORY.
        links = fault.errno in (errno.ELOOP, errno.ENOTDIR)
        why = "a link, or no directory, is in the way" if links else fault.strerror
        raise LoginRefused(f"{shown}: {why}") from None


@contextmanager
def _directory(agent: Agent, name: str, *, make: bool = False) -> Iterator[int]:
    """The directory a saved file is in. Walked one component at a time, since a path as a whole would follow links in
    its middle."""
    top = place.config_dir()
    if make:
        private.prepare(top)
    at = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in ("agents", agent.name, *name.split("/")[:-1]):
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=at)
            below = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        yield at
    finally:
        os.close(at)
