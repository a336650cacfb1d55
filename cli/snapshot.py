"""Snapshots: what a sandbox is at one moment, for others to start from.

Usage:
  sandbox-cli snapshot (ls | list) [--context=C] [--json]
  sandbox-cli snapshot rm [--context=C] ID...
  sandbox-cli snapshot [--context=C] [--json] SANDBOX
  sandbox-cli snapshot (-h | --help)

Taking one prints its id; the sandbox runs on, and what is being taken is
finished whether or not this command waits. `run --from-snapshot ID` makes a
sandbox of it. `rm` stops at the first failure. A sandbox that is called `ls`
or `rm` is named by its id.

Options:
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address
  --json         print the API's objects
  -h, --help     show this
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from cli import context, duration, show
from sandboxd.client import Client
from sandboxd.errors import NotFound, SandboxError
from sandboxd.termsafe import clean

HEAD = ("ID", "SANDBOX", "KIND", "SIZE", "CREATED", "IMAGE")
MAX_KEEP = 1000
ID = re.compile(r"snp_[0-9a-f]{16}")


def main(args: dict[str, Any]) -> int:
    for given in args["ID"]:
        check_id(given)
    client = context.choose(args["--context"]).client
    if args["rm"]:
        return _remove(client, args["ID"])
    return _list(client, args["--json"]) if args["ls"] or args["list"] else _take(client, args)


def check_id(text: str) -> str:
    """`text`, if a snapshot's id can be so."""
    if not ID.fullmatch(text):
        raise SandboxError(f"{clean(text)[:100]!r} is no snapshot's id: it is snp_ and 16 digits; see snapshot ls")
    return text


def interval(flag: str, text: str) -> int:
    """Whole seconds, more than none."""
    seconds = duration.seconds(flag, text)
    if seconds < 1 or seconds != int(seconds):
        raise SandboxError(f"{flag} {clean(text)}: whole seconds, and more than none")
    return int(seconds)


def kept(flag: str, text: str | None) -> int | None:
    """How many; None where that is left to the server."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text[:9]) <= MAX_KEEP):
        raise SandboxError(f"{flag} {clean(text)}: not a number from 1 to {MAX_KEEP}")
    return int(text)


def _take(client: Client, args: dict[str, Any]) -> int:
    taken = client.snapshot(args["SANDBOX"])
    if args["--json"]:
        show.as_json(taken._asdict())
    else:
        show.line(taken.id)
    return 0


def _list(client: Client, as_json: bool) -> int:
    found = client.snapshots()
    if as_json:
        show.as_json([one._asdict() for one in found])
        return 0
    rows = [
        (one.id, one.sandbox, one.kind, show.bytes_size(one.bytes), show.age(one.created_at), one.image)
        for one in found
    ]
    sys.stdout.write(show.table(HEAD, rows, whole=("ID",)))
    return 0


def _remove(client: Client, ids: Sequence[str]) -> int:
    for one in ids:
        try:
            client.delete_snapshot(one)
        except NotFound:
            raise SandboxError(f"no such snapshot: {one}; see sandbox-cli snapshot ls") from None
        show.line(one)
    return 0
