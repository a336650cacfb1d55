"""The relay's edges: whom a guest dialled, which upstream answers first, limits and deadlines."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from native.relay import FREE, Accepted, Closed, Data, Ended, Failed, Limits, Opened, Reason, Refused, Relay
from tests.native.relay_rig import DOWN, SANDBOX, UP, Rig, is_reset, receive, receive_all, reset


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as running:
        yield running


# Whom a guest dialled

LINK = ("link set lo up", "address add 172.16.0.2 dev lo", "route add 198.18.0.0/15 dev lo src 172.16.0.2")
REDIRECT = """
table ip test {
    chain output {
        type nat hook output priority -100;
        ip daddr 198.18.0.0/15 tcp dport != 3128 redirect to :3128
    }
}
"""


def why_no_redirect() -> str | None:
    if os.geteuid() != 0:
        return "a network namespace with a redirect in it needs root"
    return None if shutil.which("nft") else "nft is not installed"


needs_redirect = pytest.mark.skipif(why_no_redirect() is not None, reason=why_no_redirect() or "")


class Redirected:
    """A thread in a network namespace of its own, in which 198.18.0.0/15 leads to the gate."""

    def __init__(self) -> None:
        self.gate: socket.socket
        self._wanted: list[tuple[str, int]] = []
        self._made: list[socket.socket] = []
        self._turn = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._wait()

    def dial(self, address: str, port: int) -> socket.socket:
        self._wanted.append((address, port))
        self._turn.release()
        self._wait()
        return self._made.pop()

    def close(self) -> None:
        self._turn.release()
        self._thread.join(10)
        self.gate.close()

    def _wait(self) -> None:
        assert self._done.acquire(timeout=20)
        if self._fault:
            raise self._fault

    def _run(self) -> None:
        try:
            if ctypes.CDLL(None, use_errno=True).unshare(0x40000000) != 0:  # CLONE_NEWNET, of this thread alone
                raise OSError(ctypes.get_errno(), "unshare")
            for command in LINK:
                subprocess.run(["ip", *command.split()], check=True, timeout=10)
            subprocess.run(["nft", "-f", "-"], input=REDIRECT.encode(), check=True, timeout=10)
            self.gate = socket.create_server(("0.0.0.0", 3128))
            self._done.release()
            while self._turn.acquire() and self._wanted:
                self._made.append(socket.create_connection(self._wanted.pop(), timeout=10))
                self._done.release()
        except BaseException as fault:
            self._fault = fault
            self._done.release()


@pytest.fixture
def redirected(rig: Rig) -> Iterator[Redirected]:
    there = Redirected()
    rig.relay.listen(8, there.gate.fileno(), Limits(first_ms=1000))
    yield there
    rig.relay.unlisten(8)
    there.close()


@needs_redirect
@pytest.mark.parametrize("port", [22, 8443, 3127])
def test_the_address_that_was_dialled_is_told_at_once(rig: Rig, redirected: Redirected, port: int) -> None:
    with redirected.dial("198.18.0.77", port) as guest:
        event = rig.wait(Accepted)
        assert event == Accepted(event.pair, 8, "198.18.0.77", port, True)
        guest.sendall(b"x")
        assert rig.nothing() == [], "bytes are for whoever asks for them"


@needs_redirect
@pytest.mark.parametrize("port", [80, 443])
def test_web_ports_are_told_with_their_first_bytes(rig: Rig, redirected: Redirected, port: int) -> None:
    with redirected.dial("198.18.0.9", port) as guest:
        assert rig.nothing() == []
        guest.sendall(b"\x16\x03\x01")
        pair = rig.wait(Accepted).pair
        assert rig.data(pair) == b"\x16\x03\x01"
        assert rig.seen == [Accepted(pair, 8, "198.18.0.9", port, True), Data(pair, UP, b"\x16\x03\x01")]
        guest.sendall(b"more")
        assert rig.nothing() == []
        rig.relay.read(pair, UP, 0)
        assert rig.data(pair) == b"more"


@needs_redirect
def test_a_web_port_has_credit_for_a_first_flight_and_no_more(rig: Rig, redirected: Redirected) -> None:
    with redirected.dial("198.18.0.9", 443) as guest:
        guest.sendall(b"h" * 30_000)
        pair = rig.wait(Accepted).pair
        got = len(rig.data(pair))
        while got < 17 * 1024:
            rig.relay.read(pair, UP, 0)
            got += len(rig.data(pair))
        rig.relay.read(pair, UP, 0)
        assert rig.nothing() == []
        assert got == 17 * 1024


@needs_redirect
def test_a_silent_guest_is_told_once_at_its_end(rig: Rig, redirected: Redirected) -> None:
    with redirected.dial("198.18.0.9", 443) as guest:
        closed = rig.wait(Closed, 5)
        assert rig.seen == [closed]
        assert (closed.sandbox, closed.reason, closed.said) == (8, Reason.DEADLINE, False)
        assert is_reset(guest)
    with redirected.dial("198.18.0.9", 80) as guest:
        guest.shutdown(socket.SHUT_WR)
        assert receive_all(guest) == b""
        assert rig.wait(Closed).reason is Reason.DONE


@needs_redirect
def test_dialling_the_gate_itself_is_not_redirected(rig: Rig, redirected: Redirected) -> None:
    with redirected.dial("127.0.0.1", 3128):
        event = rig.wait(Accepted)
        assert event == Accepted(event.pair, 8, "127.0.0.1", 3128, False)


# Which upstream answers first


@pytest.fixture
def black_hole() -> Iterator[tuple[str, int]]:
    """A listening socket whose queue is full: what comes after gets no answer."""
    with ExitStack() as stack:
        hole = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(hole.getsockname())
        time.sleep(0.05)
        yield hole.getsockname()


@pytest.fixture
def closed_port() -> Iterator[tuple[str, int]]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()


def test_a_dead_first_address_costs_a_quarter_of_a_second(rig: Rig, black_hole: tuple[str, int]) -> None:
    _guest, pair = rig.pair()
    started = time.monotonic()
    rig.relay.open(pair, [black_hole, rig.upstream], b"hi", FREE, FREE)
    assert rig.wait(Opened) == Opened(pair, *rig.upstream)
    assert 0.2 < time.monotonic() - started < 10, "as long as an address may take to connect"
    assert receive(rig.accept(), 2) == b"hi"


def test_a_refused_first_address_costs_nothing(
    rig: Rig, closed_port: tuple[str, int], black_hole: tuple[str, int]
) -> None:
    took = []
    for _ in range(5):
        _guest, pair = rig.pair()
        started = time.monotonic()
        rig.relay.open(pair, [closed_port, closed_port, rig.upstream, black_hole], b"hi", FREE, FREE)
        assert rig.wait(Opened) == Opened(pair, *rig.upstream)
        took.append(time.monotonic() - started)
    # The fastest: a busy machine can make any one of them slow, a quarter of a second for an address all of them.
    assert min(took) < 0.2


def test_an_ipv6_upstream(rig: Rig) -> None:
    try:
        origin = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6 on loopback here: {error}")
    with origin:
        _guest, pair = rig.pair()
        where = origin.getsockname()[:2]
        rig.relay.open(pair, [where], b"hi", FREE, FREE)
        assert rig.wait(Opened) == Opened(pair, "::1", where[1])


def test_nobody_answers(closed_port: tuple[str, int], black_hole: tuple[str, int]) -> None:
    with Rig(Limits(connect_ms=600)) as rig:
        guest, pair = rig.pair()
        rig.relay.open(pair, [closed_port], b"hi", FREE, FREE)
        assert rig.wait(Failed) == Failed(pair, errno.ECONNREFUSED)
        started = time.monotonic()
        rig.relay.open(pair, [black_hole, closed_port], b"hi", FREE, FREE)
        assert rig.wait(Failed) == Failed(pair, errno.ETIMEDOUT)
        assert time.monotonic() - started > 0.5
        rig.relay.send(pair, DOWN, b"502")
        rig.relay.close(pair, reset=False)
        assert receive_all(guest) == b"502"


def test_a_guest_that_goes_while_its_upstream_is_dialled(rig: Rig, black_hole: tuple[str, int]) -> None:
    guest, pair = rig.pair()
    rig.relay.open(pair, [black_hole], b"hi", FREE, FREE)
    reset(guest)
    assert rig.closed(pair, 1).reason is Reason.GUEST_RESET


# Limits


@pytest.mark.parametrize(
    ("limits", "max_pairs"), [(Limits(pairs=3), 100), (Limits(), 3)], ids=["of the sandbox", "of all"]
)
def test_more_than_may_be_are_reset_at_once_and_counted(limits: Limits, max_pairs: int) -> None:
    with Rig(limits, max_pairs=max_pairs) as rig:
        kept = [rig.pair() for _ in range(3)]
        for _ in range(20):
            assert rig.turned_away()
        time.sleep(1.1)
        refused = [rig.wait(Refused)]
        while sum(event.count for event in refused) < 20:
            refused.append(rig.wait(Refused))
        assert sum(event.count for event in refused) == 20
        assert len(refused) == 2, "the first at once, the others together"
        reset(kept[0][0])
        rig.closed(kept[0][1])
        rig.relay.take()
        _, pair = rig.pair()
        assert pair not in [number for _, number in kept]


def test_one_sandbox_does_not_use_up_what_another_has() -> None:
    with Rig(Limits(pairs=3), max_pairs=6) as rig, socket.create_server(("127.0.0.1", 0)) as second:
        rig.relay.listen(9, second.fileno(), Limits(pairs=3))
        for _ in range(3):
            rig.pair()
        assert rig.turned_away()
        with socket.create_connection(second.getsockname()):
            assert rig.wait(Accepted).sandbox == 9


def test_events_that_nobody_takes_are_bounded(rig: Rig) -> None:
    """A guest that opens and closes quickly while Python is busy: its places are still taken."""
    with Rig(Limits(pairs=10)) as rig:
        for _ in range(200):
            with contextlib.suppress(ConnectionResetError):
                reset(rig.dial())
        rig.nothing(1.3)
        assert sum(isinstance(event, Closed) for event in rig.seen) <= 20
        assert sum(event.count for event in rig.seen if isinstance(event, Refused)) >= 100


def test_more_than_may_be_held_ends_the_pair() -> None:
    with Rig(Limits(held_bytes=1 << 20)) as rig:
        _guest, pair = rig.pair()
        other, number = rig.pair()
        for _ in range(100):  # the guest reads nothing: the sockets take some, the rest is held
            rig.relay.send(pair, DOWN, b"x" * 200_000)
        assert rig.closed(pair).reason is Reason.LIMIT
        rig.relay.send(number, DOWN, b"y" * 900_000)
        assert receive(other, 900_000) == b"y" * 900_000, "what was held is free again"


# Deadlines


def test_the_first_flight_has_a_deadline_until_something_is_opened() -> None:
    with Rig(Limits(first_ms=800)) as rig:
        guest, pair = rig.pair()
        opened, upstream, _kept = rig.joined()
        assert rig.closed(pair).reason is Reason.DEADLINE
        assert is_reset(guest)
        time.sleep(0.4)
        opened.sendall(b"still")
        assert receive(upstream, 5) == b"still"


def test_a_deadline_replaces_the_one_before(rig: Rig) -> None:
    _guest, upstream, pair = rig.joined()
    rig.relay.deadline(pair, 300)
    rig.relay.deadline(pair, 0)
    assert rig.nothing(0.5) == []
    rig.relay.deadline(pair, 60_000)
    started = time.monotonic()
    rig.relay.deadline(pair, 200)
    assert rig.closed(pair).reason is Reason.DEADLINE
    assert 0.15 < time.monotonic() - started < 20, "the one before was of a minute"
    assert is_reset(upstream)


def test_idle_means_neither_direction() -> None:
    with Rig(Limits(idle_ms=1000)) as rig:
        guest, upstream, pair = rig.joined()
        for _ in range(13):  # a download, with nothing going up
            upstream.sendall(b"x")
            time.sleep(0.1)
        assert receive(guest, 13) == b"x" * 13
        started = time.monotonic()
        assert rig.closed(pair).reason is Reason.IDLE
        assert time.monotonic() - started > 0.2


def test_shipped_limits_let_a_quiet_stream_live_for_longer_than_a_quarter_of_an_hour() -> None:
    assert Limits().idle_ms >= 15 * 60 * 1000


@pytest.mark.parametrize("side", ["guest", "upstream"])
def test_dead_peers_are_found(rig: Rig, side: str) -> None:
    """From outside keepalive shows in the kernel's table of sockets alone."""
    guest, upstream, _ = rig.joined()
    local = (guest.getpeername() if side == "guest" else upstream.getpeername())[1]
    peer = (guest if side == "guest" else upstream).getsockname()[1]
    wanted = f":{local:04X} 0100007F:{peer:04X} 01"
    line = next(line for line in Path("/proc/net/tcp").read_text().splitlines() if wanted in line)
    assert line.split()[5].startswith("02:"), "the timer that runs is the keepalive timer"


# Listeners


@pytest.mark.parametrize("threads", [1, 3])
def test_unlisten_cuts_everything_of_that_sandbox_and_nothing_else(threads: int) -> None:
    with Rig(threads=threads) as rig, socket.create_server(("127.0.0.1", 0)) as second:
        rig.relay.listen(9, second.fileno(), Limits())
        other = socket.create_connection(second.getsockname(), timeout=10)
        kept = rig.wait(Accepted).pair
        ends = [rig.joined() for _ in range(10)]
        rig.relay.unlisten(SANDBOX)
        for guest, upstream, pair in ends:
            assert is_reset(guest) and is_reset(upstream)
            assert rig.closed(pair).reason is Reason.CUT
        rig.relay.send(kept, DOWN, b"fine")
        assert receive(other, 4) == b"fine"
        other.close()
        waiting = rig.dial()  # the socket itself is the caller's: it still listens, and nobody accepts
        assert not [event for event in rig.nothing(0.1) if isinstance(event, Accepted)]
        rig.relay.listen(SANDBOX, rig.gate.fileno(), Limits())
        assert rig.wait(Accepted).sandbox == SANDBOX
        waiting.close()


def test_a_process_without_descriptors_refuses_and_recovers() -> None:
    """In a process of its own, for the limit is the process's."""
    script = """
import resource, socket, sys, time
sys.path.insert(0, sys.argv[1])
from native.relay import *
gate = socket.create_server(("127.0.0.1", 0), backlog=200)
relay = Relay(1, 1000)
relay.listen(1, gate.fileno(), Limits())
guests = [socket.create_connection(gate.getsockname(), timeout=5) for _ in range(10)]
time.sleep(0.2)
accepted = [event for event in relay.take() if isinstance(event, Accepted)]
assert len(accepted) == 10, accepted
more = [socket.socket() for _ in range(20)]
used = max(sock.fileno() for sock in more)
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 5, used + 5))
resets = 0
for position, sock in enumerate(more):
    sock.settimeout(5)
    try:
        sock.connect(gate.getsockname())    # it may be there before connect returns
        if position >= 10:
            sock.recv(1)
    except ConnectionResetError:
        resets += position >= 10
relay.open(accepted[0].pair, [gate.getsockname()], b"", FREE, FREE)
time.sleep(0.2)
events = relay.take()
assert resets == 10, resets
assert any(isinstance(event, Refused) for event in events), events
assert Failed(accepted[0].pair, 24) in events, events
for sock in more + guests[1:]:
    sock.close()
time.sleep(0.3)
late = socket.create_connection(gate.getsockname(), timeout=5)
time.sleep(0.3)
assert any(isinstance(event, Accepted) for event in relay.take())
relay.stop()
print("done")
"""
    root = str(Path(__file__).parents[2])
    run = subprocess.run([sys.executable, "-c", script, root], capture_output=True, text=True, timeout=60)
    assert run.stdout == "done\n", run.stderr


def test_thousands_of_pairs_at_once() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    pairs = min(1500, (soft - 200) // 4)
    with Rig(Limits(pairs=pairs)) as rig:
        ends = [rig.joined() for _ in range(pairs)]
        for index, (guest, upstream, _) in enumerate(ends):
            guest.sendall(b"%d up" % index)
            upstream.sendall(b"%d down" % index)
        for index, (guest, upstream, _) in enumerate(ends):
            assert receive(upstream, len(b"%d up" % index)) == b"%d up" % index
            assert receive(guest, len(b"%d down" % index)) == b"%d down" % index
        assert not [event for event in rig.seen if isinstance(event, Ended)]


# Not tests: how fast it is, to be read


def test_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """One stream, and connections one after the other, both ends in this interpreter: far below what the relay can."""
    with Rig() as rig:
        guest, upstream, _ = rig.joined()
        size = 256 << 20
        block = b"x" * size
        sender = threading.Thread(target=upstream.sendall, args=(block,))
        started = time.monotonic()
        sender.start()
        view = memoryview(bytearray(1 << 20))
        left = size
        while left > 0:
            left -= guest.recv_into(view)
        moved_s = time.monotonic() - started
        sender.join()
        started, count = time.monotonic(), 500
        for _ in range(count):
            with rig.dial() as other:
                rig.relay.open(rig.wait(Accepted).pair, [rig.upstream], b"", FREE, FREE)
                with rig.accept() as there:
                    there.sendall(b"x")
                    assert other.recv(1) == b"x"
        dialled_s = time.monotonic() - started
    with capsys.disabled():
        print(f"\nrelay: {size * 8 / moved_s / 1e9:.1f} Gbit/s, {count / dialled_s:.0f} connections/s one by one")


def test_a_relay_that_was_not_stopped_does_not_keep_the_process() -> None:
    script = "import sys; sys.path.insert(0, sys.argv[1]); from native.relay import Relay; Relay(2, 10); print('end')"
    root = str(Path(__file__).parents[2])
    run = subprocess.run([sys.executable, "-c", script, root], capture_output=True, text=True, timeout=20)
    assert (run.returncode, run.stdout) == (0, "end\n")


def test_signals_stay_with_python() -> None:
    """The threads of the relay take none: they are blocked there."""
    relay = Relay(2, 10)
    try:
        for task in Path("/proc/self/task").iterdir():
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            if int(task.name) != threading.get_native_id() and status["SigBlk"] != "0" * 16:
                assert int(status["SigBlk"], 16) & (1 << 14), "TERM"
                break
        else:
            raise AssertionError("no thread with its signals blocked")
    finally:
        relay.stop()
