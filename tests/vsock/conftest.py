"""Builds sandbox-vsock as it ships and under sanitizers; every test here runs on both."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def built() -> Path:
    for tool in ("make", "cc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    subprocess.run(["make", "-s", "-C", ROOT / "native/vsock", "all", "asan"], check=True)
    return ROOT / "build"


@pytest.fixture(params=["shipped", "sanitized"])
def binary(request: pytest.FixtureRequest, built: Path) -> Path:
    return built / ("sandbox-vsock" if request.param == "shipped" else "asan/sandbox-vsock")
