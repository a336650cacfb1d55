"""Plain HTTP, CONNECT and ports of other protocols through the whole path."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Iterator

import pytest

from tests.egress.rig import (
    ANYWHERE,
    PLAN,
    Rig,
    Sandbox,
    heard,
    idle,
    looked_up,
    passed,
    policy,
    said,
    settle,
    until,
)
from tests.world import world as places
from tests.world.hello import hello
from tests.world.origin import Request, drip, quiet

ALL = 1 << 20  # more than anything says here: reads to the end


@pytest.fixture(scope="module")
def sandbox(rig: Rig) -> Iterator[Sandbox]:
    made = rig.sandbox(policy("allowed.test", "second.test", "deaf.test", allow_tcp=["db.test:5432"]))
    yield made
    made.close()


def request(host: str, path: str = "/", method: str = "GET", *lines: str, body: bytes = b"") -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"{method} {path} HTTP/1.1", f"Host: {host}", *lines))
    return head.encode() + b"\r\n" + body


def http(sandbox: Sandbox, data: bytes | list[bytes], port: int = 80) -> bytes:
    """What comes back until the other end closes."""
    return said(sandbox, data, port, enough=ALL)


def test_an_allowed_host_answers(rig: Rig, sandbox: Sandbox) -> None:
    with quiet(rig.world.origin) as seen, sandbox.dial(ANYWHERE, 80) as stream:
        stream.sendall(request("allowed.test"))
        assert heard(stream).startswith(b"HTTP/1.1 200")
    assert [(visit.host, visit.address) for visit in seen.visits] == [("allowed.test", places.PUBLIC)]


@pytest.mark.parametrize("host", ["Allowed.TEST", "allowed.test.", "allowed.test:80"])
def test_a_host_in_another_spelling_is_the_same(sandbox: Sandbox, host: str) -> None:
    with sandbox.dial(ANYWHERE, 80) as stream:
        stream.sendall(request(host))
        assert heard(stream).startswith(b"HTTP/1.1 200")


def test_a_refusal_says_what_why_and_what_to_do(rig: Rig, sandbox: Sandbox) -> None:
    idle(rig)
    with quiet(rig.world.origin) as seen, rig.world.uplink() as uplink:
        answer = http(sandbox, request("other.test", "/secret"))
    assert seen.visits == [] and seen.queries == [] and uplink.outgoing(port=80) == []
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 403 ")
    text = body.decode()
    assert "other.test" in text and "blocked by sandbox policy" in text and "--allow other.test" in text
    event = rig.wait_event(lambda event: event.name == "other.test" and event.by == "http")
    assert f"sandbox-cli why {event.id}" in text
    assert (event.port, event.rule) == (80, "not-listed")
    again = http(sandbox, request("other.test", "/secret"))
    assert event.id.encode() in again


@pytest.mark.parametrize("data", [request(places.PUBLIC), f"CONNECT {places.PUBLIC}:443 HTTP/1.1\r\n\r\n".encode()])
def test_a_refused_address_is_named_too(sandbox: Sandbox, data: bytes) -> None:
    text = http(sandbox, data).decode()
    assert places.PUBLIC in text and "blocked by sandbox policy" in text and "sandbox-cli why" in text


def two_hosts(*hosts: str) -> bytes:
    return ("GET / HTTP/1.1\r\n" + "".join(f"Host: {host}\r\n" for host in hosts) + "\r\n").encode()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(two_hosts("allowed.test", "other.test"), id="two hosts"),
        pytest.param(two_hosts("allowed.test", "allowed.test"), id="the same host twice"),
        pytest.param(b"GET / HTTP/1.1\r\nHost : allowed.test\r\n\r\n", id="a blank before the colon"),
        pytest.param(b"GET / HTTP/1.1\r\nHost:\r\n allowed.test\r\n\r\n", id="a folded host"),
        pytest.param(b"GET / HTTP/1.1\nHost: allowed.test\n\n", id="bare line feeds"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: allowed.test\r\nX: a\0b\r\n\r\n", id="a zero byte"),
        pytest.param(request("allowed.test", "/", "GET", "X: " + "y" * 70_000), id="a head of seventy kilobytes"),
        pytest.param(b"GET / HTTP/1.2\r\nHost: allowed.test\r\n\r\n", id="version 1.2"),
        pytest.param(b"GET / HTTP/1.0\r\n\r\n", id="no host"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="no host in 1.1"),
        pytest.param(request("allowed.test", "http://other.test/"), id="an absolute target for another host"),
        pytest.param(request("other.test", "http://allowed.test/"), id="a host other than the absolute target's"),
        pytest.param(request("127.0.0.1"), id="an address"),
        pytest.param(request("2130706433"), id="an address as one number"),
        pytest.param(request("[::1]"), id="an address of six"),
        pytest.param(request("user@allowed.test"), id="a user"),
        pytest.param(request("allowed.test other.test"), id="a blank in the host"),
        pytest.param(request("allowed.test.."), id="two dots"),
        pytest.param(
            request("allowed.test", "/", "POST", "Content-Length: 5", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
            id="a length and chunks",
        ),
        pytest.param(
            request("allowed.test", "/", "POST", "Content-Length: 5", "Content-Length: 6", body=b"hello"),
            id="two lengths",
        ),
    ],
)
def test_an_ambiguous_request_is_refused_and_nothing_goes_on(rig: Rig, sandbox: Sandbox, data: bytes) -> None:
    with quiet(rig.world.origin) as seen:
        answer = http(sandbox, data)
    assert answer.split(b" ", 2)[:2] in ([b"HTTP/1.1", b"400"], [b"HTTP/1.1", b"403"])
    assert seen.visits == []


def test_each_request_of_a_kept_connection_is_decided(rig: Rig, sandbox: Sandbox) -> None:
    with quiet(rig.world.origin) as seen, sandbox.dial(ANYWHERE, 80) as stream:
        stream.sendall(request("allowed.test", "/one"))
        until(stream, b"hello from allowed.test\n")
        stream.sendall(request("second.test", "/two"))
        until(stream, b"hello from second.test\n")
        stream.sendall(request("allowed.test", "/three"))
        until(stream, b"hello from allowed.test\n")
        stream.sendall(request("other.test", "/four"))
        answer = heard(stream, ALL)
    assert answer.startswith(b"HTTP/1.1 403") and b"other.test" in answer
    assert [(visit.host, visit.address) for visit in seen.visits] == [
        ("allowed.test", places.PUBLIC), ("second.test", places.PUBLIC_2), ("allowed.test", places.PUBLIC),
    ]  # fmt: skip


def test_requests_sent_at_once_are_decided_and_answered_in_their_order(rig: Rig, sandbox: Sandbox) -> None:
    data = b"".join(request(host) for host in ("allowed.test", "second.test", "allowed.test", "other.test"))
    answer = http(sandbox, data + request("allowed.test"))
    order = [answer.index(text) for text in (b"hello from allowed", b"hello from second", b"HTTP/1.1 403")]
    assert order == sorted(order) and answer.count(b"HTTP/1.1 ") == 4


def test_a_body_that_looks_like_a_request_is_a_body(rig: Rig, sandbox: Sandbox) -> None:
    inner = request("other.test", "/smuggled")
    outer = request("allowed.test", "/", "POST", f"Content-Length: {len(inner)}", body=inner)
    with quiet(rig.world.origin) as seen, sandbox.dial(ANYWHERE, 80) as stream:
        stream.sendall(outer)
        assert heard(stream).startswith(b"HTTP/1.1 200")
    assert [visit.line for visit in seen.visits] == ["POST /"]


def test_a_large_body_each_way_arrives_whole(rig: Rig, sandbox: Sandbox) -> None:
    sizes: list[int] = []

    def count(asked: Request) -> tuple[int, dict[str, str], bytes]:
        sizes.append(len(asked.body))
        return 200, {}, b"z" * 3_000_000

    rig.world.origin.answers["second.test"] = count
    try:
        with sandbox.dial(ANYWHERE, 80) as stream:
            stream.sendall(request("second.test", "/", "PUT", "Content-Length: 2000000", body=b"y" * 2_000_000))
            answer = b""
            while not answer.endswith(b"z") or len(answer) < 3_000_000:
                answer += stream.recv(1 << 16)
            assert answer.partition(b"\r\n\r\n")[2] == b"z" * 3_000_000
            stream.sendall(request("allowed.test"))
            until(stream, b"hello from allowed.test\n")
    finally:
        del rig.world.origin.answers["second.test"]
    assert sizes == [2_000_000]


def test_expect_continue_and_chunks(rig: Rig, sandbox: Sandbox) -> None:
    with sandbox.dial(ANYWHERE, 80) as stream:
        stream.sendall(request("allowed.test", "/", "PUT", "Transfer-Encoding: chunked", "Expect: 100-continue"))
        assert heard(stream).startswith(b"HTTP/1.1 100")
        stream.sendall(b"5\r\nhello\r\n0\r\nX-Trailer: a\r\n\r\n")
        assert heard(stream).startswith(b"HTTP/1.1 200")


def test_an_upgraded_connection_is_opaque_both_ways(rig: Rig, sandbox: Sandbox) -> None:
    def upgrade(asked: Request) -> None:
        asked.stream.sendall(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nfirst"
        )
        while data := asked.stream.recv(65536):
            asked.stream.sendall(data[::-1])

    rig.world.origin.answers["second.test"] = upgrade
    try:
        with sandbox.dial(ANYWHERE, 80) as stream:
            stream.sendall(request("second.test", "/", "GET", "Upgrade: websocket", "Connection: Upgrade"))
            assert heard(stream, 70).endswith(b"first")
            for frame in (b"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n", b"\x81\x05hello"):
                stream.sendall(frame)
                assert heard(stream, len(frame)) == frame[::-1]
            stream.shutdown(socket.SHUT_WR)
            assert heard(stream) == b""
    finally:
        del rig.world.origin.answers["second.test"]


def test_a_slow_answer_outlives_the_deadline_of_a_head(rig: Rig) -> None:
    rig.world.origin.answers["second.test"] = drip(0.4, 4)
    made = rig.sandbox(policy("second.test"), first_ms=500)
    try:
        assert http(made, request("second.test")).endswith(b"0\n1\n2\n3\n")
    finally:
        made.close()
        del rig.world.origin.answers["second.test"]


def test_a_head_one_byte_at_a_time_ends_at_its_deadline(rig: Rig) -> None:
    made = rig.sandbox(policy("allowed.test"), first_ms=700)
    try:
        begun = time.monotonic()
        said(made, [bytes([byte]) for byte in request("allowed.test")], 80, pause_s=0.1)
        assert time.monotonic() - begun < 7, "as long as the whole head takes"
    finally:
        made.close()


# CONNECT


def connect(target: str, *lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in (f"CONNECT {target} HTTP/1.1", *lines, "")).encode()


@pytest.mark.parametrize(
    "lines",
    [["Host: allowed.test"], ["Host: allowed.test:443"], ["Host: 172.16.0.1:3128"], ["Host: other.test"]],
    ids=["bare", "full", "proxy", "another"],
)
def test_a_tunnel_to_an_allowed_name_works_whatever_its_host_line_says(
    rig: Rig, sandbox: Sandbox, lines: list[str]
) -> None:
    context = ssl.create_default_context(cafile=str(rig.world.ca))
    with sandbox.dial(ANYWHERE, 80) as stream:
        stream.sendall(connect("allowed.test:443", *lines))
        assert heard(stream).startswith(b"HTTP/1.1 200")
        with context.wrap_socket(stream, server_hostname="allowed.test") as secure:
            secure.sendall(request("allowed.test"))
            assert b"200" in secure.recv(1000)


@pytest.mark.parametrize("target", ["ALLOWED.Test:443", "allowed.test.:443"], ids=["case", "a dot"])
def test_a_target_in_another_spelling_is_the_same(sandbox: Sandbox, target: str) -> None:
    answer = said(sandbox, [connect(target), hello("allowed.test")], 80, enough=100)
    assert passed(answer.partition(b"\r\n\r\n")[2])


def test_a_client_whose_proxy_variables_point_at_us_works_too(rig: Rig, sandbox: Sandbox) -> None:
    """Nobody has to set them. What they name is any address there is: only the port tells that it is for us."""
    for scheme in ("http", "https"):
        for where in (PLAN.host_address, ANYWHERE):
            proxy = f"http://{where}:80"
            url = f"{scheme}://allowed.test/"
            curl = ["curl", "-sS", "--max-time", "20", "--cacert", str(rig.world.ca), url]
            variables = ["env", "-i", f"PATH={os.environ['PATH']}", f"http_proxy={proxy}", f"https_proxy={proxy}"]
            assert sandbox.guest.run(*variables, *curl) == "hello from allowed.test\n", (proxy, url)
            refused = [*variables, *curl[:-1], f"{scheme}://other.test/"]
            assert "hello" not in sandbox.guest.run("sh", "-c", '"$@" 2>&1 || true', "-", *refused)


def test_a_tunnel_without_a_host_line_in_1_0(sandbox: Sandbox) -> None:
    answer = said(sandbox, [b"CONNECT allowed.test:443 HTTP/1.0\r\n\r\n", hello("allowed.test")], 80, enough=100)
    assert answer.startswith(b"HTTP/1.1 200")


def test_bytes_glued_to_the_head_are_not_lost_and_are_decided(rig: Rig, sandbox: Sandbox) -> None:
    head = connect("allowed.test:443", "Host: allowed.test")
    for pieces in (
        [head + hello("allowed.test")],
        [head[:-1], head[-1:] + hello("allowed.test")],
        [head, hello("allowed.test")],
    ):
        answer = said(sandbox, pieces, 80, pause_s=0.02, enough=200)
        assert passed(answer.partition(b"\r\n\r\n")[2])
    with quiet(rig.world.origin) as seen, rig.world.uplink() as uplink:
        idle(rig)
        before = len(uplink.outgoing(port=443))
        for pieces in ([head + hello("second.test")], [head, hello("other.test")], [head, hello()]):
            answer = said(sandbox, pieces, 80, pause_s=0.02, enough=ALL)
            assert not passed(answer.partition(b"\r\n\r\n")[2])
        assert len(uplink.outgoing(port=443)) == before
    assert seen.queries == []


@pytest.mark.parametrize(
    "target",
    [
        "allowed.test:22", "allowed.test:0", "allowed.test:99999", "allowed.test", "127.0.0.1:443", "[::1]:443",
        "[::ffff:7f00:1]:443", "2130706433:443", "0177.0.0.1:443", "0x7f.1:443", "user@allowed.test:443",
        "allowed.test:443@other.test:443", "allowed.test:443 other", "other.test:443", "db.test:5432",
    ],
)  # fmt: skip
def test_any_other_target_is_refused_and_not_looked_up(rig: Rig, sandbox: Sandbox, target: str) -> None:
    with quiet(rig.world.origin) as seen:
        answer = http(sandbox, connect(target, "Host: allowed.test"))
    assert answer.split(b" ", 2)[:2] in ([b"HTTP/1.1", b"400"], [b"HTTP/1.1", b"403"]), answer
    assert seen.queries == [] and seen.visits == []


# What cannot be reached


def test_a_dead_host_gives_502_with_the_reason(rig: Rig) -> None:
    made = rig.sandbox(policy("deaf.test", "missing.test"), connect_ms=700)
    try:
        answer = http(made, request("deaf.test"))
        assert answer.startswith(b"HTTP/1.1 502") and b"unreachable" in answer
        answer = http(made, request("missing.test"))
        assert answer.startswith(b"HTTP/1.1 502") and b"does not resolve" in answer
        assert made.rig.wait_event(lambda event: event.name == "missing.test").id.encode() in answer
    finally:
        made.close()


# Ports of other protocols


def test_another_port_goes_by_the_address_its_name_was_given(rig: Rig, sandbox: Sandbox) -> None:
    address = looked_up(sandbox, "db.test")
    with quiet(rig.world.origin) as seen, sandbox.dial(address, places.DATABASE) as stream:
        assert heard(stream) == b"sink\n"
    assert [(visit.address, visit.port) for visit in seen.visits] == [(places.PUBLIC, places.DATABASE)]
    event = rig.wait_event(lambda event: event.kind == "allowed" and event.name == "db.test")
    assert (event.port, event.by) == (places.DATABASE, "address")


@pytest.mark.parametrize(
    ("name", "port", "rule"),
    [("db.test", 22, "port"), ("allowed.test", 5432, "port"), ("db.test", 443, None)],
    ids=["a port not listed", "a name not listed with it", "the web of such a name"],
)
def test_another_port_or_name_is_refused_at_once(
    rig: Rig, sandbox: Sandbox, name: str, port: int, rule: str | None
) -> None:
    address = looked_up(sandbox, name)
    begun = time.monotonic()
    assert said(sandbox, hello(name) if port == 443 else b"", port, address) == b""
    assert time.monotonic() - begun < 20, "a first flight without an end is given a minute"
    if rule:
        event = rig.wait_event(lambda event: event.name == name and event.port == port)
        assert event.rule == rule


def test_an_address_no_name_was_given_is_refused(rig: Rig, sandbox: Sandbox) -> None:
    assert said(sandbox, b"", 5432, "198.18.14.200") == b""
    assert rig.wait_event(lambda event: event.port == 5432 and event.name.startswith("198.18.")).rule == "address"
    with pytest.raises(ConnectionRefusedError):
        sandbox.dial(places.PUBLIC, 5432)


# Everything open


@pytest.fixture(scope="module")
def opened(rig: Rig) -> Iterator[Sandbox]:
    from egress.policy import Mode

    made = rig.sandbox(policy(mode=Mode.OPEN))
    yield made
    made.close()


def test_open_reaches_any_public_name_and_address(rig: Rig, opened: Sandbox) -> None:
    assert passed(said(opened, hello("other.test")))
    assert looked_up(opened, "other.test").startswith("198.18.")
    assert looked_up(opened, "missing.test") == "NXDOMAIN"
    assert said(opened, b"", places.DATABASE, places.PUBLIC, enough=5) == b"sink\n"
    assert said(opened, b"", places.DATABASE, looked_up(opened, "second.test"), enough=5) == b"sink\n"
    assert passed(said(opened, hello(), 443, places.PUBLIC))


@pytest.mark.parametrize("where", [places.HOST, places.LAN_HOST, places.LAN, "169.254.169.254", "10.9.9.9"])
def test_open_reaches_no_host_and_nothing_private(rig: Rig, opened: Sandbox, where: str) -> None:
    with rig.world.uplink() as uplink:
        assert said(opened, b"", places.DATABASE, where) == b""
    assert uplink.outgoing(port=places.DATABASE) == []


def test_open_with_a_deny_list_refuses_what_is_on_it_and_what_has_no_name(rig: Rig) -> None:
    from egress.policy import Mode

    made = rig.sandbox(policy(mode=Mode.OPEN, deny=["other.test"]))
    try:
        assert passed(said(made, hello("allowed.test")))
        assert said(made, hello("other.test")) == b""
        assert said(made, hello(), 443, places.PUBLIC) == b""
        assert said(made, b"", places.DATABASE, places.PUBLIC) == b""
        assert looked_up(made, "other.test") == "NXDOMAIN"
        assert http(made, request("other.test")).startswith(b"HTTP/1.1 403")
    finally:
        made.close()


def test_what_was_carried_is_counted(rig: Rig) -> None:
    made = rig.sandbox(policy("allowed.test"))
    try:
        with made.dial(ANYWHERE, 80) as stream:
            stream.sendall(request("allowed.test", "/bytes/50000"))
            answer = until(stream, b"x" * 50_000)
        settle(lambda: any(row["connections"] for row in made.report()))
        (row,) = [row for row in made.report() if row["decision"] == "allowed"]
        assert (row["name"], row["port"], row["by"], row["count"]) == ("allowed.test", 80, "http", 1)
        assert row["bytes_in"] == len(answer) and row["bytes_out"] > 40
    finally:
        made.close()
    event = rig.wait_event(
        lambda event: event.sandbox == made.id and event.kind == "allowed" and event.connections == 1
    )
    assert event.down_bytes == len(answer)
