"""How long until a command has run in a new sandbox, beside the same kernel brought up by QEMU alone."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from bench.conftest import SHORT, alternate
from sandboxd.assets.prepare import present
from sandboxd.client import Create
from tests.daemon import ROOT, Daemon, assets_dir

MEMORY_MB = 512


def bare_boot(kernel: Path, initramfs: Path, runtime: Path) -> float:
    """QEMU by itself, nothing confined, no option that hurries the kernel, to guest-init's first line; seconds."""
    command = [
        "qemu-system-x86_64", "-M", "pc-i440fx-7.2,accel=tcg", "-cpu", "Nehalem", "-m", str(MEMORY_MB),
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
        "-kernel", str(kernel), "-initrd", str(initramfs),
        "-append", "console=ttyS0 quiet panic=-1",
        "-drive", f"file={runtime},format=raw,if=virtio,readonly=on",
    ]  # fmt: skip
    start = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as vmm:
        assert vmm.stdout is not None
        seen = b""
        while b"guest-init: start" not in seen:
            piece = vmm.stdout.read1(4096)
            assert piece, f"QEMU ended: {seen[-500:]!r}"
            seen += piece
        took = time.perf_counter() - start
        vmm.kill()
    return took


def test_boot_cold(benchmark: Any, daemon: Daemon) -> None:
    assets = present(assets_dir(), ROOT / "build")
    assert assets is not None

    def ours() -> float:
        start = time.perf_counter()
        sandbox = daemon.client.create(Create(memory_mb=MEMORY_MB))
        assert daemon.client.run(sandbox.id, ["true"]).exit_code == 0
        took = time.perf_counter() - start
        daemon.client.delete(sandbox.id)
        return took

    alternate(
        benchmark, ours, lambda: bare_boot(assets.kernel, assets.initramfs, assets.runtime),
        rounds=2 if SHORT else 7, peer_name="bare QEMU boot of the same kernel to guest-init",
    )  # fmt: skip
