"""Machines through the Firecracker backend, with the stand-ins: started, adopted, ended, and what remains of each."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from sandboxd.errors import BootFailed
from sandboxd.vm import cgroups, firecracker, firecracker_machine, jail, jailer
from sandboxd.vm.firecracker import Arch
from sandboxd.vm.firecracker_machine import Tools
from sandboxd.vm.firecracker_versions import parse
from sandboxd.vm.machine import Drive, MachineSpec
from tests.firecracker_standin.standin import SHIM, Standin

FIRST_UID = 979_300
INSTANCE = f"f{os.getpid()}"
VERSION = parse("Firecracker v1.16.1")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the jailer needs root")


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="fcm-", dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def standin(top: Path) -> Iterator[Standin]:
    if not SHIM.is_file():
        pytest.skip("no build/firecracker-standin: make standins")
    with Standin(top / "fc") as running:
        yield running
        assert running.log() == ""


@pytest.fixture(scope="module")
def tools(standin: Standin) -> Iterator[Tools]:
    found = jail.find_tools(root=True)
    hierarchy = cgroups.find()
    yield Tools(
        jailer.Tools(standin.firecracker, standin.jailer, found), jail.program(standin.firecracker), VERSION,
        Arch.X86_64, INSTANCE, 4096, hierarchy,
    )  # fmt: skip
    assert hierarchy.ids(INSTANCE) == set()


@pytest.fixture
def spec(top: Path, request: pytest.FixtureRequest) -> Iterator[MachineSpec]:
    """With files of no meaning, for what never boots. Afterwards nothing but its disk is left of it."""
    directory = top / "box"
    directory.mkdir(mode=0o700)
    for name in ("kernel", "initramfs", "image", "scratch"):
        (directory / name).write_bytes(bytes(1 << 20))
    drives = (Drive(directory / "image", True), Drive(directory / "scratch", False))
    own = directory / "own"
    own.mkdir(mode=0o700)
    yield MachineSpec("box_1", 1, 256, directory / "kernel", directory / "initramfs", drives, own, FIRST_UID)
    assert os.listdir(own) == []
    assert (directory / "scratch").stat().st_uid == 0
    shutil.rmtree(directory)


def failed(spec: MachineSpec, tools: Tools) -> str:
    with pytest.raises(BootFailed) as caught:
        anyio.run(firecracker_machine.start, spec, tools)
    return str(caught.value)


CALLS = [request.step for request in firecracker.requests(
    MachineSpec("x", 1, 256, Path("k"), Path("i"), (Drive(Path("a"), True), Drive(Path("b"), False)), Path("d"), 1),
    VERSION, Arch.X86_64, None,
)]  # fmt: skip


@pytest.mark.parametrize("fault", ["refuse", "die", "garbage", "hang", "headers"])
@pytest.mark.parametrize("step", CALLS)
def test_a_fault_at_any_call_ends_it_all_and_names_the_call(
    spec: MachineSpec, tools: Tools, standin: Standin, step: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firecracker.Request.__init__, "__defaults__", (None, 0.3))
    monkeypatch.setattr(firecracker, "START_S", 0.3)
    standin.fail({"do": fault, "path": step.partition(" ")[2]})
    try:
        assert step in failed(spec, tools)
    finally:
        standin.fail()
    assert tools.groups is not None
    assert tools.groups.ids(INSTANCE) == set()
    assert not list(standin.programs())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"do": "die", "path": "jailer"}, "starting the jailer"),
        ({"do": "hang", "path": "jailer"}, "starting the jailer"),
        ({"do": "die", "call": 0}, "ended"),
        ({"do": "hang", "call": 0}, "waiting for Firecracker's API"),
    ],
)
def test_a_jailer_or_a_vmm_that_does_not_come_up(
    spec: MachineSpec, tools: Tools, standin: Standin, fault: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firecracker_machine, "START_S", 2.0)
    standin.fail(fault)
    try:
        assert said in failed(spec, tools)
    finally:
        standin.fail()
    assert tools.groups is not None
    assert tools.groups.ids(INSTANCE) == set()
