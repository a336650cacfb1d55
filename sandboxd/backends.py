"""The backends as the service uses them, and which of them it is.

In: settings, what this host has. Out: a `Backend` that starts new machines under one VMM, and takes back those of an
earlier daemon whichever VMM they run under. Firecracker is taken where it was asked for, or where it is there, its
version is good and KVM works; what stands against it is said.
"""

from __future__ import annotations

import logging
import os
import resource
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import anyio.to_thread

from native import KvmAnswer, KvmState
from sandboxd.assets.prepare import Assets
from sandboxd.errors import SetupError
from sandboxd.vm import (
    arch,
    cgroups,
    firecracker,
    firecracker_machine,
    firecracker_start,
    firecracker_versions,
    jail,
    jailer,
    kvm,
    processes,
    qemu,
    recovery,
    virtiofs,
)
from sandboxd.vm.commands import Accelerator, Tools
from sandboxd.vm.firecracker_versions import Version
from sandboxd.vm.kvm import Trial
from sandboxd.vm.machine import MAX_CPUS, Machine, MachineSpec

log = logging.getLogger("sandboxd")

VERSION_S = 10.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What the settings say. `backend` is auto, qemu or firecracker; `allowed` a version that is taken whatever is
    known of it."""

    backend: str
    firecracker: str
    jailer: str
    allowed: str
    state_dir: Path
    assets_dir: Path
    instance: str


class Qemu:
    """`vm.qemu`. Starts machines under TCG until `settle` has found a KVM that works."""

    name = "qemu"
    silent = False

    def __init__(self, tools: Tools, uids: range, state_dir: Path, probe: Callable[[], KvmAnswer]) -> None:
        self.tools, self._uids, self._state_dir, self._probe = tools, uids, state_dir, probe
        self._e2fsck = recovery.find_e2fsck()

    async def settle(self, assets: Assets, uid: int | None) -> str:
        """Tries KVM with our kernel; `uid` is the trial's. Returns which accelerator it is to be, and why."""
        fast = replace(self.tools, accelerator=Accelerator.KVM)
        trial = Trial(self.tools.qemu.path, self.tools.instance, lambda spec: qemu.start(spec, fast))
        choice = await kvm.choose(trial, assets.kernel, assets.initramfs, self._state_dir, uid, self._probe)
        if choice.works:
            self.tools = fast
            return f"qemu with kvm ({choice.reason})"
        return f"qemu with tcg (software emulation: {choice.reason})"

    async def start(self, spec: MachineSpec) -> Machine:
        return await qemu.start(spec, self.tools)

    async def adopt(self, directory: Path, sandbox_id: str) -> Machine | None:
        return await qemu.adopt(directory, sandbox_id, self.tools)

    def sweep(self, sandboxes: Path, known: frozenset[str]) -> None:
        _said(qemu.sweep(sandboxes, known, self.tools, self._uids))

    async def recover(self, volume: Path, sandbox_id: str, uid: int | None) -> bool:
        return await recovery.recover(volume, sandbox_id, uid, self._e2fsck, self.tools.instance, self.tools.jail)


class Firecracker:
    """`vm.firecracker_start` and `vm.firecracker_machine`."""

    name = "firecracker"
    silent = True

    def __init__(self, tools: firecracker_machine.Tools, trial_s: float) -> None:
        self.tools = tools
        self._trial_s = trial_s
        self._e2fsck = recovery.find_e2fsck()

    @property
    def trial(self) -> Trial:
        return Trial(self.tools.jailer.firecracker, self.tools.instance, self._start, self._trial_s)

    async def _start(self, spec: MachineSpec) -> Machine:
        return await firecracker_start.start(spec, self.tools)

    async def start(self, spec: MachineSpec) -> Machine:
        return await self._start(spec)

    async def adopt(self, directory: Path, sandbox_id: str) -> Machine | None:
        return await firecracker_machine.adopt(directory, sandbox_id, self.tools)

    def sweep(self, sandboxes: Path, known: frozenset[str]) -> None:
        _said(firecracker_machine.sweep(sandboxes, known, self.tools))

    async def recover(self, volume: Path, sandbox_id: str, uid: int | None) -> bool:
        tools = self.tools
        return await recovery.recover(volume, sandbox_id, uid, self._e2fsck, tools.instance, tools.jailer.jail)


class Chosen:
    """The first of `found` starts machines. Where it is Firecracker, and `settle` finds that it cannot, the next one
    does, unless Firecracker was asked for. `why` is what stood against Firecracker where it is not the first."""

    def __init__(
        self, found: Sequence[Firecracker | Qemu], why: str, asked: Asked, probe: Callable[[], KvmAnswer]
    ) -> None:  # fmt: skip
        self._now, self._all = found[0], found
        self._why, self._asked, self._probe = why, asked, probe

    @property
    def name(self) -> str:
        return self._now.name

    @property
    def silent(self) -> bool:
        return self._now.silent

    @property
    def allowed(self) -> str:
        """What is known against the version of Firecracker that is used all the same; empty where nothing is."""
        tools = self._now.tools
        if isinstance(tools, firecracker_machine.Tools) and (known := firecracker_versions.against(tools.version)):
            return f"Firecracker {tools.version} is taken, as --allow-firecracker says: {known}"
        return ""

    @property
    def max_cpus(self) -> int:
        """The most processors that a machine can have."""
        return firecracker.MAX_CPUS if isinstance(self._now, Firecracker) else MAX_CPUS

    def why_not_shared(self) -> str:
        """Why no directory of this host can be shared; empty where one can. Blocking."""
        tools = self._now.tools
        if isinstance(tools, firecracker_machine.Tools):
            return "Firecracker cannot share a directory of the host; with --backend qemu it can be"
        return virtiofs.why_not(tools.jail, tools.instance, tools.open_files)

    async def settle(self, assets: Assets, uid: int | None) -> str:
        """Tries Firecracker with our kernel, where that is chosen. Raises SetupError where it was asked for and does
        not run."""
        now, asked = self._now, self._asked
        if isinstance(now, Firecracker):
            reason = await anyio.to_thread.run_sync(unfit, asked.state_dir, asked.assets_dir)
            if not reason:
                choice = await kvm.choose(now.trial, assets.kernel, assets.initramfs, asked.state_dir, uid, self._probe)
                if choice.works:
                    return f"firecracker {now.tools.version} ({choice.reason})"
                reason = choice.reason
            others = [one for one in self._all if isinstance(one, Qemu)]
            if not others or asked.backend == "firecracker":
                raise SetupError(f"--backend firecracker cannot be used: {reason}; --backend qemu runs everywhere")
            self._now, self._why = others[0], reason
            now = others[0]
        said = await now.settle(assets, uid)
        if self._why and self._why in said:
            return f"{said}; not firecracker either"
        return f"{said}; not firecracker: {self._why}" if self._why else said

    async def start(self, spec: MachineSpec) -> Machine:
        return await self._now.start(spec)

    async def adopt(self, directory: Path, sandbox_id: str) -> Machine | None:
        record = processes.read_record(directory)
        roles = set() if record is None else {process.role for process in record.processes}
        ended = record is None or all(map(processes.has_ended, record.processes))
        for backend, role in ((Firecracker, firecracker_machine.VMM), (Qemu, qemu.VMM)):
            if role in roles:
                its = next((one for one in self._all if isinstance(one, backend)), None)
                if its is None and not ended:
                    raise SetupError(
                        f"{sandbox_id} runs under {role}, which this sandboxd does not find; start it as before, or "
                        "delete its sandboxes first"
                    )
                if its is not None:
                    return await its.adopt(directory, sandbox_id)
        return await self._all[0].adopt(directory, sandbox_id)

    def sweep(self, sandboxes: Path, known: frozenset[str]) -> None:
        for backend in self._all:
            backend.sweep(sandboxes, known)

    async def recover(self, volume: Path, sandbox_id: str, uid: int | None) -> bool:
        return await self._now.recover(volume, sandbox_id, uid)


def choose(
    asked: Asked, find_qemu: Callable[[], Tools], uids: range, probe: Callable[[], KvmAnswer], trial_s: float
) -> Chosen:
    """Raises SetupError where what was asked for is not to be had. Takes a second where KVM has to be tried."""
    first, why = None, ""
    if asked.backend != "qemu":
        try:
            first = Firecracker(find_firecracker(asked), trial_s)
            answer = probe()
            if answer.state is not KvmState.OK:
                first, why = None, kvm.unusable(answer)
        except SetupError as fault:
            why = str(fault)
        if first is None and asked.backend == "firecracker":
            raise SetupError(f"--backend firecracker cannot be used: {why}; --backend qemu runs everywhere")
    second = None
    try:
        second = Qemu(find_qemu(), uids, asked.state_dir, probe)
    except SetupError:
        # Then Firecracker alone has to do.
        if first is None:
            raise
    return Chosen([one for one in (first, second) if one is not None], why, asked, probe)


def find_firecracker(asked: Asked) -> firecracker_machine.Tools:
    """Raises SetupError naming what is missing, or why the version is refused."""
    root = os.geteuid() == 0
    binary = _program("firecracker", asked.firecracker)
    version = _version(binary)
    if (fault := firecracker_versions.fault(version)) is not None and not is_allowed(asked, version):
        raise SetupError(fault)
    if root and "firecracker" not in binary.name:
        raise SetupError(f"{binary}: the jailer takes no program whose name does not hold firecracker; rename it")
    beside = asked.jailer or (str(binary.parent / "jailer") if (binary.parent / "jailer").is_file() else "")
    jailing = _program("jailer", beside) if root else binary
    if root and (its := _version(jailing)) != version:
        raise SetupError(
            f"the jailer is {its} and Firecracker {version}: they belong together; name the right one with --jailer"
        )
    return firecracker_machine.Tools(
        jailer=jailer.Tools(binary, jailing, jail.find_tools(root)),
        program=jail.program(binary),
        version=version,
        arch=arch.here(),
        instance=asked.instance,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        groups=cgroups.usable() if root else None,
    )


def is_allowed(asked: Asked, version: Version) -> bool:
    """Whether the operator has said yes to this very version."""
    try:
        return bool(asked.allowed) and firecracker_versions.read(asked.allowed) == version
    except ValueError as fault:
        raise SetupError(f"--allow-firecracker: {fault}") from None


def _program(name: str, given: str) -> Path:
    places = [Path(place, name) for place in firecracker_versions.PLACES.split(":")]
    found = [Path(given)] if given else [path for path in places if path.is_file()]
    if not found:
        raise SetupError(f"{name} is not installed; put it in /usr/local/bin, or name it with --{name}")
    if not found[0].is_file():
        raise SetupError(f"{found[0]} is no program; name the one you have with --{name}")
    usable = [path for path in found if os.access(path, os.X_OK)]
    if not usable:
        raise SetupError(f"{found[0]} may not be run by this user: chmod 755 {found[0]}")
    return usable[0].resolve()


def _version(path: Path) -> Version:
    try:
        said = subprocess.run(
            [str(path), "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=VERSION_S, check=False, env={},
        )  # fmt: skip
        return firecracker_versions.parse(said.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as fault:
        why = str(fault) if isinstance(fault, ValueError) else "it cannot be run"
        raise SetupError(f"{path}: {why}; docs/firecracker.md says which program is meant, and where it is") from None


def unfit(state_dir: Path, assets_dir: Path) -> str:
    """Why no machine under Firecracker can have its jail in the state directory; empty where one can. Blocking."""
    if os.geteuid() != 0:
        return ""
    try:
        return jailer.unfit(state_dir, assets_dir)
    except OSError as fault:
        return f"whether a jail can be made in {state_dir} of what is in {assets_dir} cannot be tried: {fault}"


def _said(ended: set[str]) -> None:
    for id in sorted(ended):
        log.info("%s: its machine had no record: it was ended", id)
