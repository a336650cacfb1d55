"""What can be changed of a sandbox that runs: its name, labels, idle timeout, and what its network lets through.

In: a checked wire request. Out: the record as it is from now on, in force and written down; or an error, and everything
as it was.
"""

from __future__ import annotations

from dataclasses import replace

import anyio

from sandboxd import fields
from sandboxd import policy as rules
from sandboxd.audit import Audit
from sandboxd.errors import Conflict, Internal, InvalidRequest
from sandboxd.lifecycle import State
from sandboxd.networks import Networks
from sandboxd.policy import Policy
from sandboxd.sandboxes import Live, Sandboxes
from sandboxd.store import SandboxRecord, Store
from sandboxd.wire import PatchRequest


class Changes:
    """One per daemon."""

    def __init__(
        self, policy: Policy, store: Store, audit: Audit, networks: Networks, sandboxes: Sandboxes
    ) -> None:
        self._policy, self._store, self._audit = policy, store, audit
        self._networks, self._sandboxes = networks, sandboxes

    async def make(self, live: Live, request: PatchRequest) -> SandboxRecord:
        """All of it, or nothing where a part is refused. A new network is in force when this returns."""
        if request.network is not None:
            rules.require("network_policy_update", self._policy)
        if all(getattr(request, name) is None for name in PatchRequest.__struct_fields__):
            raise InvalidRequest("nothing to change: network, name, labels or idle_timeout_secs")
        async with live.changing:
            old = live.record
            new = self._changed(old, request)
            if new.name != old.name:
                self._sandboxes.require_free(new.name)
            self._audit.require()
            self._tell(old, new)
            try:
                self._store.put(new)
            except Internal:
                self._tell(new, old)
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
            new = replace(new, network=rules.network(request.network, self._policy))
            self._networks.require(new.network)
        if request.name is not None:
            new = replace(new, name=fields.sandbox_name(request.name) if request.name else "")
        if request.labels is not None:
            new = replace(new, labels=fields.check_labels(request.labels))
        if request.idle_timeout_secs is not None:
            idle = rules.idle_timeout(request.idle_timeout_secs, self._policy.limits)
            new = replace(new, idle_timeout_secs=idle)
        usable = (State.RUNNING,) if request.network is not None else (State.RUNNING, State.SUSPENDED)
        if record.state not in usable:
            raise Conflict(f"the sandbox is {record.state.value}")
        if record.network.mode == "none" and new.network.mode != "none":
            raise Conflict("the sandbox has no network and cannot be given one; start another")
        return new

    def _tell(self, old: SandboxRecord, new: SandboxRecord) -> None:
        names = ("name", "labels", "idle_timeout_secs")
        if changed := {name: getattr(new, name) for name in names if getattr(new, name) != getattr(old, name)}:
            self._audit.record("sandbox.updated", new.id, **changed)
        if new.network != old.network:
            self._audit.record("sandbox.network_updated", new.id, network=new.network, reason="request")

    async def _change_network(self, live: Live, old: SandboxRecord) -> None:
        """Puts the record's network in force, or the old record back."""
        try:
            await self._networks.change(live.record)
        except Internal:
            if not live.ended:
                self._tell(live.record, old)
                live.record = old
                self._store.put_done(old)
            raise
