"""The typed face of native.h.

In: a path or a device's name. Out: a frozen value, or an exception: `DirectoryRefused` when the answer is no,
and `OSError` (the subclass of its errno: FileNotFoundError, NotADirectoryError, PermissionError, …) when a
system call failed; its text ends with the step, its `filename` says whether the directory or home was meant.
Turning `-errno` and step into an OSError is done in `_call` and nowhere else. Nothing here reads the
environment, expands `~` or logs. All of it may be called from any thread, and holds no other thread up.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any

from native._native import ffi, lib

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]

KVM_TURNS = 100_000_000  # 0.03 to 0.1 s on a processor, some 150 s where KVM is emulated
KVM_DEADLINE_MS = 1000


@dataclass(frozen=True, slots=True)
class Directory:
    """An open directory (O_PATH). The end of a `with` block closes `fd`; without one the caller does."""

    fd: int
    device: int
    inode: int

    def __enter__(self) -> Directory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)


class Refusal(Enum):
    """Why a directory of the host is never shown to a guest; the value completes "it is …"."""

    ROOT = "the root of the file system"
    HOME = "the home directory"
    ANCESTOR_OF_HOME = "a directory that holds the home directory"
    KEPT_BY_US = "a directory in which sandboxd keeps what is its own, or one that holds or is inside such a directory"
    PROC_LINK = "reached through a link of /proc, which leads another process somewhere else"


class DirectoryRefused(Exception):
    """hostpath said no. No flag, profile or request changes that."""

    def __init__(self, path: Path, refusal: Refusal) -> None:
        super().__init__(f"{os.fsdecode(path)!r} is refused: it is {refusal.value}")
        self.path = path
        self.refusal = refusal


class KvmState(Enum):
    OK = "ok"
    ABSENT = "absent"
    NO_ACCESS = "no-access"
    PRESENT_BUT_UNUSABLE = "present-but-unusable"


@dataclass(frozen=True, slots=True)
class KvmAnswer:
    """`reason` is one line for a person; `turns` of the loop were done in `elapsed_s`."""

    state: KvmState
    reason: str
    turns: int
    elapsed_s: float

    @property
    def remedy(self) -> str:
        """What gives this process access; empty where nothing is known to help."""
        # Root has the right; what keeps it out is a container or the like.
        if self.state is KvmState.NO_ACCESS and os.geteuid() != 0:
            return "let root run: usermod -aG kvm USER, and log in again"
        return ""


_HOSTPATH_STEPS: dict[int, str] = {
    lib.HOSTPATH_OPEN: "opening the directory",
    lib.HOSTPATH_PROC_LINK: "opening the directory through a link of /proc",
    lib.HOSTPATH_IDENTIFY: "reading device, inode and mount of the directory",
    lib.HOSTPATH_OPEN_ROOT: "opening /",
    lib.HOSTPATH_OPEN_HOME: "opening the home directory",
    lib.HOSTPATH_PARENTS: "walking up from the home directory",
    lib.HOSTPATH_MOUNTS: "looking for other mounts of the home directory",
}
_HOSTPATH_REFUSALS: dict[int, Refusal] = {
    lib.HOSTPATH_IS_ROOT: Refusal.ROOT,
    lib.HOSTPATH_IS_HOME: Refusal.HOME,
    lib.HOSTPATH_IS_ABOVE_HOME: Refusal.ANCESTOR_OF_HOME,
}
_KVM_STEPS: dict[int, str] = {
    lib.KVM_PROBE_OPEN: "opening the device",
    lib.KVM_PROBE_API_VERSION: "asking for its version",
    lib.KVM_PROBE_CREATE_VM: "creating a VM",
    lib.KVM_PROBE_MEMORY: "giving the VM memory",
    lib.KVM_PROBE_CREATE_VCPU: "creating a virtual processor",
    lib.KVM_PROBE_CPUID: "setting its CPUID",
    lib.KVM_PROBE_REGISTERS: "setting up long mode",
    lib.KVM_PROBE_TIMER: "starting the timer",
    lib.KVM_PROBE_RUN: "running it",
    lib.KVM_PROBE_DEADLINE: "running it to the end",
    lib.KVM_PROBE_RESULT: "checking its sum",
}
_KVM_STATES: dict[int, KvmState] = {
    lib.KVM_PROBE_OK: KvmState.OK,
    lib.KVM_PROBE_ABSENT: KvmState.ABSENT,
    lib.KVM_PROBE_NO_ACCESS: KvmState.NO_ACCESS,
    lib.KVM_PROBE_UNUSABLE: KvmState.PRESENT_BUT_UNUSABLE,
}


def open_directory(path: Path) -> Directory:
    """Resolves `path`, following symbolic links, once. The descriptor is the directory from here on.

    Raises FileNotFoundError, NotADirectoryError or another OSError; DirectoryRefused when a link of /proc is
    on the way.
    """
    identity = ffi.new("struct hostpath_id *")
    step = ffi.new("int *")
    try:
        fd = _call(
            lambda: lib.hostpath_open(_c_path(path), identity, step), lambda: _HOSTPATH_STEPS[step[0]], path
        )
    except OSError:
        if step[0] == lib.HOSTPATH_PROC_LINK:
            raise DirectoryRefused(path, Refusal.PROC_LINK) from None
        raise
    return Directory(fd, identity.device, identity.inode)


def check_directory(directory: Directory, path: Path, home: Path) -> None:
    """Raises DirectoryRefused when `directory` is /, `home` or anything above it, by device and inode.

    `path` is for the message alone. A `home` that cannot be opened is an OSError: what cannot be compared is
    not allowed.
    """
    step = ffi.new("int *")
    verdict = _call(
        lambda: lib.hostpath_check(directory.fd, _c_path(home), step), lambda: _HOSTPATH_STEPS[step[0]], home
    )
    if verdict != lib.HOSTPATH_ALLOWED:
        raise DirectoryRefused(path, _HOSTPATH_REFUSALS[verdict])


def check_apart(directory: Directory, path: Path, place: Path) -> None:
    """Raises DirectoryRefused when `directory` is `place`, anything above it or anything below it, by device and inode
    and by where both are in their file system.

    `path` is for the message alone. FileNotFoundError where there is no `place`; another OSError where the two cannot
    be compared, which allows nothing.
    """
    try:
        check_directory(directory, path, place)
    except DirectoryRefused as fault:
        kept = fault.refusal is not Refusal.ROOT
        raise DirectoryRefused(path, Refusal.KEPT_BY_US if kept else Refusal.ROOT) from None
    step = ffi.new("int *")
    if _call(
        lambda: lib.hostpath_is_inside(directory.fd, _c_path(place), step), lambda: _HOSTPATH_STEPS[step[0]], place
    ):
        raise DirectoryRefused(path, Refusal.KEPT_BY_US)


def check_host_directory(path: Path, home: Path) -> Directory:
    """`open_directory`, then `check_directory` on what it opened, whatever the name means by then."""
    directory = open_directory(path)
    try:
        check_directory(directory, path, home)
    except BaseException:
        os.close(directory.fd)
        raise
    return directory


def kvm_probe(
    device: Path = "/dev/kvm", turns: int = KVM_TURNS, deadline_ms: int = KVM_DEADLINE_MS
) -> KvmAnswer:
    """Counts a loop in a VM of its own against the clock; takes at most `deadline_ms` and a little.

    An answer other than OK is a value. OSError only where nothing was learnt about KVM (no memory, no
    descriptors, no turns or no time given).
    """
    report = ffi.new("struct kvm_probe_report *")
    code = _call(
        lambda: lib.kvm_probe(_c_path(device), turns, deadline_ms, report),
        lambda: f"probing KVM: {_KVM_STEPS[report.step]}",
        device,
    )
    reason = _kvm_reason(device, turns, report)
    return KvmAnswer(_KVM_STATES[code], reason, report.turns, report.elapsed_ns / 1e9)


def _kvm_reason(device: Path, turns: int, report: Any) -> str:
    name = os.fsdecode(device)
    if report.step == 0:
        return f"{name} ran {turns:,} turns of a loop in {report.elapsed_ns / 1e9:.2f} s"
    if report.step == lib.KVM_PROBE_DEADLINE:
        return (
            f"{name} ran {report.turns:,} of {turns:,} turns of a loop in {report.elapsed_ns / 1e9:.2f} s: "
            "no processor is that slow, KVM is emulated here"
        )
    if report.error:
        why = os.strerror(report.error)
    elif report.step == lib.KVM_PROBE_RUN:
        why = f"KVM_RUN came back with exit reason {report.exit_reason}"
    elif report.step == lib.KVM_PROBE_API_VERSION:
        why = "not version 12"
    else:
        why = "it is wrong"
    return f"{name}: {_KVM_STEPS[report.step]}: {why}"


def _c_path(path: Path) -> bytes:
    raw = os.fsencode(path)
    if b"\0" in raw:
        raise ValueError("embedded null byte")
    return raw


def _call(function: Callable[[], int], step: Callable[[], str], path: Path) -> int:
    """The value of a function of native.h; between an interrupted call and the next a handler can run."""
    while True:
        value = function()
        if value >= 0:
            return value
        if value != -errno.EINTR:
            raise OSError(-value, f"{os.strerror(-value)} ({step()})", os.fsdecode(path))
