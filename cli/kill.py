"""End sandboxes: their processes stop, their disks are discarded. Stops at the first failure.

Usage:
  sandbox-cli kill [options] SANDBOX...

Options:
  --context=C    which sandboxd: `local` or unix:///path
  -h, --help     show this
"""

from __future__ import annotations

from typing import Any

from cli import context, show


def main(args: dict[str, Any]) -> int:
    client = context.choose(args["--context"]).client
    for ref in args["SANDBOX"]:
        client.delete(ref)
        show.line(ref)
    return 0
