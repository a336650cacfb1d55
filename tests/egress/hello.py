"""ClientHellos: whole ones by hand, real ones from OpenSSL, and records cut as one likes."""

from __future__ import annotations

import contextlib
import ssl
import struct
from collections.abc import Sequence

GREASE = 0x2A2A
ECH = 0xFE0D
KEY_SHARE = 51


def vector(width: int, data: bytes) -> bytes:
    return len(data).to_bytes(width, "big") + data


def extension(kind: int, data: bytes) -> bytes:
    return struct.pack("!H", kind) + vector(2, data)


def server_name(*names: bytes, kind: int = 0) -> bytes:
    return extension(0, vector(2, b"".join(bytes([kind]) + vector(2, name) for name in names)))


def message(extensions: Sequence[bytes] | None, session: bytes = b"s" * 32, suites: bytes = b"\x13\x01") -> bytes:
    body = b"\x03\x03" + b"r" * 32 + vector(1, session) + vector(2, suites) + vector(1, b"\0")
    if extensions is not None:
        body += vector(2, b"".join(extensions))
    return b"\x01" + vector(3, body)


def records(data: bytes, size: int = 1 << 14, version: bytes = b"\x03\x01") -> bytes:
    return b"".join(b"\x16" + version + vector(2, data[at : at + size]) for at in range(0, len(data), size))


def hello(name: bytes = b"allowed.test", *more: bytes) -> bytes:
    return records(message([extension(GREASE, b""), server_name(name), *more]))


def openssl(name: str | None) -> bytes:
    """What Python's ssl sends first."""
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    context.set_alpn_protocols(["h2", "http/1.1"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    end = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        end.do_handshake()
    return outgoing.read()
