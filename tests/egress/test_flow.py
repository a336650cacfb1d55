"""One connection, told as a script: what the guest and the servers send, what each of them gets."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egress.flow import (
    FREE,
    HEAD_MS,
    HELLO_MS,
    Close,
    Deadline,
    Destination,
    Direction,
    Flow,
    Open,
    Pass,
    Read,
    Refuse,
    Send,
)
from egress.policy import Allow, Ask, By, Decider, Mode, Policy
from tests.egress.hello import extension, hello, message, openssl, records, server_name
from tests.egress.relayed import LISTED, Relayed

UP, DOWN = Direction.UP, Direction.DOWN
OPEN = Policy(Mode.OPEN)
OPEN_BUT = Policy(Mode.OPEN, deny=("other.test",))


def get(host: str = "allowed.test", path: str = "/", *more: str, method: str = "GET", version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", f"Host: {host}", *more, "", ""]).encode()


def post(body: bytes, host: str = "allowed.test") -> bytes:
    return get(host, "/", f"Content-Length: {len(body)}", method="POST") + body


def ok(body: bytes = b"hello", *more: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *more, "", ""]).encode() + body


def connect(target: str = "allowed.test:443", version: str = "1.1") -> bytes:
    return f"CONNECT {target} HTTP/{version}\r\nHost: {target}\r\n\r\n".encode()


ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


def hosts(relayed: Relayed) -> list[str]:
    return [f"{command.name or command.address}:{command.port}" for command in relayed.opens]


# The first flight: TLS


def test_a_tls_connection_passes_whole_once_its_name_is_allowed() -> None:
    flow = Flow(Destination("198.18.0.1", 443, "allowed.test"), Decider(LISTED).decide, False)
    assert flow.start() == []
    assert flow.data(UP, hello() + b"early") == [
        Open("allowed.test", "", 443, Allow("allow allowed.test", False), hello(), 0, 0, By.TLS)
    ]
    assert flow.current == Ask("allowed.test", 443, By.TLS)
    assert flow.opened() == [Deadline(HELLO_MS), Read(DOWN, 16 << 10)]
    assert flow.data(DOWN, SERVER_HELLO) == [
        Deadline(0), Send(DOWN, SERVER_HELLO), Pass(DOWN, FREE), Send(UP, b"early"), Pass(UP, FREE),
    ]  # fmt: skip


def server_hello(random: bytes) -> bytes:
    body = b"\3\3" + random + b"\0\x13\1\0"
    return b"\x16\3\3" + (len(body) + 4).to_bytes(2, "big") + b"\2" + len(body).to_bytes(3, "big") + body


SERVER_HELLO = server_hello(b"s" * 32)
RETRY = server_hello(hashlib.sha256(b"HelloRetryRequest").digest())
CHANGE = b"\x14\3\3\0\1\1"
EARLY = b"\x17\3\3\0\5early"
WARNING = b"\x15\3\3\0\2\1\x70"


@pytest.mark.parametrize("piece", [1 << 16, 1])
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(SERVER_HELLO, id="taken"),
        pytest.param(WARNING + SERVER_HELLO, id="taken with a warning"),
        pytest.param(b"\x15\3\3\0\2\2\x28\x17", id="not taken"),
        pytest.param(b"HTTP/1.1 400 -\r\n\r\n", id="no TLS"),
        pytest.param(b"\x16\3\3\0\4\0\0\0\0", id="another message"),
    ],
)
def test_once_a_server_has_answered_a_hello_everything_passes(answer: bytes, piece: int) -> None:
    relayed = Relayed(port=443, piece=piece).guest(hello() + CHANGE + EARLY)
    assert relayed.received == [hello()] and relayed.deadline == HELLO_MS
    relayed.server(answer + b"and more").guest(hello(b"other.test") * 2)
    assert relayed.to_guest == answer + b"and more" and not relayed.closed
    assert relayed.received == [hello() + CHANGE + EARLY + hello(b"other.test") * 2] and relayed.deadline == 0


@pytest.mark.parametrize("piece", [1 << 16, 1])
@pytest.mark.parametrize("between", [b"", CHANGE, EARLY + EARLY + CHANGE])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_second_hello_has_to_name_the_same_server(at_once: bool, between: bytes, piece: int) -> None:
    for second, passes in (
        (hello(), True),
        (records(hello()[5:], 7), True),
        (hello(b"ALLOWED.test"), True),
        (hello(b"other.test"), False),
        (hello(b"second.test"), False),
        (records(hello(b"other.test")[5:], 7), False),
        (openssl(None), False),
        (b"\x16\3\3\0\4\x0b\0\0\0", False),
        (b"\x80\x2e\1\3\1", False),
    ):
        relayed = Relayed(port=443, piece=piece)
        if at_once:
            relayed.guest(hello() + between + second).server(RETRY)
        else:
            relayed.guest(hello()).server(RETRY).guest(between + second)
        assert len(relayed.opens) == 1
        if passes:
            assert relayed.to_guest == RETRY
            relayed.server(SERVER_HELLO).guest(b"more")
            assert relayed.received == [hello() + between + second + b"more"] and relayed.deadline == 0
        else:
            assert (relayed.rule, relayed.closed, relayed.received) == ("names-disagree", "reset", [hello()])


def test_where_all_is_open_a_second_hello_does_not_bring_a_name() -> None:
    for policy in (OPEN, OPEN_BUT):
        relayed = Relayed(policy, port=443, name="allowed.test").guest(openssl(None)).server(RETRY)
        assert relayed.guest(hello(b"other.test")).rule == "names-disagree"
        nameless = openssl(None)
        relayed = Relayed(policy, port=443, name="allowed.test").guest(nameless).server(RETRY)
        assert relayed.guest(nameless).received == [nameless * 2]


def test_what_is_held_for_a_second_hello_is_bounded() -> None:
    relayed = Relayed(port=443).guest(hello()).server(RETRY)
    for _ in range(40):
        relayed.guest(b"\x17\3\3\x40\0" + bytes(1 << 14))
    assert (relayed.rule, relayed.closed) == ("names-disagree", "reset")


def test_either_end_may_leave_between_the_hellos() -> None:
    relayed = Relayed(port=443).guest(hello() + EARLY).server(RETRY[:9]).server_ends()
    assert relayed.to_guest == RETRY[:9] and relayed.guest_finished and relayed.received == [hello() + EARLY]
    relayed = Relayed(port=443).guest(hello()).server(RETRY).guest(CHANGE).guest_ends()
    assert relayed.finished == [True] and relayed.received == [hello()]


@pytest.mark.parametrize("piece", [5, 1])
def test_a_hello_in_small_pieces_is_waited_for(piece: int) -> None:
    relayed = Relayed(port=443, piece=piece).guest(hello())
    assert hosts(relayed) == ["allowed.test:443"] and relayed.received == [hello()]
    assert Relayed(port=443, piece=piece).guest(hello(b"other.test")).rule == "not-listed"


def test_the_name_on_the_wire_decides_whatever_address_was_dialled() -> None:
    assert hosts(Relayed(port=443, name="second.test").guest(hello())) == ["allowed.test:443"]
    assert hosts(Relayed(port=443, name="", address="172.16.0.1").guest(hello())) == ["allowed.test:443"]
    assert Relayed(port=443, name="allowed.test").guest(hello(b"other.test")).rule == "not-listed"


TLS_REFUSALS = [
    pytest.param(hello(b"other.test"), "not-listed", id="another name"),
    pytest.param(hello(b"sub.allowed.test"), "not-listed", id="a subdomain"),
    pytest.param(openssl(None), "no-name", id="no name"),
    pytest.param(hello(b"127.0.0.1"), "address", id="an address"),
    pytest.param(hello(b"[::1]"), "address", id="an address in brackets"),
    pytest.param(records(message([server_name(b"allowed.test", b"other.test")])), "names-disagree", id="two names"),
    pytest.param(
        records(message([server_name(b"other.test"), server_name(b"allowed.test")])), "names-disagree", id="two lists"
    ),
    pytest.param(b"\x16\x03\x01\0\x04\x01\xff\xff\xff", "malformed", id="a length of 2^24"),
    pytest.param(b"\0\0\0\0", "malformed", id="neither TLS nor HTTP"),
    pytest.param(b"\xff\xfd\x18", "malformed", id="telnet"),
]


@pytest.mark.parametrize(("data", "rule"), TLS_REFUSALS)
@pytest.mark.parametrize("piece", [1 << 16, 1])
def test_a_tls_connection_that_is_refused_is_reset_and_nothing_dialled(data: bytes, rule: str, piece: int) -> None:
    relayed = Relayed(port=443, piece=piece).guest(data)
    assert (relayed.rule, relayed.closed, relayed.opens) == (rule, "reset", [])
    assert relayed.to_guest == b""
    assert relayed.guest(b"more").opens == []


def test_a_refusal_without_a_name_still_knows_the_port() -> None:
    relayed = Relayed(port=443).guest(openssl(None))
    assert relayed.refusals[0].ask == Ask("", 443, By.TLS)


def test_a_guest_that_leaves_early_costs_nothing() -> None:
    for data in (b"", b"\x16", b"GET"):
        relayed = Relayed(port=443).guest(data).guest_ends()
        assert (relayed.closed, relayed.opens, relayed.refusals) == ("gently", [], [])


# Other ports


def test_other_ports_are_decided_by_the_name_of_the_address() -> None:
    relayed = Relayed(port=22, name="git.test")
    assert relayed.opens == [
        Open("git.test", "", 22, Allow("allow_tcp git.test:22", False), b"", FREE, FREE, By.ADDRESS)
    ]
    relayed.guest(b"SSH-2.0-x\r\n").server(b"SSH-2.0-y\r\n").guest_ends().server_ends()
    assert relayed.received == [b"SSH-2.0-x\r\n"] and relayed.to_guest == b"SSH-2.0-y\r\n"
    assert relayed.finished == [True] and relayed.guest_finished and not relayed.closed


@pytest.mark.parametrize(
    ("port", "name", "rule"),
    [(23, "git.test", "port"), (22, "other.test", "not-listed"), (22, "", "address"), (22, "allowed.test", "port")],
)
def test_other_ports_are_refused_by_a_reset(port: int, name: str, rule: str) -> None:
    relayed = Relayed(port=port, name=name)
    assert (relayed.rule, relayed.closed, relayed.opens) == (rule, "reset", [])
    assert relayed.refusals[0].ask == Ask(name, port, By.ADDRESS)


# Plain HTTP: one request


def test_a_request_and_its_response() -> None:
    flow = Flow(Destination("198.18.0.1", 80, "allowed.test"), Decider(LISTED).decide, False)
    assert flow.data(UP, get()[:9]) == [Read(UP, 0)]
    assert flow.data(UP, get()[9:]) == [
        Open("allowed.test", "", 80, Allow("allow allowed.test", False), get(), 0, 0, By.HTTP)
    ]
    first, *rest = flow.opened()
    assert first == Read(DOWN, 16 << 10) and rest == [Read(UP, 0)]
    assert flow.data(DOWN, ok())[0] == Send(DOWN, ok())


@pytest.mark.parametrize("piece", [1 << 16, 7, 1])
@pytest.mark.parametrize(
    ("request_", "response"),
    [
        pytest.param(get(), ok(), id="GET"),
        pytest.param(get("ALLOWED.test.:80"), ok(), id="a host in another form"),
        pytest.param(get("allowed.test", "http://allowed.test/x"), ok(), id="an absolute target"),
        pytest.param(get(method="HEAD"), b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", id="HEAD"),
        pytest.param(get(), b"HTTP/1.1 204 No Content\r\n\r\n", id="204"),
        pytest.param(get(), b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", id="304"),
        pytest.param(post(b"x" * 3000), ok(), id="a body"),
        pytest.param(post(b"x" * 100_000), ok(b"y" * 100_000), id="large bodies"),
        pytest.param(get(), b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + ok(), id="early hints"),
        pytest.param(
            get(), b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nSum: 1\r\n\r\n",
            id="trailers",
        ),
        pytest.param(
            get(), b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9c40\r\n" + b"z" * 40000 + b"\r\n0\r\n\r\n",
            id="a large chunk",
        ),
        pytest.param(
            get("allowed.test", "/", "Transfer-Encoding: chunked", method="PUT") + b"3\r\nabc\r\n0\r\nSum: 1\r\n\r\n",
            ok(),
            id="a chunked request",
        ),
    ],
)  # fmt: skip
def test_messages_pass_as_they_are_and_the_next_request_is_looked_at(
    request_: bytes, response: bytes, piece: int
) -> None:
    relayed = Relayed(piece=piece)
    relayed.guest(request_).server(response)
    assert relayed.received == [request_] and relayed.to_guest == response
    relayed.guest(get("allowed.test", "/2")).server(ok(b"2"))
    assert relayed.received == [request_ + get("allowed.test", "/2")] and relayed.to_guest == response + ok(b"2")
    relayed.guest(get("other.test"))
    assert (relayed.rule, relayed.closed, len(relayed.opens)) == ("not-listed", "gently", 1)
    assert relayed.received == [request_ + get("allowed.test", "/2")]


def test_large_bodies_pass_unseen() -> None:
    relayed = Relayed().guest(post(b"x" * 10_000_000)).server(ok(b"y" * 10_000_000))
    assert len(relayed.received[0]) > 10_000_000 and len(relayed.to_guest) > 10_000_000
    assert min(relayed.passed) > 9_900_000 and relayed.events < 12
    relayed.guest(get("second.test"))
    assert hosts(relayed) == ["allowed.test:80", "second.test:80"]


def test_a_body_that_is_asked_for_first() -> None:
    body = b"x" * 50_000
    head = get("allowed.test", "/", "Expect: 100-continue", f"Content-Length: {len(body)}", method="PUT")
    relayed = Relayed().guest(head)
    assert relayed.received == [head]
    relayed.server(b"HTTP/1.1 100 Continue\r\n\r\n").guest(body).server(ok())
    assert relayed.received == [head + body]
    assert relayed.to_guest == b"HTTP/1.1 100 Continue\r\n\r\n" + ok()
    assert relayed.guest(get("second.test")).received[1] == get("second.test")


def test_an_answer_before_the_body_is_over() -> None:
    head = get("allowed.test", "/", "Content-Length: 60000", method="PUT")
    relayed = Relayed().guest(head + b"x" * 30_000).server(ok()).guest(b"x" * 30_000)
    assert relayed.received == [head + b"x" * 60_000]
    assert relayed.guest(get("other.test")).rule == "not-listed"


@pytest.mark.parametrize("piece", [1 << 16, 1])
def test_a_response_that_ends_with_its_connection(piece: int) -> None:
    body = b"HTTP/1.1 200 OK\r\n\r\n" + b"z" * 50_000
    relayed = Relayed(piece=piece).guest(get()).server(body)
    assert relayed.to_guest == body and not relayed.closed
    assert relayed.server_ends().closed == "gently"


@pytest.mark.parametrize("odd", [b"ICY 200 OK\r\n\r\naudio", b"garbage" * 20_000, b"HTTP/1.1 200 OK\r\nA : b\r\n\r\nx"])
def test_a_response_we_do_not_understand_passes_and_ends_the_connection(odd: bytes) -> None:
    relayed = Relayed().guest(get()).server(odd).server(b"more")
    assert relayed.to_guest == odd + b"more"
    relayed.guest(get("second.test"))
    assert hosts(relayed) == ["allowed.test:80"]
    assert relayed.server_ends().closed == "gently"


def test_a_chunk_that_goes_wrong_on_the_way_down_passes_too() -> None:
    broken = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloXX\r\nmore"
    for piece in (1 << 16, 1):
        assert Relayed(piece=piece).guest(get()).server(broken).to_guest == broken


def test_a_servers_last_word() -> None:
    relayed = Relayed().guest(get()).server(ok()).server(b"HTTP/1.1 408 Timeout\r\n\r\n").server_ends()
    assert relayed.to_guest == ok() + b"HTTP/1.1 408 Timeout\r\n\r\n" and relayed.closed == "gently"


def test_nothing_follows_a_response_that_was_the_last() -> None:
    relayed = Relayed().guest(get()).server(ok(b"hello", "Connection: close"))
    assert relayed.guest(get("second.test")).closed == "gently"
    assert hosts(relayed) == ["allowed.test:80"]


# Refusals


def test_a_refusal_says_what_by_whom_and_how_to_allow_it() -> None:
    relayed = Relayed().guest(get("other.test"))
    head, _, text = relayed.page.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 403 Forbidden\r\n") and "Connection: close" in head
    assert f"Content-Length: {len(text)}\r\n" in head
    assert "other.test was blocked by sandbox policy" in text
    assert "--allow other.test" in text and "sandbox-cli why abcd2345" in text
    assert relayed.closed == "gently" and relayed.refusals[0].ask == Ask("other.test", 80, By.HTTP)


def test_a_refusal_of_head_has_no_body() -> None:
    assert Relayed().guest(get("other.test", method="HEAD")).page.endswith("\r\n\r\n")


@pytest.mark.parametrize(
    ("data", "status", "rule"),
    [
        pytest.param(get("other.test"), 403, "not-listed", id="another host"),
        pytest.param(get("sub.allowed.test"), 403, "not-listed", id="a subdomain"),
        pytest.param(get("127.0.0.1"), 403, "address", id="an address"),
        pytest.param(get("allowed.test:22", "http://allowed.test:22/"), 403, "port", id="a port by an absolute target"),
        pytest.param(get("allowed.test:8080", "http://allowed.test:8080/"), 400, "malformed",
                     id="an allowed port that is not for a proxy"),
        pytest.param(get("allowed.test", "http://other.test/"), 400, "names-disagree", id="target and host disagree"),
        pytest.param(get("allowed.test", "/", "Host: allowed.test"), 400, "names-disagree", id="two hosts"),
        pytest.param(get("allowed.test", "/", "Host: other.test"), 400, "names-disagree", id="two different hosts"),
        pytest.param(get().replace(b"Host:", b"Host :"), 400, "malformed", id="a blank before the colon"),
        pytest.param(get().replace(b"allowed", b"\r\n allowed"), 400, "malformed", id="a folded host"),
        pytest.param(get().replace(b"\r\n", b"\n"), 400, "malformed", id="bare LF"),
        pytest.param(get("allowed.test\0"), 400, "malformed", id="a NUL"),
        pytest.param(get().replace(b": ", b":\t"), 400, "malformed", id="a tab before the value"),
        pytest.param(get("allowed.test", "/", "X: " + "a" * 70_000), 400, "malformed", id="a head of 70 KB"),
        pytest.param(get(method="get"), 400, "malformed", id="a lower-case method"),
        pytest.param(get(version="1.2"), 400, "malformed", id="HTTP/1.2"),
        pytest.param(b"GET / HTTP/1.0\r\n\r\n", 400, "no-name", id="no host on 1.0"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", 400, "no-name", id="no host"),
        pytest.param(get("allowed.test", "/", "Content-Length: 3", "Transfer-Encoding: chunked"), 400, "malformed",
                     id="a length and chunked"),
        pytest.param(get("allowed.test", "/", "Content-Length: 3", "Content-Length: 4"), 400, "malformed",
                     id="two lengths"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", 400, "malformed", id="SSH"),
        pytest.param(connect("allowed.test:22"), 403, "port", id="CONNECT: port 22"),
        pytest.param(connect("allowed.test:8080"), 400, "malformed", id="CONNECT: a port allowed for dialling"),
        pytest.param(connect("other.test:443"), 403, "not-listed", id="CONNECT: another host"),
        pytest.param(connect("allowed.test:0"), 400, "malformed", id="CONNECT: port 0"),
        pytest.param(connect("allowed.test:99999"), 400, "malformed", id="CONNECT: port 99999"),
        pytest.param(connect("allowed.test"), 400, "malformed", id="CONNECT: no port"),
        pytest.param(connect("127.0.0.1:443"), 403, "address", id="CONNECT: an address"),
        pytest.param(connect("[::1]:443"), 403, "address", id="CONNECT: an IPv6 address"),
        pytest.param(connect("[::ffff:7f00:1]:443"), 403, "address", id="CONNECT: a mapped address"),
        pytest.param(connect("2130706433:443"), 403, "address", id="CONNECT: an address as one number"),
        pytest.param(connect("0177.0.0.1:443"), 403, "address", id="CONNECT: an octal address"),
        pytest.param(connect("0x7f.1:443"), 403, "address", id="CONNECT: an address in parts"),
        pytest.param(connect("user@allowed.test:443"), 400, "malformed", id="CONNECT: a user name"),
        pytest.param(connect("allowed.test:443@other.test:443"), 400, "malformed", id="CONNECT: two targets"),
        pytest.param(connect("allowed.test:443 other"), 400, "malformed", id="CONNECT: something behind it"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("piece", [1 << 16, 1], ids=["at once", "by one byte"])
def test_what_is_refused_is_answered_and_nothing_dialled(data: bytes, status: int, rule: str, piece: int) -> None:
    relayed = Relayed(piece=piece).guest(data)
    assert (relayed.rule, relayed.opens, relayed.closed) == (rule, [], "gently")
    assert relayed.page.startswith(f"HTTP/1.1 {status} ")
    assert "blocked by sandbox policy" in relayed.page and "sandbox-cli why abcd2345" in relayed.page


# Plain HTTP: more than one request


def test_a_request_to_another_allowed_host_waits_for_what_is_due_and_is_dialled() -> None:
    relayed = Relayed().guest(get() + get("second.test"))
    assert hosts(relayed) == ["allowed.test:80"] and relayed.received == [get()]
    relayed.server(ok(b"a" * 50_000)[:-1])
    assert hosts(relayed) == ["allowed.test:80"]
    relayed.server(b"a")
    assert hosts(relayed) == ["allowed.test:80", "second.test:80"] and relayed.received == [get(), get("second.test")]
    assert relayed.server(ok(b"b")).to_guest == ok(b"a" * 50_000) + ok(b"b")
    assert relayed.guest(get()).received == [get(), get("second.test"), get()]


def test_a_refused_request_is_answered_behind_what_is_due() -> None:
    relayed = Relayed().guest(get() + get() + get("other.test") + get())
    assert relayed.received == [get() * 2] and not relayed.refusals
    relayed.server(ok(b"1"))
    assert not relayed.refusals
    relayed.server(ok(b"2"))
    assert relayed.page.startswith((ok(b"1") + ok(b"2") + b"HTTP/1.1 403").decode())
    assert (relayed.closed, len(relayed.opens), relayed.received) == ("gently", 1, [get() * 2])


def test_a_malformed_request_is_answered_behind_what_is_due() -> None:
    relayed = Relayed().guest(get() + b"get / HTTP/1.1\r\n\r\n")
    assert not relayed.refusals
    assert relayed.server(ok()).page.startswith((ok() + b"HTTP/1.1 400").decode())


def test_a_body_that_looks_like_a_request_is_a_body() -> None:
    body = get("other.test")
    relayed = Relayed().guest(post(body)).server(ok())
    assert relayed.received == [post(body)] and not relayed.refusals
    relayed.guest(post(body[:-1]) + body)
    assert relayed.received == [post(body) + post(body[:-1])]


def test_requests_are_sent_on_together_up_to_a_bound() -> None:
    relayed = Relayed().guest(get() * 100)
    assert relayed.received == [get() * 64]
    relayed.server(ok() * 10)
    assert relayed.received == [get() * 74]
    relayed.server(ok() * 64).server(ok() * 26)
    assert relayed.received == [get() * 100] and relayed.to_guest == ok() * 100


def test_a_chunk_that_goes_wrong_on_the_way_up_ends_the_connection() -> None:
    head = get("allowed.test", "/", "Transfer-Encoding: chunked", method="POST")
    relayed = Relayed().guest(head + b"5\r\nhello\r\n").guest(b"5\r\nhello" + get("other.test"))
    assert (relayed.rule, relayed.closed) == ("malformed", "gently")
    assert relayed.page.startswith("HTTP/1.1 400 ") and b"other.test" not in relayed.received[0]
    relayed = Relayed().guest(head + b"5\r\nhello\r\n").server(b"HTTP/1.1 200 OK\r\n").guest(b"x\r\n")
    assert (relayed.rule, relayed.closed) == ("malformed", "reset")         # an answer would land in another


def test_a_policy_that_changed_decides_the_next_request() -> None:
    relayed = Relayed().guest(get()).server(ok())
    relayed.decider = Decider(Policy(Mode.ALLOWLIST, allow=("second.test",)))
    assert relayed.guest(get()).rule == "not-listed"
    assert relayed.received == [get()]


def test_a_request_that_waited_is_decided_when_it_goes() -> None:
    relayed = Relayed().guest(get() + get("second.test"))
    relayed.decider = Decider(Policy(Mode.ALLOWLIST, allow=("allowed.test",)))
    relayed.server(ok())
    assert (relayed.rule, hosts(relayed)) == ("not-listed", ["allowed.test:80"])


def test_a_later_head_has_a_deadline_too() -> None:
    relayed = Relayed().guest(get()).server(ok())
    assert relayed.deadline == 0
    assert relayed.guest(get()[:5]).deadline == HEAD_MS
    assert relayed.guest(get()[5:9]).deadline == HEAD_MS
    assert relayed.guest(get()[9:]).deadline == 0
    assert relayed.server(ok()).guest(get("second.test")[:9]).deadline == HEAD_MS
    assert relayed.guest(get("second.test")[9:]).deadline == 0
    assert hosts(relayed)[1:] == ["second.test:80"]


# Upgrades


UPGRADE = get("allowed.test", "/", "Connection: Upgrade", "Upgrade: websocket")
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


@pytest.mark.parametrize("piece", [1 << 16, 1])
def test_after_101_everything_passes(piece: int) -> None:
    relayed = Relayed(piece=piece).guest(UPGRADE).server(SWITCHED + b"\x81\x02hi")
    relayed.guest(b"\x81\x82" + get("other.test")).server(b"\x81\x01x").guest(b"more")
    assert relayed.received == [UPGRADE + b"\x81\x82" + get("other.test") + b"more"] and not relayed.refusals
    assert relayed.to_guest == SWITCHED + b"\x81\x02hi\x81\x01x"
    relayed.guest_ends()
    assert relayed.finished == [True] and not relayed.closed
    assert relayed.server_ends().guest_finished


def test_what_follows_a_wish_to_upgrade_waits_for_the_answer() -> None:
    relayed = Relayed().guest(UPGRADE + get("other.test"))
    assert relayed.received == [UPGRADE]
    assert relayed.server(ok()).rule == "not-listed"                # not upgraded: it was a request
    relayed = Relayed().guest(UPGRADE + get("other.test")).server(SWITCHED)
    assert relayed.received == [UPGRADE + get("other.test")]        # upgraded: it is whatever it is
    head = get("allowed.test", "/", "Content-Length: 50000", method="PUT")
    relayed = Relayed().guest(UPGRADE + head).server(SWITCHED).guest(b"x" * 50_000 + get("other.test"))
    assert relayed.received == [UPGRADE + head + b"x" * 50_000 + get("other.test")]


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        pytest.param(get(), SWITCHED, id="a 101 nobody asked for"),
        pytest.param(UPGRADE, SWITCHED.replace(b"websocket", b"h2c"), id="HTTP/2 without TLS"),
        pytest.param(UPGRADE, SWITCHED.replace(b"websocket", b"TLS/1.2, HTTP/1.1"), id="TLS on the same port"),
        pytest.param(UPGRADE, SWITCHED.replace(b"websocket", b"TLS/1.0"), id="TLS and nothing said of what is in it"),
        pytest.param(UPGRADE, SWITCHED.replace(b"websocket", b"websocket, H2C"), id="HTTP/2 in a list"),
        pytest.param(UPGRADE, SWITCHED.replace(b"websocket", b"HTTP/2.0"), id="HTTP/2 by another name"),
    ],
)
def test_a_switch_that_would_hide_requests_is_refused(request_: bytes, answer: bytes) -> None:
    relayed = Relayed().guest(request_).server(answer)
    assert (relayed.rule, relayed.closed) == ("malformed", "gently")
    assert relayed.page.startswith("HTTP/1.1 400 ")


# Half-close


def test_the_end_of_the_requests_is_passed_on_and_the_answer_comes() -> None:
    relayed = Relayed().guest(get()).guest_ends()
    assert relayed.finished == [True] and not relayed.closed
    assert relayed.server(ok()).to_guest == ok()
    assert relayed.closed == "gently"


def test_an_end_while_a_request_waits_does_not_lose_it() -> None:
    relayed = Relayed().guest(get() + get("second.test")).guest_ends().server(ok())
    assert hosts(relayed) == ["allowed.test:80", "second.test:80"]
    assert relayed.server(ok(b"2")).to_guest == ok() + ok(b"2")


def test_an_idle_connection_ends_with_either_end() -> None:
    assert Relayed().guest(get()).server(ok()).guest_ends().closed == "gently"
    assert Relayed().guest(get()).server(ok()).server_ends().closed == "gently"
    assert Relayed().guest(get()).server_ends().closed == "gently"


# CONNECT


@pytest.mark.parametrize("piece", [1 << 16, 1], ids=["glued", "by one byte"])
@pytest.mark.parametrize("port", [80, 443])
def test_connect_is_answered_and_what_comes_through_it_is_dialled(piece: int, port: int) -> None:
    relayed = Relayed(port=port, piece=piece, name="", address="172.16.0.1").guest(connect() + hello() + b"early")
    assert hosts(relayed) == ["allowed.test:443"] and relayed.received == [hello()]
    assert relayed.to_guest == ESTABLISHED
    assert relayed.server(SERVER_HELLO).received == [hello() + b"early"]
    assert relayed.asked[0] == Ask("allowed.test", 443, By.CONNECT)
    relayed.server(b"\x16answer").guest_ends()
    assert relayed.to_guest == ESTABLISHED + SERVER_HELLO + b"\x16answer" and relayed.finished == [True]


def test_nothing_is_dialled_for_a_connect_alone() -> None:
    relayed = Relayed().guest(connect())
    assert relayed.to_guest == ESTABLISHED and relayed.opens == []
    assert relayed.flow.current == Ask("allowed.test", 443, By.CONNECT)


@pytest.mark.parametrize("head", [
    b"CONNECT allowed.test:443 HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    b"CONNECT allowed.test:443 HTTP/1.1\r\nHost: proxy.test:3128\r\n\r\n",
    b"CONNECT allowed.test:443 HTTP/1.0\r\n\r\n",
])  # fmt: skip
def test_whom_connect_names_as_host_does_not_matter(head: bytes) -> None:
    assert hosts(Relayed().guest(head + hello())) == ["allowed.test:443"]


@pytest.mark.parametrize(
    ("inner", "rule"),
    [
        pytest.param(hello(b"second.test"), "names-disagree", id="another allowed name"),
        pytest.param(hello(b"other.test"), "names-disagree", id="another name"),
        pytest.param(openssl(None), "no-name", id="no name"),
        pytest.param(b"\0\0\0\0", "malformed", id="neither TLS nor HTTP"),
        pytest.param(hello(b"allowed.test", extension(0, b"")), "names-disagree", id="a second list of names"),
    ],
)
def test_what_comes_through_connect_has_to_name_the_same_host(inner: bytes, rule: str) -> None:
    relayed = Relayed().guest(connect()).guest(inner)
    assert (relayed.rule, relayed.closed, relayed.opens) == (rule, "reset", [])
    assert relayed.to_guest == ESTABLISHED


def test_plain_http_through_connect() -> None:
    relayed = Relayed().guest(connect("allowed.test:80") + get()).server(ok())
    assert hosts(relayed) == ["allowed.test:80"] and relayed.to_guest == ESTABLISHED + ok()
    relayed.guest(get("second.test"))
    assert (relayed.rule, relayed.received) == ("names-disagree", [get()])
    assert Relayed().guest(connect("allowed.test:80") + connect()).rule == "malformed"
    assert Relayed().guest(get()).server(ok()).guest(connect()).rule == "malformed"


# Nothing could be dialled


def test_what_cannot_be_dialled_is_said_to_http_and_reset_otherwise() -> None:
    relayed = Relayed(connects=False).guest(get())
    relayed.fails("private-address", "allowed.test resolves to a private address (10.0.0.5).")
    assert relayed.page.startswith("HTTP/1.1 502 Bad Gateway\r\n") and "resolves to a private address" in relayed.page
    assert "sandbox-cli why abcd2345" in relayed.page and relayed.closed == "gently"
    relayed = Relayed(connects=False, port=443).guest(hello()).fails("unresolved", "It does not resolve.")
    assert (relayed.to_guest, relayed.closed) == (b"", "reset")
    relayed = Relayed(connects=False).guest(connect() + hello()).fails("unresolved", "It does not resolve.")
    assert (relayed.to_guest, relayed.closed) == (ESTABLISHED, "reset")
    relayed = Relayed(connects=False, port=22, name="git.test").fails("unresolved", "It does not resolve.")
    assert relayed.closed == "reset"


def test_what_comes_while_dialling_is_kept() -> None:
    body = b"x" * 40_000
    relayed = Relayed(connects=False).guest(post(body)[:100]).guest(post(body)[100:] + get("other.test")).connected()
    assert relayed.received == [post(body)]
    assert relayed.server(ok()).rule == "not-listed"


def test_what_the_upstream_before_still_says_while_the_next_is_dialled_is_not_passed_on() -> None:
    flow = Flow(Destination("198.18.0.1", 80, "allowed.test"), Decider(LISTED).decide, False)
    flow.data(UP, get())
    flow.opened()
    flow.data(DOWN, ok())
    assert isinstance(flow.data(UP, get("second.test"))[0], Open)
    assert flow.data(DOWN, b"HTTP/1.1 408 late\r\n\r\n") == [] and flow.ended(DOWN) == []
    flow.opened()
    assert flow.data(DOWN, ok())[0] == Send(DOWN, ok())


def test_nothing_is_done_once_it_is_over() -> None:
    flow = Flow(Destination("198.18.0.1", 80, "allowed.test"), Decider(LISTED).decide, False)
    assert isinstance(flow.data(UP, get("other.test"))[-1], Refuse)
    assert flow.refused("abcd2345")[-1] == Close(False)
    assert flow.refused("abcd2345") == flow.opened() == flow.data(UP, get()) == flow.ended(UP) == []
    assert flow.failed("unresolved", "It does not resolve.", "abcd2345") == []


# Where the policy is open


@pytest.mark.parametrize(
    ("policy", "port", "name", "data", "dialled"),
    [
        pytest.param(OPEN, 443, "", hello(b"any.test"), "any.test:443", id="a name by TLS"),
        pytest.param(OPEN, 443, "", openssl(None), "93.184.216.34:443", id="TLS without a name: the address"),
        pytest.param(OPEN, 443, "", hello(b"1.2.3.4"), "93.184.216.34:443", id="TLS with an address: the address"),
        pytest.param(OPEN, 443, "any.test", openssl(None), "any.test:443", id="TLS without one, by a name's address"),
        pytest.param(OPEN, 80, "", get("any.test"), "any.test:80", id="a name by HTTP"),
        pytest.param(OPEN, 80, "", get("93.184.216.34"), "93.184.216.34:80", id="an address by HTTP"),
        pytest.param(OPEN, 443, "", b"SSH-2.0-x\r\n", "93.184.216.34:443", id="another protocol"),
        pytest.param(OPEN, 443, "any.test", b"\0\0\0", "any.test:443", id="another protocol, by a name's address"),
        pytest.param(OPEN, 9999, "", b"", "93.184.216.34:9999", id="any port"),
        pytest.param(OPEN, 80, "", connect("any.test:443") + openssl(None), "any.test:443", id="CONNECT, no name"),
        pytest.param(OPEN_BUT, 443, "", hello(b"any.test"), "any.test:443", id="a name that is not denied"),
        pytest.param(OPEN_BUT, 9999, "any.test", b"", "any.test:9999", id="any port of it"),
        pytest.param(OPEN_BUT, 443, "any.test", openssl(None), "any.test:443", id="TLS to its address"),
    ],
)
def test_open_dials_by_name_or_by_address(policy: Policy, port: int, name: str, data: bytes, dialled: str) -> None:
    relayed = Relayed(policy, port, name, "93.184.216.34").guest(data)
    assert (hosts(relayed), relayed.refusals) == ([dialled], [])


@pytest.mark.parametrize(
    ("port", "name", "data", "rule"),
    [
        pytest.param(443, "", hello(b"other.test"), "deny-list", id="a denied name by TLS"),
        pytest.param(80, "", get("other.test"), "deny-list", id="by HTTP"),
        pytest.param(80, "", get("any.test") + get("other.test"), "deny-list", id="by a second request"),
        pytest.param(80, "", connect("other.test:443"), "deny-list", id="by CONNECT"),
        pytest.param(9999, "other.test", b"", "deny-list", id="by its address"),
        pytest.param(443, "other.test", openssl(None), "deny-list", id="by its address, TLS without a name"),
        pytest.param(443, "", openssl(None), "no-name", id="an address, TLS without a name"),
        pytest.param(9999, "", b"", "no-name", id="an address, another port"),
        pytest.param(80, "any.test", get("1.2.3.4"), "address", id="HTTP without a name, which the server may read on"),
        pytest.param(80, "any.test", get("any.test").replace(b"\r\n", b"\n"), "malformed", id="HTTP in odd lines"),
    ],
)
def test_open_with_a_deny_list_holds_it(port: int, name: str, data: bytes, rule: str) -> None:
    relayed = Relayed(OPEN_BUT, port, name, "93.184.216.34").guest(data).server(ok())
    assert relayed.rule == rule
    assert all(command.name == "any.test" for command in relayed.opens)


# Any conversation

HOSTS = ["allowed.test", "second.test", "other.test"]


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[str, bytes, bytes]]:
    """Requests to hosts, each with its answer."""
    told = []
    for number in range(draw(st.integers(1, 6))):
        host = draw(st.sampled_from([*HOSTS[:2], *HOSTS]))
        body = b"b" * draw(st.sampled_from([0, 1, 50, 16_400, 40_000]))
        body += draw(st.sampled_from([b"", get("other.test")]))
        asked = {
            "none": get(host, f"/{number}"),
            "length": get(host, f"/{number}", f"Content-Length: {len(body)}", method="PUT") + body,
            "chunked": get(host, f"/{number}", "Transfer-Encoding: chunked", method="PUT")
            + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n",
        }[draw(st.sampled_from(["none", "length", "chunked"]))]
        body = b"a" * draw(st.sampled_from([0, 1, 50, 16_400, 40_000]))
        answer = {
            "length": ok(body, f"X-Number: {number}"),
            "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n",
            "hint first": b"HTTP/1.1 103 Early Hints\r\n\r\n" + ok(body),
        }[draw(st.sampled_from(["length", "chunked", "hint first"]))]
        told.append((host, asked, answer))
    return told


@given(conversations(), st.sampled_from([1 << 16, 1000, 3]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_each_server_gets_the_requests_that_name_it_and_the_guest_its_answers_in_order(
    told: list[tuple[str, bytes, bytes]], piece: int, pipelined: bool
) -> None:
    stop = next((at for at, (host, _, _) in enumerate(told) if host == "other.test"), len(told))
    relayed = Relayed(piece=piece)
    if pipelined:
        relayed.guest(b"".join(asked for _, asked, _ in told))
    for position, (_, asked, answer) in enumerate(told[: stop + 1]):
        if not pipelined:
            relayed.guest(asked)
        if position < stop:
            cut = len(answer) // 2
            relayed.server(answer[:cut]).server(answer[cut:])
    expected: list[tuple[str, bytes]] = []
    for host, asked, _ in told[:stop]:
        if expected and expected[-1][0] == host:
            expected[-1] = host, expected[-1][1] + asked
        else:
            expected.append((host, asked))
    got = [(command.name, bytes(data)) for command, data in zip(relayed.opens, relayed.received, strict=True)]
    assert got == expected
    answers = b"".join(answer for _, _, answer in told[:stop])
    assert bytes(relayed.to_guest[: len(answers)]) == answers
    if stop < len(told):
        assert relayed.rule == "not-listed" and relayed.to_guest[len(answers) :].startswith(b"HTTP/1.1 403 ")
    else:
        assert len(relayed.to_guest) == len(answers) and not relayed.closed


