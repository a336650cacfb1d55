"""Starts machines in a process of its own, so that tests can kill the starter, or be another user.

`python -m tests.vm.starting DIRECTORY IDS INSTANCE hold|ping|restore|die-N [STANDIN]`: says "go" before it starts the
machines and "started" after, and meanwhile has a lock on DIRECTORY/lock; `hold` then waits to be killed, `ping` asks
guestd of each and ends it, `restore` saves and restores it in between, and asks again, `die-N` saves it and is killed
at the Nth call for that, which it does not make. With STANDIN, the directory of the stand-ins, it is the Firecracker
backend that starts them.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import anyio

from sandboxd import unixpath
from sandboxd.vm import cgroups, firecracker_machine, firecracker_start, jail, jailer, qemu
from sandboxd.vm.arch import Arch
from sandboxd.vm.commands import Tools, find_tools
from sandboxd.vm.firecracker_versions import read
from sandboxd.vm.machine import Drive, Machine, MachineSpec

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
FIRST_UID = 978_000
BOOT_S = 60  # a boot is 4 s; machines that share two cores are slower


def tools(instance: str) -> Tools:
    return find_tools(BUILD / "sandbox-vsock", instance)


def firecracker_tools(instance: str, standin: Path) -> firecracker_machine.Tools:
    root = os.geteuid() == 0
    found = jail.find_tools(root)
    if not root:
        found = replace(found, bwrap=standin / "bwrap")
    program = standin / "firecracker"
    return firecracker_machine.Tools(
        jailer.Tools(program, standin / "jailer", found), jail.program(program),
        read((standin / "version").read_text()), Arch.X86_64, instance, 4096, cgroups.find() if root else None,
    )  # fmt: skip


def spec(directory: Path, id: str, number: int = 0, **changes: object) -> MachineSpec:
    """`directory` holds links kernel, initramfs, runtime, image; scratch and the machine's own directory are made."""
    own = directory / id
    own.mkdir(mode=0o700, exist_ok=True)
    scratch = own / "scratch"
    with scratch.open("ab") as file:
        file.truncate(64 << 20)
    values: dict[str, object] = {
        "id": id,
        "cpus": 1,
        "memory_mb": 256,
        "kernel": (directory / "kernel").resolve(),
        "initramfs": (directory / "initramfs").resolve(),
        "drives": (
            Drive((directory / "runtime").resolve(), True),
            Drive((directory / "image").resolve(), True),
            Drive(scratch, False),
        ),
        "directory": own,
        "uid": FIRST_UID + number if os.geteuid() == 0 else None,
    }
    return MachineSpec(**(values | changes))  # type: ignore[arg-type]


async def ping(machine: Machine) -> bytes:
    """guestd's answer, however long it takes to come up, unless the machine ends before."""
    answer = b""

    async def ask() -> None:
        nonlocal answer
        while not answer.endswith(b"\n"):
            with unixpath.named(machine.vsock_path) as name:
                stream = await anyio.connect_unix(name)
            async with stream:
                await stream.send(b"CONNECT 5000\n")
                try:
                    if not (await stream.receive()).startswith(b"OK "):
                        raise anyio.EndOfStream
                    await stream.send(b'{"op":"ping"}\n')
                    answer = await stream.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    await anyio.sleep(0.05)
        group.cancel_scope.cancel()

    async def ended() -> None:
        await machine.wait_exit()
        group.cancel_scope.cancel()

    with anyio.fail_after(BOOT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            group.start_soon(ended)
    return answer


def _die_at_call(number: int) -> None:
    """There is one connection for each call."""
    left = number

    def hook(event: str, _: object) -> None:
        nonlocal left
        if event == "socket.connect":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


async def main(directory: Path, ids: str, instance: str, what: str, *standin: str) -> None:
    lock = os.open(directory / "lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    print("go", flush=True)
    machines: list[Machine] = []
    for number, id in enumerate(ids.split(",")):
        described = spec(directory, id, number)
        if standin:
            found = firecracker_tools(instance, Path(standin[0]))
            machines.append(await firecracker_start.start(described, found))
        else:
            machines.append(await qemu.start(described, tools(instance)))
    print("started", flush=True)
    if what == "hold":
        await anyio.sleep_forever()
    if what.startswith("die-"):
        _die_at_call(int(what.removeprefix("die-")))
    for machine in machines:
        if what in ("ping", "restore"):
            print((await ping(machine)).decode().strip(), flush=True)
        if what == "restore" or what.startswith("die-"):
            assert isinstance(machine, firecracker_machine.FirecrackerMachine)
            await firecracker_machine.snapshot(machine, described, directory / "kept")
            machine = await firecracker_start.restore(described, found, directory / "kept")
            print((await ping(machine)).decode().strip(), flush=True)
        await machine.terminate()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), *sys.argv[2:])
