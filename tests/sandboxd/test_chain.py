"""The audit log's lines and what a check says of each kind of harm done to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from sandboxd import chain
from sandboxd.chain import START, Link, Report

Files = list[tuple[str, list[bytes]]]


def log(files: int = 2, each: int = 5, first: int = 1) -> tuple[Files, Link]:
    """Whole files, the oldest first, and the last line's place."""
    made: Files = []
    last = START if first == 1 else Link(1000, first - 1, "a" * 64)
    for number in range(first, first + files):
        raw, last = chain.line(last, {"time": "t", "type": chain.FILE, "file": number})
        lines = [raw]
        for event in range(each):
            raw, last = chain.line(last, {"time": "t", "type": "file.read", "path": f"/{number}/{event}"})
            lines.append(raw)
        made.append((f"log.{first + files - 1 - number}", lines))
    return made, last


def check(files: Files, head: Link | None, kept: int = 6) -> Report:
    return chain.verify(files, head, kept)


def test_a_whole_log() -> None:
    files, last = log()
    assert check(files, last) == Report(12, 2, "", last.hash)
    assert check(files, None) == Report(12, 2, "", last.hash)
    assert check([], None).fault == ""
    behind, _ = log(1)
    earlier = chain.read(behind[0][1][-1])
    assert earlier is not None
    assert check(files, Link(earlier.seq, 1, earlier.hash)).fault == "", "a head may be behind"


def test_a_line_holds_the_hash_of_the_one_before() -> None:
    files, _ = log(1, 2)
    lines = files[0][1]
    assert json.loads(lines[0])["prev"] == "0" * 64
    assert json.loads(lines[1])["prev"] == chain.digest(lines[0][:-1])
    assert [json.loads(line)["seq"] for line in lines] == [1, 2, 3]


def changed(files: Files) -> Files:
    files[0][1][3] = files[0][1][3].replace(b"/1/2", b"/1/X")
    return files


def missing(files: Files) -> Files:
    del files[0][1][3:5]
    return files


def swapped(files: Files) -> Files:
    lines = files[0][1]
    lines[2], lines[3] = lines[3], lines[2]
    return files


def inserted(files: Files) -> Files:
    before = chain.read(files[0][1][2])
    assert before is not None
    raw, _ = chain.line(Link(before.seq, 1, before.hash), {"time": "t", "type": "file.read", "path": "/put/in"})
    files[0][1].insert(3, raw)
    return files


def doubled(files: Files) -> Files:
    files[0][1].insert(3, files[0][1][2])
    return files


def truncated(files: Files) -> Files:
    del files[-1][1][-2:]
    return files


def last_changed(files: Files) -> Files:
    files[-1][1][-1] = files[-1][1][-1].replace(b"/2/4", b"/2/X")
    return files


def last_of_a_file_changed(files: Files) -> Files:
    files[0][1][-1] = files[0][1][-1].replace(b"/1/4", b"/1/X")
    return files


def rubbish(files: Files) -> Files:
    files[1][1].insert(2, b'{"seq":1,"type":"file.read"}\n')
    return files


def beginning_cut(files: Files) -> Files:
    del files[0][1][0]
    return files


def oldest_gone(files: Files) -> Files:
    return files[1:]


def newest_gone(files: Files) -> Files:
    return files[:-1]


def all_gone(files: Files) -> Files:
    return []


def emptied(files: Files) -> Files:
    return [files[0], ("log.0", [])]


def blank(files: Files) -> Files:
    files[0][1][2] = b"\0" * 100 + b"\n"
    return files


def nested(files: Files) -> Files:
    files[0][1][2] = b"[" * 60_000 + b"\n"
    return files


@pytest.mark.parametrize(
    ("harm", "fault"),
    [
        (changed, "log.1, line 5: it does not follow from line 4: one of the two was changed"),
        (missing, "log.1, line 4: 2 lines are missing before it (from number 4 on)"),
        (swapped, "log.1, line 3: number 4 stands where 3 belongs, which comes later: the lines were swapped"),
        (inserted, "log.1, line 5: number 4 comes again: a line was put in here or before"),
        (doubled, "log.1, line 4: number 3 comes again: a line was put in here or before"),
        (truncated, "log.0: the end is missing: 2 lines after number 10"),
        (last_changed, "log.0, line 6: it was changed: its hash is not the one that was kept of it"),
        (last_of_a_file_changed, "log.0, line 1: it does not follow from the last line of the file before: one of the "
         "two was changed"),
        (rubbish, "log.0, line 3: it is no line of an audit log: it was changed or put in"),
        (beginning_cut, "log.1, line 1: the line that begins a file is missing"),
        (oldest_gone, "file 1 is missing: 1 files are there, and 6 are kept"),
        (newest_gone, "log.1: the end is missing: 6 lines after number 6"),
        (all_gone, "the log is gone: 12 lines are missing"),
        (emptied, "log.0: the file is empty"),
        (blank, "log.1, line 3: it is no line of an audit log: it was changed or put in"),
        (nested, "log.1, line 3: it is no line of an audit log: it was changed or put in"),
    ],
)  # fmt: skip
def test_harm_is_found_where_it_was_done(harm: Callable[[Files], Files], fault: str) -> None:
    files, last = log()
    assert check(harm(files), last).fault == fault


def test_every_single_byte_that_is_changed_is_found() -> None:
    files, last = log(2, 2)
    whole = [b"".join(lines) for _, lines in files]
    for which, data in enumerate(whole):
        for at in range(len(data)):
            harmed = bytearray(data)
            harmed[at] ^= 1
            again: Files = [(name, lines) for name, lines in files]
            again[which] = (files[which][0], bytes(harmed).splitlines(keepends=True))
            report = check(again, last)
            assert report.fault or report.lines < 6, (which, at)
            # The very last newline: what is left is a line that a crash cut off, and the head tells that it was whole.
            assert report.fault, (which, at)


def test_what_rotation_dropped_is_no_fault_and_is_said() -> None:
    files, last = log(6, 2, first=9)
    report = check(files, last)
    assert report.fault == "" and report.notes == ("begins with line number 1001: older ones were dropped by rotation",)
    assert check(files[1:], last).fault == "file 9 is missing: 5 files are there, and 6 are kept"
    assert check(files[:2] + files[3:], last).fault == "log.2, line 1: it begins file 12, and file 11 was to come"


def test_a_torn_last_line_is_no_fault_and_is_said() -> None:
    files, last = log(1)
    files[0][1].append(b'{"seq":7,"prev":"00')
    report = check(files, last)
    assert report.fault == "" and report.lines == 6
    assert report.notes == ("log.0, line 7: cut off in the middle, as a crash leaves it; it is no event",)
    files[0][1].append(b"more\n")
    assert "line 8" not in check(files, last).fault


@pytest.mark.parametrize(
    "text",
    [
        "two\nlines", "\x1b]0;title\x07", 'quo"te\\', "\udc80\udcff", "\U0001f600", "\u2028\u202e", "\0",
        "x" * (1 << 20), "\udc80" * (1 << 20), '","seq":1,"type":"sandbox.created',
    ],
)  # fmt: skip
def test_strange_and_long_text_is_one_line_of_ascii(text: str) -> None:
    fields = {"program": text, "path": text, "cwd": text, "env_names": [text] * 5, "labels": {"k": text}}
    raw, link = chain.line(START, {"time": "t", "type": "process.started", **fields})
    assert raw.isascii() and raw.count(b"\n") == 1 and raw.endswith(b"\n") and len(raw) <= chain.MAX_LINE_BYTES
    found = chain.read(raw)
    assert found is not None and found.hash == link.hash and found.seq == 1 and found.type == "process.started"
    said = found.body["path"]
    assert said == text or (said.endswith(chain.MARK) and text.startswith(said[:-1]) and len(said) > 60)


def test_long_lists_are_cut_with_a_mark() -> None:
    fields = {"env_names": ["n" * 200] * 5000, "labels": {f"k{n}": "v" * 256 for n in range(3000)}}
    network = {"mode": "allowlist", "allow": ["a" * 250] * 9999}
    raw, _ = chain.line(START, {"time": "t", "type": "sandbox.created", "network": network} | fields)
    assert len(raw) <= chain.MAX_LINE_BYTES
    body = json.loads(raw)
    assert body["env_names"][-1] == chain.MARK and body["network"]["allow"][-1] == chain.MARK
    assert body["labels"][chain.MARK] == chain.MARK


def test_the_head_is_read_as_it_was_written() -> None:
    link = Link(12, 3, "ab" * 32)
    text = chain.head_text(link)
    assert chain.read_head(text) == link
    assert len(text) == len(chain.head_text(replace(link, seq=10**15)))
    assert chain.read_head(text[:-1]) is None and chain.read_head(b"") is None and chain.read_head(b"x" + text) is None
