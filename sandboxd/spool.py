"""A process's output on disk: what is kept, what is dropped, and how it is read back in order.

In: the bytes of two streams (`o`, `E`), in the order they came. Out: the same bytes in the same order through
any number of cursors, each at its own pace, with a note of how many are missing where some were dropped. The
files are in a directory of the daemon's own; a guest decides their contents and nothing else. Nothing is kept
in memory but one read of at most 64 KiB a stream and cursor.

A stream is a chain of segment files named `<stream>.<offset of their first byte, hex>`. A segment holds
frames: u64 sequence number over both streams, u32 length, payload. The newest bytes win: when a stream is
over its limit its oldest segment goes. A `keep_first` spool (a run's answer) keeps the beginning instead and
notes the cut. A disk that is full loses bytes as if they were dropped; much output is never an error.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sandboxd import trees, unixpath

RUN_LIMIT = 8 << 20
STREAM_LIMIT = 64 << 20
SANDBOX_LIMIT = 256 << 20
CHUNK = 64 << 10
STREAMS = ("o", "E")

_FRAME = struct.Struct(">QI")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one stream, after `dropped` bytes of it that are no longer kept."""

    stream: str
    data: bytes
    dropped: int = 0


@dataclass(slots=True)
class _Segment:
    path: Path
    first: int
    length: int = 0
    """Payload bytes in it."""


@dataclass(slots=True)
class _Stream:
    segments: list[_Segment] = field(default_factory=list)
    total: int = 0
    """Bytes ever seen, dropped ones included."""
    kept: int = 0
    fd: int = -1
    """The newest segment, open for writing, or -1."""


class Spool:
    """The output of one process. `total` are the offsets a guest is asked to go on from."""

    def __init__(self, directory: Path, *, limit: int = STREAM_LIMIT, keep_first: bool = False) -> None:
        self.directory = directory
        self._limit, self._keep_first = limit, keep_first
        self._segment_limit = max(limit // 16, 1)
        self._streams = {name: _Stream() for name in STREAMS}
        self._sequence = 0
        self._cursors: set[Cursor] = set()
        self.pinned = 0
        """How many readers were promised exact sizes: the sandbox's budget does not touch it meanwhile."""
        self._recover()

    def total(self, stream: str) -> int:
        return self._streams[stream].total

    def kept_of(self, stream: str) -> int:
        return self._streams[stream].kept

    @property
    def kept(self) -> int:
        """Bytes on disk, both streams."""
        return sum(stream.kept for stream in self._streams.values())

    @property
    def cut(self) -> bool:
        """Something of it is not kept."""
        return any(stream.kept < stream.total for stream in self._streams.values())

    def append(self, name: str, data: bytes) -> None:
        stream = self._streams[name]
        if self._keep_first:
            room = self._limit - stream.kept
            # Once cut, later bytes do not follow on: nothing more is kept.
            wanted = data[:room] if stream.kept == stream.total else b""
            self._write(name, stream, wanted)
            stream.total += len(data) - len(wanted)
            return
        self._write(name, stream, data)
        while stream.kept > self._limit and self._drop(stream):
            pass

    def skip(self, name: str, count: int) -> None:
        """`count` bytes of the stream came and are lost."""
        stream = self._streams[name]
        self._close(stream)
        stream.total += count

    def holds(self, name: str, count: int) -> bool:
        """Whether `count` more bytes would drop some that a cursor has still to read."""
        stream = self._streams[name]
        if self._keep_first or stream.kept + count <= self._limit or len(stream.segments) < 2:
            return False
        end = stream.segments[1].first
        return any(cursor.position(name) < end for cursor in self._cursors if cursor.reads(name))

    def drop_oldest(self) -> bool:
        """Frees a segment, for the sake of the sandbox's limit. False when nothing is left to free."""
        oldest = max(self._streams.values(), key=lambda stream: stream.kept)
        return self._drop(oldest)

    def cursor(self, streams: tuple[str, ...] = STREAMS) -> Cursor:
        """A reader of these streams from the first byte. Close it."""
        cursor = Cursor(self, streams)
        self._cursors.add(cursor)
        return cursor

    def seal(self) -> None:
        """No more is coming."""
        for stream in self._streams.values():
            self._close(stream)

    def remove(self) -> None:
        self.seal()
        trees.remove(self.directory)
        for stream in self._streams.values():
            stream.segments.clear()
            stream.kept = 0

    def _write(self, name: str, stream: _Stream, data: bytes) -> None:
        for start in range(0, len(data), CHUNK):
            piece = data[start : start + CHUNK]
            if self._put(name, stream, piece):
                stream.segments[-1].length += len(piece)
                stream.kept += len(piece)
            else:
                self._close(stream)
            stream.total += len(piece)

    def _put(self, name: str, stream: _Stream, piece: bytes) -> bool:
        if stream.fd >= 0 and stream.segments[-1].length >= self._segment_limit:
            self._close(stream)
        frame = _FRAME.pack(self._sequence, len(piece)) + piece
        try:
            if stream.fd < 0:
                self._begin(name, stream)
            before = os.lseek(stream.fd, 0, os.SEEK_END)
            if os.write(stream.fd, frame) != len(frame):
                os.ftruncate(stream.fd, before)
                return False
        except OSError:
            return False
        self._sequence += 1
        return True

    def _begin(self, name: str, stream: _Stream) -> None:
        path = self.directory / f"{name}.{stream.total:016x}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            stream.fd = os.open(path, flags, 0o600)
        except FileNotFoundError:
            unixpath.make_private(self.directory)
            stream.fd = os.open(path, flags, 0o600)
        except FileExistsError:
            # An earlier attempt at this offset made the file and could write nothing into it.
            stream.fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW)
        if not stream.segments or stream.segments[-1].path != path:
            stream.segments.append(_Segment(path, stream.total))

    def _close(self, stream: _Stream) -> None:
        if stream.fd >= 0:
            os.close(stream.fd)
            stream.fd = -1

    def _drop(self, stream: _Stream) -> bool:
        if not stream.segments:
            return False
        if len(stream.segments) == 1:
            self._close(stream)
        segment = stream.segments.pop(0)
        stream.kept -= segment.length
        segment.path.unlink(missing_ok=True)
        return True

    def _recover(self) -> None:
        """Takes up what an earlier daemon wrote; a frame it was killed in is cut off."""
        try:
            names = sorted(os.listdir(self.directory))
        except FileNotFoundError:
            return
        for file_name in names:
            stream_name, _, offset = file_name.partition(".")
            stream = self._streams[stream_name]
            segment = _Segment(self.directory / file_name, int(offset, 16))
            fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                end = 0
                for sequence, length, frame_end in _frames(fd):
                    end = frame_end
                    segment.length += length
                    self._sequence = max(self._sequence, sequence + 1)
                os.ftruncate(fd, end)
            finally:
                os.close(fd)
            if segment.length == 0:
                segment.path.unlink()
                continue
            stream.segments.append(segment)
            stream.kept += segment.length
            stream.total = segment.first + segment.length


class Cursor:
    """Reads a spool from its first kept byte on. Several may; each has its own place."""

    def __init__(self, spool: Spool, streams: tuple[str, ...]) -> None:
        self._spool = spool
        self._places = {name: _Place() for name in streams}

    def __enter__(self) -> Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._spool._cursors.discard(self)
        for place in self._places.values():
            place.close()

    def reads(self, stream: str) -> bool:
        return stream in self._places

    def position(self, stream: str) -> int:
        """Offset of the first byte not read yet."""
        return self._places[stream].offset

    def read(self) -> Chunk | None:
        """The next bytes of one stream, at most 64 KiB; None when nothing more is there yet."""
        pieces: list[bytes] = []
        size = dropped = 0
        chosen = ""
        while True:
            heads = {head: name for name in self._places if (head := self._head(name)) is not None}
            if not heads:
                break
            head = min(heads)
            name, length = heads[head], head[1]
            place = self._places[name]
            gap = place.segment_offset - place.offset
            if chosen and (name != chosen or gap or size + length > CHUNK):
                break
            chosen, dropped = name, dropped + gap
            pieces.append(place.take(length))
            size += length
        if chosen:
            return Chunk(chosen, b"".join(pieces), dropped)
        return self._tail_gap()

    def _head(self, name: str) -> tuple[int, int] | None:
        """(sequence, length) of the stream's next frame; moves on to the next segment where one ends."""
        place = self._places[name]
        while True:
            if place.fd >= 0 and (head := place.head()) is not None:
                return head
            following = next((s for s in self._spool._streams[name].segments if s.first > place.first), None)
            if following is None:
                return None
            # The segment just left is complete: a new one begins only when nothing more goes into it.
            if not place.open(following):
                place.first = following.first

    def _tail_gap(self) -> Chunk | None:
        """Bytes that were lost at the end, after the last kept one; only said once nothing follows them."""
        for name, place in self._places.items():
            stream = self._spool._streams[name]
            last = stream.segments[-1] if stream.segments else None
            ended = stream.fd < 0 and (last is None or place.first >= last.first)
            if ended and not self._spool._keep_first and place.offset < stream.total:
                dropped, place.offset = stream.total - place.offset, stream.total
                place.segment_offset = stream.total
                return Chunk(name, b"", dropped)
        return None


class _Place:
    """A cursor's place in one stream: an open segment and what was read ahead of it."""

    __slots__ = ("_at", "_buffer", "_position", "fd", "first", "offset", "segment_offset")

    def __init__(self) -> None:
        self.fd = -1
        self.first = -1
        self.offset = 0
        self.segment_offset = 0
        self._position = 0
        self._buffer = b""
        self._at = 0

    def open(self, segment: _Segment) -> bool:
        try:
            fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        self.close()
        self.fd, self.first, self.segment_offset = fd, segment.first, segment.first
        self._position, self._buffer, self._at = 0, b"", 0
        return True

    def head(self) -> tuple[int, int] | None:
        if not self._ahead(_FRAME.size):
            return None
        sequence, length = _FRAME.unpack_from(self._buffer, self._at)
        return sequence, length

    def take(self, length: int) -> bytes:
        whole = self._ahead(_FRAME.size + length)
        assert whole, "a frame is written in one piece"
        start = self._at + _FRAME.size
        data = self._buffer[start : start + length]
        self._at = start + length
        self.segment_offset += length
        self.offset = self.segment_offset
        return data

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _ahead(self, count: int) -> bool:
        """At least `count` unread bytes are in the buffer."""
        if len(self._buffer) - self._at < count:
            rest = self._buffer[self._at :]
            more = os.pread(self.fd, max(CHUNK, count) - len(rest), self._position)
            self._position += len(more)
            self._buffer, self._at = rest + more, 0
        return len(self._buffer) >= count


class Budget:
    """All spools of one sandbox: together at most `limit` bytes, the oldest process's output goes first."""

    def __init__(self, limit: int = SANDBOX_LIMIT) -> None:
        self._limit = limit
        self._spools: dict[int, Spool] = {}

    def add(self, pid: int, spool: Spool) -> None:
        self._spools[pid] = spool

    def discard(self, pid: int) -> None:
        self._spools.pop(pid, None)

    def trim(self) -> None:
        used = sum(spool.kept for spool in self._spools.values())
        for pid in sorted(self._spools):
            spool = self._spools[pid]
            while used > self._limit and not spool.pinned:
                before = spool.kept
                if not spool.drop_oldest():
                    break
                used -= before - spool.kept
            if used <= self._limit:
                return


def _frames(fd: int) -> Iterator[tuple[int, int, int]]:
    """(sequence, length, end) of every complete frame in a segment."""
    size = os.fstat(fd).st_size
    at = 0
    while at + _FRAME.size <= size:
        sequence, length = _FRAME.unpack(os.pread(fd, _FRAME.size, at))
        at += _FRAME.size + length
        if length > CHUNK or at > size:
            return
        yield sequence, length, at
