"""How long it is remembered what a trial under KVM came to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from native import KvmAnswer, KvmState
from sandboxd.vm import kvm, processes
from sandboxd.vm.machine import Machine, MachineSpec


async def starts_nothing(_: MachineSpec) -> Machine:
    raise AssertionError


def be(program: Path, version: str) -> None:
    program.write_text(f"#!/bin/sh\necho 'VMM {version}'\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda at, _: be(at / "vmm", "2"), id="another version of the VMM"),
        pytest.param(lambda at, _: (at / "kernel").write_text("newer"), id="another kernel"),
        pytest.param(lambda at, _: (at / "initramfs").write_text("newer"), id="another initramfs"),
        pytest.param(lambda _, patch: patch.setattr(processes, "boot_id", lambda: "newer"), id="the host was booted"),
    ],
)
def test_a_trial_is_remembered_until_something_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, pytest.MonkeyPatch], None]
) -> None:
    be(tmp_path / "vmm", "1")
    for name in ("kernel", "initramfs"):
        (tmp_path / name).write_text(name)
    outcomes = iter(("the first", "the second"))

    async def attempt(*_: object) -> str:
        return next(outcomes)

    monkeypatch.setattr(kvm, "attempt", attempt)
    trial = kvm.Trial(tmp_path / "vmm", "0123456789ab", starts_nothing)

    def said() -> str:
        works = KvmAnswer(KvmState.OK, "it counted", 1, 0.1)
        files = (tmp_path / "kernel", tmp_path / "initramfs")
        return anyio.run(kvm.choose, trial, *files, tmp_path, None, lambda: works).reason.rpartition(": ")[2]

    assert (said(), said()) == ("the first", "the first")
    change(tmp_path, monkeypatch)
    assert (said(), said()) == ("the second", "the second")
