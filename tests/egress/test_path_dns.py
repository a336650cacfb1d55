"""Names through the whole path: what a guest's resolver sees, and that nothing it asks goes anywhere."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from dnslib import DNSRecord

from tests.egress.rig import PLAN, Rig, Sandbox, asked, hello_passes, idle, looked_up, policy, query, settle
from tests.world.origin import quiet

A, TXT, AAAA, SRV, HTTPS, ANY = 1, 16, 28, 33, 65, 255


@pytest.fixture(scope="module")
def sandbox(rig: Rig) -> Iterator[Sandbox]:
    made = rig.sandbox(policy("allowed.test", "*.wild.test", "missing.test", allow_tcp=["db.test:5432"]))
    yield made
    made.close()


def test_each_allowed_name_has_an_address_of_its_own_and_keeps_it(sandbox: Sandbox) -> None:
    names = ("allowed.test", "www.wild.test", "db.test", "missing.test")
    first = [looked_up(sandbox, name) for name in names]
    assert len(set(first)) == len(names) and all(address.startswith("198.18.") for address in first)
    assert [looked_up(sandbox, name) for name in names] == first
    lines = sandbox.names.read_text().splitlines()
    assert set(lines) >= {f"{address} {name}" for address, name in zip(first, names, strict=True)}


@pytest.mark.parametrize("name", ["other.test", "sub.allowed.test", "wild.test", "notallowed.test", "x" * 60 + ".test"])
@pytest.mark.parametrize("kind", [A, TXT, AAAA, HTTPS, ANY])
def test_any_other_name_does_not_exist_and_says_so_at_once(sandbox: Sandbox, name: str, kind: int) -> None:
    begun = time.monotonic()
    answer = DNSRecord.parse(asked(sandbox, query(name, kind)))
    assert time.monotonic() - begun < 4, "a stub resolver asks again after five seconds"
    assert answer.header.rcode == 3 and not answer.rr
    assert all(record.ttl <= 1 for record in answer.auth)


@pytest.mark.parametrize("kind", [TXT, AAAA, SRV, HTTPS, ANY])
def test_an_allowed_name_has_nothing_but_an_address(sandbox: Sandbox, kind: int) -> None:
    answer = DNSRecord.parse(asked(sandbox, query("allowed.test", kind)))
    assert answer.header.rcode == 0 and not answer.rr


def test_a_refused_name_is_told_with_its_name(rig: Rig, sandbox: Sandbox) -> None:
    asked(sandbox, query("told.other.test"))
    event = rig.wait_event(lambda event: event.name == "told.other.test")
    assert (event.kind, event.rule, event.by, event.port) == ("denied", "not-listed", "dns", 0)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mzxw6ytboi5dcmrtgq2tmnzyhe.other.test", id="below a name not listed"),
        pytest.param("mzxw6ytboi5dcmrtgq2tmnzyhe.allowed.test", id="below an allowed name"),
        pytest.param("mzxw6ytboi5dcmrtgq2tmnzyhe.wild.test", id="below a wildcard"),
        pytest.param("allowed.test", id="an allowed name"),
    ],
)
@pytest.mark.parametrize("kind", [A, TXT])
@pytest.mark.parametrize("where", [PLAN.host_address, "8.8.8.8", "45.90.7.53", "198.18.0.1"])
def test_nothing_that_is_asked_leaves(rig: Rig, sandbox: Sandbox, name: str, kind: int, where: str) -> None:
    idle(rig)
    with quiet(rig.world.origin) as seen, rig.world.uplink() as uplink:
        asked(sandbox, query(name, kind), where)
    assert seen.queries == []
    assert not [packet for packet in uplink.outgoing() if packet.protocol in ("udp", "tcp")]


def test_the_case_of_a_question_comes_back_as_it_was(sandbox: Sandbox) -> None:
    question = query("aLLowed.TeSt")
    answer = asked(sandbox, question)
    assert answer[12 : len(question)] == question[12:]
    assert DNSRecord.parse(answer).rr


def test_tcp_in_two_pieces_and_two_questions_on_a_connection(sandbox: Sandbox) -> None:
    packet = query("allowed.test")
    framed = struct.pack(">H", len(packet)) + packet
    with sandbox.dial("8.8.8.8", 53) as stream:
        stream.sendall(framed[:1])
        time.sleep(0.05)
        stream.sendall(framed[1:] + framed)
        for _ in range(2):
            (size,) = struct.unpack(">H", exactly(stream, 2))
            assert str(DNSRecord.parse(exactly(stream, size)).rr[0].rdata) == looked_up(sandbox, "allowed.test")


def test_every_question_of_a_stream_is_answered_however_many_come_at_once(sandbox: Sandbox) -> None:
    packet = query("allowed.test")
    with sandbox.dial("8.8.8.8", 53) as stream:
        stream.sendall((struct.pack(">H", len(packet)) + packet) * 200)
        for _ in range(200):
            (size,) = struct.unpack(">H", exactly(stream, 2))
            assert DNSRecord.parse(exactly(stream, size)).rr


def test_edns_and_a_version_nobody_speaks(sandbox: Sandbox) -> None:
    def with_opt(version: int) -> bytes:
        packet = bytearray(query("allowed.test"))
        packet[11] = 1
        option = struct.pack(">HH4s", 65001, 4, b"what")
        return bytes(packet) + b"\0" + struct.pack(">HHBBHH", 41, 1232, 0, version, 0, len(option)) + option

    good = DNSRecord.parse(asked(sandbox, with_opt(0)))
    assert good.header.rcode == 0 and good.rr
    bad = asked(sandbox, with_opt(1))
    assert DNSRecord.parse(bad).header.rcode == 0 and DNSRecord.parse(bad).ar[0].ttl >> 24 == 1  # BADVERS is 16


def test_a_name_that_becomes_allowed_works_at_once(rig: Rig) -> None:
    made = rig.sandbox(policy("allowed.test"))
    try:
        assert looked_up(made, "second.test") == "NXDOMAIN"
        made.update(policy("allowed.test", "second.test"))
        assert looked_up(made, "second.test").startswith("198.18.")
        made.update(policy("allowed.test"))
        assert looked_up(made, "second.test") == "NXDOMAIN"
    finally:
        made.close()


def test_rubbish_is_survived_and_answers_are_never_answered(rig: Rig, sandbox: Sandbox) -> None:
    seed = random.randrange(1 << 32)
    rubbish = random.Random(seed)
    good = query("allowed.test")
    with sandbox.datagrams() as stream:
        for number in range(3000):
            packet = bytearray(good if number % 2 else rubbish.randbytes(rubbish.randrange(0, 80)))
            for _ in range(rubbish.randrange(4)):
                if packet:
                    packet[rubbish.randrange(len(packet))] = rubbish.randrange(256)
            stream.sendto(packet, (PLAN.host_address, 53))
    # What came while its socket was full is lost, a question of ours too.
    settle(lambda: answers(sandbox, good))
    assert looked_up(sandbox, "allowed.test").startswith("198.18."), f"seed {seed}"
    answer = bytearray(good)
    answer[2] |= 0x80
    with sandbox.datagrams() as stream:
        stream.settimeout(0.5)
        stream.sendto(answer, (PLAN.host_address, 53))
        with pytest.raises(TimeoutError):
            stream.recv(4096)
    assert "Traceback" not in rig.log, f"seed {seed}"


def test_one_sandbox_that_floods_does_not_hold_up_another(rig: Rig, sandbox: Sandbox) -> None:
    hog = rig.sandbox(policy("allowed.test"))
    try:
        with hog.datagrams() as stream:
            for _ in range(3000):
                stream.sendto(query("other.test"), (PLAN.host_address, 53))
            begun = time.monotonic()
            assert looked_up(sandbox, "allowed.test").startswith("198.18.")
            assert time.monotonic() - begun < 4, "a stub resolver asks again after five seconds"
    finally:
        hog.close()


def test_idle_tcp_connections_go_and_there_are_only_so_many(sandbox: Sandbox) -> None:
    streams = [sandbox.dial(PLAN.host_address, 53) for _ in range(40)]
    try:
        assert looked_up(sandbox, "allowed.test").startswith("198.18.")
        packet = query("allowed.test")
        with sandbox.dial(PLAN.host_address, 53) as stream:
            stream.sendall(struct.pack(">H", len(packet)) + packet)
            assert exactly(stream, 2)
    finally:
        for stream in streams:
            stream.close()


def test_a_sandbox_has_so_many_names_in_its_life(rig: Rig) -> None:
    made = rig.sandbox(policy("*.wild.test", "allowed.test"))
    try:
        with made.datagrams() as stream:
            for number in range(4096):
                stream.sendto(query(f"n{number}.wild.test"), (PLAN.host_address, 53))
                assert stream.recv(512)
        assert looked_up(made, "one-more.wild.test") == "NXDOMAIN"
        event = rig.wait_event(lambda event: event.name == "one-more.wild.test")
        assert event.rule == "too-many-names"
        assert looked_up(made, "n7.wild.test").startswith("198.18.")
        # On the ports of the web the name on the wire is enough.
        assert hello_passes(made, "allowed.test")
    finally:
        made.close()


def test_names_outlive_the_process_that_gave_them(rig: Rig) -> None:
    made = rig.sandbox(policy("*.wild.test"))
    try:
        before = {name: looked_up(made, name) for name in ("a.wild.test", "b.wild.test")}
        rig.call("remove", sandbox=made.id)
        with made.names.open("ab") as file:
            file.write(b"198.18.0.3 torn.wil")

        def added() -> bool:
            with suppress(OSError):  # the relay's thread closes the old socket in its own time
                made.add()
                return True
            return False

        settle(added)
        assert looked_up(made, "c.wild.test") not in before.values()
        assert {name: looked_up(made, name) for name in before} == before
    finally:
        made.close()


def answers(sandbox: Sandbox, packet: bytes) -> bool:
    with sandbox.datagrams() as stream:
        stream.settimeout(0.5)
        stream.sendto(packet, (PLAN.host_address, 53))
        try:
            return bool(stream.recv(4096))
        except TimeoutError:
            return False


def exactly(stream: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = stream.recv(size - len(data))
        assert piece
        data += piece
    return data
