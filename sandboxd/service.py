"""The verbs of the API, and the order of steps in each. Between the wire above and machines, guests and disks
below.

In: checked wire requests. Out: records, and errors that cross the API. A name is taken before anything is
started and is free again once the sandbox has ended; whatever a create set up is undone, in reverse, wherever
it stops. What a guest says reaches a client only as one clean line. Nothing but a request, an idle timeout or
a lifetime ends a sandbox; one whose machine went away by itself is shown as terminated and its disk is put
aside.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Protocol

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from guestd import protocol
from sandboxd import history
from sandboxd import policy as rules
from sandboxd.assets.prepare import Assets, Progress
from sandboxd.audit import Audit
from sandboxd.chain import Report
from sandboxd.errors import (
    ApiError,
    BootFailed,
    Conflict,
    GuestProtocolError,
    Internal,
    InvalidRequest,
    NotFound,
    SandboxError,
    Unavailable,
    Unsupported,
)  # fmt: skip
from sandboxd.events import Decision
from sandboxd.guest import Connection, Download, Guest, GuestGone, GuestRefused, Source
from sandboxd.heartbeat import Heartbeat
from sandboxd.images import Images, Status
from sandboxd.lifecycle import State, move
from sandboxd.networks import Networks, interface
from sandboxd.node import Node, Resources
from sandboxd.policy import Policy, Spec
from sandboxd.pools import Booted, Pools, Shape, Waiting
from sandboxd.pools import of as pools_of
from sandboxd.processes import Command, Finished, Process, Processes
from sandboxd.store import Mount, Network, ProcessRecord, SandboxRecord, Store, Unreadable, VolumeRecord
from sandboxd.termsafe import clean, first_line
from sandboxd.uids import Claim, Uids
from sandboxd.usage import INTERVAL_S, Meter, Sample
from sandboxd.usage import read as read_usage
from sandboxd.vm.machine import Drive, Machine, MachineSpec
from sandboxd.volumes import Use, Volumes, holder
from sandboxd.wire import SIGNALS, AuditEvent, CreateRequest, PatchRequest, ProcessRequest, VolumeRequest

BOOT_S = 60.0
"""Until guestd answers. Under emulation on a busy machine a boot takes several seconds."""
QUIESCE_S = 10.0
"""For a guest to write out what it holds for its volumes."""
MACHINE = "machine"
"""Why a sandbox ended whose machine went away by itself."""
WORKSPACE = "/workspace"
READERS = 2
"""Of the audit log at once: each is busy for as long as some ten MiB take."""
TICK_S = 1.0
EXIT_NOTICE_S = 1.0
"""How long a lost connection waits for the news that the whole machine is gone."""
MAX_TERMINATED = 100
MIN_FREE_MB = 256
"""No sandbox is created with less free on the state directory's file system, unless its whole disk is smaller."""
MESSAGE_CHARS = 500
EVENT_ID = re.compile(r"[a-z2-7]{8}\Z")

log = logging.getLogger("sandboxd")


class Backend(Protocol):
    """What starts machines and finds those that outlived us."""

    @property
    def name(self) -> str: ...

    async def start(self, spec: MachineSpec) -> Machine: ...

    async def adopt(self, directory: Path, sandbox_id: str) -> Machine | None: ...

    def sweep(self, sandboxes: Path, known: frozenset[str]) -> None: ...

    async def recover(self, volume: Path, sandbox_id: str, uid: int | None) -> bool: ...


@dataclass(frozen=True, slots=True)
class Places:
    """The state directory, laid out."""

    state: Path

    @property
    def sandboxes(self) -> Path:
        return self.state / "sandboxes"

    def machine(self, sandbox_id: str) -> Path:
        return self.sandboxes / sandbox_id

    def scratch(self, sandbox_id: str) -> Path:
        return self.machine(sandbox_id) / "scratch.img"

    def names(self, sandbox_id: str) -> Path:
        """Which address each name was given in this sandbox."""
        return self.machine(sandbox_id) / "names"

    @property
    def volumes(self) -> Path:
        return self.state / "volumes"

    @property
    def images(self) -> Path:
        return self.state / "images"

    def drive(self, sandbox_id: str) -> Path:
        """The drive of its image, when that is a registry's."""
        return self.machine(sandbox_id) / "image.erofs"

    @property
    def outputs(self) -> Path:
        return self.state / "output"

    @property
    def disks(self) -> Path:
        """Disks of machines that ended by themselves."""
        return self.state / "disks"

    def disk(self, sandbox_id: str) -> Path:
        return self.disks / f"{sandbox_id}.img"


class AssetsState:
    """Kernel, image and the rest: there, or being built."""

    def __init__(self) -> None:
        self._assets: Assets | None = None
        self._there = anyio.Event()
        self._progress = Progress("starting", 0, "")

    def report(self, progress: Progress) -> None:
        self._progress = progress

    def ready(self, assets: Assets) -> None:
        self._assets = assets
        self._there.set()

    async def wait(self) -> None:
        await self._there.wait()

    def base_image(self) -> Status:
        """Ours, as one of the images."""
        if self._assets is None:
            return Status(rules.DEFAULT_IMAGE, "installing")
        try:
            status = self._assets.image.stat()
        except FileNotFoundError:
            return Status(rules.DEFAULT_IMAGE, "failed", error="its file is gone; restarting sandboxd makes it again")
        return Status(rules.DEFAULT_IMAGE, "installed", bytes=status.st_size, installed_at=status.st_ctime)

    def get(self) -> Assets:
        if self._assets is None:
            now = self._progress
            detail = f", {now.detail}" if now.detail else ""
            raise Unavailable(clean(f"sandboxd is getting ready: {now.phase}, {now.percent} %{detail}"))
        files = (self._assets.kernel, self._assets.initramfs, self._assets.runtime, self._assets.image)
        for path in files:
            if not path.is_file():
                log.error("%s is gone; a restart of sandboxd makes it again", path)
                raise Conflict(f"the server's file {path.name} is gone; restarting sandboxd makes it again")
        return self._assets


class Live:
    """A sandbox and what belongs to it. `machine` is there while it runs; `waited` is what it was claimed from."""

    def __init__(self, record: SandboxRecord, processes: Processes) -> None:
        self.record = record
        self.order = record.created_at, record.id
        self.encoded: tuple[SandboxRecord, bytes] | None = None
        """What a list says of it, and the record that was made from: made anew when that is another."""
        self.processes = processes
        self.machine: Machine | None = None
        self.claim: Claim | None = None
        self.changing = anyio.Lock()
        self.creating: anyio.CancelScope | None = None
        self.gone = anyio.Event()
        self.heartbeat = Heartbeat()
        self.waited: Waiting | None = None
        self.meter = Meter()
        self.requests = 0
        self.active_at = time.monotonic()

    @property
    def guest(self) -> Guest:
        assert self.machine is not None
        return Guest(self.machine.vsock_path, self.record.guest_version, self.heartbeat.waiters)


class Held:
    """A guest's bytes on their way to a client; the sandbox is in use until they are closed."""

    def __init__(self, download: Download, using: AsyncExitStack) -> None:
        self.size = download.size
        self._download, self._using = download, using

    async def receive(self) -> bytes:
        return await self._download.receive()

    async def aclose(self) -> None:
        try:
            await self._download.aclose()
        finally:
            await self._using.aclose()


class Service:
    """One per daemon. Use it inside `async with`; leaving it lets go of the machines and ends none of a sandbox."""

    def __init__(
        self, places: Places, store: Store, backend: Backend, policy: Policy, assets: AssetsState,
        uids: Uids | None, networks: Networks, guest_files: Mapping[str, bytes], images: Images,
        audit: Audit, node: Node,
    ) -> None:  # fmt: skip
        """`guest_files` are written in sandboxes that have a network."""
        self.policy, self.node = policy, node
        self.pools = Pools(pools_of(policy), self._boot_waiting)
        self.backend_name = backend.name
        self.audit = audit
        self._reading = anyio.CapacityLimiter(READERS)
        self._places, self._store, self._backend = places, store, backend
        self._assets, self._uids = assets, uids
        self._networks, self._guest_files, self._images = networks, guest_files, images
        self._volumes = Volumes(store, places.volumes, backend.recover)
        self._sandboxes: dict[str, Live] = {}
        self._left_alone: list[Unreadable] = []
        self._tasks = anyio.create_task_group()

    async def __aenter__(self) -> Service:
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._watch_clock)
        self._tasks.start_soon(self._watch_usage)
        self._tasks.start_soon(self.pools.run)
        return self

    async def __aexit__(self, *fault: object) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    # -- sandboxes

    async def create(self, request: CreateRequest) -> SandboxRecord:
        with self.node.creates.counted():
            return await self._create(request)

    async def _create(self, request: CreateRequest) -> SandboxRecord:
        spec = rules.resolve(request, self.policy)
        self._networks.require(spec.network)
        assets = self._assets.get()
        self._require_room(spec.disk_mb)
        self.audit.require()
        live = self._register(spec)
        record = live.record
        try:
            with anyio.CancelScope() as live.creating:
                await self._bring_up(live, spec, assets)
                self._tasks.start_soon(self._guarded, self._watch_machine, live)
                log.info("%s: runs, %.1f s after it was asked for", record.id, _age_s(record))
                return live.record
            raise Conflict("the sandbox was deleted while it was starting")
        except BootFailed as fault:
            _log_boot(record.id, fault)
            raise Internal(f"the sandbox did not start: {fault.step}") from None
        finally:
            live.creating = None
            if live.record.state is State.PENDING:
                del self._sandboxes[record.id]
                self._store.forget(record.id)
                live.gone.set()

    def sandboxes(self, labels: list[tuple[str, str]], encode: Callable[[SandboxRecord], bytes]) -> list[bytes]:
        """Newest first; those that have every label. Each as `encode` writes it, once per change of it."""
        found = list(self._sandboxes.values())
        for key, value in labels:
            found = [live for live in found if live.record.labels.get(key) == value]
        found.sort(key=attrgetter("order"), reverse=True)
        texts = []
        for live in found:
            if live.encoded is None or live.encoded[0] is not live.record:
                live.encoded = live.record, encode(live.record)
            texts.append(live.encoded[1])
        return texts

    def get(self, ref: str) -> SandboxRecord:
        live = self._find(ref)
        live.active_at = time.monotonic()
        return live.record

    async def update(self, ref: str, request: PatchRequest) -> SandboxRecord:
        """All of it, or nothing where a part is refused. A new network is in force when this returns."""
        live = self._touched(ref)
        if request.network is not None and "network_policy_update" not in self.policy.capabilities:
            raise Unsupported("this endpoint does not have the capability network_policy_update")
        if all(getattr(request, name) is None for name in PatchRequest.__struct_fields__):
            raise InvalidRequest("nothing to change: network, name, labels or idle_timeout_secs")
        async with live.changing:
            old = live.record
            new = self._changed(old, request)
            if new.name != old.name:
                self._require_free(new.name)
            self.audit.require()
            self._tell_changes(old, new)
            try:
                self._store.put(new)
            except Internal:
                self._tell_changes(new, old)
                raise
            live.record = new
            if new.network != old.network:
                # A client that leaves must not leave the two halves of a change apart.
                with anyio.CancelScope(shield=True):
                    await self._change_network(live, old)
            return live.record

    def _changed(self, record: SandboxRecord, request: PatchRequest) -> SandboxRecord:
        new = record
        if request.network is not None:
            new = replace(new, network=rules.network(request.network, self.policy))
            self._networks.require(new.network)
        if request.name is not None:
            new = replace(new, name=rules.sandbox_name(request.name) if request.name else "")
        if request.labels is not None:
            new = replace(new, labels=rules.check_labels(request.labels))
        if request.idle_timeout_secs is not None:
            idle = rules.idle_timeout(request.idle_timeout_secs, self.policy.limits)
            new = replace(new, idle_timeout_secs=idle)
        usable = (State.RUNNING,) if request.network is not None else (State.RUNNING, State.SUSPENDED)
        if record.state not in usable:
            raise Conflict(f"the sandbox is {record.state.value}")
        if record.network.mode == "none" and new.network.mode != "none":
            raise Conflict("the sandbox has no network and cannot be given one; start another")
        return new

    def _tell_changes(self, old: SandboxRecord, new: SandboxRecord) -> None:
        names = ("name", "labels", "idle_timeout_secs")
        if changed := {name: getattr(new, name) for name in names if getattr(new, name) != getattr(old, name)}:
            self.audit.record("sandbox.updated", new.id, **changed)
        if new.network != old.network:
            self.audit.record("sandbox.network_updated", new.id, network=new.network, reason="request")

    async def _change_network(self, live: Live, old: SandboxRecord) -> None:
        """Puts the record's network in force, or the old record back."""
        try:
            await self._networks.change(live.record)
        except Internal:
            if live.record.state is not State.TERMINATED:
                self._tell_changes(live.record, old)
                live.record = old
                self._store.put_done(old)
            raise

    async def delete(self, ref: str) -> None:
        live = self._find(ref)
        if live.record.state is State.PENDING:
            if live.creating is not None:
                live.creating.cancel()
        elif live.record.state is not State.TERMINATED:
            self._tasks.start_soon(self._guarded, self._end, live, "request", False)
        await live.gone.wait()
        # Kept where the machine had ended by itself, perhaps only while we waited.
        self._places.disk(live.record.id).unlink(missing_ok=True)

    async def end_all(self) -> None:
        """For a daemon that was told to take its sandboxes along."""
        async with anyio.create_task_group() as tasks:
            for live in list(self._sandboxes.values()):
                if live.record.state is not State.TERMINATED:
                    tasks.start_soon(self.delete, live.record.id)

    # -- images

    def images(self) -> list[Status]:
        """By name; ours is one of them."""
        return sorted([self._assets.base_image(), *self._images.all()], key=lambda one: one.image)

    def image(self, name: str) -> Status:
        return self._assets.base_image() if name == rules.DEFAULT_IMAGE else self._images.status(name)

    def install_image(self, name: str) -> Status:
        rules.check_image(name, self.policy)
        if name != rules.DEFAULT_IMAGE:
            self._images.install(name)
        return self.image(name)

    def delete_image(self, name: str) -> int:
        """Returns how many bytes are free again."""
        if name in (rules.DEFAULT_IMAGE, self.policy.default_image):
            raise Conflict(f"the image {name} is the server's own or its default one and stays")
        if self.image_in_use(name):
            raise Conflict(f"the image {name} is in use by a sandbox or a pool")
        return self._images.delete(name)

    def image_pooled(self, name: str) -> bool:
        return any(pool.shape.image == name for pool in self.pools.all)

    def image_in_use(self, name: str) -> bool:
        return self.image_pooled(name) or any(
            live.record.image == name and live.record.state is not State.TERMINATED for live in self._sandboxes.values()
        )

    # -- what they use, and the machine they are on

    def usage(self, ref: str) -> tuple[SandboxRecord, list[Sample]]:
        """Of one that has ended, too, until it is forgotten. Reading it is no activity."""
        live = self._find(ref)
        return live.record, live.meter.samples()

    def counts(self) -> dict[State, int]:
        """Sandboxes by state."""
        counted = dict.fromkeys(State, 0)
        for live in self._sandboxes.values():
            counted[live.record.state] += 1
        return counted

    def processes_running(self) -> int:
        return sum(live.processes.running for live in self._sandboxes.values())

    def free(self) -> Resources:
        """Of the node's capacity, beside every sandbox that has not ended and every machine that waits."""
        used: list[SandboxRecord | Shape] = [
            live.record for live in self._sandboxes.values() if live.record.state is not State.TERMINATED
        ]
        for pool in self.pools.all:
            used += [pool.shape] * (len(pool.ready) + pool.booting)
        return self.node.free(Resources(one.cpus, one.memory_mb, one.disk_mb) for one in used)

    def cordon(self, cordoned: bool) -> None:
        if cordoned != self.node.cordoned:
            log.info("the node is cordoned: no new sandboxes" if cordoned else "the node takes new sandboxes again")
        self.node.cordoned = cordoned

    async def _watch_usage(self) -> None:
        while True:
            await anyio.sleep(INTERVAL_S - time.monotonic() % INTERVAL_S)
            try:
                await self._measure()
            except Exception:
                log.exception("what sandboxes use could not be measured")

    async def _measure(self) -> None:
        found = [(live, live.machine.programs) for live in self._sandboxes.values() if live.machine is not None]
        if not found:
            return
        traffic = await self._networks.traffic()
        readings = await anyio.to_thread.run_sync(lambda: [read_usage(programs) for _, programs in found])
        at, monotonic = time.time(), time.monotonic()
        for (live, _), reading in zip(found, readings, strict=True):
            if reading is not None and live.record.state is not State.TERMINATED:
                cpus = math.ceil(live.record.cpus)
                sent = traffic.get(live.record.id)
                live.meter.add(reading, sent, cpus, live.processes.running, at, monotonic)

    # -- what their networks are used for

    async def egress(self, ref: str) -> tuple[Network, list[Decision]]:
        """The network as it is, and each name that was asked for. Reading it is no activity."""
        live = self._find(ref)
        return live.record.network, await self._networks.decisions(live.record.id)

    async def event(self, event_id: str) -> Decision:
        found = await self._networks.decision(event_id) if EVENT_ID.match(event_id) else None
        if found is None:
            raise NotFound("no such event, or it is too long ago")
        return found

    # -- volumes

    async def create_volume(self, request: VolumeRequest) -> VolumeRecord:
        name = rules.volume_name(request.name or "")
        size_mb = rules.volume_size(request.size_mb, self.policy)
        self._require_room(size_mb)
        return await self._volumes.create(name, size_mb)

    def volumes(self) -> list[tuple[VolumeRecord, str]]:
        """By name; with the sandbox that writes to it, or the first one that reads it, or nothing."""
        uses = self._uses()
        return [(record, holder(record.name, uses) or "") for record in self._volumes.all()]

    async def delete_volume(self, name: str) -> None:
        await self._volumes.delete(name, self._uses())

    def _uses(self) -> list[Use]:
        """Until nothing of a sandbox runs any more, whatever its record says already."""
        uses = [Use(one.id, 0.0, Mount(name, "", False)) for one in self._left_alone for name in one.volumes]
        for live in self._sandboxes.values():
            if not live.gone.is_set():
                uses += [Use(live.record.id, live.record.created_at, mount) for mount in live.record.volumes]
        return uses

    # -- what was done

    async def events(self, ref: str) -> tuple[list[AuditEvent], bool]:
        """A sandbox's, oldest first, and whether older ones were left out; by its id when it is forgotten, too. Reading
        them is no activity."""
        try:
            sandbox_id, known = self._find(ref).record.id, True
        except NotFound:
            if not history.ID.match(ref):
                raise
            sandbox_id, known = ref, False
        try:
            found, cut = await anyio.to_thread.run_sync(self.audit.events, sandbox_id, limiter=self._reading)
        except OSError as fault:
            log.error("the audit log cannot be read: %s", fault.strerror or fault)
            raise Unavailable("the audit log cannot be read") from None
        merged, cut_again = history.merged(found, await self._networks.decisions(sandbox_id))
        if not merged and not known:
            raise NotFound("no such sandbox")
        return merged, cut or cut_again

    async def check_audit(self) -> Report:
        last = self.audit.last
        try:
            return await anyio.to_thread.run_sync(self.audit.check, last, limiter=self._reading)
        except OSError as fault:
            log.error("the audit log cannot be read: %s", fault.strerror or fault)
            raise Unavailable("the audit log cannot be read") from None

    # -- processes

    @asynccontextmanager
    async def run(self, ref: str, request: ProcessRequest, stdin: bytes) -> AsyncIterator[Finished]:
        """The result, to be read inside the block. Leaving early kills the process."""
        if request.tty:
            raise InvalidRequest("run has no terminal; start a process instead")
        timeout_s = request.timeout_secs or 0
        if not math.isfinite(timeout_s) or timeout_s < 0:
            raise InvalidRequest("timeout_secs must not be negative")
        command = _command(request)
        async with AsyncExitStack() as running:
            live = await running.enter_async_context(self._using(ref))
            self.audit.require()
            run = live.processes.run(live.guest, command, stdin, timeout_s)
            yield await running.enter_async_context(run)

    async def start(self, ref: str, request: ProcessRequest) -> ProcessRecord:
        if request.stdin or request.timeout_secs:
            raise InvalidRequest("stdin and timeout_secs belong to run")
        command = _command(request)
        async with self._using(ref) as live:
            self.audit.require()
            return await live.processes.start(live.guest, command)

    def processes(self, ref: str) -> list[ProcessRecord]:
        return self._touched(ref).processes.all()

    def process(self, ref: str, pid: str) -> Process:
        """For reading its record and output, of a terminated sandbox's too."""
        return self._touched(ref).processes.get(pid)

    @asynccontextmanager
    async def feeding(self, ref: str, pid: str) -> AsyncIterator[Process]:
        """A process of a running sandbox, while somebody talks to it."""
        async with self._using(ref) as live:
            with live.heartbeat.patience():
                yield live.processes.get(pid)

    async def signal(self, ref: str, pid: str, name: str) -> None:
        if name not in SIGNALS:
            raise InvalidRequest(f"signal must be one of {', '.join(SIGNALS)}")
        live = self._touched(ref)
        if live.processes.get(pid).running:
            async with self._using(ref):
                await live.processes.signal(live.guest, pid, name)

    async def resize(self, ref: str, pid: str, size: bytes) -> None:
        live = self._touched(ref)
        if live.processes.get(pid).running:
            async with self._using(ref):
                await live.processes.resize(live.guest, pid, size)

    # -- files and the workspace

    async def read_file(self, ref: str, path: str) -> Held:
        clean_path = rules.guest_path("path", path)
        self.audit.require()
        live, held = await self._held(ref, lambda guest: guest.read(clean_path))
        self.audit.record("file.read", live.record.id, path=clean_path, bytes=held.size)
        return held

    async def write_file(self, ref: str, path: str, size: int, body: Source) -> None:
        clean_path = rules.guest_path("path", path)
        async with self._using(ref) as live:
            self.audit.require()
            await live.guest.write(clean_path, size, body)
            self.audit.record("file.written", live.record.id, path=clean_path, bytes=size)

    async def remove_file(self, ref: str, path: str) -> None:
        clean_path = rules.guest_path("path", path)
        async with self._using(ref) as live:
            self.audit.require()
            await live.guest.remove(clean_path)
            self.audit.record("file.removed", live.record.id, path=clean_path)

    async def list_dir(self, ref: str, path: str) -> Held:
        """The guest's listing as it wrote it: JSON that nobody here has looked at."""
        clean_path = rules.guest_path("path", path)
        _, held = await self._held(ref, lambda guest: guest.list(clean_path))
        return held

    async def bundle_in(self, ref: str, branch: str, size: int, body: Source) -> None:
        name = rules.branch("branch", branch)
        async with self._using(ref) as live:
            self.audit.require()
            await live.guest.bundle_in(name, size, body)
            self.audit.record("workspace.in", live.record.id, path=WORKSPACE, reason=name)

    async def bundle_out(self, ref: str, base: str, branch: str) -> Held:
        start, name = rules.commit_or_branch("base", base), rules.branch("branch", branch)
        self.audit.require()
        live, held = await self._held(ref, lambda guest: guest.bundle_out(start, name))
        self.audit.record("workspace.out", live.record.id, reason=f"{start}..{name}", bytes=held.size)
        return held

    @asynccontextmanager
    async def tunnel(self, ref: str, port: int) -> AsyncIterator[Connection]:
        async with self._using(ref) as live:
            self.audit.require()
            connection = await live.guest.dial(port)
            try:
                self.audit.record("tunnel.opened", live.record.id, port=port)
                yield connection
            finally:
                connection.close()

    def spare(self, ref: str) -> Path:
        """A directory on the state's file system for a body whose size is not known beforehand."""
        return self._places.machine(self._touched(ref).record.id)

    # -- after a restart

    async def restore(
        self, found: Iterable[tuple[SandboxRecord, Machine | None]], left_alone: Iterable[Unreadable] = ()
    ) -> None:
        """The sandboxes of an earlier daemon; one without a machine has ended, those `left_alone` are not ours. Their
        networks are narrowed to what is permitted now before anything else is done, and those that belong to no sandbox
        are removed."""
        running = []
        self._left_alone.extend(left_alone)
        for record, machine in found:
            live = self._add(record)
            live.machine = machine
            if machine is None:
                live.processes.stop()
                live.gone.set()
            else:
                running.append(live)
        async with anyio.create_task_group() as tasks:
            for live in running:
                tasks.start_soon(self._take_network, live)
        await self._networks.sweep()
        for live in running:
            if self._uids is not None and live.record.uid is not None:
                live.claim = self._uids.reclaim(live.record.uid)
            self._tasks.start_soon(self._guarded, self._watch_machine, live)
            if reason := self.audit.past.ended.get(live.record.id):
                # Recorded, and then the daemon was killed: whoever ended it had not been answered yet.
                self._tasks.start_soon(self._guarded, self._end, live, reason, reason == MACHINE)
            else:
                self._tasks.start_soon(self._guarded, self._take_back, live)

    async def _take_network(self, live: Live) -> None:
        record = live.record
        network = await self._networks.take_back(record, self._places.names(record.id))
        if network != record.network:
            live.record = replace(record, network=network)
            if self.audit.past.networks.get(record.id) != msgspec.to_builtins(network):
                self.audit.record("sandbox.network_updated", record.id, network=network, reason="policy")
            self._store.put_done(live.record)

    async def _take_back(self, live: Live) -> None:
        """Until the guest has answered: a silent one keeps its disk and is asked again."""
        while live.record.state is State.RUNNING:
            try:
                self._speaks(live, await live.guest.wait_ready(BOOT_S))
                taken, lost = await live.processes.take_back(live.guest)
            except (GuestGone, GuestProtocolError, GuestRefused) as fault:
                log.warning("%s: its guest was not reached: %s; it is asked again", live.record.id, fault)
                await anyio.sleep(TICK_S)
                continue
            log.info("%s: taken back, %d processes attached again, %d lost", live.record.id, taken, lost)
            return

    def _speaks(self, live: Live, version: int) -> None:
        """A record of before they had versions may say less than the guest."""
        if version != live.record.guest_version:
            live.record = replace(live.record, guest_version=version)
            self._store.put_done(live.record)
        if version != protocol.VERSION:
            log.warning(
                "%s: its guest speaks version %d of the protocol, this daemon version %d",
                live.record.id, version, protocol.VERSION,
            )  # fmt: skip

    # -- how

    def _register(self, spec: Spec) -> Live:
        """Claims the name, the volumes, an id and a machine that waits, if there is one, before anything is started."""
        self.node.require_open()
        self._require_free(spec.name)
        self._volumes.claim(spec.volumes, self._uses())
        waiting = self.pools.find(spec)
        record = SandboxRecord(
            id=self.node.new_sandbox_id() if waiting is None else waiting.id,
            name=spec.name, state=State.PENDING, image=spec.image,
            cpus=spec.cpus, memory_mb=spec.memory_mb, disk_mb=spec.disk_mb, env_names=tuple(sorted(spec.env)),
            network=spec.network, created_at=time.time(), idle_timeout_secs=spec.idle_timeout_secs,
            lifetime_secs=spec.lifetime_secs, labels=spec.labels, guest_version=protocol.VERSION,
            created_boot_s=_boot_s(), volumes=spec.volumes,
        )  # fmt: skip
        self._store.put(record)
        live = self._add(record)
        if waiting is not None:
            self.pools.take(waiting)
            live.waited = waiting
        return live

    def _add(self, record: SandboxRecord) -> Live:
        processes = Processes(record.id, self._places.outputs / record.id, self._store, self.audit, self._tasks)
        live = self._sandboxes[record.id] = Live(record, processes)
        return live

    async def _bring_up(self, live: Live, spec: Spec, assets: Assets) -> None:
        waited = live.waited
        async with AsyncExitStack() if waited is None else waited.undo as undo:
            booted = await self._boot(live.record, assets, undo) if waited is None else waited.booted
            live.claim = booted.claim
            await self._configure(live, booted, spec)
            undo.pop_all()

    async def _boot_waiting(self, shape: Shape, undo: AsyncExitStack) -> tuple[str, Booted]:
        """A machine of nobody's yet. It has an id, and no record: a restart ends it."""
        await self._assets.wait()
        self._require_room(shape.disk_mb)
        record = SandboxRecord(
            id=self.node.new_sandbox_id(), name="", state=State.PENDING, image=shape.image, cpus=shape.cpus,
            memory_mb=shape.memory_mb, disk_mb=shape.disk_mb, env_names=(), network=shape.network, created_at=0,
            idle_timeout_secs=0,
        )  # fmt: skip
        try:
            return record.id, await self._boot(record, self._assets.get(), undo)
        except BootFailed as fault:
            _log_boot(record.id, fault)
            raise

    async def _boot(self, record: SandboxRecord, assets: Assets, undo: AsyncExitStack) -> Booted:
        """A machine of the record's size, with its network in force, whose guest answers and has been told nothing
        yet. `undo` takes all of it away again."""
        directory = self._places.machine(record.id)
        directory.mkdir(mode=0o700)
        undo.push_async_callback(_shielded, _remove_tree, directory)
        claim = None
        if self._uids is not None:
            claim = self._uids.claim()
            undo.callback(claim.close)
        image = assets.image
        if record.image != rules.DEFAULT_IMAGE:
            image = self._places.drive(record.id)
            await self._images.provide(record.image, image)
        scratch = self._places.scratch(record.id)
        await make_scratch(scratch, record.disk_mb)
        volumes = await self._volumes.ready(record.volumes, record.id, _uid(claim))
        link = await self._networks.open(record, self._places.names(record.id))
        undo.push_async_callback(_shielded, self._networks.close, record.id)
        try:
            machine = await self._backend.start(
                MachineSpec(
                    id=record.id, cpus=math.ceil(record.cpus), memory_mb=record.memory_mb,
                    kernel=assets.kernel, initramfs=assets.initramfs,
                    drives=(
                        Drive(assets.runtime, True), Drive(image, True), Drive(scratch, False),
                        *(Drive(path, one.read_only) for path, one in zip(volumes, record.volumes, strict=True)),
                    ),
                    directory=directory, uid=_uid(claim),
                    tap_fd=None if link is None else link.tap_fd, mac="" if link is None else link.guest.mac,
                )
            )  # fmt: skip
        finally:
            # The machine has its own.
            if link is not None:
                link.close_tap()
        undo.push_async_callback(_shielded, machine.terminate)
        guest = Guest(machine.vsock_path, protocol.VERSION)
        await _before_exit(machine, "waiting for the guest agent", lambda: guest.wait_booted(BOOT_S))
        return Booted(machine, claim, None if link is None else interface(link))

    async def _configure(self, live: Live, booted: Booted, spec: Spec) -> None:
        """Tells a booted machine whose it is; with that it runs."""
        machine = booted.machine
        hostname = (live.record.name or live.record.id.replace("_", "-")).rstrip("-")
        files = {} if booted.network is None else self._guest_files
        guest = Guest(machine.vsock_path, protocol.VERSION)
        await _before_exit(
            machine, "configuring the guest",
            lambda: guest.configure(hostname, spec.env, booted.network, files, live.record.volumes),
        )  # fmt: skip
        running = replace(live.record, state=move(live.record.state, State.RUNNING), uid=_uid(booted.claim))
        # The event first: a daemon that is killed in between finds it, and tells the end of what has no record.
        self.audit.record(
            "sandbox.created", running.id, name=running.name or None, image=running.image,
            labels=running.labels or None, network=running.network, env_names=running.env_names or None,
            volumes=running.volumes or None, reason=None if live.waited is None else "pool",
        )  # fmt: skip
        try:
            self._store.put(running)
        except Internal:
            self.audit.record("sandbox.terminated", running.id, reason=MACHINE)
            raise
        live.record, live.machine = running, machine
        # However long it took: its clock starts now.
        live.active_at = time.monotonic()

    async def _end(self, live: Live, reason: str, keep_disk: bool) -> None:
        """The one way a sandbox ends. Its name is free at once; `gone` is set when nothing of it runs any
        more."""
        if live.record.state is State.TERMINATED:
            return
        with anyio.CancelScope(shield=True):
            state = move(live.record.state, State.TERMINATED)
            live.record = replace(live.record, state=state, ended_because=reason)
            if live.record.id not in self.audit.past.ended:
                self.audit.record("sandbox.terminated", live.record.id, reason=reason)
            self._store.put_done(live.record)
            live.processes.stop()
            assert live.machine is not None
            try:
                if not keep_disk:
                    await quiesce(live.machine, live.record)
                await live.machine.terminate()
                if keep_disk:
                    put_aside(self._places, live.record.id)
                async with live.changing:
                    await self._networks.close(live.record.id)
                await _remove_tree(self._places.machine(live.record.id))
            finally:
                if live.claim is not None:
                    live.claim.close()
                live.machine = live.claim = None
                live.gone.set()
        log.info("%s: ended: %s", live.record.id, reason)
        self._forget_old()

    def _forget_old(self) -> None:
        ended = [live for live in self._sandboxes.values() if live.record.state is State.TERMINATED]
        ended.sort(key=lambda live: live.record.created_at, reverse=True)
        for live in ended[MAX_TERMINATED:]:
            if live.gone.is_set():
                live.processes.remove()
                self._places.disk(live.record.id).unlink(missing_ok=True)
                self._store.forget(live.record.id)
                del self._sandboxes[live.record.id]

    async def _watch_machine(self, live: Live) -> None:
        """A machine that goes away by itself takes its sandbox along, but not its disk."""
        machine = live.machine
        assert machine is not None
        await machine.wait_exit()
        if live.record.state is not State.TERMINATED:
            console = _console(await machine.console_tail())
            log.error("%s: its machine ended by itself%s", live.record.id, console)
            await self._end(live, MACHINE, True)

    async def _guarded(self, act: Callable[..., Awaitable[None]], live: Live, *arguments: object) -> None:
        """One sandbox's fault must not end the daemon, and with it the hold on every other one."""
        try:
            await act(live, *arguments)
        except Exception:
            log.exception("%s: looking after it failed", live.record.id)

    async def _watch_clock(self) -> None:
        while True:
            await anyio.sleep(TICK_S)
            self._store.catch_up()
            self.audit.catch_up()
            for live in list(self._sandboxes.values()):
                if live.record.state in (State.RUNNING, State.SUSPENDED) and (reason := self._overdue(live)):
                    self._tasks.start_soon(self._guarded, self._end, live, reason, False)
                elif live.record.state is State.RUNNING and live.heartbeat.due():
                    self._tasks.start_soon(self._guarded, self._ask, live)

    async def _ask(self, live: Live) -> None:
        if not await live.heartbeat.check(live.guest) and live.record.state is State.RUNNING:
            log.warning("%s: its guest does not answer: what waited for it is given up, it is not", live.record.id)

    def _overdue(self, live: Live) -> str:
        record = live.record
        if record.lifetime_secs and _age_s(record) >= record.lifetime_secs:
            return "lifetime"
        if live.requests or live.processes.running:
            live.active_at = time.monotonic()
        quiet = time.monotonic() - live.active_at
        timeout = record.idle_timeout_secs if record.state is State.RUNNING else 0
        return "idle" if timeout and quiet >= timeout else ""

    def _find(self, ref: str) -> Live:
        if ref in self._sandboxes:
            return self._sandboxes[ref]
        if any(ref in (one.id, one.name) for one in self._left_alone):
            raise Conflict("the sandbox belongs to another version of sandboxd: start that version to use it")
        named = [live for live in self._sandboxes.values() if live.record.name == ref and ref]
        if not named:
            raise NotFound("no such sandbox")
        # The live one first, then the newest.
        return max(named, key=lambda one: (one.record.state is not State.TERMINATED, one.record.created_at))

    def _touched(self, ref: str) -> Live:
        live = self._find(ref)
        live.active_at = time.monotonic()
        return live

    def _running(self, ref: str) -> Live:
        live = self._touched(ref)
        if live.record.state is not State.RUNNING:
            raise Conflict(f"the sandbox is {live.record.state.value}")
        return live

    @asynccontextmanager
    async def _using(self, ref: str) -> AsyncIterator[Live]:
        """A running sandbox, active as long as the block lasts; the guest's errors become the API's."""
        live = self._running(ref)
        live.requests += 1
        try:
            yield live
        except GuestRefused as no:
            raise refusal(no) from None
        except GuestProtocolError as fault:
            log.warning("%s: %s", live.record.id, fault)
            raise Internal("the sandbox broke the protocol") from None
        except GuestGone as fault:
            # The watcher may not have run yet: what counts is that the machine is gone, not what the record says.
            ended = live.machine is None
            if live.machine is not None:
                with anyio.move_on_after(EXIT_NOTICE_S):
                    await live.machine.wait_exit()
                    ended = True
            if ended or live.record.state is not State.RUNNING:
                raise Conflict("the sandbox has ended") from None
            log.warning("%s: %s", live.record.id, fault)
            raise Internal("the sandbox does not answer") from None
        finally:
            live.requests -= 1
            live.active_at = time.monotonic()

    async def _held(self, ref: str, ask: Callable[[Guest], Awaitable[Download]]) -> tuple[Live, Held]:
        async with AsyncExitStack() as using:
            live = await using.enter_async_context(self._using(ref))
            download = await ask(live.guest)
            return live, Held(download, using.pop_all())

    def _require_room(self, disk_mb: int) -> None:
        """Disks are sparse and may promise more than there is; on a host that is all but full a new one is of no
        use to anybody."""
        room = os.statvfs(self._places.state)
        free_mb = room.f_bavail * room.f_frsize >> 20
        if free_mb < min(disk_mb, MIN_FREE_MB):
            raise Conflict(f"the server's disk is full: only {free_mb} MiB are free")

    def _require_free(self, name: str) -> None:
        names = [live.record.name for live in self._sandboxes.values() if live.record.state is not State.TERMINATED]
        if name and name in (*names, *(one.name for one in self._left_alone)):
            raise Conflict(f"a sandbox named {name} exists")


REFUSALS: dict[str, type[ApiError]] = {
    "not_found": NotFound,
    "is_dir": InvalidRequest,
    "not_dir": InvalidRequest,
    "no_such_command": InvalidRequest,
    "no_such_cwd": InvalidRequest,
    "bad_request": InvalidRequest,
    "too_large": InvalidRequest,
    "not_empty": Conflict,
    "read_only": Conflict,
    "nothing_new": Conflict,
    "disk_full": Conflict,
    "bad_volume": Conflict,
    "internal": Internal,
}
"""The guest protocol's codes as the API's errors."""


def refusal(no: GuestRefused) -> ApiError:
    if no.code == "internal":
        log.warning("a guest failed: %s", _line(no.message))
        return Internal("the request failed inside the sandbox")
    text = _line(no.message) or no.code.replace("_", " ")
    if no.code == "no_such_cwd" and "cwd" not in text:
        text = f"cwd: {text}"
    return REFUSALS[no.code](text)


async def make_scratch(path: Path, size_mb: int) -> None:
    """A sparse ext4 file system. Its tables are written when they are needed, so a large one costs as
    little."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size_mb << 20)
    finally:
        os.close(fd)
    command = [
        "mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-L", "scratch",
        "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0",
        str(path),
    ]  # fmt: skip
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
    done = await anyio.run_process(command, check=False, env=environment)
    if done.returncode:
        log.error("mke2fs failed: %s", _line(done.stderr.decode(errors="replace")))
        raise Internal("the sandbox's disk could not be made")


async def quiesce(machine: Machine, record: SandboxRecord) -> None:
    """What was written to volumes gets onto them before the machine is ended. One whose guest does not see to it may be
    ended all the same: its journals are replayed later."""
    if all(mount.read_only for mount in record.volumes):
        return
    try:
        await Guest(machine.vsock_path, record.guest_version).quiesce(QUIESCE_S)
    except SandboxError as fault:
        log.warning("%s: what it wrote to its volumes last may be lost: %s", record.id, fault)


def put_aside(places: Places, sandbox_id: str) -> None:
    """Keeps the disk of a machine that nobody asked to end."""
    places.disks.mkdir(mode=0o700, exist_ok=True)
    try:
        places.scratch(sandbox_id).rename(places.disk(sandbox_id))
    except FileNotFoundError:
        return
    log.info("%s: its disk is kept as disks/%s.img until the sandbox is deleted", sandbox_id, sandbox_id)


def _command(request: ProcessRequest) -> Command:
    argv = rules.argv(request.argv or ())
    env = rules.check_env(request.env or {})
    cwd = rules.guest_path("cwd", request.cwd) if request.cwd else rules.HOME
    rows, cols = request.rows or 0, request.cols or 0
    if not (0 <= rows < 1 << 16 and 0 <= cols < 1 << 16):
        raise InvalidRequest("rows and cols must be between 0 and 65535")
    return Command(argv, env, cwd, bool(request.tty), rows, cols)


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
                unmounted = _line(error.message)
        tasks.cancel_scope.cancel()
    if unmounted:
        raise Conflict(f"a volume could not be mounted at {unmounted}")
    if not done:
        raise BootFailed(f"{step}: {fault}", None, await machine.console_tail())


async def _shielded(act: Callable[..., Awaitable[None]], *arguments: object) -> None:
    with anyio.CancelScope(shield=True):
        await act(*arguments)


async def _remove_tree(directory: Path) -> None:
    await anyio.to_thread.run_sync(lambda: shutil.rmtree(directory, ignore_errors=True))


def _boot_s() -> float:
    """A clock that nobody sets, and that goes on while the host sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _age_s(record: SandboxRecord) -> float:
    return _boot_s() - record.created_boot_s if record.created_boot_s else time.time() - record.created_at


def _uid(claim: Claim | None) -> int | None:
    return None if claim is None else claim.uid


def _line(text: str) -> str:
    return first_line(text)[:MESSAGE_CHARS]


def _log_boot(sandbox_id: str, fault: BootFailed) -> None:
    log.error("%s: %s%s", sandbox_id, clean(str(fault)), _console(fault.console_tail))


def _console(tail: bytes) -> str:
    lines = [clean(line) for line in tail.decode(errors="replace").splitlines()]
    return "".join(f"\n    console: {line}" for line in lines if line)
