"""Machines saved and restored through the Firecracker backend: with the stand-ins, and with a VMM that cheats."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest

from guestd import protocol
from sandboxd.assets import prepare, store
from sandboxd.errors import BootFailed, SandboxError, SetupError
from sandboxd.guest import Guest, GuestRefused
from sandboxd.vm import (
    cgroups,
    firecracker,
    firecracker_machine,
    firecracker_start,
    jail,
    jailer,
    processes,
    saved_files,
)
from sandboxd.vm.arch import Arch
from sandboxd.vm.firecracker_machine import FirecrackerMachine, Tools
from sandboxd.vm.firecracker_versions import Version, parse, read
from sandboxd.vm.machine import UNLIMITED, Drive, MachineSpec, Rate
from sandboxd.vm.processes import Process, Record
from sandboxd.vm.saved_files import STATE_BYTES
from tests.daemon import assets_dir
from tests.firecracker_standin import real
from tests.firecracker_standin.fixtures import enterable
from tests.firecracker_standin.standin import Standin
from tests.vm.deadlines import soon
from tests.vm.starting import BOOT_S, BUILD, ping

FIRST_UID = 979_500
INSTANCE = f"s{os.getpid()}"
VERSION = parse("Firecracker v1.16.1")
FILES = {"kernel": "vmlinux", "initramfs": "initramfs.cpio", "runtime": "runtime.erofs", "image": "image.erofs"}
STALE_S = 2.0
LOOK = """
cat /etc/machine-id /etc/hostname; hostname; date +%s.%N; head -c 32 /dev/urandom | base64; df -k --output=size /
"""
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the jailer needs root")


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    with enterable("fss-", real.place()) as path:
        yield path


@pytest.fixture
def place(top: Path) -> Iterator[Path]:
    """For one test. What it makes a machine in is empty afterwards."""
    path = top / "place"
    path.mkdir()
    (path / "own").mkdir(mode=0o700)
    yield path
    assert os.listdir(path / "own") == []
    shutil.rmtree(path)


# Saving: with a VMM that is this test, for it to leave what it likes.


class Vmm:
    """Answers yes to every call, and does `saves` when it is told to save. It says so once `answering` is set."""

    def __init__(
        self, directory: Path, uid: int | None, saves: Callable[[Path], None], version: Version = VERSION
    ) -> None:
        self.root = directory / "jail"
        self.root.mkdir()
        self.uid, self._saves = uid, saves
        self.faults: dict[str, str] = {}
        self.asked: list[str] = []
        self.answering = anyio.Event()
        process = Process("Firecracker", os.getpid(), 0)
        processes.write_record(directory, Record("box_1", jail.marker(INSTANCE, "box_1"), (process,)))
        self.machine = FirecrackerMachine("box_1", version, directory, process, [], None, None, self.root, ExitStack())

    def write(self, name: str, size: int) -> None:
        with (self.root / name).open("wb") as file:
            file.truncate(size)
        if self.uid is not None:
            os.chown(self.root / name, self.uid, self.uid)

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with await anyio.create_unix_listener(self.root / "api.sock") as listener:
            task_status.started()
            await listener.serve(self._answer)

    async def _answer(self, stream: anyio.abc.SocketStream) -> None:
        async with stream:
            asked = (await stream.receive()).decode()
            step = " ".join(asked.split(" ", 2)[:2])
            self.asked.append(f"{step} {asked.rpartition('state')[2]}" if step == "PATCH /vm" else step)
            fault = self.faults.get(step, "")
            if fault == "hang":
                await anyio.sleep_forever()
            if fault != "close":
                if step == "PUT /snapshot/create" and not fault:
                    self._saves(self.root)
                    await self.answering.wait()
                await stream.send(fault.encode() or b"HTTP/1.1 204 \r\nServer: Firecracker API\r\n\r\n")


def described(place: Path, uid: int | None = FIRST_UID) -> MachineSpec:
    return MachineSpec("box_1", 1, 64, place / "kernel", place / "initramfs", (), place / "own", uid)


def save(place: Path, vmm: Vmm, uid: int | None = FIRST_UID) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as group:
            await group.start(vmm.serve)
            vmm.answering.set()
            await firecracker_machine.snapshot(vmm.machine, described(place, uid), place / "kept")
            group.cancel_scope.cancel()

    try:
        anyio.run(main)
    except ExceptionGroup as found:
        raise found.exceptions[0] from None


def honest(vmm: Vmm) -> None:
    vmm.write("memory", 64 << 20)
    vmm.write("snapshot", 1000)


def cheating(place: Path, then: Callable[[Vmm], None], version: Version = VERSION) -> Vmm:
    vmm = Vmm(place / "own", FIRST_UID, lambda _: then(vmm), version)
    return vmm


def test_one_that_is_being_saved_is_not_saved_once_more_meanwhile(place: Path) -> None:
    vmm = Vmm(place / "own", FIRST_UID, lambda _: (honest(vmm), saving.set())[0])
    saving = anyio.Event()

    async def main() -> None:
        async with anyio.create_task_group() as group:
            await group.start(vmm.serve)
            group.start_soon(firecracker_machine.snapshot, vmm.machine, described(place), place / "kept")
            await saving.wait()
            with pytest.raises(SandboxError, match="it is being saved already; it runs on"):
                await firecracker_machine.snapshot(vmm.machine, described(place), place / "other")
            vmm.answering.set()
            await vmm.machine.wait_exit()
            while not vmm.machine.ended:  # noqa: ASYNC110 - a machine without processes is told of by nothing
                await anyio.sleep(0.01)
            group.cancel_scope.cancel()

    anyio.run(main)
    assert sorted(os.listdir(place / "kept")) == ["memory", "snapshot"]
    assert not (place / "other").exists()


@pytest.mark.parametrize(("uid", "mode"), [(FIRST_UID, 0o444), (None, 0o400)], ids=["root's", "a user's"])
def test_what_is_saved_is_ours_and_nobody_writes_to_it_any_more(place: Path, uid: int | None, mode: int) -> None:
    vmm = Vmm(place / "own", uid, lambda _: honest(vmm))
    save(place, vmm, uid)
    assert stat.S_IMODE((place / "kept").stat().st_mode) == 0o700
    assert sorted(os.listdir(place / "kept")) == ["memory", "snapshot"]
    for name in ("memory", "snapshot"):
        found = (place / "kept" / name).lstat()
        assert (found.st_mode, found.st_uid, found.st_nlink) == (stat.S_IFREG | mode, 0, 1)


def swap(name: str, make: Callable[[Vmm, Path], None]) -> Callable[[Vmm], None]:
    def act(vmm: Vmm) -> None:
        honest(vmm)
        (vmm.root / name).unlink()
        make(vmm, vmm.root / name)

    return act


def _socket(_: Vmm, at: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(at))


def _second_name(vmm: Vmm, at: Path) -> None:
    vmm.write("drive0", 64 << 20 if at.name == "memory" else 1000)
    os.link(vmm.root / "drive0", at)


def _of_root(vmm: Vmm, at: Path) -> None:
    vmm.write(at.name, 64 << 20 if at.name == "memory" else 1000)
    os.chown(at, 0, 0)


def _nothing(_: Vmm, at: Path) -> None:
    pass


def victim(vmm: Vmm) -> Path:
    return vmm.root.parents[1] / "victim"


@pytest.mark.parametrize("name", ["memory", "snapshot"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(lambda vmm, at: at.symlink_to(victim(vmm)), "symbolic links", id="a link to a file of the host"),
        pytest.param(lambda vmm, at: os.link(victim(vmm), at), "not a file of its own", id="a name of root's file"),
        pytest.param(_of_root, "not a file of its own", id="root's file"),
        pytest.param(lambda _, at: os.mkfifo(at), "not a regular file", id="a FIFO"),
        pytest.param(lambda _, at: at.mkdir(), "not a regular file", id="a directory"),
        pytest.param(_socket, "No such device", id="a socket"),
        pytest.param(_second_name, "not a file of its own", id="a file with another name"),
        pytest.param(_nothing, "No such file", id="nothing"),
        pytest.param(lambda vmm, at: vmm.write(at.name, 0), "it is 0 bytes", id="an empty file"),
        pytest.param(
            lambda vmm, at: vmm.write(at.name, (64 << 20) + 1), f"it is {(64 << 20) + 1} bytes", id="a large file"
        ),
    ],
)
def test_what_a_vmm_puts_in_the_place_of_its_files_is_refused(
    place: Path, name: str, make: Callable[[Vmm, Path], None], said: str
) -> None:
    (place / "victim").write_bytes(bytes(1000))
    (place / "victim").chmod(0o640)
    with pytest.raises(SandboxError, match=f"^box_1 could not be saved: .*{said}"):
        save(place, cheating(place, swap(name, make)))
    assert sorted(os.listdir(place)) == ["own", "victim"]
    found = (place / "victim").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_nlink) == (0o640, 0, 1)


def test_a_state_is_of_bounded_size(place: Path) -> None:
    for size, kept in ((STATE_BYTES, True), (STATE_BYTES + 1, False)):
        vmm = cheating(place, swap("snapshot", lambda vmm, at, size=size: vmm.write(at.name, size)))  # type: ignore[misc]
        if kept:
            save(place, vmm)
            shutil.rmtree(place / "kept")
        else:
            with pytest.raises(SandboxError, match=f"its state: it is {size} bytes"):
                save(place, vmm)


@pytest.mark.parametrize(
    "fault", ["HTTP/1.1 400 \r\nContent-Length: 0\r\n\r\n", "\xff\xfe", "close", "hang"],
    ids=["refuses", "garbage", "hangs up", "hangs"],
)  # fmt: skip
@pytest.mark.parametrize("step", ["PATCH /vm", "PUT /snapshot/create"])
def test_a_fault_at_any_call_of_saving_ends_the_machine_and_names_the_call(
    place: Path, step: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon(monkeypatch, step)
    vmm = cheating(place, honest)
    vmm.faults[step] = fault
    with pytest.raises(SandboxError, match=f"^box_1 could not be saved: {step}: .*; it has ended$"):
        save(place, vmm)
    assert os.listdir(place) == ["own"]


@pytest.mark.parametrize("fault", ["HTTP/1.1 400 \r\nContent-Length: 0\r\n\r\n", "\xff\xfe", "close"])
def test_a_machine_that_was_not_saved_runs_on_where_its_guest_stays_within_reach(place: Path, fault: str) -> None:
    vmm = cheating(place, honest, read("1.15.1"))
    vmm.faults["PUT /snapshot/create"] = fault
    with pytest.raises(SandboxError, match=r"^box_1 could not be saved: PUT /snapshot/create: .*; it runs on$"):
        save(place, vmm)
    assert vmm.asked == ['PATCH /vm ": "Paused"}', "PUT /snapshot/create", 'PATCH /vm ": "Resumed"}']
    assert processes.read_record(place / "own") is not None
    assert sorted(os.listdir(place / "own")) == ["jail", "vm.json"]
    assert os.listdir(vmm.root) == ["api.sock"]
    # A later try finds nothing of this one in its way.
    vmm.faults.clear()
    save(place, vmm)
    assert sorted(os.listdir(place / "kept")) == ["memory", "snapshot"]


def test_a_machine_that_its_vmm_does_not_resume_is_ended(place: Path) -> None:
    vmm = cheating(place, honest, read("1.15.1"))
    vmm.faults |= dict.fromkeys(("PATCH /vm", "PUT /snapshot/create"), "close")
    with pytest.raises(SandboxError, match=r"could not be saved: PATCH /vm: .*; it has ended$"):
        save(place, vmm)


def test_a_save_that_is_given_up_lets_the_machine_run_on(place: Path) -> None:
    vmm = cheating(place, honest, read("1.15.1"))

    async def main() -> None:
        async with anyio.create_task_group() as group:
            await group.start(vmm.serve)
            with anyio.move_on_after(0.1) as scope:
                await firecracker_machine.snapshot(vmm.machine, described(place), place / "kept")
            assert scope.cancelled_caught
            assert not vmm.machine.ended
            await vmm.machine.terminate()
            group.cancel_scope.cancel()

    anyio.run(main)
    assert vmm.asked[-1] == 'PATCH /vm ": "Resumed"}'
    assert os.listdir(place) == ["own"]


@pytest.mark.parametrize("moves", range(3))
def test_a_daemon_killed_while_it_takes_the_files_out_leaves_nothing(place: Path, tools: Tools, moves: int) -> None:
    vmm = cheating(place, honest)
    renames = 0

    def die(event: str, _: object) -> None:
        nonlocal renames
        if event == "os.rename":
            renames += 1
            if renames > moves:
                os.kill(os.getpid(), signal.SIGKILL)

    daemon = os.fork()
    if daemon == 0:
        try:
            sys.addaudithook(die)
            save(place, vmm)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(daemon, 0)[1]) == -signal.SIGKILL
    assert (place / "own" / "snapshot.new").exists() and not (place / "kept").exists()
    assert anyio.run(firecracker_machine.adopt, place / "own", "box_1", tools) is None


def not_begun(place: Path, memory_mb: int, why: str) -> None:
    """The machine is asked for nothing, and goes on."""
    vmm = cheating(place, honest)

    async def main() -> None:
        with pytest.raises(SandboxError, match=f"^box_1 could not be saved: {why}.*; it runs on$"):
            await firecracker_machine.snapshot(
                vmm.machine, replace(described(place), memory_mb=memory_mb), place / "kept"
            )
        assert processes.read_record(place / "own") is not None
        assert vmm.root.exists()
        await vmm.machine.terminate()

    anyio.run(main)


def test_a_snapshot_that_is_there_stays_as_it_is(place: Path) -> None:
    (place / "kept").mkdir()
    (place / "kept" / "memory").write_text("before")
    not_begun(place, 64, "there is a snapshot")
    assert (place / "kept" / "memory").read_text() == "before"


def test_memory_that_finds_no_room_is_not_begun_with(place: Path) -> None:
    not_begun(place, 1 << 30, f"its {1 << 30} MiB of memory find no room")
    assert os.listdir(place) == ["own"]


def test_a_machine_that_is_ended_while_it_is_saved_leaves_no_snapshot(place: Path) -> None:
    vmm = cheating(place, honest)

    async def main() -> None:
        vmm.answering = anyio.Event()
        async with anyio.create_task_group() as group:

            async def end() -> None:
                while not (vmm.root / "memory").exists():  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                await vmm.machine.terminate()
                vmm.answering.set()

            await group.start(vmm.serve)
            group.start_soon(end)
            with pytest.raises(SandboxError, match="could not be saved: it was ended meanwhile"):
                await firecracker_machine.snapshot(vmm.machine, described(place), place / "kept")
            group.cancel_scope.cancel()

    anyio.run(main)
    assert os.listdir(place) == ["own"]


def test_files_are_taken_out_once_nobody_can_write_to_them(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vmm = cheating(place, honest)
    take_out = saved_files.take_out
    with subprocess.Popen(["sleep", "60"]) as writer:
        vmm.machine._pidfds.append(os.pidfd_open(writer.pid))
        ended = []

        def looked(*arguments: Any) -> None:
            ended.append(writer.poll())
            take_out(*arguments)

        monkeypatch.setattr(saved_files, "take_out", looked)
        try:
            save(place, vmm)
        finally:
            writer.kill()
    assert ended == [-signal.SIGKILL]


# Restoring: with the stand-ins.


@pytest.fixture(scope="module")
def assets() -> Mapping[str, Path]:
    if shutil.which("qemu-system-x86_64") is None or not (BUILD / "sandbox-vsock").is_file():
        pytest.skip("no QEMU, or no build/sandbox-vsock: make programs")
    made: dict[str, store.Asset] = {}
    try:
        for recipe in prepare.recipes(BUILD):
            asset = store.find(assets_dir(), recipe, made)
            if asset is None:
                pytest.skip(f"no {recipe.name} in {assets_dir()}: make assets")
            made[recipe.name] = asset
    except SetupError as error:
        pytest.skip(str(error))
    return {name: made[name].file(file) for name, file in FILES.items()}


@pytest.fixture(scope="module")
def standin(top: Path) -> Iterator[Standin]:
    with real.programs(top / "fc") as running:
        yield running


@pytest.fixture(scope="module")
def tools(standin: Standin) -> Iterator[Tools]:
    found = jail.find_tools(root=True)
    hierarchy = cgroups.find()
    yield Tools(
        jailer.Tools(standin.firecracker, standin.jailer, found), jail.program(standin.firecracker),
        real.version(standin), Arch.X86_64, INSTANCE, 4096, hierarchy,
    )  # fmt: skip
    assert hierarchy.ids(INSTANCE) == set()


def all_ended(standin: Standin) -> bool:
    """A guest ends with its VMM, a moment later."""
    deadline = time.monotonic() + 10
    while standin.programs() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not standin.programs()


@dataclass(frozen=True)
class Saved:
    """A machine as its guest was before it was told who it is."""

    directory: Path
    scratch: Path
    spec: MachineSpec
    at: float


@pytest.fixture(scope="module")
def saved(top: Path, assets: Mapping[str, Path], tools: Tools, standin: Standin) -> Saved:
    """One boot for all."""
    own = top / "template"
    own.mkdir(mode=0o700)
    scratch = own / "scratch"
    subprocess.run(["mke2fs", "-q", "-t", "ext4", str(scratch), "64M"], check=True, timeout=60)
    spec = MachineSpec(
        "template", 1, 256, assets["kernel"], assets["initramfs"],
        (Drive(assets["runtime"], True), Drive(assets["image"], True), Drive(scratch, False, Rate(8 << 20))), own,
        FIRST_UID,
    )  # fmt: skip

    async def main() -> None:
        machine = await firecracker_start.start(spec, tools)
        assert b'"ok":true' in await ping(machine)
        await firecracker_machine.snapshot(machine, spec, top / "kept")

    anyio.run(main)
    assert os.listdir(own) == ["scratch"]
    assert all_ended(standin)
    return Saved(top / "kept", scratch, spec, time.time())


def copy(saved: Saved, place: Path, number: int, rate: Rate = UNLIMITED) -> MachineSpec:
    own = place / f"own{number}"
    own.mkdir(mode=0o700)
    subprocess.run(["cp", "--sparse=always", saved.scratch, own / "scratch"], check=True)
    drives = (*saved.spec.drives[:2], Drive(own / "scratch", False, rate))
    return replace(saved.spec, id=f"copy_{number}", drives=drives, directory=own, uid=FIRST_UID + 1 + number)


async def shell(guest: Guest, script: str) -> str:
    session = await guest.execute(True, argv=["bash", "-c", script])
    written = b""
    while frames := await session.receive():
        written += b"".join(payload for kind, payload in frames if kind in "oE")
    session.close()
    return written.decode()


async def write_time(guest: Guest, blocks: str) -> float:
    """Seconds, by the guest's clock, for writing past its cache."""
    said = await shell(guest, f"LC_ALL=C dd if=/dev/zero of=/workspace/file oflag=direct {blocks}")
    took = re.search(r"copied, ([0-9.]+) s", said)
    assert took is not None, said
    return float(took[1])


def test_two_from_one_snapshot_differ_in_all_that_must(saved: Saved, place: Path, tools: Tools) -> None:
    # The second's disk is another one, larger, and with a limit of its own.
    specs = [copy(saved, place, number, rate) for number, rate in enumerate((UNLIMITED, Rate(ops_per_s=50)))]
    (specs[1].directory / "scratch").unlink()
    make = ["mke2fs", "-q", "-t", "ext4", str(specs[1].directory / "scratch"), "96M"]
    subprocess.run(make, check=True, timeout=60)
    before = [(saved.directory / name).stat() for name in ("memory", "snapshot")]
    seen: dict[int, list[str]] = {}

    async def fork(number: int) -> None:
        spec = specs[number]
        machine = await firecracker_start.restore(spec, tools, saved.directory, [2] if number else [])
        try:
            guest = Guest(machine.vsock_path, protocol.VERSION)
            await guest.wait_booted(BOOT_S)
            with pytest.raises(GuestRefused):
                await guest.execute(True, argv=["true"])
            await guest.configure(f"fork{number}", {}, None, {}, (), None)
            earliest = time.time()
            seen[number] = (await shell(guest, LOOK)).split()
            assert earliest - 0.5 < float(seen[number][3]) < time.time() + 0.5
            # What Firecracker lets through at once is a second's worth; the QEMU behind the stand-in, less.
            if number:
                assert await write_time(guest, "bs=4k count=100") > 0.9, "the limit that it has now"
            else:
                assert await write_time(guest, "bs=1M count=16") > 0.9, "the limit that it was saved with"
                await shell(guest, "echo before >/workspace/note; sleep 1000 &")
                await firecracker_machine.snapshot(machine, spec, place / "kept")
                machine = await firecracker_start.restore(spec, tools, place / "kept")
                guest = Guest(machine.vsock_path, protocol.VERSION)
                assert await guest.wait_ready(BOOT_S)
                assert await shell(guest, "cat /workspace/note; hostname") == "before\nfork0\n"
        finally:
            await machine.terminate()

    async def main() -> None:
        # Long enough for a clock that was not set to be seen.
        await anyio.sleep(max(0.0, saved.at + STALE_S - time.time()))
        async with anyio.create_task_group() as group:
            for number in range(2):
                group.start_soon(fork, number)

    anyio.run(main)
    for number in range(2):
        assert seen[number][1:3] == [f"fork{number}"] * 2
    assert seen[0][0] != seen[1][0] and len(seen[0][0]) == 32
    assert seen[0][4] != seen[1][4] and len(seen[0][4]) == 44
    assert int(seen[0][-1]) < 64 << 10 < int(seen[1][-1])
    for spec in specs:
        assert os.listdir(spec.directory) == ["scratch"]
        assert (spec.directory / "scratch").stat().st_uid == 0
    after = [(saved.directory / name).stat() for name in ("memory", "snapshot")]
    assert [(a.st_mtime_ns, a.st_uid, a.st_mode, a.st_nlink) for a in after] == [
        (b.st_mtime_ns, 0, stat.S_IFREG | 0o444, 1) for b in before
    ]


def refused(spec: MachineSpec, tools: Tools, directory: Path) -> str:
    with pytest.raises(BootFailed) as caught:
        anyio.run(firecracker_start.restore, spec, tools, directory, [2])
    assert tools.groups is not None
    assert tools.groups.ids(INSTANCE) == set()
    assert os.listdir(spec.directory) == ["scratch"]
    assert (spec.directory / "scratch").stat().st_uid == 0
    return str(caught.value)


def _cut(by: int) -> Callable[[Path], None]:
    return lambda at: os.truncate(at, at.stat().st_size - by)


def _garbled(at: Path) -> None:
    at.write_bytes(os.urandom(1000))


def _linked(at: Path) -> None:
    at.rename(at.with_name("elsewhere"))
    at.symlink_to("elsewhere")


def _fifo(at: Path) -> None:
    at.unlink()
    os.mkfifo(at)


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("memory", _cut(4096), "opening the saved memory: it is "),
        ("memory", _linked, "opening the saved memory: Too many levels of symbolic links"),
        ("memory", _fifo, "opening the saved memory: not a regular file"),
        ("memory", Path.unlink, "opening the saved memory: No such file"),
        ("snapshot", _cut(1), "PUT /snapshot/load: refused: Load snapshot error"),
        ("snapshot", _garbled, "PUT /snapshot/load: refused: Load snapshot error"),
        ("snapshot", _linked, "opening the saved state: Too many levels of symbolic links"),
        ("snapshot", _fifo, "opening the saved state: not a regular file"),
        ("snapshot", Path.unlink, "opening the saved state: No such file"),
    ],
)  # fmt: skip
def test_a_spoiled_snapshot_is_refused(
    saved: Saved, place: Path, tools: Tools, standin: Standin, name: str, spoil: Callable[[Path], None], said: str
) -> None:
    spoiled = place / "spoiled"
    subprocess.run(["cp", "-a", "--sparse=always", saved.directory, spoiled], check=True)
    spoil(spoiled / name)
    assert said in refused(copy(saved, place, 0), tools, spoiled)
    assert all_ended(standin)


LOADING = [request.step for request in firecracker.load_requests(
    MachineSpec("x", 1, 256, Path("k"), Path("i"), (Drive(Path("a"), False),) * 3, Path("d"), 1), VERSION, None, [2],
)]  # fmt: skip


@pytest.mark.parametrize("fault", ["refuse", "die", "garbage", "hang"])
@pytest.mark.parametrize("step", LOADING)
def test_a_fault_at_any_call_of_restoring_ends_it_all_and_names_the_call(
    saved: Saved, place: Path, tools: Tools, standin: Standin, step: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon(monkeypatch, step)
    method, _, path = step.partition(" ")
    standin.fail({"do": fault, "method": method, "path": path})
    try:
        assert f"{step}: " in refused(copy(saved, place, 0), tools, saved.directory)
    finally:
        standin.fail()
    assert all_ended(standin)
    assert sorted(os.listdir(saved.directory)) == ["memory", "snapshot"]
