"""Firecracker machines that are given up, forgotten or come late, with the stand-ins. No guest boots here."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from sandboxd import unixpath
from sandboxd.errors import BootFailed, SandboxError
from sandboxd.vm import cgroups, drives, firecracker, firecracker_machine, firecracker_start, jailer, processes
from sandboxd.vm.firecracker import Names, Request
from sandboxd.vm.firecracker_machine import FirecrackerMachine, Tools
from sandboxd.vm.machine import Drive, MachineSpec
from tests.firecracker_standin.fixtures import enterable, programs
from tests.firecracker_standin.standin import Standin
from tests.vm import starting
from tests.vm.deadlines import soon

FIRST_UID = 979_700
INSTANCE = f"g{os.getpid()}"
DEEP = "a-directory-with-a-long-name/" * 5
SUN_PATH = 107  # bytes, unix(7)
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the jailer needs root")


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    with enterable("fcg-", "/var/tmp") as path:
        yield path


@pytest.fixture(scope="module")
def standin(top: Path) -> Iterator[Standin]:
    with programs(top / "fc") as running:
        yield running


@pytest.fixture(scope="module")
def tools(standin: Standin) -> Tools:
    return starting.firecracker_tools(INSTANCE, standin.directory)


@pytest.fixture
def place(top: Path, standin: Standin) -> Iterator[Path]:
    """Files of no meaning. Whatever a test does, no process, group, descriptor or owner is another afterwards."""
    path = top / "place"
    path.mkdir()
    for name in ("kernel", "initramfs", "image", "memory", "snapshot"):
        with (path / name).open("wb") as file:
            file.truncate(256 << 20 if name == "memory" else 1 << 20)
    before = len(os.listdir("/proc/self/fd"))
    try:
        yield path
        standin.fail()
        assert len(os.listdir("/proc/self/fd")) == before
        assert cgroups.find().ids(INSTANCE) == set()
        for disk in path.rglob("scratch"):
            assert (disk.stat().st_uid, disk.stat().st_nlink) == (0, 1)
            with ExitStack() as stack:
                drives.open_image(stack, "the disk, which nobody has locked", Drive(disk, False))
    finally:
        shutil.rmtree(path)


@pytest.fixture
def unbooted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine is all that it is, but for a guest; it is `taken` back where its VMM does not say so."""
    boot = firecracker.requests
    monkeypatch.setattr(firecracker, "requests", lambda *asked: (*boot(*asked)[:-1], Request("GET", "/version")))


def described(place: Path, id: str, number: int = 0) -> MachineSpec:
    own = place / id
    own.mkdir(mode=0o700)
    (own / "scratch").write_bytes(bytes(1 << 20))
    disks = (Drive(place / "image", True), Drive(own / "scratch", False))
    return MachineSpec(id, 1, 256, place / "kernel", place / "initramfs", disks, own, FIRST_UID + number)


def asked(standin: Standin, id: str, path: str) -> bool:
    return any(call["path"] == path for call in standin.calls(id.replace("_", "-")))


async def until(seen: Callable[[], bool]) -> None:
    with anyio.fail_after(15):
        while not seen():  # noqa: ASYNC110
            await anyio.sleep(0.005)


def given_up(spec: MachineSpec, tools: Tools, saved: Path | None, once: Callable[[], bool]) -> None:
    """Begun, and left by whoever wanted it when `once` is so."""

    async def begin() -> None:
        machine = await (
            firecracker_start.start(spec, tools)
            if saved is None
            else firecracker_start.restore(spec, tools, saved)
        )
        raise AssertionError(f"{machine.spec_id} came up")

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(begin)
            await until(once)
            group.cancel_scope.cancel()

    anyio.run(main)
    assert os.listdir(spec.directory) == ["scratch"]
    assert processes.read_record(spec.directory) is None


@pytest.mark.parametrize(
    "path", ["/", "/logger", "/drives/drive1", "/vsock", "/actions", pytest.param("/snapshot/load", id="a restore")]
)
def test_a_start_that_is_given_up_at_any_call_leaves_nothing(
    place: Path, tools: Tools, standin: Standin, path: str
) -> None:
    """Whoever asked for it has hung up, or it is deleted meanwhile."""
    spec = described(place, f"left_{path[1:].replace('/', '_')}")
    standin.fail({"do": "hang", "path": path})
    saved = place if path == "/snapshot/load" else None
    given_up(spec, tools, saved, lambda: asked(standin, spec.id, path))
    assert standin.programs() == []


def test_a_start_that_is_given_up_while_its_jail_is_made_leaves_nothing(
    place: Path, tools: Tools, standin: Standin
) -> None:
    spec = described(place, "left_early")
    standin.fail({"do": "hang", "path": "jailer"})
    assert tools.groups is not None
    group = tools.groups.group(INSTANCE, spec.id)
    given_up(spec, tools, None, lambda: bool(group.pids()))


async def taken(directory: Path, id: str, tools: Tools, standin: Standin) -> FirecrackerMachine | None:
    standin.fail({"do": "refuse", "path": "/"})
    try:
        return await firecracker_machine.adopt(directory, id, tools)
    finally:
        standin.fail()


async def answers(machine: FirecrackerMachine) -> None:
    """Its socket takes a connection, whatever the length of its path."""
    with unixpath.connect_sync(machine.vsock_path):
        pass


@pytest.mark.usefixtures("unbooted")
def test_a_deep_directory_with_what_a_killed_run_left_in_it(
    place: Path, tools: Tools, standin: Standin, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sockets among it, on which nobody listens."""
    deep = place / DEEP
    deep.mkdir(parents=True)
    spec = replace(described(place, "deep_1"), directory=deep)

    async def main() -> None:
        for _ in range(2):
            machine = await firecracker_start.start(spec, tools)
            root = machine.vsock_path.parent
            assert len(os.fsencode(machine.vsock_path)) > SUN_PATH
            await answers(machine)
            again = await taken(deep, spec.id, tools, standin)
            assert again is not None and "GET /: refused" in caplog.messages[-1]
            await answers(again)
            await again.terminate()
            await machine.terminate()
            assert os.listdir(deep) == []
            root.mkdir(parents=True)
            fd = os.open(root, os.O_PATH)
            for name in (Names.API_SOCKET, Names.VSOCK):
                with socket.socket(socket.AF_UNIX) as stale:
                    stale.bind(f"/proc/self/fd/{fd}/{name}")
            os.close(fd)

    anyio.run(main)


@pytest.mark.usefixtures("unbooted")
def test_a_daemon_that_stops_while_it_takes_a_machine_back_leaves_it_as_it_is(
    place: Path, tools: Tools, standin: Standin
) -> None:
    spec = described(place, "early_1")

    async def main() -> None:
        machine = await firecracker_start.start(spec, tools)
        standin.fail({"do": "hang", "path": "/"})
        before = len(os.listdir("/proc/self/fd"))
        async with anyio.create_task_group() as group:
            group.start_soon(firecracker_machine.adopt, spec.directory, spec.id, tools)
            await until(lambda: [call["outcome"] for call in standin.calls("early-1")][-1:] == ["hang"])
            group.cancel_scope.cancel()
        assert len(os.listdir("/proc/self/fd")) == before
        await answers(machine)
        await machine.terminate()

    anyio.run(main)


@pytest.mark.usefixtures("unbooted")
def test_a_jail_that_a_killed_daemon_had_not_taken_back_is_taken_back(
    place: Path, tools: Tools, standin: Standin
) -> None:
    spec = described(place, "own_1")

    async def main() -> None:
        machine = await firecracker_start.start(spec, tools)
        folders = [machine.vsock_path.parent / folder for folder in jailer.FOLDERS]
        for folder in folders:
            assert spec.uid is not None
            os.chown(folder, spec.uid, spec.uid)
            folder.chmod(0o700)
        again = await taken(spec.directory, spec.id, tools, standin)
        assert again is not None
        assert [(folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) for folder in folders] == [(0, 0o750)] * 4
        await again.terminate()
        await machine.terminate()

    anyio.run(main)


@pytest.mark.usefixtures("unbooted")
def test_a_disk_has_one_machine_and_an_image_has_any_number(place: Path, tools: Tools) -> None:
    first, second = described(place, "disk_1"), described(place, "disk_2", 1)
    thief = replace(second, drives=first.drives)

    async def main() -> None:
        machine = await firecracker_start.start(first, tools)
        with pytest.raises(BootFailed, match="opening drive 1: another machine has it"):
            await firecracker_start.start(thief, tools)
        assert first.drives[1].path.stat().st_uid == 0
        other = await firecracker_start.start(second, tools)
        await answers(machine)
        await machine.terminate()
        await other.terminate()
        machine = await firecracker_start.start(thief, tools)
        await machine.terminate()

    anyio.run(main)


@contextmanager
def unkillable() -> Iterator[None]:
    """As processes are that wait for a disk in the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "kill", lambda _: None)
        patch.setattr(processes, "END_S", 0.1)
        yield


def let_go(place: Path) -> None:
    """As this process does at its end."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(str(place)):
                os.close(int(name))


@pytest.mark.parametrize("came_up", [True, False])
def test_a_disk_is_nobody_elses_while_a_vmm_that_has_it_does_not_end(
    place: Path, tools: Tools, standin: Standin, came_up: bool, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    spec, other = described(place, "stuck_1"), described(place, "next_1", 1)
    if came_up:
        request.getfixturevalue("unbooted")
    else:
        soon(monkeypatch, "PUT /actions")
        standin.fail({"do": "hang", "path": "/actions"})

    async def main() -> None:
        if came_up:
            machine = await firecracker_start.start(spec, tools)
            with unkillable(), pytest.raises(SandboxError, match="a process did not end"):
                await machine.terminate()
        else:
            with unkillable(), pytest.raises(BootFailed, match="PUT /actions: no answer"):
                await firecracker_start.start(spec, tools)
        with pytest.raises(BootFailed, match="opening drive 1: another machine has it"):
            await firecracker_start.start(replace(other, drives=spec.drives), tools)

    anyio.run(main)
    assert firecracker_machine.sweep(place, {other.id}, tools) == {spec.id}
    let_go(place)


@pytest.mark.usefixtures("unbooted")
def test_a_known_machine_is_not_swept_and_one_whose_directory_is_gone_is(place: Path, tools: Tools) -> None:
    async def main() -> None:
        known = await firecracker_start.start(described(place, "known_1"), tools)
        lost = await firecracker_start.start(described(place, "lost_1", 1), tools)
        shutil.rmtree(place / "lost_1")
        assert await anyio.to_thread.run_sync(firecracker_machine.sweep, place, {"known_1"}, tools) == {"lost_1"}
        with anyio.fail_after(5):
            await lost.wait_exit()
        await answers(known)
        await known.terminate()
        await lost.terminate()

    anyio.run(main)


@pytest.mark.usefixtures("unbooted")
def test_a_machine_is_adopted_by_its_own_id_alone(place: Path, tools: Tools, standin: Standin) -> None:
    """A directory that was renamed by hand has the record of another sandbox in it."""

    async def main() -> None:
        machine = await firecracker_start.start(described(place, "mine_1"), tools)
        assert await taken(place / "mine_1", "yours_1", tools, standin) is None
        with anyio.fail_after(5):
            await machine.wait_exit()
        await machine.terminate()

    anyio.run(main)


@pytest.mark.usefixtures("unbooted")
@pytest.mark.parametrize("part", ["jail", "jail/firecracker/gone-1/root/run"])
def test_a_machine_whose_jail_was_deleted_by_hand_is_ended(
    place: Path, tools: Tools, standin: Standin, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec = described(place, "gone_1")

    async def main() -> None:
        machine = await firecracker_start.start(spec, tools)
        shutil.rmtree(spec.directory / part)
        assert await taken(spec.directory, spec.id, tools, standin) is None
        with anyio.fail_after(5):
            await machine.wait_exit()
        await machine.terminate()

    anyio.run(main)
    assert "is ended: its jail is not as it was made" in caplog.text
    assert os.listdir(spec.directory) == ["scratch"]


@pytest.mark.usefixtures("unbooted")
def test_eight_come_up_while_others_go(place: Path, tools: Tools) -> None:
    specs = [described(place, f"one_{number}", number) for number in range(8)]
    four = anyio.Semaphore(4)

    async def live(spec: MachineSpec) -> None:
        async with four:
            machine = await firecracker_start.start(spec, tools)
            await answers(machine)
            await machine.terminate()

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for spec in specs:
                group.start_soon(live, spec)

    anyio.run(main)
    assert [os.listdir(spec.directory) for spec in specs] == [["scratch"]] * 8
