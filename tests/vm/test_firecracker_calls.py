"""The table of Firecracker's API calls: what it refuses, and that it says what the official description says.

FIRECRACKER_API is the path of that description (`firecracker.yaml` of Firecracker's source). The project carries no
copy of it; without it that part is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sandboxd.vm.firecracker_calls import ACTION_STATES, CALLS, Call, Field, Kind, State, fault, find

NEW = (1, 16, 1)
DRIVE = {"drive_id": "drive0", "is_root_device": False, "is_read_only": True, "path_on_host": "drive0"}
LOAD = {"snapshot_path": "state", "mem_backend": {"backend_type": "File", "backend_path": "memory"}}
GOOD: list[tuple[str, str, Any, State]] = [
    ("GET", "/", None, State.NOT_STARTED),
    ("GET", "/version", None, State.RUNNING),
    ("GET", "/vm/config", None, State.PAUSED),
    ("PUT", "/logger", {"log_path": "log", "level": "Warning"}, State.NOT_STARTED),
    ("PUT", "/metrics", {"metrics_path": "metrics"}, State.NOT_STARTED),
    ("PUT", "/machine-config", {"vcpu_count": 32, "mem_size_mib": 512}, State.NOT_STARTED),
    ("PUT", "/boot-source", {"kernel_image_path": "kernel"}, State.NOT_STARTED),
    ("PUT", "/drives/drive0", DRIVE, State.NOT_STARTED),
    ("PATCH", "/drives/drive0", {"drive_id": "drive0", "path_on_host": "drive0"}, State.PAUSED),
    ("PUT", "/network-interfaces/eth0", {"iface_id": "eth0", "host_dev_name": "tap0"}, State.NOT_STARTED),
    ("PUT", "/vsock", {"guest_cid": 3, "uds_path": "v.sock"}, State.NOT_STARTED),
    ("PUT", "/entropy", {}, State.NOT_STARTED),
    ("PUT", "/serial", {"serial_out_path": "console"}, State.NOT_STARTED),
    ("PUT", "/actions", {"action_type": "InstanceStart"}, State.NOT_STARTED),
    ("PUT", "/actions", {"action_type": "SendCtrlAltDel"}, State.RUNNING),
    ("PATCH", "/vm", {"state": "Paused"}, State.RUNNING),
    ("PUT", "/snapshot/create", {"snapshot_path": "state", "mem_file_path": "memory"}, State.PAUSED),
    ("PUT", "/snapshot/load", LOAD, State.NOT_STARTED),
]


@pytest.mark.parametrize(("method", "path", "body", "state"), GOOD, ids=[f"{row[0]} {row[1]}" for row in GOOD])
def test_a_call_is_taken_in_its_states_and_in_no_other(method: str, path: str, body: Any, state: State) -> None:
    assert fault(method, path, body, state, NEW) is None
    found = find(method, path)
    assert found is not None
    allowed = ACTION_STATES[body["action_type"]] if path == "/actions" else found[0].states
    assert state in allowed
    for other in State:
        why = fault(method, path, body, other, NEW)
        assert (why is None) == (other in allowed)
        assert why is None or other.value in why


def test_every_call_of_the_table_is_tried() -> None:
    tried = [found[0] for method, path, _, _ in GOOD if (found := find(method, path)) is not None]
    assert set(tried) == set(CALLS)


BAD: dict[str, tuple[str, str, Any, str]] = {
    "a path that is none": ("PUT", "/drive/drive0", DRIVE, "Invalid request method and/or path: PUT /drive/drive0."),
    "a method that the path does not have": ("PATCH", "/vsock", {}, "Invalid request method and/or path"),
    "an id with a slash": ("PUT", "/drives/a/b", DRIVE, "Invalid request method and/or path"),
    "an id with a dash": ("PUT", "/drives/drive-0", DRIVE | {"drive_id": "drive-0"}, "letters, digits and underscores"),
    "no id": ("PUT", "/drives/", DRIVE | {"drive_id": ""}, "letters, digits and underscores"),
    "ids that differ": ("PUT", "/drives/drive1", DRIVE, "drive_id of the path and of the body differ"),
    "a body where none is": ("GET", "/", {}, "no body"),
    "no body": ("PUT", "/entropy", None, "JSON object"),
    "a list as the body": ("PUT", "/entropy", [], "JSON object"),
    "a field that is unknown": ("PUT", "/drives/drive0", DRIVE | {"discard": True}, "unknown field discard"),
    "a field that is missing": ("PUT", "/vsock", {"guest_cid": 3}, "missing field uds_path"),
    "a drive without its file": ("PUT", "/drives/d", {"drive_id": "d", "is_root_device": False}, "path_on_host"),
    "a text for a number": ("PUT", "/vsock", {"guest_cid": "3", "uds_path": "v"}, "guest_cid is not of the type"),
    "a flag for a number": ("PUT", "/vsock", {"guest_cid": True, "uds_path": "v"}, "guest_cid is not of the type"),
    "a number for a flag": ("PUT", "/drives/drive0", DRIVE | {"is_read_only": 1}, "is_read_only is not of the type"),
    "a cid of the host": ("PUT", "/vsock", {"guest_cid": 2, "uds_path": "v"}, "guest_cid is out of range"),
    "33 processors": ("PUT", "/machine-config", {"vcpu_count": 33, "mem_size_mib": 1}, "vcpu_count is out of range"),
    "a value of no enumeration": ("PUT", "/actions", {"action_type": "Halt"}, "action_type is none of: FlushMetrics"),
    "a fault in a nested object": (
        "PUT", "/drives/drive0", DRIVE | {"rate_limiter": {"ops": {"size": 1}}},
        "missing field rate_limiter.ops.refill_time",
    ),
    "a fault in a list": (
        "PUT", "/snapshot/load", LOAD | {"network_overrides": [{"iface_id": "eth0"}]},
        "missing field network_overrides[0].host_dev_name",
    ),
    "a list of no objects": (
        "PUT", "/snapshot/load", LOAD | {"network_overrides": ["eth0"]}, "network_overrides[0] is not an object",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "why"), BAD.values(), ids=BAD)
def test_a_call_is_refused_for(method: str, path: str, body: Any, why: str) -> None:
    assert why in (fault(method, path, body, State.NOT_STARTED, NEW) or "")


def test_a_snapshot_is_loaded_only_into_a_machine_that_nothing_else_was_configured_for() -> None:
    assert "cannot be loaded" in (fault("PUT", "/snapshot/load", LOAD, State.NOT_STARTED, NEW, configured=True) or "")
    spoils = {call.path for call in CALLS if call.configures}
    assert spoils >= {"/boot-source", "/drives/{drive_id}", "/vsock"} and not spoils & {"/logger", "/metrics"}


@pytest.mark.parametrize(
    ("method", "path", "body", "since"),
    [
        ("PUT", "/entropy", {}, (1, 4, 0)),
        ("PUT", "/serial", {}, (1, 14, 0)),
        ("PUT", "/snapshot/load", LOAD | {"network_overrides": []}, (1, 12, 0)),
        ("PUT", "/snapshot/load", LOAD | {"vsock_override": {"uds_path": "v"}}, (1, 16, 0)),
    ],
)
def test_what_came_later_is_unknown_to_an_older_version(
    method: str, path: str, body: Any, since: tuple[int, int, int]
) -> None:
    major, minor, _ = since
    assert fault(method, path, body, State.NOT_STARTED, since) is None
    assert fault(method, path, body, State.NOT_STARTED, (major, minor - 1, 9)) is not None


# -- against the official description


class Loader(yaml.SafeLoader):
    """YAML 1.2's booleans: the level of a log may be `Off`."""


Loader.yaml_implicit_resolvers = {
    first: [] if first in "yYnNoO" else resolvers
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


@pytest.fixture(scope="module")
def official() -> dict[str, Any]:
    path = os.environ.get("FIRECRACKER_API")
    if not path:
        pytest.skip("FIRECRACKER_API does not name Firecracker's description of its API (firecracker.yaml)")
    loaded: dict[str, Any] = yaml.load(Path(path).read_bytes(), Loader)
    return loaded


def body_schema(official: dict[str, Any], call: Call) -> dict[str, Any] | None:
    operation = official["paths"][call.path][call.method.lower()]
    bodies = [parameter for parameter in operation.get("parameters", ()) if parameter["in"] == "body"]
    return resolve(official, bodies[0]["schema"]) if bodies else None


def resolve(official: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Follows a reference; what stands beside it (a description) is kept."""
    if "$ref" not in schema:
        return schema
    name = schema["$ref"].removeprefix("#/definitions/")
    beside = {key: value for key, value in schema.items() if key != "$ref"}
    return {**official["definitions"][name], **beside}


def walk(official: dict[str, Any], fields: tuple[Field, ...], schema: dict[str, Any], at: str) -> Iterator[str]:
    """Each way in which the fields are not those of the schema."""
    required = set(schema.get("required", ()))
    ours = {field.name for field in fields}
    if missing := required - ours:
        yield f"{at}: {sorted(missing)} have to be there"
    for field in fields:
        where = f"{at}.{field.name}"
        if field.name not in schema["properties"]:
            yield f"{where}: there is no such field"
            continue
        theirs = resolve(official, schema["properties"][field.name])
        if theirs.get("type") != field.kind.value:
            yield f"{where}: {theirs.get('type')}, not {field.kind.value}"
        # The description says some of what is required in words.
        said = str(theirs.get("description", "")) + str(schema.get("description", ""))
        if field.required != (field.name in required) and not (
            field.required and ("is required" in said or "must be present" in said)
        ):
            yield f"{where}: required {field.name in required}"
        if tuple(sorted(theirs.get("enum", ()))) != tuple(sorted(field.values)):
            yield f"{where}: {theirs.get('enum')}, not {field.values}"
        for name, limit in (("minimum", field.minimum), ("maximum", field.maximum)):
            if theirs.get(name) is not None and theirs[name] != limit:
                yield f"{where}: {name} {theirs[name]}, not {limit}"
        if field.kind is Kind.OBJECT:
            yield from walk(official, field.fields, theirs, where)
        elif field.kind is Kind.LIST:
            yield from walk(official, field.fields, resolve(official, theirs["items"]), f"{where}[]")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.method} {call.path}")
def test_a_row_says_what_the_official_description_says(official: dict[str, Any], call: Call) -> None:
    assert call.path in official["paths"] and call.method.lower() in official["paths"][call.path]
    schema = body_schema(official, call)
    if call.method == "GET":
        assert schema is None and not call.fields
    else:
        assert schema is not None
        assert list(walk(official, call.fields, schema, call.path)) == []


def test_states_are_called_what_the_official_description_calls_them(official: dict[str, Any]) -> None:
    wire = official["definitions"]["InstanceInfo"]["properties"]["state"]["enum"]
    assert wire == [state.value for state in State]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.method} {call.path}")
def test_states_are_those_that_the_official_description_says_in_words(official: dict[str, Any], call: Call) -> None:
    operation = official["paths"][call.path][call.method.lower()]
    said = f"{operation.get('summary', '')} {operation.get('description', '')}"
    if "Pre-boot only" in said:
        assert call.states == {State.NOT_STARTED}
    if "Post-boot only" in said:
        assert State.NOT_STARTED not in call.states
    if "should be in the `Paused` state" in said:
        assert call.states == {State.PAUSED}


def test_the_comparison_sees_each_difference(official: dict[str, Any]) -> None:
    """Held against a table that is wrong in each way."""
    wrong = (
        Field("drive_id", Kind.TEXT),
        Field("is_root_device", Kind.NUMBER, required=True),
        Field("cache_type", Kind.TEXT, values=("Unsafe",)),
        Field("is_writable", Kind.FLAG),
        Field("rate_limiter", Kind.OBJECT, fields=(Field("ops", Kind.OBJECT, fields=(Field("size", Kind.NUMBER),)),)),
    )
    found = list(walk(official, wrong, official["definitions"]["Drive"], "drive"))
    assert [line.partition(":")[0] for line in found] == [
        "drive.drive_id",
        "drive.is_root_device",
        "drive.cache_type",
        "drive.is_writable",
        "drive.rate_limiter.ops",
        "drive.rate_limiter.ops.size",
        "drive.rate_limiter.ops.size",
    ]
