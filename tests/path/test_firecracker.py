"""A whole `sandboxd` with the Firecracker backend, its programs the stand-ins, its guests real."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from sandboxd.assembly import instance
from sandboxd.client import Create, NetworkRequest
from sandboxd.errors import SandboxError
from sandboxd.vm import cgroups
from sandboxd.vm.firecracker import Request
from sandboxd.vm.firecracker_client import Client
from tests.conformance.live import FIRECRACKER
from tests.daemon import Daemon, assets_dir
from tests.firecracker_standin.fixtures import enterable, programs
from tests.firecracker_standin.standin import Standin

NONE = NetworkRequest("none")
TAP = "/network-interfaces/eth0"
# Of Firecracker: the jailer's own, and where its API is. With another one it could be without its filters of calls.
FLAGS = {b"--id", b"--start-time-us", b"--start-time-cpu-us", b"--parent-cpu-time-us", b"--api-sock"}
CANARY = "value-2f1c7a90b6"
LIMITER = {
    "bandwidth": {"size": 1000 << 20, "refill_time": 1000}, "ops": {"size": 100000, "refill_time": 1000},
}  # fmt: skip
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the jailer needs root")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """On the images' file system."""
    with enterable("sbx-fc-", assets_dir().parent) as path:
        yield path


@pytest.fixture(scope="module")
def standin(place: Path) -> Iterator[Standin]:
    with programs(place / "fc") as running:
        yield running


@pytest.fixture(scope="module")
def daemon(place: Path, standin: Standin) -> Iterator[Daemon]:
    policy = place / "policy.yaml"
    policy.write_text("limits: {disk_mb_per_s: 1000, disk_ops_per_s: 100000}\n")
    flags = ("--firecracker", str(standin.firecracker), "--jailer", str(standin.jailer), "--policy", str(policy))
    with Daemon(place / "d", flags=flags, command=FIRECRACKER) as running:
        yield running
    assert running.leftovers() == []
    assert cgroups.find().ids(instance(running.state)) == set()
    assert "Traceback" not in running.log.read_text()


def everything_said() -> bytes:
    """Every command line and environment of this host that can be read."""
    found = b""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            for name in ("cmdline", "environ"):
                with suppress(OSError):
                    found += (entry / name).read_bytes()
    return found


def configured(root: Path) -> str:
    """What a VMM says that its machine is, over the API in its jail."""
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return json.dumps(anyio.run(Client(fd).send, Request("GET", "/vm/config")))
    finally:
        os.close(fd)


def test_a_sandbox_from_create_to_delete_and_over_a_killed_daemon(daemon: Daemon, standin: Standin) -> None:
    client = daemon.client
    assert client.capabilities().backend == "firecracker"
    sandbox = client.create(Create(memory_mb=512, env={"CANARY": CANARY}, network=NONE))
    done = client.run(sandbox.id, ["sh", "-c", 'test -n "$CANARY" && cat /proc/cmdline'])
    assert done.exit_code == 0
    assert b"8250.nr_uarts=0" in done.stdout
    client.start(sandbox.id, ["sleep", "600"], env={"CANARY": CANARY})
    assert CANARY.encode() not in done.stdout + everything_said()
    directory = daemon.state / "sandboxes" / sandbox.id
    drives = [call for call in standin.calls(sandbox.id.replace("_", "-")) if call["path"].startswith("/drives/")]
    assert [json.loads(call["body"])["rate_limiter"] for call in drives] == [LIMITER] * 3
    told = json.dumps(standin.calls(sandbox.id.replace("_", "-"))) + (directory / "vm.json").read_text()
    assert "InstanceStart" in told
    (root,) = directory.glob("jail/*/*/root")
    # A guest can make its VMM log and count without end.
    assert all(stat.S_ISFIFO((root / name).lstat().st_mode) for name in ("log", "metrics"))
    configuration = configured(root)
    assert '"uds_path": "v.sock"' in configuration
    told += configuration
    assert CANARY not in told
    assert sandbox.id not in told.replace('"id": "' + sandbox.id, "").replace(f"/{sandbox.id}", "")

    daemon.kill()
    daemon.start()
    assert client.run(sandbox.id, ["echo", "still here"]).stdout == b"still here\n"
    group = cgroups.find().group(instance(daemon.state), sandbox.id)
    (vmm,) = group.pids()
    words = Path(f"/proc/{vmm}/cmdline").read_bytes().split(b"\0")
    assert {word for word in words if word.startswith(b"--")} <= FLAGS
    client.delete(sandbox.id)
    assert not group.directories[0].exists()
    assert not directory.exists()
    deadline = time.monotonic() + 10
    while standin.programs() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert standin.programs() == []


@pytest.mark.parametrize("fault", ["refuse", "die"])
@pytest.mark.parametrize(("path", "network"), [("/vsock", NONE), (TAP, None), ("/actions", None)])
def test_a_vmm_that_fails_is_an_error_that_names_the_call(
    daemon: Daemon, standin: Standin, path: str, network: NetworkRequest | None, fault: str
) -> None:
    asked = len(standin.calls())
    standin.fail({"do": fault, "path": path})
    try:
        with pytest.raises(SandboxError, match=f"the sandbox did not start: PUT {path}: "):
            daemon.client.create(Create(memory_mb=512, network=network))
    finally:
        standin.fail()
    taps = [call for call in standin.calls()[asked:] if call["path"] == TAP]
    assert len(taps) == (network is None)
    assert cgroups.find().ids(instance(daemon.state)) == set()
    assert daemon.leftovers() == []


def test_a_guest_that_does_not_come_up_is_tried_once_more_with_its_console(daemon: Daemon, standin: Standin) -> None:
    before = len(standin.calls())

    def started() -> list[str]:
        return [call["id"] for call in standin.calls()[before:] if call["path"] == "/actions"]

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(daemon.client.create, Create(memory_mb=512, network=NONE))
        deadline = time.monotonic() + 30
        while not started() and time.monotonic() < deadline:
            time.sleep(0.02)
        (id,) = started()
        group = cgroups.find().group(instance(daemon.state), id.replace("sbx-", "sbx_", 1))
        for pid in group.pids():
            os.kill(pid, signal.SIGKILL)
        sandbox = made.result(120)
    assert started() == [id, id]
    assert "the machine ended; it is tried again with its console kept" in daemon.log.read_text()
    assert b"console=ttyS0" in daemon.client.run(sandbox.id, ["cat", "/proc/cmdline"]).stdout
    daemon.client.delete(sandbox.id)
