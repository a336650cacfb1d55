"""A run that is cut off at any of its steps: `recover` tells the truth, and what was checkpointed is got back."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli import fate, session
from cli import recover as recovery
from cli.fate import Held, Seen, State
from cli.session import Session
from sandboxd.client import Client, Create
from tests.cli.person import PATIENCE_S, Person, at_terminal
from tests.cli.rawserver import ReadRequest, Wait, serving
from tests.cli.toll import WORDS, Toll, toll_before
from tests.conftest import git, make_repository
from tests.sandboxd.rig import Rig

REF = "refs/sandbox/checkpoints/"
COMMAND = ("sh", "-c", "echo work >work; until [ -e .git/stop ]; do sleep 0.1; done")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rec-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def rig(place: Path) -> Iterator[Rig]:
    with Rig(place) as rig:
        yield rig


@pytest.fixture
def toll(rig: Rig, place: Path) -> Iterator[Toll]:
    path = place / "toll.sock"
    path.unlink(missing_ok=True)
    with toll_before(path, rig.socket) as toll:
        yield toll
    for one in Client(str(rig.socket)).sandboxes():
        if one.state != "terminated":
            Client(str(rig.socket)).delete(one.id)


@pytest.fixture
def person(toll: Toll, tmp_path: Path) -> Person:
    make_repository(tmp_path / "project")
    return Person(tmp_path, toll.path)


def recover(person: Person, *flags: str) -> list[dict[str, Any]]:
    project = person.home / "project"
    before = git(project, "for-each-ref") + git(project, "count-objects", "-v")
    done = person.run("recover", "--json", *flags, cwd=project)
    assert done.returncode == 0, done.stderr
    assert git(project, "for-each-ref") + git(project, "count-objects", "-v") == before
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def records(person: Person) -> list[dict[str, Any]]:
    files = (person.home / ".config/sandbox/sessions").glob("*.json")
    return [json.loads(path.read_text()) for path in files]


def until(condition: Callable[[], object], why: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.03)


def alive(rig: Rig) -> list[str]:
    return [one.id for one in Client(str(rig.socket)).sandboxes() if one.state != "terminated"]


EARLY = WORDS[: WORDS.index("gather")]
KILLED = ("asked", "answered")


def cases() -> list[Any]:
    """Every step of a run, before the daemon hears of it and before the command line hears of its answer. That the
    command line is killed before any of them is in every `make test`; of the rest a part, with each way to end."""
    found = []
    for word in WORDS:
        for moment in KILLED:
            for victim in ("KILL", "TERM", "HUP", "daemon", "both"):
                quick = (victim, moment) == ("KILL", "asked") or (victim, word, moment) in QUICK
                marks = () if quick else (pytest.mark.soak,)
                what = f"{victim} when {word} is {moment}"
                found.append(pytest.param(word, moment, victim, id=what, marks=marks))
    return found


QUICK = {
    ("KILL", "create", "answered"), ("KILL", "checkpoint's bundle", "answered"), ("KILL", "bundle", "answered"),
    ("TERM", "create", "answered"), ("HUP", "checkpoint's bundle", "answered"),
    ("daemon", "create", "asked"), ("daemon", "checkpoint's bundle", "asked"), ("both", "gather", "answered"),
}  # fmt: skip


@pytest.mark.parametrize(("word", "moment", "victim"), cases())
def test_cut_off(rig: Rig, toll: Toll, person: Person, word: str, moment: str, victim: str) -> None:
    project = person.home / "project"
    toll.stop(word, moment)
    process = person.start("run", "--name=job", "--checkpoint-every=1s", "--", *COMMAND, cwd=project)

    def said() -> object:
        return toll.seen, process.poll()

    if word not in EARLY:
        until(lambda: any(record["checkpoint"] for record in records(person)), said)
        Client(str(rig.socket)).write_file("job", "/workspace/.git/stop", b"")
    until(toll.reached.is_set, said)
    if victim in ("KILL", "both"):
        process.kill()
    if victim in ("daemon", "both"):
        rig.kill()
    if victim in ("TERM", "HUP"):
        process.send_signal(getattr(signal, f"SIG{victim}"))
        if process.poll() is None and word in EARLY and word not in ("attach", "checkpoint", "checkpoint's bundle"):
            time.sleep(0.2)  # so that it is the signal that is heard first
    toll.release()
    if victim == "daemon":
        until(lambda: process.poll() is not None, said)
    process.communicate(timeout=PATIENCE_S)
    if victim in ("daemon", "both"):
        rig.start()

    assert_truth(rig, person)


def assert_truth(rig: Rig, person: Person) -> None:
    """Whatever has happened: what `recover` says is so, what it advises works, and nothing is left that it hides."""
    project, client = person.home / "project", Client(str(rig.socket))
    until(lambda: all(client.get(one).state != "pending" for one in alive(rig)))
    found = recover(person)
    assert sorted(one["sandbox"] for one in found if one["state"] == "running") == sorted(alive(rig))
    for one in found:
        assert one["state"] in ("running", "gone", "never made"), one
    checkpointed = git(project, "for-each-ref", "--format=%(refname)", REF).split()
    assert set(checkpointed) <= {one["checkpoint_ref"] for one in found}
    for ref in checkpointed:
        assert git(project, "show", f"{ref}:work") == "work\n"
    for one in found:
        if one["state"] == "running" and client.processes(one["sandbox"]):
            until(lambda: client.run("job", ["test", "-e", "/workspace/work"]).exit_code == 0)
            [hint] = [step["command"] for step in one["next"] if "bring-back" in step["command"]]
            done = person.run(*hint.split()[1:], cwd=project)
            assert done.returncode == 0, done.stderr
            assert git(project, "show", "refs/sandbox/job:work") == "work\n"
            [after] = recover(person)
            assert "what came back earlier is refs/sandbox/job" in after["said"]
    for ref in alive(rig):
        client.delete(ref)
    for one in recover(person):
        if one["state"] == "never made":
            assert not checkpointed
            continue
        assert one["state"] == "gone"
        assert (one["checkpoint_ref"] in checkpointed) if one["checkpoint_ref"] else not checkpointed
        assert ("its work is lost" in one["said"]) == (not one["checkpoint_ref"] and not one["brought_back"]), one
        assert person.run("recover", "forget", one["sandbox"]).returncode == 0
    assert (recover(person), records(person)) == ([], [])
    assert git(project, "for-each-ref", "--format=%(refname)", REF).split() == checkpointed
    assert git(project, "for-each-ref", "--format=%(refname)", "refs/heads") == "refs/heads/main\n"
    assert git(project, "fsck", "--strict", "--no-dangling") == ""


def start(person: Person, *flags: str, command: tuple[str, ...] = COMMAND) -> tuple[Any, str]:
    """A run whose command is at work, and its sandbox."""
    known = {record["sandbox"] for record in records(person)}
    process = person.start("run", *flags, "--", *command, cwd=person.home / "project")
    new: list[str] = []

    def is_at_work() -> bool:
        new[:] = [one["sandbox"] for one in records(person) if one["sandbox"] and one["sandbox"] not in known]
        return bool(new and Client(str(person.socket)).processes(new[0]))

    until(is_at_work, process.poll)
    return process, new[0]


def checkpoint_of(person: Person, sandbox: str) -> str:
    def found() -> str:
        return "".join(one["checkpoint"] for one in records(person) if one["sandbox"] == sandbox)

    until(found)
    return found()


def test_what_it_prints(person: Person, rig: Rig) -> None:
    project = person.home / "project"
    nothing = person.run("recover", cwd=project)
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (
        0, b"", b"sandbox-cli: every run is known to have ended here; all repositories: --all\n"
    )  # fmt: skip
    process, sandbox = start(person, "--name=job", "--checkpoint-every=1s")
    commit = checkpoint_of(person, sandbox)
    process.kill()
    process.wait()
    [record] = records(person)
    head = f"{sandbox} job, started {record['started']} in {project}"
    at = f"  its checkpoint of {record['checkpoint_at']} is {REF}{sandbox}"
    assert person.run("recover", cwd=project).stdout.decode().splitlines() == [
        head,
        "  its sandbox runs, its command is at work",
        at,
        f"  bring its commits back: sandbox-cli bring-back {sandbox}",
        f"  end it: sandbox-cli kill {sandbox}",
    ]
    Client(str(rig.socket)).delete(sandbox)
    base = record["base"][:12]
    assert person.run("recover", cwd=project).stdout.decode().splitlines() == [
        head,
        "  its sandbox is gone",
        at,
        f"  review: git log {base}..{REF}{sandbox}",
        f"  or: git diff {base} {REF}{sandbox}",
        f"  merge: git merge {REF}{sandbox}",
        f"  done with it: sandbox-cli recover forget {sandbox}",
    ]
    late = person.run("bring-back", sandbox, cwd=project)
    assert late.returncode == 1
    assert f"the checkpoint of {record['checkpoint_at']} is {REF}{sandbox}" in late.stderr.decode()
    git(project, "merge", "-q", f"{REF}{sandbox}")
    assert (project / "work").read_text() == "work\n"
    git(project, "update-ref", "-d", f"{REF}{sandbox}")
    lines = person.run("recover", cwd=project).stdout.decode().splitlines()
    assert f"  the ref of its checkpoint of {record['checkpoint_at']} was deleted: git branch NAME {commit}" in lines


def test_the_terminal_is_closed(person: Person, rig: Rig) -> None:
    project = person.home / "project"
    command = ("sh", "-c", "echo work >work; cat")
    with at_terminal(person, "run", "--project=project", "--name=job", "--", *command) as shown:
        until(lambda: any(one["sandbox"] for one in records(person)))
        until(lambda: Client(str(rig.socket)).run("job", ["test", "-e", "/workspace/work"]).exit_code == 0)
        shown.until(raw=True)
        os.close(shown.slave)
        os.close(shown.master)
        shown.slave = shown.master = -1
        until(lambda: shown.process.poll() is not None)
    assert git(project, "show", "refs/sandbox/job:work") == "work\n"
    assert (recover(person), alive(rig)) == ([], [])


def test_a_detached_run_is_one_that_its_command_line_left(person: Person, rig: Rig) -> None:
    done = person.run("run", "-d", "--name=bg", "--", "sh", "-c", "exit 3", cwd=person.home / "project")
    sandbox = done.stdout.decode().strip()
    until(lambda: Client(str(rig.socket)).processes(sandbox)[0].exit_code == 3)
    [one] = recover(person)
    assert (one["state"], one["said"]) == ("running", ["its sandbox runs, its command ended with 3"])


def test_what_a_bring_back_found_is_what_is_said_of_it(person: Person, rig: Rig) -> None:
    project = person.home / "project"
    sandbox = person.run("run", "-d", "--name=bg", "--", "sleep", "600", cwd=project).stdout.decode().strip()
    git(project, "update-ref", "refs/sandbox/bg", "HEAD")  # of an earlier run of that name
    assert person.run("bring-back", "bg").returncode == 0
    [one] = recover(person)
    assert one["said"][1:] == ["when it was last asked for its commits there was nothing new"]
    Client(str(rig.socket)).run(sandbox, ["touch", "/workspace/work"])
    assert person.run("bring-back", "bg", "--name=other").returncode == 0
    [one] = recover(person)
    assert one["said"][1:] == ["what came back earlier is refs/sandbox/other"]
    Client(str(rig.socket)).delete(sandbox)
    late = person.run("bring-back", sandbox)
    assert "what it brought back is refs/sandbox/other" in late.stderr.decode()


def test_two_command_lines_on_one_run(person: Person, rig: Rig) -> None:
    """One brings back and one asks while a third is at work, and ends."""
    project = person.home / "project"
    process, sandbox = start(person, "--name=job", "--checkpoint-every=1s")
    until(lambda: Client(str(rig.socket)).run("job", ["test", "-e", "/workspace/work"]).exit_code == 0)
    assert person.run("bring-back", sandbox).returncode == 0
    assert [one["state"] for one in person_json(person, "--all")] == ["running"]
    at_once = [person.start("bring-back", sandbox), person.start("recover", "--all", "--json")]
    Client(str(rig.socket)).write_file("job", "/workspace/.git/stop", b"")
    at_once += [person.start("bring-back", sandbox), person.start("bring-back", sandbox)]
    for one in at_once:
        _, said = one.communicate(timeout=PATIENCE_S)
        assert b"Traceback" not in said
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert git(project, "show", "refs/sandbox/job:work") == "work\n"
    assert (records(person), alive(rig)) == ([], [])
    assert git(project, "fsck", "--strict", "--no-dangling") == ""


def test_a_run_that_is_starting_is_left_alone(person: Person, rig: Rig, toll: Toll) -> None:
    toll.stop("create", "asked")
    process = person.start("run", "--name=job", "--", "true", cwd=person.home / "project")
    until(toll.reached.is_set)
    [one] = recover(person)
    assert (one["state"], one["next"]) == ("starting", [])
    [record] = records(person)
    forgotten = person.run("recover", "forget", f"starting-{record['run']}")
    assert (forgotten.returncode, b"is being started by a sandbox-cli that is at work" in forgotten.stderr) == (1, True)
    toll.release()
    process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, recover(person), records(person)) == (0, [], [])


# What needs no sandbox


@pytest.fixture
def somebody(tmp_path: Path) -> Person:
    make_repository(tmp_path / "project")
    return Person(tmp_path, tmp_path / "none.sock")


def record_of(person: Person, sandbox: str, context: str | None = None, **more: Any) -> Session:
    project = person.home / "project"
    base = git(project, "rev-parse", "HEAD").strip()
    where = context or f"unix://{person.socket}"
    record = Session(sandbox, where, str(project), base, sandbox, started="2030-01-01T00:00:00Z")
    record = dataclasses.replace(record, **more)
    session.save(person.home / ".config/sandbox", record)
    return record


def test_every_sandboxd_is_asked_for_five_seconds_and_all_at_once(somebody: Person, tmp_path: Path) -> None:
    silent = [tmp_path / f"s{number}" for number in range(3)]
    with (
        serving(silent[0], [], [Wait(7)]) as one, serving(silent[1], [], [Wait(7)]) as two,
        serving(silent[2], [], [ReadRequest(), b"HTTP/1.1 200 OK\r\n", Wait(7)]) as three,
    ):
        for server in (one, two, three):
            record_of(somebody, Path(server.path).name, f"unix://{server.path}")
        record_of(somebody, "nobody", f"unix://{tmp_path}/nobody")
        record_of(somebody, "no-token", "https://127.0.0.1:1")
        began = time.monotonic()
        found = {each["sandbox"]: each for each in recover(somebody)}
        assert time.monotonic() - began < 14, "three times five seconds"
    assert {each["state"] for each in found.values()} == {"unreachable"}
    assert found["s0"]["said"] == ["its sandboxd cannot be asked: no answer within 5 s"]
    assert "No such file" in found["nobody"]["said"][0]
    assert "SANDBOX_TOKEN_FILE" in found["no-token"]["said"][0]
    assert {step["command"] for step in found["s1"]["next"]} == {"sandbox-cli recover"}


def test_a_run_that_is_made_while_others_are_asked_is_not_called_lost(somebody: Person, tmp_path: Path) -> None:
    """What was listed before it was made has no sandbox of its run, and its writer is done with the first record."""
    config = somebody.home / ".config/sandbox"
    nothing = b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"sandboxes":[]}'
    with (
        serving(tmp_path / "quick", [], [ReadRequest(), nothing]) as quick,
        serving(tmp_path / "slow", [], [Wait(3)]) as slow,
    ):
        record_of(somebody, "slow", f"unix://{slow.path}")
        base = record_of(somebody, "gone", f"unix://{quick.path}")
        announced = dataclasses.replace(base, sandbox="", branch="job", run="0a0a")
        session.forget(config, "gone")
        held = session.hold(config, announced)
        process = somebody.start("recover", "--json", cwd=somebody.home / "project")
        until(lambda: len(quick.seen) > 1 and quick.seen[1])
        session.save(config, dataclasses.replace(base, sandbox="made", branch="job", run="0a0a"))
        session.forget(config, announced.key)
        os.close(held)
        out, err = process.communicate(timeout=PATIENCE_S)
    states = {each["branch"]: each["state"] for each in json.loads(out)}
    assert states == {"slow": "unreachable", "job": "starting"}, err


def test_records_of_other_repositories_and_those_that_cannot_be_read(somebody: Person) -> None:
    project = somebody.home / "project"
    other = make_repository(somebody.home / "other")
    git(project, "worktree", "add", "-q", "../tree")
    record_of(somebody, "here")
    record_of(somebody, "tree", repo=str(somebody.home / "tree"))
    record_of(somebody, "other", repo=str(other))
    record_of(somebody, "moved", repo=str(somebody.home / "moved"))
    (somebody.home / ".config/sandbox/sessions/bad.json").write_text("{\x1b")
    assert sorted(one["sandbox"] for one in recover(somebody)) == ["here", "tree"]
    every = person_json(somebody, "--all")
    assert sorted(one["sandbox"] for one in every) == ["here", "moved", "other", "tree"]
    [moved] = [one for one in every if one["sandbox"] == "moved"]
    assert any(said.startswith("its repository cannot be looked at: ") for said in moved["said"])
    done = somebody.run("recover", "--all")
    assert done.returncode == 0
    assert b"bad.json is not a session record" in done.stderr
    outside = somebody.run("recover")
    assert (outside.returncode, outside.stderr) == (
        1, b"sandbox-cli: not in a git repository: --all looks at the runs of every one\n"
    )  # fmt: skip
    assert somebody.run("recover", "forget", "bad", "other").stdout == b"bad\nother\n"
    assert sorted(one["sandbox"] for one in person_json(somebody, "--all")) == ["here", "moved", "tree"]


def person_json(person: Person, *flags: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(person.run("recover", "--json", *flags).stdout)
    return found


def test_forget(somebody: Person) -> None:
    project = somebody.home / "project"
    head = git(project, "rev-parse", "HEAD").strip()
    git(project, "update-ref", f"{REF}sb1", head)
    record_of(somebody, "sb1", branch="job", checkpoint=head, checkpoint_at="2030-01-01T00:00:00Z")
    record_of(somebody, "sb2", branch="twice")
    record_of(somebody, "sb3", branch="twice")
    twice = somebody.run("recover", "forget", "twice")
    assert b"twice is the name of 2 runs: say which by id: sb2, sb3" in twice.stderr
    done = somebody.run("recover", "forget", "job")
    assert (done.returncode, done.stdout) == (0, b"job\n")
    assert f"its checkpoint stays; it goes with: git update-ref -d {REF}sb1" in done.stderr.decode()
    assert git(project, "rev-parse", f"{REF}sb1").strip() == head
    for name in ("job", "../x", ""):
        assert b"no run is known as" in somebody.run("recover", "forget", name).stderr


def test_a_sandbox_that_was_to_be_kept_is_nothing_to_recover(person: Person, rig: Rig) -> None:
    run = ("run", "--keep", "--name=kept", "--", "sh", "-c")
    assert person.run(*run, "echo x >x", cwd=person.home / "project").returncode == 0
    [sandbox] = alive(rig)
    assert (recover(person), [one["done"] for one in records(person)]) == ([], [True])
    Client(str(rig.socket)).delete(sandbox)
    assert person.run(*run, "echo x >x; git stash -qu", cwd=person.home / "project").returncode == 0
    [one] = recover(person)
    assert (one["state"], one["said"][0]) == ("running", "its sandbox runs, its command ended with 0")


def test_what_is_done_is_dropped_once_its_sandbox_is_gone(person: Person, rig: Rig) -> None:
    client = Client(str(rig.socket))
    sandbox = client.create(Create()).id
    record_of(person, sandbox, done=True)
    record_of(person, "gone", done=True)
    record_of(person, "far", f"unix://{person.home}/nobody", done=True)
    assert recover(person) == []
    assert sorted(one["sandbox"] for one in records(person)) == sorted(["far", sandbox])
    client.delete(sandbox)
    assert recover(person) == []
    assert [one["sandbox"] for one in records(person)] == ["far"]


RECORD = Session("sb", "unix:///s", "/r", "b" * 40, "job", started="t")
COMMIT = "c" * 40


@pytest.mark.parametrize(
    ("record", "seen", "kept", "said", "following"),
    [
        pytest.param({}, Seen(State.RUNNING, "sb"), Held(),
                     ["its sandbox runs, but its command was never started: there is nothing to bring back"],
                     ["sandbox-cli kill --context=C sb"], id="nothing was started"),
        pytest.param({}, Seen(State.SUSPENDED, "sb"), Held(), ["its sandbox is suspended"],
                     ["sandbox-cli resume --context=C sb && sandbox-cli bring-back sb"], id="suspended"),
        pytest.param({}, Seen(State.GONE, "sb"), Held(),
                     ["its sandbox is gone, and nothing came back from it", "its work is lost"],
                     ["sandbox-cli recover forget sb"], id="gone with all it did"),
        pytest.param({}, Seen(State.GONE, "sb", remembered=True), Held(),
                     ["its sandbox is gone, and nothing came back from it", "its work is lost",
                      "if its machine died by itself, sandboxd keeps its disk until it is killed: docs/operations.md"],
                     ["sandbox-cli recover forget sb"], id="gone, and sandboxd may have its disk"),
        pytest.param({"brought_back": True, "brought": "x"}, Seen(State.GONE, "sb"), Held(brought=COMMIT),
                     ["its sandbox is gone", "what came back earlier is refs/sandbox/x"],
                     ["sandbox-cli recover forget sb"], id="gone after a bring-back"),
        pytest.param({"brought_back": True, "brought": "x"}, Seen(State.GONE, "sb"), Held(),
                     ["its sandbox is gone", "what came back earlier is refs/sandbox/x, which was deleted since"],
                     ["sandbox-cli recover forget sb"], id="and its ref is gone too"),
        pytest.param({"brought_back": True}, Seen(State.GONE, "sb"), Held(),
                     ["its sandbox is gone", "when it was last asked for its commits there was nothing new"],
                     ["sandbox-cli recover forget sb"], id="gone after a bring-back of nothing"),
        pytest.param({}, Seen(State.GONE, "sb"), Held(checkpoint=COMMIT),
                     ["its sandbox is gone", f"its checkpoint is {REF}sb"],
                     [f"git log {'b' * 12}..{REF}sb", f"git diff {'b' * 12} {REF}sb", f"git merge {REF}sb",
                      "sandbox-cli recover forget sb"], id="a checkpoint that the record does not know of"),
        pytest.param({}, Seen(State.GONE, "sb"), Held(why="gone"),
                     ["its sandbox is gone, and nothing came back from it",
                      "its repository cannot be looked at: gone"],
                     ["sandbox-cli recover forget sb"], id="whether there is a checkpoint is not known"),
        pytest.param({"sandbox": "", "branch": "", "run": "r"}, Seen(State.NEVER_MADE), Held(),
                     ["it was cut off before anything was in a sandbox: nothing is lost"], [], id="never made"),
    ],
)  # fmt: skip
def test_what_is_said(record: dict[str, Any], seen: Seen, kept: Held, said: list[str], following: list[str]) -> None:
    one = fate.of(dataclasses.replace(RECORD, **record), seen, kept, " --context=C")
    assert (list(one.said), [command for _, command in one.next]) == (said, following)


def test_text_of_others_is_clean() -> None:
    hostile = "a\x1b[2J\n\u202eb"
    record = dataclasses.replace(RECORD, repo=hostile, agent=hostile, branch=hostile, checkpoint_at=hostile)
    seen = Seen(State.UNREACHABLE, "sb", why=hostile)
    shown = recovery.text(fate.of(record, seen, Held(why=hostile, brought=COMMIT), ""))
    assert all(line.isprintable() for line in shown.splitlines())
    assert len(shown.splitlines()) == 4
