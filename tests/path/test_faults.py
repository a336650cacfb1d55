"""The parts of a running sandbox ended by `kill -9`, or stopped, at random moments under load: nothing that was
acknowledged is lost, nothing is left behind, every caller gets an answer or an error in bounded time."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd.client import Create, Sandbox
from sandboxd.errors import ApiError, Internal
from tests.conftest import SOAK, counts
from tests.daemon import ROOT, Daemon, assets_dir
from tests.faults import BOUND_S, Work

pytestmark = pytest.mark.vm

# `sandboxd` with less patience with a guest that does not answer; `make soak` waits for as long as the product.
IMPATIENT = (
    sys.executable, "-c",
    "from sandboxd import __main__, heartbeat; heartbeat.QUIET_S = heartbeat.ATTEMPT_S = 5.0; __main__.main()",
)  # fmt: skip
HERE = Path(__file__).resolve().parent
BUILD = ROOT / "build"
KILL_GUESTD = "cp /bin/sleep /tmp/kill-guestd; exec /tmp/kill-guestd 5"


@pytest.fixture(scope="module")
def own(short_tmp: Path) -> Iterator[Daemon]:
    """A daemon whose guests have a way to end their guestd, and that may be killed itself."""
    place = short_tmp / "faults"
    build, assets = place / "build", place / "assets"
    build.mkdir(parents=True)
    for name in ("guest-exec", "sandbox-vsock"):
        shutil.copy2(BUILD / name, build)
    sources = [str(ROOT / "native" / "guest_init.c"), str(HERE / "guestd_killer.c")]
    subprocess.run(["cc", "-std=c11", "-O2", "-static", *sources, "-o", str(build / "guest-init")], check=True)
    assets.mkdir()
    shutil.copytree(assets_dir() / "wanted", assets / "wanted", symlinks=True)
    for entry in assets_dir().iterdir():
        if entry.is_dir() and entry.name != "wanted" and not entry.name.startswith("."):
            (assets / entry.name).symlink_to(entry)
    command = {} if SOAK else {"command": IMPATIENT}
    with Daemon(place, flags=("--build-dir", str(build)), assets=assets, **command) as daemon:
        yield daemon
    assert daemon.leftovers() == []
    assert "Traceback" not in daemon.log.read_text(errors="replace"), daemon.log.read_text(errors="replace")


def parts(daemon: Daemon, sandbox: str, word: bytes) -> list[int]:
    """The pids of the sandbox's programs whose command line begins with a path that has `word`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            program = (entry / "cmdline").read_bytes().split(b"\0")[0]
            if os.fsencode(sandbox) in program and word in program:
                found.append(int(entry.name))
    return found


def until_state(daemon: Daemon, sandbox: str, state: str) -> None:
    deadline = time.monotonic() + 60
    while daemon.client.get(sandbox).state != state:
        assert time.monotonic() < deadline, daemon.client.get(sandbox)
        time.sleep(0.1)


def answers(daemon: Daemon, sandbox: str, within_s: float = BOUND_S) -> None:
    deadline = time.monotonic() + within_s
    while True:
        try:
            assert daemon.client.run(sandbox, ["echo", "here"]).stdout == b"here\n"
            return
        except ApiError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def fresh(daemon: Daemon) -> Sandbox:
    for _ in range(2):
        # What is broken here takes its time on a busy machine, and a boot beside it longer than it may.
        with contextlib.suppress(Internal):
            return daemon.client.create(Create(memory_mb=512))
    return daemon.client.create(Create(memory_mb=512))


def ended_exit_code(daemon: Daemon, sandbox: str, pid: int) -> int | None:
    deadline = time.monotonic() + 60
    while (code := daemon.client.process(sandbox, pid).exit_code) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return code


def test_parts_are_killed_at_random_moments_under_load(own: Daemon, seed: random.Random) -> None:
    """Whichever it is; a sandbox whose machine it was is shown as terminated, any other is as it was."""
    sandbox = fresh(own)
    victims = ["sandboxd", "guestd", "QEMU", "sandbox-vsock"]
    for number in range(counts(4, 100)):
        victim = victims[number % len(victims)]
        kept = own.client.start(sandbox.id, ["sh", "-c", "i=0; while sleep 0.05; do i=$((i+1)); echo $i; done"])
        with Work(lambda: own.client, sandbox.id, f"round-{number}") as work:
            work.wait_busy()
            time.sleep(seed.uniform(0, 1.5))
            if victim == "sandboxd":
                own.kill()
                time.sleep(seed.uniform(0, 0.5))
                own.start()
            elif victim == "guestd":
                with contextlib.suppress(ApiError):
                    own.client.start(sandbox.id, ["sh", "-c", KILL_GUESTD])
                assert ended_exit_code(own, sandbox.id, kept.pid) == -1, "nobody saw its end"
            else:
                word = b"qemu" if victim == "QEMU" else b"vsock"
                pids = parts(own, sandbox.id, word)
                assert pids, victim
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                until_state(own, sandbox.id, "terminated")
            work.settle()
        assert victim == "guestd" or any(call.fault for call in work.calls), "nobody noticed"
        if victim in ("sandboxd", "guestd"):
            answers(own, sandbox.id)
            work.verify()
            if victim == "sandboxd":
                own.client.signal(sandbox.id, kept.pid, "KILL")
                lines = b"".join(piece.data for piece in own.client.output(sandbox.id, kept.pid)).split()
                assert [int(line) for line in lines] == list(range(1, len(lines) + 1)), "output is missing"
        else:
            disk = own.state / "disks" / f"{sandbox.id}.img"
            deadline = time.monotonic() + 30
            while not disk.exists():
                assert time.monotonic() < deadline, "its disk is lost"
                time.sleep(0.1)
            own.client.delete(sandbox.id)
            assert own.leftovers() == []
            sandbox = fresh(own)
    own.client.delete(sandbox.id)
    assert own.leftovers() == []


def test_a_machine_that_is_stopped_holds_nobody_up_and_goes_on(own: Daemon) -> None:
    sandbox = fresh(own)
    kept = own.client.start(sandbox.id, ["sh", "-c", "echo before; read line; echo $line"])
    with Work(lambda: own.client, sandbox.id, "stopped") as work:
        work.wait_busy()
        pids = parts(own, sandbox.id, b"qemu")
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            assert [one.state for one in own.client.sandboxes() if one.id == sandbox.id] == ["running"]
            assert time.monotonic() - started < 10
            with pytest.raises(ApiError):
                own.client.run(sandbox.id, ["true"])
            work.settle()
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
    answers(own, sandbox.id)
    work.verify()
    own.client.write_stdin(sandbox.id, kept.pid, b"after\n")
    assert b"".join(piece.data for piece in own.client.output(sandbox.id, kept.pid)) == b"before\nafter\n"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    own.client.delete(sandbox.id)
    assert own.leftovers() == []


def test_a_full_disk_in_the_guest_leaves_work_that_can_be_brought_back(own: Daemon, tmp_path: Path) -> None:
    sandbox = own.client.create(Create(memory_mb=512, disk_mb=96))
    commit = "git init -q -b main . && git commit -q --allow-empty -m One && git rev-parse HEAD"
    base = own.client.run(sandbox.id, ["sh", "-c", commit], cwd="/workspace").stdout.decode().strip()
    own.client.run(sandbox.id, ["sh", "-c", "echo x > f; git add f; git commit -qm Two"], cwd="/workspace")
    filled = own.client.run(sandbox.id, ["sh", "-c", "cat /dev/zero > /workspace/full; echo $?"])
    assert filled.stdout.split()[0] == b"1" and b"No space left" in filled.stderr
    assert own.client.run(sandbox.id, ["cat", "/workspace/f"]).stdout == b"x\n"
    assert own.client.read_file(sandbox.id, "/workspace/f") == b"x\n"
    with pytest.raises(ApiError, match=r"(?i)disk is full|no space|full"):
        own.client.write_file(sandbox.id, "/workspace/more", bytes(1 << 20))
    bundle = b"".join(own.client.get_workspace(sandbox.id, base, "main"))
    (tmp_path / "out").write_bytes(bundle)
    heads = subprocess.run(["git", "bundle", "list-heads", str(tmp_path / "out")], capture_output=True, check=True)
    assert heads.stdout.endswith(b" refs/heads/main\n")
    own.client.remove_file(sandbox.id, "/workspace/full")
    own.client.write_file(sandbox.id, "/workspace/more", bytes(1 << 20))
    own.client.delete(sandbox.id)


def test_real_machines_made_and_deleted_leave_nothing(own: Daemon) -> None:
    def held() -> tuple[int, int]:
        assert own.process is not None
        proc = Path(f"/proc/{own.process.pid}")
        return len(os.listdir(proc / "fd")), len(os.listdir(proc / "task"))

    def cycle() -> None:
        sandbox = fresh(own)
        assert own.client.run(sandbox.id, ["true"]).exit_code == 0
        own.client.delete(sandbox.id)

    cycle()
    time.sleep(1)
    before = held()
    for _ in range(counts(1, 50)):
        cycle()
    deadline = time.monotonic() + 20
    while held()[0] > before[0] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert held()[0] <= before[0] and held()[1] <= before[1] + 10
    assert own.leftovers() == []
