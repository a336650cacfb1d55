"""Fields of a request, each by itself. Pure: a value in; the same in normal form out, or an error that names the field.

What a server permits is not asked here; only a reserved environment name is refused whatever its policy says. Messages
name names, never an environment's value.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Iterable

from egress import policy as egress
from sandboxd import wire
from sandboxd.envnames import RESERVED_ENV
from sandboxd.errors import InvalidRequest, Refused
from sandboxd.store import Mount
from sandboxd.wire import MountRequest

HOME = "/sandbox/home"


def _whole(pattern: str) -> re.Pattern[str]:
    """Python's `$` also matches before a line's end; the wire's does not."""
    return re.compile(pattern.removesuffix("$") + r"\Z")


NAME = _whole(wire.NAME)
IMAGE = _whole(wire.IMAGE)
ENV_NAME = _whole(wire.ENV_NAME)
LABEL_KEY = _whole(wire.LABEL_KEY)
BRANCH = _whole(wire.BRANCH)
COMMIT = _whole(wire.COMMIT)
MAX_LABELS = 32
MAX_ENTRY = 300
"""Characters of an entry of a list of names, however it is written; a name has at most 253."""
MAX_MOUNTS = 8
MAX_MOUNT_PATH = 1024
MOUNT_PATH = re.compile(r"/[A-Za-z0-9._/-]*\Z")
NO_MOUNT = re.compile(r"/(?:|(?:tmp|proc|sys|dev|run|etc|usr|bin|sbin|boot|lib[^/]*|workspace)(?:/.*)?)\Z")
"""Where no volume goes: what the system needs, what does not outlive a sandbox anyway, and the repository's place."""


def hosts(field_name: str, names: Iterable[str]) -> tuple[str, ...]:
    """Names in normal form, each once, in order. `InvalidRequest` says which is none."""
    return _normal(egress.normal, field_name, names)


def services(field_name: str, texts: Iterable[str]) -> tuple[str, ...]:
    """`HOST:PORT`s likewise."""
    return _normal(egress.normal_tcp, field_name, texts)


def sandbox_name(text: str) -> str:
    if not NAME.match(text):
        raise InvalidRequest("name must be 1 to 63 characters of a-z, 0-9 and -, not starting with -")
    return text


def volume_name(text: str) -> str:
    if not NAME.match(text):
        raise InvalidRequest("a volume's name must be 1 to 63 characters of a-z, 0-9 and -, not starting with -")
    return text


def mounts(asked: Collection[MountRequest]) -> tuple[Mount, ...]:
    """API §12: where volumes may be in a sandbox. Whether they exist is not asked here."""
    if len(asked) > MAX_MOUNTS:
        raise InvalidRequest(f"volumes: at most {MAX_MOUNTS}")
    found: list[Mount] = []
    for one in asked:
        mount = Mount(volume_name(one.name or ""), _mount_path(one.path or ""), bool(one.read_only))
        for other in found:
            if other.name == mount.name:
                raise InvalidRequest(f"volumes: {mount.name} stands there twice")
            if f"{mount.path}/".startswith(f"{other.path}/") or f"{other.path}/".startswith(f"{mount.path}/"):
                raise InvalidRequest(f"volumes: {mount.path} and {other.path} are one within the other")
        found.append(mount)
    return tuple(found)


def _mount_path(text: str) -> str:
    if not MOUNT_PATH.match(text) or len(text) > MAX_MOUNT_PATH:
        raise InvalidRequest(
            f"volumes: a path must be absolute, of letters, digits and . _ - /, and at most {MAX_MOUNT_PATH} long"
        )
    path = guest_path("volumes: a path", text)
    if NO_MOUNT.match(path):
        raise InvalidRequest(f"volumes: nothing can be mounted at {path}; choose another place, such as /data")
    return path


def check_labels(labels: dict[str, str]) -> dict[str, str]:
    if len(labels) > MAX_LABELS:
        raise InvalidRequest(f"at most {MAX_LABELS} labels")
    for key, value in labels.items():
        label(key, value)
    return labels


def label(key: str, value: str) -> None:
    if not LABEL_KEY.match(key):
        raise InvalidRequest(f"{printable(key)} is not a label key")
    what = f"the value of the label {key}"
    if len(_utf8(what, value)) > 256 or any(c < " " or "\x7f" <= c <= "\x9f" for c in value):
        raise InvalidRequest(f"{what} must be at most 256 bytes without control characters")


def check_env(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        trimmed = name.strip()
        if trimmed in RESERVED_ENV:
            raise Refused(f"the environment name {trimmed} is reserved")
        if not ENV_NAME.match(name):
            raise InvalidRequest(f"{printable(name)} is not an environment name")
        _bytes(f"the value of {name}", value)
    return env


def argv(arguments: tuple[str, ...]) -> tuple[str, ...]:
    if not arguments or not arguments[0]:
        raise InvalidRequest("argv must name a command")
    for position, argument in enumerate(arguments):
        _bytes(f"argv[{position}]", argument)
    return arguments


def guest_path(field_name: str, text: str) -> str:
    """An absolute path in the guest, cleaned as text and never resolved here."""
    _bytes(field_name, text)
    if not text.startswith("/"):
        raise InvalidRequest(f"{field_name} must be an absolute path")
    if ".." in text.split("/"):
        raise InvalidRequest(f"{field_name} must not hold ..")
    return "/" + posixpath.normpath(text).lstrip("/")


def host_path(field_name: str, text: str) -> str:
    """An absolute path of the host as it is given, not resolved here."""
    _bytes(field_name, text)
    _utf8(field_name, text)
    if not text.startswith("/"):
        raise InvalidRequest(f"{field_name} must be an absolute path")
    return text


def branch(field_name: str, text: str) -> str:
    if not BRANCH.match(text) or ".." in text or "//" in text or text.endswith((".lock", "/", ".")):
        raise InvalidRequest(f"{field_name} is not a branch name")
    return text


def commit_or_branch(field_name: str, text: str) -> str:
    return text if COMMIT.match(text) else branch(field_name, text)


def printable(text: str) -> str:
    """Somebody's text inside a message: short, quoted, ASCII."""
    return ascii(text if len(text) <= 80 else text[:80] + "…")


def _normal(normal: Callable[[str], str], field_name: str, texts: Iterable[str]) -> tuple[str, ...]:
    found = set()
    for text in texts:
        if len(text) > MAX_ENTRY:
            raise InvalidRequest(f"{field_name}: {printable(text)} is too long")
        try:
            found.add(normal(text))
        except ValueError as fault:
            raise InvalidRequest(f"{field_name}: {fault}") from None
    return tuple(sorted(found))


def _bytes(what: str, text: str) -> None:
    """Text that can stand in an argument, a path or an environment: no NUL, and bytes it can be turned
    into."""
    if "\0" in text:
        raise InvalidRequest(f"{what} holds a NUL")
    try:
        text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what} is not text") from None


def _utf8(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what} is not valid UTF-8") from None
