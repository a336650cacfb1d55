"""The name in a ClientHello."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from egress.tls import MAX_HELLO, MAX_RECORDS, Bad, Hello, NeedMore, NotTls, Outcome, ServerName
from tests.egress.hello import (
    ECH,
    GREASE,
    KEY_SHARE,
    extension,
    hello,
    message,
    openssl,
    records,
    server_name,
    vector,
)

NAME = ServerName("allowed.test")


def feed(data: bytes, size: int = 1 << 20) -> Outcome:
    reader = Hello()
    outcome: Outcome = NeedMore(5)
    for at in range(0, len(data), size):
        outcome = reader.feed(data[at : at + size])
        if not isinstance(outcome, NeedMore):
            break
    return outcome


POST_QUANTUM = extension(KEY_SHARE, vector(2, b"\x11\xec" + vector(2, b"k" * 1216) + b"\0\x1d" + vector(2, b"x" * 32)))

GOOD = [
    pytest.param(hello(), id="a plain one"),
    pytest.param(hello(b"ALLOWED.Test"), id="case"),
    pytest.param(hello(b"allowed.test."), id="one trailing dot"),
    pytest.param(openssl("allowed.test"), id="OpenSSL's"),
    pytest.param(openssl("allowed.test."), id="OpenSSL's, with the dot it does send"),
    pytest.param(hello(b"allowed.test", POST_QUANTUM), id="post-quantum key shares"),
    pytest.param(hello(b"allowed.test", extension(21, b"\0" * 40_000)), id="40 KB of padding in three records"),
    pytest.param(hello(b"allowed.test", extension(0x9A9A, b"\0")), id="GREASE at both ends"),
    pytest.param(hello(b"allowed.test", extension(ECH, b"\0" * 250)), id="an encrypted inner hello: the outer name"),
    pytest.param(records(message([server_name(b"allowed.test")]), size=1), id="records of one byte"),
    pytest.param(records(message([server_name(b"allowed.test")]), size=7), id="records of seven bytes"),
    pytest.param(records(message([server_name(b"allowed.test")], session=b"")), id="no session id"),
    pytest.param(records(message([server_name(b"allowed.test")]), version=b"\x03\x03"), id="another record version"),
    pytest.param(hello() + b"\x17\x03\x03\0\x05early", id="early data behind it"),
    pytest.param(hello() + b"\x14\x03\x03\0\x01\x01", id="a change of cipher spec behind it"),
]


@pytest.mark.parametrize("data", GOOD)
@pytest.mark.parametrize("size", [1 << 20, 1400, 5, 1], ids=["at once", "by packets", "by five bytes", "by one byte"])
def test_the_name_comes_out_however_it_is_cut(data: bytes, size: int) -> None:
    assert feed(data, size) == NAME


def without_name() -> bytes:
    return records(message([extension(GREASE, b""), POST_QUANTUM]))


ONE, TWO = server_name(b"allowed.test"), server_name(b"other.test")

BAD = [
    pytest.param(without_name(), "no-name", id="no server_name"),
    pytest.param(openssl(None), "no-name", id="OpenSSL without a name"),
    pytest.param(records(message(None)), "no-name", id="no extensions"),
    pytest.param(records(message([])), "no-name", id="an empty list of extensions"),
    pytest.param(hello(b""), "malformed", id="an empty name"),
    pytest.param(hello(b"127.0.0.1"), "address", id="an IPv4 address"),
    pytest.param(hello(b"[::1]"), "address", id="an IPv6 address in brackets"),
    pytest.param(hello(b"[allowed.test]"), "address", id="a name in brackets"),
    pytest.param(hello(b"2130706433"), "address", id="an address as one number"),
    pytest.param(hello(b"a" * 300), "malformed", id="300 bytes"),
    pytest.param(hello(b"allowed.test\0.other.test"), "malformed", id="an embedded NUL"),
    pytest.param(hello(b".allowed.test"), "malformed", id="a leading dot"),
    pytest.param(hello(b"allowed.test.."), "malformed", id="two trailing dots"),
    pytest.param(hello(b"*"), "malformed", id="a star"),
    pytest.param(hello("bücher.test".encode()), "malformed", id="raw UTF-8"),
    pytest.param(records(message([server_name(b"allowed.test", b"other.test")])), "names-disagree", id="two names"),
    pytest.param(records(message([server_name(b"other.test", b"allowed.test")])), "names-disagree", id="two, swapped"),
    pytest.param(records(message([ONE, TWO])), "names-disagree", id="two extensions"),
    pytest.param(records(message([TWO, ONE])), "names-disagree", id="two extensions, swapped"),
    pytest.param(records(message([ONE, ONE])), "names-disagree", id="the same extension twice"),
    pytest.param(records(message([extension(0, b"")])), "malformed", id="an empty extension"),
    pytest.param(records(message([extension(0, b"\0\0")])), "malformed", id="an empty list of names"),
    pytest.param(records(message([server_name(b"allowed.test", kind=1)])), "malformed", id="another kind of name"),
    pytest.param(
        records(message([extension(0, ONE[4:] + b"\0")])), "malformed", id="a byte behind the list of names"
    ),
    pytest.param(
        records(message([extension(0, b"\0\x20" + ONE[6:])])), "malformed", id="a list of names past its extension"
    ),
    pytest.param(
        records(message([extension(0, b"\0\x0f\0\0\x30allowed.test")])), "malformed", id="a name past its list"
    ),
    pytest.param(records(message([ONE, b"\0\x10\xff\xff"])), "malformed", id="an extension past the end"),
    pytest.param(records(message([ONE, b"\0"])), "malformed", id="half an extension"),
    pytest.param(records(message([ONE], suites=b"")), "malformed", id="no cipher suites"),
    pytest.param(records(message([ONE], suites=b"abc")), "malformed", id="half a cipher suite"),
    pytest.param(records(message([ONE], session=b"s" * 33)), "malformed", id="a session id of 33"),
    pytest.param(records(message([ONE]) + b"\x01"), "malformed", id="something behind it in its record"),
    pytest.param(records(message([ONE]) * 2), "malformed", id="a second hello in its record"),
    pytest.param(records(b"\x02" + message([ONE])[1:]), "malformed", id="a server's hello"),
    pytest.param(b"\x16\x03\x01\0\0", "malformed", id="an empty record"),
    pytest.param(records(b"\x01\0") + b"\x16\x03\x01\0\0", "malformed", id="an empty record within"),
    pytest.param(b"\x16\x03\x01\x40\x01", "malformed", id="a record over 2^14"),
    pytest.param(records(b"\x01\0") + b"\x15\x03\x01\0\x02\x01\0", "malformed", id="an alert within"),
    pytest.param(b"\x16\x02\0\0\x05hello", "malformed", id="a version there is not"),
    pytest.param(b"\x16\x03\x01\0\x04\x01\xff\xff\xff", "malformed", id="a length of 2^24"),
    pytest.param(records(b"\x01" + vector(3, b"\0" * MAX_HELLO)), "malformed", id="over 64 KiB"),
    pytest.param(records(b"\x01\0\xff\0" + b"\0" * 5_000, size=1), "malformed", id="too many records"),
]


@pytest.mark.parametrize(("data", "rule"), BAD)
@pytest.mark.parametrize("size", [1 << 20, 1], ids=["at once", "by one byte"])
def test_what_gives_no_name_to_go_by_says_why(data: bytes, rule: str, size: int) -> None:
    outcome = feed(data, size)
    assert isinstance(outcome, Bad), outcome
    assert outcome.rule == rule and outcome.why.endswith(".")


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"\x80\x2e\x01\x03\x01", b"\x15\x03\x01", b"SSH-2.0", b"\0"])
def test_what_does_not_begin_as_tls_is_not_tls(data: bytes) -> None:
    assert feed(data) == NotTls()
    assert feed(data, 1) == NotTls()


def test_a_name_with_an_underscore_is_a_name() -> None:
    assert feed(hello(b"_a.allowed.test")) == ServerName("_a.allowed.test")


def test_the_answer_does_not_change_once_given() -> None:
    reader = Hello()
    assert reader.feed(hello()) == NAME
    assert reader.feed(hello(b"other.test")) == NAME
    assert reader.feed(b"\xff" * 100) == NAME


@pytest.mark.parametrize("data", GOOD[:3] + GOOD[6:7])
def test_what_is_asked_for_is_never_more_than_there_is(data: bytes) -> None:
    # Who waits for exactly the bytes asked for gets the name, without one byte too many.
    reader, at = Hello(), 0
    outcome = reader.feed(b"")
    while isinstance(outcome, NeedMore):
        assert outcome.bytes > 0
        assert at + outcome.bytes <= len(data)
        wanted = outcome.bytes
        outcome = reader.feed(data[at : at + wanted])
        at += wanted
    assert outcome == NAME and at == len(data)


def test_every_cut_short_hello_waits_and_no_more() -> None:
    whole = hello()
    for cut in range(len(whole)):
        assert isinstance(feed(whole[:cut]), NeedMore) or cut == 0


def test_an_endless_hello_costs_a_bounded_room_and_time() -> None:
    endless = records(b"\x01\0\xff\xfb" + b"\0" * MAX_HELLO, size=2)
    tracemalloc.start()
    began = time.monotonic()
    readers = []
    for _ in range(10):
        reader = Hello()
        outcome: Outcome = NeedMore(5)
        for at in range(0, len(endless), 4096):
            outcome = reader.feed(endless[at : at + 4096])
            if not isinstance(outcome, NeedMore):
                break
        assert isinstance(outcome, Bad)
        assert at <= MAX_RECORDS * 7 + 4096
        readers.append(reader)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20           # what was read goes when the answer is there
    assert time.monotonic() - began < 20
