"""What became of a fleet, to the person: a table and what to do next, or JSON."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cli import bringback, place, session, show
from cli.fleet import file, state
from cli.fleet.state import Fleet, Store, Task
from sandboxd.errors import SandboxError

HEAD = ("BRANCH", "AGENT", "STATE", "COMMITS", "TOOK", "WHY")


def ref(branch: str) -> str:
    return f"{bringback.REFS}/{file.REFS}{branch}"


def tell(fleet: Fleet, store: Store, *, as_json: bool) -> None:
    """`fleet` is the truth."""
    if as_json:
        tasks = [_object(task, store) for task in fleet.tasks]
        kept = {key: value for key, value in asdict(fleet).items() if key not in ("pid", "born")}
        show.as_json(kept | {"tasks": tasks})
        return
    sys.stdout.write(show.table(HEAD, [_row(task) for task in fleet.tasks]))
    sys.stdout.flush()
    for task in fleet.tasks:
        if task.state == state.LOST:
            saved = checkpoint(task)
            what = f"its last checkpoint is {saved}" if saved else "what can be got back: sandbox-cli recover"
            show.note(f"{task.branch}: {what}")
    if any(task.state in (state.FAILED, state.REJECTED, state.LOST) for task in fleet.tasks):
        show.note(f"what the tasks wrote: {store.directory}/logs")
    if any(task.state == state.VERIFIED and task.commits and not task.landed for task in fleet.tasks):
        show.note("merge what is verified: sandbox-cli agent fleet land --all")


def checkpoint(task: Task) -> str:
    """The ref with the last checkpoint of a task's sandbox, "" where there is none."""
    try:
        record = session.load(Path(place.config_dir()), task.sandbox) if task.sandbox else None
    except SandboxError:
        return ""
    return f"{bringback.CHECKPOINTS}/{task.sandbox}" if record and record.checkpoint else ""


def _row(task: Task) -> tuple[str, ...]:
    why = f"landed as {task.landed[: bringback.SHORT]}" if task.landed else task.detail
    commits = "" if task.commits is None else str(task.commits)
    return task.branch, task.agent, task.state, commits, _took(task), why


def _took(task: Task) -> str:
    if not task.started or (task.state == state.LOST and not task.ended):
        return ""
    end = datetime.fromisoformat(task.ended) if task.ended else datetime.now(UTC)
    seconds = max(0, int((end - datetime.fromisoformat(task.started)).total_seconds()))
    return f"{seconds // 60}:{seconds % 60:02}"


def _object(task: Task, store: Store) -> dict[str, Any]:
    more = {"ref": ref(task.branch) if task.commit else "", "checkpoint": checkpoint(task)}
    more["log"] = str(store.directory / "logs" / f"{task.name}.log")
    return {key: value for key, value in asdict(task).items() if key != "born"} | more
