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
        raise SetupError(f"no virtual machine can be confined on {machine}: x86_64 is needed") from None
