"""This machine as gateways and operators see it: its name, what it offers, what of that is free, whether it takes new
sandboxes, and how creates went.

In: checked flags, the shapes of sandboxes. Out: numbers and ids. What sandboxes are promised may be more than there
is: nothing here refuses one for it. Cordoned is a state of this run of the daemon, not kept.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sandboxd.errors import ApiError, Unavailable

BUCKETS_S = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0)
"""Of the histogram of creates: from a machine that waited to one that boots on a busy host without KVM."""


@dataclass(frozen=True, slots=True)
class Resources:
    cpus: float
    memory_mb: int
    disk_mb: int


@dataclass(slots=True)
class Creates:
    """How creates ended: `ok`, an error's code, or `abandoned` by the client. Times are of those that succeeded;
    `buckets` counts each in the first of BUCKETS_S that holds it, and in one more that holds the rest."""

    ended: Counter[str] = field(default_factory=Counter)
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        started = time.monotonic()
        status = "abandoned"
        try:
            yield
            status = "ok"
            self.took(time.monotonic() - started)
        except ApiError as fault:
            status = fault.code
            raise
        except Exception:
            status = "internal"
            raise
        finally:
            self.ended[status] += 1

    def took(self, seconds: float) -> None:
        self.sum_s += seconds
        self.buckets[sum(seconds > most for most in BUCKETS_S)] += 1


class Node:
    """One per daemon. `id` is empty where none was given."""

    def __init__(self, id: str, version: str, labels: Mapping[str, str], capacity: Resources) -> None:
        self.id, self.version, self.labels, self.capacity = id, version, dict(labels), capacity
        self.cordoned = False
        self.creates = Creates()

    def new_sandbox_id(self) -> str:
        return "_".join(part for part in ("sbx", self.id, secrets.token_hex(8)) if part)

    def require_open(self) -> None:
        if self.cordoned:
            raise Unavailable("this node is cordoned: it takes no new sandboxes")

    def free(self, used: Iterable[Resources]) -> Resources:
        """What is left beside `used`, never below 0."""
        held = list(used)
        capacity = self.capacity
        return Resources(
            max(0.0, capacity.cpus - sum(one.cpus for one in held)),
            max(0, capacity.memory_mb - sum(one.memory_mb for one in held)),
            max(0, capacity.disk_mb - sum(one.disk_mb for one in held)),
        )


def capacity(given: tuple[float | None, int | None, int | None], state_dir: Path) -> Resources:
    """What the flags say of processors, memory and disk; where they say nothing, all that this host has."""
    cpus, memory_mb, disk_mb = given
    disk = os.statvfs(state_dir)
    return Resources(
        len(os.sched_getaffinity(0)) if cpus is None else cpus,
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20 if memory_mb is None else memory_mb,
        disk.f_blocks * disk.f_frsize >> 20 if disk_mb is None else disk_mb,
    )
