"""The operator's own kernel: taken as ELF or bzImage, with no module of ours; a guest boots with it."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from sandboxd.assets import kernel, prepare, store
from sandboxd.client import Create
from sandboxd.errors import SetupError
from tests.daemon import ROOT, Daemon, assets_dir

OWN = ROOT / "build" / "own-kernel" / "vmlinux"


def made(path: Path, assets: Path) -> store.Asset:
    return prepare.produce(assets, [kernel.own(path)], lambda progress: None)["kernel"]


def test_an_elf_kernel_is_taken_as_it_is_and_no_module_with_it(tmp_path: Path) -> None:
    asset = prepare.present(assets_dir(), ROOT / "build")
    if asset is None:
        pytest.skip("no assets for these sources; `make assets` builds them")
    own = made(asset.kernel, tmp_path)
    assert own.file("vmlinux").read_bytes() == asset.kernel.read_bytes()
    modules = own.file("modules.cpio").read_bytes()
    assert b"modules/order\0" in modules
    assert b".ko" not in modules


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "not a bzImage"),
        (b"\x7fELF\x02\x01" + bytes(12) + struct.pack("<H", 183) + bytes(44), "not a bzImage"),
        (bytes(0x202) + b"HdrS" + struct.pack("<H", 0x20F) + bytes(0x100), "points outside the file"),
    ],
)
def test_what_is_no_kernel_is_refused_with_what_it_takes(tmp_path: Path, content: bytes, part: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(SetupError, match=f"{part}.*takes an x86 kernel with CONFIG_PVH, as vmlinux or bzImage"):
        made(tmp_path / "file", tmp_path / "assets")


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_a_kernel_that_cannot_be_read_is_named(tmp_path: Path, path: str) -> None:
    with pytest.raises(SetupError, match=f"--kernel {tmp_path / path}: "):
        kernel.own(tmp_path / path)


@pytest.mark.vm
def test_a_guest_boots_with_a_kernel_that_has_its_drivers_built_in(short_tmp: Path) -> None:
    if not OWN.is_file():
        pytest.skip("no build/own-kernel/vmlinux; `make own-kernel` builds it in ten minutes, `make soak` needs it")
    with Daemon(short_tmp / "own", flags=("--kernel", str(OWN))) as daemon:
        sandbox = daemon.client.create(Create(memory_mb=512))
        said = daemon.client.run(sandbox.id, ["sh", "-c", "ls /sys/module; touch /workspace/x"])
        assert said.exit_code == 0, said.stderr
        assert b"virtio_pci" in said.stdout
    assert os.listdir(daemon.state / "sandboxes") == []
