"""A machine under Firecracker: saved, ended, adopted after a restart of the daemon, swept up.

In: a machine that `firecracker_start` started, or the directory of one. Out: no machine, files to restore it from, or
a `FirecrackerMachine`. It outlives whoever started it. Everything it says is hostile from the moment the guest runs,
and so is every name in an ordinary user's jail, whose directory it may write to: its sockets are looked for in the open
directory, no link is followed, and its pipes are held open since before it ran.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from sandboxd import trees
from sandboxd.errors import SandboxError
from sandboxd.vm import (
    cgroups,
    firecracker,
    firecracker_versions,
    jail,
    jailer,
    processes,
    saved_files,
    watch,
)
from sandboxd.vm.arch import Arch
from sandboxd.vm.cgroups import Group, Hierarchy
from sandboxd.vm.child import Child
from sandboxd.vm.firecracker import Names
from sandboxd.vm.firecracker_calls import State
from sandboxd.vm.firecracker_client import CallFailed, Client
from sandboxd.vm.firecracker_versions import Version
from sandboxd.vm.machine import MachineSpec, Program
from sandboxd.vm.processes import Process, Record

VMM = "Firecracker"
ADOPT_S = 10.0  # a VMM whose daemon was killed may be busy with writing memory
CONSOLE_BYTES = 64 * 1024

log = logging.getLogger("sandboxd")


@dataclass(frozen=True, slots=True)
class Tools:
    """The programs of this host, the version they have, and what marks what is started with them. `program` is
    Firecracker in an ordinary user's jail, `groups` are root's machines'."""

    jailer: jailer.Tools
    program: jail.Program
    version: Version
    arch: Arch
    instance: str
    open_files: int
    groups: Hierarchy | None


class FirecrackerMachine:
    """A running machine. Made by `firecracker_start` and `adopt`, which hand over what they hold in `held`."""

    def __init__(
        self, id: str, version: Version, directory: Path, process: Process, pidfds: Sequence[int],
        started: Child | None, group: Group | None, root: Path, held: ExitStack,
    ) -> None:  # fmt: skip
        self.spec_id = id
        self.programs = (Program(process.pid, process.start_ticks),)
        self.vsock_path = root / Names.VSOCK
        self._version, self._directory, self._root = version, directory, root
        self._pidfds, self._child, self._group = list(pidfds), started, group
        self._held = held
        self._console = bytearray()
        self._ending = anyio.Lock()
        self._ended = self._saving = False

    async def console_tail(self, limit_bytes: int = 8192) -> bytes:
        """What was written since the daemon started it, where the spec asked for a console."""
        if self._child is not None and not self._ended:
            self._console += self._child.errors()
            del self._console[:-CONSOLE_BYTES]
        return bytes(self._console[-limit_bytes:])

    @property
    def ended(self) -> bool:
        return self._ended

    async def wait_exit(self) -> None:
        if self._ending.locked() or self._ended:
            async with self._ending:
                return
        with ExitStack() as stack:
            await watch.first(*watch.ends(stack, self._pidfds))

    async def terminate(self) -> None:
        with anyio.CancelScope(shield=True):
            async with self._ending:
                if not self._ended:
                    await self._end()

    async def save(self, spec: MachineSpec, directory: Path) -> None:
        """As `snapshot`, but what failed is raised as it is."""
        if self._saving:
            # The files of both would have the same names.
            raise SandboxError("it is being saved already")
        root, new = open_directory(self._root), self._directory / saved_files.UNFINISHED
        self._saving = True
        try:
            await anyio.to_thread.run_sync(saved_files.prepare, root, new, directory, spec.uid, spec.memory_mb)
            client = Client(root)
            try:
                for call in firecracker.snapshot_requests(spec.memory_mb):
                    await client.send(call)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._go_on(client)
                raise
            with anyio.CancelScope(shield=True):
                async with self._ending:
                    if self._ended:
                        raise SandboxError("it was ended meanwhile")
                    await self._end(partial(saved_files.take_out, root, new, directory, spec.uid, spec.memory_mb))
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(saved_files.discard, root, new)
            os.close(root)
            self._saving = False

    async def _go_on(self, client: Client) -> None:
        """Of one that is paused: where its guest can be reached afterwards it runs again, else it is ended."""
        if firecracker_versions.resumes(self._version):
            with suppress(CallFailed, OSError):
                await client.send(firecracker.resume_request())
                return
        await self.terminate()

    async def _end(self, take_out: Callable[[], None] = lambda: None) -> None:
        """What is wanted of its files is taken out in between: no process of it is left, its jail still is."""
        gone = await anyio.to_thread.run_sync(end, self._pidfds, self._group)
        try:
            if gone:
                await anyio.to_thread.run_sync(take_out)
        finally:
            await self.console_tail()
            self._ended = True
            if gone:
                # Else it may still write: nobody else gets its drives for as long as this process lives.
                self._held.close()
            if self._child is not None:
                self._child.close()
            await anyio.to_thread.run_sync(clean, self._directory)
            if gone:
                processes.remove_record(self._directory)
        if not gone:
            raise SandboxError(f"{self.spec_id}: a process did not end in {processes.END_S:.0f} s")


async def snapshot(machine: FirecrackerMachine, spec: MachineSpec, directory: Path) -> None:
    """Saves what the machine has in memory to `directory`, which is made, on the file system of the machine's own, and
    ends it: a VMM that goes on could go on writing to what it has saved, and in some versions nobody reaches a guest
    that is resumed in place. Whoever wants it to go on restores it. To what is saved belong its drives, as they are
    when this returns: those are the caller's to keep. Raises SandboxError, with no directory left. The machine then
    runs on where there is no room for what is saved, and where its VMM fails to save it, but resumes it and is of a
    version whose guests are within reach afterwards; else it has ended. The error says which."""
    try:
        await machine.save(spec, directory)
    except (CallFailed, SandboxError, OSError) as fault:
        why = jailer.reason(fault) if isinstance(fault, OSError) else fault
        then = "it has ended" if machine.ended else "it runs on"
        raise SandboxError(f"{spec.id} could not be saved: {why}; {then}") from fault


async def adopt(directory: Path, id: str, tools: Tools) -> FirecrackerMachine | None:
    """The machine an earlier run of the daemon left in `directory`; None unless its VMM still runs, or if that says
    that its guest does not. One whose guest was left paused is resumed where that leaves it within reach. What is
    left of one that cannot be adopted is ended, as far as its record tells; `sweep` finds the rest. Its drives are no
    longer locked: that they are this machine's alone, records say. Raises OSError where it cannot be seen, with the
    machine left alone."""
    record = processes.read_record(directory)
    if record is None:
        return None
    group = cgroups.group(tools.groups, record.instance, id)
    held = processes.hold_all(record.processes)
    pidfds = [fd for _, fd in held]
    vmm = next((process for process, _ in held if process.role == VMM), None)
    try:
        if record.id == id and vmm is not None and _is_its(vmm, record, group):
            root = _found_root(directory, id, tools)
            try:
                version = await _running(root, directory, id, tools)
                return FirecrackerMachine(id, version, directory, vmm, pidfds, None, group, root, ExitStack())
            except (CallFailed, SandboxError) as fault:
                log.error("%s: its VMM is not taken back, and is ended: %s", id, fault)
    except BaseException:
        for pidfd in pidfds:
            os.close(pidfd)
        raise
    if await anyio.to_thread.run_sync(end, pidfds, group if record.id == id else None):
        processes.remove_record(directory)
    await anyio.to_thread.run_sync(clean, directory)
    return None


async def _running(jailed: Path, directory: Path, id: str, tools: Tools) -> Version:
    """Sees to it that the guest runs whose VMM has the root `jailed`. Returns the VMM's version, taken to be today's
    where it says nothing. Raises CallFailed, SandboxError; OSError where that is no fault of the VMM's."""
    with ExitStack() as stack:
        try:
            root = open_directory(jailed)
            stack.callback(os.close, root)
            if tools.groups is not None:
                # It may have been left before that was done.
                jailer.take_back(root)
        except (FileNotFoundError, NotADirectoryError) as fault:
            raise SandboxError("its jail is not as it was made") from fault
        client = Client(root)
        try:
            info = await client.info(ADOPT_S)
        except CallFailed as fault:
            # On a busy host, say. Whether the guest answers is another question, and asked again and again.
            log.warning("%s: its VMM is taken back without an answer from it: %s", id, fault)
            return tools.version
        if info.state is State.PAUSED and firecracker_versions.resumes(info.version):
            await client.send(firecracker.resume_request())
            log.warning("%s: its guest was paused, and goes on", id)
        elif info.state is not State.RUNNING:
            raise SandboxError(f"its guest does not run ({info.state.value})")
        await anyio.to_thread.run_sync(saved_files.discard, root, directory / saved_files.UNFINISHED)
    if info.version != tools.version and (known := firecracker_versions.against(info.version)):
        log.warning("%s goes on under Firecracker %s, until it is ended: %s", id, info.version, known)
    return info.version


def sweep(sandboxes_dir: Path, known_ids: Collection[str], tools: Tools) -> set[str]:
    """Ends every VMM of our instance whose id is not in `known_ids`; returns the ids found. Of another instance, from
    before the state directory was renamed, it ends what records name. Called with the lock of the state directory held.
    Blocking. Raises OSError where processes cannot be looked at."""
    ended: set[str] = set()
    directories = processes.unknown(sandboxes_dir, known_ids)
    if tools.groups is not None:
        for group in tools.groups.left(tools.instance, known_ids, directories):
            if group.pids():
                ended.add(group.id)
            group.remove()
    else:
        ended |= processes.sweep_marked(tools.instance, lambda id: id not in known_ids, {os.getuid()})
    for directory in directories:
        if processes.end_recorded(directory):
            ended.add(directory.name)
        clean(directory)
    return ended


def root_of(directory: Path, id: str, tools: Tools) -> Path:
    """What is / for a jailed VMM, and an ordinary user's working directory."""
    if tools.groups is None:
        return directory / jailer.DIRECTORY
    return directory / jailer.DIRECTORY / tools.jailer.firecracker.name / jailer.jailed_id(id) / "root"


def _found_root(directory: Path, id: str, tools: Tools) -> Path:
    """The same of a machine that runs: in its jail's path is the name of the program it was started with, and that of
    today's may be another. What is above the root is root's alone."""
    if tools.groups is not None:
        for found in (directory / jailer.DIRECTORY).glob(f"*/{jailer.jailed_id(id)}/root"):
            return found
    return root_of(directory, id, tools)


def _is_its(process: Process, record: Record, group: Group | None) -> bool:
    if group is not None:
        return group.holds(process.pid)
    return processes.marked_id(processes.command_line(process.pid), record.instance) == record.id


def end(pidfds: Sequence[int], group: Group | None) -> bool:
    gone = processes.end(pidfds)
    return (group is None or group.remove()) and gone


def clean(directory: Path) -> None:
    """Removes the jail, following nothing in it, and an unfinished snapshot. The drives have other names elsewhere."""
    trees.remove(directory / jailer.DIRECTORY)
    trees.remove(directory / saved_files.UNFINISHED)


def open_directory(path: Path) -> int:
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
