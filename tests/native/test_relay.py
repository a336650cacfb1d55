"""The relay's streams: what passes, what is handed over, in which order, and how a connection ends."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import resource
import socket
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from native._native import lib

import native
from native import relay as face
from native.relay import FREE, Accepted, Closed, Data, Ended, Limits, Opened, Reason, Relay
from tests.conftest import counts
from tests.native.relay_rig import DOWN, SANDBOX, UP, Rig, is_reset, receive, receive_all, reset


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as running:
        yield running


def test_what_comes_first_goes_first(rig: Rig) -> None:
    guest, pair = rig.pair()
    rig.relay.read(pair, UP, 100)
    guest.sendall(b"one ")
    assert rig.data(pair) == b"one "
    guest.sendall(b"five")
    rig.relay.send(pair, UP, b"two ")
    rig.relay.send(pair, UP, b"three ")
    rig.relay.open(pair, [rig.upstream], b"one ", FREE, FREE)
    assert rig.wait(Opened) == Opened(pair, *rig.upstream)
    assert receive(rig.accept(), 18) == b"one two three five"


def test_both_ways_half_closed_and_counted(rig: Rig) -> None:
    guest, upstream, pair = rig.joined(b"hello ")
    guest.sendall(b"there")
    guest.shutdown(socket.SHUT_WR)
    assert receive_all(upstream) == b"hello there"
    upstream.sendall(b"general")
    assert receive(guest, 7) == b"general"
    upstream.close()
    assert receive_all(guest) == b""
    assert rig.closed(pair) == Closed(pair, SANDBOX, Reason.DONE, 11, 7, True)
    assert not [event for event in rig.seen if isinstance(event, Ended | Data)]


def test_nothing_is_read_without_credit(rig: Rig) -> None:
    guest, pair = rig.pair()
    guest.sendall(b"bytes")
    guest.shutdown(socket.SHUT_WR)
    assert rig.nothing() == []
    rig.relay.read(pair, UP, 3)
    assert rig.data(pair) == b"byt"
    assert rig.nothing() == []
    rig.relay.read(pair, UP, 10)
    assert rig.data(pair) == b"es"
    assert rig.nothing() == []
    rig.relay.read(pair, UP, 0)
    assert rig.wait(Ended) == Ended(pair, UP)


def test_after_data_a_direction_stands_still_with_credit_left(rig: Rig) -> None:
    guest, upstream, pair = rig.joined(up=0, down=FREE)
    rig.relay.read(pair, UP, 1000)
    guest.sendall(b"head")
    assert rig.data(pair) == b"head"
    guest.sendall(b"bodyhead")
    upstream.sendall(b"the other direction goes on")
    assert receive(guest, 27) == b"the other direction goes on"
    assert rig.nothing() == []
    rig.relay.send(pair, UP, b"HEAD")
    rig.relay.pass_(pair, UP, 4)
    assert receive(upstream, 8) == b"HEADbody"
    assert rig.data(pair) == b"head", "then the read credit that was left"


@pytest.mark.parametrize("direction", [UP, DOWN], ids=["up", "down"])
@pytest.mark.parametrize("size", [1, 4095, 65536, 1_000_003], ids=lambda size: f"{size} bytes")
def test_a_counted_pass_ends_where_it_should(rig: Rig, direction: face.Direction, size: int) -> None:
    guest, upstream, pair = rig.joined(up=0, down=0)
    source, target = (guest, upstream) if direction is UP else (upstream, guest)
    body = os.urandom(size)
    sender = threading.Thread(target=source.sendall, args=(body + b"next",))
    sender.start()
    rig.relay.pass_(pair, direction, size - 1)
    rig.relay.pass_(pair, direction, 1)
    rig.relay.read(pair, direction, 10)
    assert receive(target, size) == body
    sender.join()
    assert rig.data(pair, direction) == b"next"
    assert rig.nothing(0.05) == []


def test_an_end_within_a_counted_pass_is_told_and_not_passed(rig: Rig) -> None:
    guest, upstream, pair = rig.joined(up=100, down=FREE)
    guest.sendall(b"short")
    guest.shutdown(socket.SHUT_WR)
    assert rig.wait(Ended) == Ended(pair, UP)
    assert receive(upstream, 5) == b"short"
    upstream.settimeout(0.2)
    with pytest.raises(TimeoutError):
        upstream.recv(1)
    upstream.settimeout(10)
    rig.relay.send(pair, UP, b", and more")
    rig.relay.finish(pair, UP)
    assert receive_all(upstream) == b", and more"


def test_free_after_the_end_was_told_passes_it_on(rig: Rig) -> None:
    guest, upstream, pair = rig.joined(up=0, down=FREE)
    rig.relay.read(pair, UP, 10)
    guest.shutdown(socket.SHUT_WR)
    rig.wait(Ended)
    rig.relay.pass_(pair, UP, FREE)
    assert receive_all(upstream) == b""


def test_another_upstream_takes_the_place_of_the_first(rig: Rig) -> None:
    guest, first, pair = rig.joined(b"GET 1", up=0, down=0)
    rig.relay.read(pair, UP, 100)
    rig.relay.read(pair, DOWN, 100)
    assert receive(first, 5) == b"GET 1"
    first.sendall(b"200 1")
    rig.relay.send(pair, DOWN, rig.data(pair, DOWN))
    guest.sendall(b"GET 2")
    assert rig.data(pair) == b"GET 2"
    rig.relay.open(pair, [rig.upstream], b"GET 2", 0, 0)
    second = rig.accept()
    assert receive(second, 5) == b"GET 2"
    assert receive_all(first) == b""
    first.close()
    rig.relay.pass_(pair, DOWN, FREE)
    second.sendall(b"200 2")
    assert receive(guest, 10) == b"200 1200 2"
    reset(guest)
    assert rig.closed(pair).reason is Reason.GUEST_RESET
    assert is_reset(second)


def test_a_guest_that_resets_resets_upstream(rig: Rig) -> None:
    guest, upstream, pair = rig.joined(b"x")
    assert receive(upstream, 1) == b"x"
    reset(guest)
    assert is_reset(upstream)
    assert rig.closed(pair).reason is Reason.GUEST_RESET


def test_what_upstream_sent_before_its_reset_reaches_the_guest(rig: Rig) -> None:
    """A server that answers early and closes with unread bytes sends both."""
    guest, upstream, pair = rig.joined(b"x" * 100)
    page = os.urandom(1_500_000)
    upstream.sendall(page)
    while unacknowledged(upstream):  # a reset throws away what has not left yet
        time.sleep(0.001)
    reset(upstream)
    assert receive(guest, len(page)) == page
    assert is_reset(guest)
    assert rig.closed(pair).reason is Reason.UPSTREAM_RESET


def test_an_upstream_reset_waits_for_what_python_has_to_read(rig: Rig) -> None:
    guest, upstream, pair = rig.joined(b"x", up=0, down=0)
    upstream.sendall(b"413 and why")
    time.sleep(0.05)
    reset(upstream)
    assert rig.nothing(0.1) == []
    rig.relay.read(pair, DOWN, 100)
    rig.relay.send(pair, DOWN, rig.data(pair, DOWN))
    rig.relay.read(pair, DOWN, 100)
    assert receive(guest, 11) == b"413 and why"
    assert is_reset(guest)
    assert rig.closed(pair).reason is Reason.UPSTREAM_RESET


@pytest.mark.parametrize("unread", [0, 300_000], ids=["all read", "the guest is still sending"])
def test_a_polite_close_delivers_what_was_sent(rig: Rig, unread: int) -> None:
    guest, pair = rig.pair()
    guest.sendall(b"u" * unread)
    page = os.urandom(50_000)
    rig.relay.send(pair, DOWN, page)
    rig.relay.close(pair, reset=False)
    assert receive_all(guest) == page
    guest.close()
    assert rig.closed(pair) == Closed(pair, SANDBOX, Reason.DONE, 0, len(page), True)


def test_a_guest_that_does_not_close_is_left_after_the_lingering(rig: Rig) -> None:
    guest, pair = rig.pair()
    rig.relay.close(pair, reset=False)
    started = time.monotonic()
    assert receive_all(guest) == b""
    assert time.monotonic() - started < 4, "its end was said after the lingering"
    assert rig.closed(pair).reason is Reason.DONE
    assert time.monotonic() - started > 4.5


def test_a_close_with_reset_is_at_once(rig: Rig) -> None:
    guest, upstream, pair = rig.joined(b"x")
    receive(upstream, 1)
    rig.relay.close(pair, reset=True)
    assert is_reset(guest) and is_reset(upstream)
    assert rig.closed(pair).reason is Reason.CUT


def test_commands_for_a_pair_that_is_gone_hit_nobody(rig: Rig) -> None:
    guest, pair = rig.pair()
    reset(guest)
    rig.closed(pair)
    other, upstream, number = rig.joined()
    assert number != pair, "the next connection in the same place"
    rig.relay.open(pair, [rig.upstream], b"late", 0, 0)
    rig.relay.send(pair, DOWN, b"late")
    rig.relay.pass_(pair, UP, 10)
    rig.relay.finish(pair, DOWN)
    rig.relay.deadline(pair, 1)
    rig.relay.close(pair, reset=True)
    assert rig.nothing() == []
    other.sendall(b"well")
    assert receive(upstream, 4) == b"well"


def test_pair_numbers_are_never_used_again(rig: Rig) -> None:
    numbers = set()
    for _ in range(300):
        guest, pair = rig.pair()
        numbers.add(pair)
        guest.close()
        rig.relay.close(pair, reset=True)
        rig.closed(pair)
    assert len(numbers) == 300


def unacknowledged(sock: socket.socket) -> int:
    return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def send_digested(sock: socket.socket, size: int, digests: dict[str, str], name: str) -> None:
    digest, block = hashlib.sha256(), os.urandom(1 << 20)
    for _ in range(size >> 20):
        sock.sendall(block)
        digest.update(block)
    sock.shutdown(socket.SHUT_WR)
    digests[name] = digest.hexdigest()


def receive_digested(sock: socket.socket, digests: dict[str, str], name: str, pause_s: float) -> None:
    digest = hashlib.sha256()
    while part := sock.recv(1 << 16):
        digest.update(part)
        time.sleep(pause_s)
    digests[name] = digest.hexdigest()


def test_large_transfers_keep_every_byte_and_no_memory() -> None:
    size = counts(48, 256) << 20
    with Rig() as rig:
        guest, upstream, pair = rig.joined()
        guest.settimeout(60)
        upstream.settimeout(60)
        digests: dict[str, str] = {}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        threads = [
            threading.Thread(target=send_digested, args=(guest, size, digests, "sent up")),
            threading.Thread(target=send_digested, args=(upstream, size, digests, "sent down")),
            threading.Thread(target=receive_digested, args=(upstream, digests, "came up", 0.0005)),
            threading.Thread(target=receive_digested, args=(guest, digests, "came down", 0)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert digests["sent up"] == digests["came up"]
        assert digests["sent down"] == digests["came down"]
        assert rig.closed(pair) == Closed(pair, SANDBOX, Reason.DONE, size, size, True)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10


def test_a_thousand_connections_leave_no_descriptor() -> None:
    with Rig() as rig:
        guest, upstream, _pair = rig.joined()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(1000):
            with contextlib.closing(rig.dial()) as other:
                number = rig.wait(Accepted).pair
                rig.relay.open(number, [rig.upstream], b"", FREE, FREE)
                with contextlib.closing(rig.accept()) as there:
                    other.shutdown(socket.SHUT_WR)
                    assert there.recv(1) == b""
            assert rig.closed(number).reason is Reason.DONE
        assert len(os.listdir("/proc/self/fd")) <= before
        guest.sendall(b"still here")
        assert receive(upstream, 10) == b"still here"


def test_guests_that_stop_reading_do_not_stop_others() -> None:
    """More stalled downloads than one sandbox is lent pipes for."""
    with Rig() as rig:
        pump = os.urandom(1 << 20)
        stalled = [rig.joined()[:2] for _ in range(70)]
        for _, upstream in stalled:
            upstream.setblocking(False)
        for _ in range(4):
            for _, upstream in stalled:
                with contextlib.suppress(BlockingIOError):
                    upstream.send(pump)
        guest, upstream, _ = rig.joined()
        sender = threading.Thread(target=upstream.sendall, args=(pump * 16,))
        sender.start()
        assert receive(guest, len(pump) * 16) == pump * 16
        sender.join()


def test_stop_resets_whatever_is_left() -> None:
    rig = Rig(threads=3)
    guests = [rig.joined()[0] for _ in range(20)]
    before = len(os.listdir("/proc/self/fd"))
    rig.relay.stop()
    rig.relay.stop()
    assert all(is_reset(guest) for guest in guests)
    assert before - len(os.listdir("/proc/self/fd")) >= 40
    with pytest.raises(OSError):
        os.fstat(rig.relay.fd)
    rig.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("call", "step"),
    [
        (lambda relay, fd: Relay(0, 1), "Invalid argument"),
        (lambda relay, fd: Relay(1, 0), "Invalid argument"),
        (lambda relay, fd: relay.listen(1, 10**6, Limits()), "Bad file descriptor (the listening socket)"),
        (lambda relay, fd: relay.listen(SANDBOX, fd, Limits()), "File exists (the sandbox's number)"),
        (lambda relay, fd: relay.unlisten(99), "No such file or directory (the sandbox's number)"),
        (lambda relay, fd: relay.open(1, [], b"", 0, 0), "Invalid argument"),
        (lambda relay, fd: relay.open(1, [("allowed.test", 1)], b"", 0, 0), "Invalid argument"),
        (lambda relay, fd: relay.open(1, [("1" * 1000, 1)], b"", 0, 0), "Invalid argument (the addresses)"),
        (lambda relay, fd: relay.open(1, [("127.0.0.1\0x", 1)], b"", 0, 0), "Invalid argument (the addresses)"),
        (lambda relay, fd: relay.open(1, [("fe80::1%lo", 1)], b"", 0, 0), "Invalid argument (the addresses)"),
        (lambda relay, fd: relay.open(1, [("127.1", 1)], b"", 0, 0), "Invalid argument (the addresses)"),
    ],
    ids=[
        "no thread", "no pair", "not a descriptor", "listens already", "listens not", "no address", "a name",
        "no address at all", "an address and more", "a scope", "half an address",
    ],
)  # fmt: skip
def test_what_cannot_be_is_an_error_with_its_step(rig: Rig, call: face.Callable[..., None], step: str) -> None:
    with pytest.raises(OSError) as caught:
        call(rig.relay, rig.gate.fileno())
    assert step in str(caught.value)


def test_the_header_and_this_face_say_the_same() -> None:
    header = (Path(native.__file__).parent / "native.h").read_text()

    def enumerators(name: str) -> dict[str, int]:
        body = re.search(rf"enum {name} \{{(.*?)\}};", header, re.DOTALL)
        assert body
        return {key: int(value) for key, value in re.findall(r"RELAY_(\w+) = (\d+)", body.group(1))}

    assert set(face._STEPS) == set(enumerators("relay_step").values())
    assert set(face._MAKE) == set(enumerators("relay_event_kind").values())
    assert {reason.name: reason.value for reason in Reason} == enumerators("relay_reason")
    assert {direction.name: direction.value for direction in face.Direction} == enumerators("relay_direction")
    assert lib.RELAY_FIRST_BYTES == face.FIRST_BYTES
