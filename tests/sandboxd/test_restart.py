"""What a restart does not take for gone."""

from __future__ import annotations

import errno
from pathlib import Path

import anyio
import pytest

from sandboxd import restart
from sandboxd.audit import Audit
from sandboxd.errors import SandboxError, SetupError
from sandboxd.lifecycle import State
from sandboxd.places import Places
from sandboxd.store import Mount, Network, SandboxRecord, Store
from sandboxd.vm import processes
from sandboxd.vm.machine import Machine, MachineSpec
from sandboxd.vm.processes import Record
from tests import descriptors


class Blind:
    """A backend that has no descriptor left when it looks, at machines or for those of nobody."""

    name, silent = "blind", False

    def __init__(self, sweeps_only: bool) -> None:
        self._sweeps_only = sweeps_only

    async def start(self, spec: MachineSpec) -> Machine:
        raise NotImplementedError

    async def adopt(self, directory: Path, sandbox_id: str) -> Machine | None:
        with descriptors.few_left(1 if self._sweeps_only else 0):
            processes.read_record(directory)
        return Running()

    def sweep(self, sandboxes: Path, known: frozenset[str]) -> None:
        with descriptors.few_left(0):
            processes.end_marked("blind", lambda id: True, ())

    async def recover(self, volume: Path, sandbox_id: str, uid: int | None) -> bool:
        raise NotImplementedError


class Running:
    """As little of a machine as a restart looks at."""

    spec_id, vsock_path, programs = "sbx_1", Path("/none"), ()

    async def console_tail(self, limit_bytes: int = 8192) -> bytes:
        raise NotImplementedError

    async def wait_exit(self) -> None:
        raise NotImplementedError

    async def terminate(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("sweeps_only", [False, True], ids=["its record", "all processes"])
def test_what_cannot_be_looked_at_stops_the_start_and_no_machine(tmp_path: Path, sweeps_only: bool) -> None:
    store = Store(tmp_path / "state.sqlite")
    record = SandboxRecord("sbx_1", "", State.RUNNING, "i", 1, 1, 2, (), Network("none"), 1.0, 3)
    store.put(record)
    places = Places(tmp_path)
    places.machine("sbx_1").mkdir(parents=True)
    places.scratch("sbx_1").touch()
    processes.write_record(places.machine("sbx_1"), Record("sbx_1", "/sandboxd/i/sbx_1", ()))
    with pytest.raises(SetupError) as caught:
        anyio.run(restart.adopt, places, store, Blind(sweeps_only), Audit(None))
    assert "Too many open files (raise LimitNOFILE, or `ulimit -n`); they are left running" in str(caught.value)
    cause = caught.value.__cause__
    assert isinstance(cause, OSError) and cause.errno == errno.EMFILE
    assert store.sandboxes()[0] == [record]
    assert places.scratch("sbx_1").exists() and not places.disks.exists()
    store.close()


class Stuck(Running):
    """A machine whose processes the kernel does not let go."""

    async def terminate(self) -> None:
        raise SandboxError("sbx_1: a process did not end in 5 s")


class Holds(Blind):
    """A backend with two machines, of which one does not end."""

    def __init__(self) -> None:
        super().__init__(sweeps_only=False)

    async def adopt(self, directory: Path, sandbox_id: str) -> Machine | None:
        return Stuck() if sandbox_id == "sbx_1" else Running()

    def sweep(self, sandboxes: Path, known: frozenset[str]) -> None:
        assert known == {"sbx_2"}


def test_a_machine_that_does_not_end_keeps_no_other_sandbox_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def quiesce(*_: object) -> None:
        return

    monkeypatch.setattr(restart, "quiesce", quiesce)
    store = Store(tmp_path / "state.sqlite")
    mounts = (Mount("cache", "/cache", False),)
    ended = SandboxRecord(
        "sbx_1", "", State.TERMINATED, "i", 1, 1, 2, (), Network("none"), 1.0, 3, ended_because="asked", volumes=mounts
    )
    runs = SandboxRecord("sbx_2", "", State.RUNNING, "i", 1, 1, 2, (), Network("none"), 1.0, 3)
    for record in (ended, runs):
        store.put(record)
    found, _ = anyio.run(restart.adopt, Places(tmp_path), store, Holds(), Audit(None))
    assert [(one.record.id, one.machine is None) for one in found] == [("sbx_1", True), ("sbx_2", False)]
    assert "sbx_1: a process did not end in 5 s" in caplog.text
    store.close()


class Mutual(Holds):
    """A backend that takes no machine back before it was asked for the next one too."""

    def __init__(self) -> None:
        super().__init__()
        self._both = anyio.Event()

    async def adopt(self, directory: Path, sandbox_id: str) -> Machine | None:
        if sandbox_id == "sbx_2":
            self._both.set()
        await self._both.wait()
        return Running()

    def sweep(self, sandboxes: Path, known: frozenset[str]) -> None:
        assert known == {"sbx_1", "sbx_2"}


def test_a_machine_that_gives_no_answer_yet_does_not_keep_the_next_waiting(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.sqlite")
    for id in ("sbx_1", "sbx_2"):
        store.put(SandboxRecord(id, "", State.RUNNING, "i", 1, 1, 2, (), Network("none"), 1.0, 3))

    async def main() -> None:
        with anyio.fail_after(20):
            found, _ = await restart.adopt(Places(tmp_path), store, Mutual(), Audit(None))
        assert [(one.record.id, one.machine is None) for one in found] == [("sbx_1", False), ("sbx_2", False)]

    anyio.run(main)
    store.close()
