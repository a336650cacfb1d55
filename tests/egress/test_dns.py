"""The DNS answerer's core: packets in, answers out. Answers are read with dnslib, odd queries built by hand; at the end
real stub resolvers ask it.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import dnslib
import pytest
from dnslib import EDNS0, QTYPE, DNSRecord, EDNSOption
from hypothesis import given, settings
from hypothesis import strategies as st

from egress import dns
from egress.dns import Address, Empty, Failure, Framer, Ignore, NoSuchName, Question, Reply, read, write
from tests.conftest import counts
from tests.daemon import ROOT
from tests.egress.fuzz import dns_packets

ALLOWED = "allowed.test"


def query(name: str = ALLOWED, kind: str = "A", *records: object) -> bytes:
    asked = DNSRecord.question(name, kind)
    for record in records:
        asked.add_ar(record)
    return bytes(asked.pack())


def header(id_: int = 7, flags: int = 0x0100, counts_: tuple[int, int, int, int] = (1, 0, 0, 0)) -> bytes:
    return struct.pack("!6H", id_, flags, *counts_)


def labels(*parts: bytes) -> bytes:
    return b"".join(bytes([len(part)]) + part for part in parts) + b"\0"


IN_A = struct.pack("!2H", 1, 1)
GOOD = header() + labels(b"allowed", b"test") + IN_A
OPT = b"\0" + struct.pack("!2HIH", 41, 4096, 0, 0)
OPT_V1 = b"\0" + struct.pack("!2HIH", 41, 4096, 1 << 16, 0)


def asked(packet: bytes) -> Question:
    found = read(packet)
    assert isinstance(found, Question), found
    return found


def code(reply: object) -> int:
    assert isinstance(reply, Reply), reply
    return DNSRecord.parse(reply.data).header.rcode


def test_an_allowed_name_gets_its_address_for_half_a_minute() -> None:
    found = asked(GOOD)
    assert (found.name, found.type) == (ALLOWED, dns.A_TYPE)
    answer = DNSRecord.parse(write(found, Address("198.18.0.9")))
    assert (answer.header.id, answer.header.qr, answer.header.rcode) == (7, 1, 0)
    assert (answer.header.rd, answer.header.ra, answer.header.aa, answer.header.tc, answer.header.ad) == (1, 1, 0, 0, 0)
    (record,) = answer.rr
    assert (str(record.rname), str(record.rdata), record.ttl) == ("allowed.test.", "198.18.0.9", 30)
    assert not answer.ar


OTHER_TYPES = "AAAA HTTPS SVCB TXT MX SRV NS SOA PTR ANY CNAME AXFR"


@pytest.mark.parametrize("kind", OTHER_TYPES.split())
def test_every_other_type_of_an_allowed_name_is_empty(kind: str) -> None:
    found = asked(query(kind=kind))
    for outcome in (Address("198.18.0.9"), Empty()):
        answer = DNSRecord.parse(write(found, outcome))
        assert (answer.header.rcode, answer.rr) == (0, [])
        assert answer.q.qtype == getattr(QTYPE, kind)


@pytest.mark.parametrize(
    ("outcome", "rcode", "with_soa"),
    [
        pytest.param(NoSuchName(), 3, True, id="a denied name does not exist"),
        pytest.param(Empty(), 0, True, id="an empty answer"),
        pytest.param(Failure(), 2, False, id="a look-up that failed is SERVFAIL"),
    ],
)
def test_a_no_is_forgotten_within_a_second(outcome: dns.Outcome, rcode: int, with_soa: bool) -> None:
    answer = DNSRecord.parse(write(asked(query("other.test")), outcome))
    assert (answer.header.rcode, answer.rr, len(answer.auth)) == (rcode, [], int(with_soa))
    for record in answer.auth:
        assert record.rtype == QTYPE.SOA
        # RFC 2308 §5: the smaller of the two.
        assert min(record.ttl, record.rdata.times[4]) <= 1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param((b"aLLowed", b"TeSt"), id="0x20"),
        pytest.param((b"ALLOWED", b"TEST"), id="upper case"),
        pytest.param((b"allowed", b"test"), id="as it is listed"),
        pytest.param((b"\xff\x00", b"t\\est"), id="bytes that no host name has"),
        pytest.param((b"a.b", b"test"), id="a dot within a label"),
        pytest.param((), id="the root"),
    ],
)
def test_the_question_goes_back_byte_for_byte(name: tuple[bytes, ...]) -> None:
    question = labels(*name) + IN_A
    found = asked(header() + question)
    for outcome in (Address("198.18.0.9"), Empty(), NoSuchName(), Failure()):
        answer = write(found, outcome)
        assert answer[12 : 12 + len(question)] == question
        assert answer[4:6] == b"\0\1"


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        pytest.param((b"aLLowed", b"TeSt"), ALLOWED, id="case is folded"),
        pytest.param((b"xn--bcher-kva", b"test"), "xn--bcher-kva.test", id="A-labels"),
        pytest.param((b"_dmarc", b"test"), "_dmarc.test", id="underscore"),
        pytest.param((b"allowed", b"test", b"corp", b"test"), "allowed.test.corp.test", id="with a search domain"),
        pytest.param((b"allowed.test",), None, id="a dot in a label makes no second label"),
        pytest.param((b"allowed", b"test."), None, id="nor at its end"),
        pytest.param((b"b\xc3\xbccher", b"test"), None, id="raw UTF-8"),
        pytest.param((b"allowed\0", b"test"), None, id="a zero byte"),
        pytest.param((b"127", b"0", b"0", b"1"), None, id="an address"),
        pytest.param((b"2130706433",), None, id="a number"),
        pytest.param((b"*", b"test"), None, id="a wildcard"),
        pytest.param((), None, id="the root"),
    ],
)
def test_names(parts: tuple[bytes, ...], name: str | None) -> None:
    found = asked(header() + labels(*parts) + IN_A)
    assert found.name == name
    assert found.shown.isprintable() and found.shown.isascii() and len(found.shown) <= 1024


@pytest.mark.parametrize(
    "packet",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\0", id="one byte"),
        pytest.param(GOOD[:11], id="half a header"),
        pytest.param(header(flags=0x8180) + GOOD[12:], id="an answer"),
        pytest.param(header(flags=0xFFFF, counts_=(65535,) * 4), id="an answer of rubbish"),
        pytest.param(header(), id="the header only, a question announced"),
        pytest.param(header() + b"\x07allow", id="a name cut short"),
        pytest.param(header() + b"\x07allowed\x04test", id="a name without its end"),
        pytest.param(header() + labels(b"allowed") + b"\0\1\0", id="a class cut short"),
        pytest.param(header() + b"\xc0\x0c" + IN_A, id="a pointer to itself"),
        pytest.param(header() + b"\x07allowed\xc0\x0c" + IN_A, id="a pointer back"),
        pytest.param(header() + b"\xc0\xff" + IN_A, id="a pointer out of the packet"),
        pytest.param(header() + b"\x40" + b"a" * 64 + b"\0" + IN_A, id="a label of 64"),
        pytest.param(header() + b"\x80a\0" + IN_A, id="a label type nobody defined"),
        pytest.param(header() + labels(*[b"a" * 63] * 3, b"a" * 62) + IN_A, id="a name of 256 bytes"),
        pytest.param(GOOD + bytes(dns.LONGEST_QUERY), id="a packet no resolver sends"),
    ],
)
def test_silence(packet: bytes) -> None:
    assert read(packet) == Ignore()
    assert isinstance(read(GOOD), Question)


@pytest.mark.parametrize(
    ("packet", "rcode"),
    [
        pytest.param(header(counts_=(0, 0, 0, 0)), 1, id="no question"),
        pytest.param(header(counts_=(2, 0, 0, 0)) + GOOD[12:] * 2, 2, id="two questions"),
        pytest.param(header(counts_=(65535, 0, 0, 0)) + GOOD[12:], 2, id="65,535 questions"),
        pytest.param(header(counts_=(1, 1, 0, 0)) + GOOD[12:], 1, id="a query with an answer in it"),
        pytest.param(GOOD + b"\0", 1, id="a byte too much"),
        pytest.param(header(counts_=(1, 0, 0, 1)) + GOOD[12:], 1, id="an additional record that is not there"),
        pytest.param(header(counts_=(1, 0, 0, 65535)) + GOOD[12:] + OPT * 9, 1, id="65,535 additional records"),
        pytest.param(header(counts_=(1, 0, 0, 2)) + GOOD[12:] + OPT * 2, 1, id="two OPT records"),
        pytest.param(header(counts_=(1, 0, 0, 1)) + GOOD[12:] + b"\1a" + OPT, 1, id="an OPT record with a name"),
        pytest.param(header(counts_=(1, 0, 0, 1)) + GOOD[12:] + OPT[:-1] + b"\x09", 1, id="options cut short"),
        pytest.param(header() + labels(b"version", b"bind") + struct.pack("!2H", 16, 3), 4, id="class CHAOS"),
        pytest.param(header() + labels(b"allowed", b"test") + struct.pack("!2H", 1, 255), 4, id="class ANY"),
        pytest.param(header(flags=2 << 11) + GOOD[12:], 4, id="a status request"),
        pytest.param(header(flags=4 << 11) + GOOD[12:], 4, id="a notify"),
        pytest.param(header(flags=5 << 11) + GOOD[12:], 4, id="an update"),
    ],
)
def test_errors_that_need_no_decision(packet: bytes, rcode: int) -> None:
    reply = read(packet)
    assert code(reply) == rcode
    assert isinstance(reply, Reply)
    answer = DNSRecord.parse(reply.data).header
    assert (answer.id, answer.qr, answer.opcode) == (7, 1, packet[2] >> 3 & 15)
    assert len(reply.data) <= len(packet)


def test_edns_is_answered_and_unknown_options_are_passed_over() -> None:
    option = EDNSOption(65001, b"x" * 40)
    found = asked(query(ALLOWED, "A", EDNS0(flags="do", udp_len=4096, opts=[option])))
    answer = DNSRecord.parse(write(found, Address("198.18.0.9")))
    (opt,) = answer.ar
    assert (opt.rtype, opt.rclass, opt.edns_ver, opt.edns_do, opt.rdata) == (QTYPE.OPT, dns.UDP_SIZE, 0, 1, [])
    assert len(answer.rr) == 1


def test_a_record_before_the_opt_is_passed_over() -> None:
    other = labels(b"key") + struct.pack("!2HIH", 250, 255, 0, 3) + b"abc"
    found = asked(header(counts_=(1, 0, 0, 2)) + GOOD[12:] + other + OPT)
    assert found.edns and not found.dnssec_ok


def test_a_version_of_edns_we_do_not_know_is_badvers() -> None:
    reply = read(header(counts_=(1, 0, 0, 1)) + GOOD[12:] + OPT_V1)
    assert isinstance(reply, Reply)
    answer = DNSRecord.parse(reply.data)
    (opt,) = answer.ar
    assert (opt.edns_rcode << 4 | answer.header.rcode, opt.edns_ver) == (16, 0)
    assert answer.q.qname == ALLOWED and not answer.rr


def test_every_answer_fits_into_the_smallest_packet() -> None:
    longest = labels(*[b"a" * 63] * 3, b"a" * 61)
    assert len(longest) == 255
    found = asked(header(counts_=(1, 0, 0, 1)) + longest + IN_A + OPT)
    assert found.name is not None
    for outcome in (Address("198.18.0.9"), Empty(), NoSuchName(), Failure()):
        assert len(write(found, outcome)) <= 512


# TCP


@pytest.mark.parametrize("step", [1, 2, 3, 7, 4096], ids=lambda step: f"{step} at a time")
def test_two_queries_on_one_connection(step: int) -> None:
    second = query("other.test")
    stream = dns.framed(GOOD) + dns.framed(second)
    framer = Framer()
    packets: list[bytes] = []
    for at in range(0, len(stream), step):
        packets += framer.feed(stream[at : at + step])
    assert packets == [GOOD, second]
    assert not framer.broken


def test_a_length_no_query_has_ends_the_connection() -> None:
    framer = Framer()
    assert framer.feed(dns.framed(GOOD) + b"\xff\xff" + bytes(100_000)) == [GOOD]
    assert framer.broken
    assert framer.feed(dns.framed(GOOD)) == []


def test_what_is_held_of_a_connection_is_bounded() -> None:
    framer = Framer()
    for _ in range(200):
        framer.feed(struct.pack("!H", dns.LONGEST_QUERY) + b"a" * 1000)
    assert len(framer._held) <= dns.LONGEST_QUERY + 2


def test_empty_frames_are_packets_nobody_answers() -> None:
    assert [read(packet) for packet in Framer().feed(b"\0\0" * 3)] == [Ignore()] * 3


# rubbish


def test_random_packets(seed: random.Random) -> None:
    for _ in range(counts(5_000, 20_000)):
        dns_packets.one(seed.randbytes(seed.randrange(80)))
    for _ in range(counts(5_000, 20_000)):
        packet = bytearray(GOOD + OPT)
        packet[11] = 1
        for _ in range(seed.randrange(1, 4)):
            packet[seed.randrange(len(packet))] = seed.randrange(256)
        dns_packets.one(bytes(packet[: seed.randrange(len(packet) + 1)] if seed.randrange(2) else packet))
    dns_packets.one(GOOD)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=63), max_size=6), st.integers(0, 65535), st.binary(max_size=40))
def test_any_name_and_any_type(parts: list[bytes], kind: int, rest: bytes) -> None:
    dns_packets.one(header(flags=0) + labels(*parts) + struct.pack("!2H", kind, 1))
    dns_packets.one(header(flags=0, counts_=(1, 0, 0, 1)) + labels(*parts) + struct.pack("!2H", kind, 1) + rest)


def test_the_largest_of_rubbish_is_read_quickly() -> None:
    one = b"\0" + struct.pack("!2HIH", 1, 1, 0, 0)
    packet = header(counts_=(1, 0, 0, 65535)) + GOOD[12:] + one * 367
    assert len(packet) <= dns.LONGEST_QUERY
    started = time.process_time()
    for _ in range(10):
        assert code(read(packet)) == 1
    assert time.process_time() - started < 1


def test_dnslib_is_what_answers_are_read_with() -> None:
    """The control: a changed byte of an answer is seen by the reader these tests rely on."""
    answer = bytearray(write(asked(GOOD), Address("198.18.0.9")))
    answer[-1] ^= 1
    assert str(DNSRecord.parse(bytes(answer)).rr[0].rdata) == "198.18.0.8"
    with pytest.raises(dnslib.DNSError):
        DNSRecord.parse(bytes(answer[:-2]))


# real stub resolvers, over UDP and TCP

SETTINGS = {
    "as our image has it": "",
    "with EDNS": "options edns0",
    "over TCP": "options use-vc",
    "with a search list": "search corp.test;options ndots:5",
}
AT_ONCE_S = 1.9  # none of them asks again or elsewhere before two seconds have passed


class Stub:
    def __init__(self, kind: str, options: str) -> None:
        self.kind = kind
        command = ["unshare", "--mount", "--net", "--propagation", "private"]
        command += [sys.executable, "-m", "tests.egress.stub_rig", kind, options]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def allow(self, name: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"allow {name}\n")

    def look_up(self, name: str) -> tuple[str, float, list[str]]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(name + "\n")
        found, seconds, seen = self.process.stdout.readline().rstrip("\n").split(" ")
        return found, float(seconds), seen.split(",")

    def end(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        assert self.process.wait(10) == 0
        self.process.stdout.close()


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda name: name.replace(" ", "-"))
def options(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["glibc", "musl", "c-ares"])
def stub(request: pytest.FixtureRequest, options: str) -> Iterator[Stub]:
    if os.geteuid() != 0:
        pytest.skip("needs root: a mount and a network namespace of its own")
    needed = {"musl": "musl-gcc", "c-ares": "node"}.get(request.param)
    if needed and not shutil.which(needed):
        pytest.skip(f"{needed} is not installed")
    running = Stub(request.param, SETTINGS[options])
    assert running.look_up("allowed.test")[0] == "198.18.0.1"  # what it loads at its first question is loaded
    yield running
    running.end()


def test_a_stub_resolver_finds_an_allowed_name_in_any_case(stub: Stub) -> None:
    found, seconds, seen = stub.look_up("aLLoWed.TeSt")
    assert found == "198.18.0.1"
    assert seconds < AT_ONCE_S, seen


def test_a_stub_resolver_is_told_at_once_that_a_name_is_denied(stub: Stub) -> None:
    found, seconds, seen = stub.look_up("other.test")
    assert found == "none"
    assert seconds < AT_ONCE_S, "nothing was asked twice or waited for"
    assert len(seen) <= 4


def test_a_stub_resolver_gets_there_by_each_of_its_ways(stub: Stub, options: str) -> None:
    found, seconds, seen = stub.look_up("allowed.test")
    assert found == "198.18.0.1"
    assert seconds < AT_ONCE_S
    if stub.kind == "glibc":
        # The controls: what was asked for was done.
        assert (seen[0] == "allowed.test.corp.test/udp") == (options == "with a search list")
        assert (seen[0] == "allowed.test/tcp") == (options == "over TCP")


def test_a_name_that_is_allowed_later_is_found_by_the_same_process(stub: Stub) -> None:
    assert stub.look_up("new.test")[0] == "none"
    stub.allow("new.test")
    end = time.monotonic() + 20
    while (found := stub.look_up("new.test")[0]) == "none" and time.monotonic() < end:
        time.sleep(0.05)
    assert found == "198.18.0.2"
