"""One client attached to one process: the frames of API §6 on a connection that was upgraded.

In: frames a client wrote (`i e s r`, at most 1 MiB each; anything else ends the connection). Out: the
process's output from its first byte on, then its exit code. Going away detaches and stops nothing. A client
that only ends its own direction goes on receiving. The framing is the guest protocol's; the bytes of one
never become the other's without passing through here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio

from guestd import protocol
from sandboxd.errors import ApiError
from sandboxd.processes import Process
from sandboxd.spool import Chunk


class Duplex(Protocol):
    """An upgraded connection. `receive` answers `b""` at the end of the client's direction."""

    async def receive(self) -> bytes: ...

    async def send(self, data: bytes) -> None: ...

    async def hung_up(self) -> None:
        """Returns when the client is gone altogether."""
        ...


Signal = Callable[[str], Awaitable[None]]
Resize = Callable[[bytes], Awaitable[None]]


async def attach(process: Process, client: Duplex, signal: Signal, resize: Resize) -> None:
    """Returns when the process has ended and everything is told, or the client is gone or broke the
    framing."""
    async with anyio.create_task_group() as tasks:

        async def listen() -> None:
            if await _listen(process, client, signal, resize):
                await client.hung_up()
            tasks.cancel_scope.cancel()

        tasks.start_soon(listen)
        await _tell(process, client)
        tasks.cancel_scope.cancel()


async def _tell(process: Process, client: Duplex) -> None:
    cursor = process.spool.cursor()
    try:
        while (chunk := await process.follow(cursor)) is not None:
            if chunk.dropped:
                await client.send(protocol.encode_frame(protocol.STDERR, gap_notice(process, chunk)))
            if chunk.data:
                await client.send(protocol.encode_frame(chunk.stream, chunk.data))
    finally:
        process.left(cursor)
    assert process.record.exit_code is not None
    await client.send(protocol.encode_exit(process.record.exit_code))


def gap_notice(process: Process, chunk: Chunk) -> bytes:
    """For a person: frames have no other place for it."""
    name = "output" if process.record.tty else {"o": "stdout", "E": "stderr"}[chunk.stream]
    return b"sandbox: %d bytes of earlier %s are not kept any more\r\n" % (chunk.dropped, name.encode())


async def _listen(process: Process, client: Duplex, signal: Signal, resize: Resize) -> bool:
    """True at the end of the client's direction, False where it broke the framing."""
    decoder = protocol.FrameDecoder(protocol.TO_GUEST)
    while data := await client.receive():
        try:
            frames = decoder.feed(data)
        except protocol.GuestProtocolFault:
            return False
        for kind, payload in frames:
            # What comes too late for the process has no answer in this framing.
            with contextlib.suppress(ApiError):
                if kind == protocol.STDIN:
                    await process.write(payload)
                elif kind == protocol.STDIN_END:
                    await process.end_stdin()
                elif kind == protocol.RESIZE:
                    await resize(payload)
                elif (name := protocol.decode_signal(payload)) is not None:
                    await signal(name)
    return True
