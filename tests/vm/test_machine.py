"""Real machines: they boot, they are confined, they are found again, and nothing of them stays."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from native import KvmAnswer, KvmState
from sandboxd import unixpath
from sandboxd.assets import prepare, store
from sandboxd.errors import BootFailed, SetupError
from sandboxd.vm import cgroups, jail, kvm, processes, qemu
from sandboxd.vm.commands import Accelerator, Tools
from sandboxd.vm.machine import Drive
from sandboxd.vm.qemu import QemuMachine
from tests import descriptors
from tests.daemon import assets_dir
from tests.vm import starting
from tests.vm.starting import BUILD, FIRST_UID, ROOT, ping, spec

pytestmark = pytest.mark.vm

INSTANCE = f"t{os.getpid()}"
UIDS = range(FIRST_UID, FIRST_UID + 16)
USER = 4242  # no account of this machine
STOP_S = 60
STEP = "QEMU's monitor|starting"  # a busy host sees the end of both before it has looked at the first


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """Where the machines' directories are made: deeper than a socket's path may be long."""
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("no QEMU: apt-get install qemu-system-x86")
    if not (BUILD / "sandbox-vsock").is_file():
        pytest.skip("no build/sandbox-vsock: make programs")
    try:
        recipes = prepare.recipes(BUILD)
    except SetupError as error:
        pytest.skip(str(error))
    top = Path(tempfile.mkdtemp(prefix="sbx-vm-", dir="/tmp"))
    path = top / ("d" * 120)
    path.mkdir()
    top.chmod(0o755)
    made: dict[str, store.Asset] = {}
    for recipe, file, link in zip(recipes, ("vmlinux", "initramfs.cpio", "", "runtime.erofs"),
                                  ("kernel", "initramfs", "", "runtime"), strict=False):  # fmt: skip
        asset = store.find(assets_dir(), recipe, made)
        if asset is None:
            shutil.rmtree(top)
            pytest.skip(f"no {recipe.name} in {assets_dir()}: make assets")
        made[recipe.name] = asset
        if link:
            (path / link).symlink_to(asset.file(file))
    # Nothing is configured here, so nothing reads the image.
    (path / "image").write_bytes(bytes(1 << 20))
    yield path
    assert leftovers() == []
    if os.geteuid() == 0:
        assert cgroups.find().ids(INSTANCE) == set()
    shutil.rmtree(top)


@pytest.fixture(scope="module")
def tools(directory: Path) -> Tools:
    return starting.tools(INSTANCE)


def leftovers(instance: str = INSTANCE, uids: range = UIDS) -> list[tuple[str, int]]:
    return list(processes.marked(instance, {os.getuid(), *uids}))


def starter(directory: Path, id: str, what: str, *prefix: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-m", "tests.vm.starting", str(directory), id, INSTANCE, what]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def with_machine(path: Path, tools: Tools, act: Callable[[QemuMachine], Awaitable[None]], **changes: object) -> None:
    """Starts a machine of its own for `act` and ends it."""

    async def main() -> None:
        described = spec(path, "box", **changes)
        machine = await qemu.start(described, tools)
        try:
            with anyio.fail_after(STOP_S):
                await act(machine)
        finally:
            await machine.terminate()
        assert leftovers() == []
        assert sorted(os.listdir(described.directory)) == ["scratch"]

    anyio.run(main)


def programs(id: str) -> dict[str, int]:
    """The pids of the two programs themselves, by name."""
    found = {}
    for marked, pid in leftovers():
        name = processes.command_line(pid)[0].decode()
        if marked == id and name.startswith(jail.MARK):
            found[name.rpartition("/")[2]] = pid
    return found


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_a_killed_starters_machine_is_adopted_boots_and_is_confined(directory: Path, tools: Tools) -> None:
    """One boot: the starter is killed as soon as the machine counts as started; the guest never notices."""
    with starter(directory, "kept", "hold") as process:
        assert (line_of(process), line_of(process)) == ("go", "started")
        process.kill()
    assert qemu.sweep(directory, {"kept"}, starting.tools(INSTANCE), UIDS) == set()
    pids = programs("kept")
    assert set(pids) == {"qemu-system-x86_64", "sandbox-vsock"}
    for pid in pids.values():
        seen = status(pid)
        uid = FIRST_UID if os.geteuid() == 0 else os.getuid()
        assert set(seen["Uid"].split()) == set(seen["Gid"].split()) == {str(uid)}
        assert seen["Groups"].split() == []
        assert (seen["NoNewPrivs"], seen["Seccomp"]) == ("1", "2")
        assert {seen[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        for space in ("pid", "net", "ipc", "uts", "mnt", "cgroup"):
            assert os.readlink(f"/proc/{pid}/ns/{space}") != os.readlink(f"/proc/self/ns/{space}")
        assert os.listdir(f"/proc/{pid}/root/") and not os.path.exists(f"/proc/{pid}/root/etc")

    async def main() -> None:
        machine = await qemu.adopt(directory / "kept", "kept", tools)
        assert machine is not None
        assert b'"ok":true' in (await ping(machine)).replace(b" ", b"")
        console = await machine.console_tail()
        assert b"guest-init: start" in console
        assert b"guest-init: runtime" in console
        assert await machine.console_tail() == console, "what was read once is not lost"
        assert len(await machine.console_tail(5)) == 5
        with anyio.move_on_after(0.1) as waiting:
            await machine.wait_exit()
        assert waiting.cancelled_caught
        # A start in the same directory is refused, and does this machine no harm.
        again = spec(directory, "kept")
        with pytest.raises(BootFailed, match="drive 2: another machine has it"):
            await qemu.start(again, tools)
        with pytest.raises(BootFailed, match="sockets"):
            await qemu.start(replace(again, drives=again.drives[:2]), tools)
        assert b'"ok":true' in (await ping(machine)).replace(b" ", b"")
        async with anyio.create_task_group() as group:
            group.start_soon(machine.wait_exit)
            for _ in range(3):
                group.start_soon(machine.terminate)
        await machine.terminate()
        await machine.wait_exit()
        assert await qemu.adopt(directory / "kept", "kept", tools) is None

    anyio.run(main)
    assert leftovers() == []
    assert sorted(os.listdir(directory / "kept")) == ["scratch"]


INIT = """
#include <stdio.h>
int main(void) {
    for (int i = 0; i < 3000; i++)
        puts("a line of a guest that does not stop talking");
    return 7;
}
"""


@pytest.fixture(scope="module")
def panicking(directory: Path) -> Path:
    """An initramfs whose init fills the console twice over and ends, which a kernel does not survive."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install gcc libc6-dev")
    tree = directory / "tree"
    (tree / "dev").mkdir(parents=True)
    (tree / "init.c").write_text(INIT)
    subprocess.run([compiler, "-static", "-O2", "-o", tree / "init", tree / "init.c"], check=True)
    packed = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet"], cwd=tree, input=b"./dev\ninit\n", capture_output=True, check=True
    )
    (directory / "panics").write_bytes(packed.stdout)
    return directory / "panics"


def test_four_machines_at_once_come_up_or_say_why_not(directory: Path, tools: Tools, panicking: Path) -> None:
    """Two that answer, one whose kernel panics after much talk, one whose runtime drive is rubbish."""
    answers: dict[int, bytes] = {}
    failures: dict[int, BootFailed] = {}
    changes: list[dict[str, object]] = [
        {},
        {"cpus": 2},
        {"initramfs": panicking},
        {"drives": (Drive(directory / "image", True),)},
    ]

    async def one(number: int) -> None:
        machine = await qemu.start(spec(directory, f"four-{number}", number, **changes[number]), tools)
        try:
            answers[number] = await ping(machine)
            if number >= 2:
                failures[number] = await machine.boot_failed("waiting for the guest agent")
            else:
                uids.append(status(programs(f"four-{number}")["qemu-system-x86_64"])["Uid"].split()[0])
        finally:
            await machine.terminate()

    async def main() -> None:
        with anyio.fail_after(2 * STOP_S):
            async with anyio.create_task_group() as group:
                for number in range(4):
                    group.start_soon(one, number)

    uids: list[str] = []
    anyio.run(main)
    assert all(b"version" in answers[number] for number in (0, 1))
    assert len(set(uids)) == (2 if os.geteuid() == 0 else 1)
    assert [answers[number] for number in (2, 3)] == [b"", b""], "these ended, and the wait for an answer with them"
    assert b"Kernel panic" in failures[2].console_tail
    assert len(failures[2].console_tail) <= 8192
    assert b"guest-init: failed: mount" in failures[3].console_tail
    assert {failure.step for failure in failures.values()} == {"waiting for the guest agent"}
    assert leftovers() == []


@pytest.mark.parametrize("victim", ["qemu-system-x86_64", "sandbox-vsock"])
def test_the_death_of_either_process_is_seen_at_once(directory: Path, tools: Tools, victim: str) -> None:
    async def act(machine: QemuMachine) -> None:
        returned = []

        async def wait() -> None:
            await machine.wait_exit()
            returned.append(time.monotonic())

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(wait)
            await anyio.sleep(0.1)
            killed = time.monotonic()
            os.kill(programs("box")[victim], signal.SIGKILL)
        assert max(returned) - killed < 1.0
        await machine.console_tail()

    with_machine(directory, tools, act)


@pytest.mark.parametrize(
    ("name", "changes", "step"),
    [
        ("no kernel", {"kernel": Path("/nonexistent")}, "opening the kernel"),
        ("no initramfs", {"initramfs": Path("/nonexistent")}, "opening the initramfs"),
        ("no drive", {"drives": (Drive(Path("/nonexistent"), True),)}, "opening drive 0: No such file"),
        ("a drive that is a directory", {"drives": (Drive(Path("/tmp"), True),)}, "opening drive 0"),
        (
            "a drive that is a device",
            {"drives": (Drive(Path("/dev/null"), False),)},
            "drive 0: not a regular file",
        ),
        ("rubbish for a kernel", {"kernel": Path(__file__)}, "QEMU said: qemu"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_a_start_that_fails_names_its_step_and_leaves_nothing(
    directory: Path, tools: Tools, name: str, changes: dict[str, object], step: str
) -> None:
    described = spec(directory, "box", **changes)
    with pytest.raises(BootFailed) as failed:
        anyio.run(qemu.start, described, tools)
    assert step in failed.value.step
    assert str(directory) not in str(failed.value), "messages name no path of the state directory"
    assert leftovers() == []
    assert sorted(os.listdir(described.directory)) == ["scratch"]


@pytest.mark.parametrize(
    ("program", "code", "step"),
    [("/bin/false", 1, STEP), ("/bin/sleep", 1, STEP)],
    ids=["ends at once", "does not know its options"],
)
def test_a_vmm_that_is_none_fails_the_start(directory: Path, tools: Tools, program: str, code: int, step: str) -> None:
    described = spec(directory, "box")
    with pytest.raises(BootFailed, match=step) as failed:
        anyio.run(qemu.start, described, replace(tools, qemu=jail.program(Path(program))))
    assert failed.value.exit_code == code
    assert leftovers() == []


def test_a_vmm_that_says_nothing_fails_the_start(
    directory: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qemu, "START_S", 1.0)
    silent = directory / "silent"
    silent.write_text("int pause(void); int main(void) { for (;;) pause(); }")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: apt-get install gcc libc6-dev")
    subprocess.run(["cc", "-x", "c", "-static", "-o", directory / "silent-vmm", silent], check=True)
    with pytest.raises(BootFailed, match="QEMU's monitor"):
        anyio.run(qemu.start, spec(directory, "box"), replace(tools, qemu=jail.program(directory / "silent-vmm")))
    assert leftovers() == []


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.3])
def test_a_start_that_is_given_up_leaves_nothing(directory: Path, tools: Tools, delay_s: float) -> None:
    described = spec(directory, "box")

    async def main() -> None:
        with anyio.move_on_after(delay_s):
            machine = await qemu.start(described, tools)
            await machine.terminate()

    anyio.run(main)
    assert leftovers() == []
    assert sorted(os.listdir(described.directory)) == ["scratch"]


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.2])
def test_after_a_starter_was_killed_at_any_moment_a_sweep_leaves_nothing(directory: Path, delay_s: float) -> None:
    """Between spawn and record there is no record: the marks are found. Later there is one."""
    with starter(directory, "swept", "hold") as process:
        assert line_of(process) == "go"
        time.sleep(delay_s)
        process.kill()
    (directory / "kept-by-someone").mkdir(exist_ok=True)
    with open(directory / "lock", "rb") as lock:
        # As the daemon does: a child between fork and exec has no mark yet, but it still holds the lock.
        fcntl.flock(lock, fcntl.LOCK_EX)
    qemu.sweep(directory, {"kept-by-someone"}, starting.tools(INSTANCE), UIDS)
    assert leftovers() == []
    own = directory / "swept"
    assert not own.exists() or set(os.listdir(own)) <= {"scratch"}


def test_a_known_machine_is_not_swept_and_one_whose_directory_is_gone_is(directory: Path, tools: Tools) -> None:
    async def main() -> None:
        known = await qemu.start(spec(directory, "known", 1), tools)
        if tools.groups is not None:
            assert {program.pid for program in known.programs} <= tools.groups.group(INSTANCE, "known").pids()
        lost = await qemu.start(spec(directory, "lost", 2), tools)
        shutil.rmtree(directory / "lost")
        ended = await anyio.to_thread.run_sync(qemu.sweep, directory, {"known"}, starting.tools(INSTANCE), UIDS)
        assert ended == {"lost"}
        with anyio.fail_after(5):
            await lost.wait_exit()
        assert programs("known")
        await known.terminate()
        await lost.terminate()

    anyio.run(main)


@pytest.mark.parametrize("lost", ["qemu-system-x86_64", "sandbox-vsock"])
def test_half_a_machine_is_not_adopted_but_ended(directory: Path, tools: Tools, lost: str) -> None:
    """By a daemon of another instance, as it is where the state directory was renamed."""
    with starter(directory, "half", "hold") as process:
        assert (line_of(process), line_of(process)) == ("go", "started")
        process.kill()
    os.kill(programs("half")[lost], signal.SIGKILL)
    time.sleep(0.1)
    assert anyio.run(qemu.adopt, directory / "half", "half", replace(tools, instance=f"{INSTANCE}-renamed")) is None
    assert leftovers() == []
    assert tools.groups is None or tools.groups.ids(INSTANCE) == set()


def test_a_machine_is_adopted_by_its_own_id_alone(directory: Path, tools: Tools) -> None:
    with starter(directory, "mine", "hold") as process:
        assert (line_of(process), line_of(process)) == ("go", "started")
        process.kill()
    assert anyio.run(qemu.adopt, directory / "mine", "yours", tools) is None
    assert leftovers() == []
    qemu.sweep(directory, {"yours"}, tools, UIDS)


def test_after_the_state_directory_was_renamed_machines_are_adopted_and_swept(directory: Path, tools: Tools) -> None:
    """By their records; and one that cannot be looked at is left alone."""
    with starter(directory, "kept,lost", "hold") as process:
        assert (line_of(process), line_of(process)) == ("go", "started")
        process.kill()
    renamed = replace(tools, instance=f"{INSTANCE}-renamed")
    assert qemu.sweep(directory, {"kept"}, renamed, UIDS) == {"lost"}
    assert tools.groups is None or tools.groups.ids(INSTANCE) == {"kept"}

    async def main() -> None:
        for left in range(2):
            with descriptors.few_left(left), pytest.raises(OSError, match="Too many open files"):
                await qemu.adopt(directory / "kept", "kept", renamed)
        machine = await qemu.adopt(directory / "kept", "kept", renamed)
        assert machine is not None
        await machine.terminate()

    anyio.run(main)
    assert leftovers() == []
    assert tools.groups is None or tools.groups.ids(INSTANCE) == set()


def test_a_vmm_whose_monitor_is_busy_is_adopted_all_the_same(
    directory: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qemu, "CONNECT_S", 0.3)
    with starter(directory, "busy", "hold") as process:
        assert (line_of(process), line_of(process)) == ("go", "started")
        process.kill()

    async def main() -> None:
        with unixpath.connect_sync(directory / "busy" / qemu.QMP_SOCKET):
            machine = await qemu.adopt(directory / "busy", "busy", tools)
            assert machine is not None
            assert await machine.console_tail() == b""
        await machine.terminate()

    anyio.run(main)
    assert leftovers() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_an_ordinary_user_boots_a_machine(directory: Path) -> None:
    home = directory / "user"
    home.mkdir()
    for name in ("kernel", "initramfs", "runtime", "image"):
        target = (directory / name).resolve()
        if subprocess.run(as_user("test", "-r", str(target)), check=False).returncode != 0:
            pytest.skip(f"an ordinary user cannot read {target}")
        (home / name).symlink_to(target)
    os.chown(home, USER, USER)
    with starter(home, "box", "ping", *as_user()) as process:
        said = line_of(process)
        if not said:
            pytest.skip(f"an ordinary user cannot run {sys.executable}")
        assert (said, line_of(process)) == ("go", "started")
        owners = {status(pid)["Uid"].split()[0] for _, pid in leftovers(uids=range(USER, USER + 1))}
        assert owners == {str(USER)}
        assert '"ok":true' in line_of(process).replace(" ", "")
        assert process.wait(20) == 0
    assert leftovers(uids=range(USER, USER + 1)) == []


def as_user(*command: str) -> list[str]:
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *command]


def test_root_never_runs_a_vmm_as_root(directory: Path, tools: Tools) -> None:
    wrong = None if os.geteuid() == 0 else FIRST_UID
    with pytest.raises(ValueError, match="uid"):
        anyio.run(qemu.start, spec(directory, "box", uid=wrong), tools)


def by_kvm(tools: Tools) -> kvm.Trial:
    fast = replace(tools, accelerator=Accelerator.KVM)
    return kvm.Trial(tools.qemu.path, INSTANCE, lambda described: qemu.start(described, fast))


@pytest.mark.parametrize("state", [KvmState.ABSENT, KvmState.NO_ACCESS, KvmState.PRESENT_BUT_UNUSABLE])
def test_without_a_kvm_that_counts_there_is_no_trial(directory: Path, tools: Tools, state: KvmState) -> None:
    def probe() -> KvmAnswer:
        return KvmAnswer(state, "the reason", 0, 0.0)

    at = spec(directory, "box")
    choice = anyio.run(kvm.choose, by_kvm(tools), at.kernel, at.initramfs, directory, at.uid, probe)
    assert choice == kvm.Choice(False, f"KVM is {state.value}: the reason")
    assert not list(directory.glob("kvm-*.json"))


def test_kvm_is_what_the_trial_says_and_the_trial_is_remembered(directory: Path, tools: Tools) -> None:
    """Right on every machine: with a working KVM the kernel boots, with a broken or absent one it does not."""

    def probe() -> KvmAnswer:
        return KvmAnswer(KvmState.OK, "it counted", 1, 0.1)

    at = spec(directory, "box")
    arguments = (at.kernel, at.initramfs, directory, at.uid, probe)
    first = anyio.run(kvm.choose, by_kvm(tools), *arguments)
    assert ("our kernel booted" in first.reason) is first.works
    assert ("present-but-unusable" in first.reason) is not first.works
    assert leftovers() == []
    assert not (directory / kvm.TRIAL_ID).exists()

    async def no_machine(_: object) -> QemuMachine:
        raise AssertionError("asked again")

    again = replace(by_kvm(tools), start=no_machine)
    assert anyio.run(kvm.choose, again, *arguments) == first
    with pytest.raises(AssertionError, match="asked again"):
        anyio.run(kvm.choose, again, at.initramfs, *arguments[1:])
