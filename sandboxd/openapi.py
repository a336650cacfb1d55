"""The API's OpenAPI 3.1 document, from the route table and the wire's types. `python -m sandboxd.openapi` prints it.

Pure, and the same bytes each time. What OpenAPI has no word for stands in `x-` fields: `x-max-bytes` of a body,
`x-lines` (the schema of each line of a stream), `x-upgrade` (the protocol a connection becomes) and `x-capability`
(without which the endpoint answers 501).
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from functools import cache
from typing import Any

import msgspec

from sandboxd import wire
from sandboxd.routes.table import JSON_TYPE, LINES_TYPE, NOT_BUILT, ROUTES, SWITCH, Body, Parameter, Route

TITLE = "sandboxd"
ABOUT = (
    "Runs virtual machines for AI coding agents. Requests refuse unknown fields and duplicate keys, and null means "
    "absent; a completely empty body counts as `{}`. Answers leave out what is empty unless a field is required, and "
    "newer servers may add fields. Every answer other than success is a `Failure`."
)
SEGMENTS: dict[str, dict[str, Any]] = {
    "pid": {"description": "A process's number.", "schema": {"type": "integer", "minimum": 1}},
    "ref": {"description": "An id, or the name of a sandbox or volume.", "schema": {"type": "string", "minLength": 1}},
}
FRAMES = (
    "Frames both ways: a type byte, a 4-byte big-endian length of at most 1 MiB, a payload. From the client: `i` "
    "input, `e` end of input, `s` a signal's name, `r` rows and columns as two 16-bit numbers. From the server: `o` "
    "standard output, `E` standard error, `x` the exit code as a 32-bit number, last. Output comes from its start; "
    "hanging up leaves the process running."
)
BYTES = (
    "Raw bytes both ways. The end of the client's direction is passed on; the end of the guest's ends the connection."
)
PROTOCOLS = {wire.STREAM_PROTOCOL: FRAMES, wire.TUNNEL_PROTOCOL: BYTES}


@cache
def document() -> bytes:
    """The document as JSON."""
    return json.dumps(build(), separators=(",", ":"), sort_keys=True).encode("ascii") + b"\n"


@cache
def etag() -> str:
    return f'"{hashlib.sha256(document()).hexdigest()[:32]}"'


def build() -> dict[str, Any]:
    """The document as a value."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": wire.API_VERSION, "description": ABOUT},
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {}],
        "paths": paths,
        "components": {
            "schemas": schemas(),
            "securitySchemes": {
                "bearer": {
                    "type": "http", "scheme": "bearer",
                    "description": "Always over TCP; on a unix socket where the server was given a token.",
                }
            },
        },
    }  # fmt: skip


def schemas() -> dict[str, Any]:
    """Every type of the wire that a route names, by name."""
    kinds: list[type[msgspec.Struct]] = [wire.Failure]
    for route in ROUTES:
        kinds += [kind for kind in (route.request, route.answer) if kind is not None]
    _, found = msgspec.json.schema_components(dict.fromkeys(kinds), ref_template="#/components/schemas/{name}")
    return found


def operation(route: Route) -> dict[str, Any]:
    said: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": [*_segments(route), *(_parameter(one) for one in route.query)],
        "responses": {**_success(route), **_failures(route)},
    }
    if route.capability:
        said["x-capability"] = route.capability
    if route.name == "openapi":
        said["responses"]["304"] = {"description": "It is the one that If-None-Match names."}
    if route.name == "health":
        said["security"] = []
    if route.request is not None:
        said["requestBody"] = _body(route, {"schema": _ref(route.request)})
    elif route.body is not Body.JSON:
        said["requestBody"] = _body(route, {})
    return said


def _body(route: Route, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "required": False,
        "content": {route.body.media_type: content},
        "description": f"At most {route.body.cap >> 20} MiB.",
        "x-max-bytes": route.body.cap,
    }


def _segments(route: Route) -> list[dict[str, Any]]:
    names = re.findall(r"\{(\w+)\}", route.path)
    return [{"name": name, "in": "path", "required": True, **SEGMENTS[name]} for name in names]


def _parameter(one: Parameter) -> dict[str, Any]:
    schema = {"type": "array", "items": one.schema} if one.repeated else one.schema
    return {
        "name": one.name, "in": "query", "required": one.required, "description": one.meaning, "schema": schema
    }


def _success(route: Route) -> dict[str, Any]:
    if route.status == NOT_BUILT:
        return {}
    said: dict[str, Any] = {"description": "Done."}
    if route.status == SWITCH:
        said["description"] = PROTOCOLS[route.protocol]
        said["headers"] = {
            name: {"required": True, "schema": {"type": "string", "const": value}}
            for name, value in (("Connection", "Upgrade"), ("Upgrade", route.protocol))
        }
        said["x-upgrade"] = route.protocol
    elif route.media_type == LINES_TYPE:
        assert route.answer is not None
        said["description"] = "One JSON object per line, each sent as it comes."
        said["content"] = {LINES_TYPE: {}}
        said["x-lines"] = _ref(route.answer)
    elif route.answer is not None:
        said["description"] = _first_line(route.answer) or "Done."
        said["content"] = {JSON_TYPE: {"schema": _ref(route.answer)}}
    elif route.status != 204:
        content: dict[str, Any] = {"schema": {"type": "object"}} if route.media_type == JSON_TYPE else {}
        said["content"] = {route.media_type: content}
    return {str(route.status): said}


def _failures(route: Route) -> dict[str, Any]:
    by_status: dict[int, list[str]] = {}
    for kind in sorted(route.refusals(), key=lambda kind: (kind.status, kind.code)):
        by_status.setdefault(kind.status, []).append(f"`{kind.code}`: {_first_line(kind)}")
    return {
        str(status): {"description": " ".join(texts), "content": {JSON_TYPE: {"schema": _ref(wire.Failure)}}}
        for status, texts in by_status.items()
    }


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _first_line(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


if __name__ == "__main__":
    sys.stdout.buffer.write(document())
