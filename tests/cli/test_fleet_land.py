"""Landing: what is refused and why, what a merge is, and that nothing planted or configured runs in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli import place, session
from cli.fleet import land, state
from cli.fleet.state import Fleet, Store, Task
from sandboxd.errors import SandboxError
from tests.conftest import git, make_repository

PERSON = {"GIT_AUTHOR_NAME": "alice", "GIT_AUTHOR_EMAIL": "alice@localhost",
          "GIT_COMMITTER_NAME": "alice", "GIT_COMMITTER_EMAIL": "alice@localhost"}  # fmt: skip


class Ground:
    """A repository in which a fleet has been: its branches came back, and the record says so."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.top = make_repository(home / "project")
        self.marks = home / "MARKS"
        self.base = git(self.top, "rev-parse", "HEAD").strip()
        self.store = Store.of(place.config_dir(), self.top / ".git")
        self.store.prepare()
        self.store.write(Fleet(str(self.top), self.base, "main", "unix:///s", session.now(), 0, "", ()))

    def bring(self, branch: str, files: dict[str, str | None], became: str = state.VERIFIED, **fields: Any) -> str:
        """`files` with their contents, None for one that goes."""
        git(self.top, "checkout", "-q", "--detach", self.base)
        for name, content in files.items():
            path = self.top / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink() if content is None else path.write_text(content)
        git(self.top, "add", "-A")
        git(self.top, "commit", "-q", "--allow-empty", "-m", f"Work on {branch}")
        commit = git(self.top, "rev-parse", "HEAD").strip()
        git(self.top, "update-ref", f"refs/sandbox/fleet/{branch}", commit)
        git(self.top, "checkout", "-q", "main")
        self.record(Task(branch, "codex", True, f"fleet-{branch}", became, commit=commit, commits=1), **fields)
        return commit

    def record(self, task: Task, **fields: Any) -> None:
        fleet = self.store.read()
        assert fleet is not None
        self.store.write(replace(fleet, tasks=(*fleet.tasks, replace(task, **fields))))

    def marker(self, name: str) -> Path:
        """A program that leaves a mark, and does what is expected of a filter or an editor otherwise."""
        path = self.home / name
        path.write_text(f"#!/bin/sh\necho {name} >> {self.marks}\ncat\nexit 0\n")
        path.chmod(0o755)
        return path

    def head(self) -> str:
        return git(self.top, "rev-parse", "HEAD").strip()

    def untouched(self) -> tuple[str, str, str]:
        """HEAD, the refs, and what differs from HEAD."""
        return self.head(), git(self.top, "for-each-ref"), git(self.top, "status", "--porcelain")


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    for name in [name for name in os.environ if name.startswith(("GIT_", "XDG_"))]:
        monkeypatch.delenv(name)
    for name, value in {"HOME": str(tmp_path), **PERSON}.items():
        monkeypatch.setenv(name, value)
    made = Ground(tmp_path)
    monkeypatch.chdir(made.top)
    return made


def landed(*words: str) -> None:
    args = {"--all": "--all" in words, "--unverified": "--unverified" in words, "--json": "--json" in words}
    onto = next((word.partition("=")[2] for word in words if word.startswith("--onto=")), None)
    branch = next((word for word in words if not word.startswith("--")), None)
    assert land.main(args | {"--onto": onto, "BRANCH": branch}) == 0


def refused(*words: str) -> str:
    with pytest.raises(SandboxError) as caught:
        landed(*words)
    said = str(caught.value)
    assert said.isprintable()
    return said


def test_a_branch_is_merged_with_a_commit_of_the_persons(ground: Ground) -> None:
    commit = ground.bring("a", {"new": "new\n"})
    landed("a")
    assert git(ground.top, "log", "-1", "--format=%an|%ae|%cn|%P|%s").strip() == (
        f"alice|alice@localhost|alice|{ground.base} {commit}|Merge fleet task a"
    )
    assert (ground.top / "new").read_text() == "new\n"
    assert git(ground.top, "status", "--porcelain") == ""
    assert git(ground.top, "symbolic-ref", "HEAD").strip() == "refs/heads/main"
    task = ground.store.read().task("a")  # type: ignore[union-attr]
    assert task is not None and task.landed == ground.head()
    assert "nothing to land: HEAD has it already" in refused("a")


def test_all_lands_what_is_verified_and_names_the_rest_with_the_reason(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    ground.bring("one", {"1": "1"})
    ground.bring("bad", {"2": "2"}, state.REJECTED, detail="its verify command failed")
    ground.bring("three", {"3": "3"})
    ground.record(Task("idle", "codex", True, "fleet-idle", state.VERIFIED, commits=0))
    landed("--all", "--json")
    said = json.loads(capsys.readouterr().out)
    assert [one["branch"] for one in said["landed"]] == ["one", "three"]
    assert {one["branch"]: one["reason"] for one in said["skipped"]} == {
        "bad": "it was rejected, its verify command failed; --unverified lands what came back all the same",
        "idle": "nothing to land: it brought nothing back",
    }
    assert said["conflict"] is None
    assert sorted(path.name for path in ground.top.iterdir() if path.name != ".git") == ["1", "3", "hello.txt"]
    landed("bad", "--unverified")
    assert (ground.top / "2").exists(), "HEAD is only merges of this fleet away from where it started"


def test_one_after_the_other_needs_no_onto(ground: Ground) -> None:
    for name in ("a", "b", "c"):
        ground.bring(name, {name: name})
    for name in ("a", "b", "c"):
        landed(name)
    assert git(ground.top, "rev-list", "--merges", "--count", "HEAD").strip() == "3"


def alone(ground: Ground) -> None:
    ground.bring("a", {"new": "x"})


def recorded(became: str, **fields: Any) -> Callable[[Ground], None]:
    return lambda ground: ground.bring("a", {"new": "x"}, became, **fields) and None  # type: ignore[func-returns-value]


def ref_moved(ground: Ground) -> None:
    ground.bring("a", {"new": "x"})
    other = git(ground.top, "commit-tree", "-p", ground.base, "-m", "other", "HEAD^{tree}").strip()
    git(ground.top, "update-ref", "refs/sandbox/fleet/a", other)


def ref_of_before(ground: Ground) -> None:
    commit = ground.bring("x", {"old": "work of an earlier fleet"})
    git(ground.top, "update-ref", "refs/sandbox/fleet/a", commit)
    ground.record(Task("a", "codex", True, "fleet-a", state.FAILED, commits=0, before=commit))


@pytest.mark.parametrize(
    ("prepare", "words", "said"),
    [
        pytest.param(recorded(state.RUNNING, pid=os.getpid(), born=state.born(os.getpid())), (), "still at work",
                     id="one that runs"),
        pytest.param(recorded(state.RUNNING, pid=os.getpid(), born=state.born(os.getpid())), ("--unverified",),
                     "still at work", id="one that runs, whatever it is worth"),
        pytest.param(recorded(state.WAITING), (), "it was never started", id="one nobody started"),
        pytest.param(recorded(state.REJECTED), (), "it was rejected; --unverified lands", id="a rejected one"),
        pytest.param(recorded(state.FAILED, detail="exit code 5"), (), "it failed, exit code 5", id="a failed one"),
        pytest.param(recorded(state.RUNNING, pid=os.getpid(), born="0:1"), (), "it was lost, its process was killed",
                     id="one whose process is another's now"),
        pytest.param(ref_moved, (), "is not the commit that was verified", id="a ref somebody moved"),
        pytest.param(ref_of_before, ("--unverified",), "nothing to land: it brought nothing back",
                     id="a ref of an earlier fleet"),
    ],
)  # fmt: skip
def test_a_branch_that_is_not_landed(
    prepare: Callable[[Ground], None], words: tuple[str, ...], said: str, ground: Ground,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    prepare(ground)
    before = ground.untouched()
    assert said in refused("a", *words)
    assert ground.untouched() == before
    landed("--all", *words)
    [skipped] = [line for line in capfd.readouterr().err.splitlines() if "skipped a: " in line]
    assert said in skipped


def test_who_lands_while_another_does_is_told_so(ground: Ground) -> None:
    ground.bring("a", {"new": "new\n"})
    lock = ground.store.hold_landing()
    before = ground.untouched()
    assert refused("--all") == "another sandbox-cli agent fleet land is at work in this repository"
    assert ground.untouched() == before
    os.close(lock)
    landed("--all")


def test_a_branch_nobody_knows(ground: Ground) -> None:
    ground.bring("a", {"new": "x"})
    assert refused("b\x1b[2J") == "the last fleet has no task b [2J; it has a"


def dirty(ground: Ground) -> None:
    alone(ground)
    (ground.top / "hello.txt").write_text("edited\n")


def staged(ground: Ground) -> None:
    alone(ground)
    (ground.top / "added").write_text("added\n")
    git(ground.top, "add", "added")


def moved_on(ground: Ground) -> None:
    alone(ground)
    git(ground.top, "commit", "-q", "--allow-empty", "-m", "meanwhile")


def a_merge_of_something_else(ground: Ground) -> None:
    alone(ground)
    git(ground.top, "checkout", "-q", "-b", "other")
    git(ground.top, "commit", "-q", "--allow-empty", "-m", "other")
    git(ground.top, "checkout", "-q", "main")
    git(ground.top, "merge", "-q", "--no-ff", "-m", "other", "other")


def conflicting(ground: Ground) -> None:
    alone(ground)
    git(ground.top, "checkout", "-q", "-b", "other")
    (ground.top / "hello.txt").write_text("other\n")
    git(ground.top, "commit", "-qam", "other")
    git(ground.top, "checkout", "-q", "main")
    (ground.top / "hello.txt").write_text("main\n")
    git(ground.top, "commit", "-qam", "main")
    git(ground.top, "merge", "other", check=False)


@pytest.mark.parametrize(
    ("prepare", "words", "said"),
    [
        pytest.param(lambda g: (alone(g), git(g.top, "checkout", "-q", "--detach")), (), "HEAD is detached",
                     id="a detached HEAD"),
        pytest.param(dirty, (), "tracked files differ from HEAD", id="an edited file"),
        pytest.param(staged, ("--onto=main",), "tracked files differ from HEAD", id="a staged file"),
        pytest.param(moved_on, (), "add --onto main", id="a commit since"),
        pytest.param(a_merge_of_something_else, (), "add --onto main", id="a merge of something else"),
        pytest.param(moved_on, ("--onto=other",), "you are on main, not on other: git switch other",
                     id="another branch than the one that is meant"),
        pytest.param(conflicting, (), "a merge is under way here", id="in the middle of a merge"),
    ],
)  # fmt: skip
def test_ground_that_stops_everything(
    prepare: Callable[[Ground], None], words: tuple[str, ...], said: str, ground: Ground
) -> None:
    prepare(ground)
    before = ground.untouched()
    assert said in refused("--all", *words)
    assert said in refused("a", *words)
    assert ground.untouched() == before


def test_onto_says_that_it_is_meant(ground: Ground) -> None:
    moved_on(ground)
    landed("a", "--onto=main")
    assert (ground.top / "new").exists()


def test_without_a_name_for_the_person_nothing_is_begun(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(ground)
    for name in PERSON:
        monkeypatch.delenv(name)
    assert "git config --global user.name" in refused("a")
    (ground.home / ".gitconfig").write_text("[user]\n\tname = Bob\n\temail = bob@localhost\n")
    git(ground.top, "config", "user.email", "bob@work")
    landed("a")
    assert git(ground.top, "log", "-1", "--format=%an %ae %cn %ce").strip() == "Bob bob@work Bob bob@work"


def test_a_conflict_is_left_for_the_person_and_can_be_finished_with_plain_git(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    ground.bring("a", {"hello.txt": "a\n", "x\x1b[2J\n": "1"})
    ground.bring("b", {"hello.txt": "b\n"})
    ground.bring("c", {"c": "c"})
    said = refused("--all", "--json")
    assert said == (
        "b conflicts with main in hello.txt: resolve it and git commit, or git merge --abort; then land the others"
    )
    result = json.loads(capsys.readouterr().out)
    assert result["conflict"] == {"branch": "b", "paths": ["hello.txt"]}
    assert [one["branch"] for one in result["landed"]] == ["a"]
    assert "<<<<<<<" in (ground.top / "hello.txt").read_text()
    assert "a merge is under way here: finish it, or give it up with git merge --abort" in refused("c")
    (ground.top / "hello.txt").write_text("both\n")
    git(ground.top, "commit", "-qam", "Merge b by hand")
    landed("--all")
    assert (ground.top / "c").exists()


def test_a_file_in_the_way_is_not_overwritten(ground: Ground) -> None:
    ground.bring("a", {"new": "theirs\n"})
    (ground.top / "new").write_text("precious\n")
    before = ground.untouched()
    assert refused("a").startswith("git refuses the merge: ")
    assert (ground.top / "new").read_text() == "precious\n"
    assert ground.untouched() == before


def test_what_would_be_executed_later_is_listed_before_the_merge(
    ground: Ground, capfd: pytest.CaptureFixture[str]
) -> None:
    ground.bring("a", {"Makefile": "all:\n\ttrue\n", ".github/workflows/x.yml": "on: push\n"})
    landed("a")
    said = capfd.readouterr().err
    assert 0 < said.index(".github/workflows/x.yml") < said.index("landed a as")
    assert "Makefile" in said


# Nothing runs


def hook(name: str) -> Callable[[Ground], None]:
    def plant(ground: Ground) -> None:
        shutil.copy(ground.marker("ran"), ground.top / ".git/hooks" / name)

    return plant


def setting(*pairs: tuple[str, str], scope: str = "--local", attributes: str = "") -> Callable[[Ground], None]:
    """`{m}` in a value is a program that leaves a mark."""

    def plant(ground: Ground) -> None:
        marker = ground.marker("ran")
        for key, value in pairs:
            git_config = ["config", *(["-f", str(ground.home / ".gitconfig")] if scope == "--global" else [])]
            git(ground.top, *git_config, key, value.format(m=marker))
        if attributes:
            (ground.top / ".git/info/attributes").write_text(attributes)

    return plant


def strategy(ground: Ground) -> None:
    """A merge strategy is a program on PATH that a branch's own settings can name."""
    tools = ground.home / "tools"
    tools.mkdir()
    shutil.copy(ground.marker("ran"), tools / "git-merge-evil")
    git(ground.top, "config", "branch.main.mergeOptions", "--strategy=evil")


SIGN = (("commit.gpgSign", "true"), ("gpg.program", "{m}"))
PLANTS = [
    *(pytest.param(hook(name), id=f"hook {name}") for name in (
        "pre-merge-commit", "prepare-commit-msg", "commit-msg", "post-merge", "post-index-change",
        "reference-transaction")),
    pytest.param(setting(*SIGN), id="a signing program of the repository's"),
    pytest.param(setting(*SIGN, scope="--global"), id="the person's own signing program"),
    pytest.param(setting(("merge.q7.driver", "{m} %A"), attributes="* merge=q7\n"), id="a merge driver"),
    pytest.param(setting(("merge.q7.driver", "{m} %A"), scope="--global", attributes="* merge=q7\n"),
                 id="the person's own merge driver"),
    pytest.param(setting(("core.fsmonitor", "{m}")), id="fsmonitor"),
    pytest.param(strategy, id="a strategy that a branch names"),
    pytest.param(setting(("branch.main.mergeOptions", "--edit"), ("core.editor", "{m}")), id="an editor"),
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS)
def test_nothing_runs_that_plain_git_would_run(plant: Callable[[Ground], None], ground: Ground) -> None:
    """The control is the same merge by plain git, in a copy."""
    ground.bring("a", {"hello.txt": "first\nhello\n", "new": "x"})
    (ground.top / "hello.txt").write_text("hello\nlast\n" * 3)
    git(ground.top, "commit", "-qam", "also here")
    plant(ground)
    copy = ground.home / "copy"
    shutil.copytree(ground.top, copy, symlinks=True)
    ground.marks.unlink(missing_ok=True)
    landed("a", "--onto=main", "--unverified")
    assert not ground.marks.exists(), "a program ran in the merge"
    # An editor wants a terminal, or to be told that it has one.
    subprocess.run(
        ["git", "merge", "--no-ff", *(["--edit"] if (copy / ".git/config").read_text().count("--edit") else []),
         "refs/sandbox/fleet/a"],
        cwd=copy, capture_output=True, timeout=60, stdin=subprocess.DEVNULL,
        env={"PATH": f"{ground.home}/tools:{os.environ['PATH']}", "HOME": str(ground.home), **PERSON},
    )  # fmt: skip
    assert ground.marks.exists(), "plain git ran nothing either: this proves nothing"


@pytest.mark.parametrize("options", ["--squash", "--no-commit", "--ff-only", "-X theirs", "--no-ff -m x -S"])
def test_options_that_a_branch_names_do_not_change_the_merge(options: str, ground: Ground) -> None:
    ground.bring("a", {"new": "x"})
    for key, value in (("branch.main.mergeOptions", options), ("merge.ff", "only"), ("merge.autoStash", "true")):
        git(ground.top, "config", key, value)
    landed("a")
    assert git(ground.top, "log", "-1", "--format=%s %p").split()[:4] == ["Merge", "fleet", "task", "a"]
    assert len(git(ground.top, "log", "-1", "--format=%p").split()) == 2


def test_a_merge_that_is_not_signed_says_so_to_a_person_who_signs(
    ground: Ground, capfd: pytest.CaptureFixture[str]
) -> None:
    ground.bring("a", {"new": "x"})
    ground.bring("b", {"other": "x"})
    landed("a")
    assert "not signed" not in capfd.readouterr().err
    (ground.home / ".gitconfig").write_text("[commit]\n\tgpgSign = true\n")
    landed("b")
    assert "git commit --amend --no-edit -S" in capfd.readouterr().err


# Files that a filter writes


def lfs(ground: Ground, scope: str) -> None:
    """What `git lfs install` sets up, with a filter that anybody can follow."""
    command = ["config", *(["-f", str(ground.home / ".gitconfig")] if scope == "global" else [])]
    for key, value in (("clean", "tr a-z A-Z"), ("smudge", "tr A-Z a-z"), ("required", "true")):
        git(ground.top, *command, f"filter.case.{key}", value)


@pytest.mark.parametrize("scope", ["global", "local"])
@pytest.mark.parametrize(
    ("attributes", "where"),
    [("*.bin filter=case\n", ".gitattributes"), ("*.bin filter=case\n", ".git/info/attributes"),
     ("*.bin filter=case\n", "../.config/git/attributes"), ("[attr]big filter=case\n*.bin big\n", ".gitattributes")],
    ids=["the tree's", "the clone's", "the person's", "by a macro"],
)  # fmt: skip
def test_a_file_of_a_filter_is_left_to_git_itself(scope: str, attributes: str, where: str, ground: Ground) -> None:
    path = ground.top / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(attributes)
    git(ground.top, "add", "-A")
    git(ground.top, "commit", "-q", "--allow-empty", "-m", "filters")
    ground.base = ground.head()
    fleet = ground.store.read()
    assert fleet is not None
    ground.store.write(replace(fleet, base=ground.base))
    ground.bring("plain", {"plain.txt": "X\n"})
    ground.bring("a", {"data.bin": "X\n"})
    lfs(ground, scope)
    landed("plain")
    before = ground.untouched()
    said = refused("a")
    assert "the filter case, which may concern data.bin" in said
    assert ground.untouched() == before
    command = said.rpartition("this program runs none: ")[2].split()
    assert command[:3] == ["git", "merge", "--no-ff"]
    subprocess.run([*command, "-q", "-m", "x"], cwd=ground.top, check=True, capture_output=True)
    assert (ground.top / "data.bin").read_text() == "x\n", "this is what would have been missed"


def test_changed_attributes_are_left_to_git_itself_where_there_is_a_filter(ground: Ground) -> None:
    ground.bring("a", {"sub/.gitattributes": "* text=auto\n"})
    lfs(ground, "global")
    assert "the filter case, which may concern sub/.gitattributes" in refused("a")
    (ground.home / ".gitconfig").unlink()
    landed("a")


def test_line_ends_are_as_attributes_say(ground: Ground) -> None:
    (ground.top / ".gitattributes").write_text("*.bat text eol=crlf\n")
    git(ground.top, "add", "-A")
    git(ground.top, "commit", "-qm", "line ends")
    ground.base = ground.head()
    fleet = ground.store.read()
    assert fleet is not None
    ground.store.write(replace(fleet, base=ground.base))
    ground.bring("a", {"x.bat": "one\ntwo\n"})
    landed("a")
    assert (ground.top / "x.bat").read_bytes() == b"one\r\ntwo\r\n"
    assert git(ground.top, "status", "--porcelain") == ""
