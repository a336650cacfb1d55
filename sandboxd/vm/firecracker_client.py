"""Firecracker's API, spoken over its unix socket: one request, one answer, one connection.

In: a `Request` and an open descriptor of the VMM's jail. Out: what the answer's JSON says, or `CallFailed`, which names
the call and never what it carried. The VMM is taken for hostile once its guest runs: it may hang, die, answer garbage
or answer for ever, and may put anything in the place of its socket. So every call has a deadline, an answer a limit,
what it says is made fit for a line, and the socket is looked for in the jail's directory without following a link.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import h11
from anyio.abc import UNIXSocketStream

from sandboxd import termsafe, unixpath
from sandboxd.vm import firecracker_versions
from sandboxd.vm.firecracker import CALL_S, Names, Request
from sandboxd.vm.firecracker_calls import State
from sandboxd.vm.firecracker_versions import Version

ANSWER_BYTES = 64 << 10
HEADER_BYTES = 16 << 10
INTERIM_ANSWERS = 8
CHUNK_BYTES = 16 << 10
REASON_CHARS = 300
POLL_S = 0.005


class CallFailed(Exception):
    """`step` is the method and the path."""

    def __init__(self, step: str, why: str) -> None:
        super().__init__(f"{step}: {why}")
        self.step = step
        self.why = why


class CallRefused(CallFailed):
    """The VMM answered that it will not."""


@dataclass(frozen=True, slots=True)
class Info:
    """What a VMM says of itself."""

    state: State
    version: Version


class Exchange:
    """One request and its answer, without the socket: bytes in, the answer out."""

    def __init__(self, request: Request) -> None:
        self._step = request.step
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEADER_BYTES)
        self._received = 0
        self._interim = 0
        self._status = 0
        self._body = bytearray()
        body = b"" if request.body is None else json.dumps(request.body).encode()
        headers = [("Host", "localhost"), ("Accept", "application/json")]
        if request.body is not None:
            headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        self.sent = (
            (self._http.send(h11.Request(method=request.method, target=request.path, headers=headers)) or b"")
            + (self._http.send(h11.Data(body)) or b"")
            + (self._http.send(h11.EndOfMessage()) or b"")
        )

    def feed(self, data: bytes) -> bool:
        """`b""` is the end of the stream. True once the answer is whole; then `result` has it. Raises CallFailed."""
        self._received += len(data)
        if self._received > ANSWER_BYTES:
            raise self._failed(f"the answer is longer than {ANSWER_BYTES} bytes")
        try:
            self._http.receive_data(data)
            while True:
                match self._http.next_event():
                    case h11.NEED_DATA:
                        return False
                    case h11.InformationalResponse():
                        self._interim += 1
                        if self._interim > INTERIM_ANSWERS:
                            raise self._failed("it goes on saying that an answer will come")
                    case h11.Response(status_code=status, headers=headers):
                        self._status = status
                        # Firecracker gives a length. Chunks of one byte would cost a thousand times what they bring.
                        if any(name == b"transfer-encoding" for name, _ in headers):
                            raise self._failed("the answer is in chunks")
                    case h11.Data(data=part):
                        self._body += part
                    case h11.EndOfMessage():
                        return True
                    case _:
                        raise self._failed("the connection ended before the answer did")
        except h11.RemoteProtocolError:
            ended = not data and self._status == 0
            why = "the connection ended before the answer did" if ended else "the answer is not HTTP"
            raise self._failed(why) from None

    def result(self) -> object:
        """What the answer says: None where it says no more than yes. Raises CallFailed, CallRefused."""
        if self._status == 204:
            return None
        try:
            value = json.loads(self._body.decode("utf-8"))
        except (ValueError, RecursionError):
            value = None
        if self._status == 200:
            if not isinstance(value, dict):
                raise self._failed("the answer is not a JSON object")
            return value
        said = value.get("fault_message") if isinstance(value, dict) else None
        # Cut first: cleaning takes time for each character.
        reason = termsafe.clean(said[:REASON_CHARS]) if isinstance(said, str) else ""
        raise CallRefused(self._step, f"refused: {reason}" if reason else f"refused with status {self._status}")

    def _failed(self, why: str) -> CallFailed:
        return CallFailed(self._step, why)


class Client:
    """The API of the VMM whose jail's root is open as `root_fd`, which stays its opener's."""

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd

    async def listening(self) -> None:
        """Returns once the VMM takes connections. The deadline is the caller's, who also sees whether the VMM ends."""
        while True:
            try:
                unixpath.connect_now(Names.API_SOCKET, self._root_fd).close()
                return
            except (FileNotFoundError, ConnectionRefusedError):
                await anyio.sleep(POLL_S)
            except OSError as error:
                raise CallFailed("connecting to the API", error.strerror or "not possible") from None

    async def send_all(self, requests: Sequence[Request]) -> None:
        """One after the other, to the first that fails."""
        for request in requests:
            await self.send(request)

    async def send(self, request: Request) -> object:
        """What the answer says. Raises CallFailed; OSError where it is this process that lacks a descriptor."""
        exchange = Exchange(request)
        try:
            with anyio.fail_after(request.deadline_s):
                await self._exchange(exchange)
        except TimeoutError:
            raise CallFailed(request.step, f"no answer in {request.deadline_s:g} s") from None
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise CallFailed(request.step, "the connection broke") from None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise CallFailed(request.step, f"no connection: {error.strerror or 'not possible'}") from None
        return exchange.result()

    async def info(self, deadline_s: float = CALL_S) -> Info:
        """Of the VMM, which may lie. Raises as `send` does."""
        value = await self.send(Request("GET", "/", deadline_s=deadline_s))
        match value:
            case {"state": state, "vmm_version": str(version)}:
                try:
                    return Info(State(state), firecracker_versions.read(version))
                except ValueError:
                    pass
        raise CallFailed("GET /", "the answer names no state and version")

    async def _exchange(self, exchange: Exchange) -> None:
        stream = await UNIXSocketStream.from_socket(unixpath.connect_now(Names.API_SOCKET, self._root_fd))
        try:
            await stream.send(exchange.sent)
            whole = False
            while not whole:
                try:
                    data = await stream.receive(CHUNK_BYTES)
                except anyio.EndOfStream:
                    data = b""
                whole = exchange.feed(data)
        finally:
            await anyio.aclose_forcefully(stream)
