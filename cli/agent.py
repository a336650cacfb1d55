"""Run a coding agent in a sandbox, on the repository around the current
directory.

Usage:
  sandbox-cli agent NAME [--SANDBOX-FLAG...] [--] [ARGS...]

NAME is one of those `sandbox-cli agent ls` lists. The long flags of
`sandbox-cli run` that stand directly behind it are the sandbox's; from the
first other word on, or from `--`, everything goes to the agent as it is:

  sandbox-cli agent claude                                     in this terminal
  sandbox-cli agent codex --name fix exec "make the tests pass"
  sandbox-cli agent claude --profile prod --allow api.anthropic.com -- \\
                           -p "make the tests pass"

It runs as `run` runs a command: HEAD goes in, commits come back, the exit code
is the agent's. Of your environment it gets the variables its vendor documents
for keys and addresses, and what -e, or your configuration, names. The host its
provider answers at is allowed by itself, but not under --profile prod. An
agent the image does not carry is installed first.

With --fallback (or `routing` in your configuration) another agent goes on in a
fresh sandbox where one that asks nobody fails and has changed nothing. It gets
the same prompt, the last word here, and finds what was said in
/sandbox/context.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from cli import plan, run, show, terminal
from cli.agents import routing, start, wrapper
from cli.agents.table import Agent, named
from cli.running import Run, signals_end_us
from sandboxd.errors import SandboxError

WORDS_AS_THEY_ARE = True
"""Its words are not all ours: they are not parsed by the usage text."""


def main(args: dict[str, Any]) -> int:
    words = args["WORDS"]
    if not words:
        raise SandboxError("which agent? see sandbox-cli agent ls")
    if words[0] in ("-h", "--help"):
        sys.stdout.write(str(__doc__).strip() + "\n")
        return 0
    if words[0].startswith("-"):
        raise SandboxError("the agent's name comes first, the sandbox's flags behind it: sandbox-cli agent NAME --FLAG")
    agent = named(words[0])
    usage = str(run.__doc__)
    known = wrapper.flags(usage)
    given = wrapper.split(words[1:], known)
    if given.help:
        sys.stdout.write(f"{str(__doc__).strip()}\n\nSandbox flags:\n{usage.partition('Options:')[2].strip(chr(10))}\n")
        return 0
    if near := wrapper.meant(words[1:], given, known):
        show.note(f"{given.agents[0]} goes to {agent.name}, and what follows it too; {near} is the sandbox's flag")
    flags = run.parsed(given.flags, ())
    settings = run.settings(flags)
    at_terminal = terminal.is_ours()
    others = routing.others(
        agent, given.agents, flags["--fallback"], settings.routing, terminal=at_terminal, detach=flags["--detach"]
    )

    def planned(who: Agent, command: tuple[str, ...]) -> plan.Plan:
        return plan.of(flags | {"CMD": command}, settings, os.environ, plan.zone(), who)

    with signals_end_us():
        if others:
            return routing.Route((agent, *others), given.agents, settings.providers, planned).to_the_end()
        return Run(planned(agent, start.argv(agent, given.agents))).to_the_end().code
