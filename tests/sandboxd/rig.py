"""A daemon to talk to over its real socket, and a client that hides nothing of the wire."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float = 60) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        code = self.json["error"]["code"]
        assert isinstance(code, str)
        return code

    @property
    def message(self) -> str:
        message = self.json["error"]["message"]
        assert isinstance(message, str)
        return message


class Rig:
    """One fake daemon. `call` is one request on a connection of its own."""

    def __init__(self, directory: Path, *flags: str, prefix: tuple[str, ...] = ()) -> None:
        """`prefix` is a command that becomes the daemon."""
        self.directory, self.flags, self.prefix = directory, flags, prefix
        self.state = directory / "state"
        self.socket = directory / "s.sock"
        self.log = directory / "log"
        self.knobs = directory / "knobs"
        self.knobs.mkdir(exist_ok=True)
        self.headers: dict[str, str] = {}
        """Of every call, a token for instance."""
        self.process: subprocess.Popen[bytes] | None = None
        self.slow: Slow | None = None
        self.environment: dict[str, str] = {}
        """What the daemon finds there beside ours."""

    def __enter__(self) -> Rig:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is None or self.process.poll() is not None:
            self.start()
        for sandbox in self.call("GET", "/v1/sandboxes").json["sandboxes"]:
            if sandbox["state"] != "terminated":
                self.call("DELETE", f"/v1/sandboxes/{sandbox['id']}")
        self.stop()

    def start(self) -> None:
        """Returns once it answers and has its images, or at its first answer where `prepare_s` holds these up."""
        command = [*self.prefix, sys.executable, "-m", "tests.sandboxd.fake_daemon"]
        command += [str(self.state), str(self.socket), *self.flags]
        with self.log.open("ab") as log:
            said = log.tell()
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            ready = (self.knobs / "prepare_s").exists() or b"INFO ready\n" in self.log.read_bytes()[said:]
            with contextlib.suppress(OSError):
                if ready and self.call("GET", "/v1/health").status == 200:
                    return
            time.sleep(0.03)
        raise AssertionError(self.log.read_text())

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(20) == 0, self.log.read_text()
        assert "Traceback" not in self.log.read_text(errors="replace"), self.log.read_text(errors="replace")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def knob(self, name: str, value: str | bytes | None) -> None:
        path = self.knobs / name
        if value is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(value if isinstance(value, bytes) else value.encode())

    def connection(self, timeout: float = 60) -> UnixConnection:
        return UnixConnection(self.socket, timeout)

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 60
    ) -> Answer:
        """`body`: bytes are octets, anything else is JSON."""
        given = self.headers | (headers or {})
        if isinstance(body, bytes):
            given.setdefault("Content-Type", "application/octet-stream")
        elif body is not None:
            given.setdefault("Content-Type", "application/json")
            body = json.dumps(body).encode()
        connection = self.connection(timeout)
        try:
            connection.request(method, path, body, given)
            response = connection.getresponse()
            return Answer(response.status, dict(response.headers.items()), response.read())
        finally:
            connection.close()

    def raw(self, data: bytes, timeout: float = 5) -> bytes:
        """Everything the server says to these bytes until it closes or falls silent."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(timeout)
            sock.connect(str(self.socket))
            sock.sendall(data)
            said = b""
            with contextlib.suppress(TimeoutError):
                while piece := sock.recv(65536):
                    said += piece
            return said

    def create(self, **fields: Any) -> str:
        """Waits for the images if it must."""
        while (answer := self.call("POST", "/v1/sandboxes", fields)).status == 503:
            time.sleep(0.05)
        assert answer.status == 201, answer.body
        sandbox_id = answer.json["id"]
        assert isinstance(sandbox_id, str)
        return sandbox_id

    def run(self, ref: str, *argv: str, stdin: bytes = b"", **fields: Any) -> Ran:
        body = {"argv": list(argv), **fields}
        if stdin:
            body["stdin"] = base64.b64encode(stdin).decode()
        answer = self.call("POST", f"/v1/sandboxes/{ref}/run", body)
        assert answer.status == 200, answer.body
        said = answer.json
        return Ran(
            said["exit_code"], base64.b64decode(said["stdout"]), base64.b64decode(said["stderr"]),
            said["truncated"], said["timed_out"],
        )  # fmt: skip

    def start_process(self, ref: str, *argv: str, **fields: Any) -> str:
        answer = self.call("POST", f"/v1/sandboxes/{ref}/processes", {"argv": list(argv), **fields})
        assert answer.status == 201, answer.body
        return f"/v1/sandboxes/{ref}/processes/{answer.json['pid']}"

    def output(self, process: str) -> tuple[bytes, bytes, int]:
        """Follows to the end: (stdout, stderr, exit code)."""
        lines = [json.loads(line) for line in self.call("GET", f"{process}/output").body.splitlines()]
        assert "exit_code" in lines[-1] and all("stream" in line for line in lines[:-1])
        pieces = [(line["stream"], base64.b64decode(line["data"])) for line in lines[:-1]]
        out, err = (b"".join(data for name, data in pieces if name == wanted) for wanted in ("stdout", "stderr"))
        return out, err, lines[-1]["exit_code"]

    def attach(self, process: str, early: bytes = b"") -> Attached:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(30)
        sock.connect(str(self.socket))
        return Attached(sock, process, early)

    def rss_kib(self) -> int:
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))

    def descriptors(self) -> int:
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@dataclass(frozen=True)
class Ran:
    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    timed_out: bool


class Slow:
    """A connection whose headers never end, opened early, so that no test waits the whole time for its end."""

    def __init__(self, rig: Rig) -> None:
        self.said = b"?"
        self.took_s = 0.0
        self._rig = rig
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _wait(self) -> None:
        started = time.monotonic()
        self.said = self._rig.raw(b"GET /v1/health HTTP/1.1\r\nHost:", timeout=30)
        self.took_s = time.monotonic() - started


class Attached:
    """The frames of API §6, by hand."""

    def __init__(self, sock: socket.socket, process: str, early: bytes, fields: str = "") -> None:
        self.socket = sock
        head = f"GET {process}/attach HTTP/1.1\r\nHost: localhost\r\n{fields}"
        head += "Connection: Upgrade\r\nUpgrade: sbx-stream/1\r\n\r\n"
        self.socket.sendall(head.encode() + early)
        self.file = self.socket.makefile("rb")
        self.status = self.file.readline().decode().strip()
        self.headers: dict[str, str] = {}
        while (line := self.file.readline().decode().strip()):
            name, _, value = line.partition(": ")
            self.headers[name.lower()] = value

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.socket.close()

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        self.socket.sendall(frame(kind, payload))

    def frame(self) -> tuple[bytes, bytes] | None:
        head = self.file.read(5)
        if len(head) < 5:
            return None
        return head[:1], self.file.read(int.from_bytes(head[1:], "big"))

    def rest(self) -> tuple[bytes, bytes, int | None]:
        """To the end: (stdout, stderr, exit code)."""
        pieces: dict[bytes, list[bytes]] = {b"o": [], b"E": [], b"x": []}
        while (found := self.frame()) is not None:
            pieces[found[0]].append(found[1])
        (code,) = pieces[b"x"] or [None]
        exit_code = None if code is None else int.from_bytes(code, "big", signed=True)
        return b"".join(pieces[b"o"]), b"".join(pieces[b"E"]), exit_code


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    return kind + len(payload).to_bytes(4, "big") + payload
