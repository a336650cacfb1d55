"""Session records survive what happens to files, and refuse what is not one."""

from __future__ import annotations

import dataclasses
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli import session
from cli.session import Session, SessionError

ROOT = Path(__file__).resolve().parents[2]
RECORD = Session("sb-1", "local", "/home/alice/\udcffproject", "a" * 40, "demo", started="2030-01-01T00:00:00Z")


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    started = "2029-01-01T00:00:00Z"
    full = Session("sb_2", "c", "/r", "b" * 64, "n/m", "claude", started, "c" * 40, "x", True, True, "n", ("k",))
    for record in (RECORD, full):
        session.save(tmp_path / "config", record)
        assert session.load(tmp_path / "config", record.sandbox) == record
    assert session.every(tmp_path / "config") == ([full, RECORD], [])
    assert session.forget(tmp_path / "config", "sb-1")
    assert not session.forget(tmp_path / "config", "sb-1")
    assert session.load(tmp_path / "config", "sb-1") is None
    assert session.every(tmp_path / "nothing") == ([], [])
    assert not session.forget(tmp_path / "nothing", "sb-1")


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        session.save(tmp_path, RECORD)
    finally:
        os.umask(old)
    directory = tmp_path / "sessions"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "sb-1.json").stat().st_mode) == 0o600
    assert os.listdir(directory) == ["sb-1.json"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    session.save(tmp_path, RECORD)
    (tmp_path / "elsewhere").write_text("precious")
    file = tmp_path / "sessions/sb-1.json"
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SessionError):
        session.load(tmp_path, "sb-1")
    session.save(tmp_path, RECORD)
    assert (tmp_path / "elsewhere").read_text() == "precious"
    assert session.load(tmp_path, "sb-1") == RECORD


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "not a session record"),
        ("[]", "not an object"),
        ("[" * 100_000, "not a session record"),
        ('{"sandbox": "sb-1"}', "fields are missing"),
        ('{"sandbox": 1}', "sandbox is not a str"),
        ('{"done": 1}', "done is not a bool"),
        ('{"mirrored": [1]}', "mirrored is not a list of texts"),
        ('{"extra": "\\u001b"}', "unknown extra"),
        ('{"sandbox":"sb-2","context":"","repo":"","base":"","branch":""}', "another sandbox"),
        ('{"sandbox":"sb-1","context":"","repo":"/a\\u0000","base":"","branch":""}', "repo holds a NUL"),
        ('{"sandbox":"sb-1","context":"unix:///a\\u0000","repo":"/","base":"","branch":""}', "context holds a NUL"),
        ('{"sandbox":"sb-1","context":"","repo":"/","base":"","branch":"a\\ud800"}', "not a session record"),
        ('{"sandbox":"sb-1","context":"","repo":"/","base":"--help","branch":""}', "base is no commit"),
        ('{"sandbox":"sb-1","context":"","repo":"/","base":"","branch":"","checkpoint":"HEAD"}', "checkpoint is no"),
        ('{"sandbox":"sb-1","context":"","repo":"/a\\ud800","base":"","branch":""}', "not a session record"),
        ("x" * (session.RECORD_BYTES + 1), "too large"),
    ],
)
def test_what_is_no_record_is_refused(content: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "sessions").mkdir()
    (tmp_path / "sessions/sb-1.json").write_text(content)
    with pytest.raises(SessionError, match=why) as caught:
        session.load(tmp_path, "sb-1")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused_and_cannot_be_forgotten_by_accident(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    (tmp_path / "sessions").mkdir()
    make(tmp_path / "sessions/sb-1.json")
    with pytest.raises(SessionError, match="it is no file"):
        session.load(tmp_path, "sb-1")
    assert session.every(tmp_path)[0] == []
    if make is os.mkdir:
        with pytest.raises(SessionError, match="cannot be removed: Is a directory"):
            session.forget(tmp_path, "sb-1")


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "x" * 65, "a\n", "."])
def test_a_name_that_is_no_sandbox_id_is_no_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="is not a sandbox id"):
        session.load(tmp_path, name)


def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "sessions").write_text("")
    with pytest.raises(SessionError, match=r"sessions/sb-1\.json cannot be written: "):
        session.save(tmp_path, RECORD)
    with pytest.raises(SessionError, match="sessions cannot be made: File exists"):
        session.prepare(tmp_path)
    session.prepare(tmp_path / "new")
    assert stat.S_IMODE((tmp_path / "new/sessions").stat().st_mode) == 0o700


def test_one_bad_record_hides_no_other(tmp_path: Path) -> None:
    session.save(tmp_path, RECORD)
    (tmp_path / "sessions/bad.json").write_text("{")
    (tmp_path / "sessions/not an id.json").write_text("{")
    found, faults = session.every(tmp_path)
    assert found == [RECORD]
    assert [str(fault).partition(": ")[0] for fault in faults] == [
        f"{tmp_path}/sessions/bad.json is not a session record"
    ]


def test_two_who_change_a_record_lose_neither_s_news(tmp_path: Path) -> None:
    session.save(tmp_path, RECORD)
    program = (
        "import sys; from pathlib import Path; from cli import session\n"
        "for n in range(100): session.update(Path(sys.argv[1]), 'sb-1', **{sys.argv[2]: str(n)})"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path), field], cwd=ROOT)
        for field in ("checkpoint", "checkpoint_at", "agent")
    ]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    wanted = dataclasses.replace(RECORD, checkpoint="99", checkpoint_at="99", agent="99")
    assert session.load(tmp_path, "sb-1") == wanted
    assert os.listdir(tmp_path / "sessions") == ["sb-1.json"]


def test_names_of_objects_are_added_to_those_that_are_there_by_then(tmp_path: Path) -> None:
    session.save(tmp_path, RECORD)
    for name in ("a", "b"):
        session.update(tmp_path, "sb-1", more_mirrored=name)
    changed = session.update(tmp_path, "sb-1", done=True)
    assert changed == dataclasses.replace(RECORD, mirrored=(*RECORD.mirrored, "a", "b"), done=True)
    for number in range(session.MIRRORED):
        changed = session.update(tmp_path, "sb-1", more_mirrored=str(number))
    assert changed is not None and changed.mirrored == tuple(map(str, range(session.MIRRORED)))


def test_what_was_forgotten_does_not_come_back(tmp_path: Path) -> None:
    session.save(tmp_path, RECORD)
    session.forget(tmp_path, "sb-1")
    assert session.update(tmp_path, "sb-1", done=True) is None
    assert os.listdir(tmp_path / "sessions") == []


def test_a_record_is_held_for_as_long_as_its_writer_lives(tmp_path: Path) -> None:
    starting = dataclasses.replace(RECORD, sandbox="", run="0a0a")
    assert starting.key == "starting-0a0a"
    descriptor = session.hold(tmp_path, starting)
    assert session.load(tmp_path, starting.key) == starting
    assert session.is_held(tmp_path, starting)
    os.close(descriptor)
    assert not session.is_held(tmp_path, starting)
    assert not session.is_held(tmp_path, RECORD)


def test_what_a_killed_writer_left_is_swept_but_not_a_live_one_s(tmp_path: Path) -> None:
    session.save(tmp_path, RECORD)
    old, new = (tmp_path / f"sessions/{session.TEMPORARY}{word}" for word in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    session.prepare(tmp_path)
    assert sorted(os.listdir(tmp_path / "sessions")) == [new.name, "sb-1.json"]
