"""What doctor's trial machine tries. This file is read as text and runs inside it: the standard library only.

    python3 -I -c SOURCE leave  JSON     tries to leave the sandbox in each way and prints what became of it
    python3 -I -c SOURCE listen PORT     counts who comes, until its stdin ends; "ready" once it listens

In: names and addresses. Out: one JSON object, {check: [outcome, how]}: "open" (it led somewhere), "refused" (at
once, and by something that said no) or "silent" (nobody said anything). What of it is right is not decided here.
"""

from __future__ import annotations

import json
import os
import select
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable
from functools import partial

PATIENCE_S = 5.0
BLOCKED = b"blocked by sandbox policy"
A, TXT = 1, 16  # RFC 1035 §3.2.2

Outcome = tuple[str, str]


def judged(act: Callable[[], str]) -> Outcome:
    """`act` says how it got somewhere, or fails."""
    try:
        return "open", act()
    except TimeoutError:
        return "silent", "no answer"
    except OSError as fault:  # socket.gaierror and ssl.SSLError are such
        return "refused", (fault.strerror or str(fault)).lower()


def worst(outcomes: list[Outcome]) -> Outcome:
    """Of several ways to the same thing, the one that led furthest."""
    return min(outcomes, key=lambda outcome: ("open", "silent", "refused").index(outcome[0]))


def https(address: str, name: str | None, port: int = 443) -> str:
    """Only whether a handshake comes about: whose certificate it is does not matter here."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection((address, port)) as sock, context.wrap_socket(sock, server_hostname=name):
        return f"a TLS handshake as {name or address}"


def http(address: str, host: str, port: int = 80) -> str:
    with socket.create_connection((address, port)) as sock:
        sock.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while len(answer) < 4096 and (piece := sock.recv(4096)):
            answer += piece
    if BLOCKED in answer:
        raise ConnectionRefusedError(0, "HTTP 403 that says why")
    if not answer.startswith(b"HTTP/1."):
        raise ConnectionResetError(0, "closed without an answer")
    return answer.split(b"\r\n")[0].decode(errors="replace")


def connect(address: str, port: int) -> str:
    socket.create_connection((address, port)).close()
    return f"a connection to port {port}"


def resolved(name: str) -> str:
    return str(socket.getaddrinfo(name, 443, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])


def query(name: str, kind: int) -> bytes:
    """RFC 1035 §4.1; recursion desired."""
    labels = b"".join(bytes([len(label)]) + label for label in name.encode().split(b"."))
    return struct.pack(">6H", 0x5362, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">2H", kind, 1)


def asked(resolver: str, name: str, kind: int, *, tcp: bool, port: int = 53) -> str:
    """What an outside resolver seems to say; an answer that holds nothing counts as a refusal."""
    packet = query(name, kind)
    if tcp:
        with socket.create_connection((resolver, port)) as sock:
            sock.sendall(struct.pack(">H", len(packet)) + packet)
            answer = sock.makefile("rb").read(2 + 12)[2:]
    else:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((resolver, port))
            sock.send(packet)
            answer = sock.recv(4096)
    if len(answer) < 12:
        raise ConnectionResetError(0, "closed without an answer")
    _, flags, _, answers, _, _ = struct.unpack_from(">6H", answer)
    if not answers:
        raise ConnectionRefusedError(0, {3: "no such name", 5: "refused"}.get(flags & 15, "an empty answer"))
    return f"an answer for {name}"


def datagram(address: str, port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((address, port))
        sock.send(bytes(1200))
        sock.recv(2048)
    return f"an answer from port {port}"


def leave(plan: dict[str, str]) -> dict[str, Outcome]:
    """`allowed` and its `port` may be missing; the rest is there: `denied`, `address`, `resolver`, `neighbour` (the
    port another sandbox listens on)."""
    denied, address, resolver = plan["denied"], plan["address"], plan["resolver"]
    found: dict[str, Outcome] = {}
    ways = [judged(lambda: f"{denied} is {resolved(denied)}")]
    if allowed := plan.get("allowed"):
        began = time.monotonic()
        visit: Callable[[str, str], str] = https if plan["port"] == "443" else http
        way, how = judged(lambda: visit(resolved(allowed), allowed))
        found["allowed name"] = way, f"{how}, {time.monotonic() - began:.2f} s"
        if way == "open":
            # Its own address is a way to the proxy, where the name on the wire decides.
            ways += [judged(lambda: https(resolved(allowed), denied)), judged(lambda: http(resolved(allowed), denied))]
    found["denied name"] = worst(ways)
    found["raw address"] = worst(
        [
            judged(lambda: https(address, None)),
            judged(lambda: http(address, address)),
            judged(lambda: connect(address, 22)),
        ]
    )
    found["outside DNS"] = worst(
        [
            judged(lambda: asked(resolver, denied, A, tcp=False)),
            judged(lambda: asked(resolver, f"some.secret.{denied}", TXT, tcp=False)),
            judged(lambda: asked(resolver, denied, A, tcp=True)),
        ]
    )
    found["UDP/443"] = judged(lambda: datagram(address, 443))
    port = int(plan["neighbour"])
    for near in around():
        judged(partial(connect, near, port))
        judged(partial(shout, near, port))
    return found


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing; RFC 5737's address is nobody's
        except OSError:
            return "127.0.0.1"
        return str(sock.getsockname()[0])


def around() -> list[str]:
    """Where a neighbour might be: the addresses beside our own, and those that stand for everybody."""
    own = int.from_bytes(socket.inet_aton(own_address()), "big")
    beside = [socket.inet_ntoa((own + step).to_bytes(4, "big")) for step in range(-3, 4)]
    return [*beside, "255.255.255.255", "224.0.0.1"]


def shout(address: str, port: int) -> str:
    """A datagram that nobody need answer, to a broadcast address too."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sock.sendto(b"anybody?", (address, port))
    return "sent"


def listen(port: int) -> dict[str, Outcome]:
    """Whoever comes, but for the one connection this makes itself, to show that it would be seen."""
    came = 0
    with socket.create_server(("", port)) as server, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(("", port))
        connect(own_address(), port)
        server.accept()[0].close()
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([server.fileno(), datagrams.fileno(), 0], [], [])
            if server.fileno() in ready:
                server.accept()[0].close()
                came += 1
            elif datagrams.fileno() in ready:
                datagrams.recv(2048)
                came += 1
            elif not os.read(0, 4096):
                break
    said = f"{came} came that should not" if came else "nobody came"
    return {"another sandbox": ("open" if came else "refused", said)}


if __name__ == "__main__":
    socket.setdefaulttimeout(PATIENCE_S)
    print(json.dumps(leave(json.loads(sys.argv[2])) if sys.argv[1] == "leave" else listen(int(sys.argv[2]))))
