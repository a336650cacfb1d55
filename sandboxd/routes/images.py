"""Images that sandboxes start from."""

from __future__ import annotations

from sandboxd import policy as rules
from sandboxd import wire
from sandboxd.errors import InvalidRequest
from sandboxd.images import Status
from sandboxd.routes.reply import Handler, Reply, Request, ok, read_json, timestamp
from sandboxd.service import Service


async def _images(service: Service, _: Request) -> Reply:
    rules.require("images", service.policy)
    return ok(wire.Images(images=[_image(service, one) for one in service.images()]))


async def _install(service: Service, request: Request) -> Reply:
    asked = await read_json(request, wire.ImageRequest)
    rules.require("images", service.policy)
    if not asked.image:
        raise InvalidRequest("image: name the one to install")
    return ok(_image(service, service.install_image(asked.image)), 202)


async def _delete(service: Service, request: Request) -> Reply:
    rules.require("images", service.policy)
    image = request.one("image")
    if not image:
        raise InvalidRequest("the parameter image must name the one to remove")
    return ok(wire.ImageRemoved(image=image, freed_bytes=service.delete_image(image)))


def _image(service: Service, one: Status) -> wire.Image:
    now = one.progress
    progress = None if now is None else wire.ImageProgress(phase=now.phase, done=now.done, total=now.total)
    default = one.image == service.policy.default_image
    return wire.Image(
        image=one.image, state=one.state, digest=one.digest, bytes=one.bytes,
        installed_at=timestamp(one.installed_at) if one.installed_at else "",
        in_use=default or service.image_in_use(one.image), default=default,
        pooled=service.image_pooled(one.image), progress=progress, error=one.error,
    )  # fmt: skip


HANDLERS: dict[str, Handler] = {
    "images": _images,
    "install_image": _install,
    "delete_image": _delete,
}
