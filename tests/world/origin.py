"""The servers of the tests' world: HTTP and HTTPS by name, a name server whose answers change, sinks that only record.

Their sockets are made in the origin's namespace; they are served by threads of the test. Everything that arrives is
written down, since most tests ask whether something arrived at all.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dnslib import AAAA, QTYPE, RCODE, RR, SOA, A, DNSRecord

from tests.world.spaces import Space


class Visit(NamedTuple):
    """One request, or one connection of a sink."""

    address: str        # the address of ours it came to
    port: int
    sni: str
    host: str
    line: str


class Query(NamedTuple):
    name: str
    type: str
    tcp: bool


@dataclass
class Ledger:
    """What has arrived, for all servers of one origin."""

    visits: list[Visit] = field(default_factory=list)
    queries: list[Query] = field(default_factory=list)

    def clear(self) -> None:
        self.visits.clear()
        self.queries.clear()


Answer = Callable[["Request"], tuple[int, dict[str, str], bytes] | None]


class Request(NamedTuple):
    method: str
    path: str
    host: str
    headers: dict[str, str]
    body: bytes
    stream: socket.socket


class Names:
    """The world's names: what the name server answers now. A name without an entry does not exist."""

    def __init__(self, entries: dict[str, list[str]]) -> None:
        self._entries = dict(entries)
        self._lock = threading.Lock()

    def set(self, name: str, *addresses: str) -> None:
        with self._lock:
            self._entries[name] = list(addresses)

    def drop(self, name: str) -> None:
        with self._lock:
            self._entries.pop(name, None)

    def get(self, name: str) -> list[str] | None:
        with self._lock:
            return self._entries.get(name)


class Origin:
    """All servers of one namespace; `close` ends them."""

    def __init__(self, space: Space, addresses: Sequence[str], names: Names, chain: Path) -> None:
        self.space, self.names, self.ledger = space, names, Ledger()
        self._addresses = addresses
        self.answers: dict[str, Answer] = {}        # by host name; others get `hello`
        self._closing = False
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(chain)
        self._tls.set_alpn_protocols(["http/1.1"])
        self._tls.sni_callback = lambda stream, name, _: setattr(stream, "asked", name or "")

    def close(self) -> None:
        self._closing = True
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(5)

    # Names

    def serve_names(self, port: int = 53) -> None:
        tcp = self._listener(port)
        self._datagrams(port, lambda packet: self._resolve(packet, tcp=False))
        self._thread(lambda: self._accept(tcp, self._name_stream))

    def _name_stream(self, stream: socket.socket) -> None:
        with stream:
            while size := _exactly(stream, 2):
                answer = self._resolve(_exactly(stream, int.from_bytes(size, "big")), tcp=True)
                stream.sendall(len(answer).to_bytes(2, "big") + answer)

    def _resolve(self, packet: bytes, tcp: bool) -> bytes:
        query = DNSRecord.parse(packet)
        name, kind = str(query.q.qname).rstrip(".").lower(), str(QTYPE[query.q.qtype])
        self.ledger.queries.append(Query(name, kind, tcp))
        addresses = self.names.get(name)
        reply = query.reply()
        if addresses is None:
            reply.header.rcode = RCODE.NXDOMAIN
            reply.add_auth(RR(query.q.qname, QTYPE.SOA, ttl=0, rdata=SOA(times=(0, 0, 0, 0, 0))))
        for each in addresses or []:
            if ":" in each and kind == "AAAA":
                number = tuple(socket.inet_pton(socket.AF_INET6, each))     # dnslib reads no mapped address
                reply.add_answer(RR(query.q.qname, QTYPE.AAAA, ttl=0, rdata=AAAA(number)))
            elif ":" not in each and kind == "A":
                reply.add_answer(RR(query.q.qname, QTYPE.A, ttl=0, rdata=A(each)))
        return bytes(reply.pack())

    # HTTP

    def serve_http(self, port: int, tls: bool) -> None:
        listener = self._listener(port)
        self._thread(lambda: self._accept(listener, lambda stream: self._requests(stream, tls)))

    def _requests(self, raw: socket.socket, tls: bool) -> None:
        here, port = _own(raw), raw.getsockname()[1]
        with raw:
            stream = self._tls.wrap_socket(raw, server_side=True) if tls else raw
            sni = getattr(stream, "asked", "")
            with stream:
                left = b""
                while (read := _request(stream, left)) is not None:
                    request, left = read
                    self.ledger.visits.append(
                        Visit(here, port, sni, request.host, f"{request.method} {request.path}")
                    )
                    answer = self.answers.get(request.host.partition(":")[0].lower(), hello)(request)
                    if answer is None:
                        return
                    status, headers, body = answer
                    headers = {"Content-Length": str(len(body))} | headers
                    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                    stream.sendall(f"HTTP/1.1 {status} -\r\n{head}\r\n".encode())
                    if request.method != "HEAD":
                        stream.sendall(body)
                    if request.headers.get("connection", "").lower() == "close":
                        return

    # Sinks

    def serve_sink(self, port: int, greeting: bytes = b"sink\n") -> None:
        """Takes connections and datagrams on a port and says `greeting`; the visit is what is remembered."""
        listener = self._listener(port)

        def greet(stream: socket.socket) -> None:
            with stream:
                self.ledger.visits.append(Visit(_own(stream), port, "", "", "tcp"))
                stream.sendall(greeting)
                stream.settimeout(5)
                while stream.recv(65536):
                    pass

        def note(_: bytes) -> bytes:
            self.ledger.visits.append(Visit("", port, "", "", "udp"))
            return greeting

        self._thread(lambda: self._accept(listener, greet))
        self._datagrams(port, note)

    # Threads and sockets

    def _datagrams(self, port: int, answer: Callable[[bytes], bytes]) -> None:
        """A socket for each address, so that an answer comes from where the question went."""
        sockets = [self.space.inside(lambda a=each: _datagram(a, port)) for each in self._addresses]  # type: ignore[misc]
        self._sockets += sockets

        def serve() -> None:
            while not self._closing:
                try:
                    for ready in select.select(sockets, [], [], 0.2)[0]:
                        packet, peer = ready.recvfrom(65536)
                        ready.sendto(answer(packet), peer)
                except Exception:   # rubbish is for the product to meet, not for this server to report
                    if self._closing:
                        return

        self._thread(serve)

    def _listener(self, port: int) -> socket.socket:
        listener = self.space.inside(lambda: _listening(port))
        listener.settimeout(0.2)
        self._sockets.append(listener)
        return listener

    def _accept(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        while not self._closing:
            try:
                stream, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            stream.settimeout(60)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def one(stream: socket.socket = stream) -> None:
                # A peer that goes away in the middle is what many tests are about.
                with contextlib.suppress(OSError, ValueError):
                    serve(stream)
                stream.close()

            threading.Thread(target=one, daemon=True).start()

    def _thread(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)


def hello(request: Request) -> tuple[int, dict[str, str], bytes]:
    """What a host without an answer of its own says: its name, and as many bytes as `/bytes/N` asks for."""
    if request.path.startswith("/bytes/"):
        return 200, {}, b"x" * int(request.path.rpartition("/")[2])
    return 200, {"Content-Type": "text/plain"}, f"hello from {request.host}\n".encode()


def tree(top: Path) -> Answer:
    """Serves the files below `top`; a directory is its `index.html`."""

    def answer(request: Request) -> tuple[int, dict[str, str], bytes]:
        path = (top / request.path.partition("?")[0].lstrip("/")).resolve()
        if path.is_dir():
            path /= "index.html"
        if not path.is_relative_to(top.resolve()) or not path.is_file():
            return 404, {}, b"not here\n"
        kinds = {".json": "application/json", ".html": "text/html"}
        return 200, {"Content-Type": kinds.get(path.suffix, "application/octet-stream")}, path.read_bytes()

    return answer


def git(top: Path) -> Answer:
    """The repositories below `top`, by git's own `http-backend` (CGI, RFC 3875)."""

    def answer(request: Request) -> tuple[int, dict[str, str], bytes]:
        path, _, query = request.path.partition("?")
        environment = {
            "PATH": os.environ["PATH"], "GIT_PROJECT_ROOT": str(top), "GIT_HTTP_EXPORT_ALL": "1", "PATH_INFO": path,
            "QUERY_STRING": query, "REQUEST_METHOD": request.method, "GIT_CONFIG_GLOBAL": "/dev/null",
            "CONTENT_TYPE": request.headers.get("content-type", ""), "CONTENT_LENGTH": str(len(request.body)),
            "HTTP_GIT_PROTOCOL": request.headers.get("git-protocol", ""),
            "HTTP_CONTENT_ENCODING": request.headers.get("content-encoding", ""),
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
        }  # fmt: skip
        done = subprocess.run(
            ["git", "http-backend"], env=environment, input=request.body, capture_output=True, timeout=60, check=True
        )
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        status = int(headers.pop("Status", "200").split()[0])
        return status, headers, body

    return answer


def drip(pause_s: float, times: int) -> Answer:
    """An answer that comes in pieces with a pause before each, until the connection ends."""

    def answer(request: Request) -> None:
        request.stream.sendall(b"HTTP/1.1 200 -\r\nConnection: close\r\n\r\n")
        for number in range(times):
            time.sleep(pause_s)
            request.stream.sendall(f"{number}\n".encode())

    return answer


def _request(stream: socket.socket, left: bytes) -> tuple[Request, bytes] | None:
    data = left
    while b"\r\n\r\n" not in data:
        piece = stream.recv(65536)
        if not piece or len(data) > 1 << 20:
            return None
        data += piece
    head, _, data = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("expect", "").lower() == "100-continue":
        stream.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    if "chunked" in headers.get("transfer-encoding", ""):
        body, data = _chunks(stream, data)
    else:
        size = int(headers.get("content-length", "0"))
        while len(data) < size:
            data += stream.recv(65536) or _gone()
        body, data = data[:size], data[size:]
    return Request(method, path, headers.get("host", ""), headers, body, stream), data


def _chunks(stream: socket.socket, data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        while b"\r\n" not in data:
            data += stream.recv(65536) or _gone()
        line, _, data = data.partition(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        while len(data) < size + 2:
            data += stream.recv(65536) or _gone()
        body, data = body + data[:size], data[size + 2 :]
        if size == 0:
            return body, data


def _gone() -> bytes:
    raise ConnectionError("the peer went away in the middle")


def _exactly(stream: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = stream.recv(size - len(data))
        if not piece:
            return b""
        data += piece
    return data


def _listening(port: int) -> socket.socket:
    made = socket.create_server(("::", port), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True)
    made.setblocking(False)
    return made


def _datagram(address: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((address, port))
    return made


def _own(stream: socket.socket) -> str:
    return str(stream.getsockname()[0]).removeprefix("::ffff:")


@contextlib.contextmanager
def quiet(origin: Origin) -> Iterator[Ledger]:
    """The ledger of what arrives within the block."""
    origin.ledger.clear()
    yield origin.ledger
