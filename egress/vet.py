"""Which addresses a name may resolve to.

In: addresses as the resolver gave them, in text. Out: those a connection may be tried to, in the order of trying.
The table is our own, from IANA's special-purpose registries (iana-ipv4-special-registry, iana-ipv6-special-registry,
read together with the RFC named in each row), because Python's `is_global` says yes to NAT64, 6to4, site-local and
multicast addresses. The host's own addresses are not known here: the proxy asks the kernel for those.
"""

from __future__ import annotations

import socket
from enum import IntEnum
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence


class Reach(IntEnum):
    """The higher, the stricter."""

    PUBLIC = 0
    PRIVATE = 1     # for names the operator lists as private
    NEVER = 2       # for no name


_P, _N = Reach.PRIVATE, Reach.NEVER

_IPV4: Final[tuple[tuple[str, Reach, str], ...]] = (
    ("0.0.0.0/8", _N, "this network, RFC 791: 0.0.0.0 reaches the host itself"),
    ("10.0.0.0/8", _P, "private use, RFC 1918"),
    ("100.64.0.0/10", _P, "shared address space (CGNAT), RFC 6598"),
    ("100.100.100.200/32", _N, "instance metadata of a cloud, within RFC 6598 space"),
    ("127.0.0.0/8", _N, "loopback, RFC 1122"),
    ("168.63.129.16/32", _N, "a cloud's host agent: a public number that never leaves the machine"),
    ("169.254.0.0/16", _N, "link local, RFC 3927: instance metadata"),
    ("172.16.0.0/12", _P, "private use, RFC 1918"),
    ("192.0.0.0/24", _P, "protocol assignments, RFC 6890"),
    ("192.0.0.192/32", _N, "instance metadata of a cloud, within RFC 6890 space"),
    ("192.0.2.0/24", _P, "documentation (TEST-NET-1), RFC 5737"),
    ("192.88.99.0/24", _N, "6to4 relay anycast, withdrawn by RFC 7526"),
    ("192.168.0.0/16", _P, "private use, RFC 1918"),
    ("198.18.0.0/15", _N, "benchmarking, RFC 2544: the addresses we answer names with"),
    ("198.51.100.0/24", _P, "documentation (TEST-NET-2), RFC 5737"),
    ("203.0.113.0/24", _P, "documentation (TEST-NET-3), RFC 5737"),
    ("224.0.0.0/4", _N, "multicast, RFC 5771"),
    ("240.0.0.0/4", _N, "reserved, RFC 1112; limited broadcast, RFC 919"),
)

# Only 2000::/3 is given out as global unicast (RFC 4291 §2.4), so everything outside of it starts as NEVER.
_IPV6: Final[tuple[tuple[str, Reach, str], ...]] = (
    ("2001::/23", _N, "protocol assignments, RFC 2928: Teredo (RFC 4380), benchmarking (RFC 5180), ORCHID (RFC 7343)"),
    ("2001:db8::/32", _P, "documentation, RFC 3849"),
    ("2002::/16", _N, "6to4, RFC 3056: carries any IPv4 address, its relays withdrawn by RFC 7526"),
    ("3fff::/20", _P, "documentation, RFC 9637"),
    ("fc00::/7", _P, "unique local, RFC 4193"),
    ("fd00:ec2::/32", _N, "instance metadata of a cloud, within RFC 4193 space"),
    ("fd20:ce::/32", _N, "instance metadata of a cloud, within RFC 4193 space"),
    ("fd00:42::42/128", _N, "instance metadata of a cloud, within RFC 4193 space"),
    ("fd00:c1::a9fe:a9fe/128", _N, "instance metadata of a cloud, within RFC 4193 space"),
    ("fec0::/10", _P, "site local, deprecated by RFC 3879"),
)

# What is only another way to write an IPv4 address is that address. (The local-use 64:ff9b:1::/48 of RFC 8215 may
# carry one in four places and is not in 2000::/3: NEVER.)
_EMBEDDING: Final = (
    ("::ffff:0:0/96", "IPv4-mapped, RFC 4291 §2.5.5.2"),
    ("64:ff9b::/96", "NAT64, RFC 6052"),
)
_ISATAP: Final = (0x00005EFE, 0x02005EFE)    # interface identifiers, RFC 5214 §6.1; an IPv4 address behind them


def _range(text: str) -> tuple[int, int]:
    base, _, length = text.partition("/")
    family = socket.AF_INET6 if ":" in base else socket.AF_INET
    first = int.from_bytes(socket.inet_pton(family, base), "big")
    bits = (128 if family == socket.AF_INET6 else 32) - int(length)
    return first, first | (1 << bits) - 1


_RANGES4: Final = tuple((*_range(text), reach) for text, reach, _ in _IPV4)
_RANGES6: Final = tuple((*_range(text), reach) for text, reach, _ in _IPV6)
_EMBEDDING6: Final = tuple(_range(text) for text, _ in _EMBEDDING)
_GLOBAL6: Final = _range("2000::/3")
_LOCAL6: Final = (_range("fc00::/7"), _range("fec0::/10"))


def reach(address: str) -> Reach:
    try:
        if ":" not in address:
            return _reach4(int.from_bytes(socket.inet_pton(socket.AF_INET, address), "big"))
        return _reach6(int.from_bytes(socket.inet_pton(socket.AF_INET6, address), "big"))
    except (OSError, ValueError):       # with a scope, a NUL, or not an address at all
        return Reach.NEVER


def _reach4(number: int) -> Reach:
    return max((reach for first, last, reach in _RANGES4 if first <= number <= last), default=Reach.PUBLIC)


def _reach6(number: int) -> Reach:
    low = number & 0xFFFFFFFF
    for first, last in _EMBEDDING6:
        if first <= number <= last:
            return _reach4(low)
    if not any(first <= number <= last for first, last in (_GLOBAL6, *_LOCAL6)):
        return Reach.NEVER
    found = max((reach for first, last, reach in _RANGES6 if first <= number <= last), default=Reach.PUBLIC)
    return max(found, _reach4(low)) if number >> 32 & 0xFFFFFFFF in _ISATAP else found


def usable(addresses: Sequence[str], private: bool) -> list[str]:
    """Those that may be tried, in their order, the families by turns (RFC 8305 §4)."""
    most = Reach.PRIVATE if private else Reach.PUBLIC
    good = [address for address in dict.fromkeys(addresses) if reach(address) <= most]
    if not good:
        return []
    second = [address for address in good if (":" in address) != (":" in good[0])]
    first = [address for address in good if (":" in address) == (":" in good[0])]
    return [address for pair in zip_longest(first, second) for address in pair if address is not None]
