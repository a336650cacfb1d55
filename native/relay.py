"""The typed face of the relay: accepted connections, and what becomes of them.

C threads own every connection, its sockets and its timers. Out of here come batches of events, when `fd` is readable;
in go commands, which return at once and are carried out in the order given. Python sees the bytes it asked for and no
others. A command for a pair that is gone is ignored; pair numbers are never used again, so no command can hit another
connection than the one it was meant for. Each pair ends with exactly one `Closed`, and keeps its place under the
limits until that was taken.

A connection has two directions, and each has two credits. `pass_` credit lets bytes through without Python; when it is
used up, `read` credit has them handed over as `Data`; when that is used up too, bytes wait in the socket. After a
`Data` its direction stands still, whatever credit is left, until the next `read` (0 will do), `pass_` or `open` that
speaks of it: so whoever decides knows which byte comes next, and a count given to `pass_` starts exactly there.

Accepted on port 80 or 443, a pair starts with FIRST_BYTES of read credit in the direction UP and its `Accepted` comes
together with the first `Data`. On any other port it starts with none.

Everything may be called from one thread; commands may come from several. OSError where a system call failed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from native._native import ffi, lib

FREE = 2**64 - 1  # as a count for pass_ and open: everything, and the end of the stream with it
FIRST_BYTES = 17 * 1024  # one TLS record with its header, or an ordinary HTTP head


class Direction(IntEnum):
    UP = 0  # guest to upstream
    DOWN = 1


class Reason(IntEnum):
    """Why a pair is over; the values are native.h's relay_reason."""

    DONE = 0  # both ends had their end of stream, or `close` without a reset
    GUEST_RESET = 1
    UPSTREAM_RESET = 2
    DEADLINE = 3
    IDLE = 4
    CUT = 5  # `close` with a reset, `unlisten`, `stop`
    LIMIT = 6  # more sent than held_bytes, or no memory


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one sandbox. `first_ms` runs from the accept to `open`, `connect_ms` from `open` to Opened or Failed."""

    pairs: int = 1024
    held_bytes: int = 8 << 20
    first_ms: int = 60_000
    connect_ms: int = 20_000
    idle_ms: int = 3_600_000


@dataclass(frozen=True, slots=True)
class Accepted:
    """`address` and `port` are what the guest dialled when `redirected`, else the listening socket's own."""

    pair: int
    sandbox: int
    address: str
    port: int
    redirected: bool


@dataclass(frozen=True, slots=True)
class Data:
    pair: int
    direction: Direction
    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """The source of this direction sent its last byte, and the direction is not FREE."""

    pair: int
    direction: Direction


@dataclass(frozen=True, slots=True)
class Opened:
    pair: int
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Failed:
    """No address could be connected; the guest's side is as it was. `error`: errno of the last try."""

    pair: int
    error: int


@dataclass(frozen=True, slots=True)
class Closed:
    """Bytes are those written to upstream and to the guest. `said`: there was an Accepted."""

    pair: int
    sandbox: int
    reason: Reason
    up_bytes: int
    down_bytes: int
    said: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """Connections reset at once because of `Limits.pairs` or `max_pairs`, since the last of these events."""

    sandbox: int
    count: int


Event = Accepted | Data | Ended | Opened | Failed | Closed | Refused

_STEPS: dict[int, str] = {
    1: "memory for the relay",
    2: "an eventfd",
    3: "an epoll instance",
    4: "starting a thread",
    5: "the listening socket",
    6: "watching the listening socket",
    7: "the sandbox's number",
    8: "the addresses",
}
_BATCH = 256
_ADDRESS_BYTES = 46  # INET6_ADDRSTRLEN


class Relay:
    """`max_pairs` is for all sandboxes together. `fd` is readable while events wait."""

    def __init__(self, threads: int, max_pairs: int) -> None:
        self.max_pairs = max_pairs
        handle = ffi.new("struct relay **")
        step = ffi.new("int *")
        _checked(lib.relay_start(threads, max_pairs, handle, step), step)
        self._relay: Any = handle[0]
        self._step = step
        self._events: Any = ffi.new("struct relay_event[]", _BATCH)
        self.fd: int = lib.relay_fd(self._relay)

    def listen(self, sandbox: int, listener_fd: int, limits: Limits) -> None:
        """Accepts from now on, on a duplicate of a listening TCP socket; the caller keeps its own descriptor."""
        numbers = ffi.new(
            "struct relay_limits *",
            (limits.pairs, limits.held_bytes, limits.first_ms, limits.connect_ms, limits.idle_ms),
        )
        _checked(lib.relay_listen(self._relay, sandbox, listener_fd, numbers, self._step), self._step)

    def unlisten(self, sandbox: int) -> None:
        """Accepts no more and resets every pair of this sandbox; their Closed events still come."""
        _checked(lib.relay_unlisten(self._relay, sandbox, self._step), self._step)

    def take(self, most: int = _BATCH) -> list[Event]:
        count = lib.relay_take(self._relay, self._events, min(most, _BATCH))
        return [_MAKE[raw.kind](raw) for raw in self._events[0:count]]

    def open(self, pair: int, addresses: Sequence[tuple[str, int]], first: bytes, up: int, down: int) -> None:
        """Dials the addresses in order, 250 ms apart, and keeps the first that answers: Opened, or Failed.

        `first` goes out before anything sent so far. `up` and `down` become the pass credits. An upstream the pair
        has already is closed, with what was still queued for it and the read credit of DOWN.
        """
        targets = ffi.new("struct relay_address[]", [(_raw(text), port) for text, port in addresses])
        _checked(
            lib.relay_open(self._relay, pair, targets, len(addresses), first, len(first), up, down, self._step),
            self._step,
        )

    def send(self, pair: int, direction: Direction, data: bytes) -> None:
        """Queues bytes to the direction's destination, before anything passed from now on."""
        _checked(lib.relay_send(self._relay, pair, direction, data, len(data), self._step), self._step)

    def read(self, pair: int, direction: Direction, most: int) -> None:
        """Adds `most` bytes of read credit."""
        _checked(lib.relay_read(self._relay, pair, direction, most, self._step), self._step)

    def pass_(self, pair: int, direction: Direction, count: int) -> None:
        """Adds `count` bytes of pass credit; FREE: everything from here on, the end of the stream too."""
        _checked(lib.relay_pass(self._relay, pair, direction, count, self._step), self._step)

    def finish(self, pair: int, direction: Direction) -> None:
        """Ends the stream towards the direction's destination, once what is queued has gone out."""
        _checked(lib.relay_finish(self._relay, pair, direction, self._step), self._step)

    def deadline(self, pair: int, ms: int) -> None:
        """Closes the pair with DEADLINE in `ms`, instead of whenever it was set to before; 0: not at all."""
        _checked(lib.relay_deadline(self._relay, pair, ms, self._step), self._step)

    def close(self, pair: int, reset: bool) -> None:
        """With `reset` both ends at once. Otherwise what is queued goes out, then the end of the stream; the guest has
        5 s to take it, and what it still sends is thrown away."""
        _checked(lib.relay_close(self._relay, pair, reset, self._step), self._step)

    def stop(self) -> None:
        """Resets every pair, ends the threads and closes `fd`. Nothing else may be called afterwards."""
        relay, self._relay = self._relay, ffi.NULL
        if relay != ffi.NULL:
            lib.relay_stop(relay)


def _raw(text: str) -> bytes:
    """What cannot be an address becomes none, which is refused with the rest."""
    raw = text.encode("ascii", "replace")
    return raw if len(raw) < _ADDRESS_BYTES and b"\0" not in raw else b""


def _data(raw: Any) -> Data:
    return Data(raw.pair, _DIRECTIONS[raw.direction], ffi.unpack(ffi.cast("char *", raw.data), raw.length))


def _text(raw: Any) -> str:
    text: bytes = ffi.string(raw.address)
    return text.decode("ascii")


_DIRECTIONS = (Direction.UP, Direction.DOWN)
_REASONS = tuple(Reason)
_MAKE: dict[int, Callable[[Any], Event]] = {
    1: lambda raw: Accepted(raw.pair, raw.sandbox, _text(raw), raw.port, bool(raw.flag)),
    2: _data,
    3: lambda raw: Ended(raw.pair, _DIRECTIONS[raw.direction]),
    4: lambda raw: Opened(raw.pair, _text(raw), raw.port),
    5: lambda raw: Failed(raw.pair, raw.error),
    6: lambda raw: Closed(
        raw.pair, raw.sandbox, _REASONS[raw.reason], raw.up_bytes, raw.down_bytes, bool(raw.flag)
    ),
    7: lambda raw: Refused(raw.sandbox, raw.count),
}


def _checked(code: int, step: Any) -> None:
    if code < 0:
        raise OSError(-code, f"{os.strerror(-code)} ({_STEPS.get(step[0], 'the relay')})")
