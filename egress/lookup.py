"""Names asked of the resolver process, and its answers handed to whoever waits for them.

In: a sandbox's wish to know a name's addresses. Out: one datagram `<id> <name>` to the resolver, and once its answer
is there (`<id> ok <address>…`, `<id> no <reason>`), calls. Nothing is kept beyond the answer: askers who come while a
name is in flight share it, the next one asks anew. A sandbox has a share of the resolver and no more; what goes
beyond waits its turn.
"""

from __future__ import annotations

import socket
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, Protocol

IN_FLIGHT: Final = 16  # names of one sandbox at the resolver at a time: a quarter of its threads
WAITING: Final = 1024  # names of one sandbox that wait for their turn
WAITERS: Final = 2048  # of one name
DEADLINE_S: Final = 10.0
ANSWER_BYTES: Final = 2048  # sixteen addresses are 16 x 46
TIMED_OUT: Final = "timeout"


class Waiter(Protocol):
    """Told once, unless it is dropped before."""

    def __call__(self, addresses: list[str], reason: str) -> None: ...


class _Asked:
    __slots__ = ("at", "by", "id", "name", "sent", "turn", "waiters")

    def __init__(self, id: int, name: str, by: Share, at: float, waiter: Waiter) -> None:
        self.id, self.name, self.by, self.at = id, name, by, at
        self.waiters = {waiter: None}  # in order, and quick to leave
        self.turn = False  # it counts in its share
        self.sent = False


class Share:
    """A sandbox's part: what it has asked, how much of that is its turn, and what waits."""

    __slots__ = ("asked", "turns", "waiting")

    def __init__(self) -> None:
        self.asked: dict[str, _Asked] = {}
        self.waiting: deque[_Asked] = deque()
        self.turns = 0


class Lookups:
    """`resolver` is a connected SEQPACKET socket; `blocked` is told when it takes no more, and when it does again."""

    def __init__(self, resolver: socket.socket, blocked: Callable[[bool], None]) -> None:
        self.resolver = resolver
        self._blocked = blocked
        self._stuck = False
        self._asked: OrderedDict[int, _Asked] = OrderedDict()  # somebody waits for it
        self._late: dict[int, _Asked] = {}  # nobody waits any more, the resolver is still at it
        self._unsent: deque[_Asked] = deque()
        self._next = 1

    def want(self, share: Share, name: str, waiter: Waiter, now: float) -> bool:
        """False where this sandbox has too much waiting already. Nothing is sent before `flush`."""
        asked = share.asked.get(name)
        if asked is not None:
            if len(asked.waiters) >= WAITERS:
                return False
            asked.waiters[waiter] = None
            return True
        if len(share.waiting) >= WAITING:
            return False
        asked = share.asked[name] = self._asked[self._next] = _Asked(self._next, name, share, now, waiter)
        self._next += 1
        share.waiting.append(asked)
        self._turn(share)
        return True

    def drop(self, share: Share, name: str, waiter: Waiter) -> None:
        """This one does not wait any more."""
        if (asked := share.asked.get(name)) is not None:
            asked.waiters.pop(waiter, None)

    def flush(self) -> None:
        """Sends what is to be sent, as far as the resolver takes it."""
        unsent = self._unsent
        while unsent:
            asked = unsent[0]
            if asked.id in self._asked:
                try:
                    self.resolver.send(b"%d %s" % (asked.id, asked.name.encode("ascii")), socket.MSG_DONTWAIT)
                except BlockingIOError:
                    break
                except OSError:
                    return  # it is gone; `replace` sends all of it again
                asked.sent = True
            unsent.popleft()
        if self._stuck != bool(unsent):
            self._stuck = bool(unsent)
            self._blocked(self._stuck)

    def ready(self, most: int = 256) -> bool:
        """Takes answers and calls who waits for them. False once the resolver has gone."""
        for _ in range(most):
            try:
                answer = self.resolver.recv(ANSWER_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not answer:
                return False
            words = answer.decode("ascii", "replace").split(" ")
            id = int(words[0]) if words[0].isdecimal() and len(words[0]) < 20 else 0
            asked = self._asked.get(id)
            if asked is not None and asked.sent:
                good = len(words) > 2 and words[1] == "ok"
                self._answer(asked, words[2:] if good else [], "" if good else words[-1][:32])
            elif (asked := self._late.pop(id, None)) is not None:
                self._release(asked)
        return True

    def replace(self, resolver: socket.socket) -> None:
        """A new resolver in place of the old; what the old one was asked, the new one is asked again."""
        self.resolver.close()
        self.resolver = resolver
        for asked in self._late.values():
            self._release(asked)
        self._late.clear()
        again = [asked for asked in self._asked.values() if asked.sent]
        for asked in again:
            asked.sent = False
        self._unsent.extendleft(reversed(again))
        self._stuck = False
        self.flush()

    def expire(self, now: float) -> None:
        while self._asked:
            asked = next(iter(self._asked.values()))
            if now - asked.at < DEADLINE_S:
                return
            self._answer(asked, [], TIMED_OUT)

    def wait_s(self, now: float) -> float | None:
        return max(0.0, next(iter(self._asked.values())).at + DEADLINE_S - now) if self._asked else None

    def forget(self, share: Share) -> None:
        """Nobody of this sandbox waits any more."""
        for asked in share.asked.values():
            del self._asked[asked.id]
        share.asked.clear()
        share.waiting.clear()

    def _answer(self, asked: _Asked, addresses: list[str], reason: str) -> None:
        del self._asked[asked.id], asked.by.asked[asked.name]
        if not asked.turn:
            asked.by.waiting.remove(asked)
        elif reason == TIMED_OUT and asked.sent:
            # A thread of the resolver is still at it, so this name still counts in its sandbox's share.
            self._late[asked.id] = asked
        else:
            self._release(asked)
        for waiter in asked.waiters:
            waiter(addresses, reason)

    def _release(self, asked: _Asked) -> None:
        asked.by.turns -= 1
        self._turn(asked.by)

    def _turn(self, share: Share) -> None:
        while share.waiting and share.turns < IN_FLIGHT:
            asked = share.waiting.popleft()
            asked.turn = True
            share.turns += 1
            self._unsent.append(asked)
