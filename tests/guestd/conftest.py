"""One stand-in machine for the tests of guestd that leave nothing behind in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_vmm import cgroup_hierarchy
from tests.guestd.peer import REPOSITORY, Guest, machine


def _missing() -> str:
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    if not (REPOSITORY / "build" / "guest-exec").exists():
        return "build/guest-exec is not built: run make"
    return ""


@pytest.fixture(scope="session")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    if why := _missing():
        pytest.skip(why)
    with machine(tmp_path_factory.mktemp("machine"), env={"CONFIGURED": "yes", "HOME": "/sandbox/home"}) as running:
        yield running


@pytest.fixture
def fresh_guest(tmp_path: Path) -> Iterator[Guest]:
    """A machine of the test's own; its workspace is empty."""
    if why := _missing():
        pytest.skip(why)
    with machine(tmp_path) as running:
        yield running


@pytest.fixture
def needs_cgroups() -> None:
    if os.geteuid() != 0 or cgroup_hierarchy() is None:
        pytest.skip("no version 2 cgroup hierarchy that this user may make groups in")
