"""Names asked of a resolver and answers handed out, over a real SEQPACKET socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from egress import lookup
from egress.lookup import Lookups, Share


class Rig:
    def __init__(self) -> None:
        ours, self.resolver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.blocked: list[bool] = []
        self.heard: list[tuple[str, list[str], str]] = []
        self.lookups = Lookups(ours, self.blocked.append)

    def want(self, share: Share, name: str, now: float = 0.0) -> bool:
        def hear(addresses: list[str], reason: str) -> None:
            self.heard.append((name, addresses, reason))

        return self.lookups.want(share, name, hear, now)

    def asked(self) -> list[tuple[bytes, str]]:
        """What has arrived at the resolver: id and name."""
        found = []
        while True:
            try:
                id, _, name = self.resolver.recv(512, socket.MSG_DONTWAIT).partition(b" ")
            except BlockingIOError:
                return found
            found.append((id, name.decode()))

    def close(self) -> None:
        self.lookups.resolver.close()
        self.resolver.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_askers_of_a_name_in_flight_share_its_answer_and_the_next_asks_anew(rig: Rig) -> None:
    share = Share()
    for _ in range(3):
        assert rig.want(share, "allowed.test")
    rig.lookups.flush()
    ((id, name),) = rig.asked()
    assert name == "allowed.test"
    rig.resolver.send(id + b" ok 192.0.2.1 2001:db8::1")
    assert rig.lookups.ready()
    assert rig.heard == [("allowed.test", ["192.0.2.1", "2001:db8::1"], "")] * 3
    rig.want(share, "allowed.test")
    rig.lookups.flush()
    ((again, _),) = rig.asked()
    assert again != id
    rig.resolver.send(again + b" no EAI_NONAME")
    rig.lookups.ready()
    assert rig.heard[-1] == ("allowed.test", [], "EAI_NONAME")


def test_a_sandbox_has_its_share_and_another_does_not_wait_for_it(rig: Rig) -> None:
    hog, other = Share(), Share()
    wanted = [f"n{number}.test" for number in range(40)]
    for name in wanted:
        assert rig.want(hog, name)
    assert rig.want(other, "allowed.test")
    rig.lookups.flush()
    first = rig.asked()
    assert [name for _, name in first] == [*wanted[: lookup.IN_FLIGHT], "allowed.test"]
    for id, _ in first[:4]:
        rig.resolver.send(id + b" ok 192.0.2.1")
    rig.lookups.ready()
    rig.lookups.flush()
    assert [name for _, name in rig.asked()] == wanted[lookup.IN_FLIGHT : lookup.IN_FLIGHT + 4]


def test_a_name_that_takes_too_long_is_given_up_and_still_counts_in_its_share(rig: Rig) -> None:
    share = Share()
    names = [f"n{number}.test" for number in range(lookup.IN_FLIGHT + 1)]
    for name in names:
        rig.want(share, name, 100.0)
    rig.lookups.flush()
    asked = rig.asked()
    rig.lookups.expire(100.0 + lookup.DEADLINE_S - 0.1)
    assert rig.heard == [] and rig.lookups.wait_s(109.0) == pytest.approx(1.0)
    rig.lookups.expire(100.0 + lookup.DEADLINE_S)
    assert rig.heard == [(name, [], lookup.TIMED_OUT) for name in names]
    # The resolver is still busy with them, so there is no turn left; its late answer gives one back.
    rig.want(share, "later.test", 111.0)
    rig.lookups.flush()
    assert rig.asked() == []
    rig.resolver.send(asked[0][0] + b" ok 192.0.2.1")
    rig.lookups.ready()
    rig.lookups.flush()
    assert [name for _, name in rig.asked()] == ["later.test"]
    assert len(rig.heard) == len(names)


def test_too_many_waiting_names_are_turned_away(rig: Rig) -> None:
    share = Share()
    for number in range(lookup.IN_FLIGHT + lookup.WAITING):
        assert rig.want(share, f"n{number}.test")
    assert not rig.want(share, "one-more.test")
    assert rig.want(share, "n5.test") and rig.want(Share(), "one-more.test")


def test_who_has_gone_is_not_told_and_not_kept(rig: Rig) -> None:
    share = Share()
    told: list[str] = []

    def gone(addresses: list[str], reason: str) -> None:
        told.append(reason)

    assert rig.lookups.want(share, "allowed.test", gone, 0.0)
    assert rig.want(share, "allowed.test")
    rig.lookups.drop(share, "allowed.test", gone)
    rig.lookups.drop(share, "never.test", gone)
    rig.lookups.flush()
    rig.resolver.send(rig.asked()[0][0] + b" ok 192.0.2.1")
    rig.lookups.ready()
    assert told == [] and len(rig.heard) == 1


def test_a_name_has_only_so_many_waiting(rig: Rig) -> None:
    share = Share()
    assert all(rig.want(share, "allowed.test") for _ in range(lookup.WAITERS))
    assert not rig.want(share, "allowed.test")


def test_a_full_socket_is_said_and_nothing_is_lost(rig: Rig) -> None:
    shares = [Share() for _ in range(100)]
    wanted = [f"n{number}.test" for number in range(len(shares) * 10)]
    for number, name in enumerate(wanted):
        rig.want(shares[number // 10], name)
    rig.lookups.flush()
    assert rig.blocked == [True]
    arrived = rig.asked()
    while len(arrived) < len(wanted):
        rig.lookups.flush()
        arrived += rig.asked()
    assert [name for _, name in arrived] == wanted
    assert rig.blocked[-1] is False


def test_a_new_resolver_is_asked_what_the_old_one_has_not_answered(rig: Rig) -> None:
    share = Share()
    for name in ("a.test", "b.test", "c.test"):
        rig.want(share, name)
    rig.lookups.flush()
    rig.resolver.send(rig.asked()[0][0] + b" ok 192.0.2.1")
    rig.lookups.ready()
    rig.resolver.close()
    assert not rig.lookups.ready()
    rig.want(share, "d.test")
    rig.lookups.flush()
    ours, rig.resolver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rig.lookups.replace(ours)
    asked = rig.asked()
    assert [name for _, name in asked] == ["b.test", "c.test", "d.test"]
    for id, _ in asked:
        rig.resolver.send(id + b" ok 192.0.2.2")
    rig.lookups.ready()
    assert [name for name, *_ in rig.heard] == ["a.test", "b.test", "c.test", "d.test"]


def test_nobody_hears_for_a_sandbox_that_has_gone(rig: Rig) -> None:
    share = Share()
    for number in range(lookup.IN_FLIGHT + 5):
        rig.want(share, f"n{number}.test")
    rig.lookups.flush()
    ids = [id for id, _ in rig.asked()]
    rig.lookups.forget(share)
    for id in ids:
        rig.resolver.send(id + b" ok 192.0.2.1")
    rig.lookups.ready()
    rig.lookups.expire(1e9)
    assert rig.heard == []


@pytest.mark.parametrize(
    "answer",
    [b"x ok 192.0.2.1", b"1", b"99 ok 192.0.2.1", b"1 ok", b"1 maybe", b"\xff\xfe", b"9" * 500, b"1 ok " + b"a" * 1900],
    ids=["no id", "nothing", "an id nobody has", "no address", "no verdict", "not text", "a long id", "rubbish"],
)
def test_an_odd_answer_allows_nothing(rig: Rig, answer: bytes) -> None:
    rig.want(Share(), "allowed.test")
    rig.lookups.flush()
    rig.asked()
    rig.resolver.send(answer)
    assert rig.lookups.ready()
    assert [address for _, addresses, _ in rig.heard for address in addresses] in ([], ["a" * 1900])
