"""A machine under QEMU: started, adopted after a restart of the daemon, ended, swept up.

In: a `MachineSpec`. Out: a `QemuMachine`, or BootFailed with the step and nothing left behind. A machine is
two jails, each with a program in it: QEMU, and sandbox-vsock, which carries the guest's sockets; where a
directory of the host is shared there is a third, with virtiofsd. They outlive whoever started them. All are
hostile from the moment the guest runs: their sockets, their exit status and every byte of the monitor are
looked at as such. Sockets and the record are made in a directory that only the daemon can reach.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import socket
import stat
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import anyio
import anyio.to_thread

from sandboxd import unixpath
from sandboxd.errors import BootFailed, SandboxError, SetupError
from sandboxd.vm import cgroups, commands, drives, jail, processes, virtiofs, watch
from sandboxd.vm.cgroups import Group
from sandboxd.vm.child import Child, ChildError, spawn
from sandboxd.vm.commands import CONSOLE_BYTES, Accelerator, Descriptors, Tools
from sandboxd.vm.machine import MachineSpec, Program
from sandboxd.vm.monitor import Monitor, MonitorError
from sandboxd.vm.processes import Process, Record

START_S = 20.0
CONNECT_S = 5.0
RETRY_S = 5.0
EXITS_S = 2.0  # how long the processes of a machine that failed may take to end by themselves
QMP_SOCKET = "qmp.sock"
VSOCK_SOCKET = "vsock.sock"
KVM_NODE = "kvm"
VMM = "QEMU"
DEVICE = "sandbox-vsock"

log = logging.getLogger("sandboxd")


class QemuMachine:
    """A running machine. Made by `start` and `adopt`; of each of `programs` it has one of `pidfds`."""

    def __init__(
        self,
        id: str,
        directory: Path,
        programs: Sequence[Process],
        pidfds: Sequence[int],
        monitor: Monitor | None,
        children: Sequence[Child],
        group: Group | None,
    ) -> None:
        self.spec_id = id
        self._group = group
        self._processes = tuple(programs)
        self._said = False
        by_role = {process.role: Program(process.pid, process.start_ticks) for process in programs}
        self.programs = tuple(by_role[role] for role in (VMM, DEVICE, virtiofs.ROLE) if role in by_role)
        self.vsock_path = directory / VSOCK_SOCKET
        self._directory = directory
        self._pidfds = list(pidfds)
        self._monitor = monitor
        self._connecting = anyio.Lock()
        self._children = list(children)
        self._console = bytearray()
        self._ending = anyio.Lock()
        self._ended = False

    async def console_tail(self, limit_bytes: int = 8192) -> bytes:
        if (monitor := await self._reach()) is not None:
            with suppress(MonitorError):
                text = await monitor.execute("ringbuf-read", device="console", size=CONSOLE_BYTES, format="base64")
                # Reading empties the ring, so what was read is kept here, as much as the ring would hold.
                self._console += _from_base64(text)
                del self._console[:-CONSOLE_BYTES]
        return bytes(self._console[-limit_bytes:])

    async def wait_exit(self) -> None:
        if self._ending.locked() or self._ended:
            async with self._ending:
                return
        with ExitStack() as stack:
            await watch.first(self._wait_guest_stopped, *watch.ends(stack, self._pidfds))
        if self._said or self._ended or self._ending.locked():
            return
        held = zip(self._processes, self._pidfds, strict=True)
        if ended := [process.role for process, pidfd in held if processes.wait_ended([pidfd], 0)]:
            self._said = True
            log.error("%s: of its machine, this ended: %s", self.spec_id, ", ".join(ended))

    async def boot_failed(self, step: str) -> BootFailed:
        """The error for a machine whose guest did not come up, with what is known of why."""
        return BootFailed(step, _exit_code(self._children), await self.console_tail())

    async def terminate(self) -> None:
        with anyio.CancelScope(shield=True):
            async with self._ending:
                if self._ended:
                    return
                gone = await anyio.to_thread.run_sync(processes.end, self._pidfds)
                self._ended = True
                if self._monitor is not None:
                    await self._monitor.close()
                for child in self._children:
                    child.close()
                _clean(self._directory)
                if self._group is not None:
                    gone = await anyio.to_thread.run_sync(self._group.remove) and gone
                if not gone:
                    raise SandboxError(f"{self.spec_id}: a process did not end in {processes.END_S:.0f} s")
                processes.remove_record(self._directory)

    async def _wait_guest_stopped(self) -> None:
        while True:
            monitor = await self._reach()
            if monitor is not None and await monitor.wait_stopped():
                return
            await anyio.sleep(RETRY_S)

    async def _reach(self) -> Monitor | None:
        """The monitor, connected anew if it was lost. A VMM that does not answer is left to run without."""
        async with self._connecting:
            if (self._monitor is None or self._monitor.lost is not None) and not self._ended:
                self._monitor = await _connect(self._directory)
            return self._monitor


async def start(spec: MachineSpec, tools: Tools) -> QemuMachine:
    """Starts both processes and returns once QEMU runs the guest. Whether the guest comes up its answers show.

    Raises BootFailed with nothing left behind. A directory that holds a live machine is refused, and that
    machine left alone.
    """
    if (os.geteuid() == 0) != (spec.uid is not None):
        raise ValueError("a VMM of root's has a uid of its own, and only one of root's")
    with ExitStack() as ours:
        images = [drives.open_image(ours, f"drive {index}", drive) for index, drive in enumerate(spec.drives)]
        for what, path in (("kernel", spec.kernel), ("initramfs", spec.initramfs)):
            if not path.is_file():
                raise BootFailed(f"opening the {what}: there is no such file", None, b"")
        monitor_listener, vsock_listener = _listen(ours, spec.directory)
        vmm_end, device_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.enter_context(vmm_end)
        ours.enter_context(device_end)
        starting = _Starting(spec, tools)
        try:
            entering = await starting.group()
            device_fds = (device_end.fileno(), vsock_listener.fileno())
            prison = commands.device_jail(spec, tools, entering)
            starting.spawn(DEVICE, prison, commands.device_argv(*device_fds), device_fds)
            share = starting.share(ours, entering) if spec.share is not None else None
            fds = Descriptors(tuple(images), vmm_end.fileno(), monitor_listener.fileno(), share)
            writable = [fd for fd, drive in zip(images, spec.drives, strict=True) if not drive.read_only]
            largest = max((os.fstat(fd).st_size for fd in writable), default=0)
            prison = commands.vmm_jail(spec, tools, largest, _kvm_node(spec, tools.accelerator), entering)
            tap = () if spec.tap_fd is None else (spec.tap_fd,)
            inherited = (*fds.drives, fds.vhost, fds.qmp, *tap, *(() if share is None else (share,)))
            starting.spawn(VMM, prison, commands.argv(spec, tools.accelerator, fds), inherited)
            # Our copies go now, so that each end of the pair sees when the other is gone.
            ours.close()
            with anyio.fail_after(START_S):
                return await starting.finish()
        except BaseException as error:
            # First: a socket that we still listen on would not count as nobody's.
            ours.close()
            with anyio.CancelScope(shield=True):
                failed = await starting.undo(error)
            if failed is None:
                raise
            raise failed from error


async def adopt(directory: Path, id: str, tools: Tools) -> QemuMachine | None:
    """The machine an earlier run of the daemon left in `directory`; None unless both its programs still run.

    A VMM that does not answer its monitor now is adopted all the same, and asked again later. What is left of
    a machine that cannot be adopted is ended, as far as its record tells; `sweep` finds the rest. Raises OSError where
    that cannot be seen, with the machine left alone.
    """
    record = processes.read_record(directory)
    if record is None:
        return None
    group = cgroups.group(tools.groups, record.instance, id)
    held = processes.hold_all(record.processes)
    pidfds = [fd for _, fd in held]
    parts = {VMM, DEVICE} | ({virtiofs.ROLE} & {process.role for process in record.processes})
    try:
        running = {process.role for process, _ in held if _is_marked(process, record)}
        if record.id == id and parts <= running:
            monitor = await _connect(directory)
            return QemuMachine(id, directory, [process for process, _ in held], pidfds, monitor, (), group)
    except BaseException:
        for pidfd in pidfds:
            os.close(pidfd)
        raise
    if await anyio.to_thread.run_sync(processes.end, pidfds):
        processes.remove_record(directory)
    if group is not None and record.id == id:
        await anyio.to_thread.run_sync(group.remove)
    _clean(directory)
    return None


def sweep(sandboxes_dir: Path, known_ids: Collection[str], tools: Tools, uids: Collection[int] = ()) -> set[str]:
    """Ends every VMM and device process of our instance whose id is not in `known_ids`; returns the ids found.

    `uids` are those a root daemon gives to its machines; processes of any other uid but the daemon's own are
    left alone, whatever their command line says. Of another instance, from before the state directory was renamed, it
    ends what records name. Called with the lock of the state directory held. Takes SETTLE_S and some milliseconds,
    2 END_S at most. Raises OSError where processes cannot be looked at.
    """
    instance = tools.instance
    ended = processes.sweep_marked(instance, lambda id: id not in known_ids, {os.getuid(), *uids})
    directories = processes.unknown(sandboxes_dir, known_ids)
    groups = [] if tools.groups is None else tools.groups.left(instance, known_ids, directories)
    for directory in directories:
        if processes.end_recorded(directory):
            ended.add(directory.name)
        # After both: only then does nobody listen on the sockets any more.
        _clean(directory)
    for group in groups:
        group.remove()
    return ended


class _Starting:
    """A machine on its way: what there is to keep, or to undo."""

    def __init__(self, spec: MachineSpec, tools: Tools) -> None:
        self._spec = spec
        self._tools = tools
        self._step = f"starting {VMM}"
        self._children: list[Child] = []
        self._pidfds: list[int] = []

    async def group(self) -> list[str]:
        """Makes the machine's group; returns the command that enters it."""
        self._step = "making the machine's control group"
        group = cgroups.group(self._tools.groups, self._tools.instance, self._spec.id)
        if group is None:
            return []
        await anyio.to_thread.run_sync(group.make, commands.limits(self._spec, self._tools.accelerator))
        return group.entering()

    def spawn(self, role: str, prison: jail.Jail, arguments: Sequence[str], fds: Sequence[int]) -> None:
        self._step = f"starting {role}"
        self._children.append(spawn(role, prison, arguments, fds))

    def share(self, ours: ExitStack, entering: Sequence[str]) -> int:
        """Starts what shares the directory; returns the descriptor that is for the VMM, closed with `ours`."""
        spec, tools = self._spec, self._tools
        assert spec.share is not None
        self._step = f"starting {virtiofs.ROLE}"
        try:
            found = virtiofs.find_tools()
        except SetupError as fault:
            raise ChildError(str(fault)) from None
        marker = jail.marker(tools.instance, spec.id)
        prison = virtiofs.prison(spec.share, spec.memory_mb, marker, tools.open_files, found, tools.jail, entering)
        listener, end = ours.enter_context(virtiofs.connection(spec.directory))
        self._children.append(virtiofs.start(spec.share, prison, listener))
        return end.fileno()

    async def finish(self) -> QemuMachine:
        record = Record(
            self._spec.id,
            jail.marker(self._tools.instance, self._spec.id),
            tuple([process for child in self._children for process in await self._hold(child)]),
        )
        processes.write_record(self._spec.directory, record)
        self._step = f"waiting for {VMM}'s monitor"
        found: list[Monitor | Exception] = []

        async def connect() -> None:
            try:
                found.append(await Monitor.connect(self._spec.directory / QMP_SOCKET))
            except (OSError, MonitorError) as error:
                found.append(error)

        with ExitStack() as stack:
            await watch.first(connect, *watch.ends(stack, self._pidfds))
        match found:
            case [Monitor() as monitor]:
                return QemuMachine(
                    self._spec.id, self._spec.directory, record.processes, self._pidfds, monitor, self._children,
                    cgroups.group(self._tools.groups, self._tools.instance, self._spec.id),
                )  # fmt: skip
            case _:
                raise ChildError("a process ended before the monitor answered")

    async def _hold(self, child: Child) -> list[Process]:
        """The jail's outer process and the program in it, each by a pidfd from here on."""
        self._step = f"starting {child.role}"
        program = await child.program_pid()
        found = []
        outer = (f"{child.role} jail", child.pid, os.getpid())
        for role, pid, above in (outer, (child.role, program, child.pid)):
            pidfd = processes.hold_child(pid, above)
            if pidfd is None:
                raise ChildError("the process ended")
            self._pidfds.append(pidfd)
            found.append(Process(role, pid, processes.start_ticks(pid)))
        return found

    async def undo(self, error: BaseException) -> BootFailed | None:
        """Leaves nothing. Returns what to raise instead of `error`; None where that is no failure to boot."""
        spec = self._spec
        failed = isinstance(error, OSError | ChildError)
        code = await anyio.to_thread.run_sync(self._end, failed)
        said = [f"{child.role} said: {line}" for child in self._children if (line := child.last_line())]
        for child in self._children:
            child.close()
        _clean(spec.directory)
        processes.remove_record(spec.directory)
        if not failed:
            return None
        return BootFailed("; ".join([self._step, *said]), code, b"")

    def _end(self, failed: bool) -> int | None:
        """Ends all processes; returns what the VMM exited with, if it did so by itself."""
        spec = self._spec
        if failed:
            # One may be on its way out, its monitor gone before it, and the others follow in milliseconds: then the
            # exit status is the VMM's own.
            processes.wait_ended(self._pidfds, EXITS_S)
        code = _exit_code(self._children)
        processes.end(self._pidfds)
        uids = {os.getuid()} if spec.uid is None else {os.getuid(), spec.uid}
        processes.end_marked(self._tools.instance, lambda id: id == spec.id, uids)
        if (group := cgroups.group(self._tools.groups, self._tools.instance, spec.id)) is not None:
            group.remove()
        return code


def _listen(stack: ExitStack, directory: Path) -> list[socket.socket]:
    try:
        dir_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        stack.callback(os.close, dir_fd)
        return [stack.enter_context(unixpath.bind(dir_fd, name)) for name in (QMP_SOCKET, VSOCK_SOCKET)]
    except OSError as error:
        stack.close()
        _clean(directory)
        raise BootFailed(f"making the machine's sockets: {error.strerror}", None, b"") from error


def _kvm_node(spec: MachineSpec, accelerator: Accelerator) -> Path | None:
    """/dev/kvm itself, or for a machine with a uid of its own a node that only this uid may open."""
    if accelerator is not Accelerator.KVM:
        return None
    device = Path("/dev/kvm")
    if spec.uid is None:
        return device
    node = spec.directory / KVM_NODE
    node.unlink(missing_ok=True)
    os.mknod(node, stat.S_IFCHR | 0o600, os.stat(device).st_rdev)
    os.chown(node, spec.uid, spec.uid)
    return node


def _clean(directory: Path) -> None:
    """Removes sockets nobody listens on, and the device node."""
    with suppress(FileNotFoundError, NotADirectoryError):
        dir_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in (QMP_SOCKET, VSOCK_SOCKET):
                unixpath.remove_stale(dir_fd, name)
        finally:
            os.close(dir_fd)
        (directory / KVM_NODE).unlink(missing_ok=True)


async def _connect(directory: Path) -> Monitor | None:
    with suppress(OSError, MonitorError), anyio.move_on_after(CONNECT_S):
        return await Monitor.connect(directory / QMP_SOCKET)
    return None


def _is_marked(process: Process, record: Record) -> bool:
    """Whether the process still says on its command line that it is this machine's."""
    return processes.marked_id(processes.command_line(process.pid), record.instance) == record.id


def _exit_code(children: Sequence[Child]) -> int | None:
    """The VMM's, which was started last."""
    return children[-1].exit_code() if children else None


def _from_base64(text: object) -> bytes:
    try:
        return base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except binascii.Error:
        return b""
