"""What fixtures of tests through the stand-ins have in common."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.firecracker_standin.standin import SHIM, Standin


@contextmanager
def enterable(prefix: str, above: str | Path) -> Iterator[Path]:
    """One that a VMM's uid may enter."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=above) as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@contextmanager
def programs(directory: Path) -> Iterator[Standin]:
    """Skips where they are not built. Nothing may have gone wrong in the companion."""
    need()
    with Standin(directory) as running:
        yield running
        assert running.log() == ""


def need() -> None:
    if not SHIM.is_file():
        pytest.skip("no build/firecracker-standin: make standins")
