"""Processors that guests and their VMMs run on. ARM64 has not been run."""

from __future__ import annotations

import platform
from enum import Enum

from sandboxd.errors import SetupError


class Arch(Enum):
    """By what `uname -m` says."""

    X86_64 = "x86_64"
    ARM64 = "aarch64"


def here() -> Arch:
    """This machine's. Raises SetupError for any other."""
    machine = platform.machine()
    try:
        return Arch(machine)
    except ValueError:
        raise SetupError(f"nothing can be confined on {machine}: there is no filter of system calls for it") from None


def require() -> None:
    """Raises SetupError where the guests' kernel and images, and QEMU's machine, are another processor's."""
    if (machine := platform.machine()) != Arch.X86_64.value:
        raise SetupError(
            f"sandboxd's kernel, images and virtual machines are for x86_64, and this machine is {machine}; "
            "docs/firecracker.md says what is missing for arm64"
        )
