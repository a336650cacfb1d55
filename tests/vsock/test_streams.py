"""What a host client and a guest program see of each other through the device."""

from __future__ import annotations

import hashlib
import os
import select
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from tests.vsock.peer import (
    CREDIT_REQUEST,
    CREDIT_UPDATE,
    F_EVENT_IDX,
    FEATURES,
    NO_RCV,
    NO_SEND,
    REQUEST,
    RESPONSE,
    RST,
    RW,
    SET_VRING_ENABLE,
    SHUTDOWN,
    TX,
    WINDOW,
    Connection,
    Device,
    Guest,
    Stack,
    booted,
    closed,
    deaf,
    echo,
    read_ok,
    sink,
)

BOTH = NO_RCV | NO_SEND
with_and_without_event_idx = pytest.mark.parametrize(
    "features", [FEATURES, FEATURES & ~F_EVENT_IDX], ids=["with event indices", "without event indices"]
)


def send_and_receive(client: socket.socket, data: bytes) -> bytes:
    """Writes all and half-closes in a thread; reads to the end."""

    def write() -> None:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)

    writer = threading.Thread(target=write)
    writer.start()
    back = bytearray()
    while part := client.recv(1 << 16):
        back += part
    writer.join()
    return bytes(back)


# --- the greeting


def test_a_greeting_may_come_in_single_bytes(binary: Path) -> None:
    with booted(binary) as (device, guest), Stack(guest, {5000: echo}):
        client = device.client()
        for byte in b"CONNECT 5000\n":
            client.send(bytes([byte]))
            time.sleep(0.002)
        assert read_ok(client) >= 1024
        assert send_and_receive(client, b"hello") == b"hello"


def test_bytes_glued_to_the_greeting_reach_the_guest(binary: Path) -> None:
    with booted(binary) as (device, guest), Stack(guest, {5000: echo}):
        client = device.client()
        client.sendall(b"CONNECT 5000\nCONNECT 1\nhello")
        client.shutdown(socket.SHUT_WR)
        read_ok(client)
        assert client.recv(100) == b"CONNECT 1\nhello"
        assert client.recv(100) == b""


@pytest.mark.parametrize(
    "greeting",
    [
        pytest.param(b"CONNECT " + b"0" * 40, id="too long"),
        pytest.param(b"\n", id="empty"),
        pytest.param(b"CONNECT \n", id="no port"),
        pytest.param(b"CONNECT x\n", id="a word for a port"),
        pytest.param(b"CONNECT -1\n", id="a negative port"),
        pytest.param(b"CONNECT 5000 \n", id="a blank after the port"),
        pytest.param(b"CONNECT 5000\r\n", id="a carriage return"),
        pytest.param(b"connect 5000\n", id="small letters"),
        pytest.param(b"CONNECT 4294967295\n", id="the port that means any"),
        pytest.param(b"CONNECT 4294967296\n", id="a port beyond 32 bits"),
        pytest.param(b"CONNECT 00000005000\n", id="eleven digits"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="HTTP"),
        pytest.param(b"\0" * 32, id="zeros"),
    ],
)
def test_a_wrong_greeting_is_closed(binary: Path, greeting: bytes) -> None:
    with booted(binary) as (device, guest):
        guest.offer_rx()
        client = device.client()
        client.sendall(greeting)
        assert closed(client)
        guest.quiet(0.05)
        guest.still_serves()


def test_a_greeting_cut_off_is_closed_at_once(binary: Path) -> None:
    with booted(binary) as (device, guest):
        guest.offer_rx()
        client = device.client()
        client.sendall(b"CONNECT 50")
        client.shutdown(socket.SHUT_WR)
        began = time.monotonic()
        assert closed(client)
        assert time.monotonic() - began < 2, "it was given the time of a silent one"
        guest.still_serves()


def test_a_silent_client_is_closed_after_two_seconds_and_keeps_nobody_out(binary: Path) -> None:
    with booted(binary) as (device, guest), Stack(guest, {5000: echo}):
        began = time.monotonic()
        silent = [device.client() for _ in range(70)]
        client, _ = device.dial(5000)  # behind 70 others of which 64 hold the places
        assert time.monotonic() - began > 1.5
        assert send_and_receive(client, b"x") == b"x"
        assert closed(silent[0])


@pytest.mark.parametrize("stage", ["before the driver", "after a stop", "with one queue only"])
def test_without_a_driver_a_client_is_refused_at_once(binary: Path, stage: str) -> None:
    with Device(binary) as device, Guest(device) as guest:
        guest.frontend.greet()
        if stage == "after a stop":
            guest.start()
            guest.stop()
        if stage == "with one queue only":
            guest.start()
            guest.frontend.done(SET_VRING_ENABLE, struct.pack("<II", TX, 0))
        client = device.client()
        client.sendall(b"CONNECT 5000\n")
        began = time.monotonic()
        assert client.recv(1) == b""
        assert time.monotonic() - began < 2, "it was given the time of a silent one"


def test_a_refusal_by_the_guest_is_a_plain_close(binary: Path) -> None:
    with booted(binary) as (device, guest), Stack(guest, {}):
        client = device.client()
        client.sendall(b"CONNECT 5000\n")
        assert client.recv(1) == b""


def test_a_client_that_gives_up_before_the_answer_is_reset_at_the_guest(binary: Path) -> None:
    with booted(binary) as (device, guest):
        guest.offer_rx()
        client = device.client()
        client.sendall(b"CONNECT 5000\n")
        request = guest.receive(REQUEST)
        client.close()
        reset = guest.receive(RST)
        assert (reset.src_port, reset.dst_port) == (request.src_port, 5000)
        guest.send(RESPONSE, 5000, request.src_port)  # too late
        guest.receive(RST)
        guest.still_serves()


# --- bytes


@with_and_without_event_idx
def test_a_mebibyte_comes_back_unchanged(binary: Path, features: int) -> None:
    data = os.urandom(1 << 20)
    with booted(binary, features) as (device, guest), Stack(guest, {5000: echo}):
        client, _ = device.dial(5000)
        back = send_and_receive(client, data)
        assert hashlib.sha256(back).digest() == hashlib.sha256(data).digest()


@with_and_without_event_idx
def test_eight_mebibytes_pass_the_window_with_a_reader_that_pauses(binary: Path, features: int) -> None:
    data = os.urandom(8 << 20)

    def feed(connection: Connection) -> None:
        if connection.user is None:
            connection.outbox += data
            connection.shutdown_want |= NO_SEND
            connection.user = True

    with booted(binary, features) as (device, guest), Stack(guest, {5000: feed}):
        client, _ = device.dial(5000)
        time.sleep(0.5)
        digest = hashlib.sha256()
        while part := client.recv(1 << 16):
            digest.update(part)
        assert digest.digest() == hashlib.sha256(data).digest()


def test_half_close_by_the_host_leaves_the_other_way_open(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        client.sendall(b"question")
        client.shutdown(socket.SHUT_WR)
        assert guest.receive(RW).payload == b"question"
        assert guest.receive(SHUTDOWN).flags == NO_SEND
        guest.send(RW, 5000, request.src_port, b"answer", fwd_cnt=8)
        assert client.recv(100) == b"answer"
        guest.send(SHUTDOWN, 5000, request.src_port, flags=NO_SEND, fwd_cnt=8)
        assert client.recv(100) == b""
        assert guest.receive(SHUTDOWN).flags == BOTH  # both directions are over
        guest.send(RST, 5000, request.src_port, fwd_cnt=8)
        guest.still_serves()


def test_half_close_by_the_guest_leaves_the_other_way_open(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        guest.send(RW, 5000, request.src_port, b"all I have")
        guest.send(SHUTDOWN, 5000, request.src_port, flags=NO_SEND)
        assert client.recv(100) == b"all I have"
        assert client.recv(100) == b""
        client.sendall(b"more from the host")
        assert guest.receive(RW).payload == b"more from the host"
        client.close()
        assert guest.receive(SHUTDOWN).flags & NO_RCV
        guest.send(SHUTDOWN, 5000, request.src_port, flags=BOTH, fwd_cnt=18)
        while (packet := guest.receive()).op != RST:
            assert packet.op == SHUTDOWN
        guest.still_serves()


def test_a_guest_that_will_not_receive_makes_writing_fail(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        guest.send(SHUTDOWN, 5000, request.src_port, flags=NO_RCV)
        assert guest.receive(SHUTDOWN).flags == NO_SEND
        with pytest.raises(BrokenPipeError):
            client.sendall(b"x")
        guest.send(RW, 5000, request.src_port, b"still")
        assert client.recv(10) == b"still"


def test_both_shutdowns_of_the_guest_are_answered_with_rst_and_the_client_gets_every_byte(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(4):
            guest.send(RW, 5000, request.src_port, b"y" * 65536)
        guest.send(SHUTDOWN, 5000, request.src_port, flags=BOTH)
        while guest.receive().op != RST:
            pass
        total = 0
        while part := client.recv(1 << 16):
            total += len(part)
        assert total == 4 * 65536


def test_rst_by_the_guest_closes_the_client(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        guest.send(RST, 5000, request.src_port)
        assert client.recv(1) == b""
        with pytest.raises(BrokenPipeError):
            client.sendall(b"x")
        guest.quiet(0.05)
        guest.still_serves()


def test_a_client_that_closes_with_bytes_on_the_way_loses_none_of_them(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        client.sendall(b"z" * 100_000)
        client.close()
        total = 0
        while (packet := guest.receive()).op != SHUTDOWN or packet.flags != BOTH:
            total += len(packet.payload)
        assert total == 100_000
        guest.send(RST, 5000, request.src_port, fwd_cnt=total)
        guest.still_serves()


def test_a_shutdown_never_answered_is_given_up_after_two_seconds(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        client.close()
        while guest.receive(SHUTDOWN).flags != BOTH:
            pass
        began = time.monotonic()
        reset = guest.receive(RST)
        assert (reset.src_port, reset.dst_port) == (request.src_port, 5000)
        assert time.monotonic() - began > 1.5


# --- credit


def test_the_host_stops_at_the_guests_window_and_goes_on_with_new_credit(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        data = os.urandom(2 * WINDOW)
        writer = threading.Thread(target=client.sendall, args=(data,))
        writer.start()
        got = b""
        while len(got) < WINDOW:
            got += guest.receive(RW).payload
        assert len(got) == WINDOW
        guest.receive(CREDIT_REQUEST)
        guest.quiet()
        guest.send(CREDIT_UPDATE, 5000, request.src_port, fwd_cnt=1000)
        assert len(guest.receive(RW).payload) == 1000
        guest.quiet()
        guest.send(CREDIT_UPDATE, 5000, request.src_port, fwd_cnt=WINDOW + 1000)
        got = got + b" " * 1000
        while len(got) < 2 * WINDOW:
            got += guest.receive(RW).payload
        writer.join()
        assert got[WINDOW + 1000 :] == data[WINDOW + 1000 :]


def test_a_smaller_window_of_the_guest_counts(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        guest.send(CREDIT_UPDATE, 5000, request.src_port, buf_alloc=10)
        client.sendall(b"0123456789abcdef")
        assert guest.receive(RW).payload == b"0123456789"
        guest.receive(CREDIT_REQUEST)
        guest.send(CREDIT_UPDATE, 5000, request.src_port, buf_alloc=4, fwd_cnt=0)
        guest.quiet()
        guest.send(CREDIT_UPDATE, 5000, request.src_port, buf_alloc=4, fwd_cnt=8)
        assert guest.receive(RW).payload == b"ab"


def test_the_end_of_the_stream_needs_no_credit(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        guest.send(CREDIT_UPDATE, 5000, request.src_port, buf_alloc=0)
        guest.finish(client, request)
        guest.still_serves()


def test_a_client_that_does_not_read_holds_the_guest_to_its_window(binary: Path) -> None:
    with booted(binary) as (device, guest):
        guest.offer_rx()
        client, request = guest.connect()
        before = device.rss_kib()
        sent = 0
        announced = 0
        while sent - announced < WINDOW:  # all the device grants
            size = min(65536, WINDOW - (sent - announced))
            guest.send(RW, 5000, request.src_port, b"w" * size)
            sent += size
            time.sleep(0.01)
            while (packet := guest.poll()) is not None:
                assert packet.op == CREDIT_UPDATE
                announced = packet.fwd_cnt
                guest.offer_rx(1)
        assert sent < 4 * WINDOW  # the socket's buffer and one window
        assert device.rss_kib() - before < 1024
        assert device.alive()
        total = 0
        while total < sent:
            total += len(client.recv(1 << 16))
        assert guest.receive(CREDIT_UPDATE).fwd_cnt > announced
        guest.send(RW, 5000, request.src_port, b"again")
        assert client.recv(10) == b"again"


def test_credit_asked_for_is_given(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        guest.send(RW, 5000, request.src_port, b"abc")
        assert client.recv(3) == b"abc"
        guest.send(CREDIT_REQUEST, 5000, request.src_port)
        update = guest.receive(CREDIT_UPDATE)
        assert (update.buf_alloc, update.fwd_cnt) == (WINDOW, 3)


def test_counters_wrap_at_32_bits(binary: Path) -> None:
    """4 GiB cannot be sent in a test; a guest's stale fwd_cnt is the part of the arithmetic that looks the same."""
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        client.sendall(b"0123456789")
        guest.receive(RW)
        guest.send(CREDIT_UPDATE, 5000, request.src_port, fwd_cnt=10)
        guest.send(CREDIT_UPDATE, 5000, request.src_port, fwd_cnt=5)  # queued out of order by two threads
        guest.send(CREDIT_UPDATE, 5000, request.src_port, fwd_cnt=-1)
        client.sendall(b"more")
        assert guest.receive(RW).payload == b"more"


def test_a_guest_that_claims_to_have_read_what_was_never_sent_is_reset(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        guest.send(CREDIT_UPDATE, 5000, request.src_port, fwd_cnt=1)
        guest.receive(RST)
        assert closed(client)
        guest.still_serves()


# --- many


def test_fifty_connections_at_once(binary: Path) -> None:
    data = {index: os.urandom(100_000 + index) for index in range(50)}
    back: dict[int, bytes] = {}

    def run(index: int, client: socket.socket) -> None:
        back[index] = send_and_receive(client, data[index])

    with booted(binary) as (device, guest), Stack(guest, {5000: echo}):
        clients = [device.dial(5000)[0] for _ in range(50)]
        threads = [threading.Thread(target=run, args=pair) for pair in enumerate(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert back == data


def test_a_slow_reader_and_a_deaf_guest_program_hold_nobody_up(binary: Path) -> None:
    def flood(connection: Connection) -> None:
        if len(connection.outbox) < WINDOW:
            connection.outbox += b"f" * WINDOW

    with booted(binary) as (device, guest), Stack(guest, {1: flood, 2: deaf, 5000: echo}):
        slow, _ = device.dial(1)  # never reads
        stuck, _ = device.dial(2)
        stuck.setblocking(False)
        while select.select([], [stuck], [], 0.2)[1]:
            stuck.send(b"s" * 65536)
        for _ in range(20):
            client, _ = device.dial(5000)
            assert send_and_receive(client, b"ping") == b"ping", "the others never end, and a client waits ten seconds"
            client.close()
        used = device.cpu_s()
        time.sleep(0.3)
        assert device.cpu_s() - used < 0.1  # waiting, not spinning
        slow.close()
        stuck.close()


def test_a_ping_passes_a_bulk_transfer(binary: Path) -> None:
    stop = threading.Event()

    def push(client: socket.socket) -> None:
        while not stop.is_set():
            client.sendall(b"b" * 65536)

    with booted(binary) as (device, guest), Stack(guest, {1: sink, 5000: echo}):
        bulk, _ = device.dial(1)
        thread = threading.Thread(target=push, args=(bulk,))
        thread.start()
        for _ in range(20):
            client, _ = device.dial(5000)
            assert send_and_receive(client, b"ping") == b"ping", "the others never end, and a client waits ten seconds"
            client.close()
        stop.set()
        thread.join()


def test_a_thousand_connections_leave_no_descriptor(binary: Path) -> None:
    with booted(binary) as (device, guest), Stack(guest, {5000: echo}) as stack:
        try:
            before = device.fd_count()
        except PermissionError:
            pytest.skip("descriptors of an undumpable process are only root's to count")
        for index in range(1000):
            client, _ = device.dial(5000)
            if index % 3 == 0:
                client.sendall(b"left behind")  # and aborted
            elif index % 3 == 1:
                assert send_and_receive(client, b"x") == b"x"
            client.close()
        deadline = time.monotonic() + 20
        while device.fd_count() != before or stack.connections:
            assert time.monotonic() < deadline, (device.fd_count(), before, len(stack.connections))
            time.sleep(0.02)


def test_a_thousand_open_at_once_and_no_more_than_the_table_holds(binary: Path) -> None:
    with booted(binary) as (device, guest), Stack(guest, {5000: echo}):
        clients = [device.dial(5000)[0] for _ in range(1024)]
        surplus = device.client()
        assert closed(surplus)
        assert send_and_receive(clients[700], b"inside") == b"inside"
        for client in clients:
            client.close()
        again, _ = device.dial(5000)
        assert send_and_receive(again, b"room again") == b"room again"


def test_clients_wait_while_descriptors_are_short(binary: Path) -> None:
    with Device(binary, files=24) as device, Guest(device) as guest:
        guest.start()
        with Stack(guest, {5000: echo}):
            clients = [device.client() for _ in range(40)]
            for client in clients:
                client.sendall(b"CONNECT 5000\n")
            while clients:
                ready, _, _ = select.select(clients, [], [], 5)
                assert ready, f"{len(clients)} not served"
                for client in ready:
                    read_ok(client)
                    client.close()
                clients = [client for client in clients if client not in ready]
            used = device.cpu_s()
            time.sleep(0.2)
            assert device.cpu_s() - used < 0.1


def test_without_buffers_nothing_is_read_and_nothing_is_lost(binary: Path) -> None:
    with booted(binary) as (device, guest):
        guest.offer_rx(1)
        client = device.client()
        client.sendall(b"CONNECT 5000\n")
        request = guest.receive(REQUEST, refill=False)
        guest.send(RESPONSE, 5000, request.src_port)
        read_ok(client)
        client.setblocking(False)
        written = 0
        while select.select([], [client], [], 0.1)[1]:
            written += client.send(b"n" * 65536)
        used = device.cpu_s()
        time.sleep(0.2)
        assert device.cpu_s() - used < 0.1
        assert written < 2 * WINDOW
        guest.offer_rx()
        got = 0
        while got < min(written, WINDOW):
            got += len(guest.receive(RW).payload)
