"""QMP, QEMU's monitor protocol, without the socket. The VMM is taken for hostile: a guest may have broken
into it.

A line each way is one JSON object. First the VMM says `{"QMP": …}` and takes nothing but `qmp_capabilities`.
Then every `{"execute", "arguments", "id"}` is answered in order by `{"return", "id"}` or `{"error": {"class",
"desc"}, "id"}`, and `{"event", "data", "timestamp"}` may come at any time (QEMU, docs/interop/qmp-spec.txt).

In: bytes as they come. Out: messages. Anything that is not the above, or a line over LINE_LIMIT, raises
QmpError, and the connection is of no use from there on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

LINE_LIMIT = 256 * 1024  # a console read of 64 KiB is 88 KiB in base64


class QmpError(Exception):
    """The peer broke the protocol."""


@dataclass(frozen=True, slots=True)
class Greeting:
    pass


@dataclass(frozen=True, slots=True)
class Answer:
    id: int
    value: object


@dataclass(frozen=True, slots=True)
class Fault:
    """A command was refused. `text` is the VMM's."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class Event:
    """`reason` is what SHUTDOWN carries: "guest-shutdown", "guest-reset", "guest-panic", "host-signal", …"""

    name: str
    reason: str


Message = Greeting | Answer | Fault | Event


def command(id: int, name: str, arguments: Mapping[str, object]) -> bytes:
    body = {"execute": name, "arguments": dict(arguments), "id": id}
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


class Decoder:
    """Bytes in, messages out. After a QmpError it takes nothing more."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0
        self._broken = False

    def feed(self, data: bytes) -> list[Message]:
        if self._broken:
            raise QmpError("the monitor broke the protocol before")
        try:
            return self._feed(data)
        except QmpError:
            self._broken = True
            self._rest.clear()
            raise

    def _feed(self, data: bytes) -> list[Message]:
        self._rest += data
        found: list[Message] = []
        start = 0
        while (end := self._rest.find(b"\n", max(start, self._searched))) >= 0:
            if end - start > LINE_LIMIT:
                raise QmpError("a line over the limit")
            line = bytes(self._rest[start:end]).strip()
            start = end + 1
            if line:
                found.append(_message(line))
        del self._rest[:start]
        self._searched = len(self._rest)
        if len(self._rest) > LINE_LIMIT:
            raise QmpError("a line over the limit")
        return found


def _message(line: bytes) -> Message:
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        raise QmpError("not JSON") from None
    match value:
        case {"QMP": dict()}:
            return Greeting()
        case {"event": str(name)}:
            data = value.get("data")
            reason = data.get("reason") if isinstance(data, dict) else None
            return Event(name[:64], reason[:64] if isinstance(reason, str) else "")
        case {"return": answer, "id": int(id)}:
            return Answer(id, answer)
        case {"error": {"desc": str(text)}, "id": int(id)}:
            return Fault(id, text[:1024])
        case _:
            raise QmpError("not a greeting, an answer or an event")
