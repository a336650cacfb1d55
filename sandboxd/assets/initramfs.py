"""The initramfs: guest-init, the console's node, and the kernel's modules. Publishes `initramfs.cpio`."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

from sandboxd.assets import cpio, store
from sandboxd.assets.apt import Package
from sandboxd.assets.store import Bench, Recipe

CONSOLE = (5, 1)  # Linux, Documentation/admin-guide/devices.txt


def recipe(guest_init: Path) -> Recipe:
    def build(bench: Bench, _packages: Sequence[Package], out: Path) -> None:
        # The kernel unpacks archives that follow each other into one tree.
        modules = bench.made["kernel"].file("modules.cpio").read_bytes()
        (out / "initramfs.cpio").write_bytes(archive(guest_init.read_bytes()) + modules)

    return Recipe(
        name="initramfs", version=1, files=("initramfs.cpio",), resolve=lambda bench: (), build=build,
        sources=(store.file_digest(guest_init),), after=("kernel",),
    )


def archive(guest_init: bytes) -> bytes:
    return cpio.archive(
        [
            cpio.Entry("dev", stat.S_IFDIR | 0o755),
            cpio.Entry("dev/console", stat.S_IFCHR | 0o600, device=CONSOLE),
            cpio.Entry("init", stat.S_IFREG | 0o755, guest_init),
        ]
    )
