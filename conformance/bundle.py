"""A git bundle of one commit, written by hand; and what a bundle's head says.

gitformat-bundle(5): a signature line, prerequisites (`-`), references, an empty line, a pack. gitformat-pack(5):
`PACK`, version 2, a count, objects with their type and size in front of deflated data, and a SHA-1 of all of it.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass

SIGNATURE = b"# v2 git bundle\n"
COMMIT, TREE, BLOB = 1, 2, 3
NAMES = {COMMIT: b"commit", TREE: b"tree", BLOB: b"blob"}
WHO = b"Conformance <conformance@localhost> 1700000000 +0000"


@dataclass(frozen=True)
class Head:
    """A bundle's references by name, and the commits it builds on."""

    references: dict[str, str]
    needs: tuple[str, ...]


def of_one_file(name: bytes, content: bytes) -> tuple[bytes, str]:
    """A bundle whose HEAD is a first commit with this file, and that commit's id."""
    blob = _id(BLOB, content)
    tree = b"100644 " + name + b"\0" + bytes.fromhex(blob)
    commit = b"tree %s\nauthor %s\ncommitter %s\n\nOne\n" % (_id(TREE, tree).encode(), WHO, WHO)
    top = _id(COMMIT, commit)
    objects = ((COMMIT, commit), (TREE, tree), (BLOB, content))
    pack = b"PACK" + (2).to_bytes(4, "big") + len(objects).to_bytes(4, "big")
    pack += b"".join(_entry(kind, data) for kind, data in objects)
    pack += hashlib.sha1(pack, usedforsecurity=False).digest()
    return SIGNATURE + b"%s HEAD\n%s refs/heads/main\n\n" % (top.encode(), top.encode()) + pack, top


def head(bundle: bytes) -> Head:
    assert bundle.startswith(SIGNATURE), bundle[:40]
    text, end, pack = bundle.removeprefix(SIGNATURE).partition(b"\n\n")
    assert end and pack.startswith(b"PACK"), "the bundle has no pack"
    needs = [line[1:].split(b" ")[0].decode() for line in text.split(b"\n") if line.startswith(b"-")]
    references = [line.decode().split(" ", 1) for line in text.split(b"\n") if not line.startswith(b"-")]
    return Head({name: commit for commit, name in references}, tuple(needs))


def _id(kind: int, data: bytes) -> str:
    return hashlib.sha1(b"%s %d\0" % (NAMES[kind], len(data)) + data, usedforsecurity=False).hexdigest()


def _entry(kind: int, data: bytes) -> bytes:
    size = len(data)
    first = (kind << 4) | (size & 15)
    size >>= 4
    head_bytes = bytearray()
    while size:
        head_bytes.append(first | 0x80)
        first, size = size & 0x7F, size >> 7
    head_bytes.append(first)
    return bytes(head_bytes) + zlib.compress(data)
