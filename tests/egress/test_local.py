"""Which addresses the kernel says are this machine's, in a namespace that has some."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a namespace")

SETUP = """
ip link set lo up && ip link add d0 type veth peer d1 && ip link set d0 up && ip link set d1 up &&
ip addr add 45.90.7.1/24 dev d0 && ip addr add 45.90.7.9/24 dev d0 && ip addr add 2a0e:7::1/64 dev d0 nodad &&
ip route add local 203.0.113.0/24 dev lo && ip route add default via 45.90.7.2 &&
ip -6 route add default via 2a0e:7::2 &&
ip route add blackhole 198.51.100.0/24 && ip route add unreachable 192.0.2.0/24 &&
echo 1 >/proc/sys/net/ipv4/ip_nonlocal_bind &&
exec "$@"
"""
ASK = """
import os, sys
from egress.local import Local
local = Local()
os.setuid(65534)
print(*(int(local.delivers(address)) for address in sys.argv[1:]))
"""
OURS = [
    "127.0.0.1", "127.9.9.9", "45.90.7.1", "45.90.7.9", "203.0.113.77", "::1", "2a0e:7::1", "::ffff:45.90.7.1",
    "45.90.7.255", "255.255.255.255", "224.0.0.1", "ff02::1", "0.0.0.0", "rubbish", "",
]  # fmt: skip
OTHERS = ["45.90.7.2", "8.8.8.8", "2a0e:7::2", "2a0e:8::1", "::ffff:8.8.8.8", "198.51.100.1", "192.0.2.1", "10.0.0.1"]


def ask(addresses: list[str]) -> list[bool]:
    command = ["unshare", "--net", "sh", "-c", SETUP, "sh", sys.executable, "-c", ASK, *addresses]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return [answer == "1" for answer in done.stdout.split()]


def test_what_the_kernel_would_deliver_here_is_known_whatever_may_be_bound() -> None:
    answers = ask(OURS + OTHERS)
    assert [address for address, ours in zip(OURS + OTHERS, answers, strict=True) if ours] == OURS
