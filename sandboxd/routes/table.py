"""The API's one route table: what each route takes, answers and refuses.

The server matches request lines against it, handlers and the guard read a route's body and limits from it, the
OpenAPI document and docs/api.md are written from it. A new route is a row here and a handler of its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import unquote_to_bytes

from sandboxd import wire
from sandboxd.errors import (
    ApiError,
    BodyTooLarge,
    Conflict,
    ForbiddenOrigin,
    Internal,
    InvalidRequest,
    MediaTypeRefused,
    NotFound,
    Refused,
    Unauthorized,
    Unavailable,
    Unsupported,
)  # fmt: skip

JSON_TYPE = "application/json"
RAW_TYPE = "application/octet-stream"
LINES_TYPE = "application/x-ndjson"
SWITCH = 101
NOT_BUILT = 501

EVERYWHERE: tuple[type[ApiError], ...] = (
    InvalidRequest, MediaTypeRefused, Unauthorized, ForbiddenOrigin, Unavailable, Internal
)
"""What the guard and the limits refuse on any route."""


class Body(Enum):
    """What a route's body is: its media type and its limit."""

    JSON = (JSON_TYPE, wire.JSON_CAP)
    RAW = (RAW_TYPE, wire.RAW_CAP)
    BUNDLE = (RAW_TYPE, wire.BUNDLE_CAP)

    def __init__(self, media_type: str, cap: int) -> None:
        self.media_type = media_type
        self.cap = cap


@dataclass(frozen=True, slots=True)
class Parameter:
    """Of the query string. `schema` is its JSON schema as far as every endpoint has it."""

    name: str
    meaning: str
    schema: dict[str, Any]
    required: bool = True
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """`name` is the operation's; `path` holds `{ref}` and `{pid}` as whole segments. Success is `status` with an
    `answer` as `media_type`: JSON of a type, lines of it, or bytes where it is None; with a `protocol` it is an
    upgrade. `errors` are what the handler refuses beyond `EVERYWHERE`."""

    name: str
    method: str
    path: str
    summary: str
    answer: type[wire.Answer] | None = None
    status: int = 200
    media_type: str = JSON_TYPE
    body: Body = Body.JSON
    request: type[wire.Request] | None = None
    query: tuple[Parameter, ...] = ()
    errors: tuple[type[ApiError], ...] = ()
    capability: str = ""
    protocol: str = ""

    def refusals(self) -> tuple[type[ApiError], ...]:
        """All errors this route can answer."""
        found = [kind for kind in EVERYWHERE if self.name != "health" or kind is not Unauthorized]
        if self.body is not Body.JSON:
            found.append(BodyTooLarge)
        if "{" in self.path:
            found.append(NotFound)
        if self.capability:
            found.append(Unsupported)
        found.extend(kind for kind in self.errors if kind not in found)
        return tuple(found)


def _text(name: str, meaning: str, **schema: Any) -> Parameter:
    return Parameter(name, meaning, {"type": "string", **schema})


GUEST_PATH = _text("path", "An absolute path in the guest, without `..` and NUL.", pattern="^/")
BRANCH = _text("branch", "A branch name.", pattern=wire.BRANCH)
BASE = _text("base", "A commit (7 to 64 hex digits) or a branch name: what the caller has already.", minLength=1)
LABEL = Parameter(
    "label", "`key=value`; only sandboxes that have this label. Several must all match.",
    {"type": "string", "pattern": "="}, required=False, repeated=True,
)  # fmt: skip
CLOSE = Parameter("close", "`1` ends the process's input after this.", {"type": "string"}, required=False)
PORT = Parameter(
    "port", "A TCP port of the guest's loopback address.", {"type": "integer", "minimum": 1, "maximum": 65535}
)
IMAGE = _text("image", "The image's reference.", pattern=wire.IMAGE)

S = "/v1/sandboxes/{ref}"
P = f"{S}/processes/{{pid}}"
RUNNING = (Conflict, Unsupported)
"""Of what needs a running sandbox, with an agent that knows the operation."""
ROUTES: tuple[Route, ...] = (
    Route("health", "GET", "/v1/health", "Whether the server answers; needs no token.", wire.Health),
    Route(
        "capabilities", "GET", "/v1/capabilities", "What this endpoint can do, and its limits.", wire.Capabilities
    ),
    Route(
        "create", "POST", "/v1/sandboxes", "Make a sandbox and wait until it runs.", wire.Sandbox, 201,
        request=wire.CreateRequest, errors=(Refused, NotFound, Conflict, Unsupported),
    ),
    Route(
        "list", "GET", "/v1/sandboxes", "All sandboxes, newest first, with the last hundred that ended.",
        wire.Sandboxes, query=(LABEL,),
    ),
    Route("get", "GET", S, "One sandbox, by id or by name.", wire.Sandbox),
    Route(
        "update", "PATCH", S, "Change a sandbox's network, name, labels or idle timeout: all of it or nothing.",
        wire.Sandbox, request=wire.PatchRequest, errors=(Refused, Conflict, Unsupported),
    ),
    Route(
        "delete", "DELETE", S, "End a sandbox and discard its disk. Again is fine.", status=204,
        errors=(Conflict,),
    ),
    Route(
        "run", "POST", f"{S}/run", "Run a command and wait for its end. It is killed when the caller goes away.",
        wire.RunResult, request=wire.ProcessRequest, errors=(Refused, *RUNNING),
    ),
    Route(
        "start", "POST", f"{S}/processes", "Start a process that outlives this call.", wire.Process, 201,
        request=wire.ProcessRequest, errors=(Refused, *RUNNING),
    ),
    Route("processes", "GET", f"{S}/processes", "A sandbox's processes by pid; of an ended one too.", wire.Processes),
    Route("process", "GET", P, "One process.", wire.Process),
    Route(
        "output", "GET", f"{P}/output", "A process's output from its start, then as it comes, then its exit code.",
        wire.OutputLine, media_type=LINES_TYPE,
    ),
    Route(
        "stdin", "POST", f"{P}/stdin", "Write to a process's standard input.", status=204, body=Body.RAW,
        query=(CLOSE,), errors=RUNNING,
    ),
    Route(
        "signal", "POST", f"{P}/signal", "Send a signal. To a process that has ended it is no error.", status=204,
        request=wire.SignalRequest, errors=RUNNING,
    ),
    Route(
        "attach", "GET", f"{P}/attach", "A process's streams, both ways.", status=SWITCH,
        protocol=wire.STREAM_PROTOCOL, errors=RUNNING,
    ),
    Route(
        "read_file", "GET", f"{S}/files", "A file's bytes, at most 64 MiB.", media_type=RAW_TYPE, query=(GUEST_PATH,),
        errors=RUNNING,
    ),
    Route(
        "write_file", "PUT", f"{S}/files", "Write a file; missing directories are made.", status=204, body=Body.RAW,
        query=(GUEST_PATH,), errors=RUNNING,
    ),
    Route(
        "remove_file", "DELETE", f"{S}/files", "Remove a file or an empty directory.", status=204,
        query=(GUEST_PATH,), errors=RUNNING,
    ),
    Route(
        "list_dir", "GET", f"{S}/dirs", "A directory's entries by name.", wire.Entries, query=(GUEST_PATH,),
        errors=RUNNING,
    ),
    Route(
        "tunnel", "GET", f"{S}/tunnel", "A TCP connection to a port of the guest's loopback address.",
        status=SWITCH, query=(PORT,), capability="tunnel", protocol=wire.TUNNEL_PROTOCOL, errors=RUNNING,
    ),
    Route(
        "bundle_in", "POST", f"{S}/workspace", "Clone a git bundle into the empty workspace.", status=204,
        body=Body.BUNDLE, query=(BRANCH,), capability="workspace_bundle", errors=RUNNING,
    ),
    Route(
        "bundle_out", "GET", f"{S}/workspace/bundle", "A git bundle of what is new. Verifying it is the client's duty.",
        media_type=RAW_TYPE, query=(BASE, BRANCH), capability="workspace_bundle", errors=RUNNING,
    ),
    Route("suspend", "POST", f"{S}/suspend", "Not built yet.", status=NOT_BUILT, capability="suspend"),
    Route("resume", "POST", f"{S}/resume", "Not built yet.", status=NOT_BUILT, capability="suspend"),
    Route("snapshot", "POST", f"{S}/snapshots", "Not built yet.", status=NOT_BUILT, capability="memory_snapshot"),
    Route(
        "snapshot_schedule", "PUT", f"{S}/snapshot-schedule", "Not built yet.", status=NOT_BUILT,
        request=wire.ScheduleRequest, capability="memory_snapshot",
    ),
    Route(
        "metrics", "GET", f"{S}/metrics", "What a sandbox used in the last hour, oldest first.", wire.Metrics,
        capability="metrics",
    ),
    Route(
        "events", "GET", f"{S}/events", "What happened to a sandbox, oldest first; by id also when it is forgotten.",
        wire.Events, capability="audit",
    ),
    Route("egress", "GET", f"{S}/egress", "A sandbox's network, and every name it asked for.", wire.Egress),
    Route("event", "GET", "/v1/events/{ref}", "One decision about a name, by its id.", wire.Event),
    Route("snapshots", "GET", "/v1/snapshots", "Not built yet.", status=NOT_BUILT, capability="memory_snapshot"),
    Route(
        "delete_snapshot", "DELETE", "/v1/snapshots/{ref}", "Not built yet.", status=NOT_BUILT,
        capability="memory_snapshot",
    ),
    Route(
        "create_volume", "POST", "/v1/volumes", "Make an empty volume.", wire.Volume, 201,
        request=wire.VolumeRequest, capability="volumes", errors=(Conflict,),
    ),
    Route("volumes", "GET", "/v1/volumes", "All volumes by name.", wire.Volumes, capability="volumes"),
    Route(
        "delete_volume", "DELETE", "/v1/volumes/{ref}", "Delete a volume and what is in it.", status=204,
        capability="volumes", errors=(Conflict,),
    ),
    Route("images", "GET", "/v1/images", "The images that are here or on their way, by name.", wire.Images,
        capability="images",
    ),
    Route(
        "install_image", "POST", "/v1/images", "Fetch an image in the background; ask `GET /v1/images` how far it is.",
        wire.Image, 202, request=wire.ImageRequest, capability="images", errors=(Refused,),
    ),
    Route(
        "delete_image", "DELETE", "/v1/images", "Remove an image nobody uses.", wire.ImageRemoved, query=(IMAGE,),
        capability="images", errors=(NotFound, Conflict),
    ),
    Route("node", "GET", "/v1/node", "The machine: what it has, what is free.", wire.Node),
    Route(
        "cordon", "POST", "/v1/node/cordon", "Take no new sandboxes, or take them again.", wire.Node,
        request=wire.CordonRequest,
    ),
    Route(
        "verify_audit", "GET", "/v1/audit/verify", "Check the chain of the audit log.", wire.AuditCheck,
        capability="audit",
    ),
    Route("openapi", "GET", "/v1/openapi.json", "This document."),
)  # fmt: skip


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", re.escape(path)) + r"\Z")


_PATTERNS = tuple((route, _pattern(route.path)) for route in ROUTES)


def match(method: str, path: str) -> tuple[Route, dict[str, str]] | None:
    """The route of a request line, with the decoded segments in place of `{ref}` and `{pid}`."""
    for route, pattern in _PATTERNS:
        if route.method == method and (found := pattern.match(path)):
            return route, {key: unquote(value) for key, value in found.groupdict().items()}
    return None


def query(text: str) -> list[tuple[str, str]]:
    """A query string's pairs in order; `+` is a blank."""
    pairs = (part.partition("=") for part in text.replace("+", " ").split("&") if part)
    return [(unquote(key), unquote(value)) for key, _, value in pairs]


def unquote(text: str) -> str:
    return unquote_to_bytes(text).decode(errors="surrogateescape")
