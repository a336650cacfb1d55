"""Processes killed, policies replaced and rules flushed while a guest tries the forbidden without pause.

A guest dials what no policy of the test allows and fetches what all of them allow. Whatever happens to the host's side
meanwhile, nothing forbidden may leave it, and the allowed comes back.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandboxd.assembly import instance
from sandboxd.client import NetworkRequest, Process
from tests.conftest import counts
from tests.daemon import BIN, Daemon
from tests.path.conftest import networked_daemon
from tests.world import frames
from tests.world import world as place
from tests.world.capture import Capture
from tests.world.guest import HOME, Guest, encoded, get, stream
from tests.world.hello import hello
from tests.world.world import World

pytestmark = pytest.mark.vm

# second.test is at PUBLIC_2, and no policy here allows it; nothing else is.
FORBIDDEN = place.PUBLIC_2
BASE = ("allowed.test",)


@pytest.fixture(scope="module")
def own(world: World, short_tmp: Path) -> Iterator[Daemon]:
    """A daemon to be killed."""
    with networked_daemon(world, short_tmp / "killed") as running:
        yield running
        leftover = [line for line in namespaces(world, running) if line]
        running.stop(end_sandboxes=True)
    assert leftover, "there was a namespace while there was a sandbox"
    assert namespaces(world, running) == []
    assert running.leftovers() == []
    assert "tap" not in world.host.run("ip", "-br", "link")
    assert "Traceback" not in running.log.read_text(errors="replace"), running.log.read_text(errors="replace")


@pytest.fixture(scope="module")
def victim(own: Daemon, world: World) -> Guest:
    return Guest(own, world, NetworkRequest(mode="allowlist", allow=BASE), "victim")


def namespaces(world: World, daemon: Daemon) -> list[str]:
    listed = world.host.run("ip", "netns", "list").split()
    return [name for name in listed if name.startswith(f"sbx-{instance(daemon.state)}-")]


def processes(daemon: Daemon, part: str) -> list[int]:
    """The pids of `egress` or `resolver`."""
    mark = f"/sandboxd/{instance(daemon.state)}/egress/{part}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark in arguments:
            found.append(int(entry.name))
    return found


@contextmanager
def insisting(guest: Guest, for_s: float) -> Iterator[tuple[Process, Capture]]:
    """The guest dials the forbidden and fetches the allowed until the block ends; then both are judged."""
    stop = f"{HOME}/stop"
    guest.run("rm", "-f", stop)
    plain, secure = get("second.test"), hello("second.test")
    forbidden = [
        (FORBIDDEN, 80, plain), (FORBIDDEN, 443, secure), (FORBIDDEN, place.SINK, b""), ("198.18.0.9", 22, b""),
        (FORBIDDEN, 80, b"CONNECT second.test:443 HTTP/1.1\r\nHost: second.test\r\n\r\n"),
    ]  # fmt: skip
    rows = [[address, port, encoded(piece)] for address, port, piece in forbidden]
    allowed = [[place.PUBLIC, 80, encoded(get("allowed.test")), "HTTP/1.1 200"]]
    process = guest.begin({"do": "insist", "forbidden": rows, "allowed": allowed, "for_s": for_s, "stop": stop})
    with guest.world.uplink() as uplink:
        fetched(uplink)
        yield process, uplink
        fetched(uplink)
        guest.run("touch", stop)
        figures = guest.finish(process).figures
        assert uplink.outgoing(FORBIDDEN) == [], figures
        assert figures["breaches"] == 0 and figures["tries"] > 10, figures
        assert figures["fetched"] > 0, figures


def fetched(uplink: Capture) -> None:
    """Waits until the guest has been through all its attempts once more, to the allowed one."""
    before, deadline = len(uplink.outgoing(place.PUBLIC, 80)), time.monotonic() + 60
    while len(uplink.outgoing(place.PUBLIC, 80)) <= before + 20:
        assert time.monotonic() < deadline, "the allowed does not get out"
        time.sleep(0.1)


def works_again(guest: Guest, timeout_s: float = 60, each_s: float = 3) -> int:
    """How many tries an allowed fetch takes to succeed, each given up after so long."""
    deadline = time.monotonic() + timeout_s
    tries = 0
    while time.monotonic() < deadline:
        tries += 1
        if guest.ask(stream(place.PUBLIC, 80, get("allowed.test"), wait_s=each_s))[0].came.startswith(b"HTTP/1.1 200 "):
            return tries
    raise AssertionError(f"not within {timeout_s} s")


def test_policies_replaced_during_traffic(victim: Guest) -> None:
    """Between two policies that both forbid a name nothing for it passes; what both allow goes on."""
    with insisting(victim, 600):
        for number in range(counts(100, 1000)):
            other = "other.test" if number % 2 else "www.wild.test"
            victim.allow(*BASE, other, deny=("second.test",) * (number % 3 == 0))
        victim.allow(*BASE)


def test_between_an_allowlist_and_open(victim: Guest) -> None:
    """The rules of the namespace change too, and with them what is redirected."""
    client = victim.daemon.client
    with insisting(victim, 600):
        for _ in range(counts(10, 100)):
            client.update(victim.id, network=NetworkRequest(mode="open", deny=("second.test",)))
            victim.allow(*BASE)


@pytest.mark.parametrize("part", ["egress", "resolver"])
def test_egress_killed_during_traffic(victim: Guest, own: Daemon, seed: random.Random, part: str) -> None:
    def address() -> bytes:
        return victim.ask({"do": "resolve", "name": "allowed.test"})[0].came

    before = address()
    with insisting(victim, 900):
        for _ in range(counts(2, 50)):
            (pid,) = wait_for_one(own, part)
            os.kill(pid, signal.SIGKILL)
            time.sleep(seed.uniform(0.05, 2))
        wait_for_one(own, part)
        works_again(victim)
    assert before.startswith(b"198.18.") and address() == before, "a name keeps its address"


def wait_for_one(daemon: Daemon, part: str, timeout_s: float = 60) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while len(found := processes(daemon, part)) != 1:
        assert time.monotonic() < deadline, f"{part}: {found}"
        time.sleep(0.05)
    return found


def test_sandboxd_killed_during_traffic(victim: Guest, own: Daemon, seed: random.Random) -> None:
    """egress goes on without it, and is taken back."""
    before = processes(own, "egress")
    with insisting(victim, 1200):
        for _ in range(counts(2, 50)):
            own.kill()
            time.sleep(seed.uniform(0.05, 1.5))
            own.start()
            victim.allow(*BASE)
        works_again(victim)
    assert processes(own, "egress") == before, "the same process all the time"


def test_everything_killed_at_once(victim: Guest, own: Daemon) -> None:
    with insisting(victim, 120):
        own.kill()
        for part in ("egress", "resolver"):
            for pid in processes(own, part):
                os.kill(pid, signal.SIGKILL)
        time.sleep(1)
        own.start()
        works_again(victim)


def test_rules_flushed_in_the_hosts_namespace(victim: Guest, world: World) -> None:
    """An administrator's `nft flush ruleset`: none of ours is there."""
    with insisting(victim, 120):
        world.host.run("nft", "flush", "ruleset")
        time.sleep(1)
        assert works_again(victim, each_s=20) == 1


def test_rules_flushed_in_the_sandboxs_namespace(victim: Guest, world: World, own: Daemon) -> None:
    """Even there nothing passes: without rules the namespace leads nowhere. Another policy brings them back."""
    with insisting(victim, 120):
        world.host.run("ip", "netns", "exec", victim.namespace, "nft", "flush", "ruleset")
        told = victim.ask(
            stream(place.PUBLIC, 80, get("allowed.test"), wait_s=2),
            stream(frames.HOST, 3128, get("second.test"), wait_s=2),
        )
        assert not any(each.came.startswith(b"HTTP/1.1 200 ") for each in told), told
        victim.allow(*BASE, "other.test")
        works_again(victim)
        victim.allow(*BASE)


# What docker and firewalld put beside ours: a forward chain that drops, an input chain that lets in answers.
BESIDE = """
table ip filter {
    chain FORWARD { type filter hook forward priority 0; policy drop; }
    chain INPUT { type filter hook input priority 0; policy accept; }
}
table inet firewalld {
    chain filter_INPUT {
        type filter hook input priority 10; policy accept;
        ct state { established, related } accept
        iifname "lo" accept
        ct state invalid drop
        reject with icmpx admin-prohibited
    }
    chain filter_FORWARD {
        type filter hook forward priority 10; policy accept;
        ct state { established, related } accept
        reject with icmpx admin-prohibited
    }
}
table ip nat {
    chain DOCKER { }
    chain PREROUTING {
        type nat hook prerouting priority -100; policy accept;
        fib daddr type local jump DOCKER
    }
    chain POSTROUTING {
        type nat hook postrouting priority 100; policy accept;
        ip saddr 172.17.0.0/16 masquerade
    }
}
"""


def test_rules_of_docker_and_firewalld_beside_ours(own: Daemon, victim: Guest, world: World) -> None:
    world.host.run("nft", "-f", "-", stdin=BESIDE)
    listed = world.host.run("nft", "list", "ruleset")
    try:
        with insisting(victim, 120):
            assert works_again(victim, each_s=20) == 1
            fresh = Guest(own, world, NetworkRequest(mode="allowlist", allow=BASE), "beside")
            works_again(fresh)
            own.client.delete(fresh.id)
        assert world.host.run("nft", "list", "ruleset") == listed, "what is not ours is as it was"
    finally:
        world.host.run("nft", "flush", "ruleset")


def test_somebody_elses_namespaces_and_taps_are_left_alone(own: Daemon, world: World) -> None:
    """Also those whose names look like ours: another daemon's."""
    foreign = ["sbx-000000000000-0123456789abcdef", "blue"]
    for name in foreign:
        world.host.run("ip", "netns", "add", name)
    world.host.run("ip", "tuntap", "add", "dev", "tap0", "mode", "tap")
    try:
        own.kill()
        own.start()
        fresh = Guest(own, world, NetworkRequest(mode="allowlist", allow=BASE), "apart")
        works_again(fresh)
        own.client.delete(fresh.id)
        assert set(foreign) <= set(world.host.run("ip", "netns", "list").split())
        assert "tap0" in world.host.run("ip", "-br", "link")
    finally:
        for name in foreign:
            world.host.run("ip", "netns", "delete", name)
        world.host.run("ip", "link", "delete", "tap0")


def test_a_namespace_of_ours_without_a_sandbox_is_removed(own: Daemon, world: World) -> None:
    orphan = f"sbx-{instance(own.state)}-00112233445566ff"
    world.host.run("ip", "netns", "add", orphan)
    own.kill()
    own.start()
    assert orphan not in world.host.run("ip", "netns", "list").split()


@pytest.mark.soak
def test_creates_killed_at_random_moments_leave_no_network(own: Daemon, world: World, seed: random.Random) -> None:
    for _ in range(25):
        client = subprocess.Popen(
            [str(BIN / "sandbox-cli"), "run", "--memory", "512", "--allow", "allowed.test", "--", "sleep", "30"],
            env=own.environment(), cwd="/", stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(seed.uniform(0.05, 8))
        own.kill()
        client.wait(60)
        own.start()
        for sandbox in own.client.sandboxes():
            if sandbox.state != "terminated" and sandbox.name != "victim":
                own.client.delete(sandbox.id)
        left = namespaces(world, own)
        assert len(left) <= 1, left
