"""doctor's trial of the network: what is chosen to be tried, what is tried, and what is made of the outcome."""

from __future__ import annotations

import json
import socket
import socketserver
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from cli import attempts, trial
from cli.trial import CHECKS, FAILED, Target
from sandboxd.client import Capabilities, Network, NetworkRequest

ROOT = Path(__file__).resolve().parents[2]


def offering(*names: str, ceiling: str = "allowlist", may: tuple[str, ...] = ("*",), on: bool = True) -> Capabilities:
    return Capabilities("1", "qemu", {"egress_allowlist": on}, {}, Network("allowlist", names), ceiling, may)


@pytest.mark.parametrize(
    ("offer", "why"),
    [
        (offering(ceiling="none"), "this sandboxd gives sandboxes no network"),
        (offering(on=False), "this sandboxd gives sandboxes no network"),
        (offering(may=()), "this sandboxd's list has no name to try"),
        (offering("*.x.test", may=()), "this sandboxd's list has no name to try"),
    ],
)
def test_when_there_is_nothing_to_try(offer: Capabilities, why: str) -> None:
    assert trial.choose(offer) == why


@pytest.mark.parametrize(
    ("names", "found", "chosen"),
    [
        pytest.param(
            ["a.test", "b.test", "c.test"], {"b.test": (80, "203.0.113.1"), "c.test": (443, "203.0.113.2")},
            ("b.test", "b.test", 80, "c.test", "203.0.113.1"), id="two can be reached",
        ),
        pytest.param(
            ["example.com"], {"example.com": (443, "203.0.113.1")},
            ("example.com", "example.com", 443, "example.org", "203.0.113.1"), id="one, itself an example",
        ),
        pytest.param(["a.test"], {}, ("a.test", "", 443, "example.com", trial.NOBODY), id="none can be reached"),
        pytest.param([], {}, ("example.com", "", 443, "example.org", trial.NOBODY), id="none is on the list"),
    ],
)  # fmt: skip
def test_what_is_tried(
    names: list[str], found: dict[str, tuple[int, str]], chosen: tuple[str, str, int, str, str]
) -> None:
    aim = trial.target(names, found, ["192.0.2.9"])
    assert aim == Target(NetworkRequest("allowlist", (chosen[0],), None, ()), *chosen[1:], "192.0.2.9")
    plan = json.loads(aim.plan())
    assert ("allowed" in plan) is bool(chosen[1])
    assert trial.target(names, found, []).resolver == trial.NOBODYS_RESOLVER


def test_who_can_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert trial.reachable(["127.0.0.1", "no-such-name.invalid"], (1, port)) == {"127.0.0.1": (port, "127.0.0.1")}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nameserver 192.0.2.1\nnameserver 192.0.2.2\n", ["192.0.2.1", "192.0.2.2"]),
        ("# x\nsearch a\nnameserver\nnameserver 127.0.0.53\nnameserver ::1\noptions edns0\n", []),
        ("\udcff", []),
    ],
)
def test_this_machine_s_resolvers(tmp_path: Path, text: str, found: list[str]) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text(text, errors="surrogateescape")
    assert trial.nameservers(path) == found
    assert trial.nameservers(tmp_path / "none") == []


AIM = trial.target(["a.test"], {"a.test": (443, "203.0.113.1")}, [])
UNREACHED = trial.target(["a.test"], {}, [])


@pytest.mark.parametrize(
    ("aim", "check", "outcome", "said"),
    [
        (AIM, "allowed name", ("open", "a TLS handshake"), "passed: a.test, a TLS handshake"),
        (AIM, "allowed name", ("refused", "reset"), "FAILED: a.test: reset"),
        (AIM, "allowed name", ("silent", "no answer"), "FAILED: a.test: no answer"),
        (AIM, "allowed name", None, "FAILED: a.test: the trial machine did not say"),
        (UNREACHED, "allowed name", None,
         "not tested: no name of the server's list can be reached from this machine"),
        (AIM, "denied name", ("refused", "no such name"), "refused: example.com: no such name"),
        (AIM, "denied name", ("open", "a TLS handshake"), "FAILED: example.com: a TLS handshake"),
        *((AIM, check, ("refused", "at once"), "refused: at once") for check in (*CHECKS[2:], trial.OTHER)),
        *((AIM, check, (way, "how"), "FAILED: how") for check in (*CHECKS[2:], trial.OTHER)
          for way in ("open", "silent", "nonsense")),
        *((AIM, check, None, "FAILED: the trial machine did not say") for check in (*CHECKS[2:], trial.OTHER)),
    ],
    ids=str,
)  # fmt: skip
def test_verdicts(aim: Target, check: str, outcome: tuple[str, str] | None, said: str) -> None:
    assert trial.verdict(check, outcome, aim) == said
    assert said.startswith(FAILED) is said.startswith("FAILED")


@pytest.mark.parametrize(
    ("written", "found"),
    [
        (b'{"UDP/443": ["refused", "x"]}', {"UDP/443": ("refused", "x")}),
        (b'noise\n{"a": ["b", "c"]}\n', {"a": ("b", "c")}),
        (b'{"a": ["b", "' + b"c" * 999 + b'"]}', {"a": ("b", "c" * 200)}),
        *((rubbish, {}) for rubbish in (b"", b"\xff", b"[]", b'{"a": 1}', b'{"a": ["b"]}', b"[" * 99_999)),
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_what_a_trial_machine_wrote(written: bytes, found: dict[str, tuple[str, str]]) -> None:
    assert trial.outcomes(written) == found


# ---- the attempts themselves, against servers on loopback


@contextmanager
def tcp_server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            answer(self.request)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def saying(text: bytes) -> Callable[[socket.socket], None]:
    def answer(sock: socket.socket) -> None:
        sock.recv(4096)
        sock.sendall(text)

    return answer


def resetting(sock: socket.socket) -> None:
    sock.recv(1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nhello", ("open", "HTTP/1.1 200 OK")),
        (b"HTTP/1.1 403 Forbidden\r\n\r\nx.test: blocked by sandbox policy", ("refused", "http 403 that says why")),
        (b"HTTP/1.1 403 Forbidden\r\n\r\nan origin's own", ("open", "HTTP/1.1 403 Forbidden")),
        (b"", ("refused", "closed without an answer")),
    ],
)
def test_plain_http(text: bytes, outcome: tuple[str, str]) -> None:
    with tcp_server(saying(text)) as port:
        assert attempts.judged(lambda: attempts.http("127.0.0.1", "x.test", port)) == outcome


@pytest.fixture
def impatient() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.3)
    yield
    socket.setdefaulttimeout(before)


@pytest.mark.usefixtures("impatient")
def test_a_connection_that_is_cut_is_a_refusal_and_one_that_says_nothing_is_none() -> None:
    done = threading.Event()
    with tcp_server(resetting) as port:
        assert attempts.judged(lambda: attempts.https("127.0.0.1", "x.test", port))[0] == "refused"
        assert attempts.judged(lambda: attempts.connect("127.0.0.1", port)) == ("open", f"a connection to port {port}")
    assert attempts.judged(lambda: attempts.connect("127.0.0.1", port))[0] == "refused"
    with tcp_server(lambda sock: done.wait(10) and None) as port:
        assert attempts.judged(lambda: attempts.https("127.0.0.1", "x.test", port))[0] == "silent"
        done.set()


@pytest.fixture
def udp() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock


@pytest.mark.usefixtures("impatient")
def test_a_datagram(udp: socket.socket) -> None:
    port = udp.getsockname()[1]
    assert attempts.judged(lambda: attempts.datagram("127.0.0.1", port))[0] == "silent"
    udp.close()
    assert attempts.judged(lambda: attempts.datagram("127.0.0.1", port)) == ("refused", "connection refused")


HEAD = struct.Struct(">6H")


@pytest.mark.parametrize(
    ("flags", "answers", "outcome"),
    [
        (0x8183, 0, ("refused", "no such name")),
        (0x8185, 0, ("refused", "refused")),
        (0x8180, 0, ("refused", "an empty answer")),
        (0x8180, 1, ("open", "an answer for x.test")),
    ],
)
def test_an_outside_resolver(udp: socket.socket, flags: int, answers: int, outcome: tuple[str, str]) -> None:
    port = udp.getsockname()[1]
    answer = HEAD.pack(0x5362, flags, 1, answers, 0, 0)

    def serve() -> None:
        packet, peer = udp.recvfrom(512)
        assert packet[12:] == b"\x01x\x04test\0\0\x01\0\x01"
        udp.sendto(answer, peer)

    thread = threading.Thread(target=serve)
    thread.start()
    assert attempts.judged(lambda: attempts.asked("127.0.0.1", "x.test", attempts.A, tcp=False, port=port)) == outcome
    thread.join()
    with tcp_server(saying(struct.pack(">H", len(answer)) + answer)) as stream_port:
        ask = partial(attempts.asked, "127.0.0.1", "x.test", attempts.A, tcp=True, port=stream_port)
        assert attempts.judged(ask) == outcome


@pytest.mark.parametrize(
    ("outcomes", "one"),
    [
        ([("refused", "a"), ("open", "b"), ("silent", "c")], ("open", "b")),
        ([("refused", "a"), ("silent", "c")], ("silent", "c")),
        ([("refused", "a"), ("refused", "b")], ("refused", "a")),
    ],
)
def test_of_several_ways_the_furthest_counts(outcomes: list[tuple[str, str]], one: tuple[str, str]) -> None:
    assert attempts.worst(outcomes) == one


@pytest.mark.parametrize("comes", [0, 1, 2], ids=["nobody", "one", "two"])
def test_the_listener_counts_who_comes(comes: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    source = (ROOT / "cli" / "attempts.py").read_text()
    command = [sys.executable, "-I", "-c", source, "listen", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        if comes:
            attempts.connect("127.0.0.1", port)
        if comes == 2:
            attempts.shout("127.0.0.1", port)
        process.stdin.close()
        way, how = trial.outcomes(process.stdout.read())[trial.OTHER]
    assert (way, how) == (("open", f"{comes} came that should not") if comes else ("refused", "nobody came"))
