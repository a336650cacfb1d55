"""`sandbox-cli run` in a repository: what goes in, what comes back, what stays as it was."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import git, make_repository
from tests.daemon import Daemon

pytestmark = pytest.mark.vm

# The smallest memory a VM boots with here, so that many runs fit; what is tested is git, not size.
RUN = ("run", "--memory", "512")


def tree_digest(top: Path) -> str:
    """Every path, mode, and content below `top` but git's objects and the refs a run may write."""
    digest = hashlib.sha256()
    for path in sorted(top.rglob("*")):
        name = path.relative_to(top).as_posix()
        if name.startswith((".git/objects", ".git/refs/sandbox")):
            continue
        mode = path.lstat().st_mode
        digest.update(f"{name}\0{mode:o}\0".encode(errors="surrogateescape"))
        if stat.S_ISREG(mode):
            digest.update(path.read_bytes())
        elif stat.S_ISLNK(mode):
            digest.update(os.fsencode(os.readlink(path)))
    return digest.hexdigest()


def test_commits_come_back_into_one_ref_and_nothing_else_moves(daemon: Daemon, repository: Path) -> None:
    (repository / "run.sh").write_text("#!/bin/sh\necho it runs\n")
    (repository / "run.sh").chmod(0o755)
    (repository / "to").symlink_to("run.sh")
    git(repository, "add", "run.sh", "to")
    git(repository, "commit", "-qm", "Zero")
    (repository / "dirty.txt").write_text("not committed\n")
    (repository / "hello.txt").write_text("edited, not committed\n")
    before, head = tree_digest(repository), git(repository, "rev-parse", "HEAD").strip()
    # In there it is as committed: nothing changed, what could be run can be, and nothing else.
    script = "git status --porcelain; ./to; stat -c %A hello.txt run.sh to; cat hello.txt; "
    script += "git log --oneline | wc -l; echo more >> hello.txt; git commit -qam Two; echo left >new.txt"
    ran = daemon.cli(*RUN, "--name", "one", "--", "sh", "-c", script, cwd=repository)
    assert ran.returncode == 0, ran.stderr.decode()
    said = ["it runs", "-rw-r--r--", "-rwxr-xr-x", "lrwxrwxrwx", "hello", "2"]
    assert ran.stdout.decode().splitlines() == said
    assert b"refs/sandbox/one" in ran.stderr + ran.stdout
    assert tree_digest(repository) == before
    assert git(repository, "for-each-ref", "--format=%(refname)").split() == ["refs/heads/main", "refs/sandbox/one"]
    assert git(repository, "show", "refs/sandbox/one:hello.txt") == "hello\nmore\n"
    assert git(repository, "show", "refs/sandbox/one:new.txt") == "left\n"
    changed = git(repository, "diff-tree", "-r", "--raw", "HEAD", "refs/sandbox/one").splitlines()
    assert [(line.split()[1], line.split()[-1]) for line in changed] == [("100644", "hello.txt"), ("100644", "new.txt")]
    assert git(repository, "merge-base", "HEAD", "refs/sandbox/one").strip() == head
    assert git(repository, "fsck", "--strict", "--no-dangling") == ""
    assert [s for s in daemon.client.sandboxes() if s.name == "one" and s.state != "terminated"] == []


@pytest.mark.soak
def test_the_exit_code_is_the_commands_and_its_work_comes_back_all_the_same(
    daemon: Daemon, repository: Path
) -> None:
    ran = daemon.cli(*RUN, "--name", "seven", "--", "sh", "-c", "echo x > x; exit 7", cwd=repository)
    assert ran.returncode == 7
    assert git(repository, "show", "refs/sandbox/seven:x") == "x\n"


@pytest.mark.soak
def test_nothing_new_is_said_and_no_ref_is_made(daemon: Daemon, repository: Path) -> None:
    ran = daemon.cli(*RUN, "--name", "idle", "--", "true", cwd=repository)
    assert ran.returncode == 0
    assert git(repository, "for-each-ref", "refs/sandbox") == ""


def test_detached_head_sub_directory_and_odd_names(daemon: Daemon, tmp_path: Path) -> None:
    top = make_repository(tmp_path / "odd")
    odd = [b"new\nline", b'quo"te', b"caf\xe9", "ü─".encode(), b"--option", b"a b"]
    for name in odd:
        (Path(os.fsdecode(bytes(os.fsencode(top)) + b"/" + name))).write_bytes(name)
    (top / "link").symlink_to("/etc/passwd")
    (top / "sub").mkdir()
    (top / "sub" / "file").write_text("x")
    (top / ".gitattributes").write_text("* filter=planted\n")
    git(top, "add", ".")
    git(top, "commit", "-qm", "Odd")
    git(top, "checkout", "-q", "--detach")
    code = "import os;open('sub/new','w').close();print(sorted(os.listdir(b'.')));print(os.readlink('link'))"
    ran = daemon.cli(*RUN, "--name", "odd", "--", "python3", "-c", code, cwd=top / "sub")
    assert ran.returncode == 0, ran.stderr.decode()
    listed = ran.stdout.decode()
    assert all(repr(name) in listed for name in odd) and "/etc/passwd" in listed
    changed = git(top, "diff", "--name-status", "HEAD", "refs/sandbox/odd")
    assert changed.split() == ["A", "sub/new"]


def prepare_shallow(where: Path) -> Path:
    origin = make_repository(where / "origin")
    for number in range(3):
        (origin / "n").write_text(str(number))
        git(origin, "add", ".")
        git(origin, "commit", "-qm", f"n {number}")
    git(where, "clone", "-q", "--depth", "1", f"file://{origin}", "shallow")
    return where / "shallow"


def prepare_worktree(where: Path) -> Path:
    origin = make_repository(where / "origin")
    git(origin, "worktree", "add", "-q", "-b", "side", str(where / "worktree"))
    return where / "worktree"


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(prepare_shallow, id="shallow clone"),
        pytest.param(lambda where: make_repository(where / "sha256", "--object-format=sha256"), id="SHA-256"),
        pytest.param(prepare_worktree, id="worktree", marks=pytest.mark.soak),
    ],
)
def test_repositories_of_other_kinds(daemon: Daemon, tmp_path: Path, prepare: Callable[[Path], Path]) -> None:
    where = prepare(tmp_path)
    ran = daemon.cli(*RUN, "--name", "other", "--", "sh", "-c", "echo new > new", cwd=where)
    assert ran.returncode == 0, ran.stderr.decode()
    assert git(where, "show", "refs/sandbox/other:new") == "new\n"
    assert git(where, "status", "--porcelain") == ""
    git(where, "fsck", "--strict", "--no-dangling")


@pytest.mark.soak
def test_twenty_thousand_files_go_in_and_one_change_comes_out(daemon: Daemon, tmp_path: Path) -> None:
    top = make_repository(tmp_path / "many")
    for number in range(20_000):
        path = top / f"d{number % 100}" / f"f{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{number}\n")
    git(top, "add", ".")
    git(top, "commit", "-qm", "Many")
    ran = daemon.cli(*RUN, "--name", "many", "--", "sh", "-c", "echo x > d1/f1", cwd=top, timeout_s=280)
    assert ran.returncode == 0, ran.stderr.decode()
    assert git(top, "diff", "--name-only", "HEAD", "refs/sandbox/many") == "d1/f1\n"


@pytest.mark.soak
def test_submodules_are_named_as_not_carried(daemon: Daemon, tmp_path: Path) -> None:
    inner, outer = make_repository(tmp_path / "inner"), make_repository(tmp_path / "outer")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", f"file://{inner}", "lib")
    git(outer, "commit", "-qm", "With a submodule")
    ran = daemon.cli(*RUN, "--name", "outer", "--", "sh", "-c", "echo x > x", cwd=outer)
    assert ran.returncode == 0, ran.stderr.decode()
    assert b"lib" in ran.stderr and b"submodule" in ran.stderr
    assert git(outer, "diff", "--name-only", "HEAD", "refs/sandbox/outer") == "x\n"


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda top: git(top, "update-ref", "-d", "HEAD"), "commit"),
        (lambda top: git(top, "config", "remote.origin.promisor", "true"), "partial clone"),
        (lambda top: [os.chown(path, 12345, 12345) for path in [*top.rglob("*"), top]], "belongs to"),
    ],
    ids=["no commit yet", "a partial clone", "root in someone else's repository"],
)
def test_a_repository_that_cannot_be_taken_is_refused_before_a_vm_exists(
    daemon: Daemon, repository: Path, prepare: Callable[[Path], object], says: str
) -> None:
    if says == "belongs to" and os.geteuid() != 0:
        pytest.skip("only root can be in a repository of another user's that it may write")
    prepare(repository)
    existing = {sandbox.id for sandbox in daemon.client.sandboxes()}
    ran = daemon.cli(*RUN, "--", "true", cwd=repository)
    assert ran.returncode == 1 and says in ran.stderr.decode()
    assert ran.stderr.decode().startswith("sandbox-cli: ")
    assert {sandbox.id for sandbox in daemon.client.sandboxes()} == existing


def test_a_tree_with_git_in_it_is_refused_and_the_sandbox_is_kept(daemon: Daemon, repository: Path) -> None:
    script = """
        blob=$(echo '[core] fsmonitor = /tmp/evil' | git hash-object -w --stdin)
        inner=$(printf '100644 blob %s\\tconfig\\n' $blob | git mktree)
        python3 - $inner <<'PY'
import subprocess, sys
tree = b"40000 .git\\0" + bytes.fromhex(sys.argv[1])
name = subprocess.run(["git", "hash-object", "-t", "tree", "--literally", "-w", "--stdin"], input=tree,
                      capture_output=True, check=True).stdout.decode().strip()
commit = subprocess.run(["git", "commit-tree", "-p", "HEAD", "-m", "evil", name], capture_output=True, check=True)
subprocess.run(["git", "update-ref", "refs/heads/sandbox", commit.stdout.decode().strip()], check=True)
subprocess.run(["git", "symbolic-ref", "HEAD", "refs/heads/elsewhere"], check=True)
PY"""
    ran = daemon.cli(*RUN, "--name", "evil", "--", "sh", "-c", script, cwd=repository)
    said = ran.stderr.decode()
    assert ".git" in said, said
    assert git(repository, "for-each-ref", "refs/sandbox") == ""
    git(repository, "fsck", "--strict", "--no-dangling")
    kept = daemon.client.get("evil")
    assert kept.state == "running" and (kept.id in said or "evil" in said)
    daemon.client.delete(kept.id)
