"""The name in a TLS ClientHello, read as the bytes come.

In: a guest's first bytes, in pieces of any size. Out: the server name, or why there is none to go by. Nothing is
decrypted or changed; whoever feeds keeps the bytes and passes them on.

A record is 1 byte type, 2 bytes version, 2 bytes length, at most 2^14 bytes (RFC 8446 §5.1). The handshake message in
it is 1 byte type, 3 bytes length, and may go over any number of records. Every length in it has to end exactly where
the one around it does: a hello that two readers could read differently is refused, not guessed at. What we do not
know (GREASE, key shares, an encrypted inner hello) is stepped over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from egress.policy import unnamed, wire_name

MAX_HELLO: Final = 64 << 10             # the handshake message; post-quantum key shares make about 2 KiB
MAX_WIRE: Final = 128 << 10             # with the headers of the records it came in
MAX_RECORD: Final = 1 << 14

_HANDSHAKE: Final = 0x16                # ContentType, RFC 8446 §5.1
_CLIENT_HELLO: Final = 1                # HandshakeType, §4
_SERVER_NAME: Final = 0                 # ExtensionType; its host_name has name type 0 too, RFC 6066 §3
_HEADER: Final = 5


@dataclass(frozen=True, slots=True)
class NeedMore:
    bytes: int                          # at least so many


@dataclass(frozen=True, slots=True)
class ServerName:
    name: str


@dataclass(frozen=True, slots=True)
class NotTls:
    pass


@dataclass(frozen=True, slots=True)
class Bad:
    rule: str                           # as in policy.Deny
    why: str


Outcome: TypeAlias = NeedMore | ServerName | NotTls | Bad


class Hello:
    """The outcome that is not NeedMore is the last one, whatever is fed afterwards."""

    def __init__(self) -> None:
        self._wire = bytearray()        # from the record that is not complete yet
        self._seen = 0
        self._message = bytearray()
        self._outcome: Outcome = NeedMore(_HEADER)

    def feed(self, data: bytes) -> Outcome:
        if isinstance(self._outcome, NeedMore):
            self._wire += data
            self._seen += len(data)
            try:
                self._outcome = self._read()
            except _Fault as fault:
                self._outcome = Bad("malformed", f"The TLS hello is not well formed: {fault}.")
            if not isinstance(self._outcome, NeedMore):
                self._wire, self._message = bytearray(), bytearray()
        return self._outcome

    def _read(self) -> Outcome:
        wire, at = self._wire, 0
        if wire and not self._message and wire[0] != _HANDSHAKE:
            return NotTls()
        wanted = _HEADER
        while len(wire) - at >= _HEADER:
            length = wire[at + 3] << 8 | wire[at + 4]
            if wire[at] != _HANDSHAKE or wire[at + 1] != 3:
                raise _Fault("a record of another kind within it")
            if not 0 < length <= MAX_RECORD:
                raise _Fault("a record with an impossible length")
            if len(wire) - at - _HEADER < length:
                wanted = _HEADER + length
                break
            self._message += wire[at + _HEADER : at + _HEADER + length]
            at += _HEADER + length
            if len(self._message) >= 4:
                whole = _whole(self._message)
                if len(self._message) > whole:
                    raise _Fault("something behind it in its record")
                if len(self._message) == whole:
                    return _server_name(self._message)
        del wire[:at]
        if self._seen > MAX_WIRE:
            raise _Fault("too many records for it")
        return NeedMore(wanted - len(wire))


class _Fault(Exception):
    pass


def _whole(message: bytearray) -> int:
    if message[0] != _CLIENT_HELLO:
        raise _Fault("another message in its place")
    length = 4 + int.from_bytes(message[1:4], "big")
    if length > MAX_HELLO:
        raise _Fault("longer than 64 KiB")
    return length


class _Fields:
    """Reads fields with a length in front, each within its bounds."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise _Fault("a length that points past the end")
        self._at += count
        return self._data[self._at - count : self._at]

    def vector(self, width: int) -> bytes:
        return self.take(int.from_bytes(self.take(width), "big"))


def _server_name(message: bytearray) -> Outcome:
    hello = _Fields(bytes(message[4:]))
    hello.take(2 + 32)                  # legacy_version, random
    session = hello.vector(1)
    suites = hello.vector(2)
    if len(session) > 32 or not suites or len(suites) % 2 or not hello.vector(1):
        raise _Fault("a field with an impossible length")
    raw: bytes | None = None
    if hello.left:
        extensions = _Fields(hello.vector(2))
        if hello.left:
            raise _Fault("something behind its extensions")
        while extensions.left:
            kind = int.from_bytes(extensions.take(2), "big")
            value = extensions.vector(2)
            if kind != _SERVER_NAME:
                continue
            if raw is not None:
                return Bad("names-disagree", "The TLS hello names its server twice.")
            names = _Fields(_Fields(value).vector(2))
            if names.left + 2 != len(value) or names.take(1) != b"\0":
                raise _Fault("a server name of an unknown form")
            raw = names.vector(2)
            if names.left:
                return Bad("names-disagree", "The TLS hello names more than one server.")
            if not raw:
                raise _Fault("an empty server name")
    name = wire_name(raw or b"")
    if name is None:
        refusal = unnamed(raw or b"")
        return Bad(refusal.rule, refusal.why)
    return ServerName(name)
