"""One connection of a guest: what is said on it, and what is done with it.

In: where it was dialled to, its first bytes and those after them, what became of the dial. Out: commands for the
relay. Nothing is opened before a name was decided. See `Flow`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, TypeAlias

from egress.policy import Allow, Ask, By, Deny

if TYPE_CHECKING:
    from collections.abc import Callable

FREE: Final = 2**64 - 1                 # pass credit for good


class Direction(IntEnum):
    UP = 0                              # guest → upstream
    DOWN = 1


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the guest dialled to."""

    address: str
    port: int
    name: str                           # the one the address was given for, else ""


@dataclass(frozen=True, slots=True)
class Open:
    """Dial the name; the address only where `by` is ADDRESS and there is no name."""

    name: str
    address: str
    port: int
    allow: Allow
    first: bytes                        # for the upstream, before anything else
    up: int                             # pass credits in force once connected
    down: int
    by: By


@dataclass(frozen=True, slots=True)
class Send:
    direction: Direction
    data: bytes


@dataclass(frozen=True, slots=True)
class Read:
    direction: Direction
    most: int


@dataclass(frozen=True, slots=True)
class Pass:
    direction: Direction
    count: int


@dataclass(frozen=True, slots=True)
class Finish:
    direction: Direction


@dataclass(frozen=True, slots=True)
class Deadline:
    ms: int


@dataclass(frozen=True, slots=True)
class Close:
    reset: bool


@dataclass(frozen=True, slots=True)
class Refuse:
    """Always the last of its list. The refusal gets an id, and `Flow.refused(id)` says what is done."""

    ask: Ask
    deny: Deny


Command: TypeAlias = Open | Send | Read | Pass | Finish | Deadline | Close | Refuse


class Flow:
    current: Ask | None

    def __init__(
        self, destination: Destination, decide: Callable[[Ask], Allow | Deny], open_mode: bool
    ) -> None: ...

    def start(self) -> list[Command]: ...
    def data(self, direction: Direction, data: bytes) -> list[Command]: ...
    def ended(self, direction: Direction) -> list[Command]: ...
    def opened(self) -> list[Command]: ...
    def failed(self, rule: str, why: str, id: str) -> list[Command]: ...
    def refused(self, id: str) -> list[Command]: ...
