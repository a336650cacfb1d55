"""The resolver process: names in, addresses out, by what this machine's own settings say about them.

Descriptor 3 is a SEQPACKET socket to `egress`. In: one datagram a request, `<id> <name>`. Out: one for each,
`<id> ok <address> <address>…` in the order of getaddrinfo, or `<id> no <reason>`, the reason being the name of
getaddrinfo's error. Ends when the peer closes. It never sees a byte of a guest but the name, checked here again.

It is a process of its own because getaddrinfo needs what `egress` gave up: /etc/hosts and resolv.conf, NSS
modules, sockets of the host. Nothing is remembered: one look-up runs for each name at a time, and who asks
meanwhile gets its answer. RFC 6724 (the order), RFC 3493 §6.1 (getaddrinfo).
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable

from egress import confine
from egress.policy import wire_name

EGRESS_FD = 3
# A name server that does not answer holds a thread for some ten seconds, and `egress` lets a sandbox hold a few.
THREADS = 64
WAITING = 1024  # names that wait for a thread
ASKERS = 4096  # requests without an answer yet
REQUEST_BYTES = 512
ADDRESSES = 16
_LOG_BYTES = 16 << 20

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_REASONS = {getattr(socket, name): name for name in dir(socket) if name.startswith("EAI_")}


class Resolver:
    """`look_up` is called with a name and returns the answer, without the id."""

    def __init__(self, egress: socket.socket, look_up: Callable[[bytes], bytes]) -> None:
        self._egress = egress
        self._look_up = look_up
        self._changed = threading.Condition()
        self._askers: dict[bytes, list[bytes]] = {}  # ids, by a name that waits or is looked up
        self._waiting: deque[bytes] = deque()
        self._unanswered = self._threads = self._idle = 0

    def serve(self) -> None:
        while request := self._receive():
            id_, _, name = request.partition(b" ")
            if _is_id(id_) and (refusal := self._take(id_, name)):
                self._answer([id_], refusal)

    def _receive(self) -> bytes:
        try:
            return self._egress.recv(REQUEST_BYTES)
        except ConnectionError:
            return b""  # closed before it had read all answers

    def _take(self, id_: bytes, name: bytes) -> bytes:
        if wire_name(name) != name.decode("ascii", "replace"):
            return b"no EAI_NONAME"
        with self._changed:
            askers = self._askers.get(name)
            if self._unanswered >= ASKERS or (askers is None and len(self._waiting) >= WAITING):
                return b"no EAI_AGAIN"
            self._unanswered += 1
            if askers is not None:
                askers.append(id_)
                return b""
            self._askers[name] = [id_]
            self._waiting.append(name)
            if len(self._waiting) > self._idle and self._threads < THREADS:
                self._threads += 1
                threading.Thread(target=self._work, daemon=True).start()
            self._changed.notify()
        return b""

    def _work(self) -> None:
        with self._changed:
            self._idle += 1
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                self._idle -= 1
                name = self._waiting.popleft()
            answer = self._look_up(name)
            with self._changed:
                askers = self._askers.pop(name)
                self._unanswered -= len(askers)
                self._idle += 1  # before the answer brings the next request
            self._answer(askers, answer)

    def _answer(self, askers: list[bytes], answer: bytes) -> None:
        for id_ in askers:
            try:
                self._egress.send(id_ + b" " + answer)
            except OSError:
                return  # the peer is gone, which `serve` sees too


def look_up(name: bytes) -> bytes:
    """Bytes, so that Python's idna codec, which is not there any more, is not asked."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as failed:
        return b"no " + _REASONS.get(failed.errno or 0, "EAI_FAIL").encode()
    except OSError:
        return b"no EAI_SYSTEM"
    addresses = [str(address[0]).partition("%")[0] for family, *_, address in found if family in _FAMILIES]
    return b"ok " + " ".join(addresses[:ADDRESSES]).encode() if addresses else b"no EAI_NODATA"


def _is_id(text: bytes) -> bool:
    return 0 < len(text) <= 20 and text.isdigit()


def main(arguments: list[str]) -> int:
    """`<mark> <uid>`: the mark says in a process list whose it is."""
    _mark, uid = arguments
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LOG_BYTES, _LOG_BYTES))
    # A name that was allowed is looked up as it stands, never with a domain of this host's search list behind it.
    os.environ["LOCALDOMAIN"] = "."
    confine.resolver(int(uid), [EGRESS_FD])
    Resolver(socket.socket(fileno=EGRESS_FD), look_up).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
