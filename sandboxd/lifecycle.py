"""The states of a sandbox and the moves between them. Pure: one table, and one function that reads it."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """As on the wire. There is no way back from `TERMINATED`."""

    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    TERMINATED = "terminated"


MOVES: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.RUNNING, State.TERMINATED}),
    State.RUNNING: frozenset({State.SUSPENDED, State.TERMINATED}),
    State.SUSPENDED: frozenset({State.RUNNING, State.TERMINATED}),
    State.TERMINATED: frozenset(),
}


class IllegalMove(Exception):
    """A bug of the daemon: nobody may ask for this move. Carries the state it has and the one it was to
    take."""

    def __init__(self, have: State, wanted: State) -> None:
        super().__init__(f"a sandbox that is {have.value} cannot become {wanted.value}")
        self.have, self.wanted = have, wanted


def move(have: State, to: State) -> State:
    if to not in MOVES[have]:
        raise IllegalMove(have, to)
    return to
