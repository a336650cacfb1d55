"""Say what the agents in sandboxes are doing.

Usage:
  sandbox-cli agent state [options] [SANDBOX...]

Without SANDBOX: of every sandbox that an agent was started in and that has not
ended.

  working     it was told something, or said something less than 30 s ago
  blocked     it said something and waits in its terminal
  idle        it said something, and has no terminal to be answered in
  done        its process ended with exit code 0
  failed      its process ended with another one
  suspended   its sandbox is suspended
  stopped     its sandbox has ended
  unknown     none of these can be told, for instance where its session files
              are not understood

It is told from times and from who spoke last in the session files of claude
and codex, never from what was said.

Options:
  --why           say the reason, too
  --context=C     which sandboxd: the name of a context (see `context`), or an
                  address
  --json          print it as a list of objects
  -h, --help      show this
"""

from __future__ import annotations

import sys
import time
from typing import Any

from cli import context, show, wording
from cli.agents import states
from sandboxd.client import Client, Sandbox
from sandboxd.errors import NotFound


def main(args: dict[str, Any]) -> int:
    client = context.choose(args["--context"]).client
    if args["SANDBOX"]:
        found = [_get(client, ref) for ref in args["SANDBOX"]]
    else:
        found = [one for one in client.sandboxes() if one.labels.get("agent") and one.state != "terminated"]
    found.sort(key=lambda one: one.id)
    told = [(one, states.look(client, one, time.time())) for one in found]
    if args["--json"]:
        show.as_json([
            {"sandbox": one.id, "name": one.name, "agent": one.labels.get("agent", "")} | verdict._asdict()
            for one, verdict in told
        ])  # fmt: skip
        return 0
    head = ("SANDBOX", "NAME", "AGENT", "STATE", *(["WHY"] if args["--why"] else []))
    rows = [(one.id, one.name, one.labels.get("agent", ""), *verdict)[: len(head)] for one, verdict in told]
    sys.stdout.write(show.table(head, rows))
    return 0


def _get(client: Client, ref: str) -> Sandbox:
    try:
        return client.get(ref)
    except NotFound as error:
        raise NotFound(wording.about(error.message, ref, None)) from None
