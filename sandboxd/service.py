"""The verbs of the API, and the order of steps in each. Between the wire above and machines, guests and disks
below.

In: checked wire requests. Out: records, and errors that cross the API. A name is taken before anything is
started and is free again once the sandbox has ended; whatever a create set up is undone, in reverse, wherever
it stops.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import anyio

from guestd import protocol
from sandboxd import bind, boot, fields, history
from sandboxd import policy as rules
from sandboxd.address import Peer, UnixPeer
from sandboxd.assets.prepare import Assets
from sandboxd.audit import Audit
from sandboxd.bind import Kept
from sandboxd.boot import Boot
from sandboxd.chain import Report
from sandboxd.changes import Changes
from sandboxd.ending import MACHINE, Ending
from sandboxd.errors import BootFailed, Conflict, Internal, InvalidRequest, NotFound
from sandboxd.events import Decision
from sandboxd.guest import Connection, Source
from sandboxd.images import Images, Status
from sandboxd.lifecycle import State, move
from sandboxd.networks import Networks
from sandboxd.node import Node, Resources
from sandboxd.places import MIN_FREE_MB, Places
from sandboxd.policy import Policy, Spec
from sandboxd.pools import Booted, Pools, Shape
from sandboxd.pools import of as pools_of
from sandboxd.processes import Command, Finished, Process
from sandboxd.readiness import AssetsState
from sandboxd.restart import Adopted, Restart
from sandboxd.sandboxes import Held, Live, Sandboxes, boot_s
from sandboxd.store import Bind, Network, ProcessRecord, SandboxRecord, Store, Unreadable, VolumeRecord
from sandboxd.supervision import Supervision
from sandboxd.uids import Uids
from sandboxd.usage import Sample
from sandboxd.vm.machine import Backend, Share
from sandboxd.volumes import Volumes, holder
from sandboxd.wire import SIGNALS, AuditEvent, CreateRequest, PatchRequest, ProcessRequest, VolumeRequest

WORKSPACE = "/workspace"
EVENT_ID = re.compile(r"[a-z2-7]{8}\Z")

log = logging.getLogger("sandboxd")


class Service:
    """One per daemon. Use it inside `async with`; leaving it lets go of the machines and ends none of a sandbox."""

    def __init__(
        self, places: Places, store: Store, backend: Backend, policy: Policy, assets: AssetsState,
        uids: Uids | None, networks: Networks, guest_files: Mapping[str, bytes], images: Images,
        audit: Audit, node: Node, kept: Kept,
    ) -> None:  # fmt: skip
        """`guest_files` are written in sandboxes that have a network; what is `kept` is shared with none."""
        self.policy, self.node, self.audit = policy, node, audit
        self._backend = backend
        self._places, self._store, self._assets = places, store, assets
        self._networks, self._images, self._kept = networks, images, kept
        self._volumes = Volumes(store, places.volumes, backend.recover)
        self._tasks = anyio.create_task_group()
        self._sandboxes = Sandboxes(places, store, audit, self._tasks)
        self._changes = Changes(policy, store, audit, networks, self._sandboxes)
        self._boot = Boot(
            places, backend, assets, uids, networks, images, self._volumes, node, guest_files, policy.limits
        )
        self.pools = Pools(pools_of(policy), self._boot.waiting)
        ending = Ending(places, store, audit, networks, self._sandboxes)
        self._supervision = Supervision(store, audit, networks, self._sandboxes, ending, self._tasks)
        self._restart = Restart(places, store, audit, uids, networks, self._sandboxes, self._supervision)

    @property
    def backend_name(self) -> str:
        """Of the one that starts new machines."""
        return self._backend.name

    async def __aenter__(self) -> Service:
        await self._tasks.__aenter__()
        self._supervision.begin()
        self._tasks.start_soon(self.pools.run)
        return self

    async def __aexit__(self, *fault: object) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def restore(self, found: Iterable[Adopted], left_alone: Iterable[Unreadable]) -> None:
        """Takes back the sandboxes of an earlier daemon; those `left_alone` are not ours."""
        await self._restart.restore(found, left_alone)

    # -- sandboxes

    async def create(self, request: CreateRequest, peer: Peer) -> SandboxRecord:
        with self.node.creates.counted():
            spec = rules.resolve(request, self.policy, local=isinstance(peer, UnixPeer))
            if spec.bind is None:
                return await self._create(spec, None)
            asked = spec.bind
            with await anyio.to_thread.run_sync(bind.open_directory, asked.host_path, peer, self._kept) as directory:
                spec = replace(spec, bind=Bind(bind.place(directory), asked.read_only))
                return await self._create(spec, Share(directory.fd, asked.read_only))

    async def _create(self, spec: Spec, share: Share | None) -> SandboxRecord:
        self._networks.require(spec.network)
        self._volumes.require(spec.volumes)
        assets = self._assets.get()
        self._places.require_room(spec.disk_mb)
        self.audit.require()
        live = self._register(spec)
        record = live.record
        try:
            with anyio.CancelScope() as live.creating:
                await self._bring_up(live, spec, share, assets)
                self._supervision.watch(live)
                log.info("%s: runs, %.1f s after it was asked for", record.id, live.age_s)
                return live.record
            raise Conflict("the sandbox was deleted while it was starting")
        except BootFailed as fault:
            boot.log_failure(record.id, fault)
            raise Internal(f"the sandbox did not start: {fault.step}") from None
        finally:
            live.creating = None
            if live.record.state is State.PENDING:
                self._sandboxes.forget(live)
                live.gone.set()

    def sandboxes(self, labels: list[tuple[str, str]], encode: Callable[[SandboxRecord], bytes]) -> list[bytes]:
        """Newest first; those that have every label. Each as `encode` writes it, once per change of it."""
        found = list(self._sandboxes)
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
        return self._sandboxes.touched(ref).record

    async def update(self, ref: str, request: PatchRequest) -> SandboxRecord:
        return await self._changes.make(self._sandboxes.touched(ref), request)

    async def delete(self, ref: str) -> None:
        live = self._sandboxes.find(ref)
        if live.record.state is State.PENDING:
            if live.creating is not None:
                live.creating.cancel()
        elif not live.ended:
            self._supervision.end(live, "request")
        await live.gone.wait()
        # Kept where the machine had ended by itself, perhaps only while we waited.
        self._places.disk(live.record.id).unlink(missing_ok=True)

    async def end_all(self) -> None:
        """For a daemon that was told to take its sandboxes along."""
        async with anyio.create_task_group() as tasks:
            for live in self._sandboxes.living():
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
        return self.image_pooled(name) or any(live.record.image == name for live in self._sandboxes.living())

    # -- what they use, and the machine they are on

    def usage(self, ref: str) -> tuple[SandboxRecord, list[Sample]]:
        """Of one that has ended, too, until it is forgotten. Reading it is no activity."""
        live = self._sandboxes.find(ref)
        return live.record, live.meter.samples()

    def counts(self) -> dict[State, int]:
        """Sandboxes by state."""
        counted = dict.fromkeys(State, 0)
        for live in self._sandboxes:
            counted[live.record.state] += 1
        return counted

    def processes_running(self) -> int:
        return sum(live.processes.running for live in self._sandboxes)

    def free(self) -> Resources:
        """Of the node's capacity, beside every sandbox that has not ended and every machine that waits."""
        used: list[SandboxRecord | Shape] = [live.record for live in self._sandboxes.living()]
        for pool in self.pools.all:
            used += [pool.shape] * (len(pool.ready) + pool.booting)
        return self.node.free(Resources(one.cpus, one.memory_mb, one.disk_mb) for one in used)

    def cordon(self, cordoned: bool) -> None:
        if cordoned != self.node.cordoned:
            log.info("the node is cordoned: no new sandboxes" if cordoned else "the node takes new sandboxes again")
        self.node.cordoned = cordoned

    # -- what their networks are used for

    async def egress(self, ref: str) -> tuple[Network, list[Decision]]:
        """The network as it is, and each name that was asked for. Reading it is no activity."""
        live = self._sandboxes.find(ref)
        return live.record.network, await self._networks.decisions(live.record.id)

    async def event(self, event_id: str) -> Decision:
        found = await self._networks.decision(event_id) if EVENT_ID.match(event_id) else None
        if found is None:
            raise NotFound("no such event, or it is too long ago")
        return found

    # -- volumes

    async def create_volume(self, request: VolumeRequest) -> VolumeRecord:
        name = fields.volume_name(request.name or "")
        size_mb = rules.volume_size(request.size_mb, self.policy)
        self._places.require_room(size_mb)
        return await self._volumes.create(name, size_mb)

    def volumes(self) -> list[tuple[VolumeRecord, str]]:
        """By name; with the sandbox that writes to it, or the first one that reads it, or nothing."""
        uses = self._sandboxes.volume_uses()
        return [(record, holder(record.name, uses) or "") for record in self._volumes.all()]

    async def delete_volume(self, name: str) -> None:
        await self._volumes.delete(name, self._sandboxes.volume_uses())

    # -- what was done

    async def events(self, ref: str) -> tuple[list[AuditEvent], bool]:
        """A sandbox's, oldest first, and whether older ones were left out; by its id when it is forgotten, too. Reading
        them is no activity."""
        try:
            sandbox_id, known = self._sandboxes.find(ref).record.id, True
        except NotFound:
            if not history.ID.match(ref):
                raise
            sandbox_id, known = ref, False
        found, cut = await self.audit.events(sandbox_id)
        merged, cut_again = history.merged(found, await self._networks.decisions(sandbox_id))
        if not merged and not known:
            raise NotFound("no such sandbox")
        return merged, cut or cut_again

    async def check_audit(self) -> Report:
        return await self.audit.check()

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
            live = await running.enter_async_context(self._sandboxes.using(ref))
            self.audit.require()
            run = live.processes.run(live.guest, command, stdin, timeout_s)
            yield await running.enter_async_context(run)

    async def start(self, ref: str, request: ProcessRequest) -> ProcessRecord:
        if request.stdin or request.timeout_secs:
            raise InvalidRequest("stdin and timeout_secs belong to run")
        command = _command(request)
        async with self._sandboxes.using(ref) as live:
            self.audit.require()
            return await live.processes.start(live.guest, command)

    def processes(self, ref: str) -> list[ProcessRecord]:
        return self._sandboxes.touched(ref).processes.all()

    def process(self, ref: str, pid: str) -> Process:
        """For reading its record and output, of a terminated sandbox's too."""
        return self._sandboxes.touched(ref).processes.get(pid)

    @asynccontextmanager
    async def feeding(self, ref: str, pid: str) -> AsyncIterator[Process]:
        """A process of a running sandbox, while somebody talks to it."""
        async with self._sandboxes.using(ref) as live:
            with live.heartbeat.patience():
                yield live.processes.get(pid)

    async def signal(self, ref: str, pid: str, name: str) -> None:
        if name not in SIGNALS:
            raise InvalidRequest(f"signal must be one of {', '.join(SIGNALS)}")
        live = self._sandboxes.touched(ref)
        if live.processes.get(pid).running:
            async with self._sandboxes.using(ref):
                await live.processes.signal(live.guest, pid, name)

    async def resize(self, ref: str, pid: str, size: bytes) -> None:
        live = self._sandboxes.touched(ref)
        if live.processes.get(pid).running:
            async with self._sandboxes.using(ref):
                await live.processes.resize(live.guest, pid, size)

    # -- files and the workspace

    async def read_file(self, ref: str, path: str) -> Held:
        clean_path = fields.guest_path("path", path)
        self.audit.require()
        live, held = await self._sandboxes.hold(ref, lambda guest: guest.read(clean_path))
        self.audit.record("file.read", live.record.id, path=clean_path, bytes=held.size)
        return held

    async def write_file(self, ref: str, path: str, size: int, body: Source) -> None:
        clean_path = fields.guest_path("path", path)
        async with self._sandboxes.using(ref) as live:
            self.audit.require()
            await live.guest.write(clean_path, size, body)
            self.audit.record("file.written", live.record.id, path=clean_path, bytes=size)

    async def remove_file(self, ref: str, path: str) -> None:
        clean_path = fields.guest_path("path", path)
        async with self._sandboxes.using(ref) as live:
            self.audit.require()
            await live.guest.remove(clean_path)
            self.audit.record("file.removed", live.record.id, path=clean_path)

    async def list_dir(self, ref: str, path: str) -> Held:
        """The guest's listing as it wrote it: JSON that nobody here has looked at."""
        clean_path = fields.guest_path("path", path)
        _, held = await self._sandboxes.hold(ref, lambda guest: guest.list(clean_path))
        return held

    async def bundle_in(self, ref: str, branch: str, size: int, body: Source) -> None:
        name = fields.branch("branch", branch)
        async with self._sandboxes.using(ref) as live:
            _require_own_workspace(live.record)
            self.audit.require()
            await live.guest.bundle_in(name, size, body)
            self.audit.record("workspace.in", live.record.id, path=WORKSPACE, reason=name)

    async def bundle_out(self, ref: str, base: str, branch: str) -> Held:
        start, name = fields.commit_or_branch("base", base), fields.branch("branch", branch)
        _require_own_workspace(self._sandboxes.find(ref).record)
        self.audit.require()
        live, held = await self._sandboxes.hold(ref, lambda guest: guest.bundle_out(start, name))
        self.audit.record("workspace.out", live.record.id, reason=f"{start}..{name}", bytes=held.size)
        return held

    @asynccontextmanager
    async def tunnel(self, ref: str, port: int) -> AsyncIterator[Connection]:
        async with self._sandboxes.using(ref) as live:
            self.audit.require()
            connection = await live.guest.dial(port)
            try:
                self.audit.record("tunnel.opened", live.record.id, port=port)
                yield connection
            finally:
                connection.close()

    @asynccontextmanager
    async def spare(self, ref: str) -> AsyncIterator[Path]:
        """A directory on the state's file system for a body whose size is not known beforehand; the sandbox, which
        must run, is in use as long as the block lasts."""
        async with self._sandboxes.using(ref) as live:
            yield self._places.machine(live.record.id)

    def require_room(self) -> None:
        """For more of such a body."""
        self._places.require_room(MIN_FREE_MB)

    # -- how

    def _register(self, spec: Spec) -> Live:
        """Claims the name, the volumes, an id and a machine that waits, if there is one, before anything is started."""
        self.node.require_open()
        self._sandboxes.require_free(spec.name)
        self._volumes.claim(spec.volumes, self._sandboxes.volume_uses())
        waiting = self.pools.find(spec)
        record = SandboxRecord(
            id=self.node.new_sandbox_id() if waiting is None else waiting.id,
            name=spec.name, state=State.PENDING, image=spec.image,
            cpus=spec.cpus, memory_mb=spec.memory_mb, disk_mb=spec.disk_mb, env_names=tuple(sorted(spec.env)),
            network=spec.network, created_at=time.time(), idle_timeout_secs=spec.idle_timeout_secs,
            lifetime_secs=spec.lifetime_secs, labels=spec.labels, guest_version=protocol.VERSION,
            created_boot_s=boot_s(), volumes=spec.volumes, bind=spec.bind,
        )  # fmt: skip
        self._store.put(record)
        live = self._sandboxes.add(record)
        if waiting is not None:
            self.pools.take(waiting)
            live.waited = waiting
        return live

    async def _bring_up(self, live: Live, spec: Spec, share: Share | None, assets: Assets) -> None:
        waited = live.waited
        async with AsyncExitStack() if waited is None else waited.undo as undo:
            booted = await self._boot.up(live.record, assets, undo, share) if waited is None else waited.booted
            live.claim = booted.claim
            await self._boot.configure(booted, live.record, spec.env)
            self._runs(live, booted)
            undo.pop_all()

    def _runs(self, live: Live, booted: Booted) -> None:
        """From now on, once that is written down."""
        uid = None if booted.claim is None else booted.claim.uid
        running = replace(live.record, state=move(live.record.state, State.RUNNING), uid=uid)
        # The event first: a daemon that is killed in between finds it, and tells the end of what has no record.
        self.audit.record(
            "sandbox.created", running.id, name=running.name or None, image=running.image,
            labels=running.labels or None, network=running.network, env_names=running.env_names or None,
            volumes=running.volumes or None, bind=running.bind, reason=None if live.waited is None else "pool",
        )  # fmt: skip
        try:
            self._store.put(running)
        except Internal:
            self.audit.record("sandbox.terminated", running.id, reason=MACHINE)
            raise
        live.record, live.machine = running, booted.machine
        # However long it took: its clock starts now.
        live.active_at = time.monotonic()


def _require_own_workspace(record: SandboxRecord) -> None:
    if record.bind is not None:
        raise Conflict("/workspace is a directory of the host: what is in it is there already")


def _command(request: ProcessRequest) -> Command:
    argv = fields.argv(request.argv or ())
    env = fields.check_env(request.env or {})
    cwd = fields.guest_path("cwd", request.cwd) if request.cwd else fields.HOME
    rows, cols = request.rows or 0, request.cols or 0
    if not (0 <= rows < 1 << 16 and 0 <= cols < 1 << 16):
        raise InvalidRequest("rows and cols must be between 0 and 65535")
    return Command(argv, env, cwd, bool(request.tty), rows, cols)
