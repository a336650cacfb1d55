"""The node: what it says of itself, cordoned or not; pools; what sandboxes use; and all of it for Prometheus."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.sandboxd.conftest import why_not
from tests.sandboxd.rig import Rig
from tests.sandboxd.test_life import leftovers, machines, until

S = "/v1/sandboxes"
POLICY = "pools: [{size: 2}]\ndefaults: {memory_mb: 256, disk_mb: 100, idle_timeout_secs: 0}\n"
FLAGS = (
    "--node-id", "n-1", "--node-label", "zone=a=b", "--node-label", "rack=7", "--capacity-cpus", "2.5",
    "--capacity-memory-mb", "1000", "--capacity-disk-mb", "350", "--metrics-listen", "127.0.0.1:0",
)  # fmt: skip


def node(rig: Rig) -> dict[str, Any]:
    answer = rig.call("GET", "/v1/node")
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


def pooled(rig: Rig) -> int:
    return int(node(rig)["pooled"]["sandbox-base"])


@pytest.fixture
def pool(place: Path) -> Iterator[Rig]:
    """A daemon whose pool of two has been filled."""
    if reason := why_not():
        pytest.skip(reason)
    policy = place / "policy.yaml"
    policy.write_text(POLICY)
    with Rig(place, "--policy", str(policy), *FLAGS) as rig:
        until("the pool is full", lambda: pooled(rig) == 2, 60)
        yield rig
        for sandbox in rig.call("GET", S).json["sandboxes"]:
            rig.call("DELETE", f"{S}/{sandbox['id']}")
        rig.stop()
        assert leftovers(rig) == [], "machines that waited end with the daemon"


def metrics_port(rig: Rig) -> int:
    found = re.findall(r"metrics at http://127\.0\.0\.1:([0-9]+)/metrics", rig.log.read_text())
    return int(found[-1])


def scrape(rig: Rig) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with socket.create_connection(("127.0.0.1", metrics_port(rig)), timeout=20) as sock:
        said = talk(sock, b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9\r\n\r\n")
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"text/plain; version=" in head.lower()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def talk(sock: socket.socket, request: bytes) -> bytes:
    sock.settimeout(20)
    sock.sendall(request)
    said = b""
    while piece := sock.recv(65536):
        said += piece
    return said


def test_a_node_without_flags_has_what_the_host_has(rig: Rig) -> None:
    said = node(rig)
    assert said["node"] == "" and said["cordoned"] is False and "pooled" not in said and "labels" not in said
    assert said["capabilities"] == rig.call("GET", "/v1/capabilities").json
    has = said["capacity"]
    disk = os.statvfs(rig.state)
    assert has["cpus"] == len(os.sched_getaffinity(0)) and has["disk_mb"] == disk.f_blocks * disk.f_frsize >> 20
    assert has["memory_mb"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20


def test_cordoned_it_takes_no_new_sandbox_until_a_restart_or_the_word(own: Rig) -> None:
    box = own.create(name="before")
    for bad in ({}, {"cordoned": None}, {"cordoned": 1}, {"cordoned": "true"}, {"cordoned": True, "more": 1}):
        answer = own.call("POST", "/v1/node/cordon", bad)
        assert (answer.status, answer.code) == (400, "invalid_request")
    assert node(own)["cordoned"] is False
    assert own.call("POST", "/v1/node/cordon", {"cordoned": True}).json["cordoned"] is True
    refused = own.call("POST", S, {"name": "before"})
    assert (refused.status, refused.code) == (503, "unavailable") and "cordoned" in refused.message
    assert own.call("POST", S, {"cpus": -1}).status == 400, "what is wrong is wrong first"
    assert own.run(box, "true").exit_code == 0
    assert own.call("POST", "/v1/node/cordon", {"cordoned": False}).json["cordoned"] is False
    assert own.call("POST", S, {"name": "before"}).status == 409
    own.call("POST", "/v1/node/cordon", {"cordoned": True})
    own.kill()
    own.start()
    assert node(own)["cordoned"] is False


def test_a_create_of_the_default_takes_a_machine_that_waits(pool: Rig) -> None:
    said = node(pool)
    assert said["node"] == "n-1" and said["labels"] == {"zone": "a=b", "rack": "7"}
    assert said["capacity"] == {"cpus": 2.5, "memory_mb": 1000, "disk_mb": 350}
    assert said["free"] == {"cpus": 0.5, "memory_mb": 488, "disk_mb": 150} and said["running"] == 0
    assert pool.call("GET", S).json == {"sandboxes": []}, "what waits is not listed"
    waiting = [path.name for path in (pool.state / "sandboxes").iterdir()]
    assert all(re.fullmatch(r"sbx_n-1_[0-9a-f]{16}", one) for one in waiting)
    for one in waiting:
        assert [pool.call(method, f"{S}/{one}").status for method in ("GET", "DELETE")] == [404, 404]
    pool.knob("boot_s", "3")     # whatever is booted from here on takes longer than a claim may
    claimed = pool.create(name="mine", env={"A": "b"}, labels={"k": "v"}, idle_timeout_secs=99, lifetime_secs=999)
    assert claimed in waiting
    assert pool.run(claimed, "sh", "-c", "echo $A").stdout == b"b\n"
    shown = pool.call("GET", f"{S}/mine").json
    assert (shown["id"], shown["labels"], shown["idle_timeout_secs"]) == (claimed, {"k": "v"}, 99)
    (created,) = [e for e in pool.call("GET", f"{S}/mine/events").json["events"] if e["type"] == "sandbox.created"]
    assert created["reason"] == "pool" and created["name"] == "mine" and created["env_names"] == ["A"]
    # Anything that is fixed at boot and differs boots.
    other = pool.create(memory_mb=257)
    assert other not in waiting
    (plain,) = [e for e in pool.call("GET", f"{S}/{other}/events").json["events"] if e["type"] == "sandbox.created"]
    assert "reason" not in plain
    pool.knob("boot_s", None)
    until("it was filled up again", lambda: pooled(pool) == 2, 30)
    assert node(pool)["free"] == {"cpus": 0, "memory_mb": 0, "disk_mb": 0}, "promised more than there is"


def test_a_machine_that_ends_while_it_waits_is_replaced(pool: Rig) -> None:
    first = {path.name for path in (pool.state / "sandboxes").iterdir()}
    os.kill(int(machines(pool)[0]), signal.SIGKILL)
    until("it is noticed", lambda: "it ended while it waited" in pool.log.read_text())
    until("another waits", lambda: pooled(pool) == 2, 60)
    now = {path.name for path in (pool.state / "sandboxes").iterdir()}
    assert len(now) == 2 and len(now & first) == 1, "nothing is left of it"


def test_what_waited_is_made_anew_after_a_crash(pool: Rig) -> None:
    claimed = pool.create(name="kept")
    before = set(machines(pool))
    pool.kill()
    pool.start()
    until("the pool is full again", lambda: pooled(pool) == 2, 60)
    assert [one["id"] for one in pool.call("GET", S).json["sandboxes"]] == [claimed]
    assert len(machines(pool)) == 3 and len(before & set(machines(pool))) == 1, "only the claimed one is still there"
    assert pool.run("kept", "true").exit_code == 0


def test_a_policy_that_allows_more_processors_than_a_machine_has_is_narrowed(place: Path) -> None:
    policy = place / "policy.yaml"
    policy.write_text("limits: {max_cpus: 64}\ndefaults: {cpus: 40}\n")
    rig = Rig(place, "--policy", str(policy))
    rig.knob("max_cpus", "32")
    with rig:
        lost = "limits.max_cpus is 32 instead of 64; defaults.cpus is 32 instead of 40"
        assert f"WARNING policy {policy}: {lost}: fake gives a machine no more processors" in rig.log.read_text()
        assert rig.call("GET", "/v1/capabilities").json["limits"]["max_cpus"] == 32
        answer = rig.call("POST", S, {"cpus": 33})
        assert (answer.status, answer.message) == (400, "cpus must be between 0 and 32")


def test_a_pool_that_cannot_be_filled_is_tried_again(place: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    policy = place / "policy.yaml"
    policy.write_text(POLICY)
    rig = Rig(place, "--policy", str(policy))
    rig.knob("no_boot", "1")
    with rig:
        until("it failed", lambda: "lacks a machine" in rig.log.read_text())
        assert pooled(rig) == 0 and leftovers(rig) == []
        assert "\x1b" not in rig.log.read_text()
        rig.knob("no_boot", None)
        until("it is filled", lambda: pooled(rig) == 2, 60)


def test_a_create_that_cannot_be_configured_leaves_nothing_of_what_waited(pool: Rig) -> None:
    for pid in machines(pool):
        os.kill(int(pid), signal.SIGSTOP)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(pool.socket))
        body = json.dumps({"name": "left"}).encode()
        head = b"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until("it is listed", lambda: pool.call("GET", f"{S}/left").status == 200)
        claimed = pool.call("GET", f"{S}/left").json["id"]
    until("the client left, and with it the create", lambda: pool.call("GET", f"{S}/left").status == 404, 20)
    until("nothing is left of it", lambda: not (pool.state / "sandboxes" / claimed).exists(), 20)
    for pid in machines(pool):
        os.kill(int(pid), signal.SIGCONT)


@pytest.fixture
def measuring(place: Path) -> Iterator[Rig]:
    """A daemon with a network that looks every second what sandboxes use."""
    if reason := why_not():
        pytest.skip(reason)
    rig = Rig(place, "--network")
    rig.knob("measured_s", "1")
    with rig:
        yield rig


def test_usage_is_measured_and_reading_it_is_no_activity(measuring: Rig) -> None:
    # Measured a second time before it has been idle for so long.
    box = measuring.create(name="used", idle_timeout_secs=6)
    measuring.start_process(box, "sleep", "1")
    assert measuring.call("GET", f"{S}/sbx_{'0' * 16}/metrics").code == "not_found"

    def samples() -> list[dict[str, Any]]:
        said = measuring.call("GET", f"{S}/used/metrics").json
        assert said["interval_secs"] == 5
        found: list[dict[str, Any]] = said["samples"]
        return found

    until("it was measured twice", lambda: len(samples()) >= 2, 30)
    first, second = samples()[:2]
    assert first["cpu_percent"] == 0 and 0 <= second["cpu_percent"] <= 100 and first["time"] < second["time"]
    assert first["memory_bytes"] > 1 << 20 and first["memory_limit_bytes"] == 1024 << 20
    # Asked for all the time, it ends all the same; and what was measured can still be read.

    def listed() -> str:
        """Its state; to ask for it by its name would be activity."""
        return str(measuring.call("GET", S).json["sandboxes"][0]["state"])

    until("it is idle", lambda: samples() and listed() == "terminated")
    assert samples()[:2] == [first, second]


def test_the_links_counters_are_the_sandboxes(measuring: Rig) -> None:
    box = measuring.create(network={"mode": "allowlist", "allow": ["a.test"]})
    measuring.knob("traffic", json.dumps({box: [1234, 567]}))
    seen: list[dict[str, Any]] = []

    def counted() -> bool:
        seen[:] = measuring.call("GET", f"{S}/{box}/metrics").json["samples"]
        return bool(seen) and seen[-1]["net_rx_bytes"] == 1234

    until("it was counted", counted)
    assert seen[-1]["net_tx_bytes"] == 567


def test_an_idle_timeout_shorter_than_the_boot_starts_when_it_runs(other: Rig) -> None:
    other.knob("boot_s", "2.5")
    box = other.create(idle_timeout_secs=2)
    assert other.call("GET", f"{S}/{box}").json["state"] == "running"
    time.sleep(1.2)     # longer than the clock's tick
    assert other.call("GET", f"{S}/{box}").json["state"] == "running"


def test_prometheus_sees_sums_and_no_sandbox(pool: Rig) -> None:
    name, label = "canary-name", "canary-label"
    pool.create(name=name, labels={"k": label})
    pool.create(memory_mb=300)
    pool.start_process(name, "sleep", "60")
    assert pool.call("POST", S, {"name": name}).status == 409
    assert pool.call("POST", S, {"cpus": -1}).status == 400
    until("the pool is full again", lambda: pooled(pool) == 2, 60)
    pool.call("POST", "/v1/node/cordon", {"cordoned": True})
    assert pool.call("POST", S, {}).status == 503
    found = scrape(pool)
    image = (("image", "sandbox-base"),)
    expected = {
        ("sandboxd_sandboxes", (("state", "running"),)): 2, ("sandboxd_sandboxes", (("state", "pending"),)): 0,
        ("sandboxd_sandboxes", (("state", "suspended"),)): 0, ("sandboxd_sandboxes", (("state", "terminated"),)): 0,
        ("sandboxd_processes_running", ()): 1,
        ("sandboxd_pool_target", image): 2, ("sandboxd_pool_ready", image): 2, ("sandboxd_pool_booting", image): 0,
        ("sandboxd_capacity_cpus", ()): 2.5, ("sandboxd_capacity_memory_mb", ()): 1000,
        ("sandboxd_capacity_disk_mb", ()): 350, ("sandboxd_free_cpus", ()): 0, ("sandboxd_free_disk_mb", ()): 0,
        ("sandboxd_free_memory_mb", ()): 0, ("sandboxd_cordoned", ()): 1,
        ("sandboxd_creates_total", (("status", "ok"),)): 2,
        ("sandboxd_creates_total", (("status", "conflict"),)): 1,
        ("sandboxd_creates_total", (("status", "invalid_request"),)): 1,
        ("sandboxd_creates_total", (("status", "unavailable"),)): 1,
        ("sandboxd_create_seconds_count", ()): 2, ("sandboxd_create_seconds_bucket", (("le", "+Inf"),)): 2,
    }  # fmt: skip
    assert {key: found.get(key) for key in expected} == expected
    assert found["sandboxd_create_seconds_sum", ()] > 0
    assert {key for _, labels in found for key, _ in labels} == {"state", "image", "status", "le"}
    text = json.dumps([str(key) for key in found])
    assert name not in text and label not in text and "sbx_" not in text


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        pytest.param(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 200, id="localhost"),
        pytest.param(b"GET /metrics?a=b HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", 200, id="an IPv6 address and a query"),
        pytest.param(b"GET /metrics HTTP/1.1\r\nHost: evil.test\r\n\r\n", 403, id="a rebound name"),
        pytest.param(b"GET /metrics HTTP/1.0\r\n\r\n", 403, id="no name"),
        pytest.param(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.test\r\n\r\n", 403, id="a page"),
        pytest.param(b"GET http://localhost/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 403, id="as to a proxy"),
        pytest.param(b"GET /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\n\r\n", 404, id="the API is not here"),
        pytest.param(b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n", 405, id="a POST"),
        pytest.param(b"\x16\x03\x01\x00\x05\x01\r\n\r\n", None, id="TLS"),
        pytest.param(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20000, None, id="an endless header"),
    ],
)  # fmt: skip
def test_the_metrics_listener_answers_nothing_else(metered: Rig, request_: bytes, status: int | None) -> None:
    with socket.create_connection(("127.0.0.1", metrics_port(metered)), timeout=20) as sock, suppress(ConnectionError):
        said = talk(sock, request_)
        assert said.startswith(f"HTTP/1.1 {status} ".encode()) if status else said == b""


def test_slow_and_many_clients_of_the_metrics_hold_nobody_up(metered: Rig) -> None:
    with ExitStack() as slow:
        socks = []
        for _ in range(80):
            socks.append(slow.enter_context(socket.create_connection(("127.0.0.1", metrics_port(metered)), timeout=20)))
            socks[-1].sendall(b"GET /metr")
        assert metered.call("GET", "/v1/health").status == 200
        assert ("sandboxd_cordoned", ()) in scrape(metered), "a newer one takes the place of the oldest"
        socks[-1].sendall(b"ics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert socks[-1].recv(100).startswith(b"HTTP/1.1 200 "), "and of no other"


@pytest.fixture(scope="module")
def metered() -> Iterator[Rig]:
    """A daemon with metrics and without sandboxes."""
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="dmn-", dir="/tmp") as name, Rig(
        Path(name), "--metrics-listen", "127.0.0.1:0"
    ) as rig:
        yield rig
