"""A fleet from end to end: a real daemon and guests, tasks that end in every way there is, and everybody killed.

The agent is a program of the repository that runs its prompt as a script.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cli.fleet import state
from cli.fleet.crew import latest
from cli.fleet.state import Fleet, Store
from cli.fleet.task import verdict
from cli.running import Outcome
from sandboxd.client import Client
from tests.cli.person import COMMAND, Done, Person, at_terminal
from tests.conftest import counts, git, make_repository
from tests.sandboxd.fake_daemon import recorded
from tests.sandboxd.rig import Rig

PATIENCE_S = 120
PERSON = {"GIT_AUTHOR_NAME": "alice", "GIT_AUTHOR_EMAIL": "alice@localhost",
          "GIT_COMMITTER_NAME": "alice", "GIT_COMMITTER_EMAIL": "alice@localhost"}  # fmt: skip
AGENT = '#!/bin/sh\n[ "$1" = exec ] || exit 99\nexec sh -c "$2"\n'
WORKING = "echo saved > saved; git add saved; git commit -qm saved; echo more > more; echo ready; exec sleep 600"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("d"), "--network") as rig:
        yield rig


class Commander(Person):
    """A person with a repository, an agent in it, and fleets to run."""

    def __init__(self, home: Path, socket: Path) -> None:
        super().__init__(home, socket)
        self.config = home / ".config/sandbox"
        self.config.mkdir(parents=True)
        (self.config / "config.yaml").write_text("env:\n  PATH: /workspace/bin:/usr/bin:/bin\n")
        self.top = make_repository(home / "project")
        (self.top / "bin").mkdir()
        (self.top / "bin/codex").write_text(AGENT)
        (self.top / "bin/codex").chmod(0o755)
        git(self.top, "add", ".")
        git(self.top, "commit", "-qm", "An agent")
        self.store = Store.of(str(self.config), self.top / ".git")

    def write(self, *tasks: dict[str, Any], **more: Any) -> Path:
        path = self.home / "fleet.yaml"
        defaults = {"memory": "512m", "cpus": 1}
        path.write_text(json.dumps({"agent": "codex", "defaults": defaults, "tasks": list(tasks)} | more))
        return path

    def fleet(self, *words: str, **env: str) -> Done:
        return subprocess.run(
            [*COMMAND, "agent", "fleet", *words], cwd=self.top, env=self.environment(**PERSON, **env),
            stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=PATIENCE_S,
        )  # fmt: skip

    def begin(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*COMMAND, "agent", "fleet", "run", "-f", str(self.home / "fleet.yaml"), *words], cwd=self.top,
            env=self.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def record(self) -> Fleet:
        """The truth, as `status` tells it."""
        fleet = self.store.read()
        assert fleet is not None
        return state.truth(fleet, state.alive)

    def states(self) -> dict[str, str]:
        return {task.branch: task.state for task in self.record().tasks}

    def log(self, branch: str) -> str:
        task = self.record().task(branch)
        assert task is not None
        return (self.store.directory / "logs" / f"{task.name}.log").read_text()

    def until(self, told: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with suppress(AssertionError, OSError):
                if told():
                    return
            assert time.monotonic() < deadline, self.store.read()
            time.sleep(0.05)

    def until_ready(self, *branches: str) -> None:
        self.until(lambda: all("ready" in self.log(branch) for branch in branches))

    def refs(self) -> list[str]:
        return git(self.top, "for-each-ref", "--format=%(refname)").split()


@pytest.fixture
def person(rig: Rig, tmp_path: Path) -> Commander:
    return Commander(tmp_path, rig.socket)


@pytest.fixture
def client(rig: Rig) -> Client:
    return Client(str(rig.socket))


def ended(client: Client) -> None:
    """Nothing is left running but what a test keeps on purpose."""
    for sandbox in client.sandboxes():
        if sandbox.state != "terminated":
            client.delete(sandbox.id)


def test_every_way_a_task_ends(person: Commander, client: Client) -> None:
    person.write(
        {"branch": "good", "prompt": "echo x > x", "verify": "test -e x"},
        {"branch": "bad/agent", "prompt": "echo x > x; exit 3", "verify": "test -e x"},
        {"branch": "rejected", "prompt": "echo x > x", "verify": "test -e y"},
        {"branch": "HEAD", "prompt": "echo x > x; exit 7"},
        {"branch": "unchecked", "prompt": "echo x > x; git commit -qam a; echo y > y"},
        {"branch": "ninety", "prompt": "exit 90"},
        {"branch": "größe", "prompt": "true", "verify": "syntax ( error"},
    )
    (person.top / "hello.txt").write_text("edited\n")
    head, status = git(person.top, "rev-parse", "HEAD").strip(), git(person.top, "status", "--porcelain")
    done = person.fleet("run", "-f", "../fleet.yaml", "--json")
    assert done.returncode == 1 and done.stdout, done.stderr.decode()
    told = {task["branch"]: task for task in json.loads(done.stdout)["tasks"]}
    assert {branch: (task["state"], task["code"], task["commits"]) for branch, task in told.items()} == {
        "good": ("verified", 0, 1),
        "bad/agent": ("verified", 0, 1),
        "rejected": ("rejected", 90, 1),
        "HEAD": ("failed", 7, 1),
        "unchecked": ("verified", 0, 1),
        "ninety": ("failed", 90, 0),
        "größe": ("rejected", 90, 0),
    }
    assert "uncommitted changes stay here" in done.stderr.decode()
    assert f"what the tasks write meanwhile: {person.store.directory}/logs\n" in done.stderr.decode()
    assert told["bad/agent"]["detail"] == "" and "no verify command" in told["unchecked"]["detail"]
    assert "the agent ended with exit code 3" in person.log("bad/agent")
    back = ("HEAD", "bad/agent", "good", "rejected", "unchecked")
    assert person.refs() == ["refs/heads/main", *(f"refs/sandbox/fleet/{branch}" for branch in back)]
    assert git(person.top, "rev-parse", "HEAD").strip() == head and git(person.top, "status", "--porcelain") == status
    assert {git(person.top, "merge-base", "main", ref).strip() for ref in person.refs()} == {head}
    ours = [one for one in client.sandboxes() if one.name.startswith("fleet-") or "fleet.branch" in one.labels]
    assert {(one.labels["agent"], one.labels["fleet.branch"], one.state) for one in ours} == {
        ("codex", branch, "terminated") for branch in told
    }
    assert {path.stat().st_mode & 0o777 for path in person.store.directory.rglob("*") if path.is_file()} == {0o600}
    assert list((person.config / "sessions").glob("*.json")) == []
    table = person.fleet("status")
    assert table.returncode == 0 and table.stdout.decode().splitlines()[0].split()[:3] == ["BRANCH", "AGENT", "STATE"]
    again = json.loads(person.fleet("status", "--json").stdout)
    assert again["tasks"] == json.loads(done.stdout)["tasks"]


def test_all_verified_is_0_and_landed_with_one_command(person: Commander) -> None:
    person.write(*({"branch": name, "prompt": f"echo {name} > {name}", "verify": "true"} for name in "ab"))
    assert person.fleet("run", "-f", "../fleet.yaml").returncode == 0
    assert git(person.top, "rev-list", "--count", "main").strip() == "2", "no branch moved"
    done = person.fleet("land", "--all")
    assert done.returncode == 0, done.stderr.decode()
    assert git(person.top, "log", "--first-parent", "--format=%an %s").splitlines()[:2] == [
        "alice Merge fleet task b", "alice Merge fleet task a",
    ]  # fmt: skip
    assert (person.top / "a").exists() and (person.top / "b").exists()


def test_so_many_at_once_and_no_more_each_from_the_same_commit(person: Commander, client: Client) -> None:
    """HEAD moves meanwhile; so the later ones would start from another commit if each packed its own."""
    many = counts(5, 50)
    prompt = "git rev-parse HEAD; echo x > x; sleep 0.5"
    person.write(*({"branch": f"t{n}", "prompt": prompt} for n in range(many)), max_parallel=2)
    base = git(person.top, "rev-parse", "HEAD").strip()
    running = person.begin()
    most = 0
    while running.poll() is None:
        names = [one.name for one in client.sandboxes() if one.state != "terminated" and "fleet.branch" in one.labels]
        most = max(most, len(names))
        if most and git(person.top, "rev-parse", "HEAD").strip() == base:
            git(person.top, "commit", "-q", "--allow-empty", "-m", "meanwhile")
        time.sleep(0.05)
    assert running.wait() == 0, running.communicate()[1].decode()
    running.communicate()
    assert most == 2
    assert all(person.log(f"t{n}").startswith(f"{base}\n") for n in range(many))
    done = person.fleet("land", "t1")
    assert done.returncode == 1 and b"add --onto main" in done.stderr
    assert person.fleet("land", "t1", "--onto", "main").returncode == 0


def test_programs_of_the_repository_are_not_run_on_this_machine(person: Commander) -> None:
    """Python looks for modules in the current directory first, unless it is told not to."""
    mark = person.home / "RAN"
    for name in ("cli/__init__.py", "cli/fleet/__init__.py", "cli/fleet/task.py", "json.py", "sitecustomize.py"):
        (person.top / name).parent.mkdir(parents=True, exist_ok=True)
        (person.top / name).write_text(f"open({str(mark)!r}, 'w').close()\n")
    git(person.top, "add", ".")
    git(person.top, "commit", "-qm", "Modules")
    person.write({"branch": "a", "prompt": "echo x > x"})
    # As installed: by its file, not as `python -m` or `-c`, which look in the current directory themselves.
    script = person.home / "sandbox-cli"
    script.write_text("import sys\nfrom cli.__main__ import main\nsys.exit(main())\n")
    done = subprocess.run(
        [COMMAND[0], str(script), "agent", "fleet", "run", "-f", "../fleet.yaml"], cwd=person.top,
        env=person.environment(), capture_output=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    assert not mark.exists()
    subprocess.run([COMMAND[0], "-m", "cli.fleet.task"], cwd=person.top, env=person.environment(), check=False)
    assert mark.exists(), "Python would not have run it either: this proves nothing"


def test_a_prompt_and_the_environments_values_are_in_no_argument_and_no_record(
    person: Commander, rig: Rig, client: Client
) -> None:
    canary = f"canary-{os.urandom(8).hex()}"
    person.write({"branch": "a", "prompt": f": {canary}-prompt\n{WORKING}"})
    running = subprocess.Popen(
        [*COMMAND, "agent", "fleet", "run", "-f", "../fleet.yaml"], cwd=person.top,
        env=person.environment(OPENAI_API_KEY=f"{canary}-key"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    person.until_ready("a")
    task = person.record().tasks[0]
    seen = client.run(task.sandbox, ["sh", "-c", "tr '\\0' '\\n' < /proc/1/environ; env"]).stdout.decode()
    assert f"{canary}-key" in seen, "the agent has it"
    for pid in (running.pid, task.pid):
        assert canary.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    kept = [path for path in person.config.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]
    assert kept == []
    assert canary.encode() not in rig.log.read_bytes()
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=PATIENCE_S)


def test_ctrl_c_ends_the_agents_and_brings_back_what_there_is(person: Commander, client: Client) -> None:
    person.write(*({"branch": name, "prompt": WORKING} for name in "abc"), max_parallel=2)
    running = person.begin()
    person.until_ready("a", "b")
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 1, err.decode()
    assert "it was interrupted" in out.decode()
    assert person.states() == {"a": "failed", "b": "failed", "c": "unstarted"}
    assert git(person.top, "show", "refs/sandbox/fleet/a:more") == "more\n", "also what was not committed"
    assert person.refs() == ["refs/heads/main", "refs/sandbox/fleet/a", "refs/sandbox/fleet/b"]
    assert [line.split()[:3] for line in out.decode().splitlines()][3][:3] == ["c", "codex", "unstarted"]
    assert [one for one in client.sandboxes(["agent=codex"]) if one.state != "terminated"] == []
    assert b"was never started" in person.fleet("land", "c").stderr


def test_an_agent_that_hangs_is_ended_at_its_timeout_and_its_work_comes_back(person: Commander) -> None:
    person.write(
        {"branch": "a", "prompt": WORKING, "timeout": "1500ms"},
        {"branch": "b", "prompt": "echo x > x", "verify": "test -e x"},
        max_parallel=1,
    )
    done = person.fleet("run", "-f", "../fleet.yaml")
    assert done.returncode == 1 and person.states() == {"a": "failed", "b": "verified"}, done.stderr.decode()
    assert b"its timeout was over" in done.stdout
    assert "the command was ended: its time was over" in person.log("a")
    assert git(person.top, "show", "refs/sandbox/fleet/a:more") == "more\n", "also what was not committed"


def test_the_line_shows_what_was_written_last(tmp_path: Path) -> None:
    install, talk, none = tmp_path / "install", tmp_path / "talk", tmp_path / "none"
    install.write_text("sandbox-cli: waiting for sandboxd\nsandbox-cli: installing codex: 12 of 60 MiB\n")
    talk.write_bytes(b"x" * 100_000 + b"\nlast \x1b[2J\xff\r\xe2\x80\xae" + b"word \n\n \x07\n")
    logs = [("fix/" + "long" * 9, install), ("b\x1b", talk), ("c", none)]
    os.utime(install, (1, 1))
    assert latest(logs) == "b: last [2J\ufffd word"
    os.utime(talk, (0, 0))
    assert latest(logs) == "fix/longlonglon…: installing codex: 12 of 60 MiB"
    assert latest(logs[2:]) == latest([]) == ""


def test_at_a_terminal_one_line_tells_where_it_stands_and_ctrl_c_is_heard(person: Commander) -> None:
    path = person.write({"branch": "a", "prompt": WORKING}, {"branch": "b", "prompt": "true"})
    person.home, home = person.top, person.home
    environment = person.environment
    person.environment = lambda **more: environment(**more) | {"HOME": str(home)}  # type: ignore[method-assign]
    with at_terminal(person, "agent", "fleet", "run", "-f", str(path), rows=30, cols=80) as terminal:
        terminal.expect(b"fleet: 1 running, 1 verified", PATIENCE_S)
        terminal.expect(b"; a: ready", PATIENCE_S)
        terminal.type(b"\x03")
        terminal.expect(b"interrupted, bringing back what there is", PATIENCE_S)
        terminal.expect(b"BRANCH", PATIENCE_S)
        terminal.expect(b"failed", PATIENCE_S)
        assert terminal.wait() == 1


def test_a_second_fleet_is_told_who_has_the_repository(person: Commander) -> None:
    person.write({"branch": "a", "prompt": WORKING})
    running = person.begin()
    person.until_ready("a")
    second = person.fleet("run", "-f", "../fleet.yaml")
    assert second.returncode == 1
    assert f"another fleet is at work in this repository: process {running.pid}, since 20" in second.stderr.decode()
    assert person.states() == {"a": "running"}
    status = person.fleet("status")
    assert status.returncode == 0 and b"running" in status.stdout
    assert b"still at work" in person.fleet("land", "a", "--unverified").stderr
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=PATIENCE_S)
    assert person.states() == {"a": "failed"}
    assert git(person.top, "show", "refs/sandbox/fleet/a:saved") == "saved\n"


def test_a_fleet_that_is_killed_leaves_its_tasks_at_work_and_its_record_true(person: Commander) -> None:
    gate = "while [ ! -e /tmp/go ]; do sleep 0.1; done"
    person.write(
        {"branch": "a", "prompt": f"echo x > x; echo ready; {gate}", "verify": "test -e x"},
        {"branch": "b", "prompt": WORKING},
        max_parallel=1,
    )
    running = person.begin()
    person.until_ready("a")
    running.kill()
    running.communicate()
    assert person.states() == {"a": "running", "b": "unstarted"}
    second = person.fleet("run", "-f", "../fleet.yaml")
    name = person.record().tasks[0].name
    assert f"still at work: wait, or end them with sandbox-cli kill {name}" in second.stderr.decode()
    assert person.run("exec", name, "--", "touch", "/tmp/go").returncode == 0
    person.until(lambda: person.states()["a"] == "verified")
    assert person.fleet("land", "--all").returncode == 0
    assert (person.top / "x").exists()


@pytest.mark.parametrize(
    "after_s", [0.8, 2.0, *(pytest.param(after_s, marks=pytest.mark.soak) for after_s in (0.3, 0.5, 1.2, 1.5, 3.0))]
)
def test_a_fleet_killed_at_any_moment_tells_no_lie(person: Commander, client: Client, after_s: float) -> None:
    person.write(*({"branch": name, "prompt": "echo x > x"} for name in "abc"), max_parallel=2)
    running = person.begin()
    time.sleep(after_s)
    running.kill()
    running.communicate()
    told = person.fleet("status", "--json")
    if told.returncode:
        assert b"no fleet was run" in told.stderr
        return
    allowed = {"running", "unstarted", "verified", "waiting"}
    assert {task["state"] for task in json.loads(told.stdout)["tasks"]} <= allowed
    person.until(lambda: "running" not in person.states().values())
    assert set(person.states().values()) <= {"verified", "unstarted"}
    for task in person.record().tasks:
        there = f"refs/sandbox/fleet/{task.branch}" in person.refs()
        assert there == (task.state == "verified")
    person.write({"branch": "d", "prompt": "echo x > x"})
    assert person.fleet("run", "-f", "../fleet.yaml").returncode == 0, "nothing stands in the way of the next"


def test_a_task_that_is_killed_is_lost_and_its_work_can_be_got_back(person: Commander, client: Client) -> None:
    person.write({"branch": "a", "prompt": WORKING}, {"branch": "b", "prompt": "echo x > x"})
    running = person.begin()
    person.until_ready("a")
    task = person.record().task("a")
    assert task is not None
    os.kill(task.pid, signal.SIGKILL)
    out, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 1
    assert person.states() == {"a": "lost", "b": "verified"}
    assert "its process was ended by SIGKILL" in out.decode()
    assert "sandbox-cli recover" in err.decode()
    assert b"it was lost" in person.fleet("land", "a").stderr
    back = person.run("bring-back", task.sandbox, cwd=person.top)
    assert b"refs/sandbox/fleet/a" in back.stderr, back.stderr
    landed = person.fleet("land", "a", "--unverified")
    assert landed.returncode == 0, landed.stderr
    assert (person.top / "saved").read_text() == "saved\n" and (person.top / "more").exists()
    client.delete(task.sandbox)


def test_a_machine_that_dies_loses_its_task_and_no_other(person: Commander, rig: Rig, client: Client) -> None:
    person.write({"branch": "a", "prompt": WORKING}, {"branch": "b", "prompt": WORKING})
    running = person.begin()
    person.until_ready("a", "b")
    task = person.record().task("a")
    assert task is not None
    pid = recorded(rig.state / "sandboxes" / task.sandbox)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    person.until(lambda: person.states()["a"] == "lost")
    assert person.states()["b"] == "running"
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=PATIENCE_S)
    assert person.states() == {"a": "lost", "b": "failed"}
    assert git(person.top, "show", "refs/sandbox/fleet/b:saved") == "saved\n"
    ended(client)


def test_a_task_that_is_lost_names_its_last_checkpoint(person: Commander, client: Client) -> None:
    person.write({"branch": "a", "prompt": WORKING})
    running = person.begin("--checkpoint-every", "1s")
    person.until(lambda: "refs/sandbox/checkpoints" in " ".join(person.refs()))
    [task] = person.record().tasks
    client.delete(task.sandbox)
    _, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 1 and person.states() == {"a": "lost"}
    ref = f"refs/sandbox/checkpoints/{task.sandbox}"
    assert f"a: its last checkpoint is {ref}" in err.decode()
    assert ref in person.fleet("status").stderr.decode()
    assert json.loads(person.fleet("status", "--json").stdout)["tasks"][0]["checkpoint"] == ref
    assert ref in person.fleet("land", "a", "--unverified").stderr.decode()
    assert git(person.top, "show", f"{ref}:saved") == "saved\n"


@pytest.mark.parametrize(
    ("outcome", "checked", "told"),
    [
        (Outcome(0, "s"), True, ("verified", "")),
        (Outcome(0, "s"), False, ("verified", "it has no verify command: its agent's exit code was 0")),
        (Outcome(90, "s"), True, ("rejected", "its verify command failed")),
        (Outcome(90, "s"), False, ("failed", "exit code 90")),
        (Outcome(3, "s"), True, ("failed", "exit code 3")),
        (Outcome(130, "s", interrupted=True), True, ("failed", "it was interrupted")),
        (Outcome(0, "s", interrupted=True), False, ("failed", "it was interrupted")),
        (Outcome(0, "s", interrupted=True), True, ("verified", "")),
        (Outcome(143, "s", expired=True), True, ("failed", "its timeout was over")),
        (Outcome(0, "s", expired=True), False, ("failed", "its timeout was over")),
        (Outcome(1, "s", error="no"), True, ("failed", "its commits did not come back: no")),
        (Outcome(1, "s", error="x", died=True), True, ("lost", "its sandbox ended before its command did")),
        (Outcome(0, "s", left=True), True,
         ("verified", "some of its work is only in its sandbox, which is kept: see its log")),
    ],
)  # fmt: skip
def test_the_state_that_a_run_leaves_its_task_in(outcome: Outcome, checked: bool, told: tuple[str, str]) -> None:
    assert verdict(outcome, checked=checked) == told


def test_work_that_cannot_come_back_is_failed_and_the_sandbox_kept(person: Commander, client: Client) -> None:
    person.write({"branch": "a", "prompt": "echo x > x; rm -rf .git", "verify": "test -e x"})
    done = person.fleet("run", "-f", "../fleet.yaml")
    assert done.returncode == 1
    [task] = person.record().tasks
    assert task.state == "failed" and task.detail.startswith("its commits did not come back: ")
    assert client.get(task.sandbox).state == "running"
    ended(client)


def test_a_sandbox_of_that_name_that_still_runs_is_said(person: Commander, client: Client) -> None:
    person.write({"branch": "a", "prompt": "echo 1 > x"})
    assert person.fleet("run", "-f", "../fleet.yaml", "--keep").returncode == 0
    [kept] = person.record().tasks
    person.write({"branch": "a", "prompt": "echo 2 > x"}, {"branch": "b", "prompt": "echo x > x"})
    done = person.fleet("run", "-f", "../fleet.yaml")
    assert person.states() == {"a": "failed", "b": "verified"}
    first = git(person.top, "rev-parse", "refs/sandbox/fleet/a").strip()
    assert f"to keep them: git branch a-before {first}" in done.stderr.decode()
    assert f"a sandbox named {kept.name} is running" in done.stdout.decode()
    assert b"nothing to land: it brought nothing back" in person.fleet("land", "a", "--unverified").stderr
    ended(client)


def test_a_log_stops_growing_and_the_agent_does_not_notice(person: Commander) -> None:
    prompt = "head -c 80000000 /dev/zero | tr '\\0' x; echo x > x"
    person.write({"branch": "a", "prompt": prompt, "verify": "test -e x"})
    done = person.fleet("run", "-f", "../fleet.yaml")
    assert done.returncode == 0, done.stderr
    [log] = (person.store.directory / "logs").iterdir()
    assert (64 << 20) <= log.stat().st_size < (64 << 20) + 1000
    assert log.read_bytes()[-60:].endswith(b"this log is full --\n")


@pytest.mark.parametrize(
    ("prepare", "words", "said"),
    [
        pytest.param(lambda p: None, ("run", "-f", "no.yaml"), "no.yaml cannot be read: No such file", id="no file"),
        pytest.param(lambda p: p.write({"branch": "a", "prompt": ""}), ("run", "-f", "../fleet.yaml"),
                     "../fleet.yaml is not in order: tasks[0].prompt: it is missing", id="a file with a fault"),
        pytest.param(lambda p: p.write({"branch": "a", "prompt": "x"}),
                     ("run", "-f", "../fleet.yaml", "--profile", "x"), "--profile x", id="an unknown profile"),
        pytest.param(lambda p: p.write({"branch": "a", "prompt": "x"}),
                     ("run", "-f", "../fleet.yaml", "--profile", "prod"), "is the key allow", id="prod and no host"),
        pytest.param(lambda p: p.write({"branch": "a", "prompt": "x"}), ("run",), "agent fleet:", id="no file named"),
        pytest.param(lambda p: None, ("status",), "no fleet was run in this repository", id="no fleet"),
        pytest.param(lambda p: None, ("land", "--all"), "no fleet was run in this repository", id="nothing to land"),
        pytest.param(lambda p: None, ("land",), "agent fleet:", id="nothing named"),
        pytest.param(lambda p: git(p.top, "update-ref", "refs/sandbox/fleet/a/b", "HEAD") or p.write(
                     {"branch": "a", "prompt": "x"}), ("run", "-f", "../fleet.yaml"),
                     "refs/sandbox/fleet/a/b of an earlier fleet is in the way of the branch a", id="a ref in the way"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_is_made(
    prepare: Callable[[Commander], object], words: tuple[str, ...], said: str, person: Commander, client: Client
) -> None:
    prepare(person)
    before = {one.id for one in client.sandboxes()}
    done = person.fleet(*words)
    assert done.returncode == 1
    [line] = done.stderr.decode().splitlines()
    assert line.startswith("sandbox-cli: ") and said in line
    assert {one.id for one in client.sandboxes()} == before


def test_outside_a_repository(person: Commander) -> None:
    person.write({"branch": "a", "prompt": "x"})
    for words, said in ((("run", "-f", "fleet.yaml"), "start it inside one"), (("status",), "ask inside one"),
                        (("land", "--all"), "land inside one")):  # fmt: skip
        done = person.run("agent", "fleet", *words)
        assert done.returncode == 1 and said in done.stderr.decode()
