"""Whose event comes next."""

from __future__ import annotations

import pytest

from egress.turns import Turns


def drain(turns: Turns[str]) -> list[str]:
    events = []
    while turns:
        events.append(turns.next())
    return events


def test_one_sandbox_alone_has_its_order() -> None:
    turns: Turns[str] = Turns()
    for number in range(5):
        turns.add(1, f"a{number}")
    assert drain(turns) == ["a0", "a1", "a2", "a3", "a4"]
    with pytest.raises(IndexError):
        turns.next()


def test_others_wait_for_one_event_of_each() -> None:
    turns: Turns[str] = Turns()
    for number in range(100):
        turns.add(1, f"a{number}")
    for number in range(3):
        turns.add(2, f"b{number}")
    turns.add(3, "c0")
    assert drain(turns)[:8] == ["a0", "b0", "c0", "a1", "b1", "a2", "b2", "a3"]


def test_who_comes_later_has_a_turn_in_the_next_round() -> None:
    turns: Turns[str] = Turns()
    for number in range(10):
        turns.add(1, f"a{number}")
    assert [turns.next(), turns.next()] == ["a0", "a1"]
    turns.add(2, "b0")
    assert [turns.next() for _ in range(3)] == ["a2", "b0", "a3"]


def test_a_sandbox_that_has_gone_leaves_its_events() -> None:
    turns: Turns[str] = Turns()
    turns.add(1, "a0")
    turns.forget(1)
    turns.forget(7)
    turns.add(1, "a1")
    assert drain(turns) == ["a0", "a1"]
