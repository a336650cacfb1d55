"""`agent fleet run`: what is checked before anything is made, the tasks' work, and what became of them.

In: the fleet file and flags. Out: the tasks' processes and the fleet's record, a table, an exit code. HEAD is packed
once, so that every task starts from the same commit, whenever its turn comes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cli import bringback, config, context, githard, network, place, plan, repository, running, session, show
from cli.fleet import file, plans, report, state
from cli.fleet.crew import Crew
from cli.fleet.state import Fleet, Store, Task
from cli.fleet.task import Order
from cli.plan import Packed
from cli.repository import Repository
from sandboxd.client import Capabilities
from sandboxd.errors import SandboxError

PREFIX = f"{bringback.REFS}/{file.REFS}"
SHARED = ("--config", "--profile", "--checkpoint-every")


def main(args: dict[str, Any]) -> int:
    """0 where every task is verified, else 1."""
    asked = file.read(Path(args["--file"]))
    repo = repository.discover(Path("."))
    if repo is None:
        raise SandboxError("a fleet works on a repository: start it inside one")
    refs = _refs(repo)
    _check_room(asked, refs)
    settings = config.load(os.environ, config.directory(None), args["--config"], args["--profile"])
    flags = [f"{flag}={args[flag]}" for flag in SHARED if args[flag] is not None] + ["--keep"] * args["--keep"]
    store = Store.of(place.config_dir(), repo.common_dir)
    logs = store.prepare()
    session.prepare(Path(place.config_dir()))
    lock = store.hold()
    try:
        bundle, _ = bringback.bundle_head(repo)
        with bundle:
            packed = Packed(repo.head_commit, bundle.fileno())
            zone = plan.zone()
            orders = []
            for task in asked.tasks:
                made = plans.of(task, flags, repo.common_dir, repo.top, settings, os.environ, zone, packed)
                log = logs / f"{made.create.name}.log"
                orders.append(Order(store.directory, task.branch, log, task.verify is not None, made))
            endpoint = context.choose(args["--context"], context.STARTING_S)
            _check_offer(orders, endpoint.client.capabilities())
            # Whoever chooses another context meanwhile does not send the later tasks there.
            where = endpoint.client.endpoint.address
            orders = [replace(order, plan=replace(order.plan, context=where)) for order in orders]
            for note in (endpoint.note, *settings.notes, *_notes(repo, orders, refs, store)):
                if note:
                    show.note(note)
            # The first run of an agent installs it, for minutes: only the logs tell how far it is.
            show.note(f"what the tasks write meanwhile: {logs}")
            store.write(_record(orders, repo, where, refs))
            Crew(store, orders, asked.max_parallel, (lock, bundle.fileno())).work()
        ended = store.read()
    finally:
        os.close(lock)
    assert ended is not None
    report.tell(state.truth(ended, lambda pid, born: False), store, as_json=args["--json"])
    return 0 if all(task.state == state.VERIFIED for task in ended.tasks) else 1


def _refs(repo: Repository) -> Mapping[str, str]:
    """What earlier fleets brought back: commits by branch."""
    listed = githard.run(repo.place, "for-each-ref", "--format=%(objectname) %(refname)", PREFIX.rstrip("/"))
    pairs = (line.partition(" ") for line in os.fsdecode(listed.stdout).splitlines())
    return {ref.removeprefix(PREFIX): commit for commit, _, ref in pairs}


def _check_room(asked: file.Fleet, refs: Mapping[str, str]) -> None:
    """A ref of an earlier fleet that stands in the way would only be met when the work comes back."""
    for task in asked.tasks:
        for ref in refs:
            if ref != task.branch and (f"{task.branch}/".startswith(f"{ref}/") or ref.startswith(f"{task.branch}/")):
                raise SandboxError(
                    f"{PREFIX}{ref} of an earlier fleet is in the way of the branch {task.branch}: keep its commits "
                    f"elsewhere or give them up, then: git update-ref -d {PREFIX}{ref}"
                )


def _check_offer(orders: Sequence[Order], offer: Capabilities) -> None:
    """Raises on what this server has not got, for any of the tasks."""
    network.for_agents(offer, os.geteuid())
    for order in orders:
        volumes = bool(order.plan.create.volumes)
        running.check_offer(offer, workspace=True, volumes=volumes, snapshots=False)
        network.of_run(order.plan.network, offer, order.plan.hosts)


def _notes(repo: Repository, orders: Sequence[Order], refs: Mapping[str, str], store: Store) -> Iterator[str]:
    if repo.dirty:
        yield "uncommitted changes stay here: the sandboxes get HEAD"
    yield from repo.notes
    for order in orders:
        commit = refs.get(order.branch)
        if commit and githard.run(repo.place, "rev-list", "--max-count=1", commit, "^HEAD", accept=(0, 128)).stdout:
            yield (
                f"{PREFIX}{order.branch} has commits of an earlier fleet that are not in HEAD, and is replaced when "
                f"new ones come back; to keep them: git branch {order.branch}-before {commit}"
            )
    before = store.read()
    names = {order.branch for order in orders}
    forgotten = [
        task.branch for task in (before.tasks if before else ())
        if task.state == state.VERIFIED and task.commits and not task.landed and task.branch not in names
    ]  # fmt: skip
    if forgotten:
        yield f"of the fleet before, these were not landed and are left to git merge: {', '.join(forgotten)}"


def _record(orders: Sequence[Order], repo: Repository, where: str, refs: Mapping[str, str]) -> Fleet:
    tasks = tuple(
        Task(
            branch=order.branch, agent=order.plan.agent.name if order.plan.agent else "", checked=order.checked,
            name=order.plan.create.name or "", before=refs.get(order.branch, ""),
        )
        for order in orders
    )  # fmt: skip
    pid = os.getpid()
    return Fleet(
        repo=str(repo.top), base=repo.head_commit, on=repo.branch or "", context=where, started=session.now(), pid=pid,
        born=state.born(pid), tasks=tasks,
    )  # fmt: skip
