"""Queries of a guest in, answers out: nothing is ever forwarded.

In: packets and TCP bytes as a guest sent them; all of them are hostile. Out: what to send back, or the one
question to decide. The decision is made elsewhere. Queries are read here, byte by byte, because what dnslib
accepts is more than a stub resolver ever sends (pointers in a question, records of any type). The records of
the answers are dnslib's. The question goes back byte for byte, with the mixed case that resolvers put into it.

    query ── read ──┬── Ignore    silence: an answer, or nothing that can be answered
                    ├── Reply     an error that needs no decision
                    └── Question ── decided elsewhere ── write ── answer

An answer has one question, at most one record and at most one OPT, so it fits into 512 bytes and is the same
over UDP and TCP. Its records are made once, when the module is loaded: a guest that floods us with queries
costs a copy of them each. RFC 1035 §4, RFC 2308 §5 (negative answers), RFC 4343 (case), RFC 6891 (EDNS).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from dnslib import EDNS0, QTYPE, RCODE, RR, SOA, A, DNSBuffer, DNSLabel

from egress.policy import wire_name

A_TYPE: int = QTYPE.A
TTL_S = 30
# A name that was refused may be allowed a second later.
NEGATIVE_TTL_S = 1
# What is usual since 2020: it crosses every link unfragmented.
UDP_SIZE = 1232
# A query has one name and an OPT; padding (RFC 7830) makes it some hundred bytes.
LONGEST_QUERY = 4096

_HEADER = struct.Struct("!6H")
_TAIL = struct.Struct("!2H")
_RECORD = struct.Struct("!2HIH")
_QR, _RD, _RA, _CD = 0x8000, 0x0100, 0x0080, 0x0010
_IN, _OPT = 1, 41
_DO = 0x8000
_BADVERS = 16


@dataclass(frozen=True, slots=True)
class Ignore:
    """Say nothing. To answer an answer would let two sandboxes keep each other busy."""


@dataclass(frozen=True, slots=True)
class Reply:
    data: bytes


@dataclass(frozen=True, slots=True)
class Question:
    name: str | None  # normal form; None: no host has such a name
    type: int
    id: int
    flags: int
    labels: tuple[bytes, ...]
    section: bytes  # as it came
    edns: bool
    dnssec_ok: bool

    @property
    def shown(self) -> str:
        """The name for a log: printable, bounded."""
        return str(DNSLabel(self.labels))


@dataclass(frozen=True, slots=True)
class Address:
    """The name has this IPv4 address. Whoever asked for another type gets an empty answer."""

    address: str


@dataclass(frozen=True, slots=True)
class Empty:
    """The name exists and has no record of this type."""


@dataclass(frozen=True, slots=True)
class NoSuchName:
    pass


@dataclass(frozen=True, slots=True)
class Failure:
    """The look-up failed, and may work when it is tried again."""


Outcome = Address | Empty | NoSuchName | Failure


class _Malformed(Exception):
    pass


def read(packet: bytes) -> Ignore | Reply | Question:
    if not _HEADER.size <= len(packet) <= LONGEST_QUERY:
        return Ignore()
    id_, flags, questions, answers, authorities, additionals = _HEADER.unpack_from(packet)
    if flags & _QR:
        return Ignore()
    if flags >> 11 & 15:
        return Reply(_bare(id_, flags, RCODE.NOTIMP))
    if questions > 1:
        return Reply(_bare(id_, flags, RCODE.SERVFAIL))
    if questions == 0:
        return Reply(_bare(id_, flags, RCODE.FORMERR))
    try:
        labels, at = _name(packet, _HEADER.size)
        type_, class_ = _unpack(_TAIL, packet, at)
    except _Malformed:
        return Ignore()
    if class_ != _IN:
        return Reply(_bare(id_, flags, RCODE.NOTIMP))
    try:
        if answers or authorities:
            raise _Malformed
        opt = _opt(packet, at + _TAIL.size, additionals)
    except _Malformed:
        return Reply(_bare(id_, flags, RCODE.FORMERR))
    # A dot inside a label would read as two labels once they are joined.
    name = None if any(b"." in label for label in labels) else wire_name(b".".join(labels))
    edns, dnssec_ok = opt is not None, bool((opt or 0) & _DO)
    section = packet[_HEADER.size : at + _TAIL.size]
    question = Question(name, type_, id_, flags, labels, section, edns, dnssec_ok)
    if (opt or 0) >> 16 & 255:
        return Reply(_pack(question, _BADVERS))
    return question


def write(question: Question, outcome: Outcome) -> bytes:
    match outcome:
        case Address(address) if question.type == A_TYPE:
            return _pack(question, RCODE.NOERROR, answer=_ADDRESS + bytes(map(int, address.split("."))))
        case Address() | Empty():
            return _pack(question, RCODE.NOERROR, authority=_NEGATIVE)
        case NoSuchName():
            return _pack(question, RCODE.NXDOMAIN, authority=_NEGATIVE)
        case Failure():
            return _pack(question, RCODE.SERVFAIL)


def framed(packet: bytes) -> bytes:
    """A packet as it goes over TCP (RFC 1035 §4.2.2)."""
    return struct.pack("!H", len(packet)) + packet


@dataclass(slots=True)
class Framer:
    """Packets out of TCP bytes. `broken`: the peer announced more than a query can be; nothing comes any more."""

    broken: bool = False
    _held: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[bytes]:
        if self.broken:
            return []
        self._held += data
        packets: list[bytes] = []
        at = 0
        while len(self._held) - at >= 2:
            size = self._held[at] << 8 | self._held[at + 1]
            if size > LONGEST_QUERY:
                self.broken = True
                break
            if len(self._held) - at - 2 < size:
                break
            packets.append(bytes(self._held[at + 2 : at + 2 + size]))
            at += 2 + size
        del self._held[: len(self._held) if self.broken else at]
        return packets


def _name(packet: bytes, at: int) -> tuple[tuple[bytes, ...], int]:
    """An uncompressed name: what a query may hold before anything it could point back to."""
    labels: list[bytes] = []
    start = at
    while True:
        if at >= len(packet):
            raise _Malformed
        size = packet[at]
        at += 1
        if size == 0:
            return tuple(labels), at
        if size > 63 or at + size > len(packet) or at + size - start > 254:
            raise _Malformed
        labels.append(packet[at : at + size])
        at += size


def _opt(packet: bytes, at: int, records: int) -> int | None:
    """The flags (extended code, version, bits) of the OPT record, where there is one.

    Other additional records (a signature, say) are passed over unread.
    """
    flags: int | None = None
    for _ in range(records):
        labels, at = _name(packet, at)
        type_, _size, ttl, length = _unpack(_RECORD, packet, at)
        at += _RECORD.size + length
        if type_ == _OPT:
            if labels or flags is not None:
                raise _Malformed
            flags = ttl
    if at != len(packet):
        raise _Malformed
    return flags


def _unpack(layout: struct.Struct, packet: bytes, at: int) -> tuple[int, ...]:
    if at + layout.size > len(packet):
        raise _Malformed
    return layout.unpack_from(packet, at)


def _bare(id_: int, flags: int, code: int) -> bytes:
    """An answer without its question: to what was not read, or cannot be written."""
    return _HEADER.pack(id_, _QR | flags & (0x7800 | _RD | _CD) | code, 0, 0, 0, 0)


def _pack(question: Question, code: int, answer: bytes = b"", authority: bytes = b"") -> bytes:
    # As a forwarder says it: recursion available (some clients try the next server else), not authoritative,
    # nothing verified.
    flags = _QR | _RA | question.flags & (_RD | _CD) | code & 15
    opt = _OPTS[code >> 4, question.dnssec_ok] if question.edns else b""
    header = _HEADER.pack(question.id, flags, 1, bool(answer), bool(authority), question.edns)
    return header + question.section + answer + authority + opt


def _record(record: RR) -> bytes:
    buffer = DNSBuffer()
    record.pack(buffer)
    return bytes(buffer.data)


# Up to the address itself, of the name in the question (RFC 1035 §4.1.4).
_ADDRESS = b"\xc0\x0c" + _record(RR(".", A_TYPE, ttl=TTL_S, rdata=A("0.0.0.0")))[1:-4]  # noqa: S104
# The root's, since it is above every name. The last figure is how long a "no" may be remembered.
_SOA = SOA(".", ".", (1, 3600, 600, 86400, NEGATIVE_TTL_S))
_NEGATIVE = _record(RR(".", QTYPE.SOA, ttl=NEGATIVE_TTL_S, rdata=_SOA))
_OPTS = {
    (high, dnssec_ok): _record(EDNS0(flags="do" if dnssec_ok else "", ext_rcode=high, udp_len=UDP_SIZE))
    for high in (0, _BADVERS >> 4)
    for dnssec_ok in (False, True)
}
