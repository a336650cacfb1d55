"""guest-init in a real machine, with initramfs and drives that make it fail: each failure must name itself."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxd.assets import cpio, drive, initramfs, prepare

ROOT = Path(__file__).resolve().parents[2]
GUEST_INIT = ROOT / "build/guest-init"
BOOT_S = 90  # a boot is 4 s; machines that share two cores are slower


@pytest.fixture(scope="module")
def assets() -> prepare.Assets:
    directory = Path(os.environ.get("SANDBOX_TEST_ASSETS", "/var/lib/sandboxd/assets"))
    found = prepare.present(directory, ROOT / "build") if GUEST_INIT.is_file() else None
    if found is None:
        pytest.skip(f"no assets for these sources in {directory}; `make assets` builds them")
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("qemu-system-x86_64 is not installed")
    return found


def modules(assets: prepare.Assets) -> bytes:
    return (assets.kernel.parent / "modules.cpio").read_bytes()


def no_modules(assets: prepare.Assets) -> bytes:
    return initramfs.archive(GUEST_INIT.read_bytes())


def garbage_module(assets: prepare.Assets) -> bytes:
    return initramfs.archive(GUEST_INIT.read_bytes()) + cpio.archive(
        [
            cpio.Entry("modules", stat.S_IFDIR | 0o755),
            cpio.Entry("modules/order", stat.S_IFREG | 0o644, b"bad.ko\n"),
            cpio.Entry("modules/bad.ko", stat.S_IFREG | 0o644, b"\x7fELF" + bytes(200)),
        ]
    )


def usual(assets: prepare.Assets) -> bytes:
    return initramfs.archive(GUEST_INIT.read_bytes()) + modules(assets)


def no_drive(path: Path) -> None:
    pass


def garbage_drive(path: Path) -> None:
    path.write_bytes(bytes(1 << 20))


def drive_without_python(path: Path) -> None:
    tree = path.with_name("tree")
    for name in ("dev", "proc", "sys", "run", "tmp"):
        (tree / name).mkdir(parents=True)
    subprocess.run(drive.mkfs(tree, path), check=True, capture_output=True)


@pytest.mark.vm
@pytest.mark.parametrize(
    ("archive", "disk", "said"),
    [
        pytest.param(
            no_modules, no_drive, "failed: open /modules: No such file or directory", id="an initramfs without modules",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            garbage_module, no_drive, "failed: load module bad.ko: Exec format error", id="a module that is none",
            marks=pytest.mark.soak,
        ),
        pytest.param(usual, no_drive, "failed: wait for /dev/vda: No such file or directory", id="no drive"),
        pytest.param(usual, garbage_drive, "failed: mount /root: Invalid argument", id="a drive of zeros"),
        pytest.param(
            usual, drive_without_python,
            "runtime|guestd: /usr/bin/python3: No such file or directory|guestd ended: exit 127"
            "|failed: guestd ended 6 times", id="a drive without an interpreter",
        ),
    ],
)
def test_a_failure_names_its_step_and_ends_the_machine(
    archive: Callable[[prepare.Assets], bytes], disk: Callable[[Path], None], said: str, assets: prepare.Assets,
    tmp_path: Path,
) -> None:
    (tmp_path / "initramfs").write_bytes(archive(assets))
    disk(tmp_path / "drive")
    attached = ["-drive", f"if=virtio,format=raw,read-only=on,file={tmp_path}/drive"] if disk is not no_drive else []
    console = subprocess.run(
        [
            "qemu-system-x86_64", "-M", "pc-i440fx-7.2,accel=tcg", "-cpu", "Nehalem", "-m", "256", "-nodefaults",
            "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot",
            "-kernel", assets.kernel, "-initrd", tmp_path / "initramfs",
            "-append", "console=ttyS0 quiet panic=-1 reboot=t mitigations=off", *attached,
        ],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=BOOT_S, check=True, text=True,
    ).stdout
    lines = [line for line in console.splitlines() if line.startswith("guest-init: ")]
    assert lines[0] == "guest-init: start"
    for expected in said.split("|"):
        assert f"guest-init: {expected}" in lines
    assert "failed: " in lines[-1]


def test_anywhere_but_as_pid_1_it_refuses() -> None:
    if not GUEST_INIT.is_file():
        pytest.skip("build/guest-init is not compiled; `make` does it")
    run = subprocess.run([GUEST_INIT], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stdout == "guest-init: failed: this is PID 1 of a sandbox's kernel and nothing else\n"
