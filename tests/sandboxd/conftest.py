"""One stand-in daemon and one sandbox for the tests that leave nothing behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandboxd.fake_daemon import ROOT
from tests.sandboxd.rig import Rig, Slow


def why_not() -> str:
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    if not (ROOT / "build" / "guest-exec").exists():
        return "build/guest-exec is missing: make programs"
    return ""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="dmn-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def own(place: Path) -> Iterator[Rig]:
    """A daemon for one test."""
    if reason := why_not():
        pytest.skip(reason)
    with Rig(place) as rig:
        yield rig


@pytest.fixture(scope="session")
def rig() -> Iterator[Rig]:
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="dmn-", dir="/tmp") as name, Rig(Path(name)) as running:
        running.slow = Slow(running)
        yield running


@pytest.fixture(scope="session")
def _second() -> Iterator[Rig]:
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="dmn-", dir="/tmp") as name, Rig(Path(name)) as running:
        running.create(name="warm")
        running.call("DELETE", "/v1/sandboxes/warm")
        yield running


@pytest.fixture
def other(_second: Rig) -> Iterator[Rig]:
    """A daemon that tests steer by its knobs and empty again."""
    yield _second
    for knob in _second.knobs.iterdir():
        knob.unlink()
    for sandbox in _second.call("GET", "/v1/sandboxes").json["sandboxes"]:
        if sandbox["state"] != "terminated":
            _second.call("DELETE", f"/v1/sandboxes/{sandbox['id']}")


@pytest.fixture(scope="session")
def box(rig: Rig) -> str:
    """A sandbox every test may use."""
    return rig.create(name="box", env={"API_TOKEN": "s3cr3t-CANARY"})
