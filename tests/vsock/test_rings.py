"""A hostile guest: rings that break the rules, packets that break the rules.

The device outlives all of them, writes nowhere but where it may (every `Guest` checks that on leaving), and serves the
next driver or the other connections.
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vsock.peer import (
    CREDIT_REQUEST,
    CREDIT_UPDATE,
    F_EVENT_IDX,
    FEATURES,
    GUEST_BASE,
    GUEST_CID,
    HEADER,
    INDIRECT,
    MEMORY_BYTES,
    NEXT,
    NO_RCV,
    NO_SEND,
    REQUEST,
    RESPONSE,
    RING_AT,
    RST,
    RW,
    RX,
    RX_BUFFER_BYTES,
    RX_BUFFERS,
    SET_MEM_TABLE,
    SET_VRING_ERR,
    SHUTDOWN,
    TX,
    TX_BUFFER_BYTES,
    TX_BUFFER_COUNT,
    TX_BUFFERS,
    WINDOW,
    WRITE,
    Guest,
    Memfd,
    booted,
    closed,
    table,
)

Act = Callable[[Guest], None]
END = GUEST_BASE + MEMORY_BYTES
AT = GUEST_BASE + TX_BUFFERS + 17 * TX_BUFFER_BYTES  # a buffer of ours that Guest.send will not come to
AT_OFFSET = AT - GUEST_BASE
RX_SLOT = GUEST_BASE + RX_BUFFERS


# --- rings


def tx(*descriptors: tuple[int, int, int, int], head: int = 100) -> Act:
    def act(guest: Guest) -> None:
        guest.send_raw(list(descriptors), head)

    return act


def tx_head(head: int) -> Act:
    def act(guest: Guest) -> None:
        guest.offer(TX, head)
        guest.ring_bell(TX)

    return act


def avail_jump(queue: int, by: int) -> Act:
    def act(guest: Guest) -> None:
        guest.set_avail(queue, guest.avail[queue] + by & 0xFFFF)
        guest.ring_bell(queue)
        if queue == RX:  # looked at only when there is something to give
            guest.send(REQUEST, 1, 1)

    return act


def rx(*descriptors: tuple[int, int, int, int], head: int = 0) -> Act:
    """The guest takes no more packets, then offers only this chain, and provokes a packet."""

    def act(guest: Guest) -> None:
        for number, (address, size, flags, following) in enumerate(descriptors):
            guest.descriptor(RX, head + number, address, size, flags, following)
        guest.offer(RX, head)
        guest.ring_bell(RX)
        guest.send(REQUEST, 1, 1)

    return act


def begin_anew(guest: Guest) -> None:
    guest.stop()
    guest.clear_rings()
    guest.start(greet=False)
    guest.offer_rx()
    guest.still_serves()


def five_gibibytes(guest: Guest) -> None:
    """In five descriptors, all of them inside memory."""
    at, size = 1 << 40, 1 << 30
    sparse = Memfd(size)
    wire = table(guest.region(), (at, size, at, 0))
    guest.frontend.done(SET_MEM_TABLE, wire, (guest.memfd.fd, sparse.fd))
    sparse.close()
    guest.send_raw([(AT, 44, NEXT, 101), *((at, size, NEXT if n < 105 else 0, n + 1) for n in range(101, 106))])


TX_BROKEN = {
    "a head beyond the table": tx_head(128),
    "the largest head": tx_head(0xFFFF),
    "a next beyond the table": tx((AT, 44, NEXT, 128)),
    "the largest next": tx((AT, 44, NEXT, 0xFFFF)),
    "a chain that is its own next": tx((AT, 44, NEXT, 100)),
    "a chain that goes round": tx((AT, 44, NEXT, 101), (AT, 0, NEXT, 102), (AT, 0, NEXT, 100)),
    "a chain of empty descriptors that goes round": tx((AT, 0, NEXT, 101), (AT, 0, NEXT, 100)),
    "a buffer before memory": tx((GUEST_BASE - 4096, 44, 0, 0)),
    "a buffer that begins before memory": tx((GUEST_BASE - 4, 44, 0, 0)),
    "a buffer beyond memory": tx((END, 44, 0, 0)),
    "a buffer that ends beyond memory": tx((END - 43, 44, 0, 0)),
    "a buffer of 4 GiB": tx((AT, 0xFFFFFFFF, 0, 0)),
    "lengths that add up beyond 32 bits": five_gibibytes,
    "an address that overflows": tx(((1 << 64) - 16, 44, 0, 0)),
    "the last address": tx(((1 << 64) - 1, 1, 0, 0)),
    "the null address": tx((0, 44, 0, 0)),
    "a payload outside memory": tx((AT, 44, NEXT, 101), (END, 16, 0, 0)),
    "a buffer for writing": tx((AT, 44, WRITE, 0)),
    "a payload for writing": tx((AT, 44, NEXT, 101), (AT + 44, 16, WRITE, 0)),
    "an indirect table": tx((AT, 48, INDIRECT, 0)),
    "more new heads than the ring holds": avail_jump(TX, 129),
    "half the number of heads there are": avail_jump(TX, 0x8000),
    "an index that goes back": avail_jump(TX, 0xFFFF),
}
RX_BROKEN = {
    "a head beyond the table": rx(head=128),
    "a chain that is its own next": rx((RX_SLOT, 8, WRITE | NEXT, 0)),
    "a buffer for reading": rx((RX_SLOT, 4096, 0, 0)),
    "a header for writing and a payload for reading": rx((RX_SLOT, 44, WRITE | NEXT, 1), (RX_SLOT + 44, 4096, 0, 0)),
    "a buffer outside memory": rx((END, 4096, WRITE, 0)),
    "a buffer that ends beyond memory": rx((END - 64, 128, WRITE, 0)),
    "a buffer before memory": rx((GUEST_BASE - 4096, 4096, WRITE, 0)),
    "the null address": rx((0, 4096, WRITE, 0)),
    "a buffer of 4 GiB": rx((RX_SLOT, 0xFFFFFFFF, WRITE, 0)),
    "an indirect table": rx((RX_SLOT, 48, WRITE | INDIRECT, 0)),
    "a buffer too short for a header": rx((RX_SLOT, 43, WRITE, 0)),
    "an empty buffer": rx((RX_SLOT, 0, WRITE, 0)),
    "more buffers than the ring holds": avail_jump(RX, 129),
}


@pytest.mark.parametrize("act", TX_BROKEN.values(), ids=TX_BROKEN.keys())
@pytest.mark.parametrize("features", [FEATURES, FEATURES & ~F_EVENT_IDX], ids=["event indices", "flags"])
def test_a_broken_tx_ring_ends_the_connections_until_a_new_driver_comes(binary: Path, act: Act, features: int) -> None:
    with booted(binary, features) as (device, guest):
        guest.offer_rx()
        client, _ = guest.connect()
        err = os.eventfd(0, os.EFD_NONBLOCK)
        guest.frontend.done(SET_VRING_ERR, struct.pack("<Q", TX), (err,))
        used = guest.u16(RING_AT[TX] + 0x4002)
        act(guest)
        assert closed(client)
        assert os.eventfd_read(err) == 1
        assert guest.u16(RING_AT[TX] + 0x4002) == used, "the broken chain was given back"
        refused = device.client()
        refused.sendall(b"CONNECT 5000\n")
        assert closed(refused)
        guest.check_memory()
        begin_anew(guest)
        os.close(err)


@pytest.mark.parametrize("act", RX_BROKEN.values(), ids=RX_BROKEN.keys())
def test_a_broken_rx_ring_ends_the_connections_until_a_new_driver_comes(binary: Path, act: Act) -> None:
    with booted(binary) as (device, guest):
        guest.offer_rx(1)
        client = device.client()
        client.sendall(b"CONNECT 5000\n")
        request = guest.receive(REQUEST, refill=False)
        guest.send(RESPONSE, 5000, request.src_port)
        assert client.recv(3) == b"OK "
        act(guest)
        while (part := client.recv(16)) != b"":
            assert part.endswith(b"\n")
        guest.check_memory()
        begin_anew(guest)


def test_a_buffer_for_a_header_alone_carries_control_packets_and_breaks_on_bytes(binary: Path) -> None:
    with booted(binary) as (device, guest):
        guest.descriptor(RX, 0, RX_SLOT, 44, WRITE)
        guest.descriptor(RX, 2, RX_SLOT + RX_BUFFER_BYTES, 44, WRITE)
        guest.allow(RX_BUFFERS, 44)
        guest.allow(RX_BUFFERS + RX_BUFFER_BYTES, 44)
        guest.offer(RX, 0)
        guest.offer(RX, 2)
        guest.ring_bell(RX)
        client = device.client()
        client.sendall(b"CONNECT 5000\nbytes")
        request = guest.receive(REQUEST, refill=False)
        guest.send(RESPONSE, 5000, request.src_port)
        with pytest.raises(ConnectionResetError):  # the bytes were never read
            while client.recv(16) != b"":
                pass
        begin_anew(guest)


def test_packets_in_unusual_pieces_are_understood(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        packet = HEADER.pack(GUEST_CID, 2, 5000, request.src_port, 10, 1, RW, 0, WINDOW, 0) + b"0123456789"
        guest.write(AT_OFFSET, packet)
        pieces = {
            "one descriptor": [(AT, 54, 0, 0)],
            "a split header": [(AT, 20, NEXT, 101), (AT + 20, 30, NEXT, 102), (AT + 50, 4, 0, 0)],
            "empty descriptors between": [
                (AT, 0, NEXT, 101),
                (AT, 44, NEXT, 102),
                (AT, 0, NEXT, 103),
                (AT + 44, 10, 0, 0),
            ],
            "more room than payload": [(AT, 44, NEXT, 101), (AT + 44, 4000, 0, 0)],
        }
        for descriptors in pieces.values():
            guest.send_raw(descriptors)
            assert client.recv(100) == b"0123456789"
        for head in range(64, 118):  # every byte its own descriptor
            guest.descriptor(TX, head, AT + head - 64, 1, NEXT if head < 117 else 0, head + 1)
        guest.offer(TX, 64)
        guest.ring_bell(TX)
        got = b""
        while len(got) < 10:
            got += client.recv(100)
        assert got == b"0123456789"


def test_buffers_in_unusual_pieces_are_filled(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, _ = guest.connect()
        while guest.poll() is not None:
            pass
        # Use up what was offered, so that the next buffer is the one below.
        left = (guest.avail[RX] - guest.seen[RX]) & 0xFFFF
        for _ in range(left):
            guest.send(RW, 9, 9)
            guest.receive(RST, refill=False)
        at = RX_BUFFERS + 0x90000
        for index in range(100):
            guest.descriptor(RX, index, GUEST_BASE + at + 2 * index, 1, WRITE | (NEXT if index < 99 else 0), index + 1)
            guest.allow(at + 2 * index, 1)
        guest.offer(RX, 0)
        guest.ring_bell(RX)
        client.sendall(b"x" * 56)
        deadline = time.monotonic() + 20
        while (used := guest.take_used(RX)) is None:
            assert time.monotonic() < deadline
        assert used == (0, 100)
        filled = guest.memory[at : at + 200 : 2]
        assert HEADER.unpack(filled[:44])[4:7] == (56, 1, RW)
        assert filled[44:] == b"x" * 56


@pytest.mark.parametrize("size", [0, 1, 43])
def test_a_packet_without_a_whole_header_is_passed_over(binary: Path, size: int) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        guest.send_raw([(AT, size, 0, 0)])
        guest.send(RW, 5000, request.src_port, b"next")
        assert client.recv(10) == b"next"


def test_a_guest_that_scribbles_over_its_rings_harms_itself_only(binary: Path) -> None:
    seed = int(os.environ.get("SEED", random.SystemRandom().randrange(2**32)))
    print(f"SEED={seed}")
    rng = random.Random(seed)
    with booted(binary) as (device, guest):
        guest.allow(0, MEMORY_BYTES)  # any address it offers is fair
        for _ in range(15):
            guest.offer_rx()
            clients = [device.client() for _ in range(4)]
            for client in clients:
                client.sendall(b"CONNECT 5000\n" + bytes(100))
            end = time.monotonic() + 0.06
            while time.monotonic() < end:
                queue = rng.choice((RX, TX))
                at = RING_AT[queue] + rng.choice((0, 0, 0x2000, 0x4000)) + rng.randrange(0, 256)
                guest.write(
                    at,
                    rng.choice((rng.randbytes(8), struct.pack("<QI", AT + rng.randrange(9999), 64), bytes(2), b"\1\0")),
                )
                with contextlib.suppress(IndexError):
                    guest.set_avail(queue, guest.avail[queue] + rng.randrange(4) & 0xFFFF)
                guest.ring_bell(queue)
            for client in clients:
                client.close()
            guest.stop()
            guest.clear_rings()
            guest.allow(0, MEMORY_BYTES)
            guest.start(greet=False)
        guest.offer_rx()
        guest.still_serves()


def test_a_payload_that_changes_while_it_is_sent_is_still_a_payload(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        stop = threading.Event()

        def scribble() -> None:
            while not stop.is_set():
                for slot in range(TX_BUFFER_COUNT):
                    at = TX_BUFFERS + slot * TX_BUFFER_BYTES
                    guest.memory[at + 24 : at + 28] = os.urandom(
                        4
                    )  # the length in the header, and in flight the payload
                    guest.memory[at + 44 : at + 60] = os.urandom(16)

        scribbler = threading.Thread(target=scribble)
        scribbler.start()
        for _ in range(200):
            guest.send(RW, 5000, request.src_port, b"p" * 100)
        stop.set()
        scribbler.join()
        client.close()
        while guest.poll() is not None:
            guest.offer_rx(1)
        begin_anew(guest)
        guest.allow(TX_BUFFERS, TX_BUFFER_COUNT * TX_BUFFER_BYTES)


# --- packets that belong to no connection


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        pytest.param(REQUEST, {}, id="REQUEST: the guest never dials"),
        pytest.param(RESPONSE, {}, id="RESPONSE"),
        pytest.param(RW, {}, id="RW"),
        pytest.param(SHUTDOWN, {"flags": 3}, id="SHUTDOWN"),
        pytest.param(CREDIT_UPDATE, {}, id="CREDIT_UPDATE"),
        pytest.param(CREDIT_REQUEST, {}, id="CREDIT_REQUEST"),
        pytest.param(0, {}, id="operation 0"),
        pytest.param(8, {}, id="operation 8"),
        pytest.param(65535, {}, id="operation 65535"),
        pytest.param(REQUEST, {"type": 2}, id="a sequenced-packet REQUEST"),
        pytest.param(REQUEST, {"type": 0}, id="type 0"),
        pytest.param(REQUEST, {"dst_cid": 0}, id="to the hypervisor"),
        pytest.param(REQUEST, {"dst_cid": 3}, id="to itself"),
        pytest.param(REQUEST, {"dst_cid": 7}, id="to a sibling"),
        pytest.param(REQUEST, {"dst_cid": 1 << 32 | 2}, id="to a CID beyond 32 bits"),
        pytest.param(REQUEST, {"src_cid": 2}, id="from the host's CID"),
        pytest.param(REQUEST, {"src_cid": 4}, id="from a sibling's CID"),
        pytest.param(RW, {"length": 0xFFFFFFFF}, id="RW of 4 GiB"),
    ],
)
def test_a_packet_of_no_connection_is_answered_with_rst(binary: Path, op: int, fields: dict[str, int]) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        guest.send(op, 1234, 5678, **fields)
        reset = guest.receive(RST)
        assert (reset.src_cid, reset.src_port, reset.dst_port) == (fields.get("dst_cid", 2), 5678, 1234)
        assert reset.type == fields.get("type", 1)
        guest.still_serves()


@pytest.mark.parametrize("fields", [{}, {"type": 2}, {"dst_cid": 7}, {"src_cid": 7}])
def test_rst_is_never_answered(binary: Path, fields: dict[str, int]) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        guest.send(RST, 1234, 5678, **fields)
        guest.quiet(0.05)
        guest.still_serves()


def test_a_flood_of_requests_without_buffers_for_answers_is_held_back_and_then_answered(binary: Path) -> None:
    with booted(binary) as (device, guest):
        before = device.rss_kib()
        sent = 0
        stuck_at = time.monotonic() + 0.3
        while time.monotonic() < stuck_at:
            guest.reap_tx()
            if not guest.tx_free:
                guest.wait_call(TX, 0.05)
                continue
            guest.send(REQUEST, sent, 1)
            sent += 1
            stuck_at = time.monotonic() + 0.3
        assert 1024 <= sent < 1100
        used = device.cpu_s()
        time.sleep(0.2)
        assert device.cpu_s() - used < 0.1
        assert device.rss_kib() - before < 512
        guest.offer_rx()
        for port in range(sent):
            assert guest.receive(RST).dst_port == port
        guest.still_serves()


# --- packets that break a connection's rules


@pytest.mark.parametrize(
    "packets",
    [
        pytest.param([(REQUEST, b"", {})], id="REQUEST again"),
        pytest.param([(RESPONSE, b"", {})], id="RESPONSE again"),
        pytest.param([(0, b"", {})], id="operation 0"),
        pytest.param([(99, b"", {})], id="operation 99"),
        pytest.param([(RW, b"abc", {"length": 4})], id="a length beyond the buffer"),
        pytest.param([(RW, b"abc", {"length": 0xFFFFFFFF})], id="a length of 4 GiB"),
        pytest.param([(RW, b"", {"length": 1})], id="a length without a payload"),
        pytest.param([(SHUTDOWN, b"", {"flags": NO_SEND}), (RW, b"x", {})], id="RW after the last"),
        pytest.param([(RW, bytes(65536), {})] * 4 + [(RW, b"x", {})], id="one byte more than granted"),
        pytest.param([(CREDIT_UPDATE, b"", {"fwd_cnt": 1})], id="more read than was sent"),
    ],
)
def test_a_packet_against_the_rules_ends_its_connection_alone(
    binary: Path, packets: list[tuple[int, bytes, dict[str, int]]]
) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        other, other_request = guest.connect(7)
        client, request = guest.connect()
        # All in one batch, so that no credit comes between.
        bell, guest.ring_bell = guest.ring_bell, lambda queue: None  # type: ignore[method-assign]
        for op, payload, fields in packets:
            guest.send(op, 5000, request.src_port, payload, **fields)
        guest.ring_bell = bell  # type: ignore[method-assign]
        guest.ring_bell(TX)
        while (packet := guest.receive()).op != RST:
            assert packet.op in (CREDIT_UPDATE, SHUTDOWN)
        assert (packet.src_port, packet.dst_port) == (request.src_port, 5000)
        while client.recv(1 << 16) != b"":
            pass
        guest.send(RW, 7, other_request.src_port, b"untouched")
        assert other.recv(100) == b"untouched"
        guest.send(RW, 5000, request.src_port, b"x")  # unknown by now
        guest.receive(RST)


@pytest.mark.parametrize("op", [RW, SHUTDOWN, CREDIT_UPDATE, CREDIT_REQUEST, REQUEST, 0, 99])
def test_only_an_answer_may_follow_a_request(binary: Path, op: int) -> None:
    with booted(binary) as (device, guest):
        guest.offer_rx()
        client = device.client()
        client.sendall(b"CONNECT 5000\n")
        request = guest.receive(REQUEST)
        guest.send(op, 5000, request.src_port, b"early" if op == RW else b"")
        guest.receive(RST)
        assert client.recv(1) == b""
        guest.still_serves()


def test_a_wrong_port_of_the_guest_is_another_connection(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        guest.send(RST, 5001, request.src_port)
        guest.send(RW, 5001, request.src_port, b"x")
        guest.receive(RST)
        guest.send(RW, 5000, request.src_port, b"mine")
        assert client.recv(10) == b"mine"


def test_a_port_used_before_is_not_used_again_soon(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        seen = set()
        for _ in range(50):
            client, request = guest.connect()
            assert request.src_port not in seen and request.src_port >= 1024
            seen.add(request.src_port)
            guest.finish(client, request)


def test_fields_nobody_knows_are_ignored(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        guest.send(SHUTDOWN, 5000, request.src_port, flags=0xFFFFFFFC)
        guest.send(RW, 5000, request.src_port, b"", flags=0xFFFFFFFF)
        guest.send(RW, 5000, request.src_port, b"yes", flags=0xFFFFFFFF)
        assert client.recv(10) == b"yes"
        guest.send(SHUTDOWN, 5000, request.src_port, flags=NO_RCV | NO_SEND | 0xF0)
        guest.receive(RST)
        assert client.recv(1) == b""
