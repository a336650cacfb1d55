"""Both other ends of sandbox-vsock, without a VM: the VMM's vhost-user connection and the guest's driver.

`Device` starts the program. `Frontend` speaks vhost-user messages. `Guest` owns a memfd laid out as guest memory,
drives the rings in it from Python, and keeps a shadow copy: `check_memory` proves that the device wrote nowhere
but into the used rings and the buffers offered to it. `Stack` is a small vsock implementation on it, a thread.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import fcntl
import mmap
import os
import resource
import select
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# vhost-user requests
GET_FEATURES, SET_FEATURES, SET_OWNER, SET_MEM_TABLE = 1, 2, 3, 5
SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE, GET_VRING_BASE = 8, 9, 10, 11
SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR = 12, 13, 14
GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, SET_VRING_ENABLE, GET_CONFIG = 15, 16, 18, 24

F_EVENT_IDX, F_PROTOCOL, F_VERSION_1 = 1 << 29, 1 << 30, 1 << 32
FEATURES = F_EVENT_IDX | F_PROTOCOL | F_VERSION_1

# vsock operations and SHUTDOWN flags
REQUEST, RESPONSE, RST, SHUTDOWN, RW, CREDIT_UPDATE, CREDIT_REQUEST = 1, 2, 3, 4, 5, 6, 7
NO_RCV, NO_SEND = 1, 2
HEADER = struct.Struct("<QQIIIHHIII")
GUEST_CID = 3
WINDOW = 256 * 1024

RX, TX = 0, 1
QUEUE_SIZE = 128
NEXT, WRITE, INDIRECT = 1, 2, 4

# The layout of guest memory, by offset. What is not named is canary.
GUEST_BASE = 0x4000_0000
VMM_BASE = 0x7F12_3450_0000
RING_AT = {RX: 0x1000, TX: 0x8000}  # desc, +0x2000 avail, +0x4000 used
RX_BUFFERS, RX_BUFFER_BYTES = 0x20000, 0x2000  # a buffer every 8 KiB: 44 + 4096 bytes and a canary
TX_BUFFERS, TX_BUFFER_BYTES, TX_BUFFER_COUNT = 0x100000, 0x12000, 16
MEMORY_BYTES = 0x240000
RX_PAYLOAD = 4096
DEADLINE_S = 10.0


class Memfd:
    """Guest memory as a VMM shares it."""

    def __init__(self, size: int = MEMORY_BYTES, seal: bool = True) -> None:
        self.fd = os.memfd_create("guest", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        if seal:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    def close(self) -> None:
        os.close(self.fd)


class Device:
    """The program under test. Use as a context manager; leaving it closes the VMM's end and waits."""

    def __init__(self, binary: Path, files: int | None = None) -> None:
        """`files`: how many descriptors it may have."""
        self.vmm, theirs = socket.socketpair()
        self.directory = tempfile.mkdtemp(prefix="vsk-")
        self.path = f"{self.directory}/vsock.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen(128)
        self.process = subprocess.Popen(
            [binary, "--vhost-fd", str(theirs.fileno()), "--listen-fd", str(listener.fileno()), "--guest-cid", "3"],
            pass_fds=(theirs.fileno(), listener.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # The program makes itself undumpable, which the leak checker cannot cope with.
            env={
                "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
                "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=99",
            },
            cwd="/",
        )
        if files is not None:
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (files, files))
        theirs.close()
        listener.close()
        self.vmm.settimeout(DEADLINE_S)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: object) -> None:
        self.vmm.close()
        try:
            self.wait()
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            os.rmdir(self.directory)

    def wait(self, timeout_s: float = DEADLINE_S) -> tuple[int, str]:
        """Exit code and what was said on stderr; a sanitizer's report fails the test."""
        if self.process.stderr is None or self.process.stderr.closed:
            return self.process.returncode, ""
        try:
            _, stderr = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        text = stderr.decode()
        assert "Sanitizer" not in text and "runtime error" not in text, text
        assert self.process.returncode >= 0, f"killed by signal {-self.process.returncode}"
        return self.process.returncode, text

    def alive(self) -> bool:
        return self.process.poll() is None

    def fd_count(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def rss_kib(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def client(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(DEADLINE_S)
        client.connect(self.path)
        return client

    def dial(self, port: int) -> tuple[socket.socket, int]:
        """A client past its greeting, and its host port. Needs a guest that answers meanwhile."""
        client = self.client()
        client.sendall(b"CONNECT %d\n" % port)
        return client, read_ok(client)


def read_ok(client: socket.socket) -> int:
    line = b""
    while not line.endswith(b"\n"):
        byte = client.recv(1)
        assert byte, f"closed after {line!r}"
        line += byte
    word, _, port = line.strip().partition(b" ")
    assert word == b"OK"
    return int(port)


def closed(client: socket.socket) -> bool:
    """Whether the next thing from the device is the end; an error counts when our bytes were never read."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


class Frontend:
    """vhost-user messages, well-formed unless told otherwise."""

    def __init__(self, vmm: socket.socket) -> None:
        self.vmm = vmm

    def send(
        self, request: int, payload: bytes = b"", fds: tuple[int, ...] = (), flags: int = 1, size: int | None = None
    ) -> None:
        message = struct.pack("<III", request, flags, len(payload) if size is None else size) + payload
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.vmm.sendmsg([message], ancillary)

    def ask(self, request: int, payload: bytes = b"", fds: tuple[int, ...] = (), flags: int = 1) -> bytes:
        self.send(request, payload, fds, flags)
        header = self._exactly(12)
        answered, reply_flags, size = struct.unpack("<III", header)
        assert (answered, reply_flags) == (request, 5)
        return self._exactly(size)

    def done(self, request: int, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Sends and waits until the device has obeyed (REPLY_ACK)."""
        assert struct.unpack("<Q", self.ask(request, payload, fds, flags=9)) == (0,)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.vmm.recv(size - len(data))
            assert part, "the device closed its end"
            data += part
        return data

    def greet(self) -> None:
        """What QEMU sends when the device is plugged."""
        assert self.get_u64(GET_FEATURES) == FEATURES
        assert self.get_u64(GET_PROTOCOL_FEATURES) == 1 << 9 | 1 << 3
        self.send(SET_PROTOCOL_FEATURES, struct.pack("<Q", 1 << 9 | 1 << 3))
        self.send(SET_OWNER)

    def get_u64(self, request: int) -> int:
        return int(struct.unpack("<Q", self.ask(request))[0])


def table(*regions: tuple[int, int, int, int]) -> bytes:
    """SET_MEM_TABLE's payload: (guest address, size, VMM address, offset in the file) each."""
    return struct.pack("<II", len(regions), 0) + b"".join(struct.pack("<QQQQ", *region) for region in regions)


@dataclasses.dataclass
class Packet:
    src_cid: int
    dst_cid: int
    src_port: int
    dst_port: int
    type: int
    op: int
    flags: int
    buf_alloc: int
    fwd_cnt: int
    payload: bytes


class Guest:
    """Memory and rings, and the driver's side of both."""

    def __init__(self, device: Device, features: int = FEATURES, size: int = QUEUE_SIZE) -> None:
        self.device = device
        self.frontend = Frontend(device.vmm)
        self.features = features
        self.size = size
        self.memfd = Memfd()
        self.memory = mmap.mmap(self.memfd.fd, MEMORY_BYTES)
        self.shadow = bytearray(b"\xa5" * MEMORY_BYTES)
        self.memory[:] = bytes(self.shadow)
        self.kick = {RX: os.eventfd(0), TX: os.eventfd(0)}
        self.call = {RX: os.eventfd(0, os.EFD_NONBLOCK), TX: os.eventfd(0, os.EFD_NONBLOCK)}
        self.writable: list[tuple[int, int]] = []
        self.clear_rings()

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self.check_memory()
        for fd in (*self.kick.values(), *self.call.values()):
            os.close(fd)
        self.memory.close()
        self.memfd.close()

    # --- memory

    def write(self, at: int, data: bytes) -> None:
        self.memory[at : at + len(data)] = data
        self.shadow[at : at + len(data)] = data

    def u16(self, at: int) -> int:
        return int(struct.unpack_from("<H", self.memory, at)[0])

    def allow(self, at: int, size: int) -> None:
        """The device may write there."""
        self.writable.append((at, at + size))

    def check_memory(self) -> None:
        at = 0
        for start, end in [*sorted(self.writable), (MEMORY_BYTES, MEMORY_BYTES)]:
            if start > at:
                assert self.memory[at:start] == self.shadow[at:start], f"written between {at:#x} and {start:#x}"
            at = max(at, end)

    # --- set-up and stop

    def clear_rings(self) -> None:
        """As a driver that begins anew."""
        self.avail = {RX: 0, TX: 0}
        self.seen = {RX: 0, TX: 0}
        self.rx_free: list[int] = list(range(self.size // 2))
        self.tx_free: list[int] = list(range(min(TX_BUFFER_COUNT, self.size // 2)))
        self.writable.clear()
        for base in RING_AT.values():
            self.write(base, bytes(16 * self.size))
            self.write(base + 0x2000, bytes(6 + 2 * self.size))
            self.write(base + 0x4000, bytes(6 + 8 * self.size))
            self.allow(base + 0x4000, 6 + 8 * self.size)

    def region(self) -> tuple[int, int, int, int]:
        return (GUEST_BASE, MEMORY_BYTES, VMM_BASE, 0)

    def start(self, bases: tuple[int, int] = (0, 0), greet: bool = True) -> None:
        front = self.frontend
        if greet:
            front.greet()
        front.send(SET_FEATURES, struct.pack("<Q", self.features))
        front.send(SET_MEM_TABLE, table(self.region()), (self.memfd.fd,))
        for queue in (RX, TX):
            self.start_queue(queue, bases[queue])

    def start_queue(self, queue: int, base: int = 0) -> None:
        front = self.frontend
        front.send(SET_VRING_NUM, struct.pack("<II", queue, self.size))
        front.send(SET_VRING_BASE, struct.pack("<II", queue, base))
        front.send(SET_VRING_ADDR, self.addresses(queue))
        front.send(SET_VRING_KICK, struct.pack("<Q", queue), (self.kick[queue],))
        front.send(SET_VRING_CALL, struct.pack("<Q", queue), (self.call[queue],))
        front.done(SET_VRING_ENABLE, struct.pack("<II", queue, 1))

    def addresses(self, queue: int) -> bytes:
        at = VMM_BASE + RING_AT[queue]
        return struct.pack("<IIQQQQ", queue, 0, at, at + 0x4000, at + 0x2000, 0)

    def stop(self) -> tuple[int, int]:
        bases = []
        for queue in (RX, TX):
            self.frontend.done(SET_VRING_ENABLE, struct.pack("<II", queue, 0))
        for queue in (RX, TX):
            index, base = struct.unpack("<II", self.frontend.ask(GET_VRING_BASE, struct.pack("<II", queue, 0)))
            assert index == queue
            bases.append(base)
        return bases[0], bases[1]

    # --- rings

    def descriptor(self, queue: int, index: int, address: int, size: int, flags: int, following: int = 0) -> None:
        self.write(RING_AT[queue] + 16 * index, struct.pack("<QIHH", address, size, flags, following))

    def offer(self, queue: int, head: int) -> None:
        self.write(RING_AT[queue] + 0x2000 + 4 + 2 * (self.avail[queue] % self.size), struct.pack("<H", head))
        self.avail[queue] = (self.avail[queue] + 1) & 0xFFFF
        self.set_avail(queue, self.avail[queue])

    def set_avail(self, queue: int, index: int) -> None:
        self.write(RING_AT[queue] + 0x2000 + 2, struct.pack("<H", index))

    def ring_bell(self, queue: int) -> None:
        os.eventfd_write(self.kick[queue], 1)

    def wanted_kick(self, queue: int) -> int:
        """avail_event, or the used ring's flags."""
        at = RING_AT[queue] + 0x4000
        return self.u16(at + 4 + 8 * self.size) if self.features & F_EVENT_IDX else self.u16(at)

    def take_used(self, queue: int) -> tuple[int, int] | None:
        at = RING_AT[queue] + 0x4000
        if self.seen[queue] == self.u16(at + 2):
            return None
        head, size = struct.unpack_from("<II", self.memory, at + 4 + 8 * (self.seen[queue] % self.size))
        self.seen[queue] = (self.seen[queue] + 1) & 0xFFFF
        if self.features & F_EVENT_IDX:  # used_event: interrupt at the next one
            self.write(RING_AT[queue] + 0x2000 + 4 + 2 * self.size, struct.pack("<H", self.seen[queue]))
        return head, size

    def wait_call(self, queue: int, timeout_s: float) -> None:
        select.select([self.call[queue]], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.call[queue])

    # --- packets

    def offer_rx(self, count: int | None = None) -> None:
        """Gives the device buffers, as Linux does: a descriptor for the header, one for 4 KiB."""
        while self.rx_free and count != 0:
            slot = self.rx_free.pop()
            at = RX_BUFFERS + slot * RX_BUFFER_BYTES
            self.descriptor(RX, 2 * slot, GUEST_BASE + at, 44, WRITE | NEXT, 2 * slot + 1)
            self.descriptor(RX, 2 * slot + 1, GUEST_BASE + at + 44, RX_PAYLOAD, WRITE)
            self.allow(at, 44 + RX_PAYLOAD)
            self.offer(RX, 2 * slot)
            count = None if count is None else count - 1
        self.ring_bell(RX)

    def poll(self) -> Packet | None:
        used = self.take_used(RX)
        if used is None:
            return None
        head, size = used
        slot = head // 2
        at = RX_BUFFERS + slot * RX_BUFFER_BYTES
        src_cid, dst_cid, src_port, dst_port, length, kind, op, flags, buf_alloc, fwd_cnt = HEADER.unpack_from(
            self.memory, at
        )
        assert size == 44 + length
        assert (dst_cid, length) == (GUEST_CID, length if op == RW else 0)
        self.rx_free.append(slot)
        return Packet(
            src_cid, dst_cid, src_port, dst_port, kind, op, flags, buf_alloc, fwd_cnt, self.memory[at + 44 : at + size]
        )

    def receive(self, op: int | None = None, refill: bool = True) -> Packet:
        """The next packet, which must have that operation."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            packet = self.poll()
            if packet is not None:
                if refill:
                    self.offer_rx(1)
                assert op is None or packet.op == op, packet
                return packet
            left = deadline - time.monotonic()
            assert left > 0, "no packet from the device"
            self.wait_call(RX, left)

    def quiet(self, for_s: float = 0.15) -> None:
        """Nothing comes."""
        end = time.monotonic() + for_s
        while (left := end - time.monotonic()) > 0:
            packet = self.poll()
            assert packet is None, packet
            self.wait_call(RX, left)

    def reap_tx(self) -> None:
        while (used := self.take_used(TX)) is not None:
            if used[0] < 2 * TX_BUFFER_COUNT:  # not one of send_raw's
                self.tx_free.append(used[0] // 2)

    def send(self, op: int, src_port: int, dst_port: int, payload: bytes = b"", **fields: int) -> None:
        """One packet, header and payload in two descriptors; fields override the header's."""
        while not self.tx_free:
            self.reap_tx()
            if not self.tx_free:
                self.wait_call(TX, DEADLINE_S)
        self.reap_tx()
        slot = self.tx_free.pop()
        at = TX_BUFFERS + slot * TX_BUFFER_BYTES
        header = HEADER.pack(
            fields.get("src_cid", GUEST_CID),
            fields.get("dst_cid", 2),
            src_port,
            dst_port,
            fields.get("length", len(payload)),
            fields.get("type", 1),
            op,
            fields.get("flags", 0),
            fields.get("buf_alloc", WINDOW),
            fields.get("fwd_cnt", 0) & 0xFFFFFFFF,
        )
        self.write(at, header + payload)
        self.descriptor(TX, 2 * slot, GUEST_BASE + at, 44, NEXT if payload else 0, 2 * slot + 1)
        if payload:
            self.descriptor(TX, 2 * slot + 1, GUEST_BASE + at + 44, len(payload), 0)
        self.offer(TX, 2 * slot)
        self.ring_bell(TX)

    def send_raw(self, descriptors: list[tuple[int, int, int, int]], head: int = 100) -> None:
        """A chain as given: (address, size, flags, next) at `head` and on, in the tx queue."""
        for number, (address, size, flags, following) in enumerate(descriptors):
            self.descriptor(TX, head + number, address, size, flags, following)
        self.offer(TX, head)
        self.ring_bell(TX)

    def connect(self, port: int = 5000, glued: bytes = b"") -> tuple[socket.socket, Packet]:
        """A host client with its connection established by hand: (client, the guest's view of the REQUEST)."""
        client = self.device.client()
        client.sendall(b"CONNECT %d\n" % port + glued)
        request = self.receive(REQUEST)
        assert request.dst_port == port
        self.send(RESPONSE, port, request.src_port)
        assert read_ok(client) == request.src_port
        return client, request

    def still_serves(self) -> None:
        client, request = self.connect(4000)
        self.send(RW, 4000, request.src_port, b"alive")
        assert client.recv(5) == b"alive"
        self.finish(client, request)

    def finish(self, client: socket.socket, request: Packet) -> None:
        """The client closes, the guest agrees."""
        client.close()
        # Usually one packet; two if the end of its bytes is seen before the close.
        while self.receive(SHUTDOWN).flags != NO_RCV | NO_SEND:
            pass
        self.send(RST, request.dst_port, request.src_port)


class Connection:
    """The guest's end of one connection in a Stack."""

    def __init__(self, stack: Stack, port: int, peer: int, request: Packet) -> None:
        self.stack, self.port, self.peer = stack, port, peer
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.forwarded = 0
        self.announced = 0
        self.sent = 0
        self.peer_window = request.buf_alloc
        self.peer_forwarded = request.fwd_cnt
        self.peer_shutdown = 0
        self.shutdown_want = 0
        self.shutdown_sent = 0
        self.reset = False
        self.user: Any = None

    def read(self, limit: int = 1 << 30) -> bytes:
        data = bytes(self.inbox[:limit])
        del self.inbox[: len(data)]
        self.forwarded += len(data)
        return data

    def packet(self, op: int, payload: bytes = b"", flags: int = 0) -> None:
        self.announced = self.forwarded
        self.stack.guest.send(op, self.port, self.peer, payload, flags=flags, fwd_cnt=self.forwarded)

    def step(self) -> None:
        while self.outbox:
            room = self.peer_window - (self.sent - self.peer_forwarded & 0xFFFFFFFF)
            part = bytes(self.outbox[: min(room, 65536)])
            if not part:
                break
            del self.outbox[: len(part)]
            self.sent += len(part)
            self.packet(RW, part)
        if self.shutdown_want != self.shutdown_sent and not self.outbox:
            self.packet(SHUTDOWN, flags=self.shutdown_want)
            self.shutdown_sent = self.shutdown_want
        if self.forwarded - self.announced >= WINDOW * 3 // 4:
            self.packet(CREDIT_UPDATE)


class Stack(threading.Thread):
    """Answers every REQUEST for a port in `serve`, and calls that behaviour whenever something came."""

    def __init__(self, guest: Guest, serve: dict[int, Callable[[Connection], None]]) -> None:
        super().__init__(daemon=True)
        self.guest, self.serve = guest, serve
        self.connections: dict[tuple[int, int], Connection] = {}
        self.wake = os.eventfd(0)
        self.stopping = False
        self.failure: BaseException | None = None

    def __enter__(self) -> Stack:
        self.guest.offer_rx()
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stopping = True
        os.eventfd_write(self.wake, 1)
        self.join()
        os.close(self.wake)
        if self.failure is not None:
            raise self.failure

    def run(self) -> None:
        try:
            while not self.stopping:
                while (packet := self.guest.poll()) is not None:
                    self._packet(packet)
                    self.guest.offer_rx(1)
                for connection in list(self.connections.values()):
                    self.serve[connection.port](connection)
                    connection.step()
                if self.guest.u16(RING_AT[RX] + 0x4000 + 2) == self.guest.seen[RX]:
                    select.select([self.guest.call[RX], self.wake], [], [], 1.0)
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self.guest.call[RX])
        except BaseException as error:
            self.failure = error

    def _packet(self, packet: Packet) -> None:
        key = (packet.dst_port, packet.src_port)
        connection = self.connections.get(key)
        if packet.op == REQUEST:
            if packet.dst_port not in self.serve:
                self.guest.send(RST, packet.dst_port, packet.src_port)
                return
            connection = self.connections[key] = Connection(self, packet.dst_port, packet.src_port, packet)
            connection.packet(RESPONSE)
            return
        if connection is None:
            if packet.op != RST:
                self.guest.send(RST, packet.dst_port, packet.src_port)
            return
        connection.peer_window, connection.peer_forwarded = packet.buf_alloc, packet.fwd_cnt
        if packet.op == RW:
            connection.inbox += packet.payload
            assert len(connection.inbox) <= WINDOW, "the device sent more than it was granted"
        elif packet.op == SHUTDOWN:
            connection.peer_shutdown |= packet.flags
            if connection.peer_shutdown == NO_RCV | NO_SEND:
                connection.packet(RST)
                connection.reset = True
                del self.connections[key]
        elif packet.op == RST:
            connection.reset = True
            del self.connections[key]
        elif packet.op == CREDIT_REQUEST:
            connection.packet(CREDIT_UPDATE)


def echo(connection: Connection) -> None:
    """Sends back what comes, and the end of it; holds no more than a window."""
    if len(connection.outbox) < WINDOW:
        connection.outbox += connection.read()
    if connection.peer_shutdown & NO_SEND and not connection.inbox:
        connection.shutdown_want |= NO_SEND


def sink(connection: Connection) -> None:
    connection.read()


def deaf(connection: Connection) -> None:
    """Never reads, so never grants."""


@contextlib.contextmanager
def booted(binary: Path, features: int = FEATURES) -> Iterator[tuple[Device, Guest]]:
    """A device whose driver is up, without buffers offered."""
    with Device(binary) as device, Guest(device, features) as guest:
        guest.start()
        yield device, guest
