"""One command over the API, beside the same command spawned and waited for inside the guest."""

from __future__ import annotations

import statistics
import time
from typing import Any

from bench.conftest import SHORT, alternate
from sandboxd.client import Sandbox
from tests.daemon import Daemon

# `true` by posix_spawn and waitpid, the cheapest start there is; the median of a batch, in seconds.
INSIDE = """
import os, statistics, time
took = []
for _ in range({batch}):
    start = time.perf_counter()
    os.waitpid(os.posix_spawn("/bin/true", ["true"], os.environ), 0)
    took.append(time.perf_counter() - start)
print(statistics.median(took))
"""


def test_exec_roundtrip(benchmark: Any, daemon: Daemon, vm: Sandbox) -> None:
    batch = 20

    def ours() -> float:
        took = []
        for _ in range(batch):
            start = time.perf_counter()
            assert daemon.client.run(vm.id, ["true"]).exit_code == 0
            took.append(time.perf_counter() - start)
        return statistics.median(took)

    def peer() -> float:
        return float(daemon.client.run(vm.id, ["python3", "-c", INSIDE.format(batch=batch)]).stdout)

    alternate(
        benchmark, ours, peer, rounds=3 if SHORT else 15,
        peer_name="posix_spawn and waitpid of `true` inside the guest",
    )  # fmt: skip
