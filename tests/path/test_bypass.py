"""Ways around the names, each tried from a real guest or put into its link as a hostile kernel would, and each beside
a control that shows that the same way works for what is allowed.

Most attempts are made by one process in the guest, in two goes: first everything that must fail, while all that
leaves the host is watched, then the controls. A test looks at the outcome of its own attempt.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from dnslib import DNSRecord

from sandboxd.client import NetworkRequest
from tests.conftest import counts
from tests.path.conftest import Opener
from tests.world import frames
from tests.world import world as place
from tests.world.capture import ETH_P_ARP, ETH_P_IP, ETH_P_IPV6, Packet
from tests.world.guest import Guest, Told, datagram, get, stream
from tests.world.hello import hello, padded, records
from tests.world.origin import Query, quiet
from tests.world.spaces import Space
from tests.world.world import World

pytestmark = pytest.mark.vm

OWN_PORT = 18080        # a service of the host's own
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
Ask = dict[str, object]


def web(*pieces: bytes | str, **more: object) -> Ask:
    return stream(place.PUBLIC, 80, *pieces, wait_s=3, **more)


def tls(*pieces: bytes | str, **more: object) -> Ask:
    return stream(place.PUBLIC, 443, *pieces, wait_s=3, enough=1, **more)


def dribbled(whole: bytes) -> list[bytes]:
    return [whole[at : at + 5] for at in range(0, len(whole), 5)]


def request(line: str, *headers: str, end: str = "\r\n") -> bytes:
    return (end.join([line, *headers]) + end * 2).encode("latin-1")


def connect(target: str, *inner: bytes, glued: bool = False) -> Ask:
    head = request(f"CONNECT {target} HTTP/1.1", f"Host: {target}")
    if glued:
        return web(head + b"".join(inner))
    return web(head, " 200 ", *inner) if inner else web(head)


REFUSED: dict[str, Ask] = {
    # The name in the ClientHello
    "no name in the hello": tls(hello()),
    "an address in the hello": tls(hello(place.PUBLIC)),
    "the loopback address in the hello": tls(hello("127.0.0.1")),
    "an address in brackets in the hello": tls(hello("[::1]")),
    "an allowed name in brackets in the hello": tls(hello("[allowed.test]")),
    "an empty name in the hello": tls(hello(b"")),
    "a NUL in the name": tls(hello(b"allowed.test\0.other.test")),
    "a name that starts with a dot": tls(hello(".allowed.test")),
    "a name with two dots at its end": tls(hello("allowed.test..")),
    "a star for a name": tls(hello("*")),
    "a name in raw UTF-8": tls(hello("állowed.test".encode())),
    "a name of 300 bytes": tls(hello(b"a" * 300)),
    "two names in one hello": tls(hello("allowed.test", "other.test")),
    "two names in one hello, swapped": tls(hello("other.test", "allowed.test")),
    "two name extensions": tls(hello("allowed.test", "other.test", list_of=False)),
    "two name extensions, swapped": tls(hello("other.test", "allowed.test", list_of=False)),
    "a name that is not listed": tls(hello("other.test")),
    "the same in pieces of five bytes": tls(*dribbled(hello("other.test")), pause_ms=2),
    "the same in records of forty bytes": tls(records(hello("other.test"), 40)),
    "the same in a hello of 60 KB": tls(padded("other.test", 60_000)),
    "a name below one that is allowed": tls(hello("sub.allowed.test")),
    "a name that ends like one that is allowed": tls(hello("notallowed.test")),
    "a name that begins like one that is allowed": tls(hello("allowed.test.other.test")),
    "the apex of a wildcard": tls(hello("wild.test")),
    "DNS over HTTPS at a host that is not listed": tls(hello("dns.other.test")),
    "neither TLS nor HTTP on port 443": tls(b"SSH-2.0-x\r\n"),
    "an allowed name inside a hello for none, later": tls(hello(), hello("allowed.test")),
    # Plain HTTP
    "a host that is not listed": web(get("other.test")),
    "an address for a host": web(get(place.PUBLIC)),
    "an address for a host, as one number": web(get("757729026")),
    "an address for a host, in hexadecimal": web(get("0x2d.0x5a.7.2")),
    "the metadata service by its address": stream(place.METADATA, 80, get(place.METADATA), wait_s=3),
    "no host at all": web(request("GET / HTTP/1.1", "X: y")),
    "no host in HTTP/1.0": web(request("GET / HTTP/1.0")),
    "two hosts, allowed first": web(request("GET / HTTP/1.1", "Host: allowed.test", "Host: other.test")),
    "two hosts, allowed last": web(request("GET / HTTP/1.1", "Host: other.test", "Host: allowed.test")),
    "the same host twice": web(request("GET / HTTP/1.1", "Host: allowed.test", "Host: allowed.test")),
    "a blank before the colon": web(request("GET / HTTP/1.1", "Host : allowed.test")),
    "a folded host": web(request("GET / HTTP/1.1", "Host: allowed.test", "\tother.test")),
    "line ends without CR": web(request("GET / HTTP/1.1", "Host: allowed.test", end="\n")),
    "a NUL in a header": web(request("GET / HTTP/1.1", "Host: allowed.test", "X: a\0b")),
    "a head of 70 KB": web(request("GET / HTTP/1.1", "Host: allowed.test", "X: " + "a" * 70_000)),
    "HTTP/1.2": web(request("GET / HTTP/1.2", "Host: allowed.test")),
    "absolute form for another host": web(request("GET http://other.test/ HTTP/1.1", "Host: allowed.test")),
    "absolute form that the host denies": web(request("GET http://allowed.test/ HTTP/1.1", "Host: other.test")),
    "absolute form for an address": web(request(f"GET http://{place.PUBLIC}/ HTTP/1.1", f"Host: {place.PUBLIC}")),
    "two lengths": web(
        request("POST / HTTP/1.1", "Host: allowed.test", "Content-Length: 3", "Content-Length: 5") + b"hello"
    ),
    "a length and chunks": web(
        request("POST / HTTP/1.1", "Host: allowed.test", "Content-Length: 5", "Transfer-Encoding: chunked")
        + b"0\r\n\r\n"
    ),
    # CONNECT
    "CONNECT to a host that is not listed": connect("other.test:443"),
    "CONNECT to an address": connect(f"{place.PUBLIC}:443", hello("allowed.test")),
    "CONNECT to the loopback address": connect("127.0.0.1:443"),
    "CONNECT to ::1": connect("[::1]:443"),
    "CONNECT to a mapped address": connect("[::ffff:7f00:1]:443"),
    "CONNECT to an address as one number": connect("2130706433:443"),
    "CONNECT to an address in octal": connect("0177.0.0.1:443"),
    "CONNECT to a short address": connect("127.1:443"),
    "CONNECT to port 22": connect("allowed.test:22"),
    "CONNECT to port 0": connect("allowed.test:0"),
    "CONNECT to port 99999": connect("allowed.test:99999"),
    "CONNECT to an allowed port by name": connect("db.test:5432"),
    "CONNECT with a user": connect("user@allowed.test:443"),
    "CONNECT to two targets": connect("allowed.test:443@other.test:443"),
    "CONNECT, and a hello for another host": connect("allowed.test:443", hello("other.test")),
    "CONNECT, and a hello for another host in the same write": connect(
        "allowed.test:443", hello("other.test"), glued=True
    ),
    "CONNECT, and a hello for another allowed host": connect("allowed.test:443", hello("second.test")),
    "CONNECT, and a hello without a name": connect("allowed.test:443", hello()),
    "CONNECT, and a request for another host": connect("allowed.test:80", get("other.test")),
    "CONNECT within CONNECT": connect(
        "allowed.test:80", request("CONNECT other.test:443 HTTP/1.1", "Host: other.test")
    ),
    # Other ports and protocols
    "SSH to an address": stream(place.PUBLIC, place.SSH, wait_s=3, enough=1),
    "a database by its address": stream(place.PUBLIC, place.DATABASE, wait_s=3, enough=1),
    "another port of a public address": stream(place.PUBLIC, place.SINK, wait_s=3, enough=1),
    "DNS over TLS to an outside resolver": stream(place.OUTSIDE_RESOLVER, 853, wait_s=3, enough=1),
    "the metadata service on another port": stream(place.METADATA, place.SINK, wait_s=3, enough=1),
    "an address that no name was given": stream("198.18.77.7", place.DATABASE, wait_s=3, enough=1),
    "QUIC": datagram(place.PUBLIC, 443, b"\xc0" + b"q" * 1200),
    "UDP to any port": datagram(place.PUBLIC, place.SINK, b"x"),
    "UDP to a resolver's other port": datagram(place.OUTSIDE_RESOLVER, 853, b"x"),
    "an echo request": {"do": "ping", "to": [place.PUBLIC]},
    "IPv6": stream(place.PUBLIC_6, 443, hello("allowed.test"), wait_s=2, enough=1),
    "an IPv4 address mapped into IPv6": stream(f"::ffff:{place.PUBLIC}", place.SINK, wait_s=2, enough=1),
    "a link-local address": stream("fe80::1%eth0", place.SINK, wait_s=2, enough=1),
    # The host and its own
    "the proxy's own port": stream(frames.HOST, 3128, hello("allowed.test"), wait_s=3, enough=1),
    "the answerer's own port": stream(frames.HOST, 7353, b"\0\1x", wait_s=3, enough=1),
    "a service of the host at its end of the link": stream(frames.HOST, OWN_PORT, wait_s=3, enough=1),
    "a service of the host at its public address": stream(place.HOST, OWN_PORT, wait_s=3, enough=1),
    "a service of the host in its private network": stream(place.LAN_HOST, OWN_PORT, wait_s=3, enough=1),
    "the host's own web server by its address": stream(place.HOST, 80, get(place.HOST), wait_s=3),
    "a private network by its address": stream(place.LAN, place.SINK, wait_s=3, enough=1),
    "a private web server by its address": stream(place.LAN, 80, get(place.LAN), wait_s=3),
}

ALLOWED: dict[str, Ask] = {
    "TLS by name": tls(hello("allowed.test")),
    "TLS by name, whatever address was dialled": stream(place.METADATA, 443, hello("allowed.test"), enough=1),
    "TLS in capitals": tls(hello("ALLOWED.test")),
    "TLS with a dot at the end": tls(hello("allowed.test.")),
    "TLS in pieces of five bytes": tls(*dribbled(hello("allowed.test")), pause_ms=2),
    "TLS in records of forty bytes": tls(records(hello("allowed.test"), 40)),
    "TLS with a hello of 60 KB": tls(padded("allowed.test", 60_000)),
    "TLS below a wildcard": tls(hello("www.wild.test")),
    "HTTP by name": web(get("allowed.test")),
    "HTTP with a dot at the end": web(get("allowed.test.")),
    "HTTP with a port": web(get("allowed.test:80")),
    "HTTP in absolute form": web(
        request("GET http://allowed.test/ HTTP/1.1", "Host: allowed.test", "Connection: close")
    ),
    "HTTP to a private address that was opened": web(get("lan.test")),
    "CONNECT and TLS": connect("allowed.test:443", hello("allowed.test")),
    "CONNECT and TLS in the same write": connect("allowed.test:443", hello("allowed.test"), glued=True),
    "CONNECT with the proxy's name for a host": web(
        request("CONNECT allowed.test:443 HTTP/1.1", "Host: proxy.test:3128"), " 200 ", hello("allowed.test")
    ),
    "CONNECT in HTTP/1.0 without a host": web(
        request("CONNECT allowed.test:443 HTTP/1.0"), " 200 ", hello("allowed.test")
    ),
    "CONNECT and plain HTTP": connect("allowed.test:80", get("allowed.test")),
}


@dataclass(frozen=True)
class Outcomes:
    refused: dict[str, Told]
    allowed: dict[str, Told]
    left: list[Packet]          # what left the host while nothing was allowed
    queries: list[Query]
    own: int                    # connections to the host's own services meanwhile


@contextmanager
def own_services(host: Space, *ports: int) -> Iterator[list[int]]:
    """Services of the host on every address it has; the ports of the connections they took."""
    taken: list[int] = []
    listeners = [host.inside(lambda p=port: socket.create_server(("", p), backlog=64)) for port in ports]  # type: ignore[misc]
    ending = threading.Event()

    def serve(listener: socket.socket) -> None:
        listener.settimeout(0.1)
        while not ending.is_set():
            try:
                stream, _ = listener.accept()
            except TimeoutError:
                continue
            taken.append(listener.getsockname()[1])
            stream.sendall(b"HTTP/1.1 200 own\r\nContent-Length: 0\r\n\r\n")
            stream.close()

    threads = [threading.Thread(target=serve, args=[listener]) for listener in listeners]
    for thread in threads:
        thread.start()
    try:
        yield taken
    finally:
        ending.set()
        for thread, listener in zip(threads, listeners, strict=True):
            thread.join()
            listener.close()


@pytest.fixture(scope="module")
def outcomes(guest: Guest, world: World) -> Outcomes:
    with own_services(world.host, 80, 443, OWN_PORT) as own, quiet(world.origin) as ledger, world.uplink() as uplink:
        refused = guest.ask(*REFUSED.values())
        left, queries, own_taken = uplink.outgoing(), list(ledger.queries), len(own)
        for address in (place.HOST, place.LAN_HOST):        # the control: everybody else reaches them
            def dial(address: str = address) -> bytes:
                with socket.create_connection((address, OWN_PORT), 5) as stream:
                    return stream.recv(64)

            assert b"own" in world.outside.inside(dial)
    allowed = guest.ask(*ALLOWED.values())
    return Outcomes(
        dict(zip(REFUSED, refused, strict=True)), dict(zip(ALLOWED, allowed, strict=True)), left, queries, own_taken
    )


@pytest.mark.parametrize("way", REFUSED)
def test_refused(outcomes: Outcomes, way: str) -> None:
    told = outcomes.refused[way]
    came = told.came.removeprefix(ESTABLISHED)
    answered = came.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 403 ")) and b"blocked by sandbox policy" in came
    nothing = not came and (told.end != "timeout" or way == "an echo request")
    assert answered or nothing, told
    # An own decision comes at once; the echo request's refusal is one that an unprivileged socket may not see.
    slow = {"a head of 70 KB", "the same in pieces of five bytes", "the same in a hello of 60 KB"}
    assert told.ms < (3000 if way in slow else 1000) or way == "an echo request", told


@pytest.mark.parametrize("way", ALLOWED)
def test_allowed(outcomes: Outcomes, way: str) -> None:
    told = outcomes.allowed[way]
    came = told.came.removeprefix(ESTABLISHED)
    assert came.startswith(b"HTTP/1.1 200 ") or came[:1] in (b"\x15", b"\x16"), told


def test_for_what_is_refused_nothing_left_the_host(outcomes: Outcomes) -> None:
    assert outcomes.left == []
    assert outcomes.queries == [], "and no name was looked up"
    assert outcomes.own == 0, "and none of the host's own services saw a connection"


# Later on a connection

def test_the_host_of_a_later_request_is_decided_again(guest: Guest, world: World) -> None:
    first = get("allowed.test", close=False)
    with quiet(world.origin) as ledger:
        switched, moved, smuggled = guest.ask(
            web(first, "hello from", get("other.test")),
            web(first, "hello from", get("second.test")),
            web(request("POST / HTTP/1.1", "Host: allowed.test", "Content-Length: 40") + get("other.test")[:40]),
        )
    assert switched.came.count(b"HTTP/1.1 ") == 2 and b"HTTP/1.1 403 " in switched.came
    assert moved.came.count(b"HTTP/1.1 200 ") == 2 and b"hello from second.test" in moved.came
    assert smuggled.came.count(b"HTTP/1.1 ") == 1
    assert "other.test" not in {visit.host for visit in ledger.visits}
    assert place.PUBLIC_2 in {visit.address for visit in ledger.visits}


def test_pipelined_requests_are_each_decided(guest: Guest, world: World) -> None:
    with quiet(world.origin) as ledger:
        told = guest.ask(web(get("allowed.test", close=False) + get("other.test") + get("allowed.test")))[0]
    assert told.came.count(b"HTTP/1.1 200 ") == 1 and told.came.count(b"HTTP/1.1 403 ") == 1
    assert [visit.host for visit in ledger.visits] == ["allowed.test"]


def test_a_relay_in_the_guest_gets_the_same_answers(guest: Guest) -> None:
    relay = (
        "import socket,threading\n"
        "l = socket.create_server(('127.0.0.1', 8899))\n"
        "def one(a):\n"
        f"    b = socket.create_connection(('{place.PUBLIC}', 80))\n"
        "    b.sendall(a.recv(65536))\n"
        "    a.sendall(b.recv(65536))\n"
        "    a.close()\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    threading.Thread(target=one, args=[l.accept()[0]]).start()\n"
    )
    process = guest.daemon.client.start(guest.id, ["python3", "-c", relay])
    assert next(guest.daemon.client.output(guest.id, process.pid)).data == b"ready\n"
    good, bad = guest.ask(
        stream("127.0.0.1", 8899, request("CONNECT allowed.test:443 HTTP/1.1"), enough=12),
        stream("127.0.0.1", 8899, request("CONNECT other.test:443 HTTP/1.1", "Host: other.test")),
    )
    guest.daemon.client.signal(guest.id, process.pid, "KILL")
    assert good.came.startswith(b"HTTP/1.1 200 ") or good.came.startswith(b"HTTP/1.1 400 ")
    assert bad.came.startswith(b"HTTP/1.1 403 ")


# Ports by name

def test_the_address_of_a_name_opens_that_names_ports_only(guest: Guest, world: World) -> None:
    names = ("db.test", "git.test", "allowed.test")
    addresses = [told.came.decode() for told in guest.ask(*({"do": "resolve", "name": name} for name in names))]
    assert all(address.startswith("198.18.") for address in addresses), "a name of allow_tcp has an address"
    database, git, allowed = addresses
    with quiet(world.origin) as ledger:
        right, wrong, other, web_only = guest.ask(
            *(stream(address, port, enough=1, wait_s=3) for address, port in (
                (database, place.DATABASE), (database, place.SSH), (git, place.DATABASE), (allowed, place.DATABASE),
            ))
        )  # fmt: skip
    assert right.came[:1] == b"s"
    assert {told.end for told in (wrong, other, web_only)} <= {"reset", "ECONNREFUSED"}
    assert [(visit.address, visit.port) for visit in ledger.visits] == [(place.PUBLIC, place.DATABASE)]


# Names that are questions

SECRET = "mfrggzdfmztwq2lknnwg23tpobyxe43u"
QUESTIONS = {
    "a name that is not listed": ("other.test", "A"),
    "a secret below a name that is not listed": (f"{SECRET}.other.test", "A"),
    "a secret below an allowed name": (f"{SECRET}.allowed.test", "A"),
    "labels as long as they may be": (".".join(["a" * 63] * 3) + ".other.test", "A"),
    "TXT of a name that is not listed": (f"{SECRET}.other.test", "TXT"),
    "TXT of an allowed name": ("allowed.test", "TXT"),
    "NULL of an allowed name": ("allowed.test", "NULL"),
    "HTTPS of an allowed name": ("allowed.test", "HTTPS"),
    "MX of an allowed name": ("allowed.test", "MX"),
    "AAAA of an allowed name": ("allowed.test", "AAAA"),
    "the name of an address": ("2.7.90.45.in-addr.arpa", "PTR"),
}


def test_no_question_leaves_the_host(guest: Guest, world: World) -> None:
    packets = [DNSRecord.question(name, kind).pack() for name, kind in QUESTIONS.values()]
    resolvers = (frames.HOST, place.OUTSIDE_RESOLVER)
    asks: list[Ask] = [datagram(resolver, 53, packet) for packet in packets for resolver in resolvers]
    asks += [
        stream(place.OUTSIDE_RESOLVER, 53, len(packet).to_bytes(2, "big") + packet, enough=len(packet), wait_s=3)
        for packet in packets
    ]
    good = DNSRecord.question("allowed.test").pack()
    with quiet(world.origin) as ledger, world.uplink() as uplink:
        answers = guest.ask(*asks)
        control = guest.ask(datagram(place.OUTSIDE_RESOLVER, 53, good))[0]
    assert ledger.queries == [] and uplink.outgoing() == []
    assert str(DNSRecord.parse(control.came).a.rdata).startswith("198.18."), "the same way answers what is allowed"
    for told in answers:
        assert told.end == "data" and told.ms < 1000, told
    for told, (name, _) in zip(answers[::2], QUESTIONS.values(), strict=False):
        reply = DNSRecord.parse(told.came)
        assert reply.rr == [] and reply.header.rcode == (0 if name == "allowed.test" else 3), reply


def test_other_ways_to_ask_end_at_once(guest: Guest, world: World) -> None:
    packet = DNSRecord.question("other.local").pack()
    with world.uplink() as uplink:
        multicast, broadcast, other = guest.ask(
            datagram("224.0.0.251", 5353, packet), datagram("172.16.0.3", 53, packet),
            datagram(place.OUTSIDE_RESOLVER, 5353, packet),
        )  # fmt: skip
    assert multicast.end != "data" and broadcast.end != "data"
    assert other.end == "ECONNREFUSED"
    assert uplink.outgoing() == []


# Names that lead inside

INSIDE = (
    "127.0.0.1", "0.0.0.0", place.METADATA, place.LAN, place.HOST, place.LAN_HOST, "172.16.0.1", "198.18.0.1",
    "224.0.0.1", "100.64.0.1", "::1", "fe80::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", place.HOST_6,
)  # fmt: skip


def test_a_name_that_is_rebound_to_the_inside_is_not_dialled(guest: Guest, world: World) -> None:
    names = {f"to-{number}.rebound.test": address for number, address in enumerate(INSIDE)}
    for name, address in names.items():
        world.names.set(name, address)
    with own_services(world.host, 80, 443) as own:
        with quiet(world.origin) as ledger, world.uplink() as uplink:
            plain = guest.ask(*(web(get(name)) for name in names))
            secure = guest.ask(*(tls(hello(name)) for name in names))
        world.names.set("rebound.test", "127.0.0.1", place.HOST, place.PUBLIC)
        control = guest.ask(web(get("rebound.test")))[0]
        world.names.set("rebound.test", place.PUBLIC)
        assert own == []
    for address, told in zip(INSIDE, plain, strict=True):
        assert told.came.startswith(b"HTTP/1.1 502 ") and b"private address" in told.came, (address, told)
    assert {told.end for told in secure} == {"reset"}
    assert {packet.port for packet in uplink.outgoing()} == {53}, "all that left were questions"
    assert names.keys() <= {query.name for query in ledger.queries}
    assert control.came.startswith(b"HTTP/1.1 200 "), "the public one of several is dialled"
    for name in names:
        world.names.drop(name)


def test_the_proxy_does_not_talk_to_itself(guest: Guest, world: World) -> None:
    world.names.set("rebound.test", place.HOST)
    try:
        itself = stream(frames.HOST, 3128, get("rebound.test"), wait_s=15)
        told = guest.ask(*[itself] * 25, *[web(get("rebound.test"))] * 25)
    finally:
        world.names.set("rebound.test", place.PUBLIC)
    assert {each.end for each in told[:25]} <= {"reset", "ECONNREFUSED"}
    assert all(each.came.startswith(b"HTTP/1.1 502 ") for each in told[25:])
    assert guest.ask(web(get("rebound.test")))[0].came.startswith(b"HTTP/1.1 200 ")


# Frames a guest's kernel would not make

def ip(protocol: int, payload: bytes, target: str, source: str = frames.GUEST, **more: object) -> bytes:
    return frames.ethernet(ETH_P_IP, frames.ipv4(protocol, payload, target, source, **more))  # type: ignore[arg-type]


def syn(source_port: int, port: int, target: str, source: str = frames.GUEST) -> bytes:
    return ip(frames.TCP, frames.tcp(source_port, port, target, source), target, source)


def arp(*fields: object, source: bytes = frames.GUEST_MAC, target: bytes = frames.HOST_MAC) -> bytes:
    return frames.ethernet(ETH_P_ARP, frames.arp(*fields), source, target)  # type: ignore[arg-type]


PUBLIC_SYN = frames.ipv4(frames.TCP, frames.tcp(40000, 443, place.PUBLIC), place.PUBLIC)
LONG = frames.udp(40001, place.SINK, b"f" * 64, place.PUBLIC)
SMALL = frames.tcp(40002, place.SINK, place.PUBLIC)
NOBODY, ALL_NODES = bytes.fromhex("0600ac1000ff"), bytes.fromhex("333300000001")
LINK_LOCAL = "fe80::400:acff:fe10:2"

HOSTILE: dict[str, list[bytes]] = {
    "an echo request to the host": [ip(frames.ICMP, frames.echo(), frames.HOST)],
    "an echo request to the world": [ip(frames.ICMP, frames.echo(), place.PUBLIC)],
    "a datagram in fragments": [
        ip(frames.UDP, LONG[:24], place.PUBLIC, more=True, id=9),
        ip(frames.UDP, LONG[24:], place.PUBLIC, fragment=24, id=9),
    ],
    "a SYN in tiny fragments": [
        ip(frames.TCP, SMALL[:8], place.PUBLIC, more=True, id=10),
        ip(frames.TCP, SMALL[8:], place.PUBLIC, fragment=8, id=10),
    ],
    "overlapping fragments": [
        ip(frames.TCP, SMALL[:16], place.PUBLIC, more=True, id=11),
        ip(frames.TCP, SMALL[8:], place.PUBLIC, fragment=8, id=11),
    ],
    "a source address of another sandbox": [syn(1, 443, place.PUBLIC, "172.16.0.6")],
    "a source address of the world": [syn(1, 443, place.LAN, place.PUBLIC)],
    "a source address of the loopback": [syn(1, 443, place.PUBLIC, "127.0.0.1")],
    "another MAC": [frames.ethernet(ETH_P_IP, PUBLIC_SYN, source=NOBODY)],
    "the host's MAC as the sender": [frames.ethernet(ETH_P_IP, PUBLIC_SYN, source=frames.HOST_MAC)],
    "a loopback address": [syn(2, OWN_PORT, "127.0.0.1")],
    "a loose source route": [
        ip(frames.UDP, frames.udp(5, place.SINK, b"x", place.PUBLIC), place.PUBLIC,
           options=b"\x83\x07\x04" + socket.inet_aton(place.LAN) + b"\0")
    ],
    "ARP: the gateway is here": [
        arp(2, NOBODY, frames.HOST, frames.HOST_MAC, frames.GUEST, source=NOBODY),
        arp(2, frames.GUEST_MAC, frames.HOST, frames.HOST_MAC, frames.HOST),
    ],
    "ARP: the guest has moved": [
        arp(2, NOBODY, frames.GUEST, frames.HOST_MAC, frames.HOST, source=NOBODY),
        arp(1, NOBODY, frames.GUEST, bytes(6), frames.HOST, target=frames.BROADCAST),
    ],
    "ARP: who has the public address": [
        arp(1, frames.GUEST_MAC, frames.GUEST, bytes(6), place.PUBLIC, target=frames.BROADCAST)
    ],
    "IPv6": [
        frames.ethernet(ETH_P_IPV6, frames.ipv6(17, bytes(8), LINK_LOCAL, place.PUBLIC_6)),
        frames.ethernet(ETH_P_IPV6, frames.ipv6(58, b"\x86" + bytes(15), LINK_LOCAL, "ff02::1"), target=ALL_NODES),
    ],
    "a frame with a VLAN tag": [frames.ethernet(0x8100, b"\0\1\x08\0" + PUBLIC_SYN)],
    "an unknown protocol": [frames.ethernet(0x88CC, b"lldp" * 20)],
    "GRE": [ip(47, b"\0\0\x08\0" + PUBLIC_SYN, place.PUBLIC)],
    "SCTP": [ip(132, bytes(32), place.PUBLIC)],
    "a RST for a connection that is not there": [
        ip(frames.TCP, frames.tcp(3, 443, place.PUBLIC, flags=4), place.PUBLIC)
    ],
    "the middle of a connection that is not there": [
        ip(frames.TCP, frames.tcp(4, 443, place.PUBLIC, flags=16, data=hello("allowed.test")), place.PUBLIC)
    ],
    "a frame of one byte": [b"x"],
    "a header that ends too early": [frames.ethernet(ETH_P_IP, PUBLIC_SYN[:12])],
}  # fmt: skip


def test_hostile_frames_reach_nothing_and_disturb_nobody(guest: Guest, world: World) -> None:
    tap = guest.tap()
    try:
        neighbours = ("ip", "netns", "exec", guest.namespace, "ip", "neigh", "show", "dev", "tap0")
        before, spoofed = world.host.run(*neighbours), guest.counters()["spoofed"]
        with own_services(world.host, OWN_PORT) as own, quiet(world.origin) as ledger, world.uplink() as uplink:
            with guest.link() as link:
                for each in HOSTILE.values():
                    for frame in each:
                        try:
                            tap.send(frame)
                        except OSError:
                            assert len(frame) < 14, "the kernel itself refuses what is no frame"
                time.sleep(1)
            assert uplink.outgoing() == [], "nothing of it left the host"
            assert ledger.visits == [] and ledger.queries == [] and own == []
        answers = [packet for packet in link.packets if packet.outgoing]
        assert "icmp6" not in {packet.protocol for packet in answers}
        assert {packet.target for packet in answers} <= {frames.GUEST}, answers
        assert world.host.run(*neighbours) == before, "the host's neighbour is not to be moved"
        assert guest.counters()["spoofed"] > spoofed
        # The control: a frame of the same make, with nothing wrong, is answered by the proxy.
        with guest.link() as link:
            tap.send(frames.ethernet(ETH_P_IP, PUBLIC_SYN))
            deadline = time.monotonic() + 20
            while (place.PUBLIC, 40000) not in {(packet.source, packet.port) for packet in link.packets}:
                assert time.monotonic() < deadline, link.packets
                time.sleep(0.02)
    finally:
        tap.close()
    assert guest.ask(web(get("allowed.test")))[0].came.startswith(b"HTTP/1.1 200 ")


# Another sandbox

def test_sandboxes_cannot_reach_each_other(guest: Guest, neighbour: Guest) -> None:
    """With the control that the neighbour's service answers: to the neighbour itself."""
    process = neighbour.daemon.client.start(neighbour.id, ["python3", "-m", "http.server", "8000"])
    ask = stream("172.16.0.2", 8000, get("x"))
    deadline = time.monotonic() + 20
    while not (own := neighbour.ask(ask)[0]).came and time.monotonic() < deadline:
        time.sleep(0.2)
    assert own.came.startswith(b"HTTP/1.0 200 ")
    addresses = ("172.16.0.2", "172.16.0.1", "172.16.0.6", "172.16.0.3", "172.16.255.255")
    with neighbour.link() as link:
        told = guest.ask(*(stream(address, 8000, get("x"), wait_s=2) for address in addresses))
        tap = guest.tap()
        for target in (frames.HOST_MAC, frames.GUEST_MAC, frames.BROADCAST):
            packet = frames.ipv4(frames.TCP, frames.tcp(9, 8000, "172.16.0.2"), "172.16.0.2")
            tap.send(frames.ethernet(ETH_P_IP, packet, target=target))
        tap.close()
        time.sleep(0.5)
    neighbour.daemon.client.signal(neighbour.id, process.pid, "KILL")
    assert [each.came for each in told] == [b""] * len(addresses), told
    assert [packet for packet in link.packets if packet.port in (8000, 9)] == []


# Too much of everything

def latency(neighbour: Guest, rounds: int = 9) -> float:
    """How long a fetch takes a sandbox that does nothing else; the middle of several, in milliseconds."""
    told = neighbour.ask(*[web(get("allowed.test"))] * rounds)
    assert all(each.came.startswith(b"HTTP/1.1 200 ") for each in told), told
    return statistics.median(each.ms for each in told)


def undisturbed(neighbour: Guest, disturb: Callable[[], None]) -> None:
    """Nothing else slows down much, beyond what one busy processor more costs under emulation."""
    before = latency(neighbour)
    ending = threading.Event()

    def on_and_on() -> None:
        while not ending.is_set():
            disturb()

    thread = threading.Thread(target=on_and_on)
    thread.start()
    try:
        time.sleep(0.5)
        during = latency(neighbour)
    finally:
        ending.set()
        thread.join()
    assert during < before * 3 + 500, f"{before:.0f} ms before, {during:.0f} ms meanwhile"


def test_ten_thousand_half_open_connections(guest: Guest, neighbour: Guest) -> None:
    tap = guest.tap()
    ports = iter(range(1024, 1024 + 10_000 * 6))

    def flood() -> None:
        for _ in range(200):
            tap.send(syn(next(ports, 1024), 443, place.PUBLIC))
        time.sleep(0.02)

    try:
        undisturbed(neighbour, flood)
        for _ in range(50):
            flood()
    finally:
        tap.close()
    deadline = time.monotonic() + 40
    while not (told := guest.ask(web(get("allowed.test")))[0]).came and time.monotonic() < deadline:
        time.sleep(1)
    assert told.came.startswith(b"HTTP/1.1 200 "), "the sandbox itself recovers"


def test_silent_connections_hold_up_nobody(guest: Guest, neighbour: Guest) -> None:
    before = latency(neighbour)
    running = guest.begin({"do": "many", "to": [place.PUBLIC, 443], "count": 900, "hold_s": 10, "until_s": True})
    time.sleep(3)
    during = latency(neighbour)
    assert guest.finish(running).figures["open"] >= 800, "they were open all the time"
    assert during < before * 3 + 500, f"{before:.0f} ms before, {during:.0f} ms meanwhile"
    assert guest.ask(web(get("allowed.test")))[0].came.startswith(b"HTTP/1.1 200 ")


@pytest.mark.soak
def test_silent_connections_end_at_their_deadline_and_are_one_line(guest: Guest) -> None:
    ends = guest.ask({"do": "many", "to": [place.PUBLIC, 443], "count": 900, "hold_s": 75, "until_s": True})[0].figures
    assert ends["closed"] >= 800 and ends["open"] == 0, ends
    silent = [event for event in guest.events("") if event.rule == "no-name" and "no bytes" in event.why]
    assert len(silent) == 1 and silent[0].count >= 800, silent


def test_a_slot_comes_back_with_every_connection(guest: Guest) -> None:
    """More connections, one after another, than there are places at once; in `make soak` more than there are ports."""
    loop = (
        "import socket\n"
        f"for n in range({counts(1100, 30_000)}):\n"
        f"    s = socket.create_connection(('{place.PUBLIC}', 80))\n"
        "    if n % 100 == 0:\n"
        "        s.sendall(b'GET / HTTP/1.1\\r\\nHost: allowed.test\\r\\nConnection: close\\r\\n\\r\\n')\n"
        "        assert s.recv(12) == b'HTTP/1.1 200', n\n"
        "    s.close()\n"
        "print('all')\n"
    )
    done = guest.run("python3", "-c", loop, timeout_s=900)
    assert done.stdout == b"all\n", done.stderr.decode()


def test_rubbish_for_the_answerer(guest: Guest) -> None:
    """Whatever comes, a good question is answered afterwards, and what says that it is an answer never is."""
    good = DNSRecord.question("allowed.test").pack()
    answer = bytes([*good[:2], good[2] | 0x80, *good[3:]])
    loop = b"\0\1\1\0\0\1\0\0\0\0\0\0\xc0\x0c\0\1\0\1"
    rubbish = [b"x", good[:12], loop, good[:4] + b"\0\2" + good[6:], good[:4] + b"\xff\xff" + good[6:], answer]
    ask = [{**datagram(frames.HOST, 53, packet), "wait_s": 0.5} for packet in rubbish]
    told = guest.ask(*ask, datagram(frames.HOST, 53, good))
    assert told[5].end == "timeout", "an answer is not answered"
    assert str(DNSRecord.parse(told[-1].came).a.rdata).startswith("198.18.")


def test_fronting_inside_tls_is_out_of_reach_and_said_so(opened: Opener) -> None:
    """Once allowed.test was let through, what is said inside its TLS is not seen. docs/security.md says it in words."""
    one = opened(NetworkRequest(mode="allowlist", allow=("allowed.test",)), "fronting")
    done = one.sh("curl -sS -H 'Host: other.test' https://allowed.test/")
    assert done.stdout == b"hello from other.test\n"
