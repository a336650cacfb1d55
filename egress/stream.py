"""One direction of a plain HTTP connection: what of it was looked at, what may go on, what is asked for next.

In: bytes as the relay hands them over, and what their reader makes of each head. Out: heads, and commands that send
on what was accepted. The relay lets a direction rest after each Data until something is asked of it. Only then, with
that Data looked at, is anything let pass unseen: it begins exactly where the buffer ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from egress import http1
from egress.command import Command, Direction, Pass, Read, Send

if TYPE_CHECKING:
    from egress.http1 import Framing

CHUNK_BYTES: Final = 16 << 10           # read credit is filled up to this
PASS_FROM: Final = 16 << 10             # less than this is as quickly read as passed


class Stream:
    def __init__(self, direction: Direction, credit: int) -> None:
        self.buffer = bytearray()       # not accepted yet
        self._direction = direction
        self._strict = direction is Direction.UP
        self._credit = credit
        self.resting = False            # all it read was handed over, and nothing was asked since
        self._scan = http1.Scan(self._strict)
        self._head = 0                  # length of the head the buffer begins with, once whole
        self._body: http1.Body | None = None
        self._accepted = bytearray()

    @property
    def begun(self) -> bool:
        """Part of a head is there."""
        return self._body is None and bool(self.buffer)

    def add(self, data: bytes) -> None:
        self._credit -= len(data)
        self.resting = True
        self.buffer += data

    def head(self) -> bytes | None:
        if not self._head:
            self._head = self._scan.end(self.buffer)
        return bytes(self.buffer[: self._head]) if self._head else None

    def drop_head(self) -> None:
        del self.buffer[: self._head]
        self._head, self._scan = 0, http1.Scan(self._strict)

    def accept(self, body: Framing) -> None:
        """The head goes on, and what belongs to it."""
        self._accepted += self.buffer[: self._head]
        self.drop_head()
        self._body = http1.Body(body, self._strict)

    def accept_rest(self) -> None:
        """Everything goes on, whatever it is, until the connection ends."""
        self._head = 0
        self._body = http1.Body(http1.Ends.WITH_CONNECTION, self._strict)

    def advance(self) -> bool:
        """Follows the body as far as it is there; whether the stream then stands between two messages."""
        if self._body is not None:
            taken = self._body.take(self.buffer, 0)
            self._accepted += self.buffer[:taken]
            del self.buffer[:taken]
            if self._body.done:
                self._body = None
        return self._body is None

    def accepted(self) -> bytes:
        """What may go on and did not yet; it counts as gone."""
        accepted, self._accepted = bytes(self._accepted), bytearray()
        return accepted

    def everything(self) -> bytes:
        data, self.buffer = self.accepted() + bytes(self.buffer), bytearray()
        return data

    def send(self) -> list[Command]:
        data = self.accepted()
        return [Send(self._direction, data)] if data else []

    def read(self) -> Command:
        most = max(CHUNK_BYTES - self._credit, 0)
        self._credit += most
        self.resting = False
        return Read(self._direction, most)

    def ahead(self) -> int:
        """So much may pass unseen from here; it counts as gone."""
        if self._body is None or not self.resting:
            return 0
        # The last byte of a response is looked at: nothing else tells when it has come.
        count = self._body.unseen - (self._direction is Direction.DOWN)
        if count < PASS_FROM:
            return 0
        self._body.leave(count)
        return count

    def go_on(self) -> list[Command]:
        """Sends on what may, lets pass what need not be looked at, and asks for what follows."""
        commands = self.send()
        if count := self.ahead():
            commands.append(Pass(self._direction, count))
        return [*commands, self.read()]
