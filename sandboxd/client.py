"""The API from the other side: one method for each route, frozen values for what it answers.

In: the path of sandboxd's unix socket. Out: frozen values, byte streams, an `Attachment`. Synchronous;
holds nothing between calls, so one `Client` may be used from several threads. Fields a newer server adds
are ignored; `null` and an absent field are the empty value of their type; a field of the wrong type is a
`BadAnswer`.

An answer other than success raises the class of `sandboxd.errors` that its code names. A server that cannot
be reached, or stops in the middle, raises `Unreachable`. Text in the answers is the server's or a guest's
word: it goes through termsafe before a person sees it.

The values are named tuples: as frozen dataclasses they would cost every `sandbox-cli` command 30 ms at its
start.
"""

from __future__ import annotations

import binascii
import json
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sandboxd import unixhttp
from sandboxd.errors import BY_CODE, ApiError, BodyTooLarge, Internal, MediaTypeRefused, SandboxError
from sandboxd.unixhttp import ProtocolError, Response

JSON_LIMIT_BYTES = 64 << 20
LINE_LIMIT_BYTES = 4 << 20
FRAME_LIMIT_BYTES = 1 << 20
QUICK_S = 60.0
CREATE_S = 600.0

_HEADERS = {"Host": "localhost"}
_JSON = {"Host": "localhost", "Content-Type": "application/json"}
_BYTES = {"Host": "localhost", "Content-Type": "application/octet-stream"}
_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


class Unreachable(SandboxError):
    """No sandboxd answers at this socket, or it went away in the middle. `cause` is the operating system's
    word."""

    def __init__(self, path: str, cause: str) -> None:
        super().__init__(f"sandboxd at {path}: {cause}")
        self.path = path
        self.cause = cause


class BadAnswer(SandboxError):
    """What answers is not this API."""


class Network(NamedTuple):
    mode: str
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    allow_tcp: tuple[str, ...] = ()


class NetworkRequest(NamedTuple):
    """What a network is asked to be. None is left to the server, `()` is an empty list; `allow_tcp` holds
    `HOST:PORT`."""

    mode: str | None = None
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] | None = None
    allow_tcp: tuple[str, ...] | None = None

    def body(self) -> dict[str, Any]:
        """As the wire names it."""
        return {key: value for key, value in self._asdict().items() if value is not None}


class Mount(NamedTuple):
    """A volume's place in a sandbox."""

    name: str
    path: str
    read_only: bool = False


class Volume(NamedTuple):
    """`attached_to` is the id of the sandbox that writes to it, or of the first one that reads it, or empty."""

    name: str
    size_mb: int
    created_at: str
    attached_to: str


class Sandbox(NamedTuple):
    id: str
    name: str
    state: str
    image: str
    cpus: float
    memory_mb: int
    disk_mb: int
    env_names: tuple[str, ...]
    network: Network
    created_at: str
    idle_timeout_secs: int
    labels: Mapping[str, str]
    volumes: tuple[Mount, ...] = ()


class Process(NamedTuple):
    pid: int
    tty: bool
    argv: tuple[str, ...]
    state: str
    exit_code: int | None
    started_at: str


class RunResult(NamedTuple):
    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    timed_out: bool


class Output(NamedTuple):
    """A piece of a process's output: `data` of a `stream`, or at the end its `exit_code`."""

    stream: str
    data: bytes
    exit_code: int | None
    dropped_bytes: int = 0


class Capabilities(NamedTuple):
    api_version: str
    backend: str
    capabilities: Mapping[str, bool]
    limits: Mapping[str, int]
    network_default: Network
    network_ceiling: str
    network_may_allow: tuple[str, ...]
    network_may_allow_tcp: tuple[str, ...] = ()


class EgressName(NamedTuple):
    """One name a sandbox asked for, and what was decided. `decision` is denied or allowed, `by` is what named it
    (dns, tls, http, connect or address); the bytes are the sandbox's, in and out."""

    id: str
    name: str
    port: int
    decision: str
    rule: str
    by: str
    count: int  # type: ignore[assignment]  # as the wire names it; hides tuple.count
    connections: int
    bytes_in: int
    bytes_out: int
    first_at: str
    last_at: str


class Egress(NamedTuple):
    """A sandbox's network and what it was used for."""

    mode: str
    allow: tuple[str, ...] | None
    deny: tuple[str, ...]
    allow_tcp: tuple[str, ...]
    names: tuple[EgressName, ...]


class Event(NamedTuple):
    """One decision about a name. `remedy` is the flag that would allow it, empty where nothing can: then `why` says
    so."""

    time: str
    type: str
    sandbox: str
    id: str
    name: str
    port: int
    rule: str
    by: str
    count: int  # type: ignore[assignment]  # as the wire names it; hides tuple.count
    why: str
    remedy: str
    bytes_in: int
    bytes_out: int


class Entry(NamedTuple):
    name: str
    type: str
    size: int


class Create(NamedTuple):
    """What a sandbox is asked to be; what is None or empty is left to the server."""

    name: str | None = None
    image: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    idle_timeout_secs: int | None = None
    env: Mapping[str, str] | None = None
    labels: Mapping[str, str] | None = None
    network: NetworkRequest | None = None
    volumes: tuple[Mount, ...] = ()

    def body(self) -> dict[str, Any]:
        """As the wire names it."""
        asked: dict[str, Any] = {
            "name": self.name,
            "image": self.image,
            "cpus": self.cpus,
            "memory_mb": self.memory_mb,
            "disk_mb": self.disk_mb,
            "idle_timeout_secs": self.idle_timeout_secs,
            "env": dict(self.env or {}) or None,
            "labels": dict(self.labels or {}) or None,
            "network": None if self.network is None else self.network.body(),
            "volumes": [mount._asdict() for mount in self.volumes] or None,
        }
        return {key: value for key, value in asked.items() if value is not None}


class Frame(NamedTuple):
    """One message of an attach stream: its type letter and its payload (API v1 §6)."""

    kind: bytes
    payload: bytes


class FrameDecoder:
    """Bytes of an attach stream to frames, however they are cut."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now; a payload above 1 MiB raises `BadAnswer`."""
        self._kept += data
        frames: list[Frame] = []
        at = 0
        while len(self._kept) - at >= 5:
            size = int.from_bytes(self._kept[at + 1 : at + 5], "big")
            if size > FRAME_LIMIT_BYTES:
                raise BadAnswer("sandboxd sent a frame larger than 1 MiB")
            if len(self._kept) - at < 5 + size:
                break
            frames.append(Frame(bytes(self._kept[at : at + 1]), bytes(self._kept[at + 5 : at + 5 + size])))
            at += 5 + size
        del self._kept[:at]
        return frames


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    return kind + len(payload).to_bytes(4, "big") + payload


def resize(rows: int, cols: int) -> bytes:
    """The frame that tells a terminal's size."""
    return frame(b"r", rows.to_bytes(2, "big") + cols.to_bytes(2, "big"))


class Attachment(NamedTuple):
    """A process's live streams: a connected socket, and the decoder that already holds what came early."""

    sock: socket.socket
    decoder: FrameDecoder
    first: tuple[Frame, ...]

    def frames(self) -> Iterator[Frame]:
        """Frames until the exit code has come; `BadAnswer` if the connection ends before."""
        pending = list(self.first)
        while True:
            for one in pending:
                yield one
                if one.kind == b"x":
                    return
            data = self.sock.recv(unixhttp.READ_BYTES)
            if not data:
                raise BadAnswer("sandboxd ended the stream before the process's exit")
            pending = self.decoder.feed(data)

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def exit_code(payload: bytes) -> int:
    """The exit code an `x` frame carries."""
    if len(payload) != 4:
        raise BadAnswer("sandboxd sent a malformed exit code")
    return int.from_bytes(payload, "big", signed=True)


class Client:
    """sandboxd behind the socket at `path`."""

    def __init__(self, path: str) -> None:
        self.path = path

    # The server

    def health(self) -> None:
        self._json("GET", "/v1/health")

    def capabilities(self) -> Capabilities:
        raw = self._json("GET", "/v1/capabilities")
        network = _object(raw, "network")
        return Capabilities(
            api_version=_text(raw, "api_version"),
            backend=_text(raw, "backend"),
            capabilities={name: value is True for name, value in _object(raw, "capabilities").items()},
            limits={name: v for name, v in _object(raw, "limits").items() if isinstance(v, int)},
            network_default=_network(_object(network, "default")),
            network_ceiling=_text(network, "ceiling"),
            network_may_allow=_texts(network, "may_allow"),
            network_may_allow_tcp=_texts(network, "may_allow_tcp"),
        )

    # Sandboxes

    def create(self, asked: Create) -> Sandbox:
        return _sandbox(self._json("POST", "/v1/sandboxes", asked.body(), timeout_s=CREATE_S))

    def sandboxes(self, labels: Sequence[str] = ()) -> list[Sandbox]:
        """Newest first; `labels` are `key=value` pairs that must all match."""
        query = "&".join(f"label={_quote(label)}" for label in labels)
        raw = self._json("GET", f"/v1/sandboxes{'?' if query else ''}{query}")
        return [_sandbox(one) for one in _objects(raw, "sandboxes")]

    def get(self, ref: str) -> Sandbox:
        return _sandbox(self._json("GET", _at(ref)))

    def update(
        self,
        ref: str,
        *,
        network: NetworkRequest | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        idle_timeout_secs: int | None = None,
    ) -> Sandbox:
        """Changes what is given; all of it, or nothing where a part is refused. An empty name takes it away."""
        asked: dict[str, Any] = {
            "network": None if network is None else network.body(),
            "name": name,
            "labels": None if labels is None else dict(labels),
            "idle_timeout_secs": idle_timeout_secs,
        }
        return _sandbox(self._json("PATCH", _at(ref), {key: v for key, v in asked.items() if v is not None}))

    def delete(self, ref: str) -> None:
        self._json("DELETE", _at(ref))

    # Volumes

    def create_volume(self, name: str, size_mb: int | None = None) -> Volume:
        """An empty one; the server says how large where no size is given."""
        asked = {"name": name} | ({} if size_mb is None else {"size_mb": size_mb})
        return _volume(self._json("POST", "/v1/volumes", asked))

    def volumes(self) -> list[Volume]:
        """By name."""
        return [_volume(one) for one in _objects(self._json("GET", "/v1/volumes"), "volumes")]

    def delete_volume(self, name: str) -> None:
        """With all that is in it."""
        self._json("DELETE", f"/v1/volumes/{_quote(name)}")

    # Egress

    def egress(self, ref: str) -> Egress:
        """The network as it is and every name that was asked for; of an ended sandbox too."""
        raw = self._json("GET", f"{_at(ref)}/egress")
        return Egress(*_network(raw), tuple(map(_egress_name, _objects(raw, "names"))))

    def event(self, event_id: str) -> Event:
        """The decision that has this id."""
        raw = self._json("GET", f"/v1/events/{_quote(event_id)}")
        return Event(
            time=_text(raw, "time"),
            type=_text(raw, "type"),
            sandbox=_text(raw, "sandbox"),
            id=_text(raw, "id"),
            name=_text(raw, "name"),
            port=_number(raw, "port"),
            rule=_text(raw, "rule"),
            by=_text(raw, "by"),
            count=_number(raw, "count"),
            why=_text(raw, "why"),
            remedy=_text(raw, "remedy"),
            bytes_in=_number(raw, "bytes_in"),
            bytes_out=_number(raw, "bytes_out"),
        )

    # Processes

    def run(
        self,
        ref: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout_secs: float | None = None,
    ) -> RunResult:
        asked = _process_body(argv, env, cwd)
        if stdin:
            asked["stdin"] = binascii.b2a_base64(stdin, newline=False).decode()
        if timeout_secs is not None:
            asked["timeout_secs"] = timeout_secs
        raw = self._json("POST", f"{_at(ref)}/run", asked, timeout_s=None)
        return RunResult(
            exit_code=_number(raw, "exit_code"),
            stdout=_bytes(raw, "stdout"),
            stderr=_bytes(raw, "stderr"),
            truncated=raw.get("truncated") is True,
            timed_out=raw.get("timed_out") is True,
        )

    def start(
        self,
        ref: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        size: tuple[int, int] | None = None,
    ) -> Process:
        """Start a process that outlives this call; `size` (rows, columns) gives it a terminal."""
        asked = _process_body(argv, env, cwd)
        if size is not None:
            asked |= {"tty": True, "rows": size[0], "cols": size[1]}
        return _process(self._json("POST", f"{_at(ref)}/processes", asked))

    def processes(self, ref: str) -> list[Process]:
        return [_process(one) for one in _objects(self._json("GET", f"{_at(ref)}/processes"), "processes")]

    def process(self, ref: str, pid: int) -> Process:
        return _process(self._json("GET", f"{_at(ref)}/processes/{pid}"))

    def output(self, ref: str, pid: int) -> Iterator[Output]:
        """Output from the start, then as it comes; the last piece carries the exit code."""
        with self._ask("GET", f"{_at(ref)}/processes/{pid}/output", timeout_s=QUICK_S) as answer:
            try:
                for line in answer.lines(LINE_LIMIT_BYTES):
                    raw = _decode(line)
                    code = raw.get("exit_code")
                    yield Output(
                        stream=_text(raw, "stream"),
                        data=_bytes(raw, "data"),
                        exit_code=code if isinstance(code, int) else None,
                        dropped_bytes=_number(raw, "dropped"),
                    )
            except (ProtocolError, OSError) as fault:
                raise Unreachable(self.path, str(fault)) from None

    def write_stdin(self, ref: str, pid: int, data: bytes, *, close: bool = False) -> None:
        target = f"{_at(ref)}/processes/{pid}/stdin{'?close=1' if close else ''}"
        self._done(self._ask("POST", target, headers=_BYTES, body=data, timeout_s=None))

    def signal(self, ref: str, pid: int, name: str) -> None:
        """`name` is INT, TERM, KILL or HUP."""
        self._json("POST", f"{_at(ref)}/processes/{pid}/signal", {"signal": name})

    def attach(self, ref: str, pid: int) -> Attachment:
        target = f"{_at(ref)}/processes/{pid}/attach"
        try:
            answer = unixhttp.upgrade(
                self.path, target, protocol="sbx-stream/1", headers=_HEADERS, timeout_s=QUICK_S
            )
            if isinstance(answer, Response):
                with answer:
                    self._raise_for(answer)
                raise BadAnswer("sandboxd answered an attach with something else")
        except (ProtocolError, OSError) as fault:
            raise Unreachable(self.path, _why(fault)) from None
        decoder = FrameDecoder()
        try:
            return Attachment(answer.sock, decoder, tuple(decoder.feed(answer.early)))
        except BadAnswer:
            answer.sock.close()
            raise

    # Files

    def read_file(self, ref: str, path: str) -> bytes:
        with self._ask("GET", f"{_at(ref)}/files?path={_quote(path)}", timeout_s=None) as answer:
            return self._read(answer)

    def write_file(self, ref: str, path: str, data: bytes) -> None:
        target = f"{_at(ref)}/files?path={_quote(path)}"
        self._done(self._ask("PUT", target, headers=_BYTES, body=data, timeout_s=None))

    def remove_file(self, ref: str, path: str) -> None:
        self._json("DELETE", f"{_at(ref)}/files?path={_quote(path)}")

    def list_dir(self, ref: str, path: str) -> list[Entry]:
        raw = self._json("GET", f"{_at(ref)}/dirs?path={_quote(path)}")
        entries = _objects(raw, "entries")
        return [Entry(_text(one, "name"), _text(one, "type"), _number(one, "size")) for one in entries]

    # Workspace bundles

    def put_workspace(self, ref: str, branch: str, bundle: Iterable[bytes], length: int) -> None:
        """Clone a git bundle of `length` bytes into the empty workspace and check its HEAD out as
        `branch`."""
        target = f"{_at(ref)}/workspace?branch={_quote(branch)}"
        self._done(self._ask("POST", target, headers=_BYTES, body=bundle, length=length, timeout_s=None))

    def get_workspace(self, ref: str, base: str, branch: str) -> Iterator[bytes]:
        """A bundle of `base..branch` as it comes; `Conflict` when there is nothing new."""
        target = f"{_at(ref)}/workspace/bundle?base={_quote(base)}&branch={_quote(branch)}"
        answer = self._ask("GET", target, timeout_s=None)
        return self._stream(answer)

    # The wire

    def _stream(self, answer: Response) -> Iterator[bytes]:
        with answer:
            try:
                yield from answer.chunks()
            except (ProtocolError, OSError) as fault:
                raise Unreachable(self.path, _why(fault)) from None

    def _ask(
        self,
        method: str,
        target: str,
        *,
        timeout_s: float | None,
        headers: Mapping[str, str] = _HEADERS,
        body: bytes | Iterable[bytes] = b"",
        length: int | None = None,
    ) -> Response:
        """Send a request; anything but success raises."""
        try:
            answer = unixhttp.request(
                self.path, method, target, headers=headers, body=body, length=length, timeout_s=timeout_s
            )
        except (ProtocolError, OSError) as fault:
            raise Unreachable(self.path, _why(fault)) from None
        try:
            self._raise_for(answer)
        except BaseException:
            answer.close()
            raise
        return answer

    def _json(
        self, method: str, target: str, body: Any = None, *, timeout_s: float | None = QUICK_S
    ) -> dict[str, Any]:
        if body is None:
            answer = self._ask(method, target, timeout_s=timeout_s)
        else:
            data = json.dumps(body, separators=(",", ":")).encode("ascii")
            answer = self._ask(method, target, headers=_JSON, body=data, timeout_s=timeout_s)
        with answer:
            return _decode(self._read(answer)) if answer.status != 204 else {}

    def _done(self, answer: Response) -> None:
        with answer:
            self._read(answer)

    def _read(self, answer: Response) -> bytes:
        try:
            return answer.read(JSON_LIMIT_BYTES + 1024)
        except (ProtocolError, OSError) as fault:
            raise Unreachable(self.path, _why(fault)) from None

    def _raise_for(self, answer: Response) -> None:
        if 200 <= answer.status < 300:
            return
        try:
            error = _object(_decode(self._read(answer)), "error")
            code, message = _text(error, "code"), _text(error, "message")
        except BadAnswer:
            raise BadAnswer(f"what answers at {self.path} is not sandboxd (status {answer.status})") from None
        kind: type[ApiError] = BY_CODE.get(code, Internal)
        if code == "invalid_request":
            kind = {413: BodyTooLarge, 415: MediaTypeRefused}.get(answer.status, kind)
        raise kind(message or f"status {answer.status}")


def _why(fault: Exception) -> str:
    return (fault.strerror or str(fault)) if isinstance(fault, OSError) else str(fault)


def _quote(text: str) -> str:
    """Percent-encoding of everything but the unreserved characters (RFC 3986 §2.3)."""
    raw = text.encode("utf-8", "surrogateescape")
    return "".join(chr(byte) if byte in _UNRESERVED else f"%{byte:02X}" for byte in raw)


def _at(ref: str) -> str:
    if not ref:
        raise BadAnswer("a sandbox's name is empty")
    return f"/v1/sandboxes/{_quote(ref)}"


def _process_body(argv: Sequence[str], env: Mapping[str, str] | None, cwd: str | None) -> dict[str, Any]:
    asked: dict[str, Any] = {"argv": list(argv)}
    if env:
        asked["env"] = dict(env)
    if cwd:
        asked["cwd"] = cwd
    return asked


def _decode(body: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        raw = None
    if not isinstance(raw, dict):
        raise BadAnswer("sandboxd's answer is not a JSON object")
    return raw


def _text(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadAnswer(f"sandboxd's answer has a {name} that is not text")
    return value


def _number(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if value is None:
        return 0
    if not isinstance(value, int):
        raise BadAnswer(f"sandboxd's answer has a {name} that is not a whole number")
    return value


def _object(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadAnswer(f"sandboxd's answer has a {name} that is not an object")
    return value


def _objects(raw: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = raw.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise BadAnswer(f"sandboxd's answer has {name} that are not objects")
    return value


def _texts(raw: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = raw.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise BadAnswer(f"sandboxd's answer has {name} that are not text")
    return tuple(value)


def _bytes(raw: Mapping[str, Any], name: str) -> bytes:
    try:
        return binascii.a2b_base64(_text(raw, name), strict_mode=True)
    except (binascii.Error, ValueError):
        raise BadAnswer(f"sandboxd's answer has a {name} that is not base64") from None


def _network(raw: Mapping[str, Any]) -> Network:
    allow = None if raw.get("allow") is None else _texts(raw, "allow")
    return Network(_text(raw, "mode"), allow, _texts(raw, "deny"), _texts(raw, "allow_tcp"))


def _egress_name(raw: Mapping[str, Any]) -> EgressName:
    return EgressName(
        id=_text(raw, "id"),
        name=_text(raw, "name"),
        port=_number(raw, "port"),
        decision=_text(raw, "decision"),
        rule=_text(raw, "rule"),
        by=_text(raw, "by"),
        count=_number(raw, "count"),
        connections=_number(raw, "connections"),
        bytes_in=_number(raw, "bytes_in"),
        bytes_out=_number(raw, "bytes_out"),
        first_at=_text(raw, "first_at"),
        last_at=_text(raw, "last_at"),
    )


def _sandbox(raw: Mapping[str, Any]) -> Sandbox:
    cpus = raw.get("cpus")
    labels = _object(raw, "labels")
    return Sandbox(
        id=_text(raw, "id"),
        name=_text(raw, "name"),
        state=_text(raw, "state"),
        image=_text(raw, "image"),
        cpus=cpus if isinstance(cpus, int | float) else 0,
        memory_mb=_number(raw, "memory_mb"),
        disk_mb=_number(raw, "disk_mb"),
        env_names=_texts(raw, "env_names"),
        network=_network(_object(raw, "network")),
        created_at=_text(raw, "created_at"),
        idle_timeout_secs=_number(raw, "idle_timeout_secs"),
        labels={key: _text(labels, key) for key in labels},
        volumes=tuple(
            Mount(_text(one, "name"), _text(one, "path"), one.get("read_only") is True)
            for one in _objects(raw, "volumes")
        ),
    )


def _volume(raw: Mapping[str, Any]) -> Volume:
    return Volume(
        name=_text(raw, "name"),
        size_mb=_number(raw, "size_mb"),
        created_at=_text(raw, "created_at"),
        attached_to=_text(raw, "attached_to"),
    )


def _process(raw: Mapping[str, Any]) -> Process:
    code = raw.get("exit_code")
    return Process(
        pid=_number(raw, "pid"),
        tty=raw.get("tty") is True,
        argv=_texts(raw, "argv"),
        state=_text(raw, "state"),
        exit_code=code if isinstance(code, int) else None,
        started_at=_text(raw, "started_at"),
    )
