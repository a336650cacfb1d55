"""Volumes: disks that outlive the sandboxes they are given to.

Usage:
  sandbox-cli volume create [--size=MIB] [--context=C] [--json] NAME
  sandbox-cli volume (ls | list) [--context=C] [--json]
  sandbox-cli volume rm [--context=C] NAME...
  sandbox-cli volume (-h | --help)

`run --volume NAME:/path` mounts one, `NAME:/path:ro` only to read. One sandbox
at a time may write to a volume, or any number may read it. `rm` deletes
volumes with all that is in them, and stops at the first failure.

Options:
  --size=MIB     how much it can hold, in MiB (default: the server's size of a
                 sandbox's disk)
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

from cli import context, show, wording
from sandboxd.client import Client, Mount
from sandboxd.errors import Conflict, NotFound, SandboxError
from sandboxd.termsafe import clean

HEAD = ("NAME", "SIZE MIB", "ATTACHED TO", "CREATED")
MAX_SIZE_MIB = 10**9
_AGENTS = re.compile(r"agent-[a-z]+-[0-9a-f]{8}")
"""The names that `agent` gives to the volumes it installs into."""
_GIVEN = re.compile(r"(?P<name>[^:/]+):(?P<path>/[^:]*)(?::(?P<mode>ro|rw))?")


def main(args: dict[str, Any]) -> int:
    size_mib = _size(args["--size"])
    client = context.choose(args["--context"]).client
    if args["create"]:
        return _create(client, args["NAME"][0], size_mib, args["--json"])
    return _remove(client, args["NAME"]) if args["rm"] else _list(client, args["--json"])


def given(specs: Sequence[str]) -> tuple[Mount, ...]:
    """What `run --volume` asks for; whether it may be is the server's to say."""
    found = []
    for spec in specs:
        parts = _GIVEN.fullmatch(spec)
        if parts is None:
            raise SandboxError(f"--volume {clean(spec)}: it is NAME:/path, or NAME:/path:ro to read only")
        if _AGENTS.fullmatch(parts["name"]) and parts["mode"] != "ro":
            # What a run could write there, the next run of that agent would start.
            raise SandboxError(f"--volume {clean(spec)}: runs start an agent from it; mount it to read only, with :ro")
        found.append(Mount(parts["name"], parts["path"], parts["mode"] == "ro"))
    return tuple(found)


def _create(client: Client, name: str, size_mib: int | None, as_json: bool) -> int:
    made = client.create_volume(name, size_mib)
    if as_json:
        show.as_json(made._asdict())
    else:
        show.line(made.name)
    return 0


def _list(client: Client, as_json: bool) -> int:
    found = client.volumes()
    if as_json:
        show.as_json([one._asdict() for one in found])
        return 0
    rows = [(one.name, str(one.size_mb), one.attached_to, show.age(one.created_at)) for one in found]
    sys.stdout.write(show.table(HEAD, rows, whole=("NAME",)))
    return 0


def _remove(client: Client, names: Sequence[str]) -> int:
    for name in names:
        try:
            client.delete_volume(name)
        except NotFound:
            raise SandboxError(f"no such volume: {clean(name)}; see sandbox-cli volume ls") from None
        except Conflict as error:
            raise SandboxError(wording.of_volume(error.message)) from None
        show.line(name)
    return 0


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < MAX_SIZE_MIB):
        raise SandboxError(f"--size {clean(text)}: not a number of MiB from 1 to {MAX_SIZE_MIB - 1}")
    return int(text)
