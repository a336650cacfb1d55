"""The policy's limits of drives, as a guest under QEMU meets them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sandboxd.client import Create, Mount
from tests.daemon import Daemon

pytestmark = pytest.mark.vm

MB_PER_S = 16
OPS_PER_S = 400
# QEMU lets a tenth of a second's worth through at once (its throttle.c), and nobody waits for the last request's time.
BURST_S = 0.2


@pytest.fixture(scope="module")
def limited(short_tmp: Path) -> Daemon:
    policy = short_tmp / "limited.yaml"
    policy.write_text(f"limits: {{disk_mb_per_s: {MB_PER_S}, disk_ops_per_s: {OPS_PER_S}}}\n")
    return Daemon(short_tmp / "limited", flags=("--no-network", "--policy", str(policy)))


def test_every_drive_of_a_sandbox_carries_what_the_policy_says(limited: Daemon) -> None:
    """Each is busy for at least as long as the limit makes it; without one, a tenth of that."""
    with limited as running:
        client = running.client
        client.create_volume("data", 64)
        sandbox = client.create(Create(memory_mb=384, volumes=(Mount("data", "/data"),)))

        def copied(arguments: str) -> float:
            """Seconds, by the guest's clock."""
            done = client.run(sandbox.id, ["sh", "-c", f"LC_ALL=C dd {arguments}"])
            took = re.search(rb"copied, ([0-9.]+) s", done.stderr)
            assert done.exit_code == 0 and took is not None, done.stderr
            return float(took[1])

        for directory in ("/workspace", "/data"):
            assert copied(f"if=/dev/zero of={directory}/file bs=1M count=16 oflag=direct") > 16 / MB_PER_S - BURST_S
        assert copied("if=/data/file of=/dev/null bs=512 count=400 iflag=direct") > 400 / OPS_PER_S - BURST_S
        client.delete(sandbox.id)
    assert limited.leftovers() == []
