"""Names and their own addresses."""

from __future__ import annotations

import ipaddress

import pytest

from egress.names import MOST, Full, Names


def test_a_name_keeps_its_address_and_says_so_once() -> None:
    names = Names()
    address, line = names.address("allowed.test")
    assert line == f"{address} allowed.test\n".encode()
    assert names.address("allowed.test") == (address, b"")
    assert names.name(address) == "allowed.test"
    assert names.address("other.test")[0] != address
    assert names.name("198.18.77.1") is None
    assert names.name("93.184.216.34") is None


def test_what_was_written_is_the_same_after_a_crash() -> None:
    names, written = Names(), b""
    given = {}
    for number in range(600):
        name = f"h{number}.test"
        given[name], line = names.address(name)
        written += line
    again = Names(written)
    assert {name: again.address(name) for name in given} == {name: (at, b"") for name, at in given.items()}
    fresh, line = again.address("new.test")
    assert fresh not in given.values() and line


def test_there_are_so_many_and_no_more() -> None:
    names = Names()
    addresses = [names.address(f"h{number}.test")[0] for number in range(MOST)]
    assert len(set(addresses)) == MOST == 4096
    net = ipaddress.ip_network("198.18.0.0/15")
    assert all(ipaddress.ip_address(address) in net for address in addresses)
    assert not any(address.endswith((".0", ".255")) for address in addresses)
    with pytest.raises(Full):
        names.address("one.too.many.test")
    assert names.address("h0.test") == (addresses[0], b"")      # those there are still work


def test_a_torn_last_line_does_not_swallow_the_next() -> None:
    address, line = Names().address("allowed.test")
    for cut in range(1, len(line)):
        torn = line[:cut]
        names = Names(torn)
        fresh, appended = names.address("other.test")
        assert appended.startswith(b"\n")
        assert names.address("third.test")[1][:1] != b"\n"
        again = Names(torn + appended)
        assert again.name(fresh) == "other.test"
        assert again.address("other.test") == (fresh, b"")
        assert again.name(address) == names.name(address)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"198.18.0.1",
        b"198.18.0.1 ",
        b"198.18.0.1 127.0.0.1",
        b"198.18.0.1 a\0b.test",
        b"198.18.0.01 a.test",
        b"198.18.0.0 a.test",
        b"198.18.0.255 a.test",
        b"198.18.200.1 a.test",
        b"10.18.0.1 a.test",
        b"198.18.0.1.2 a.test",
        b"198.18.0.-1 a.test",
        b"198.18..1 a.test",
        b"\xff\xfe",
        b"x" * 5000,
    ],
)
def test_an_odd_line_counts_for_nothing(line: bytes) -> None:
    names = Names(line + b"\n198.18.0.7 good.test\n")
    assert names.name("198.18.0.7") == "good.test"
    assert names.address("new.test")[0] == "198.18.0.8"


def test_an_address_is_the_first_ones_whatever_the_file_says() -> None:
    names = Names(b"198.18.0.1 a.test\n198.18.0.1 b.test\n198.18.0.2 a.test\n")
    assert names.name("198.18.0.1") == "a.test"
    assert names.address("a.test") == ("198.18.0.1", b"")
    assert names.address("b.test")[0] == "198.18.0.3"
