"""The contexts a person has named: which sandboxd each is, and the files that open it. Pure but for the one file.

`contexts.json` in the settings' directory holds addresses and absolute paths, never what is in a token's or a key's
file. `local` is built in, and is what is current where nothing else was chosen. A file that cannot be understood is an
error, and is not replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cli import private
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

LOCAL = "local"
FILE_BYTES = 1 << 20
NAME_CHARS = 64
FILES = ("token_file", "ca_file", "cert_file", "key_file")


class Context(NamedTuple):
    """`address` as `sandboxd.endpoint` writes it; the files are absolute paths, or empty."""

    address: str
    token_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


class Contexts(NamedTuple):
    """All of them, but for the built-in one; `current` is a name of them, or `local`."""

    named: Mapping[str, Context]
    current: str = LOCAL

    def get(self, name: str) -> Context:
        """Raises `SandboxError` with the names there are."""
        try:
            return self.named[name]
        except KeyError:
            there = ", ".join([LOCAL, *map(clean, self.named)])
            raise SandboxError(f"no context {clean(name)}; there are {there} (see sandbox-cli context ls)") from None

    def at(self, address: str) -> Context | None:
        """The first one that has this address."""
        return next((one for one in self.named.values() if one.address == address), None)


def check_name(name: str) -> None:
    """What can be typed after `--context` without being taken for an address, an option or a path."""
    fits = 0 < len(name) <= NAME_CHARS and clean(name) == name and not name.startswith(("-", "."))
    if not fits or any(char in " /\\:*" for char in name):
        raise SandboxError(
            f"{clean(name)[:NAME_CHARS] or 'nothing'} is no context's name: up to {NAME_CHARS} characters without "
            "blanks, slashes or colons"
        )
    if name == LOCAL:
        raise SandboxError(f"{LOCAL} is built in: it is the sandboxd of this machine")


def path(config_dir: str) -> str:
    """Where they are kept."""
    return os.path.join(config_dir, "contexts.json")


def load(config_dir: str) -> Contexts:
    """Raises `SandboxError` for a file that is there and cannot be used."""
    where = path(config_dir)
    data = private.read(where, FILE_BYTES)
    if data is None:
        return Contexts({})
    try:
        return parse(json.loads(data))
    except (ValueError, RecursionError) as fault:
        raise SandboxError(
            f"{clean(where)} cannot be understood ({clean(str(fault))}): mend it, or move it away and add them again"
        ) from None


def change(config_dir: str, step: Callable[[Contexts], Contexts]) -> Contexts:
    """Read, `step`, write, while nobody else does; nothing is written where `step` raises."""
    with private.alone(config_dir):
        changed = step(load(config_dir))
        private.write(path(config_dir), text(changed))
    return changed


def text(contexts: Contexts) -> bytes:
    """As it is kept: empty fields are left out."""
    named = {
        name: {key: value for key, value in one._asdict().items() if value} for name, one in contexts.named.items()
    }
    return json.dumps({"current": contexts.current, "contexts": named}, indent=1).encode("ascii") + b"\n"


def parse(value: object) -> Contexts:
    """Raises ValueError that says what is wrong with it."""
    whole = _object(value, "it", {"current", "contexts"})
    current, entries = whole.get("current", LOCAL), _object(whole.get("contexts", {}), "contexts", None)
    named = {}
    for name, entry in entries.items():
        fields = _object(entry, name, set(Context._fields))
        if any(type(held) is not str for held in fields.values()):
            raise ValueError(f"{name}: not all of it is text")
        if not fields.get("address"):
            raise ValueError(f"{name}: no address")
        named[name] = Context(**fields)
    if type(current) is not str or (current != LOCAL and current not in named):
        raise ValueError("current is not one of them")
    return Contexts(named, current)


def _object(value: object, what: str, known: set[str] | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    if known is not None and (unknown := sorted(set(value) - known)):
        raise ValueError(f"{what}: unknown {unknown[0]}")
    return value
