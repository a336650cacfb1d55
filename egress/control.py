"""The socket between sandboxd and egress: frames, the descriptors that travel with them, events until acknowledged.

A frame is four bytes of length (big-endian) and a JSON object, at most 4 MiB either way. Descriptors ride on the
first byte of their frame (SCM_RIGHTS), and its key `fds` says how many. Either end may be the one that reads what
the other was made to say, so nothing in a frame is taken for granted. Leaf: no decision, no file, no clock.

From sandboxd `{"seq": n, "do": verb, …}`; `seq` comes back in `{"seq", "ok": true, …}` or `{"seq", "error": "…"}`:

    hello    {}                                          → build, pid, sandboxes: [ids], events: the last number
    add      {sandbox, policy, limits}                   with four descriptors: TCP listener, DNS UDP socket, DNS TCP
                                                         listener, names file (O_RDWR | O_APPEND)
    update   {sandbox, policy}                           what the new policy forbids is cut before the answer
    remove   {sandbox}                                   answered when none of its connections is left
    resolver {} and one descriptor                       a new resolver's SEQPACKET socket
    report   {sandbox}                                   → names: [rows], see `ROW`
    ack      {through}                                   events up to this number are safe

`policy` is `Policy.as_json()`, `limits` any of the fields of the relay's `Limits`. From egress, unasked:
`{"event": {…}, "number": n}`. What is not acknowledged is sent again on the next connection.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

FRAME_LIMIT = 4 << 20
FDS_LIMIT = 16
EVENTS_LIMIT = 8192
TEXT_LIMIT = 512  # of a field of an event, in characters
TIME_LIMIT = 1e11  # seconds since the epoch; a calendar has no name for much later ones

DENIED, ALLOWED, LOST = "denied", "allowed", "lost"

# The keys of a row of a report. `bytes_out` is what the guest sent; times are seconds since the epoch.
ROW = (
    "id", "name", "port", "decision", "rule", "by", "why", "count", "connections", "bytes_in", "bytes_out",
    "first_at", "last_at",
)  # fmt: skip

_LENGTH = struct.Struct(">I")
_FD_SPACE = socket.CMSG_SPACE(FDS_LIMIT * array.array("i").itemsize)


class Fault(Exception):
    """The other end does not keep to the framing; the connection is of no more use."""


@dataclass(frozen=True, slots=True)
class Frame:
    """`fds` belong to whoever takes the frame."""

    body: dict[str, Any]
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """One decision so far: every figure is the total since the first, so the latest event of an `id` is the truth
    and one that comes twice does no harm. `kind` is `denied`, `allowed`, or `lost` with the `count` of events that
    nobody took in time."""

    number: int
    at: float
    kind: str
    sandbox: str
    id: str
    name: str
    port: int
    rule: str
    by: str
    why: str
    count: int
    up_bytes: int
    down_bytes: int
    connections: int

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Event:
        """Raises Fault unless `value` is exactly an event: all keys, no others, types and lengths right."""
        if not isinstance(value, dict) or value.keys() != _EVENT_TYPES.keys():
            raise Fault("an event without its keys")
        for key, kind in _EVENT_TYPES.items():
            field = value[key]
            if not _fits(field, kind):
                raise Fault(f"an event whose {key} is wrong")
        if value["kind"] not in (DENIED, ALLOWED, LOST):
            raise Fault("an event of no known kind")
        return cls(**value)


def _fits(field: Any, kind: str) -> bool:
    if kind == "str":
        return isinstance(field, str) and len(field) <= TEXT_LIMIT
    if kind == "int":
        return type(field) is int and 0 <= field < 1 << 63
    return type(field) in (int, float) and 0 <= field < TIME_LIMIT


def is_row(value: Mapping[str, object]) -> bool:
    """Whether it is exactly a row of a report."""
    return value.keys() == _ROW_TYPES.keys() and all(_fits(value[key], kind) for key, kind in _ROW_TYPES.items())


_EVENT_TYPES: dict[str, str] = {field: str(kind) for field, kind in Event.__annotations__.items()}


_NUMBERS = ("port", "count", "connections", "bytes_in", "bytes_out")
_TIMES = ("first_at", "last_at")
_ROW_TYPES = {key: "int" if key in _NUMBERS else "float" if key in _TIMES else "str" for key in ROW}


def pack(body: Mapping[str, object], fds: int = 0) -> bytes:
    """The bytes of a frame that `fds` descriptors travel with."""
    text = json.dumps({**body, "fds": fds} if fds else body, separators=(",", ":")).encode()
    if len(text) > FRAME_LIMIT:
        raise Fault("a frame larger than the limit")
    return _LENGTH.pack(len(text)) + text


def send(connection: socket.socket, body: Mapping[str, object], fds: Sequence[int] = ()) -> None:
    """Sends one frame on a blocking socket. The descriptors stay open here."""
    data = pack(body, len(fds))
    if fds:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        data = data[connection.sendmsg([data], rights) :]
    connection.sendall(data)


class Inbox:
    """What one connection has brought and nobody has taken yet: at most one frame and its descriptors."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._fds: deque[int] = deque()

    def read(self, connection: socket.socket) -> list[Frame]:
        """One recvmsg. Raises EOFError at the end, Fault, and what the socket raises (BlockingIOError too)."""
        data, ancillary, flags, _ = connection.recvmsg(1 << 16, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self._fds.extend(numbers)
        if not data:
            raise EOFError
        if flags & socket.MSG_CTRUNC or len(self._fds) > FDS_LIMIT:
            raise Fault("more descriptors than a frame may carry")
        return self.feed(data)

    def feed(self, data: bytes) -> list[Frame]:
        held = self._bytes
        held += data
        frames: list[Frame] = []
        start = 0
        while len(held) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(held, start)
            if size > FRAME_LIMIT:
                raise Fault("a frame larger than the limit")
            end = start + _LENGTH.size + size
            if len(held) < end:
                break
            frames.append(self._frame(bytes(held[start + _LENGTH.size : end])))
            start = end
        del held[:start]
        return frames

    def _frame(self, text: bytes) -> Frame:
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            raise Fault("a frame that is not JSON") from None
        if not isinstance(body, dict):
            raise Fault("a frame that is not an object")
        count = body.pop("fds", 0)
        if type(count) is not int or not 0 <= count <= len(self._fds):
            raise Fault("a frame without its descriptors")
        return Frame(body, tuple(self._fds.popleft() for _ in range(count)))

    def close(self) -> None:
        """Closes the descriptors that no frame has claimed."""
        while self._fds:
            os.close(self._fds.popleft())


class Unacked:
    """Events in order, numbered from 1 without gaps, until the other end says they are safe.

    Bounded: the oldest go first, and once there is room again an event of kind `lost` says how many.
    """

    def __init__(self, limit: int = EVENTS_LIMIT) -> None:
        self.last = 0
        self._limit = limit
        self._events: deque[Event] = deque()
        self._dropped = 0

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: Event) -> None:
        if len(self._events) >= self._limit:
            self._events.popleft()
            self._dropped += 1
        self.last += 1
        self._events.append(replace(event, number=self.last))

    def ack(self, through: int, at: float) -> None:
        events = self._events
        while events and events[0].number <= through:
            events.popleft()
        if self._dropped and len(events) < self._limit:
            dropped, self._dropped = self._dropped, 0
            self.add(Event(0, at, LOST, "", "", "", 0, "", "", "", dropped, 0, 0, 0))

    def after(self, number: int, most: int) -> list[Event]:
        """At most `most` of the events that come after `number`."""
        if not self._events:
            return []
        skip = max(0, number + 1 - self._events[0].number)
        return list(islice(self._events, skip, skip + most))
