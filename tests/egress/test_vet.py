"""Which addresses are public."""

from __future__ import annotations

import ipaddress

import pytest

from egress.vet import Reach, reach, usable

PUBLIC, PRIVATE, NEVER = Reach


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", PUBLIC),
        ("1.0.0.0", PUBLIC),
        ("9.255.255.255", PUBLIC),
        ("11.0.0.0", PUBLIC),
        ("100.63.255.255", PUBLIC),
        ("100.128.0.0", PUBLIC),
        ("172.15.255.255", PUBLIC),
        ("172.32.0.0", PUBLIC),
        ("192.167.255.255", PUBLIC),
        ("192.169.0.0", PUBLIC),
        ("198.17.255.255", PUBLIC),
        ("198.20.0.0", PUBLIC),
        ("223.255.255.255", PUBLIC),
        ("2606:4700::1111", PUBLIC),
        ("2001:4860:4860::8888", PUBLIC),
        ("2a00::1", PUBLIC),
        ("2620:4f:8000::1", PUBLIC),
        ("::ffff:8.8.8.8", PUBLIC),
        ("64:ff9b::8.8.8.8", PUBLIC),
        ("10.0.0.5", PRIVATE),
        ("172.16.0.1", PRIVATE),
        ("172.31.255.255", PRIVATE),
        ("192.168.1.1", PRIVATE),
        ("100.64.0.1", PRIVATE),
        ("192.0.2.1", PRIVATE),
        ("198.51.100.7", PRIVATE),
        ("203.0.113.7", PRIVATE),
        ("192.0.0.8", PRIVATE),
        ("fd12:3456::1", PRIVATE),
        ("fc00::1", PRIVATE),
        ("fec0::1", PRIVATE),
        ("2001:db8::1", PRIVATE),
        ("3fff::1", PRIVATE),
        ("::ffff:10.0.0.5", PRIVATE),
        ("64:ff9b::10.0.0.5", PRIVATE),
        ("2606:4700::5efe:10.0.0.5", PRIVATE),
        ("0.0.0.0", NEVER),
        ("0.1.2.3", NEVER),
        ("127.0.0.1", NEVER),
        ("127.255.255.255", NEVER),
        ("169.254.169.254", NEVER),
        ("100.100.100.200", NEVER),
        ("168.63.129.16", NEVER),
        ("192.0.0.192", NEVER),
        ("192.88.99.1", NEVER),
        ("198.18.0.1", NEVER),
        ("198.19.255.255", NEVER),
        ("224.0.0.1", NEVER),
        ("239.255.255.255", NEVER),
        ("240.0.0.1", NEVER),
        ("255.255.255.255", NEVER),
        ("::", NEVER),
        ("::1", NEVER),
        ("::127.0.0.1", NEVER),
        ("::8.8.8.8", NEVER),
        ("::ffff:127.0.0.1", NEVER),
        ("::ffff:7f00:1", NEVER),
        ("::ffff:169.254.169.254", NEVER),
        ("::ffff:0:127.0.0.1", NEVER),
        ("64:ff9b::127.0.0.1", NEVER),
        ("64:ff9b::169.254.169.254", NEVER),
        ("64:ff9b:1::1", NEVER),
        ("2002:7f00:1::", NEVER),
        ("2002:a00:5::1", NEVER),
        ("2001::1", NEVER),
        ("2001:0:7f00:1::", NEVER),
        ("2001:2::1", NEVER),
        ("2606:4700::200:5efe:127.0.0.1", NEVER),
        ("fe80::1", NEVER),
        ("fe80::1%eth0", NEVER),
        ("febf::1", NEVER),
        ("ff02::1", NEVER),
        ("ff0e::1", NEVER),
        ("100::1", NEVER),
        ("5f00::1", NEVER),
        ("4000::1", NEVER),
        ("fd00:ec2::254", NEVER),
        ("fd20:ce::254", NEVER),
        ("", NEVER),
        ("allowed.test", NEVER),
        ("127.1", NEVER),
        ("2130706433", NEVER),
        ("08.8.8.8", NEVER),
        ("8.8.8.8\0", NEVER),
        ("8.8.8.8 ", NEVER),
        ("[::1]", NEVER),
        ("é", NEVER),
    ],
)
def test_where_an_address_reaches(address: str, expected: Reach) -> None:
    assert reach(address) is expected


def test_nothing_that_python_calls_local_is_public() -> None:
    blocks = ["0.0.0.0/8", "10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16",
              "100.64.0.0/10", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4", "fc00::/7", "fe80::/10", "fec0::/10",
              "ff00::/8", "2001:db8::/32", "2002::/16", "2001::/32"]  # fmt: skip
    for block in blocks:
        network = ipaddress.ip_network(block)
        middle = network.network_address + network.num_addresses // 2
        for address in (network.network_address, middle, network.broadcast_address):
            assert reach(str(address)) is not PUBLIC, address


MIXED = ["2606:4700::1", "2606:4700::2", "10.0.0.5", "8.8.8.8", "127.0.0.1", "8.8.4.4", "8.8.8.8", "fe80::1"]


@pytest.mark.parametrize(
    ("addresses", "private", "expected"),
    [
        pytest.param([], False, [], id="nothing"),
        pytest.param(["127.0.0.1", "::1"], True, [], id="nothing of use"),
        pytest.param(["10.0.0.5"], False, [], id="a private one"),
        pytest.param(["10.0.0.5"], True, ["10.0.0.5"], id="a private one, permitted"),
        pytest.param(["127.0.0.1"], True, [], id="loopback is never permitted"),
        pytest.param(MIXED, False, ["2606:4700::1", "8.8.8.8", "2606:4700::2", "8.8.4.4"], id="families by turns"),
        pytest.param(
            ["8.8.8.8", "8.8.4.4", "1.1.1.1", "2606:4700::1"],
            False,
            ["8.8.8.8", "2606:4700::1", "8.8.4.4", "1.1.1.1"],
            id="the first family stays first",
        ),
    ],
)
def test_what_is_tried_and_in_which_order(addresses: list[str], private: bool, expected: list[str]) -> None:
    assert usable(addresses, private) == expected
