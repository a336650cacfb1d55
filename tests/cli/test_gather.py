"""The script that gathers a run's work, run by the host's own sh and git on repositories in every kind of
mess."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli import collect, gather, repository
from sandboxd.client import Client, RunResult
from sandboxd.errors import Conflict, InvalidRequest

ENV = {
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "agent",
    "GIT_AUTHOR_EMAIL": "agent@localhost",
    "GIT_COMMITTER_NAME": "agent",
    "GIT_COMMITTER_EMAIL": "agent@localhost",
}


class Workspace:
    """A repository on the branch `sandbox` with three commits, the first one being the base."""

    def __init__(self, top: Path) -> None:
        self.top = top
        top.mkdir()
        self.git("init", "-q", "-b", "sandbox")
        self.write(".gitignore", "*.log\nbuild/\n")
        self.commit("base")
        self.base = self.git("rev-parse", "HEAD")

    def git(self, *args: str, fails: bool = False) -> str:
        argv = ["git", *args]
        done = subprocess.run(argv, cwd=self.top, env=ENV, capture_output=True, text=True, check=False)
        assert fails or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def write(self, name: str, text: str) -> None:
        path = self.top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self, message: str, name: str = "", text: str = "") -> str:
        if name:
            self.write(name, text or message)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")

    def gather(self, path: str | None = None, **more: str) -> RunResult:
        argv = ["/bin/sh", "-c", gather.SCRIPT, "sh", self.base, gather.MESSAGE, gather.JOINED]
        env = ENV | more | ({"PATH": path} if path is not None else {})
        done = subprocess.run(argv, cwd=self.top, env=env, capture_output=True, check=False, timeout=60)
        return RunResult(done.returncode, done.stdout, done.stderr, False, False)

    def gathered(self) -> gather.Gathered:
        result = self.gather()
        assert result.exit_code == 0, result.stderr
        return gather.read(result.stdout)

    def files(self, ref: str = "sandbox") -> set[str]:
        return set(self.git("ls-tree", "-r", "--name-only", ref).splitlines()) - {".gitignore"}

    def subjects(self) -> list[str]:
        return self.git("log", "--topo-order", "--format=%s", f"{self.base}..sandbox").splitlines()


@pytest.fixture
def work(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "workspace")


def test_nothing_done_is_nothing_said(work: Workspace) -> None:
    assert work.gathered() == ((), (), True)
    assert work.git("rev-parse", "sandbox") == work.base


def test_nothing_new_is_said_of_a_branch_without_new_commits_only(work: Workspace) -> None:
    work.commit("one")
    assert not work.gathered().nothing_new
    work.git("reset", "-q", "--hard", work.base)
    assert work.gathered().nothing_new
    work.git("checkout", "-q", "--orphan", "other")
    work.git("rm", "-q", "-r", "--cached", ".")
    (work.top / ".gitignore").unlink()
    assert work.gathered().nothing_new
    work.git("branch", "-q", "-D", "sandbox")
    assert not work.gathered().nothing_new


def test_staged_unstaged_untracked_and_deleted_are_committed_and_ignored_named(work: Workspace) -> None:
    work.commit("one", "kept.txt", "1")
    work.write("gone.txt", "x")
    work.commit("two")
    work.write("staged.txt", "s")
    work.git("add", "staged.txt")
    work.write("kept.txt", "2")
    work.write("dir/untracked\nname", "u")
    (work.top / "gone.txt").unlink()
    work.write("a.log", "ignored")
    work.write("build/out", "ignored")
    gathered = work.gathered()
    assert work.git("show", "sandbox:kept.txt") == "2"
    assert {"kept.txt", "staged.txt", '"dir/untracked\\nname"'} == work.files()
    assert work.subjects() == [gather.MESSAGE, "two", "one"]
    assert gathered.left == ()
    assert gathered.notes[-1] == "ignored files stay behind: a.log, build/"
    assert work.git("log", "-1", "--format=%an <%ae> %cn", "sandbox") == "sandbox <sandbox@localhost> sandbox"


def test_hooks_signing_and_an_editor_do_not_stand_in_the_way(work: Workspace) -> None:
    hook = work.top / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ntouch ../ran; exit 1\n")
    hook.chmod(0o755)
    work.git("config", "commit.gpgSign", "true")
    work.git("config", "gpg.program", "false")
    work.git("config", "core.editor", "false")
    work.write("a", "a")
    work.gathered()
    assert work.files() == {"a"}
    assert not (work.top.parent / "ran").exists()


def test_a_stale_index_lock_is_removed(work: Workspace) -> None:
    work.write("a", "a")
    (work.top / ".git/index.lock").write_text("")
    work.gathered()
    assert work.files() == {"a"}


def conflict(work: Workspace) -> None:
    """`sandbox` and `other` both change a.txt."""
    work.git("checkout", "-q", "-b", "other")
    work.commit("theirs", "a.txt", "theirs")
    work.git("checkout", "-q", "sandbox")
    work.commit("ours", "a.txt", "ours")


def test_a_merge_that_stopped_is_concluded_with_its_markers(work: Workspace) -> None:
    conflict(work)
    work.git("merge", "other", fails=True)
    gathered = work.gathered()
    assert "an unfinished merge was left; it comes back as it stood" in gathered.notes
    assert "<<<<<<<" in work.git("show", "sandbox:a.txt")
    assert len(work.git("log", "-1", "--format=%P", "sandbox").split()) == 2
    assert gathered.left == ()


def test_a_merge_that_only_lacks_its_commit_is_concluded(work: Workspace) -> None:
    work.git("checkout", "-q", "-b", "other")
    work.commit("theirs", "b.txt")
    work.git("checkout", "-q", "sandbox")
    work.git("merge", "--no-ff", "--no-commit", "other")
    work.gathered()
    assert work.files() == {"b.txt"}
    assert not (work.top / ".git/MERGE_HEAD").exists()


def test_a_rebase_that_stopped_loses_neither_side(work: Workspace) -> None:
    conflict(work)
    work.commit("later", "later.txt")
    work.git("rebase", "other", fails=True)
    work.write("half.txt", "half")
    gathered = work.gathered()
    assert "an unfinished rebase was left; it comes back as it stood" in gathered.notes
    assert "a detached HEAD and the branch sandbox had both moved; a commit joins them" in gathered.notes
    subjects = work.subjects()
    assert subjects[0] == gather.JOINED
    assert set(subjects[1:]) == {"ours", "later", "theirs", gather.MESSAGE}
    assert work.files() == {"a.txt", "later.txt"}, "the branch's tree, not the half-way one"
    assert work.files("sandbox^2") == {"a.txt", "half.txt"}


def test_a_cherry_pick_that_stopped(work: Workspace) -> None:
    conflict(work)
    work.git("cherry-pick", "other", fails=True)
    gathered = work.gathered()
    assert any("cherry-pick" in note for note in gathered.notes)
    assert "<<<<<<<" in work.git("show", "sandbox:a.txt")


def test_work_on_another_branch_is_what_comes_back(work: Workspace) -> None:
    work.git("checkout", "-q", "-b", "feature/x")
    work.commit("done", "done.txt")
    work.write("more.txt", "m")
    gathered = work.gathered()
    assert work.files() == {"done.txt", "more.txt"}
    assert "the work is on the branch feature/x; that is what comes back" in gathered.notes


def test_work_on_two_branches_is_joined(work: Workspace) -> None:
    work.commit("first", "first.txt")
    work.git("checkout", "-q", "-b", "feature", work.base)
    work.commit("second", "second.txt")
    gathered = work.gathered()
    assert set(work.subjects()) == {gather.JOINED, "first", "second"}
    assert work.files() == {"second.txt"}
    assert gathered.left == ()


def test_looking_at_an_old_commit_changes_nothing(work: Workspace) -> None:
    tip = work.commit("done", "done.txt")
    work.git("checkout", "-q", work.base)
    assert work.gathered() == ((), (), False)
    assert work.git("rev-parse", "sandbox") == tip


def test_a_renamed_or_deleted_branch(work: Workspace) -> None:
    work.commit("done", "done.txt")
    work.git("branch", "-m", "main")
    work.gathered()
    assert work.files() == {"done.txt"}


def test_a_history_begun_anew(work: Workspace) -> None:
    work.git("checkout", "-q", "--orphan", "fresh")
    work.write("new.txt", "n")
    work.gathered()
    assert "new.txt" in work.files()


def test_a_rewritten_history_on_the_branch_itself(work: Workspace) -> None:
    work.write("a", "a")
    work.git("add", "-A")
    work.git("commit", "-q", "--amend", "-m", "amended")
    assert work.gathered()[:2] == ((), ())


def test_stashes_other_branches_and_inner_repositories_are_said(work: Workspace) -> None:
    work.write("stashed", "s")
    work.git("stash", "-u")
    work.git("checkout", "-q", "-b", "side")
    work.commit("on the side", "side.txt")
    work.git("checkout", "-q", "sandbox")
    Workspace(work.top / "vendor")
    gathered = work.gathered()
    assert gathered.left == (
        "stashes: 1",
        "other branches: side",
        "the contents of repositories inside the workspace: vendor",
    )


def test_what_is_no_file_does_not_stop_the_rest(work: Workspace) -> None:
    os.mkfifo(work.top / "fifo")
    work.write("a", "a")
    work.gathered()
    assert work.files() == {"a"}


@pytest.mark.parametrize(
    ("ruin", "said"),
    [
        pytest.param(lambda w: (w.top / ".git").rename(w.top / "moved"), "no git repository", id="no repository"),
        pytest.param(lambda w: w.git("config", "core.bare", "true"), "no git repository", id="made bare"),
        pytest.param(lambda w: (w.top / ".git/objects").rename(w.top / "o"), "no git", id="objects gone"),
    ],
)
def test_a_ruined_repository(work: Workspace, ruin: Callable[[Workspace], object], said: str) -> None:
    ruin(work)
    with pytest.raises(gather.GatherError, match=said):
        gather.gather(Answering(work.gather()), "sb", work.base)


def test_an_image_without_git(work: Workspace, tmp_path: Path) -> None:
    with pytest.raises(gather.GatherError, match="the image has no git"):
        gather.gather(Answering(work.gather(path=str(tmp_path))), "sb", work.base)


class Answering(Client):
    """A client whose `run` has one answer."""

    def __init__(self, answer: RunResult | Exception) -> None:
        super().__init__("/nowhere")
        self._answer = answer

    def run(self, *_: object, **__: object) -> RunResult:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        pytest.param(
            RunResult(43, b"", b"fatal: sha1 file write: No space left on device\n", False, False),
            "disk is full",
            id="a full disk",
        ),
        pytest.param(RunResult(-1, b"", b"", False, True), "took more than 900 s", id="a timeout"),
        pytest.param(RunResult(43, b"", b"fatal: \x1b[31mb\n", False, False), r": fatal: \[31mb", id="git says"),
        pytest.param(RunResult(99, b"", b"", False, False), "exit 99", id="git says nothing"),
        pytest.param(InvalidRequest("no such command: sh"), "no such command: sh", id="no shell in the image"),
    ],
)
def test_what_can_go_wrong(answer: RunResult | Exception, said: str) -> None:
    with pytest.raises(gather.GatherError, match=said):
        gather.gather(Answering(answer), "sb", "0" * 40)


@pytest.mark.parametrize(
    ("output", "gathered"),
    [
        pytest.param(b"", ((), ()), id="nothing"),
        pytest.param(b"garbage\0\0more garbage", ((), ()), id="unknown words"),
        pytest.param(
            b"moved a\x1b[2J\xe2\x80\xaeb\nx\0",
            (("the work is on the branch a [2J b x; that is what comes back",), ()),
            id="a name that lies in a terminal",
        ),
        pytest.param(
            b"ignored\0" + b"".join(b"f%d\0" % n for n in range(9)),
            (("ignored files stay behind: f0, f1, f2, f3, f4 and 4 more",), ()),
            id="many names are counted",
        ),
        pytest.param(b"ignored\0\xff\n\0", (("ignored files stay behind: \ufffd",), ()), id="undecodable"),
    ],
)
def test_records_are_a_guests_word(output: bytes, gathered: object) -> None:
    assert gather.read(output)[:2] == gathered


class Refusing(Answering):
    """Its bundle is refused with a conflict."""

    def get_workspace(self, *_: object) -> Iterator[bytes]:
        raise Conflict("the sandbox has ended")


def test_a_conflict_is_no_new_commits_only_where_the_branch_has_none(work: Workspace) -> None:
    repo = repository.discover(work.top)
    assert repo is not None
    done = Refusing(RunResult(0, b"nothing_new\0ignored\0", b"", False, False))
    assert collect.collect(done, "sb", repo, repo.head_commit, "demo")[1] is None
    work = Refusing(RunResult(0, b"committed\0ignored\0", b"", False, False))
    with pytest.raises(Conflict, match="has ended"):
        collect.collect(work, "sb", repo, repo.head_commit, "demo")
