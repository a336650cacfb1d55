"""The egress process: `python -I -m egress <mark> <build> <uid> <empty-root>`.

In: descriptor 3, a listening unix stream socket for the daemon; descriptor 4, a SEQPACKET socket to the resolver. The
mark says in a process list whose it is; the build is what `hello` answers with. Started as root, it imports all it
will ever need, gives its power up and serves until SIGTERM, or until the control socket's path has gone and nobody is
connected: then nobody can reach it any more.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Final

from egress import confine
from egress.ledger import Ledger
from egress.local import Local
from egress.log import Log
from egress.lookup import Lookups
from egress.loop import IN, OUT, Loop
from egress.proxy import Proxy
from egress.serve import Service
from native.relay import Relay

CONTROL_FD, RESOLVER_FD = 3, 4
_LOG_BYTES: Final = 16 << 20
_THREADS: Final = 2
_PAIRS_MOST: Final = 16_384
_FDS_A_PAIR: Final = 4  # two sockets, and a pipe now and then
_FDS_ASIDE: Final = 512
_TICK_S: Final = 0.25
_ORPHAN_S: Final = 5.0


class Egress:
    def __init__(self, build: str, uids: frozenset[int], control: socket.socket, path_fd: int, local: Local) -> None:
        self._log = Log()
        self._loop = Loop(self._log)
        self._path_fd = path_fd
        self._orphan_since: float | None = None
        self._ended = False
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        relay = Relay(_THREADS, max(64, min(_PAIRS_MOST, (files - _FDS_ASIDE) // _FDS_A_PAIR)))
        resolver = socket.socket(fileno=RESOLVER_FD)
        self._lookups = Lookups(resolver, self._resolver_blocks)
        self._ledger = Ledger()
        self._proxy = Proxy(self._loop, relay, self._lookups, local, self._ledger, self._log)
        self._service = Service(
            self._loop, control, uids, build, self._proxy, self._ledger, self._replace_resolver, self._log
        )
        self._loop.watch(resolver.fileno(), self._resolver_ready)
        self._resolver_there = True

    def end(self) -> None:
        self._ended = True

    def serve(self) -> None:
        ticked = 0.0
        while not self._ended:
            self._loop.turn(0 if self._proxy.busy else _TICK_S)
            self._proxy.work()
            now = time.monotonic()
            if now - ticked >= _TICK_S:
                ticked = now
                self._proxy.tick()
                if self._orphan(now):
                    return
            self._service.tell(time.time())

    def _orphan(self, now: float) -> bool:
        if self._service.connected or os.fstat(self._path_fd).st_nlink:
            self._orphan_since = None
            return False
        if self._orphan_since is None:
            self._orphan_since = now
        return now - self._orphan_since > _ORPHAN_S

    # The resolver's socket: read while it is there, written to when it was full

    def _resolver_ready(self) -> None:
        if not self._proxy.lookups_ready():
            # Names wait for the next one, until their deadline.
            self._log.line("the resolver has gone")
            self._resolver_there = False
            self._loop.forget(self._lookups.resolver.fileno())

    def _resolver_blocks(self, blocked: bool) -> None:
        if self._resolver_there:
            self._loop.change(self._lookups.resolver.fileno(), IN | OUT if blocked else IN)

    def _replace_resolver(self, resolver: socket.socket) -> None:
        if self._resolver_there:
            self._loop.forget(self._lookups.resolver.fileno())
        self._loop.watch(resolver.fileno(), self._resolver_ready)
        self._resolver_there = True
        self._lookups.replace(resolver)


def main(arguments: list[str]) -> int:
    _mark, build, uid, root = arguments
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # root may raise it, in most places
        files = max(files, _PAIRS_MOST * _FDS_A_PAIR + _FDS_ASIDE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LOG_BYTES, _LOG_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=CONTROL_FD)
    # The file that leads here, not the socket: its link count says whether it still does. Not by the socket's own
    # word, since a long path is bound through /proc.
    path_fd = os.open(os.path.join(os.path.dirname(root), "control.sock"), os.O_PATH | os.O_CLOEXEC)
    local = Local()
    uids = frozenset((0, os.getuid()))
    confine.egress(int(uid), [CONTROL_FD, RESOLVER_FD, path_fd, local.fileno()], root)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    egress = Egress(build, uids, control, path_fd, local)
    signal.signal(signal.SIGTERM, lambda *_: egress.end())
    egress.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
