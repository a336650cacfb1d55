"""What a sandbox uses, from the host's accounts: the reading of a real process, and the sums over readings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd.usage import KEPT, Meter, Reading, Traffic, read
from sandboxd.vm.machine import Program
from sandboxd.vm.processes import start_ticks

ONE, OTHER = Program(10, 1), Program(11, 2)
HZ = os.sysconf("SC_CLK_TCK")
MIB = 1 << 20
BUSY = """
import mmap, os, sys, time
own = bytearray(os.urandom(1 << 20)) * 32
shared = mmap.mmap(-1, 16 << 20)
shared.write(b"x" * (16 << 20))
with open(sys.argv[1], "wb") as file:
    file.write(own[: 4 << 20])
    os.fsync(file.fileno())
while time.process_time() < 0.3:
    pass
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has used 0.3 s, 32 MiB of its own, 16 MiB of shared memory, and written 4 MiB."""
    command = [sys.executable, "-I", "-S", "-c", BUSY, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"done\n"
        yield process
        process.kill()


def program(process: subprocess.Popen[bytes]) -> Program:
    return Program(process.pid, start_ticks(process.pid))


def test_a_process_is_read(busy: subprocess.Popen[bytes]) -> None:
    its = program(busy)
    reading = read((its,))
    assert reading is not None
    assert 0.25 * HZ <= reading.ticks[its] < 60 * HZ
    assert 48 * MIB <= reading.memory_bytes < 100 * MIB
    assert reading.read[its] >= 0 and reading.written[its] >= 0


def test_memory_that_two_processes_share_counts_once_and_only_the_first_ones_disk(
    busy: subprocess.Popen[bytes],
) -> None:
    its, own = program(busy), Program(os.getpid(), start_ticks(os.getpid()))
    alone, both = read((its,)), read((its, own))
    assert alone is not None and both is not None
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    private, shared = (int(status[key].split()[0]) << 10 for key in ("RssAnon", "RssShmem"))
    expected = alone.memory_bytes + private + max(0, shared - 16 * MIB)
    assert abs(both.memory_bytes - expected) < 4 * MIB
    assert both.read.keys() == both.written.keys() == {its} and both.ticks.keys() == {its, own}


def test_a_process_that_ended_or_is_another_by_now_is_not_read(busy: subprocess.Popen[bytes]) -> None:
    its = program(busy)
    assert read((Program(its.pid, its.start_ticks + 1),)) is None, "the pid is another's"
    os.kill(its.pid, 9)
    os.waitid(os.P_PID, its.pid, os.WEXITED | os.WNOWAIT)
    assert read((its,)) is None, "a zombie"
    busy.wait()
    assert read((its,)) is None, "nobody"


def reading(ticks: int, written: int = 0, of: Program = ONE, memory: int = 5) -> Reading:
    return Reading({of: ticks}, memory, {of: 0}, {of: written})


def test_percentages_are_of_the_granted_processors_since_the_sample_before() -> None:
    meter = Meter()
    for at, ticks in enumerate((1000, 1000 + 5 * HZ, 1000 + 15 * HZ, 1000 + 15 * HZ, 9000 + 90 * HZ)):
        meter.add(reading(ticks), None, 2, at, float(at), 100 + 5.0 * at)
    samples = meter.samples()
    assert [one.cpu_percent for one in samples] == [0, 50, 100, 0, 100], "the first is 0; emulation may use more"
    assert [one.at for one in samples] == [0, 1, 2, 3, 4] and [one.processes for one in samples] == [0, 1, 2, 3, 4]


def test_a_clock_that_is_set_back_changes_no_percentage() -> None:
    meter = Meter()
    meter.add(reading(0), None, 1, 0, 1000.0, 5.0)
    meter.add(reading(HZ), None, 1, 0, 10.0, 10.0)
    meter.add(reading(2 * HZ), None, 1, 0, 10.0, 10.0)
    assert [one.cpu_percent for one in meter.samples()] == [0, 20, 0], "nor does no time at all"


def test_counters_begin_with_what_the_processes_have_counted_and_never_fall() -> None:
    meter = Meter()
    seen = [
        (reading(1, 1000), Traffic(70, 7)),
        (reading(1, 3000), Traffic(80, 8)),
        (reading(1, 500, OTHER), Traffic(5, 9)),     # another VMM, and a link made anew
        (reading(1, 700, OTHER), None),              # a link that cannot be counted now
        (reading(1, 700, OTHER), Traffic(15, 10)),
    ]  # fmt: skip
    for at, (each, traffic) in enumerate(seen):
        meter.add(each, traffic, 1, 0, float(at), float(at))
    samples = meter.samples()
    assert [one.disk_write_bytes for one in samples] == [1000, 3000, 3500, 3700, 3700]
    assert [one.net_rx_bytes for one in samples] == [70, 80, 80, 80, 90]
    assert [one.net_tx_bytes for one in samples] == [7, 8, 9, 9, 10]


def test_the_newest_hour_is_kept() -> None:
    meter = Meter()
    for at in range(KEPT + 7):
        meter.add(reading(0), None, 1, 0, float(at), float(at))
    assert KEPT == 720 and [one.at for one in meter.samples()] == list(range(7, KEPT + 7))
