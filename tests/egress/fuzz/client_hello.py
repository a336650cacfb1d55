"""What must be true of the ClientHello reader whatever the bytes. `one` takes any; an AssertionError is a finding."""

from __future__ import annotations

import contextlib
import ssl

from egress.policy import RULES, wire_name
from egress.tls import Bad, Hello, NeedMore, NotTls, Outcome, ServerName
from tests.egress.hello import extension, hello, message, openssl, records, server_name

SEEDS = [
    hello(),
    hello(b"ALLOWED.test."),
    hello(b"127.0.0.1"),
    openssl("allowed.test"),
    openssl(None),
    records(message([server_name(b"allowed.test", b"other.test")])),
    records(message([server_name(b"allowed.test"), extension(51, b"k" * 40), server_name(b"other.test")])),
    records(message([server_name(b"allowed.test")]), size=9),
    records(message(None)),
]


def one(data: bytes) -> None:
    whole = Hello().feed(data)
    assert _by_bytes(data) == whole
    match whole:
        case ServerName(name):
            assert wire_name(name.encode()) == name
            heard = _openssl_hears(data)
            assert heard is None or heard.lower().removesuffix(".") == name, "OpenSSL reads another name"
        case Bad(rule, why):
            assert rule in RULES and why.endswith(".")
        case NeedMore(more):
            assert more > 0
        case NotTls():
            assert data[0] != 0x16


def _by_bytes(data: bytes) -> Outcome:
    reader = Hello()
    outcome = reader.feed(b"")
    for at in range(len(data)):
        outcome = reader.feed(data[at : at + 1])
        if not isinstance(outcome, NeedMore):
            break
    return outcome


def _openssl_hears(data: bytes) -> str | None:
    """The name a server of OpenSSL's gets out of it."""
    heard: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = lambda _end, name, _context: heard.append(name)
    incoming = ssl.MemoryBIO()
    incoming.write(data)
    with contextlib.suppress(ssl.SSLError):
        context.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True).do_handshake()
    return heard[0] if heard else None
