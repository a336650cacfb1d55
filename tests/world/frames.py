"""Ethernet frames as a hostile guest kernel would send them, put into the tap of a running machine.

A process in a guest cannot make them; whoever owns the guest's kernel can. The frames are written through a copy of
the machine's own descriptor of the tap, so they take the way of everything the guest sends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

GUEST, HOST = "172.16.0.2", "172.16.0.1"
GUEST_MAC, HOST_MAC = bytes.fromhex("0600ac100002"), bytes.fromhex("0600ac100001")
BROADCAST = b"\xff" * 6

SYS_PIDFD_GETFD = 438           # asm-generic/unistd.h
TUNGETVNETHDRSZ = 0x800454D7    # linux/if_tun.h
TCP, UDP, ICMP = 6, 17, 1


class Tap:
    """The tap of the machine whose command line holds `mark`."""

    def __init__(self, mark: str) -> None:
        self._fd = _copy(mark)
        size = struct.unpack("i", fcntl.ioctl(self._fd, TUNGETVNETHDRSZ, bytes(4)))[0]
        self._head = bytes(size)

    def send(self, frame: bytes) -> None:
        os.write(self._fd, self._head + frame)

    def close(self) -> None:
        os.close(self._fd)


def ethernet(kind: int, body: bytes, source: bytes = GUEST_MAC, target: bytes = HOST_MAC) -> bytes:
    return target + source + kind.to_bytes(2, "big") + body


def ipv4(
    protocol: int, payload: bytes, target: str, source: str = GUEST, *,
    fragment: int = 0, more: bool = False, id: int = 1, options: bytes = b"",
) -> bytes:  # fmt: skip
    """`fragment` is the offset in bytes."""
    words = 5 + len(options) // 4
    flags = (0x2000 if more else 0) | fragment // 8
    head = struct.pack(
        "!BBHHHBBH4s4s", 0x40 | words, 0, words * 4 + len(payload), id, flags, 64, protocol, 0,
        socket.inet_aton(source), socket.inet_aton(target),
    ) + options  # fmt: skip
    return head[:10] + _sum(head).to_bytes(2, "big") + head[12:] + payload


def tcp(source_port: int, port: int, target: str, source: str = GUEST, *, flags: int = 2, data: bytes = b"") -> bytes:
    head = struct.pack("!HHIIBBHHH", source_port, port, 1000, 0, 5 << 4, flags, 64240, 0, 0) + data
    return _with_sum(head, 16, TCP, source, target)


def udp(source_port: int, port: int, data: bytes, target: str, source: str = GUEST) -> bytes:
    return _with_sum(struct.pack("!HHHH", source_port, port, 8 + len(data), 0) + data, 6, UDP, source, target)


def echo(id: int = 7) -> bytes:
    body = struct.pack("!BBHHH", 8, 0, 0, id, 1) + b"probe"
    return body[:2] + _sum(body).to_bytes(2, "big") + body[4:]


def arp(operation: int, sender_mac: bytes, sender: str, target_mac: bytes, target: str) -> bytes:
    head = struct.pack("!HHBBH", 1, 0x0800, 6, 4, operation)
    return head + sender_mac + socket.inet_aton(sender) + target_mac + socket.inet_aton(target)


def ipv6(next_header: int, payload: bytes, source: str, target: str) -> bytes:
    addresses = [socket.inet_pton(socket.AF_INET6, each) for each in (source, target)]
    return struct.pack("!IHBB", 0x60000000, len(payload), next_header, 64) + b"".join(addresses) + payload


def _with_sum(body: bytes, at: int, protocol: int, source: str, target: str) -> bytes:
    pseudo = socket.inet_aton(source) + socket.inet_aton(target) + struct.pack("!BBH", 0, protocol, len(body))
    return body[:at] + _sum(pseudo + body).to_bytes(2, "big") + body[at + 2 :]


def _sum(data: bytes) -> int:
    """RFC 1071."""
    if len(data) % 2:
        data += b"\0"
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _copy(mark: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() not in (process / "cmdline").read_bytes():
                continue
            taps = [fd for fd in (process / "fd").iterdir() if os.readlink(fd) == "/dev/net/tun"]
        except OSError:
            continue
        for fd in taps:
            pidfd = os.pidfd_open(int(process.name))
            try:
                copied = int(libc.syscall(SYS_PIDFD_GETFD, pidfd, int(fd.name), 0))
            finally:
                os.close(pidfd)
            if copied >= 0:
                return copied
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
    raise RuntimeError(f"no machine {mark} with a tap")
