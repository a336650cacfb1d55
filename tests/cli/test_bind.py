"""`run --bind`: a directory of this host as /workspace. What real machines make of it: tests/path/test_bind.py."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd.client import Client
from tests.cli.person import Done, Person
from tests.conftest import git, make_repository
from tests.sandboxd.rig import Rig

TOKEN = "a-token-of-the-tests-own"


@pytest.fixture(scope="module")
def rig(short_tmp: Path) -> Iterator[Rig]:
    place = short_tmp / "cli-bind"
    place.mkdir()
    with Rig(place, "--allow-bind") as rig:
        yield rig


@pytest.fixture
def person(rig: Rig, tmp_path: Path) -> Person:
    make_repository(tmp_path / "project")
    (tmp_path / "project").chmod(0o777)  # the stand-in's guest is another uid here
    return Person(tmp_path, rig.socket)


def run(person: Person, *flags: str, script: str = "true", cwd: str = ".") -> Done:
    return person.run("run", *flags, "--", "sh", "-c", script, cwd=person.home / cwd)


def alive(rig: Rig) -> list[str]:
    return [one.id for one in Client(str(rig.socket)).sandboxes() if one.state != "terminated"]


@pytest.mark.parametrize(
    ("path", "cwd"),
    [
        pytest.param("~/project", ".", id="a path from home"),
        pytest.param("project", ".", id="a relative path"),
        pytest.param("../link", "project", id="a link to it"),
        pytest.param(".", "project", id="where one is"),
    ],
)
def test_the_directory_itself_is_the_workspace(rig: Rig, person: Person, path: str, cwd: str) -> None:
    project = person.home / "project"
    (person.home / "link").symlink_to("project")
    (project / "hello.txt").write_text("changed and not committed\n")
    refs = git(project, "for-each-ref")
    script = "pwd; cat hello.txt; echo made > made; exit 3"
    done = run(person, "--bind", path, script=script, cwd=cwd)
    assert (done.returncode, done.stdout) == (3, b"/workspace\nchanged and not committed\n"), done.stderr
    assert (project / "made").read_text() == "made\n"
    # No bundle, no commit, no ref, no record of a session.
    assert git(project, "for-each-ref") == refs
    assert sorted(git(project, "status", "--porcelain").splitlines()) == [" M hello.txt", "?? made"]
    assert not list((person.home / ".config/sandbox/sessions").glob("*"))
    assert alive(rig) == []
    assert "is changed here, and nothing checks it" in done.stderr.decode()
    assert "refs/sandbox" not in done.stderr.decode()
    assert "/. itself" not in done.stderr.decode()


PLANTED = r"printf '[core]\n\tfsmonitor = ./evil\n\thooksPath = .evil\n' >> .git/config; "
PLANTED += "echo x > .git/hooks/post-checkout; chmod +x .git/hooks/post-checkout; "
PLANTED += "mkdir -p .vscode; echo '{}' > .vscode/tasks.json; echo y > notes.txt"


def test_what_this_machine_would_run_later_is_listed(person: Person) -> None:
    """Nothing of it has run here: the report does not use the repository's settings."""
    for path in (person.home / "project").rglob("*"):
        path.chmod(0o777)
    (person.home / "project/.git").chmod(0o777)
    done = run(person, "--bind=project", "--json", script=PLANTED)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stderr.splitlines()[-1])
    listed = {(one["path"], one["change"]) for one in said["executed"]}
    planted = {(".git/config", "changed"), (".git/hooks/post-checkout", "added"), (".vscode/tasks.json", "added")}
    assert planted <= listed and not any(path == "notes.txt" for path, _ in listed)
    notes = done.stderr.decode().lower()
    for expected in ("core.fsmonitor is './evil'", "core.hookspath", ".vscode/tasks.json (added)"):
        assert expected in notes, notes


def test_where_nothing_of_the_kind_changed_nothing_is_said(person: Person) -> None:
    done = run(person, "--bind=project", script="echo y > notes.txt")
    assert done.stderr.decode().splitlines() == [
        f"sandbox-cli: /workspace is {person.home}/project itself: what the command changes there is changed here, "
        "and nothing checks it"
    ]


def test_a_sandbox_that_is_kept_can_still_change_it(person: Person) -> None:
    done = run(person, "--bind=project", "--keep", "--name=kept", script="echo x > Makefile")
    assert "Makefile (added)" in done.stderr.decode() and "the sandbox still runs" in done.stderr.decode()
    assert person.run("kill", "kept").returncode == 0


def test_only_to_be_read_nothing_can_be_changed(rig: Rig, person: Person) -> None:
    script = "cat hello.txt; echo x > made || echo cannot; rm -f hello.txt || echo stays"
    done = run(person, "--bind=project", "--bind-read-only", script=script)
    assert done.stdout == b"hello\ncannot\nstays\n", done.stderr
    assert not (person.home / "project/made").exists()
    assert "only to be read" in done.stderr.decode()


def test_outside_a_repository_it_is_as_good(person: Person) -> None:
    (person.home / "plain").mkdir(mode=0o777)
    (person.home / "plain").chmod(0o777)
    done = run(person, "--bind=plain", "--json", script="echo made > made")
    assert json.loads(done.stderr.splitlines()[-1])["exit_code"] == 0
    assert (person.home / "plain/made").read_text() == "made\n"


def test_a_run_that_is_left_keeps_the_directory(rig: Rig, person: Person) -> None:
    done = run(person, "--bind=project", "--detach", script="sleep 60")
    sandbox = done.stdout.decode().strip()
    said = person.run("exec", sandbox, "--", "ls", "/workspace")
    assert b"hello.txt" in said.stdout, said.stderr
    assert "bring-back" not in done.stderr.decode()
    assert "will not be listed" in done.stderr.decode(), "there is nobody to list what it changed"
    assert person.run("kill", sandbox).returncode == 0


@pytest.mark.parametrize("path", ["project", "~/project"])
def test_the_shared_project_s_own_settings_are_the_run_s(rig: Rig, person: Person, path: str) -> None:
    (person.home / ".sandbox.yaml").write_text("persist_auth: 1\n")  # of where the person stands, and not read
    (person.home / "project/.sandbox.yaml").write_text("profile: prod\n")
    done = run(person, "--bind", path)
    assert done.returncode == 1
    assert f"profile prod (from {person.home}/project/.sandbox.yaml) does not permit" in done.stderr.decode()


@pytest.mark.parametrize("path", ["settings/sandbox", "settings/sandbox/agents", "settings"])
def test_the_person_s_own_settings_are_not_shared_wherever_they_are(rig: Rig, person: Person, path: str) -> None:
    """The daemon, another process with another environment, does not know the place."""
    (person.home / "settings/sandbox/agents").mkdir(parents=True)
    before = rig.log.read_bytes()
    done = person.run("run", "--bind", path, "--", "true", XDG_CONFIG_HOME=str(person.home / "settings"))
    assert done.returncode == 1 and "keeps what is its own" in done.stderr.decode(), done.stderr
    assert rig.log.read_bytes() == before


HERE = "a directory that holds the home directory"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param(["--bind=/"], "the root of the file system", id="the root"),
        pytest.param(["--bind", "~"], "the home directory", id="home"),
        pytest.param(["--bind=."], "the home directory", id="home by a relative path"),
        pytest.param(["--bind=project/.."], "the home directory", id="home by dots"),
        pytest.param(["--bind=link"], "the home directory", id="home by a link"),
        pytest.param(["--bind=.."], HERE, id="what holds home"),
        pytest.param(["--bind=/", "--bind-read-only"], "the root", id="the root, only to be read"),
        pytest.param(["--bind=/proc/self/root"], "a link of /proc", id="a link of /proc"),
        pytest.param(["--bind="], "--bind: its value is empty", id="a shell's variable that is not set"),
        pytest.param(["--bind=nowhere"], "No such file", id="what is not there"),
        pytest.param(["--bind=file"], "Not a directory", id="a file"),
        pytest.param(["--bind-read-only"], "goes with --bind DIR", id="read-only without a directory"),
        pytest.param(["--bind=project", "--project=project"], "--bind and --project", id="a repository beside it"),
        pytest.param(["--bind=project", "--no-workspace"], "--bind and --no-workspace", id="no workspace"),
        pytest.param(["--bind=project", "--from-snapshot=snp_0123456789abcdef"], "and --from-snapshot", id="a fork"),
        pytest.param(["--bind=project", "--checkpoint-every=5m"], "is here already", id="checkpoints"),
    ],
)
def test_what_is_refused_before_a_server_is_asked(rig: Rig, person: Person, flags: list[str], said: str) -> None:
    (person.home / "file").write_text("")
    (person.home / "link").symlink_to(".")
    before = rig.log.read_bytes()
    done = run(person, *flags)
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1 and said in done.stderr.decode(), done.stderr
    assert rig.log.read_bytes() == before


def test_a_server_that_does_not_share_is_named_with_the_way_out(short_tmp: Path, tmp_path: Path) -> None:
    place = short_tmp / "cli-no-bind"
    place.mkdir()
    (tmp_path / "project").mkdir()
    with Rig(place) as rig:
        done = run(Person(tmp_path, rig.socket), "--bind=project")
        assert done.returncode == 1 and "sandboxd --allow-bind" in done.stderr.decode(), done.stderr
        assert alive(rig) == []


def test_over_the_network_it_is_refused_here(short_tmp: Path, person: Person) -> None:
    """Whatever the server would say: it never hears of the path."""
    place = short_tmp / "cli-bind-tcp"
    place.mkdir()
    (place / "token").write_text(TOKEN)
    (place / "token").chmod(0o600)
    served = Rig(place, "--allow-bind", "--listen", "127.0.0.1:0", "--token-file", str(place / "token"))
    served.headers = {"Authorization": f"Bearer {TOKEN}"}
    with served:
        said = next(line for line in served.log.read_text().splitlines() if "listening on" in line)
        address = "http://127.0.0.1:" + said.partition("http://127.0.0.1:")[2].partition(",")[0]
        told = {"SANDBOX_TOKEN_FILE": str(place / "token"), "SANDBOX_CONTEXT": address}
        done = person.run("run", "--bind=project", "--", "true", **told)
        assert done.returncode == 1 and b"over the network" in done.stderr, done.stderr
    # It is not even asked what it can do: nobody answers there any more.
    done = person.run("run", "--bind=project", "--", "true", **told)
    assert done.returncode == 1 and b"over the network" in done.stderr, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="files of somebody else's need root")
def test_root_shares_no_directory_of_somebody_elses_to_be_written_to(person: Person) -> None:
    os.chown(person.home / "project", 4242, 4242)
    done = run(person, "--bind=project")
    assert done.returncode == 1 and "it belongs to uid 4242" in done.stderr.decode(), done.stderr
    assert run(person, "--bind=project", "--bind-read-only").returncode == 0
