"""The kernel inside a bzImage: `vmlinuz` bytes in, ELF `vmlinux` bytes out.

A virtual machine monitor that loads an ELF kernel enters it at its PVH note, without the real-mode code and without
the kernel unpacking itself, which under emulation takes a second. The setup header says where the compressed kernel
is (`payload_offset`, `payload_length`: Linux, Documentation/arch/x86/boot.rst, protocol 2.08); its first bytes say
how it is compressed. What comes out is checked to be a 64-bit x86 ELF with a PVH entry.
"""

from __future__ import annotations

import lzma
import struct
import zlib
from collections.abc import Callable

from sandboxd.assets import command

SECTOR_BYTES = 512
VMLINUX_MAX_BYTES = 512 << 20
PT_NOTE = 4
XEN_ELFNOTE_PHYS32_ENTRY = 18  # Linux, include/xen/interface/elfnote.h


class NotAKernel(ValueError):
    """The bytes are not the kernel image they should be; the message says which part is wrong."""


def vmlinux(image: bytes) -> bytes:
    packed = payload(image)
    for magic, unpack in _UNPACK.items():
        if packed.startswith(magic):
            kernel = unpack(packed)
            break
    else:
        raise NotAKernel(f"the kernel is compressed in an unknown way (it begins with {packed[:4].hex()})")
    if not has_pvh_entry(kernel):
        raise NotAKernel("the unpacked kernel has no PVH entry")
    return kernel


def payload(image: bytes) -> bytes:
    """The compressed kernel in a bzImage, without the length that follows it."""
    if len(image) < 0x250 or image[0x202:0x206] != b"HdrS":
        raise NotAKernel("not a bzImage: no setup header")
    (version,) = struct.unpack_from("<H", image, 0x206)
    if version < 0x0208:
        raise NotAKernel(f"boot protocol {version >> 8}.{version & 0xFF:02d} does not say where the kernel is")
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (sectors + 1) * SECTOR_BYTES + offset
    if length < 8 or start + length > len(image):
        raise NotAKernel("the setup header points outside the file")
    return image[start : start + length - 4]


def has_pvh_entry(elf: bytes) -> bool:
    if len(elf) < 64 or elf[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", elf, 18)[0] != 62:
        return False
    (headers_at,) = struct.unpack_from("<Q", elf, 32)
    header_size, count = struct.unpack_from("<HH", elf, 54)
    if header_size < 56 or headers_at + header_size * count > len(elf):
        return False
    for at in range(headers_at, headers_at + header_size * count, header_size):
        kind, offset, size = struct.unpack_from("<I4xQ16xQ", elf, at)
        if kind == PT_NOTE and _holds_pvh_note(elf[offset : offset + size]):
            return True
    return False


def _holds_pvh_note(notes: bytes) -> bool:
    at = 0
    while at + 12 <= len(notes):
        name_size, value_size, kind = struct.unpack_from("<III", notes, at)
        name = notes[at + 12 : at + 12 + name_size]
        if name == b"Xen\0" and kind == XEN_ELFNOTE_PHYS32_ENTRY:
            return True
        at += 12 + (name_size + 3 & ~3) + (value_size + 3 & ~3)
    return False


def _gzip(packed: bytes) -> bytes:
    kernel = zlib.decompressobj(wbits=31).decompress(packed, VMLINUX_MAX_BYTES)
    return _bounded(kernel)


def _lzma(packed: bytes) -> bytes:
    kernel = lzma.LZMADecompressor().decompress(packed, VMLINUX_MAX_BYTES)
    return _bounded(kernel)


def _bounded(kernel: bytes) -> bytes:
    if len(kernel) >= VMLINUX_MAX_BYTES:
        raise NotAKernel("the unpacked kernel is larger than any kernel")
    return kernel


def _by_tool(tool: str) -> Callable[[bytes], bytes]:
    def unpack(packed: bytes) -> bytes:
        return _bounded(command.run([tool, "-dc"], step="unpack the kernel", stdin=packed).stdout)

    return unpack


_UNPACK: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x02\x21\x4c\x18": _by_tool("lz4"),  # the legacy frame, what the kernel's build uses
    b"\x28\xb5\x2f\xfd": _by_tool("zstd"),
    b"\x1f\x8b": _gzip,
    b"\xfd7zXZ\x00": _lzma,
    b"\x5d\x00\x00": _lzma,
}
