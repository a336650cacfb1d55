"""The networks of this daemon's sandboxes: under the policy, given, changed, taken back, closed, looked at.

In: records whose network `policy` has permitted, and what egress tells. Out: links for machines, the network a
sandbox really has, decisions about names. A sandbox has what its record says or less, never more: what cannot be put
under a policy is closed. What egress says of a guest's names is somebody else's text.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import anyio.to_thread

from egress.network import EgressError, Link
from egress.policy import Policy as EgressPolicy
from sandboxd import policy as rules
from sandboxd.errors import Internal, Unsupported
from sandboxd.events import Decision, EventFile, decision, merged
from sandboxd.policy import Policy
from sandboxd.store import Network, SandboxRecord
from sandboxd.termsafe import clean
from sandboxd.usage import Traffic

log = logging.getLogger("sandboxd")


class Egress(Protocol):
    """What gives sandboxes their network: `egress.network.Egress`. A policy is in force when its call returns, and at
    no moment does anything pass that both the old and the new one forbid."""

    async def open(self, sandbox_id: str, policy: EgressPolicy, names: Path) -> Link: ...

    async def adopt(self, sandbox_id: str, policy: EgressPolicy, names: Path) -> bool: ...

    async def update(self, sandbox_id: str, policy: EgressPolicy) -> None: ...

    async def close(self, sandbox_id: str) -> None: ...

    async def report(self, sandbox_id: str) -> list[dict[str, Any]]: ...

    async def traffic(self) -> dict[str, tuple[int, int]]: ...

    async def sweep(self, known: Collection[str]) -> list[str]: ...

    async def end(self) -> None: ...


class Networks:
    """`egress` is None where no sandbox has a network. `names` is always the sandbox's file of names."""

    def __init__(self, egress: Egress | None, policy: Policy, events: EventFile) -> None:
        self._egress, self._policy, self._events = egress, policy, events
        self._linked: set[str] = set()

    @property
    def in_use(self) -> bool:
        return bool(self._linked)

    def require(self, network: Network) -> None:
        """Whatever the policy says: what nobody here would enforce is not promised."""
        if network.mode != "none" and self._egress is None:
            raise Unsupported(f"this endpoint cannot give a sandbox a network with mode {network.mode}")

    async def open(self, record: SandboxRecord, names: Path) -> Link | None:
        """None for a sandbox without a network; it has no link either. The tap is the caller's to close."""
        if self._egress is None or record.network.mode == "none":
            return None
        try:
            link = await self._egress.open(record.id, rules.enforced(record.network, self._policy), names)
        except EgressError as fault:
            log.error("%s: its network could not be made: %s", record.id, clean(str(fault)))
            raise Internal("the sandbox's network could not be made") from None
        self._linked.add(record.id)
        return link

    async def change(self, record: SandboxRecord) -> None:
        """Puts the record's network in force. `Internal` where that fails: then it is the one before, or less."""
        assert self._egress is not None
        try:
            await self._egress.update(record.id, rules.enforced(record.network, self._policy))
        except EgressError as fault:
            log.error("%s: its network could not be changed: %s", record.id, clean(str(fault)))
            raise Internal("the network could not be changed") from None
        log.info("%s: sandbox.network_updated, reason request: %s", record.id, record.network.mode)

    async def take_back(self, record: SandboxRecord, names: Path) -> Network:
        """What a sandbox of an earlier daemon keeps: what the policy still permits, in force. One whose end of the
        link is gone, or cannot be put under the policy, keeps nothing."""
        network, reason = rules.narrowed(record.network, self._policy), "policy"
        if network.mode != "none":
            assert self._egress is not None
            linked = False
            try:
                linked = await self._egress.adopt(record.id, rules.enforced(network, self._policy), names)
                reason = reason if linked else "its link is gone"
            except EgressError as fault:
                reason = str(fault)
            if linked:
                self._linked.add(record.id)
            else:
                network = Network("none")
        if network != record.network:
            log.warning("%s: sandbox.network_updated, reason %s: %s", record.id, clean(reason), network.mode)
        return network

    async def sweep(self) -> None:
        """After every sandbox was taken back: what belongs to none of them is closed."""
        if self._egress is not None:
            for sandbox_id in await self._egress.sweep(frozenset(self._linked)):
                log.info("%s: its network was still there: it is removed", sandbox_id)

    async def close(self, sandbox_id: str) -> None:
        """Whatever goes wrong with it holds nothing else up: the next start removes what is left."""
        if self._egress is not None and sandbox_id in self._linked:
            self._linked.discard(sandbox_id)
            try:
                await self._egress.close(sandbox_id)
            except EgressError as fault:
                log.error("%s: its network was not removed: %s", sandbox_id, clean(str(fault)))

    async def traffic(self) -> dict[str, Traffic]:
        """Of each sandbox that has a link. What cannot be counted now is counted the next time."""
        if self._egress is None:
            return {}
        try:
            return {sandbox_id: Traffic(*counted) for sandbox_id, counted in (await self._egress.traffic()).items()}
        except EgressError as fault:
            log.warning("what sandboxes sent could not be counted: %s", clean(str(fault)))
            return {}

    async def decisions(self, sandbox_id: str) -> list[Decision]:
        """About each name the sandbox asked for; of one that has ended, or was forgotten, too."""
        known = {one.id: one for one in await anyio.to_thread.run_sync(self._events.of, sandbox_id)}
        known |= {one.id: one for one in await self._reported(sandbox_id)}
        return merged(known.values())

    async def decision(self, decision_id: str) -> Decision | None:
        found = await anyio.to_thread.run_sync(self._events.find, decision_id)
        if found is None:
            return None
        return next((one for one in await self._reported(found.sandbox) if one.id == decision_id), found)

    async def _reported(self, sandbox_id: str) -> list[Decision]:
        """What egress says now; the file is behind, and better than nothing."""
        if self._egress is None or sandbox_id not in self._linked:
            return []
        try:
            rows = await self._egress.report(sandbox_id)
        except EgressError as fault:
            log.warning("%s: egress does not report: %s", sandbox_id, clean(str(fault)))
            return []
        return [one for row in rows if (one := decision(sandbox_id, row)) is not None]


def interface(link: Link) -> dict[str, Any]:
    """The guest's end of a link, as the guest protocol names it."""
    guest = link.guest
    return {"address": guest.address, "gateway": guest.gateway, "resolver": guest.resolver, "mtu": guest.mtu}
