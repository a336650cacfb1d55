"""Route → handler, error → status. Each in one place."""

from __future__ import annotations

import logging

from sandboxd import wire
from sandboxd.errors import (
    ApiError,
    BodyTooLarge,
    Conflict,
    ForbiddenOrigin,
    Internal,
    InvalidRequest,
    MediaTypeRefused,
    NotFound,
    Refused,
    Unauthorized,
    Unavailable,
    Unsupported,
)  # fmt: skip
from sandboxd.routes import events, files, images, node, processes, sandboxes, volumes
from sandboxd.routes.reply import ClientGone, Handler, Reply, Request, Switch
from sandboxd.service import Service

STATUS: dict[type[ApiError], int] = {
    InvalidRequest: 400,
    MediaTypeRefused: 415,
    BodyTooLarge: 413,
    Unauthorized: 401,
    Refused: 403,
    ForbiddenOrigin: 403,
    NotFound: 404,
    Conflict: 409,
    Unsupported: 501,
    Unavailable: 503,
    Internal: 500,
}

HANDLERS: dict[str, Handler] = {
    **sandboxes.HANDLERS,
    **processes.HANDLERS,
    **files.HANDLERS,
    **events.HANDLERS,
    **volumes.HANDLERS,
    **images.HANDLERS,
    **node.HANDLERS,
}

log = logging.getLogger("sandboxd")


async def handle(service: Service, request: Request) -> Reply | Switch:
    """What went wrong is a reply. Raises `ClientGone` only."""
    try:
        return await HANDLERS[request.route.name](service, request)
    except ApiError as error:
        return failure(error)
    except ClientGone:
        raise
    except Exception:
        log.exception("%s failed", request.route.name)
        return failure(Internal("internal error"))


def failure(error: ApiError) -> Reply:
    status = STATUS[type(error)]
    body = wire.encode({"error": {"code": error.code, "message": error.message}})
    return Reply(status, body, headers=((b"www-authenticate", b"Bearer"),) if status == 401 else ())
