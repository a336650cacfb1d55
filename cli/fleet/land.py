"""`agent fleet land`: what a fleet brought back, merged into the branch the person is on.

In: branches of the fleet's record. Out: a merge commit each, or why not. What is wrong with one branch concerns that
branch: `--all` names it and goes on. What is wrong with the ground to merge on stops everything before it begins.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cli import bringback, gate, githard, identity, place, repository, show
from cli.bringback import SHORT
from cli.fleet import merge, report, state
from cli.fleet.state import Fleet, Store, Task
from cli.repository import Repository
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

NAMED = 5
STILL = {
    state.RUNNING: "it is still at work",
    state.WAITING: "it has not been started yet",
    state.UNSTARTED: "it was never started",
}
BECAME = {state.FAILED: "failed", state.REJECTED: "was rejected", state.LOST: "was lost"}


class LandError(SandboxError):
    """A branch, or all of them, cannot be merged; the message says why and what to do."""


def main(args: dict[str, Any]) -> int:
    found = repository.locate(Path("."))
    if found is None:
        raise LandError("a fleet belongs to a repository: land inside one")
    store = Store.of(place.config_dir(), found.common_dir)
    if store.read() is None:
        raise LandError("no fleet was run in this repository: sandbox-cli agent fleet run -f FILE runs one")
    lock = store.hold_landing()
    try:
        return _land(store, args)
    finally:
        os.close(lock)


def _land(store: Store, args: dict[str, Any]) -> int:
    repo, recorded = repository.discover(Path(".")), store.read()
    assert repo is not None and recorded is not None
    fleet = state.truth(recorded, state.alive)
    landing = Landing(repo, store, fleet, unverified=args["--unverified"])
    check_ground(repo, fleet, args["--onto"])
    try:
        if args["--all"]:
            landing.all()
        else:
            landing.one(args["BRANCH"])
    finally:
        if args["--json"]:
            show.as_json({"landed": landing.landed, "skipped": landing.skipped, "conflict": landing.conflict})
        elif landing.landed:
            for note in _unsigned(repo):
                show.note(note)
    return 0


def check_ground(repo: Repository, fleet: Fleet, onto: str | None) -> None:
    """Raises unless a merge of this fleet is meant to happen here, and can."""
    doing = merge.unfinished(repo)
    if doing:
        way_out = "git bisect reset" if doing == "bisect" else f"git {doing} --abort"
        raise LandError(f"a {doing} is under way here: finish it, or give it up with {way_out}")
    if repo.branch is None:
        raise LandError("HEAD is detached: check out the branch to merge into (git switch BRANCH)")
    if repo.dirty:
        raise LandError("tracked files differ from HEAD: commit them, or put them aside (git stash), then land")
    if onto is not None:
        if onto != repo.branch:
            raise LandError(f"you are on {clean(repo.branch)}, not on {clean(onto)}: git switch {shlex.quote(onto)}")
    elif not _is_ours_since(repo, fleet):
        raise LandError(
            f"{clean(repo.branch)} is at {repo.head_commit[:SHORT]}, and the fleet started from {fleet.base[:SHORT]}: "
            f"to merge all the same, add --onto {shlex.quote(repo.branch)}"
        )


def _is_ours_since(repo: Repository, fleet: Fleet) -> bool:
    """Whether HEAD is the commit the fleet started from, with nothing on top but merges of its tasks."""
    if repo.head_commit == fleet.base:
        return True
    most = f"--max-count={len(fleet.tasks) + 1}"
    listed = githard.run(
        repo.place, "rev-list", "--first-parent", "--parents", most, "HEAD", f"^{fleet.base}", accept=(0, 128)
    )  # fmt: skip
    lines = [line.split() for line in listed.stdout.decode("ascii").splitlines()]
    brought = {task.commit for task in fleet.tasks if task.commit}
    merges = all(len(line) == 3 and line[2] in brought for line in lines)
    return bool(lines) and merges and lines[-1][1] == fleet.base


class Landing:
    """`landed`, `skipped` and `conflict` are what `--json` prints."""

    def __init__(self, repo: Repository, store: Store, fleet: Fleet, *, unverified: bool) -> None:
        self.landed: list[dict[str, Any]] = []
        self.skipped: list[dict[str, str]] = []
        self.conflict: dict[str, Any] | None = None
        self._repo = repo
        self._store = store
        self._fleet = fleet
        self._unverified = unverified
        self._identity = identity.of(repo.place, os.environ)

    def all(self) -> None:
        for task in self._fleet.tasks:
            try:
                self._land(task)
            except _Skipped as why:
                self.skipped.append({"branch": task.branch, "reason": str(why)})
                show.note(f"skipped {task.branch}: {why}")

    def one(self, branch: str) -> None:
        task = self._fleet.task(branch)
        if task is None:
            names = ", ".join(task.branch for task in self._fleet.tasks[:NAMED])
            raise LandError(f"the last fleet has no task {clean(branch)}; it has {names}")
        try:
            self._land(task)
        except _Skipped as why:
            raise LandError(f"{clean(branch)} is not landed: {why}") from None

    def _land(self, task: Task) -> None:
        commit = self._commit(task)
        review = gate.review(self._repo, self._fleet.base, commit)
        show.note(f"{task.branch}: {self._count(commit)}")
        for line in gate.lines(review):
            show.note(line)
        missed = merge.unfiltered(self._repo, commit)
        if missed:
            path, name = missed
            raise _Skipped(
                f"git here runs the filter {name}, which may concern {path}, and this program runs none: "
                f"git merge --no-ff {shlex.quote(report.ref(task.branch))}"
            )
        if task.commit != commit:
            self._store.change(task.branch, commit=commit)
        done = merge.merge(self._repo, commit, f"Merge fleet task {task.branch}", self._identity)
        if not done.commit:
            self.conflict = {"branch": task.branch, "paths": list(done.conflicts)}
            some = show.some([clean(path) for path in done.conflicts], NAMED)
            raise LandError(
                f"{task.branch} conflicts with {clean(self._repo.branch or 'HEAD')} in {some}: resolve it and "
                "git commit, or git merge --abort; then land the others"
            )
        self._store.change(task.branch, landed=done.commit)
        self.landed.append({"branch": task.branch, "commit": commit, "merge": done.commit, **gate.as_json(review)})
        show.note(f"landed {task.branch} as {done.commit[:SHORT]}")

    def _commit(self, task: Task) -> str:
        """What is to be merged; raises `_Skipped`."""
        if task.state in STILL:
            raise _Skipped(STILL[task.state])
        if task.state != state.VERIFIED and not self._unverified:
            why = f", {task.detail}" if task.detail else ""
            raise _Skipped(f"it {BECAME[task.state]}{why}; --unverified lands what came back all the same")
        ref = report.ref(task.branch)
        commit = bringback.commit_of(self._repo, ref)
        if not commit or (commit == task.before and commit != task.commit):
            saved = report.checkpoint(task)
            raise _Skipped(f"nothing to land: it brought nothing back{f'; its checkpoint is {saved}' if saved else ''}")
        if commit != task.commit and not self._unverified:
            raise _Skipped(f"{ref} is not the commit that was verified; --unverified lands it all the same")
        if not githard.run(self._repo.place, "rev-list", "--max-count=1", commit, "^HEAD").stdout:
            raise _Skipped("nothing to land: HEAD has it already")
        return commit

    def _count(self, commit: str) -> str:
        counted = githard.run(self._repo.place, "rev-list", "--count", commit, "^HEAD").stdout.decode("ascii").strip()
        return f"{counted} commit{'' if counted == '1' else 's'} to merge"


class _Skipped(Exception):
    """One branch is not landed, for a reason that concerns no other."""


def _unsigned(repo: Repository) -> Iterator[str]:
    """A person who signs what they commit learns that this was not."""
    key = "commit.gpgSign"
    said = [githard.value_in(repo.common_dir / "config", key), *reversed(githard.persons(key))]
    if next((one for one in said if one is not None), "false").lower() in ("true", "yes", "on", "1"):
        yield "the merges are not signed, since no program of yours ran; the last one: git commit --amend --no-edit -S"
