"""Change a running sandbox: what it may reach, its name, its labels, when it
counts as idle.

Usage:
  sandbox-cli update [--allow=HOST]... [--deny=HOST]...
              [--allow-tcp=HOST:PORT]... [--label=KV]... [--unlabel=KEY]...
              [options] SANDBOX

Only what is named changes, all of it or nothing. --allow, --allow-tcp
and --deny add to what the sandbox has. Its lists start anew with --network
or --no-baseline, as in `run`: from the server's names, or from none.
Connections to what it may no longer reach are cut. --network none is for good:
a sandbox without a network cannot be given one.

Options:
  --network=MODE         none, allowlist or open
  --allow=HOST           a name it may reach on ports 80 and 443; may be given
                         again
  --allow-tcp=HOST:PORT  a name it may reach on another port; may be given
                         again
  --deny=HOST            a name it may not reach, whatever is allowed; may be
                         given again
  --no-baseline          only the names given here, none of the server's own
  --name=NAME            its new name; an empty one takes the name away
  --label=KV             K=V sets a label, K- removes it; may be given again
  --unlabel=KEY          removes a label; may be given again
  --idle=TIME            end it after this long with no process and no request:
                         seconds, or 30m, 2h; 0: never, where the server allows
                         that
  --context=C            which sandboxd: the name of a context (see `context`),
                         or an address
  --json                 print the sandbox as the API's object
  -h, --help             show this
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cli import context, duration, network, show
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

MAX_IDLE_S = 10**9


def main(args: dict[str, Any]) -> int:
    wanted = network.wanted(args)
    sets, removes = label_changes(args["--label"], args["--unlabel"])
    name, idle = args["--name"], idle_secs(args["--idle"])
    if wanted.nothing and not sets and not removes and name is None and idle is None:
        raise SandboxError("update: nothing to change; see sandbox-cli update --help")
    client = context.choose(args["--context"]).client
    present = client.get(args["SANDBOX"])
    asked = None if wanted.nothing else network.of_update(wanted, present.network, client.capabilities())
    labels = labelled(present.labels, sets, removes) if sets or removes else None
    changed = client.update(present.id, network=asked, name=name, labels=labels, idle_timeout_secs=idle)
    if args["--json"]:
        show.as_json(show.sandbox(changed))
    else:
        show.line(f"{changed.name or changed.id}: network {show.network(changed.network)}")
    return 0


def label_changes(given: Sequence[str], removed: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """(what is set, what is removed)"""
    sets: dict[str, str] = {}
    removes = set(removed)
    for pair in given:
        key, equals, value = pair.partition("=")
        if key and equals:
            sets[key] = value
        elif len(pair) > 1 and pair.endswith("-"):
            removes.add(pair[:-1])
        else:
            raise SandboxError(f"--label {clean(pair)}: it is KEY=VALUE, or KEY- to remove it")
    return sets, removes


def labelled(present: Mapping[str, str], sets: Mapping[str, str], removes: set[str]) -> dict[str, str]:
    """The labels a sandbox has afterwards; the API takes all of them or none."""
    return {key: value for key, value in present.items() if key not in removes} | dict(sets)


def idle_secs(text: str | None) -> int | None:
    if text is None:
        return None
    if text.isascii() and text.isdigit():
        return _whole(text, int(text[:12]))
    return _whole(text, duration.seconds("--idle", text))


def _whole(text: str, seconds: float) -> int:
    if seconds != int(seconds) or seconds > MAX_IDLE_S:
        raise SandboxError(f"--idle {clean(text)}: not a whole number of seconds up to {MAX_IDLE_S}")
    return int(seconds)
