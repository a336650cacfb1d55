"""Every kind of repository a person may have: found, sent, brought back, or refused with what to do."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli import bringback, repository
from cli.repository import Found, Repository, RepositoryError
from tests.cli.planted import world as worlds
from tests.cli.planted.world import World, git, text


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("template"))


@pytest.fixture
def world(template: World, tmp_path: Path) -> World:
    return worlds.copy(template, tmp_path)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "main", "r")
    return tmp_path / "r"


def found(start: Path) -> Repository:
    repo = repository.discover(start)
    assert repo is not None
    return repo


def commit(repo: Path, message: str = "m") -> str:
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "--allow-empty", "-m", message)
    return text(repo, "rev-parse", "HEAD")


def there_and_back(repo: Repository, scratch: Path) -> str:
    """Sends HEAD, lets a guest commit on it as guestd would hold it, brings it back; answers the commit."""
    file, size = bringback.bundle_head(repo)
    with file:
        data = file.read()
    assert len(data) == size
    guest = scratch / "guest"
    git(scratch, "init", "-q", "-b", "sandbox", f"--object-format={repo.object_format}", str(guest))
    header, _, packed = data.partition(b"\n\n")
    sent = header.splitlines()[-1].split()[0].decode()
    assert sent == repo.head_commit
    if repo.shallow:
        (guest / ".git/shallow").write_bytes((repo.common_dir / "shallow").read_bytes())
    git(guest, "index-pack", "--stdin", stdin=packed)
    git(guest, "reset", "-q", "--hard", sent)
    (guest / "from the guest").write_text("hello\n")
    new = commit(guest, "guest")
    git(guest, "bundle", "create", "-q", str(scratch / "back"), f"{sent}..sandbox")
    received = bringback.receive(repo, scratch / "back", sent, "demo")
    assert (received.commit, received.commits) == (new, 1)
    shown = git(repo.top, "show", "refs/sandbox/demo:from the guest")
    assert shown == b"hello\n"
    git(repo.top, "fsck", "--strict")
    return new


def test_an_ordinary_repository(world: World, tmp_path: Path) -> None:
    repo = found(world.repo)
    assert (repo.branch, repo.dirty, repo.shallow, repo.notes) == ("main", True, False, ())
    assert repo.head_commit == world.base()
    there_and_back(repo, tmp_path)


def test_a_subdirectory_and_a_link_to_one(world: World, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(world.repo / "dir")
    for start in (world.repo / "dir", tmp_path / "link"):
        assert found(start).top == world.repo


def test_no_repository(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    assert repository.discover(tmp_path) is None
    with pytest.raises(RepositoryError, match="No such file"):
        repository.discover(tmp_path / "nothing")


def test_clean_and_dirty(world: World) -> None:
    git(world.repo, "checkout", "-q", "-f", "main")
    (world.repo / "untracked").write_text("x")
    assert not found(world.repo).dirty
    os.utime(world.repo / "a.txt")
    assert not found(world.repo).dirty
    (world.repo / "a.txt").unlink()
    assert found(world.repo).dirty


def test_no_commit_yet(place: Path) -> None:
    with pytest.raises(RepositoryError, match="has no commit yet: make one first"):
        repository.discover(place)


def test_only_a_tag(place: Path) -> None:
    name = git(place, "hash-object", "-w", "--stdin", stdin=b"x").decode().strip()
    git(place, "tag", "t", name)
    with pytest.raises(RepositoryError, match="has no commit yet"):
        repository.discover(place)


def test_a_head_that_is_gone(world: World) -> None:
    (world.repo / ".git/refs/heads/main").write_text("12" * 20 + "\n")
    with pytest.raises(RepositoryError, match="run git fsck"):
        repository.discover(world.repo)


def test_a_detached_head(world: World, tmp_path: Path) -> None:
    git(world.repo, "checkout", "-q", "-f", "--detach", "side")
    repo = found(world.repo)
    assert repo.branch is None
    there_and_back(repo, tmp_path)
    assert text(world.repo, "rev-parse", "HEAD") == repo.head_commit


def test_a_shallow_clone(world: World, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth=1", world.remote.as_uri(), "shallow")
    repo = found(tmp_path / "shallow")
    assert repo.shallow
    assert repo.notes == ("this is a shallow clone: the sandbox gets the commits that are here",)
    there_and_back(repo, tmp_path)


@pytest.mark.parametrize("start", ["tree", "tree/dir"])
def test_a_linked_worktree(start: str, world: World, tmp_path: Path) -> None:
    git(world.repo, "worktree", "add", "-q", str(tmp_path / "tree"), "side")
    before = worlds.snapshot(world)
    repo = found(tmp_path / start)
    assert (repo.top, repo.branch, repo.common_dir) == (tmp_path / "tree", "side", world.repo / ".git")
    new = there_and_back(repo, tmp_path)
    assert text(world.repo, "rev-parse", "refs/sandbox/demo") == new
    assert worlds.snapshot(world) == before


def test_a_worktree_with_relative_pointers(world: World, tmp_path: Path) -> None:
    git(world.repo, "worktree", "add", "-q", str(tmp_path / "tree"), "side")
    admin = world.repo / ".git/worktrees/tree"
    (admin / "gitdir").write_text(os.path.relpath(tmp_path / "tree/.git", admin) + "\n")
    (tmp_path / "tree/.git").write_text(f"gitdir: {os.path.relpath(admin, tmp_path / 'tree')}\n")
    assert found(tmp_path / "tree").common_dir == world.repo / ".git"


def moved(world: World, tmp_path: Path) -> Path:
    git(world.repo, "worktree", "add", "-q", str(tmp_path / "tree"), "side")
    shutil.copytree(tmp_path / "tree", tmp_path / "copy")
    return tmp_path / "copy"


def to_another(world: World, tmp_path: Path) -> Path:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/.git").write_text(f"gitdir: {world.repo}/.git\n")
    return tmp_path / "x"


def foreign_common(world: World, tmp_path: Path) -> Path:
    git(world.repo, "worktree", "add", "-q", str(tmp_path / "tree"), "side")
    git(tmp_path, "init", "-q", "evil")
    (world.repo / ".git/worktrees/tree/commondir").write_text(f"{tmp_path}/evil/.git\n")
    return tmp_path / "tree"


def made_up_admin(world: World, tmp_path: Path) -> Path:
    admin = tmp_path / "admin"
    admin.mkdir()
    (admin / "HEAD").write_text("ref: refs/heads/main\n")
    (admin / "commondir").write_text(f"{world.repo}/.git\n")
    (admin / "gitdir").write_text(f"{tmp_path}/x/.git\n")
    (tmp_path / "x").mkdir()
    (tmp_path / "x/.git").write_text(f"gitdir: {admin}\n")
    return tmp_path / "x"


def linked(world: World, tmp_path: Path) -> Path:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/.git").symlink_to(world.repo / ".git")
    return tmp_path / "x"


def planted_commondir(world: World, tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "evil")
    (world.repo / ".git/commondir").write_text(f"{tmp_path}/evil/.git\n")
    return world.repo


def to_nothing(world: World, tmp_path: Path) -> Path:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/.git").write_text("gitdir: /nonexistent\n")
    return tmp_path / "x"


def no_pointer(world: World, tmp_path: Path) -> Path:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/.git").write_text("hello\n")
    return tmp_path / "x"


def endless_pointer(world: World, tmp_path: Path) -> Path:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/.git").write_text("gitdir: " + "a/" * 10_000)
    return tmp_path / "x"


def pipe(world: World, tmp_path: Path) -> Path:
    (tmp_path / "x").mkdir()
    os.mkfifo(tmp_path / "x/.git")
    return tmp_path / "x"


def piped_commondir(world: World, tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "evil")
    os.mkfifo(tmp_path / "evil/.git/commondir")
    (tmp_path / "x").mkdir()
    (tmp_path / "x/.git").write_text(f"gitdir: {tmp_path}/evil/.git\n")
    return tmp_path / "x"


@pytest.mark.parametrize(
    ("tamper", "why"),
    [
        (moved, "does not point back to it: if you moved it, run git worktree repair"),
        (to_another, "does not point back to it"),
        (foreign_common, "does not point back to it"),
        (made_up_admin, "does not point back to it"),
        (linked, "does not point back to it"),
        (planted_commondir, "holds a commondir file"),
        (to_nothing, "not a git directory"),
        (no_pointer, "not a file git would write"),
        (endless_pointer, "not a file git would write"),
        (pipe, "neither a directory nor a file"),
        (piped_commondir, "not a file git would write"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_tampered_git_entry_is_refused(
    tamper: Callable[[World, Path], Path], why: str, world: World, tmp_path: Path
) -> None:
    start = tamper(world, tmp_path)
    with pytest.raises(RepositoryError, match=why):
        repository.discover(start)


def test_a_separate_git_directory_that_points_back(place: Path, tmp_path: Path) -> None:
    commit(place)
    git(tmp_path, "init", "-q", "--separate-git-dir", str(tmp_path / "elsewhere"), str(place))
    git(tmp_path / "elsewhere", "config", "core.worktree", str(place))
    there_and_back(found(place), tmp_path)
    git(tmp_path / "elsewhere", "config", "core.worktree", "/")
    with pytest.raises(RepositoryError, match="does not point back"):
        repository.discover(place)


@pytest.mark.parametrize("where", [".", "objects", "hooks"])
def test_a_bare_repository_and_the_inside_of_one(where: str, world: World) -> None:
    for git_dir in (world.remote, world.repo / ".git"):
        with pytest.raises(RepositoryError, match="bare repository or the inside of one"):
            repository.discover(git_dir / where)


def test_settings_that_name_another_working_tree_are_not_followed(world: World, tmp_path: Path) -> None:
    git(world.repo, "config", "core.worktree", "/etc")
    git(world.repo, "config", "core.bare", "false")
    repo = found(world.repo)
    assert repo.top == world.repo
    there_and_back(repo, tmp_path)


def test_submodules_are_named(world: World, tmp_path: Path) -> None:
    for name in ("one", "two", "three", "four"):
        git(world.repo, "-c", "protocol.file.allow=always", "submodule", "-q", "add", str(world.remote), f"mod/{name}")
    commit(world.repo)
    repo = found(world.repo)
    assert repo.notes == (
        "submodules are not carried, their directories will be empty: mod/four, mod/one, mod/three and 1 more",
    )
    there_and_back(repo, tmp_path)
    inner = found(world.repo / "mod/one")
    assert inner.top == world.repo / "mod/one" and inner.git_dir == world.repo / ".git/modules/mod/one"


def test_filters_are_named_and_do_not_run(world: World, tmp_path: Path) -> None:
    (world.repo / ".gitattributes").write_text("*.bin filter=lfs diff=lfs merge=lfs -text\n*.key filter=crypt\n")
    (world.repo / "x.bin").write_text("version https://git-lfs.github.com/spec/v1\n")
    (world.repo / "x.key").write_text("k")
    commit(world.repo)
    for key in ("clean", "smudge", "process"):
        git(world.repo, "config", f"filter.lfs.{key}", str(world.marker))
    git(world.repo, "config", "filter.lfs.required", "true")
    repo = found(world.repo)
    assert repo.notes == (
        "filter crypt does not run, the sandbox gets files as stored, unfiltered: x.key",
        "filter lfs does not run, the sandbox gets git-lfs pointers instead of files: x.bin",
    )
    there_and_back(repo, tmp_path)
    assert not world.fired()


def test_a_sha256_repository(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main", "--object-format=sha256", "r")
    (tmp_path / "r/f").write_text("x\n")
    commit(tmp_path / "r")
    repo = found(tmp_path / "r")
    assert repo.object_format == "sha256" and len(repo.head_commit) == 64
    there_and_back(repo, tmp_path)


NAMES = [b"new\nline", b'quote"d', b"tab\t", b"back\\slash", b"not\xffutf8", b"-option", b" blank ", b"esc\x1b[2J",
         "größe".encode(), "\u202egnp".encode(), b"a:b", b"*", b"'", b"$(touch x)"]  # fmt: skip


def test_file_names_of_every_kind(place: Path, tmp_path: Path) -> None:
    for name in NAMES:
        Path(os.fsdecode(os.fsencode(place) + b"/" + name)).write_bytes(name)
    (place / ".gitattributes").write_text("* filter=q\n")
    (place / "dangling").symlink_to("/nonexistent")
    (place / "up").symlink_to("../..")
    commit(place)
    repo = found(place)
    assert not repo.dirty
    assert all(note.isprintable() for note in repo.notes) and len(repo.notes) == 1
    there_and_back(repo, tmp_path)
    listed = git(place, "ls-tree", "-z", "--name-only", "refs/sandbox/demo").split(b"\0")
    assert set(NAMES) < set(listed)


@pytest.mark.parametrize(
    "name", ["with blank", "new\nline", 'qu"ote', "co:lon", "back\\slash", "-dash", "größe", "\udcff"]
)
def test_directory_names_of_every_kind(name: str, world: World, tmp_path: Path) -> None:
    target = tmp_path / name
    world.repo.rename(target)
    there_and_back(found(target), tmp_path)


@pytest.mark.timeout(120)
def test_files(place: Path, tmp_path: Path) -> None:
    entries = b"".join(b"M 100644 inline d%d/f%d\ndata %d\n%d\n" % (n % 200, n, len(str(n)), n) for n in range(20_000))
    stream = b"commit refs/heads/main\ncommitter a <a@example.test> 1700000000 +0000\ndata 1\nx\n" + entries
    git(place, "fast-import", "--quiet", stdin=stream)
    git(place, "reset", "-q", "--hard")
    began = time.monotonic()
    repo = found(place)
    looked = time.monotonic() - began
    file, _ = bringback.bundle_head(repo)
    file.close()
    sent = time.monotonic() - began - looked
    new = text(place, "commit-tree", "-p", "HEAD", "-m", "guest", "HEAD^{tree}")
    git(place, "update-ref", "refs/heads/sandbox", new)
    git(place, "bundle", "create", "-q", str(tmp_path / "back"), "main..sandbox")
    began = time.monotonic()
    bringback.receive(repo, tmp_path / "back", repo.head_commit, "demo")
    back = time.monotonic() - began
    print(f"20,000 files: found in {looked:.2f} s, packed in {sent:.2f} s, brought back in {back:.2f} s")
    assert not repo.dirty
    assert max(looked, sent, back) < 10


# Whose it is.


def owned(**uids: int) -> Callable[[Path], int]:
    return lambda path: uids[path.name]


PLAIN = Found(Path("/top"), Path("/top/entry"), Path("/top/git_dir"), Path("/top/common"))


@pytest.mark.parametrize("foreign", ["top", "entry", "git_dir", "common"])
def test_root_is_refused_in_someone_elses_repository(foreign: str) -> None:
    uids = {"top": 0, "entry": 0, "git_dir": 0, "common": 0, foreign: 54321}
    with pytest.raises(RepositoryError, match=r"belongs to uid 54321, .* \(sudo -u #54321 -H"):
        repository.check_owner(PLAIN, 0, owned(**uids))


def test_owners_that_are_fine() -> None:
    repository.check_owner(PLAIN, 0, lambda path: 0)
    repository.check_owner(PLAIN, 1000, lambda path: 1000)


@pytest.mark.parametrize(
    ("settings", "safe"),
    [("", False), ("/top", True), ("*", True), ("/other", False), ("/top\n\tdirectory =", False)],
    ids=["nothing", "this one", "all", "another", "taken back"],
)
def test_an_ordinary_user_may_declare_a_directory_safe(
    settings: str, safe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".gitconfig").write_text(f"[safe]\n\tdirectory = {settings}\n" if settings else "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    if safe:
        repository.check_owner(PLAIN, 1000, lambda path: 0)
        return
    with pytest.raises(RepositoryError, match=r"safe\.directory '/top'"):
        repository.check_owner(PLAIN, 1000, lambda path: 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_root_in_a_repository_that_was_given_away(world: World) -> None:
    before = worlds.snapshot(world)
    os.chown(world.repo, 54321, 54321)
    with pytest.raises(RepositoryError, match="root does not work in other people's repositories"):
        repository.discover(world.repo / "dir")
    os.chown(world.repo, 0, 0)
    assert worlds.snapshot(world) == before
