"""A sandbox as the egress process knows it: its policy, its names and the file that keeps them, its connections.

In: what the daemon handed over. Out: verdicts, and addresses for names, each in the file before anybody is told.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from egress import flow
from egress.answer import Answers
from egress.lookup import Share, Waiter
from egress.names import Names
from egress.policy import Allow, Ask, Decider, Deny, Mode, Policy

NAMES_BYTES: Final = 2 << 20  # 4,096 lines of the longest name, and some


class Connection:
    __slots__ = (
        "address", "ask", "counted", "decider", "early", "flow", "found", "held", "opening", "pair", "port",
        "private", "rule", "sandbox",
    )  # fmt: skip

    def __init__(self, pair: int, sandbox: Sandbox, address: str, port: int, told: flow.Flow) -> None:
        self.pair, self.sandbox, self.port, self.flow = pair, sandbox, port, told
        self.address = address  # where it went, unless that was given for a name
        self.ask: Ask | None = None  # what is dialled or open was allowed for it
        self.private = False
        self.rule = ""
        self.opening: flow.Open | None = None  # its addresses are being looked up
        self.held: list[flow.Command] = []  # what comes after it
        self.found: Waiter | None = None  # who waits for them
        self.decider = sandbox.decider  # that allowed it
        self.early = 0  # bytes that came before there was a decision; later those that wait for the rest of a head
        self.counted: tuple[str, int] | None = None  # in the ledger, since it was open


class Sandbox:
    __slots__ = (
        "_names_fd", "_unwritten", "answers", "connections", "decide", "decider", "early", "gone", "id", "leaving_at",
        "names", "number", "open", "share",
    )  # fmt: skip

    def __init__(self, id: str, number: int, policy: Policy, names_fd: int) -> None:
        self.id, self.number, self._names_fd = id, number, names_fd
        self.connections: dict[int, Connection] = {}
        self.share = Share()
        self.answers: Answers | None = None
        self.names = Names(_whole(names_fd))
        self._unwritten = b""
        self.early = 0  # of all its connections
        self.leaving_at: float | None = None
        self.gone: Callable[[], None] | None = None
        self.decide: Callable[[Ask], Allow | Deny] = self._decide
        self.obey(policy)

    def obey(self, policy: Policy) -> None:
        self.decider = Decider(policy)
        self.open = policy.mode is Mode.OPEN

    def _decide(self, ask: Ask) -> Allow | Deny:
        return self.decider.decide(ask)

    def address(self, name: str) -> str | None:
        """The name's own address, kept in the file; None where the file cannot be written. Raises names.Full."""
        address, line = self.names.address(name)
        self._unwritten += line
        while self._unwritten:
            try:
                self._unwritten = self._unwritten[os.write(self._names_fd, self._unwritten) :]
            except OSError:
                return None
        return address

    def close(self) -> None:
        if self.answers is not None:
            self.answers.close()
        os.close(self._names_fd)


def _whole(fd: int) -> bytes:
    os.lseek(fd, 0, os.SEEK_SET)
    parts = []
    left = NAMES_BYTES
    while left > 0 and (part := os.read(fd, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
