"""The record of a fleet: true whoever was killed, whole whoever writes it at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cli import session
from cli.fleet import state
from cli.fleet.state import Fleet, StateError, Store, Task
from sandboxd.errors import SandboxError
from tests.conftest import counts

ROOT = Path(__file__).resolve().parents[2]
OURS = os.getpid(), state.born(os.getpid())


def fleet(*tasks: Task, pid: int = 0, born: str = "") -> Fleet:
    return Fleet("/r", "f" * 40, "main", "unix:///s", session.now(), pid, born, tasks)


def a_task(branch: str = "a", **fields: object) -> Task:
    return replace(Task(branch, "codex", True, f"fleet-{branch}"), **fields)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.of(str(tmp_path / "config"), Path("/r/.git"))
    made.prepare()
    return made


def dead() -> tuple[int, str]:
    """A process that was, and is waited for."""
    child = subprocess.Popen(["sleep", "60"])
    before = child.pid, state.born(child.pid)
    child.kill()
    child.wait()
    return before


@pytest.mark.parametrize(
    ("task", "by", "told"),
    [
        pytest.param(a_task(state=state.RUNNING, pid=OURS[0], born=OURS[1]), (0, ""), state.RUNNING,
                     id="a task at work outlives its fleet"),
        pytest.param(a_task(state=state.RUNNING, pid=OURS[0], born="another boot:1"), OURS, state.LOST,
                     id="its number is another process's now"),
        pytest.param(a_task(state=state.RUNNING), OURS, state.LOST, id="it never said who it is"),
        pytest.param(a_task(state=state.WAITING), OURS, state.WAITING, id="its turn is yet to come"),
        pytest.param(a_task(state=state.WAITING), (0, ""), state.UNSTARTED, id="nobody is left to start it"),
        pytest.param(a_task(state=state.VERIFIED), (0, ""), state.VERIFIED, id="what it wrote last stays"),
        pytest.param(a_task(state=state.REJECTED, pid=1), (0, ""), state.REJECTED, id="so does a bad end"),
    ],
)  # fmt: skip
def test_what_is_told(task: Task, by: tuple[int, str], told: str) -> None:
    [seen] = state.truth(fleet(task, pid=by[0], born=by[1]), state.alive).tasks
    assert seen.state == told


def test_a_process_is_alive_until_it_has_ended_and_not_when_nobody_waits_for_it() -> None:
    child = subprocess.Popen(["sleep", "60"])
    born = state.born(child.pid)
    assert state.alive(child.pid, born)
    child.kill()
    deadline = time.monotonic() + 20
    while state.alive(child.pid, born):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert Path(f"/proc/{child.pid}/stat").exists(), "it was a zombie, which is as good as gone"
    child.wait()
    assert not state.alive(*dead())


def test_a_record_comes_back_as_it_was_and_is_the_owners_alone(store: Store) -> None:
    written = fleet(a_task(), a_task("b/ö", state=state.FAILED, code=3, commits=0, detail="x"), pid=5, born="b:1")
    store.write(written)
    assert store.read() == written
    store.change("a", state=state.VERIFIED, commit="f" * 40)
    changed = store.read()
    assert changed is not None and changed.task("a") == a_task(state=state.VERIFIED, commit="f" * 40)
    assert changed.task("b/ö") == written.task("b/ö")
    assert {path.name: path.stat().st_mode & 0o777 for path in (store.directory, *store.directory.iterdir())} == {
        store.directory.name: 0o700, "logs": 0o700, "state.json": 0o600,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"repo": 1}', '{"extra": 1}', "[" * 100_000, "\xff", '{"tasks": [{"branch": "a"}]}'],
    ids=["empty", "cut", "a list", "a number", "unknown", "deep", "no text", "a task without its fields"],
)
def test_what_is_no_record_is_said_in_one_line(text: str, store: Store) -> None:
    (store.directory / "state.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StateError, match="is not the record of a fleet") as caught:
        store.read()
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("fields", "whole"),
    [
        pytest.param({"state": "landed"}, {}, id="a state there is not"),
        pytest.param({"branch": "a\0b"}, {}, id="a branch with a NUL"),
        pytest.param({"branch": "a\ud800"}, {}, id="a branch that is no name"),
        pytest.param({"started": "yesterday"}, {}, id="a time that is none"),
        pytest.param({"ended": "2030-01-01T00:00:00"}, {}, id="a time without a zone"),
        pytest.param({"commit": "--help"}, {}, id="an option for a commit"),
        pytest.param({}, {"base": "HEAD"}, id="a name for a commit"),
    ],
)
def test_values_that_can_be_no_record_s_are_said_in_one_line(
    fields: dict[str, str], whole: dict[str, str], store: Store
) -> None:
    store.write(replace(fleet(a_task(**fields)), **whole))  # type: ignore[arg-type]
    with pytest.raises(StateError, match="is not the record of a fleet") as caught:
        store.read()
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["state.json", "lock"])
def test_a_link_is_not_followed(name: str, store: Store, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("{}")
    (store.directory / name).symlink_to(tmp_path / "victim")
    with pytest.raises(SandboxError):
        store.read() if name == "state.json" else store.hold()
    assert (tmp_path / "victim").read_text() == "{}"


CHANGER = """
import sys
from pathlib import Path
from cli.fleet.state import Store
store = Store(Path(sys.argv[1]))
for number in range(int(sys.argv[3])):
    store.change(sys.argv[2], code=number + 1)
"""


def changer(store: Store, branch: str, times: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CHANGER, str(store.directory), branch, str(times)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)


def test_many_write_at_once_and_no_word_is_lost(store: Store) -> None:
    names = [f"t{number}" for number in range(5)]
    store.write(fleet(*map(a_task, names)))
    writers = [changer(store, name, 30) for name in names]
    assert [writer.wait(100) for writer in writers] == [0] * 5
    ended = store.read()
    assert ended is not None and [task.code for task in ended.tasks] == [30] * 5


def test_a_writer_killed_at_any_moment_leaves_a_whole_record(store: Store) -> None:
    store.write(fleet(a_task(), a_task("b")))
    for number in range(counts(6, 100)):
        writer = changer(store, "a", 100_000)
        deadline = time.monotonic() + 30
        while not (now := store.read()) or not (task := now.task("a")) or not task.code:
            assert writer.poll() is None and time.monotonic() < deadline
        time.sleep(0.003 * number)
        writer.kill()
        writer.wait()
        store.change("b", code=number)  # nobody holds its lock any more
        now = store.read()
        assert now is not None and now.task("b") == a_task("b", code=number)
        store.change("a", code=None)


def test_the_lock_is_held_until_the_last_of_a_fleets_processes_has_ended(store: Store) -> None:
    lock = store.hold()
    task = subprocess.Popen(["sleep", "60"], pass_fds=(lock,))
    running = a_task(state=state.RUNNING, pid=task.pid, born=state.born(task.pid))
    store.write(fleet(running, pid=OURS[0], born=OURS[1]))
    with pytest.raises(StateError, match=f"another fleet is at work in this repository: process {OURS[0]}, since"):
        store.hold()
    os.close(lock)
    store.write(fleet(running, pid=dead()[0], born=dead()[1]))
    with pytest.raises(StateError, match=r"that was killed are still at work: wait, or end .* kill fleet-a"):
        store.hold()
    task.send_signal(signal.SIGKILL)
    task.wait()
    os.close(store.hold())
