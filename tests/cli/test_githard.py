"""No program a repository, a home or an environment names is started by git as we run it.

Every plant is paired: plain git in the same place must start it, else the pair proves nothing and fails.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from cli import bringback, gate, githard, repository, survey
from cli.githard import Bounds, GitError, Place
from tests.cli.planted import world as worlds
from tests.cli.planted.plants import PLANTS, Plant
from tests.cli.planted.world import World, git
from tests.conftest import SOAK


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("template"))


@pytest.fixture
def world(template: World, tmp_path: Path) -> World:
    return worlds.copy(template, tmp_path)


# What githard can run beyond what a run of a sandbox does, on the files the plants are about; in this order.
COMMANDS = (
    ("status",),
    ("diff",),
    ("diff", "HEAD", "main~1"),
    ("log", "-p", "-3"),
    ("log", "-1", "side"),
    ("show", "HEAD"),
    ("blame", "a.txt"),
    ("cat-file", "--filters", "HEAD:a.txt"),
    ("add", "a.txt"),
    ("commit", "-m", "x"),
    ("merge", "-m", "x", "side"),
    ("update-ref", "refs/sandbox/x", "HEAD"),
)
NEEDS = {"commit": {"add"}, "merge": {"add", "commit"}}


def everything(world: World, plant: Plant) -> None:
    """What a run does on the host, then the commands of the control (all there are, in a soak run)."""
    base = world.base()
    repo = repository.discover(world.repo / "dir")
    assert repo is not None and repo.dirty
    file, _ = bringback.bundle_head(repo)
    file.close()
    received = bringback.receive(repo, world.returned, base, "demo")
    assert received.commits == 2
    if SOAK:
        assert gate.review(repo, base, received.commit).unseen == ""
        assert survey.snapshot(world.repo).unseen == ""
    verbs = {command[0] for command in plant.control}
    verbs = verbs.union(*(NEEDS.get(verb, set()) for verb in verbs))
    for command in COMMANDS:
        if SOAK or command[0] in verbs:
            githard.run(repo.place, *command)
    if SOAK or "fetch" in verbs:
        try:
            githard.run(repo.place, "fetch", str(world.remote), "+refs/heads/*:refs/sandbox/remote/*")
        except GitError:
            assert plant.stops_fetch
        else:
            assert not plant.stops_fetch


def environ(plant: Plant, world: World, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    values = plant.env(world)
    for key, value in {"HOME": str(world.home), **values}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(world.repo)
    return values


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_nothing_planted_runs_but_under_plain_git(
    plant: Plant, template: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side in ("ours", "control"):
        (tmp_path / side).mkdir()
    ours = worlds.copy(template, tmp_path / "ours")
    plant.plant(ours)
    ours.marks.unlink(missing_ok=True)
    with monkeypatch.context() as patch:
        environ(plant, ours, patch)
        everything(ours, plant)
    assert not ours.fired(), "a planted program ran on the host"

    control = worlds.copy(template, tmp_path / "control")
    plant.plant(control)
    control.marks.unlink(missing_ok=True)
    for command in plant.control:
        control.plain(*command, env=plant.env(control), stdin=plant.stdin, tty=plant.tty)
    assert control.fired(), "plain git did not run it either: this plant proves nothing"


def test_a_bare_repository_buried_in_the_tree_is_not_entered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buried = world.repo / "vendor/thing"
    git(world.repo, "init", "-q", "--bare", str(buried))
    for key, value in (("core.bare", "false"), ("core.worktree", ".."), ("core.fsmonitor", str(world.marker))):
        git(buried, "config", key, value)
    (buried.parent / "f").write_text("f")
    monkeypatch.chdir(buried)
    with pytest.raises(repository.RepositoryError, match="bare repository"):
        repository.discover(buried / "hooks")
    assert not world.fired()
    subprocess.run(["git", "add", "../f"], cwd=buried, env={"PATH": worlds.PATH}, capture_output=True)
    assert world.fired(), "plain git did not enter it either"


def test_a_partial_clone_is_refused_and_fetches_nothing(world: World, tmp_path: Path) -> None:
    git(world.remote, "config", "uploadpack.allowFilter", "true")
    partial = tmp_path / "partial"
    git(tmp_path, "clone", "-q", "--no-checkout", "--filter=blob:none", world.remote.as_uri(), str(partial))
    git(partial, "config", "remote.origin.uploadpack", f"{world.marker}")
    with pytest.raises(repository.RepositoryError, match="partial clone"):
        repository.discover(partial)
    place = Place(partial / ".git", partial, "sha1")
    with pytest.raises(GitError):
        githard.run(place, "cat-file", "-p", "HEAD:a.txt")
    assert not world.fired()
    git(partial, "cat-file", "-p", "HEAD:a.txt", check=False)
    assert world.fired(), "plain git did not fetch the missing object either"


DISTURBING = {
    "GIT_DIR": "{o}/.git", "GIT_WORK_TREE": "{o}", "GIT_INDEX_FILE": "{o}/.git/index", "GIT_NAMESPACE": "n",
    "GIT_OBJECT_DIRECTORY": "{o}/.git/objects", "GIT_COMMON_DIR": "{o}/.git", "GIT_CEILING_DIRECTORIES": "/",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES": "{o}/.git/objects", "GIT_SHALLOW_FILE": "{o}/.git/shallow",
    "GIT_DEFAULT_HASH": "sha256", "GIT_REF_PARANOIA": "0", "GIT_QUARANTINE_PATH": "{o}", "GIT_PREFIX": "x/",
    "GIT_CONFIG": "{o}/.git/config", "GIT_FLUSH": "x", "GIT_GLOB_PATHSPECS": "1", "LC_ALL": "xx_XX",
}  # fmt: skip


@pytest.mark.parametrize("which", [*(DISTURBING if SOAK else ["GIT_DIR", "GIT_INDEX_FILE"]), "all of them"])
def test_the_callers_environment_does_not_lead_to_another_repository(
    which: str, template: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    other = worlds.copy(template, tmp_path / "other")
    (tmp_path / "mine").mkdir()
    mine = worlds.copy(template, tmp_path / "mine")
    before = worlds.snapshot(other)
    base = mine.base()
    for name, value in DISTURBING.items():
        if which in (name, "all of them"):
            monkeypatch.setenv(name, value.format(o=other.repo))
    repo = repository.discover(mine.repo)
    assert repo is not None and repo.top == mine.repo
    file, _ = bringback.bundle_head(repo)
    file.close()
    bringback.receive(repo, mine.returned, base, "demo")
    monkeypatch.undo()
    assert worlds.text(mine.repo, "rev-parse", "refs/sandbox/demo~2") == base
    assert worlds.snapshot(other) == before
    assert not (other.repo / ".git/refs/sandbox").exists()


def test_nothing_of_the_persons_is_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(world.home))
    git(world.repo, "config", "core.logAllRefUpdates", "true")
    before = worlds.snapshot(world)
    repo = repository.discover(world.repo)
    assert repo is not None
    file, _ = bringback.bundle_head(repo)
    file.close()
    bringback.receive(repo, world.returned, world.base(), "demo")
    bringback.receive(repo, world.returned, world.base(), "again")
    assert worlds.snapshot(world) == before


def test_neutral_drivers_change_no_content(world: World) -> None:
    """A required filter made to do nothing stores the file as it is; a merge driver merges as git would."""
    (world.repo / ".git/info/attributes").write_text("a.txt filter=q7 merge=q7\n")
    for key, value in (("filter.q7.clean", "false"), ("filter.q7.required", "true"), ("merge.q7.driver", "false")):
        world.config(key, value)
    repo = repository.discover(world.repo)
    assert repo is not None
    changed = (world.repo / "a.txt").read_bytes()
    githard.run(repo.place, "add", "a.txt")
    assert git(world.repo, "show", ":a.txt") == changed
    githard.run(repo.place, "commit", "-m", "x")
    githard.run(repo.place, "merge", "-m", "x", "side")
    assert (world.repo / "a.txt").read_bytes() == changed.replace(b"line 39\n", b"side\n")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (b"filter.q7.clean", "filter.q7.clean"),
        (b"filter.a.b.c.clean", "filter.a.b.c.clean"),
        (b"filter.a=b.clean", "filter.a=b.clean"),
        (b"filter.with blank.process", "filter.with blank.clean"),
        (b"filter..clean", "filter..clean"),
        (b"filter.Case.clean", "filter.Case.clean"),
        (b"filter.\xff.clean", "filter.\udcff.clean"),
        (b"filter.line\nbreak.clean", "filter.line\nbreak.clean"),
        (b"diff.x.textconv", "diff.x.command"),
        (b"merge.x.name", "merge.x.driver"),
        (b"hook.x.event", "hook.x.enabled"),
        (b"trailer.x.key", "trailer.x.cmd"),
        (b"remote.x.url", "remote.x.uploadpack"),
    ],
)
def test_a_driver_is_found_by_any_of_its_keys(name: bytes, expected: str) -> None:
    assert expected in dict(githard.overrides([name]))


def test_settings_without_a_name_are_no_drivers() -> None:
    assert githard.overrides([b"diff.external", b"merge.ff", b"core.bare", b"branch.x.merge", b"filter"]) == []


def test_more_drivers_than_anyone_has_are_refused() -> None:
    with pytest.raises(GitError, match="names 3000 drivers"):
        githard.overrides(b"filter.%d.clean" % n for n in range(3000))


@pytest.mark.parametrize(
    ("names", "partial"),
    [
        ([b"extensions.partialclone"], True),
        ([b"remote.a.b\nc.promisor"], True),
        ([b"remote.origin.partialclonefilter"], True),
        ([b"remote.origin.url", b"extensions.objectformat"], False),
    ],
)
def test_partial_clones_are_known_by_their_settings(names: list[bytes], partial: bool) -> None:
    assert githard.is_promisor(names) is partial


@pytest.mark.parametrize(
    ("object_format", "command", "known", "length"),
    [
        ("sha1", "status", (2, 39), None),
        ("sha1", "status", (2, 40), None),
        ("sha1", "status", (2, 41), 40),
        ("sha256", "diff", (3, 0), 64),
        ("sha1", "check-attr", (2, 50), None),
        ("sha1", "merge", (2, 50), None),
    ],
)
def test_attributes_are_read_from_an_empty_tree_where_git_can(
    object_format: str, command: str, known: tuple[int, int], length: int | None, tmp_path: Path
) -> None:
    tree = githard.attribute_source(object_format, command, known)
    if length is None:
        assert tree is None
        return
    assert tree is not None and len(tree) == length
    git(tmp_path, "init", "-q", f"--object-format={object_format}")
    assert git(tmp_path, "mktree").decode().strip() == tree


def test_a_command_outside_the_table_does_not_run(world: World) -> None:
    with pytest.raises(KeyError):
        githard.run(Place(world.repo / ".git"), "gc")


def test_a_git_that_hangs_is_ended(world: World) -> None:
    reading, writing = os.pipe()
    began = time.monotonic()
    with (
        os.fdopen(reading, "rb") as silent,
        os.fdopen(writing, "wb"),
        pytest.raises(GitError, match=r"took longer than 0\.3 s"),
    ):
        githard.run(Place(world.repo / ".git"), "cat-file", "--batch", stdin=silent, bounds=Bounds(time_s=0.3))
    assert time.monotonic() - began < 30


def test_more_output_than_wanted_ends_git(world: World) -> None:
    with pytest.raises(GitError, match="printed more than 100 bytes"):
        githard.run(Place(world.repo / ".git", world.repo), "log", "-p", bounds=Bounds(output_bytes=100))


def test_memory_is_bounded(world: World) -> None:
    commit = git(world.repo, "cat-file", "commit", "main") + b"x" * 30_000_000
    name = git(world.repo, "hash-object", "-t", "commit", "-w", "--stdin", stdin=commit).decode().strip()
    with pytest.raises(GitError, match=r"[Oo]ut of memory"):
        githard.run(Place(world.repo / ".git"), "cat-file", "-p", name, bounds=Bounds(memory_bytes=20_000_000))


def test_a_file_git_writes_is_bounded(world: World, tmp_path: Path) -> None:
    blob = git(world.repo, "hash-object", "-w", "--stdin", stdin=os.urandom(300_000)).decode().strip()
    with (tmp_path / "out").open("w+b") as file, pytest.raises(GitError, match="wrote more than 100000 bytes"):
        githard.run(
            Place(world.repo / ".git"), "cat-file", "blob", blob, stdout=file, bounds=Bounds(file_bytes=100_000)
        )  # fmt: skip
    assert (tmp_path / "out").stat().st_size <= 100_000


def test_what_git_says_is_one_clean_line(world: World) -> None:
    with pytest.raises(GitError) as caught:
        githard.run(Place(world.repo / ".git"), "rev-parse", "--verify", "\x1b]0;x\x07\u202egnp\nsecond line")
    assert str(caught.value).isprintable()


def test_messages_are_in_english_whatever_the_caller_speaks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGUAGE", "de")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with pytest.raises(GitError, match="Needed a single revision"):
        githard.run(Place(world.repo / ".git"), "rev-parse", "--verify", "nothing")
