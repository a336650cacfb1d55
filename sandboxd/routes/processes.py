"""Processes and their output: as one answer, as lines, as a stream both ways; and tunnels."""

from __future__ import annotations

import base64
import binascii
from contextlib import AsyncExitStack
from typing import Any

import anyio

from sandboxd import wire
from sandboxd.attach import Duplex, attach
from sandboxd.errors import InvalidRequest
from sandboxd.processes import Finished, Process
from sandboxd.routes.reply import (
    LINES_TYPE,
    Handler,
    Reply,
    Request,
    Switch,
    ok,
    read_json,
    require_upgrade,
    timestamp,
)  # fmt: skip
from sandboxd.service import Service
from sandboxd.spool import Cursor
from sandboxd.store import ProcessRecord

STREAM_NAMES = {"o": "stdout", "E": "stderr"}


async def _run(service: Service, request: Request) -> Reply:
    asked = await read_json(request, wire.ProcessRequest)
    try:
        stdin = base64.b64decode(asked.stdin or "", validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("stdin is not base64") from None
    async with AsyncExitStack() as running:
        finished = await running.enter_async_context(service.run(request.path["ref"], asked, stdin))
        answer = RunAnswer(finished)
        return Reply(200, Closing(answer, running.pop_all()), length=answer.length)


async def _start(service: Service, request: Request) -> Reply:
    asked = await read_json(request, wire.ProcessRequest)
    return ok(_process(await service.start(request.path["ref"], asked)), 201)


async def _processes(service: Service, request: Request) -> Reply:
    records = service.processes(request.path["ref"])
    return ok(wire.Processes(processes=[_process(record) for record in records]))


async def _one_process(service: Service, request: Request) -> Reply:
    return ok(_process(service.process(request.path["ref"], request.path["pid"]).record))


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
    asked = await read_json(request, wire.SignalRequest)
    await service.signal(request.path["ref"], request.path["pid"], asked.signal or "")
    return Reply(204)


async def _attach(service: Service, request: Request) -> Switch:
    require_upgrade(request, wire.STREAM_PROTOCOL)
    ref, pid = request.path["ref"], request.path["pid"]
    process = service.process(ref, pid)

    async def talk(client: Duplex) -> None:
        await attach(
            process, client, lambda name: service.signal(ref, pid, name), lambda size: service.resize(ref, pid, size)
        )

    return Switch(wire.STREAM_PROTOCOL.encode(), talk)


async def _tunnel(service: Service, request: Request) -> Switch:
    require_upgrade(request, wire.TUNNEL_PROTOCOL)
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


def _process(record: ProcessRecord) -> wire.Process:
    return wire.Process(
        pid=record.pid, tty=record.tty, argv=record.argv, exit_code=record.exit_code,
        state="running" if record.exit_code is None else "exited", started_at=timestamp(record.started_at),
    )  # fmt: skip


HANDLERS: dict[str, Handler] = {
    "run": _run,
    "start": _start,
    "processes": _processes,
    "process": _one_process,
    "output": _output,
    "stdin": _stdin,
    "signal": _signal,
    "attach": _attach,
    "tunnel": _tunnel,
}
