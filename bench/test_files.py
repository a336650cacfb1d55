"""64 MiB into and out of a sandbox, beside the same bytes over a bare vsock stream to a socket in the guest."""

from __future__ import annotations

import socket
import time
from typing import Any

from bench.conftest import SHORT, alternate
from sandboxd.client import Sandbox
from tests.daemon import Daemon

SIZE = 64 << 20
PORT = 7000

# A guest's side of the bare stream: takes SIZE bytes and answers one, or sends SIZE bytes.
PEER = f"""
import socket
listener = socket.socket(socket.AF_VSOCK)
listener.bind((socket.VMADDR_CID_ANY, {PORT}))
listener.listen()
print("ready", flush=True)
buffer = bytearray(1 << 18)
while True:
    stream, _ = listener.accept()
    if stream.recv(1) == b"p":
        left = {SIZE}
        while left:
            got = stream.recv_into(buffer, min(left, len(buffer)))
            if not got:
                break
            left -= got
        stream.sendall(b"!")
    else:
        for _ in range({SIZE} // len(buffer)):
            stream.sendall(buffer)
    stream.close()
"""


class Stream:
    """The host's side of the bare stream."""

    def __init__(self, daemon: Daemon, vm: Sandbox) -> None:
        self._path = str(daemon.state / "sandboxes" / vm.id / "vsock.sock")
        self._process = daemon.client.start(vm.id, ["python3", "-c", PEER])
        self._daemon, self._vm = daemon, vm
        assert next(daemon.client.output(vm.id, self._process.pid)).data == b"ready\n"
        self._data = bytes(1 << 18)

    def close(self) -> None:
        self._daemon.client.signal(self._vm.id, self._process.pid, "KILL")

    def _dial(self) -> socket.socket:
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(self._path)
        stream.sendall(f"CONNECT {PORT}\n".encode())
        greeting = b""
        while not greeting.endswith(b"\n"):
            greeting += stream.recv(1)
        assert greeting.startswith(b"OK ")
        return stream

    def put(self) -> float:
        with self._dial() as stream:
            start = time.perf_counter()
            stream.sendall(b"p")
            for _ in range(SIZE // len(self._data)):
                stream.sendall(self._data)
            assert stream.recv(1) == b"!"
            return time.perf_counter() - start

    def get(self) -> float:
        with self._dial() as stream:
            start = time.perf_counter()
            stream.sendall(b"g")
            left = SIZE
            while left:
                left -= len(stream.recv(min(left, 1 << 18)))
            return time.perf_counter() - start


def rate(seconds: float) -> float:
    return SIZE / seconds


def test_file_put(benchmark: Any, daemon: Daemon, vm: Sandbox) -> None:
    stream, data = Stream(daemon, vm), bytes(SIZE)
    alternate(
        benchmark, lambda: daemon.client.write_file(vm.id, "/sandbox/home/big", data), stream.put,
        rounds=2 if SHORT else 7, peer_name="a bare vsock stream", better="higher", unit=rate,
    )  # fmt: skip
    stream.close()


def test_file_get(benchmark: Any, daemon: Daemon, vm: Sandbox) -> None:
    stream = Stream(daemon, vm)
    daemon.client.write_file(vm.id, "/sandbox/home/big", bytes(SIZE))

    def ours() -> None:
        assert len(daemon.client.read_file(vm.id, "/sandbox/home/big")) == SIZE

    alternate(
        benchmark, ours, stream.get,
        rounds=2 if SHORT else 7, peer_name="a bare vsock stream", better="higher", unit=rate,
    )  # fmt: skip
    stream.close()
