"""How a sandbox ends. Nothing but a request, an idle timeout or a lifetime ends one; one whose machine went away by
itself is shown as terminated and its disk is put aside.

In: a sandbox, and why it is to end. Out: nothing of it, but its record, what its processes wrote, and perhaps its disk.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import anyio
import anyio.to_thread

from sandboxd import trees
from sandboxd.audit import Audit
from sandboxd.errors import SandboxError
from sandboxd.guest import Guest
from sandboxd.lifecycle import State, move
from sandboxd.networks import Networks
from sandboxd.places import Places
from sandboxd.sandboxes import Live, Sandboxes
from sandboxd.store import SandboxRecord, Store
from sandboxd.vm.machine import Machine

QUIESCE_S = 10.0
"""For a guest to write out what it holds for its volumes."""
MACHINE = "machine"
"""Why a sandbox ended whose machine went away by itself."""

log = logging.getLogger("sandboxd")


class Ending:
    """One per daemon."""

    def __init__(self, places: Places, store: Store, audit: Audit, networks: Networks, sandboxes: Sandboxes) -> None:
        self._places, self._store, self._audit = places, store, audit
        self._networks, self._sandboxes = networks, sandboxes

    async def end(self, live: Live, reason: str) -> None:
        """The one way a sandbox ends. Its name is free at once; `gone` is set when nothing of it runs any
        more."""
        if live.ended:
            return
        keep_disk = reason == MACHINE
        with anyio.CancelScope(shield=True):
            state = move(live.record.state, State.TERMINATED)
            live.record = replace(live.record, state=state, ended_because=reason)
            if live.record.id not in self._audit.past.ended:
                self._audit.record("sandbox.terminated", live.record.id, reason=reason)
            self._store.put_done(live.record)
            live.processes.stop()
            assert live.machine is not None
            try:
                if not keep_disk:
                    await quiesce(live.machine, live.record)
                try:
                    await live.machine.terminate()
                except (SandboxError, OSError) as fault:
                    # Its network and its files go all the same; what is left of it the next start ends.
                    log.error("%s", fault)
                if keep_disk:
                    self._places.put_aside(live.record.id)
                async with live.changing:
                    await self._networks.close(live.record.id)
                await anyio.to_thread.run_sync(trees.remove, self._places.machine(live.record.id))
            finally:
                if live.claim is not None:
                    live.claim.close()
                live.machine = live.claim = None
                live.gone.set()
        log.info("%s: ended: %s", live.record.id, reason)
        self._sandboxes.forget_old()


async def quiesce(machine: Machine, record: SandboxRecord) -> None:
    """What was written to volumes gets onto them before the machine is ended. One whose guest does not see to it may be
    ended all the same: its journals are replayed later."""
    if all(mount.read_only for mount in record.volumes):
        return
    try:
        await Guest(machine.vsock_path, record.guest_version).quiesce(QUIESCE_S)
    except SandboxError as fault:
        log.warning("%s: what it wrote to its volumes last may be lost: %s", record.id, fault)
