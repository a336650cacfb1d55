"""What the API's answers look like, to the field: what must be there, and what must not be there when it is empty.

Pure: answers in, assertion errors out. Fields nobody knows are harmless, as they are to every client.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from conformance.endpoint import Answer

MODES = ("none", "allowlist", "open")
ID = re.compile(r"sbx_(?:[a-z0-9][a-z0-9-]{0,30}_)?[0-9a-f]{16}\Z")
SNAPSHOT_ID = re.compile(r"snp_[0-9a-f]{16}\Z")
TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]+)?Z\Z")

CODES = {
    400: {"invalid_request"}, 401: {"unauthorized"}, 403: {"refused"}, 404: {"not_found"}, 409: {"conflict"},
    413: {"invalid_request"}, 415: {"invalid_request"}, 501: {"unsupported"}, 503: {"unavailable"},
}  # fmt: skip

Number = (int, float)


def refused(answer: Answer, status: int, code: str | None = None) -> str:
    """The answer is this error, in the one form errors have. Returns its message."""
    assert answer.status == status, f"{status} was to come, not {answer}"
    assert answer.media_type == "application/json", f"an error's Content-Type is {answer.media_type!r}"
    body = answer.json
    assert isinstance(body, dict) and set(body) == {"error"}, body
    assert {"code", "message"} <= set(body["error"]), body
    assert body["error"]["code"] in ({code} if code else CODES[status]), body
    message = body["error"]["message"]
    assert isinstance(message, str) and message, body
    return message


def done(answer: Answer) -> None:
    assert answer.status == 204, f"204 was to come, not {answer}"
    assert answer.body == b"", answer


def ok(answer: Answer, status: int = 200) -> Any:
    """The answer is JSON with this status. Returns it."""
    assert answer.status == status, f"{status} was to come, not {answer}"
    assert answer.media_type == "application/json", f"the Content-Type is {answer.media_type!r}"
    return answer.json


def fields(body: Any, always: dict[str, Any], unless_empty: dict[str, Any] | None = None) -> None:
    """`always`: name → type. `unless_empty`: those that stand only when they have a value."""
    assert isinstance(body, dict), body
    for name, kind in always.items():
        assert name in body, f"the field {name} is missing: {body}"
        _typed(name, body[name], kind)
    for name, kind in (unless_empty or {}).items():
        if name in body:
            _typed(name, body[name], kind)
            assert body[name] not in (None, "", [], {}, 0, False), f"{name} is empty and stands all the same: {body}"


def _typed(name: str, value: Any, kind: Any) -> None:
    # A truth value is an integer to Python, and not to JSON.
    right = isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)
    assert right, f"{name} is {value!r}"


def network(body: Any) -> None:
    """`allow` always stands, and is null where there is none; `deny` is left out when empty."""
    fields(body, {"mode": str, "allow": (list, type(None))}, {"deny": list, "allow_tcp": list})
    assert body["mode"] in MODES, body
    if body["mode"] != "allowlist":
        assert body["allow"] is None, f"there is no list, so allow is null: {body}"
    for name in ("allow", "deny"):
        names = body.get(name) or []
        assert names == sorted(set(names)), f"{name} is not sorted, or holds a name twice: {body}"


def sandbox(body: Any, state: str | None = None) -> dict[str, Any]:
    fields(
        body,
        {
            "id": str, "state": str, "image": str, "cpus": Number, "memory_mb": int, "disk_mb": int,
            "network": dict, "created_at": str, "idle_timeout_secs": int,
        },
        {
            "name": str, "env_names": list, "lifetime_secs": int, "expires_at": str, "snapshot_every_secs": int,
            "snapshot_keep": int, "labels": dict, "volumes": list, "snapshotting": dict,
        },
    )  # fmt: skip
    assert ID.match(body["id"]), body["id"]
    assert body["state"] in ("pending", "running", "suspended", "terminated"), body
    assert state is None or body["state"] == state, body
    assert ("expires_at" in body) == ("lifetime_secs" in body), body
    assert "env" not in body, "an environment is never returned"
    moment(body["created_at"])
    network(body["network"])
    assert isinstance(body, dict)
    return body


def process(body: Any) -> dict[str, Any]:
    fields(
        body,
        {"pid": int, "argv": list, "state": str, "exit_code": (int, type(None)), "started_at": str},
        {"tty": bool},
    )
    assert body["pid"] >= 1 and body["state"] in ("running", "exited"), body
    assert (body["exit_code"] is None) == (body["state"] == "running"), f"exit_code is null while it runs: {body}"
    moment(body["started_at"])
    assert isinstance(body, dict)
    return body


def moment(text: Any) -> float:
    """RFC 3339 in UTC with `Z`. Returns seconds since 1970."""
    assert isinstance(text, str) and TIME.match(text), f"{text!r} is not a time in UTC"
    whole, _, fraction = text[:-1].partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
