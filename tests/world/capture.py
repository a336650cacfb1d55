"""What really passes an interface: a packet socket in its namespace, read by a thread, packets kept as short facts."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

Inside = Callable[[Callable[[], socket.socket]], socket.socket]     # runs what it is given in a namespace

ETH_P_ALL, ETH_P_IP, ETH_P_IPV6, ETH_P_ARP = 0x0003, 0x0800, 0x86DD, 0x0806     # linux/if_ether.h
OUTGOING = 4        # linux/if_packet.h PACKET_OUTGOING
KEPT = 200_000      # packets, after which only their number is kept


class Packet(NamedTuple):
    """A packet seen, and when by the monotonic clock. `port` is the destination's; 0 where the protocol has none or it
    is not the first fragment."""

    at: float
    outgoing: bool
    protocol: str
    source: str
    target: str
    port: int
    source_port: int = 0
    begins: bool = False    # TCP's first packet of a connection


class Capture:
    """Sees an interface from its start to `close`; `outgoing` says what left by it. `own` are addresses of ours:
    connections from there that were begun before the start may still have something to say, and do not count."""

    def __init__(self, inside: Inside, interface: str, own: Collection[str] = ()) -> None:
        self._own = own
        self.packets: list[Packet] = []
        self.dropped = 0
        self._socket = inside(lambda: _open(interface))
        self._socket.settimeout(0.2)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._ending.set()
        self._thread.join(5)
        self._socket.close()

    def outgoing(self, target: str | None = None, port: int | None = None) -> list[Packet]:
        """What went out, without the wire's own upkeep (who has which address)."""
        packets = list(self.packets)
        begun = {_flow(packet) for packet in packets if packet.begins}

        def earlier(packet: Packet) -> bool:
            return packet.protocol == "tcp" and packet.source in self._own and _flow(packet) not in begun

        return [
            packet for packet in packets
            if packet.outgoing and target in (None, packet.target) and port in (None, packet.port)
            and packet.protocol not in ("arp", "icmp6") and not earlier(packet)
        ]  # fmt: skip

    def _read(self) -> None:
        while True:
            try:
                frame, where = self._socket.recvfrom(128)
            except TimeoutError:
                if self._ending.is_set():
                    return
                continue
            except OSError:
                return
            if len(self.packets) < KEPT:
                self.packets.append(read(frame, where[2] == OUTGOING))
            else:
                self.dropped += 1


def read(frame: bytes, outgoing: bool) -> Packet:
    """The facts of one Ethernet frame, seen now."""
    now = time.monotonic()
    kind = int.from_bytes(frame[12:14], "big")
    body = frame[14:]
    with contextlib.suppress(struct.error, IndexError, ValueError):
        if kind == ETH_P_IP:
            fragment = int.from_bytes(body[6:8], "big") & 0x1FFF
            at = (body[0] & 15) * 4
            source, target = (str(ipaddress.IPv4Address(body[i : i + 4])) for i in (12, 16))
            rest = b"" if fragment else body[at:]
            return Packet(now, outgoing, _name(body[9]), source, target, *_ports(body[9], rest))
        if kind == ETH_P_IPV6:
            source, target = (str(ipaddress.IPv6Address(body[i : i + 16])) for i in (8, 24))
            return Packet(now, outgoing, _name(body[6]), source, target, *_ports(body[6], body[40:]))
        if kind == ETH_P_ARP:
            source, target = (str(ipaddress.IPv4Address(body[i : i + 4])) for i in (14, 24))
            return Packet(now, outgoing, "arp", source, target, 0)
    return Packet(now, outgoing, f"ether-{kind:04x}", "", "", 0)


def _open(interface: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    made.setsockopt(socket.SOL_SOCKET, 33, 16 << 20)    # SO_RCVBUFFORCE: a burst must not be missed
    made.bind((interface, ETH_P_ALL))
    return made


def _name(number: int) -> str:
    return {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp6"}.get(number, f"ip-{number}")


def _flow(packet: Packet) -> tuple[str, int, str, int]:
    return packet.source, packet.source_port, packet.target, packet.port


def _ports(protocol: int, payload: bytes) -> tuple[int, int, bool]:
    """Destination's, source's, and whether it is a SYN without ACK (RFC 9293 section 3.1)."""
    if protocol not in (6, 17) or len(payload) < 4:
        return 0, 0, False
    begins = protocol == 6 and len(payload) > 13 and payload[13] & 0x12 == 0x02
    return int.from_bytes(payload[2:4], "big"), int.from_bytes(payload[:2], "big"), begins
