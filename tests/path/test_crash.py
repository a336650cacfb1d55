"""`kill -9` at any moment: afterwards nothing without an owner, and no repository in a half state."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from sandboxd.client import Create, Sandbox, Unreachable
from sandboxd.errors import ApiError
from tests.conftest import counts, git
from tests.daemon import BIN, Daemon

pytestmark = pytest.mark.vm


def test_the_daemon_killed_at_random_moments_of_a_create(short_tmp: Path, seed: random.Random) -> None:
    with Daemon(short_tmp / "crash") as daemon:
        for _ in range(counts(2, 25)):
            client = subprocess.Popen(
                [str(BIN / "sandbox-cli"), "run", "--memory", "512", "--", "sleep", "60"],
                env=daemon.environment(), cwd="/", stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            time.sleep(seed.uniform(0.05, 8))
            daemon.kill()
            client.wait(30)
            daemon.start()
            alive = [sandbox for sandbox in daemon.client.sandboxes() if sandbox.state == "running"]
            for sandbox in alive:
                assert daemon.client.run(sandbox.id, ["echo", "ok"]).stdout == b"ok\n"
                daemon.client.delete(sandbox.id)
            assert daemon.leftovers() == []
    assert daemon.leftovers() == []


def test_a_killed_daemon_takes_its_sandboxes_back_with_processes_and_output(short_tmp: Path) -> None:
    with Daemon(short_tmp / "adopt") as daemon:
        sandbox = daemon.client.create(Create(name="kept", memory_mb=512, labels={"a": "b"}))
        process = daemon.client.start(sandbox.id, ["sh", "-c", "echo before; sleep 4; echo after; exit 3"])
        time.sleep(1)
        daemon.kill()
        daemon.start()
        again = daemon.client.get("kept")
        assert (again.id, again.state, again.labels) == (sandbox.id, "running", {"a": "b"})
        pieces = list(daemon.client.output(sandbox.id, process.pid))
        assert b"".join(piece.data for piece in pieces) == b"before\nafter\n"
        assert pieces[-1].exit_code == 3
        assert daemon.client.start(sandbox.id, ["true"]).pid == process.pid + 1
    assert daemon.leftovers() == []


def test_the_cli_killed_at_random_moments_leaves_the_repository_whole(
    daemon: Daemon, repository: Path, seed: random.Random
) -> None:
    before = git(repository, "for-each-ref")
    for _ in range(counts(2, 30)):
        known = {sandbox.id for sandbox in daemon.client.sandboxes()}
        client = subprocess.Popen(
            [str(BIN / "sandbox-cli"), "run", "--memory", "512", "--name", "killed", "--", "sh", "-c", "echo x > x"],
            env=daemon.environment(), cwd=repository, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(seed.uniform(0.1, 12))
        client.send_signal(signal.SIGKILL)
        client.wait()
        time.sleep(0.5)
        git(repository, "fsck", "--strict", "--no-dangling")
        refs = git(repository, "for-each-ref", "refs/sandbox", "--format=%(refname)").split()
        assert refs in ([], ["refs/sandbox/killed"])
        if refs:
            assert git(repository, "show", "refs/sandbox/killed:x") == "x\n"
            git(repository, "update-ref", "-d", "refs/sandbox/killed")
        for sandbox in daemon.client.sandboxes():
            if sandbox.id not in known and sandbox.state != "terminated":
                daemon.client.delete(sandbox.id)
    assert git(repository, "for-each-ref") == before


def test_a_vmm_that_dies_ends_its_sandbox_and_nothing_else(daemon: Daemon, shared: Sandbox) -> None:
    victim = daemon.client.create(Create(memory_mb=512))
    marker = os.fsencode(victim.id)
    pids = [int(p.name) for p in Path("/proc").glob("[0-9]*") if _names(p, marker, b"qemu")]
    assert pids
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + 60
    while daemon.client.get(victim.id).state == "running" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert daemon.client.get(victim.id).state == "terminated"
    assert daemon.client.run(shared.id, ["echo", "fine"]).stdout == b"fine\n"


def _names(process: Path, *words: bytes) -> bool:
    try:
        command = (process / "cmdline").read_bytes()
    except OSError:
        return False
    return all(word in command for word in words)


def test_deleting_during_a_create_leaves_nothing(daemon: Daemon, seed: random.Random) -> None:
    for _ in range(counts(2, 25)):
        client = subprocess.Popen(
            [str(BIN / "sandbox-cli"), "run", "-d", "--memory", "512", "--label", "short=1", "--", "sleep", "60"],
            env=daemon.environment(), cwd="/", stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(seed.uniform(0.3, 6))
        for sandbox in daemon.client.sandboxes(["short=1"]):
            if sandbox.state != "terminated":
                daemon.client.delete(sandbox.id)
        client.wait(60)
        for sandbox in daemon.client.sandboxes(["short=1"]):
            if sandbox.state != "terminated":
                try:
                    daemon.client.delete(sandbox.id)
                except (ApiError, Unreachable) as fault:
                    raise AssertionError(f"a delete failed: {fault}") from fault
