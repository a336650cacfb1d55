"""Namespaces, taps and sockets of the real kernel, and what a crash leaves of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from egress import link, nft, plan, ruleset
from egress.link import LinkError
from egress.nft import NftError
from egress.plan import NAMESPACES, Plan
from egress.policy import Mode
from tests.conftest import counts
from tests.egress.networked import need_networks, new_instance, new_sandbox

pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def networks() -> None:
    need_networks()


@pytest.fixture
def its() -> Iterator[Plan]:
    its = plan.of(new_instance(), new_sandbox())
    yield its
    link.delete(its)


def namespaces() -> set[str]:
    with suppress(FileNotFoundError):
        return set(os.listdir(NAMESPACES))
    return set()


def inside(its: Plan, *argv: str) -> str:
    return subprocess.check_output(["nsenter", f"--net={NAMESPACES}/{its.namespace}", *argv], text=True)


def test_a_namespace_has_the_tap_and_nothing_else_and_no_way_out(its: Plan) -> None:
    tap = link.make(its)
    try:
        assert inside(its, "ip", "-o", "link").count("\n") == 2
        assert "state DOWN" in inside(its, "ip", "-o", "link", "show", "tap0")
        nft.apply(ruleset.text(its, Mode.ALLOWLIST), its.namespace)
        link.settle(its)
        link.bring_up(its)
        assert inside(its, "ip", "route").split() == [
            *("172.16.0.0/30", "dev", "tap0", "proto", "kernel", "scope", "link", "src", "172.16.0.1")
        ]
        assert inside(its, "ip", "-6", "addr") == ""
        assert "06:00:ac:10:00:02 PERMANENT" in inside(its, "ip", "neigh")
        assert "06:00:ac:10:00:01" in inside(its, "ip", "link", "show", "tap0")
        assert inside(its, "cat", "/proc/sys/net/ipv4/ip_forward") == "0\n"
        assert inside(its, "cat", "/proc/sys/net/ipv4/conf/tap0/rp_filter") == "1\n"
    finally:
        os.close(tap)


def test_the_caller_stays_where_it_is(its: Plan) -> None:
    before = os.readlink("/proc/thread-self/ns/net")
    os.close(link.make(its))
    assert os.readlink("/proc/thread-self/ns/net") == before
    assert link.inside(its, lambda: os.readlink("/proc/thread-self/ns/net")) != before
    assert os.readlink("/proc/thread-self/ns/net") == before


def test_the_sockets_are_in_the_namespace_and_do_not_block(its: Plan) -> None:
    tap = link.make(its)
    try:
        link.bring_up(its)
        made = link.sockets(its)
        listing = inside(its, "ss", "-Hlntu")
        assert {"172.16.0.1:3128", "172.16.0.1:7353"} <= set(listing.split())
        assert not any(os.get_blocking(fd) for fd in (made.proxy, made.dns_udp, made.dns_tcp))
        made.close()
        link.sockets(its).close()
    finally:
        os.close(tap)


def test_a_tap_is_there_as_long_as_somebody_holds_it(its: Plan) -> None:
    tap = link.make(its)
    assert link.exists(its)
    os.close(tap)
    assert not link.exists(its)
    with pytest.raises(LinkError, match="tap0 is gone"):
        link.take_down(its)


def test_a_name_that_is_taken_stays_with_who_has_it(its: Plan) -> None:
    subprocess.check_call(["ip", "netns", "add", its.namespace])
    subprocess.check_call(["ip", "-n", its.namespace, "tuntap", "add", "tap0", "mode", "tap"])
    before = os.stat(f"{NAMESPACES}/{its.namespace}").st_ino
    with pytest.raises(LinkError, match="is there already"):
        link.make(its)
    assert os.stat(f"{NAMESPACES}/{its.namespace}").st_ino == before
    assert "tap0" in inside(its, "ip", "-o", "link")


def test_a_tap_that_is_there_is_not_opened(its: Plan) -> None:
    """Two guests would share a wire."""
    tap = link.make(its)
    try:
        with pytest.raises(OSError, match="resource busy"):
            link.inside(its, lambda: link._tap(its.interface))
    finally:
        os.close(tap)


def test_what_was_deleted_can_be_deleted_again(its: Plan) -> None:
    tap = link.make(its)
    link.delete(its)
    link.delete(its)
    assert its.namespace not in namespaces()
    with pytest.raises(OSError, match="descriptor in bad state"):
        os.read(tap, 100)
    os.close(tap)


def test_only_the_instances_own_namespaces_are_listed(its: Plan) -> None:
    other = plan.of(new_instance(), new_sandbox())
    instance = its.namespace.split("-")[1]
    taps = [link.make(its), link.make(other)]
    try:
        assert [plan.of(instance, id) for id in link.sandboxes(instance)] == [its]
    finally:
        link.delete(other)
        for tap in taps:
            os.close(tap)


DYING = """
import os, sys
from egress import link, nft, plan, ruleset
from egress.policy import Mode
from pyroute2 import netns
its = plan.of(sys.argv[1], sys.argv[2])
step = sys.argv[3]
if step == "a file without a namespace":
    os.makedirs("/run/netns", exist_ok=True)
    os.close(os.open(f"/run/netns/{its.namespace}", os.O_CREAT | os.O_EXCL))
    os._exit(9)
if step == "a namespace without a tap":
    def attach():
        link._unshare()
        netns.attach(its.namespace, "thread-self")
    link.alone(attach)
    os._exit(9)
tap = link.make(its)
if step == "a tap":
    os._exit(9)
nft.apply(ruleset.text(its, Mode.ALLOWLIST), its.namespace)
if step == "rules":
    os._exit(9)
link.bring_up(its)
made = link.sockets(its)
os._exit(9)
"""


@pytest.mark.parametrize(
    "step", ["a file without a namespace", "a namespace without a tap", "a tap", "rules", "everything"]
)
def test_what_a_crash_leaves_is_found_by_name_and_deleted(its: Plan, step: str) -> None:
    instance, sandbox = its.namespace.split("-")[1], f"sbx_{its.namespace.split('-')[2]}"
    died = subprocess.run([sys.executable, "-c", DYING, instance, sandbox, step], timeout=30, check=False)
    assert died.returncode == 9
    assert link.sandboxes(instance) == [sandbox]
    link.delete(its)
    assert link.sandboxes(instance) == []


def test_sixteen_at_once_and_nothing_is_left() -> None:
    instance = new_instance()
    with ThreadPoolExecutor(16) as pool:
        for _ in range(counts(2, 20)):
            plans = [plan.of(instance, new_sandbox()) for _ in range(16)]
            taps = list(pool.map(link.make, plans))
            list(pool.map(link.bring_up, plans))
            assert len(link.sandboxes(instance)) == 16
            list(pool.map(link.delete, plans))
            for tap in taps:
                os.close(tap)
            assert link.sandboxes(instance) == []


def test_rules_that_do_not_load_change_nothing(its: Plan) -> None:
    tap = link.make(its)
    try:
        nft.apply(ruleset.text(its, Mode.OPEN), its.namespace)
        before = inside(its, "nft", "list", "ruleset")
        with pytest.raises(NftError, match="Could not process rule"):
            nft.apply(ruleset.text(its, Mode.NONE) + "\nadd rule inet sandbox nowhere accept\n", its.namespace)
        assert inside(its, "nft", "list", "ruleset") == before
    finally:
        os.close(tap)


def test_what_a_tap_receives_the_guest_has_sent(its: Plan) -> None:
    tap = link.make(its)
    try:
        link.bring_up(its)
        gone = plan.of(new_instance(), new_sandbox())
        before = link.traffic({"a": its, "gone": gone})
        assert before.keys() == {"a"}
        # A frame as the guest would send it (without offloads, virtio's header is ten zero bytes), of no protocol.
        for _ in range(3):
            os.write(tap, bytes(10) + bytes.fromhex("0600ac1000010600ac10000288b5") + bytes(500))
        assert link.traffic({"a": its})["a"][1] - before["a"][1] == 3 * 514
        # A neighbour that is known gets what is sent to it, over the tap; it counts once the machine has taken it.
        command = "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(bytes(700), ('172.16.0.2', 9))"
        inside(its, sys.executable, "-c", command)
        taken = len(os.read(tap, 4096)) - 10
        assert taken == 14 + 20 + 8 + 700
        assert link.traffic({"a": its})["a"][0] - before["a"][0] == taken
        assert link.traffic({}) == {}
    finally:
        os.close(tap)
    assert link.traffic({"a": its}) == {}, "the link is gone"
