"""Whether guests run under KVM here, found out by trying, and why not.

In: the tools, our kernel and initramfs, a directory for the answer. Out: a `Choice`. A device that opens,
makes a VM and even runs a small loop proves nothing: on nested or emulated hosts an ordinary kernel then
hangs, or QEMU aborts. So after the quick probe of `native` the deciding step is a machine like any other, in
the same jail, under KVM, up to guest-init's first line. The answer is kept for this boot of the host, this
kernel and this QEMU.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import anyio.to_thread

from native import KvmAnswer, KvmState, kvm_probe
from sandboxd.errors import BootFailed
from sandboxd.vm import processes, qemu
from sandboxd.vm.commands import Accelerator, Tools
from sandboxd.vm.machine import MachineSpec

TRIAL_S = 10.0
TRIAL_ID = "kvm-trial"
TRIAL_MEMORY_MB = 256
FIRST_LINE = b"guest-init: start"
ANSWER = "kvm.json"


@dataclass(frozen=True, slots=True)
class Choice:
    """`reason` is one line for a person, whichever way it went."""

    accelerator: Accelerator
    reason: str


async def choose(
    tools: Tools,
    kernel: Path,
    initramfs: Path,
    state_dir: Path,
    uid: int | None,
    probe: Callable[[], KvmAnswer] = kvm_probe,
) -> Choice:
    """`uid` is for the trial's VMM, as in a MachineSpec. Takes 1 s where KVM is no use, 10 s at most."""
    answer = await anyio.to_thread.run_sync(probe)
    if answer.state is not KvmState.OK:
        return Choice(Accelerator.TCG, f"software emulation: KVM is {answer.state.value}: {answer.reason}")
    key = await anyio.to_thread.run_sync(_key, tools, kernel, initramfs)
    fault = _remembered(state_dir, key)
    if fault is None:
        fault = await trial(tools, kernel, initramfs, state_dir, uid)
        _remember(state_dir, key, fault)
    if fault:
        why = f"{KvmState.PRESENT_BUT_UNUSABLE.value}: {fault}"
        return Choice(Accelerator.TCG, f"software emulation: KVM is {why}")
    return Choice(Accelerator.KVM, f"KVM: {answer.reason}, and our kernel booted")


async def trial(
    tools: Tools, kernel: Path, initramfs: Path, state_dir: Path, uid: int | None, timeout_s: float = TRIAL_S
) -> str:
    """Boots under KVM; returns "" when guest-init spoke in time, else what went wrong, in one line."""
    directory = state_dir / TRIAL_ID
    directory.mkdir(mode=0o700, exist_ok=True)
    uids = {os.getuid()} if uid is None else {os.getuid(), uid}
    processes.end_recorded(directory)
    processes.end_marked(tools.instance, lambda id: id == TRIAL_ID, uids)
    spec = MachineSpec(TRIAL_ID, 1, TRIAL_MEMORY_MB, kernel, initramfs, (), directory, uid)
    try:
        with anyio.move_on_after(timeout_s):
            return await _boot(spec, replace(tools, accelerator=Accelerator.KVM))
        return f"our kernel said nothing in {timeout_s:.0f} s"
    finally:
        with suppress(OSError):
            directory.rmdir()


async def _boot(spec: MachineSpec, tools: Tools) -> str:
    try:
        machine = await qemu.start(spec, tools)
    except BootFailed as error:
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


def _key(tools: Tools, kernel: Path, initramfs: Path) -> list[str]:
    version = subprocess.run(
        [str(tools.qemu.path), "--version"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False, env={},
    )  # fmt: skip
    digests = []
    for path in (kernel, initramfs):
        with open(path, "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return [processes.boot_id(), *digests, version.stdout.partition("\n")[0]]


def _remembered(state_dir: Path, key: list[str]) -> str | None:
    """What the trial said for this `key`; None when it was not asked yet."""
    try:
        value = json.loads((state_dir / ANSWER).read_bytes()[:65536])
    except (OSError, ValueError, RecursionError):
        return None
    match value:
        case {"key": seen, "fault": str(fault)} if seen == key:
            return fault
    return None


def _remember(state_dir: Path, key: list[str], fault: str) -> None:
    temporary = state_dir / f"{ANSWER}.new"
    temporary.write_text(json.dumps({"key": key, "fault": fault}))
    os.rename(temporary, state_dir / ANSWER)
