"""Synthetic kernels: an ELF with a PVH note, compressed, behind a setup header."""

from __future__ import annotations

import gzip
import lzma
import shutil
import struct
import subprocess
from collections.abc import Callable

import pytest

from sandboxd.assets.payload import NotAKernel, has_pvh_entry, payload, vmlinux


def elf(note_kind: int = 18, note_name: bytes = b"Xen\0", machine: int = 62) -> bytes:
    note = struct.pack("<III", len(note_name), 8, note_kind) + note_name + bytes(8)
    fields = struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + fields
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 0, 0, 0)
    notes = struct.pack("<IIQQQQQQ", 4, 4, 64 + 112, 0, 0, len(note), len(note), 4)
    return head + load + notes + note


def bzimage(packed: bytes, version: int = 0x020F, sectors: int = 4) -> bytes:
    image = bytearray((sectors + 1) * 512)
    image[0x1F1] = sectors
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", image, 0x206, version)
    struct.pack_into("<II", image, 0x248, 64, len(packed) + 4)
    return bytes(image) + bytes(64) + packed + struct.pack("<I", len(elf())) + b"after"


def by_program(*argv: str) -> Callable[[bytes], bytes]:
    def pack(raw: bytes) -> bytes:
        if shutil.which(argv[0]) is None:
            pytest.skip(f"{argv[0]} is not installed")
        return subprocess.run(argv, input=raw, capture_output=True, check=True).stdout

    return pack


@pytest.mark.parametrize(
    "pack",
    [
        pytest.param(gzip.compress, id="gzip"),
        pytest.param(lzma.compress, id="xz"),
        pytest.param(lambda raw: lzma.compress(raw, format=lzma.FORMAT_ALONE), id="lzma"),
        pytest.param(by_program("lz4", "-l", "-c"), id="lz4 with the legacy frame"),
        pytest.param(by_program("zstd", "-c"), id="zstd"),
    ],
)
def test_the_kernel_comes_out_however_it_is_compressed(pack: Callable[[bytes], bytes]) -> None:
    assert vmlinux(bzimage(pack(elf()))) == elf()


def test_the_payload_is_found_without_its_length_and_what_follows() -> None:
    assert payload(bzimage(b"packed kernel")) == b"packed kernel"


def test_an_old_header_without_a_sector_count_means_four() -> None:
    image = bytearray(bzimage(b"packed kernel"))
    image[0x1F1] = 0
    assert payload(bytes(image)) == b"packed kernel"


@pytest.mark.parametrize(
    ("image", "said"),
    [
        pytest.param(b"", "no setup header", id="nothing"),
        pytest.param(bytes(4096), "no setup header", id="zeros"),
        pytest.param(elf() + bytes(1024), "no setup header", id="an ELF file"),
        pytest.param(bzimage(b"k" * 99, version=0x0207), "2.07", id="a protocol that does not say where"),
        pytest.param(bzimage(b"k" * 99)[:-90], "outside", id="a cut file"),
        pytest.param(bzimage(b"abc" * 9), "616263", id="an unknown compression"),
        pytest.param(bzimage(gzip.compress(b"not a kernel")), "PVH", id="no ELF inside"),
        pytest.param(bzimage(gzip.compress(elf(note_kind=17))), "PVH", id="another note"),
        pytest.param(bzimage(gzip.compress(elf(note_name=b"GNU\0"))), "PVH", id="somebody else's note"),
        pytest.param(bzimage(gzip.compress(elf(machine=183))), "PVH", id="another processor"),
    ],
)
def test_what_is_no_kernel_is_refused_with_the_reason(image: bytes, said: str) -> None:
    with pytest.raises(NotAKernel, match=said):
        vmlinux(image)


def test_offsets_that_wrap_are_outside() -> None:
    image = bytearray(bzimage(b"k" * 99))
    struct.pack_into("<II", image, 0x248, 0xFFFFFFFF, 0xFFFFFFFF)
    with pytest.raises(NotAKernel, match="outside"):
        payload(bytes(image))


def test_every_cut_of_an_elf_has_no_entry_and_raises_nothing() -> None:
    whole = elf()
    assert has_pvh_entry(whole)
    assert not any(has_pvh_entry(whole[:size]) for size in range(len(whole) - 16))


def test_a_table_of_headers_that_points_anywhere_raises_nothing() -> None:
    for at, size in ((32, 8), (54, 2), (56, 2), (64 + 56 + 8, 8), (64 + 56 + 32, 8), (64 + 112, 4), (64 + 116, 4)):
        broken = bytearray(elf())
        broken[at : at + size] = b"\xff" * size
        has_pvh_entry(bytes(broken))
