"""Where the API listens, as a person writes it, and where a request came from. Pure.

In: `unix:///path`, `HOST:PORT`, `[v6]:PORT`. Out: frozen addresses, or `SetupError` with what would be right. A host is
an address or `localhost`: what another name leads to is not this machine's to say.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from sandboxd.errors import SetupError

SOCKET = "sandboxd.sock"
MAX_SOCKET_PATH = 104
"""sun_path of the smallest system a client may run on, its NUL included."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """An absolute path."""

    path: Path

    def __str__(self) -> str:
        return f"unix://{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """`host` is an IP address, never a name."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """A wildcard address is not."""
        return ipaddress.ip_address(self.host).is_loopback


Address = UnixAddress | TcpAddress


@dataclass(frozen=True, slots=True)
class UnixPeer:
    """Who is on the other end, by SO_PEERCRED."""

    uid: int


@dataclass(frozen=True, slots=True)
class TcpPeer:
    """From where; who it is the token says."""

    host: str

    @property
    def network(self) -> str:
        """What one customer of a provider has for himself: an IPv4 address, or 64 bits of an IPv6 one."""
        address = ipaddress.ip_address(self.host.partition("%")[0])
        if address.version == 4:
            return str(address)
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


Peer = UnixPeer | TcpPeer


def parse(flag: str, text: str) -> Address:
    """Raises `SetupError` that starts with the flag and what was given."""
    if text.startswith("/"):
        raise SetupError(f"{flag} {text}: write unix://{text}")
    scheme, separator, rest = text.partition("://")
    if separator and scheme != "unix":
        raise SetupError(f"{flag} {text}: write HOST:PORT, or unix:///path/to/{SOCKET}")
    return _unix(flag, text, rest) if separator else tcp(flag, text)


def tcp(flag: str, text: str) -> TcpAddress:
    """A `HOST:PORT`. Port 0 is one the kernel chooses."""
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise SetupError(f"{flag} {text}: write HOST:PORT, as in 127.0.0.1:8443")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise SetupError(f"{flag} {text}: the port must be a number up to 65535")
    bracketed = host.startswith("[") and host.endswith("]")
    if host == "localhost":
        host = "127.0.0.1"
    try:
        found = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        raise SetupError(f"{flag} {text}: the host must be an IP address or localhost, no other name") from None
    if bracketed != (found.version == 6):
        raise SetupError(f"{flag} {text}: brackets are for IPv6 addresses, as in [::1]:8443, and for nothing else")
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped:
        raise SetupError(f"{flag} {text}: write the IPv4 address {found.ipv4_mapped}")
    return TcpAddress(str(found), int(port))


def _unix(flag: str, text: str, path: str) -> UnixAddress:
    if not path.startswith("/"):
        raise SetupError(f"{flag} {text}: the path must be absolute, as in unix:///path/to/{SOCKET}")
    if "\0" in path or len(os.fsencode(path)) >= MAX_SOCKET_PATH:
        raise SetupError(f"{flag} {text}: the path of a unix socket must be shorter than {MAX_SOCKET_PATH} bytes")
    return UnixAddress(Path(path))
