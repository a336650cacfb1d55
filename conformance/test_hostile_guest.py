"""What a guest tries to reach and must not: its host, what is beside it, and anything at all where it has no network.

A refusal is told from a program that cannot dial by the same program reaching something that it may.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from conformance import shape
from conformance.endpoint import Endpoint
from conformance.estate import Offer, Sandbox
from conformance.guest import Listener, own_address, reach, reach_each, speaker

METADATA = "169.254.169.254"
PRIVATE = ("10.0.0.1", "172.16.0.1", "192.168.0.1", "192.168.1.1", "100.64.0.1")
PORTS = (22, 80, 443, 2375, 3128, 8080)
REQUEST = b"GET / HTTP/1.1\r\nHost: %h\r\nConnection: close\r\n\r\n"
OURS = b"a probe of the suite's own"


class Trap:
    """A listener on this machine that takes down everybody who connects but our own probe."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(8).encode()
        self.heard: list[bytes] = []
        self._server = socket.create_server(("0.0.0.0", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                with client:
                    client.settimeout(2)
                    with contextlib.suppress(OSError):
                        client.sendall(self.secret)
                        self._take(client.recv(100))

    def _take(self, data: bytes) -> None:
        if data != OURS:
            self.heard.append(data)

    def answers(self, address: str) -> bool:
        """Whether it is reached from here, which is what makes a guest's failure mean something."""
        try:
            with socket.create_connection((address, self.port), 2) as sock:
                sock.sendall(OURS)
                return sock.recv(100) == self.secret
        except OSError:
            return False

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def trap() -> Iterator[Trap]:
    one = Trap()
    yield one
    one.close()


@pytest.fixture
def language(box: Sandbox, offer: Offer) -> str:
    """Of a sandbox that has a network."""
    if not offer.networked:
        pytest.skip("the endpoint lacks the capability egress_allowlist: no sandbox has a network here")
    return speaker(box)


def gateway_of(address: str) -> list[str]:
    """Where the other end of a guest's link may be: its neighbours in a small network, and the network's first."""
    parts = address.split(".")
    last = int(parts[3])
    near = {last - 1, last + 1, 1, 254} - {last}
    return [".".join([*parts[:3], str(number)]) for number in sorted(near) if 0 < number < 255]


def ours() -> list[str]:
    """Addresses of this machine by which it would be reached."""
    found = ["127.0.0.1"]
    for target in ("192.0.2.1", "10.0.0.1"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            # Connecting a datagram socket sends nothing.
            sock.connect((target, 9))
            found.append(sock.getsockname()[0])
    return list(dict.fromkeys(found))


def test_a_guest_reaches_its_own_listener_and_not_this_machines(box: Sandbox, language: str, trap: Trap) -> None:
    secret = secrets.token_hex(8).encode()
    with Listener(box, language, secret, everywhere=True) as listener:
        assert secret in reach(box, language, "127.0.0.1", listener.port).reply
    asked = ours()
    assert trap.answers("127.0.0.1")
    hosts = [*asked, *gateway_of(own_address(box, language)), "localhost"]
    for where, found in reach_each(box, language, [(host, trap.port) for host in hosts]).items():
        assert trap.secret not in found.reply, where
    assert trap.heard == []


def test_a_guest_reaches_no_port_of_its_gateway(box: Sandbox, language: str) -> None:
    targets = [(host, port) for host in gateway_of(own_address(box, language)) for port in PORTS]
    for where, found in reach_each(box, language, targets, REQUEST).items():
        assert found.refusal, f"{where} answers {found}"


def test_a_guest_reaches_no_metadata_service_and_no_private_network(box: Sandbox, language: str) -> None:
    for where, found in reach_each(box, language, [(host, 80) for host in (METADATA, *PRIVATE)], REQUEST).items():
        assert found.refusal, f"{where} answers {found}"


def test_a_guest_reaches_a_name_it_may_and_not_that_names_server_by_its_address(
    box: Sandbox, language: str, offer: Offer
) -> None:
    names = [name for name in offer.network["default"]["allow"] or () if not name.startswith("*")]
    answers = reach_each(box, language, [(name, 80) for name in names[:4]], REQUEST)
    for name in names[:4]:
        found = answers[f"{name}:80"]
        if found.reply.startswith(b"HTTP/1.") and not found.refusal:
            break
    else:
        pytest.skip(f"none of {', '.join(names[:4])} answers on port 80, so that no refusal would mean anything")
    # The addresses that the name has for us: a guest has no business with them.
    with contextlib.suppress(OSError):
        for address in {str(info[4][0]) for info in socket.getaddrinfo(name, 80, socket.AF_INET)}:
            for host in (address, "unlisted.invalid"):
                found = reach(box, language, address, 80, REQUEST.replace(b"%h", host.encode()))
                assert found.refusal, f"{address} answers {found}"
    # The allowed name's connection is for that name alone.
    smuggled = REQUEST.replace(b"%h", b"unlisted.invalid")
    assert reach(box, language, name, 80, smuggled).refusal
    assert not reach(box, language, "unlisted.invalid", 80, smuggled).opened


def test_a_guest_does_not_reach_the_api(box: Sandbox, language: str, endpoint: Endpoint) -> None:
    if endpoint.is_unix:
        path = urlsplit(endpoint.url).path
        shape.refused(box.read(path), 404)
        assert box.run("cat", path).exit_code != 0
        return
    port = urlsplit(endpoint.url).port or 0
    hosts = [*ours(), urlsplit(endpoint.url).hostname or "", *gateway_of(own_address(box, language))]
    asked = REQUEST.replace(b"%h", b"localhost")
    for where, found in reach_each(box, language, [(host, port) for host in hosts], asked).items():
        assert not found.reply, f"{where} answers {found}"


def test_without_a_network_a_guest_reaches_nothing_but_itself(closed: Sandbox, trap: Trap) -> None:
    spoken = speaker(closed)
    secret = secrets.token_hex(8).encode()
    with Listener(closed, spoken, secret) as listener:
        assert secret in reach(closed, spoken, "127.0.0.1", listener.port).reply
    assert trap.answers("127.0.0.1")
    hosts = [*ours(), METADATA, PRIVATE[0], "192.0.2.1", "localhost", "example.com"]
    targets = [*((host, trap.port) for host in hosts), (METADATA, 80), (PRIVATE[0], 80)]
    for where, found in reach_each(closed, spoken, targets).items():
        assert not found.opened, where
    assert trap.heard == []
