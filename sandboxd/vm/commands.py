"""What QEMU and sandbox-vsock are told: their arguments and their jails, as values to be read whole.

In: a `MachineSpec` and the tools of this host. Out: lists and frozen descriptions; only `find_tools` looks at
the machine. QEMU gets descriptors and no names: drives by -add-fd, the vsock device, the monitor and the tap by
fd, the console as a ring buffer that is asked for over the monitor, so nothing a guest writes is stored on the
host. Kernel and initramfs are bound into the jail. Nothing of a sandbox's identity is on the kernel's command
line.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from sandboxd.errors import SetupError
from sandboxd.vm import cgroups, jail, virtiofs
from sandboxd.vm.jail import Jail, Limits, Program
from sandboxd.vm.machine import UNLIMITED, MachineSpec, Rate

MACHINE = "pc-i440fx-7.2"  # versioned: a saved machine fits a later QEMU; its root bus can hot-plug
GUEST_CID = 3
CONSOLE_BYTES = 64 * 1024
VMM_FILES = 256  # three for a drive, some for each processor and queue
DEVICE_FILES = 2048  # one for a connection, of which it takes 1024
OVERHEAD_BYTES = 512 << 20  # of all programs of a machine, beside the guest's memory and the code made of it
CODE_BUFFER_MB = 512  # translated code under TCG; the default, 1 GiB a machine, is more than most guests fill

_FIRMWARE = ("bios-256k.bin", "kvmvapic.bin", "linuxboot_dma.bin", "pvh.bin")
_FIRMWARE_DIRECTORIES = ("/usr/share/qemu", "/usr/share/seabios", "/usr/share/qemu-firmware")
_MODULE_DIRECTORIES = ("/usr/lib/x86_64-linux-gnu/qemu", "/usr/lib64/qemu", "/usr/lib/qemu")
_TCG_MODULE = "accel-tcg-x86_64.so"


class Accelerator(Enum):
    """How guest code runs."""

    KVM = "kvm"
    TCG = "tcg"


@dataclass(frozen=True, slots=True)
class Tools:
    """The programs of this host and what they are linked with.

    `instance` marks what is started with them; `open_files` is as many as a process of ours may be allowed.
    """

    qemu: Program
    firmware: tuple[Path, ...]
    modules: tuple[Path, ...]
    vsock: Program
    jail: jail.Tools
    accelerator: Accelerator
    instance: str
    open_files: int
    groups: cgroups.Hierarchy | None
    """Of root's machines."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """The numbers QEMU finds its descriptors under."""

    drives: tuple[int, ...]
    vhost: int
    qmp: int
    share: int | None = None


def find_tools(vsock: Path, instance: str, accelerator: Accelerator = Accelerator.TCG) -> Tools:
    """Looks at this host once; takes some 0.1 s. Raises SetupError naming what is missing."""
    if not vsock.is_file():
        raise SetupError(f"{vsock.name} is missing; it is built by: make programs")
    modules = tuple(p for d in _MODULE_DIRECTORIES if (p := Path(d, _TCG_MODULE)).is_file())[:1]
    return Tools(
        qemu=jail.program(jail.find("qemu-system-x86_64", "qemu-system-x86"), modules),
        firmware=tuple(_firmware(name) for name in _FIRMWARE),
        modules=modules,
        vsock=jail.program(vsock),
        jail=jail.find_tools(root=os.geteuid() == 0),
        accelerator=accelerator,
        instance=instance,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        groups=cgroups.usable() if os.geteuid() == 0 else None,
    )


def kernel_command_line(accelerator: Accelerator) -> str:
    """What the guest's kernel is told: nothing that tells one sandbox from another.

    Under TCG, without mitigations (no guest code runs on the processor) and without two things that cost a quarter
    of the time to guest-init: testing every cipher, and patching every lock away on one processor. Interrupts are
    routed as the firmware's tables say, since interpreting ACPI's for each device costs more than a second. Two
    words keep a kernel going that the host does not give its time: it would panic over a late timer tick, or give
    up its clock.
    """
    line = "console=ttyS0 quiet panic=-1 reboot=t cryptomgr.notests"
    if accelerator is Accelerator.TCG:
        line += " mitigations=off noreplace-smp acpi=noirq no_timer_check tsc=reliable"
    return line


def argv(spec: MachineSpec, accelerator: Accelerator, fds: Descriptors) -> list[str]:
    """QEMU's arguments."""
    tcg = accelerator is Accelerator.TCG
    command = [
        "-nodefaults",
        "-no-user-config",
        "-display", "none",
        "-L", "/firmware",
        "-machine", f"{MACHINE},memory-backend=memory,usb=off,vmport=off,smbus=off",
        "-accel", f"tcg,tb-size={CODE_BUFFER_MB}" if tcg else "kvm",
        "-cpu", "Nehalem,+rdrand" if tcg else "host",
        "-smp", str(spec.cpus),
        "-m", f"{spec.memory_mb}M",
        # Shared, because the vsock device works in the guest's memory from a process of its own.
        "-object", f"memory-backend-memfd,id=memory,size={spec.memory_mb}M,share=on",
        "-kernel", "/kernel",
        "-initrd", "/initramfs",
        "-append", kernel_command_line(accelerator),
        "-chardev", f"ringbuf,id=console,size={CONSOLE_BYTES}",
        "-serial", "chardev:console",
        "-chardev", f"socket,id=monitor,fd={fds.qmp},server=on,wait=off",
        "-mon", "chardev=monitor,mode=control",
        # A guest that resets, shuts down or panics leaves a VMM that can still be asked for the console.
        "-action", "reboot=shutdown,shutdown=pause,panic=pause",
        "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "-chardev", f"socket,id=vsock,fd={fds.vhost}",
        "-device", "vhost-user-vsock-pci,id=vsock,chardev=vsock",
    ]  # fmt: skip
    for index, (drive, fd) in enumerate(zip(spec.drives, fds.drives, strict=True)):
        node = f"drive{index}"
        options = "read-only=on" if drive.read_only else "read-only=off,discard=unmap"
        # Its locks could be held against another machine that reads the same image; `drives` has locked it.
        file = f"file.driver=file,file.filename=/dev/fdset/{index},file.locking=off"
        command += [
            "-add-fd", f"fd={fd},set={index}",
            "-blockdev", f"driver=raw,node-name={node},{options},{file}",
        ]  # fmt: skip
        if drive.rate != UNLIMITED:
            limited = f"limited{index}"
            command += [
                "-object", _throttle_group(f"rate{index}", drive.rate),
                "-blockdev", f"driver=throttle,node-name={limited},throttle-group=rate{index},{options},file={node}",
            ]  # fmt: skip
            node = limited
        command += [
            # A full host gives the guest an I/O error, not a machine that stands still.
            "-device", f"virtio-blk-pci,drive={node},werror=report,rerror=report",
        ]  # fmt: skip
    if spec.tap_fd is not None:
        command += [
            # Without the host kernel's vhost, which would read the guest's rings with the kernel's own rights.
            "-netdev", f"tap,id=net0,fd={spec.tap_fd},vhost=off",
            "-device", f"virtio-net-pci,netdev=net0,mac={spec.mac},romfile=",
        ]  # fmt: skip
    if fds.share is not None:
        command += [
            "-chardev", f"socket,id=share,fd={fds.share}",
            "-device", f"vhost-user-fs-pci,chardev=share,tag={virtiofs.TAG},queue-size=1024",
        ]  # fmt: skip
    return command


def device_argv(vhost_fd: int, listen_fd: int) -> list[str]:
    """The arguments of sandbox-vsock."""
    return ["--vhost-fd", str(vhost_fd), "--listen-fd", str(listen_fd), "--guest-cid", str(GUEST_CID)]


def limits(spec: MachineSpec, accelerator: Accelerator) -> cgroups.Limits:
    """What all processes of a machine may use together, the device's and virtiofsd's too. The guest has its processors
    whole: moving its bytes takes another."""
    return cgroups.Limits(
        cpus=spec.cpus + 1,
        memory_bytes=(spec.memory_mb << 20) + _code_bytes(accelerator) + OVERHEAD_BYTES,
        processes=2 * (spec.cpus + 200),
    )


def vmm_jail(
    spec: MachineSpec, tools: Tools, largest_drive_bytes: int, kvm: Path | None, entering: Sequence[str] = ()
) -> Jail:
    """`kvm` is the device node to be seen as /dev/kvm; `entering` the command that enters the machine's group."""
    memory = spec.memory_mb << 20
    code = _code_bytes(tools.accelerator)
    return Jail(
        tools=tools.jail,
        program=tools.qemu,
        marker=jail.marker(tools.instance, spec.id),
        uid=spec.uid,
        limits=Limits(
            address_space_bytes=memory + code + (2 << 30),
            # Neither a drive nor an anonymous file can be made larger than what the machine was given.
            file_size_bytes=max(memory, largest_drive_bytes),
            open_files=min(VMM_FILES, tools.open_files),
            processes=None if spec.uid is None else spec.cpus + 200,
        ),
        files=(
            *((path, f"/firmware/{path.name}") for path in tools.firmware),
            *((path, f"/modules/{path.name}") for path in tools.modules),
            (spec.kernel, "/kernel"),
            (spec.initramfs, "/initramfs"),
        ),
        devices=() if kvm is None else ((kvm, "/dev/kvm"),),
        environment=(("QEMU_MODULE_DIR", "/modules"),),
        before=tuple(entering),
    )


def device_jail(spec: MachineSpec, tools: Tools, entering: Sequence[str] = ()) -> Jail:
    return Jail(
        tools=tools.jail,
        program=tools.vsock,
        marker=jail.marker(tools.instance, spec.id),
        uid=spec.uid,
        limits=Limits(
            address_space_bytes=(spec.memory_mb << 20) + (1 << 30),
            file_size_bytes=0,
            open_files=min(DEVICE_FILES, tools.open_files),
            processes=None if spec.uid is None else spec.cpus + 200,
        ),
        files=(),
        before=tuple(entering),
    )


def _throttle_group(id: str, rate: Rate) -> str:
    """As JSON (qapi/qom.json, ThrottleGroupProperties), since the dotted form has unstable names alone."""
    limits = {"bps-total": rate.bytes_per_s, "iops-total": rate.ops_per_s}
    found = {name: value for name, value in limits.items() if value is not None}
    return json.dumps({"qom-type": "throttle-group", "id": id, "limits": found})


def _code_bytes(accelerator: Accelerator) -> int:
    return CODE_BUFFER_MB << 20 if accelerator is Accelerator.TCG else 0


def _firmware(name: str) -> Path:
    for directory in _FIRMWARE_DIRECTORIES:
        if (path := Path(directory, name)).is_file():
            return path
    raise SetupError(f"QEMU's {name} is missing; let root run: apt-get install -y qemu-system-x86 seabios")
