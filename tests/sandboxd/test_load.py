"""What a daemon holds after much work: memory, descriptors, threads, files. How fast it is, is measured in bench/."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import SOAK, counts
from tests.sandboxd.loaded import loaded
from tests.sandboxd.rig import Rig

S = "/v1/sandboxes"


@dataclass(frozen=True)
class Held:
    descriptors: int
    threads: int
    rss_kib: int


def held(rig: Rig) -> Held:
    assert rig.process is not None
    proc = Path(f"/proc/{rig.process.pid}")
    return Held(len(os.listdir(proc / "fd")), len(os.listdir(proc / "task")), rig.rss_kib())


def settled(rig: Rig, before: Held, more_descriptors: int) -> Held:
    """As little as it comes to within a while."""
    deadline = time.monotonic() + 20
    while (now := held(rig)).descriptors > before.descriptors + more_descriptors and time.monotonic() < deadline:
        time.sleep(0.1)
    return now


def test_memory_stays_flat_under_lists_attaches_and_tunnels(place: Path) -> None:
    with loaded(place) as running:
        before = held(running.rig)
        with running.busy():
            running.figures(2)
            warm = held(running.rig)
            for _ in range(counts(2, 60)):
                running.figures(2 if not SOAK else 10)
            after = held(running.rig)
        assert after.rss_kib - warm.rss_kib < 8 << 10, (before, warm, after)
        assert settled(running.rig, before, 5).descriptors <= before.descriptors + 5
        # Its worker threads are few and kept.
        assert held(running.rig).threads <= before.threads + 10


def test_creates_and_deletes_leave_nothing(own: Rig) -> None:
    def cycle(number: int) -> None:
        box = own.create(name=f"box-{number}")
        assert own.run(box, "echo", "x").stdout == b"x\n"
        own.start_process(box, "cat")
        assert own.call("DELETE", f"{S}/{box}").status == 204

    for number in range(6):
        cycle(number)
    before = settled(own, held(own), 0)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cycle, range(100, 100 + counts(40, 1000))))
    after = settled(own, before, 0)
    assert after.descriptors <= before.descriptors, (before, after)
    assert after.threads <= before.threads + 10, (before, after)
    # Ended sandboxes are remembered, the hundred newest of them.
    assert after.rss_kib - before.rss_kib < 16 << 10, (before, after)
    assert os.listdir(own.state / "sandboxes") == []
    assert len(os.listdir(own.state / "output")) <= 100
