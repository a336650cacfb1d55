"""Booting a machine: its directory, uid, disks, network, VMM, in this order, until its guest answers.

In: records, not stored yet, of sandboxes or of machines that are to wait for one. Out: machines that nothing was told
yet. Whatever a boot sets up goes on the caller's stack, which undoes it in reverse wherever it stops. A guest that says
something wrong, or nothing, and a machine that ends meanwhile are `BootFailed`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace

import anyio
import anyio.to_thread

from guestd import protocol
from sandboxd import ext4, trees
from sandboxd.assets.prepare import Assets
from sandboxd.errors import BootFailed, Conflict, GuestProtocolError
from sandboxd.guest import Guest, GuestGone, GuestRefused
from sandboxd.images import Images
from sandboxd.lifecycle import State
from sandboxd.networks import Networks, interface
from sandboxd.node import Node
from sandboxd.places import Places
from sandboxd.policy import DEFAULT_IMAGE, Limits
from sandboxd.pools import Booted, Shape
from sandboxd.readiness import AssetsState
from sandboxd.sandboxes import message
from sandboxd.store import SandboxRecord
from sandboxd.termsafe import clean
from sandboxd.uids import Uids
from sandboxd.vm.machine import Backend, Drive, Machine, MachineSpec, Rate, Share
from sandboxd.volumes import Volumes

BOOT_S = 60.0
"""Until guestd answers. Under emulation on a busy machine a boot takes several seconds."""

log = logging.getLogger("sandboxd")


class Boot:
    """One per daemon. `guest_files` are written in sandboxes that have a network; of the `limits`, those of a drive
    are taken."""

    def __init__(
        self, places: Places, backend: Backend, assets: AssetsState, uids: Uids | None, networks: Networks,
        images: Images, volumes: Volumes, node: Node, guest_files: Mapping[str, bytes], limits: Limits,
    ) -> None:  # fmt: skip
        self._places, self._backend, self._assets, self._uids = places, backend, assets, uids
        self._networks, self._images, self._volumes, self._node = networks, images, volumes, node
        self._guest_files = guest_files
        bytes_per_s = None if limits.disk_mb_per_s is None else limits.disk_mb_per_s << 20
        self._rate = Rate(bytes_per_s, limits.disk_ops_per_s)

    async def waiting(self, shape: Shape, undo: AsyncExitStack) -> tuple[str, Booted]:
        """A machine of nobody's yet. It has an id, and no record: a restart ends it."""
        await self._assets.wait()
        self._places.require_room(shape.disk_mb)
        record = SandboxRecord(
            id=self._node.new_sandbox_id(), name="", state=State.PENDING, image=shape.image, cpus=shape.cpus,
            memory_mb=shape.memory_mb, disk_mb=shape.disk_mb, env_names=(), network=shape.network, created_at=0,
            idle_timeout_secs=0,
        )  # fmt: skip
        try:
            return record.id, await self.up(record, self._assets.get(), undo)
        except BootFailed as fault:
            log_failure(record.id, fault)
            raise

    async def up(
        self, record: SandboxRecord, assets: Assets, undo: AsyncExitStack, share: Share | None = None
    ) -> Booted:
        """A machine of the record's size, with its network in force, whose guest answers and has been told nothing
        yet. `undo` takes all of it away again."""
        directory = self._places.machine(record.id)
        directory.mkdir(mode=0o700)
        undo.push_async_callback(_shielded, anyio.to_thread.run_sync, trees.remove, directory)
        claim = None
        if self._uids is not None:
            claim = self._uids.claim()
            undo.callback(claim.close)
        uid = None if claim is None else claim.uid
        image = assets.image
        if record.image != DEFAULT_IMAGE:
            image = self._places.drive(record.id)
            await self._images.provide(record.image, image)
        scratch = self._places.scratch(record.id)
        await ext4.make(scratch, record.disk_mb, "scratch", 0, "the sandbox's disk")
        volumes = await self._volumes.ready(record.volumes, record.id, uid)
        link = await self._networks.open(record, self._places.names(record.id))
        undo.push_async_callback(_shielded, self._networks.close, record.id)
        drives = [
            (assets.runtime, True), (image, True), (scratch, False),
            *((path, one.read_only) for path, one in zip(volumes, record.volumes, strict=True)),
        ]  # fmt: skip
        spec = MachineSpec(
            id=record.id, cpus=math.ceil(record.cpus), memory_mb=record.memory_mb,
            kernel=assets.kernel, initramfs=assets.initramfs,
            drives=tuple(Drive(path, read_only, self._rate) for path, read_only in drives),
            directory=directory, uid=uid, share=share,
        )  # fmt: skip
        if link is not None:
            spec = replace(
                spec, tap_fd=link.tap_fd, mac=link.guest.mac, tap_name=link.name, netns=link.namespace,
                leave_tap=link.leave_tap,
            )  # fmt: skip
        try:
            machine = await self._answering(spec)
        finally:
            # The machine has its own.
            if link is not None:
                link.close_tap()
        undo.push_async_callback(_shielded, machine.terminate)
        return Booted(machine, claim, None if link is None else interface(link))

    async def _answering(self, spec: MachineSpec) -> Machine:
        """A machine whose guest answers. Where nothing is known of why one does not, a second one keeps its console."""
        machine = await self._backend.start(spec)
        try:
            guest = Guest(machine.vsock_path, protocol.VERSION)
            await _before_exit(machine, "waiting for the guest agent", lambda: guest.wait_booted(BOOT_S))
        except BaseException as fault:
            await _shielded(machine.terminate)
            if not isinstance(fault, BootFailed) or spec.console or not self._backend.silent:
                raise
            log.warning("%s: %s; it is tried again with its console kept", spec.id, clean(str(fault)))
            return await self._answering(replace(spec, console=True))
        return machine

    async def configure(self, booted: Booted, record: SandboxRecord, env: dict[str, str]) -> None:
        """Tells a booted machine whose it is. `env` holds values and is not kept."""
        hostname = (record.name or record.id.replace("_", "-")).rstrip("-")
        files = {} if booted.network is None else self._guest_files
        guest = Guest(booted.machine.vsock_path, protocol.VERSION)
        await _before_exit(
            booted.machine, "configuring the guest",
            lambda: guest.configure(hostname, env, booted.network, files, record.volumes, record.bind),
        )  # fmt: skip


def log_failure(sandbox_id: str, fault: BootFailed) -> None:
    log.error("%s: %s%s", sandbox_id, clean(str(fault)), console(fault.console_tail))


def console(tail: bytes) -> str:
    """What a machine wrote last, as further lines of an entry of the log."""
    lines = [clean(line) for line in tail.decode(errors="replace").splitlines()]
    return "".join(f"\n    console: {line}" for line in lines if line)


async def _before_exit(machine: Machine, step: str, act: Callable[[], Awaitable[None]]) -> None:
    """Does something with a machine that may die meanwhile, or answer wrongly: then `BootFailed`, at once."""
    fault, unmounted = "the machine ended", ""
    done = False

    async def watch(scope: anyio.CancelScope) -> None:
        await machine.wait_exit()
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, tasks.cancel_scope)
        try:
            await act()
            done = True
        except (GuestGone, GuestProtocolError, GuestRefused) as error:
            # A refusal's own text is the guest's, and may repeat what it was given.
            fault = str(error)
            if isinstance(error, GuestRefused) and error.code == "bad_volume":
                unmounted = message(error)
        tasks.cancel_scope.cancel()
    if unmounted:
        raise Conflict(f"a volume could not be mounted at {unmounted}")
    if not done:
        raise BootFailed(f"{step}: {fault}", None, await machine.console_tail())


async def _shielded(act: Callable[..., Awaitable[None]], *arguments: object) -> None:
    with anyio.CancelScope(shield=True):
        await act(*arguments)
