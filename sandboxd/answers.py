"""What the API answers, as frozen values, and how JSON becomes one.

Fields a newer server adds are ignored; `null` and an absent field are the empty value of their type; a field of the
wrong type is a `BadAnswer`. Text is the server's or a guest's word: it goes through termsafe before a person sees it.

The values are named tuples: as frozen dataclasses they would cost every `sandbox-cli` command 30 ms at its start.
Annotations are evaluated here, since `read` goes by them.
"""

import binascii
import json
from collections.abc import Mapping
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

from sandboxd.errors import SandboxError

T = TypeVar("T")


class BadAnswer(SandboxError):
    """What answers is not this API."""


class Network(NamedTuple):
    mode: str
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    allow_tcp: tuple[str, ...] = ()


class Bind(NamedTuple):
    """A directory of the host that is a sandbox's /workspace."""

    host_path: str
    read_only: bool = False


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
    lifetime_secs: int = 0
    expires_at: str = ""
    bind: Bind | None = None


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
    registries: tuple[str, ...] = ()
    registries_tcp: tuple[str, ...] = ()
    lacking: Mapping[str, str] = {}


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


class ImageProgress(NamedTuple):
    """Bytes of a phase; `total` is 0 while it is not known."""

    phase: str
    done: int
    total: int


class Image(NamedTuple):
    """`state` is installed, installing or failed."""

    image: str
    state: str
    digest: str
    bytes: int
    installed_at: str
    in_use: bool
    default: bool
    pooled: bool
    progress: ImageProgress | None
    error: str


class ImageRemoved(NamedTuple):
    image: str
    freed_bytes: int


class Sample(NamedTuple):
    """Measured on the host; bytes count from the sandbox's start."""

    time: str
    cpu_percent: float
    memory_bytes: int
    memory_limit_bytes: int
    net_rx_bytes: int
    net_tx_bytes: int
    disk_read_bytes: int
    disk_write_bytes: int
    processes: int


class Metrics(NamedTuple):
    interval_secs: int
    samples: tuple[Sample, ...]


class Resources(NamedTuple):
    cpus: float
    memory_mb: int
    disk_mb: int


class Node(NamedTuple):
    """The machine: what it has and what sandboxes have not been given."""

    node: str
    version: str
    capabilities: Capabilities
    capacity: Resources
    free: Resources
    running: int
    pooled: Mapping[str, int]
    images: tuple[str, ...]
    labels: Mapping[str, str]
    cordoned: bool


class Snapshot(NamedTuple):
    """What a sandbox was; `kind` is `memory` (its processes go on in what starts from it) or `disk` (its files)."""

    id: str
    sandbox: str
    image: str
    kind: str
    bytes: int
    created_at: str
    scheduled: bool = False


class AuditEvent(NamedTuple):
    """One event of the audit log; which fields are filled depends on `type`."""

    time: str
    type: str
    sandbox: str
    name: str | None
    image: str
    labels: Mapping[str, str]
    network: Network | None
    idle_timeout_secs: int | None
    env_names: tuple[str, ...]
    snapshot: str
    volumes: tuple[Mount, ...]
    bind: Bind | None
    reason: str
    pid: int
    program: str
    arg_count: int
    args_sha256: str
    cwd: str
    exit_code: int | None
    duration_ms: int | None
    path: str
    bytes: int | None
    port: int
    id: str
    rule: str
    by: str
    count: int  # type: ignore[assignment]  # as the wire names it; hides tuple.count


class Events(NamedTuple):
    events: tuple[AuditEvent, ...]
    truncated: bool


class AuditCheck(NamedTuple):
    """Whether the audit log's chain holds; `fault` names the first place where it does not.
    `last` is the hash of the last good line."""

    ok: bool
    lines: int
    files: int
    fault: str
    last: str
    notes: tuple[str, ...]


def decode(body: bytes) -> dict[str, Any]:
    """A JSON object, or `BadAnswer`."""
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        raw = None
    if not isinstance(raw, dict):
        raise BadAnswer("sandboxd's answer is not a JSON object")
    return raw


def read(kind: type[T], raw: Mapping[str, Any]) -> T:
    """An object as the named tuple `kind`."""
    return kind(**{name: field(form, raw, name) for name, form in kind.__annotations__.items()})


def capabilities(raw: Mapping[str, Any]) -> Capabilities:
    """What stands in `network` is on a level with the rest."""
    network = field(dict, raw, "network")
    return Capabilities(
        api_version=field(str, raw, "api_version"),
        backend=field(str, raw, "backend"),
        capabilities=field(Mapping[str, bool], raw, "capabilities"),
        limits=field(Mapping[str, int], raw, "limits"),
        network_default=field(Network, network, "default"),
        network_ceiling=field(str, network, "ceiling"),
        network_may_allow=field(tuple[str, ...], network, "may_allow"),
        network_may_allow_tcp=field(tuple[str, ...], network, "may_allow_tcp"),
        registries=field(tuple[str, ...], network, "registries"),
        registries_tcp=field(tuple[str, ...], network, "registries_tcp"),
        lacking=field(Mapping[str, str], raw, "lacking"),
    )


def output(raw: Mapping[str, Any]) -> Output:
    """A line of a process's output."""
    return Output(
        stream=field(str, raw, "stream"),
        data=field(bytes, raw, "data"),
        exit_code=field(int | None, raw, "exit_code"),
        dropped_bytes=field(int, raw, "dropped"),
    )


def field(form: Any, raw: Mapping[str, Any], name: str) -> Any:
    """The field `name` as `form`: a type of a named tuple's field."""
    return _value(form, raw.get(name), name)


_PLAIN: dict[Any, tuple[Any, Any, str]] = {
    str: (str, "", "text"),
    int: (int, 0, "a whole number"),
    float: (int | float, 0, "a number"),
    bool: (bool, False, "true or false"),
    dict: (dict, {}, "an object"),
}
"""What JSON may hold for a type, its empty value, and its name."""


def _value(form: Any, value: Any, name: str) -> Any:
    if form in _PLAIN:
        fits, empty, called = _PLAIN[form]
        if value is None:
            return empty
        if not isinstance(value, fits) or (isinstance(value, bool) and form is not bool):
            raise BadAnswer(f"sandboxd's answer has a {name} that is not {called}")
        return value
    if form is bytes:
        return _bytes(value, name)
    if form is Capabilities:
        return capabilities(_value(dict, value, name))
    if isinstance(form, UnionType):
        return None if value is None else _value(get_args(form)[0], value, name)
    if get_origin(form) is tuple:
        if value is None:
            return ()
        if not isinstance(value, list) or None in value:
            raise BadAnswer(f"sandboxd's answer has a {name} that is not a list")
        return tuple(_value(get_args(form)[0], one, name) for one in value)
    held = _value(dict, value, name)
    if get_origin(form) is Mapping:
        return {key: _value(get_args(form)[1], one, name) for key, one in held.items()}
    return read(form, held)


def _bytes(value: Any, name: str) -> bytes:
    try:
        return binascii.a2b_base64(_value(str, value, name), strict_mode=True)
    except (binascii.Error, ValueError):
        raise BadAnswer(f"sandboxd's answer has a {name} that is not base64") from None
