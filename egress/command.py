"""What a flow tells the relay to do. Values only; `proxy` carries them out, in their order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

from egress.policy import Allow, Ask, By, Deny

FREE: Final = 2**64 - 1                 # pass credit for good, the end of the stream included


class Direction(IntEnum):
    UP = 0                              # guest → upstream
    DOWN = 1


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
    """0 adds no credit, and still lets the direction go on."""

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
    ms: int                             # 0: none


@dataclass(frozen=True, slots=True)
class Close:
    reset: bool


@dataclass(frozen=True, slots=True)
class Refuse:
    """Always the last of its list. The refusal gets an id, and `Flow.refused(id)` says what is done."""

    ask: Ask
    deny: Deny


Command: TypeAlias = Open | Send | Read | Pass | Finish | Deadline | Close | Refuse
