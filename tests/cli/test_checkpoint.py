"""Checkpoints: what a running agent has done is in the person's repository, and the agent notices nothing."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli import checkpoint, duration, repository, session
from cli.repository import Repository
from cli.session import Session
from sandboxd.client import Client, Create
from sandboxd.errors import ApiError, SandboxError
from tests.cli.person import PATIENCE_S, Person
from tests.conftest import counts, git, make_repository
from tests.sandboxd.rig import Rig

REF = "refs/sandbox/checkpoints/"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("d")) as rig:
        yield rig


@pytest.fixture(scope="module")
def sandbox(rig: Rig) -> str:
    return Client(str(rig.socket)).create(Create(name="agent")).id


class Agent:
    """One who works in /workspace of a sandbox; `checkpoint` takes one, as the command line would."""

    def __init__(self, rig: Rig, sandbox: str, where: Path) -> None:
        self.client, self.sandbox, self.config = Client(str(rig.socket)), sandbox, where / "config"
        self.top = make_repository(where / "project")
        found = repository.discover(self.top)
        assert found is not None
        self.repo: Repository = found
        self.record = Session(sandbox, str(rig.socket), str(self.top), found.head_commit, "job")
        session.save(self.config, self.record)
        git(self.top, "bundle", "create", "-q", str(where / "head"), "HEAD")
        bundle = (where / "head").read_bytes()
        self.client.run(sandbox, ["find", "/workspace", "-mindepth", "1", "-delete"])
        self.client.put_workspace(sandbox, "sandbox", [bundle], len(bundle))

    def does(self, script: str, cwd: str = "/workspace") -> str:
        identity = {f"GIT_{who}_{what}": "agent" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        result = self.client.run(self.sandbox, ["sh", "-ec", script], cwd=cwd, env=identity)
        assert result.exit_code == 0, result.stderr
        return result.stdout.decode()

    def checkpoint(self) -> bool:
        """Whether one was taken."""
        before = self.record.checkpoint
        self.record = checkpoint.take(self.client, self.config, self.record, self.repo)
        return self.record.checkpoint != before

    def show(self, path: str) -> str:
        return git(self.top, "show", f"{REF}{self.sandbox}:{path}")

    def files(self) -> list[str]:
        return git(self.top, "ls-tree", "-r", "--name-only", f"{REF}{self.sandbox}").split()


@pytest.fixture
def agent(rig: Rig, sandbox: str, tmp_path: Path) -> Agent:
    return Agent(rig, sandbox, tmp_path)


def test_every_kind_of_work_is_in_it_and_the_agent_s_own_state_is_as_it_was(agent: Agent) -> None:
    agent.does("""
        echo ignored >.gitignore; echo x >ignored; echo forced >forced.o; echo '*.o' >>.gitignore
        git add .gitignore; git add -f forced.o; git commit -qm Two
        echo staged >staged; git add staged; echo more >>staged; echo new >'a b'; rm hello.txt; mkdir d; echo d >d/d
    """)
    look = "git status --porcelain; git for-each-ref refs/heads; cat .git/HEAD; git ls-files -s; ls .git"
    before = agent.does(look)
    refs = git(agent.top, "for-each-ref")
    assert agent.checkpoint()
    assert agent.does(look) == before
    assert git(agent.top, "ls-tree", "-rz", "--name-only", f"{REF}{agent.sandbox}").split("\0")[:-1] == [
        ".gitignore", "a b", "d/d", "forced.o", "staged",
    ]  # fmt: skip
    assert agent.show("staged") == "staged\nmore\n"
    head = agent.does("git rev-parse HEAD").strip()
    assert git(agent.top, "rev-parse", f"{REF}{agent.sandbox}^@").split() == [head]
    assert git(agent.top, "for-each-ref") == refs + git(agent.top, "for-each-ref", REF)
    assert git(agent.top, "status", "--porcelain") == ""
    assert git(agent.top, "fsck", "--strict", "--no-dangling") == ""
    written = session.load(agent.config, agent.sandbox)
    assert written == agent.record
    assert (written.checkpoint, bool(written.checkpoint_at)) == (
        git(agent.top, "rev-parse", f"{REF}{agent.sandbox}").strip(), True,
    )  # fmt: skip


def test_what_is_as_it_was_is_not_fetched(agent: Agent) -> None:
    packs = agent.top / ".git/objects/pack"
    assert not agent.checkpoint()
    agent.does("echo 1 >f")
    assert agent.checkpoint()
    had = sorted(packs.iterdir())
    assert not agent.checkpoint()
    agent.does("touch f hello.txt; git add f")
    assert not agent.checkpoint()
    assert sorted(packs.iterdir()) == had
    agent.does("git commit -qm f")
    assert agent.checkpoint(), "a new commit with the same files is news"
    agent.does("git reset -q --hard HEAD~1")
    assert agent.checkpoint(), "and so is work that was undone"
    assert agent.files() == ["hello.txt"]


def test_one_that_never_arrived_is_fetched_by_the_next(agent: Agent) -> None:
    agent.does("echo 1 >f")
    assert agent.checkpoint()
    agent.record = session.update(agent.config, agent.sandbox, checkpoint="") or agent.record
    git(agent.top, "update-ref", "-d", f"{REF}{agent.sandbox}")
    assert agent.checkpoint()
    assert agent.show("f") == "1\n"


def test_a_change_within_the_second_of_the_index_is_seen(agent: Agent) -> None:
    for number in range(counts(2, 20)):
        agent.does(f"echo {number} >f; git add f; echo {9 - number % 9} >f")
        agent.checkpoint()
        assert agent.show("f") == f"{9 - number % 9}\n"


REBASING = """
    git checkout -qb side; echo side >hello.txt; git commit -qam side; git checkout -q sandbox
    echo ours >hello.txt; echo on-branch >kept; git add kept; git commit -qam ours; git rebase side || true
    test -d .git/rebase-merge
"""


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        pytest.param(REBASING, {"hello.txt": "<<<<<<<"}, id="a rebase stopped at a conflict"),
        pytest.param("touch .git/index.lock; echo x >f", {"f": "x"}, id="a git was killed and left its lock"),
        pytest.param("rm .git/index; echo x >f", {"f": "x"}, id="there is no index"),
        pytest.param("git checkout -q --orphan new; git rm -qrf .; echo x >f", {"f": "x"}, id="an unborn branch"),
        pytest.param("git checkout -q --detach; echo x >f", {"f": "x"}, id="a detached HEAD"),
        pytest.param("git init -q inner; echo x >f", {"f": "x"}, id="a repository without a commit inside"),
        pytest.param("git config core.splitIndex true; echo y >y; git add y; echo x >f", {"f": "x", "y": "y"},
                     id="a split index"),
        pytest.param("ln -sf /bin/false .git/hooks/reference-transaction; git config commit.gpgSign true; echo x >f",
                     {"f": "x"}, id="hooks and signing that fail"),
        pytest.param("ln -s /etc/passwd link; mkfifo fifo; echo x >f; chmod 0 f; echo y >g", {"g": "y"},
                     id="what cannot be read"),
        pytest.param("git gc -q --prune=now; echo x >f; git pack-refs --all", {"f": "x"}, id="after a gc"),
    ],
)  # fmt: skip
def test_whatever_state_the_agent_s_repository_is_in(agent: Agent, script: str, wanted: dict[str, str]) -> None:
    agent.does(script)
    look = "git status --porcelain 2>&1 | sort; git for-each-ref refs/heads; cat .git/HEAD; ls .git/*.lock 2>&1 || true"
    before = agent.does(look)
    assert agent.checkpoint()
    assert agent.does(look) == before
    for path, text in wanted.items():
        assert agent.show(path).startswith(text)
    assert not agent.checkpoint()


def test_commits_of_the_branch_that_the_head_has_left_are_in_it(agent: Agent) -> None:
    agent.does(REBASING)
    assert agent.checkpoint()
    tip = agent.does("git rev-parse refs/heads/sandbox").strip()
    assert git(agent.top, "rev-parse", f"{REF}{agent.sandbox}^2").strip() == tip
    assert git(agent.top, "show", f"{tip}:kept") == "on-branch\n"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        pytest.param("rm -rf .git", "no git repository any more", id="the repository is gone"),
        pytest.param("rm -rf .git; ln -s / .git", "no git repository any more", id="a link to /"),
        pytest.param("rm -rf .git; git init -q -b sandbox; echo x >f", "base|revision|bundle|commit",
                     id="another one took its place"),
        pytest.param("git update-ref refs/sandbox/checkpoint/x HEAD; echo x >f", "cannot be committed",
                     id="another ref is in the way"),
    ],
)  # fmt: skip
def test_where_none_can_be_taken_that_is_an_error_and_the_last_one_stays(agent: Agent, script: str, why: str) -> None:
    agent.does("echo x >first")
    assert agent.checkpoint()
    agent.does("git update-ref -d refs/sandbox/checkpoint")
    agent.does(script)
    with pytest.raises((SandboxError, ApiError), match=why) as caught:
        agent.checkpoint()
    assert str(caught.value).isprintable()
    assert agent.show("first") == "x\n"
    assert session.load(agent.config, agent.sandbox) == agent.record


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        pytest.param("update-ref refs/sandbox/checkpoint HEAD:hello.txt", "not a commit|bundle|revision", id="a blob"),
        pytest.param("symbolic-ref refs/sandbox/checkpoint refs/heads/sandbox", "brings the ref", id="a symbolic ref"),
    ],
)
def test_what_the_guest_makes_of_its_ref_is_checked_here(agent: Agent, plant: str, why: str) -> None:
    agent.does("echo x >f; git add f; git commit -qm f")
    agent.does(f"git {plant}".replace("HEAD:hello.txt", "$(git rev-parse HEAD:hello.txt)"))
    before = git(agent.top, "for-each-ref")
    try:
        agent.checkpoint()
    except (SandboxError, ApiError) as error:
        assert re.search(why, str(error)), error
        assert git(agent.top, "for-each-ref") == before
    else:
        assert agent.show("f") == "x\n"
    assert git(agent.top, "fsck", "--strict", "--no-dangling") == ""


def test_while_the_agent_commits_without_pause(agent: Agent, rig: Rig) -> None:
    loop = "n=0; while [ ! -e stop ]; do n=$((n+1)); echo $n >n; git add n; git commit -qm $n; git gc -q --auto; done"
    identity = {f"GIT_{who}_{what}": "agent" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    process = agent.client.start(agent.sandbox, ["sh", "-ec", loop], cwd="/workspace", env=identity)
    for _ in range(counts(3, 50)):
        agent.checkpoint()
    agent.does("touch stop")
    deadline = time.monotonic() + PATIENCE_S
    while (ended := agent.client.process(agent.sandbox, process.pid)).state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert ended.exit_code == 0, "the agent's git never failed"
    assert agent.checkpoint()
    assert agent.show("n") == agent.does("cat n")
    assert git(agent.top, "fsck", "--strict", "--no-dangling") == ""


def test_two_at_once(agent: Agent, rig: Rig) -> None:
    agent.does("echo x >f")
    first = checkpoint.Checkpoints(agent.client, agent.config, agent.record, agent.repo, 0.05)
    second = checkpoint.Checkpoints(agent.client, agent.config, agent.record, agent.repo, 0.05)
    with first, second:
        deadline = time.monotonic() + PATIENCE_S
        while not (first.record.checkpoint and second.record.checkpoint):
            assert time.monotonic() < deadline, (first.fault, second.fault)
            time.sleep(0.05)
    assert (first.fault, second.fault) == ("", "")
    assert agent.show("f") == "x\n"


def test_a_failure_is_told_only_where_no_success_followed(agent: Agent) -> None:
    taken = checkpoint.Checkpoints(agent.client, agent.config, agent.record, agent.repo, 0.05)

    def until(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, taken.fault
            time.sleep(0.02)

    with taken:
        agent.does("mv .git away; echo x >f")
        until(lambda: taken.fault)
        agent.does("mv away .git")
        until(lambda: taken.record.checkpoint)
        assert taken.told() == ()
        agent.does("mv .git away")
        until(lambda: taken.fault.endswith("any more"))
    assert taken.told() == (
        "the last checkpoint failed: /workspace in the sandbox is no git repository any more; "
        f"the last one is of {taken.record.checkpoint_at}",
    )
    agent.does("mv away .git")


def test_nothing_new_could_be_read_is_not_nothing_new(agent: Agent) -> None:
    agent.does("git config filter.x.clean false; git config filter.x.required true; echo '* filter=x' >.gitattributes")
    with pytest.raises(SandboxError, match=r"git could not read what is new: .*filter"):
        agent.checkpoint()


def test_a_record_that_was_forgotten_meanwhile_stays_so(agent: Agent) -> None:
    agent.does("echo x >f")
    session.forget(agent.config, agent.sandbox)
    with pytest.raises(SandboxError, match="record is gone"):
        agent.checkpoint()
    assert session.load(agent.config, agent.sandbox) is None


# The command line


@pytest.fixture
def person(rig: Rig, tmp_path: Path) -> Person:
    make_repository(tmp_path / "project")
    return Person(tmp_path, rig.socket)


def records(person: Person) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in (person.home / ".config/sandbox/sessions").glob("*.json")]


def until_checkpoint(person: Person, patience_s: float = PATIENCE_S) -> dict[str, object]:
    deadline = time.monotonic() + patience_s
    while not (found := [one for one in records(person) if one["checkpoint"]]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found[0]


def test_a_run_takes_them_says_nothing_and_drops_them_when_its_commits_came_back(person: Person) -> None:
    project = person.home / "project"
    script = "echo x >x; until [ -e stop ]; do sleep 0.1; done; rm stop"
    process = person.start("run", "--name=ck", "--checkpoint-every=1s", "--", "sh", "-c", script, cwd=project)
    record = until_checkpoint(person)
    ref = f"{REF}{record['sandbox']}"
    assert git(project, "show", f"{ref}:x") == "x\n"
    person.run("exec", "ck", "--", "touch", "/workspace/stop")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, b"")
    assert b"checkpoint" not in err
    assert git(project, "for-each-ref", "--format=%(refname)").split() == ["refs/heads/main", "refs/sandbox/ck"]
    assert records(person) == []


def test_what_the_run_undid_stays_in_its_checkpoint_and_that_is_said(person: Person) -> None:
    project = person.home / "project"
    script = "echo x >x; until [ -e stop ]; do sleep 0.1; done; rm stop x"
    process = person.start("run", "--name=un", "--checkpoint-every=1s", "--", "sh", "-c", script, cwd=project)
    record = until_checkpoint(person)
    process_ref = f"{REF}{record['sandbox']}"
    person.run("exec", "un", "--", "touch", "/workspace/stop")
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert f"the checkpoint of {record['checkpoint_at']} is {process_ref}" in err.decode()
    assert git(project, "for-each-ref", "--format=%(refname)", "refs/sandbox").split() == [process_ref]


def test_attach_takes_them_for_a_detached_run(person: Person) -> None:
    project = person.home / "project"
    started = person.run("run", "-d", "--name=bg", "--", "sh", "-c", "echo x >x; exec sleep 60", cwd=project)
    ref = started.stdout.decode().strip()
    process = person.start("attach", "--checkpoint-every=1s", "bg")
    until_checkpoint(person)
    assert git(project, "show", f"{REF}{ref}:x") == "x\n"
    process.kill()
    process.wait()
    done = person.run("kill", "bg")
    assert f"stays: {REF}{ref}" in done.stderr.decode()
    assert git(project, "show", f"{REF}{ref}:x") == "x\n"


def test_attach_to_what_no_run_has_made(person: Person, sandbox: str) -> None:
    done = person.run("attach", "--checkpoint-every=1s", sandbox)
    assert (done.returncode, done.stderr.decode()) == (
        1, f"sandbox-cli: no run from this account put a repository into {sandbox}\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-d", "--checkpoint-every=5m"), "nobody would take them of a detached run"),
        (("--checkpoint-every=soon",), "--checkpoint-every soon: not a length of time such as 30s, 5m or 1h30m"),
        (("--checkpoint-every=10ms",), "at least 1s, or 0 for never"),
        (("--checkpoint-every=5m", "--no-workspace"), "nothing to take one of"),
    ],
)
def test_refused_before_there_is_a_sandbox(person: Person, rig: Rig, flags: tuple[str, ...], said: str) -> None:
    before = {one.id for one in Client(str(rig.socket)).sandboxes()}
    done = person.run("run", *flags, "--", "true", cwd=person.home / "project")
    assert done.returncode == 1
    assert said in done.stderr.decode()
    assert {one.id for one in Client(str(rig.socket)).sandboxes()} == before


def test_never_is_no_contradiction_of_detach(person: Person) -> None:
    done = person.run("run", "-d", "--checkpoint-every=0", "--", "true", cwd=person.home / "project")
    assert done.returncode == 0
    person.run("kill", done.stdout.decode().strip())


@pytest.mark.parametrize(
    ("text", "s"), [("0", 0), ("30s", 30), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("500ms", 0.5), ("1m5s", 65)]
)
def test_lengths_of_time(text: str, s: float) -> None:
    assert duration.seconds("--every", text) == s


@pytest.mark.parametrize("text", ["", "5", "m", "-1s", "1s ", "1d", "1e3s", "٣s", "1.s", "s5", "1" * 10 + "s", "1s\n"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(SandboxError, match=r"--every .*: not a length of time") as caught:
        duration.seconds("--every", text)
    assert str(caught.value).isprintable()
