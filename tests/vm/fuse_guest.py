"""A hostile guest's end of a shared directory: FUSE requests of one's own making, put into a ring for virtiofsd.

`Sharing` starts virtiofsd as the product does, with a VMM's end that is ours; `ask` sends one request as whatever uid
and waits for its answer. A guest's root can send exactly this. Layouts: linux/fuse.h, linux/virtio_ring.h.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import struct
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from sandboxd.vm import jail, processes, virtiofs
from sandboxd.vm.machine import Share
from tests.vsock import peer

LOOKUP, SETATTR, SYMLINK, MKNOD, MKDIR, LINK, OPEN, READ, WRITE, SETXATTR, INIT, CREATE = (
    1, 4, 6, 8, 9, 13, 14, 15, 16, 21, 26, 35,
)  # fmt: skip
ROOT_NODE = 1
MODE, UID, GID = 1, 2, 4  # FATTR_*
_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_RING, _AVAIL, _USED, _REQUEST, _ANSWER = 0x1000, 0x2000, 0x3000, 0x10000, 0x80000
_ANSWER_BYTES = 0x20000
_QUEUE = 1  # 0 is for forgets
_SIZE = 64
DEADLINE_S = 20.0


class Entry(NamedTuple):
    """What a name leads to: `error` is 0 or an errno."""

    error: int
    node: int = 0
    inode: int = 0
    mode: int = 0
    uid: int = -1


def instance_of(what: str) -> str:
    return f"fuse-{what}-{os.getpid()}"


class Sharing:
    """virtiofsd with `directory`, and the only connection to it."""

    def __init__(self, directory: int | Path, *, read_only: bool = False, what: str = "test") -> None:
        """`what` tells those of one process apart; those of others are left alone."""
        self._held = ExitStack()
        self.instance = instance = instance_of(what)
        if isinstance(directory, Path):
            directory = os.open(directory, os.O_PATH | os.O_DIRECTORY)
            self._held.callback(os.close, directory)
        share = Share(directory, read_only)
        tools = jail.find_tools(root=os.geteuid() == 0)
        cell = virtiofs.prison(share, 64, jail.marker(instance, "box"), 1024, virtiofs.find_tools(), tools)
        own = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="fuse-", dir="/tmp")))
        with ExitStack() as ends:
            listener, vmm = ends.enter_context(virtiofs.connection(own))
            self.child = virtiofs.start(share, cell, listener)
            self.vmm = vmm.dup()
        self.vmm.settimeout(DEADLINE_S)
        self._unique = self._sent = 0

    def __enter__(self) -> Sharing:
        return self

    def __exit__(self, *_: object) -> None:
        self.vmm.close()
        processes.end_marked(self.instance, lambda id: id == "box", {os.getuid()})
        self.child.close()
        self._held.close()

    @property
    def program(self) -> int:
        """virtiofsd's own pid, once it runs."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            for _, pid in processes.marked(self.instance, {os.getuid()}):
                if processes.command_line(pid)[0].endswith(b"/virtiofsd"):
                    return pid
            assert self.child.exit_code() is None, self.child.errors()
            time.sleep(0.02)
        raise AssertionError("virtiofsd did not come up")

    def started(self) -> bool:
        """Whether it answers at all."""
        with suppress(OSError, AssertionError):
            peer.Frontend(self.vmm).get_u64(peer.GET_FEATURES)
            return True
        return False

    def boot(self) -> Sharing:
        """What VMM and guest do until the file system is mounted."""
        front = peer.Frontend(self.vmm)
        features = front.get_u64(peer.GET_FEATURES) & ~peer.F_EVENT_IDX & ~(1 << 26)
        protocol = front.get_u64(peer.GET_PROTOCOL_FEATURES) & (1 << 3)
        front.send(peer.SET_PROTOCOL_FEATURES, struct.pack("<Q", protocol))
        front.send(peer.SET_OWNER)
        front.send(peer.SET_FEATURES, struct.pack("<Q", features))
        memfd = peer.Memfd()
        self._held.callback(memfd.close)
        self.memory = mmap.mmap(memfd.fd, peer.MEMORY_BYTES)
        self._held.callback(self.memory.close)
        region = (peer.GUEST_BASE, peer.MEMORY_BYTES, peer.VMM_BASE, 0)
        front.send(peer.SET_MEM_TABLE, peer.table(region), (memfd.fd,))
        self._kick, self._call = os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK)
        for fd in (self._kick, self._call):
            self._held.callback(os.close, fd)
        at = peer.VMM_BASE
        front.send(peer.SET_VRING_NUM, struct.pack("<II", _QUEUE, _SIZE))
        front.send(peer.SET_VRING_BASE, struct.pack("<II", _QUEUE, 0))
        addresses = struct.pack("<IIQQQQ", _QUEUE, 0, at + _RING, at + _USED, at + _AVAIL, 0)
        front.send(peer.SET_VRING_ADDR, addresses)
        front.send(peer.SET_VRING_CALL, struct.pack("<Q", _QUEUE), (self._call,))
        front.send(peer.SET_VRING_KICK, struct.pack("<Q", _QUEUE), (self._kick,))
        front.send(peer.SET_VRING_ENABLE, struct.pack("<II", _QUEUE, 1))
        error, _ = self.ask(INIT, struct.pack("<IIII", 7, 31, 65536, 0))
        assert error == 0
        return self

    def ask(self, opcode: int, body: bytes = b"", node: int = ROOT_NODE, uid: int = 0) -> tuple[int, bytes]:
        """(errno or 0, the answer's body)."""
        self._unique += 1
        request = _IN.pack(_IN.size + len(body), opcode, self._unique, node, uid, uid, 1, 0) + body
        self.memory[_REQUEST : _REQUEST + len(request)] = request
        self.memory[_ANSWER : _ANSWER + _OUT.size] = bytes(_OUT.size)
        # virtiofsd wants the header of a request in a piece of its own.
        pieces = [(_REQUEST, _IN.size, 0), (_REQUEST + _IN.size, len(body), 0)][: 2 if body else 1]
        pieces += [(_ANSWER, _OUT.size, 2), (_ANSWER + _OUT.size, _ANSWER_BYTES, 2)]
        for index, (at, size, flags) in enumerate(pieces):
            last = index == len(pieces) - 1
            descriptor = struct.pack("<QIHH", peer.GUEST_BASE + at, size, flags | (not last), 0 if last else index + 1)
            self.memory[_RING + 16 * index : _RING + 16 * index + 16] = descriptor
        struct.pack_into("<H", self.memory, _AVAIL + 4 + 2 * (self._sent % _SIZE), 0)
        self._sent += 1
        struct.pack_into("<H", self.memory, _AVAIL + 2, self._sent & 0xFFFF)
        os.eventfd_write(self._kick, 1)
        deadline = time.monotonic() + DEADLINE_S
        while struct.unpack_from("<H", self.memory, _USED + 2)[0] != self._sent & 0xFFFF:
            assert time.monotonic() < deadline and self.child.exit_code() is None, self.child.errors()
            select.select([self._call], [], [], 0.1)
            with suppress(BlockingIOError):
                os.eventfd_read(self._call)
        size, error, unique = _OUT.unpack_from(self.memory, _ANSWER)
        assert unique == self._unique
        return -error, bytes(self.memory[_ANSWER + _OUT.size : _ANSWER + max(size, _OUT.size)])

    # -- requests

    def _entry(self, opcode: int, body: bytes, node: int, uid: int) -> Entry:
        error, said = self.ask(opcode, body, node, uid)
        if error:
            return Entry(error)
        (found,) = struct.unpack_from("<Q", said)
        (inode,) = struct.unpack_from("<Q", said, 40)
        mode, _, owner = struct.unpack_from("<III", said, 40 + 60)
        return Entry(0, found, inode, mode, owner)

    def lookup(self, name: bytes, node: int = ROOT_NODE, uid: int = 0) -> Entry:
        return self._entry(LOOKUP, name + b"\0", node, uid)

    def mkdir(self, name: bytes, mode: int, uid: int = 0) -> Entry:
        return self._entry(MKDIR, struct.pack("<II", mode, 0) + name + b"\0", ROOT_NODE, uid)

    def mknod(self, name: bytes, mode: int, device: int = 0, uid: int = 0) -> Entry:
        return self._entry(MKNOD, struct.pack("<IIII", mode, device, 0, 0) + name + b"\0", ROOT_NODE, uid)

    def symlink(self, name: bytes, target: bytes, uid: int = 0) -> Entry:
        return self._entry(SYMLINK, name + b"\0" + target + b"\0", ROOT_NODE, uid)

    def link(self, old: int, name: bytes, uid: int = 0) -> Entry:
        return self._entry(LINK, struct.pack("<Q", old) + name + b"\0", ROOT_NODE, uid)

    def create(self, name: bytes, mode: int, uid: int = 0, flags: int = os.O_RDWR) -> Entry:
        return self._entry(CREATE, struct.pack("<IIII", flags, mode, 0, 0) + name + b"\0", ROOT_NODE, uid)

    def setattr(self, node: int, valid: int, mode: int = 0, owner: int = 0, uid: int = 0) -> int:
        body = struct.pack("<IIQQQQQQIII", valid, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        body += struct.pack("<IIIII", mode, 0, owner, owner, 0)
        return self.ask(SETATTR, body, node, uid)[0]

    def setxattr(self, node: int, name: bytes, value: bytes, uid: int = 0) -> int:
        return self.ask(SETXATTR, struct.pack("<II", len(value), 0) + name + b"\0" + value, node, uid)[0]

    def open(self, node: int, flags: int = os.O_RDONLY, uid: int = 0) -> tuple[int, int]:
        """(errno, handle)."""
        error, said = self.ask(OPEN, struct.pack("<II", flags, 0), node, uid)
        return error, 0 if error else int(struct.unpack_from("<Q", said)[0])

    def read(self, node: int, handle: int, size: int = 4096) -> bytes:
        error, said = self.ask(READ, struct.pack("<QQIIQII", handle, 0, size, 0, 0, 0, 0), node)
        assert error == 0, errno.errorcode[error]
        return said

    def write(self, node: int, handle: int, data: bytes) -> int:
        body = struct.pack("<QQIIQII", handle, 0, len(data), 0, 0, 0, 0) + data
        return self.ask(WRITE, body, node)[0]
