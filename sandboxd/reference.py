"""The OpenAPI document as a page to read. `python -m sandboxd.reference` prints the generated part of docs/api.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from sandboxd import openapi
from sandboxd.routes.table import EVERYWHERE, NOT_BUILT, ROUTES, Route

PREFIX = "#/components/schemas/"

SANDBOX = {
    "id": "sbx_0123456789abcdef", "name": "demo", "state": "running", "image": "sandbox-base", "cpus": 1,
    "memory_mb": 1024, "disk_mb": 10240, "env_names": ["TZ"], "network": {"mode": "none", "allow": None},
    "created_at": "2026-01-02T03:04:05.000000Z", "idle_timeout_secs": 1800, "labels": {"project": "demo"},
}  # fmt: skip
PROCESS = {"pid": 1, "argv": ["make", "test"], "state": "running", "exit_code": None,
           "started_at": "2026-01-02T03:04:06.000000Z"}  # fmt: skip
EXAMPLES: Mapping[str, tuple[Any, Any]] = {
    "health": (None, {"status": "ok"}),
    "create": (
        {"name": "demo", "env": {"TZ": "UTC"}, "network": {"mode": "none"}, "labels": {"project": "demo"}}, SANDBOX
    ),
    "list": (None, {"sandboxes": [SANDBOX]}),
    "update": ({"labels": {"project": "other"}}, SANDBOX | {"labels": {"project": "other"}}),
    "run": (
        {"argv": ["uname", "-s"], "timeout_secs": 10},
        {"exit_code": 0, "stdout": "TGludXgK", "stderr": "", "truncated": False, "timed_out": False},
    ),
    "start": ({"argv": ["make", "test"], "cwd": "/workspace"}, PROCESS),
    "signal": ({"signal": "TERM"}, None),
    "output": (None, {"stream": "stdout", "data": "b2sK"}),
    "list_dir": (None, {"entries": [{"name": "notes.txt", "type": "file", "size": 12}]}),
    "create_volume": (
        {"name": "cache", "size_mb": 2048},
        {"name": "cache", "size_mb": 2048, "created_at": "2026-01-02T03:04:05.000000Z"},
    ),
    "cordon": ({"cordoned": True}, None),
}
"""Of a route: what is sent and what comes back, either None where there is nothing to show."""


def page() -> str:
    """Markdown: every route, then every type."""
    document = openapi.build()
    routes = [_route(route, document["paths"][route.path][route.method.lower()]) for route in ROUTES]
    kinds = [_kind(name, said) for name, said in sorted(document["components"]["schemas"].items())]
    return "\n".join(["## Routes", "", *routes, "## Types", "", *kinds])


def _route(route: Route, said: dict[str, Any]) -> str:
    lines = [f"### `{route.method} {route.path}`", "", route.summary]
    if route.capability:
        lines[-1] += f" Needs the capability `{route.capability}`."
    lines.append("")
    if said["parameters"]:
        lines += ["| parameter | in | type | |", "|---|---|---|---|"]
        lines += [_parameter(one) for one in said["parameters"]]
        lines.append("")
    if body := said.get("requestBody"):
        ((media, content),) = body["content"].items()
        what = _type(content["schema"]) if "schema" in content else "bytes"
        lines += [f"Body: {what} as `{media}`. {body['description']}", ""]
    if success := said["responses"].get(str(route.status)) if route.status != NOT_BUILT else None:
        lines += [f"Answers {_answer(route.status, success)}", ""]
    own = sorted({f"{kind.status} `{kind.code}`" for kind in route.refusals() if kind not in EVERYWHERE})
    if own:
        lines += [f"Can refuse with {', '.join(own)}.", ""]
    return "\n".join([*lines, *_examples(route.name)])


def _parameter(one: dict[str, Any]) -> str:
    must = "" if one["required"] else " Optional."
    return f"| `{one['name']}` | {one['in']} | {_type(one['schema'])} | {one['description']}{must} |"


def _answer(status: int, said: dict[str, Any]) -> str:
    what = said["description"]
    for media, content in said.get("content", {}).items():
        shown = _type(said["x-lines"]) if "x-lines" in said else _type(content["schema"]) if content else "bytes"
        what = f"{shown} as `{media}`. {what}"
    if "x-upgrade" in said:
        what = f"`Upgrade: {said['x-upgrade']}`. {what}"
    return f"{status}: {what}".removesuffix(". Done.").removesuffix(": Done.").removesuffix(".") + "."


def _examples(name: str) -> list[str]:
    sent, came = EXAMPLES.get(name, (None, None))
    if sent is None and came is None:
        return []
    shown = [json.dumps(value) for value in (sent, came) if value is not None]
    return ["```json", *shown, "```", ""]


def _kind(name: str, said: dict[str, Any]) -> str:
    lines = [f"### {name}", ""]
    if "description" in said:
        lines += [" ".join(said["description"].split()), ""]
    lines += ["| field | type | |", "|---|---|---|"]
    required = frozenset(said.get("required", ()))
    lines += [_field(key, value, key in required) for key, value in said["properties"].items()]
    return "\n".join([*lines, ""])


def _field(name: str, said: dict[str, Any], always: bool) -> str:
    kind = _type(said)
    return f"| `{name}` | {kind}{', always there' if always else ''} | {_cell(said.get('description', ''))} |"


def _type(said: Mapping[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in said:
        name = said["$ref"].removeprefix(PREFIX)
        return f"[{name}](#{name.lower()})"
    if "allOf" in said:
        return _type(said["allOf"][0])
    if "anyOf" in said:
        kinds = [_type(one) for one in said["anyOf"] if one.get("type") != "null"]
        null = " or null" if len(kinds) < len(said["anyOf"]) and "enum" not in said else ""
        return _limited(" or ".join(kinds), said) + null
    match said.get("type"):
        case "array":
            return _limited(f"list of {_type(said['items'])}", said)
        case "object" if isinstance(said.get("additionalProperties"), dict):
            return f"object of {_type(said['additionalProperties'])}"
        case kind:
            return _limited(str(kind or "anything"), said)


def _limited(kind: str, said: Mapping[str, Any]) -> str:
    if "enum" in said:
        return " or ".join(f"`{one}`" for one in said["enum"] if one is not None)
    if "pattern" in said:
        return _cell(f"{kind} `{said['pattern']}`")
    if "minimum" in said and "maximum" in said:
        return f"{kind} from {said['minimum']} to {said['maximum']}"
    return kind


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
