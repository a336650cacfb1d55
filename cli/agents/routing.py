"""Which agent works when the first one cannot: the next is asked if the first has failed and changed nothing.

In: the person's words and settings, a way to make a plan of an agent and its arguments, and how runs ended. Out: runs,
each in a fresh sandbox, and the exit code of the last. An agent whose provider does not answer is passed over. Where it
is not known that nothing was changed, nobody goes on: two agents' work would mix.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cli import show
from cli.agents import briefing, conversation, start
from cli.agents.conversation import Turn
from cli.agents.table import Agent, named
from cli.plan import Plan
from cli.running import Outcome, Run
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

if TYPE_CHECKING:
    from sandboxd.client import Client

LABEL_BYTES = 256


def others(
    first: Agent, words: Sequence[str], asked: Sequence[str], settings: Sequence[str], *, terminal: bool, detach: bool
) -> tuple[Agent, ...]:
    """Those that go on after `first`, in order. `asked` are flags, and what does not fit them is refused; `settings`
    are for every run, and hold for those that they fit."""
    names = dict.fromkeys(asked or settings)
    names.pop(first.name, None)
    chain = tuple(named(name) for name in names)
    if not asked:
        fits = first.headless is not None and not detach and unattended(first, words, terminal=terminal)
        return tuple(agent for agent in chain if agent.headless is not None) if fits else ()
    for agent in (first, *chain):
        if agent.headless is None:
            raise SandboxError(f"--fallback: {agent.name} works in a terminal only, so no agent can go on for another")
    if detach:
        raise SandboxError("--fallback does not go with --detach: nobody would see the first agent fail")
    if not unattended(first, words, terminal=terminal):
        typed = " ".join((*(first.headless or ()), "PROMPT"))
        raise SandboxError(f"--fallback is for work that asks nobody: give {first.name} its prompt with {typed}")
    return chain


def unattended(agent: Agent, words: Sequence[str], *, terminal: bool) -> bool:
    """Whether nobody is asked: there is no terminal, or the agent was told to work without asking."""
    given = {*(agent.headless or ()), *agent.skip_permission[:1]}
    return not terminal or not given.isdisjoint(words)


def prompt_of(words: Sequence[str]) -> str | None:
    """What an agent was asked, as its last argument; None where that is a flag, or there is none."""
    return words[-1] if words and words[-1].strip() and not words[-1].startswith("-") else None


def hands_over(outcome: Outcome) -> bool:
    """Whether another agent may go on: this one failed, and it is known that it changed nothing."""
    return outcome.code != 0 and outcome.commits == 0 and not (outcome.left or outcome.interrupted or outcome.died)


def labels(route: str, attempt: int, came_from: str, reason: str) -> dict[str, str]:
    """How a sandbox is known as an attempt of a route."""
    cut = clean(reason).encode("utf-8", "replace")[:LABEL_BYTES].decode("utf-8", "ignore")
    told = {"route.id": route, "route.attempt": str(attempt)}
    return told | ({"route.from": came_from, "route.reason": cut} if came_from else {})


def new_route() -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) + f"-{os.urandom(3).hex()}"


class Route:
    """The attempts for one piece of work."""

    def __init__(
        self, chain: Sequence[Agent], words: Sequence[str], hosts: Mapping[str, str],
        planned: Callable[[Agent, tuple[str, ...]], Plan],
    ) -> None:
        """`hosts` says for an agent by name which host to ask for its provider, "" for none."""
        self._chain, self._words, self._hosts, self._planned = chain, words, hosts, planned
        self._id = new_route()
        self._attempts = 0
        self._came_from, self._reason = "", ""
        self._turns: list[Turn] = []

    def to_the_end(self) -> int:
        """The exit code of the last agent that ran. Raises where none could."""
        last: Outcome | None = None
        why_not = []
        for agent in self._chain:
            if down := self._down(agent):
                why_not.append(f"{agent.name}: {down}")
                show.note(f"{agent.name} is passed over: {down}")
                if last is None:
                    self._came_from, self._reason = agent.name, down
                continue
            if agent is not self._chain[0] and prompt_of(self._words) is None:
                why_not.append(f"{agent.name}: the last argument is no prompt that could be handed on")
                show.note(why_not[-1])
                break
            if last is not None:
                show.note(f"{self._came_from} failed ({self._reason}) and changed nothing: {agent.name} goes on")
            last = self._attempt(agent, last)
            if not hands_over(last):
                break
            self._came_from, self._reason = agent.name, f"exit code {last.code}"
        if last is None:
            raise SandboxError(f"no agent was started: {'; '.join(why_not)}")
        return last.code

    def _attempt(self, agent: Agent, before: Outcome | None) -> Outcome:
        self._attempts += 1
        words: Sequence[str] = self._words
        files: dict[str, bytes] = {}
        prompt = prompt_of(self._words) or ""
        if before is not None:
            files = briefing.files(self._came_from, before.code, prompt, self._turns)
            words = start.headless(agent, prompt + briefing.POINTER)
        elif agent is not self._chain[0]:
            words = start.headless(agent, prompt)
        asked = self._planned(agent, start.argv(agent, words))
        create = asked.create
        name, branch = create.name, asked.branch
        if name and self._attempts > 1 and asked.keep:
            # The one before is kept under its name; what comes back is still what the person named.
            name, branch = f"{name}-{self._attempts}", branch or name
        marks = labels(self._id, self._attempts, self._came_from, self._reason)
        create = create._replace(name=name, labels={**(create.labels or {}), **marks})
        self._turns = []

        def ended(client: Client, sandbox: str, code: int) -> None:
            if code:
                self._turns = conversation.read(client, sandbox, agent.name)

        return Run(replace(asked, create=create, branch=branch, files=files), ended=ended).to_the_end()

    def _down(self, agent: Agent) -> str:
        if not (host := self._hosts.get(agent.name, agent.probe)):
            return ""
        from cli.agents.probe import probe  # what speaks TLS takes its time to load

        why = probe(host)
        return f"{host}: {why}" if why else ""
