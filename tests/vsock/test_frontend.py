"""The vhost-user conversation: what a proper VMM may do, and that a hostile one ends the device and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vsock.peer import (
    F_PROTOCOL,
    FEATURES,
    GET_CONFIG,
    GET_FEATURES,
    GET_PROTOCOL_FEATURES,
    GET_VRING_BASE,
    GUEST_BASE,
    MEMORY_BYTES,
    REQUEST,
    RESPONSE,
    RING_AT,
    RST,
    RW,
    RX,
    SET_FEATURES,
    SET_MEM_TABLE,
    SET_OWNER,
    SET_PROTOCOL_FEATURES,
    SET_VRING_ADDR,
    SET_VRING_BASE,
    SET_VRING_CALL,
    SET_VRING_ENABLE,
    SET_VRING_ERR,
    SET_VRING_KICK,
    SET_VRING_NUM,
    TX,
    TX_BUFFER_BYTES,
    TX_BUFFER_COUNT,
    TX_BUFFERS,
    VMM_BASE,
    Device,
    Guest,
    Memfd,
    booted,
    closed,
    read_ok,
    table,
)

EXIT_VMM, EXIT_MEMORY, EXIT_USAGE = 3, 4, 2
REGION = (GUEST_BASE, MEMORY_BYTES, VMM_BASE, 0)
Act = Callable[[Guest], None]


# --- a proper VMM


def test_the_end_of_the_connection_ends_the_device(binary: Path) -> None:
    with Device(binary) as device:
        device.vmm.close()
        assert device.wait() == (0, "")


def test_the_end_ends_it_with_connections_open_and_the_clients_see_it(binary: Path) -> None:
    with booted(binary) as (device, guest):
        guest.offer_rx()
        client, _ = guest.connect()
        device.vmm.close()
        assert device.wait() == (0, "")
        assert closed(client)


def test_the_guests_cid_is_its_configuration(binary: Path) -> None:
    with Device(binary) as device, Guest(device) as guest:
        front = guest.frontend
        front.greet()
        cid = struct.pack("<Q", 3)
        for offset, size in ((0, 8), (0, 4), (4, 4), (7, 1), (8, 0)):
            answer = front.ask(GET_CONFIG, struct.pack("<III", offset, size, 0) + bytes(size))
            assert answer == struct.pack("<III", offset, size, 0) + cid[offset : offset + size]


@pytest.mark.parametrize(("offset", "size"), [(0, 9), (8, 1), (1, 8), (0xFFFFFFFF, 1), (0, 256)])
def test_configuration_beyond_the_cid_is_answered_with_nothing(binary: Path, offset: int, size: int) -> None:
    with Device(binary) as device, Guest(device) as guest:
        guest.frontend.greet()
        assert guest.frontend.ask(GET_CONFIG, struct.pack("<III", offset, size, 0) + bytes(size)) == b""
        assert guest.frontend.get_u64(GET_FEATURES) == FEATURES


def test_messages_may_come_in_single_bytes(binary: Path) -> None:
    with Device(binary) as device, Guest(device) as guest:
        guest.frontend.greet()
        for byte in struct.pack("<III", GET_CONFIG, 1, 20) + struct.pack("<III", 0, 8, 0) + bytes(8):
            device.vmm.send(bytes([byte]))
            time.sleep(0.001)
        assert device.vmm.recv(100) == struct.pack("<IIIIIIQ", GET_CONFIG, 5, 20, 0, 8, 0, 3)


def test_an_acknowledgement_comes_only_when_asked_for_and_never_beside_an_answer(binary: Path) -> None:
    with Device(binary) as device, Guest(device) as guest:
        guest.frontend.greet()
        guest.frontend.send(SET_OWNER)
        assert guest.frontend.ask(SET_OWNER, flags=9) == bytes(8)
        assert guest.frontend.ask(GET_FEATURES, flags=9) == struct.pack("<Q", FEATURES)
        assert guest.frontend.get_u64(GET_FEATURES) == FEATURES


def test_without_protocol_features_queues_are_born_enabled(binary: Path) -> None:
    with Device(binary) as device, Guest(device, FEATURES & ~F_PROTOCOL) as guest:
        front = guest.frontend
        front.send(SET_OWNER)
        front.send(SET_FEATURES, struct.pack("<Q", guest.features))
        front.send(SET_MEM_TABLE, table(REGION), (guest.memfd.fd,))
        for queue in (RX, TX):
            front.send(SET_VRING_NUM, struct.pack("<II", queue, guest.size))
            front.send(SET_VRING_BASE, struct.pack("<II", queue, 0))
            front.send(SET_VRING_ADDR, guest.addresses(queue))
            front.send(SET_VRING_KICK, struct.pack("<Q", queue), (guest.kick[queue],))
            front.send(SET_VRING_CALL, struct.pack("<Q", queue), (guest.call[queue],))
        assert front.get_u64(GET_FEATURES) == FEATURES
        guest.offer_rx()
        guest.still_serves()


# --- starting and stopping


def test_a_stop_closes_open_connections_and_a_driver_that_begins_anew_works(binary: Path) -> None:
    with booted(binary) as (device, guest):
        for _ in range(3):
            guest.offer_rx()
            client, _ = guest.connect()
            waiting = device.client()
            waiting.sendall(b"CONNECT 7\n")
            guest.receive(REQUEST)
            guest.stop()
            assert closed(client) and closed(waiting)
            guest.clear_rings()
            guest.start(greet=False)
        guest.offer_rx()
        guest.quiet(0.05)  # nobody left to reset
        guest.still_serves()


def test_a_driver_that_was_only_paused_goes_on_and_hears_of_lost_connections(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        bases = guest.stop()
        assert bases == (guest.seen[RX], guest.avail[TX])
        assert closed(client)
        guest.start(bases, greet=False)
        reset = guest.receive(RST)
        assert (reset.src_port, reset.dst_port) == (request.src_port, 5000)
        guest.still_serves()


def test_a_device_unplugged_and_plugged_again_on_the_same_connection_works(binary: Path) -> None:
    with booted(binary) as (device, guest):
        for _ in range(3):
            guest.offer_rx()
            client, _ = guest.connect()
            guest.stop()
            assert closed(client)
            before = device.fd_count()
            guest.clear_rings()
            guest.start()
            assert device.fd_count() <= before + 4
        guest.offer_rx()
        guest.still_serves()


def test_set_up_again_without_a_stop_is_a_stop(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, _ = guest.connect()
        guest.clear_rings()
        guest.start(greet=False)
        assert closed(client)
        guest.offer_rx()
        guest.still_serves()


def test_a_new_memory_table_under_running_queues_keeps_connections(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        half = MEMORY_BYTES // 2
        lower = (GUEST_BASE, half, VMM_BASE, 0)
        upper = (GUEST_BASE + half, half, VMM_BASE + half, half)
        guest.frontend.done(SET_MEM_TABLE, table(upper, lower), (guest.memfd.fd, guest.memfd.fd))
        guest.send(RW, 5000, request.src_port, b"moved")
        assert client.recv(10) == b"moved"


def test_a_buffer_may_run_from_one_region_into_the_next(binary: Path) -> None:
    with booted(binary) as (_, guest):
        guest.offer_rx()
        client, request = guest.connect()
        half = TX_BUFFERS + TX_BUFFER_BYTES * (TX_BUFFER_COUNT - 1) + 4096  # a page into the buffer used next
        half -= half % 4096
        lower = (GUEST_BASE, half, VMM_BASE, 0)
        upper = (GUEST_BASE + half, MEMORY_BYTES - half, VMM_BASE + (1 << 30), half)
        guest.frontend.done(SET_MEM_TABLE, table(lower, upper), (guest.memfd.fd, guest.memfd.fd))
        guest.reap_tx()
        guest.tx_free = [TX_BUFFER_COUNT - 1]
        data = os.urandom(60000)
        guest.send(RW, 5000, request.src_port, data)
        got = b""
        while len(got) < len(data):
            got += client.recv(1 << 16)
        assert got == data


def test_an_interrupt_is_repeated_on_a_new_call_descriptor(binary: Path) -> None:
    with booted(binary) as (_, guest):
        fresh = os.eventfd(0, os.EFD_NONBLOCK)
        guest.frontend.done(SET_VRING_CALL, struct.pack("<Q", RX), (fresh,))
        assert os.eventfd_read(fresh) == 1
        os.close(fresh)


@pytest.mark.parametrize("kind", ["a full pipe", "a pipe nobody reads", "/dev/zero", "nothing"])
def test_a_strange_call_descriptor_does_not_hold_the_device(binary: Path, kind: str) -> None:
    with booted(binary) as (device, guest):
        guest.offer_rx()
        reader, writer = os.pipe()
        if kind == "a full pipe":
            os.set_blocking(writer, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(writer, bytes(4096))
            os.set_blocking(writer, True)
        if kind == "a pipe nobody reads":
            os.close(reader)
        if kind == "/dev/zero":
            os.close(writer)
            writer = os.open("/dev/zero", os.O_RDONLY)
        fds = () if kind == "nothing" else (writer,)
        for queue in (RX, TX):
            number = queue | (0x100 if kind == "nothing" else 0)
            guest.frontend.done(SET_VRING_CALL, struct.pack("<Q", number), fds)
            guest.frontend.done(SET_VRING_ERR, struct.pack("<Q", number), fds)
        client = device.client()
        client.sendall(b"CONNECT 5000\n")
        deadline = time.monotonic() + 20
        while (packet := guest.poll()) is None:  # no interrupt will come
            assert time.monotonic() < deadline
            time.sleep(0.001)
        guest.send(RESPONSE, 5000, packet.src_port)
        read_ok(client)
        os.close(writer)


def test_a_kick_descriptor_that_is_always_readable_is_not_read_for_ever(binary: Path) -> None:
    with booted(binary) as (device, guest):
        reader, writer = os.pipe()
        os.write(writer, bytes(65536))
        guest.frontend.done(SET_VRING_KICK, struct.pack("<Q", TX), (reader,))
        used = device.cpu_s()
        time.sleep(0.3)
        assert device.cpu_s() - used < 0.1
        guest.stop()
        guest.clear_rings()
        guest.start(greet=False)
        guest.offer_rx()
        guest.still_serves()
        os.close(reader)
        os.close(writer)


# --- a hostile VMM: each of these ends the device with status 3, whatever came before


def message(request: int, payload: bytes = b"", fds: int = 0, flags: int = 1, size: int | None = None) -> Act:
    def act(guest: Guest) -> None:
        guest.frontend.send(request, payload, (guest.memfd.fd,) * fds, flags, size)

    return act


def regions(*wire: tuple[int, int, int, int], fds: int | None = None) -> Act:
    return message(SET_MEM_TABLE, table(*wire), len(wire) if fds is None else fds)


def region_of(fd: Callable[[], int]) -> Act:
    def act(guest: Guest) -> None:
        number = fd()
        guest.frontend.send(SET_MEM_TABLE, table(REGION), (number,))
        os.close(number)

    return act


def raw(data: bytes) -> Act:
    def act(guest: Guest) -> None:
        guest.device.vmm.sendall(data)
        guest.device.vmm.shutdown(socket.SHUT_WR)

    return act


def state(request: int, index: int, value: int) -> Act:
    return message(request, struct.pack("<II", index, value))


def address(desc: int = 0, avail: int = 0, used: int = 0) -> Act:
    """A running queue's rings moved by so much."""

    def act(guest: Guest) -> None:
        at = VMM_BASE + RING_AT[TX]
        payload = struct.pack("<IIQQQQ", TX, 0, at + desc & (1 << 64) - 1, at + 0x4000 + used, at + 0x2000 + avail, 0)
        guest.frontend.send(SET_VRING_ADDR, payload)

    return act


def shrunk() -> int:
    fd = Memfd(seal=False).fd
    os.ftruncate(fd, 4096)
    return fd


def disk_file() -> int:
    file = tempfile.TemporaryFile()  # noqa: SIM115
    file.truncate(MEMORY_BYTES)
    return os.dup(file.fileno())


def kick_without(*missing: str) -> Act:
    def act(guest: Guest) -> None:
        front = guest.frontend
        front.send(SET_OWNER)
        if "memory" not in missing:
            front.send(SET_MEM_TABLE, table(REGION), (guest.memfd.fd,))
        if "size" not in missing:
            front.send(SET_VRING_NUM, struct.pack("<II", TX, guest.size))
        if "rings" not in missing:
            front.send(SET_VRING_ADDR, guest.addresses(TX))
        front.send(SET_VRING_KICK, struct.pack("<Q", TX), (guest.kick[TX],))

    return act


def deaf_vmm(guest: Guest) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
        for _ in range(100_000):
            guest.frontend.send(GET_FEATURES)


HUGE = 1 << 64
NUM = struct.pack("<II", TX, 128)
HOSTILE = {
    "request 0": message(0),
    "a request never offered": message(4),
    "a request with a huge number": message(0xFFFFFFFF),
    "version 0": message(GET_FEATURES, flags=0),
    "version 2": message(GET_FEATURES, flags=2),
    "a reply": message(GET_FEATURES, flags=5),
    "unknown flags": message(GET_FEATURES, flags=0x80000001),
    "a payload of 4 GiB": message(SET_MEM_TABLE, size=0xFFFFFFFF),
    "a payload one byte beyond the limit": message(SET_MEM_TABLE, bytes(513)),
    "a payload where none belongs": message(GET_FEATURES, bytes(8)),
    "a payload too short": message(SET_FEATURES, bytes(4)),
    "a payload missing": message(SET_VRING_NUM),
    "a header cut off": raw(struct.pack("<II", GET_FEATURES, 1)),
    "a payload cut off": raw(struct.pack("<IIIB", SET_FEATURES, 1, 8, 0)),
    "the end after a header": raw(struct.pack("<III", SET_FEATURES, 1, 8)),
    "a descriptor where none belongs": message(SET_OWNER, fds=1),
    "a descriptor beside a number": message(SET_VRING_NUM, NUM, fds=1),
    "nine descriptors": message(SET_MEM_TABLE, table(REGION), fds=9),
    "two hundred and fifty descriptors": message(SET_MEM_TABLE, table(REGION), fds=250),
    "features not offered": message(SET_FEATURES, struct.pack("<Q", FEATURES | 1 << 28)),
    "all features": message(SET_FEATURES, b"\xff" * 8),
    "protocol features not offered": message(SET_PROTOCOL_FEATURES, struct.pack("<Q", 1 << 12)),
    "a table of no regions": message(SET_MEM_TABLE, table()),
    "a table of nine regions": message(SET_MEM_TABLE, table(*[REGION] * 9), fds=8),
    "a table that says two and has one": message(SET_MEM_TABLE, struct.pack("<II", 2, 0) + table(REGION)[8:], fds=2),
    "a table that says four thousand million": message(SET_MEM_TABLE, struct.pack("<II", 2**32 - 1, 0), fds=1),
    "a table cut short": message(SET_MEM_TABLE, bytes(4)),
    "a table without descriptors": regions(REGION, fds=0),
    "a table with too many descriptors": regions(REGION, fds=2),
    "a region of size zero": regions((GUEST_BASE, 0, VMM_BASE, 0)),
    "a region beyond its file": regions((GUEST_BASE, MEMORY_BYTES + 4096, VMM_BASE, 0)),
    "an offset beyond the file": regions((GUEST_BASE, MEMORY_BYTES, VMM_BASE, 4096)),
    "a huge region": regions((GUEST_BASE, 1 << 62, VMM_BASE, 0)),
    "a region to the end of all addresses": regions((0, HUGE - 4096, 0, 0)),
    "a guest address that overflows": regions((HUGE - 4096, 8192, VMM_BASE, 0)),
    "a VMM address that overflows": regions((GUEST_BASE, 8192, HUGE - 4096, 0)),
    "an offset that overflows": regions((GUEST_BASE, 8192, VMM_BASE, HUGE - 4096)),
    "a misaligned guest address": regions((GUEST_BASE + 1, 4096, VMM_BASE, 0)),
    "a misaligned size": regions((GUEST_BASE, 4095, VMM_BASE, 0)),
    "a misaligned offset": regions((GUEST_BASE, 4096, VMM_BASE, 512)),
    "regions that overlap for the guest": regions((0, 8192, 0, 0), (4096, 8192, 65536, 0)),
    "regions that overlap for the VMM": regions((0, 8192, 0, 0), (65536, 8192, 4096, 0)),
    "the same region twice": regions(REGION, REGION),
    "memory of a file that can shrink": region_of(lambda: Memfd(seal=False).fd),
    "memory of a file that has shrunk": region_of(shrunk),
    "memory of a file on disk": region_of(disk_file),
    "memory of a device": region_of(lambda: os.open("/dev/zero", os.O_RDWR)),
    "memory of an eventfd": region_of(lambda: os.eventfd(0)),
    "memory of a socket": region_of(lambda: socket.socket().detach()),
    "a queue of size 0": state(SET_VRING_NUM, TX, 0),
    "a queue of size 3": state(SET_VRING_NUM, TX, 3),
    "a queue of size 2048": state(SET_VRING_NUM, TX, 2048),
    "a queue of size 65536": state(SET_VRING_NUM, TX, 65536),
    "a queue of size 65664": state(SET_VRING_NUM, TX, 65536 + 128),
    "a queue of the largest size": state(SET_VRING_NUM, TX, 2**31),
    "size of queue 3": state(SET_VRING_NUM, 3, 128),
    "size of the last queue there is": state(SET_VRING_NUM, 2**32 - 1, 128),
    "position beyond 16 bits": state(SET_VRING_BASE, TX, 65536),
    "position of queue 3": state(SET_VRING_BASE, 3, 0),
    "asking for the position of queue 3": state(GET_VRING_BASE, 3, 0),
    "enabling with 2": state(SET_VRING_ENABLE, TX, 2),
    "enabling queue 3": state(SET_VRING_ENABLE, 3, 1),
    "rings of queue 3": message(SET_VRING_ADDR, struct.pack("<IIQQQQ", 3, 0, VMM_BASE, VMM_BASE, VMM_BASE, 0)),
    "a kick before any memory": kick_without("memory"),
    "a kick before the size": kick_without("size"),
    "a kick before the rings": kick_without("rings"),
    "a kick before anything": kick_without("memory", "size", "rings"),
    "a kick without its descriptor": message(SET_VRING_KICK, struct.pack("<Q", TX)),
    "a kick to be polled for": message(SET_VRING_KICK, struct.pack("<Q", TX | 0x100)),
    "a kick with unknown bits": message(SET_VRING_KICK, struct.pack("<Q", TX | 0x200), fds=1),
    "a kick of queue 3": message(SET_VRING_KICK, struct.pack("<Q", 3), fds=1),
    "a kick that is a plain file": message(SET_VRING_KICK, struct.pack("<Q", TX), fds=1),
    "two kicks at once": message(SET_VRING_KICK, struct.pack("<Q", TX), fds=2),
    "a call announced as absent and there": message(SET_VRING_CALL, struct.pack("<Q", TX | 0x100), fds=1),
    "a call of queue 255": message(SET_VRING_CALL, struct.pack("<Q", 255), fds=1),
    "an error descriptor missing": message(SET_VRING_ERR, struct.pack("<Q", TX)),
    "configuration cut short": message(GET_CONFIG, bytes(8)),
    "configuration of another length than it says": message(GET_CONFIG, struct.pack("<III", 0, 8, 0) + bytes(7)),
    "configuration of 4 GiB": message(GET_CONFIG, struct.pack("<III", 0, 2**32 - 1, 0)),
    "configuration of 257 bytes": message(GET_CONFIG, struct.pack("<III", 0, 257, 0) + bytes(257)),
    "replies nobody reads": deaf_vmm,
}
HOSTILE_UNDER_RUNNING_QUEUES = {
    "other features under a running queue": message(SET_FEATURES, struct.pack("<Q", F_PROTOCOL)),
    "a table without the running rings": regions((GUEST_BASE, 4096, VMM_BASE, 0)),
    "a misaligned descriptor table": address(desc=8),
    "a misaligned available ring": address(avail=1),
    "a misaligned used ring": address(used=2),
    "a descriptor table before memory": address(desc=-RING_AT[TX] - 16),
    "a descriptor table that ends beyond memory": address(desc=MEMORY_BYTES - RING_AT[TX] - 16),
    "an available ring that ends beyond memory": address(avail=MEMORY_BYTES - RING_AT[TX] - 0x2000 - 16),
    "a used ring that ends beyond memory": address(used=MEMORY_BYTES - RING_AT[TX] - 0x4000 - 1028),
    "a descriptor table at address zero": address(desc=-VMM_BASE - RING_AT[TX]),
    "a descriptor table at the end of all addresses": address(desc=-VMM_BASE - RING_AT[TX] - 16),
}


ALL = HOSTILE | HOSTILE_UNDER_RUNNING_QUEUES


@pytest.mark.parametrize("act", ALL.values(), ids=ALL.keys())
def test_a_hostile_message_ends_the_device_cleanly(binary: Path, act: Act) -> None:
    with booted(binary) as (device, guest):
        guest.offer_rx()
        client, _ = guest.connect()
        act(guest)
        status, said = device.wait()
        assert status == EXIT_VMM
        assert said.startswith("sandbox-vsock: vhost-user: ") and said.count("\n") == 1
        assert closed(client)


@pytest.mark.parametrize("act", HOSTILE.values(), ids=HOSTILE.keys())
def test_it_ends_it_as_the_first_message_too(binary: Path, act: Act) -> None:
    with Device(binary) as device, Guest(device) as guest:
        act(guest)
        assert device.wait()[0] == EXIT_VMM


def test_memory_that_goes_away_ends_the_device(binary: Path) -> None:
    """The seal makes it impossible for the VMM; running out of huge pages or a memory error still raises SIGBUS."""
    with booted(binary) as (device, _):
        os.kill(device.process.pid, signal.SIGBUS)
        assert device.wait() == (EXIT_MEMORY, "sandbox-vsock: guest memory is gone\n")


# --- start-up


def run(binary: Path, *arguments: str, fds: tuple[int, ...] = ()) -> tuple[int, str]:
    done = subprocess.run([binary, *arguments], pass_fds=fds, capture_output=True, text=True, timeout=10, env={})
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="none"),
        pytest.param(("--vhost-fd", "V", "--listen-fd", "L"), id="no CID"),
        pytest.param(("--vhost-fd", "V", "--listen-fd", "L", "--guest-cid", "2"), id="the host's CID"),
        pytest.param(("--vhost-fd", "V", "--listen-fd", "L", "--guest-cid", "4294967295"), id="the CID that means any"),
        pytest.param(("--vhost-fd", "V", "--listen-fd", "L", "--guest-cid", "3x"), id="letters in a number"),
        pytest.param(("--vhost-fd", "V", "--listen-fd", "L", "--guest-cid", "-3"), id="a negative CID"),
        pytest.param(("--vhost-fd", "V", "--listen-fd", "L", "--guest-cid", ""), id="an empty CID"),
        pytest.param(("--vhost-fd", "V", "--listen-fd", "L", "--guest-cid", "3", "more"), id="one argument more"),
        pytest.param(("--vhost-fd", "V", "--listen-fd", "L", "--guest-cid", "3", "--debug"), id="an unknown option"),
        pytest.param(("--vhost-fd", "V", "--listen-fd", "V", "--guest-cid", "3"), id="one descriptor for both"),
        pytest.param(("--vhost-fd", "1", "--listen-fd", "L", "--guest-cid", "3"), id="a standard descriptor"),
        pytest.param(("--vhost-fd", "L", "--listen-fd", "V", "--guest-cid", "3"), id="descriptors exchanged"),
        pytest.param(("--vhost-fd", "999", "--listen-fd", "L", "--guest-cid", "3"), id="a descriptor not open"),
        pytest.param(("--vhost-fd", "P", "--listen-fd", "L", "--guest-cid", "3"), id="a pipe"),
        pytest.param(("--vhost-fd", "T", "--listen-fd", "L", "--guest-cid", "3"), id="a TCP socket"),
        pytest.param(("--vhost-fd", "D", "--listen-fd", "L", "--guest-cid", "3"), id="a datagram socket"),
    ],
)
def test_wrong_arguments_are_refused(binary: Path, arguments: tuple[str, ...], tmp_path: Path) -> None:
    pair = socket.socketpair()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"/tmp/vsk-{os.getpid()}.sock")
    os.unlink(f"/tmp/vsk-{os.getpid()}.sock")
    listener.listen()
    pipe = os.pipe()
    tcp = socket.socket()
    datagram = socket.socketpair(type=socket.SOCK_DGRAM)
    names = {"V": pair[0].fileno(), "L": listener.fileno(), "P": pipe[0], "T": tcp.fileno(), "D": datagram[0].fileno()}
    given = [str(names.get(argument, argument)) for argument in arguments]
    status, said = run(binary, *given, fds=tuple(names.values()))
    assert status == EXIT_USAGE
    assert said.count("\n") == 1
    for end in (*pair, listener, tcp, *datagram):
        end.close()
    for fd in pipe:
        os.close(fd)


def test_privileges_are_given_up_and_strange_descriptors_closed(binary: Path) -> None:
    with booted(binary) as (device, _):
        status = Path(f"/proc/{device.process.pid}/status").read_text()
        assert "NoNewPrivs:\t1\n" in status
        limits = Path(f"/proc/{device.process.pid}/limits").read_text()
        core = next(line for line in limits.splitlines() if line.startswith("Max core file size"))
        assert core.split()[4:6] == ["0", "0"]


def test_it_cannot_be_looked_into_by_its_own_user(binary: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("another user's process needs root to start")
    vmm, theirs = socket.socketpair()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"/tmp/vsk-{os.getpid()}.sock")
    os.unlink(f"/tmp/vsk-{os.getpid()}.sock")
    listener.listen()
    stray, program = os.open("/dev/null", os.O_RDONLY), os.open(binary, os.O_RDONLY)
    process = subprocess.Popen(
        [
            f"/proc/self/fd/{program}",
            "--vhost-fd",
            str(theirs.fileno()),
            "--listen-fd",
            str(listener.fileno()),
            "--guest-cid",
            "3",
        ],
        pass_fds=(theirs.fileno(), listener.fileno(), stray, program),
        user=65534,
        group=65534,
        extra_groups=[],
        env={"ASAN_OPTIONS": "detect_leaks=0"},
    )
    theirs.close()
    vmm.sendall(struct.pack("<III", GET_PROTOCOL_FEATURES, 1, 0))
    assert vmm.recv(100)
    assert os.stat(f"/proc/{process.pid}/mem").st_uid == 0  # what a process that may be dumped would own
    open_files = {
        os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd") if int(fd) > 2
    }
    assert len(open_files) == 3 and all(name.startswith(("socket:", "anon_inode:[eventpoll]")) for name in open_files)
    vmm.close()
    assert process.wait(10) == 0
    listener.close()
    os.close(stray)
    os.close(program)
