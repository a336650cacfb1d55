"""What became of a run whose command line may be gone. Pure.

In: the record of its session, what its sandboxd said of the sandbox (`Seen`), what its repository holds (`Held`). Out:
a `Fate`: what there is to say, and the commands that come next. Nothing is asked here, and nothing is hoped for: what
is not known is said to be unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cli import gate
from cli.bringback import CHECKPOINTS, REFS
from cli.gate import NOTHING, Review
from cli.session import Session


class State(StrEnum):
    """As `recover --json` names it."""

    STARTING = "starting"  # by a command line that is at work
    NEVER_MADE = "never made"  # it was to be, and is not there
    RUNNING = "running"
    SUSPENDED = "suspended"
    GONE = "gone"
    UNREACHABLE = "unreachable"  # nobody answers for it


@dataclass(frozen=True, slots=True)
class Seen:
    """A sandboxd's answer. `command` is what its first process does, "" where there never was one.

    `why` says why nobody answered; `remembered`: it is gone, and sandboxd still knows of it.
    """

    state: State
    sandbox: str = ""
    command: str = ""
    why: str = ""
    remembered: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """The repository's side: the commits of the ref that came back and of its checkpoint's, "" where there is none.

    `review` is of the checkpoint. `lost` says that the record names a checkpoint that no ref keeps, `why` why the
    repository cannot be looked at.
    """

    brought: str = ""
    checkpoint: str = ""
    lost: bool = False
    why: str = ""
    review: Review = NOTHING


@dataclass(frozen=True, slots=True)
class Fate:
    """`said` are lines for the person, `next` the commands that may come next, each with what it is for."""

    record: Session
    state: State
    sandbox: str
    checkpoint_ref: str
    said: tuple[str, ...]
    next: tuple[tuple[str, str], ...]
    review: Review = NOTHING


def of(record: Session, seen: Seen, held: Held, elsewhere: str = "") -> Fate:
    """`elsewhere` are the words that name the run's sandboxd where it is not the one that is meant without them."""
    sandbox = record.sandbox or seen.sandbox
    said: list[str] = []
    following: list[tuple[str, str]] = []
    bring_back, end = f"sandbox-cli bring-back {sandbox}", f"sandbox-cli kill{elsewhere} {sandbox}"
    ref = f"{CHECKPOINTS}/{sandbox}" if held.checkpoint else ""
    if seen.state is State.STARTING:
        said.append("its sandbox is being made, by a sandbox-cli that is at work")
    elif seen.state is State.NEVER_MADE:
        said.append("it was cut off before anything was in a sandbox: nothing is lost")
    elif seen.state is State.RUNNING and not seen.command:
        said.append("its sandbox runs, but its command was never started: there is nothing to bring back")
        following.append(("end it", end))
    elif seen.state is State.RUNNING:
        said.append(f"its sandbox runs, {seen.command}")
        following += [("bring its commits back", bring_back), ("end it", end)]
    elif seen.state is State.SUSPENDED:
        said.append("its sandbox is suspended")
        following.append(("bring its commits back", f"sandbox-cli resume{elsewhere} {sandbox} && {bring_back}"))
    elif seen.state is State.UNREACHABLE:
        said.append(f"its sandboxd cannot be asked: {seen.why}")
        following.append(("try again later", "sandbox-cli recover"))
    else:
        said.append("its sandbox is gone" + ("" if record.brought_back or ref else ", and nothing came back from it"))
    said += _of_checkpoint(record, held, ref)
    if record.brought and not held.why:
        gone = "" if held.brought else ", which was deleted since"
        said.append(f"what came back earlier is {REFS}/{record.brought}{gone}")
    elif record.brought_back and not held.why:
        said.append("when it was last asked for its commits there was nothing new")
    if seen.state is State.GONE:
        if not ref and not record.brought_back and not held.why:
            said.append("its work is lost")
        if seen.remembered and not ref:
            said.append("if its machine died by itself, sandboxd keeps its disk until it is killed: docs/operations.md")
        said += gate.lines(held.review)
        following += _of_ref(record, ref, sandbox)
    return Fate(record, seen.state, sandbox, ref, tuple(said), tuple(following), held.review)


def _of_checkpoint(record: Session, held: Held, ref: str) -> list[str]:
    if held.why:
        return [f"its repository cannot be looked at: {held.why}"]
    if held.lost:
        return [f"the ref of its checkpoint of {record.checkpoint_at} was deleted: git branch NAME {record.checkpoint}"]
    if not ref:
        return []
    when = f" of {record.checkpoint_at}" if record.checkpoint == held.checkpoint else ""
    return [f"its checkpoint{when} is {ref}"]


def _of_ref(record: Session, ref: str, sandbox: str) -> list[tuple[str, str]]:
    found = []
    if ref:
        found = gate.steps(record.base, ref)
    return [*found, ("done with it", f"sandbox-cli recover forget {sandbox}")]
