"""`events` and `audit verify`: what a person is shown of a log, by sandboxd and without one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cli import audit, events
from sandboxd.errors import SandboxError
from sandboxd.journal import Journal
from tests.cli.rawserver import ReadRequest, serving


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of three files."""
    journal = Journal(tmp_path / "log" / "events.jsonl", 800)
    journal.begin()
    for number in range(9):
        journal.append({"time": "2026-01-01T00:00:00.000000Z", "type": "file.read", "path": f"/{number}"})
    journal.close()
    return tmp_path / "log" / "events.jsonl"


def verify(*files: Path, as_json: bool = False, context: str | None = None) -> int:
    return audit.main({"FILE": [str(file) for file in files], "--json": as_json, "--context": context})


def test_a_good_log(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert verify(log) == 0
    said = capfd.readouterr()
    assert said.out.startswith("12 lines in 3 files, each follows from the one before\nlast hash: ") and not said.err
    assert log.with_name("events.jsonl.head").read_text().split()[2] == said.out.split()[-1]
    assert verify(log, as_json=True) == 0
    assert json.loads(capfd.readouterr().out)["lines"] == 12


def test_copies_in_any_order(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    oldest, middle, newest = (log.with_name(f"events.jsonl{end}") for end in (".2", ".1", ""))
    assert verify(middle, newest, oldest) == 0
    assert verify(middle) == 0
    assert "begins with line number 6: older ones were dropped" in capfd.readouterr().err
    assert verify(oldest, newest) == 1
    assert "it begins file 3, and file 2 was to come" in capfd.readouterr().err


def test_a_log_that_was_changed(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    older = log.with_name("events.jsonl.1")
    older.write_bytes(older.read_bytes().replace(b"/4", b"/X"))
    assert verify(log) == 1
    said = capfd.readouterr()
    assert said.out == "" and "the chain does not hold: events.jsonl.1, line 3: it does not follow" in said.err
    assert verify(log, as_json=True) == 1
    assert json.loads(capfd.readouterr().out)["ok"] is False


def test_a_log_without_its_head(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log.with_name("events.jsonl.head").unlink()
    assert verify(log) == 0
    assert "events.jsonl.head is missing" in capfd.readouterr().err


def test_what_is_no_log(log: Path, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="none cannot be read: No such file"):
        verify(tmp_path / "none")
    with pytest.raises(SandboxError, match="log cannot be read"):
        verify(tmp_path / "log")
    (tmp_path / "text").write_text("hello\n")
    assert verify(tmp_path / "text") == 1
    with pytest.raises(SandboxError, match="text does not begin as an audit log"):
        verify(tmp_path / "text", log)
    os.symlink(log, tmp_path / "link")
    with pytest.raises(SandboxError, match="cannot be read"):
        verify(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SandboxError, match="pipe cannot be read"):
        verify(tmp_path / "pipe")


def answering(path: Path, body: Any) -> Any:
    text = json.dumps(body).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(text)
    # The first connection only sees whether somebody is there.
    return serving(path, [], [ReadRequest(), head + text])


def test_sandboxd_s_word_is_shown_as_one_line(short_tmp: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = {"ok": False, "lines": 1, "files": 1, "fault": "line 2:\x1b[31m changed\nlast hash: 00"}
    with answering(short_tmp / "audit.sock", body):
        assert verify(context=f"unix://{short_tmp}/audit.sock") == 1
    said = capfd.readouterr()
    assert said.out == "" and said.err == (
        "sandbox-cli: the chain does not hold: line 2: [31m changed last hash: 00\n"
    )


def test_events_are_shown_as_lines_fit_for_a_terminal(short_tmp: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = [
        {
            "time": "2026-01-01T00:00:00.123456Z", "type": "process.started", "sandbox": "sbx_1", "pid": 1,
            "program": "evil\x1b]0;t\x07\nname", "arg_count": 2, "args_sha256": "ab" * 32, "env_names": ["A", "B"],
        },
        {
            "time": "2026-01-01T00:00:01.000000Z", "type": "sandbox.created", "sandbox": "sbx_1",
            "network": {"mode": "allowlist", "allow": ["a.test", "b.test"]}, "labels": {"k": "v w"},
            "exit_code": 0,
        },
        {"time": "2026-01-01T00:00:02Z", "type": "sandbox.resumed", "sandbox": "sbx_1"},
    ]  # fmt: skip
    where = {"--context": f"unix://{short_tmp}/events.sock", "SANDBOX": "box"}
    with answering(short_tmp / "events.sock", {"events": found, "truncated": True}):
        assert events.main({**where, "--json": False}) == 0
    said = capfd.readouterr()
    assert said.out.splitlines() == [
        '2026-01-01T00:00:00Z  process.started          env_names=A,B  pid=1  program="evil ]0;t name"  arg_count=2'
        "  args_sha256=abababababab",
        '2026-01-01T00:00:01Z  sandbox.created          labels="k:\\"v w\\""'
        "  network=mode:allowlist,allow:a.test,b.test  exit_code=0",
        "2026-01-01T00:00:02Z  sandbox.resumed",
    ]
    assert said.err == "sandbox-cli: older events than these 3 are left out\n"
    (short_tmp / "events.sock").unlink()
    with answering(short_tmp / "events.sock", {"events": found}):
        assert events.main({**where, "--json": True}) == 0
    said = capfd.readouterr()
    assert [json.loads(line) for line in said.out.splitlines()] == found and "\x1b" not in said.out


def test_an_event_wider_than_the_terminal_goes_on_below_and_no_value_is_broken() -> None:
    text = "2026-01-02T03:04:05Z  process.started          pid=1  " + "  ".join(f"key{n}=value{n}" for n in range(9))
    assert events.fitted(text, None) == events.fitted(text, len(text)) == text
    lines = events.fitted(text, 80).splitlines()
    assert len(lines) > 1 and all(len(line) <= 80 for line in lines)
    assert " ".join(lines).split() == text.split() and lines[1].startswith(" " * 20)
