"""Which words of an agent's command line are the sandbox's.

In: the words after the agent's name, and the usage text of `run`, which is where the sandbox's flags are defined. Out:
the leading run of known long flags with their values, and every word after it as it was given. Short flags, and words
that only begin like a flag, are the agent's; `--` says that the rest is. Nothing is looked up by its meaning here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cli import candidates
from sandboxd.errors import SandboxError


class Words(NamedTuple):
    """`help` says that the sandbox's own flags were asked for."""

    flags: tuple[str, ...]
    agents: tuple[str, ...]
    help: bool = False


def flags(usage: str) -> dict[str, bool]:
    """The long flags of a usage text's options but --help, and whether each takes a value."""
    found = candidates.options(usage)
    return {name: name in found.valued for name in found.all if name != "--help"}


def split(words: Sequence[str], known: Mapping[str, bool]) -> Words:
    """Raises SandboxError for a flag of ours that lacks its value, or has one too many."""
    position = 0
    while position < len(words):
        name, equals, _ = words[position].partition("=")
        if words[position] == "--":
            return Words(tuple(words[:position]), tuple(words[position + 1 :]))
        if name == "--help" and not equals:
            return Words(tuple(words[:position]), (), help=True)
        if name not in known:
            break
        if equals and not known[name]:
            raise SandboxError(f"agent: {name} takes no value")
        position += 1 if equals or not known[name] else 2
    if position > len(words):
        raise SandboxError(f"agent: {words[-1]} needs a value")
    return Words(tuple(words[:position]), tuple(words[position:]))


def meant(words: Sequence[str], given: Words, known: Mapping[str, bool]) -> str:
    """Which flag of ours the agent's first word may have been, where no `--` says that it is the agent's; else "".

    Of a run whose `--profile` is mistyped nobody would see that it keeps to nothing.
    """
    first = words[len(given.flags)].partition("=")[0] if len(words) > len(given.flags) else ""
    if not first.startswith("--") or first == "--":
        return ""
    from difflib import get_close_matches

    return next(iter(get_close_matches(first, known, n=1, cutoff=0.8)), "")
