"""Print the version.

Usage:
  sandbox-cli version [--json]

Options:
  --json         print an object
  -h, --help     show this
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cli import show


def current() -> str:
    """The installed package's version."""
    try:
        return version(show.PROGRAM)
    except PackageNotFoundError:
        return "not installed"


def main(args: dict[str, Any]) -> int:
    if args["--json"]:
        show.as_json({"version": current()})
    else:
        show.line(f"{show.PROGRAM} {current()}")
    return 0
