"""A daemon in the tests' world that has real agents, and models there for them to talk to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.agents.table import AGENTS
from tests.agents import installed
from tests.daemon import Daemon
from tests.world.world import World, missing, open_world

REAL = ("claude", "codex")
POLICY = """
network:
  ceiling: allowlist
  default:
    mode: allowlist
    allow: [allowed.test, npm.test]
  may_allow: ["*"]
"""


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    if lacking := missing():
        pytest.skip(lacking)
    with open_world() as opened:
        yield opened


@pytest.fixture(scope="session")
def lacking() -> dict[str, str]:
    """Why an agent is not there, by its name."""
    return {}


@pytest.fixture(scope="session")
def daemon(world: World, short_tmp: Path, lacking: dict[str, str]) -> Iterator[Daemon]:
    """One for the whole run; the registry it is told of is the world's."""
    directory = short_tmp / "agents"
    directory.mkdir()
    (directory / "policy.yaml").write_text(POLICY)
    prefix = (*world.host.prefix, "env", "npm_config_registry=https://npm.test/")
    made = Daemon(directory, prefix=prefix, flags=("--policy", str(directory / "policy.yaml")))
    for name in REAL:
        try:
            installed.put(AGENTS[name], made.state)
        except installed.NotHere as why:
            lacking[name] = str(why)
    with made as running:
        yield running
    assert running.leftovers() == []
    assert "Traceback" not in running.log.read_text(errors="replace"), running.log.read_text(errors="replace")
