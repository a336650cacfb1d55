"""The end of a process is seen, also by who has no descriptor left to wait with."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack

import anyio
import pytest

from sandboxd.vm import watch
from tests import descriptors


@pytest.mark.parametrize("left", [0, 1, 2])
def test_any_number_see_the_end_of_either_process(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    before = os.listdir("/proc/self/fd")
    seen = []

    async def wait(pidfds: list[int]) -> None:
        with ExitStack() as held:
            with descriptors.few_left(left):
                waits = watch.ends(held, pidfds)
            await watch.first(*waits)
            seen.append(pidfds)

    async def main(pidfds: list[int], end: subprocess.Popen[bytes]) -> None:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(wait, pidfds)
                await anyio.wait_all_tasks_blocked()
                assert seen == []
                end.kill()

    with subprocess.Popen(["sleep", "60"]) as one, subprocess.Popen(["sleep", "60"]) as other, ExitStack() as held:
        pidfds = [os.pidfd_open(child.pid) for child in (one, other)]
        for pidfd in pidfds:
            held.callback(os.close, pidfd)
        try:
            anyio.run(main, pidfds, other)
            assert one.poll() is None
        finally:
            one.kill()
            other.kill()
    assert seen == [pidfds, pidfds]
    assert os.listdir("/proc/self/fd") == before
