"""Command lines, the daemon and a machine are killed under runs with checkpoints, with real machines."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cli.person import Person
from tests.conftest import git, make_repository
from tests.daemon import Daemon

pytestmark = pytest.mark.vm

PATIENCE_S = 240
RUN = ("run", "--memory=512", "--name")
SCRIPT = ("sh", "-c", "echo committed >one; git add one; git commit -qm One; echo work >two; exec sleep 600")
REF = "refs/sandbox/checkpoints/"


@pytest.fixture
def own(short_tmp: Path) -> Iterator[Daemon]:
    with Daemon(short_tmp / "recover") as running:
        yield running
    assert running.leftovers() == []
    assert "Traceback" not in running.log.read_text(errors="replace")


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def records(person: Person) -> dict[str, dict[str, Any]]:
    files = (person.home / ".config/sandbox/sessions").glob("*.json")
    found: dict[str, dict[str, Any]] = {}
    for path in files:
        with suppress(FileNotFoundError):
            record = json.loads(path.read_text())
            found[record["branch"]] = record
    return found


def recover(person: Person) -> dict[str, dict[str, Any]]:
    done = person.run("recover", "--json", cwd=person.home / "project")
    assert done.returncode == 0, done.stderr
    return {one["branch"]: one for one in json.loads(done.stdout)}


def kill_machine(sandbox: str) -> None:
    """Its VMM, as the kernel would when memory runs out."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if b"qemu" in command and sandbox.encode() in command:
                os.kill(int(process.name), signal.SIGKILL)


def test_everybody_is_killed_and_the_work_is_found(own: Daemon, tmp_path: Path) -> None:
    project = make_repository(tmp_path / "project")
    person = Person(tmp_path, own.socket)
    attached = person.start(*RUN, "one", "--checkpoint-every=2s", "--", *SCRIPT, cwd=project)
    left = person.start(*RUN, "two", "-d", "--", *SCRIPT, cwd=project)
    _, said = left.communicate(timeout=PATIENCE_S)
    assert left.returncode == 0, said
    watching = person.start("attach", "--checkpoint-every=2s", "two")
    ids = {
        name: until(lambda name=name: (one := records(person).get(name)) and one["checkpoint"] and one["sandbox"])
        for name in ("one", "two")
    }
    for process in (attached, watching):
        process.kill()
        process.wait()
    for name, one in recover(person).items():
        assert (one["state"], one["checkpoint_ref"]) == ("running", f"{REF}{ids[name]}")
        assert git(project, "show", f"{REF}{ids[name]}:two") == "work\n"
        assert git(project, "show", f"{REF}{ids[name]}^:one") == "committed\n"

    own.kill()
    assert {one["state"] for one in recover(person).values()} == {"unreachable"}
    own.start()
    until(lambda: {one["state"] for one in recover(person).values()} == {"running"})

    kill_machine(ids["one"])
    until(lambda: recover(person)["one"]["state"] == "gone")
    found = recover(person)
    assert found["one"]["said"][:2] == [
        "its sandbox is gone", f"its checkpoint of {found['one']['checkpoint_at']} is {REF}{ids['one']}",
    ]  # fmt: skip
    done = person.run("bring-back", ids["two"])
    assert done.returncode == 0, done.stderr
    assert git(project, "show", "refs/sandbox/two:two") == "work\n"
    assert git(project, "for-each-ref", "--format=%(refname)").split() == [
        "refs/heads/main", *sorted(f"{REF}{one}" for one in ids.values()), "refs/sandbox/two",
    ]  # fmt: skip
    assert git(project, "status", "--porcelain") == ""
    assert git(project, "fsck", "--strict", "--no-dangling") == ""
    assert person.run("kill", ids["two"]).returncode == 0
    assert list(recover(person)) == ["one"]


@pytest.mark.soak
def test_a_full_disk_is_told_and_the_last_checkpoint_stays(own: Daemon, tmp_path: Path) -> None:
    project = make_repository(tmp_path / "project")
    person = Person(tmp_path, own.socket)
    script = """
        echo before >work; until [ -e .git/refs/sandbox/checkpoint ]; do sleep 1; done; sleep 5
        cat /dev/zero >.git/fill; echo after >work; until [ -e .git/stop ]; do sleep 1; done; rm .git/fill
    """
    flags = ("--disk=256", "--checkpoint-every=2s")
    process = person.start(*RUN, "full", *flags, "--", "sh", "-c", script, cwd=project)
    record = until(lambda: (one := records(person).get("full")) and one["checkpoint"] and one)
    process.kill()
    process.wait()
    free = ["sh", "-c", "df --output=avail /workspace | tail -n 1"]
    until(lambda: own.client.run("full", free).stdout.strip() == b"0")
    watching = person.start("attach", "--checkpoint-every=2s", "full")
    before = len(own.client.events("full").events)
    until(lambda: len(own.client.events("full").events) > before + 3)
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate(timeout=PATIENCE_S)
    assert b"the last checkpoint failed: the sandbox's disk is full" in said
    assert git(project, "show", f"{REF}{record['sandbox']}:work") == "before\n"
    own.client.delete("full")
