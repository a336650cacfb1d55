"""The machine's one network interface: address, route and resolver as `configure` says them.

In: the request's "network", checked by the protocol. Out: eth0 up, without IPv6, with one route through the
gateway. The kernel of the guest has no other way to learn them: no DHCP, nothing on its command line. Loaded
only in a machine that has a network.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Final

DEVICE: Final = "eth0"

# linux/sockios.h, linux/if.h, linux/route.h
_SIOCADDRT: Final = 0x890B
_SIOCSIFFLAGS: Final = 0x8914
_SIOCSIFADDR: Final = 0x8916
_SIOCSIFNETMASK: Final = 0x891C
_SIOCSIFMTU: Final = 0x8922
_IFF_UP_RUNNING: Final = 0x41
_RTF_UP_GATEWAY: Final = 0x3

_IFREQ: Final = struct.Struct("16s24s")
_RTENTRY: Final = struct.Struct("8x16s16s16sH2x4x8x8xh6x8x8x8x8x")


def bring_up(network: Mapping[str, Any]) -> None:
    """Raises OSError with the first call that failed; ENODEV: the machine has no interface."""
    address, _, prefix = network["address"].partition("/")
    # Before it is up: the kernel would give it a link-local address by itself. An operator's may have no IPv6 at all.
    if os.path.exists("/proc/sys/net/ipv6"):
        with open(f"/proc/sys/net/ipv6/conf/{DEVICE}/disable_ipv6", "w") as switch:
            switch.write("1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFMTU, _request(struct.pack("i", network["mtu"])))
        fcntl.ioctl(any_socket, _SIOCSIFADDR, _request(_sockaddr(socket.inet_aton(address))))
        fcntl.ioctl(any_socket, _SIOCSIFNETMASK, _request(_sockaddr(netmask(int(prefix)))))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _request(struct.pack("h", _IFF_UP_RUNNING)))
        fcntl.ioctl(any_socket, _SIOCADDRT, default_route(network["gateway"]))


def resolv_conf(resolver: str) -> bytes:
    """No search list: a name is asked for as it was written."""
    return f"nameserver {resolver}\n".encode()


def netmask(prefix: int) -> bytes:
    return struct.pack(">I", (1 << 32) - (1 << (32 - prefix)))


def default_route(gateway: str) -> bytes:
    """A struct rtentry."""
    anywhere = _sockaddr(bytes(4))
    return _RTENTRY.pack(anywhere, _sockaddr(socket.inet_aton(gateway)), anywhere, _RTF_UP_GATEWAY, 0)


def _request(value: bytes) -> bytes:
    return _IFREQ.pack(DEVICE.encode(), value)


def _sockaddr(address: bytes) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, address)
