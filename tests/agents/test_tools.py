"""The tools volume with real machines: installed once, by nobody else's hand, whatever ends in the middle.

The agent is a package that the world's registry serves under a real one's name, and does what it is told.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.agents import tools
from cli.agents.start import BIN, NOT_STARTED, READY, TOOLS_PATH
from cli.agents.table import AGENTS
from sandboxd.client import Sandbox
from tests.agents import registry
from tests.agents.registry import Registry
from tests.agents.test_real_agents import environment
from tests.daemon import BIN as PROGRAMS
from tests.daemon import Daemon
from tests.world.world import World

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600)]

AGENT = AGENTS["cline"]
VOLUME = tools.volume(AGENT)
PROD = ("--profile", "prod", "--allow", "allowed.test")
PATIENCE_S = 240
FOUND = f"the agent is {TOOLS_PATH}/{BIN}/{AGENT.binary}"


@pytest.fixture
def served(world: World, daemon: Daemon) -> Iterator[Registry]:
    """A registry of the test's own, and nothing installed from it yet."""
    mine = Registry(AGENT)
    world.origin.answers[registry.HOST] = mine
    forget(daemon)
    yield mine
    mine.held.set()
    forget(daemon)


class Agent:
    """`sandbox-cli agent` as a process; what it says goes to files, since nobody reads while it runs."""

    def __init__(self, daemon: Daemon, place: Path, script: str, *flags: str) -> None:
        self._place = place
        place.mkdir()
        # The smallest memory that npm works in, so that many runs fit.
        command = [str(PROGRAMS / "sandbox-cli"), "agent", AGENT.name, "--no-workspace", "--memory", "768", *flags]
        with (place / "out").open("wb") as out, (place / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [*command, "--", script], cwd=place, env=environment(daemon, place), stdin=subprocess.DEVNULL,
                stdout=out, stderr=err,
            )  # fmt: skip

    def ends(self) -> int:
        return self.process.wait(PATIENCE_S)

    @property
    def said(self) -> str:
        return (self._place / "out").read_text()

    @property
    def noted(self) -> str:
        return (self._place / "err").read_text()


Starter = Callable[..., Agent]


@pytest.fixture
def start(daemon: Daemon, tmp_path: Path) -> Iterator[Starter]:
    begun: list[Agent] = []

    def begin(script: str, *flags: str) -> Agent:
        begun.append(Agent(daemon, tmp_path / f"run-{len(begun)}", script, *flags))
        return begun[-1]

    yield begin
    for one in begun:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def forget(daemon: Daemon) -> None:
    for sandbox in alive(daemon):
        daemon.client.delete(sandbox.id)
    for volume in daemon.client.volumes():
        if volume.name == VOLUME:
            daemon.client.delete_volume(VOLUME)


def alive(daemon: Daemon, *labels: str) -> list[Sandbox]:
    """Those that have not ended, with all of these labels."""
    found = [one for one in daemon.client.sandboxes() if one.state != "terminated"]
    return [one for one in found if set(labels) <= set(one.labels)]


def machine(sandbox: str) -> list[int]:
    """The emulator's processes of a sandbox."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if b"qemu-system" in command and sandbox.encode() in command:
                    found.append(int(entry.name))
    return found


def until(what: str, true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def digest(daemon: Daemon) -> str:
    return hashlib.sha256((daemon.state / "volumes" / f"{VOLUME}.ext4").read_bytes()).hexdigest()


def test_two_first_runs_install_it_once_and_a_hostile_run_changes_nothing_for_the_next(
    daemon: Daemon, served: Registry, start: Starter
) -> None:
    served.held.clear()
    first = start("echo works; curl -sS https://npm.test/cline", *PROD)
    second = start("echo works")
    until("one of them has the package fetched", lambda: served.fetched)
    until("both say what they wait for", lambda: all("installing cline" in one.noted for one in (first, second)))
    (installer,) = alive(daemon)
    assert installer.labels == {tools.INSTALL: AGENT.name}
    assert "npm.test" in (installer.network.allow or ())
    assert not {"allowed.test", "api.anthropic.com", "github.com"} & set(installer.network.allow or ())
    assert (installer.env_names, [mount.read_only for mount in installer.volumes]) == ((), [False])
    served.held.set()
    # The run may reach what it was given and no registry, whatever its installer reached.
    assert first.ends() != 0
    assert first.said.splitlines() == [FOUND, "works"], first.noted
    assert "curl" in first.noted
    assert second.ends() == 0, second.noted
    assert second.said.splitlines() == [FOUND, "works"]
    before = digest(daemon)
    place = f"{TOOLS_PATH}/{BIN}/{AGENT.binary}"
    attempts = (
        f"mount -o remount,rw {TOOLS_PATH}", f"sudo -n mount -o remount,rw {TOOLS_PATH}",
        "for disk in /dev/vd?; do echo evil >$disk; done", f"echo evil >{place}", f"rm -f {place}",
        f"mv {TOOLS_PATH}/{BIN} /tmp", f"touch {TOOLS_PATH}/cache", f"rm {TOOLS_PATH}/{READY}",
        f"unshare -r mount -o remount,rw,bind {TOOLS_PATH} && touch {TOOLS_PATH}/cache",
    )  # fmt: skip
    shadows = (
        f"mkdir -p $HOME/bin $HOME/{BIN}", f"printf '#!/bin/sh\\necho evil\\n' | tee $HOME/bin/cline $HOME/{BIN}/cline",
        "chmod 755 $HOME/bin/cline", "echo 'PATH=$HOME/bin:$PATH' >>$HOME/.profile",
    )  # fmt: skip
    tried = "; ".join(f"({one}) 2>/dev/null && echo 'DONE: {one}'" for one in attempts)
    hostile = start(f"touch $HOME/control && echo control; {tried}; {'; '.join(shadows)}")
    hostile.ends()
    assert hostile.said.splitlines()[:2] == [FOUND, "control"], hostile.noted
    assert "DONE: touch" not in hostile.said and "DONE" not in hostile.said
    third = start("echo $PATH; ls -A $HOME")
    assert third.ends() == 0
    assert third.said.splitlines()[0] == FOUND and "evil" not in third.said
    assert digest(daemon) == before
    assert served.fetched == 1 and "installing" not in hostile.noted + third.noted


@pytest.mark.soak
def test_an_install_whose_command_line_was_killed_is_waited_for_by_the_next_run(
    daemon: Daemon, served: Registry, start: Starter
) -> None:
    served.held.clear()
    first = start("echo works")
    until("the installer fetches the package", lambda: served.fetched)
    first.process.kill()
    second = start("echo works")
    until("the next run waits", lambda: "installing cline" in second.noted)
    served.held.set()
    assert second.ends() == 0, second.noted
    assert second.said.splitlines() == [FOUND, "works"]
    assert (served.fetched, alive(daemon)) == (1, [])


@pytest.mark.soak
def test_a_volume_that_was_begun_and_never_filled_is_made_anew(
    daemon: Daemon, served: Registry, start: Starter
) -> None:
    made = daemon.client.create_volume(VOLUME, tools.VOLUME_MIB)
    run = start("echo works")
    assert run.ends() == 0, run.noted
    assert run.said.splitlines() == [FOUND, "works"]
    assert next(one for one in daemon.client.volumes() if one.name == VOLUME).created_at != made.created_at


@pytest.mark.soak
def test_ctrl_c_during_an_install_leaves_nothing(daemon: Daemon, served: Registry, start: Starter) -> None:
    served.held.clear()
    run = start("echo works")
    until("the installer fetches the package", lambda: served.fetched)
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 130, run.noted
    assert (alive(daemon), [one for one in daemon.client.volumes() if one.name == VOLUME]) == ([], [])


@pytest.mark.soak
def test_an_installer_whose_machine_dies_leaves_no_half_volume(
    daemon: Daemon, served: Registry, start: Starter
) -> None:
    served.held.clear()
    first = start("echo works")
    until("the installer fetches the package", lambda: served.fetched)
    (installer,) = alive(daemon)
    pids = machine(installer.id)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until("the machine is missed", lambda: not alive(daemon, tools.INSTALL))
    served.held.set()
    # This run does without: it installs into its own sandbox, which may reach the registry.
    assert first.ends() == 0, first.noted
    assert first.said.splitlines() == [f"the agent is /sandbox/home/{BIN}/cline", "works"]
    assert "its sandbox ended" in first.noted
    second = start("echo works")
    assert second.ends() == 0, second.noted
    assert second.said.splitlines() == [FOUND, "works"]


@pytest.mark.soak
def test_a_daemon_that_is_killed_during_an_install_has_it_finished_by_the_next_run(
    daemon: Daemon, served: Registry, start: Starter
) -> None:
    served.held.clear()
    first = start("echo works")
    until("the installer fetches the package", lambda: served.fetched)
    daemon.kill()
    assert first.ends() == 1
    assert "sandboxd at" in first.noted and "Traceback" not in first.noted
    daemon.start()
    served.held.set()
    second = start("echo works")
    assert second.ends() == 0, second.noted
    assert second.said.splitlines() == [FOUND, "works"]


@pytest.mark.soak
def test_other_bytes_than_the_registry_promised_are_not_installed(
    daemon: Daemon, served: Registry, start: Starter
) -> None:
    served.forged = True
    run = start("echo works")
    assert run.ends() == NOT_STARTED
    assert "could not be installed once for all runs" in run.noted and "EINTEGRITY" in run.noted
    assert run.said == ""
    assert [one for one in daemon.client.volumes() if one.name == VOLUME] == []
