"""The host's end of the guest protocol: one guest, reached through its machine's vsock socket.

Out: requests of `guestd.protocol`. In: answers, frames and bytes that a hostile guest may have written. Every
line, frame and wait is bounded; what does not fit closes the connection and raises `GuestProtocolError`, a
connection that is refused or ends early raises `GuestGone`, and an honest "no" raises `GuestRefused`. A
request that may have reached the guest is never sent again: only the ping before a machine is ready is
repeated, within the boot's deadline.
"""

from __future__ import annotations

import base64
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio

from guestd import protocol
from sandboxd import skew
from sandboxd.errors import GuestProtocolError, SandboxError, Unsupported
from sandboxd.socketstream import BrokenStreamError, SocketStream, connect
from sandboxd.store import Bind, Mount

GREETING_S = 10.0
ANSWER_S = 60.0
BUNDLE_S = 3600.0
PING_S = 3.0
GREETING_BYTES = 32
FILE_MODE = 0o644
"""Of what `configure` writes; everybody in the guest reads it."""
READ_BYTES = protocol.CHUNK_BYTES

_GREETING = re.compile(rb"OK [0-9]{1,10}\Z")


class GuestGone(SandboxError):
    """The guest is not there, or hung up in the middle."""


class GuestRefused(SandboxError):
    """The guest's honest no. `code` is one of the protocol's; `message` is the guest's text, not cleaned."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"the guest answered {code}")
        self.code, self.message = code, message


class Source(Protocol):
    """Bytes to be pulled by whoever passes them on; `b""` is the end. Closed by its taker."""

    async def receive(self) -> bytes: ...

    async def aclose(self) -> None: ...


class Connection:
    """A greeted connection: raw bytes both ways. Not for two readers or two writers at once."""

    def __init__(self, stream: SocketStream, ahead: bytes, waiters: set[Any]) -> None:
        self._stream, self._ahead, self._waiters = stream, ahead, waiters
        waiters.add(self)

    async def receive(self) -> bytes:
        """At most 64 KiB; `b""` at the end of the stream."""
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        try:
            return await self._stream.receive(READ_BYTES)
        except BrokenStreamError:
            raise GuestGone("the connection to the guest broke") from None

    async def send(self, data: bytes) -> None:
        try:
            await self._stream.send(data)
        except BrokenStreamError:
            raise GuestGone("the connection to the guest broke") from None

    def send_eof(self) -> None:
        try:
            self._stream.send_eof()
        except BrokenStreamError:
            raise GuestGone("the connection to the guest broke") from None

    async def line(self, timeout_s: float) -> bytes:
        """The next line, whatever came behind it kept."""
        reader = protocol.LineReader()
        with anyio.move_on_after(timeout_s):
            while data := await self.receive():
                try:
                    line = reader.feed(data)
                except protocol.GuestProtocolFault as fault:
                    raise GuestProtocolError(f"the guest sent {fault}") from None
                if line is not None:
                    self._ahead = reader.rest()
                    return line
            raise GuestGone("the guest hung up before it answered")
        raise GuestGone(f"the guest did not answer within {timeout_s:g} s")

    async def answer(self, timeout_s: float) -> protocol.Answer:
        """The next answer line; one that says no is raised."""
        line = await self.line(timeout_s)
        try:
            answer = protocol.decode_answer(line)
        except protocol.GuestProtocolFault as fault:
            raise GuestProtocolError(f"the guest sent {fault}") from None
        if not answer.ok:
            raise GuestRefused(answer.code, answer.message)
        return answer

    def keep(self) -> None:
        """It is no request's any more: however long nothing comes, it stays."""
        self._waiters.discard(self)

    def close(self) -> None:
        self._waiters.discard(self)
        self._stream.close()


class Download:
    """`size` bytes that the guest announced, as a source. More or fewer break the protocol."""

    def __init__(self, connection: Connection, size: int) -> None:
        self.size = size
        self._connection, self._left = connection, size

    async def receive(self) -> bytes:
        if not self._left:
            return b""
        data = await self._connection.receive()
        if not data:
            raise GuestGone("the guest hung up in the middle")
        if len(data) > self._left:
            raise GuestProtocolError("the guest sent more than it announced")
        self._left -= len(data)
        return data

    async def aclose(self) -> None:
        self._connection.close()


class Session:
    """The frames of one process. `pump` must run for `send` to get anywhere: it alone writes, so that a
    caller who gives up in the middle leaves no half frame behind."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._decoder = protocol.FrameDecoder(protocol.TO_HOST)
        self._queue, self._waiting = anyio.create_memory_object_stream[bytes](0)

    async def receive(self) -> list[tuple[str, bytes]]:
        """The next frames; none at the end of the stream."""
        while data := await self._connection.receive():
            try:
                frames = self._decoder.feed(data)
            except protocol.GuestProtocolFault as fault:
                raise GuestProtocolError(f"the guest sent {fault}") from None
            if frames:
                return frames
        return []

    async def send(self, kind: str, payload: bytes = b"") -> None:
        try:
            await self._queue.send(protocol.encode_frame(kind, payload))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise GuestGone("the process takes no more input") from None

    async def pump(self) -> None:
        with self._waiting:
            async for frame in self._waiting:
                try:
                    await self._connection.send(frame)
                except GuestGone:
                    return

    def close(self) -> None:
        self._queue.close()
        self._waiting.close()
        self._connection.close()


class Guest:
    """What one machine's guestd can be asked. `version` is that of the protocol it speaks; what it does not have is
    `Unsupported`. Connections that a request waits on are among `waiters`: closed by somebody else, they raise
    `GuestGone`."""

    def __init__(self, vsock_path: Path, version: int, waiters: set[Any] | None = None) -> None:
        self._path, self._version = vsock_path, version
        self._waiters: set[Any] = set() if waiters is None else waiters

    async def wait_ready(self, deadline_s: float) -> int:
        """Pings until it answers, with the version it speaks. Raises `GuestGone` at the deadline."""
        try:
            with anyio.fail_after(deadline_s):
                while True:
                    answer = None
                    with anyio.move_on_after(PING_S):
                        try:
                            answer = await self.ping()
                        except GuestGone:
                            await anyio.sleep(0.02)
                    if answer is None:
                        continue
                    return answer.version
        except TimeoutError:
            raise GuestGone(f"the guest did not answer a ping within {deadline_s:g} s") from None

    async def wait_booted(self, deadline_s: float) -> None:
        """As `wait_ready`, of a machine that was started just now and has our own guestd."""
        version = await self.wait_ready(deadline_s)
        if version != protocol.VERSION:
            raise GuestProtocolError(f"the guest speaks version {version} of the protocol")

    async def ping(self, timeout_s: float = PING_S) -> protocol.Answer:
        async with self.request(timeout_s, "ping") as (answer, _):
            return answer

    async def configure(
        self, hostname: str, env: dict[str, str], network: dict[str, Any] | None, files: Mapping[str, bytes],
        volumes: Sequence[Mount], bind: Bind | None,
    ) -> None:  # fmt: skip
        """Once per machine. `files` are by path; `network` is the protocol's, None without an interface; `volumes` are
        in the order of their drives; `bind` is what the machine shares. The values of `env` are in no error of this
        call."""
        written = [
            {"path": path, "mode": FILE_MODE, "data": base64.b64encode(data).decode()} for path, data in files.items()
        ]
        mounts = tuple({"path": mount.path, "read_only": mount.read_only} for mount in volumes)
        await self._ask(
            "configure", hostname=hostname, machine_id=secrets.token_hex(16), entropy=secrets.token_hex(32),
            time_ns=time.time_ns(), env=env, network=network, files=written,
            volumes=mounts, bind=None if bind is None else {"read_only": bind.read_only},
        )  # fmt: skip

    async def execute(self, end_stdin: bool, **fields: Any) -> Session:
        """Starts a process; it is running when this returns. `fields` are the protocol's. Close the
        session."""
        tail = protocol.encode_frame(protocol.STDIN_END) if end_stdin else b""
        _, connection = await self._open(ANSWER_S, "exec", tail, **fields)
        if fields.get("keep"):
            connection.keep()
        return Session(connection)

    async def attach(self, session: str, offset_o: int, offset_e: int, frame: bytes = b"") -> Session:
        """To a kept process. `frame` goes right behind the request."""
        offsets: dict[str, Any] = {"offset_o": offset_o, "offset_E": offset_e}
        _, connection = await self._open(ANSWER_S, "attach", frame, session=session, **offsets)
        connection.keep()
        return Session(connection)

    async def sessions(self) -> tuple[protocol.SessionState, ...]:
        async with self.request(ANSWER_S, "sessions") as (answer, _):
            return answer.sessions

    async def quiesce(self, deadline_s: float) -> None:
        """Nothing can be written to volumes afterwards, and all that was is on them. Raises `GuestGone` at the
        deadline."""
        with anyio.move_on_after(deadline_s):
            async with self.request(deadline_s, "sync", final=True):
                return
        raise GuestGone(f"the guest did not answer within {deadline_s:g} s")

    async def forget(self, session: str) -> None:
        await self._ask("forget", session=session)

    async def read(self, path: str) -> Download:
        return await self._download(ANSWER_S, protocol.MAX_FILE_BYTES, "read", path=path)

    async def list(self, path: str) -> Download:
        return await self._download(ANSWER_S, protocol.MAX_LISTING_BYTES, "list", path=path)

    async def bundle_out(self, base: str, branch: str) -> Download:
        most = protocol.MAX_BUNDLE_BYTES
        return await self._download(BUNDLE_S, most, "bundle_out", base=base, branch=branch)

    async def write(self, path: str, size: int, body: Source) -> None:
        await self._upload(ANSWER_S, size, body, "write", path=path)

    async def bundle_in(self, branch: str, size: int, body: Source) -> None:
        await self._upload(BUNDLE_S, size, body, "bundle_in", branch=branch)

    async def remove(self, path: str) -> None:
        await self._ask("remove", path=path)

    async def dial(self, port: int) -> Connection:
        """A TCP connection to the guest's loopback. Close it."""
        _, connection = await self._open(ANSWER_S, "dial", port=port)
        return connection

    @asynccontextmanager
    async def request(
        self, timeout_s: float, op: str, **fields: Any
    ) -> AsyncIterator[tuple[protocol.Answer, Connection]]:
        answer, connection = await self._open(timeout_s, op, **fields)
        try:
            yield answer, connection
        finally:
            connection.close()

    async def _ask(self, op: str, **fields: Any) -> None:
        async with self.request(ANSWER_S, op, **fields):
            pass

    async def _download(self, timeout_s: float, most: int, op: str, **fields: Any) -> Download:
        answer, connection = await self._open(timeout_s, op, **fields)
        if answer.size > most:
            connection.close()
            raise GuestProtocolError("the guest announced more than may be sent")
        return Download(connection, answer.size)

    async def _upload(self, timeout_s: float, size: int, body: Source, op: str, **fields: Any) -> None:
        async with self.request(timeout_s, op, size=size, **fields) as (_, connection):
            left = size
            try:
                while left and (data := await body.receive()):
                    left -= len(data)
                    await connection.send(data)
            except GuestGone:
                # It may have said why before it hung up; a broken connection has no answer to read.
                await connection.answer(GREETING_S)
                raise
            if left:
                raise GuestGone("the upload ended early")
            await connection.answer(timeout_s)

    async def _open(
        self, timeout_s: float, op: str, tail: bytes = b"", **fields: Any
    ) -> tuple[protocol.Answer, Connection]:
        """Connects, greets, sends the request and takes its answer."""
        if why := skew.refusal(op, fields, self._version, protocol.VERSION, protocol.SINCE):
            raise Unsupported(why)
        try:
            line = protocol.encode_request(protocol.Request(op, **fields))
        except protocol.GuestProtocolFault as fault:
            raise GuestRefused(fault.code, str(fault)) from None
        connection = await self._connect()
        try:
            await connection.send(line + tail)
            return await connection.answer(timeout_s), connection
        except BaseException:
            connection.close()
            raise

    async def _connect(self) -> Connection:
        try:
            stream = connect(self._path)
        except OSError:
            raise GuestGone("the machine's vsock does not answer") from None
        try:
            with anyio.fail_after(GREETING_S):
                await stream.send(b"CONNECT %d\n" % protocol.PORT)
                return Connection(stream, await _greeting(stream), self._waiters)
        except BaseException as fault:
            stream.close()
            if isinstance(fault, (TimeoutError, BrokenStreamError)):
                raise GuestGone("the guest does not take connections") from None
            raise


async def _greeting(stream: SocketStream) -> bytes:
    """Reads `OK <port>\\n` and returns what came behind it."""
    seen = b""
    while b"\n" not in seen[:GREETING_BYTES]:
        if len(seen) >= GREETING_BYTES:
            raise GuestProtocolError("the greeting is not one")
        data = await stream.receive(READ_BYTES)
        if not data:
            raise BrokenStreamError
        seen += data
    greeting, _, rest = seen.partition(b"\n")
    if not _GREETING.match(greeting):
        raise GuestProtocolError("the greeting is not one")
    return rest
