"""The API's types. A leaf: names here are the names on the wire.

Requests refuse unknown fields and duplicate keys; `null` means absent, as it does for a Go peer. Answers
write a field that has no default always (so `network.allow` and `exit_code` may be null) and one with a
default only when it differs. Text is UTF-8; a byte of a path or an argument that is not comes and goes as a
lone surrogate escape (`\\udc80`).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec

from sandboxd.errors import InvalidRequest

API_VERSION = "v1"
JSON_CAP = 1 << 20
RAW_CAP = 64 << 20
BUNDLE_CAP = 4 << 30
CHUNK = 64 << 10
STREAM_PROTOCOL = "sbx-stream/1"
TUNNEL_PROTOCOL = "sbx-tunnel/1"
MAX_INTEGER = 2**53 - 1
"""What every reader of JSON takes without loss (RFC 8259 §6)."""

NAME = "^[a-z0-9][a-z0-9-]{0,62}$"
IMAGE = "^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}$"
ENV_NAME = "^[A-Za-z_][A-Za-z0-9_]*$"
LABEL_KEY = "^[a-z0-9][a-z0-9._/-]{0,62}$"
BRANCH = "^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$"
COMMIT = "^[0-9a-f]{7,64}$"
OPTIONAL_NAME = f"^$|{NAME}"
OPTIONAL_IMAGE = f"^$|{IMAGE}"
"""Shapes of names, as the policy checks them and the API's document shows them. `$` is the end of the text."""

MODES = ("none", "allowlist", "open")
"""Of a network, from the strictest on."""
STATES = ("pending", "running", "suspended", "terminated")
SIGNALS = ("INT", "TERM", "KILL", "HUP")


def about(meaning: str, **schema: Any) -> msgspec.Meta:
    """What the API's document says of a field. The policy checks a request, in an order that the API promises."""
    return msgspec.Meta(description=meaning, extra_json_schema=schema or None)


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of what a client sends."""


class NetworkRequest(Request, frozen=True, kw_only=True):
    mode: Annotated[
        str | None, about("How much may be reached; absent: the server's default.", enum=[*MODES, None])
    ] = None
    allow: Annotated[
        tuple[str, ...] | None,
        about("Names, or `*.name` for all below one; replaces the server's list. Null: the server's list."),
    ] = None
    deny: Annotated[
        tuple[str, ...] | None, about("Names refused whatever else is allowed; added to the server's.")
    ] = None
    allow_tcp: Annotated[
        tuple[str, ...] | None,
        about(
            "`HOST:PORT` on other ports than the web's; replaces the server's list. Null: none where `allow` is given, "
            "else the server's list."
        ),
    ] = None


class BindRequest(Request, frozen=True, kw_only=True):
    host_path: Annotated[str | None, about("An absolute path on the host.")] = None
    read_only: Annotated[bool | None, about("Whether the guest may not write to it.")] = None


class MountRequest(Request, frozen=True, kw_only=True):
    name: Annotated[str | None, about("The volume's name.", pattern=NAME)] = None
    path: Annotated[
        str | None,
        about(
            "Where it is in the guest: absolute, not a place of the system's.",
            pattern="^/[A-Za-z0-9._/-]+$",
        ),
    ] = None
    read_only: Annotated[bool | None, about("One sandbox may write, or any number may read.")] = None


class CreateRequest(Request, frozen=True, kw_only=True):
    name: Annotated[str | None, about("Free again once the sandbox has ended.", pattern=OPTIONAL_NAME)] = None
    image: Annotated[
        str | None, about("What it starts from; absent: the server's default image.", pattern=OPTIONAL_IMAGE)
    ] = None
    cpus: Annotated[
        float | None, about("Processors; 0 or absent: the default. At most `limits.max_cpus`.", minimum=0)
    ] = None
    memory_mb: Annotated[
        int | None, about("MiB; 0 or absent: the default. At most `limits.max_memory_mb`.", minimum=0)
    ] = None
    disk_mb: Annotated[
        int | None, about("MiB; 0 or absent: the default. At most `limits.max_disk_mb`.", minimum=0)
    ] = None
    env: Annotated[
        dict[str, str] | None,
        about(
            "Environment of every process in it. No answer holds a value.",
            propertyNames={"pattern": ENV_NAME},
        ),
    ] = None
    network: Annotated[NetworkRequest | None, about("What it may reach; absent: the server's default.")] = None
    idle_timeout_secs: Annotated[
        int | None,
        about(
            "It ends after so long without a request and without a process; 0 or absent: the default.",
            minimum=0,
        ),
    ] = None
    lifetime_secs: Annotated[
        int | None,
        about(
            "It ends so long after it was made, whatever it does; 0 or absent: the server's limit, if any.",
            minimum=0,
        ),
    ] = None
    snapshot_id: Annotated[str | None, about("Not built yet.")] = None
    snapshot_every_secs: Annotated[int | None, about("Not built yet.", minimum=0)] = None
    snapshot_keep: Annotated[int | None, about("Not built yet.", minimum=0)] = None
    labels: Annotated[
        dict[str, str] | None,
        about(
            "At most 32; values of at most 256 bytes without control characters.",
            maxProperties=32, propertyNames={"pattern": LABEL_KEY},
        ),
    ] = None
    volumes: Annotated[
        tuple[MountRequest, ...] | None, about("Volumes and where they are mounted; at most 8.", maxItems=8)
    ] = None
    bind: Annotated[
        BindRequest | None, about("A directory of this host at `/workspace`, where the server permits it.")
    ] = None


class PatchRequest(Request, frozen=True, kw_only=True):
    network: Annotated[NetworkRequest | None, about("As for a create; the sandbox must be running.")] = None
    name: Annotated[str | None, about("An empty name takes it away.", pattern=OPTIONAL_NAME)] = None
    labels: Annotated[
        dict[str, str] | None,
        about(
            "Replaces all; `{}` removes all.",
            maxProperties=32, propertyNames={"pattern": LABEL_KEY},
        ),
    ] = None
    idle_timeout_secs: Annotated[int | None, about("As for a create, at least 1.", minimum=0)] = None


class ProcessRequest(Request, frozen=True, kw_only=True):
    """For `run` and for `processes`; `stdin` (base64) and `timeout_secs` are `run`'s, the terminal is
    `processes`'."""

    argv: Annotated[
        tuple[str, ...] | None, about("The command and its arguments; no shell. Required.", minItems=1)
    ] = None
    env: Annotated[
        dict[str, str] | None, about("Added to the sandbox's own.", propertyNames={"pattern": ENV_NAME})
    ] = None
    cwd: Annotated[str | None, about("Working directory in the guest; absent: the sandbox user's home.")] = None
    stdin: Annotated[
        str | None, about("`run` only: all of its standard input, in base64.", contentEncoding="base64")
    ] = None
    timeout_secs: Annotated[
        float | None, about("`run` only: it is killed after so long; 0 or absent: never.", minimum=0)
    ] = None
    tty: Annotated[bool | None, about("`processes` only: gives it a terminal, whose output is one stream.")] = None
    rows: Annotated[int | None, about("The terminal's height.", minimum=0, maximum=65535)] = None
    cols: Annotated[int | None, about("The terminal's width.", minimum=0, maximum=65535)] = None


class SignalRequest(Request, frozen=True, kw_only=True):
    signal: Annotated[str | None, about("Which signal. Required.", enum=[*SIGNALS, None])] = None


class ScheduleRequest(Request, frozen=True, kw_only=True):
    every_secs: Annotated[int | None, about("Not built yet.", minimum=0)] = None
    keep: Annotated[int | None, about("Not built yet.", minimum=0)] = None


class VolumeRequest(Request, frozen=True, kw_only=True):
    name: Annotated[str | None, about("Required.", pattern=NAME)] = None
    size_mb: Annotated[int | None, about("MiB; absent: the default disk. At most `limits.max_disk_mb`.")] = None


class ImageRequest(Request, frozen=True, kw_only=True):
    image: Annotated[str | None, about("The image's reference. Required.", pattern=IMAGE)] = None


class CordonRequest(Request, frozen=True, kw_only=True):
    cordoned: Annotated[bool | None, about("Whether new sandboxes are refused from now on. Required.")] = None


class Empty(Request, frozen=True, kw_only=True):
    """Of routes that take no field."""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of what the server sends."""


class Health(Answer, frozen=True, kw_only=True):
    status: Annotated[str, about("`ok`.")]


class Fault(Answer, frozen=True, kw_only=True):
    code: Annotated[str, about("What kind of refusal; stays the same.")]
    message: Annotated[str, about("For a person: what is wrong and what to do.")]


class Failure(Answer, frozen=True, kw_only=True):
    """Every answer other than success."""

    error: Annotated[Fault, about("The refusal.")]


class Network(Answer, frozen=True, kw_only=True):
    mode: Annotated[str, about("How much may be reached.", enum=list(MODES))]
    allow: Annotated[tuple[str, ...] | None, about("Names that may be reached; null where there is no list.")]
    deny: Annotated[tuple[str, ...], about("Names refused whatever else is allowed.")] = ()
    allow_tcp: Annotated[tuple[str, ...], about("`HOST:PORT` on other ports than the web's.")] = ()


class Bind(Answer, frozen=True, kw_only=True):
    """A directory of the host in a sandbox."""

    host_path: Annotated[str, about("Where it is on the host, links resolved.")]
    read_only: Annotated[bool, about("Whether the guest can only read it.")]


class Mount(Answer, frozen=True, kw_only=True):
    """A volume's place in a sandbox."""

    name: Annotated[str, about("The volume's name.")]
    path: Annotated[str, about("Where it is in the guest.")]
    read_only: Annotated[bool, about("Whether the guest can only read it.")]


class Sandbox(Answer, frozen=True, kw_only=True):
    id: Annotated[str, about("`sbx_` and 16 hex digits, the node's name between them where it has one.")]
    name: Annotated[str, about("Absent where it has none.")] = ""
    state: Annotated[str, about("Where it is in its life.", enum=list(STATES))]
    image: Annotated[str, about("What it was started from.")]
    cpus: Annotated[float, about("Processors.")]
    memory_mb: Annotated[int, about("MiB.")]
    disk_mb: Annotated[int, about("MiB.")]
    env_names: Annotated[tuple[str, ...], about("Names of its environment; never values.")] = ()
    network: Annotated[Network, about("What it may reach.")]
    created_at: Annotated[str, about("When it was asked for.", format="date-time")]
    idle_timeout_secs: Annotated[int, about("Seconds without a request or a process after which it ends; 0: never.")]
    lifetime_secs: Annotated[int, about("Seconds after which it ends; absent: none.")] = 0
    expires_at: Annotated[str, about("When that is.", format="date-time")] = ""
    labels: Annotated[dict[str, str], about("Its labels.")] = {}
    volumes: Annotated[tuple[Mount, ...], about("Volumes mounted in it.")] = ()
    bind: Annotated[Bind | None, about("The directory of its host that is its `/workspace`; absent: none.")] = None


class Sandboxes(Answer, frozen=True, kw_only=True):
    sandboxes: Annotated[list[Sandbox], about("Newest first.")]


class Process(Answer, frozen=True, kw_only=True):
    pid: Annotated[int, about("The server's number for it, from 1 on in each sandbox; not the guest's.")]
    tty: Annotated[bool, about("Whether it has a terminal.")] = False
    argv: Annotated[tuple[str, ...], about("The command.")]
    state: Annotated[str, about("`running` or `exited`.", enum=["running", "exited"])]
    exit_code: Annotated[
        int | None,
        about("128 and a signal's number where one ended it; null while it runs; -1 where its sandbox ended first."),
    ]
    started_at: Annotated[str, about("When it was started.", format="date-time")]


class Processes(Answer, frozen=True, kw_only=True):
    processes: Annotated[list[Process], about("By pid.")]


class RunResult(Answer, frozen=True, kw_only=True):
    """The streams are base64."""

    exit_code: Annotated[int, about("128 and the signal's number where a signal ended it, -1 after a timeout.")]
    stdout: Annotated[str, about("Its first 8 MiB, in base64.", contentEncoding="base64")]
    stderr: Annotated[str, about("Likewise.", contentEncoding="base64")]
    truncated: Annotated[bool, about("Whether a stream was longer.")]
    timed_out: Annotated[bool, about("Whether it was killed for its timeout.")]


class OutputLine(Answer, frozen=True, kw_only=True):
    """A piece of a stream, `data` in base64; or, last, the exit code alone. `dropped` counts the bytes before the
    piece that are no longer kept."""

    stream: Annotated[str, about("`stdout` or `stderr`.", enum=["stdout", "stderr"])] = ""
    data: Annotated[str, about("In base64.", contentEncoding="base64")] = ""
    dropped: Annotated[int, about("Bytes of this stream before `data` that are no longer kept.")] = 0
    exit_code: Annotated[int | None, about("Only in the last line, alone.")] = None


class Entry(Answer, frozen=True, kw_only=True):
    name: Annotated[str, about("Bytes that are no UTF-8 are lone surrogate escapes.")]
    type: Annotated[
        str, about("Of the entry itself; a link is not followed.", enum=["file", "dir", "symlink", "other"])
    ]
    size: Annotated[int, about("Bytes; 0 but for files.", minimum=0)]


class Entries(Answer, frozen=True, kw_only=True):
    entries: Annotated[list[Entry], about("By name.")]


class Limits(Answer, frozen=True, kw_only=True):
    max_cpus: Annotated[int, about("Per sandbox.")]
    max_memory_mb: Annotated[int, about("Per sandbox.")]
    max_disk_mb: Annotated[int, about("Per sandbox.")]
    max_idle_timeout_secs: Annotated[int, about("0: no limit.")]
    min_snapshot_every_secs: Annotated[int, about("Of a snapshot schedule.")]
    max_snapshot_keep: Annotated[int, about("Of a snapshot schedule.")]
    max_lifetime_secs: Annotated[int, about("0: no limit.")]


class NetworkOffer(Answer, frozen=True, kw_only=True):
    default: Annotated[Network, about("What a sandbox gets that asks for nothing.")]
    ceiling: Annotated[str, about("The widest mode there is.", enum=list(MODES))]
    may_allow: Annotated[tuple[str, ...], about("Names a request may allow beside the default's; `*`: any.")]
    may_allow_tcp: Annotated[tuple[str, ...], about("`HOST:PORT` likewise.")] = ()
    registries: Annotated[tuple[str, ...], about("Names of the package registries that the server's host uses.")] = ()
    registries_tcp: Annotated[tuple[str, ...], about("Those on a port of their own, as `HOST:PORT`.")] = ()


class EgressName(Answer, frozen=True, kw_only=True):
    """The bytes are the sandbox's, in and out."""

    id: Annotated[str, about("For `GET /v1/events/{id}`.")]
    name: Annotated[str, about("The name that was asked for.")]
    port: Annotated[int, about("0 for a question to DNS.")]
    decision: Annotated[str, about("What was decided.", enum=["denied", "allowed"])]
    rule: Annotated[str, about("Which rule decided.")]
    by: Annotated[str, about("What named it.")]
    count: Annotated[int, about("How often.")]
    connections: Annotated[int, about("Of those that were allowed.")]
    bytes_in: Annotated[int, about("Bytes the sandbox received.")]
    bytes_out: Annotated[int, about("Bytes the sandbox sent.")]
    first_at: Annotated[str, about("When it was first asked for.", format="date-time")]
    last_at: Annotated[str, about("When it was last asked for.", format="date-time")]


class Egress(Network, frozen=True, kw_only=True):
    names: Annotated[list[EgressName], about("Every name it asked for.")]


class Event(Answer, frozen=True, kw_only=True):
    """One decision about a name."""

    time: Annotated[str, about("When it was last asked for.", format="date-time")]
    type: Annotated[str, about("`egress.denied` or `egress.allowed`.")]
    sandbox: Annotated[str, about("Its id.")]
    id: Annotated[str, about("The decision's.")]
    name: Annotated[str, about("The name that was asked for.")]
    port: Annotated[int, about("0 for a question to DNS.")]
    rule: Annotated[str, about("Which rule decided.")]
    by: Annotated[str, about("What named it.")]
    count: Annotated[int, about("How often.")]
    why: Annotated[str, about("For a person.")]
    remedy: Annotated[str, about("The command line's flag that would allow it; empty where nothing can.")]
    bytes_in: Annotated[int, about("Bytes the sandbox received.")] = 0
    bytes_out: Annotated[int, about("Bytes the sandbox sent.")] = 0


class Volume(Answer, frozen=True, kw_only=True):
    """`attached_to` is the id of the sandbox that writes to it, or of the first one that reads it."""

    name: Annotated[str, about("Its name.")]
    size_mb: Annotated[int, about("MiB.")]
    created_at: Annotated[str, about("When it was made.", format="date-time")]
    attached_to: Annotated[str, about("The sandbox that has it; absent: none.")] = ""


class Volumes(Answer, frozen=True, kw_only=True):
    volumes: Annotated[list[Volume], about("By name.")]


class ImageProgress(Answer, frozen=True, kw_only=True):
    """`phase` is pulling or building; bytes, `total` 0 while it is not known."""

    phase: Annotated[str, about("What is under way.")]
    done: Annotated[int, about("Bytes.")]
    total: Annotated[int, about("Bytes; 0 while not known.")]


class Image(Answer, frozen=True, kw_only=True):
    """`state` is installed, installing or failed."""

    image: Annotated[str, about("Its reference.")]
    state: Annotated[str, about("`installed`, `installing` or `failed`.", enum=["installed", "installing", "failed"])]
    digest: Annotated[str, about("What was fetched.")] = ""
    bytes: Annotated[int, about("On disk.")] = 0
    installed_at: Annotated[str, about("When it was ready.")] = ""
    in_use: Annotated[bool, about("Whether a sandbox was started from it.")]
    default: Annotated[bool, about("Whether it is the server's default.")] = False
    pooled: Annotated[bool, about("Whether machines stand ready with it.")] = False
    progress: Annotated[ImageProgress | None, about("While it is installed.")] = None
    error: Annotated[str, about("Why it failed.")] = ""


class Images(Answer, frozen=True, kw_only=True):
    images: Annotated[list[Image], about("By name.")]


class ImageRemoved(Answer, frozen=True, kw_only=True):
    image: Annotated[str, about("Its reference.")]
    freed_bytes: Annotated[int, about("On disk.")]


class Sample(Answer, frozen=True, kw_only=True):
    """Measured on the host. `cpu_percent` is of the granted processors since the sample before; bytes are counted
    from the sandbox's start."""

    time: Annotated[str, about("When.", format="date-time")]
    cpu_percent: Annotated[float, about("0 to 100 of the granted processors.")]
    memory_bytes: Annotated[int, about("In use on the host.")]
    memory_limit_bytes: Annotated[int, about("Granted.")]
    net_rx_bytes: Annotated[int, about("Received by the sandbox.")]
    net_tx_bytes: Annotated[int, about("Sent by the sandbox.")]
    disk_read_bytes: Annotated[int, about("Read.")]
    disk_write_bytes: Annotated[int, about("Written.")]
    processes: Annotated[int, about("Running, as far as the server started them.")] = 0


class Metrics(Answer, frozen=True, kw_only=True):
    interval_secs: Annotated[int, about("Between samples.")]
    samples: Annotated[list[Sample], about("Oldest first.")]


class Resources(Answer, frozen=True, kw_only=True):
    cpus: Annotated[float, about("Processors.")]
    memory_mb: Annotated[int, about("MiB.")]
    disk_mb: Annotated[int, about("MiB.")]


class AuditEvent(Answer, frozen=True, kw_only=True):
    """One event of the audit log. Which fields there are depends on `type`; names only, never a value, an argument or
    a file's content."""

    time: Annotated[str, about("When.", format="date-time")]
    type: Annotated[str, about("What happened.")]
    sandbox: Annotated[str, about("Its id.")] = ""
    name: Annotated[str | None, about("The sandbox's name, or the one that a guest asked for.")] = None
    image: Annotated[str, about("What it was started from.")] = ""
    labels: Annotated[dict[str, str] | None, about("Its labels.")] = None
    network: Annotated[Network | None, about("What it may reach.")] = None
    idle_timeout_secs: Annotated[int | None, about("Where it was changed.")] = None
    env_names: Annotated[tuple[str, ...], about("Names only.")] = ()
    snapshot: Annotated[str, about("Its id.")] = ""
    volumes: Annotated[tuple[Mount, ...], about("Mounted in it.")] = ()
    bind: Annotated[Bind | None, about("The directory of the host that it shares.")] = None
    reason: Annotated[str, about("Why, or for a bundle which branch.")] = ""
    pid: Annotated[int, about("Of a process.")] = 0
    program: Annotated[str, about("Its first argument.")] = ""
    arg_count: Annotated[int, about("How many more there were.")] = 0
    args_sha256: Annotated[str, about("Of each further argument and a NUL; hexadecimal.")] = ""
    cwd: Annotated[str, about("Its working directory.")] = ""
    exit_code: Annotated[int | None, about("How it ended.")] = None
    duration_ms: Annotated[int | None, about("How long it ran.")] = None
    path: Annotated[str, about("Of a file.")] = ""
    bytes: Annotated[int | None, about("How many.")] = None
    port: Annotated[int, about("Of a tunnel, or of what a guest asked for.")] = 0
    id: Annotated[str, about("Of a decision about a name.")] = ""
    rule: Annotated[str, about("Which rule decided.")] = ""
    by: Annotated[str, about("What named it.")] = ""
    count: Annotated[int, about("How often.")] = 0


class Events(Answer, frozen=True, kw_only=True):
    events: Annotated[list[AuditEvent], about("Oldest first.")]
    truncated: Annotated[bool, about("Whether there were more.")] = False


class AuditCheck(Answer, frozen=True, kw_only=True):
    """Whether each line of the audit log follows from the one before. `fault` names the first place where not."""

    ok: Annotated[bool, about("Whether the chain holds.")]
    lines: Annotated[int, about("That were checked.")]
    files: Annotated[int, about("That were checked.")]
    fault: Annotated[str, about("The first place where it does not.")] = ""
    last: Annotated[str, about("The hash of the last good line, worth keeping elsewhere.")] = ""
    notes: Annotated[tuple[str, ...], about("What is no fault and should be known.")] = ()


class Capabilities(Answer, frozen=True, kw_only=True):
    api_version: Annotated[str, about("`v1`.")]
    backend: Annotated[str, about("What runs the machines.")]
    capabilities: Annotated[dict[str, bool], about("Name and whether it is there; absent is false.")]
    limits: Annotated[Limits, about("What a sandbox may have.")]
    network: Annotated[NetworkOffer, about("What a sandbox may reach.")]
    lacking: Annotated[dict[str, str], about("Why capabilities are not there, of those where it is known.")] = {}


class Node(Answer, frozen=True, kw_only=True):
    """`pooled` counts the ready machines by image."""

    node: Annotated[str, about("Its name.")]
    version: Annotated[str, about("Of the server.")]
    capabilities: Annotated[Capabilities, about("As `GET /v1/capabilities`.")]
    capacity: Annotated[Resources, about("What there is.")]
    free: Annotated[Resources, about("What sandboxes have not been given.")]
    running: Annotated[int, about("Sandboxes whose state is `running`.")]
    pooled: Annotated[dict[str, int], about("Machines that stand ready, by image.")] = {}
    images: Annotated[tuple[str, ...], about("That are installed.")] = ()
    labels: Annotated[dict[str, str], about("The operator's.")] = {}
    cordoned: Annotated[bool, about("Whether new sandboxes are refused.")]


T = TypeVar("T", bound=Request)


def decode(body: bytes, kind: type[T]) -> T:
    """A request's body as its type. Empty is `{}`. Raises `InvalidRequest` naming the place of the fault."""
    try:
        text = body.decode() or "{}"
        raw = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer)
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as fault:
        raise InvalidRequest(str(fault)) from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8") from None
    except UnicodeEncodeError:
        raise InvalidRequest("a text holds half a surrogate pair where another type was expected") from None
    except json.JSONDecodeError as fault:
        # Its own text would repeat a piece of the body, and a body holds environment values.
        raise InvalidRequest(f"the body is not JSON: {fault.msg} at byte {fault.pos}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


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


def _integer(digits: str) -> int:
    if len(digits) > len(str(-MAX_INTEGER)) or abs(number := int(digits)) > MAX_INTEGER:
        raise InvalidRequest(f"the body holds a number of too many digits: {digits[:20]}...")
    return number


def _constant(name: str) -> NoReturn:
    raise InvalidRequest(f"{name} is not a JSON number")
