"""The log of what was done: names and hashes, never values, arguments or contents."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from typing import Any

from conformance import shape
from conformance.conftest import Past
from conformance.endpoint import Answer, Endpoint
from conformance.estate import Estate, Sandbox
from conformance.test_sandboxes import NOBODY

WRITTEN_S = 5.0


def events(one: Sandbox, enough: Callable[[list[dict[str, Any]]], bool]) -> tuple[Answer, list[dict[str, Any]]]:
    """A log is written beside the request; it gets a moment."""
    deadline = time.monotonic() + WRITTEN_S
    while True:
        answer = one.call("GET", "/events")
        found: list[dict[str, Any]] = shape.ok(answer)["events"]
        if enough(found) or time.monotonic() > deadline:
            return answer, found
        time.sleep(0.1)


def of(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in found if event["type"] == kind]


def test_a_life_is_recorded_by_names_and_without_values(past: Past, estate: Estate, endpoint: Endpoint) -> None:
    """C41"""
    estate.needs("audit", ("GET", f"{past.sandbox.path}/events", None))
    answer, found = events(past.sandbox, lambda seen: bool(of(seen, "sandbox.terminated")))
    for event in found:
        shape.fields(event, {"time": str, "type": str, "sandbox": str})
        assert event["sandbox"] == past.sandbox.id
    times = [shape.moment(event["time"]) for event in found]
    assert times == sorted(times), "oldest first"
    assert b"hello-from-the-environment" not in answer.body and b"12345" not in answer.body
    (created,) = of(found, "sandbox.created")
    assert created["name"] == past.name and created["env_names"] == ["GREETING"]
    assert created["labels"] == estate.labels and created["image"] == past.sandbox.body["image"]
    assert created["network"]["mode"] == past.sandbox.body["network"]["mode"]
    (started,) = of(found, "process.started")
    assert started["program"] == "false" and started["pid"] == 1
    assert not {"arg_count", "args_sha256"} & set(started), "there were no arguments"
    (exited,) = of(found, "process.exited")
    assert (exited["pid"], exited["exit_code"]) == (1, 1) and exited["duration_ms"] >= 0
    (written,) = of(found, "file.written")
    assert (written["path"], written["bytes"]) == ("/tmp/five", 5)
    (removed,) = of(found, "file.removed")
    assert removed["path"] == "/tmp/five"
    (ended,) = of(found, "sandbox.terminated")
    assert ended["reason"] == "request"
    shape.refused(endpoint.call("GET", f"/v1/sandboxes/{NOBODY}/events"), 404)


def test_arguments_are_recorded_as_a_count_and_a_hash(box: Sandbox, estate: Estate) -> None:
    """C42"""
    estate.needs("audit", ("GET", f"{box.path}/events", None))
    token = f"secret-{secrets.token_hex(16)}"
    assert box.run("echo", "-n", token).stdout == token.encode()
    digest = hashlib.sha256(b"-n\0" + token.encode() + b"\0").hexdigest()
    answer, found = events(box, lambda seen: any(event.get("args_sha256") == digest for event in seen))
    assert token.encode() not in answer.body
    (started,) = [event for event in of(found, "process.started") if event.get("args_sha256") == digest]
    assert (started["program"], started["arg_count"]) == ("echo", 2)
