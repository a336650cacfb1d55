"""The name in a TLS ClientHello, read as the bytes come.

In: a guest's first bytes, in pieces of any size. Out: the server name, or why there is none to go by. Nothing is
decrypted or changed; whoever feeds keeps the bytes and passes them on. A server may ask for a second hello (`Answer`),
still in the clear, and some go by the name in that one (`Again`).

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
MAX_RECORDS: Final = 4096               # it may come in; some clients cut it into single bytes on purpose
MAX_RECORD: Final = 1 << 14

# ContentType, RFC 8446 §5.1; HandshakeType, §4
_CHANGE_CIPHER_SPEC, _ALERT, _HANDSHAKE, _APPLICATION_DATA = 0x14, 0x15, 0x16, 0x17
_CLIENT_HELLO, _SERVER_HELLO = 1, 2
# The random of a ServerHello that is a HelloRetryRequest, §4.1.3
_RETRY: Final = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
_RETRY_AT: Final = 4 + 2                # in its message
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
        self._records = 0
        self._message = bytearray()
        self._outcome: Outcome = NeedMore(_HEADER)
        self.behind = b""
        """What came behind the whole hello, in records of their own."""

    def feed(self, data: bytes) -> Outcome:
        if isinstance(self._outcome, NeedMore):
            self._wire += data
            try:
                self._outcome = self._read()
            except _Fault as fault:
                self._outcome = Bad("malformed", f"The TLS hello is not well formed: {fault}.")
            except IndexError:
                self._outcome = Bad("malformed", "The TLS hello is not well formed: a length points past the end.")
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
            self._records += 1
            if self._records > MAX_RECORDS:
                raise _Fault("too many records for it")
            if len(self._message) >= 4:
                whole = _whole(self._message)
                if len(self._message) > whole:
                    raise _Fault("something behind it in its record")
                if len(self._message) == whole:
                    self.behind = bytes(wire[at:])
                    return _server_name(bytes(self._message))
        del wire[:at]
        return NeedMore(wanted - len(wire))


class Answer:
    """The first words of a server: does it ask for another hello?"""

    def __init__(self) -> None:
        self._wire = bytearray()        # from the record that is not complete yet
        self._message = bytearray()     # what complete records held

    def feed(self, data: bytes) -> bool | None:
        """None: not known yet."""
        wire = self._wire
        wire += data
        while wire:
            if wire[0] not in (_HANDSHAKE, _ALERT):     # a warning may come before
                return False
            if len(wire) < _HEADER:
                return None
            size = _HEADER + (wire[3] << 8 | wire[4])
            part = wire[_HEADER:size] if wire[0] == _HANDSHAKE else b""
            message = self._message + part
            if message and message[0] != _SERVER_HELLO:
                return False
            if len(message) >= _RETRY_AT + len(_RETRY):
                return message.startswith(_RETRY, _RETRY_AT)
            if len(wire) < size:
                return None
            self._message = message
            del wire[:size]
        return None


class Again:
    """From the first hello to the end of the second. The outcome that is not NeedMore is the last one."""

    def __init__(self) -> None:
        self._wire = bytearray()
        self._hello: Hello | None = None

    def feed(self, data: bytes) -> Outcome:
        if self._hello is not None:
            return self._hello.feed(data)
        wire = self._wire
        wire += data
        # Clients of old networks say a change of ciphers first, and early data may have been on its way.
        while wire and wire[0] in (_CHANGE_CIPHER_SPEC, _ALERT, _APPLICATION_DATA):
            size = _HEADER + (wire[3] << 8 | wire[4]) if len(wire) >= _HEADER else _HEADER
            if len(wire) < size:
                return NeedMore(size - len(wire))
            del wire[:size]
        if not wire:
            return NeedMore(_HEADER)
        self._hello = Hello()
        return self._hello.feed(bytes(wire))


class _Fault(Exception):
    pass


def _whole(message: bytearray) -> int:
    if message[0] != _CLIENT_HELLO:
        raise _Fault("another message in its place")
    length = 4 + int.from_bytes(message[1:4], "big")
    if length > MAX_HELLO:
        raise _Fault("longer than 64 KiB")
    return length


def _server_name(hello: bytes) -> Outcome:
    """Of a whole message. A length that leads past its end is an IndexError, so none is trusted unseen."""
    at = 4 + 2 + 32                     # the message's header, legacy_version, random
    session = hello[at]
    at += 1 + session
    suites = hello[at] << 8 | hello[at + 1]
    at += 2 + suites
    methods = hello[at]
    at += 1 + methods
    if session > 32 or not suites or suites % 2 or not methods:
        raise _Fault("a field with an impossible length")
    raw: bytes | None = None
    if at != len(hello):
        end = at + 2 + (hello[at] << 8 | hello[at + 1])
        if end != len(hello):
            raise _Fault("its extensions do not end where it does")
        at += 2
        while at < end:
            kind, value = hello[at] << 8 | hello[at + 1], at + 4
            at = value + (hello[at + 2] << 8 | hello[at + 3])
            if at > end:
                raise _Fault("an extension that points past the end")
            if kind == _SERVER_NAME:
                if raw is not None:
                    return Bad("names-disagree", "The TLS hello names its server twice.")
                raw = hello[value:at]
    if raw is None:
        return _unnamed(b"")
    # A list of names, 2 bytes its length; each 1 byte type, 2 bytes length. There is one, of type host_name.
    if len(raw) < 5 or raw[0] << 8 | raw[1] != len(raw) - 2 or raw[2] != 0:
        raise _Fault("a server name of an unknown form")
    length = raw[3] << 8 | raw[4]
    if length < len(raw) - 5:
        return Bad("names-disagree", "The TLS hello names more than one server.")
    if length > len(raw) - 5 or not length:
        raise _Fault("an empty server name, or one that points past its list")
    name = wire_name(raw[5:])
    return _unnamed(raw[5:]) if name is None else ServerName(name)


def _unnamed(raw: bytes) -> Bad:
    refusal = unnamed(raw)
    return Bad(refusal.rule, refusal.why)
