"""The API from the other side: one method for each route. The public module for Python; docs/client.md has examples.

In: an endpoint (or the path of a unix socket). Out: frozen values, byte streams, an `Attachment`, a `Tunnel`.
Synchronous; a connection per call and nothing held between calls, so one `Client` may be used from several threads.

An answer other than success raises the class of `sandboxd.errors` that its code names. A server that cannot be
reached, or stops in the middle, raises `Unreachable`. Text in the answers is the server's or a guest's word: it goes
through termsafe before a person sees it.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sandboxd import answers, unixhttp
from sandboxd.answers import (
    AuditCheck,
    AuditEvent,
    BadAnswer,
    Bind,
    Capabilities,
    Egress,
    EgressName,
    Entry,
    Event,
    Events,
    Image,
    ImageProgress,
    ImageRemoved,
    Metrics,
    Mount,
    Network,
    Node,
    Output,
    Process,
    Resources,
    RunResult,
    Sample,
    Sandbox,
    Snapshot,
    Volume,
)
from sandboxd.endpoint import Endpoint
from sandboxd.errors import BY_CODE, ApiError, BodyTooLarge, Internal, MediaTypeRefused, SandboxError, Unauthorized
from sandboxd.streams import Attachment, Frame, FrameDecoder, Tunnel, exit_code, frame, resize
from sandboxd.unixhttp import ProtocolError, Response

__all__ = [
    "Attachment",
    "AuditCheck",
    "AuditEvent",
    "BadAnswer",
    "Bind",
    "Capabilities",
    "Client",
    "Create",
    "Egress",
    "EgressName",
    "Endpoint",
    "Entry",
    "Event",
    "Events",
    "Frame",
    "FrameDecoder",
    "Image",
    "ImageProgress",
    "ImageRemoved",
    "Metrics",
    "Mount",
    "Network",
    "NetworkRequest",
    "Node",
    "Output",
    "Process",
    "Resources",
    "RunResult",
    "Sample",
    "Sandbox",
    "Snapshot",
    "Tunnel",
    "Unreachable",
    "Volume",
    "exit_code",
    "frame",
    "resize",
]  # fmt: skip

JSON_LIMIT_BYTES = 64 << 20
LINE_LIMIT_BYTES = 4 << 20
QUICK_S = 60.0
CREATE_S = 600.0

_JSON = {"Content-Type": "application/json"}
_BYTES = {"Content-Type": "application/octet-stream"}
_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


class Unreachable(SandboxError):
    """No sandboxd answers at this socket, or it went away in the middle. `cause` is the operating system's
    word."""

    def __init__(self, path: str, cause: str) -> None:
        super().__init__(f"sandboxd at {path}: {cause}")
        self.path = path
        self.cause = cause


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
    lifetime_secs: int | None = None
    snapshot_id: str | None = None
    snapshot_every_secs: int | None = None
    snapshot_keep: int | None = None
    bind: Bind | None = None

    def body(self) -> dict[str, Any]:
        """As the wire names it."""
        asked: dict[str, Any] = {
            "name": self.name,
            "image": self.image,
            "cpus": self.cpus,
            "memory_mb": self.memory_mb,
            "disk_mb": self.disk_mb,
            "idle_timeout_secs": self.idle_timeout_secs,
            "lifetime_secs": self.lifetime_secs,
            "snapshot_id": self.snapshot_id,
            "snapshot_every_secs": self.snapshot_every_secs,
            "snapshot_keep": self.snapshot_keep,
            "env": dict(self.env or {}) or None,
            "labels": dict(self.labels or {}) or None,
            "network": None if self.network is None else self.network.body(),
            "volumes": [mount._asdict() for mount in self.volumes] or None,
            "bind": None if self.bind is None else self.bind._asdict(),
        }
        return {key: value for key, value in asked.items() if value is not None}


class Client:
    """sandboxd at an endpoint; text is the path of its unix socket."""

    def __init__(self, endpoint: Endpoint | str) -> None:
        self.endpoint = Endpoint.of_socket(endpoint) if isinstance(endpoint, str) else endpoint

    @property
    def path(self) -> str:
        """Where it is, as an error names it: a socket's path, or an address."""
        return self.endpoint.shown

    # The server

    def health(self) -> None:
        self._json("GET", "/v1/health")

    def capabilities(self) -> Capabilities:
        return answers.capabilities(self._json("GET", "/v1/capabilities"))

    def node(self) -> Node:
        return answers.read(Node, self._json("GET", "/v1/node"))

    def cordon(self, cordoned: bool) -> Node:
        """While it is cordoned a node takes no new sandboxes."""
        return answers.read(Node, self._json("POST", "/v1/node/cordon", {"cordoned": cordoned}))

    def openapi(self) -> dict[str, Any]:
        """The API's own description."""
        return self._json("GET", "/v1/openapi.json")

    # Sandboxes

    def create(self, asked: Create) -> Sandbox:
        # An image that is not there yet may take an hour, and the server bounds it.
        timeout_s = None if asked.image else CREATE_S
        return answers.read(Sandbox, self._json("POST", "/v1/sandboxes", asked.body(), timeout_s=timeout_s))

    def sandboxes(self, labels: Sequence[str] = ()) -> list[Sandbox]:
        """Newest first; `labels` are `key=value` pairs that must all match."""
        query = "&".join(f"label={_quote(label)}" for label in labels)
        raw = self._json("GET", f"/v1/sandboxes{'?' if query else ''}{query}")
        return list(answers.field(tuple[Sandbox, ...], raw, "sandboxes"))

    def get(self, ref: str) -> Sandbox:
        return answers.read(Sandbox, self._json("GET", _at(ref)))

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
        given = {key: value for key, value in asked.items() if value is not None}
        return answers.read(Sandbox, self._json("PATCH", _at(ref), given))

    def delete(self, ref: str) -> None:
        self._json("DELETE", _at(ref))

    # Suspended sandboxes and snapshots: a server without the capability raises `Unsupported`

    def suspend(self, ref: str) -> Sandbox:
        """Its memory and disk are kept; `Conflict` while a process runs in it."""
        return answers.read(Sandbox, self._json("POST", f"{_at(ref)}/suspend", timeout_s=CREATE_S))

    def resume(self, ref: str) -> Sandbox:
        return answers.read(Sandbox, self._json("POST", f"{_at(ref)}/resume", timeout_s=CREATE_S))

    def snapshot(self, ref: str) -> Snapshot:
        """Take one; the sandbox runs on. It is finished even where the caller does not wait."""
        return answers.read(Snapshot, self._json("POST", f"{_at(ref)}/snapshots", timeout_s=None))

    def snapshots(self) -> list[Snapshot]:
        """Newest first."""
        return list(answers.field(tuple[Snapshot, ...], self._json("GET", "/v1/snapshots"), "snapshots"))

    def delete_snapshot(self, snapshot_id: str) -> None:
        self._json("DELETE", f"/v1/snapshots/{_quote(snapshot_id)}")

    def schedule_snapshots(self, ref: str, every_secs: int, keep: int | None = None) -> Sandbox:
        """Take one every so often and keep the newest `keep`; 0 seconds stops it."""
        asked = {"every_secs": every_secs} | ({} if keep is None else {"keep": keep})
        return answers.read(Sandbox, self._json("PUT", f"{_at(ref)}/snapshot-schedule", asked))

    # Volumes

    def create_volume(self, name: str, size_mb: int | None = None) -> Volume:
        """An empty one; the server says how large where no size is given."""
        asked = {"name": name} | ({} if size_mb is None else {"size_mb": size_mb})
        return answers.read(Volume, self._json("POST", "/v1/volumes", asked))

    def volumes(self) -> list[Volume]:
        """By name."""
        return list(answers.field(tuple[Volume, ...], self._json("GET", "/v1/volumes"), "volumes"))

    def delete_volume(self, name: str) -> None:
        """With all that is in it."""
        self._json("DELETE", f"/v1/volumes/{_quote(name)}")

    # Egress

    def egress(self, ref: str) -> Egress:
        """The network as it is and every name that was asked for; of an ended sandbox too."""
        return answers.read(Egress, self._json("GET", f"{_at(ref)}/egress"))

    def event(self, event_id: str) -> Event:
        """The decision that has this id."""
        return answers.read(Event, self._json("GET", f"/v1/events/{_quote(event_id)}"))

    # The audit log, and what a sandbox uses

    def events(self, ref: str) -> Events:
        """What happened to a sandbox, oldest first; by its id also after it is forgotten."""
        return answers.read(Events, self._json("GET", f"{_at(ref)}/events"))

    def verify_audit(self) -> AuditCheck:
        return answers.read(AuditCheck, self._json("GET", "/v1/audit/verify", timeout_s=None))

    def metrics(self, ref: str) -> Metrics:
        """The last hour's samples, oldest first."""
        return answers.read(Metrics, self._json("GET", f"{_at(ref)}/metrics"))

    # Images

    def images(self) -> list[Image]:
        """By name, with what is being installed and what failed."""
        return list(answers.field(tuple[Image, ...], self._json("GET", "/v1/images"), "images"))

    def install_image(self, image: str) -> Image:
        """Begin to install it, or join who has begun; `images` says how far it is."""
        return answers.read(Image, self._json("POST", "/v1/images", {"image": image}))

    def delete_image(self, image: str) -> ImageRemoved:
        return answers.read(ImageRemoved, self._json("DELETE", f"/v1/images?image={_quote(image)}"))

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
        return answers.read(RunResult, raw)

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
        return answers.read(Process, self._json("POST", f"{_at(ref)}/processes", asked))

    def processes(self, ref: str) -> list[Process]:
        raw = self._json("GET", f"{_at(ref)}/processes")
        return list(answers.field(tuple[Process, ...], raw, "processes"))

    def process(self, ref: str, pid: int) -> Process:
        return answers.read(Process, self._json("GET", f"{_at(ref)}/processes/{pid}"))

    def output(self, ref: str, pid: int) -> Iterator[Output]:
        """Output from the start, then as it comes; the last piece carries the exit code."""
        with self._ask("GET", f"{_at(ref)}/processes/{pid}/output", timeout_s=QUICK_S) as answer:
            try:
                for line in answer.lines(LINE_LIMIT_BYTES):
                    yield answers.output(answers.decode(line))
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
        answer = self._upgrade(target, "sbx-stream/1")
        decoder = FrameDecoder()
        try:
            return Attachment(answer.sock, decoder, tuple(decoder.feed(answer.early)))
        except BadAnswer:
            answer.sock.close()
            raise

    def tunnel(self, ref: str, port: int) -> Tunnel:
        """A connection to `port` of the guest's loopback address; `NotFound` where nothing listens there."""
        upgraded = self._upgrade(f"{_at(ref)}/tunnel?port={port}", "sbx-tunnel/1")
        return Tunnel(upgraded.sock, upgraded.early)

    # Files

    def read_file(self, ref: str, path: str) -> bytes:
        with self._ask("GET", f"{_at(ref)}/files?path={_quote(path)}", timeout_s=None) as answer:
            return self._read(answer)

    def stream_file(self, ref: str, path: str) -> Iterator[bytes]:
        """A file as it comes, so that a reader can stop where it has enough."""
        return self._stream(self._ask("GET", f"{_at(ref)}/files?path={_quote(path)}", timeout_s=None))

    def write_file(self, ref: str, path: str, data: bytes) -> None:
        target = f"{_at(ref)}/files?path={_quote(path)}"
        self._done(self._ask("PUT", target, headers=_BYTES, body=data, timeout_s=None))

    def remove_file(self, ref: str, path: str) -> None:
        self._json("DELETE", f"{_at(ref)}/files?path={_quote(path)}")

    def list_dir(self, ref: str, path: str) -> list[Entry]:
        raw = self._json("GET", f"{_at(ref)}/dirs?path={_quote(path)}")
        return list(answers.field(tuple[Entry, ...], raw, "entries"))

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
        headers: Mapping[str, str] | None = None,
        body: bytes | Iterable[bytes] = b"",
        length: int | None = None,
    ) -> Response:
        """Send a request; anything but success raises."""
        try:
            fields = self.endpoint.headers() | dict(headers or {})
            answer = unixhttp.request(
                self.endpoint.connect, method, target, headers=fields, body=body, length=length, timeout_s=timeout_s
            )
        except (ProtocolError, OSError) as fault:
            raise Unreachable(self.path, f"{_why(fault)}{self._hint(fault)}") from None
        try:
            self._raise_for(answer)
        except BaseException:
            answer.close()
            raise
        return answer

    def _hint(self, fault: Exception) -> str:
        """What may be wrong with an address on the network."""
        if isinstance(fault, ConnectionRefusedError) and not self.endpoint.socket_path:
            return "; nothing listens there: is sandboxd running, with --listen?"
        if isinstance(fault, ProtocolError) and self.endpoint.address.startswith("http://"):
            return "; is that port https://?"
        return ""

    def _upgrade(self, target: str, protocol: str) -> unixhttp.Upgraded:
        try:
            answer = unixhttp.upgrade(
                self.endpoint.connect, target, protocol=protocol, headers=self.endpoint.headers(), timeout_s=QUICK_S
            )
        except (ProtocolError, OSError) as fault:
            raise Unreachable(self.path, _why(fault)) from None
        if isinstance(answer, unixhttp.Upgraded):
            return answer
        with answer:
            self._raise_for(answer)
        raise BadAnswer("sandboxd answered an upgrade with something else")

    def _json(
        self, method: str, target: str, body: Any = None, *, timeout_s: float | None = QUICK_S
    ) -> dict[str, Any]:
        if body is None:
            answer = self._ask(method, target, timeout_s=timeout_s)
        else:
            data = json.dumps(body, separators=(",", ":")).encode("ascii")
            answer = self._ask(method, target, headers=_JSON, body=data, timeout_s=timeout_s)
        with answer:
            return answers.decode(self._read(answer)) if answer.status != 204 else {}

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
            error = answers.field(dict, answers.decode(self._read(answer)), "error")
            code, message = answers.field(str, error, "code"), answers.field(str, error, "message")
        except BadAnswer:
            raise BadAnswer(f"what answers at {self.path} is not sandboxd (status {answer.status})") from None
        kind: type[ApiError] = BY_CODE.get(code, Internal)
        if code == "invalid_request":
            kind = {413: BodyTooLarge, 415: MediaTypeRefused}.get(answer.status, kind)
        if kind is Unauthorized:
            message = f"{message}; {self.endpoint.token_remedy()}"
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
