"""A machine under Firecracker on its way: its jail, its VMM, the calls that boot or restore it, and undoing that.

In: a `MachineSpec`, the programs of this host. Out: a `FirecrackerMachine`, or BootFailed with the step and nothing
left behind. As root the VMM is started by its jailer, in a control group that says which process it is; an ordinary
user's runs in bubblewrap's jail, with its own filters of system calls on.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from sandboxd.errors import BootFailed
from sandboxd.vm import cgroups, child, drives, firecracker, jail, jailer, processes, saved_files, seccomp, watch
from sandboxd.vm.child import Child, ChildError
from sandboxd.vm.firecracker import Names, Request
from sandboxd.vm.firecracker_client import CallFailed, Client
from sandboxd.vm.firecracker_machine import (
    VMM,
    FirecrackerMachine,
    Tools,
    clean,
    end,
    open_directory,
    root_of,
)
from sandboxd.vm.jail import Jail, Limits
from sandboxd.vm.machine import Drive, MachineSpec
from sandboxd.vm.processes import Process, Record

START_S = 20.0
OVERHEAD_BYTES = 256 << 20  # beside the guest's memory; Firecracker's own is a few MiB, the rest is the drives' pages
FILES = 2048  # one for a connection over vsock, of which it takes 1023; the jailer's own default
HOME = "/vm"
KVM = Path("/dev/kvm")

log = logging.getLogger("sandboxd")


async def start(spec: MachineSpec, tools: Tools) -> FirecrackerMachine:
    """Returns once the guest runs. Whether it comes up its answers show. Raises BootFailed with nothing left behind. A
    directory that holds a live machine is refused, and that machine left alone."""
    if (why := firecracker.unsupported(spec)) is not None:
        raise BootFailed(why, None, b"")
    calls = firecracker.requests(spec, tools.version, tools.arch, spec.tap_name or None, spec.console)
    return await _Starting(spec, tools).run(calls)


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
        self._group = cgroups.group(tools.groups, tools.instance, spec.id)
        self._root = root_of(spec.directory, spec.id, tools)

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
        await anyio.to_thread.run_sync(clean, spec.directory)
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
        fd = open_directory(path)
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
        gone = await anyio.to_thread.run_sync(end, self._pidfds, self._group)
        if self._group is None:
            try:
                await anyio.to_thread.run_sync(self._end_marked)
            except OSError as fault:
                # Where no descriptor is left, say. What is let go below is let go all the same.
                log.error("%s: what is left of its start could not be looked for: %s", spec.id, fault.strerror)
        if self._child is not None:
            self._child.close()
        self._given.close()
        if gone:
            # Else it may still write to its drives, as in `FirecrackerMachine.terminate`.
            self._held.close()
        await anyio.to_thread.run_sync(clean, spec.directory)
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
