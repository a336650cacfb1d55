"""The API's own description."""

from __future__ import annotations

from sandboxd import openapi
from sandboxd.routes.reply import Handler, Reply, Request
from sandboxd.service import Service


async def _openapi(_: Service, request: Request) -> Reply:
    headers = ((b"etag", openapi.etag().encode()),)
    if request.headers.get(b"if-none-match", b"").decode("latin-1") == openapi.etag():
        return Reply(304, headers=headers)
    return Reply(200, openapi.document(), headers=headers)


HANDLERS: dict[str, Handler] = {"openapi": _openapi}
