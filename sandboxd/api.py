"""Route → handler, record → wire, error → status. Each in one place.

In: a request that has passed the guard, with a body that is pulled as it is needed. Out: a reply, or the talk
that follows an upgrade. Bodies stream both ways; nothing here holds more of one than a chunk, but for JSON (1
MiB).
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

import anyio
import anyio.to_thread

from sandboxd import policy as rules
from sandboxd import wire
from sandboxd.attach import Duplex, attach
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
from sandboxd.events import Decision
from sandboxd.guest import Source
from sandboxd.policy import CAPABILITIES
from sandboxd.processes import Finished, Process
from sandboxd.service import Service
from sandboxd.spool import Cursor
from sandboxd.store import Network, ProcessRecord, SandboxRecord

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
JSON_TYPE = b"application/json"
RAW_TYPE = b"application/octet-stream"
LINES_TYPE = b"application/x-ndjson"
STREAM_NAMES = {"o": "stdout", "E": "stderr"}
LISTINGS = 2
"""Listings checked at once; each is up to 16 MiB of a guest's JSON."""

log = logging.getLogger("sandboxd")


class ClientGone(Exception):
    """The client hung up: what it asked for stops, and nobody is answered."""


class Body(Source, Protocol):
    """A request's body: pulled in chunks, `b""` at the end. `declared` is its announced length, if any."""

    declared: int | None


@dataclass(frozen=True, slots=True)
class Request:
    """`path` are the decoded segments of the route; a query parameter may stand once."""

    route: wire.Route
    path: dict[str, str]
    query: list[tuple[str, str]]
    headers: dict[bytes, bytes]
    body: Body

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


# -- sandboxes


async def _health(_: Service, __: Request) -> Reply:
    return Reply(200, b'{"status":"ok"}')


async def _capabilities(service: Service, _: Request) -> Reply:
    policy = service.policy
    limits = wire.Limits(**{name: getattr(policy.limits, name) for name in wire.Limits.__struct_fields__})
    offer = wire.NetworkOffer(
        default=_network(policy.default_network), ceiling=policy.ceiling, may_allow=policy.may_allow,
        may_allow_tcp=policy.may_allow_tcp,
    )  # fmt: skip
    return _ok(
        wire.Capabilities(
            api_version=wire.API_VERSION, backend=service.backend_name, limits=limits, network=offer,
            capabilities={name: name in policy.capabilities for name in CAPABILITIES},
        )
    )  # fmt: skip


async def _create(service: Service, request: Request) -> Reply:
    asked = await _json(request, wire.CreateRequest)
    return _ok(_sandbox(await service.create(asked)), 201)


async def _list(service: Service, request: Request) -> Reply:
    labels = []
    for key, value in request.query:
        if key == "label":
            name, equals, text = value.partition("=")
            if not equals:
                raise InvalidRequest("label must be key=value")
            rules.label(name, text)
            labels.append((name, text))
    return _ok(wire.Sandboxes(sandboxes=[_sandbox(record) for record in service.sandboxes(labels)]))


async def _get(service: Service, request: Request) -> Reply:
    return _ok(_sandbox(service.get(request.path["ref"])))


async def _update(service: Service, request: Request) -> Reply:
    asked = await _json(request, wire.PatchRequest)
    return _ok(_sandbox(await service.update(request.path["ref"], asked)))


async def _delete(service: Service, request: Request) -> Reply:
    await service.delete(request.path["ref"])
    return Reply(204)


async def _egress(service: Service, request: Request) -> Reply:
    network, decisions = await service.egress(request.path["ref"])
    names = [_egress_name(one) for one in decisions]
    return _ok(
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
    return _ok(
        wire.Event(
            time=_time(found.last_at), type=f"egress.{found.kind}", sandbox=found.sandbox, id=found.id,
            name=found.name, port=found.port, rule=found.rule, by=found.by, count=found.count, why=why, remedy=remedy,
            bytes_in=found.bytes_in, bytes_out=found.bytes_out,
        )
    )  # fmt: skip


# -- processes


async def _run(service: Service, request: Request) -> Reply:
    asked = await _json(request, wire.ProcessRequest)
    try:
        stdin = base64.b64decode(asked.stdin or "", validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("stdin is not base64") from None
    async with AsyncExitStack() as running:
        finished = await running.enter_async_context(service.run(request.path["ref"], asked, stdin))
        answer = RunAnswer(finished)
        return Reply(200, Closing(answer, running.pop_all()), length=answer.length)


async def _start(service: Service, request: Request) -> Reply:
    asked = await _json(request, wire.ProcessRequest)
    return _ok(_process(await service.start(request.path["ref"], asked)), 201)


async def _processes(service: Service, request: Request) -> Reply:
    records = service.processes(request.path["ref"])
    return _ok(wire.Processes(processes=[_process(record) for record in records]))


async def _one_process(service: Service, request: Request) -> Reply:
    return _ok(_process(service.process(request.path["ref"], request.path["pid"]).record))


async def _output(service: Service, request: Request) -> Reply:
    process = service.process(request.path["ref"], request.path["pid"])
    return Reply(200, OutputLines(process), LINES_TYPE)


async def _stdin(service: Service, request: Request) -> Reply:
    async with service.feeding(request.path["ref"], request.path["pid"]) as process:
        # An empty body, too, is refused where it comes too late.
        await process.write(b"")
        while data := await request.body.receive():
            await process.write(data)
        if request.one("close") in ("1", "true"):
            await process.end_stdin()
    return Reply(204)


async def _signal(service: Service, request: Request) -> Reply:
    asked = await _json(request, wire.SignalRequest)
    await service.signal(request.path["ref"], request.path["pid"], asked.signal or "")
    return Reply(204)


async def _attach(service: Service, request: Request) -> Switch:
    _require_upgrade(request, wire.STREAM_PROTOCOL)
    ref, pid = request.path["ref"], request.path["pid"]
    process = service.process(ref, pid)

    async def talk(client: Duplex) -> None:
        await attach(
            process, client, lambda name: service.signal(ref, pid, name), lambda size: service.resize(ref, pid, size)
        )

    return Switch(wire.STREAM_PROTOCOL.encode(), talk)


async def _tunnel(service: Service, request: Request) -> Switch:
    _require_upgrade(request, wire.TUNNEL_PROTOCOL)
    text = request.one("port")
    port = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
    if not 1 <= port <= 65535:
        raise InvalidRequest("port must be between 1 and 65535")
    async with AsyncExitStack() as open_tunnel:
        connection = await open_tunnel.enter_async_context(service.tunnel(request.path["ref"], port))
        held = open_tunnel.pop_all()

    async def talk(client: Duplex) -> None:
        async with held, anyio.create_task_group() as tasks:

            async def to_guest() -> None:
                while data := await client.receive():
                    await connection.send(data)
                connection.send_eof()
                await client.hung_up()
                tasks.cancel_scope.cancel()

            tasks.start_soon(to_guest)
            while data := await connection.receive():
                await client.send(data)
            tasks.cancel_scope.cancel()

    return Switch(wire.TUNNEL_PROTOCOL.encode(), talk)


# -- files and the workspace


async def _read_file(service: Service, request: Request) -> Reply:
    held = await service.read_file(request.path["ref"], request.one("path"))
    return Reply(200, held, RAW_TYPE, held.size)


async def _write_file(service: Service, request: Request) -> Reply:
    ref, path = request.path["ref"], request.one("path")
    rules.guest_path("path", path)
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
    rules.branch("branch", branch)
    async with _sized(service, ref, request.body) as (size, body):
        await service.bundle_in(ref, branch, size, body)
    return Reply(204)


async def _bundle_out(service: Service, request: Request) -> Reply:
    held = await service.bundle_out(request.path["ref"], request.one("base"), request.one("branch"))
    return Reply(200, held, RAW_TYPE, held.size)


# -- what this endpoint lacks


def _without(capability: str, *, of_sandbox: bool = True) -> Handler:
    async def handler(service: Service, request: Request) -> Reply:
        if of_sandbox:
            service.get(request.path["ref"])
        raise Unsupported(f"this endpoint does not have the capability {capability}")

    return handler


HANDLERS: dict[str, Handler] = {
    "health": _health,
    "capabilities": _capabilities,
    "create": _create,
    "list": _list,
    "get": _get,
    "update": _update,
    "delete": _delete,
    "run": _run,
    "start": _start,
    "processes": _processes,
    "process": _one_process,
    "output": _output,
    "stdin": _stdin,
    "signal": _signal,
    "attach": _attach,
    "read_file": _read_file,
    "write_file": _write_file,
    "remove_file": _remove_file,
    "list_dir": _list_dir,
    "tunnel": _tunnel,
    "bundle_in": _bundle_in,
    "bundle_out": _bundle_out,
    "suspend": _without("suspend"),
    "resume": _without("suspend"),
    "snapshot": _without("memory_snapshot"),
    "snapshot_schedule": _without("memory_snapshot"),
    "metrics": _without("metrics"),
    "events": _without("audit", of_sandbox=False),
    "egress": _egress,
    "event": _event,
    "snapshots": _without("memory_snapshot", of_sandbox=False),
    "delete_snapshot": _without("memory_snapshot", of_sandbox=False),
    "create_volume": _without("volumes", of_sandbox=False),
    "volumes": _without("volumes", of_sandbox=False),
    "delete_volume": _without("volumes", of_sandbox=False),
    "images": _without("images", of_sandbox=False),
    "install_image": _without("images", of_sandbox=False),
    "delete_image": _without("images", of_sandbox=False),
}

_listings = anyio.CapacityLimiter(LISTINGS)


class Closing:
    """A source, and what is let go with it."""

    def __init__(self, source: RunAnswer, held: AsyncExitStack) -> None:
        self._source, self._held = source, held

    async def receive(self) -> bytes:
        return self._source.read()

    async def aclose(self) -> None:
        self._source.close()
        await self._held.aclose()


class RunAnswer:
    """A run's JSON, its streams encoded from the spool as they are sent. `length` is exact."""

    def __init__(self, finished: Finished) -> None:
        flags = {
            "exit_code": finished.exit_code,
            "truncated": finished.truncated,
            "timed_out": finished.timed_out,
        }
        self._spool = finished.spool
        self._texts = [wire.encode(flags)[:-1] + b',"stdout":"', b'","stderr":"', b'"}']
        self._streams = ["o", "E"]
        self._cursor: Cursor | None = None
        self._carry = b""
        sizes = [(self._spool.kept_of(stream) + 2) // 3 * 4 for stream in self._streams]
        self.length = sum(map(len, self._texts)) + sum(sizes)

    def read(self) -> bytes:
        """At most about 128 KiB; `b""` at the end."""
        pieces: list[bytes] = []
        size = 0
        while size < wire.CHUNK and (piece := self._next()) is not None:
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)

    def close(self) -> None:
        if self._cursor is not None:
            self._cursor.close()

    def _next(self) -> bytes | None:
        if self._cursor is None:
            if not self._texts:
                return None
            if self._streams:
                self._cursor = self._spool.cursor((self._streams.pop(0),))
            return self._texts.pop(0)
        chunk = self._cursor.read()
        if chunk is None:
            self._cursor.close()
            self._cursor = None
            last, self._carry = self._carry, b""
            return base64.b64encode(last)
        data = self._carry + chunk.data
        whole = len(data) - len(data) % 3
        self._carry = data[whole:]
        return base64.b64encode(data[:whole])


class OutputLines:
    """A process's output as NDJSON: from the start, then as it comes, then the exit code.

    A line with `dropped` says how many bytes of its stream before it are no longer kept.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._cursor = process.spool.cursor()
        self._done = False

    async def receive(self) -> bytes:
        if self._done:
            return b""
        chunk = await self._process.follow(self._cursor)
        if chunk is None:
            self._done = True
            return wire.encode({"exit_code": self._process.record.exit_code}) + b"\n"
        line: dict[str, Any] = {
            "stream": STREAM_NAMES[chunk.stream],
            "data": base64.b64encode(chunk.data).decode(),
        }
        if chunk.dropped:
            line["dropped"] = chunk.dropped
        return wire.encode(line) + b"\n"

    async def aclose(self) -> None:
        self._process.left(self._cursor)


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
        and isinstance(entry["name"], str)
        and entry["type"] in ("file", "dir", "symlink", "other")
        and type(entry["size"]) is int
        and entry["size"] >= 0
        for entry in found["entries"]
    )


@asynccontextmanager
async def _sized(service: Service, ref: str, body: Body) -> AsyncIterator[tuple[int, Source]]:
    """A body with its size, which the guest is told first; one that does not say goes through a file."""
    if body.declared is not None:
        yield body.declared, body
        return
    with tempfile.TemporaryFile(dir=service.spare(ref)) as spare:
        size = 0
        while data := await body.receive():
            spare.write(data)
            size += len(data)
        spare.flush()
        os.lseek(spare.fileno(), 0, os.SEEK_SET)
        yield size, _FileSource(spare.fileno())


async def _json(request: Request, kind: type[T]) -> T:
    text = bytearray()
    while data := await request.body.receive():
        text += data
    return wire.decode(bytes(text), kind)


def _require_upgrade(request: Request, protocol: str) -> None:
    connection = request.headers.get(b"connection", b"").lower()
    tokens = {token.strip() for token in connection.split(b",")}
    if b"upgrade" not in tokens or request.headers.get(b"upgrade", b"").decode("latin-1").lower() != protocol:
        raise InvalidRequest(f"this needs Connection: Upgrade and Upgrade: {protocol}")


def _ok(value: wire.Answer, status: int = 200) -> Reply:
    return Reply(status, wire.encode(value))


def _network(network: Network) -> wire.Network:
    return wire.Network(mode=network.mode, allow=network.allow, deny=network.deny, allow_tcp=network.allow_tcp)


def _egress_name(one: Decision) -> wire.EgressName:
    return wire.EgressName(
        id=one.id, name=one.name, port=one.port, decision=one.kind, rule=one.rule, by=one.by, count=one.count,
        connections=one.connections, bytes_in=one.bytes_in, bytes_out=one.bytes_out,
        first_at=_time(one.first_at), last_at=_time(one.last_at),
    )  # fmt: skip


def _sandbox(record: SandboxRecord) -> wire.Sandbox:
    ends = record.created_at + record.lifetime_secs
    return wire.Sandbox(
        id=record.id, name=record.name, state=record.state.value, image=record.image, cpus=record.cpus,
        memory_mb=record.memory_mb, disk_mb=record.disk_mb, env_names=record.env_names,
        network=_network(record.network), created_at=_time(record.created_at),
        idle_timeout_secs=record.idle_timeout_secs, lifetime_secs=record.lifetime_secs,
        expires_at=_time(ends) if record.lifetime_secs else "", labels=record.labels,
    )  # fmt: skip


def _process(record: ProcessRecord) -> wire.Process:
    return wire.Process(
        pid=record.pid, tty=record.tty, argv=record.argv, exit_code=record.exit_code,
        state="running" if record.exit_code is None else "exited", started_at=_time(record.started_at),
    )  # fmt: skip


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
