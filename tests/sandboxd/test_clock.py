"""A host whose clock is set while sandboxes run, and what a restart does to the clocks of a sandbox."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sandboxd.rig import Rig
from tests.sandboxd.test_life import S, until

SOURCE = Path(__file__).with_name("wall_clock.c")
DAY_S = 86_400


@pytest.fixture
def clocked(place: Path) -> Iterator[tuple[Rig, Callable[[int], None]]]:
    """A daemon whose wall clock is set by the second value: seconds from the real one. No other clock of it is."""
    library, file = place / "wall_clock.so", place / "clock"
    subprocess.run(["cc", "-std=c11", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(library)], check=True)

    def put(seconds: int) -> None:
        fresh = file.with_suffix(".new")
        fresh.write_text(f"{seconds}\n")
        fresh.rename(file)

    put(0)
    rig = Rig(place)
    rig.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK": str(file)}
    with rig:
        yield rig, put


def test_a_clock_that_is_set_ends_no_sandbox_and_keeps_none_for_longer(
    clocked: tuple[Rig, Callable[[int], None]]
) -> None:
    rig, put = clocked
    long = rig.create(name="long", lifetime_secs=3600, idle_timeout_secs=600)
    process = rig.start_process(long, "sh", "-c", "while read line; do echo $line; done")

    def states() -> dict[str, str]:
        return {one["name"]: one["state"] for one in rig.call("GET", S).json["sandboxes"]}

    for jump in (DAY_S, -DAY_S, 400 * DAY_S):
        put(jump)
        short = rig.create(name="short", lifetime_secs=4)
        made = rig.call("GET", f"{S}/{short}").json["created_at"]
        shown = time.mktime(time.strptime(made[:19], "%Y-%m-%dT%H:%M:%S")) - time.timezone
        assert abs(shown - time.time() - jump) < 600, "the daemon does not see this clock"
        assert rig.run("long", "echo", "here").stdout == b"here\n"
        assert rig.call("POST", f"{process}/stdin", b"line\n").status == 204
        until("the short one ends", lambda: states()["short"] == "terminated", 30)
        assert states()["long"] == "running"
        assert rig.call("DELETE", f"{S}/{short}").status in (204, 404)
    rig.kill()
    put(-400 * DAY_S)
    rig.start()
    time.sleep(2.5)
    assert states()["long"] == "running"
    assert rig.call("POST", f"{process}/stdin?close=1", b"").status == 204
    assert rig.output(process) == (b"line\n" * 3, b"", 0)


def test_a_restart_begins_the_idle_time_anew_and_not_the_lifetime(own: Rig) -> None:
    own.create(name="idle", idle_timeout_secs=10)
    own.create(name="mortal", lifetime_secs=16)
    made = time.monotonic()

    def states() -> dict[str, str]:
        return {one["name"]: one["state"] for one in own.call("GET", S).json["sandboxes"]}

    time.sleep(2)
    own.stop()
    # Most of both would be over by then.
    time.sleep(max(0.0, made + 8 - time.monotonic()))
    own.start()
    back = time.monotonic()
    assert states()["idle"] == "running", "its idle time went on while nobody could use it"
    until("the lifetime ends", lambda: states()["mortal"] == "terminated", 30)
    assert time.monotonic() - back < 16, "its lifetime began anew"
    until("the idle time ends", lambda: states()["idle"] == "terminated", 30)


def test_stopped_and_started_again_everything_goes_on(own: Rig) -> None:
    """As after a kill; but nobody is cut off in the middle."""
    box = own.create(name="box")
    waiting = own.start_process(box, "sh", "-c", "echo start; read line; echo $line; exit 5")
    ends = own.start_process(box, "sh", "-c", "echo one; sleep 1.5; echo two; exit 9")
    until("it has begun", lambda: own.call("GET", ends).json["state"] == "running")
    own.stop()
    time.sleep(2)
    own.start()
    assert own.output(ends) == (b"one\ntwo\n", b"", 9), "it ended while nobody was there"
    with own.attach(waiting) as client:
        client.send(b"i", b"after\n")
        assert client.rest() == (b"start\nafter\n", b"", 5)
    pids = [one["pid"] for one in own.call("GET", f"{S}/{box}/processes").json["processes"]]
    assert pids == [1, 2]
    log = own.log.read_text()
    assert log.count(f"{box}: taken back, ") == 1 and f"{box}: taken back, 2 processes attached again, 0 lost" in log
