"""git objects, packs and bundles written byte by byte, so that a test can write wrong ones."""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass

KINDS = {"commit": 1, "tree": 2, "blob": 3, "tag": 4}


@dataclass(frozen=True)
class Object:
    kind: str
    data: bytes

    @property
    def name(self) -> str:
        return hashlib.sha1(b"%s %d\0" % (self.kind.encode(), len(self.data)) + self.data).hexdigest()


def blob(data: bytes) -> Object:
    return Object("blob", data)


def tree(*entries: tuple[bytes, bytes, str]) -> Object:
    """Entries as (mode, name, object name), in the order given."""
    return Object("tree", b"".join(mode + b" " + name + b"\0" + bytes.fromhex(to) for mode, name, to in entries))


def commit(of: str, *parents: str, message: bytes = b"m\n") -> Object:
    lines = [f"tree {of}", *(f"parent {parent}" for parent in parents)]
    who = "g <g@example.test> 1700000000 +0000"
    return Object("commit", "\n".join([*lines, f"author {who}", f"committer {who}", "", ""]).encode() + message)


def head(kind: int, size: int) -> bytes:
    """The type and size an entry starts with."""
    out = [kind << 4 | size & 15]
    size >>= 4
    while size:
        out[-1] |= 0x80
        out.append(size & 0x7F)
        size >>= 7
    return bytes(out)


def entry(of: Object, size: int | None = None) -> bytes:
    """`size` lies about the length."""
    return head(KINDS[of.kind], len(of.data) if size is None else size) + zlib.compress(of.data)


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def offset(back: int) -> bytes:
    out = [back & 0x7F]
    back >>= 7
    while back:
        back -= 1
        out.insert(0, back & 0x7F | 0x80)
        back >>= 7
    return bytes(out)


def append_delta(base_size: int, more: bytes) -> bytes:
    """A delta: all of the base (at most 64 KiB of it), then `more`."""
    copy = bytes([0x80 | 0x30]) + struct.pack("<H", base_size)
    return varint(base_size) + varint(base_size + len(more)) + copy + bytes([len(more)]) + more


def offset_delta(back: int, delta: bytes) -> bytes:
    return head(6, len(delta)) + offset(back) + zlib.compress(delta)


def name_delta(base: str, delta: bytes) -> bytes:
    return head(7, len(delta)) + bytes.fromhex(base) + zlib.compress(delta)


def pack(*entries: bytes, version: int = 2, count: int | None = None) -> bytes:
    body = b"PACK" + struct.pack(">II", version, len(entries) if count is None else count) + b"".join(entries)
    return body + hashlib.sha1(body).digest()


def bundle(heads: list[tuple[str, bytes]], body: bytes, needs: tuple[str, ...] = (), first: bytes = b"") -> bytes:
    lines = [first or b"# v2 git bundle"]
    lines += [b"-" + name.encode() + b" needed" for name in needs]
    lines += [name.encode() + b" " + ref for name, ref in heads]
    return b"\n".join(lines) + b"\n\n" + body
