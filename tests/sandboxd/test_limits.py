"""What a client may take, and for how long: floods, slow clients of every kind, and who else is served meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from sandboxd.address import TcpPeer, UnixPeer
from sandboxd.limits import Limits
from sandboxd.occupancy import Full, Occupancy
from tests.conftest import counts
from tests.sandboxd.conftest import why_not
from tests.sandboxd.reach import SECOND, TOKEN, Reach, end_direction, said_by, token_files
from tests.sandboxd.rig import Rig

SMALL = Limits(
    connections_per_client=24, newcomers=24, newcomers_per_address=16, lingering=4, header_s=6, idle_s=2, json_s=2,
    raw_stall_s=3, answer_stall_s=2, stream_stall_s=2, linger_s=0.3, json_held_per_client_bytes=1 << 20,
)  # fmt: skip


@pytest.fixture(scope="module")
def tcp() -> Iterator[Reach]:
    """A daemon of short patience, on TCP and a unix socket."""
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="dmn-", dir="/tmp") as name:
        rig = Rig(Path(name), "--listen", "127.0.0.1:0", *token_files(Path(name)))
        rig.headers["Authorization"] = f"Bearer {TOKEN}"
        rig.knob("limits", json.dumps({field: getattr(SMALL, field) for field in Limits.__slots__}))
        with rig:
            rig.create(name="box")
            yield Reach(rig, "tcp")


@pytest.fixture
def unix(tcp: Reach) -> Reach:
    return replace(tcp, kind="unix")


@pytest.fixture
def held() -> Iterator[Callable[[socket.socket], socket.socket]]:
    """Keeps sockets open to the end of the test."""
    with contextlib.ExitStack() as stack:
        yield stack.enter_context


def until(what: str, check: Callable[[], object], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


Hold = Callable[[socket.socket], socket.socket]


def test_a_flood_of_newcomers_pushes_out_itself(tcp: Reach, unix: Reach, held: Hold) -> None:
    before = tcp.rig.descriptors()
    neighbour = replace(tcp, source="127.0.0.2")
    waiting = held(neighbour.connect())
    flood = [held(tcp.connect()) for _ in range(counts(600, 5000))]
    waiting.sendall(tcp.head("GET", "/v1/sandboxes", "Connection: close"))
    assert said_by(waiting).startswith(b"HTTP/1.1 200 "), "who came from elsewhere kept its place"
    assert neighbour.call("GET", "/v1/sandboxes").status == 200
    assert unix.call("GET", "/v1/sandboxes").status == 200
    assert tcp.call("GET", "/v1/sandboxes").status == 200, "from the same address too"
    assert tcp.rig.descriptors() <= before + SMALL.newcomers + 3
    until("the flood is cut", lambda: tcp.rig.descriptors() <= before + 2)
    assert all(said_by(sock) == b"" for sock in flood[:5])


@pytest.fixture
def endless(tcp: Reach) -> Iterator[str]:
    """A process that says nothing: whoever follows it keeps a connection as long as it lives."""
    process = tcp.rig.start_process("box", "sleep", "300")
    yield process
    until("it can be ended", lambda: tcp.rig.call("POST", f"{process}/signal", {"signal": "KILL"}).status in (204, 409))


def follow(reach: Reach, process: str) -> socket.socket:
    sock = reach.connect()
    sock.sendall(reach.head("GET", f"{process}/output"))
    assert sock.recv(12) == b"HTTP/1.1 200"
    return sock


def test_one_token_cannot_use_up_what_is_the_others(tcp: Reach, unix: Reach, held: Hold, endless: str) -> None:
    for _ in range(SMALL.connections_per_client):
        held(follow(tcp, endless))
    answer = tcp.call("GET", "/v1/sandboxes")
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "unavailable", "1")
    assert tcp.call("GET", "/v1/health").status == 200
    assert replace(tcp, token=SECOND).call("GET", "/v1/sandboxes").status == 200
    assert unix.call("GET", "/v1/sandboxes").status == 200


def test_one_users_connections_are_counted_and_refused_with_an_answer(
    tcp: Reach, unix: Reach, held: Hold, endless: str
) -> None:
    with contextlib.ExitStack() as mine:
        for _ in range(SMALL.connections_per_client):
            mine.enter_context(follow(unix, endless))
        assert b"HTTP/1.1 503 " in unix.raw(b"")
        assert tcp.call("GET", "/v1/sandboxes").status == 200
        many = [held(unix.connect()) for _ in range(100)]
        until("the refused are closed", lambda: all(said_by(sock) is not None for sock in many))
    close = unix.head("GET", "/v1/health", "Connection: close")
    until("there is room again", lambda: b"HTTP/1.1 200 " in unix.raw(close))


def test_no_descriptors_left_is_waited_out(tcp: Reach, held: Hold) -> None:
    """The queue keeps who waits; the daemon does not spin meanwhile, and says it once."""
    rig = tcp.rig
    assert rig.process is not None
    pid = rig.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)

    def squeezed() -> bool:
        """To the lowest number that is free: the limit is one of numbers, not of how many there are."""
        taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        free = next(number for number in itertools.count() if number not in taken)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))
        return "could not be accepted" in rig.log.read_text()

    squeezed()
    try:
        waiting = [held(tcp.connect()) for _ in range(3)]
        until("it is said", squeezed)
        before = ticks(pid)
        time.sleep(1)
        assert ticks(pid) - before < 30, "it spins"
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    for sock in waiting:
        with contextlib.suppress(ConnectionError):      # who got in before the squeeze has had his time
            sock.sendall(tcp.head("GET", "/v1/health", "Connection: close"))
    assert any(said_by(sock).endswith(b'{"status":"ok"}') for sock in waiting)
    assert rig.log.read_text().count("could not be accepted") == 1


def ticks(pid: int) -> int:
    """Hundredths of a second of processor time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.fixture(params=["tcp", "unix"])
def slow(request: pytest.FixtureRequest, tcp: Reach, unix: Reach) -> Reach:
    return tcp if request.param == "tcp" else unix


def drip(sock: socket.socket, data: bytes, seconds: float) -> bytes:
    """A byte each 0.2 s until somebody answers; then the answer."""
    sock.settimeout(0.2)
    deadline = time.monotonic() + seconds
    for byte in data:
        with contextlib.suppress(TimeoutError):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(bytes([byte]))
            piece = sock.recv(1, socket.MSG_PEEK)
            sock.settimeout(20)
            return said_by(sock) if piece else b""
        assert time.monotonic() < deadline, "it has endless patience"
    raise AssertionError("it was taken")


JSON = ("Content-Type: application/json",)
RAW = ("Content-Type: application/octet-stream",)


def drip_a_head(slow: Reach) -> None:
    with slow.connect() as sock:
        assert drip(sock, slow.head("GET", "/v1/health"), 60) == b""


def drip_json(slow: Reach) -> None:
    with slow.connect() as sock:
        sock.sendall(slow.head("POST", "/v1/sandboxes", *JSON, "Content-Length: 500"))
        said = drip(sock, b'{"name":"' + b"x" * 400, 60)
        assert said.startswith(b"HTTP/1.1 400 ") and b"the whole body must come within 2 s" in said


def stop_halfway(slow: Reach) -> None:
    path = f"/v1/sandboxes/box/files?path=/tmp/half-{slow.kind}"
    with slow.connect() as sock:
        sock.sendall(slow.head("PUT", path, *RAW, "Content-Length: 12"))
        sock.sendall(b"half of")
        said = said_by(sock)
        assert said.startswith(b"HTTP/1.1 400 ") and b"nothing of the body came for 3 s" in said
    assert slow.call("GET", path).status == 404, "no half of a file"


def go_on_slowly(slow: Reach) -> None:
    path = f"/v1/sandboxes/box/files?path=/tmp/slow-{slow.kind}"
    with slow.connect() as sock:
        sock.sendall(slow.head("PUT", path, *RAW, "Connection: close", "Transfer-Encoding: chunked"))
        for _ in range(12):
            sock.sendall(b"1\r\nx\r\n")
            time.sleep(0.35)
        sock.sendall(b"0\r\n\r\n")
        assert said_by(sock).startswith(b"HTTP/1.1 204 "), "slow is fine while it goes on"
    assert slow.call("GET", path).body == b"x" * 12


def test_heads_and_bodies_that_drip(tcp: Reach, unix: Reach) -> None:
    checks = (drip_a_head, drip_json, stop_halfway, go_on_slowly)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(check, reach) for check in checks for reach in (tcp, unix)]:
            done.result()


def test_a_kept_connection_that_says_nothing_ends(slow: Reach) -> None:
    with slow.connect() as sock:
        sock.sendall(slow.head("GET", "/v1/health"))
        assert said_by(sock).endswith(b'{"status":"ok"}')


def test_an_answer_nobody_takes_ends_and_a_process_does_not(slow: Reach) -> None:
    rig = slow.rig
    path = f"/tmp/large-{slow.kind}"
    assert rig.run("box", "truncate", "-s", "60M", path).exit_code == 0
    process = rig.start_process("box", "sh", "-c", "head -c 40000000 /dev/zero; exec sleep 300")
    before = rig.descriptors()
    upgrade = ("Connection: Upgrade", "Upgrade: sbx-stream/1")
    heads = [
        slow.head("GET", f"/v1/sandboxes/box/files?path={path}"), slow.head("GET", f"{process}/output"),
        slow.head("GET", f"{process}/attach", *upgrade),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for head in heads:
            sock = slow.connect()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stack.enter_context(sock).sendall(head)
        until("they are served", lambda: rig.descriptors() > before)
        until("they are cut", lambda: rig.descriptors() <= before + 1)
    assert rig.call("GET", process).json["state"] == "running"
    rig.call("POST", f"{process}/signal", {"signal": "KILL"})


def test_following_a_silent_process_has_no_end(slow: Reach) -> None:
    process = slow.rig.start_process("box", "sh", "-c", "sleep 4; echo done")
    with slow.attach(process) as client:
        end_direction(client.socket)
        assert client.rest() == (b"done\n", b"", 0)
    assert b'"exit_code":0' in slow.call("GET", f"{process}/output").body


def test_json_in_memory_is_bounded_for_a_client(tcp: Reach, held: Hold) -> None:
    size = 700_000
    head = tcp.head("POST", "/v1/sandboxes", *JSON, f"Content-Length: {size}", "Connection: close")
    first = held(tcp.connect())
    first.sendall(head + b" " * (size - 2))
    said: list[bytes] = []

    def no_room() -> bool:
        """Not before the first one's has been read."""
        said.append(tcp.raw(head + b" " * (size - 2) + b"[]"))
        return said[-1].startswith(b"HTTP/1.1 503 ")

    until("the first one's is in memory", no_room)
    assert b"too many large requests at once" in said[-1]
    assert replace(tcp, token=SECOND).raw(head.replace(TOKEN.encode(), SECOND.encode()) + b" " * size).startswith(
        b"HTTP/1.1 400 "
    )
    first.sendall(b"[]")
    assert said_by(first).startswith(b"HTTP/1.1 400 ")
    assert tcp.raw(head + b" " * (size - 2) + b"[]").startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/v1/nothing", JSON, 404),
        ("/v1/sandboxes", ("Content-Type: text/plain",), 415),
        ("/v1/sandboxes", (*JSON, "Origin: https://evil.example"), 403),
        ("/v1/sandboxes", JSON, 400),
    ],
)
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_what_was_refused_is_not_in_memory(
    tcp: Reach, kind: str, path: str, fields: tuple[str, ...], status: int
) -> None:
    """Of one connection, and of many: in all more than a client may have there."""
    body = b" " * 60_000
    reach = replace(tcp, kind=kind)
    request = reach.head("POST", path, *fields, f"Content-Length: {len(body)}") + body
    get = reach.head("GET", "/v1/sandboxes")
    for _ in range(3):
        with reach.connect() as sock:
            for sent in (get, *[request] * (SMALL.json_held_per_client_bytes // len(body) // 2 + 1)):
                sock.sendall(sent)
                answer = HTTPResponse(sock)
                answer.begin()
                answer.read()
                assert answer.status == (200 if sent is get else status)
    refused = reach.head("POST", "/v1/sandboxes", *JSON, "Content-Length: 60000", "Connection: close") + body
    assert reach.raw(refused).startswith(b"HTTP/1.1 400 ")


# -- the count itself


def occupancy(**fields: Any) -> Occupancy[str]:
    return Occupancy(replace(Limits(), **fields))


def test_the_oldest_newcomer_of_the_busiest_address_makes_room() -> None:
    house = occupancy(newcomers=4, newcomers_per_address=3)
    assert [house.enter(name, TcpPeer("192.0.2.1")) for name in ("a1", "a2", "a3")] == [None] * 3
    assert house.enter("a4", TcpPeer("192.0.2.1")) == "a1"
    assert house.enter("b1", TcpPeer("192.0.2.2")) is None
    assert house.enter("c1", TcpPeer("192.0.2.3")) == "a2"
    house.know("a3", 0)
    assert house.enter("c2", TcpPeer("192.0.2.3")) is None, "who is known is no newcomer"
    house.leave("a2")
    house.leave("a2")
    assert house.enter("d1", TcpPeer("192.0.2.4")) == "c1"
    assert house.enter("root", UnixPeer(0)) is None


def test_the_addresses_of_one_ipv6_network_are_one() -> None:
    house = occupancy(newcomers_per_address=1)
    assert house.enter("a", TcpPeer("2001:db8::1")) is None
    assert house.enter("b", TcpPeer("2001:db8::ffff:2")) == "a"
    assert house.enter("c", TcpPeer("2001:db8:0:1::1")) is None
    assert house.enter("d", TcpPeer("fe80::1%lo")) is None


def test_a_client_is_its_token_or_its_uid_wherever_it_comes_from() -> None:
    house = occupancy(connections_per_client=2, connections=5)
    for number in range(3):
        house.enter(f"t{number}", TcpPeer(f"192.0.2.{number}"))
    house.know("t0", 7)
    house.know("t0", 7)
    house.know("t1", 7)
    with pytest.raises(Full, match="one client may have 2"):
        house.know("t2", 7)
    house.know("t2", 8)
    house.enter("u0", UnixPeer(0))
    house.enter("u1", UnixPeer(0))
    with pytest.raises(Full, match="one client may have 2"):
        house.enter("u2", UnixPeer(0))
    with pytest.raises(Full, match=r"too many connections$"):
        house.enter("u3", UnixPeer(1))
    house.leave("u0")
    assert house.enter("u3", UnixPeer(1)) is None


def test_memory_is_counted_by_client_and_given_back() -> None:
    house = occupancy(json_held_bytes=10, json_held_per_client_bytes=6)
    for number in range(3):
        house.enter(f"c{number}", UnixPeer(number))
    house.hold("c0", 6)
    with pytest.raises(Full):
        house.hold("c0", 1)
    house.hold("c1", 4)
    with pytest.raises(Full):
        house.hold("c2", 1)
    house.let_go("c0", 6)
    house.let_go("c0", 0)
    house.hold("c2", 6)
