"""Named volumes."""

from __future__ import annotations

from sandboxd import wire
from sandboxd.routes.reply import Handler, Reply, Request, ok, read_json, timestamp
from sandboxd.service import Service
from sandboxd.store import VolumeRecord


async def _create(service: Service, request: Request) -> Reply:
    asked = await read_json(request, wire.VolumeRequest)
    return ok(_volume(await service.create_volume(asked)), 201)


async def _list(service: Service, _: Request) -> Reply:
    return ok(wire.Volumes(volumes=[_volume(record, user) for record, user in service.volumes()]))


async def _delete(service: Service, request: Request) -> Reply:
    await service.delete_volume(request.path["ref"])
    return Reply(204)


def _volume(record: VolumeRecord, user: str = "") -> wire.Volume:
    return wire.Volume(
        name=record.name, size_mb=record.size_mb, created_at=timestamp(record.created_at), attached_to=user
    )


HANDLERS: dict[str, Handler] = {
    "create_volume": _create,
    "volumes": _list,
    "delete_volume": _delete,
}
