"""Which address of 198.18.0.0/15 stands for which name, in one sandbox's life.

In: the lines of the sandbox's names file, as they were left. Out: addresses, and the line to append for a new one,
which has to be in the file before the address is told to anybody. An address never serves a second name, whatever the
file holds: of two claims the first counts, a line that is torn or odd counts for nothing.
A line is "<address> <name>\\n".
"""

from __future__ import annotations

from typing import Final

from egress.policy import wire_name

MOST: Final = 4096
_BASE: Final = "198.18."                # RFC 2544, benchmarking: on no network that a guest could mean
_PER_BLOCK: Final = 254                 # no address ends in .0 or .255, which some programs take for a broadcast


class Full(Exception):
    """The sandbox has been given as many names as it gets."""


class Names:
    def __init__(self, lines: bytes = b"") -> None:
        self._addresses: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._next = 0
        self._torn = lines != b"" and not lines.endswith(b"\n")
        for line in lines.split(b"\n"):
            address, _, raw = line.partition(b" ")
            position, name = _position(address), wire_name(raw)
            if position is None or name is None:
                continue
            text = address.decode("ascii")
            self._next = max(self._next, position + 1)
            if text not in self._names:
                self._names[text] = name
                self._addresses.setdefault(name, text)

    def address(self, name: str) -> tuple[str, bytes]:
        """The name's address, and the line to append first (empty where the name has one already)."""
        known = self._addresses.get(name)
        if known is not None:
            return known, b""
        if self._next >= MOST:
            raise Full
        address = _address(self._next)
        self._next += 1
        self._addresses[name] = address
        self._names[address] = name
        line = f"{address} {name}\n".encode("ascii")
        if self._torn:
            self._torn, line = False, b"\n" + line
        return address, line

    def name(self, address: str) -> str | None:
        return self._names.get(address)


def _address(position: int) -> str:
    block, host = divmod(position, _PER_BLOCK)
    return f"{_BASE}{block}.{host + 1}"


def _position(address: bytes) -> int | None:
    parts = address.split(b".")
    if len(parts) != 4 or not all(part.isdigit() and len(part) <= 3 for part in parts):
        return None
    position = int(parts[2]) * _PER_BLOCK + int(parts[3]) - 1
    if not 0 <= position < MOST:
        return None
    return position if _address(position).encode("ascii") == address else None
