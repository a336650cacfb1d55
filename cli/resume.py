"""Let a suspended sandbox go on.

Usage:
  sandbox-cli resume [options] SANDBOX

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
    resumed = context.choose(args["--context"]).client.resume(args["SANDBOX"])
    if args["--json"]:
        show.as_json(show.sandbox(resumed))
    else:
        show.line(resumed.id)
    return 0
