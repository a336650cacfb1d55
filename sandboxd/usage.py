"""What each sandbox uses, measured on the host: one sample every five seconds, an hour of them, in memory only.

In: the host's own accounts of a machine's processes (/proc) and of its end of the link. Out: samples. Nothing that a
guest or its VMM says is used. Counters go on from what the processes themselves have counted, so a restart of the
daemon loses samples and no bytes.

- Processor time is that of the VMM and of the process beside it, all their threads. Emulation may use more than the
  processors that were granted: a percentage ends at 100.
- Memory is what is resident: the guest's, which both processes map and which is counted once, and what each process has
  of its own (under emulation also the translated code, so it may exceed the limit, which is the guest's). Program text
  from files is left out: all sandboxes share it.
- Disk is what the VMM made the kernel fetch from a disk, and the pages of files it made dirty (`read_bytes` and
  `write_bytes`, proc_pid_io(5)): what comes from the page cache, as most of a shared image does, is not counted.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sandboxd.vm.machine import Program

K = TypeVar("K")

INTERVAL_S = 5
KEPT = 3600 // INTERVAL_S
_TICKS = os.sysconf("SC_CLK_TCK")
_ROW = struct.Struct("<dd6Q")


@dataclass(frozen=True, slots=True)
class Sample:
    """`at` is seconds since the epoch; bytes are counted from the sandbox's start, as the sandbox sees them."""

    at: float
    cpu_percent: float
    memory_bytes: int
    net_rx_bytes: int
    net_tx_bytes: int
    disk_read_bytes: int
    disk_write_bytes: int
    processes: int


@dataclass(frozen=True, slots=True)
class Reading:
    """A machine's processes at one moment: ticks of processor time by program, resident bytes, and the VMM's bytes
    from and to the disk."""

    ticks: dict[Program, int]
    memory_bytes: int
    read: dict[Program, int]
    written: dict[Program, int]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes to and from a guest, by the host's end of its link."""

    to_guest: int
    from_guest: int


class Meter:
    """The samples of one sandbox."""

    def __init__(self) -> None:
        self._rows = bytearray()
        self._cpu, self._read, self._written = _Count[Program](), _Count[Program](), _Count[Program]()
        self._rx, self._tx = _Count[str](), _Count[str]()
        self._before: tuple[float, int] | None = None

    def add(
        self, reading: Reading, traffic: Traffic | None, cpus: int, processes: int, at: float, monotonic: float
    ) -> None:
        """`cpus` are the granted ones; `monotonic` tells how long ago the sample before was taken."""
        ticks = self._cpu.now(reading.ticks)
        percent = 0.0
        if self._before is not None and monotonic > self._before[0]:
            busy_s = (ticks - self._before[1]) / _TICKS
            percent = min(100.0, 100 * busy_s / ((monotonic - self._before[0]) * cpus))
        self._before = monotonic, ticks
        self._rows += _ROW.pack(
            at, percent, reading.memory_bytes,
            self._rx.now({} if traffic is None else {"link": traffic.to_guest}),
            self._tx.now({} if traffic is None else {"link": traffic.from_guest}),
            self._read.now(reading.read), self._written.now(reading.written), processes,
        )  # fmt: skip
        del self._rows[: -KEPT * _ROW.size]

    def samples(self) -> list[Sample]:
        """Oldest first."""
        return [Sample(*row) for row in _ROW.iter_unpack(self._rows)]


@dataclass(slots=True)
class _Count(Generic[K]):
    """A sum over counters that may come, go, and start anew; it never falls."""

    total: int = 0
    last: dict[K, int] = field(default_factory=dict)

    def now(self, values: Mapping[K, int]) -> int:
        self.total += sum(max(0, value - self.last.get(key, 0)) for key, value in values.items())
        self.last.update(values)
        return self.total


def read(programs: tuple[Program, ...]) -> Reading | None:
    """`programs` begin with the VMM. None once one of them has ended. Blocking, for well under a millisecond."""
    ticks, private, shared = {}, 0, 0
    read: dict[Program, int] = {}
    written: dict[Program, int] = {}
    for program in programs:
        try:
            status = dict(_lines(_proc(program, "status")))
            own, mapped = status[b"RssAnon"] << 10, status[b"RssShmem"] << 10
            if program is programs[0]:
                io = dict(_lines(_proc(program, "io")))
                read[program], written[program] = io[b"read_bytes"], io[b"write_bytes"]
            # Last: if the pid is still this process's, it was while the others were read.
            started, used = _stat(_proc(program, "stat"))
        except (OSError, KeyError):
            return None     # it is gone, or a zombie without memory
        if started != program.start_ticks:
            return None
        ticks[program] = used
        private += own
        shared = max(shared, mapped)
    return Reading(ticks, private + shared, read, written)


def _proc(program: Program, name: str) -> bytes:
    fd = os.open(f"/proc/{program.pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 8192)
    finally:
        os.close(fd)


def _stat(text: bytes) -> tuple[int, int]:
    """Fields 22, and 14 and 15 together, of /proc/<pid>/stat. The second is a name and may hold anything."""
    fields = text.rpartition(b")")[2].split()
    return int(fields[19]), int(fields[11]) + int(fields[12])


def _lines(text: bytes) -> Iterator[tuple[bytes, int]]:
    """`Name: number` and, in /proc/<pid>/status, kB behind it; other lines are left out."""
    for line in text.splitlines():
        name, _, rest = line.partition(b":")
        words = rest.split()
        if words and words[0].isdigit():
            yield name, int(words[0])
