"""What every benchmark needs: a daemon of its own, one VM to measure in, and a way to record ours beside a peer."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sandboxd.client import Create, Sandbox
from tests.daemon import Daemon

SHORT = os.environ.get("BENCH_SHORT") == "1"


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory, Daemon(Path(directory)) as running:
        yield running


@pytest.fixture(scope="session")
def vm(daemon: Daemon) -> Sandbox:
    return daemon.client.create(Create(name="bench", memory_mb=1024))


def alternate(
    benchmark: Any, ours: Callable[[], float | None], peer: Callable[[], float], *,
    rounds: int, peer_name: str, better: str = "lower", unit: Callable[[float], float] = lambda seconds: seconds,
) -> None:  # fmt: skip
    """Ours and the peer by turns, `rounds` times; medians and their ratio into the report.

    `ours` is timed here unless it returns its own figure in seconds; `peer` returns seconds. `unit` turns the seconds
    of both into what is reported (a rate, for instance).
    """
    figures: list[float] = []
    peers: list[float] = []

    def before() -> None:
        peers.append(peer())

    def timed() -> None:
        start = time.perf_counter()
        own = ours()
        figures.append(time.perf_counter() - start if own is None else own)

    benchmark.pedantic(timed, setup=before, rounds=rounds, iterations=1)
    mine, other = unit(statistics.median(figures)), unit(statistics.median(peers))
    benchmark.extra_info |= {
        "ours": mine, "peer": other, "peer_name": peer_name, "ratio": mine / other, "better": better, "rounds": rounds
    }
