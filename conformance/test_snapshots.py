"""Sandboxes that sleep, and sandboxes made from what another one was."""

from __future__ import annotations

import time
from typing import Any

import pytest

from conformance import shape
from conformance.endpoint import Endpoint
from conformance.estate import Estate, Offer, Sandbox

UNKNOWN = "snp_" + 16 * "0"
SHORT_INTERVAL_S = 5


@pytest.fixture(scope="session")
def own(estate: Estate) -> Sandbox:
    """A sandbox that these tests put to sleep and copy."""
    return estate.create(network={"mode": "none"})


def needs_snapshots(estate: Estate, one: Sandbox) -> None:
    """Either kind will do."""
    if not estate.offer.has("disk_snapshot"):
        estate.needs(
            "memory_snapshot", ("POST", f"{one.path}/snapshots", None), ("GET", "/v1/snapshots", None),
            ("PUT", f"{one.path}/snapshot-schedule", {"every_secs": 3600, "keep": 1}),
            ("POST", "/v1/sandboxes", {"snapshot_id": UNKNOWN}),
            ("POST", "/v1/sandboxes", {"snapshot_every_secs": 3600}),
            ("DELETE", f"/v1/snapshots/{UNKNOWN}", None),
        )  # fmt: skip


def test_a_sandbox_is_suspended_and_resumed_with_its_files(
    box: Sandbox, estate: Estate, request: pytest.FixtureRequest
) -> None:
    """C35"""
    estate.needs("suspend", ("POST", f"{box.path}/suspend", None), ("POST", f"{box.path}/resume", None))
    own: Sandbox = request.getfixturevalue("own")
    shape.refused(own.call("POST", "/resume"), 409)
    process = own.start("sleep", "600")
    shape.refused(own.call("POST", "/suspend"), 409)
    shape.done(estate.endpoint.call("POST", f"{process}/signal", {"signal": "KILL"}))
    assert own.output(process)[2] == 137
    shape.done(own.write("/tmp/kept", b"before the sleep"))
    shape.sandbox(shape.ok(own.call("POST", "/suspend")), "suspended")
    shape.refused(own.call("POST", "/run", {"argv": ["true"]}), 409)
    shape.refused(own.call("POST", "/suspend"), 409)
    shape.sandbox(shape.ok(own.call("POST", "/resume")), "running")
    assert own.read("/tmp/kept").body == b"before the sleep"
    shape.refused(own.call("POST", "/resume"), 409)


def test_forks_of_a_snapshot_go_their_own_ways(
    box: Sandbox, estate: Estate, endpoint: Endpoint, request: pytest.FixtureRequest
) -> None:
    """C36"""
    needs_snapshots(estate, box)
    own: Sandbox = request.getfixturevalue("own")
    shape.done(own.write("/tmp/shared", b"as it was"))
    taken = shape.ok(estate.snapshot(own), 201)
    _is_snapshot(taken, own)
    assert own.get()["state"] == "running"
    assert taken["id"] in [one["id"] for one in shape.ok(endpoint.call("GET", "/v1/snapshots"))["snapshots"]]
    memory = own.body["memory_mb"]
    same: dict[str, Any] = {"snapshot_id": taken["id"], "memory_mb": memory, "network": {"mode": "none"}}
    forks = [estate.create(**same) for _ in range(2)]
    for number, fork in enumerate(forks):
        assert fork.read("/tmp/shared").body == b"as it was"
        shape.done(fork.write("/tmp/shared", b"mine, %d" % number))
    assert [one.read("/tmp/shared").body for one in (own, *forks)] == [b"as it was", b"mine, 0", b"mine, 1"]
    estate.refuse(400, **same, image="another.example/image:1")
    if taken["kind"] == "memory":
        estate.refuse(400, **{**same, "memory_mb": memory + 64})
    else:
        assert estate.create(**{**same, "memory_mb": memory + 64}).body["memory_mb"] == memory + 64
    estate.refuse(404, snapshot_id=UNKNOWN)
    shape.done(endpoint.call("DELETE", f"/v1/snapshots/{taken['id']}"))
    shape.refused(endpoint.call("DELETE", f"/v1/snapshots/{taken['id']}"), 404)


def test_a_schedule_keeps_as_many_snapshots_as_it_was_told(
    box: Sandbox, estate: Estate, endpoint: Endpoint, offer: Offer, request: pytest.FixtureRequest
) -> None:
    """C38

    The intervals are waited for where the endpoint permits short ones.
    """
    needs_snapshots(estate, box)
    least, most = offer.limits["min_snapshot_every_secs"], offer.limits["max_snapshot_keep"]
    own: Sandbox = request.getfixturevalue("own")
    schedule = "/snapshot-schedule"
    for bad in (
        {"every_secs": least - 1, "keep": 1} if least > 1 else {"every_secs": -1, "keep": 1},
        {"every_secs": least, "keep": most + 1}, {"every_secs": -1}, {"every_secs": least, "keep": -1},
    ):  # fmt: skip
        shape.refused(own.call("PUT", schedule, bad), 400)
    estate.refuse(400, snapshot_keep=1)
    set_to = shape.sandbox(shape.ok(own.call("PUT", schedule, {"every_secs": least})))
    assert (set_to["snapshot_every_secs"], set_to["snapshot_keep"]) == (least, 1)
    if least <= SHORT_INTERVAL_S:
        seen: set[str] = set()
        deadline = time.monotonic() + 3 * least + 90
        while len(seen) < 3:
            assert time.monotonic() < deadline, f"three intervals, and these snapshots: {seen}"
            seen.update(_scheduled(endpoint, own))
            time.sleep(0.2)
    stopped = shape.sandbox(shape.ok(own.call("PUT", schedule, {"every_secs": 0})))
    assert "snapshot_every_secs" not in stopped
    if least <= SHORT_INTERVAL_S:
        (last,) = _scheduled(endpoint, own)
        shape.done(endpoint.call("DELETE", f"/v1/snapshots/{last}"))


def _scheduled(endpoint: Endpoint, one: Sandbox) -> list[str]:
    found = shape.ok(endpoint.call("GET", "/v1/snapshots"))["snapshots"]
    return [taken["id"] for taken in found if taken["sandbox"] == one.id and taken.get("scheduled")]


def _is_snapshot(taken: Any, one: Sandbox) -> None:
    shape.fields(
        taken, {"id": str, "sandbox": str, "image": str, "kind": str, "bytes": int, "created_at": str},
        {"scheduled": bool},
    )  # fmt: skip
    assert shape.SNAPSHOT_ID.match(taken["id"]) and taken["kind"] in ("memory", "disk")
    assert (taken["sandbox"], taken["image"]) == (one.id, one.body["image"]) and "scheduled" not in taken
