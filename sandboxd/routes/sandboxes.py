"""Sandboxes as a whole: made, listed, changed, ended."""

from __future__ import annotations

from sandboxd import fields, wire
from sandboxd.errors import InvalidRequest
from sandboxd.policy import CAPABILITIES
from sandboxd.routes.reply import Handler, Reply, Request, ok, read_json, timestamp, without
from sandboxd.service import Service
from sandboxd.store import Network, SandboxRecord


async def _health(_: Service, __: Request) -> Reply:
    return Reply(200, b'{"status":"ok"}')


async def _capabilities(service: Service, _: Request) -> Reply:
    return ok(capabilities(service))


def capabilities(service: Service) -> wire.Capabilities:
    policy = service.policy
    limits = wire.Limits(**{name: getattr(policy.limits, name) for name in wire.Limits.__struct_fields__})
    offer = wire.NetworkOffer(
        default=_network(policy.default_network), ceiling=policy.ceiling, may_allow=policy.may_allow,
        may_allow_tcp=policy.may_allow_tcp, registries=policy.registries, registries_tcp=policy.registries_tcp,
    )  # fmt: skip
    return wire.Capabilities(
        api_version=wire.API_VERSION, backend=service.backend_name, limits=limits, network=offer,
        capabilities={name: name in policy.capabilities for name in CAPABILITIES}, lacking=dict(policy.lacking),
    )  # fmt: skip


async def _create(service: Service, request: Request) -> Reply:
    asked = await read_json(request, wire.CreateRequest)
    return ok(_sandbox(await service.create(asked, request.peer)), 201)


async def _list(service: Service, request: Request) -> Reply:
    labels = []
    for key, value in request.query:
        if key == "label":
            name, equals, text = value.partition("=")
            if not equals:
                raise InvalidRequest("label must be key=value")
            fields.label(name, text)
            labels.append((name, text))
    # wire.Sandboxes, put together from pieces: many clients poll this.
    texts = service.sandboxes(labels, lambda record: wire.encode(_sandbox(record)))
    return Reply(200, b'{"sandboxes":[' + b",".join(texts) + b"]}")


async def _get(service: Service, request: Request) -> Reply:
    return ok(_sandbox(service.get(request.path["ref"])))


async def _update(service: Service, request: Request) -> Reply:
    asked = await read_json(request, wire.PatchRequest)
    return ok(_sandbox(await service.update(request.path["ref"], asked)))


async def _delete(service: Service, request: Request) -> Reply:
    await service.delete(request.path["ref"])
    return Reply(204)


def _sandbox(record: SandboxRecord) -> wire.Sandbox:
    ends = record.created_at + record.lifetime_secs
    return wire.Sandbox(
        id=record.id, name=record.name, state=record.state.value, image=record.image, cpus=record.cpus,
        memory_mb=record.memory_mb, disk_mb=record.disk_mb, env_names=record.env_names,
        network=_network(record.network), created_at=timestamp(record.created_at),
        idle_timeout_secs=record.idle_timeout_secs, lifetime_secs=record.lifetime_secs,
        expires_at=timestamp(ends) if record.lifetime_secs else "", labels=record.labels,
        volumes=tuple(wire.Mount(name=one.name, path=one.path, read_only=one.read_only) for one in record.volumes),
        bind=None if record.bind is None else wire.Bind(
            host_path=record.bind.host_path, read_only=record.bind.read_only
        ),
    )  # fmt: skip


def _network(network: Network) -> wire.Network:
    return wire.Network(mode=network.mode, allow=network.allow, deny=network.deny, allow_tcp=network.allow_tcp)


HANDLERS: dict[str, Handler] = {
    "health": _health,
    "capabilities": _capabilities,
    "create": _create,
    "list": _list,
    "get": _get,
    "update": _update,
    "delete": _delete,
    "suspend": without("suspend"),
    "resume": without("suspend"),
    "snapshot": without("memory_snapshot"),
    "snapshot_schedule": without("memory_snapshot"),
    "snapshots": without("memory_snapshot", of_sandbox=False),
    "delete_snapshot": without("memory_snapshot", of_sandbox=False),
}
