"""The rules as text, and then in the kernel, in front of a guest that sends what it likes."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from egress import link, nft, plan, ruleset
from egress.plan import Plan
from egress.policy import Mode
from tests.conftest import counts
from tests.egress.networked import ipv4, mac, need_networks, new_instance, new_sandbox, udp
from tests.egress.tap_guest import Guest

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "egress"
SO_ORIGINAL_DST = 80
VNET_HEADER = bytes(10)
"""struct virtio_net_hdr: nothing left for the other side to do."""


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_the_text_of_a_mode(mode: Mode) -> None:
    text = ruleset.text(plan.of("0" * 12, f"sbx_{'0' * 16}"), mode)
    golden = GOLDEN / f"{mode.value}.nft"
    if os.environ.get("GOLDEN") == "write":
        golden.write_text(text)
    assert golden.read_text() == text, "run GOLDEN=write pytest tests/egress/test_ruleset.py and look at the difference"


class Host:
    """The host's side of a sandbox: link, rules, and sockets that answer with where something was going."""

    def __init__(self) -> None:
        self.plan: Plan = plan.of(new_instance(), new_sandbox())
        self.tap = link.make(self.plan)
        self.load(Mode.ALLOWLIST)
        link.settle(self.plan)
        link.bring_up(self.plan)
        made = link.sockets(self.plan)
        self._proxy, self._dns, self._dns_tcp = map(_blocking, (made.proxy, made.dns_udp, made.dns_tcp))
        for listener in (self._proxy, self._dns_tcp):
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        threading.Thread(target=self._answer, daemon=True).start()

    def load(self, mode: Mode) -> None:
        nft.apply(ruleset.text(self.plan, mode), self.plan.namespace)

    def counted(self, name: str) -> int:
        return nft.counters(self.plan.namespace)[name]

    def close(self) -> None:
        # Shut down first: threads that wait in them hold them open.
        for each in (self._proxy, self._dns, self._dns_tcp):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        link.delete(self.plan)
        os.close(self.tap)

    def _accept(self, listener: socket.socket) -> None:
        what = "proxy" if listener is self._proxy else "dns"
        kept = []
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                kept.append(connection)
                try:
                    target = connection.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
                except OSError:
                    connection.sendall(b"not redirected")
                    continue
                port, address = struct.unpack(">2xH4s8x", target)
                connection.sendall(f"{what} for {socket.inet_ntoa(address)}:{port}".encode())
                threading.Thread(target=_echo, args=(connection,), daemon=True).start()

    def _answer(self) -> None:
        with suppress(OSError):
            while True:
                data, sender = self._dns.recvfrom(65536)
                if sender is None:
                    return
                self._dns.sendto(b"re:" + data, sender)


def _echo(connection: socket.socket) -> None:
    with suppress(OSError):
        while data := connection.recv(65536):
            connection.sendall(data)


def _blocking(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    sock.setblocking(True)
    return sock


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    need_networks()
    its = Host()
    yield its
    its.close()


@pytest.fixture
def own_host() -> Iterator[Host]:
    """For a test that leaves it in no good state."""
    need_networks()
    its = Host()
    yield its
    its.close()


@pytest.fixture(scope="module")
def guest(host: Host) -> Iterator[Guest]:
    with Guest(host.plan, host.tap) as its:
        yield its


PORTS = itertools.cycle(range(20_000, 60_000))
"""Rules count the first packet from each."""

REFUSED, TO = "ConnectionRefusedError", "proxy for {}"


@pytest.mark.parametrize(
    ("mode", "address", "port", "outcome"),
    [
        (Mode.ALLOWLIST, "203.0.113.5", 443, TO),
        (Mode.ALLOWLIST, "203.0.113.5", 80, TO),
        (Mode.ALLOWLIST, "198.18.0.7", 443, TO),
        (Mode.ALLOWLIST, "198.18.0.7", 22, TO),
        (Mode.ALLOWLIST, "198.19.255.254", 5432, TO),
        (Mode.ALLOWLIST, "198.20.0.1", 22, REFUSED),
        (Mode.ALLOWLIST, "198.17.255.255", 22, REFUSED),
        (Mode.ALLOWLIST, "203.0.113.5", 22, REFUSED),
        (Mode.ALLOWLIST, "203.0.113.5", 3128, REFUSED),
        (Mode.ALLOWLIST, "203.0.113.5", 8443, REFUSED),
        (Mode.ALLOWLIST, "169.254.169.254", 8080, REFUSED),
        (Mode.ALLOWLIST, "172.16.0.1", 3128, REFUSED),
        (Mode.ALLOWLIST, "172.16.0.1", 7353, REFUSED),
        (Mode.ALLOWLIST, "172.16.0.1", 22, REFUSED),
        (Mode.ALLOWLIST, "8.8.8.8", 53, "dns for {}"),
        (Mode.ALLOWLIST, "172.16.0.1", 53, "dns for {}"),
        (Mode.ALLOWLIST, "8.8.8.8", 853, REFUSED),
        (Mode.OPEN, "203.0.113.5", 22, TO),
        (Mode.OPEN, "203.0.113.5", 443, TO),
        (Mode.OPEN, "198.18.0.7", 22, TO),
        (Mode.OPEN, "10.1.2.3", 8080, TO),
        (Mode.OPEN, "8.8.8.8", 53, "dns for {}"),
        (Mode.OPEN, "172.16.0.1", 3128, REFUSED),
        (Mode.OPEN, "172.16.0.1", 7353, REFUSED),
        (Mode.OPEN, "172.16.0.1", 22, REFUSED),
        (Mode.NONE, "203.0.113.5", 443, REFUSED),
        (Mode.NONE, "198.18.0.7", 22, REFUSED),
        (Mode.NONE, "172.16.0.1", 53, REFUSED),
        (Mode.NONE, "172.16.0.1", 3128, REFUSED),
    ],
    ids=lambda value: value.value if isinstance(value, Mode) else str(value),
)
@pytest.mark.root
def test_tcp_goes_to_the_proxy_or_is_refused_at_once(
    host: Host, guest: Guest, mode: Mode, address: str, port: int, outcome: str
) -> None:
    host.load(mode)
    assert guest.tcp(address, port) == outcome.format(f"{address}:{port}")


@pytest.mark.parametrize(
    ("mode", "address", "port", "outcome"),
    [
        (Mode.ALLOWLIST, "172.16.0.1", 53, "re:hello"),
        (Mode.ALLOWLIST, "8.8.8.8", 53, "re:hello"),
        (Mode.ALLOWLIST, "8.8.8.8", 443, REFUSED),
        (Mode.ALLOWLIST, "198.18.0.7", 443, REFUSED),
        (Mode.ALLOWLIST, "172.16.0.1", 7353, REFUSED),
        (Mode.ALLOWLIST, "172.16.0.1", 9, REFUSED),
        (Mode.OPEN, "8.8.8.8", 53, "re:hello"),
        (Mode.OPEN, "8.8.8.8", 443, REFUSED),
        (Mode.OPEN, "172.16.0.1", 7353, REFUSED),
        (Mode.NONE, "172.16.0.1", 53, REFUSED),
        (Mode.NONE, "8.8.8.8", 123, REFUSED),
    ],
    ids=lambda value: value.value if isinstance(value, Mode) else str(value),
)
@pytest.mark.root
def test_of_udp_only_dns_is_answered(
    host: Host, guest: Guest, mode: Mode, address: str, port: int, outcome: str
) -> None:
    """An answer must come from the address that was asked, or a connected socket would not take it."""
    host.load(mode)
    assert guest.udp(address, port) == outcome


@pytest.mark.root
def test_refusals_are_not_limited_to_one_a_second(host: Host, guest: Guest) -> None:
    host.load(Mode.ALLOWLIST)
    started = time.monotonic()
    assert {guest.udp("203.0.113.5", 443) for _ in range(50)} == {REFUSED}
    assert time.monotonic() - started < 25


@pytest.mark.root
def test_a_large_datagram_is_refused_as_a_small_one_is(host: Host, guest: Guest) -> None:
    host.load(Mode.ALLOWLIST)
    assert guest.udp("203.0.113.5", 443, b"x" * 8000) == REFUSED


@pytest.mark.root
def test_one_source_port_may_have_many_destinations(host: Host, guest: Guest) -> None:
    """All of them become connections from one address and port to one address and port."""
    host.load(Mode.ALLOWLIST)

    def dial() -> list[str]:
        held, answers = [], []
        for last in range(1, 20):
            connection = socket.socket()
            connection.settimeout(2)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            connection.bind(("", 5555))
            connection.connect((f"203.0.113.{last}", 443))
            answers.append(connection.recv(100).decode())
            held.append(connection)
        for connection in held:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        return answers

    assert guest.run(dial) == [f"proxy for 203.0.113.{last}:443" for last in range(1, 20)]


def dns_frame(host: Host, **changed: str | int | bytes) -> bytes:
    """A frame with a DNS question. What is changed makes it one that must not arrive."""
    packet = ipv4(
        str(changed.get("source", host.plan.guest_address)), "172.16.0.1", 17, udp(next(PORTS), 53, b"question")
    )
    return (
        mac(host.plan.host_mac)
        + mac(str(changed.get("mac", host.plan.guest_mac)))
        + bytes(changed.get("tag", b""))  # type: ignore[arg-type]
        + struct.pack(">H", int(changed.get("type", 0x0800)))
        + packet
    )


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"source": "172.16.0.3"}, id="the link's broadcast address"),
        pytest.param({"source": "172.16.0.1"}, id="the host's own address"),
        pytest.param({"source": "127.0.0.1"}, id="loopback"),
        pytest.param({"source": "203.0.113.5"}, id="an address of the world"),
        pytest.param({"source": "0.0.0.0"}, id="no address"),
        pytest.param({"mac": "06:00:ac:10:00:09"}, id="another MAC"),
        pytest.param({"mac": "06:00:ac:10:00:01"}, id="the host's MAC"),
        pytest.param({"type": 0x86DD}, id="called IPv6"),
        pytest.param({"tag": b"\x81\x00\x00\x05"}, id="in a VLAN"),
        pytest.param({"type": 0x88CC}, id="of another protocol"),
    ],
)
@pytest.mark.root
def test_a_frame_that_says_it_is_from_somebody_else_is_dropped_and_counted(
    host: Host, guest: Guest, changed: dict[str, str | int | bytes]
) -> None:
    host.load(Mode.ALLOWLIST)
    before = nft.counters(host.plan.namespace)
    guest.send_frame(dns_frame(host, **changed))
    wait_until(lambda: host.counted("spoofed") > before["spoofed"])
    assert host.counted("answered") == before["answered"]
    # The same frame unchanged is answered: it is the change that was refused.
    guest.send_frame(dns_frame(host))
    wait_until(lambda: host.counted("answered") == before["answered"] + 1)


@pytest.mark.root
def test_whatever_the_guest_says_of_addresses_the_host_sends_to_the_guest(host: Host, guest: Guest) -> None:
    host.load(Mode.ALLOWLIST)
    before = host.counted("spoofed")
    for operation in (1, 2):
        arp = struct.pack(
            ">HHBBH6s4s6s4s", 1, 0x0800, 6, 4, operation, mac("06:00:ac:10:00:99"), socket.inet_aton("172.16.0.2"),
            mac(host.plan.host_mac), socket.inet_aton("172.16.0.1"),
        )  # fmt: skip
        guest.send_frame(b"\xff" * 6 + mac(host.plan.guest_mac) + b"\x08\x06" + arp)
    wait_until(lambda: host.counted("spoofed") > before)
    assert guest.tcp("203.0.113.5", 443) == "proxy for 203.0.113.5:443"


@pytest.mark.root
def test_a_connection_the_new_mode_forbids_is_cut(host: Host, guest: Guest) -> None:
    host.load(Mode.OPEN)

    def talk() -> tuple[str, str]:
        with (
            socket.create_connection(("203.0.113.5", 22), 2) as forbidden,
            socket.create_connection(("203.0.113.5", 443), 2) as allowed,
        ):
            for connection in (forbidden, allowed):
                connection.recv(100)
            host.load(Mode.ALLOWLIST)
            return _say(forbidden), _say(allowed)

    assert guest.run(talk) == ("ConnectionResetError", "hello")


def _say(connection: socket.socket) -> str:
    try:
        connection.sendall(b"hello")
        return connection.recv(100).decode()
    except OSError as fault:
        return type(fault).__name__


@pytest.mark.root
def test_while_modes_change_only_what_one_of_them_allows_arrives(host: Host, guest: Guest) -> None:
    """Neither mode lets port 22 of an address that is no name's through, both let 443."""
    host.load(Mode.NONE)
    stop = threading.Event()
    seen: dict[int, set[str]] = {22: set(), 443: set()}

    def knock(port: int) -> None:
        while not stop.is_set():
            seen[port].add(guest.tcp("203.0.113.5", port))

    threads = [threading.Thread(target=knock, args=(port,)) for port in seen]
    for thread in threads:
        thread.start()
    for turn in range(counts(40, 1000)):
        host.load(Mode.ALLOWLIST if turn % 2 == 0 else Mode.NONE)
    stop.set()
    for thread in threads:
        thread.join()
    assert seen[22] == {REFUSED}
    # A packet may meet the rules of both in turn: then it is dropped, and comes again.
    assert {"proxy for 203.0.113.5:443", REFUSED} <= seen[443]


@pytest.mark.root
def test_without_rules_the_namespace_leads_nowhere(own_host: Host) -> None:
    """Somebody may flush them."""
    its = own_host.plan
    with Guest(its, own_host.tap) as guest:
        assert guest.tcp("203.0.113.5", 443) == "proxy for 203.0.113.5:443"
        link.inside(its, lambda: nft.apply("flush ruleset"))
        assert guest.tcp("203.0.113.5", 443) in ("TimeoutError", "OSError")
        # The proxy sees that nobody sent this one to it, and refuses.
        assert guest.tcp(its.host_address, its.proxy_port) == "not redirected"
        own_host.load(Mode.ALLOWLIST)
        assert guest.tcp("203.0.113.5", 443) == "proxy for 203.0.113.5:443"


@pytest.mark.root
def test_a_flood_is_held_back_and_counted(own_host: Host) -> None:
    for _ in range(counts(20_000, 100_000)):
        # As the machine would: past the guest, whose queue would hold some of them back.
        os.write(own_host.tap, VNET_HEADER + dns_frame(own_host))
    wait_until(lambda: own_host.counted("flooded") > 0)
    with Guest(own_host.plan, own_host.tap) as guest:
        wait_until(lambda: guest.udp("8.8.8.8", 53) == "re:hello")


def wait_until(is_so: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not become so in time"
        time.sleep(0.01)
