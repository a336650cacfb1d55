"""Whether guests run under KVM here, found out by trying, and why not.

In: a VMM, our kernel and initramfs, a directory for the answer. Out: a `Choice`. A device that opens,
makes a VM and even runs a small loop proves nothing: on nested or emulated hosts an ordinary kernel then
hangs, or the VMM aborts. So after the quick probe of `native` the deciding step is a machine like any other, in
the same jail, under KVM, up to guest-init's first line. The answer is kept for this boot of the host, this
kernel and this VMM.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from native import KvmAnswer, KvmState, kvm_probe
from sandboxd.errors import BootFailed, SandboxError
from sandboxd.vm import processes
from sandboxd.vm.machine import Machine, MachineSpec

TRIAL_S = 10.0
VERSION_S = 10.0
TRIAL_ID = "kvm-trial"
TRIAL_MEMORY_MB = 256
FIRST_LINE = b"guest-init: start"


@dataclass(frozen=True, slots=True)
class Choice:
    """`reason` is one line for a person, whichever way it went."""

    works: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Trial:
    """How a machine under KVM is started here: `program` is the VMM, whose version is part of what is remembered."""

    program: Path
    instance: str
    start: Callable[[MachineSpec], Awaitable[Machine]]
    timeout_s: float = TRIAL_S


async def choose(
    trial: Trial,
    kernel: Path,
    initramfs: Path,
    state_dir: Path,
    uid: int | None,
    probe: Callable[[], KvmAnswer] = kvm_probe,
) -> Choice:
    """`uid` is for the trial's VMM, as in a MachineSpec. Takes 1 s where KVM is no use, 10 s at most."""
    answer = await anyio.to_thread.run_sync(probe)
    if answer.state is not KvmState.OK:
        return Choice(False, unusable(answer))
    # One for each VMM: `auto` may ask about two.
    kept = state_dir / f"kvm-{trial.program.name}.json"
    try:
        key = await anyio.to_thread.run_sync(_key, trial.program, kernel, initramfs)
        fault = _remembered(kept, key)
        if fault is None:
            fault = await attempt(trial, kernel, initramfs, state_dir, uid)
            _remember(kept, key, fault)
    except (SandboxError, OSError, subprocess.SubprocessError) as error:
        # A full disk, a library that is missing, a VMM that the kernel does not let end: it may be over the next time.
        return Choice(False, f"KVM could not be tried: {error}")
    if fault:
        return Choice(False, f"KVM is {KvmState.PRESENT_BUT_UNUSABLE.value}: {fault}")
    return Choice(True, f"KVM: {answer.reason}, and our kernel booted")


def unusable(answer: KvmAnswer) -> str:
    """Why, and what helps where something does."""
    return f"KVM is {answer.state.value}: {answer.reason}" + (f"; {answer.remedy}" if answer.remedy else "")


async def attempt(trial: Trial, kernel: Path, initramfs: Path, state_dir: Path, uid: int | None) -> str:
    """Boots under KVM; returns "" when guest-init spoke in time, else what went wrong, in one line. Raises BootFailed
    or OSError where no VMM came so far, which may be no fault of KVM's, and none crashed; SandboxError where one does
    not end."""
    directory = state_dir / TRIAL_ID
    directory.mkdir(mode=0o700, exist_ok=True)
    uids = {os.getuid()} if uid is None else {os.getuid(), uid}
    processes.end_recorded(directory)
    processes.end_marked(trial.instance, lambda id: id == TRIAL_ID, uids)
    spec = MachineSpec(TRIAL_ID, 1, TRIAL_MEMORY_MB, kernel, initramfs, (), directory, uid, console=True)
    try:
        with anyio.move_on_after(trial.timeout_s):
            return await _boot(spec, trial)
        return f"our kernel said nothing in {trial.timeout_s:.0f} s"
    finally:
        with suppress(OSError):
            directory.rmdir()


async def _boot(spec: MachineSpec, trial: Trial) -> str:
    try:
        machine = await trial.start(spec)
    except BootFailed as error:
        # Of a signal, as QEMU where KVM gives it less than it takes for granted. What it says itself may be about a
        # library or a jail.
        if error.exit_code is None or error.exit_code <= 128:
            raise
        return str(error)
    try:
        while FIRST_LINE not in await machine.console_tail():
            with anyio.move_on_after(0.05):
                await machine.wait_exit()
                spoke = FIRST_LINE in await machine.console_tail()
                return "" if spoke else "the VMM or the guest stopped before our kernel was up"
        return ""
    finally:
        await machine.terminate()


def _key(program: Path, kernel: Path, initramfs: Path) -> list[str]:
    version = subprocess.run(
        [str(program), "--version"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=VERSION_S, check=False,
        env={},
    )  # fmt: skip
    digests = []
    for path in (kernel, initramfs):
        with open(path, "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return [processes.boot_id(), *digests, version.stdout.partition("\n")[0]]


def _remembered(kept: Path, key: list[str]) -> str | None:
    """What the trial said for this `key`; None when it was not asked yet."""
    try:
        value = json.loads(kept.read_bytes()[:65536])
    except (OSError, ValueError, RecursionError):
        return None
    match value:
        case {"key": seen, "fault": str(fault)} if seen == key:
            return fault
    return None


def _remember(kept: Path, key: list[str], fault: str) -> None:
    temporary = kept.with_suffix(".new")
    with suppress(OSError):
        temporary.write_text(json.dumps({"key": key, "fault": fault}))
        os.rename(temporary, kept)
