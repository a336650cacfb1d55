"""Bodies that are no request: each is refused with a code, in bounded time, and the server goes on."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from conformance import shape
from conformance.endpoint import Endpoint
from conformance.estate import Estate, Sandbox

LIMIT_S = 15.0

BODIES: dict[str, bytes] = {
    "no JSON": b"hello",
    "half a JSON": b'{"name":',
    "two values": b"{}{}",
    "a list": b"[]",
    "a text": b'"name"',
    "a number": b"1",
    "a duplicate key": b'{"cpus":1,"cpus":1}',
    "a duplicate key below": b'{"env":{"A":"1","A":"2"}}',
    "an unknown key": b'{"surprise":1}',
    "deep lists": b'{"labels":' + b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a huge integer": b'{"memory_mb":' + b"9" * 10_000 + b"}",
    "an integer of 65 bits": b'{"memory_mb":18446744073709551616}',
    "a huge float": b'{"cpus":1e400}',
    "NaN": b'{"cpus":NaN}',
    "Infinity": b'{"cpus":Infinity}',
    "minus Infinity": b'{"cpus":-Infinity}',
    "a fraction for an integer": b'{"memory_mb":256.5}',
    "a leading zero": b'{"memory_mb":0256}',
    "invalid UTF-8": b'{"name":"\xff\xfe"}',
    "an overlong NUL": b'{"name":"\xc0\x80"}',
    "a lone surrogate": b'{"name":"\\ud800"}',
    "a NUL": b'{"name":"a\\u0000b"}',
    "a raw control character": b'{"name":"a\x01b"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"name":"x"}'.encode("utf-16"),
    "a trailing comma": b'{"name":"x",}',
    "a comment": b'{"name":"x"/**/}',
    "single quotes": b"{'name':'x'}",
}

WRONG: dict[str, list[Any]] = {
    "name": [1, [], {}, True], "image": [1, []], "cpus": ["1", [], True], "memory_mb": ["256", [], True],
    "disk_mb": ["1", {}], "env": [[], "A=1", {"A": 1}], "network": ["none", [], {"mode": 1}, {"allow": "a"}],
    "idle_timeout_secs": ["1", 1.5], "lifetime_secs": ["1"], "labels": [[], "k=v", {"k": 1}],
}  # fmt: skip


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_request_is_refused(body: bytes, endpoint: Endpoint, box: Sandbox) -> None:
    for method, target in (
        ("POST", "/v1/sandboxes"), ("PATCH", box.path), ("POST", f"{box.path}/run"), ("POST", f"{box.path}/processes"),
    ):  # fmt: skip
        began = time.monotonic()
        answer = endpoint.call(method, target, body, {"Content-Type": "application/json"}, timeout_s=LIMIT_S)
        shape.refused(answer, 400)
        assert time.monotonic() - began < LIMIT_S


@pytest.mark.parametrize("field", WRONG)
def test_a_field_of_another_type_is_refused(field: str, estate: Estate) -> None:
    for value in WRONG[field]:
        body = json.dumps({field: value}).encode()
        answer = estate.endpoint.call("POST", "/v1/sandboxes", body, {"Content-Type": "application/json"})
        shape.refused(answer, 400)


def test_wrong_types_of_a_command_are_refused(box: Sandbox) -> None:
    bodies: tuple[dict[str, Any], ...] = (
        {"argv": "echo"}, {"argv": [1]}, {"argv": {}}, {"argv": ["true"], "env": []},
        {"argv": ["true"], "cwd": 1}, {"argv": ["true"], "timeout_secs": "1"}, {"argv": ["true"], "stdin": 1},
        {"argv": ["true"], "surprise": 1},
    )  # fmt: skip
    for body in bodies:
        shape.refused(box.call("POST", "/run", body), 400)


def test_a_body_over_a_mebibyte_is_refused_however_it_is_sent(endpoint: Endpoint) -> None:
    kind = {"Content-Type": "application/json"}
    whole = json.dumps({"labels": {"k": "x" * (2 << 20)}}).encode()
    shape.refused(endpoint.call("POST", "/v1/sandboxes", whole, kind), 400)
    head = endpoint.head("POST", "/v1/sandboxes", {**kind, "Transfer-Encoding": "chunked"})
    parts = [whole[start : start + 60000] for start in range(0, len(whole), 60000)]
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    shape.refused(endpoint.say(head + pieces + b"0\r\n\r\n"), 400)
    announced = endpoint.head("POST", "/v1/sandboxes", {**kind, "Content-Length": str(1 << 40)})
    shape.refused(endpoint.say(announced), 400)


def test_an_empty_body_is_an_empty_object(box: Sandbox) -> None:
    shape.refused(box.call("PATCH", body=None), 400)
    shape.refused(box.call("POST", "/run"), 400)


def test_the_endpoint_is_as_it_was(endpoint: Endpoint, box: Sandbox) -> None:
    assert shape.ok(endpoint.call("GET", "/v1/health")) == {"status": "ok"}
    assert box.run("echo", "still here").stdout == b"still here\n"
