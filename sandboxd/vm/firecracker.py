"""What Firecracker is told, as values to be read whole: the calls of a boot, of a snapshot and of its restore.

In: a `MachineSpec`, the name of its tap, the version. Out: requests in the order in which they are sent. Every file is
named relative to the VMM's working directory, the root of its jail, so a snapshot is restored in another machine's jail
by the same names. Nothing that tells one sandbox from another is in any of it, and no value from an environment: that
comes with `configure`, to the guest, after the boot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sandboxd.vm.arch import Arch
from sandboxd.vm.firecracker_versions import Feature, Version, has
from sandboxd.vm.machine import UNLIMITED, MachineSpec, Rate

GUEST_CID = 3
IFACE = "eth0"
MAX_CPUS = 32  # firecracker.yaml, MachineConfiguration
MAX_DRIVES = 16  # of 19 interrupt lines for devices, three are for network, vsock and entropy
CALL_S = 5.0
START_S = 20.0
BUCKET_MS = 1000
"""A bucket holds what comes in a second. A much smaller one would overflow between two looks of the limiter, 100 ms
apart; and Linux makes requests of up to 1.25 MiB, of which each that is larger than the bucket is an error in the log
(Firecracker's rate_limiter/mod.rs)."""
WRITTEN_MB_S = 20  # a disk slower than that is not waited for when memory is saved


class Names(StrEnum):
    """What is in the jail. `LOG` and `METRICS` are to be named pipes whose maker holds them open for reading: a guest
    can make its VMM write into them as long as it likes, and a full pipe drops what a file would keep. Drives are
    `drive(0)` and so on."""

    API_SOCKET = "api.sock"
    VSOCK = "v.sock"
    KERNEL = "kernel"
    INITRAMFS = "initramfs"
    LOG = "log"
    METRICS = "metrics"
    SNAPSHOT = "snapshot"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Request:
    """One call of the API."""

    method: str
    path: str
    body: Mapping[str, object] | None = None
    deadline_s: float = CALL_S

    @property
    def step(self) -> str:
        return f"{self.method} {self.path}"


def drive(index: int) -> str:
    """A drive's id, and its name in the jail."""
    return f"drive{index}"


def unsupported(spec: MachineSpec) -> str | None:
    """Why Firecracker cannot run such a machine."""
    if spec.share is not None:
        return "Firecracker cannot share a directory of the host with its guest"
    if spec.cpus > MAX_CPUS:
        return f"Firecracker gives a machine at most {MAX_CPUS} processors, not {spec.cpus}"
    if len(spec.drives) > MAX_DRIVES:
        return f"Firecracker gives a machine at most {MAX_DRIVES} drives, not {len(spec.drives)}"
    return None


def boot_args(arch: Arch, serial: bool) -> str:
    """The kernel's command line. A guest that panics or reboots ends its VMM. Without `serial` the kernel leaves the
    serial port alone, each byte of which costs an exit from the guest. On x86_64, no time is spent on looking for
    a keyboard controller's devices, and there is no PCI."""
    words = ["panic=1", "quiet"]
    if arch is Arch.X86_64:
        words = ["reboot=k", *words, "pci=off", "i8042.noaux", "i8042.nomux", "i8042.nopnp", "i8042.dumbkbd"]
    elif serial:
        words += ["keep_bootcon"]
    return " ".join([*words, "console=ttyS0" if serial else "8250.nr_uarts=0"])


def requests(
    spec: MachineSpec, version: Version, arch: Arch, tap_name: str | None, serial: bool = False
) -> tuple[Request, ...]:
    """The calls that boot a machine. With `serial` the console is the VMM's standard output."""
    if (why := unsupported(spec)) is not None:
        raise ValueError(why)
    _check_tap(spec, tap_name)
    found = [
        *_observed(),
        Request("PUT", "/machine-config", {"vcpu_count": spec.cpus, "mem_size_mib": spec.memory_mb}),
        Request(
            "PUT", "/boot-source",
            {
                "kernel_image_path": Names.KERNEL.value,
                "initrd_path": Names.INITRAMFS.value,
                "boot_args": boot_args(arch, serial),
            },
        ),
    ]  # fmt: skip
    for index, disk in enumerate(spec.drives):
        # No root device: the kernel starts from its initramfs, and finds the drives as vda, vdb, … in this order.
        body: dict[str, object] = {
            "drive_id": drive(index),
            "path_on_host": drive(index),
            "is_root_device": False,
            "is_read_only": disk.read_only,
        }
        if not disk.read_only:
            # What a guest has synced is on the host's disk, too.
            body["cache_type"] = "Writeback"
        if disk.rate != UNLIMITED:
            body["rate_limiter"] = _rate_limiter(disk.rate)
        found.append(Request("PUT", f"/drives/{drive(index)}", body))
    if tap_name is not None:
        interface = {"iface_id": IFACE, "host_dev_name": tap_name, "guest_mac": spec.mac}
        found.append(Request("PUT", f"/network-interfaces/{IFACE}", interface))
    if has(version, Feature.ENTROPY):
        found.append(Request("PUT", "/entropy", {}))
    found.append(Request("PUT", "/vsock", {"guest_cid": GUEST_CID, "uds_path": Names.VSOCK.value}))
    found.append(Request("PUT", "/actions", {"action_type": "InstanceStart"}, START_S))
    return tuple(found)


def resume_request() -> Request:
    return Request("PATCH", "/vm", {"state": "Resumed"})


def snapshot_requests(memory_mb: int) -> tuple[Request, ...]:
    """The calls that save a machine. It stays paused: in some versions one that is resumed in place is out of reach
    (`firecracker_versions.resumes`), so whoever goes on with it restores it."""
    names = {"snapshot_path": Names.SNAPSHOT.value, "mem_file_path": Names.MEMORY.value}
    return (
        Request("PATCH", "/vm", {"state": "Paused"}),
        Request(
            "PUT", "/snapshot/create", {"snapshot_type": "Full", **names}, START_S + memory_mb / WRITTEN_MB_S
        ),
    )  # fmt: skip


def load_requests(
    spec: MachineSpec, version: Version, tap_name: str | None, replaced: Sequence[int] = ()
) -> tuple[Request, ...]:
    """The calls that restore a machine in a fresh VMM. Drives whose index is in `replaced` are others than those of the
    snapshot: the guest is told, before it runs, that they have another size. The limits of a drive are in the snapshot;
    those that it has now take their place."""
    _check_tap(spec, tap_name)
    if not all(0 <= index < len(spec.drives) for index in replaced):
        raise ValueError("a drive to be replaced is none of the machine's")
    load: dict[str, object] = {
        "snapshot_path": Names.SNAPSHOT.value,
        "mem_backend": {"backend_type": "File", "backend_path": Names.MEMORY.value},
        "resume_vm": False,
    }
    # An older version finds the tap and the socket by the names that the snapshot has.
    if tap_name is not None and has(version, Feature.NETWORK_OVERRIDES):
        load["network_overrides"] = [{"iface_id": IFACE, "host_dev_name": tap_name}]
    if has(version, Feature.VSOCK_OVERRIDE):
        load["vsock_override"] = {"uds_path": Names.VSOCK.value}
    changes = []
    for index, disk in enumerate(spec.drives):
        change: dict[str, object] = {}
        if index in replaced:
            change["path_on_host"] = drive(index)
        if disk.rate != UNLIMITED:
            change["rate_limiter"] = _rate_limiter(disk.rate)
        if change:
            changes.append(Request("PATCH", f"/drives/{drive(index)}", {"drive_id": drive(index), **change}))
    return (
        *_observed(),
        Request("PUT", "/snapshot/load", load, START_S),
        *changes,
        resume_request(),
    )


def _rate_limiter(rate: Rate) -> dict[str, object]:
    """Both buckets: one of size 0 limits nothing, where one that is left out leaves a saved limit in force."""
    sizes = {"bandwidth": rate.bytes_per_s or 0, "ops": rate.ops_per_s or 0}
    return {name: {"size": size, "refill_time": BUCKET_MS} for name, size in sizes.items()}


def _observed() -> tuple[Request, ...]:
    """Taken before a machine is configured or restored."""
    return (
        Request("PUT", "/logger", {"log_path": Names.LOG.value, "level": "Warning", "show_level": True}),
        Request("PUT", "/metrics", {"metrics_path": Names.METRICS.value}),
    )


def _check_tap(spec: MachineSpec, tap_name: str | None) -> None:
    if (tap_name is None) != (spec.mac == ""):
        raise ValueError("an interface has a tap and a MAC address")
