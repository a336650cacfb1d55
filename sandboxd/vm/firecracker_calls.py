"""The calls of Firecracker's API that this project makes, and what each may carry.

In: one request and the state its VMM is in. Out: why Firecracker would refuse it, or None. What we send is held
against this table, and so is Firecracker's own description of its API where that is at hand; a test's stand-in for the
VMM answers by it. Fields we never send are not here, so they count as unknown. States and versions are those of
Firecracker's source (`rpc_interface.rs`) and change log: its description says them in words only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

Number = tuple[int, int, int]
"""A version of Firecracker."""

_ALWAYS: Number = (0, 0, 0)
_ID = re.compile(r"[A-Za-z0-9_]+", re.ASCII)


class State(Enum):
    """What GET / calls the state of a machine."""

    NOT_STARTED = "Not started"
    RUNNING = "Running"
    PAUSED = "Paused"


class Kind(Enum):
    """A JSON type, by the name it has in the API's description."""

    TEXT = "string"
    NUMBER = "integer"
    FLAG = "boolean"
    OBJECT = "object"
    LIST = "array"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body. `fields` are those of an object, or of each object in a list; `values` all that a text may
    be. `since` is the first version that knows it."""

    name: str
    kind: Kind
    required: bool = False
    values: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    fields: tuple[Field, ...] = ()
    since: Number = _ALWAYS


@dataclass(frozen=True, slots=True)
class Call:
    """`path` may hold one `{name}`: an id, which the body repeats in its field of that name. A call that `configures`
    the machine leaves no way to load a snapshot into it. A GET has no body."""

    method: str
    path: str
    states: frozenset[State]
    fields: tuple[Field, ...] = ()
    since: Number = _ALWAYS
    configures: bool = False

    @property
    def id_field(self) -> str | None:
        _, brace, rest = self.path.partition("{")
        return rest.rstrip("}") if brace else None


BEFORE = frozenset({State.NOT_STARTED})
AFTER = frozenset({State.RUNNING, State.PAUSED})
PAUSED = frozenset({State.PAUSED})
ALL = BEFORE | AFTER

_TEXT, _NUMBER, _FLAG, _OBJECT, _LIST = Kind.TEXT, Kind.NUMBER, Kind.FLAG, Kind.OBJECT, Kind.LIST

_BUCKET = (
    Field("size", _NUMBER, required=True, minimum=0),
    Field("refill_time", _NUMBER, required=True, minimum=0),
    Field("one_time_burst", _NUMBER, minimum=0),
)
_LIMITER = (Field("bandwidth", _OBJECT, fields=_BUCKET), Field("ops", _OBJECT, fields=_BUCKET))

CALLS = (
    Call("GET", "/", ALL),
    Call("GET", "/version", ALL),
    Call("GET", "/vm/config", ALL),
    Call(
        "PUT", "/logger", BEFORE,
        (
            Field("log_path", _TEXT),
            Field("level", _TEXT, values=("Error", "Warning", "Info", "Debug", "Trace", "Off")),
            Field("show_level", _FLAG),
            Field("show_log_origin", _FLAG),
        ),
    ),
    Call("PUT", "/metrics", BEFORE, (Field("metrics_path", _TEXT, required=True),)),
    Call(
        "PUT", "/machine-config", BEFORE,
        (
            Field("vcpu_count", _NUMBER, required=True, minimum=1, maximum=32),
            Field("mem_size_mib", _NUMBER, required=True, minimum=1),
            Field("smt", _FLAG),
            Field("track_dirty_pages", _FLAG),
        ),
        configures=True,
    ),
    Call(
        "PUT", "/boot-source", BEFORE,
        (
            Field("kernel_image_path", _TEXT, required=True),
            Field("initrd_path", _TEXT),
            Field("boot_args", _TEXT),
        ),
        configures=True,
    ),
    Call(
        "PUT", "/drives/{drive_id}", BEFORE,
        (
            Field("drive_id", _TEXT, required=True),
            Field("is_root_device", _FLAG, required=True),
            # Needed by every drive that is a file.
            Field("path_on_host", _TEXT, required=True),
            Field("is_read_only", _FLAG, required=True),
            Field("cache_type", _TEXT, values=("Unsafe", "Writeback")),
            Field("io_engine", _TEXT, values=("Sync", "Async")),
            Field("rate_limiter", _OBJECT, fields=_LIMITER),
        ),
        configures=True,
    ),
    Call(
        "PATCH", "/drives/{drive_id}", AFTER,
        (
            Field("drive_id", _TEXT, required=True),
            Field("path_on_host", _TEXT),
            Field("rate_limiter", _OBJECT, fields=_LIMITER),
        ),
    ),
    Call(
        "PUT", "/network-interfaces/{iface_id}", BEFORE,
        (
            Field("iface_id", _TEXT, required=True),
            Field("host_dev_name", _TEXT, required=True),
            Field("guest_mac", _TEXT),
            Field("rx_rate_limiter", _OBJECT, fields=_LIMITER),
            Field("tx_rate_limiter", _OBJECT, fields=_LIMITER),
        ),
        configures=True,
    ),
    Call(
        "PUT", "/vsock", BEFORE,
        (Field("guest_cid", _NUMBER, required=True, minimum=3), Field("uds_path", _TEXT, required=True)),
        configures=True,
    ),
    Call(
        "PUT", "/entropy", BEFORE, (Field("rate_limiter", _OBJECT, fields=_LIMITER),),
        since=(1, 4, 0), configures=True,
    ),
    Call("PUT", "/serial", BEFORE, (Field("serial_out_path", _TEXT),), since=(1, 14, 0)),
    Call(
        "PUT", "/actions", ALL,
        (Field("action_type", _TEXT, required=True, values=("FlushMetrics", "InstanceStart", "SendCtrlAltDel")),),
    ),
    Call("PATCH", "/vm", AFTER, (Field("state", _TEXT, required=True, values=("Paused", "Resumed")),)),
    Call(
        "PUT", "/snapshot/create", PAUSED,
        (
            Field("snapshot_path", _TEXT, required=True),
            Field("mem_file_path", _TEXT, required=True),
            Field("snapshot_type", _TEXT, values=("Full", "Diff")),
        ),
    ),
    Call(
        "PUT", "/snapshot/load", BEFORE,
        (
            Field("snapshot_path", _TEXT, required=True),
            # One of this and the older mem_file_path has to be there.
            Field(
                "mem_backend", _OBJECT, required=True,
                fields=(
                    Field("backend_type", _TEXT, required=True, values=("File", "Uffd")),
                    Field("backend_path", _TEXT, required=True),
                ),
            ),
            Field("resume_vm", _FLAG),
            Field(
                "network_overrides", _LIST, since=(1, 12, 0),
                fields=(Field("iface_id", _TEXT, required=True), Field("host_dev_name", _TEXT, required=True)),
            ),
            Field("vsock_override", _OBJECT, since=(1, 16, 0), fields=(Field("uds_path", _TEXT, required=True),)),
        ),
    ),
)  # fmt: skip

ACTION_STATES = {"InstanceStart": BEFORE, "FlushMetrics": AFTER, "SendCtrlAltDel": AFTER}


def find(method: str, path: str) -> tuple[Call, str | None] | None:
    """The call, and the id in its path."""
    for call in CALLS:
        prefix, brace, _ = call.path.partition("{")
        if call.method != method:
            continue
        if path == call.path and not brace:
            return call, None
        if brace and path.startswith(prefix) and "/" not in path[len(prefix) :]:
            return call, path[len(prefix) :]
    return None


def fault(method: str, path: str, body: object, state: State, version: Number, configured: bool = False) -> str | None:
    """Why Firecracker refuses the request; None where it takes it. `body` is what the JSON says, None without a body.
    `configured`: a call that configures the machine came before."""
    found = find(method, path)
    if found is None or found[0].since > version:
        return f"Invalid request method and/or path: {method} {path}."
    call, id = found
    if id is not None and not _ID.fullmatch(id):
        return "An id in a path is letters, digits and underscores."
    if method == "GET":
        return None if body is None else "A GET request has no body."
    if not isinstance(body, dict):
        return f"The body of a {method} request is a JSON object."
    if (wrong := _object(body, call.fields, version, "")) is not None:
        return wrong
    if call.id_field is not None and body[call.id_field] != id:
        return f"{call.id_field} of the path and of the body differ."
    states = ACTION_STATES[body["action_type"]] if path == "/actions" else call.states
    if state not in states:
        return f"Not possible in the state {state.value!r}, only in: {_names(states)}."
    if path == "/snapshot/load" and configured:
        return "A snapshot cannot be loaded after something else was configured."
    return None


def _object(value: Mapping[str, object], fields: tuple[Field, ...], version: Number, at: str) -> str | None:
    known = {field.name: field for field in fields if field.since <= version}
    for name in value:
        if name not in known:
            return f"unknown field {at}{name}"
    for field in known.values():
        if field.name not in value:
            if field.required:
                return f"missing field {at}{field.name}"
        elif (wrong := _value(value[field.name], field, version, at + field.name)) is not None:
            return wrong
    return None


def _value(value: object, field: Field, version: Number, at: str) -> str | None:
    match field.kind, value:
        case (Kind.TEXT, str()):
            if field.values and value not in field.values:
                return f"{at} is none of: {', '.join(field.values)}"
            return None
        case (Kind.FLAG, bool()):
            return None
        case (Kind.NUMBER, int()) if not isinstance(value, bool):
            low = field.minimum is None or value >= field.minimum
            high = field.maximum is None or value <= field.maximum
            return None if low and high else f"{at} is out of range"
        case (Kind.OBJECT, dict()):
            return _object(value, field.fields, version, f"{at}.")
        case (Kind.LIST, list()):
            for index, item in enumerate(value):
                if not isinstance(item, dict):
                    return f"{at}[{index}] is not an object"
                if (wrong := _object(item, field.fields, version, f"{at}[{index}].")) is not None:
                    return wrong
            return None
    return f"{at} is not of the type {field.kind.value}"


def _names(states: frozenset[State]) -> str:
    return ", ".join(state.value for state in State if state in states)
