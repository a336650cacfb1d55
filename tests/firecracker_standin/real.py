"""The real programs in the place of the stand-ins, for tests that can do with either.

    with programs(directory) as standin: …

`make check-kvm` names them in the environment, on a machine whose KVM works; elsewhere it is the stand-ins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.firecracker_standin.standin import SHIM, Standin

FIRECRACKER, JAILER = "SANDBOX_TEST_FIRECRACKER", "SANDBOX_TEST_JAILER"


class Real(Standin):
    """What tests use of the stand-ins, as far as the real ones have it. A test of a fault on demand skips."""

    def __init__(self, directory: Path, firecracker: Path, jailer: Path) -> None:
        super().__init__(directory)
        self.firecracker, self.jailer = firecracker, jailer

    def __enter__(self) -> Real:
        return self

    def stop(self) -> None:
        pass

    def be(self, version: str) -> None:
        pytest.skip("the real Firecracker has the version it has")

    def fail(self, *faults: dict[str, Any]) -> None:
        if faults:
            pytest.skip("the real Firecracker does not fail on demand")

    def programs(self) -> Sequence[int]:
        pytest.skip("the real Firecracker runs its guests itself")

    def log(self) -> str:
        return ""


@contextmanager
def programs(directory: Path) -> Iterator[Standin]:
    """Skips where there are neither."""
    firecracker, jailer = os.environ.get(FIRECRACKER), os.environ.get(JAILER)
    if firecracker and jailer:
        yield Real(directory, Path(firecracker), Path(jailer))
        return
    if not SHIM.is_file():
        pytest.skip("no build/firecracker-standin: make standins")
    with Standin(directory) as standin:
        yield standin
