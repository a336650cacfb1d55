"""What is read out of an audit log, and in which order it is shown."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest

from sandboxd import chain, history
from sandboxd.chain import START
from sandboxd.events import Decision
from sandboxd.journal import Journal
from sandboxd.wire import AuditEvent

BOX = "sbx_0123456789abcdef"


def log(*bodies: dict[str, object]) -> list[io.BytesIO]:
    last, text = START, b""
    for body in bodies:
        raw, last = chain.line(last, {"time": "t"} | body)
        text += raw
    return [io.BytesIO(text)]


def decided(at: float, name: str = "x.test") -> Decision:
    return Decision("denied", BOX, "abcdefg2", name, 443, "not-listed", "tls", "", 2, 0, 0, 0, at, at)


def test_only_a_sandbox_s_own_events_are_shown() -> None:
    other = "sbx_ffffffffffffffff"
    found, cut = history.of_sandbox(
        log(
            {"type": "sandbox.created", "sandbox": other, "labels": {"sandbox": BOX}},
            {"type": "file.read", "sandbox": BOX, "path": "/a", "bytes": 0},
            {"type": "file.read", "sandbox": other, "path": f'"sandbox":"{BOX}"'},
            {"type": "from.a.newer.version", "sandbox": BOX, "surprise": 1},
        ),
        BOX,
    )  # fmt: skip
    assert not cut
    assert found == [
        AuditEvent(time="t", type="file.read", sandbox=BOX, path="/a", bytes=0),
        AuditEvent(time="t", type="from.a.newer.version", sandbox=BOX),
    ]


def test_the_newest_5000_are_kept() -> None:
    files = log(*({"type": "process.started", "sandbox": BOX, "pid": pid} for pid in range(1, 5003)))
    found, cut = history.of_sandbox(files, BOX)
    assert cut and [event.pid for event in found] == list(range(3, 5003))


def test_long_lines_are_fewer() -> None:
    files = log(*({"type": "file.read", "sandbox": BOX, "path": "\udc80" * 4096, "bytes": n} for n in range(1000)))
    found, cut = history.of_sandbox(files, BOX)
    assert cut and 600 < len(found) < 1000 and found[-1].bytes == 999


def test_what_a_guest_causes_is_merged_by_time() -> None:
    """A clock that was set back does not turn the log's own order."""
    events = [AuditEvent(time=chain.stamp(at), type=f"n{at}", sandbox=BOX) for at in (10, 30, 20, 40)]
    found, cut = history.merged(events, [decided(35), decided(5), decided(15)])
    assert not cut
    assert [event.type for event in found] == [
        "egress.denied", "n10", "egress.denied", "n30", "n20", "egress.denied", "n40"
    ]  # fmt: skip
    assert found[0] == AuditEvent(
        time="1970-01-01T00:00:05.000000Z", type="egress.denied", sandbox=BOX, id="abcdefg2", name="x.test", port=443,
        rule="not-listed", by="tls", count=2,
    )  # fmt: skip


def test_a_guest_does_not_push_the_rest_out() -> None:
    events = [AuditEvent(time=chain.stamp(at), type="own", sandbox=BOX) for at in range(4900)]
    found, cut = history.merged(events, [decided(10_000 + n) for n in range(20_000)])
    assert cut and len(found) == 5000
    assert sum(event.type == "own" for event in found) == 4000


def test_what_a_restart_must_know() -> None:
    network = {"mode": "none", "allow": None}
    found = history.past(
        log(
            {"type": "sandbox.created", "sandbox": BOX, "labels": {"type": "sandbox.terminated", "sandbox": BOX}},
            {"type": "process.started", "sandbox": BOX, "pid": 1, "program": "a"},
            {"type": "process.started", "sandbox": BOX, "pid": 2, "program": '"type":"process.exited"'},
            {"type": "process.exited", "sandbox": BOX, "pid": 1, "exit_code": 0},
            {"type": "sandbox.network_updated", "sandbox": BOX, "network": network},
            {"type": "process.started", "sandbox": "sbx_other", "pid": 3},
        ),
        {BOX},
    )  # fmt: skip
    assert found == history.Past({BOX}, {}, {BOX: network}, {BOX: {1, 2}}, {BOX: {1}})
    ended = history.past(log({"type": "sandbox.terminated", "sandbox": BOX, "reason": "idle"}), {BOX})
    assert ended.ended == {BOX: "idle"}


@pytest.mark.soak
def test_how_long_a_full_log_takes(tmp_path: Path) -> None:
    """Prints; nothing is demanded of it."""
    journal = Journal(tmp_path / "audit" / "events.jsonl")
    journal.begin()
    body = {"time": chain.stamp(0), "type": "process.exited", "pid": 1, "exit_code": 0, "duration_ms": 12}
    written, started = 0, time.monotonic()
    while not os.path.exists(journal.files.place(5)) or written % 1000:
        journal.append(body | {"sandbox": f"sbx_{written % 50:016x}"})
        written += 1
    each_us = (time.monotonic() - started) / written * 1e6
    started = time.monotonic()
    with journal.files.opened() as opened:
        found, _ = history.of_sandbox([file for _, file in opened.files], f"sbx_{7:016x}")
    looked_s, started = time.monotonic() - started, time.monotonic()
    with journal.files.opened() as opened:
        history.past([file for _, file in opened.files], {f"sbx_{7:016x}"})
    past_s, started = time.monotonic() - started, time.monotonic()
    with journal.files.opened() as opened:
        assert chain.verify([(name, iter(file)) for name, file in opened.files], journal.last, 6).fault == ""
    checked_s = time.monotonic() - started
    journal.close()
    print(
        f"\n{written} lines, {each_us:.0f} us each; {len(found)} events of one sandbox in {looked_s:.2f} s,"
        f" what a restart must know in {past_s:.2f} s, checked in {checked_s:.2f} s"
    )
