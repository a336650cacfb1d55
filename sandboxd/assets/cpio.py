"""A cpio archive in the `newc` form, which is what the kernel unpacks as initramfs.

Entries in, bytes out. The same entries always give the same bytes: owners are root, times and device numbers of the
archive itself are zero, inode numbers count up. Format: Linux, Documentation/driver-api/early-userspace/buffer-format.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass

NAME_MAX_BYTES = 4096
SIZE_MAX_BYTES = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Entry:
    """`mode` holds the file type too (`stat.S_IFREG | 0o755`); `device` is (major, minor) of a node."""

    name: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        parts = self.name.split("/")
        if not self.name or "\0" in self.name or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"not a plain relative path: {self.name!r}")
        if len(self.name.encode()) >= NAME_MAX_BYTES or len(self.data) > SIZE_MAX_BYTES:
            raise ValueError(f"too large for the format: {self.name!r}")
        if self.data and not stat.S_ISREG(self.mode):
            raise ValueError(f"only a regular file holds data: {self.name!r}")


def archive(entries: Iterable[Entry]) -> bytes:
    """The entries in their order (a directory must come before what is in it), then the trailer."""
    out = bytearray()
    for number, entry in enumerate(entries, start=1):
        _append(out, number, entry.name, entry.mode, entry.data, entry.device)
    _append(out, 0, "TRAILER!!!", 0, b"", (0, 0))
    return bytes(out)


def _append(out: bytearray, inode: int, name: str, mode: int, data: bytes, device: tuple[int, int]) -> None:
    raw_name = name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(mode) else 1
    fields = (inode, mode, 0, 0, links, 0, len(data), 0, 0, *device, len(raw_name), 0)
    out += b"070701" + b"".join(b"%08X" % field for field in fields) + raw_name
    _pad(out)
    out += data
    _pad(out)


def _pad(out: bytearray) -> None:
    out += b"\0" * (-len(out) % 4)
