"""What is counted, what is told and when."""

from __future__ import annotations

import re
from itertools import pairwise

from egress import control, ledger
from egress.ledger import Ledger

WHY = "it is not on the list"


def deny(book: Ledger, name: str, at: float, sandbox: str = "a", rule: str = "not-listed", by: str = "tls") -> str:
    return book.denied(sandbox, name, 443, rule, by, WHY, at)


def test_the_same_refusal_has_the_same_id_and_is_counted() -> None:
    book = Ledger()
    first = deny(book, "other.test", 100.0)
    assert re.fullmatch("[a-z2-7]{8}", first)
    assert {deny(book, "other.test", 100.0 + turn) for turn in range(50)} == {first}
    (row,) = book.report("a")
    assert (row["id"], row["count"], row["first_at"], row["last_at"]) == (first, 51, 100.0, 149.0)
    assert tuple(row) == control.ROW


def test_what_differs_in_anything_has_an_id_of_its_own() -> None:
    book = Ledger()
    ids = [
        deny(book, "other.test", 1.0),
        deny(book, "other.test", 1.0, sandbox="b"),
        deny(book, "other.test", 1.0, rule="deny-list"),
        deny(book, "other.test", 1.0, by="dns"),
        deny(book, "another.test", 1.0),
        book.denied("a", "other.test", 80, "not-listed", "tls", WHY, 1.0),
        book.allowed("a", "other.test", 443, "allow other.test", "tls", 1.0),
    ]
    assert len(set(ids)) == len(ids)


def test_a_first_refusal_is_told_at_once_and_repeats_ever_more_seldom() -> None:
    book = Ledger()
    deny(book, "other.test", 100.0)
    assert book.wait_s(100.0) == 0.0
    assert [event.count for event in book.due(100.0)] == [1]
    told = []
    for tenth in range(1, 200):
        at = 100.0 + tenth / 10
        deny(book, "other.test", at)
        told += [(at, event.count) for event in book.due(at)]
    assert [count for _, count in told] == [52, 153]
    assert all(later - earlier >= 2 * ledger.UPDATE_S for (earlier, _), (later, _) in pairwise(told))
    assert book.wait_s(120.0) is not None
    assert [event.count for event in book.due(200.0)] == [200]
    assert book.due(300.0) == [] and book.wait_s(300.0) is None


def test_a_clock_that_is_set_back_delays_nothing_for_long() -> None:
    book = Ledger()
    deny(book, "other.test", 10_000.0)
    book.due(10_000.0)
    deny(book, "other.test", 10_001.0)
    wait = book.wait_s(50.0)
    assert wait is not None and wait <= ledger.UPDATE_S
    assert [event.count for event in book.due(50.0)] == [2]


def test_beyond_a_thousand_new_names_an_hour_refusals_are_only_counted() -> None:
    book = Ledger()
    ids = {deny(book, f"n{number}.test", 50.0) for number in range(3000)}
    assert len(ids) == ledger.REFUSALS_AN_HOUR + 1
    rest = [row for row in book.report("a") if row["rule"] == ledger.TOO_MANY]
    assert [row["count"] for row in rest] == [2000]
    assert len(book.due(50.0)) == ledger.REFUSALS_AN_HOUR + 1
    # Names seen before are still counted by name, other sandboxes have an hour of their own, and so has the next hour.
    assert deny(book, "n5.test", 51.0) in ids
    assert deny(book, "fresh.test", 51.0, sandbox="b") not in ids
    assert deny(book, "fresh.test", 50.0 + 3600) not in ids


def test_a_thousand_names_that_go_on_for_a_day_are_few_events() -> None:
    """What a guest repeats without end may not fill what is kept of its neighbours."""
    book = Ledger()
    told = 0
    for minute in range(24 * 60):
        for number in range(100):
            deny(book, f"n{number}.test", minute * 60.0)
        told += len(book.due(minute * 60.0))
    assert told < 100 * 35
    assert [row["count"] for row in book.report("a")] == [24 * 60] * 100


def test_beyond_a_thousand_allowed_names_an_hour_the_rest_is_one_entry() -> None:
    book = Ledger()
    for number in range(3000):
        book.allowed("a", f"n{number}.test", 443, "mode open", "tls", 50.0)
        book.closed("a", f"n{number}.test", 443, 1, 2, 50.0)
    rows = book.report("a")
    assert len(rows) == ledger.NAMES_AN_HOUR + 1 == len(book.due(50.0))
    (rest,) = [row for row in rows if row["rule"] == ledger.REST]
    assert (rest["name"], rest["decision"], rest["count"], rest["connections"]) == ("", control.ALLOWED, 2000, 2000)
    assert (rest["bytes_out"], rest["bytes_in"]) == (2000, 4000)
    book.allowed("a", "fresh.test", 443, "mode open", "tls", 50.0 + 3600)
    assert "fresh.test" in {row["name"] for row in book.report("a")}


def test_entries_are_bounded_over_any_number_of_hours() -> None:
    book = Ledger()
    for hour in range(5):
        for number in range(1000):
            deny(book, f"n{number}.h{hour}.test", hour * 3600.0)
            book.allowed("a", f"n{number}.h{hour}.test", 443, "mode open", "tls", hour * 3600.0)
    rows = book.report("a")
    assert len(rows) == 2 * ledger.ENTRIES_LIMIT
    assert {row["name"] for row in rows} >= {f"n{number}.h4.test" for number in range(1000)}
    assert len(book.due(1e6)) == 10_000  # nothing goes untold


def test_the_largest_report_fits_in_a_frame() -> None:
    book = Ledger()
    for number in range(ledger.ENTRIES_LIMIT):
        name = f"{number}." + "x" * 245
        hour = number // 1000 * 3600.0
        book.denied("a", name, 65535, "names-disagree", "connect", "w" * 600, hour)
        book.allowed("a", name, 65535, "allow *." + name, "connect", hour)
    assert len(control.pack({"seq": 1, "ok": True, "names": book.report("a")})) < control.FRAME_LIMIT


def test_a_name_that_is_allowed_is_told_once_and_its_bytes_when_connections_close() -> None:
    book = Ledger()
    for _ in range(3):
        book.allowed("a", "allowed.test", 443, "allow allowed.test", "tls", 10.0)
    (event,) = book.due(10.0)
    assert (event.kind, event.rule, event.by, event.connections) == ("allowed", "allow allowed.test", "tls", 0)
    for _ in range(3):
        book.closed("a", "allowed.test", 443, 10, 1000, 11.0)
    book.closed("a", "never.test", 443, 1, 1, 11.0)
    book.closed("nobody", "never.test", 443, 1, 1, 11.0)
    (event,) = book.due(16.0)
    assert (event.count, event.connections, event.up_bytes, event.down_bytes) == (3, 3, 30, 3000)
    (row,) = book.report("a")
    assert (row["bytes_out"], row["bytes_in"]) == (30, 3000)


def test_a_sandbox_that_goes_leaves_what_was_untold_and_nothing_else() -> None:
    book = Ledger()
    deny(book, "told.test", 1.0)
    deny(book, "b.test", 1.0, sandbox="b")
    book.due(1.0)
    deny(book, "told.test", 2.0)
    deny(book, "fresh.test", 2.0)
    assert {event.name: event.count for event in book.removed("a")} == {"told.test": 2, "fresh.test": 1}
    assert book.report("a") == [] and book.due(100.0) == [] and book.removed("a") == []
    assert len(book.report("b")) == 1
