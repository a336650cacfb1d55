"""The file of what guests caused: its lines, its size, what is found in it."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from egress.control import ALLOWED, DENIED, LOST, ROW, Event
from sandboxd.events import GENERATIONS, Decision, EventFile, decision, merged

DENIAL = Event(1, 100.5, DENIED, "sbx_a", "abcdefg2", "other.test", 443, "not-listed", "tls", "Why.", 1, 0, 0, 0)
USE = Event(2, 101.0, ALLOWED, "sbx_a", "bcdefgh3", "a.test", 443, "allow a.test", "tls", "", 1, 0, 0, 0)


def path_of(state: Path) -> Path:
    return state / "audit" / "egress.jsonl"


def test_the_last_line_of_an_id_is_the_truth_and_the_first_says_when(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    assert file.find("abcdefg2") is None and file.of("sbx_a") == []
    for event in (DENIAL, USE, replace(DENIAL, sandbox="sbx_b", id="cdefghi4"), replace(DENIAL, count=7, at=160.0)):
        file.add(event)
    file.add(replace(USE, count=2, connections=2, up_bytes=10, down_bytes=2000, at=170.0))
    expected = Decision(
        "denied", "sbx_a", "abcdefg2", "other.test", 443, "not-listed", "tls", "Why.", 7, 0, 0, 0, 100.5, 160.0
    )
    assert file.find("abcdefg2") == expected
    used = Decision(
        "allowed", "sbx_a", "bcdefgh3", "a.test", 443, "allow a.test", "tls", "", 2, 2, 2000, 10, 101.0, 170.0
    )
    assert file.of("sbx_a") == [expected, used]
    assert EventFile(tmp_path).of("sbx_a") == [expected, used], "another daemon reads the same"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (path_of(tmp_path), path_of(tmp_path).parent)]
    assert modes == [0o600, 0o700]


@pytest.mark.parametrize(
    "name", ["a\nb", "\x1b]0;x\x07", 'x","id":"abcdefg2', "\u2028", "\udcff", "x" * 400], ids=ascii
)
def test_a_line_is_one_line_whatever_the_guest_wrote(tmp_path: Path, name: str) -> None:
    file = EventFile(tmp_path)
    file.add(replace(DENIAL, id="zzzzzzz7", name=name, why=name))
    file.add(DENIAL)
    lines = path_of(tmp_path).read_bytes().splitlines()
    assert len(lines) == 2 and all(isinstance(json.loads(line), dict) and line.isascii() for line in lines)
    found = file.find("zzzzzzz7")
    assert found is not None and found.name == (name if len(name) <= 300 else "x" * 300 + "…")
    assert file.find("abcdefg2") is not None and file.find("abcdefg2") != found


def test_it_holds_a_bounded_number_of_bytes_and_the_newest(tmp_path: Path) -> None:
    file = EventFile(tmp_path, max_bytes=4096)
    for number in range(400):
        file.add(replace(DENIAL, id=f"aaaa{number:04}", at=float(number)))
        file.add(replace(USE, count=number, at=float(number)))
    paths = sorted(path_of(tmp_path).parent.iterdir())
    assert [path.name for path in paths] == ["egress.jsonl", *(f"egress.jsonl.{n}" for n in range(1, GENERATIONS + 1))]
    assert all(0 < path.stat().st_size <= 4096 and stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)
    assert file.find("aaaa0000") is None and file.find("aaaa0399") is not None
    used = file.find("bcdefgh3")
    assert used is not None and (used.count, used.last_at) == (399, 399.0) and 0 < used.first_at < 399


def test_what_is_no_line_is_passed_over(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.add(DENIAL)
    whole = path_of(tmp_path).read_bytes()
    rubbish = b'{"id":"abcdefg2"\n[]\n{"id":"abcdefg2"}\n"id":"abcdefg2"\n'
    rubbish += b"x" * 100_000 + b'"id":"abcdefg2"\n\xff\n'
    path_of(tmp_path).write_bytes(rubbish + whole + whole[:30])
    found = file.find("abcdefg2")
    assert found is not None and found.count == 1


def test_what_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = EventFile(tmp_path)
    path_of(tmp_path).parent.mkdir()
    path_of(tmp_path).symlink_to(tmp_path / "elsewhere")
    for _ in range(3):
        file.add(DENIAL)
    assert not (tmp_path / "elsewhere").exists()
    assert caplog.text.count("cannot be written") == 1
    os.unlink(path_of(tmp_path))
    file.add(DENIAL)
    assert file.find("abcdefg2") is not None


def test_events_that_nobody_took_are_said_and_are_no_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost = Event(9, 1.0, LOST, "", "", "", 0, "", "", "", 12, 0, 0, 0)
    file = EventFile(tmp_path)
    file.add(lost)
    assert "12 decisions about names were not recorded" in caplog.text
    assert merged(file.of("")) == []


def test_two_ids_for_one_thing_are_one_row() -> None:
    first = Decision("denied", "s", "aaaaaaa2", "x.test", 443, "not-listed", "tls", "w", 3, 0, 0, 0, 1.0, 2.0)
    again = replace(first, id="bbbbbbb2", count=4, first_at=10.0, last_at=12.0)
    by_dns = replace(first, id="ccccccc2", by="dns", last_at=1.5)
    used = Decision("allowed", "s", "ddddddd2", "a.test", 443, "allow a.test", "tls", "", 1, 1, 10, 20, 3.0, 3.0)
    later = replace(used, id="eeeeeee2", rule="mode open", bytes_in=1, bytes_out=2, first_at=4.0, last_at=4.0)
    assert merged([again, used, first, later, by_dns]) == [
        by_dns,
        replace(later, count=2, connections=2, bytes_in=11, bytes_out=22, first_at=3.0),
        replace(again, count=7, first_at=1.0),
    ]


def test_a_row_of_a_report() -> None:
    texts = {"id": "abcdefg2", "decision": "denied", "name": "x.test", "rule": "not-listed", "by": "dns", "why": ""}
    row: dict[str, object] = dict.fromkeys(ROW, 0) | texts
    found = decision("sbx_a", row)
    assert found is not None and (found.kind, found.sandbox, found.id) == ("denied", "sbx_a", "abcdefg2")
    assert decision("sbx_a", row | {"more": 1}) is None and decision("sbx_a", {}) is None
    for key, value in (
        ("name", ["x.test"]), ("name", "x" * 513), ("rule", None), ("port", "443"), ("port", True), ("count", -1),
        ("bytes_in", 1 << 63), ("last_at", "1"), ("last_at", float("nan")), ("first_at", 1e11), ("last_at", -1.0),
    ):  # fmt: skip
        assert decision("sbx_a", row | {key: value}) is None
