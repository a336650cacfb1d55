"""A daemon with two hundred sandboxes' worth of records, and guests that talk without pause."""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandboxd.lifecycle import State
from sandboxd.store import Network, SandboxRecord, Store
from tests import load
from tests.sandboxd.rig import Rig

RECORDS = 200
CLIENTS, PER_SECOND = 32, 1000
ATTACHES, TUNNELS = 64, 16

TALKER = "import time\nn = 0\nwhile True:\n n += 1\n print(n, 'x' * 100, flush=True)\n time.sleep(0.2)"
ECHO = """
import socket, threading
def serve(sock):
    while data := sock.recv(65536):
        sock.sendall(data)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


@dataclass(frozen=True)
class Loaded:
    """`talkers` and `echo` are the words of the loads on it."""

    rig: Rig
    talkers: list[str]
    echo: list[str]

    def figures(self, seconds: float) -> load.Figures:
        return load.measured(self.rig.socket, clients=CLIENTS, per_second=PER_SECOND, seconds=seconds)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        with load.busy(self.rig.socket, self.talkers, self.echo):
            yield


@contextlib.contextmanager
def loaded(place: Path) -> Iterator[Loaded]:
    state = place / "state"
    state.mkdir(mode=0o700)
    store = Store(state / "state.sqlite")
    allow = tuple(f"name-{n}.test" for n in range(8))
    for n in range(RECORDS - 2):
        store.put(
            SandboxRecord(
                f"sbx_{n:016x}", f"box-{n}", State.TERMINATED, "sandbox-base", 2, 2048, 10240, ("TOKEN",),
                Network("allowlist", allow), time.time() - n, 1800, labels={"team": "blue"},
            )
        )  # fmt: skip
    store.close()
    with Rig(place) as rig:
        boxes = [rig.create(name=name) for name in ("talkers", "echo")]
        talkers = [rig.start_process(boxes[0], "python3", "-c", TALKER) for _ in range(8)]
        process = rig.start_process(boxes[1], "python3", "-c", ECHO)
        connection = rig.connection()
        connection.request("GET", f"{process}/output")
        line = json.loads(connection.getresponse().readline())
        connection.close()
        port = base64.b64decode(line["data"]).decode().strip()
        yield Loaded(
            rig, ["attach", str(ATTACHES), *talkers], ["tunnel", str(TUNNELS), f"/v1/sandboxes/{boxes[1]}", port]
        )
