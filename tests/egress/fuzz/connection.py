"""What must be true of a connection whatever both its ends say. `one` takes any bytes; an AssertionError is a finding.

The bytes are a conversation: the first chooses how it is cut, MARK hands over to the other end.
"""

from __future__ import annotations

import h11

from egress.policy import By
from tests.egress.hello import hello
from tests.egress.relayed import LISTED, Relayed

MARK = b"\xfe\xfd"
_GET = b"GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n"
_NEXT = _GET.replace(b"allowed", b"second")
_BAD = _GET.replace(b"allowed", b"other")
_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
SEEDS = [
    b"\0" + MARK.join([_GET, _OK, _NEXT, _OK, _BAD]),
    b"\1" + MARK.join([_GET + _GET + _BAD, _OK + _OK]),
    b"\2" + MARK.join([_GET[:-2] + _CHUNKED, b"HTTP/1.1 200 OK\r\n" + _CHUNKED, _BAD]),
    b"\3" + MARK.join([_GET.replace(b"\r\n\r\n", b"\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"),
                       b"HTTP/1.1 101 X\r\nUpgrade: websocket\r\n\r\nhi", _BAD]),
    b"\4" + MARK.join([b"CONNECT allowed.test:443 HTTP/1.1\r\n\r\n" + hello(), b"answer", b"more"]),
    b"\5" + MARK.join([b"CONNECT allowed.test:80 HTTP/1.1\r\n\r\n" + _GET, _OK, _NEXT]),
    b"\6" + hello(),
    b"\7" + hello(b"other.test"),
    b"\0" + MARK.join([_GET, b"HTTP/1.1 200 OK\r\n\r\nuntil the end", _GET]),
]  # fmt: skip


def one(data: bytes) -> None:
    choice, rest = data[0] if data else 0, data[1:]
    relayed = Relayed(port=443 if choice & 4 else 80, piece=(1 << 16, 1, 7, 100)[choice & 3])
    spoken = rest.split(MARK)
    for turn, words in enumerate(spoken):
        if turn % 2 == 0:
            relayed.guest(words)
        elif relayed.opens:
            relayed.server(words)
    allowed = set(LISTED.allow)
    for opened, got in zip(relayed.opens, relayed.received, strict=True):
        assert opened.name in allowed and opened.port in (80, 443)
        if opened.by is By.HTTP and b"upgrade" not in rest.lower():
            _names_only(opened.name.encode(), bytes(got))
    # Nothing the guest said was changed, or said twice.
    sent = b"".join(spoken[::2])
    at = 0
    for got in relayed.received:
        found = sent.find(got, at)
        assert found >= 0
        at = found + len(got)


def _names_only(name: bytes, got: bytes) -> None:
    """As far as a server of h11's understands what reached it, every request in it names that server."""
    reader = h11.Connection(h11.SERVER)
    reader.receive_data(got)
    try:
        while True:
            event = reader.next_event()
            if isinstance(event, h11.Request):
                host = dict(event.headers).get(b"host", b"")
                assert host.lower().split(b":")[0].removesuffix(b".") == name
            elif isinstance(event, h11.EndOfMessage):
                reader.send(h11.Response(status_code=204, headers=[]))
                reader.send(h11.EndOfMessage())
            elif event is h11.PAUSED and reader.our_state is h11.DONE and reader.their_state is h11.DONE:
                reader.start_next_cycle()
            elif not isinstance(event, h11.Data):
                return
    except h11.ProtocolError:
        return
