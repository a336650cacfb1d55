"""ClientHellos as OpenSSL says them, taken apart and put together otherwise (RFC 8446, RFC 6066)."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from contextlib import suppress

SERVER_NAME, PADDING = 0, 21


def hello(*names: str | bytes, list_of: bool = True) -> bytes:
    """One record with a ClientHello for these names: none, one, or several in one list.

    Where `list_of` is false each name gets a server_name extension of its own.
    """
    handshake = _openssl()
    head, rest = handshake[:38], handshake[38:]
    at = 1 + rest[0]                                            # session id
    at += 2 + int.from_bytes(rest[at : at + 2], "big")          # cipher suites
    at += 1 + rest[at]                                          # compression
    kept = b"".join(
        _extension(kind, body) for kind, body in _extensions(rest[at + 2 :]) if kind not in (SERVER_NAME, PADDING)
    )
    encoded = [name.encode() if isinstance(name, str) else name for name in names]
    groups = [encoded] if list_of else [[name] for name in encoded]
    own = b"".join(_extension(SERVER_NAME, _names(group)) for group in groups if group)
    body = head[4:] + rest[:at] + len(own + kept).to_bytes(2, "big") + own + kept
    return record(b"\x01" + len(body).to_bytes(3, "big") + body)


def record(handshake: bytes) -> bytes:
    return b"\x16\x03\x01" + len(handshake).to_bytes(2, "big") + handshake


def records(whole: bytes, size: int) -> bytes:
    """The same hello in records of `size` bytes."""
    body = whole[5:]
    return b"".join(record(body[at : at + size]) for at in range(0, len(body), size))


def padded(name: str, size: int) -> bytes:
    """A hello of about `size` bytes, by a padding extension (RFC 7685), in records of 16 KiB."""
    whole = hello(name)
    body = whole[9:]
    at = 2 + 32
    at += 1 + body[at]
    at += 2 + int.from_bytes(body[at : at + 2], "big")
    at += 1 + body[at]
    extensions = body[at + 2 :] + _extension(PADDING, bytes(size - len(whole)))
    body = body[:at] + len(extensions).to_bytes(2, "big") + extensions
    return records(bytes(5) + b"\x01" + len(body).to_bytes(3, "big") + body, 16384)


def _openssl() -> bytes:
    context = ssl.create_default_context()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    stream = context.wrap_bio(incoming, outgoing, server_hostname="a.test")
    with suppress(ssl.SSLWantReadError):
        stream.do_handshake()
    return outgoing.read()[5:]


def _extensions(data: bytes) -> list[tuple[int, bytes]]:
    found = []
    while data:
        size = int.from_bytes(data[2:4], "big")
        found.append((int.from_bytes(data[:2], "big"), data[4 : 4 + size]))
        data = data[4 + size :]
    return found


def _extension(kind: int, body: bytes) -> bytes:
    return kind.to_bytes(2, "big") + len(body).to_bytes(2, "big") + body


def _names(names: Sequence[bytes]) -> bytes:
    entries = b"".join(b"\x00" + len(name).to_bytes(2, "big") + name for name in names)
    return len(entries).to_bytes(2, "big") + entries
