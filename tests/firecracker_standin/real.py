"""The real programs in the place of the stand-ins, for tests that can do with either.

    with programs(directory) as standin: …

`make check-kvm` names them in the environment, on a machine whose KVM works; elsewhere it is the stand-ins.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandboxd.vm.firecracker_versions import Version, parse
from tests.daemon import assets_dir
from tests.firecracker_standin import fixtures
from tests.firecracker_standin.standin import Standin

FIRECRACKER, JAILER = "SANDBOX_TEST_FIRECRACKER", "SANDBOX_TEST_JAILER"


class Real(Standin):
    """What tests use of the stand-ins, as far as the real ones have it. A test of a fault on demand skips."""

    def __init__(self, directory: Path, firecracker: Path, jailer: Path) -> None:
        super().__init__(directory)
        self._real = {self.firecracker: firecracker, self.jailer: jailer}

    def __enter__(self) -> Real:
        self.directory.mkdir(exist_ok=True)
        self.directory.chmod(0o755)
        for path, real in self._real.items():
            shutil.copy(real, path)
        self.bwrap.write_text('#!/bin/sh\nexec bwrap "$@"\n')
        self.bwrap.chmod(0o755)
        return self

    def stop(self) -> None:
        pass

    def be(self, version: str) -> None:
        pytest.skip("the real Firecracker has the version it has")

    def fail(self, *faults: dict[str, Any]) -> None:
        if faults:
            pytest.skip("the real Firecracker does not fail on demand")

    def programs(self) -> Sequence[int]:
        return []  # it runs its guests itself

    def log(self) -> str:
        return ""


def given() -> bool:
    return bool(os.environ.get(FIRECRACKER) and os.environ.get(JAILER))


def version(standin: Standin) -> Version:
    """Of what is used, whichever it is."""
    said = subprocess.run([standin.firecracker, "--version"], capture_output=True, text=True, timeout=30, check=True)
    return parse(said.stdout)


def place() -> Path:
    """Where machines are made of the images themselves: a jail holds further names of them, and these have to be on one
    file system."""
    beside = assets_dir().parent
    return beside if os.access(beside, os.W_OK) else Path(tempfile.gettempdir())


@contextmanager
def programs(directory: Path) -> Iterator[Standin]:
    """Skips where there are neither."""
    if given():
        with Real(directory, Path(os.environ[FIRECRACKER]), Path(os.environ[JAILER])) as real:
            yield real
            assert real.log() == ""
        return
    with fixtures.programs(directory) as standin:
        yield standin
