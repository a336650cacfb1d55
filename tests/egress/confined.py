"""What a process can do before and after it has given its power up.

    python -m tests.egress.confined egress|resolver <directory>           {attempt: [before, after]} as JSON, each
                                                                          "ok" or the name of the error
    python -m tests.egress.confined egress|resolver|nobody <directory> fatal   {call: exit status} of children, each of
                                                                          which makes one call that may end it

Nothing it tries is done to anything but itself and `directory`.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import select
import signal
import socket
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyseccomp import resolve_syscall

from egress import confine, control, dns
from egress.policy import Allow, Ask, By, Decider, Deny, Mode, Policy
from egress.tls import Hello, ServerName
from native import relay

UID = 3_070_002
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
ATTEMPTS: dict[str, Callable[[], object]] = {}


def attempt(call: Callable[[], object]) -> Callable[[], object]:
    ATTEMPTS[call.__name__.replace("_", " ")] = call
    return call


def call(name: str, *arguments: object) -> None:
    if libc.syscall(resolve_syscall(0, name), *arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


# Must go on working

made = Path(sys.argv[2])
names_file = os.open(made / "names", os.O_RDWR | os.O_APPEND | os.O_CREAT)
listener = socket.create_server(("127.0.0.1", 0))
here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(("127.0.0.1", 0))
relayed = socket.create_server(("127.0.0.1", 0))
relayed.setblocking(False)
origin = socket.create_server(("127.0.0.1", 0))
abstract = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
abstract.bind("")  # the kernel finds a name
KEPT = [names_file, *(kept.fileno() for kept in (listener, here, there, datagrams, relayed, origin, abstract))]


def client_hello(name: str) -> bytes:
    wire = ssl.MemoryBIO()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), wire, server_hostname=name)
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        return wire.read()
    raise AssertionError("a handshake with nobody")


HELLO = client_hello("allowed.test")
QUERY = b"\0\7\1\0\0\1\0\0\0\0\0\0\7aLLowed\4test\0\0\1\0\1"


def pair() -> tuple[socket.socket, socket.socket]:
    ours = socket.create_connection(listener.getsockname(), 5)
    theirs, _ = listener.accept()
    return ours, theirs


@attempt
def accept_connect_and_tune() -> None:
    ours, theirs = pair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 30)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            end.setblocking(False)
        ours.shutdown(socket.SHUT_WR)
        assert select.select([theirs], [], [], 5)[0] and theirs.recv(1) == b""


@attempt
def splice_through_a_large_pipe() -> None:
    ours, theirs = pair()
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    with ours, theirs:
        fcntl.fcntl(write, 1031, 1 << 17)  # F_SETPIPE_SZ
        ours.sendall(b"x" * 1000)
        assert os.splice(theirs.fileno(), write, 1000) == 1000
        assert os.splice(read, theirs.fileno(), 1000) == 1000
        assert ours.recv(1000, socket.MSG_WAITALL) == b"x" * 1000
    os.close(read)
    os.close(write)


@attempt
def wait_with_epoll_and_events() -> None:
    poller = select.epoll()
    event = os.eventfd(0, os.EFD_NONBLOCK)
    poller.register(event, select.EPOLLIN)
    os.eventfd_write(event, 1)
    assert poller.poll(5) == [(event, select.EPOLLIN)]
    poller.close()
    os.close(event)


@attempt
def threads_that_come_and_go() -> None:
    threads = [threading.Thread(target=time.sleep, args=(0.01,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@attempt
def memory_in_large_pieces() -> None:
    assert len(bytearray(64 << 20)) == 64 << 20


@attempt
def append_to_the_names_file() -> None:
    os.write(names_file, b"a.test 198.18.0.1\n")
    os.lseek(names_file, 0, os.SEEK_SET)
    assert b"198.18" in os.read(names_file, 1000)


@attempt
def descriptors_over_a_socket() -> None:
    read, write = os.pipe()
    here.sendmsg([b"fds"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [read, write]))])
    data, ancillary, _, _ = there.recvmsg(10, 100)
    assert data == b"fds" and len(ancillary) == 1
    for fd in (read, write, *array.array("i", ancillary[0][2])):
        os.close(fd)


@attempt
def datagrams_both_ways() -> None:
    datagrams.sendto(b"q", datagrams.getsockname())
    assert datagrams.recvfrom(10)[0] == b"q"


@attempt
def a_signal_handler() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@attempt
def random_bytes_and_clocks() -> None:
    assert len(os.urandom(16)) == 16 and time.time() and time.monotonic()


@attempt
def an_error_with_its_trace() -> None:
    try:
        raise KeyError("x")
    except KeyError:
        assert "KeyError" in traceback.format_exc()


@attempt
def decide_by_a_client_hello() -> None:
    name = Hello().feed(HELLO)
    assert name == ServerName("allowed.test")
    decider = Decider(Policy(Mode.ALLOWLIST, allow=("allowed.test",)))
    assert isinstance(decider.decide(Ask(name.name, 443, By.TLS)), Allow)
    assert isinstance(decider.decide(Ask("other.test", 443, By.TLS)), Deny)


@attempt
def answer_a_query() -> None:
    question = dns.read(QUERY)
    assert isinstance(question, dns.Question) and question.name == "allowed.test"
    assert dns.write(question, dns.Address("198.18.0.1"))[12:30] == QUERY[12:30]


@attempt
def speak_with_the_daemon() -> None:
    control.send(here, {"seq": 1, "hello": {}}, [names_file])
    (frame,) = control.Inbox().read(there)
    for fd in frame.fds:
        os.close(fd)


@attempt
def relay_a_connection() -> None:
    running = relay.Relay(1, 16)
    try:
        running.listen(1, relayed.fileno(), relay.Limits())
        with socket.create_connection(relayed.getsockname(), 5) as guest:
            pair_ = wait_for(running, relay.Accepted).pair
            running.open(pair_, [origin.getsockname()], b"first ", relay.FREE, relay.FREE)
            wait_for(running, relay.Opened)
            with origin.accept()[0] as upstream:
                guest.sendall(b"up")
                assert upstream.recv(8, socket.MSG_WAITALL) == b"first up"
                upstream.sendall(b"x" * 300_000)
                with guest.makefile("rb") as reader:
                    assert len(reader.read(300_000)) == 300_000
        assert wait_for(running, relay.Closed).pair == pair_
    finally:
        running.stop()


def wait_for(running: relay.Relay, kind: type[Any]) -> Any:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        select.select([running.fd], [], [], 1)
        for event in running.take():
            if isinstance(event, kind):
                return event
    raise AssertionError(f"no {kind.__name__}")


# Must not


@attempt
def read_a_file() -> None:
    Path("/etc/hosts").read_bytes()


@attempt
def read_a_file_of_root() -> None:
    Path("/etc/shadow").read_bytes()


@attempt
def read_pythons_own_tree() -> None:
    Path(os.__file__).read_bytes()


@attempt
def list_the_root() -> None:
    assert os.listdir("/")


@attempt
def write_a_file() -> None:
    path = Path("/tmp", f"confined-{os.getpid()}")
    path.write_bytes(b"x")
    path.unlink()


@attempt
def start_a_process() -> None:
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)


@attempt
def become_root() -> None:
    os.setresuid(0, 0, 0)


@attempt
def signal_another_process() -> None:
    os.kill(1, 0)


@attempt
def thread_signal_to_another_process() -> None:
    call("tgkill", 1, 1, 0)


@attempt
def listen_on_a_port() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()


@attempt
def datagrams_to_an_abstract_socket() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with one, other:
        one.connect(abstract.getsockname())
        one.send(b"x")


@attempt
def memory_that_runs() -> None:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()


@attempt
def memory_made_to_run() -> None:
    page = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    call("mprotect", ctypes.c_void_p(address), ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_EXEC)


def a_socket(*what: int) -> Callable[[], None]:
    return lambda: socket.socket(*what).close()


for name, what in {
    "TCP": (socket.AF_INET, socket.SOCK_STREAM, 0),
    "TCP over IPv6": (socket.AF_INET6, socket.SOCK_STREAM, 0),
    "UDP": (socket.AF_INET, socket.SOCK_DGRAM, 0),
    "raw": (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
    "packet": (17, socket.SOCK_RAW, 0),
    "vsock": (40, socket.SOCK_STREAM, 0),
    "unix": (socket.AF_UNIX, socket.SOCK_STREAM, 0),
    "route": (16, socket.SOCK_RAW, 0),
    "netfilter": (16, socket.SOCK_RAW, 12),
    "alg": (38, socket.SOCK_SEQPACKET, 0),
}.items():
    ATTEMPTS[f"a socket: {name}"] = a_socket(*what)


@attempt
def attach_a_filter_to_a_socket() -> None:
    program = ctypes.create_string_buffer(b"\x06\0\0\0\0\0\0\0", 8)  # return 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.setsockopt(socket.SOL_SOCKET, 26, b"\1" + bytes(7) + ctypes.addressof(program).to_bytes(8, "little"))


@attempt
def set_a_limit() -> None:
    limits = (ctypes.c_ulong * 2)(*resource.getrlimit(resource.RLIMIT_CPU))
    call("prlimit64", 0, resource.RLIMIT_CPU, limits, None)


@attempt
def an_unlisted_system_call() -> None:
    call("memfd_create", b"x", 0)


# With these the process does not come back

FATAL: dict[str, Callable[[], object]] = {
    "execve": lambda: call("execve", None, None, None),
    "unshare": lambda: call("unshare", 0),
    "setns": lambda: call("setns", -1, 0),
    "mount": lambda: call("mount", None, None, None, 0, None),
    "ptrace": lambda: call("ptrace", 0, 0, 0, 0),
    "bpf": lambda: call("bpf", -1, None, 0),
    "io_uring_setup": lambda: call("io_uring_setup", 0, None),
    "x32": lambda: libc.syscall(0x40000000 + resolve_syscall(0, "getpid")),
}


def thirty_two_bit() -> None:
    """getpid the 32-bit way, in memory that was made to run while that was allowed: mov eax, 20; int 0x80; ret."""
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\xb8\x14\0\0\0\xcd\x80\xc3")
    FATAL["int 0x80"] = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))


def outcome(attempted: Callable[[], object]) -> str:
    try:
        attempted()
    except OSError as failed:
        return errno.errorcode.get(failed.errno or 0, repr(failed))
    except AssertionError as failed:
        return f"wrong: {failed}"
    return "ok"


def give_up(kind: str) -> None:
    if kind == "egress":
        root = made / "root"
        root.mkdir(mode=0o555, exist_ok=True)
        confine.egress(UID, KEPT, str(root))
    if kind == "resolver":
        confine.resolver(UID, KEPT)


def fate(kind: str, attempted: Callable[[], object]) -> int:
    if (pid := os.fork()) == 0:
        try:
            give_up(kind)
        except confine.NotConfined:
            os._exit(1)
        outcome(attempted)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(kind: str, fatal: str = "") -> None:
    if fatal:
        thirty_two_bit()
        print(json.dumps({name: fate(kind, attempted) for name, attempted in FATAL.items()}))
        return
    if kind == "resolver":
        del ATTEMPTS["relay a connection"]  # it would wait for what cannot come
    before = {name: outcome(attempted) for name, attempted in ATTEMPTS.items()}
    give_up(kind)
    print(json.dumps({name: [before[name], outcome(attempted)] for name, attempted in ATTEMPTS.items()}))


if __name__ == "__main__":
    main(sys.argv[1], *sys.argv[3:])
