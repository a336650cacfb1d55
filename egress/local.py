"""Which addresses lead back into this machine: asked of the kernel, for each address, when it is about to be dialled.

In: an address as text. Out: whether the kernel would deliver it here (or to everybody on a link). The socket is
opened while the network namespace is still the host's and power still there; asking needs none. The routing table
is what is asked because every other test has exceptions: `bind` succeeds for foreign addresses where
`ip_nonlocal_bind` is set, and interface lists do not show AnyIP ranges.
"""

from __future__ import annotations

import socket
import struct

_GETROUTE, _NEWROUTE, _ERROR, _REQUEST = 26, 24, 2, 1
_DST = 1
_UNICAST = (0, 1, 6, 7, 8)  # unspecified, unicast, black hole, unreachable, prohibited: none of them is delivered here
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address in IPv6's clothes
_HEADER = struct.Struct("=IHHII")
_ROUTE = struct.Struct("=BBBBBBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_NOT_ROUTED = (-101, -113, -22, -97)  # unreachable network or host; no such family here


class Local:
    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.bind((0, 0))
        self._socket.setblocking(False)
        self._turn = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def delivers(self, address: str) -> bool:
        """True where the kernel does not clearly say otherwise."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._turn = self._turn + 1 & 0xFFFFFFFF
        try:
            raw = socket.inet_pton(family, address)
            if raw.startswith(_MAPPED):
                family, raw = socket.AF_INET, raw[len(_MAPPED) :]
            self._socket.send(_request(family, raw, self._turn))
            while True:
                # The kernel answers within the call that asks. A turn that is not ours is left over from a fault.
                answer = self._socket.recv(4096)
                _, kind, _, turn, _ = _HEADER.unpack_from(answer)
                if turn == self._turn:
                    break
        except (OSError, struct.error):
            return True
        if kind == _NEWROUTE:
            return _ROUTE.unpack_from(answer, _HEADER.size)[7] not in _UNICAST
        if kind == _ERROR:
            return struct.unpack_from("=i", answer, _HEADER.size)[0] not in _NOT_ROUTED
        return True


def _request(family: int, raw: bytes, turn: int) -> bytes:
    route = _ROUTE.pack(family, len(raw) * 8, 0, 0, 0, 0, 0, 0, 0)
    body = route + _ATTRIBUTE.pack(_ATTRIBUTE.size + len(raw), _DST) + raw
    return _HEADER.pack(_HEADER.size + len(body), _GETROUTE, _REQUEST, turn, 0) + body
