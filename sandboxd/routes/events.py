"""What happened: decisions about names, and the audit log."""

from __future__ import annotations

import anyio.to_thread

from sandboxd import policy as rules
from sandboxd import wire
from sandboxd.events import Decision
from sandboxd.routes.reply import Handler, Reply, Request, ok, timestamp
from sandboxd.service import Service


async def _events(service: Service, request: Request) -> Reply:
    rules.require("audit", service.policy)
    events, truncated = await service.events(request.path["ref"])
    # Of a busy sandbox these are megabytes.
    return await anyio.to_thread.run_sync(ok, wire.Events(events=events, truncated=truncated))


async def _verify_audit(service: Service, _: Request) -> Reply:
    rules.require("audit", service.policy)
    found = await service.check_audit()
    return ok(
        wire.AuditCheck(
            ok=not found.fault, lines=found.lines, files=found.files, fault=found.fault, last=found.last,
            notes=found.notes,
        )
    )  # fmt: skip


async def _egress(service: Service, request: Request) -> Reply:
    network, decisions = await service.egress(request.path["ref"])
    names = [_egress_name(one) for one in decisions]
    return ok(
        wire.Egress(
            mode=network.mode, allow=network.allow, deny=network.deny, allow_tcp=network.allow_tcp, names=names
        )
    )


async def _event(service: Service, request: Request) -> Reply:
    found = await service.event(request.path["ref"])
    remedy, why_none = rules.remedy(found.rule, found.by, found.name, found.port, service.policy)
    if found.kind == "denied":
        why = " ".join(text for text in (found.why, why_none) if text)
    else:
        remedy, why = "", f"The rule that allows it: {found.rule}."
    return ok(
        wire.Event(
            time=timestamp(found.last_at), type=f"egress.{found.kind}", sandbox=found.sandbox, id=found.id,
            name=found.name, port=found.port, rule=found.rule, by=found.by, count=found.count, why=why, remedy=remedy,
            bytes_in=found.bytes_in, bytes_out=found.bytes_out,
        )
    )  # fmt: skip


def _egress_name(one: Decision) -> wire.EgressName:
    return wire.EgressName(
        id=one.id, name=one.name, port=one.port, decision=one.kind, rule=one.rule, by=one.by, count=one.count,
        connections=one.connections, bytes_in=one.bytes_in, bytes_out=one.bytes_out,
        first_at=timestamp(one.first_at), last_at=timestamp(one.last_at),
    )  # fmt: skip


HANDLERS: dict[str, Handler] = {
    "events": _events,
    "verify_audit": _verify_audit,
    "egress": _egress,
    "event": _event,
}
