"""A whole path without a virtual machine: guests in namespaces, the real rules, the confined processes, an origin.

    guest ── veth ── gate (a sandbox's namespace: the rules, our sockets)   host ── wire ── outside (every server)
                       └── descriptors ── egress, resolver: processes in the namespace of the host

The gate's end of the veth has the name of a tap, so the rules are those of a sandbox. The test is the daemon: it holds
the control socket, and reads the events.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import ssl
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dnslib import RCODE, DNSRecord

from egress import control, ruleset
from egress.control import Event, Inbox
from egress.plan import Plan
from egress.policy import Mode, Policy
from tests.world.hello import hello
from tests.world.spaces import Space, address, join
from tests.world.world import World

EGRESS_UID, RESOLVER_UID = 61_096, 61_097
BUILD = "a-build"
PLAN = Plan("nobody-has-it")


def policy(*allow: str, mode: Mode = Mode.ALLOWLIST, **lists: Sequence[str]) -> Policy:
    return Policy(mode, allow, **{key: tuple(value) for key, value in lists.items()})


class Rig:
    """egress and its resolver in the host's namespace, and a daemon's end of the control socket."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.directory = Path(tempfile.mkdtemp(prefix="egress-", dir="/tmp"))
        self.directory.chmod(0o711)
        (self.directory / "root").mkdir(mode=0o755)
        self.events: list[Event] = []
        self.sandboxes: dict[str, Sandbox] = {}
        self._pids: list[int] = []
        self._seq = self._made = 0
        self._path = self.directory / "control.sock"
        self.resolver = self.egress = 0
        self.start()

    # Processes

    def start(self) -> None:
        """A listening socket, both processes, and a connection to egress."""
        self._path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self._path))
            listener.listen(4)
            ours = self._start_resolver()
            argv = ["egress", "/sandboxd/test/egress/egress", BUILD, str(EGRESS_UID), str(self.directory / "root")]
            with ours:
                self.egress = self._spawn(argv, [listener.fileno(), ours.fileno()], "egress.log")
        self.connect()

    def _start_resolver(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = ["egress.resolver", "/sandboxd/test/egress/resolver", str(RESOLVER_UID)]
        with theirs:
            self.resolver = self._spawn(argv, [theirs.fileno()], "resolver.log")
        return ours

    def restart_resolver(self) -> None:
        self.end(self.resolver)
        with self._start_resolver() as ours:
            self.call("resolver", [ours.fileno()])

    def _spawn(self, arguments: list[str], fds: list[int], log: str) -> int:
        """`-m arguments` in the namespaces of the host, with `fds` as 3, 4, …"""
        command = [*self.world.host.prefix, sys.executable, "-I", "-m", *arguments]
        program = shutil.which(command[0])
        assert program is not None
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200) for fd in fds]
        output = os.open(self.directory / log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        silence = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            actions = [(os.POSIX_SPAWN_DUP2, silence, 0), (os.POSIX_SPAWN_DUP2, output, 1)]
            actions += [(os.POSIX_SPAWN_DUP2, output, 2)]
            actions += [(os.POSIX_SPAWN_DUP2, fd, 3 + place) for place, fd in enumerate(high)]
            pid = os.posix_spawn(program, command, {"PATH": os.environ["PATH"]}, file_actions=actions)
        finally:
            for fd in (*high, output, silence):
                os.close(fd)
        self._pids.append(pid)
        return pid

    def end(self, pid: int, how: signal.Signals = signal.SIGKILL) -> int:
        """Ends one of ours; its exit status as waitpid gives it."""
        os.kill(pid, how)
        self._pids.remove(pid)
        return os.waitpid(pid, 0)[1]

    def close(self) -> None:
        for sandbox in list(self.sandboxes.values()):
            sandbox.close()
        self._connection.close()
        for pid in list(self._pids):
            self.end(pid)
        shutil.rmtree(self.directory)

    @property
    def log(self) -> str:
        return (self.directory / "egress.log").read_text(errors="replace")

    # The daemon's end

    def connect(self) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(30)
        self._connection.connect(str(self._path))
        self._inbox = Inbox()
        self._lock = threading.Lock()
        self._seen = 0
        self.hello = self.call("hello")

    def call(self, do: str, fds: Sequence[int] = (), **fields: object) -> dict[str, Any]:
        with self._lock:
            self._seq += 1
            seq = self._seq
            control.send(self._connection, {"seq": seq, "do": do, **fields}, fds)
            while True:
                for answer in self._read():
                    if answer.get("seq") == seq:
                        if not answer.get("ok"):
                            raise RuntimeError(answer.get("error"))
                        return answer

    def _read(self) -> list[dict[str, Any]]:
        answers = []
        for frame in self._inbox.read(self._connection):
            if "event" in frame.body:
                event = Event.from_json(frame.body["event"])
                if event.number > self._seen:
                    self._seen = event.number
                    self.events.append(event)
            else:
                answers.append(frame.body)
        return answers

    def wait_event(self, fits: Callable[[Event], bool], timeout_s: float = 30.0) -> Event:
        """The latest event that fits; waits for one."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.call("ack", through=0)
            for event in reversed(self.events):
                if fits(event):
                    return event
            if time.monotonic() > deadline:
                raise AssertionError(f"no such event among {self.events}")
            time.sleep(0.02)

    def sandbox(self, rules: Policy, **limits: int) -> Sandbox:
        self._made += 1
        return Sandbox(self, f"sbx_{self._made:016x}", rules, limits)


class Sandbox:
    """A guest's namespace and its gate, known to egress."""

    def __init__(self, rig: Rig, id: str, rules: Policy, limits: dict[str, int]) -> None:
        self.rig, self.id, self.policy, self.limits = rig, id, rules, limits
        place = rig.directory / id
        place.mkdir()
        self.names = place / "names"
        self.gate = Space(place / "gate")
        self.guest = Space(place / "guest")
        join(self.gate, PLAN.interface, self.guest, "eth0")
        self.gate.run("ip", "link", "set", PLAN.interface, "address", PLAN.host_mac)
        self.guest.run("ip", "link", "set", "eth0", "address", PLAN.guest_mac)
        self.gate.run("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv4.ip_forward=0")
        self.gate.run("nft", "-f", "-", stdin=ruleset.text(PLAN, rules.mode))
        address(self.gate, PLAN.interface, [f"{PLAN.host_address}/{PLAN.prefix}"])
        neighbour = ("neigh", "add", PLAN.guest_address, "lladdr", PLAN.guest_mac, "dev", PLAN.interface)
        self.gate.run("ip", *neighbour, "nud", "permanent")
        address(self.guest, "eth0", [f"{PLAN.guest_address}/{PLAN.prefix}"])
        self.guest.run("ip", "route", "add", "default", "via", PLAN.host_address)
        rig.sandboxes[id] = self
        self.add()

    def add(self) -> None:
        sockets = self.gate.inside(_sockets)
        names = os.open(self.names, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fds = [*(each.fileno() for each in sockets), names]
            self.rig.call("add", fds, sandbox=self.id, policy=self.policy.as_json(), limits=self.limits)
        finally:
            os.close(names)
            for each in sockets:
                each.close()

    def update(self, rules: Policy) -> None:
        """As the daemon does it: what gets stricter first is the side that lets less through."""
        if rules.mode is not self.policy.mode:
            self.gate.run("nft", "-f", "-", stdin=ruleset.text(PLAN, rules.mode))
        self.rig.call("update", sandbox=self.id, policy=rules.as_json())
        self.policy = rules

    def report(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.rig.call("report", sandbox=self.id)["names"]
        return rows

    def close(self) -> None:
        with contextlib.suppress(RuntimeError, OSError, EOFError):
            self.rig.call("remove", sandbox=self.id)
        del self.rig.sandboxes[self.id]
        self.gate.close()
        self.guest.close()

    # What a guest does

    def dial(self, where: str, port: int, timeout_s: float = 10.0) -> socket.socket:
        """A connection from the guest to an address."""

        def make() -> socket.socket:
            made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            made.settimeout(timeout_s)
            try:
                made.connect((where, port))
            except BaseException:
                made.close()
                raise
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made

        return self.guest.inside(make)

    def datagrams(self) -> socket.socket:
        made = self.guest.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        made.settimeout(10)
        return made


def _sockets() -> tuple[socket.socket, socket.socket, socket.socket]:
    proxy, udp, tcp = (socket.socket(socket.AF_INET, kind) for kind in (1, 2, 1))
    for each, port in ((proxy, PLAN.proxy_port), (tcp, PLAN.dns_port)):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind((PLAN.host_address, port))
        each.listen(4096)
    udp.bind((PLAN.host_address, PLAN.dns_port))
    return proxy, udp, tcp


@contextlib.contextmanager
def open_rig(world: World) -> Iterator[Rig]:
    rig = Rig(world)
    try:
        yield rig
    finally:
        rig.close()


# What is said on a connection, and what came of it

ANYWHERE = "198.51.100.7"  # on 80 and 443 the name decides, whatever was dialled


def said(
    sandbox: Sandbox,
    data: bytes | Sequence[bytes],
    port: int = 443,
    where: str = ANYWHERE,
    pause_s: float = 0.0,
    enough: int = 6,
) -> bytes:
    """Sends (in these pieces), and reads until so many bytes have come or the other end is gone. b"" where it went
    without a word."""
    try:
        with sandbox.dial(where, port) as stream:
            for piece in [data] if isinstance(data, bytes) else data:
                stream.sendall(piece)
                if pause_s:
                    time.sleep(pause_s)
            return heard(stream, enough)
    except (ConnectionResetError, BrokenPipeError):
        return b""


def heard(stream: socket.socket, enough: int = 1) -> bytes:
    """What the other end says until it is gone or so many bytes have come. A silence is a failure."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while len(answer) < enough and (piece := stream.recv(65536)):
            answer += piece
    return answer


def until(stream: socket.socket, text: bytes) -> bytes:
    """What the other end says until this text has come."""
    answer = b""
    while text not in answer:
        piece = stream.recv(65536)
        assert piece, f"{text!r} did not come, but {answer[-500:]!r}"
        answer += piece
    return answer


def settle(done: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "it does not settle"
        time.sleep(0.05)


def idle(rig: Rig) -> None:
    """Waits until egress has no connection to the outside any more."""
    states = ("state", "connected", "exclude", "time-wait")
    settle(lambda: not rig.world.host.run("ss", "-Htn", *states).strip())


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_kb(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def passed(answer: bytes) -> bool:
    """Whether a TLS server answered a hello: a handshake record with its ServerHello."""
    return answer[:1] == b"\x16" and answer[5:6] == b"\x02"


def secure(sandbox: Sandbox, name: str, where: str = ANYWHERE) -> ssl.SSLSocket:
    """TLS to the origin as a client does it, certificate checked."""
    context = ssl.create_default_context(cafile=str(sandbox.rig.world.ca))
    return context.wrap_socket(sandbox.dial(where, 443), server_hostname=name)


def query(name: str | bytes, kind: int = 1, id: int = 7) -> bytes:
    """A DNS question, labels as given."""
    raw = name.encode() if isinstance(name, str) else name
    labels = b"".join(bytes([len(label)]) + label for label in raw.split(b"."))
    return struct.pack(">6H", id, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">2H", kind, 1)


def asked(sandbox: Sandbox, packet: bytes, where: str = PLAN.host_address) -> bytes:
    """The answer to a datagram sent to port 53."""
    with sandbox.datagrams() as stream:
        stream.sendto(packet, (where, 53))
        return stream.recv(4096)


def looked_up(sandbox: Sandbox, name: str) -> str:
    """The address a guest gets for a name, or the code of the answer."""
    answer = DNSRecord.parse(asked(sandbox, query(name)))
    if answer.rr:
        return str(answer.rr[0].rdata)
    return str(RCODE[answer.header.rcode])


def hello_passes(sandbox: Sandbox, name: str, where: str = ANYWHERE, port: int = 443) -> bool:
    return passed(said(sandbox, hello(name), port, where))
