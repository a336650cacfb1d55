"""What the service manager is told: through a real socket, by the daemon itself."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandboxd.rig import Rig


@pytest.fixture(params=["a path", "an abstract name"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        if request.param == "a path":
            sock.bind(str(tmp_path / "notify"))
            name = str(tmp_path / "notify")
        else:
            sock.bind(f"\0{tmp_path.name}-{id(sock)}")
            name = f"@{tmp_path.name}-{id(sock)}"
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        sock.settimeout(20)
        yield sock


def until(manager: socket.socket, line: str) -> list[str]:
    """What was said up to the datagram with this line."""
    said: list[str] = []
    while line not in said:
        said += manager.recv(4096).decode().split("\n")
    return said


def test_the_manager_hears_of_progress_readiness_and_the_end(short_tmp: Path, manager: socket.socket) -> None:
    directory = short_tmp / f"notify-{time.monotonic_ns()}"
    directory.mkdir()
    with Rig(directory):
        said = until(manager, "READY=1")
        assert "STATUS=image: 42 % 12 of 29 MiB" in said, "progress of building the images"
        assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in said), "a long build is no hanging one"
    until(manager, "STOPPING=1")


@pytest.mark.parametrize("name", ["", "/nowhere/at/all", "not-an-address", "@"])
def test_a_manager_that_is_not_there_stops_nothing(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    directory = short_tmp / f"notify-{len(name)}"
    directory.mkdir()
    with Rig(directory) as rig:
        assert rig.call("GET", "/v1/health").status == 200
