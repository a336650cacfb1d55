"""Say what became of runs that did not end as they should, and where their work
is.

Usage:
  sandbox-cli recover [--all] [--json]
  sandbox-cli recover forget SANDBOX...
  sandbox-cli recover (-h | --help)

For when sandbox-cli, its terminal, sandboxd or this machine went down during a
run. The runs of the repository around the current directory are looked up,
each at the sandboxd it was started with: one that still runs is there to be
brought back, of one that is gone the last checkpoint is named, if it had one.
Nothing is changed in the repository. `forget` drops what is known of a run, by
its sandbox's id or its name; its refs stay.

Options:
  --all          the runs of every repository
  --json         print the result as objects
  -h, --help     show this
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cli import bringback, context, fate, gate, place, repository, session, show
from cli.fate import Fate, Held, Seen, State
from cli.gate import Review
from cli.session import Session
from sandboxd.client import Client, Process, Sandbox
from sandboxd.errors import ApiError, NotFound, SandboxError
from sandboxd.termsafe import clean

PATIENCE_S = 5.0


@dataclass(slots=True)
class Answer:
    """What one sandboxd says, filled in by a thread; `why` is why it does not."""

    why: str = f"no answer within {PATIENCE_S:.0f} s"
    sandboxes: Mapping[str, Sandbox] = field(default_factory=dict)
    processes: dict[str, list[Process]] = field(default_factory=dict)


def main(args: dict[str, Any]) -> int:
    config = Path(place.config_dir())
    if args["forget"]:
        return _forget(config, args["SANDBOX"])
    records, faults = session.every(config)
    if not args["--all"]:
        records = of_repository(records, Path("."))
    # Before anybody is asked: one that is made meanwhile is not in an answer, and is no longer held afterwards.
    starting = {record.key for record in records if not record.sandbox and session.is_held(config, record)}
    answers = ask(records)
    usual = _usual_address()
    fates = []
    for record in records:
        seen = Seen(State.STARTING) if record.key in starting else look(record, answers[record.context])
        if record.done:
            if seen.state is State.GONE:
                session.forget(config, record.key)
            continue
        if seen.state is State.NEVER_MADE:
            session.forget(config, record.key)
        elsewhere = "" if record.context == usual else f" --context={clean(record.context)}"
        fates.append(fate.of(record, seen, held(record, record.sandbox or seen.sandbox), elsewhere))
    if args["--json"]:
        show.as_json([as_object(one) for one in fates])
    else:
        sys.stdout.write("\n".join(text(one) for one in fates))
    for fault in faults:
        show.note(f"{fault}; forget it with: sandbox-cli recover forget, or look at the file")
    if not fates and not args["--json"]:
        show.note("every run is known to have ended" + ("" if args["--all"] else " here; all repositories: --all"))
    return 0


def of_repository(records: Sequence[Session], start: Path) -> list[Session]:
    """Those of the repository around `start`, whichever of its working trees they were started in."""
    here = repository.discover(start)
    if here is None:
        raise SandboxError("not in a git repository: --all looks at the runs of every one")

    def is_here(path: str) -> bool:
        try:
            found = repository.locate(Path(path))
        except SandboxError:
            found = None
        return path == str(here.top) or (found is not None and found.common_dir == here.common_dir)

    known = {path: is_here(path) for path in {record.repo for record in records}}
    return [record for record in records if known[record.repo]]


# ---- what the sandboxds say


def ask(records: Sequence[Session]) -> dict[str, Answer]:
    """By address. All at once, each for as long as one may take."""
    answers = {record.context: Answer() for record in records}
    threads = [
        threading.Thread(target=_ask, args=(one, [record for record in records if record.context == one], answers))
        for one in answers
    ]
    for thread in threads:
        thread.daemon = True
        thread.start()
    deadline = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers)


def _ask(address: str, records: Sequence[Session], answers: dict[str, Answer]) -> None:
    """Puts a whole answer in place of the one that says there is none."""
    try:
        client = context.choose(address).client
        found = client.sandboxes()
        ids, runs = {one.sandbox for one in records}, {one.run for one in records} - {""}
        processes = {
            one.id: _processes(client, one.id)
            for one in found
            if one.state == "running" and (one.id in ids or one.labels.get(session.RUN_LABEL) in runs)
        }
        answers[address] = Answer("", {one.id: one for one in found}, processes)
    except ApiError as error:
        answers[address] = Answer(error.message)
    except (SandboxError, OSError) as error:
        answers[address] = Answer(str(error))


def _processes(client: Client, sandbox: str) -> list[Process]:
    try:
        return client.processes(sandbox)
    except NotFound:
        return []  # it has ended since


def look(record: Session, answer: Answer) -> Seen:
    """What is known of a record's sandbox."""
    if answer.why:
        return Seen(State.UNREACHABLE, why=answer.why)
    if record.sandbox:
        found = answer.sandboxes.get(record.sandbox)
    else:
        mine = [one for one in answer.sandboxes.values() if one.labels.get(session.RUN_LABEL) == record.run]
        found = next((one for one in mine if one.state != "terminated"), None)
        if found is None:
            return Seen(State.NEVER_MADE)
    if found is None or found.state == "terminated":
        return Seen(State.GONE, record.sandbox, remembered=found is not None)
    if found.state == "suspended":
        return Seen(State.SUSPENDED, found.id)
    return Seen(State.RUNNING, found.id, command=_command(answer.processes.get(found.id, ())))


def _command(processes: Sequence[Process]) -> str:
    """Of the first process, which is the run's."""
    if not processes:
        return ""
    first = min(processes, key=lambda one: one.pid)
    if first.exit_code is None:
        return "its command is at work"
    return f"its command ended with {first.exit_code}"


def _usual_address() -> str:
    try:
        return context.choose(None).client.endpoint.address
    except SandboxError:
        return ""


# ---- what the repository holds


def held(record: Session, sandbox: str) -> Held:
    """Reads two refs. The record is believed in nothing: a checkpoint may have arrived that it does not know of."""
    try:
        repo = repository.discover(Path(record.repo))
        if repo is None:
            return Held(why=f"there is none at {clean(record.repo)} any more")
        brought = bringback.commit_of(repo, f"{bringback.REFS}/{record.brought}") if record.brought else None
        checkpoint = bringback.commit_of(repo, f"{bringback.CHECKPOINTS}/{sandbox}") if sandbox else None
        kept = checkpoint is None and record.checkpoint and bringback.commit_of(repo, record.checkpoint)
        review = gate.review(repo, record.base, checkpoint) if checkpoint else Review()
        return Held(brought or "", checkpoint or "", lost=bool(kept), review=review)
    except SandboxError as error:
        return Held(why=str(error))


# ---- for the person


def text(one: Fate) -> str:
    """A line for the run, and below it what there is to say."""
    record = one.record
    words = [one.sandbox or "a run", record.branch if record.branch != one.sandbox else "", record.agent]
    head = f"{' '.join(word for word in words if word)}, started {record.started} in {record.repo}"
    lines = [clean(head), *(f"  {clean(said)}" for said in one.said)]
    lines += [f"  {clean(what)}: {clean(command)}" for what, command in one.next]
    return "".join(f"{line}\n" for line in lines)


def as_object(one: Fate) -> dict[str, Any]:
    """As JSON prints it: the record, and what became of it."""
    known = {key: value for key, value in asdict(one.record).items() if key not in ("sandbox", "run", "done")}
    return {
        "sandbox": one.sandbox,
        "state": str(one.state),
        **known,
        "checkpoint_ref": one.checkpoint_ref,
        "said": list(one.said),
        "next": [{"for": what, "command": command} for what, command in one.next],
        **gate.as_json(one.review),
    }


def _forget(config: Path, names: Sequence[str]) -> int:
    """By id, also where the record cannot be read; else by the name of a run that no other has."""
    records, _ = session.every(config)
    for name in names:
        keys = [record.key for record in records if name in (record.key, record.branch)]
        if not keys and session.SANDBOX_ID.fullmatch(name):
            keys = [name]
        if len(keys) > 1:
            raise SandboxError(f"{clean(name)} is the name of {len(keys)} runs: say which by id: {', '.join(keys)}")
        record = next((one for one in records if keys and one.key == keys[0]), None)
        if record and not record.sandbox and session.is_held(config, record):
            raise SandboxError(f"{clean(name)} is being started by a sandbox-cli that is at work")
        if not keys or not session.forget(config, keys[0]):
            raise SandboxError(f"no run is known as {clean(name)}; see sandbox-cli recover --all")
        if record and record.checkpoint:
            ref = f"{bringback.CHECKPOINTS}/{record.sandbox}"
            show.note(f"its checkpoint stays; it goes with: git update-ref -d {ref}")
        show.line(name)
    return 0
