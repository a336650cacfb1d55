"""The wire's types and its route table."""

from __future__ import annotations

import json

import pytest

from sandboxd import api, wire
from sandboxd.errors import InvalidRequest
from sandboxd.routes import table


def test_every_route_has_a_handler() -> None:
    assert {route.name for route in table.ROUTES} == api.HANDLERS.keys()
    assert len({(route.method, route.path) for route in table.ROUTES}) == len(table.ROUTES)


@pytest.mark.parametrize(
    ("method", "path", "name", "values"),
    [
        ("GET", "/v1/health", "health", {}),
        ("GET", "/v1/sandboxes/x", "get", {"ref": "x"}),
        ("GET", "/v1/sandboxes/a%2Fb%20%C3%A9", "get", {"ref": "a/b é"}),
        ("POST", "/v1/sandboxes/x/processes/12/stdin", "stdin", {"ref": "x", "pid": "12"}),
        ("GET", "/v1/sandboxes/x/workspace/bundle", "bundle_out", {"ref": "x"}),
    ],
)
def test_routes(method: str, path: str, name: str, values: dict[str, str]) -> None:
    found = table.match(method, path)
    assert found is not None and (found[0].name, found[1]) == (name, values)


@pytest.mark.parametrize(
    "path", ["", "/", "/v1", "/v1/health/", "/v1//health", "/v1/healthz", "/V1/health", "/v1/health\n"]
)
def test_what_is_no_route(path: str) -> None:
    assert table.match("GET", path) is None


def test_queries() -> None:
    pairs = [("a", "b"), ("a", "  "), ("c", ""), ("", "d"), ("\udce9", "\udcff")]
    assert table.query("a=b&a=%20+&c&=d&%E9=%ff") == pairs


def test_null_means_absent_and_allow_keeps_its_two_emptinesses() -> None:
    decoded = wire.decode(b'{"name": null, "network": {"allow": []}}', wire.CreateRequest)
    assert decoded.name is None and decoded.network is not None and decoded.network.allow == ()
    assert wire.decode(b'{"network": {"allow": null}}', wire.CreateRequest).network == wire.NetworkRequest()
    assert wire.decode(b"", wire.CreateRequest) == wire.CreateRequest()


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b'{"network": {"allow": ["a", 1]}}', "$.network.allow[1]"), (b'{"env": {"A": null}}', "$.env"),
        (b'{"memory_mb": 1.5}', "$.memory_mb"), (b'{"x": 1}', "`x`"), (b'{"labels": {"a": "b", "a": "b"}}', "twice"),
        (b'{"cpus": Infinity}', "Infinity"), (b'{"cpus": 1' + b"0" * 5000 + b"}", "too many digits"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_place(body: bytes, place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.decode(body, wire.CreateRequest)
    assert place in str(caught.value)


def test_what_is_always_written_and_what_is_not() -> None:
    process = wire.Process(pid=1, argv=("a\udcff",), state="running", exit_code=None, started_at="T")
    assert json.loads(wire.encode(process)) == {
        "pid": 1, "argv": ["a\udcff"], "state": "running", "exit_code": None, "started_at": "T",
    }  # fmt: skip
    assert json.loads(wire.encode(wire.Network(mode="none", allow=None))) == {"mode": "none", "allow": None}
