"""Sizes with a name, for `run --template`.

Usage:
  sandbox-cli template (ls | list) [--json]
  sandbox-cli template (-h | --help)

Those that are built in, and those saved in studio.json of the settings'
directory. What --cpus, --memory or --disk say comes before a template's own; a
disk that it does not name is the server's default.

Options:
  --json         print a list of objects
  -h, --help     show this
"""

from __future__ import annotations

import sys
from typing import Any

from cli import show, templates

HEAD = ("NAME", "VCPUS", "MEMORY", "DISK", "SOURCE", "DESCRIPTION")


def main(args: dict[str, Any]) -> int:
    found = templates.every()
    if args["--json"]:
        show.as_json([one._asdict() for one in found])
        return 0
    rows = [
        (
            one.name, str(one.vcpus), f"{one.memory_mb} MiB", f"{one.disk_mb} MiB" if one.disk_mb else "default",
            one.source, one.description,
        )
        for one in found
    ]  # fmt: skip
    sys.stdout.write(show.table(HEAD, rows))
    return 0
