"""What an endpoint says it can do."""

from __future__ import annotations

from conformance import shape
from conformance.endpoint import Endpoint

COUNTS = ("max_cpus", "max_memory_mb", "max_disk_mb", "min_snapshot_every_secs", "max_snapshot_keep")
MAY_BE_ZERO = ("max_idle_timeout_secs", "max_lifetime_secs")
ALWAYS = ("network_policy_update", "suspend", "memory_snapshot", "audit")


def test_capabilities_name_version_backend_limits_and_network(endpoint: Endpoint) -> None:
    """C1"""
    body = shape.ok(endpoint.call("GET", "/v1/capabilities"))
    assert body["api_version"] == "v1"
    assert isinstance(body["backend"], str) and body["backend"]
    assert all(isinstance(value, bool) for value in body["capabilities"].values()), body
    assert set(ALWAYS) <= set(body["capabilities"]), body
    shape.fields(body["limits"], dict.fromkeys(COUNTS + MAY_BE_ZERO, int))
    assert all(body["limits"][name] > 0 for name in COUNTS), body
    assert all(body["limits"][name] >= 0 for name in MAY_BE_ZERO), body
    network = body["network"]
    shape.network(network["default"])
    assert network["ceiling"] in shape.MODES
    assert shape.MODES.index(network["default"]["mode"]) <= shape.MODES.index(network["ceiling"])
    assert isinstance(network["may_allow"], list)


def test_health_is_told_without_a_token(endpoint: Endpoint) -> None:
    answer = endpoint.call("GET", "/v1/health", headers={"Authorization": ""})
    assert shape.ok(answer) == {"status": "ok"}


def test_an_endpoint_nobody_knows_is_not_found(endpoint: Endpoint) -> None:
    for method, target in (("GET", "/"), ("GET", "/v1"), ("GET", "/v2/sandboxes"), ("POST", "/v1/nothing")):
        shape.refused(endpoint.call(method, target), 404)
