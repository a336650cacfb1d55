"""Wait until the agent in a sandbox is in a state, and print which it is.

Usage:
  sandbox-cli agent wait --state=STATE... [options] SANDBOX

The states are those of `sandbox-cli agent state`. Exit code 0 when it is in
one of those asked for; 2 when the time is over, with the last state on stderr;
1 when the sandbox has ended, unless `stopped` was asked for.

Options:
  --state=STATE   what to wait for; may be given again
  --timeout=D     give up after so long, such as 90s or 10m (default: never)
  --every=D       how often to look, at least 200ms [default: 2s]
  --context=C     which sandboxd: the name of a context (see `context`), or an
                  address
  --json          print it as an object
  -h, --help      show this
"""

from __future__ import annotations

import time
from typing import Any

from cli import context, duration, show
from cli.agents import states
from cli.agents.states import Verdict
from sandboxd.client import Client
from sandboxd.errors import NotFound, SandboxError
from sandboxd.termsafe import clean

TIME_IS_OVER = 2
LEAST_S = 0.2


def main(args: dict[str, Any]) -> int:
    wanted = args["--state"]
    for word in wanted:
        if word not in states.STATES:
            raise SandboxError(f"--state {clean(word)}: it is one of {', '.join(states.STATES)}")
    every_s = duration.seconds("--every", args["--every"])
    if every_s < LEAST_S:
        raise SandboxError(f"--every {clean(args['--every'])}: at least 200ms")
    timeout_s = duration.seconds("--timeout", args["--timeout"]) if args["--timeout"] else None
    client, ref = context.choose(args["--context"]).client, args["SANDBOX"]
    began = time.monotonic()
    seen = False
    while True:
        verdict = _look(client, ref, known=seen)
        seen = True
        if verdict.state in wanted:
            break
        if verdict.state == "stopped":
            raise SandboxError(f"{clean(ref)} has ended")
        left_s = every_s if timeout_s is None else min(every_s, began + timeout_s - time.monotonic())
        if left_s <= 0:
            show.note(f"{ref} is {verdict.state}: {verdict.why}")
            return TIME_IS_OVER
        time.sleep(left_s)
    if args["--json"]:
        show.as_json(verdict._asdict())
    else:
        show.line(verdict.state)
    return 0


def _look(client: Client, ref: str, *, known: bool) -> Verdict:
    """A sandbox that was there and is forgotten has ended."""
    try:
        return states.look(client, client.get(ref), time.time())
    except NotFound:
        if not known:
            raise
        return states.of_sandbox("terminated")
