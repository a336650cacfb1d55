"""`run` from end to end: a real daemon and guest, the person's repository, what comes back and what stays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandboxd.client import Client
from tests.cli.person import PATIENCE_S, Done, Person, at_terminal
from tests.cli.rawserver import ReadRequest, serving
from tests.conftest import git, make_repository
from tests.sandboxd.rig import Rig

WORKING = ("sh", "-c", "echo x > x; echo ready; exec sleep 60")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("d")) as rig:
        yield rig


@pytest.fixture
def person(rig: Rig, tmp_path: Path) -> Person:
    make_repository(tmp_path / "project")
    return Person(tmp_path, rig.socket)


@pytest.fixture
def project(person: Person) -> Path:
    return person.home / "project"


def run(person: Person, *flags: str, script: str) -> Done:
    return person.run("run", *flags, "--", "sh", "-c", script, cwd=person.home / "project")


def notes(done: Done) -> list[str]:
    return [line.removeprefix("sandbox-cli: ") for line in done.stderr.decode().splitlines()]


def records(person: Person) -> list[str]:
    return sorted(path.stem for path in (person.home / ".config/sandbox/sessions").glob("*.json"))


def alive(rig: Rig) -> list[str]:
    return [one.id for one in Client(str(rig.socket)).sandboxes() if one.state != "terminated"]


def refs(project: Path) -> list[str]:
    return git(project, "for-each-ref", "--format=%(refname)", "refs/sandbox").split()


def test_the_whole_of_it(person: Person, project: Path, rig: Rig) -> None:
    (project / "hello.txt").write_text("dirty\n")
    head = git(project, "rev-parse", "HEAD").strip()
    script = "pwd; cat hello.txt; git rev-parse --abbrev-ref HEAD; echo x > x; echo e >&2; exit 7"
    done = run(person, "--name=job", script=script)
    assert (done.returncode, done.stdout) == (7, b"/workspace\nhello\nsandbox\n")
    assert notes(done) == [
        "uncommitted changes stay here: the sandbox gets HEAD",
        "e",
        "changes that were not committed are now, in a commit of their own",
        "brought back 1 commit to refs/sandbox/job",
        f"review: git log {head[:12]}..refs/sandbox/job",
        f"or: git diff {head[:12]} refs/sandbox/job",
        "merge: git merge refs/sandbox/job",
    ]
    assert git(project, "show", "refs/sandbox/job:x") == "x\n"
    assert git(project, "status", "--porcelain") == " M hello.txt\n"
    assert (alive(rig), records(person)) == ([], [])


def test_nothing_new(person: Person, project: Path, rig: Rig) -> None:
    done = run(person, script="true")
    assert (done.returncode, notes(done)) == (0, ["no new commits: nothing to bring back"])
    assert (refs(project), alive(rig), records(person)) == ([], [], [])


def test_outside_a_repository_and_without_one(person: Person, rig: Rig) -> None:
    outside = person.run("run", "--", "pwd")
    assert (outside.stdout, notes(outside)) == (
        b"/sandbox/home\n",
        ["not in a git repository: the sandbox's /workspace is empty"],
    )
    without = run(person, "--no-workspace", script="pwd; ls /workspace")
    assert (without.stdout, without.stderr) == (b"/sandbox/home\n", b"")
    for where in ("--project=project", "--project=~/project"):  # of the latter a shell leaves the ~ to us
        elsewhere = person.run("run", where, "--", "ls")
        assert elsewhere.stdout == b"hello.txt\n", elsewhere.stderr


def test_no_bring_back_and_keep(person: Person, project: Path, rig: Rig) -> None:
    done = run(person, "--no-bring-back", "--keep", "--name=kept", script="echo x > x")
    [ref] = alive(rig)
    assert notes(done) == ["kept is kept; end it with: sandbox-cli kill kept"]
    assert (refs(project), records(person)) == ([], [ref])
    later = person.run("bring-back", "kept", "--name=other", "--json")
    assert later.returncode == 0, later.stderr
    result = json.loads(later.stdout)
    assert (result["ref"], result["commits"], result["replaced"]) == ("refs/sandbox/other", 1, None)
    again = person.run("bring-back", ref)
    assert "brought back 1 commit to refs/sandbox/kept" in notes(again)
    taken = run(person, "--name=kept", script="true")
    assert notes(taken)[-1].startswith("a sandbox named kept is running: choose another --name")
    assert person.run("kill", "kept").stdout == b"kept\n"
    assert (records(person), ref in person.run("list").stdout.decode()) == ([], False)
    assert ref in person.run("list", "-a").stdout.decode()
    gone = person.run("bring-back", "kept")
    assert (gone.returncode, notes(gone)) == (
        1, ["kept has ended; what it brought back, if anything, is refs/sandbox/kept"]
    )  # fmt: skip
    assert notes(person.run("kill", "kept")) == ["kept had already ended"]
    assert notes(person.run("exec", "kept", "--", "true")) == ["kept has ended"]


def test_a_name_again_says_how_to_keep_the_former_work(person: Person, project: Path) -> None:
    run(person, "--name=again", script="echo 1 > x")
    former = git(project, "rev-parse", "refs/sandbox/again").strip()
    done = run(person, "--name=again", "-e", "NOT_HERE", script="echo 2 > x")
    assert notes(done)[0] == "NOT_HERE is not set here: not passed on"
    assert f"the former work is kept nowhere else: git branch again-before {former}" in notes(done)


def test_a_sandbox_that_ended_with_its_work(person: Person, rig: Rig) -> None:
    run(person, "--keep", "--no-bring-back", "--name=lost", script="echo x > x")
    [ref] = alive(rig)
    Client(str(rig.socket)).delete(ref)
    assert notes(person.run("bring-back", "lost")) == ["lost has ended, and nothing had been brought back from it"]
    assert records(person) == []


def test_what_makes_no_run_says_nothing_of_one(person: Person, rig: Rig) -> None:
    for flags, said in [
        (("--memory=1",), "--memory must be between "),
        (("--network=open",), "this sandboxd gives sandboxes no network"),
    ]:
        [only] = notes(person.run("run", *flags, "--", "true"))
        assert only.startswith(said)


def test_detached(person: Person, project: Path, rig: Rig) -> None:
    done = run(person, "-d", "--name=bg", script="cat; echo done > done; echo finished")
    [ref] = alive(rig)
    assert done.stdout.decode() == f"{ref}\n"
    assert notes(done) == [
        "what it writes: sandbox-cli logs bg",
        "attach: sandbox-cli attach bg",
        "bring its commits back: sandbox-cli bring-back bg",
        "end it: sandbox-cli kill bg",
    ]
    assert person.run("logs", "bg").stdout == b"finished\n"
    assert person.run("bring-back", "bg").returncode == 0
    assert git(project, "show", "refs/sandbox/bg:done") == "done\n"
    person.run("kill", "bg")
    as_json = run(person, "-d", "--json", script="true")
    assert set(json.loads(as_json.stdout)) == {"sandbox", "pid"}
    person.run("kill", json.loads(as_json.stdout)["sandbox"])


def test_the_result_as_json(person: Person, rig: Rig) -> None:
    done = run(person, "--json", "--name=js", script="echo x > x; exit 3")
    result = json.loads(done.stderr.splitlines()[-1])
    assert (result["exit_code"], result["ref"], result["commits"]) == (3, "refs/sandbox/js", 1)


def test_work_that_cannot_come_back_keeps_its_sandbox(person: Person, project: Path, rig: Rig) -> None:
    done = run(person, "--name=bad", "--json", script="mv .git ../tmp/git")
    [ref] = alive(rig)
    assert done.returncode == 1
    assert notes(done)[:3] == [
        "the commits could not be brought back: /workspace in the sandbox is no git repository any more",
        "try again with: sandbox-cli bring-back bad",
        "bad is kept; end it with: sandbox-cli kill bad",
    ]
    assert "no git repository" in json.loads(done.stderr.splitlines()[-1])["error"]
    assert person.run("bring-back", ref).returncode == 1
    person.run("exec", ref, "--", "mv", "/tmp/git", "/workspace/.git")
    person.run("exec", "-w", "/workspace", ref, "--", "touch", "saved")
    assert person.run("bring-back", ref).returncode == 0
    assert "saved" in git(project, "ls-tree", "--name-only", "refs/sandbox/bad")
    person.run("kill", ref)


def test_the_command_s_own_failure_is_not_hidden(person: Person, rig: Rig) -> None:
    done = run(person, script="rm -rf .git; exit 5")
    assert done.returncode == 5
    person.run("kill", *alive(rig))


def test_what_would_be_lost_keeps_the_sandbox(person: Person, project: Path, rig: Rig) -> None:
    done = run(person, "--name=st", script="echo s > s; git stash -qu; git branch side; echo x > x")
    [ref] = alive(rig)
    assert done.returncode == 0
    assert "still only in the sandbox: stashes: 1" in notes(done)
    assert "st is kept; end it with: sandbox-cli kill st" in notes(done)
    assert refs(project) == ["refs/sandbox/st"]
    person.run("kill", ref)


def test_a_command_that_does_not_start_leaves_nothing(person: Person, rig: Rig) -> None:
    done = person.run("run", "--", "no-such-command", cwd=person.home / "project")
    assert done.returncode == 1
    assert "no-such-command" in notes(done)[-1]
    assert (alive(rig), records(person)) == ([], [])


def test_what_is_refused_says_where_it_can_be_mended_before_it_is_tried_again(person: Person, project: Path) -> None:
    url = "printf '[submodule \"a\"]\\n\\tpath = a\\n\\turl = %s\\n' {} > .gitmodules"
    done = run(person, "--name=mend", script=url.format("--upload-pack=x"))
    assert done.returncode == 1
    assert "disallowed submodule url" in notes(done)[0]
    assert notes(done)[1:3] == [
        "it would be refused again: see to that in the sandbox first: sandbox-cli shell mend",
        "try again with: sandbox-cli bring-back mend",
    ]
    git_there = "git -c user.name=a -c user.email=b commit -q --amend -m mended"
    again = ["sh", "-c", f"{url.format('https://a.test/b')}; git add -A; {git_there}"]
    assert person.run("exec", "-w", "/workspace", "mend", "--", *again).returncode == 0
    assert person.run("bring-back", "mend").returncode == 0
    assert refs(project) == ["refs/sandbox/mend"]
    person.run("kill", "mend")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(lambda top: git(top, "update-ref", "-d", "HEAD"), "commit", id="no commit yet"),
        pytest.param(lambda top: git(top, "config", "remote.o.promisor", "true"), "partial", id="a partial clone"),
    ],
)
def test_a_repository_that_cannot_go_in_makes_no_sandbox(
    person: Person, project: Path, rig: Rig, spoil: Callable[[Path], object], said: str
) -> None:
    spoil(project)
    done = run(person, script="true")
    assert (done.returncode, said in done.stderr.decode()) == (1, True)
    assert alive(rig) == []


@pytest.mark.parametrize("name", ["fleet", "mirror", "a..b", "-x"])
def test_a_name_that_cannot_be_a_ref_makes_no_sandbox(person: Person, rig: Rig, name: str) -> None:
    done = run(person, f"--name={name}", script="true")
    assert done.returncode == 1
    assert alive(rig) == []


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "TERM"])
def test_a_signal_ends_the_command_and_its_work_still_comes_back(
    person: Person, project: Path, rig: Rig, sent: signal.Signals
) -> None:
    process = person.start("run", "--name=sig", "--", *WORKING, cwd=project)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(sent)
    assert process.wait(20) == 128 + sent
    assert git(project, "show", "refs/sandbox/sig:x") == "x\n"
    assert alive(rig) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["Ctrl-C", "TERM", "HUP"])
def test_a_signal_while_waiting_for_the_daemon(tmp_path: Path, sent: signal.Signals) -> None:
    body = b'{"error":{"code":"unavailable","message":"sandboxd is getting ready: image, 42 %"}}'
    busy = b"HTTP/1.1 503 X\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with serving(tmp_path / "s", [], [ReadRequest(), busy]) as server:
        process = Person(tmp_path, Path(server.path)).start("run", "--no-workspace", "--", "true")
        wait(lambda: len(server.seen) > 3)
        process.send_signal(sent)
        assert process.wait(PATIENCE_S) == 128 + sent
        assert process.stderr is not None
        said = process.stderr.read()
        assert b"Traceback" not in said
        assert said.count(b"waiting for sandboxd: sandboxd is getting ready: image, 42 %\n") == 1


def test_what_will_not_pass_by_itself_is_not_waited_for(person: Person, rig: Rig) -> None:
    client = Client(str(rig.socket))
    client.cordon(True)
    try:
        done = person.run("run", "--no-workspace", "--", "true")
    finally:
        client.cordon(False)
    assert (done.returncode, done.stderr) == (1, b"sandbox-cli: this node is cordoned: it takes no new sandboxes\n")


def test_progress_while_the_daemon_gets_ready(tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    slow = Rig(tmp_path / "slow")
    slow.knob("prepare_s", "2.5")
    with slow, at_terminal(Person(tmp_path, slow.socket), "run", "--no-workspace", "--", "echo", "ran") as terminal:
        terminal.expect(b"waiting for sandboxd: ")
        terminal.expect(b"42")
        terminal.expect(b"\r\x1b[K")
        terminal.expect(b"ran\r\n")
        assert terminal.wait() == 0


def test_a_killed_cli_leaves_what_can_be_found_and_brought_back(person: Person, project: Path, rig: Rig) -> None:
    process = person.start("run", "--name=orphan", "--", *WORKING, cwd=project)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.kill()
    process.wait()
    [ref] = alive(rig)
    assert records(person) == [ref]
    assert ref.encode() in person.run("list").stdout
    assert person.run("bring-back", "orphan").returncode == 0
    assert refs(project) == ["refs/sandbox/orphan"]
    assert person.run("kill", ref).returncode == 0
    assert git(project, "fsck", "--strict", "--no-dangling") == ""


def test_a_killed_daemon_keeps_the_work(person: Person, project: Path, tmp_path: Path) -> None:
    (tmp_path / "k").mkdir()
    with Rig(tmp_path / "k") as rig:
        someone = Person(person.home, rig.socket)
        process = someone.start("run", "--name=kd", "--", *WORKING, cwd=project)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        rig.kill()
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        ref = re.search(rb"sandbox-cli attach (\S+)", err)
        assert ref is not None
        rig.start()
        wait(lambda: someone.run("bring-back", ref[1].decode()).returncode == 0)
        assert git(project, "show", "refs/sandbox/kd:x") == "x\n"


def test_hostile_text_of_a_guest_is_clean(person: Person, rig: Rig) -> None:
    script = (
        "printf x > \"$(printf 'a\\033[2J\\342\\200\\256b')\"; echo '*' > .gitignore; "
        "git checkout -qb \"$(printf 'e\\342\\200\\256vil')\"; git commit -q --allow-empty -m x"
    )
    done = run(person, "--name=ht", script=script)
    assert b"\x1b" not in done.stderr
    assert "\u202e" not in done.stderr.decode()


def test_doctor(person: Person, tmp_path: Path, rig: Rig) -> None:
    done = person.run("doctor")
    assert done.returncode == 0, done.stderr
    for word in (b"kvm", b"qemu", b"bubblewrap", b"git", b"backend", b"network ceiling", b"guest kernel"):
        assert word in done.stdout
    as_json = json.loads(person.run("doctor", "--no-probe", "--json").stdout)
    assert as_json["sandboxd"]["network ceiling"] == "none"
    assert "workspace_bundle" in as_json["sandboxd"]["capabilities"]
    assert "probe" not in as_json
    absent = Person(tmp_path, tmp_path / "none").run("doctor", "--json")
    assert absent.returncode == 1
    assert "error" in json.loads(absent.stdout)
    assert alive(rig) == []


def test_root_in_somebody_else_s_repository(person: Person, project: Path, rig: Rig) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be in somebody else's repository that it may write")
    subprocess.run(["chown", "-R", "12345:12345", str(project)], check=True)
    done = run(person, script="true")
    assert done.returncode == 1
    assert "root does not work in other people's repositories" in done.stderr.decode()
    assert alive(rig) == []
