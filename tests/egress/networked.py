"""What the tests of namespaces share: whether they can run here, and names of their own."""

from __future__ import annotations

import os
import secrets
import struct
import sys
from pathlib import Path

import pytest

from egress import network
from egress.policy import Mode, Policy
from egress.supervisor import Programs

STUB = str(Path(__file__).with_name("stub_egress.py"))
PROGRAMS = Programs((sys.executable, "-I", STUB, "egress"), (sys.executable, "-I", STUB, "resolver"))
UIDS = (964_096, 964_097)

ALLOWLIST = Policy(Mode.ALLOWLIST, allow=("allowed.test",))
OPEN = Policy(Mode.OPEN)
NONE = Policy(Mode.NONE)


def need_networks() -> None:
    """Skips, with the reason, where no network can be made."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    if lacks := network.missing():
        pytest.skip("; ".join(lacks))


def new_instance() -> str:
    return secrets.token_hex(6)


def new_sandbox() -> str:
    return f"sbx_{secrets.token_hex(8)}"


def pid_of(pidfd: int) -> int:
    text = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("Pid:")).split()[1])


def mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def ipv4(source: str, destination: str, protocol: int, payload: bytes) -> bytes:
    """RFC 791."""
    head = struct.pack(
        ">BBHHHBBH4s4s", 0x45, 0, 20 + len(payload), 7, 0, 64, protocol, 0,
        bytes(map(int, source.split("."))), bytes(map(int, destination.split("."))),
    )  # fmt: skip
    total = sum(struct.unpack(">10H", head))
    total = (total & 0xFFFF) + (total >> 16)
    return head[:10] + struct.pack(">H", ~total & 0xFFFF) + head[12:] + payload


def udp(source_port: int, destination_port: int, data: bytes) -> bytes:
    """RFC 768, without a checksum, as it may be over IPv4."""
    return struct.pack(">HHHH", source_port, destination_port, 8 + len(data), 0) + data
