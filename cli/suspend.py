"""Stop a sandbox where it is, its disk and memory kept, until it is resumed.

Usage:
  sandbox-cli suspend [options] SANDBOX

A sandbox in which a process runs is not suspended: end the process first. A
suspended sandbox does not count as idle.

Options:
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address
  --json         print the sandbox as the API's object
  -h, --help     show this
"""

from __future__ import annotations

from typing import Any

from cli import context, show


def main(args: dict[str, Any]) -> int:
    suspended = context.choose(args["--context"]).client.suspend(args["SANDBOX"])
    if args["--json"]:
        show.as_json(show.sandbox(suspended))
    else:
        show.line(suspended.id)
        show.note(f"let it go on with: sandbox-cli resume {args['SANDBOX']}")
    return 0
