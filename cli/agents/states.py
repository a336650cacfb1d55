"""What an agent is doing, decided from facts: its sandbox's state, its process, and who spoke last and when.

In: values. Out: a word and the reason for it. No text that an agent wrote is looked at: who spoke is enough, and
wording changes with every version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cli.agents import conversation
from cli.agents.conversation import AGENT, Turn
from sandboxd.errors import Conflict, NotFound

if TYPE_CHECKING:
    from sandboxd.client import Client, Process, Sandbox

STATES = ("working", "blocked", "idle", "done", "failed", "suspended", "stopped", "unknown")
QUIET_S = 30.0
"""An agent that spoke last may go on by itself; after so long without a word it waits for somebody."""


class Verdict(NamedTuple):
    state: str
    why: str


def look(client: Client, sandbox: Sandbox, now: float) -> Verdict:
    """The state of the agent in `sandbox`, which was asked for at `now`, in seconds since 1970."""
    if sandbox.state != "running":
        return of_sandbox(sandbox.state)
    agent = sandbox.labels.get("agent", "")
    if not agent:
        return Verdict("unknown", "the sandbox has no label agent: no agent was started in it")
    try:
        process = min(client.processes(sandbox.id), key=lambda one: one.pid, default=None)
    except (NotFound, Conflict):
        return of_sandbox("terminated")  # just now
    if process is None or process.state != "running":
        return of_process(process)
    if not conversation.readable(agent):
        return Verdict("unknown", f"what {agent} writes about its conversation is not understood")
    return of_conversation(conversation.read(client, sandbox.id, agent), process.tty, now)


def of_sandbox(state: str) -> Verdict:
    """Of a sandbox that does not run."""
    known = {"terminated": "stopped", "suspended": "suspended"}
    return Verdict(known.get(state, "unknown"), f"the sandbox is {state}")


def of_process(process: Process | None) -> Verdict:
    """Of an agent's process that does not run."""
    if process is None:
        return Verdict("unknown", "nothing was started in the sandbox yet")
    return Verdict("failed" if process.exit_code else "done", f"it ended with exit code {process.exit_code}")


def of_conversation(turns: Sequence[Turn], tty: bool, now: float) -> Verdict:
    """Of an agent whose process runs."""
    if not turns:
        return Verdict("unknown", "no conversation is to be seen")
    last = turns[-1]
    if last.who != AGENT:
        return Verdict("working", f"the {last.who} spoke last")
    if last.at is None:
        return Verdict("unknown", "the agent spoke last, at a time that is not known")
    quiet_s = now - last.at
    if quiet_s < QUIET_S:
        return Verdict("working", f"the agent spoke {max(0, round(quiet_s))} s ago")
    since = f"the agent spoke last, {round(quiet_s)} s ago"
    return Verdict("blocked", f"{since}, in a terminal") if tty else Verdict("idle", since)
