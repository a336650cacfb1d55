"""The processes themselves: what power they have left, the daemon's verbs, policies that change under traffic, and what
is left when one of the parts goes away."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import threading
import time
import types
from collections.abc import Iterator
from typing import cast

import pytest

from egress.policy import Mode
from tests.conftest import counts
from tests.egress.rig import (
    ANYWHERE,
    BUILD,
    EGRESS_UID,
    RESOLVER_UID,
    Rig,
    Sandbox,
    descriptors,
    heard,
    hello_passes,
    looked_up,
    memory_kb,
    open_rig,
    passed,
    policy,
    said,
    settle,
    until,
)
from tests.world import world as places
from tests.world.hello import hello
from tests.world.origin import Request, quiet
from tests.world.world import World

ALLOWED = hello("allowed.test")
GET = b"GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n"


@pytest.fixture
def sandbox(rig: Rig) -> Iterator[Sandbox]:
    made = rig.sandbox(policy("allowed.test", "second.test"))
    yield made
    made.close()


def status(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status") as file:
        return {name: " ".join(value.split()) for name, _, value in (line.partition(":") for line in file)}


def test_both_processes_have_no_power_left_and_serve(rig: Rig, sandbox: Sandbox) -> None:
    assert hello_passes(sandbox, "allowed.test")
    for pid, uid in ((rig.egress, EGRESS_UID), (rig.resolver, RESOLVER_UID)):
        for task in os.listdir(f"/proc/{pid}/task"):
            seen = status(int(task))
            assert seen["Uid"] == seen["Gid"] == " ".join([str(uid)] * 4) and seen["Groups"] == ""
            assert {seen[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
            assert (seen["NoNewPrivs"], seen["Seccomp"]) == ("1", "2")
    assert os.listdir(f"/proc/{rig.egress}/root/") == []
    kinds = {
        os.readlink(f"/proc/{rig.egress}/fd/{fd}").partition(":")[0] for fd in os.listdir(f"/proc/{rig.egress}/fd")
    }
    files = {kind for kind in kinds if kind.startswith("/")}
    assert files <= {
        "/dev/null",
        str(rig.directory / "egress.log"),
        str(rig.directory / "control.sock"),
        str(sandbox.names),
    }


# The daemon's verbs


def test_a_low_limit_of_descriptors_lets_no_sandbox_starve_the_others(rig: Rig) -> None:
    prefix = [*rig.world.host.prefix, "prlimit", "--nofile=1024:1024"]
    world = types.SimpleNamespace(host=types.SimpleNamespace(prefix=prefix))
    with open_rig(cast(World, world)) as few, contextlib.ExitStack() as open_:
        hog, other = few.sandbox(policy("allowed.test")), few.sandbox(policy("allowed.test"))
        for _ in range(300):
            with contextlib.suppress(OSError):
                open_.enter_context(hog.dial(ANYWHERE, 443)).send(b"\x16")
        assert hello_passes(other, "allowed.test")


def test_hello_says_who_it_is(rig: Rig, sandbox: Sandbox) -> None:
    answer = rig.call("hello")
    assert (answer["build"], answer["pid"]) == (BUILD, rig.egress)
    assert answer["sandboxes"] == [sandbox.id]


@pytest.mark.parametrize(
    ("do", "fields", "text"),
    [
        pytest.param("fly", {}, "no such verb", id="an unknown verb"),
        pytest.param("update", {"sandbox": "nobody", "policy": {"mode": "none"}}, "not here", id="an unknown sandbox"),
        pytest.param("update", {"sandbox": 5, "policy": {"mode": "none"}}, "not an id", id="an id that is a number"),
        pytest.param("remove", {"sandbox": "nobody"}, "not here", id="removing nobody"),
        pytest.param("report", {"sandbox": "nobody"}, "not here", id="a report about nobody"),
        pytest.param("add", {"sandbox": "x", "policy": {"mode": "none"}, "limits": {}}, "descriptors", id="no sockets"),
        pytest.param("ack", {"through": "x"}, "not a number", id="an ack of nothing"),
        pytest.param("resolver", {}, "descriptors", id="no resolver"),
    ],
)
def test_a_request_that_cannot_be_done_says_why(rig: Rig, do: str, fields: dict[str, object], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        rig.call(do, **fields)


@pytest.mark.parametrize(
    ("policy_", "limits"),
    [
        ({"mode": "everything"}, {}),
        ({"mode": "allowlist", "allow": ["Upper.Test"]}, {}),
        ({"mode": "none"}, {"pairs": -1}),
        ({"mode": "none"}, {"speed": 3}),
        ({"mode": "none"}, []),
    ],
    ids=["a mode nobody knows", "a name not in its form", "a limit below zero", "a limit nobody knows", "no limits"],
)
def test_a_sandbox_that_cannot_be_added_leaves_no_descriptor(rig: Rig, policy_: object, limits: object) -> None:
    before = descriptors(rig.egress)
    pairs = [socket.socketpair() for _ in range(2)]
    try:
        fds = [each.fileno() for pair in pairs for each in pair]
        with pytest.raises(RuntimeError):
            rig.call("add", fds, sandbox="sbx_bad", policy=policy_, limits=limits)
    finally:
        for pair in pairs:
            for each in pair:
                each.close()
    settle(lambda: descriptors(rig.egress) == before)


def test_the_same_sandbox_is_not_added_twice(rig: Rig, sandbox: Sandbox) -> None:
    before = descriptors(rig.egress)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    names = os.open(sandbox.names, os.O_RDWR | os.O_APPEND)
    try:
        fds = [*(each.fileno() for each in listeners), names]
        with pytest.raises(RuntimeError, match="already"):
            rig.call("add", fds, sandbox=sandbox.id, policy={"mode": "none"}, limits={})
    finally:
        os.close(names)
        for each in listeners:
            each.close()
    settle(lambda: descriptors(rig.egress) == before)
    assert hello_passes(sandbox, "allowed.test")


def test_removal_ends_what_is_open_and_leaves_nothing(rig: Rig) -> None:
    before = descriptors(rig.egress)
    made = rig.sandbox(policy("allowed.test"))
    streams = [made.dial(ANYWHERE, 80) for _ in range(20)]
    for stream in streams[:10]:
        stream.sendall(GET)
        until(stream, b"hello from")
    begun = time.monotonic()
    rig.call("remove", sandbox=made.id)
    assert time.monotonic() - begun < 10
    assert all(heard(stream) == b"" for stream in streams)
    with pytest.raises(ConnectionRefusedError):
        made.dial(ANYWHERE, 443)
    for stream in streams:
        stream.close()
    settle(lambda: descriptors(rig.egress) == before)
    rig.wait_event(lambda event: event.sandbox == made.id and event.kind == "allowed" and event.connections == 10)
    made.close()


def test_events_are_sent_until_they_are_acknowledged(rig: Rig, sandbox: Sandbox) -> None:
    said(sandbox, hello("once.other.test"))
    first = rig.wait_event(lambda event: event.name == "once.other.test")
    rig.events.clear()
    rig.connect()  # a daemon that was restarted before it had written anything down
    assert rig.wait_event(lambda event: event.name == "once.other.test") == first
    rig.call("ack", through=first.number)
    rig.events.clear()
    rig.connect()
    rig.call("hello")
    assert all(event.number > first.number for event in rig.events)


def test_a_new_daemon_takes_the_place_of_the_old(rig: Rig) -> None:
    old = rig._connection
    rig.connect()
    assert old.recv(1) == b""
    old.close()
    assert rig.call("hello")["build"] == BUILD


def test_nobody_but_root_is_served(rig: Rig) -> None:
    path = rig.directory / "control.sock"
    path.chmod(0o777)
    script = f"""
import os, socket
os.setuid(12345)
made = socket.socket(socket.AF_UNIX)
made.settimeout(5)
made.connect({str(path)!r})
print(made.recv(1))
"""
    done = subprocess.run(["python3", "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.strip() == "b''", done.stderr
    assert rig.call("hello")["build"] == BUILD  # and the daemon's own connection is as it was


def test_a_daemon_that_breaks_the_framing_loses_its_connection_only(rig: Rig, sandbox: Sandbox) -> None:
    broken = socket.socket(socket.AF_UNIX)
    broken.settimeout(5)
    broken.connect(str(rig.directory / "control.sock"))
    broken.sendall(b"\xff\xff\xff\xff")
    assert broken.recv(1) == b""
    broken.close()
    rig.connect()
    assert hello_passes(sandbox, "allowed.test")


# A policy that changes


def test_what_a_new_policy_forbids_is_cut_and_what_it_allows_goes_on(rig: Rig, sandbox: Sandbox) -> None:
    kept, cut, cut_too = (sandbox.dial(ANYWHERE, port) for port in (80, 80, 443))
    with kept, cut, cut_too:
        for stream, host in ((kept, b"allowed"), (cut, b"second")):
            stream.sendall(GET.replace(b"allowed", host))
            until(stream, b"hello from")
        cut_too.sendall(hello("second.test"))
        assert heard(cut_too)
        begun = time.monotonic()
        sandbox.update(policy("allowed.test"))
        with pytest.raises(ConnectionResetError):
            while cut.recv(100):
                pass
        with contextlib.suppress(ConnectionResetError):
            while cut_too.recv(10_000):
                pass
        assert time.monotonic() - begun < 10
        kept.sendall(GET)
        until(kept, b"hello from")
    event = rig.wait_event(lambda event: event.sandbox == sandbox.id and event.name == "second.test")
    assert (event.kind, event.rule) == ("denied", "not-listed")


def test_a_name_keeps_its_address_when_it_is_refused_and_allowed_again(sandbox: Sandbox) -> None:
    address = looked_up(sandbox, "second.test")
    sandbox.update(policy("allowed.test"))
    assert looked_up(sandbox, "second.test") == "NXDOMAIN"
    assert said(sandbox, hello("second.test"), where=address) == b""
    sandbox.update(policy("second.test"))
    assert looked_up(sandbox, "second.test") == address


def test_a_connection_half_decided_is_decided_by_the_new_policy(rig: Rig, sandbox: Sandbox) -> None:
    half = hello("second.test")
    with sandbox.dial(ANYWHERE, 443) as stream, quiet(rig.world.origin) as seen:
        stream.sendall(half[:100])
        time.sleep(0.1)
        sandbox.update(policy("allowed.test"))
        stream.sendall(half[100:])
        assert heard(stream) == b""
    assert seen.queries == []


def test_a_name_that_is_being_looked_up_is_decided_again(rig: Rig, sandbox: Sandbox) -> None:
    slow = "slow.second.test"
    sandbox.update(policy("allowed.test", slow))
    os.kill(rig.resolver, signal.SIGSTOP)
    try:
        with sandbox.dial(ANYWHERE, 443) as stream:
            stream.sendall(hello(slow))
            time.sleep(0.2)
            sandbox.update(policy("allowed.test"))
            rig.world.names.set(slow, places.PUBLIC)
            os.kill(rig.resolver, signal.SIGCONT)
            with rig.world.uplink() as uplink:
                assert heard(stream) == b""
            assert uplink.outgoing(port=443) == []
    finally:
        os.kill(rig.resolver, signal.SIGCONT)
        rig.world.names.drop(slow)


def test_none_lets_nothing_through_and_open_the_public(rig: Rig, sandbox: Sandbox) -> None:
    with sandbox.dial(ANYWHERE, 80) as stream:
        stream.sendall(GET)
        until(stream, b"hello from")
        sandbox.update(policy(mode=Mode.NONE))
        with pytest.raises(ConnectionResetError):
            while stream.recv(100):
                pass
    with pytest.raises(ConnectionRefusedError):
        sandbox.dial(ANYWHERE, 443)
    sandbox.update(policy(mode=Mode.OPEN))
    assert hello_passes(sandbox, "other.test")


def test_policies_that_change_under_traffic_let_nothing_through_that_both_forbid(rig: Rig, sandbox: Sandbox) -> None:
    ending = threading.Event()
    good: list[bool] = []
    leaked: list[str] = []

    def knock() -> None:
        while not ending.is_set():
            for name in ("other.test", "second.test", "allowed.test"):
                answer = said(sandbox, hello(name))
                if name == "allowed.test":
                    good.append(passed(answer))
                elif name == "other.test" and answer:
                    leaked.append(name)

    with quiet(rig.world.origin) as seen:
        threads = [threading.Thread(target=knock) for _ in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(1000):
            sandbox.update(policy("allowed.test", *(["second.test"] if turn % 2 else [])))
        ending.set()
        for thread in threads:
            thread.join()
    assert leaked == [] and good and all(good)
    assert {query.name for query in seen.queries} <= {"allowed.test", "second.test"}


def test_rules_that_an_administrator_flushes_lead_to_no_other_way(rig: Rig, sandbox: Sandbox) -> None:
    sandbox.gate.run("nft", "flush", "ruleset")
    with rig.world.uplink() as uplink:
        assert said(sandbox, ALLOWED, 3128, "172.16.0.1") == b""
        for where in (ANYWHERE, places.PUBLIC):
            with pytest.raises(OSError):  # refused, unreachable or silent: all of them will do
                sandbox.dial(where, 443, 1.0)
    assert uplink.outgoing(port=443) == []
    event = rig.wait_event(lambda event: event.sandbox == sandbox.id and event.rule == "not-redirected")
    assert "proxy itself" in event.why


# Bytes


def test_a_slow_reader_gets_every_byte_and_costs_no_memory(rig: Rig, sandbox: Sandbox) -> None:
    size = counts(32, 256) << 20
    block = os.urandom(1 << 20)

    def send(asked: Request) -> None:
        asked.stream.sendall(f"HTTP/1.1 200 -\r\nContent-Length: {size}\r\n\r\n".encode())
        for _ in range(size >> 20):
            asked.stream.sendall(block)

    rig.world.origin.answers["second.test"] = send
    before = memory_kb(rig.egress)
    most = 0
    try:
        with sandbox.dial(ANYWHERE, 80) as stream:
            stream.sendall(GET.replace(b"allowed", b"second"))
            body = until(stream, b"\r\n\r\n").partition(b"\r\n\r\n")[2]
            digest, got = hashlib.sha256(body), len(body)
            while got < size:
                piece = stream.recv(1 << 16)
                assert piece
                digest.update(piece)
                got += len(piece)
                if got % 50 == 0:
                    time.sleep(0.02)
                most = max(most, memory_kb(rig.egress)) if got % 7 == 0 else most
    finally:
        del rig.world.origin.answers["second.test"]
    assert digest.digest() == hashlib.sha256(block * (size >> 20)).digest()
    assert most - before < 16_000


def test_what_is_dear_to_read_holds_up_neither_the_daemon_nor_a_neighbour(rig: Rig, sandbox: Sandbox) -> None:
    """Bodies in chunks of one byte: nothing costs more time for what it holds."""
    body = b"POST / HTTP/1.1\r\nHost: allowed.test\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 2700
    other = rig.sandbox(policy("allowed.test"))
    slowest = 0.0
    with contextlib.ExitStack() as open_:
        streams = [open_.enter_context(other.dial(ANYWHERE, 80)) for _ in range(250)]
        for stream in streams:
            stream.setblocking(False)
            stream.send(body)
        for _ in range(10):
            began = time.monotonic()
            rig.call("hello")
            assert looked_up(sandbox, "allowed.test").startswith("198.18.")
            slowest = max(slowest, time.monotonic() - began)
    other.close()
    assert slowest < 3


def test_heads_without_an_end_cost_so_much_memory_and_no_more(rig: Rig, sandbox: Sandbox) -> None:
    def half(asked: Request) -> None:
        asked.stream.sendall(b"HTTP/1.1 200 -\r\nX: " + b"x" * 60_000)
        time.sleep(20)

    other = rig.sandbox(policy("second.test"))
    rig.world.origin.answers["second.test"] = half
    before = memory_kb(rig.egress)
    with contextlib.ExitStack() as open_:
        for _ in range(450):
            stream = open_.enter_context(other.dial(ANYWHERE, 80))
            stream.sendall(GET.replace(b"allowed", b"second"))
        event = rig.wait_event(lambda event: event.sandbox == other.id and event.rule == "too-many-connections", 20)
        assert "bytes waiting" in event.why
        assert memory_kb(rig.egress) - before < 60_000
        assert hello_passes(sandbox, "allowed.test")
    del rig.world.origin.answers["second.test"]
    other.close()


# Parts that go away


def test_without_a_resolver_names_wait_and_the_next_one_answers(rig: Rig, sandbox: Sandbox) -> None:
    rig.end(rig.resolver)
    with sandbox.dial(ANYWHERE, 443) as stream:
        stream.sendall(ALLOWED)
        time.sleep(0.3)
        with rig._start_resolver() as ours:
            rig.call("resolver", [ours.fileno()])
        assert passed(heard(stream, 6))
    assert hello_passes(sandbox, "allowed.test")
    for _ in range(5):
        rig.restart_resolver()
    assert hello_passes(sandbox, "allowed.test")


def test_a_daemon_that_goes_away_changes_nothing(rig: Rig, sandbox: Sandbox) -> None:
    rig._connection.close()
    time.sleep(0.3)
    assert hello_passes(sandbox, "allowed.test")
    assert said(sandbox, hello("other.test")) == b""
    rig.connect()
    assert sandbox.id in rig.hello["sandboxes"]


def test_egress_that_is_killed_lets_nothing_through_and_another_knows_the_names(rig: Rig, sandbox: Sandbox) -> None:
    address = looked_up(sandbox, "second.test")
    with sandbox.dial(ANYWHERE, 80) as stream:
        stream.sendall(GET)
        until(stream, b"hello from")
        rig.end(rig.egress)
        rig.end(rig.resolver)
        with contextlib.suppress(ConnectionResetError):
            assert stream.recv(100) == b""
    with pytest.raises(ConnectionRefusedError):
        sandbox.dial(ANYWHERE, 443)
    rig.start()
    assert rig.hello["sandboxes"] == []
    sandbox.add()
    assert looked_up(sandbox, "second.test") == address
    assert hello_passes(sandbox, "allowed.test")


def test_asked_to_end_it_ends_at_once_with_success(rig: Rig) -> None:
    with open_rig(rig.world) as other:
        assert os.waitstatus_to_exitcode(other.end(other.egress, signal.SIGTERM)) == 0
        with pytest.raises((EOFError, OSError)):
            other.call("hello")


def test_it_ends_by_itself_once_nobody_can_reach_it_any_more(rig: Rig) -> None:
    with open_rig(rig.world) as other:
        made = other.sandbox(policy("allowed.test"))
        other._connection.close()
        (other.directory / "control.sock").unlink()
        assert hello_passes(made, "allowed.test")
        deadline = time.monotonic() + 20
        while os.waitid(os.P_PID, other.egress, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
