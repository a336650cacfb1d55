"""What eth0 is told, as the kernel's structures; that it takes them is seen in a real machine (tests/vm)."""

from __future__ import annotations

import pytest

from guestd import link


@pytest.mark.parametrize(
    ("prefix", "mask"), [(8, "ff000000"), (24, "ffffff00"), (30, "fffffffc"), (31, "fffffffe")]
)
def test_netmask(prefix: int, mask: str) -> None:
    assert link.netmask(prefix).hex() == mask


def test_a_default_route_is_a_struct_rtentry() -> None:
    raw = link.default_route("172.16.0.1")
    assert len(raw) == 120, "sizeof(struct rtentry) on x86-64, linux/route.h"
    nowhere = "02000000" + "0" * 24
    assert raw[8:24].hex() == nowhere
    assert raw[24:40].hex() == "02000000ac100001" + "0" * 16
    assert raw[40:56].hex() == nowhere
    assert raw[56:].hex() == "0300" + "0" * 124, "up, through a gateway"


def test_a_resolver_and_no_search_list() -> None:
    assert link.resolv_conf("172.16.0.1") == b"nameserver 172.16.0.1\n"
