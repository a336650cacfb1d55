"""Sizes of sandboxes that have a name: those we know, and those the person saved.

In: `studio.json` in the settings' directory, of which only `templates` is looked at, and which is only read here.
Out: `Template` values, or an error that says what is wrong with the file and where.
"""

from __future__ import annotations

import json
import os
import re
from typing import NamedTuple

from cli import private
from cli.place import config_dir
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

FILE_BYTES = 4 << 20
MAX_SAVED = 100
NAME = re.compile(r"[a-z0-9-]{1,32}")
BUILT_IN = "built in"
SAVED = "saved"
MAX_DESCRIPTION = 256


class Template(NamedTuple):
    """`disk_mb` 0 is the server's default; `source` is `built in` or `saved`."""

    name: str
    vcpus: int
    memory_mb: int
    disk_mb: int = 0
    description: str = ""
    source: str = BUILT_IN


OURS = (
    Template("micro", 1, 512, description="a command or a small script"),
    Template("small", 1, 1024, description="one agent on a small repository"),
    Template("medium", 2, 2048, description="an agent that builds and tests"),
    Template("large", 4, 8192, description="large builds"),
    Template("xlarge", 8, 16384, description="several builds at once"),
)
_RANGES = {"vcpus": (1, 256), "memory_mb": (128, 1 << 20), "disk_mb": (256, 1 << 30)}


def every() -> list[Template]:
    """Ours, then the person's, by name."""
    return [*OURS, *sorted(saved(os.path.join(config_dir(), "studio.json")))]


def named(name: str) -> Template:
    """Raises `SandboxError` with the names there are."""
    found = {one.name: one for one in every()}
    if name not in found:
        raise SandboxError(f"no template {clean(name)}; there are {', '.join(found)} (see sandbox-cli template ls)")
    return found[name]


def saved(path: str) -> list[Template]:
    """Those in the file, none where there is no file."""
    data = private.read(path, FILE_BYTES)
    if data is None:
        return []
    try:
        return parse(json.loads(data))
    except (ValueError, RecursionError) as fault:
        raise SandboxError(f"{clean(path)}: {clean(str(fault))}") from None


def parse(value: object) -> list[Template]:
    """Raises ValueError that says which entry is wrong, and how."""
    entries = value.get("templates", []) if isinstance(value, dict) else None
    if not isinstance(entries, list):
        raise ValueError("not an object with a list of templates")
    if len(entries) > MAX_SAVED:
        raise ValueError(f"{len(entries)} templates, and there may be {MAX_SAVED}")
    taken = {one.name for one in OURS}
    found = []
    for number, entry in enumerate(entries, 1):
        one = _one(entry, f"template {number}")
        if one.name in taken:
            raise ValueError(f"template {number}: {one.name} is there already, or built in")
        taken.add(one.name)
        found.append(one)
    return found


def _one(entry: object, where: str) -> Template:
    known = {"name", "description", *_RANGES}
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: not an object")
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"{where}: unknown {unknown[0]}")
    name, description = entry.get("name"), entry.get("description", "")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{where}: its name is 1 to 32 of a-z, 0-9 and -")
    if not isinstance(description, str) or len(description) > MAX_DESCRIPTION:
        raise ValueError(f"{where}: its description is no text of at most {MAX_DESCRIPTION} characters")
    sizes = {}
    for field, (least, most) in _RANGES.items():
        size = entry.get(field, 0 if field == "disk_mb" else None)
        # A bool is an int, and 2.0 is no whole number of processors as a person writes it.
        if type(size) is not int or not (least <= size <= most or (field == "disk_mb" and size == 0)):
            zero = "0 or " if field == "disk_mb" else ""
            raise ValueError(f"{where}: {field} is no whole number, {zero}from {least} to {most}")
        sizes[field] = size
    return Template(name, **sizes, description=description, source=SAVED)
