"""What a handler is given and what it gives back.

In: a request that has passed the guard, with a body that is pulled as it is needed. Out: a reply, or the talk that
follows an upgrade. Bodies stream both ways; nothing here holds more of one than a chunk, but for JSON (1 MiB).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol, TypeVar

from sandboxd import wire
from sandboxd.address import Peer
from sandboxd.attach import Duplex
from sandboxd.errors import InvalidRequest, Unsupported
from sandboxd.guest import Source
from sandboxd.routes import table
from sandboxd.routes.table import Route
from sandboxd.service import Service

JSON_TYPE = table.JSON_TYPE.encode()
RAW_TYPE = table.RAW_TYPE.encode()
LINES_TYPE = table.LINES_TYPE.encode()


class ClientGone(Exception):
    """The client hung up: what it asked for stops, and nobody is answered."""


class Body(Source, Protocol):
    """A request's body: pulled in chunks, `b""` at the end. `declared` is its announced length, if any."""

    declared: int | None


@dataclass(frozen=True, slots=True)
class Request:
    """`path` are the decoded segments of the route; a query parameter may stand once. `peer` is where it came from."""

    route: Route
    path: dict[str, str]
    query: list[tuple[str, str]]
    headers: dict[bytes, bytes]
    body: Body
    peer: Peer

    def one(self, name: str) -> str:
        """A query parameter, empty when absent."""
        found = [value for key, value in self.query if key == name]
        if len(found) > 1:
            raise InvalidRequest(f"the parameter {name} stands twice")
        return found[0] if found else ""


@dataclass(frozen=True, slots=True)
class Reply:
    """`body` is whole, or a source; `length` of a source is None when it is not known beforehand."""

    status: int
    body: bytes | Source = b""
    media_type: bytes = JSON_TYPE
    length: int | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Switch:
    """The connection becomes `protocol` and `talk` has it to the end."""

    protocol: bytes
    talk: Callable[[Duplex], Awaitable[None]] = field(repr=False)


Handler = Callable[[Service, Request], Awaitable[Reply | Switch]]
T = TypeVar("T", bound=wire.Request)


async def read_json(request: Request, kind: type[T]) -> T:
    text = bytearray()
    while data := await request.body.receive():
        text += data
    return wire.decode(bytes(text), kind)


def require_upgrade(request: Request, protocol: str) -> None:
    connection = request.headers.get(b"connection", b"").lower()
    tokens = {token.strip() for token in connection.split(b",")}
    if b"upgrade" not in tokens or request.headers.get(b"upgrade", b"").decode("latin-1").lower() != protocol:
        raise InvalidRequest(f"this needs Connection: Upgrade and Upgrade: {protocol}")


def ok(value: wire.Answer, status: int = 200) -> Reply:
    return Reply(status, wire.encode(value))


def without(capability: str, *, of_sandbox: bool = True) -> Handler:
    async def handler(service: Service, request: Request) -> Reply:
        if request.route.request is not None:
            await read_json(request, request.route.request)
        if of_sandbox:
            service.get(request.path["ref"])
        raise Unsupported(f"this endpoint does not have the capability {capability}")

    return handler


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
