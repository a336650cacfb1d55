"""Machines through the Firecracker backend, with the stand-ins: started, adopted, ended, and what remains of each."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from egress import link, plan
from sandboxd import unixpath
from sandboxd.assets import prepare, store
from sandboxd.errors import BootFailed, SetupError
from sandboxd.vm import cgroups, drives, firecracker, firecracker_machine, firecracker_start, jail, processes
from sandboxd.vm.arch import Arch
from sandboxd.vm.firecracker import Request
from sandboxd.vm.firecracker_calls import State
from sandboxd.vm.firecracker_client import Client
from sandboxd.vm.firecracker_machine import FirecrackerMachine, Tools
from sandboxd.vm.firecracker_versions import parse
from sandboxd.vm.machine import Drive, MachineSpec
from tests import descriptors
from tests.daemon import assets_dir
from tests.firecracker_standin.fixtures import enterable, programs
from tests.firecracker_standin.standin import Standin
from tests.vm import starting
from tests.vm.deadlines import soon
from tests.vm.starting import BUILD, ROOT, ping

FIRST_UID = 979_300
INSTANCE = f"f{os.getpid()}"
VERSION = parse("Firecracker v1.16.1")
USER = 4242  # no account of this machine
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the jailer needs root")


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    with enterable("fcm-", "/var/tmp") as path:
        yield path


@pytest.fixture(scope="module")
def standin(top: Path) -> Iterator[Standin]:
    with programs(top / "fc") as running:
        yield running


@pytest.fixture(scope="module")
def tools(standin: Standin) -> Iterator[Tools]:
    yield starting.firecracker_tools(INSTANCE, standin.directory)
    assert cgroups.find().ids(INSTANCE) == set()


@pytest.fixture
def spec(top: Path, request: pytest.FixtureRequest) -> Iterator[MachineSpec]:
    """With files of no meaning, for what never boots. Afterwards nothing but its disk is left of it."""
    directory = top / "box"
    directory.mkdir(mode=0o700)
    for name in ("kernel", "initramfs", "image", "scratch"):
        (directory / name).write_bytes(bytes(1 << 20))
    drives = (Drive(directory / "image", True), Drive(directory / "scratch", False))
    own = directory / "own"
    own.mkdir(mode=0o700)
    yield MachineSpec("box_1", 1, 256, directory / "kernel", directory / "initramfs", drives, own, FIRST_UID)
    assert os.listdir(own) == []
    assert (directory / "scratch").stat().st_uid == 0
    shutil.rmtree(directory)


def failed(spec: MachineSpec, tools: Tools) -> str:
    with pytest.raises(BootFailed) as caught:
        anyio.run(firecracker_start.start, spec, tools)
    return str(caught.value)


CALLS = [request.step for request in firecracker.requests(
    MachineSpec("x", 1, 256, Path("k"), Path("i"), (Drive(Path("a"), True), Drive(Path("b"), False)), Path("d"), 1),
    VERSION, Arch.X86_64, None,
)]  # fmt: skip


@pytest.mark.parametrize("fault", ["refuse", "die", "garbage", "hang", "headers"])
@pytest.mark.parametrize("step", CALLS)
def test_a_fault_at_any_call_ends_it_all_and_names_the_call(
    spec: MachineSpec, tools: Tools, standin: Standin, step: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon(monkeypatch, step)
    standin.fail({"do": fault, "path": step.partition(" ")[2]})
    try:
        assert step in failed(spec, tools)
    finally:
        standin.fail()
    assert tools.groups is not None
    assert tools.groups.ids(INSTANCE) == set()
    assert not list(standin.programs())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"do": "die", "path": "jailer"}, "starting the jailer"),
        ({"do": "hang", "path": "jailer"}, "starting the jailer"),
        ({"do": "die", "call": 0}, "ended"),
        ({"do": "hang", "call": 0}, "waiting for Firecracker's API"),
    ],
)
def test_a_jailer_or_a_vmm_that_does_not_come_up(
    spec: MachineSpec, tools: Tools, standin: Standin, fault: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firecracker_start, "START_S", 2.0)
    standin.fail(fault)
    try:
        assert said in failed(spec, tools)
    finally:
        standin.fail()
    assert tools.groups is not None
    assert tools.groups.ids(INSTANCE) == set()


def test_another_version_than_was_looked_at_starts_no_machine(
    spec: MachineSpec, tools: Tools, standin: Standin
) -> None:
    standin.be("1.16.0")
    try:
        assert "it is 1.16.0 now, and was 1.16.1 when sandboxd started" in failed(spec, tools)
    finally:
        standin.be(str(VERSION))
    assert not list(standin.programs())


def test_a_start_that_cannot_be_cleared_up_holds_nothing_on(
    spec: MachineSpec, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ordinary user's is looked for by its mark. One of root's that is started like it fails, as it is to."""

    def end_marked(*_: object) -> set[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(processes, "end_marked", end_marked)
    before = len(os.listdir("/proc/self/fd"))
    assert "Firecracker ended" in failed(spec, replace(tools, groups=None))
    assert len(os.listdir("/proc/self/fd")) == before
    with ExitStack() as stack:
        drives.open_image(stack, "the disk", spec.drives[1])


@pytest.fixture(scope="module")
def bootable(top: Path) -> Path:
    """Kernel, initramfs, runtime and image, of its own: a jail changes whose they are."""
    if shutil.which("qemu-system-x86_64") is None or not (BUILD / "sandbox-vsock").is_file():
        pytest.skip("no QEMU, or no build/sandbox-vsock: make programs")
    try:
        recipes = prepare.recipes(BUILD)
    except SetupError as error:
        pytest.skip(str(error))
    path = top / "real"
    path.mkdir(mode=0o755)
    made: dict[str, store.Asset] = {}
    files = {"kernel": "vmlinux", "initramfs": "initramfs.cpio", "runtime": "runtime.erofs"}
    for recipe in recipes:
        asset = store.find(assets_dir(), recipe, made)
        if asset is None and recipe.name in files:
            pytest.skip(f"no {recipe.name} in {assets_dir()}: make assets")
        if asset is not None:
            made[recipe.name] = asset
    for name, file in files.items():
        shutil.copyfile(made[name].file(file), path / name)
    (path / "image").write_bytes(bytes(1 << 20))
    return path


@pytest.fixture
def networks() -> Iterator[list[plan.Plan]]:
    """Two that are not made yet."""
    if not Path("/dev/net/tun").exists():
        pytest.skip("no /dev/net/tun, to make a tap")
    made = [plan.of(f"{os.getpid():012x}", f"sbx_{number}{os.getpid():015x}") for number in range(2)]
    yield made
    for network in made:
        link.delete(network)
        assert not Path(plan.NAMESPACES, network.namespace).exists()


def with_tap(spec: MachineSpec, network: plan.Plan) -> MachineSpec:
    """Its tap is made here."""
    tap = link.make(network)

    def leave(uid: int) -> None:
        link.give(tap, uid)
        os.close(tap)

    return replace(
        spec, tap_fd=tap, mac=network.guest_mac, tap_name=network.interface,
        netns=Path(plan.NAMESPACES, network.namespace), leave_tap=leave,
    )  # fmt: skip


def starter(directory: Path, ids: str, what: str, standin: Standin, *prefix: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-m", "tests.vm.starting", str(directory), ids, INSTANCE, what]
    return subprocess.Popen(
        [*command, str(standin.directory)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def is_ended(pid: int) -> bool:
    try:
        return b") Z " in Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def tun(top: Path) -> Iterator[Path]:
    """/dev/net/tun, for everybody."""
    node = top / "tun"
    os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(10, 200))
    node.chmod(0o666)
    yield node
    node.unlink()


def opens_tap(network: plan.Plan, node: Path, uid: int) -> int:
    """What `uid` hears, in the namespace of the tap, when it opens that by its name: an errno."""
    code = (
        "import fcntl, os, struct, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "try: fcntl.ioctl(fd, 0x400454CA, struct.pack('16sH22x', sys.argv[2].encode(), 0x5002))\n"
        "except OSError as error: sys.exit(error.errno)\n"
    )
    command = ["nsenter", f"--net={plan.NAMESPACES}/{network.namespace}", "setpriv", f"--reuid={uid}", f"--regid={uid}"]
    return subprocess.run(
        [*command, "--clear-groups", "/usr/bin/python3", "-I", "-c", code, str(node), network.interface], check=False
    ).returncode


def test_it_boots_with_its_tap_is_found_again_and_leaves_nothing(
    bootable: Path, tools: Tools, standin: Standin, tun: Path, networks: list[plan.Plan]
) -> None:
    """One boot for all that needs a guest."""
    spec = with_tap(starting.spec(bootable, "box_2", uid=FIRST_UID, console=True), networks[0])

    async def main() -> None:
        machine = await firecracker_start.start(spec, tools)
        try:
            assert b'"ok":true' in (await ping(machine)).replace(b" ", b"")
            console = await machine.console_tail()
            assert b"guest-init" in console
            assert await machine.console_tail() == console, "what was read once is not lost"
            confined(machine, networks[0])
            with anyio.move_on_after(0.1) as waiting:
                await machine.wait_exit()
            assert waiting.cancelled_caught
            with pytest.raises(BootFailed, match="a machine runs in it"):
                await firecracker_start.start(spec, tools)
            assert await anyio.to_thread.run_sync(firecracker_machine.sweep, bootable, {"box_2"}, tools) == set()
            # Its path holds its version, say, and today's is another.
            renamed = replace(tools, jailer=replace(tools.jailer, firecracker=Path("/opt/firecracker-v9.9.9")))
            again = await firecracker_machine.adopt(spec.directory, spec.id, renamed)
            assert again is not None
            assert b'"ok":true' in (await ping(again)).replace(b" ", b"")
            await firecracker_machine.snapshot(again, spec, bootable / "forked")
            await again.wait_exit()
            with anyio.fail_after(1):
                await machine.wait_exit()
            await machine.terminate()  # it has the drives locked
            assert not until_none(standin)
            assert opens_tap(networks[0], tun, FIRST_UID) == 0, "nobody's any more"
            # In another namespace, with a tap of its own. The stand-in's guest does not answer after that.
            other = with_tap(spec, networks[1])
            machine = await firecracker_start.restore(other, tools, bootable / "forked")
            confined(machine, networks[1])
        finally:
            await machine.terminate()
        await machine.terminate()
        assert await firecracker_machine.adopt(spec.directory, spec.id, tools) is None

    def confined(machine: FirecrackerMachine, network: plan.Plan) -> None:
        pid = machine.programs[0].pid
        assert tools.groups is not None
        assert tools.groups.group(INSTANCE, "box_2").pids() == {pid}
        for space in ("pid", "net", "ipc", "uts", "mnt"):
            assert os.readlink(f"/proc/{pid}/ns/{space}") != os.readlink(f"/proc/self/ns/{space}"), space
        # As many connections as Firecracker takes, and QEMU's device; where no more are open, it tries without end.
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        soft, hard = next(map(int, line.split()[3:5]) for line in limits if line.startswith("Max open files"))
        assert 1023 + 256 <= soft == hard <= 4096
        root = machine.vsock_path.parent
        for name in ("kernel", "initramfs", "drive0", "drive1"):
            info = (root / name).stat()
            assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (0, 0, 0o444), name
        info = (root / "drive2").stat()
        assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (0, 0, 0o600), "the VMM has it open"
        assert os.path.samefile(root / "drive2", spec.drives[2].path), "no copy"
        for folder in (root, root / "dev", root / "dev" / "net", root / "run"):
            info = folder.stat()
            assert (info.st_uid, stat.S_IMODE(info.st_mode)) == (0, 0o750), folder
        assert opens_tap(network, tun, FIRST_UID) == errno.EBUSY, "it is the VMM's"
        assert opens_tap(network, tun, FIRST_UID + 1) == errno.EPERM

    anyio.run(main)
    assert os.listdir(spec.directory) == ["scratch"]
    info = spec.drives[2].path.stat()
    assert (info.st_uid, info.st_nlink, stat.S_IMODE(info.st_mode)) == (0, 1, 0o600)
    assert not until_none(standin)


@pytest.mark.parametrize(
    ("step", "fault"),
    [("PUT /network-interfaces/eth0", "hang"), ("PUT /vsock", "garbage"), ("PUT /actions", "hang")],
)
def test_a_fault_with_a_tap_leaves_nobody_that_has_it(
    spec: MachineSpec, tools: Tools, standin: Standin, tun: Path, networks: list[plan.Plan], step: str, fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    soon(monkeypatch, step)
    standin.fail({"do": fault, "path": step.partition(" ")[2]})
    try:
        assert step in failed(with_tap(spec, networks[0]), tools)
    finally:
        standin.fail()
    assert opens_tap(networks[0], tun, FIRST_UID) == 0
    assert tools.groups is not None
    assert tools.groups.ids(INSTANCE) == set()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (None, r"not taken back, and is ended: its guest does not run \(Not started\)"),
        ("hang", r"taken back without an answer from it: GET /: no answer in 1 s"),
        ("garbage", "taken back without an answer from it: GET /: the answer is not HTTP"),
        ("refuse", "taken back without an answer from it: GET /: refused"),
    ],
)
def test_a_vmm_is_taken_back_unless_it_says_that_its_guest_does_not_run(
    spec: MachineSpec, tools: Tools, standin: Standin, fault: str | None, said: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(firecracker_machine, "ADOPT_S", 1.0)
    boot = firecracker.requests
    monkeypatch.setattr(firecracker, "requests", lambda *asked: (*boot(*asked)[:-1], Request("GET", "/version")))

    async def main() -> None:
        machine = await firecracker_start.start(spec, tools)
        if fault is not None:
            standin.fail({"do": fault, "path": "/"})
        try:
            found = await firecracker_machine.adopt(spec.directory, spec.id, tools)
            assert (found is None) == (fault is None)
            if found is not None:
                await found.terminate()
            with anyio.fail_after(5):
                await machine.wait_exit()
        finally:
            standin.fail()
            await machine.terminate()

    anyio.run(main)
    assert re.search(f"box_1: its VMM is {said}", caplog.text)
    assert tools.groups is not None
    assert tools.groups.ids(INSTANCE) == set()


def test_a_recorded_process_outside_of_the_group_is_not_taken_for_the_vmm(
    spec: MachineSpec, tools: Tools, standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = firecracker.requests
    monkeypatch.setattr(firecracker, "requests", lambda *asked: (*boot(*asked)[:-1], Request("GET", "/version")))

    async def main() -> None:
        machine = await firecracker_start.start(spec, tools)
        standin.fail({"do": "refuse", "path": "/"})
        try:
            record = processes.read_record(spec.directory)
            assert record is not None
            (vmm,) = record.processes
            wrong = replace(vmm, pid=other.pid, start_ticks=processes.start_ticks(other.pid))
            processes.write_record(spec.directory, replace(record, processes=(wrong,)))
            assert await firecracker_machine.adopt(spec.directory, spec.id, tools) is None
            with anyio.fail_after(5):
                await machine.wait_exit()
        finally:
            standin.fail()
            await machine.terminate()

    other = subprocess.Popen(["sleep", "60"])
    try:
        anyio.run(main)
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    ("call", "version", "taken"),
    [
        pytest.param(1, "1.16.0", True, id="before the pause, of a version that is refused by now"),
        pytest.param(2, "1.15.1", True, id="paused, and within reach when it is resumed"),
        pytest.param(2, "1.16.1", False, id="paused for good"),
    ],
)
def test_a_machine_whose_daemon_was_killed_while_it_saved_it_runs_or_is_ended(
    bootable: Path, tools: Tools, standin: Standin, call: int, version: str, taken: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    standin.be(version)
    with starter(bootable, "saved_1", f"die-{call}", standin) as process:
        assert (says(process), says(process), process.wait(20)) == ("go", "started", -signal.SIGKILL)
    own = bootable / "saved_1"
    assert (own / "snapshot.new").exists()
    assert tools.groups is not None
    (pid,) = tools.groups.group(INSTANCE, "saved_1").pids()

    async def main() -> None:
        machine = await firecracker_machine.adopt(own, "saved_1", tools)
        assert (machine is not None) == taken
        if machine is not None:
            root = os.open(machine.vsock_path.parent, os.O_PATH)
            assert (await Client(root).info()).state is State.RUNNING
            assert not {"memory", "snapshot"} & set(os.listdir(machine.vsock_path.parent))
            os.close(root)
            assert sorted(os.listdir(own)) == ["jail", "scratch", "vm.json"]
            await machine.terminate()

    try:
        anyio.run(main)
    finally:
        standin.be(str(VERSION))
    assert ("saved_1 goes on under Firecracker 1.16.0, until it is ended: " in caplog.text) == (version == "1.16.0")
    assert is_ended(pid)
    assert os.listdir(own) == ["scratch"]
    assert not until_none(standin)


def until_none(standin: Standin) -> list[int]:
    """The guests that are there after a moment: they follow their VMM."""
    deadline = time.monotonic() + 5
    while (left := list(standin.programs())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def test_a_killed_starters_machines_are_adopted_or_swept(bootable: Path, tools: Tools, standin: Standin) -> None:
    """By a daemon of another instance, as it is where the state directory was renamed."""
    with starter(bootable, "kept_1,lost_1,half_1", "hold", standin) as process:
        assert (says(process), says(process)) == ("go", "started")
        process.kill()
    with open(bootable / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    assert tools.groups is not None
    pids = {id: tools.groups.group(INSTANCE, id).pids() for id in ("kept_1", "lost_1", "half_1")}
    tools = replace(tools, instance=f"{INSTANCE}-renamed")
    assert firecracker_machine.sweep(bootable, {"kept_1", "half_1"}, tools) == {"lost_1"}
    assert all(map(is_ended, pids["lost_1"])) and not any(map(is_ended, pids["kept_1"] | pids["half_1"]))
    assert os.listdir(bootable / "lost_1") == ["scratch"]

    async def main() -> None:
        for left in range(4):
            with descriptors.few_left(left), pytest.raises(OSError, match="Too many open files"):
                await firecracker_machine.adopt(bootable / "kept_1", "kept_1", tools)
        machine = await firecracker_machine.adopt(bootable / "kept_1", "kept_1", tools)
        assert machine is not None
        with unixpath.named(machine.vsock_path) as name, socket.socket(socket.AF_UNIX) as sock:
            sock.connect(name)
        (pid,) = pids["kept_1"]
        assert machine.programs[0].pid == pid
        with anyio.fail_after(1):
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(machine.wait_exit)
                await anyio.sleep(0.05)
                os.kill(pid, signal.SIGKILL)
        await machine.console_tail()
        await machine.terminate()
        (pid,) = pids["half_1"]
        os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(5):
            while not is_ended(pid):  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert await firecracker_machine.adopt(bootable / "half_1", "half_1", tools) is None

    anyio.run(main)
    for id in pids:
        assert os.listdir(bootable / id) == ["scratch"]
    assert tools.groups is not None
    assert tools.groups.ids(INSTANCE) == set()
    assert until_none(standin) == []


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5])
def test_after_a_starter_was_killed_at_any_moment_a_sweep_leaves_nothing(
    bootable: Path, tools: Tools, standin: Standin, delay_s: float
) -> None:
    with starter(bootable, "swept_1", "hold", standin) as process:
        assert says(process) == "go"
        time.sleep(delay_s)
        process.kill()
    with open(bootable / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    firecracker_machine.sweep(bootable, set(), tools)
    assert tools.groups is not None
    assert tools.groups.ids(INSTANCE) == set()
    assert until_none(standin) == []
    own = bootable / "swept_1"
    assert not own.exists() or set(os.listdir(own)) <= {"scratch"}
    # Whoever was on the way into the group sees that it is gone.
    deadline = time.monotonic() + 5
    while left := [line for line in command_lines() if os.fsencode(own) in line]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_an_ordinary_users_child_that_bears_no_mark_yet_is_swept_too(top: Path, tools: Tools) -> None:
    late = 'sleep 0.1; exec -a "$NAME" sleep 60'
    name = f"{jail.marker(INSTANCE, 'late_1')}/firecracker"
    with subprocess.Popen(["bash", "-c", late], env={"NAME": name, "PATH": "/usr/bin:/bin"}) as started:
        try:
            assert firecracker_machine.sweep(top / "none", set(), replace(tools, groups=None)) == {"late_1"}
            assert started.wait(5) == -signal.SIGKILL
        finally:
            started.kill()


def command_lines() -> list[bytes]:
    return [b" ".join(processes.command_line(int(pid))) for pid in os.listdir("/proc") if pid.isdigit()]


def test_an_ordinary_users_machine_boots_and_is_restored(bootable: Path, top: Path, standin: Standin) -> None:
    home = top / "home"
    home.mkdir()
    os.chown(home, USER, USER)
    for name in ("kernel", "initramfs", "runtime", "image"):
        (home / name).symlink_to(bootable / name)
        (bootable / name).chmod(0o644)
    standin.companion.chmod(0o666)
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    with starter(home, "box", "restore", standin, *user) as process:
        said = says(process)
        if not said:
            pytest.skip(f"an ordinary user cannot run {sys.executable}")
        assert (said, says(process)) == ("go", "started")
        owners = {os.stat(f"/proc/{pid}").st_uid for _, pid in processes.marked(INSTANCE, {USER})}
        assert owners == {USER}
        for _ in ("booted", "restored"):
            assert '"ok":true' in says(process).replace(" ", "")
        assert process.wait(20) == 0
    assert list(processes.marked(INSTANCE, {USER})) == []
    kept = [(home / "kept" / name).stat() for name in ("memory", "snapshot")]
    assert [(file.st_uid, stat.S_IMODE(file.st_mode)) for file in kept] == [(USER, 0o400)] * 2
    assert os.listdir(home / "box") == ["scratch"]
    assert until_none(standin) == []
