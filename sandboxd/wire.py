"""The API's types. A leaf: names here are the names on the wire.

Requests refuse unknown fields and duplicate keys; `null` means absent, as it does for a Go peer. Answers
write a field that has no default always (so `network.allow` and `exit_code` may be null) and one with a
default only when it differs. Text is UTF-8; a byte of a path or an argument that is not comes and goes as a
lone surrogate escape (`\\udc80`).
"""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeVar

import msgspec

from sandboxd.errors import InvalidRequest

API_VERSION = "v1"
JSON_CAP = 1 << 20
RAW_CAP = 64 << 20
BUNDLE_CAP = 4 << 30
CHUNK = 64 << 10
STREAM_PROTOCOL = "sbx-stream/1"
TUNNEL_PROTOCOL = "sbx-tunnel/1"

NAME = "^[a-z0-9][a-z0-9-]{0,62}$"
IMAGE = "^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}$"
ENV_NAME = "^[A-Za-z_][A-Za-z0-9_]*$"
LABEL_KEY = "^[a-z0-9][a-z0-9._/-]{0,62}$"
BRANCH = "^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$"
COMMIT = "^[0-9a-f]{7,64}$"
"""Shapes of names, as the policy checks them and the API's document shows them. `$` is the end of the text."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of what a client sends."""


class NetworkRequest(Request, frozen=True, kw_only=True):
    mode: str | None = None
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] | None = None
    allow_tcp: tuple[str, ...] | None = None


class BindRequest(Request, frozen=True, kw_only=True):
    host_path: str | None = None
    read_only: bool | None = None


class MountRequest(Request, frozen=True, kw_only=True):
    name: str | None = None
    path: str | None = None
    read_only: bool | None = None


class CreateRequest(Request, frozen=True, kw_only=True):
    name: str | None = None
    image: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    env: dict[str, str] | None = None
    network: NetworkRequest | None = None
    idle_timeout_secs: int | None = None
    lifetime_secs: int | None = None
    snapshot_id: str | None = None
    snapshot_every_secs: int | None = None
    snapshot_keep: int | None = None
    labels: dict[str, str] | None = None
    volumes: tuple[MountRequest, ...] | None = None
    bind: BindRequest | None = None


class PatchRequest(Request, frozen=True, kw_only=True):
    network: NetworkRequest | None = None
    name: str | None = None
    labels: dict[str, str] | None = None
    idle_timeout_secs: int | None = None


class ProcessRequest(Request, frozen=True, kw_only=True):
    """For `run` and for `processes`; `stdin` (base64) and `timeout_secs` are `run`'s, the terminal is
    `processes`'."""

    argv: tuple[str, ...] | None = None
    env: dict[str, str] | None = None
    cwd: str | None = None
    stdin: str | None = None
    timeout_secs: float | None = None
    tty: bool | None = None
    rows: int | None = None
    cols: int | None = None


class SignalRequest(Request, frozen=True, kw_only=True):
    signal: str | None = None


class ScheduleRequest(Request, frozen=True, kw_only=True):
    every_secs: int | None = None
    keep: int | None = None


class VolumeRequest(Request, frozen=True, kw_only=True):
    name: str | None = None
    size_mb: int | None = None


class ImageRequest(Request, frozen=True, kw_only=True):
    image: str | None = None


class CordonRequest(Request, frozen=True, kw_only=True):
    cordoned: bool | None = None


class Empty(Request, frozen=True, kw_only=True):
    """Of routes that take no field."""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of what the server sends."""


class Health(Answer, frozen=True, kw_only=True):
    status: str


class Fault(Answer, frozen=True, kw_only=True):
    code: str
    message: str


class Failure(Answer, frozen=True, kw_only=True):
    """Every answer other than success."""

    error: Fault


class Network(Answer, frozen=True, kw_only=True):
    mode: str
    allow: tuple[str, ...] | None
    deny: tuple[str, ...] = ()
    allow_tcp: tuple[str, ...] = ()


class Mount(Answer, frozen=True, kw_only=True):
    """A volume's place in a sandbox."""

    name: str
    path: str
    read_only: bool


class Sandbox(Answer, frozen=True, kw_only=True):
    id: str
    name: str = ""
    state: str
    image: str
    cpus: float
    memory_mb: int
    disk_mb: int
    env_names: tuple[str, ...] = ()
    network: Network
    created_at: str
    idle_timeout_secs: int
    lifetime_secs: int = 0
    expires_at: str = ""
    labels: dict[str, str] = {}
    volumes: tuple[Mount, ...] = ()


class Sandboxes(Answer, frozen=True, kw_only=True):
    sandboxes: list[Sandbox]


class Process(Answer, frozen=True, kw_only=True):
    pid: int
    tty: bool = False
    argv: tuple[str, ...]
    state: str
    exit_code: int | None
    started_at: str


class Processes(Answer, frozen=True, kw_only=True):
    processes: list[Process]


class RunResult(Answer, frozen=True, kw_only=True):
    """The streams are base64."""

    exit_code: int
    stdout: str
    stderr: str
    truncated: bool
    timed_out: bool


class OutputLine(Answer, frozen=True, kw_only=True):
    """A piece of a stream, `data` in base64; or, last, the exit code alone. `dropped` counts the bytes before the
    piece that are no longer kept."""

    stream: str = ""
    data: str = ""
    dropped: int = 0
    exit_code: int | None = None


class Entry(Answer, frozen=True, kw_only=True):
    name: str
    type: str
    size: int


class Entries(Answer, frozen=True, kw_only=True):
    entries: list[Entry]


class Limits(Answer, frozen=True, kw_only=True):
    max_cpus: int
    max_memory_mb: int
    max_disk_mb: int
    max_idle_timeout_secs: int
    min_snapshot_every_secs: int
    max_snapshot_keep: int
    max_lifetime_secs: int


class NetworkOffer(Answer, frozen=True, kw_only=True):
    default: Network
    ceiling: str
    may_allow: tuple[str, ...]
    may_allow_tcp: tuple[str, ...] = ()


class EgressName(Answer, frozen=True, kw_only=True):
    """The bytes are the sandbox's, in and out."""

    id: str
    name: str
    port: int
    decision: str
    rule: str
    by: str
    count: int
    connections: int
    bytes_in: int
    bytes_out: int
    first_at: str
    last_at: str


class Egress(Network, frozen=True, kw_only=True):
    names: list[EgressName]


class Event(Answer, frozen=True, kw_only=True):
    """One decision about a name."""

    time: str
    type: str
    sandbox: str
    id: str
    name: str
    port: int
    rule: str
    by: str
    count: int
    why: str
    remedy: str
    bytes_in: int = 0
    bytes_out: int = 0


class Volume(Answer, frozen=True, kw_only=True):
    """`attached_to` is the id of the sandbox that writes to it, or of the first one that reads it."""

    name: str
    size_mb: int
    created_at: str
    attached_to: str = ""


class Volumes(Answer, frozen=True, kw_only=True):
    volumes: list[Volume]


class ImageProgress(Answer, frozen=True, kw_only=True):
    """`phase` is pulling or building; bytes, `total` 0 while it is not known."""

    phase: str
    done: int
    total: int


class Image(Answer, frozen=True, kw_only=True):
    """`state` is installed, installing or failed."""

    image: str
    state: str
    digest: str = ""
    bytes: int = 0
    installed_at: str = ""
    in_use: bool
    default: bool = False
    pooled: bool = False
    progress: ImageProgress | None = None
    error: str = ""


class Images(Answer, frozen=True, kw_only=True):
    images: list[Image]


class ImageRemoved(Answer, frozen=True, kw_only=True):
    image: str
    freed_bytes: int


class Sample(Answer, frozen=True, kw_only=True):
    """Measured on the host. `cpu_percent` is of the granted processors since the sample before; bytes are counted
    from the sandbox's start."""

    time: str
    cpu_percent: float
    memory_bytes: int
    memory_limit_bytes: int
    net_rx_bytes: int
    net_tx_bytes: int
    disk_read_bytes: int
    disk_write_bytes: int
    processes: int = 0


class Metrics(Answer, frozen=True, kw_only=True):
    interval_secs: int
    samples: list[Sample]


class Resources(Answer, frozen=True, kw_only=True):
    cpus: float
    memory_mb: int
    disk_mb: int


class AuditEvent(Answer, frozen=True, kw_only=True):
    """One event of the audit log. Which fields there are depends on `type`; names only, never a value, an argument or
    a file's content."""

    time: str
    type: str
    sandbox: str = ""
    name: str = ""
    image: str = ""
    labels: dict[str, str] | None = None
    network: Network | None = None
    idle_timeout_secs: int | None = None
    env_names: tuple[str, ...] = ()
    snapshot: str = ""
    volumes: tuple[Mount, ...] = ()
    reason: str = ""
    pid: int = 0
    program: str = ""
    arg_count: int = 0
    args_sha256: str = ""
    cwd: str = ""
    exit_code: int | None = None
    duration_ms: int | None = None
    path: str = ""
    bytes: int | None = None
    port: int = 0
    id: str = ""
    rule: str = ""
    by: str = ""
    count: int = 0


class Events(Answer, frozen=True, kw_only=True):
    events: list[AuditEvent]
    truncated: bool = False


class AuditCheck(Answer, frozen=True, kw_only=True):
    """Whether each line of the audit log follows from the one before. `fault` names the first place where not."""

    ok: bool
    lines: int
    files: int
    fault: str = ""


class Capabilities(Answer, frozen=True, kw_only=True):
    api_version: str
    backend: str
    capabilities: dict[str, bool]
    limits: Limits
    network: NetworkOffer


class Node(Answer, frozen=True, kw_only=True):
    """`pooled` counts the ready machines by image."""

    node: str
    version: str
    capabilities: Capabilities
    capacity: Resources
    free: Resources
    running: int
    pooled: dict[str, int] = {}
    images: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    cordoned: bool


T = TypeVar("T", bound=Request)


def decode(body: bytes, kind: type[T]) -> T:
    """A request's body as its type. Empty is `{}`. Raises `InvalidRequest` naming the place of the fault."""
    try:
        text = body.decode() or "{}"
        raw = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as fault:
        raise InvalidRequest(str(fault)) from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8") from None
    except json.JSONDecodeError as fault:
        # Its own text would repeat a piece of the body, and a body holds environment values.
        raise InvalidRequest(f"the body is not JSON: {fault.msg} at byte {fault.pos}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError:
        raise InvalidRequest("the body holds a number of too many digits") from None


def encode(value: Any) -> bytes:
    """An answer as JSON, ASCII only."""
    return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode("ascii")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InvalidRequest(f"the key {json.dumps(key[:64])} stands twice in one object")
        found[key] = value
    return found


def _constant(name: str) -> NoReturn:
    raise InvalidRequest(f"{name} is not a JSON number")
