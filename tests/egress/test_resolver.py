"""The resolver: its queue against look-ups that are passed in, and the real process against a real name server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from egress import resolver
from egress.resolver import Resolver
from tests.daemon import ROOT


def settled(true: Callable[[], bool], timeout_s: float = 10) -> bool:
    end = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


class Lookups:
    """Look-ups that end when they are told to."""

    def __init__(self) -> None:
        self.started: list[bytes] = []
        self.go = threading.Event()
        self.together = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, name: bytes) -> bytes:
        with self._lock:
            self.started.append(name)
            self.together += 1
            self.most = max(self.most, self.together)
        self.go.wait(20)
        with self._lock:
            self.together -= 1
        return b"ok 192.0.2.1"


class Peer:
    def __init__(self, look_up: Callable[[bytes], bytes]) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(10)
        self.thread = threading.Thread(target=self._serve, args=(theirs, look_up))
        self.thread.start()

    @staticmethod
    def _serve(theirs: socket.socket, look_up: Callable[[bytes], bytes]) -> None:
        with theirs:
            Resolver(theirs, look_up).serve()

    def ask(self, request: bytes) -> None:
        self.socket.send(request)

    def answers(self, number: int) -> dict[bytes, bytes]:
        found = [self.socket.recv(4096).partition(b" ") for _ in range(number)]
        return {id_: answer for id_, _, answer in found}

    def close(self) -> None:
        self.socket.close()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def lookups() -> Iterator[Lookups]:
    found = Lookups()
    yield found
    found.go.set()


@pytest.fixture
def peer(lookups: Lookups) -> Iterator[Peer]:
    found = Peer(lookups)
    yield found
    lookups.go.set()
    found.close()


def test_one_look_up_for_a_name_whoever_asks_meanwhile(peer: Peer, lookups: Lookups) -> None:
    for number in range(50):
        peer.ask(b"%d slow.test" % number)
    peer.ask(b"50 other.test")
    assert settled(lambda: len(lookups.started) == 2)
    lookups.go.set()
    assert peer.answers(51) == {b"%d" % number: b"ok 192.0.2.1" for number in range(51)}
    assert sorted(lookups.started) == [b"other.test", b"slow.test"]


def test_nothing_is_remembered(peer: Peer, lookups: Lookups) -> None:
    lookups.go.set()
    for number in range(3):
        peer.ask(b"%d again.test" % number)
        peer.answers(1)
    assert lookups.started == [b"again.test"] * 3


def test_threads_and_what_waits_are_bounded(peer: Peer, lookups: Lookups) -> None:
    room = resolver.THREADS + resolver.WAITING
    for number in range(resolver.THREADS):
        peer.ask(b"%d n%d.test" % (number, number))
    assert settled(lambda: len(lookups.started) == resolver.THREADS)
    for number in range(resolver.THREADS, room + 3):
        peer.ask(b"%d n%d.test" % (number, number))
    assert set(peer.answers(3).values()) == {b"no EAI_AGAIN"}
    assert lookups.most == resolver.THREADS
    lookups.go.set()
    assert set(peer.answers(room).values()) == {b"ok 192.0.2.1"}
    assert lookups.most <= resolver.THREADS


def test_who_asks_for_one_name_is_bounded_too(peer: Peer, lookups: Lookups) -> None:
    for number in range(resolver.ASKERS + 2):
        peer.ask(b"%d slow.test" % number)
    assert peer.answers(2) == {b"%d" % (resolver.ASKERS + late): b"no EAI_AGAIN" for late in (0, 1)}
    threading.Timer(0.1, lookups.go.set).start()
    assert set(peer.answers(resolver.ASKERS).values()) == {b"ok 192.0.2.1"}


def test_an_idle_thread_is_used_before_another_is_started(peer: Peer, lookups: Lookups) -> None:
    lookups.go.set()
    before = threading.active_count()
    for number in range(20):
        peer.ask(b"%d n%d.test" % (number, number))
        peer.answers(1)
    assert threading.active_count() - before <= 2


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(b"127.0.0.1", id="an address"),
        pytest.param(b"0x7f.1", id="an address in another spelling"),
        pytest.param(b"2130706433", id="a number"),
        pytest.param(b"::1", id="an IPv6 address"),
        pytest.param(b"fe80::1%eth0", id="an address with a zone"),
        pytest.param(b"allowed.test.", id="a trailing dot"),
        pytest.param(b"Allowed.test", id="not in normal form"),
        pytest.param(b"allowed.test\0.evil.test", id="a zero byte"),
        pytest.param(b"allowed.test evil.test", id="two names"),
        pytest.param(b"allowed.test\n", id="a newline"),
        pytest.param(b"\xff\xfe.test", id="not text"),
        pytest.param(b"-", id="not a host name"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"a." * 200 + b"test", id="too long"),
        pytest.param(b"a." * 2000 + b"test", id="longer than a request"),
    ],
)
def test_what_is_no_name_is_not_looked_up(peer: Peer, lookups: Lookups, name: bytes) -> None:
    lookups.go.set()
    peer.ask(b"1 " + name)
    assert peer.answers(1) == {b"1": b"no EAI_NONAME"}
    peer.ask(b"2 allowed.test")
    assert peer.answers(1) == {b"2": b"ok 192.0.2.1"}
    assert lookups.started == [b"allowed.test"]


@pytest.mark.parametrize(
    "request_", [b"x allowed.test", b" allowed.test", b"1" * 21 + b" a.test", b"-1 a.test", b"\xff"]
)
def test_a_request_without_an_id_is_passed_over(peer: Peer, lookups: Lookups, request_: bytes) -> None:
    lookups.go.set()
    peer.ask(request_)
    peer.ask(b"2 allowed.test")
    assert peer.answers(1) == {b"2": b"ok 192.0.2.1"}


def test_a_peer_that_goes_while_answers_are_due_ends_it() -> None:
    lookups = Lookups()
    peer = Peer(lookups)
    for number in range(10):
        peer.ask(b"%d n%d.test" % (number, number))
    assert settled(lambda: len(lookups.started) == 10)
    peer.close()
    lookups.go.set()


# the real process


class Rig:
    def __init__(self, *arguments: str) -> None:
        command = ["unshare", "--mount", "--net", "--propagation", "private"]
        command += [sys.executable, "-m", "tests.egress.resolver_rig", *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def order(self, **what: object) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(what) + "\n")
        line = self.process.stdout.readline()
        assert line, "the rig has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, *names: str) -> tuple[dict[str, str], list[tuple[str, str]]]:
        answer = self.order(ask=names)
        return answer["answers"], [(name, kind) for name, kind in answer["queries"]]

    def end(self) -> int:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        code = self.process.wait(20)
        self.process.stdout.close()
        return code


def needs_namespaces() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: a mount and a network namespace of its own")
    if subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True).returncode:
        pytest.skip("this machine makes no namespaces")


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    needs_namespaces()
    running = Rig()
    running.order(
        zone={
            "two.test": ["192.0.2.1", "2001:db8::1", "192.0.2.2"],
            "nodata.test": [],
            "inside.corp.test": ["192.0.2.9"],
            "outside.test.corp.test": ["192.0.2.9"],
            "many.test": [f"192.0.2.{last}" for last in range(1, 30)],
            "slow.test": ["192.0.2.3"],
            "quick.test": ["192.0.2.4"],
        }
    )
    try:
        yield running
    finally:
        assert running.end() == 0, "it ends by itself once its peer is gone"


def test_hosts_file_and_name_server_both_count(rig: Rig) -> None:
    answers, queries = rig.ask("printed.test", "two.test")
    assert answers["printed.test"] == "ok 192.0.2.7"
    assert sorted(answers["two.test"].split()[1:]) == ["192.0.2.1", "192.0.2.2", "2001:db8::1"]
    assert sorted(queries) == [("two.test", "A"), ("two.test", "AAAA")], "both families, whatever addresses we have"


def test_reasons(rig: Rig) -> None:
    answers, _ = rig.ask("nothing.test", "nodata.test")
    assert answers == {"nothing.test": "no EAI_NONAME", "nodata.test": "no EAI_NODATA"}


def test_a_name_is_looked_up_as_it_stands(rig: Rig) -> None:
    """The search list of the host would make another name of it, which nobody allowed."""
    answers, queries = rig.ask("inside", "outside.test")
    assert answers == {"inside": "no EAI_NONAME", "outside.test": "no EAI_NONAME"}
    assert {name for name, _ in queries} == {"inside", "outside.test"}
    assert rig.ask("inside.corp.test")[0] == {"inside.corp.test": "ok 192.0.2.9"}


def test_sixteen_addresses_are_enough(rig: Rig) -> None:
    assert len(rig.ask("many.test")[0]["many.test"].split()) == 1 + resolver.ADDRESSES


def test_a_changed_answer_is_seen_by_the_next_look_up(rig: Rig) -> None:
    rig.order(zone={"rebound.test": ["192.0.2.5"]})
    assert rig.ask("rebound.test")[0] == {"rebound.test": "ok 192.0.2.5"}
    rig.order(zone={"rebound.test": ["127.0.0.1"]})
    assert rig.ask("rebound.test")[0] == {"rebound.test": "ok 127.0.0.1"}, "vetting is not done here"


def test_a_slow_name_does_not_hold_up_others(rig: Rig) -> None:
    rig.order(hold="slow.test")
    started = time.monotonic()
    for _ in range(5):
        assert rig.ask("quick.test")[0] == {"quick.test": "ok 192.0.2.4"}
    assert time.monotonic() - started < 10
    assert rig.order(release="slow.test") == {"answer": "999 ok 192.0.2.3"}


def test_what_is_left_of_its_power(rig: Rig) -> None:
    rig.ask("quick.test")
    seen = rig.order(status=True)
    status = seen["status"]
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"3070001"}
    assert status["Groups"] == ""
    assert {status[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert seen["writable"] == []
    assert seen["fds"] == [0, 1, 2, 3]


def test_it_works_where_its_own_tree_is_roots_alone() -> None:
    needs_namespaces()
    rig = Rig("hidden")
    rig.order(zone={"two.test": ["192.0.2.1"]})
    answers, _ = rig.ask("printed.test", "two.test", "nothing.test", "1.2.3.4")
    assert rig.end() == 0
    assert answers == {
        "printed.test": "ok 192.0.2.7",
        "two.test": "ok 192.0.2.1",
        "nothing.test": "no EAI_NONAME",
        "1.2.3.4": "no EAI_NONAME",
    }
