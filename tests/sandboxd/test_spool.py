"""What a spool keeps, drops and reads back."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from sandboxd.spool import CHUNK, Budget, Chunk, Cursor, Spool


def read_all(cursor: Cursor) -> list[Chunk]:
    found = []
    while (chunk := cursor.read()) is not None:
        found.append(chunk)
    return found


def joined(chunks: list[Chunk], stream: str) -> bytes:
    return b"".join(chunk.data for chunk in chunks if chunk.stream == stream)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        pytest.param([], [], id="nothing written, nothing read and no file made"),
        pytest.param([("o", b"a"), ("o", b"b")], [Chunk("o", b"ab")], id="pieces of one stream are joined"),
        pytest.param(
            [("o", b"1"), ("E", b"2"), ("o", b"3")],
            [Chunk("o", b"1"), Chunk("E", b"2"), Chunk("o", b"3")],
            id="two streams come back in the order they came",
        ),
        pytest.param([("E", b"\0\xff")], [Chunk("E", b"\0\xff")], id="bytes are bytes"),
        pytest.param(
            [("o", b"x" * (CHUNK + 1))],
            [Chunk("o", b"x" * CHUNK), Chunk("o", b"x")],
            id="a large piece comes back in reads of 64 KiB",
        ),
    ],
)
def test_order(tmp_path: Path, written: list[tuple[str, bytes]], expected: list[Chunk]) -> None:
    spool = Spool(tmp_path / "1")
    for stream, data in written:
        spool.append(stream, data)
    with spool.cursor() as cursor:
        assert read_all(cursor) == expected
    assert (tmp_path / "1").exists() == bool(written)
    assert not spool.cut


def test_a_reader_follows_the_writer_and_another_starts_from_the_first_byte(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "1")
    first = spool.cursor()
    for number in range(100):
        spool.append("oE"[number % 2], b"%d " % number)
        assert read_all(first) == [Chunk("oE"[number % 2], b"%d " % number)]
    second = spool.cursor()
    assert joined(read_all(second), "o") == b"".join(b"%d " % n for n in range(0, 100, 2))


@pytest.mark.parametrize("extra", [0, 1, 100, 5000])
def test_the_newest_bytes_win_and_the_gap_is_exact(tmp_path: Path, extra: int) -> None:
    spool = Spool(tmp_path / "1", limit=1600)
    data = random.Random(7).randbytes(1600 + extra)
    for start in range(0, len(data), 33):
        spool.append("o", data[start : start + 33])
    with spool.cursor() as cursor:
        chunks = read_all(cursor)
    kept = joined(chunks, "o")
    assert sum(chunk.dropped for chunk in chunks) + len(kept) == len(data)
    assert data.endswith(kept)
    assert len(kept) <= 1600
    assert all(not chunk.dropped for chunk in chunks[1:])
    assert spool.cut == (extra > 0)


def test_much_of_one_stream_does_not_push_the_other_out(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "1", limit=1600)
    spool.append("E", b"the reason")
    for _ in range(100):
        spool.append("o", b"x" * 100)
    with spool.cursor() as cursor:
        assert joined(read_all(cursor), "E") == b"the reason"


def test_a_cursor_that_is_behind_holds_the_writer_and_one_that_left_does_not(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "1", limit=160)
    cursor = spool.cursor()
    while not spool.holds("o", 10):
        spool.append("o", b"0123456789")
    assert spool.total("o") == 160
    assert cursor.read() == Chunk("o", b"0123456789" * 16)
    assert not spool.holds("o", 10)
    late = spool.cursor()
    assert spool.holds("o", 10)
    late.close()
    assert not spool.holds("o", 10)


def test_a_cursor_reads_on_in_a_segment_that_was_dropped_under_it(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "1", limit=160)
    spool.append("o", b"A" * 10)
    spool.append("o", b"B" * 10)
    cursor = spool.cursor(("o",))
    place_before = cursor.read()
    assert place_before == Chunk("o", b"A" * 10 + b"B" * 10)
    for _ in range(40):
        spool.append("o", b"C" * 10)
    chunks = read_all(cursor)
    assert 20 + sum(c.dropped + len(c.data) for c in chunks) == spool.total("o")


def test_a_run_keeps_the_beginning_and_says_so(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "1", limit=10, keep_first=True)
    spool.append("o", b"012345")
    spool.append("o", b"6789abc")
    spool.append("o", b"later")
    spool.append("E", b"err")
    with spool.cursor() as cursor:
        chunks = read_all(cursor)
    assert (joined(chunks, "o"), joined(chunks, "E")) == (b"0123456789", b"err")
    assert spool.cut and spool.kept_of("o") == 10 and spool.total("o") == 18


def test_bytes_that_never_came_are_a_gap(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "1")
    spool.append("o", b"before")
    spool.skip("o", 7)
    spool.append("o", b"after")
    spool.skip("E", 3)
    with spool.cursor() as cursor:
        assert read_all(cursor) == [Chunk("o", b"before"), Chunk("o", b"after", 7), Chunk("E", b"", 3)]


def test_a_killed_daemon_leaves_a_spool_that_goes_on(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "1", limit=1600)
    for number in range(50):
        spool.append("oE"[number % 3 == 0], b"%04d|" % number)
    again = Spool(tmp_path / "1", limit=1600)
    assert (again.total("o"), again.total("E"), again.kept) == (spool.total("o"), spool.total("E"), spool.kept)
    again.append("o", b"more")
    with again.cursor() as cursor, spool.cursor() as old:
        assert joined(read_all(cursor), "o") == joined(read_all(old), "o") + b"more"


@pytest.mark.parametrize("torn", range(1, 17))
def test_a_frame_the_daemon_was_killed_in_is_cut_off(tmp_path: Path, torn: int) -> None:
    spool = Spool(tmp_path / "1")
    spool.append("o", b"whole")
    (segment,) = (tmp_path / "1").iterdir()
    with segment.open("ab") as file:
        file.write((struct.pack(">QI", 1, 5) + b"torn!")[:torn])
    again = Spool(tmp_path / "1")
    assert again.total("o") == (5 if torn < 17 else 10)
    again.append("o", b"next")
    with again.cursor() as cursor:
        assert joined(read_all(cursor), "o") == b"wholenext"


def test_a_full_disk_loses_bytes_and_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("a file where the directory would be")
    spool = Spool.__new__(Spool)
    spool.__init__(tmp_path / "2")  # type: ignore[misc]
    spool.directory = tmp_path / "1"
    spool.append("o", b"lost")
    assert spool.total("o") == 4 and spool.cut
    with spool.cursor() as cursor:
        assert read_all(cursor) == [Chunk("o", b"", 4)]


def test_the_oldest_process_pays_for_the_newest(tmp_path: Path) -> None:
    budget = Budget(limit=3000)
    spools = {pid: Spool(tmp_path / str(pid), limit=1600) for pid in (1, 2, 3)}
    for pid, spool in spools.items():
        budget.add(pid, spool)
        for _ in range(15):
            spool.append("o", b"x" * 100)
    budget.trim()
    assert sum(spool.kept for spool in spools.values()) <= 3000
    assert spools[1].kept == 0 and spools[2].kept == spools[3].kept == 1500
    spools[2].pinned = 1
    spools[3].append("o", b"y" * 100)
    budget.trim()
    assert spools[2].kept == 1500
