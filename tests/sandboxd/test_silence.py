"""Guests that stop answering, and clients that stop reading: who waits is told, nobody else is held up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import SOAK
from tests.sandboxd.rig import Rig
from tests.sandboxd.test_life import machines, until

S = "/v1/sandboxes"
BOUND_S = 120.0
"""What `heartbeat` allows, and as much again for a busy machine."""

COMMIT = (
    "cd /workspace && git init -q -b main . && git config user.name a && git config user.email a@b"
    " && git commit -q --allow-empty -m One && git rev-parse HEAD"
    " && head -c 20000000 /dev/urandom > noise && git add noise && git commit -q -m Two"
)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def guestd(rig: Rig, box: str) -> int:
    """The guest's end alone, so that its machine still takes connections."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if b"guestd.sock" in command and b"bwrap" not in command.split(b"\0")[0]:
                root = os.readlink(entry / "root"), (entry / "mountinfo").read_text()
                if f"/{box}/root/tmp" in root[1]:
                    return int(entry.name)
    raise AssertionError("no guestd")


@pytest.mark.parametrize("part", ["the machine", "its guestd"])
def test_every_caller_hears_of_a_guest_that_stops_in_bounded_time_and_it_can_go_on(own: Rig, part: str) -> None:
    if not SOAK:
        own.stop()
        own.knob("patience", '{"QUIET_S": 2, "ATTEMPT_S": 2}')
        own.start()
    box, other = own.create(name="frozen"), own.create(name="other")
    kept = own.start_process(box, "sh", "-c", "echo before; while read line; do echo got $line; done")
    deaf = own.start_process(box, "sleep", "600")
    assert own.run(box, "sh", "-c", "head -c 3000000 /dev/zero > /workspace/big").exit_code == 0
    pid = int(machines(own)[0]) if part == "the machine" else guestd(own, box)
    if part == "the machine":
        pid = next(int(p) for p in machines(own) if box in Path(f"/proc/{p}/cmdline").read_text())

    def call(method: str, path: str, body: object = None) -> tuple[int, float]:
        started = time.monotonic()
        return own.call(method, path, body, timeout=BOUND_S).status, time.monotonic() - started

    with ThreadPoolExecutor(16) as pool:
        early = [pool.submit(call, "POST", f"{S}/{box}/run", {"argv": ["sleep", "600"]})]
        until("it runs", lambda: len(own.call("GET", f"{S}/{box}/processes").json["processes"]) == 4)
        with stopped(pid):
            calls = early + [
                pool.submit(call, *one)
                for one in [
                    ("POST", f"{S}/{box}/run", {"argv": ["true"]}),
                    ("POST", f"{S}/{box}/processes", {"argv": ["true"]}),
                    ("GET", f"{S}/{box}/files?path=/workspace/big", None),
                    ("PUT", f"{S}/{box}/files?path=/workspace/x", bytes(8 << 20)),
                    ("GET", f"{S}/{box}/dirs?path=/workspace", None),
                    ("POST", f"{deaf}/stdin", bytes(8 << 20)),
                ]
            ]
            for method, path in (("GET", S), ("GET", f"{S}/{box}"), ("GET", kept), ("GET", f"{S}/{box}/processes")):
                assert call(method, path)[1] < 20
            # As to a stopped process of one's own: it is there when that goes on.
            assert call("POST", f"{deaf}/signal", {"signal": "KILL"})[0] in (204, 500)
            assert own.run(other, "echo", "fine").stdout == b"fine\n"
            assert [one.result()[0] for one in calls] == [500] * 7
        until("it answers", lambda: own.call("POST", f"{S}/{box}/run", {"argv": ["true"]}).status == 200, 60)
    assert own.call("POST", f"{kept}/stdin?close=1", b"again\n").status == 204
    assert own.output(kept) == (b"before\ngot again\n", b"", 0)
    with stopped(pid):
        assert own.call("DELETE", f"{S}/{box}", timeout=BOUND_S).status == 204


def test_clients_that_stop_reading_cost_little_and_hold_nobody_else_up(other: Rig) -> None:
    box = other.create()
    base = other.run(box, "sh", "-c", COMMIT).stdout.split()[0].decode()
    sockets = []
    before = other.rss_kib()
    run = json.dumps({"argv": ["head", "-c", "8000000", "/dev/zero"]}).encode()
    asked = [
        f"GET {S}/{box}/files?path=/workspace/noise HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(),
        f"GET {S}/{box}/workspace/bundle?base={base}&branch=main HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(),
        f"POST {S}/{box}/run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
        + b"Content-Length: %d\r\n\r\n" % len(run) + run,
    ]  # fmt: skip
    try:
        for request in asked * 3:
            sock = socket.socket(socket.AF_UNIX)
            sockets.append(sock)
            sock.settimeout(30)
            sock.connect(str(other.socket))
            sock.sendall(request)
        for sock in sockets:
            assert sock.recv(12) == b"HTTP/1.1 200"
        time.sleep(1)
        assert other.run(box, "echo", "fine").stdout == b"fine\n"
        assert other.rss_kib() - before < 24 << 10
        # Whoever goes on reading gets all of it.
        whole = b""
        while data := sockets[0].recv(1 << 20):
            whole += data
            if len(whole) >= 20000000:
                break
    finally:
        for sock in sockets:
            sock.close()
    until("their files are closed", lambda: other.call("DELETE", f"{S}/{box}").status == 204)
