"""The suite against the product itself."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.conformance.live import daemon, suite

# What this version of the daemon does not have; everything else must run.
LACKING = ("audit", "images", "memory_snapshot", "metrics", "suspend", "volumes")
LIMIT_S = 1500


@pytest.mark.vm
@pytest.mark.timeout(LIMIT_S + 120)
def test_the_daemon_conforms(short_tmp: Path) -> None:
    with daemon(short_tmp / "conformance") as (running, prefix):
        ran = subprocess.run(
            [*prefix, *suite(f"unix://{running.socket}", "-q")],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=LIMIT_S,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
        print(ran.stdout)
        for line in re.findall(r"^SKIPPED .*$", ran.stdout, re.MULTILINE):
            assert any(f"the capability {name};" in line for name in LACKING), line
    assert running.leftovers() == []
    assert "Traceback" not in running.log.read_text(errors="replace"), running.log.read_text(errors="replace")
