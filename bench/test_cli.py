"""`sandbox-cli list`, beside an interpreter that does nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from bench.conftest import SHORT, alternate
from sandboxd.client import Sandbox
from tests.daemon import BIN, Daemon


def seconds(command: list[str], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def test_cli_list(benchmark: Any, daemon: Daemon, vm: Sandbox) -> None:
    environment = daemon.environment()
    alternate(
        benchmark,
        lambda: seconds([str(BIN / "sandbox-cli"), "list"], environment),
        lambda: seconds([sys.executable, "-c", "pass"], environment),
        rounds=10 if SHORT else 40,
        peer_name="python3 -c pass",
    )
