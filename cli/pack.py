"""A pack's entries, walked before git unpacks them: what they would become is known before it is.

In: an open file a guest wrote, the place of the pack in it, `Limits`. Out: a `Scan`, or a PackError
that names the entry and what is wrong with it. Everything is inflated once in pieces and thrown away,
so memory is bounded by one piece and time by the limits; a size is refused when it is announced, not
when it has been reached.

gitformat-pack(5): `PACK`, version 2, number of entries; each entry a type and size in 7-bit groups, for
a delta its base (an offset back, or an object's name), then a zlib stream; after the last entry a
checksum, which is git's to verify.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from mmap import mmap

from sandboxd.errors import SandboxError

GIB = 2**30
PIECE_BYTES = 256 * 1024
WINDOW_BYTES = 1024 * 1024
# What a pack may inflate to beyond any doubt, and for each byte it has. zlib's most is 1032 for each.
INFLATED_FLOOR = GIB
INFLATED_PER_BYTE = 64
WHOLE = {1: "commit", 2: "tree", 3: "blob", 4: "tag"}
OFFSET_DELTA = 6
NAME_DELTA = 7
HASH_BYTES = {"sha1": 20, "sha256": 32}
IDX_FANOUT = 256
IDX_HEADER_BYTES = 8 + 4 * IDX_FANOUT


class PackError(SandboxError):
    """The pack is refused."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may come back. `time_s` is for the whole of a bring-back.

    `delta_depth` is the deepest chain git itself writes (pack.depth); a deeper one makes reading slow.
    """

    bundle_bytes: int = 4 * GIB
    objects: int = 2_000_000
    object_bytes: int = 2 * GIB
    inflated_bytes: int = 16 * GIB
    expanded_bytes: int = 64 * GIB
    delta_depth: int = 4095
    time_s: float = 900


@dataclass(frozen=True, slots=True)
class Scan:
    """`inflated_bytes` counts the zlib streams, `expanded_bytes` the objects they stand for.

    `offsets` are where entries start; for entry n `parents[n]` is the entry its delta builds on, -1 for a
    whole object, and -2 - k where the base is the object named `named_bases[k]`.
    """

    objects: int
    inflated_bytes: int
    expanded_bytes: int
    offsets: array[int]
    parents: array[int]
    named_bases: tuple[bytes, ...]


def scan(fd: int, start: int, end: int, object_format: str, limits: Limits, deadline: float) -> Scan:
    """Walks the pack at `start`..`end` of the file; `deadline` is on the monotonic clock."""
    return _Walk(_Window(fd, start, end), object_format, limits, deadline).walk()


def deepest(found: Scan, index: bytes | mmap, object_format: str) -> int:
    """The longest delta chain, once git has written the pack's index (version 2) and names have a place."""
    parents = array("q", found.parents)
    places = {offset: n for n, offset in enumerate(found.offsets)} if found.named_bases else {}
    for n, parent in enumerate(parents):
        if parent <= -2:
            offset = offset_of(index, found.named_bases[-2 - parent], object_format)
            parents[n] = places.get(offset, -1)  # a base from outside was appended whole
    depths = array("l", bytes(array("l").itemsize * len(parents)))
    most = 0
    for entry in range(len(parents)):
        chain = []
        base = entry
        while parents[base] >= 0 and not depths[base]:
            chain.append(base)
            base = parents[base]
        for depth, link in enumerate(reversed(chain), depths[base] + 1):
            depths[link] = depth
        most = max(most, depths[entry])
    return most


def offset_of(index: bytes | mmap, name: bytes, object_format: str) -> int:
    """Where the index says the object starts, -1 if it is not in this pack."""
    hash_bytes = HASH_BYTES[object_format]
    total = struct.unpack_from(">I", index, IDX_HEADER_BYTES - 4)[0]
    low = struct.unpack_from(">I", index, 8 + 4 * (name[0] - 1))[0] if name[0] else 0
    high = struct.unpack_from(">I", index, 8 + 4 * name[0])[0]
    while low < high:
        middle = (low + high) // 2
        at = IDX_HEADER_BYTES + middle * hash_bytes
        found = index[at : at + hash_bytes]
        if found == name:
            offsets = IDX_HEADER_BYTES + total * (hash_bytes + 4)
            offset: int = struct.unpack_from(">I", index, offsets + 4 * middle)[0]
            if offset & 0x80000000:
                large = offsets + 4 * total + 8 * (offset & 0x7FFFFFFF)
                offset = struct.unpack_from(">Q", index, large)[0]
            return offset
        low, high = (middle + 1, high) if found < name else (low, middle)
    return -1


class _Window:
    """Positioned reads of a file through a piece in memory; the file may shrink meanwhile without harm."""

    def __init__(self, fd: int, start: int, end: int) -> None:
        self._fd = fd
        self._data = b""
        self._from = start
        self.start = start
        self.end = end

    def at(self, position: int, length: int) -> bytes:
        """At most `length` bytes, fewer only at the end of the pack."""
        length = min(length, self.end - position)
        offset = position - self._from
        if offset < 0 or offset + length > len(self._data):
            self._data = os.pread(self._fd, min(max(WINDOW_BYTES, length), self.end - position), position)
            self._from, offset = position, 0
        return self._data[offset : offset + length]


class _Walk:
    def __init__(self, window: _Window, object_format: str, limits: Limits, deadline: float) -> None:
        self._window = window
        self._hash = HASH_BYTES[object_format]
        self._limits = limits
        self._deadline = deadline
        size = window.end - window.start
        self._most_inflated = min(limits.inflated_bytes, INFLATED_FLOOR + INFLATED_PER_BYTE * size)
        self._inflated = 0
        self._expanded = 0
        self._offsets = array("q")
        self._parents = array("q")
        self._depths = array("l")
        self._bases: list[bytes] = []

    def walk(self) -> Scan:
        head = self._window.at(self._window.start, 12)
        if len(head) < 12 or head[:4] != b"PACK":
            raise PackError("the pack is cut off" if b"PACK".startswith(head[:4]) else "there is no pack")
        version, count = struct.unpack(">II", head[4:])
        if version != 2:
            raise PackError(f"the pack has version {version}, not 2")
        if count == 0:
            raise PackError("the pack is empty")
        if count > self._limits.objects:
            raise PackError(f"the pack has {count} objects; {self._limits.objects} is the most")
        position = self._window.start + 12
        for _ in range(count):
            position = self._entry(position)
        left = self._window.end - position - self._hash
        if left:
            raise PackError("the pack is cut off" if left < 0 else f"{left} bytes lie behind the pack")
        bases = tuple(self._bases)
        return Scan(count, self._inflated, self._expanded, self._offsets, self._parents, bases)

    def _entry(self, start: int) -> int:
        head = self._window.at(start, 64)
        kind, size, used = _type_and_size(head)
        position = start + used
        parent, depth = -1, 0
        if kind == OFFSET_DELTA:
            back, used = _offset(head[position - start :])
            position += used
            parent = self._place_of(start - self._window.start - back)
            depth = self._depths[parent] + 1
        elif kind == NAME_DELTA:
            base = head[position - start : position - start + self._hash]
            if len(base) < self._hash:
                raise PackError("the pack is cut off")
            position += self._hash
            parent, depth = -2 - len(self._bases), 1
            self._bases.append(base)
        elif kind not in WHOLE:
            raise PackError(f"the pack has an entry of unknown type {kind}")
        if depth > self._limits.delta_depth:
            raise PackError(f"the pack has a chain of more than {self._limits.delta_depth} deltas")
        self._offsets.append(start - self._window.start)
        self._parents.append(parent)
        self._depths.append(depth)
        self._count(size, inflated=True)
        end, first = self._inflate(position, size)
        self._count(size if kind in WHOLE else _result_size(first), inflated=False)
        return end

    def _place_of(self, offset: int) -> int:
        """Offsets rise, so a base is found by halving; it must be an entry, not the middle of one."""
        n = bisect_left(self._offsets, offset)
        if n == len(self._offsets) or self._offsets[n] != offset:
            raise PackError("the pack has a delta that builds on something that is no object of the pack")
        return n

    def _count(self, size: int, inflated: bool) -> None:
        if size > self._limits.object_bytes:
            most = self._limits.object_bytes
            raise PackError(f"the pack has an object of {size} bytes; {most} is the most")
        if inflated:
            self._inflated += size
            if self._inflated > self._most_inflated:
                raise PackError(f"the pack inflates to more than {self._most_inflated} bytes")
        else:
            self._expanded += size
            if self._expanded > self._limits.expanded_bytes:
                raise PackError(f"the pack's objects are more than {self._limits.expanded_bytes} bytes")

    def _inflate(self, position: int, size: int) -> tuple[int, bytes]:
        """Where the zlib stream ends, and the first bytes in it; it must hold exactly `size`."""
        stream = zlib.decompressobj()
        produced = 0
        first = b""
        ask = 512
        pending = b""
        try:
            while not stream.eof:
                if not pending:
                    pending = self._window.at(position, ask)
                    position += len(pending)
                    ask = min(ask * 4, PIECE_BYTES)
                    if not pending:
                        raise PackError("the pack is cut off")
                    if time.monotonic() > self._deadline:
                        raise PackError("reading the pack took too long")
                out = stream.decompress(pending, PIECE_BYTES)
                pending = stream.unconsumed_tail
                produced += len(out)
                if len(first) < 32:
                    first += out[:32]
                if produced > size:
                    raise PackError("the pack has an object that is larger than it says")
        except zlib.error:
            raise PackError("the pack is damaged") from None
        if produced != size:
            raise PackError("the pack has an object that is smaller than it says")
        return position - len(stream.unused_data), first


def _type_and_size(head: bytes) -> tuple[int, int, int]:
    if not head:
        raise PackError("the pack is cut off")
    kind, size, shift, used = (head[0] >> 4) & 7, head[0] & 15, 4, 1
    while head[used - 1] & 0x80:
        if used >= min(len(head), 10):
            raise PackError("the pack has an entry whose size cannot be read")
        size |= (head[used] & 0x7F) << shift
        shift += 7
        used += 1
    return kind, size, used


def _offset(head: bytes) -> tuple[int, int]:
    """How far back the base is: each continued group also counts the values a shorter one could have said."""
    value, used = -1, 0
    while True:
        if used >= min(len(head), 10):
            raise PackError("the pack has a delta whose base cannot be read")
        byte = head[used]
        used += 1
        value = ((value + 1) << 7) | (byte & 0x7F)
        if not byte & 0x80:
            return value, used


def _result_size(delta: bytes) -> int:
    """A delta starts with the size it needs and the size it makes."""
    used = 0
    value = 0
    for _ in range(2):
        value, shift = 0, 0
        while True:
            if used >= len(delta) or shift > 63:
                raise PackError("the pack has a delta that cannot be read")
            byte = delta[used]
            used += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
    return value
