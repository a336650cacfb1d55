"""How long `sandbox-cli` takes to say what it knows, beside an interpreter that does nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.conftest import SHORT, alternate
from sandboxd.client import Sandbox
from tests.daemon import BIN, Daemon


def seconds(command: list[str], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def beside_nothing(benchmark: Any, environment: dict[str, str], *args: str) -> None:
    alternate(
        benchmark,
        lambda: seconds([str(BIN / "sandbox-cli"), *args], environment),
        lambda: seconds([sys.executable, "-c", "pass"], environment),
        rounds=10 if SHORT else 40,
        peer_name="python3 -c pass",
    )


def test_cli_list(benchmark: Any, daemon: Daemon, vm: Sandbox) -> None:
    beside_nothing(benchmark, daemon.environment(), "list")


def test_cli_help(benchmark: Any, tmp_path: Path) -> None:
    beside_nothing(benchmark, {"HOME": str(tmp_path)}, "--help")


def test_cli_agent_ls(benchmark: Any, tmp_path: Path) -> None:
    beside_nothing(benchmark, {"HOME": str(tmp_path)}, "agent", "ls")
