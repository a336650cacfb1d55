"""Session records survive what happens to files, and refuse what is not one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cli import session
from cli.session import Session, SessionError

RECORD = Session("sb-1", "local", "/home/alice/\udcffproject", "a" * 40, "demo", started="2030-01-01T00:00:00Z")


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    started = "2029-01-01T00:00:00Z"
    full = Session("sb_2", "c", "/r", "b" * 64, "n/m", "claude", started, "c" * 40, "x", True, True, ("k",))
    for record in (RECORD, full):
        session.save(tmp_path / "config", record)
        assert session.load(tmp_path / "config", record.sandbox) == record
    assert session.every(tmp_path / "config") == [full, RECORD]
    session.forget(tmp_path / "config", "sb-1")
    session.forget(tmp_path / "config", "sb-1")
    assert session.load(tmp_path / "config", "sb-1") is None
    assert session.every(tmp_path / "nothing") == []


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
        ("x" * (session.RECORD_BYTES + 1), "too large"),
    ],
)
def test_what_is_no_record_is_refused(content: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "sessions").mkdir()
    (tmp_path / "sessions/sb-1.json").write_text(content)
    with pytest.raises(SessionError, match=why) as caught:
        session.load(tmp_path, "sb-1")
    assert str(caught.value).isprintable()


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
