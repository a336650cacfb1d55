"""What a sandbox uses, as the host measures it."""

from __future__ import annotations

import time

from conformance import shape
from conformance.endpoint import Endpoint
from conformance.estate import Estate, Sandbox
from conformance.test_sandboxes import NOBODY

COUNTERS = ("net_rx_bytes", "net_tx_bytes", "disk_read_bytes", "disk_write_bytes")


def test_usage_is_sampled_in_order_and_within_reason(box: Sandbox, estate: Estate, endpoint: Endpoint) -> None:
    """C37"""
    estate.needs("metrics", ("GET", f"{box.path}/metrics", None))
    interval = shape.ok(box.call("GET", "/metrics"))["interval_secs"]
    assert isinstance(interval, int) and interval > 0
    deadline = time.monotonic() + 4 * interval + 10
    while len(samples := shape.ok(box.call("GET", "/metrics"))["samples"]) < 2:
        assert time.monotonic() < deadline, f"fewer than two samples: {samples}"
        time.sleep(0.5)
    for sample in samples:
        shape.fields(
            sample,
            {"time": str, "cpu_percent": shape.Number, "memory_bytes": int, "memory_limit_bytes": int}
            | dict.fromkeys(COUNTERS, int),
            {"processes": int},
        )
        assert 0 <= sample["cpu_percent"] <= 100
        assert sample["memory_bytes"] >= 0 and sample["memory_limit_bytes"] >= box.body["memory_mb"] << 20
    times = [shape.moment(sample["time"]) for sample in samples]
    assert times == sorted(times)
    for name in COUNTERS:
        counted = [sample[name] for sample in samples]
        assert counted == sorted(counted), f"{name} is cumulative: {counted}"
    shape.refused(endpoint.call("GET", f"/v1/sandboxes/{NOBODY}/metrics"), 404)
