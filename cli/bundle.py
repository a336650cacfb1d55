"""The header of a git bundle, read before git sees a byte of it.

In: bytes as they come, from a guest. Out: a `Header`, or a BundleError that names what was wrong in one
clean line. Starts nothing, reads no file.

gitformat-bundle(5): a signature line (`# v2 git bundle` or `# v3 git bundle`); in v3 lines
`@key=value`; lines `-<object> comment` for commits the receiver must have; lines `<object> <ref>` for
what the bundle brings; an empty line; a pack. Here a bundle brings exactly one ref, a v3 bundle says
nothing but its object format, and the whole header is at most 1 MiB with lines of at most 4 KiB.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

SIGNATURES = {b"# v2 git bundle": 2, b"# v3 git bundle": 3}
HEADER_BYTES = 1024 * 1024
LINE_BYTES = 4096
HEX_LENGTH = {"sha1": 40, "sha256": 64}
OBJECT_NAME = re.compile(rb"[0-9a-f]+")


class BundleError(SandboxError):
    """The bundle is refused."""


@dataclass(frozen=True, slots=True)
class Header:
    """`ref` is the one ref, undecodable bytes as surrogates; the pack starts at `size_bytes`."""

    version: int
    object_format: str
    prerequisites: tuple[str, ...]
    commit: str
    ref: str
    size_bytes: int


class HeaderReader:
    """Feed it bytes until it answers; what lies behind the header is left alone."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._size = 0
        self._version = 0
        self._format = "sha1"
        self._prerequisites: list[str] = []
        self._heads: list[tuple[str, str]] = []

    def feed(self, data: bytes) -> Header | None:
        """The header once its empty line has come; None asks for more."""
        position = 0
        while position < len(data):
            newline = data.find(b"\n", position)
            end = len(data) if newline < 0 else newline
            self._line += data[position : min(end, position + LINE_BYTES + 1)]
            self._size += end - position + (newline >= 0)
            position = end + 1
            if len(self._line) > LINE_BYTES:
                raise BundleError(f"a line of the bundle's header is longer than {LINE_BYTES} bytes")
            if self._size > HEADER_BYTES:
                raise BundleError(f"the bundle's header is larger than {HEADER_BYTES} bytes")
            if newline >= 0:
                line = bytes(self._line)
                self._line.clear()
                if not line and self._version:
                    return self._finish()
                self._take(line)
        return None

    def end(self) -> BundleError:
        """What is wrong when no more bytes come."""
        return BundleError("the bundle ends inside its header" if self._size else "the bundle is empty")

    def _take(self, line: bytes) -> None:
        if not self._version:
            if line not in SIGNATURES:
                raise BundleError(f"this is not a git bundle: it starts with {_shown(line)}")
            self._version = SIGNATURES[line]
        elif line.startswith(b"@"):
            self._capability(line)
        elif line.startswith(b"-"):
            self._prerequisites.append(self._name(line[1:].partition(b" ")[0], line))
        else:
            name, blank, ref = line.partition(b" ")
            if not blank or b"\0" in ref:
                raise BundleError(f"a line of the bundle's header cannot be read: {_shown(line)}")
            self._heads.append((self._name(name, line), os.fsdecode(ref)))
            if len(self._heads) > 1:
                refs = " and ".join(_shown(os.fsencode(ref)) for _, ref in self._heads)
                raise BundleError(f"the bundle brings more than one ref: {refs}")

    def _capability(self, line: bytes) -> None:
        key, _, value = line[1:].partition(b"=")
        known = value.decode("ascii", "replace")
        if self._version < 3 or key != b"object-format" or known not in HEX_LENGTH:
            raise BundleError(f"the bundle asks for something unknown: {_shown(line)}")
        if self._prerequisites or self._heads:
            raise BundleError(f"the bundle's header is out of order at {_shown(line)}")
        self._format = known

    def _name(self, name: bytes, line: bytes) -> str:
        if len(name) != HEX_LENGTH[self._format] or not OBJECT_NAME.fullmatch(name):
            raise BundleError(f"a line of the bundle's header holds no {self._format} name: {_shown(line)}")
        return name.decode("ascii")

    def _finish(self) -> Header:
        if not self._heads:
            raise BundleError("the bundle brings no ref")
        commit, ref = self._heads[0]
        return Header(self._version, self._format, tuple(self._prerequisites), commit, ref, self._size)


def _shown(raw: bytes) -> str:
    """Bytes of a guest's in quotes, fit for a message."""
    text = clean(raw[:100].decode("utf-8", "replace"))
    return f"'{text}'" + ("..." if len(raw) > 100 else "")
