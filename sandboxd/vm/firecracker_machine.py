"""A machine under Firecracker: started, saved and restored, adopted after a restart of the daemon, ended, swept up.

In: a `MachineSpec`. Out: a `FirecrackerMachine`, or BootFailed with the step and nothing left behind. As root the VMM
is started by its jailer, in a control group that says which process it is; an ordinary user's runs in bubblewrap's
jail, with its own filters of system calls on. It outlives whoever started it. Everything it says is hostile from the
moment the guest runs, and so is every name in an ordinary user's jail, whose directory it may write to: its sockets are
looked for in the open directory, no link is followed, and its pipes are held open since before it ran.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from sandboxd import trees
from sandboxd.errors import BootFailed, SandboxError
from sandboxd.vm import (
    cgroups,
    child,
    drives,
    firecracker,
    firecracker_versions,
    jail,
    jailer,
    processes,
    saved_files,
    seccomp,
    watch,
)
from sandboxd.vm.arch import Arch
from sandboxd.vm.cgroups import Group, Hierarchy
from sandboxd.vm.child import Child, ChildError
from sandboxd.vm.firecracker import Names, Request
from sandboxd.vm.firecracker_calls import State
from sandboxd.vm.firecracker_client import CallFailed, Client
from sandboxd.vm.firecracker_versions import Version
from sandboxd.vm.jail import Jail, Limits
from sandboxd.vm.machine import Drive, MachineSpec, Program
from sandboxd.vm.processes import Process, Record

VMM = "Firecracker"
START_S = 20.0
ADOPT_S = 10.0  # a VMM whose daemon was killed may be busy with writing memory
CONSOLE_BYTES = 64 * 1024
OVERHEAD_BYTES = 256 << 20  # beside the guest's memory; Firecracker's own is a few MiB, the rest is the drives' pages
FILES = 2048  # one for a connection over vsock, of which it takes 1023; the jailer's own default
HOME = "/vm"
KVM = Path("/dev/kvm")

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
    """A running machine. Made by `start`, `restore` and `adopt`, which hand over what they hold in `held`."""

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
        root, new = _open_directory(self._root), self._directory / saved_files.UNFINISHED
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
        gone = await anyio.to_thread.run_sync(_end, self._pidfds, self._group)
        try:
            if gone:
                await anyio.to_thread.run_sync(take_out)
        finally:
            await self.console_tail()
            self._ended = True
            self._held.close()
            if self._child is not None:
                self._child.close()
            await anyio.to_thread.run_sync(_clean, self._directory)
            if gone:
                processes.remove_record(self._directory)
        if not gone:
            raise SandboxError(f"{self.spec_id}: a process did not end in {processes.END_S:.0f} s")


async def start(spec: MachineSpec, tools: Tools) -> FirecrackerMachine:
    """Returns once the guest runs. Whether it comes up its answers show. Raises BootFailed with nothing left behind. A
    directory that holds a live machine is refused, and that machine left alone."""
    if (why := firecracker.unsupported(spec)) is not None:
        raise BootFailed(why, None, b"")
    calls = firecracker.requests(spec, tools.version, tools.arch, spec.tap_name or None, spec.console)
    return await _Starting(spec, tools).run(calls)


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


async def restore(
    spec: MachineSpec, tools: Tools, directory: Path, replaced: Sequence[int] = ()
) -> FirecrackerMachine:  # fmt: skip
    """As `start`, from what `snapshot` left in `directory`. Any number may run from it at once: each maps its memory
    and writes to none of it. A drive is the saved one, or a copy of it; those with an index in `replaced` are others,
    and the guest has not used them. Processors, and whether there is an interface, are those of the snapshot. The guest
    has the clock and the secrets of the one that was saved until `configure` gives it others."""
    if (why := firecracker.unsupported(spec)) is not None:
        raise BootFailed(why, None, b"")
    calls = firecracker.load_requests(spec, tools.version, spec.tap_name or None, replaced)
    return await _Starting(spec, tools, directory).run(calls)


async def adopt(directory: Path, id: str, tools: Tools) -> FirecrackerMachine | None:
    """The machine an earlier run of the daemon left in `directory`; None unless its VMM still runs, or if that says
    that its guest does not. One whose guest was left paused is resumed where that leaves it within reach. What is
    left of one that cannot be adopted is ended, as far as its record tells; `sweep` finds the rest. Its drives are no
    longer locked: that they are this machine's alone, records say. Raises OSError where it cannot be seen, with the
    machine left alone."""
    record = processes.read_record(directory)
    if record is None:
        return None
    group = _group(tools, record.instance, id)
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
    except OSError:
        for pidfd in pidfds:
            os.close(pidfd)
        raise
    if await anyio.to_thread.run_sync(_end, pidfds, group if record.id == id else None):
        processes.remove_record(directory)
    await anyio.to_thread.run_sync(_clean, directory)
    return None


async def _running(jailed: Path, directory: Path, id: str, tools: Tools) -> Version:
    """Sees to it that the guest runs whose VMM has the root `jailed`. Returns the VMM's version, taken to be today's
    where it says nothing. Raises CallFailed, SandboxError; OSError where that is no fault of the VMM's."""
    with ExitStack() as stack:
        try:
            root = _open_directory(jailed)
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
        _clean(directory)
    return ended


def limits(spec: MachineSpec) -> cgroups.Limits:
    """What the VMM may use. The guest has its processors whole: moving its bytes takes another."""
    return cgroups.Limits(spec.cpus + 1, (spec.memory_mb << 20) + OVERHEAD_BYTES, spec.cpus + 50)


class _Starting:
    """A machine on its way: what there is to keep, or to undo."""

    def __init__(self, spec: MachineSpec, tools: Tools, saved: Path | None = None) -> None:
        if (os.geteuid() == 0) != (spec.uid is not None):
            raise ValueError("a VMM of root's has a uid of its own, and only one of root's")
        self._spec, self._tools = spec, tools
        self._images = [("the kernel", spec.kernel, Names.KERNEL), ("the initramfs", spec.initramfs, Names.INITRAMFS)]
        self._saved = saved is not None
        if saved is not None:
            for name, what in saved_files.NAMES.items():
                self._images.append((f"the saved {what}", saved / name, name))
        self._step = ""
        self._held = ExitStack()
        self._given = ExitStack()
        self._child: Child | None = None
        self._log: int | None = None
        self._pidfds: list[int] = []
        self._group = _group(tools, tools.instance, spec.id)
        self._root = _root(spec.directory, spec.id, tools)

    async def run(self, calls: Sequence[Request]) -> FirecrackerMachine:
        spec = self._spec
        try:
            found = processes.read_record(spec.directory)
            ended = found is None or all(map(processes.has_ended, found.processes))
        except OSError as fault:
            raise BootFailed(f"making the machine's jail: {fault.strerror}", None, b"") from fault
        if not ended:
            raise BootFailed("making the machine's jail: a machine runs in it", None, b"")
        try:
            return await self._run(calls)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                failed = await self._undo(error)
            if failed is None:
                raise
            raise failed from error

    async def _run(self, calls: Sequence[Request]) -> FirecrackerMachine:
        spec = self._spec
        await anyio.to_thread.run_sync(_clean, spec.directory)
        with ExitStack() as brief:
            files = self._files(brief)
            self._step = "making the machine's jail"
            if self._group is not None:
                await anyio.to_thread.run_sync(self._group.make, limits(spec))
                self._fill(files)
                self._step = "starting the jailer"
                self._child = self._jailed([fd for fd, _, read_only in files if not read_only])
            else:
                self._root.mkdir(mode=0o700)
                self._pipes()
                self._step = f"starting {VMM}"
                self._child = child.spawn(VMM, self._prison(), _arguments(spec), ())
        with anyio.fail_after(START_S):
            process = await self._hold(self._child)
            record = Record(spec.id, jail.marker(self._tools.instance, spec.id), (process,))
            processes.write_record(spec.directory, record)
            root = self._directory_fd(self._root)
            client = Client(root)
            self._step = f"waiting for {VMM}'s API"
            await self._unless_ended(client.listening)
            self._step = "asking for its version"
            await self._unless_ended(partial(self._as_known, client))
        for call in calls:
            if call is calls[-1] and self._group is not None:
                # Its sockets are there, and its guest does not run yet.
                self._step = "taking back its jail"
                jailer.take_back(root)
            self._step = call.step
            await self._unless_ended(partial(client.send, call))
        if self._saved:
            saved_files.unname(root)
        # Root's again now that the VMM has them open, and not in its end, which may come under another daemon: the uid
        # may be another sandbox's by then.
        self._given.close()
        held, self._held = self._held, ExitStack()
        return FirecrackerMachine(
            spec.id, self._tools.version, spec.directory, process, self._pidfds, self._child, self._group,
            self._root, held,
        )  # fmt: skip

    def _files(self, brief: ExitStack) -> list[tuple[int, str, bool]]:
        """(open file, name in the jail, read-only). The drives stay open, and locked, as long as the machine."""
        spec = self._spec
        files = []
        for what, path, name in self._images:
            fd = drives.open_image(brief, what, Drive(path, True))
            why = saved_files.size_fault(name, os.fstat(fd).st_size, spec.memory_mb)
            if why is not None:
                raise BootFailed(f"opening {what}: {why}", None, b"")
            files.append((fd, str(name), True))
        for index, drive in enumerate(spec.drives):
            fd = drives.open_image(self._held, f"drive {index}", drive)
            files.append((fd, firecracker.drive(index), drive.read_only))
            if not drive.read_only and spec.uid is not None:
                self._given.callback(_take_back, fd)
        return files

    def _fill(self, files: Sequence[tuple[int, str, bool]]) -> None:
        spec = self._spec
        try:
            jailer.fill(self._cell(0), files)
        except OSError as fault:
            raise ChildError(jailer.reason(fault)) from fault
        self._pipes()
        if spec.leave_tap is not None:
            assert spec.uid is not None
            spec.leave_tap(spec.uid)

    def _pipes(self) -> None:
        """For what it logs and counts; read by nobody unless it fails, and full pipes drop what comes."""
        root = self._directory_fd(self._root)
        for name in (Names.LOG, Names.METRICS):
            os.mkfifo(name, 0o600, dir_fd=root)
            if self._spec.uid is not None:
                os.chown(name, self._spec.uid, self._spec.uid, dir_fd=root, follow_symlinks=False)
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
            self._held.callback(os.close, fd)
            if name is Names.LOG:
                self._log = fd

    def _jailed(self, writable: Sequence[int]) -> Child:
        assert self._group is not None
        cell = self._cell(max((os.fstat(fd).st_size for fd in writable), default=0))
        entering = self._group.entering()

        def command(info_fd: int, seccomp_fd: int) -> list[str]:
            return jailer.argv(cell, entering, info_fd, seccomp_fd, _arguments(self._spec))

        return child.launch(VMM, command, (), seccomp.jailing_program(self._tools.arch))

    def _cell(self, largest_drive_bytes: int) -> jailer.Cell:
        spec = self._spec
        assert spec.uid is not None
        own = _limits(spec, self._tools, largest_drive_bytes)
        return jailer.Cell(self._tools.jailer, spec.id, spec.uid, spec.directory / jailer.DIRECTORY, own, spec.netns)

    def _prison(self) -> Jail:
        spec, tools = self._spec, self._tools
        largest = max((drive.path.stat().st_size for drive in spec.drives if not drive.read_only), default=0)
        named = [(drive, f"{HOME}/{firecracker.drive(index)}") for index, drive in enumerate(spec.drives)]
        return Jail(
            tools=tools.jailer.jail,
            program=tools.program,
            marker=jail.marker(tools.instance, spec.id),
            uid=None,
            limits=_limits(spec, tools, largest),
            files=(
                *((path, f"{HOME}/{name}") for _, path, name in self._images),
                *((drive.path, inside) for drive, inside in named if drive.read_only),
            ),
            devices=((KVM, str(KVM)),) if KVM.exists() else (),
            writable=tuple((drive.path, inside) for drive, inside in named if not drive.read_only),
            home=(self._root, HOME),
        )

    async def _hold(self, started: Child) -> Process:
        """The VMM by a pidfd from here on: the only one in its group, or the child of its jail's outer process."""
        pid = await started.program_pid()
        if self._group is None:
            pidfd, outer = processes.hold_child(pid, started.pid), processes.hold_child(started.pid, os.getpid())
            if pidfd is not None and outer is not None:
                self._pidfds += [pidfd, outer]
                return Process(VMM, pid, processes.start_ticks(pid))
            self._pidfds += [fd for fd in (pidfd, outer) if fd is not None]
            raise ChildError("the process ended")
        # The jailer, which ends once the VMM is on its way.
        await _ended(started.pid)
        if started.exit_code() != 0:
            raise ChildError("the jailer failed")
        self._step = f"starting {VMM}"
        found = self._group.pids()
        if len(found) != 1:
            raise ChildError("the process ended" if not found else "there is more than one process")
        (pid,) = found
        with suppress(OSError):
            pidfd = os.pidfd_open(pid)
            self._pidfds.append(pidfd)
            if self._group.holds(pid):
                return Process(VMM, pid, processes.start_ticks(pid))
        raise ChildError("the process ended")

    async def _unless_ended(self, act: Callable[[], Awaitable[object]]) -> None:
        """Does something with the VMM. Raises ChildError where that fails, or the VMM ends meanwhile."""
        faults: list[str] = [f"{VMM} ended"]

        async def attempt() -> None:
            try:
                await act()
                faults.clear()
            except CallFailed as fault:
                faults.append(fault.why)

        with ExitStack() as stack:
            await watch.first(attempt, *watch.ends(stack, self._pidfds))
        if faults:
            ended = any(processes.wait_ended([fd], 0) for fd in self._pidfds)
            raise ChildError(faults[0] if ended else faults[-1])

    async def _as_known(self, client: Client) -> None:
        """Raises CallFailed where it is another than was looked at: what is known of that one does not hold for it."""
        version = (await client.info()).version
        if version != self._tools.version:
            why = f"it is {version} now, and was {self._tools.version} when sandboxd started, which is to be restarted"
            raise CallFailed("GET /", why)

    def _directory_fd(self, path: Path) -> int:
        fd = _open_directory(path)
        self._held.callback(os.close, fd)
        return fd

    def _end_marked(self) -> None:
        processes.end_marked(self._tools.instance, lambda id: id == self._spec.id, {os.getuid()})

    async def _undo(self, error: BaseException) -> BootFailed | None:
        """Leaves nothing. Returns what to raise instead of `error`; None where that is no failure to boot."""
        spec = self._spec
        code = None if self._child is None else self._child.exit_code()
        console = b"" if self._child is None else self._child.errors()
        logged = b"" if self._log is None else _drain(self._log)
        await anyio.to_thread.run_sync(_end, self._pidfds, self._group)
        if self._group is None:
            try:
                await anyio.to_thread.run_sync(self._end_marked)
            except OSError as fault:
                # Where no descriptor is left, say. What is let go below is let go all the same.
                log.error("%s: what is left of its start could not be looked for: %s", spec.id, fault.strerror)
        if self._child is not None:
            self._child.close()
        self._given.close()
        self._held.close()
        await anyio.to_thread.run_sync(_clean, spec.directory)
        processes.remove_record(spec.directory)
        match error:
            case ChildError() | TimeoutError() | OSError():
                why = "it took too long" if isinstance(error, TimeoutError) else str(error)
                said = child.last_line(logged) or child.last_line(console)
                return BootFailed(": ".join(part for part in (self._step, why, said) if part), code or None, console)
        return None


def _arguments(spec: MachineSpec) -> list[str]:
    id = ["--id", jailer.jailed_id(spec.id)] if spec.uid is None else []  # the jailer gives it itself
    return [*id, "--api-sock", Names.API_SOCKET]


def _limits(spec: MachineSpec, tools: Tools, largest_drive_bytes: int) -> Limits:
    memory = spec.memory_mb << 20
    return Limits(
        address_space_bytes=memory + (1 << 30),
        # A snapshot's memory is a file of the guest's size.
        file_size_bytes=max(memory, largest_drive_bytes),
        open_files=min(FILES, tools.open_files),
        processes=None if spec.uid is None else spec.cpus + 50,
    )


def _group(tools: Tools, instance: str, id: str) -> Group | None:
    """Only root's machines have one."""
    return None if tools.groups is None else tools.groups.group(instance, id)


def _root(directory: Path, id: str, tools: Tools) -> Path:
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
    return _root(directory, id, tools)


def _is_its(process: Process, record: Record, group: Group | None) -> bool:
    if group is not None:
        return group.holds(process.pid)
    return processes.marked_id(processes.command_line(process.pid), record.instance) == record.id


def _end(pidfds: Sequence[int], group: Group | None) -> bool:
    gone = processes.end(pidfds)
    return (group is None or group.remove()) and gone


def _clean(directory: Path) -> None:
    """Removes the jail, following nothing in it, and an unfinished snapshot. The drives have other names elsewhere."""
    trees.remove(directory / jailer.DIRECTORY)
    trees.remove(directory / saved_files.UNFINISHED)


def _open_directory(path: Path) -> int:
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _take_back(fd: int) -> None:
    os.fchown(fd, 0, 0)
    os.fchmod(fd, stat.S_IRUSR | stat.S_IWUSR)


def _drain(fd: int) -> bytes:
    with suppress(OSError):
        return os.read(fd, 65536)
    return b""


async def _ended(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        await anyio.wait_readable(pidfd)
    finally:
        os.close(pidfd)
