"""What a restart takes back, and what it clears away.

In: the records of an earlier daemon and what still runs. Out: first each record with its machine, or without one;
then sandboxes, under today's policy, attached to their guests again. The lock on the state directory comes before
that, so nothing of a living daemon is ever looked at. A machine with a whole record is taken back; one whose create
never finished, or whose end was asked for, is ended; files that belong to no record go. A sandbox whose machine is
gone is shown as terminated and its disk is put aside: nobody asked for its end. One whose record cannot be read is
left alone with all that is its own.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from guestd import protocol
from sandboxd import trees
from sandboxd.audit import Audit
from sandboxd.boot import BOOT_S
from sandboxd.ending import MACHINE, quiesce
from sandboxd.errors import GuestProtocolError, SandboxError, SetupError
from sandboxd.guest import GuestGone, GuestRefused
from sandboxd.lifecycle import State, move
from sandboxd.networks import Networks
from sandboxd.places import Places
from sandboxd.sandboxes import Live, Sandboxes
from sandboxd.store import SandboxRecord, Store, Unreadable
from sandboxd.supervision import Supervision
from sandboxd.termsafe import clean
from sandboxd.uids import Uids
from sandboxd.vm.machine import Backend, Machine

PAUSE_S = 1.0
LONGEST_PAUSE_S = 10.0
"""Before a guest that was not reached is asked again."""

AT_ONCE = 16
"""Machines that are asked for at a time; each takes a few descriptors meanwhile."""

log = logging.getLogger("sandboxd")


@dataclass(frozen=True, slots=True)
class Adopted:
    """A record as it is now. `machine` is None where it has ended."""

    record: SandboxRecord
    machine: Machine | None


async def adopt(
    places: Places, store: Store, backend: Backend, audit: Audit
) -> tuple[list[Adopted], list[Unreadable]]:
    """Oldest first, and what is left alone. Afterwards every process, socket and file below the state directory has an
    owner. Raises SetupError where it cannot be seen what of it still runs: machines that were not seen are no machines
    that are gone."""
    try:
        return await _adopt(places, store, backend, audit)
    except OSError as fault:
        advice = _ADVICE.get(fault.errno or 0, "")
        raise SetupError(
            f"the machines of an earlier sandboxd cannot be taken back: {fault.strerror}{advice}; they are left running"
        ) from fault


_ADVICE = {
    errno.EMFILE: " (raise LimitNOFILE, or `ulimit -n`)",
    errno.ENFILE: " (raise the sysctl fs.file-max)",
}


async def _adopt(
    places: Places, store: Store, backend: Backend, audit: Audit
) -> tuple[list[Adopted], list[Unreadable]]:
    places.sandboxes.mkdir(mode=0o700, exist_ok=True)
    found: list[Adopted] = []
    records, unreadable = store.sandboxes()
    running = [one.id for one in records if one.state not in (State.PENDING, State.TERMINATED)]
    machines = await _take(places, backend, running)
    for record in records:
        if record.state is State.PENDING:
            log.info("%s: its create never finished: it is removed", record.id)
            if record.id in audit.past.created and record.id not in audit.past.ended:
                audit.record("sandbox.terminated", record.id, reason=MACHINE)
            store.forget(record.id)
            continue
        found.append(await _look(places, store, backend, audit, record, machines.get(record.id)))
    for one in unreadable:
        log.error("%s: its record was written by another version: %s; it is left as it is", one.id, clean(one.why))
    left = {one.id for one in unreadable}
    known = frozenset(one.record.id for one in found if one.machine is not None) | left
    await anyio.to_thread.run_sync(backend.sweep, places.sandboxes, known)
    owners = {one.record.id for one in found} | left
    _clear(places.sandboxes, known, "sandboxes")
    _clear(places.outputs, owners, "output")
    _clear(places.disks, {f"{owner}.img" for owner in owners}, "disks")
    return found, unreadable


async def _take(places: Places, backend: Backend, ids: Iterable[str]) -> dict[str, Machine | None]:
    """Several at once: a VMM that gives no answer is waited for, and nobody's sandbox waits for all of somebody's."""
    found: dict[str, Machine | None] = {}
    faults: list[OSError | SetupError] = []
    limit = anyio.CapacityLimiter(AT_ONCE)

    async def take(id: str) -> None:
        async with limit:
            try:
                found[id] = await backend.adopt(places.machine(id), id)
            except (OSError, SetupError) as fault:
                faults.append(fault)

    async with anyio.create_task_group() as tasks:
        for id in ids:
            tasks.start_soon(take, id)
    if faults:
        raise faults[0]
    return found


async def _look(
    places: Places, store: Store, backend: Backend, audit: Audit, record: SandboxRecord, machine: Machine | None
) -> Adopted:
    """`machine` is that of a sandbox whose end was not asked for."""
    if record.state is State.TERMINATED:
        await _finish(places, backend, record)
        if record.ended_because == MACHINE:
            # Where the daemon was killed between the record and this.
            places.put_aside(record.id)
        return Adopted(record, None)
    if machine is not None:
        log.info("%s: its machine still runs: it is taken back", record.id)
        return Adopted(record, machine)
    log.warning("%s: its machine is gone: it is shown as terminated", record.id)
    places.put_aside(record.id)
    if record.id not in audit.past.ended:
        audit.record("sandbox.terminated", record.id, reason=MACHINE)
    ended = replace(record, state=move(record.state, State.TERMINATED), ended_because="its machine is gone")
    store.put_done(ended)
    return Adopted(ended, None)


async def _finish(places: Places, backend: Backend, record: SandboxRecord) -> None:
    """Of a sandbox whose end was asked for: a daemon that was killed meanwhile had perhaps not seen to its volumes. The
    rest of its end is the sweep's."""
    if record.volumes and (machine := await backend.adopt(places.machine(record.id), record.id)) is not None:
        await quiesce(machine, record)
        try:
            await machine.terminate()
        except SandboxError as fault:
            # Of one that the kernel does not let go: every other sandbox would wait for it.
            log.error("%s", fault)


def _clear(directory: Path, known: frozenset[str] | set[str], what: str) -> None:
    """Removes what no record names. Links are removed, never followed."""
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.name in known:
            continue
        log.info("%s/%s has no owner: it is removed", what, entry.name)
        if entry.is_dir(follow_symlinks=False):
            trees.remove(Path(entry.path))
        else:
            os.unlink(entry.path)


class Restart:
    """The second half: once per daemon, with what `adopt` found."""

    def __init__(
        self, places: Places, store: Store, audit: Audit, uids: Uids | None, networks: Networks,
        sandboxes: Sandboxes, supervision: Supervision,
    ) -> None:  # fmt: skip
        self._places, self._store, self._audit, self._uids = places, store, audit, uids
        self._networks, self._sandboxes, self._supervision = networks, sandboxes, supervision

    async def restore(self, found: Iterable[Adopted], left_alone: Iterable[Unreadable]) -> None:
        """Networks are narrowed to what is permitted now before anything else is done, and those that belong to no
        sandbox are removed."""
        running = []
        self._sandboxes.left_alone.extend(left_alone)
        for one in found:
            live = self._sandboxes.add(one.record)
            live.machine = one.machine
            if one.machine is None:
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
            self._supervision.watch(live)
            if reason := self._audit.past.ended.get(live.record.id):
                # Recorded, and then the daemon was killed: whoever ended it had not been answered yet.
                self._supervision.end(live, reason)
            else:
                self._supervision.start(self._take_back, live)

    async def _take_network(self, live: Live) -> None:
        record = live.record
        network = await self._networks.take_back(record, self._places.names(record.id))
        if network != record.network:
            live.record = replace(record, network=network)
            if self._audit.past.networks.get(record.id) != msgspec.to_builtins(network):
                self._audit.record("sandbox.network_updated", record.id, network=network, reason="policy")
            self._store.put_done(live.record)

    async def _take_back(self, live: Live) -> None:
        """Until the guest has answered: a silent one keeps its disk and is asked again, ever more seldom."""
        pause_s = PAUSE_S
        while live.record.state is State.RUNNING:
            try:
                self._speaks(live, await live.guest.wait_ready(BOOT_S))
                taken, lost = await live.processes.take_back(live.guest)
            except (GuestGone, GuestProtocolError, GuestRefused) as fault:
                log.warning("%s: its guest was not reached: %s; it is asked again", live.record.id, fault)
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
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
