"""Starts `attack.c` in a VMM's place, as root or as whoever runs this, has it carry out attempts, and ends it.

As a script (`python -m tests.vm.attacking BACKEND DIRECTORY`, a `Plan` as JSON on its input) it does so for another
user's tests: it prints a `Result` as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio

from sandboxd import unixpath
from sandboxd.errors import SandboxError
from sandboxd.vm import cgroups, commands, firecracker_machine, firecracker_start, jail, jailer, qemu
from sandboxd.vm.arch import Arch
from sandboxd.vm.commands import Accelerator
from sandboxd.vm.firecracker_client import CallFailed, Client
from sandboxd.vm.firecracker_versions import parse
from sandboxd.vm.machine import Drive, MachineSpec

BUILD = Path(__file__).resolve().parents[2] / "build"
REPORT = 65536
SCRATCH_BYTES = 1 << 20
REPLY_S = 30.0
UID = 979_700 + os.getpid() % 100  # of this run alone: what another run starts would count against its limits


@dataclass
class Plan:
    """`attempts` are lines for attack.c; so are `swaps`, which come last."""

    attempts: list[str]
    swaps: list[str]


@dataclass
class Result:
    """What the program said, and what became of the host's side of it afterwards."""

    attempts: list[str] = field(default_factory=list)
    swaps: list[str] = field(default_factory=list)
    status: dict[str, str] = field(default_factory=dict)
    console_s: float = 0.0
    reached: dict[str, str] = field(default_factory=dict)
    adopted: bool = False
    left: list[str] = field(default_factory=list)


def described(directory: Path, uid: int | None) -> MachineSpec:
    """A machine of files of no meaning, below `directory`."""
    own = directory / "own"
    own.mkdir(mode=0o700)
    for name in ("kernel", "initramfs", "image", "scratch"):
        (directory / name).write_bytes(bytes(SCRATCH_BYTES))
    drives = (Drive(directory / "image", True), Drive(directory / "scratch", False))
    return MachineSpec("box_1", 1, 256, directory / "kernel", directory / "initramfs", drives, own, uid)


async def ask(scratch: Path, number: int, lines: Sequence[str]) -> list[str]:
    """What came of `lines`, which the program reads from its drive."""
    with scratch.open("r+b") as file:
        file.write("\n".join([str(number), *lines, ""]).encode().ljust(REPORT, b"\0"))
    deadline = time.monotonic() + REPLY_S
    while time.monotonic() < deadline:
        lines = report(scratch)
        if f"end: {number}" in lines:
            return lines
        await anyio.sleep(0.01)
    raise TimeoutError(f"the program said nothing of script {number}")


def report(scratch: Path) -> list[str]:
    return scratch.read_bytes()[REPORT:].partition(b"\0")[0].decode(errors="replace").splitlines()


async def run(backend: str, directory: Path, program: Path, launcher: Path, instance: str, plan: Plan) -> Result:
    root = os.geteuid() == 0
    spec = described(directory, UID if root else None)
    start: Any = qemu.start
    adopt: Any = qemu.adopt
    if backend == "qemu":
        found = commands.find_tools(BUILD / "sandbox-vsock", instance, Accelerator.TCG)
        tools: Any = replace(found, qemu=jail.program(program))
    else:
        start, adopt = firecracker_start.start, firecracker_machine.adopt
        tools = firecracker_machine.Tools(
            jailer.Tools(program, launcher, jail.find_tools(root)), jail.program(program),
            parse("Firecracker v1.16.1"), Arch.X86_64, instance, 4096, cgroups.find() if root else None,
        )  # fmt: skip
    result = Result()
    machine = await start(spec, tools)
    try:
        scratch = directory / "scratch"
        result.status = status(machine.programs[0].pid)
        result.attempts = await ask(scratch, 1, plan.attempts)
        result.swaps = await ask(scratch, 2, plan.swaps)
        with suppress(OSError, CallFailed):
            result.reached["vsock"] = "refused"
            with unixpath.named(machine.vsock_path) as name, socket.socket(socket.AF_UNIX) as sock:
                sock.connect(name)
                result.reached["vsock"] = "connected"
        if backend != "qemu":
            root_fd = os.open(machine.vsock_path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                result.reached["api"] = "refused"
                await Client(root_fd).info()
                result.reached["api"] = "connected"
            except CallFailed:
                pass
            finally:
                os.close(root_fd)
        await ask(scratch, 3, ["flood"])
        started = time.monotonic()
        await machine.console_tail()
        result.console_s = time.monotonic() - started
        again = await adopt(spec.directory, spec.id, tools)
        result.adopted = again is not None
        if again is not None and backend != "qemu":
            result.reached["snapshot"] = "taken"
            try:
                await firecracker_machine.snapshot(again, spec, directory / "kept")
            except SandboxError:
                result.reached["snapshot"] = "refused"
            left = [entry.name for entry in os.scandir(directory) if entry.name.startswith("kept")]
            result.reached |= {name: "left" for name in left}
        elif again is not None:
            await again.terminate()
    finally:
        await machine.terminate()
    result.left = sorted(os.listdir(spec.directory))
    return result


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def main(backend: str, directory: Path, program: Path, instance: str) -> None:
    plan = Plan(**json.loads(sys.stdin.read()))
    print(json.dumps(asdict(await run(backend, directory, program, Path("/nonexistent"), instance, plan))))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
