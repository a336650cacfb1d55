"""How long it is remembered what a trial under KVM came to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from native import KvmAnswer, KvmState
from sandboxd.errors import BootFailed, SandboxError
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


class Stuck:
    """A machine whose VMM stays where the kernel does not let it end."""

    spec_id, vsock_path, programs = kvm.TRIAL_ID, Path("/none"), ()

    async def console_tail(self, limit_bytes: int = 8192) -> bytes:
        return kvm.FIRST_LINE

    async def wait_exit(self) -> None:
        raise NotImplementedError

    async def terminate(self) -> None:
        raise SandboxError("kvm-trial: a process did not end in 5 s")


async def starts_one_that_stays(_: MachineSpec) -> Machine:
    return Stuck()


@pytest.mark.parametrize(
    ("program", "why"),
    [
        pytest.param("#!/bin/sh\necho 'VMM 1'\n", "kvm-trial: a process did not end in 5 s", id="does not end"),
        pytest.param("#!/bin/sh\nprintf '\\377\\n'\n", "kvm-trial: a process did not end in 5 s", id="says no text"),
        pytest.param("#!/bin/sh\nexec sleep 60\n", "timed out after 0.1 seconds", id="hangs"),
        pytest.param("#!/none\n", "No such file or directory", id="does not start"),
    ],
)
def test_a_vmm_that_cannot_be_tried_is_none_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    monkeypatch.setattr(kvm, "VERSION_S", 0.1 if "sleep" in program else 10.0)
    (tmp_path / "vmm").write_text(program)
    (tmp_path / "vmm").chmod(0o755)
    trial = kvm.Trial(tmp_path / "vmm", "0123456789ab", starts_one_that_stays)
    uid = 1000 if os.geteuid() == 0 else None
    works = KvmAnswer(KvmState.OK, "it counted", 1, 0.1)
    choice = anyio.run(kvm.choose, trial, tmp_path / "vmm", tmp_path / "vmm", tmp_path, uid, lambda: works)
    assert not choice.works
    assert choice.reason.startswith("KVM could not be tried: ") and why in choice.reason


@pytest.mark.parametrize(
    ("code", "why", "tries"),
    [
        pytest.param(127, "KVM could not be tried: the machine did not start: ", 2, id="a library is missing, say"),
        pytest.param(None, "KVM could not be tried: the machine did not start: ", 2, id="it hangs"),
        pytest.param(134, "KVM is present-but-unusable: the machine did not start: ", 1, id="it crashes"),
    ],
)
def test_a_vmm_that_does_not_start_is_tried_again_unless_it_crashed(
    tmp_path: Path, code: int | None, why: str, tries: int
) -> None:
    be(tmp_path / "vmm", "1")
    for name in ("kernel", "initramfs"):
        (tmp_path / name).write_text(name)
    tried = []

    async def fails(_: MachineSpec) -> Machine:
        tried.append("")
        raise BootFailed("starting the VMM", code, b"")

    trial = kvm.Trial(tmp_path / "vmm", "0123456789ab", fails)
    works = KvmAnswer(KvmState.OK, "it counted", 1, 0.1)
    for _ in range(2):
        found = anyio.run(
            kvm.choose, trial, tmp_path / "kernel", tmp_path / "initramfs", tmp_path, None, lambda: works
        )
        assert not found.works
        assert found.reason.startswith(why)
    assert len(tried) == tries
