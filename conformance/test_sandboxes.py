"""Sandboxes from their making to their end: names, environment, labels, the two clocks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest

from conformance import shape
from conformance.conftest import Box, Heir, Past
from conformance.endpoint import Endpoint
from conformance.estate import Estate, Offer, Sandbox

NOBODY = "sbx_" + 16 * "0"


def test_a_named_sandbox_is_found_by_id_and_name_and_is_terminated_once_deleted(past: Past) -> None:
    """C2"""
    made = shape.sandbox(shape.ok(past.sandbox.created, 201), "running")
    assert made["id"].startswith("sbx_") and made["name"] == past.name
    for answer in past.got:
        assert shape.sandbox(shape.ok(answer), "running")["id"] == made["id"]
    (listed,) = [one for one in shape.ok(past.listed)["sandboxes"] if one["id"] == made["id"]]
    assert shape.sandbox(listed, "running")["name"] == past.name
    shape.done(past.deleted)
    assert shape.sandbox(shape.ok(past.after), "terminated")["id"] == made["id"]


def test_the_list_is_newest_first(heir: Heir, box: Sandbox, endpoint: Endpoint) -> None:
    listed = shape.ok(endpoint.call("GET", "/v1/sandboxes"))["sandboxes"]
    order = [(shape.moment(one["created_at"]), one["id"]) for one in listed]
    assert order == sorted(order, reverse=True)


def test_deleting_twice_is_no_error(past: Past) -> None:
    """C3"""
    shape.done(past.deleted)
    shape.done(past.sandbox.call("DELETE"))


def test_a_deleted_name_can_be_used_again(past: Past, heir: Heir) -> None:
    """C4"""
    shape.refused(past.again, 409)
    shape.ok(heir.sandbox.created, 201)
    assert heir.sandbox.id != past.sandbox.id
    assert shape.sandbox(shape.ok(heir.by_name), "running")["id"] == heir.sandbox.id


def test_a_name_that_is_no_name_is_refused(estate: Estate) -> None:
    """C5"""
    for name in ("Upper", "has space", "sbx_lookslikeanid", "-lead", 64 * "a"):
        estate.refuse(400, name=name)


def test_an_unknown_sandbox_is_not_found(endpoint: Endpoint, estate: Estate) -> None:
    """C6"""
    shape.refused(endpoint.call("GET", f"/v1/sandboxes/{estate.name('nobody')}"), 404)
    shape.refused(endpoint.call("POST", f"/v1/sandboxes/{NOBODY}/run", {"argv": ["true"]}), 404)


def test_an_environment_reaches_commands_and_no_answer(shared: Box, endpoint: Endpoint) -> None:
    """C7"""
    box = shared.sandbox
    for answer in (box.created, box.call("GET"), endpoint.call("GET", "/v1/sandboxes")):
        assert shared.value.encode() not in answer.body
    assert box.body["env_names"] == ["API_TOKEN"] and box.get()["env_names"] == ["API_TOKEN"]
    assert box.run("printenv", "API_TOKEN").stdout == shared.value.encode() + b"\n"
    assert box.run("printenv", "API_TOKEN", env={"API_TOKEN": "this-once"}).stdout == b"this-once\n"


def test_a_reserved_environment_name_is_refused(estate: Estate, box: Sandbox) -> None:
    """C8"""
    estate.refuse(403, env={"LD_PRELOAD": "/tmp/x.so"})
    for path in ("/run", "/processes"):
        shape.refused(box.call("POST", path, {"argv": ["true"], "env": {"BASH_ENV": "/tmp/x"}}), 403)


def test_an_environment_name_that_is_no_name_is_refused(estate: Estate, box: Sandbox) -> None:
    for env in ({"1ST": "x"}, {"A-B": "x"}, {"": "x"}, {"A": "nul\0"}):
        estate.refuse(400, env=env)
        shape.refused(box.call("POST", "/run", {"argv": ["true"], "env": env}), 400)


def test_what_is_empty_is_left_out_of_a_sandbox(closed: Sandbox, offer: Offer) -> None:
    body = shape.sandbox(closed.get(), "running")
    assert not {"name", "env_names", "volumes", "snapshot_every_secs", "snapshot_keep", "snapshotting"} & set(body)
    assert ("lifetime_secs" in body) == (offer.limits["max_lifetime_secs"] > 0)


def test_cpus_memory_and_disk_have_limits(estate: Estate, offer: Offer) -> None:
    for field, limit in (("cpus", "max_cpus"), ("memory_mb", "max_memory_mb"), ("disk_mb", "max_disk_mb")):
        for value in (-1, offer.limits[limit] + 1):
            given: dict[str, Any] = {field: value}
            estate.refuse(400, **given)


def test_name_labels_and_idle_timeout_can_be_changed(
    heir: Heir, past: Past, shared: Box, estate: Estate, endpoint: Endpoint, offer: Offer
) -> None:
    """C28"""
    one, other = heir.sandbox, estate.name("renamed")
    old = one.get()
    named = shape.sandbox(shape.ok(one.call("PATCH", body={"name": other})))
    assert named["name"] == other and named["labels"] == old["labels"]
    assert shape.ok(endpoint.call("GET", f"/v1/sandboxes/{other}"))["id"] == one.id
    labels = {**estate.labels, "part": "relabelled"}
    assert shape.ok(one.call("PATCH", body={"labels": labels}))["labels"] == labels
    for part, count in (("relabelled", 1), ("heir", 0)):
        query = "&".join(f"label={quote(text, safe='')}" for text in (f"part={part}", f"conformance={estate.mark}"))
        assert len(shape.ok(endpoint.call("GET", f"/v1/sandboxes?{query}"))["sandboxes"]) == count
    shape.refused(one.call("PATCH", body={"name": shared.name}), 409)
    for bad in (
        {"name": "Not A Name"}, {"labels": {"Bad Key": "x"}}, {"labels": {"k": "a\nb"}}, {"idle_timeout_secs": -1}, {},
        {"cpus": 2}, {"name": estate.name("half"), "labels": {"Bad Key": "x"}},
    ):  # fmt: skip
        shape.refused(one.call("PATCH", body=bad), 400)
    kept = one.get()
    assert (kept["name"], kept["labels"]) == (other, labels), "a refused change has changed something"
    assert shape.ok(one.call("PATCH", body={"idle_timeout_secs": 120}))["idle_timeout_secs"] == 120
    if limit := offer.limits["max_idle_timeout_secs"]:
        shape.refused(one.call("PATCH", body={"idle_timeout_secs": limit + 1}), 400)
        shape.refused(one.call("PATCH", body={"idle_timeout_secs": 0}), 400)
        assert one.get()["idle_timeout_secs"] == 120
    else:
        assert shape.ok(one.call("PATCH", body={"idle_timeout_secs": 0}))["idle_timeout_secs"] == 0
    bare = shape.sandbox(shape.ok(one.call("PATCH", body={"name": "", "labels": {}})))
    assert "name" not in bare and "labels" not in bare
    restored = {name: old[name] for name in ("name", "labels", "idle_timeout_secs")}
    assert shape.sandbox(shape.ok(one.call("PATCH", body=restored))) == old
    shape.refused(past.sandbox.call("PATCH", body={"labels": {}}), 409)


@dataclass
class Clocks:
    """Two sandboxes that end by themselves, running their time while other tests go on."""

    idle: Sandbox
    living: Sandbox
    lifetime_s: int
    asleep: str


@pytest.fixture(scope="session")
def clocks(estate: Estate, offer: Offer, box: Sandbox) -> Clocks:
    """The lifetime counts from before the boot, so it has to be longer than one."""
    most = offer.limits["max_lifetime_secs"]
    found: dict[str, Sandbox] = {}
    asked = 3 + math.ceil(3 * estate.boot_s)
    lifetime_s = min(asked, most) if most else asked

    def make(key: str, **given: int) -> Callable[[], None]:
        def create() -> None:
            found[key] = estate.create(network={"mode": "none"}, **given)

        return create

    makers = [make("idle", idle_timeout_secs=2), make("living", lifetime_secs=lifetime_s)]
    threads = [threading.Thread(target=maker) for maker in makers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Clocks(found["idle"], found["living"], lifetime_s, found["living"].start("sleep", "600"))


def test_a_sandbox_nobody_uses_is_terminated(clocks: Clocks) -> None:
    """C30"""
    assert clocks.idle.body["idle_timeout_secs"] == 2
    clocks.idle.wait_for("terminated", 30)


def test_an_idle_timeout_above_the_limit_is_refused(estate: Estate, offer: Offer) -> None:
    """C31"""
    estate.refuse(400, idle_timeout_secs=-1)
    if limit := offer.limits["max_idle_timeout_secs"]:
        estate.refuse(400, idle_timeout_secs=limit + 1)


def test_a_lifetime_ends_a_sandbox_whatever_runs_in_it(clocks: Clocks) -> None:
    """C32"""
    body = shape.sandbox(clocks.living.body, "running")
    assert body["lifetime_secs"] == clocks.lifetime_s
    ends = shape.moment(body["created_at"]) + clocks.lifetime_s
    assert abs(shape.moment(body["expires_at"]) - ends) < 0.01
    clocks.living.wait_for("terminated", clocks.lifetime_s + 30)
    ran = shape.process(shape.ok(clocks.living.estate.endpoint.call("GET", clocks.asleep)))
    assert ran["state"] == "exited"


def test_a_lifetime_has_a_limit_that_is_given_to_whoever_asks_for_none(
    estate: Estate, offer: Offer, box: Sandbox
) -> None:
    """C33"""
    estate.refuse(400, lifetime_secs=-1)
    if limit := offer.limits["max_lifetime_secs"]:
        estate.refuse(400, lifetime_secs=limit + 1)
        assert box.body["lifetime_secs"] == limit and "expires_at" in box.body
    else:
        assert "lifetime_secs" not in box.body and "expires_at" not in box.body


def test_labels_select_sandboxes(box: Sandbox, heir: Heir, estate: Estate, endpoint: Endpoint) -> None:
    """C40"""
    query = "&".join(f"label={quote(text, safe='')}" for text in (f"conformance={estate.mark}", "part=box"))
    (found,) = shape.ok(endpoint.call("GET", f"/v1/sandboxes?{query}"))["sandboxes"]
    assert found["id"] == box.id and found["labels"] == {**estate.labels, "part": "box"}
    for bad in ("noequals", "Bad Key=x", "=x"):
        shape.refused(endpoint.call("GET", f"/v1/sandboxes?label={quote(bad, safe='')}"), 400)
    for labels in (
        {"Upper": "x"}, {"": "x"}, {64 * "k": "x"}, {"_k": "x"}, {"k": 257 * "v"}, {"k": "a\x07"}, {"k": "a\x7f"},
        {"k": "a\x85"}, {f"k{n}": "x" for n in range(33)},
    ):  # fmt: skip
        estate.refuse(400, labels=labels)


def test_a_value_of_256_bytes_is_a_label(heir: Heir) -> None:
    labels = {**heir.sandbox.get()["labels"], "a.b/c_d-e": 64 * "🦊"}
    assert shape.ok(heir.sandbox.call("PATCH", body={"labels": labels}))["labels"] == labels


def test_creates_of_one_name_cannot_both_win(shared: Box) -> None:
    assert sorted(answer.status for answer in shared.answers) == [201, 409, 409]
    for answer in shared.answers:
        if answer.status != 201:
            shape.refused(answer, 409)
