"""Whose process is it? Records, marks, pid reuse, and other people's processes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandboxd.vm import processes
from sandboxd.vm.processes import Process, Record
from tests import descriptors

MARKED = "/sandboxd/t1/box/qemu"


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for child in started:
        child.kill()
        child.wait()


def start(children: list[subprocess.Popen[bytes]], argv0: str, user: int | None = None) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [argv0, "60"],
        executable="/bin/sleep",
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )
    children.append(child)
    return child


def seen(child: subprocess.Popen[bytes], role: str = "QEMU") -> Process:
    return Process(role, child.pid, processes.start_ticks(child.pid))


@pytest.mark.parametrize(
    ("line", "id"),
    [
        ([b"/sandboxd/t1/box/qemu", b"-nodefaults"], "box"),
        ([b"/sandboxd/t1/box/sandbox-vsock"], "box"),
        ([b"/usr/bin/bwrap", b"--ro-bind", b"/usr/bin/q", b"/sandboxd/t1/box/q"], "box"),
        ([b"prlimit", b"--core=0", b"bwrap", b"/sandboxd/t1/box/q"], "box"),
        ([b"/setpriv", b"--", b"/sandboxd/t1/box/q"], "box"),
        ([b"vim", b"/sandboxd/t1/box/qemu"], None),
        ([b"grep", b"-r", b"/sandboxd/t1/box/"], None),
        ([b"/sandboxd/t2/box/qemu"], None),
        ([b"/sandboxd/t1"], None),
        ([b"/sandboxd/t1/"], None),
        ([b"/sandboxd/t1/box"], None),
        ([b"/sandboxd/t1//qemu"], None),
        ([b"x/sandboxd/t1/box/qemu"], None),
        ([b"qemu-system-x86_64", b"-name", b"/sandboxd/t1/box/qemu"], None),
        ([b""], None),
    ],
)
def test_a_mark_is_read_where_it_belongs_and_nowhere_else(line: list[bytes], id: str | None) -> None:
    assert processes.marked_id(line, "t1") == id


def test_marked_processes_are_ended_and_only_those(children: list[subprocess.Popen[bytes]]) -> None:
    mine = start(children, MARKED)
    known = start(children, "/sandboxd/t1/known/qemu")
    others = start(children, "/sandboxd/t2/box/qemu")
    plain = start(children, "qemu-system-x86_64")
    wait_for_exec(children)
    assert processes.end_marked("t1", lambda id: id != "known", {os.getuid()}) == {"box"}
    assert mine.wait(5) == -9
    assert [child.poll() for child in (known, others, plain)] == [None] * 3
    assert processes.end_marked("t1", lambda id: id != "known", {os.getuid()}) == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start another user's process")
def test_another_users_process_is_not_touched_whatever_it_calls_itself(
    children: list[subprocess.Popen[bytes]],
) -> None:
    forged = start(children, MARKED, user=4242)
    ours = start(children, MARKED, user=4243)
    wait_for_exec(children)
    assert processes.end_marked("t1", lambda id: True, {0, 4243}) == {"box"}
    assert ours.wait(5) == -9
    assert forged.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start another user's process")
def test_what_anybody_says_on_a_command_line_is_not_even_read(
    children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could be in memory that never answers, a file of FUSE say."""
    forged, ours = start(children, MARKED, user=4242), start(children, MARKED, user=4243)
    wait_for_exec(children)
    read: list[int] = []
    command_line = processes.command_line
    monkeypatch.setattr(processes, "command_line", lambda pid: (read.append(pid), command_line(pid))[1])
    assert list(processes.marked("t1", {0, 4243})) == [("box", ours.pid)]
    assert forged.pid not in read and ours.pid in read


def test_a_held_process_is_the_recorded_one(children: list[subprocess.Popen[bytes]]) -> None:
    child = start(children, MARKED)
    process = seen(child)
    pidfd = processes.hold(process)
    assert pidfd is not None
    assert processes.end([pidfd])
    assert child.wait(5) == -9
    assert processes.hold(process) is None


def test_a_pid_that_is_somebody_elses_by_now_is_not_held(children: list[subprocess.Popen[bytes]]) -> None:
    process = seen(start(children, MARKED))
    assert processes.hold(Process(process.role, process.pid, process.start_ticks - 1)) is None


def test_the_dead_but_not_waited_for_count_as_gone(children: list[subprocess.Popen[bytes]]) -> None:
    child = start(children, MARKED)
    process = seen(child)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.hold(process) is None


LOOKS: dict[str, Callable[[Process, Path], object]] = {
    "hold": lambda process, _: processes.hold(process),
    "hold_all": lambda process, _: processes.hold_all([process]),
    "has_ended": lambda process, _: processes.has_ended(process),
    "hold_child": lambda process, _: processes.hold_child(process.pid, os.getpid()),
    "start_ticks": lambda process, _: processes.start_ticks(process.pid),
    "parent": lambda process, _: processes.parent(process.pid),
    "command_line": lambda process, _: processes.command_line(process.pid),
    "end_marked": lambda _, __: processes.end_marked("t1", lambda id: True, {os.getuid()}),
    "read_record": lambda _, directory: processes.read_record(directory),
    "end_recorded": lambda _, directory: processes.end_recorded(directory),
}


@pytest.mark.parametrize("look", LOOKS)
def test_what_cannot_be_looked_at_is_not_gone(
    look: str, tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    child = start(children, MARKED)
    process = seen(child)
    processes.write_record(tmp_path, Record("box", "/sandboxd/t1/box", (process,)))
    with descriptors.few_left(0), pytest.raises(OSError) as caught:
        LOOKS[look](process, tmp_path)
    assert caught.value.errno == errno.EMFILE
    assert child.poll() is None
    assert processes.read_record(tmp_path) is not None


@pytest.mark.parametrize("left", [0, 1, 2])
def test_what_was_held_is_let_go_where_the_next_cannot_be(
    left: int, children: list[subprocess.Popen[bytes]]
) -> None:
    """For the first one's pidfd, for its look at /proc beside it, for the second one's."""
    held = [seen(start(children, "sleep")) for _ in range(2)]
    before = os.listdir("/proc/self/fd")
    with descriptors.few_left(left), pytest.raises(OSError):
        processes.hold_all(held)
    assert os.listdir("/proc/self/fd") == before
    assert [child.poll() for child in children] == [None, None]


def test_a_thread_is_no_process() -> None:
    thread = threading.Thread(target=(stop := threading.Event()).wait, args=(10,))
    thread.start()
    try:
        assert thread.native_id is not None
        assert processes.hold(Process("QEMU", thread.native_id, processes.start_ticks(thread.native_id))) is None
    finally:
        stop.set()
        thread.join()


def test_a_name_with_parentheses_does_not_shift_the_fields(tmp_path: Path) -> None:
    program = tmp_path / ") R 1 (x"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as child:
        try:
            assert processes.parent(child.pid) == os.getpid()
        finally:
            child.kill()


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record = Record("box", "/sandboxd/t1/box", (Process("QEMU", 1234, 5), Process("sandbox-vsock", 1235, 6)))
    processes.write_record(tmp_path, record)
    assert processes.read_record(tmp_path) == record
    assert os.listdir(tmp_path) == ["vm.json"]
    assert (tmp_path / "vm.json").stat().st_mode & 0o077 == 0
    processes.remove_record(tmp_path)
    processes.remove_record(tmp_path)
    assert processes.read_record(tmp_path) is None


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"version": 2}, id="another version"),
        pytest.param({"boot_id": "00000000-0000-0000-0000-000000000000"}, id="an earlier boot"),
        pytest.param({"processes": {"pid": 1}}, id="no list"),
        pytest.param({"processes": [{"role": "QEMU", "pid": 1, "start_ticks": 1}]}, id="init"),
        pytest.param({"processes": [{"role": "QEMU", "pid": -1, "start_ticks": 1}]}, id="a group"),
        pytest.param({"processes": [{"role": "QEMU", "pid": 1 << 31, "start_ticks": 1}]}, id="no pid of any kernel"),
        pytest.param({"processes": [{"role": "QEMU", "pid": "7", "start_ticks": 1}]}, id="a pid of another kind"),
        pytest.param({"processes": [{"role": "QEMU", "pid": 7}]}, id="no start time"),
        pytest.param({"id": 7}, id="an id of another kind"),
        pytest.param({"marker": "/sandboxd/t1/other"}, id="a mark of another machine"),
        pytest.param({"marker": "/sandboxd/../box"}, id="a mark of no instance"),
        pytest.param({"marker": "box"}, id="no mark"),
        pytest.param({"directory": 7}, id="a directory of another kind"),
    ],
)
def test_a_damaged_record_is_no_record(tmp_path: Path, change: dict[str, object]) -> None:
    processes.write_record(tmp_path, Record("box", "/sandboxd/t1/box", ()))
    value = json.loads((tmp_path / "vm.json").read_text()) | change
    (tmp_path / "vm.json").write_text(json.dumps(value))
    assert processes.read_record(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 50_000, b"{}" * 100_000])
def test_rubbish_is_no_record(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "vm.json").write_bytes(content)
    assert processes.read_record(tmp_path) is None
    assert not processes.end_recorded(tmp_path)


def test_a_record_finds_a_program_that_renamed_itself(tmp_path: Path, children: list[subprocess.Popen[bytes]]) -> None:
    child = start(children, "innocent")
    processes.write_record(tmp_path, Record("box", "/sandboxd/t1/box", (seen(child),)))
    assert processes.end_recorded(tmp_path)
    assert child.wait(5) == -9
    assert not processes.end_recorded(tmp_path)


def test_a_copy_of_a_state_directory_has_no_say_over_machines_and_a_renamed_one_has(
    tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    child = start(children, MARKED)
    own, copy, renamed = tmp_path / "own", tmp_path / "copy", tmp_path / "renamed"
    own.mkdir()
    processes.write_record(own, Record("box", "/sandboxd/t1/box", (seen(child),)))
    shutil.copytree(own, copy)
    assert processes.read_record(copy) is None
    assert not processes.end_recorded(copy)
    assert child.poll() is None
    own.rename(renamed)
    assert processes.end_recorded(renamed)
    assert child.wait(5) == -9


def test_a_record_of_an_earlier_version_does_not_say_which_directory_it_is_of(tmp_path: Path) -> None:
    processes.write_record(tmp_path, Record("box", "/sandboxd/t1/box", ()))
    value = json.loads((tmp_path / "vm.json").read_text())
    del value["directory"]
    (tmp_path / "vm.json").write_text(json.dumps(value))
    assert processes.read_record(tmp_path) is not None


def wait_for_exec(children: list[subprocess.Popen[bytes]]) -> None:
    """Until each has its own command line: between fork and exec a child has ours."""
    own = processes.command_line(os.getpid())
    deadline = time.monotonic() + 10
    while any(processes.command_line(child.pid) in (own, [b""]) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)
