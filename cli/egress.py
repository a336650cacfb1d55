"""Show what a sandbox may reach, and every name it asked for: what was decided,
why, and how much passed.

Usage:
  sandbox-cli egress [options] SANDBOX

IN and OUT are bytes to and from the sandbox. The last line, where there is
one, has the names that were refused and that a flag could allow, ready to be
pasted behind `run` or `update`. `why ID` says more about one line.

Options:
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address
  --json         print the API's object, with those flags as "flags"
  -h, --help     show this
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Any

from cli import context, show
from cli.network import covers
from sandboxd.client import Egress, EgressName
from sandboxd.termsafe import clean

HEAD = ("ID", "NAME", "PORT", "DECISION", "RULE", "SEEN IN", "COUNT", "CONNECTIONS", "IN", "OUT", "LAST")
DROP = ("LAST", "OUT", "IN", "CONNECTIONS", "SEEN IN")
WEB_PORTS = (0, 80, 443)  # 0: asked for by DNS alone, for whatever port


def main(args: dict[str, Any]) -> int:
    found = context.choose(args["--context"]).client.egress(args["SANDBOX"])
    flags = " ".join(map(shlex.quote, allowing(found)))
    if args["--json"]:
        show.as_json(found._asdict() | {"names": [one._asdict() for one in found.names], "flags": flags})
        return 0
    for key, value in network(found):
        sys.stdout.write(f"{key:<10}{clean(' '.join(value)) or 'none'}\n")
    if found.names:
        sys.stdout.write("\n" + show.table(HEAD, [row(one) for one in found.names], whole=("ID",), drop=DROP))
    if flags:
        sys.stdout.write("\nrefused, and what would allow it:\n")
        show.line(flags)
    return 0


def network(found: Egress) -> list[tuple[str, Sequence[str]]]:
    lines: list[tuple[str, Sequence[str]]] = [("network", (found.mode,))]
    if found.mode == "allowlist":
        lines.append(("allow", found.allow or ()))
    for key, values in (("allow-tcp", found.allow_tcp), ("deny", found.deny)):
        if values:
            lines.append((key, values))
    return lines


def row(one: EgressName) -> tuple[str, ...]:
    return (
        one.id, one.name, str(one.port or ""), one.decision, one.rule, one.by, str(one.count),
        str(one.connections or ""), show.bytes_size(one.bytes_in) if one.connections else "",
        show.bytes_size(one.bytes_out) if one.connections else "", show.age(one.last_at),
    )  # fmt: skip


def allowing(found: Egress) -> list[str]:
    """The flags that would allow what was refused for not being on a list, and still is not; other rules no flag
    changes."""
    if found.mode != "allowlist":
        return []
    hosts: dict[str, None] = {}
    services: dict[str, None] = {}
    for one in found.names:
        if one.decision != "denied" or one.rule not in ("not-listed", "port") or not one.name:
            continue
        if covers(found.deny, one.name):
            continue
        if one.port in WEB_PORTS or one.by == "dns":
            hosts[one.name] = None
        else:
            services[f"{one.name}:{one.port}"] = None
    flags = [("--allow", host) for host in hosts if not covers(found.allow or (), host)]
    flags += [("--allow-tcp", service) for service in services if not covers(found.allow_tcp, service)]
    return [word for flag in flags for word in flag]
