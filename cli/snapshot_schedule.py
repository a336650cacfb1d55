"""Let a snapshot of a sandbox be taken from time to time, the newest ones kept.

Usage:
  sandbox-cli snapshot-schedule [--keep=N] [--context=C] [--json] --every=D
              SANDBOX
  sandbox-cli snapshot-schedule [--context=C] [--json] --off SANDBOX
  sandbox-cli snapshot-schedule (-h | --help)

The time runs from the end of one snapshot to the beginning of the next. Only
snapshots of the schedule are deleted by it, never one that was asked for.

Options:
  --every=D      how long from one to the next: 30m, 2h (how short it may be,
                 `doctor` says)
  --keep=N       how many of them are kept (default: the server's, 1)
  --off          take no more; those there are stay
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address
  --json         print the sandbox as the API's object
  -h, --help     show this
"""

from __future__ import annotations

from typing import Any

from cli import context, show, snapshot


def main(args: dict[str, Any]) -> int:
    every = 0 if args["--off"] else snapshot.interval("--every", args["--every"])
    keep = snapshot.kept("--keep", args["--keep"])
    changed = context.choose(args["--context"]).client.schedule_snapshots(args["SANDBOX"], every, keep)
    if args["--json"]:
        show.as_json(show.sandbox(changed))
    else:
        show.line(changed.id)
    return 0
