"""Files of the guest, and bundles into and out of its workspace."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread

from sandboxd import fields, wire
from sandboxd.errors import Internal
from sandboxd.guest import Source
from sandboxd.routes.reply import RAW_TYPE, Body, Handler, Reply, Request
from sandboxd.service import Service

LISTINGS = 2
"""Listings checked at once; each is up to 16 MiB of a guest's JSON."""

NAME_MAX = 255  # linux/limits.h

SMALL_BYTES = 1 << 20
"""Of a body that goes through a file: a larger one must leave room on the disk, or sandboxes would get I/O errors."""

log = logging.getLogger("sandboxd")
_listings = anyio.CapacityLimiter(LISTINGS)


async def _read_file(service: Service, request: Request) -> Reply:
    held = await service.read_file(request.path["ref"], request.one("path"))
    return Reply(200, held, RAW_TYPE, held.size)


async def _write_file(service: Service, request: Request) -> Reply:
    ref, path = request.path["ref"], request.one("path")
    fields.guest_path("path", path)
    async with _sized(service, ref, request.body) as (size, body):
        await service.write_file(ref, path, size, body)
    return Reply(204)


async def _remove_file(service: Service, request: Request) -> Reply:
    await service.remove_file(request.path["ref"], request.one("path"))
    return Reply(204)


async def _list_dir(service: Service, request: Request) -> Reply:
    async with _listings:
        held = await service.list_dir(request.path["ref"], request.one("path"))
        try:
            listing = bytearray()
            while data := await held.receive():
                listing += data
        finally:
            with anyio.CancelScope(shield=True):
                await held.aclose()
        text = bytes(listing)
        if not await anyio.to_thread.run_sync(is_listing, text):
            log.warning("%s: its guest sent a listing that is none", request.path["ref"])
            raise Internal("the sandbox broke the protocol")
    return Reply(200, text)


async def _bundle_in(service: Service, request: Request) -> Reply:
    ref, branch = request.path["ref"], request.one("branch")
    fields.branch("branch", branch)
    async with _sized(service, ref, request.body) as (size, body):
        await service.bundle_in(ref, branch, size, body)
    return Reply(204)


async def _bundle_out(service: Service, request: Request) -> Reply:
    held = await service.bundle_out(request.path["ref"], request.one("base"), request.one("branch"))
    return Reply(200, held, RAW_TYPE, held.size)


class _FileSource:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def receive(self) -> bytes:
        return os.read(self._fd, wire.CHUNK)

    async def aclose(self) -> None:
        """The file is its owner's."""


def is_listing(text: bytes) -> bool:
    """Whether a guest's bytes are a listing as the API shows it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(found, dict) or found.keys() != {"entries"} or not isinstance(found["entries"], list):
        return False
    return all(
        isinstance(entry, dict)
        and entry.keys() == {"name", "type", "size"}
        and _is_name(entry["name"])
        and entry["type"] in ("file", "dir", "symlink", "other")
        and type(entry["size"]) is int
        and entry["size"] >= 0
        for entry in found["entries"]
    )


def _is_name(name: object) -> bool:
    """Of a file in a directory. A caller makes bytes of it again, which only surrogates that stand for bytes allow."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return len(name.encode("utf-8", "surrogateescape")) <= NAME_MAX
    except UnicodeEncodeError:
        return False


@asynccontextmanager
async def _sized(service: Service, ref: str, body: Body) -> AsyncIterator[tuple[int, Source]]:
    """A body with its size, which the guest is told first; one that does not say goes through a file."""
    if body.declared is not None:
        yield body.declared, body
        return
    async with service.spare(ref) as directory:
        with tempfile.TemporaryFile(dir=directory) as spare:
            size = 0
            while data := await body.receive():
                spare.write(data)
                size += len(data)
                if size > SMALL_BYTES:
                    service.require_room()
            spare.flush()
            os.lseek(spare.fileno(), 0, os.SEEK_SET)
            yield size, _FileSource(spare.fileno())



HANDLERS: dict[str, Handler] = {
    "read_file": _read_file,
    "write_file": _write_file,
    "remove_file": _remove_file,
    "list_dir": _list_dir,
    "bundle_in": _bundle_in,
    "bundle_out": _bundle_out,
}
