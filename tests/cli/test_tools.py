"""What is decided about the tools volume, and the script that fills it, in a shell of the host with an npm that is not.

Real machines, real installs and what becomes of them when somebody is killed: tests/agents/test_tools.py.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.agents import tools
from cli.agents.start import BIN, READY, TOOLS_PATH
from cli.agents.table import AGENTS, Npm
from cli.status import Status
from sandboxd.client import Capabilities, Create, Network, Process, Sandbox, Volume
from sandboxd.errors import Conflict

CLAUDE, CURSOR, OPENHANDS = AGENTS["claude"], AGENTS["cursor"], AGENTS["openhands"]


def offer(*registries: str) -> Capabilities:
    network = Network("allowlist", (*registries, "x.test"), (), ())
    return Capabilities("v1", "qemu", {"volumes": True}, {}, network, "allowlist", (), (), registries)


def test_every_agent_s_volume_has_a_name_of_its_own_that_the_server_takes() -> None:
    names = [tools.volume(agent) for agent in AGENTS.values()]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"agent-[a-z]+-[0-9a-f]{8}", name) for name in names)


def test_another_version_is_another_volume_and_the_old_one_is_named() -> None:
    assert isinstance(CLAUDE.source, Npm)
    newer = CLAUDE._replace(source=CLAUDE.source._replace(version="99.0.0"))
    assert tools.volume(newer) != tools.volume(CLAUDE)
    there = [tools.volume(CLAUDE), tools.volume(newer), "agent-claude-cache", "agent-codex-01234567", "claude"]
    assert tools.superseded(newer, there) == [tools.volume(CLAUDE)]


class Endpoint:
    """A server with one volume, which somebody's installer without end has, or which is taken and never seen."""

    def __init__(self, attached_to: str) -> None:
        self.attached_to = attached_to

    def volumes(self) -> list[Volume]:
        return [Volume(tools.volume(CLAUDE), 1, "", self.attached_to)] if self.attached_to else []

    def create_volume(self, name: str, size_mb: int) -> None:
        raise Conflict(f"there is a volume {name}")

    def get(self, ref: str) -> Sandbox:
        network = Network("none", None, (), ())
        return Sandbox(ref, "", "running", "i", 1, 1, 1, (), network, "", 0, {tools.INSTALL: "claude"})

    def processes(self, ref: str) -> list[Process]:
        return [Process(1, False, ("sleep",), "running", None, "")]


@pytest.mark.parametrize(
    ("attached_to", "said"),
    [
        pytest.param("sbx_other", "if that hangs, end it: sandbox-cli kill sbx_other", id="an installer without end"),
        pytest.param("", "is still made and given up by others", id="a volume that is never there to be seen"),
    ],
)
def test_what_others_do_with_the_volume_is_waited_for_only_so_long(attached_to: str, said: str) -> None:
    made: list[Create] = []

    def make(asked: Create, status: Status) -> Sandbox:
        made.append(asked)
        return Endpoint("").get("sbx_run")

    client: Any = Endpoint(attached_to)
    one = tools.Tools(client, offer("r.test"), CLAUDE, Create(), make, patience_s=0.1)
    with Status() as status:
        one.install(status)
        one.create(Create(), status)
    assert said in one.notes[0] and "installs it into its own sandbox" in one.notes[1]
    assert [asked.volumes for asked in made] == [Create().volumes]


def test_what_a_snapshot_holds_is_left_as_it_is() -> None:
    """It may hold the agent already, and takes no other disk."""
    made: list[Create] = []

    def make(asked: Create, status: Status) -> Sandbox:
        made.append(asked)
        return Endpoint("").get("sbx_run")

    asked = Create(snapshot_id="snp_0123456789abcdef")
    client: Any = None  # nobody is asked about a volume
    one = tools.Tools(client, offer("x.test"), CLAUDE, asked, make)
    with Status() as status:
        one.install(status)
        one.create(asked, status)
    assert made == [asked]


@pytest.mark.parametrize(
    ("path", "in_the_way"),
    [
        ("/sandbox/tools", True), ("/sandbox/tools/", True), ("/sandbox/tools/bin", True), ("/sandbox", True),
        ("/sandbox/toolbox", False), ("/sandbox/home", False), ("/data", False),
    ],
)  # fmt: skip
def test_a_mount_of_the_person_s_own_is_left_alone(path: str, in_the_way: bool) -> None:
    assert tools.overlaps(path) is in_the_way


@pytest.mark.parametrize(
    ("agent", "network", "said"),
    [
        pytest.param(CLAUDE, Network("allowlist", ("r.test",), (), ()), "", id="the registry is allowed"),
        pytest.param(CLAUDE, Network("allowlist", ("*.test",), (), ()), "", id="a wildcard covers it"),
        pytest.param(CLAUDE, Network("open", None, (), ()), "", id="open"),
        pytest.param(CLAUDE, Network("allowlist", ("m.test",), (), ()), "--allow (here: r.test)", id="no registry"),
        pytest.param(CURSOR, Network("allowlist", ("m.test",), (), ()), "add --allow cursor.com", id="a vendor's host"),
        pytest.param(CURSOR, Network("allowlist", ("cursor.com",), (), ()), "", id="a vendor's host is allowed"),
        pytest.param(OPENHANDS, Network("none", None, (), ()), "add --allow github.com", id="no network"),
    ],
)
def test_what_a_run_that_installs_by_itself_would_have_to_reach(
    agent: tools.Agent, network: Network, said: str
) -> None:
    notes = list(tools.hints(agent, offer("r.test"), network))
    assert [said in note for note in notes] == ([True] if said else [])


# -- the script


@dataclass
class Installer:
    """A place that stands for the volume, and an `npm` of the test's own."""

    home: Path

    def run(self, npm: str, *, carried: bool = False) -> subprocess.CompletedProcess[str]:
        programs = self.home.parent / "programs"
        programs.mkdir()
        (programs / "npm").write_text(f"#!/bin/sh\n{npm}\n")
        (programs / "npm").chmod(0o755)
        if carried:
            (programs / "claude").symlink_to("/bin/true")
        script = tools.script(CLAUDE).replace(TOOLS_PATH, str(self.home))
        return subprocess.run(
            ["sh", "-c", script], env={"PATH": f"{programs}:{os.defpath}", "HOME": "/nonexistent"},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    @property
    def ready(self) -> bool:
        return (self.home / READY).exists()


@pytest.fixture
def installer(tmp_path: Path) -> Installer:
    (tmp_path / "volume").mkdir()
    return Installer(tmp_path / "volume")


def test_an_install_that_leaves_the_program_makes_the_volume_ready(installer: Installer) -> None:
    fill = f'echo "$*" >$HOME/asked; mkdir -p $HOME/{BIN}; ln -s /bin/true $HOME/{BIN}/claude'
    done = installer.run(fill)
    assert (done.returncode, installer.ready) == (0, True), done.stderr
    asked = (installer.home / "asked").read_text()
    assert isinstance(CLAUDE.source, Npm)
    assert asked.rstrip().endswith(f"{CLAUDE.source.package}@{CLAUDE.source.version}")


@pytest.mark.parametrize(
    ("npm", "said"),
    [
        pytest.param("echo npm error 404 >&2; exit 1", "npm error 404", id="npm fails"),
        pytest.param("exit 0", "claude is not among", id="it installs nothing"),
        pytest.param(f"mkdir -p $HOME/{BIN}/claude", "claude is not among", id="a directory of that name"),
        pytest.param(f"mkdir -p $HOME/{BIN}; : >$HOME/{BIN}/claude", "claude is not among", id="not a program"),
        pytest.param("kill -9 $PPID", "", id="it is killed in the middle"),
    ],
)  # fmt: skip
def test_an_install_that_fails_says_why_and_leaves_nothing_that_looks_ready(
    installer: Installer, npm: str, said: str
) -> None:
    done = installer.run(npm)
    assert done.returncode != 0
    assert said in done.stderr
    assert not installer.ready


def test_what_the_image_carries_is_not_installed_again(installer: Installer) -> None:
    done = installer.run("exit 1", carried=True)
    assert (done.returncode, installer.ready) == (0, True), done.stderr
    assert sorted(os.listdir(installer.home)) == [READY]
