"""List the sandboxes that have not ended, newest first.

Usage:
  sandbox-cli list [--label=K=V]... [options]

Options:
  -a, --all      ended ones too, as long as sandboxd knows them
  --label=K=V    only those that have this label; may be given again, and all
                 must match
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address
  --json         print the API's objects
  -h, --help     show this
"""

from __future__ import annotations

import sys
from typing import Any

from cli import context, show

HEAD = ("ID", "NAME", "STATE", "IMAGE", "NETWORK", "CREATED", "LABELS")


def main(args: dict[str, Any]) -> int:
    found = context.choose(args["--context"]).client.sandboxes(args["--label"])
    if not args["--all"]:
        found = [one for one in found if one.state != "terminated"]
    if args["--json"]:
        show.as_json([show.sandbox(one) for one in found])
        return 0
    rows = [
        (s.id, s.name, s.state, s.image, show.network(s.network), show.age(s.created_at), show.labels(s.labels))
        for s in found
    ]
    sys.stdout.write(show.table(HEAD, rows, whole=("ID",)))
    return 0
