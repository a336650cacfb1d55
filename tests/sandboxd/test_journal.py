"""The files of an audit log, killed anywhere, and with all that can be done to them while they are written."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from sandboxd import chain
from sandboxd.chain import Report
from sandboxd.errors import SetupError
from sandboxd.generations import Generations, lines
from sandboxd.journal import Journal
from tests.conftest import counts

SMALL = 900         # bytes: three or four lines
EVENTS = 14         # fewer than six such files hold
TRACED = ("journal.py", "generations.py")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit" / "events.jsonl"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    one = Journal(path, SMALL)
    one.begin()
    yield one
    one.close()


def event(number: int) -> dict[str, Any]:
    return {"time": "2026-01-01T00:00:00.000000Z", "type": "file.read", "path": f"/{number}", "bytes": number}


def report(path: Path) -> Report:
    files = Generations(path)
    head = files.kept_head()
    with files.opened() as opened:
        return chain.verify([(name, lines(file)) for name, file in opened.files], head, opened.kept)


def numbers(path: Path) -> list[int]:
    """Of the events that the files hold, in order."""
    with Generations(path).opened() as opened:
        bodies = [json.loads(line) for _, file in opened.files for line in lines(file)]
    return [body["bytes"] for body in bodies if body["type"] == "file.read"]


def test_rotation(journal: Journal, path: Path) -> None:
    for number in range(100):
        journal.append(event(number))
        assert report(path).fault == ""
    names = sorted(entry.name for entry in path.parent.iterdir())
    assert names == ["events.jsonl", *(f"events.jsonl.{n}" for n in range(1, 6)), "events.jsonl.head"]
    assert all(entry.stat().st_mode & 0o777 == 0o600 for entry in path.parent.iterdir())
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert all(entry.stat().st_size <= SMALL for entry in path.parent.iterdir())
    kept = numbers(path)
    assert kept == list(range(kept[0], 100)) and len(kept) > 12
    oldest = chain.read(path.with_name("events.jsonl.5").read_bytes().splitlines(keepends=True)[0])
    assert oldest is not None and oldest.file > 1, "the oldest kept begins with the last hash of the dropped one"
    assert report(path).notes == (f"begins with line number {oldest.seq}: older ones were dropped by rotation",)


def append_all(path: Path, numbers_from: int, acknowledged: int) -> None:
    """In a child: what was written for certain is told through a pipe."""
    one = Journal(path, SMALL)
    one.begin()
    for number in range(numbers_from, numbers_from + EVENTS):
        one.append(event(number))
        os.write(acknowledged, b"x")


def killed_at(step: int, work: Callable[[int], None]) -> tuple[int, bool]:
    """`work` in a process that ends without a word before its `step`th line of the writer is run: (how many were
    acknowledged, whether it came to its end before)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        left = step

        def trace(frame: FrameType, kind: str, _: object) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.endswith(TRACED):
                return None
            if kind == "line":
                left -= 1
                if left == 0:
                    os._exit(9)
            return trace

        sys.settrace(trace)
        try:
            work(writing)
        finally:
            os._exit(0)
    os.close(writing)
    said = 0
    while data := os.read(reading, 4096):
        said += len(data)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    return said, status == 0


def test_killed_before_any_line_of_the_writer(tmp_path: Path, seed: random.Random) -> None:
    """Nothing acknowledged is lost or doubled, the chain holds, and it goes on; where the recovery is killed too."""
    stride = counts(23, 1)
    step = seed.randrange(stride) + 1
    done = False
    while not done:
        path = tmp_path / str(step) / "audit" / "events.jsonl"
        path.parent.parent.mkdir()
        written, done = killed_at(step, lambda acknowledged, path=path: append_all(path, 0, acknowledged))  # type: ignore[misc]
        killed_at(seed.randrange(1, 80), lambda acknowledged, path=path: append_all(path, 1000, acknowledged))  # type: ignore[misc]
        one = Journal(path, 100 * SMALL)
        one.begin()
        one.append(event(5000))
        one.close()
        assert report(path).fault == "", step
        found = numbers(path)
        assert found[-1] == 5000 and len(found) == len(set(found))
        first = [number for number in found if number < 1000]
        assert first in (list(range(written)), list(range(written + 1))), step
        assert not one.files.new.exists()
        step += stride


def test_a_torn_last_line_is_put_aside_and_noted(journal: Journal, path: Path) -> None:
    journal.append(event(1))
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"seq":3,"prev":"00\xff\x1b')
    again = Journal(path, SMALL)
    again.begin()
    assert report(path).notes != ()
    again.append(event(2))
    again.close()
    assert report(path) == Report(4, 1, "", report(path).last)
    assert numbers(path) == [1, 2]
    noted = json.loads(path.read_bytes().splitlines()[2])
    assert noted["type"] == "audit.torn" and noted["bytes"] == 21
    torn = path.with_name("events.jsonl.torn")
    assert torn.read_bytes() == b'{"seq":3,"prev":"00\xff\x1b' and torn.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("again", [False, True], ids=["while it runs", "between two runs"])
def test_what_is_done_to_the_files_is_found_by_a_check(path: Path, again: bool) -> None:
    def harm(name: str, act: Callable[[Path], object]) -> str:
        place = path.parent.parent / name / "events.jsonl"
        one = Journal(place, 1 << 20)
        one.begin()
        for number in range(5):
            one.append(event(number))
        act(place)
        if again:
            one.close()
            one = Journal(place, 1 << 20)
            one.begin()
        one.append(event(5))
        assert numbers(place)[-1] == 5, "it goes on"
        one.close()
        return report(place).fault

    path.parent.parent.mkdir(exist_ok=True)
    assert "file 1 is missing" in harm("removed", lambda place: place.unlink())
    assert "2 lines are missing" in harm("cut", lambda place: os.truncate(place, place.read_bytes().index(b'{"seq":5')))
    assert "file 1 is missing" in harm("emptied", lambda place: os.truncate(place, 0))
    assert "file 1 is missing" in harm("renamed", lambda place: place.rename(place.with_name("elsewhere")))
    changed = harm("changed", lambda place: place.write_bytes(place.read_bytes().replace(b"/3", b"/X")))
    assert "does not follow" in changed
    if not again:
        # Between two runs the last line's hash is gone with the directory.
        assert "file 1 is missing" in harm("gone", lambda place: shutil.rmtree(place.parent))


def test_places_that_are_refused(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(SetupError) as caught:
            Journal(path).begin()
        return str(caught.value)

    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert "others could replace" in refusal(shared / "log")
    shared.chmod(0o1777)
    assert "others could replace" in refusal(shared / "log")
    shared.chmod(0o700)
    (shared / "link").symlink_to(shared / "other")
    assert "cannot be used" in refusal(shared / "link")
    (shared / "directory").mkdir()
    assert "cannot be used" in refusal(shared / "directory")
    os.mkfifo(shared / "fifo", 0o600)
    assert "is not a file" in refusal(shared / "fifo")
    assert "cannot be used" in refusal(shared / "no" / "such" / "log")
    readable = shared / "readable"
    readable.write_text("")
    readable.chmod(0o644)
    assert "chmod 600" in refusal(readable)
    for number, content in enumerate((b"something else\n", b"something else", b'{"seq":1}\n', b"\0" * 70000)):
        other = shared / f"other{number}"
        other.write_bytes(content)
        other.chmod(0o600)
        assert "something else than an audit log" in refusal(other)
        assert other.read_bytes() == content


def test_two_writers_are_one_too_many(journal: Journal, path: Path) -> None:
    with pytest.raises(SetupError, match="another sandboxd writes the audit log"):
        Journal(path).begin()
    journal.close()
    second = Journal(path)
    second.begin()
    second.close()


def test_readers_see_a_whole_chain_while_files_are_moved(journal: Journal, path: Path) -> None:
    journal.append(event(0))
    child = os.fork()
    if child == 0:
        try:
            for number in range(1, counts(800, 30000)):
                journal.append(event(number))
        finally:
            os._exit(0)
    looked = 0
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert report(path).fault == ""
        looked += 1
    assert looked
