"""The API under load: 200 sandboxes' worth of records, 1,000 lists a second from 32 clients, while 64 clients follow
output and 16 talk through tunnels. Its guests are stand-ins, so that it is the daemon that is measured.

`list_p99` is the loaded p99 beside that of a single client on the same daemon at rest; `list_p99_wanted` the same
figure beside the 50 ms that are wanted.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.conftest import SHORT, alternate
from tests import load
from tests.sandboxd.loaded import Loaded, loaded

SECONDS = 3.0 if SHORT else 10.0
ROUNDS = 1 if SHORT else 3
WANTED_S = 0.05


@pytest.fixture(scope="module")
def daemon_at_work() -> Iterator[Loaded]:
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory, loaded(Path(directory)) as running:
        yield running


@pytest.fixture(scope="module")
def took() -> list[float]:
    """The loaded figures, in seconds, for whoever compares them next."""
    return []


def test_list_p99(benchmark: Any, daemon_at_work: Loaded, took: list[float]) -> None:
    def ours() -> float:
        with daemon_at_work.busy():
            took.append(daemon_at_work.figures(SECONDS).p99_s)
        return took[-1]

    def peer() -> float:
        return load.measured(daemon_at_work.rig.socket, clients=1, per_second=50, seconds=SECONDS).p99_s

    alternate(benchmark, ours, peer, rounds=ROUNDS, peer_name="the p99 of one client at 50 a second, nothing else")


def test_list_p99_wanted(benchmark: Any, took: list[float]) -> None:
    alternate(
        benchmark, lambda: statistics.median(took), lambda: WANTED_S, rounds=1,
        peer_name="50 ms, the p99 that is wanted under the same load",
    )  # fmt: skip
