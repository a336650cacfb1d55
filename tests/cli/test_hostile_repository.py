"""One repository in which everything is planted at once, and every operation of ours on it.

Each plant is shown to run under plain git, alone, in test_githard; here they stand together, with the caller's
environment turned against us too, and no operation may start one, nor change anything but the refs it is for.
"""

from __future__ import annotations

import io
import os
import select
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from cli import bringback, bucket, gate, identity, mirrored, recover, repository, survey
from cli.bringback import BringBackError
from cli.bucket import Mirror
from cli.fleet import merge
from cli.repository import Repository
from cli.s3 import Store
from tests.cli.person import Person
from tests.cli.planted import world as worlds
from tests.cli.planted.plants import PLANTS
from tests.cli.planted.world import World, git, text
from tests.cli.test_mirror import outside
from tests.sandboxd.rig import Rig

SANDBOX = "sbx_0123456789abcdef"
KEYS = {"MIRROR_KEY": "x", "MIRROR_SECRET": "y"}
# These make commits or repositories with plain git, which what is planted later would disturb.
FIRST = (
    "hook pre-auto-gc", "hook after fetch through gc", "log.showSignature", "merge.verifySignatures",
    "a submodule's own settings", "core.alternateRefsCommand",
)  # fmt: skip
# It stops every fetch, plain git's too; on its own it is in test_githard.
APART = {"address rewritten to ext::"}


@dataclass(frozen=True)
class Ground:
    """The world with everything in it, the commit that is sent from it, and what the caller's environment holds."""

    world: World
    base: str
    environ: dict[str, str]
    proxy: socket.socket  # where the repository's settings send what git asks over HTTP

    def dialled(self) -> bool:
        with suppress(BlockingIOError):
            self.proxy.accept()[0].close()
            return True
        return False

    def repo(self) -> Repository:
        found = repository.discover(self.world.repo / "dir")
        assert found is not None
        return found

    def state(self) -> tuple[dict[str, tuple[int, int, bytes]], dict[str, str]]:
        """Every file but refs of ours and objects; every ref."""
        lines = git(self.world.repo, "for-each-ref", "--format=%(refname) %(objectname)").decode().splitlines()
        return worlds.snapshot(self.world), dict(line.split(" ") for line in lines)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    clean = worlds.build(tmp_path_factory.mktemp("clean"))
    world = worlds.copy(clean, tmp_path_factory.mktemp("hostile"))
    program = world.marker.read_text()
    world.marker.write_text("#!/bin/sh\nexit 0\n")  # nothing runs while it is planted
    base = world.base()
    together = [plant for plant in PLANTS if plant.name not in APART]
    for plant in dict.fromkeys(each.plant for each in sorted(together, key=lambda each: each.name not in FIRST)):
        plant(world)
    proxy = socket.create_server(("127.0.0.1", 0))
    proxy.setblocking(False)
    address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
    for key, value in (("http.proxy", address), ("http.http://web.test.proxy", address), ("remote.web.proxy", address),
                       ("remote.web.url", "http://web.test/r.git")):  # fmt: skip
        world.config(key, value)
    world.marker.write_text(program)
    world.marks.unlink(missing_ok=True)
    environ = {key: value for plant in together for key, value in plant.env(world).items()}
    with proxy:
        yield Ground(world, base, environ | worlds.IDENTITY | {"HOME": str(world.home)}, proxy)


@pytest.fixture
def ground(planted: Ground, monkeypatch: pytest.MonkeyPatch) -> Ground:
    planted.world.marks.unlink(missing_ok=True)
    while planted.dialled():
        pass
    for key, value in planted.environ.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(planted.world.repo)
    return planted


@pytest.fixture(scope="module")
def mirror() -> Iterator[Mirror]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    found = Mirror("hostile", endpoint=f"http://{host}:{port}", path_style=True, access_key_env="MIRROR_KEY",
                   secret_key_env="MIRROR_SECRET")  # fmt: skip
    outside(found).create_bucket(Bucket=found.bucket)
    yield found
    server.stop()


def receive(ground: Ground, name: str) -> str:
    return bringback.receive(ground.repo(), ground.world.returned, ground.base, name).commit


def checkpoint(ground: Ground) -> io.BytesIO:
    """What a guest returns as a checkpoint: the same commits under the other ref."""
    raw = ground.world.returned.read_bytes()
    return io.BytesIO(raw.replace(b" refs/heads/sandbox\n", b" refs/sandbox/checkpoint\n", 1))


def take_checkpoint(ground: Ground, mirror: Mirror) -> None:
    file = ground.world.root / "checkpoint.bundle"
    file.write_bytes(checkpoint(ground).read())
    received = bringback.receive_checkpoint(ground.repo(), file, ground.base, SANDBOX)
    bringback.drop_checkpoint(ground.repo(), SANDBOX, received.commit)
    bringback.receive_checkpoint(ground.repo(), file, ground.base, SANDBOX)


def to_the_mirror_and_back(ground: Ground, mirror: Mirror) -> None:
    receive(ground, "up")
    repo = ground.repo()
    made = mirrored.upload(mirror, KEYS, ground.world.root / "config", repo, SANDBOX, "bring-back", "refs/sandbox/up")
    mirrored.fetch(mirror, Store(mirror, KEYS), repo, made, None)


def send(ground: Ground, mirror: Mirror) -> None:
    file, _ = bringback.bundle_head(ground.repo())
    file.close()


def look_for_runs(ground: Ground, mirror: Mirror) -> None:
    assert recover.main({"forget": False, "SANDBOX": [], "--all": False, "--json": False}) == 0


def what_git_is_told(ground: Ground, mirror: Mirror) -> None:
    identity.of(ground.repo().place, os.environ)
    assert merge.unfinished(ground.repo()) in (None, "")


Operation = Callable[[Ground, Mirror], object]
OPERATIONS: list[tuple[str, Operation, set[str]]] = [
    ("the repository is found and described", lambda ground, mirror: ground.repo(), set()),
    ("HEAD is packed", send, set()),
    ("commits come back", lambda ground, mirror: receive(ground, "demo"), {"refs/sandbox/demo"}),
    ("a checkpoint is taken and dropped", take_checkpoint, {f"refs/sandbox/checkpoints/{SANDBOX}"}),
    ("what would run is listed",
     lambda ground, mirror: gate.review(ground.repo(), f"{ground.base}~1", ground.base), set()),
    ("a bind's directory is looked at", lambda ground, mirror: survey.snapshot(ground.world.repo), set()),
    ("to the mirror and back", to_the_mirror_and_back, {"refs/sandbox/up", "refs/sandbox/mirror/up"}),
    ("runs that were cut off are looked for", look_for_runs, set()),
    ("who the person is, and what is under way", what_git_is_told, set()),
]  # fmt: skip


@pytest.mark.parametrize(("act", "refs"), [row[1:] for row in OPERATIONS], ids=[row[0] for row in OPERATIONS])
def test_nothing_planted_runs_and_only_the_expected_refs_change(
    ground: Ground, mirror: Mirror, act: Operation, refs: set[str]
) -> None:
    files, before = ground.state()
    ground.world.marks.unlink(missing_ok=True)  # plain git, asked for the refs
    act(ground, mirror)
    assert not ground.world.fired(), "a planted program ran on the host"
    assert not ground.dialled(), "a planted proxy was asked"
    files_after, after = ground.state()
    assert {ref for ref in {*before, *after} if before.get(ref) != after.get(ref)} == refs
    assert files_after == files


def test_a_merge_that_lands_a_branch_runs_nothing(ground: Ground) -> None:
    """It may change HEAD's branch, index and working tree, and nothing else."""
    commit = receive(ground, "landed")
    git(ground.world.repo, "read-tree", "main")  # a checkout would hand every file to the filters
    for name in ("a.txt", "dir/b.txt"):
        (ground.world.repo / name).write_bytes(git(ground.world.repo, "cat-file", "blob", f"main:{name}"))
    kept = [".git/config", ".git/config.worktree", ".git/info/attributes", ".gitattributes"]
    before = {name: (ground.world.repo / name).read_bytes() for name in kept}
    ground.world.marks.unlink(missing_ok=True)
    done = merge.merge(ground.repo(), commit, "Merge", identity.of(ground.repo().place, os.environ))
    assert not ground.world.fired(), "a planted program ran on the host"
    assert not ground.dialled(), "a planted proxy was asked"
    assert done.commit and text(ground.world.repo, "rev-parse", "main") == done.commit
    assert {name: (ground.world.repo / name).read_bytes() for name in kept} == before


def test_plain_git_runs_what_is_planted_there(ground: Ground) -> None:
    """The control for all of the above, in the same place and environment."""
    for command in (("status",), ("fetch", "origin"), ("diff",), ("update-ref", "refs/heads/x", "HEAD")):
        ground.world.marks.unlink(missing_ok=True)
        ground.world.plain(*command, env={**ground.environ, "PATH": worlds.PATH})
        assert ground.world.fired(), command
    environ = {"PATH": worlds.PATH, "HOME": str(ground.world.home)}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        ["git", "ls-remote", "web"], cwd=ground.world.repo, env=environ, stdin=quiet, stdout=quiet, stderr=quiet
    ) as plain:
        assert select.select([ground.proxy], [], [], 30)[0], "plain git asks the proxy, and would wait for its answer"
        plain.kill()


def test_a_whole_run_from_there(ground: Ground, tmp_path: Path) -> None:
    """The command line itself, with everything in its environment: in, out, the list, the record."""
    with Rig(tmp_path) as rig:
        person = Person(ground.world.home, rig.socket)
        files, before = ground.state()
        ground.world.marks.unlink(missing_ok=True)
        own = ("HOME", "PATH", "XDG_CONFIG_HOME")
        environ = {key: value for key, value in ground.environ.items() if key not in own}
        script = "echo x > Makefile; printf x > \"$(printf 'a\\033[2J\\342\\200\\256b')\""
        done = person.run("run", "--name=whole", "--", "sh", "-c", script, cwd=ground.world.repo, **environ)
        assert (done.returncode, ground.world.fired(), ground.dialled()) == (0, False, False), done.stderr
    files_after, after = ground.state()
    assert {ref for ref in {*before, *after} if before.get(ref) != after.get(ref)} == {"refs/sandbox/whole"}
    assert {name for name in files_after if files_after[name] != files.get(name)} == set()
    said = done.stderr.decode()
    assert "- Makefile (added): make, just" in said and "its name holds characters that do not show" in said
    assert "\x1b" not in said and "\u202e" not in said


TRICKS = ("the directory is a link", "the ref is a link", "the ref is symbolic", "its log is a link")


@pytest.mark.parametrize("kind", ["checkpoints", "mirror"])
@pytest.mark.parametrize("trick", TRICKS)
def test_a_ref_of_ours_that_leads_elsewhere(kind: str, trick: str, mirror: Mirror, tmp_path: Path) -> None:
    """refs/sandbox/<kind>/<sandbox> made to stand for main, or its log for a file of the person's."""
    world = worlds.copy(worlds.build(tmp_path / "t"), tmp_path)
    ref = f"refs/sandbox/{kind}/{SANDBOX}"
    path = world.repo / ".git" / ref
    victim = world.home / "victim"
    victim.write_text("mine\n")
    if trick == "the directory is a link":
        path.parent.parent.mkdir()
        path.parent.symlink_to("../heads")
    elif trick == "the ref is a link":
        path.parent.mkdir(parents=True)
        path.symlink_to("../../heads/main")
    elif trick == "the ref is symbolic":
        git(world.repo, "symbolic-ref", ref, "refs/heads/main")
    else:
        log = world.repo / ".git/logs" / ref
        log.parent.mkdir(parents=True)
        log.symlink_to(victim)
    main = text(world.repo, "rev-parse", "main")
    with socket.socket() as nobody:
        ground = Ground(world, world.base(), {}, nobody)
        try:
            take_checkpoint(ground, mirror) if kind == "checkpoints" else to_the_mirror_and_back(ground, mirror)
        except BringBackError as error:
            assert "symbolic link" in str(error)
    assert text(world.repo, "rev-parse", "main") == main
    assert victim.read_text() == "mine\n"
    assert bucket.read(mirror, "x") is None
