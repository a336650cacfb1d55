"""Control groups: what is written to them, and real ones with processes in them."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandboxd.errors import SetupError
from sandboxd.vm import cgroups, processes
from sandboxd.vm.cgroups import Group, Hierarchy, Limits
from sandboxd.vm.processes import Record
from tests import descriptors

LIMITS = Limits(cpus=0.5, memory_bytes=64 << 20, processes=16)
INSTANCE = f"test-{os.getpid()}"

V1 = """\
tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0
cgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0
"""


def test_the_files_of_each_version() -> None:
    assert cgroups.files(2, LIMITS) == {
        "cpu.max": "50000 100000",
        "memory.max": "67108864",
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "16",
    }
    assert cgroups.files(1, LIMITS) == {
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "50000",
        "memory.limit_in_bytes": "67108864",
        "memory.memsw.limit_in_bytes": "67108864",
        "pids.max": "16",
    }


def test_version_1_has_a_directory_for_each_controller() -> None:
    found = cgroups.find(V1)
    assert found.version == 1
    assert [root.name for root in found.roots] == ["cpu,cpuacct", "memory", "pids"]


def test_version_2_is_taken_where_it_has_the_controllers(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    assert cgroups.find(V1 + f"cgroup2 {tmp_path} cgroup2 rw 0 0\n").roots == (tmp_path,)
    (tmp_path / "cgroup.controllers").write_text("hugetlb\n")
    assert cgroups.find(V1 + f"cgroup2 {tmp_path} cgroup2 rw 0 0\n").version == 1


def test_a_host_without_one_is_told_which() -> None:
    with pytest.raises(SetupError, match="pids"):
        cgroups.find(V1.replace("pids", "rdma"))


def hierarchy(directory: Path) -> str:
    """The line of one that has only what it is found by."""
    (directory / "cgroup.controllers").write_text("cpu memory pids\n")
    return f"cgroup2 {directory} cgroup2 rw 0 0\n"


def test_where_no_group_can_be_made_a_start_says_so(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=f"no control group can be made below {tmp_path}, .*the kernel has no such"):
        cgroups.usable(hierarchy(tmp_path))


def test_processes_in_a_containers_own_group_are_to_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: object) -> None:
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(Group, "make", make)
    with pytest.raises(SetupError, match=f"as in a container. Move them into one below: mkdir {tmp_path}/own; for"):
        cgroups.usable(hierarchy(tmp_path))


def test_the_trial_leaves_nothing() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may make control groups")
    assert cgroups.usable() == cgroups.find()
    assert str(os.getpid()) not in cgroups.find().ids("trial")


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 65])
def test_a_name_stays_one_directory(name: str) -> None:
    with pytest.raises(ValueError, match="not names"):
        cgroups.find(V1).group(INSTANCE, name)


@pytest.fixture
def group() -> Iterator[Group]:
    if os.geteuid() != 0:
        pytest.skip("only root may make control groups")
    hierarchy = cgroups.find()
    made = hierarchy.group(INSTANCE, "one")
    made.make(LIMITS)
    yield made
    assert made.remove()
    assert not any(directory.parent.exists() for directory in made.directories)


def run(group: Group, program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*group.entering(), sys.executable, "-c", program], stdout=subprocess.PIPE)


def test_who_is_started_in_it_is_in_it_with_all_descendants(group: Group) -> None:
    program = "import os, time; pid = os.fork(); pid or os.setsid(); print(pid, flush=True); time.sleep(60)"
    with run(group, program) as started:
        assert started.stdout is not None
        lines = {int(started.stdout.readline()), int(started.stdout.readline())} - {0}
        assert group.pids() == {started.pid, *lines}
        assert group.end()
        assert group.pids() == set()


def test_more_memory_than_allowed_ends_the_taker_alone(group: Group) -> None:
    with run(group, "print(len(bytearray(256 << 20)))") as started:
        assert started.wait(30) == -9


def test_no_more_processes_than_allowed(group: Group) -> None:
    program = """
import os, time
made = 0
try:
    for _ in range(64):
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except BlockingIOError:
    print(made)
"""
    with run(group, program) as started:
        assert started.stdout is not None
        assert int(started.stdout.readline()) == LIMITS.processes - 1
        assert group.end()


def test_half_a_processor(group: Group) -> None:
    with run(group, "import time; end = time.time() + 2\nwhile time.time() < end: pass") as started:
        before = os.times().children_user
        started.wait(30)
        assert os.times().children_user - before < 1.6


def test_a_group_that_was_left_is_made_anew(group: Group) -> None:
    with run(group, "import time; time.sleep(60)") as started:
        while group.pids() != {started.pid}:
            time.sleep(0.01)
        group.make(LIMITS)
        assert started.wait(5) == -9
    assert cgroups.find().ids(INSTANCE) == {"one"}


def test_who_comes_while_it_is_removed_is_ended_too(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    end = Group.end

    def late(self: Group) -> bool:
        looks.append(self)
        return len(looks) == 1 or end(self)

    with run(group, "import time; time.sleep(60)") as started:
        while group.pids() != {started.pid}:
            time.sleep(0.01)
        monkeypatch.setattr(Group, "end", late)
        assert group.remove()
        assert started.wait(5) == -9


def test_a_group_that_cannot_be_read_is_not_empty(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    with run(group, "import time; print(flush=True); time.sleep(60)") as started:
        assert started.stdout is not None and started.stdout.readline()
        with descriptors.few_left(0):
            for look in (group.pids, lambda: group.holds(started.pid)):
                with pytest.raises(OSError) as caught:
                    look()
                assert caught.value.errno == errno.EMFILE
        monkeypatch.setattr(processes, "END_S", 0.05)
        pauses = watch_pauses(monkeypatch)
        # One for the group's list, and none for a pidfd, or none at all.
        for left in (0, 1):
            with descriptors.few_left(left):
                assert not group.end()
            assert 0 < len(pauses) < 50
            pauses.clear()
        assert started.poll() is None
        monkeypatch.undo()
        assert group.end()
        assert started.wait(5) == -9


def watch_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    sleep = time.sleep

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr("sandboxd.vm.cgroups.time.sleep", pause)
    return pauses


def test_a_group_that_stays_is_told_of_and_found_again(
    group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "END_S", 0.05)
    below = group.directories[-1] / "below"
    below.mkdir()
    try:
        with caplog.at_level(logging.ERROR):
            assert not group.remove()
        assert f"a control group could not be removed: {group.directories[-1]}" in caplog.text
        assert [left.id for left in cgroups.find().left(INSTANCE, {"two"}, [])] == ["one"]
    finally:
        below.rmdir()
    group.make(LIMITS)


def test_what_is_left_of_an_instance_and_of_what_records_name(tmp_path: Path) -> None:
    tree = tmp_path / "cgroup"
    for name in ("sandboxd-now/known", "sandboxd-now/lost", "sandboxd-then/renamed", "sandboxd-then/strangers"):
        (tree / name).mkdir(parents=True)
    for id, mark in (("renamed", "then/renamed"), ("copied", "then/strangers"), ("none", "")):
        (tmp_path / id).mkdir()
        if mark:
            processes.write_record(tmp_path / id, Record(mark.partition("/")[2], f"/sandboxd/{mark}", ()))
    left = Hierarchy(2, (tree,)).left("now", {"known"}, [tmp_path / id for id in ("renamed", "copied", "none")])
    assert [str(group.directories[0].relative_to(tree)) for group in left] == [
        "sandboxd-now/lost", "sandboxd-then/renamed",
    ]  # fmt: skip


def test_machines_that_come_and_go_at_once_do_not_meet(group: Group) -> None:
    others = [cgroups.find().group(f"{INSTANCE}-more", f"m{number}") for number in range(2)]

    def come_and_go(one: Group) -> bool:
        for _ in range(20):
            one.make(LIMITS)
            if not one.remove():
                return False
        return True

    with ThreadPoolExecutor(len(others)) as pool:
        assert list(pool.map(come_and_go, others)) == [True, True]


def test_a_command_that_cannot_enter_is_not_run(group: Group) -> None:
    assert group.remove()
    assert subprocess.run([*group.entering(), "echo", "ran"], capture_output=True, check=False).stdout == b""
