"""Logins between runs: what crosses, what does not, and that nothing is written or read through a link."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.agents import login
from cli.agents.table import AGENTS
from sandboxd.client import Client
from tests.cli.person import Done, Person
from tests.conftest import make_repository
from tests.sandboxd.rig import Rig

CREDENTIALS, SETTINGS = ".claude/.credentials.json", ".claude.json"


# What crosses


@pytest.mark.parametrize(
    ("name", "settings", "kept"),
    [
        pytest.param(
            SETTINGS,
            {
                "oauthAccount": {"a": [1]}, "userID": "u", "hasCompletedOnboarding": True, "lastOnboardingVersion": "2",
                "theme": "dark", "bypassPermissionsModeAccepted": True,
            },
            {
                "oauthAccount": {"a": [1]}, "userID": "u", "hasCompletedOnboarding": True, "lastOnboardingVersion": "2",
                "theme": "dark", "bypassPermissionsModeAccepted": True,
            },
            id="all that is a login",
        ),
        pytest.param(
            SETTINGS,
            {"mcpServers": {"x": {"command": "sh"}}, "hooks": {}, "projects": {}, "permissions": {}, "theme": "x"},
            {"theme": "x"},
            id="no servers, hooks or permissions",
        ),
        pytest.param(SETTINGS, {"oauthaccount": 1, "userID ": 2, "": 3}, {}, id="names that only look like it"),
        pytest.param(
            ".gemini/settings.json",
            {"security": {"auth": {"selectedType": "o", "x": 1}, "y": 2}, "selectedAuthType": "p", "mcpServers": {}},
            {"security": {"auth": {"selectedType": "o"}}, "selectedAuthType": "p"},
            id="a key inside others",
        ),
        pytest.param(".gemini/settings.json", {"security": ["auth"]}, {}, id="another type where others are expected"),
        pytest.param(".gemini/settings.json", {"security": {"auth": "selectedType"}}, {}, id="a text for an object"),
    ],
)  # fmt: skip
def test_of_settings_only_the_login_crosses(name: str, settings: object, kept: object) -> None:
    assert json.loads(login.filtered(name, json.dumps(settings).encode())) == kept


def test_a_key_that_is_there_twice_counts_as_it_is_kept() -> None:
    assert json.loads(login.filtered(SETTINGS, b'{"theme": "a", "theme": {"b": 1}}')) == {"theme": {"b": 1}}


def test_credentials_cross_as_they_are() -> None:
    for content in (b"", b"\0\xff", b"[not JSON"):
        assert login.filtered(CREDENTIALS, content) == content


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'"x"', b"null", b"1", b"\xff\xfe", b"[" * 200_000, b"{} {}", b"9" * 10_000],
    ids=["nothing", "half", "a list", "a text", "null", "a number", "no UTF-8", "deep", "two objects", "a huge number"],
)
def test_settings_that_are_no_object_do_not_cross(content: bytes) -> None:
    with pytest.raises(login.LoginRefused, match=r"^\.claude\.json is not"):
        login.filtered(SETTINGS, content)


def test_every_settings_file_that_is_reduced_is_some_agent_s_and_every_login_is_a_file_below_home() -> None:
    names = {name for agent in AGENTS.values() for name in agent.logins}
    assert set(login.LOGIN_KEYS) <= names
    for name in names:
        assert not name.startswith("/") and ".." not in name.split("/") and "" not in name.split("/")


# As a person has it: runs of an agent that is a program in the repository


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("d"), "--network") as rig:
        yield rig


@pytest.fixture
def person(rig: Rig, tmp_path: Path) -> Person:
    make_repository(tmp_path / "project")
    return Person(tmp_path, rig.socket)


def kept(person: Person, name: str = "") -> Path:
    return person.home / ".config/sandbox/agents/claude" / name


def claude(person: Person, script: str, *flags: str) -> Done:
    """A run whose agent is `script`."""
    words = ("--no-workspace", "--env=PATH=/sandbox/home/.local/bin:/usr/bin:/bin", *flags)
    return person.run("agent", "claude", *words, "--", "-c", script)


@pytest.fixture(autouse=True)
def a_shell_is_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line's process takes `sh` for the program of `claude`: found on PATH, with a script as its words."""
    code = (
        "import sys; from cli.agents import table; "
        "table.AGENTS['claude'] = table.AGENTS['claude']._replace(binary='sh'); "
        "from cli.__main__ import main; sys.exit(main())"
    )
    monkeypatch.setattr("tests.cli.person.COMMAND", [os.sys.executable, "-c", code])


LOG_IN = (
    "cd; mkdir -p .claude; printf secret >.claude/.credentials.json; "
    """printf '{"userID": "u", "mcpServers": {"x": {"command": "evil"}}}' >.claude.json"""
)
SHOW = "cd; cat .claude/.credentials.json .claude.json"


def modes(top: Path) -> set[tuple[str, int]]:
    return {(path.relative_to(top).as_posix(), stat.S_IMODE(path.lstat().st_mode)) for path in top.rglob("*")}


def test_a_login_of_one_run_is_there_in_the_next(person: Person) -> None:
    assert claude(person, f"umask 0; {LOG_IN}").returncode == 0
    top = person.home / ".config/sandbox/agents"
    assert modes(top) == {
        ("claude", 0o700), ("claude/.claude", 0o700), ("claude/.claude/.credentials.json", 0o600),
        ("claude/.claude.json", 0o600),
    }  # fmt: skip
    assert stat.S_IMODE(top.stat().st_mode) == 0o700
    assert kept(person, CREDENTIALS).read_bytes() == b"secret"
    assert json.loads(kept(person, SETTINGS).read_bytes()) == {"userID": "u"}
    again = claude(person, SHOW)
    assert again.stdout.startswith(b"secret{") and b"evil" not in again.stdout, again.stderr
    assert b"claude     yes              yes" in person.run("agent", "ls").stdout


def test_what_was_put_among_the_saved_files_does_not_go_in(person: Person) -> None:
    kept(person).mkdir(parents=True)
    kept(person, SETTINGS).write_text('{"theme": "t", "mcpServers": {"x": {"command": "evil"}}}')
    kept(person, "other").write_text("x")
    done = claude(person, "cd; cat .claude.json; ls -A; rm .claude.json")
    assert b'"theme": "t"' in done.stdout and b"evil" not in done.stdout and b"other" not in done.stdout
    assert b"evil" in kept(person, SETTINGS).read_bytes(), "a file that is gone in the sandbox leaves ours as it is"


def test_a_run_that_changes_its_login_saves_the_change_whatever_its_exit_code(person: Person) -> None:
    claude(person, LOG_IN)
    assert claude(person, "cd; printf new >.claude/.credentials.json; exit 7").returncode == 7
    assert kept(person, CREDENTIALS).read_bytes() == b"new"


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        pytest.param(("--profile=prod", "--allow=api.test"), "", id="under prod"),
        pytest.param(("--no-persist-auth",), "", id="by a flag"),
        pytest.param((), "persist_auth: false\n", id="by the settings"),
    ],
)
def test_a_login_that_is_not_to_be_kept(person: Person, flags: tuple[str, ...], settings: str) -> None:
    kept(person, ".claude").mkdir(parents=True)
    kept(person, CREDENTIALS).write_text("secret")
    (person.home / ".config/sandbox/config.yaml").write_text(settings)
    done = claude(person, f"ls -A ~; {LOG_IN}", *flags)
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    assert not kept(person, SETTINGS).exists()


# What a guest and what somebody here may leave where a login is looked for: one sandbox for all of it


@pytest.fixture(scope="module")
def box(rig: Rig) -> str:
    return rig.create()


@pytest.fixture
def home(rig: Rig, box: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where logins are kept, while the sandbox has one."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert rig.run(box, "sh", "-c", f"cd; rm -rf .claude .claude.json; {LOG_IN}").exit_code == 0
    return tmp_path / "config/sandbox/agents/claude"


def save(rig: Rig, box: str) -> list[str]:
    return list(login.save(Client(str(rig.socket)), box, AGENTS["claude"]))


def restore(rig: Rig, box: str) -> list[str]:
    return list(login.restore(Client(str(rig.socket)), box, AGENTS["claude"]))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        pytest.param("printf '{' >.claude.json", ".claude.json is not JSON", id="settings that are cut"),
        pytest.param("printf '[]' >.claude.json", ".claude.json is not a JSON object", id="settings that are a list"),
        pytest.param("rm .claude.json; mkfifo .claude.json", "not a regular file", id="a FIFO"),
        pytest.param("ln -sf /dev/zero .claude.json", "not a regular file", id="a link to a device"),
        pytest.param("rm .claude.json; mkdir .claude.json", "is a directory", id="a directory"),
        pytest.param("rm .claude.json; ln -s .claude.json .claude.json", "symbolic links", id="a link to itself"),
        pytest.param("head -c 5000000 /dev/zero >.claude.json", "larger than 4 MiB", id="a huge file"),
        pytest.param("truncate -s 10G .claude.json", "longer than 64 MiB", id="a file of holes"),
    ],
)
def test_what_a_guest_leaves_in_its_place_is_not_saved(
    rig: Rig, box: str, home: Path, script: str, said: str
) -> None:
    assert save(rig, box) == []
    assert rig.run(box, "sh", "-c", f"cd; {script}").exit_code == 0
    [line] = save(rig, box)
    assert line.startswith("the login of claude was not saved: ") and said in line
    assert json.loads((home / SETTINGS).read_bytes()) == {"userID": "u"}, "the saved one is as it was"


@pytest.mark.parametrize(
    ("link", "target"),
    [
        pytest.param("", "", id="a link for all agents"),
        pytest.param("claude", "claude", id="a link for the agent"),
        pytest.param("claude/.claude", "claude/.claude", id="a link inside"),
        pytest.param(f"claude/{CREDENTIALS}", f"claude/{CREDENTIALS}", id="a link for the file"),
        pytest.param(f"claude/{CREDENTIALS}", "new", id="a link to nothing"),
        pytest.param(f"claude/{CREDENTIALS}", None, id="a FIFO"),
    ],
)
def test_nothing_is_read_or_written_through_a_link(
    rig: Rig, box: str, home: Path, tmp_path: Path, link: str, target: str | None
) -> None:
    outside = tmp_path / "outside"
    (outside / "claude/.claude").mkdir(parents=True)
    (outside / "claude" / CREDENTIALS).write_text("of the host")
    at = home.parent / link
    at.parent.mkdir(parents=True)
    if target is None:
        os.mkfifo(at)
    else:
        at.symlink_to(outside / target)
    before = modes(outside)
    if target != "new":
        [line] = [line for line in restore(rig, box) if CREDENTIALS in line]
        assert line.startswith("the saved login of claude is not used: ")
    assert Client(str(rig.socket)).read_file(box, f"/sandbox/home/{CREDENTIALS}") == b"secret"
    assert any(CREDENTIALS in line for line in save(rig, box))
    assert modes(outside) == before
    assert {path.read_text() for path in outside.rglob("*") if path.is_file()} == {"of the host"}


def test_no_draft_is_left_where_a_login_cannot_be_saved(rig: Rig, box: str, home: Path) -> None:
    (home / CREDENTIALS).mkdir(parents=True)
    [line] = save(rig, box)
    assert "is a link, or no file" in line
    assert sorted(path.name for path in (home / ".claude").iterdir()) == [".credentials.json"]


def test_plain_runs_have_no_login(person: Person) -> None:
    kept(person, ".claude").mkdir(parents=True)
    kept(person, CREDENTIALS).write_text("secret")
    script = "ls -A ~; touch ~/.claude.json"
    done = person.run("run", "--no-workspace", "--label=agent=claude", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (0, b"")
    assert not kept(person, SETTINGS).exists()
