"""Route → handler, error → reply. Each in one place."""

from __future__ import annotations

import errno
import logging

from sandboxd import wire
from sandboxd.errors import ApiError, Conflict, Internal, Unavailable
from sandboxd.routes import document, events, files, images, node, processes, sandboxes, volumes
from sandboxd.routes.reply import ClientGone, Handler, Reply, Request, Switch, read_json
from sandboxd.routes.table import Body
from sandboxd.service import Service

HANDLERS: dict[str, Handler] = {
    **sandboxes.HANDLERS,
    **processes.HANDLERS,
    **files.HANDLERS,
    **events.HANDLERS,
    **volumes.HANDLERS,
    **images.HANDLERS,
    **node.HANDLERS,
    **document.HANDLERS,
}

_WITH = {401: ((b"www-authenticate", b"Bearer"),), 503: ((b"retry-after", b"1"),)}

_FULL = Conflict("the server's disk is full")
_NO_FILES = Unavailable("the server has no file descriptors left; end something, or let its operator raise its limit")
LACKING = {errno.ENOSPC: _FULL, errno.EDQUOT: _FULL, errno.EMFILE: _NO_FILES, errno.ENFILE: _NO_FILES}
"""What the host has run out of, wherever that is noticed."""

log = logging.getLogger("sandboxd")


async def handle(service: Service, request: Request) -> Reply | Switch:
    """What went wrong is a reply. Raises `ClientGone` only."""
    try:
        if request.route.request is None and request.route.body is Body.JSON:
            await read_json(request, wire.Empty)
        return await HANDLERS[request.route.name](service, request)
    except ApiError as error:
        return failure(error)
    except ClientGone:
        raise
    except OSError as fault:
        lacking = LACKING.get(fault.errno or 0)
        if lacking is None:
            log.exception("%s failed", request.route.name)
            return failure(Internal("internal error"))
        log.error("%s: %s", request.route.name, fault.strerror)
        return failure(lacking)
    except Exception:
        log.exception("%s failed", request.route.name)
        return failure(Internal("internal error"))


def failure(error: ApiError) -> Reply:
    body = wire.encode(wire.Failure(error=wire.Fault(code=error.code, message=error.message)))
    return Reply(error.status, body, headers=_WITH.get(error.status, ()))
