"""The guest of a stand-in: QEMU's emulation of what Firecracker would have run, and sandbox-vsock beside it.

In: what the API was told, with every file already open. Out: a `Guest` that runs, pauses, saves itself and ends. Only
the devices differ from Firecracker's: they are on a PCI bus, since QEMU's `microvm` does not boot this kernel under
emulation. Everything here ends with the process that started it.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from sandboxd.vm.monitor import Monitor

ROOT = Path(__file__).resolve().parents[2]
VSOCK_PROGRAM = ROOT / "build" / "sandbox-vsock"
# A kernel under emulation needs more patience with its clocks, and gains from not guarding what runs on no processor.
EMULATED = "mitigations=off noreplace-smp acpi=noirq no_timer_check tsc=reliable cryptomgr.notests"
NOT_EMULATED = {"pci=off"}
SAVE_S = 60.0
UNPLUG_S = 10.0


@dataclass(frozen=True)
class Disk:
    """`limits` are QEMU's (ThrottleLimits), 0 for none."""

    fd: int
    read_only: bool
    limits: Mapping[str, int]


@dataclass(frozen=True)
class Parts:
    """What a guest is made of. The descriptors stay their opener's."""

    kernel: int
    initramfs: int | None
    boot_args: str
    cpus: int
    memory_mib: int
    disks: Sequence[Disk]
    taps: Sequence[tuple[int, str]] = ()
    vsock: tuple[int, int] | None = None  # the listening socket, the guest's CID
    entropy: bool = False


def kernel_line(boot_args: str) -> str:
    return " ".join([*(word for word in boot_args.split() if word not in NOT_EMULATED), EMULATED])


def argv(parts: Parts, monitor: int, serial: int, vhost: int | None, saved: int | None) -> list[str]:
    command = [
        "qemu-system-x86_64",
        "-nodefaults",
        "-no-user-config",
        "-display", "none",
        "-machine", "pc-i440fx-7.2,memory-backend=memory,usb=off,vmport=off,smbus=off",
        "-accel", "tcg,tb-size=256",
        "-cpu", "Nehalem,+rdrand",
        "-smp", str(parts.cpus),
        "-m", f"{parts.memory_mib}M",
        "-object", f"memory-backend-memfd,id=memory,size={parts.memory_mib}M,share=on",
        "-kernel", f"/proc/self/fd/{parts.kernel}",
        "-append", kernel_line(parts.boot_args),
        "-chardev", f"socket,id=serial,fd={serial}",
        "-serial", "chardev:serial",
        "-chardev", f"socket,id=monitor,fd={monitor},server=on,wait=off",
        "-mon", "chardev=monitor,mode=control",
        "-action", "reboot=shutdown,shutdown=pause,panic=none",
    ]  # fmt: skip
    if parts.initramfs is not None:
        command += ["-initrd", f"/proc/self/fd/{parts.initramfs}"]
    for index, disk in enumerate(parts.disks):
        access = "read-only=on" if disk.read_only else "read-only=off,discard=unmap"
        command += [
            "-add-fd", f"fd={disk.fd},set={index}",
            "-blockdev", f"driver=file,node-name=file{index},filename=/dev/fdset/{index},{access}",
            "-blockdev", f"driver=raw,node-name=drive{index},file=file{index},{access}",
            # Always there, so that limits can come later.
            "-object", json.dumps({"qom-type": "throttle-group", "id": f"rate{index}", "limits": disk.limits}),
            "-blockdev", f"driver=throttle,node-name=top{index},throttle-group=rate{index},file=drive{index},{access}",
            "-device", f"virtio-blk-pci,id=disk{index},drive=top{index},werror=report,rerror=report",
        ]  # fmt: skip
    for index, (fd, mac) in enumerate(parts.taps):
        device = f"virtio-net-pci,netdev=net{index},romfile=" + (f",mac={mac}" if mac else "")
        command += ["-netdev", f"tap,id=net{index},fd={fd},vhost=off", "-device", device]
    if parts.entropy:
        command += ["-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng"]
    if vhost is not None:
        command += ["-chardev", f"socket,id=vsock0,fd={vhost}"]
        # What is restored had no such device while it was saved; it gets one afterwards.
        command += ["-device", "vhost-user-vsock-pci,id=vsock,chardev=vsock0"] if saved is None else []
    if saved is not None:
        command += ["-incoming", f"fd:{saved}", "-S"]
    return command


class Guest:
    """Made by `start`."""

    def __init__(self, parts: Parts, console: Callable[[bytes], None]) -> None:
        self._parts = parts
        self._console = console
        self._stack = ExitStack()
        self._devices = itertools.count(1)
        self._files = itertools.count(1)
        self._qemu: subprocess.Popen[bytes] | None = None
        self._device: subprocess.Popen[bytes] | None = None
        self._monitor: Monitor | None = None
        self._plugged = False

    async def start(self, saved: int | None = None) -> None:
        """`saved`: what `save` wrote, to go on from there. The deadline is the caller's."""
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fcs-")))
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(self._directory / "qmp"))
        listener.listen(8)
        self.serial, far_serial = socket.socketpair()
        self.serial.setblocking(False)
        self._stack.callback(self.serial.close)
        vhost = device = None
        if self._parts.vsock is not None:
            vhost, device = socket.socketpair()
        command = argv(
            self._parts, listener.fileno(), far_serial.fileno(), None if vhost is None else vhost.fileno(), saved
        )
        fds = [listener.fileno(), far_serial.fileno(), self._parts.kernel, *(disk.fd for disk in self._parts.disks)]
        fds += [fd for fd, _ in self._parts.taps]
        fds += [fd for fd in (self._parts.initramfs, saved) if fd is not None]
        if device is not None:
            assert vhost is not None
            fds.append(vhost.fileno())
            self._start_device(device)
        self._qemu = self._spawn(command, fds)
        for end in (far_serial, vhost):
            if end is not None:
                end.close()
        self._monitor = await Monitor.connect(self._directory / "qmp")
        self._plugged = saved is None and self._parts.vsock is not None
        if saved is not None:
            await self._migrated()
            for index, disk in enumerate(self._parts.disks):
                await self._tell_size(index, disk.fd, disk.read_only)
            if self._parts.vsock is not None:
                await self._execute("device_add", driver="vhost-user-vsock-pci", id="vsock", chardev="vsock0")
                self._plugged = True
            await self.resume()

    async def run(self) -> int:
        """Returns what a Firecracker would exit with, once the guest has reset itself or QEMU is gone."""
        qemu, monitor = self._qemu, self._monitor
        assert qemu is not None and monitor is not None
        codes: list[int] = []
        async with anyio.create_task_group() as group:

            async def ended() -> None:
                pidfd = os.pidfd_open(qemu.pid)
                try:
                    await anyio.wait_readable(pidfd)
                finally:
                    os.close(pidfd)
                codes.append(1)
                group.cancel_scope.cancel()

            async def stopped() -> None:
                # A guest that powers off only halts its processors there: Firecracker has no such device.
                if await monitor.wait_stopped() and monitor.stopped == "guest-reset":
                    codes.append(0)
                    group.cancel_scope.cancel()

            group.start_soon(self._read_serial)
            group.start_soon(ended)
            group.start_soon(stopped)
        return codes[0]

    async def pause(self) -> None:
        await self._execute("stop")

    async def resume(self) -> None:
        if not self._plugged and self._parts.vsock is not None:
            await self._plug()
        await self._execute("cont")

    async def ctrl_alt_del(self) -> None:
        keys = [{"type": "qcode", "data": key} for key in ("ctrl", "alt", "delete")]
        await self._execute("send-key", keys=keys)

    async def save(self, fd: int) -> None:
        """Of a paused guest, which stays paused. QEMU cannot save the vsock device, so the guest runs for the moment it
        takes to let go of it."""
        if self._plugged:
            await self._execute("cont")
            await self._execute("device_del", id="vsock")
            with anyio.fail_after(UNPLUG_S):
                while "'vsock'" in repr(await self._execute("query-pci")):  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            await self._execute("stop")
            self._plugged = False
        await self._execute("migrate", uri=f"exec:cat > /proc/{os.getpid()}/fd/{fd}")
        await self._migrated()

    async def exchange(self, index: int, fd: int, read_only: bool) -> None:
        """Another file for a disk, in a guest that runs."""
        node = f"file{index}-{next(self._files)}"
        name = f"/proc/{os.getpid()}/fd/{fd}"
        access = {"read-only": read_only}
        await self._execute(
            "blockdev-add", driver="file", filename=name, locking="off", **{"node-name": node}, **access
        )
        options = [{"driver": "raw", "node-name": f"drive{index}", "file": node, **access}]
        await self._execute("blockdev-reopen", options=options)
        await self._tell_size(index, fd, read_only)

    async def limit(self, index: int, limits: Mapping[str, int]) -> None:
        await self._execute("qom-set", path=f"/objects/rate{index}", property="limits", value=limits)

    async def _tell_size(self, index: int, fd: int, read_only: bool) -> None:
        """The guest learns that its disk has changed; of a read-only one QEMU tells it nothing."""
        if not read_only:
            await self._execute("block_resize", size=os.fstat(fd).st_size, **{"node-name": f"top{index}"})

    def deafen(self) -> None:
        """Its vsock takes connections and answers none, as in versions with that fault. QEMU cannot reset it then."""
        assert self._device is not None
        self._device.send_signal(signal.SIGSTOP)

    async def end(self) -> None:
        if self._monitor is not None:
            await self._monitor.close()
        self._stack.close()

    async def _execute(self, name: str, **arguments: object) -> object:
        assert self._monitor is not None
        return await self._monitor.execute(name, **arguments)

    async def _migrated(self) -> None:
        with anyio.fail_after(SAVE_S):
            while True:
                answer = await self._execute("query-migrate")
                status = answer.get("status") if isinstance(answer, dict) else None
                if status == "completed":
                    return
                if status == "failed":
                    raise OSError("QEMU could not save or restore the guest")
                await anyio.sleep(0.01)

    async def _plug(self) -> None:
        """The device again, with a new process behind it."""
        number = next(self._devices)
        path = str(self._directory / f"vhost{number}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(1)
            address = {"type": "unix", "data": {"path": path}}
            backend = {"type": "socket", "data": {"addr": address, "server": False}}
            await self._execute("chardev-add", id=f"vsock{number}", backend=backend)
            device, _ = listener.accept()
        self._start_device(device)
        await self._execute("device_add", driver="vhost-user-vsock-pci", id="vsock", chardev=f"vsock{number}")
        self._plugged = True

    def _start_device(self, end: socket.socket) -> None:
        assert self._parts.vsock is not None
        listen_fd, cid = self._parts.vsock
        command = [str(VSOCK_PROGRAM), "--vhost-fd", str(end.fileno()), "--listen-fd", str(listen_fd)]
        self._device = self._spawn([*command, "--guest-cid", str(cid)], [end.fileno(), listen_fd])
        end.close()

    def _spawn(self, command: Sequence[str], fds: Sequence[int]) -> subprocess.Popen[bytes]:
        # The parent of that signal is a thread: the one that runs the event loop, which lasts as long as the process.
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], pass_fds=fds, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._stack.callback(_end, process)
        return process

    async def _read_serial(self) -> None:
        while True:
            await anyio.wait_readable(self.serial)
            with suppress(OSError):
                data = self.serial.recv(65536)
                if not data:
                    return
                self._console(data)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    process.wait(10)
