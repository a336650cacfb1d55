"""Which connections there are, whose, and which one has to go for another. Pure: the caller closes what it is told to.

A newcomer has shown nothing but its address. Once it has shown a token it counts as that token's, since behind one
address (this machine's loopback, a router) may be many people. A unix socket's peer is known from the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

from sandboxd.address import Peer, UnixPeer
from sandboxd.limits import Limits

C = TypeVar("C", bound=Hashable)


class Full(Exception):
    """There is no room for this one. The message is for the client."""


class Occupancy(Generic[C]):
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._newcomers: dict[C, str] = {}
        self._known: dict[C, str] = {}
        self._addresses: Counter[str] = Counter()
        self._clients: Counter[str] = Counter()
        self._json: Counter[str] = Counter()

    def enter(self, connection: C, peer: Peer) -> C | None:
        """The newcomer that has to make room, already counted as gone. Raises `Full`."""
        if isinstance(peer, UnixPeer):
            self._add(connection, f"uid {peer.uid}")
            return None
        address = peer.network
        evicted: C | None = None
        if self._addresses[address] >= self._limits.newcomers_per_address:
            evicted = self._oldest(address)
        elif len(self._newcomers) >= self._limits.newcomers:
            evicted = self._oldest(self._addresses.most_common(1)[0][0])
        if evicted is not None:
            self.leave(evicted)
        self._newcomers[connection] = address
        self._addresses[address] += 1
        return evicted

    def know(self, connection: C, token: int) -> None:
        """It has shown this token. Raises `Full`."""
        if connection in self._newcomers:
            self._add(connection, f"token {token}")
            _take(self._addresses, self._newcomers.pop(connection), 1)

    def leave(self, connection: C) -> None:
        """Idempotent."""
        if connection in self._newcomers:
            _take(self._addresses, self._newcomers.pop(connection), 1)
        if connection in self._known:
            _take(self._clients, self._known.pop(connection), 1)

    def hold(self, connection: C, size_bytes: int) -> None:
        """A piece of a JSON body is in memory until `let_go` says otherwise. Raises `Full`."""
        client = self._known.get(connection, "")
        if (
            self._json[client] + size_bytes > self._limits.json_held_per_client_bytes
            or self._json.total() + size_bytes > self._limits.json_held_bytes
        ):
            raise Full("too many large requests at once; try again in a moment")
        self._json[client] += size_bytes

    def let_go(self, connection: C, size_bytes: int) -> None:
        _take(self._json, self._known.get(connection, ""), size_bytes)

    def _add(self, connection: C, client: str) -> None:
        if self._clients[client] >= self._limits.connections_per_client:
            raise Full(f"too many connections: one client may have {self._limits.connections_per_client}")
        if len(self._known) >= self._limits.connections:
            raise Full("too many connections")
        self._known[connection] = client
        self._clients[client] += 1

    def _oldest(self, address: str) -> C:
        return next(one for one, where in self._newcomers.items() if where == address)


def _take(counter: Counter[str], key: str, amount: int) -> None:
    counter[key] -= amount
    if counter[key] <= 0:
        del counter[key]
