"""The rules of a guest session, without input or output: which request is legal when, what a kept process's
output remembers, who is owed which bytes, and when a process counts as over.

Events come in (`output`, `closed`, `exited`, time as a number of seconds), frames come out (`take`). Two
streams, "o" and "E"; offsets count bytes of a stream since its process began.
"""

from __future__ import annotations

from collections import deque

from guestd import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

DRAIN_S: Final = 0.3        # how long a stream that a child keeps open is read after the leader's exit
AHEAD_BYTES: Final = 64 << 10   # how far a process may run ahead of the connection that started it
JOIN_BYTES: Final = 16 << 10    # small pieces are joined up to this: a ring of single bytes would be huge

UNCONFIGURED_OPS: Final = frozenset({"ping", "configure"})


def refusal(op: str, configured: bool) -> str | None:
    """Why this op may not be served now, or None."""
    if op == "configure" and configured:
        return "configured already: a machine is configured once"
    if not configured and op not in UNCONFIGURED_OPS:
        return f"{op} before configure"
    return None


class Ring:
    """The end of one stream. Holds what `keep_bytes` allow, and beyond it what lies at or behind a floor."""

    __slots__ = ("_pieces", "end", "keep_bytes", "start")

    def __init__(self, keep_bytes: int) -> None:
        self.keep_bytes = keep_bytes
        self._pieces: deque[bytes] = deque()
        self.start = 0
        self.end = 0

    def append(self, data: bytes) -> None:
        pieces = self._pieces
        if pieces and len(pieces[-1]) + len(data) <= JOIN_BYTES:
            pieces[-1] += data
        else:
            pieces.append(data)
        self.end += len(data)

    def trim(self, floor: int) -> None:
        """Forgets whole pieces before `floor`, oldest first, until no more than `keep_bytes` are held."""
        pieces = self._pieces
        while pieces and self.end - self.start > self.keep_bytes and self.start + len(pieces[0]) <= floor:
            self.start += len(pieces.popleft())

    def read(self, offset: int) -> bytes:
        """The bytes from `offset` (between start and end) to the end of its piece; b"" at the end."""
        if offset == self.end:
            return b""
        at = self.end
        for piece in reversed(self._pieces):
            at -= len(piece)
            if at <= offset:
                return piece if at == offset else piece[offset - at:]
        raise ValueError(f"offset {offset} is not within {self.start} to {self.end}")


class Feed:
    """One connection's place in the output of a process. `pinned`: the process waits for it; others get
    gaps."""

    __slots__ = ("done", "offsets", "pinned")

    def __init__(self, offset_o: int = 0, offset_e: int = 0, *, pinned: bool = False) -> None:
        self.offsets = {"o": offset_o, "E": offset_e}
        self.pinned = pinned
        self.done = False


class Session:
    """The output of one process, from its start until everybody has seen its end.

    It is over when its leader has exited and its streams are at their end, or DRAIN_S later: a child that
    was left behind may keep a stream open for ever. What was in the pipes when the leader exited is
    delivered however slow the reader, and time spent waiting for a reader does not count.
"""

    __slots__ = ("_deadline", "_open", "_owed", "exit_code", "feeds", "over", "rings")

    def __init__(self, keep_bytes: int) -> None:
        self.rings = {"o": Ring(keep_bytes), "E": Ring(keep_bytes)}
        self.feeds: list[Feed] = []
        self.exit_code: int | None = None
        self.over = False
        self._open = {"o", "E"}
        self._owed = {"o": 0, "E": 0}
        self._deadline = 0.0

    def wants(self, stream: str) -> bool:
        """Whether more of this stream may be read from the process now."""
        end = self.rings[stream].end
        return stream in self._open and all(
            end - feed.offsets[stream] < AHEAD_BYTES for feed in self.feeds if feed.pinned
        )

    def still_open(self, stream: str) -> bool:
        return stream in self._open

    def output(self, stream: str, data: bytes) -> None:
        self.rings[stream].append(data)
        self._owed[stream] -= len(data)
        self._trim(stream)

    def closed(self, stream: str) -> None:
        self._open.discard(stream)
        self._settle(0.0)

    def exited(self, code: int, now_s: float, waiting_bytes: dict[str, int]) -> None:
        """`waiting_bytes`: what each stream's pipe holds at this moment."""
        self.exit_code = code
        self._owed = {stream: waiting_bytes.get(stream, 0) for stream in self.rings}
        self._deadline = now_s + DRAIN_S
        self._settle(now_s)

    def waited(self, seconds: float) -> None:
        """A reader, not the process, was what we waited for."""
        self._deadline += seconds

    def tick(self, now_s: float) -> None:
        self._settle(now_s)

    def deadline_s(self) -> float | None:
        """When `tick` has to be called at the latest, or None."""
        return self._deadline if self.exit_code is not None and not self.over else None

    def _settle(self, now_s: float) -> None:
        if self.exit_code is not None and not self.over:
            late = now_s >= self._deadline and all(self._owed[stream] <= 0 for stream in self._open)
            self.over = not self._open or late

    def add(self, feed: Feed) -> None:
        if any(feed.offsets[stream] > ring.end for stream, ring in self.rings.items()):
            raise protocol.GuestProtocolFault("an offset beyond what the process has written")
        self.feeds.append(feed)

    def remove(self, feed: Feed) -> None:
        self.feeds.remove(feed)
        for stream in self.rings:
            self._trim(stream)

    def _trim(self, stream: str) -> None:
        ring = self.rings[stream]
        ring.trim(min((feed.offsets[stream] for feed in self.feeds if feed.pinned), default=ring.end))

    def take(self, feed: Feed) -> list[bytes]:
        """What to send to this feed next: at most one piece of each stream, gaps first, the exit code
        last."""
        out: list[bytes] = []
        behind = False
        for stream, ring in self.rings.items():
            offset = feed.offsets[stream]
            if offset < ring.start:
                out.append(protocol.encode_gap(stream, ring.start - offset))
                offset = ring.start
            data = ring.read(offset)
            if data:
                out += (protocol.frame_head(stream, len(data)), data)
            feed.offsets[stream] = offset + len(data)
            behind = behind or offset + len(data) < ring.end
            self._trim(stream)
        if self.over and not behind and not feed.done:
            assert self.exit_code is not None
            out.append(protocol.encode_exit(self.exit_code))
            feed.done = True
        return out
