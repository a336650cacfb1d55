"""The host's end of the guest protocol for tests: a plain client over a machine's socket, and a machine to talk to."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guestd import protocol
from guestd.protocol import Answer, FrameDecoder, LineReader, Request

REPOSITORY = Path(__file__).resolve().parents[2]
IDENTITY = {"hostname": "guest", "machine_id": "0" * 32, "time_ns": 0, "entropy": "0" * 64}


@dataclass
class Outcome:
    """What a process wrote and how it ended; `gaps` are (stream, lost bytes)."""

    stdout: bytes = b""
    stderr: bytes = b""
    code: int | None = None
    gaps: list[tuple[str, int]] = field(default_factory=list)
    order: str = ""


class Call:
    """One connection with its request sent."""

    def __init__(self, path: Path, request: Request | bytes) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(120)
        self.sock.connect(str(path))
        self.sock.sendall(b"CONNECT 5000\n")
        greeting = LineReader(32)
        line = None
        while line is None:
            data = self.sock.recv(1)
            assert data, "the machine closed the connection instead of greeting"
            line = greeting.feed(data)
        assert line.startswith(b"OK ")
        self.sock.sendall(protocol.encode_request(request) if isinstance(request, Request) else request)
        self._decoder = FrameDecoder(protocol.TO_HOST)
        self._rest = b""

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def answer(self) -> Answer:
        reader = LineReader()
        line = reader.feed(self._rest) if self._rest else None
        while line is None:
            data = self.sock.recv(65536)
            assert data, "the guest closed the connection without an answer"
            line = reader.feed(data)
        self._rest = reader.rest()
        return protocol.decode_answer(line)

    def content(self, size: int) -> bytes:
        pieces = [self._rest]
        left = size - len(self._rest)
        self._rest = b""
        while left:
            data = self.sock.recv(min(left, 1 << 20))
            assert data, f"{left} bytes short"
            pieces.append(data)
            left -= len(data)
        return b"".join(pieces)

    def send(self, *frames: bytes) -> None:
        self.sock.sendall(b"".join(frames))

    def frames(self) -> Iterator[tuple[str, bytes]]:
        """Until the guest closes."""
        data, self._rest = self._rest, b""
        while True:
            yield from self._decoder.feed(data)
            try:
                data = self.sock.recv(1 << 18)
            except ConnectionResetError:        # the guest left stdin unread; what it sent before is complete
                return
            if not data:
                return

    def outcome(self) -> Outcome:
        """Everything to the end; the exit code must be the last frame."""
        found = Outcome()
        stdout, stderr = [], []
        for kind, payload in self.frames():
            assert found.code is None, "a frame behind the exit code"
            found.order += kind
            if kind == "o":
                stdout.append(payload)
            elif kind == "E":
                stderr.append(payload)
            elif kind == "d":
                found.gaps.append(protocol.decode_gap(payload))
            else:
                found.code = protocol.decode_exit(payload)
        found.stdout, found.stderr = b"".join(stdout), b"".join(stderr)
        return found


class Guest:
    """A configured machine behind a unix socket."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def call(self, op: str, **fields: Any) -> Call:
        return Call(self.path, Request(op, **fields))

    def ask(self, op: str, **fields: Any) -> Answer:
        with self.call(op, **fields) as call:
            return call.answer()

    def start(self, *argv: str, **fields: Any) -> Call:
        """The connection of a process that runs."""
        call = self.call("exec", argv=list(argv), **fields)
        answer = call.answer()
        assert answer.ok, answer.message
        return call

    def run(self, *argv: str, stdin: bytes = b"", **fields: Any) -> Outcome:
        with self.start(*argv, **fields) as call:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):    # it may end before its input does
                for at in range(0, len(stdin), 1 << 16):
                    call.send(protocol.encode_frame("i", stdin[at:at + (1 << 16)]))
                call.send(protocol.encode_frame("e"))
            return call.outcome()

    def shell(self, script: str, **fields: Any) -> Outcome:
        return self.run("sh", "-c", script, **fields)

    def put(self, path: str, content: bytes) -> Answer:
        with self.call("write", path=path, size=len(content)) as call:
            answer = call.answer()
            if not answer.ok:
                return answer
            if content:
                call.sock.sendall(content)
            return call.answer()

    def get(self, path: str) -> tuple[Answer, bytes]:
        with self.call("read", path=path) as call:
            answer = call.answer()
            return answer, call.content(answer.size)

    def bundle_in(self, bundle: bytes, branch: str = "sandbox") -> Answer:
        with self.call("bundle_in", branch=branch, size=len(bundle)) as call:
            answer = call.answer()
            if not answer.ok:
                return answer
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                call.sock.sendall(bundle)
            return call.answer()

    def bundle_out(self, base: str, branch: str = "sandbox") -> tuple[Answer, bytes]:
        with self.call("bundle_out", base=base, branch=branch) as call:
            answer = call.answer()
            return answer, call.content(answer.size)


@contextlib.contextmanager
def machine(
    directory: Path, env: Mapping[str, str] | None = None, helper: Path | None = None, *, configure: bool = True
) -> Iterator[Guest]:
    """A stand-in machine of its own (tests/fake_vmm.py), configured."""
    path = directory / "vsock.sock"
    argv: Sequence[str] = [
        sys.executable, str(REPOSITORY / "tests" / "fake_vmm.py"), "--listen", str(path), "--root", str(directory),
        *(["--helper", str(helper)] if helper else []),
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as vmm:
        try:
            assert vmm.stdout is not None
            assert vmm.stdout.readline() == b"ready\n"
            guest = Guest(path)
            if configure:
                answer = guest.ask("configure", **IDENTITY, env=dict(env or {}))
                assert answer.ok, answer.message
            yield guest
        finally:
            vmm.send_signal(signal.SIGTERM)
            vmm.wait(10)


def eventually(condition: Any, timeout_s: float = 30.0) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def git(*arguments: str, cwd: Path, stdin: bytes | None = None) -> bytes:
    """Git for making test repositories, without anybody's configuration."""
    env = {
        "PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C.UTF-8",
        "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
        "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
    }
    return subprocess.run(["git", *arguments], cwd=cwd, env=env, input=stdin, check=True, capture_output=True).stdout
