"""Profiles: the run as it will be, with files and flags folded in, is what is checked."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from docopt import docopt

from cli import plan, profile
from cli.agents.table import named
from cli.config import load
from cli.network import Wanted
from cli.plan import Plan
from sandboxd.errors import SandboxError
from tests.cli.person import Person
from tests.sandboxd.rig import Rig

PROD = ("--profile=prod",)


class Asked:
    """A person who has settings, and a project that has some."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / ".config" / "sandbox").mkdir(parents=True)

    def plan(self, *flags: str, user: str = "", project: str = "", agent: str | None = None) -> Plan:
        (self.home / ".config" / "sandbox" / "config.yaml").write_text(user)
        (self.home / ".config" / "sandbox" / "config.yaml").chmod(0o600)
        (self.home / ".sandbox.yaml").write_text(project)
        args = dict(docopt(str(import_module("cli.run").__doc__), argv=["run", *flags, "--", "x"]))
        environ = {"HOME": str(self.home)}
        settings = load(environ, self.home, args["--config"], args["--profile"])
        return plan.of(args, settings, environ, None, named(agent) if agent else None)


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


@pytest.mark.parametrize(
    ("flags", "user", "project", "network"),
    [
        pytest.param((), "", "", Wanted(), id="dev is the default and leaves the network to the server"),
        pytest.param(("--allow=a.test",), "", "", Wanted(allow=("a.test",)), id="a name beside the server's"),
        pytest.param(
            (*PROD, "--allow=a.test"), "", "", Wanted("allowlist", ("a.test",), baseline=False),
            id="prod has only names that were named",
        ),
        pytest.param(
            PROD, "network: {allow: [a.test]}", "", Wanted("allowlist", ("a.test",), baseline=False), id="in a file",
        ),
        pytest.param(
            (*PROD, "--allow-tcp=a.test:22"), "", "",
            Wanted("allowlist", allow_tcp=("a.test:22",), baseline=False), id="or a service",
        ),
        pytest.param((*PROD, "--network=none"), "", "", Wanted("none"), id="no network at all is tighter"),
        pytest.param(PROD, "network: {mode: none}", "", Wanted("none"), id="from a file too"),
        pytest.param((), "", "profile: prod\nnetwork: {mode: none}", Wanted("none"), id="all of it from a project"),
        pytest.param(
            ("--allow=a.test",), "", "profile: prod", Wanted("allowlist", ("a.test",), baseline=False),
            id="a project's prod with a flag of the person's",
        ),
        pytest.param(
            ("--profile=dev",), "", "profile: prod", Wanted(), id="the flag has the last word",
        ),
        pytest.param(
            (*PROD, "--network=allowlist", "--allow=a.test"), "network: {mode: open}", "",
            Wanted("allowlist", ("a.test",), baseline=False), id="a flag mends what a file loosened",
        ),
        pytest.param(
            (*PROD, "--no-baseline", "--allow=a.test"), "network: {baseline: true}", "",
            Wanted("allowlist", ("a.test",), baseline=False), id="likewise the server's names",
        ),
    ],
)  # fmt: skip
def test_the_network_of_a_run(asked: Asked, flags: tuple[str, ...], user: str, project: str, network: Wanted) -> None:
    found = asked.plan(*flags, user=user, project=project)
    assert found.network == network
    assert found.persist_auth is (found.profile == "dev")


@pytest.mark.parametrize(
    ("flags", "user", "said"),
    [
        pytest.param(
            PROD, "", "profile prod does not permit an allowlist that names no host: name those it needs with "
            "--allow, or use --network none", id="nothing named: never the server's list instead",
        ),
        pytest.param((*PROD, "--network=open"), "", "network open: use --network allowlist or --network", id="open"),
        pytest.param(PROD, "network: {mode: open}", "network open (from {user}): use", id="open from a file"),
        pytest.param((*PROD, "--network=default"), "network: {mode: none}", "permit network open: use", id="a flag"),
        pytest.param(
            (*PROD, "--allow=a"), "network: {baseline: true}",
            "the server's own names (from {user}): add --no-baseline", id="the server's names",
        ),
        pytest.param(
            (*PROD, "--allow=a"), "persist_auth: true", "keeping logins (from {user}): add --no-persist", id="logins"
        ),
        pytest.param((), "profile: prod", "profile prod (from {user}) does not permit an allow", id="prod by a file"),
        pytest.param(
            (), "profile: prod\nnetwork: {mode: open}\npersist_auth: true",
            "does not permit network open (from {user}): use --network allowlist or --network none; nor keeping logins",
            id="everything at once",
        ),
    ],
)  # fmt: skip
def test_what_a_profile_does_not_permit(asked: Asked, flags: tuple[str, ...], user: str, said: str) -> None:
    with pytest.raises(SandboxError) as refused:
        asked.plan(*flags, user=user)
    assert said.replace("{user}", f"{asked.home}/.config/sandbox/config.yaml") in str(refused.value)


def test_logins_are_kept_by_dev_alone_and_not_where_somebody_says_no(asked: Asked) -> None:
    assert asked.plan().persist_auth
    assert not asked.plan("--no-persist-auth").persist_auth
    assert not asked.plan(user="persist_auth: false").persist_auth
    assert not asked.plan(project="persist_auth: false").persist_auth
    assert not asked.plan("--profile=prod", "--network=none").persist_auth
    prod = "profile: prod\nnetwork: {mode: none}"
    assert not asked.plan("--no-persist-auth", user="persist_auth: true", project=prod).persist_auth


def test_under_prod_an_agent_reaches_no_host_that_nobody_named(asked: Asked) -> None:
    assert asked.plan(agent="claude").hosts == ("api.anthropic.com",)
    assert asked.plan("--profile=prod", "--allow=a.test", agent="claude").hosts == ()


@pytest.mark.parametrize(
    ("wish", "demand", "chosen"),
    [
        ("dev", None, "dev"), ("dev", "dev", "dev"), ("dev", "prod", "prod"), ("prod", "dev", "prod"),
        ("prod", None, "prod"), ("dev", "staging", "dev"), ("prod", "staging", "prod"), ("dev", ["prod"], "dev"),
    ],
    ids=str,
)  # fmt: skip
def test_the_stronger_of_two(wish: str, demand: object, chosen: str) -> None:
    assert profile.stronger(wish, demand) == chosen


def test_what_a_profile_refuses_is_told_before_any_daemon_is_asked(tmp_path: Path) -> None:
    person = Person(tmp_path, Path("/etc/passwd/none.sock"))
    done = person.run("run", "--profile", "prod", "--network", "open", "--", "true")
    assert (done.returncode, done.stderr) == (
        1, b"sandbox-cli: profile prod does not permit network open: use --network allowlist or --network none\n"
    )  # fmt: skip
    (tmp_path / ".sandbox.yaml").write_text("profile: prod\n")
    done = person.run("agent", "codex", "exec", "hello")
    said = done.stderr.decode()
    assert done.returncode == 1 and said.count("\n") == 1
    assert said.startswith(f"sandbox-cli: profile prod (from {tmp_path}/.sandbox.yaml) does not permit an allowlist")
    good = person.run("run", "--profile", "prod", "--network", "none", "--", "true")
    assert b"no sandboxd at" in good.stderr, "what is permitted gets further"


# -- with a server


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    place = tmp_path_factory.mktemp("d")
    (place / "policy.yaml").write_text("network: {ceiling: open, default: {allow: [base.test]}}")
    with Rig(place, "--network", "--policy", str(place / "policy.yaml")) as rig:
        yield rig


MINE = "network: {allow: [mine.test], deny: [bad.test]}\n"


@pytest.mark.parametrize(
    ("user", "project", "flags", "network"),
    [
        pytest.param("", "", (), {"mode": "allowlist", "allow": ["base.test"]}, id="the server's own"),
        pytest.param(
            MINE, "", (), {"mode": "allowlist", "allow": ["base.test", "mine.test"], "deny": ["bad.test"]},
            id="with the person's names",
        ),
        pytest.param(
            MINE, "network: {baseline: false, deny: [worse.test]}", (),
            {"mode": "allowlist", "allow": ["mine.test"], "deny": ["bad.test", "worse.test"]},
            id="that a project tightens",
        ),
        pytest.param(MINE, "network: {mode: none}", (), {"mode": "none", "allow": None}, id="down to none"),
        pytest.param(
            "", "", ("--profile=prod", "--allow=a.test"), {"mode": "allowlist", "allow": ["a.test"]}, id="prod"
        ),
        pytest.param("profile: prod", "", ("--network=none",), {"mode": "none", "allow": None}, id="prod without any"),
        pytest.param(
            "network: {mode: open}", "profile: prod", ("--network=allowlist", "--allow=a.test"),
            {"mode": "allowlist", "allow": ["a.test"]}, id="prod against an open file",
        ),
        pytest.param(
            "network: {mode: open}", "", ("--allow=a.test",), {"mode": "allowlist", "allow": ["a.test", "base.test"]},
            id="a named host is an allowlist",
        ),
        pytest.param("network: {mode: open}", "", (), {"mode": "open", "allow": None}, id="open by the person's file"),
    ],
)  # fmt: skip
def test_what_the_server_is_asked_for(
    rig: Rig, tmp_path: Path, user: str, project: str, flags: tuple[str, ...], network: dict[str, object]
) -> None:
    (tmp_path / ".config" / "sandbox").mkdir(parents=True)
    config = tmp_path / ".config" / "sandbox" / "config.yaml"
    config.write_text(user)
    config.chmod(0o600)
    (tmp_path / ".sandbox.yaml").write_text(project)
    done = Person(tmp_path, rig.socket).run("run", "--no-workspace", "-d", *flags, "--", "sleep", "60")
    assert done.returncode == 0, done.stderr
    made = f"/v1/sandboxes/{done.stdout.decode().strip()}"
    assert rig.call("GET", made).json["network"] == network
    rig.call("DELETE", made)
