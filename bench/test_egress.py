"""What passes through egress, beside HAProxy, nginx and mitmproxy doing the same on the same wires.

All run at once and are measured by turns. `python -m egress` and its resolver are the real processes under uids of
their own, given their sockets the way the daemon gives them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.conftest import SHORT, alternate
from bench.wire import NAMES, WAYS, Rate, Wire
from egress import control
from egress.policy import Mode, Policy

UIDS = (61300, 61301)       # nobody's
ROUNDS = 2 if SHORT else 5
SETTLE_S = 1.0
BULK_MS = 1000 if SHORT else 2000
RATE_MS = 500 if SHORT else 1000
SANDBOX = "sbx_0123456789abcdef"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make namespaces")


class Egress:
    """The two processes, with one sandbox whose sockets lie in the host's namespace."""

    def __init__(self, wire: Wire) -> None:
        self.directory = wire.directory / "egress"
        root = self.directory / "root"
        root.mkdir(parents=True, mode=0o755)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.directory / "control.sock"))
        listener.listen(1)
        asking, answering = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = self.directory / "log"
        python = (sys.executable, "-I", "-m")
        mark, resolver_mark = "/bench/egress", "/bench/resolver"
        egress = (*python, "egress", mark, "bench", str(UIDS[0]), str(root))
        resolver = (*python, "egress.resolver", resolver_mark, str(UIDS[1]))
        self.pids = [
            _start(wire, log, egress, listener, asking).pid, _start(wire, log, resolver, answering).pid
        ]
        for each in (listener, asking, answering):
            each.close()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(30)
        self._connection.connect(str(self.directory / "control.sock"))
        self._inbox = control.Inbox()
        self._seq = 0
        wire.add(self._connection.close)
        self._log = log
        self._ask("hello")
        names = os.open(self.directory / "names", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        port = WAYS["ours"][1]
        sockets = wire.host.inside(lambda: [
            socket.create_server(("0.0.0.0", port), backlog=4096), _datagram(), socket.create_server(("0.0.0.0", 7353)),
        ])  # fmt: skip
        for each in sockets:
            each.setblocking(False)
        policy = Policy(Mode.ALLOWLIST, allow=tuple(NAMES))
        fds = [*(each.fileno() for each in sockets), names]
        self._ask("add", fds, sandbox=SANDBOX, policy=policy.as_json(), limits={})
        for each in sockets:
            each.close()
        os.close(names)

    def _ask(self, verb: str, fds: list[int] | None = None, **fields: object) -> dict[str, Any]:
        self._seq += 1
        control.send(self._connection, {"do": verb, "seq": self._seq, **fields}, fds or [])
        while True:
            try:
                frames = self._inbox.read(self._connection)
            except (EOFError, OSError) as fault:
                raise AssertionError(f"egress went away: {self._log.read_text(errors='replace')[-3000:]}") from fault
            for frame in frames:
                if frame.body.get("seq") == self._seq:
                    assert frame.body.get("ok"), frame.body
                    return frame.body


def _start(wire: Wire, log: Path, command: tuple[str, ...], *sockets: socket.socket) -> subprocess.Popen[bytes]:
    """The process with these sockets as descriptors 3 and up."""
    high = [fcntl.fcntl(each.fileno(), fcntl.F_DUPFD_CLOEXEC, 64) for each in sockets]

    def place() -> None:
        for number, fd in enumerate(high):
            os.dup2(fd, 3 + number)

    with log.open("ab") as out:
        process = wire.host.start(
            *command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=place,
            pass_fds=tuple(3 + number for number in range(len(sockets))),
        )  # fmt: skip
    for fd in high:
        os.close(fd)
    return wire.started(process)


def _datagram() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("0.0.0.0", 7353))
    return made


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    missing = [program for program in ("haproxy", "nginx", "nft", "cc") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="wire-", dir="/tmp"))
        yield stack.enter_context(contextlib.closing(Wire(Path(directory))))


@dataclass(frozen=True)
class Sides:
    wire: Wire
    ours: list[int]
    haproxy: list[int]
    nginx: list[int]


@pytest.fixture(scope="module")
def sides(wire: Wire) -> Sides:
    return Sides(wire, Egress(wire).pids, wire.haproxy(), wire.nginx())


def compare(
    benchmark: Any, ours: Callable[[], float], peer: Callable[[], float], peer_name: str, better: str,
    beside: dict[str, Callable[[], float]] | None = None,
) -> None:  # fmt: skip
    """Ours and the peer by turns; what else is measured `beside` them goes into the report without a ratio."""
    others: dict[str, list[float]] = {name: [] for name in beside or {}}

    def both() -> float:
        for name, measure in (beside or {}).items():
            others[name].append(measure())
        return peer()

    alternate(benchmark, ours, both, rounds=ROUNDS, peer_name=peer_name, better=better)
    benchmark.extra_info |= {name: statistics.median(figures) for name, figures in others.items()}


def relay(benchmark: Any, sides: Sides, streams: int) -> None:
    def through(way: str, pids: list[int]) -> Callable[[], float]:
        return lambda: sides.wire.bulk(way, pids, streams, BULK_MS).rate

    compare(
        benchmark, through("ours", sides.ours), through("haproxy", sides.haproxy),
        "HAProxy, TCP mode, spliced", "higher", {"nginx": through("nginx", sides.nginx)},
    )  # fmt: skip


def test_relay_1(benchmark: Any, sides: Sides) -> None:
    relay(benchmark, sides, 1)


def test_relay_16(benchmark: Any, sides: Sides) -> None:
    relay(benchmark, sides, 16)


def test_relay_cpu(benchmark: Any, sides: Sides) -> None:
    def cost(way: str, pids: list[int]) -> Callable[[], float]:
        return lambda: sides.wire.bulk(way, pids, 16, BULK_MS).cpu

    compare(
        benchmark, cost("ours", sides.ours), cost("haproxy", sides.haproxy),
        "HAProxy, CPU seconds for a GiB", "lower", {"nginx": cost("nginx", sides.nginx)},
    )  # fmt: skip


def test_relay_1000(benchmark: Any, sides: Sides) -> None:
    def crowded() -> float:
        # The streams of the round before may still count: with them there would be more than a sandbox may have.
        time.sleep(SETTLE_S)
        idle = sides.wire.idle("ours", 1000)
        try:
            return rate()
        finally:
            idle.communicate()

    def rate() -> float:
        return sides.wire.bulk("ours", sides.ours, 16, BULK_MS).rate

    compare(benchmark, crowded, rate, "16 streams of ours without 1,000 idle pairs", "higher")


def added(sides: Sides, way: str, figure: Callable[[Rate], float]) -> Callable[[], float]:
    """What a way adds to the time of one new connection after another, beside none between."""

    def measure() -> float:
        direct = sides.wire.rate("direct", 1, RATE_MS)
        return max(1e-6, figure(sides.wire.rate(way, 1, RATE_MS)) - direct.p50)

    return measure


def connect(benchmark: Any, sides: Sides, figure: Callable[[Rate], float]) -> None:
    compare(
        benchmark, added(sides, "ours", figure), added(sides, "haproxy-asking", figure),
        "HAProxy with do-resolve", "lower", {"HAProxy that need not ask": added(sides, "haproxy", figure)},
    )  # fmt: skip


def test_connect_p50(benchmark: Any, sides: Sides) -> None:
    connect(benchmark, sides, lambda rate: rate.p50)


def test_connect_p99(benchmark: Any, sides: Sides) -> None:
    connect(benchmark, sides, lambda rate: rate.p99)


def test_connect_rate(benchmark: Any, sides: Sides) -> None:
    def through(way: str) -> Callable[[], float]:
        return lambda: sides.wire.rate(way, 64, RATE_MS).rate

    compare(
        benchmark, through("ours"), through("haproxy"), "HAProxy that need not ask", "higher",
        {"HAProxy with do-resolve": through("haproxy-asking"), "nginx": through("nginx")},
    )  # fmt: skip


def test_connect_rate_mitm(benchmark: Any, sides: Sides) -> None:
    sides.wire.mitmproxy()

    def through(way: str) -> Callable[[], float]:
        return lambda: sides.wire.rate(way, 64, RATE_MS).rate

    compare(benchmark, through("ours"), through("mitmproxy"), "mitmproxy, bytes passed unopened", "higher")


def test_deny_p50(benchmark: Any, sides: Sides) -> None:
    def median(way: str, name: str) -> Callable[[], float]:
        return lambda: sides.wire.rate(way, 1, RATE_MS, name).p50

    compare(
        benchmark, median("ours", "denied"), median("ours", "byte"),
        "an allowed connection of ours", "lower", {"HAProxy": median("haproxy", "denied")},
    )  # fmt: skip
