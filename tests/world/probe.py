"""Runs inside a guest: network actions, told in JSON as the argument or on standard input, their outcomes as JSON.

Standard library only, and nothing of this project: it is copied into the guest as it is. Times are in milliseconds.
An outcome has `end`: `data` (something came), `reset`, `eof`, `timeout`, or the name of the errno; and what came.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import select
import socket
import sys
import time
from typing import Any


def stream(ask: dict[str, Any]) -> dict[str, Any]:
    """Connects to `to`, sends `pieces` with `pause_ms` between them and reads until the end, or `wait_s` of silence.

    A piece may be a mapping {"after": text}: what was received must hold the text before the next piece is sent.
    """
    started = time.monotonic()
    came = b""
    sock = socket.socket(socket.AF_INET6 if ":" in ask["to"][0] else socket.AF_INET)
    sock.settimeout(ask.get("wait_s", 5))
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if "from" in ask:
            sock.bind(("", ask["from"]))
        sock.connect(tuple(ask["to"]))
        connected = time.monotonic()
        for piece in ask.get("pieces", []):
            if isinstance(piece, dict):
                while piece["after"].encode() not in came:
                    got = sock.recv(65536)
                    if not got:
                        return _told("eof", started, came)
                    came += got
            else:
                sock.sendall(base64.b64decode(piece))
                time.sleep(ask.get("pause_ms", 0) / 1000)
        if ask.get("finish"):
            sock.shutdown(socket.SHUT_WR)
        while len(came) < ask.get("enough", 1 << 20):
            got = sock.recv(65536)
            if not got:
                return _told("data" if came else "eof", started, came, connect_ms=(connected - started) * 1e3)
            came += got
        return _told("data", started, came)
    except OSError as fault:
        return _told("data" if came and isinstance(fault, TimeoutError) else _name(fault), started, came)
    finally:
        sock.close()


def datagram(ask: dict[str, Any]) -> dict[str, Any]:
    """Sends one datagram from a connected socket and waits for an answer or an error."""
    started = time.monotonic()
    sock = socket.socket(socket.AF_INET6 if ":" in ask["to"][0] else socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(ask.get("wait_s", 2))
    try:
        sock.connect(tuple(ask["to"]))
        sock.send(base64.b64decode(ask["data"]))
        return _told("data", started, sock.recv(65536))
    except OSError as fault:
        return _told(_name(fault), started, b"")
    finally:
        sock.close()


def ping(ask: dict[str, Any]) -> dict[str, Any]:
    """An echo request from an unprivileged ICMP socket, where the kernel gives one."""
    started = time.monotonic()
    try:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
        sock.settimeout(ask.get("wait_s", 2))
        sock.connect((ask["to"][0], 0))
        sock.send(b"\x08\x00\x00\x00\x00\x00\x00\x01probe")
        return _told("data", started, sock.recv(1024))
    except OSError as fault:
        return _told(_name(fault), started, b"")


def resolve(ask: dict[str, Any]) -> dict[str, Any]:
    """getaddrinfo, as every ordinary program does it."""
    started = time.monotonic()
    try:
        found = socket.getaddrinfo(ask["name"], 443, type=socket.SOCK_STREAM)
    except OSError as fault:
        return _told("gaierror", started, str(fault).encode())
    return _told("data", started, "\n".join(sorted({str(entry[4][0]) for entry in found})).encode())


def many(ask: dict[str, Any]) -> dict[str, Any]:
    """Opens `count` connections to `to` and keeps them silent for `hold_s`; how many were taken, refused, neither."""
    started = time.monotonic()
    ends = {"open": 0, "failed": 0, "closed": 0, "pending": 0}
    socks: dict[int, socket.socket] = {}
    poller = select.poll()
    for _ in range(ask["count"]):
        try:
            sock = socket.socket()
        except OSError:
            break
        sock.setblocking(False)
        sock.connect_ex(tuple(ask["to"]))
        poller.register(sock, select.POLLOUT)
        socks[sock.fileno()] = sock
    state = dict.fromkeys(socks, "pending")
    deadline = time.monotonic() + ask.get("hold_s", 5)
    while time.monotonic() < deadline:
        for fd, _ in poller.poll(100):
            if state[fd] == "pending":
                failed = socks[fd].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                state[fd] = "failed" if failed else "open"
                if failed:
                    poller.unregister(fd)
                else:
                    poller.modify(fd, select.POLLIN)
            else:
                state[fd] = "closed"
                poller.unregister(fd)
        if not ask.get("until_s") and all(each != "pending" for each in state.values()):
            break
    for each in state.values():
        ends[each] += 1
    return _told("done", started, json.dumps(ends).encode(), tried=len(socks))


def insist(ask: dict[str, Any]) -> dict[str, Any]:
    """Dials the forbidden again and again, and fetches the allowed between, until `stop` exists or `for_s` is over.

    `forbidden` are [kind, address, port, piece] rows; whatever answers to one of them is a breach.
    """
    started = time.monotonic()
    tally = {"tries": 0, "breaches": 0, "fetched": 0, "failed": 0}
    gap = time.monotonic()
    worst = 0.0
    while time.monotonic() - started < ask["for_s"] and not os.path.exists(ask.get("stop", "/nonexistent")):
        for address, port, piece in ask["forbidden"]:
            time.sleep(0.005)
            told = stream({"to": [address, port], "pieces": [piece] if piece else [], "wait_s": 1, "enough": 1})
            tally["tries"] += 1
            # Our own refusal in words is an answer too, and not a breach.
            tally["breaches"] += told["end"] == "data" and b"blocked by sandbox policy" not in _bytes(told)
        for address, port, piece, word in ask.get("allowed", []):
            told = stream({"to": [address, port], "pieces": [piece], "wait_s": 2, "finish": False, "enough": 16})
            good = told["end"] == "data" and word.encode() in _bytes(told)
            tally["fetched" if good else "failed"] += 1
            if good:
                worst = max(worst, time.monotonic() - gap)
                gap = time.monotonic()
    return _told("done", started, json.dumps(tally | {"worst_gap_s": worst}).encode())


def interfaces(ask: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    with open("/proc/net/if_inet6") if os.path.exists("/proc/net/if_inet6") else open(os.devnull) as file:
        six = file.read()
    with open("/etc/resolv.conf") as file:
        resolver = file.read()
    names = sorted(name for _, name in socket.if_nameindex())
    return _told("done", started, json.dumps({"names": names, "six": six, "resolver": resolver}).encode())


def _bytes(told: dict[str, Any]) -> bytes:
    return base64.b64decode(told["came"])


def _name(fault: OSError) -> str:
    if isinstance(fault, TimeoutError):
        return "timeout"
    if isinstance(fault, ConnectionResetError):
        return "reset"
    return errno.errorcode.get(fault.errno or 0, type(fault).__name__)


def _told(end: str, started: float, came: bytes, **more: object) -> dict[str, Any]:
    text = base64.b64encode(came[:65536]).decode()
    return {"end": end, "ms": (time.monotonic() - started) * 1e3, "came": text, "bytes": len(came)} | more


VERBS = {each.__name__: each for each in (stream, datagram, ping, resolve, many, insist, interfaces)}

if __name__ == "__main__":
    asked = json.loads(sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read())
    print(json.dumps([VERBS[each["do"]](each) for each in asked]))
