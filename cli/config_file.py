"""One file of settings: opened carefully, read strictly, its keys taken one by one.

In: a path, and whether the person chose it. Out: a tree of plain values and from it a `Layer`, or an error that lists
every fault with its place. A project's file is opened without following a link and is anybody's text. One that is
trusted can name commands to run, so nobody else may be able to write it. Size, depth and work are bounded; what was
opened is what is read, once.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cli import network, profile
from cli.agents.table import AGENTS
from cli.config import Secret
from sandboxd import plain_yaml
from sandboxd.envnames import ENV_NAME, RESERVED_ENV
from sandboxd.errors import SandboxError
from sandboxd.plain_yaml import Section
from sandboxd.termsafe import clean

MAX_BYTES = 64 << 10
MAX_FAULTS = 20
SOURCES = ("file", "command", "env")
# What a server makes of a name is its own to say; here only what can be no name of a host at all is found.
PATTERN = re.compile(r"(?:\*\.)?[^\s/:@*?#]{1,253}")
HOST = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
A_PATTERN = "a host's name, without scheme, port or path, or *. and one in quotes"

# Keys of earlier designs, and what there is instead.
DEAD: Mapping[str, str] = {
    "cache": "use volumes: sandbox-cli volume, and run --volume NAME:/path",
    "engine": "every sandbox is a virtual machine; the server's --backend says which kind",
    "home": "it is /sandbox/home",
    "hostname": "name the sandbox with --name",
    "mounts": "use run --volume NAME:/path, or --bind for a directory of the host",
    "ports": "use sandbox-cli tunnel SANDBOX PORT",
    "runtime": "every sandbox is a virtual machine; the server's --backend says which kind",
    "security": "the virtual machine is the boundary, and the server's policy file the limits",
    "snapshot": "use run --snapshot-every, or sandbox-cli snapshot",
    "sync": "commits come back by themselves, or not with --no-bring-back",
    "user": "processes run as the user sandbox",
    "workdir": "it is /workspace in a repository, else /sandbox/home",
}


class Layer(NamedTuple):
    """What a file says, by field of `Config`; only what stands in it is there. `notes` are for the person."""

    path: Path
    said: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def tree(path: Path, *, trusted: bool) -> Mapping[str, Any]:
    """The file's text as mappings, lists and plain values. Raises SandboxError with every fault of the YAML."""
    faults: list[str] = []
    found = plain_yaml.document(_bytes(path, trusted=trusted), MAX_BYTES, faults)
    if not faults and not isinstance(found, dict | None):
        faults.append("it must be a mapping of settings")
    if faults:
        raise _error(path, faults)
    return found or {}


def layer(path: Path, tree: Mapping[str, Any], *, trusted: bool) -> Layer:
    """The settings in a file's tree. Raises SandboxError with every fault."""
    faults: list[str] = []
    living = {key: value for key, value in tree.items() if key not in DEAD}
    faults += [f"{key}: it is not read; {DEAD[key]}" for key in tree if key in DEAD]
    keys = Section("", living, faults)
    net = keys.section("network")
    found: dict[str, Any] = {
        "image": keys.take("image", None, _is_text, "an image's name"),
        "env": _env(keys.section("env")),
        "env_allow": _list(keys, "env_allow", _variable),
        "mode": network.MODES.get(net.take("mode", None, _is_mode, "none, allowlist or open")),
        "allow": _list(net, "allow", _pattern),
        "deny": _list(net, "deny", _pattern),
        "allow_tcp": _list(net, "allow_tcp", _service),
        "baseline": net.take("baseline", None, _is_flag, "true or false"),
        "secrets": _secrets(keys.section("secrets"), path.parent),
        "routing": _list(keys, "routing", _agent),
        "providers": _providers(keys.section("providers")),
        "mirror": keys.take("mirror", None, lambda value: isinstance(value, dict), "a mapping"),
        "profile": keys.take("profile", None, _is_text, "a profile's name"),
        "persist_auth": keys.take("persist_auth", None, _is_flag, "true or false"),
    }
    net.done()
    keys.done()
    _one_source(found, faults)
    notes = []
    if found["profile"] not in (None, *profile.PROFILES):
        if trusted:
            faults.append(f"profile: it must be {' or '.join(profile.PROFILES)}")
        notes.append(f"{path}: no profile {found['profile']} is known here: it changes nothing")
        found["profile"] = None
    if faults:
        raise _error(path, faults)
    # An empty mapping joins nothing; an empty list stands for what was there before.
    return Layer(path, {field: value for field, value in found.items() if value not in (None, {})}, tuple(notes))


# -- the file


def _bytes(path: Path, *, trusted: bool) -> bytes:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if trusted else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise _error(path, ["it is not a regular file"])
            if trusted and info.st_uid not in (0, os.geteuid()):
                raise _error(path, [f"it belongs to uid {info.st_uid}, who could have it run anything here"])
            if trusted and info.st_mode & 0o022:
                raise _error(path, [f"others can write it: chmod go-w {path}"])
            text = b""
            while len(text) <= MAX_BYTES and (piece := os.read(fd, MAX_BYTES + 1 - len(text))):
                text += piece
            return text
        finally:
            os.close(fd)
    except OSError as fault:
        if fault.errno == errno.ELOOP and not trusted:
            raise _error(path, ["it is a symbolic link; a project's settings are a file of its own"]) from None
        raise SandboxError(f"{clean(str(path))} cannot be read: {fault.strerror}") from None


def _error(path: Path, faults: list[str]) -> SandboxError:
    more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
    return SandboxError(f"{clean(str(path))}: {'; '.join(clean(fault) for fault in faults[:MAX_FAULTS] + more)}")


# -- its keys


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_mode(value: Any) -> bool:
    return isinstance(value, str) and value in network.MODES


def _list(section: Section, key: str, fault: Callable[[str], str]) -> tuple[str, ...] | None:
    """A list of texts; `fault` says what is wrong with one, if anything is."""
    given = section.take(key, None, lambda value: isinstance(value, list), "a list")
    for position, entry in enumerate(given or ()):
        what = fault(entry) if isinstance(entry, str) else "it must be text; put it in quotes"
        if what:
            section.fault(f"{key}[{position}]", what)
    return None if given is None else tuple(dict.fromkeys(entry for entry in given if isinstance(entry, str)))


def _variable(name: str) -> str:
    if not ENV_NAME.fullmatch(name):
        return "it is not a variable's name"
    return "the name is reserved in a sandbox" if name in RESERVED_ENV else ""


def _pattern(name: str) -> str:
    return "" if PATTERN.fullmatch(name) else f"it is {A_PATTERN}"


def _service(name: str) -> str:
    return "" if network.is_service(name) else "it is HOST:PORT, with a port from 1 to 65535"


def _agent(name: str) -> str:
    return "" if name in AGENTS else f"no such agent; there are {', '.join(sorted(AGENTS))}"


def _entries(section: Section, fault: Callable[[str], str]) -> dict[str, Any]:
    """What stands in a mapping whose keys are names, without those that `fault` finds wrong."""
    for name in section.value:
        if what := fault(name):
            section.fault(plain_yaml.shown(name), what)
    return {name: value for name, value in section.value.items() if not fault(name)}


def _env(section: Section) -> dict[str, str]:
    entries = _entries(section, _variable)
    for name, value in entries.items():
        if not isinstance(value, str) or "\0" in value:
            section.fault(name, "it must be text; put numbers and truth values in quotes")
    return entries


def _providers(section: Section) -> dict[str, str]:
    entries = _entries(section, _agent)
    for name, value in entries.items():
        if value != "" and (not isinstance(value, str) or _pattern(value) or value.startswith("*")):
            section.fault(name, 'it must be the name of a host, or "" for one that is not asked')
    return entries


def _secrets(section: Section, beside: Path) -> tuple[Secret, ...]:
    """`beside` is where a relative path of a file starts."""
    found = []
    for name in _entries(section, _variable):
        one = section.section(name)
        given = [(source, text) for source in SOURCES if (text := one.take(source, None, _is_text, "text")) is not None]
        hosts = tuple(_host(host) for host in _list(one, "hosts", _no_host) or ())
        one.done()
        if len(given) != 1:
            one.fault("", "it has exactly one of file, command and env")
            continue
        [(source, value)] = given
        if source == "env" and not ENV_NAME.fullmatch(value):
            one.fault("env", "it is not a variable's name")
        if source == "file":
            value = str(beside.absolute() / os.path.expanduser(value))
        found.append(Secret(name, source, value, hosts))
    return tuple(found)


def _host(name: str) -> str:
    """A name as the server writes it."""
    return name.lower().removesuffix(".")


def _no_host(name: str) -> str:
    return "" if HOST.fullmatch(_host(name)) else f"it is {A_PATTERN}; one that is not ASCII in its xn-- form"


def _one_source(found: Mapping[str, Any], faults: list[str]) -> None:
    """A variable that two keys set would have a value by an order that nobody sees."""
    keys: dict[str, Collection[str]] = {
        "env": found["env"], "env_allow": found["env_allow"] or (), "secrets": [one.name for one in found["secrets"]],
    }  # fmt: skip
    for name in sorted({name for names in keys.values() for name in names}):
        where = [key for key, names in keys.items() if name in names]
        if len(where) > 1:
            faults.append(f"{' and '.join(where)} both say {name}: keep one")
