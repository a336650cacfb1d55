"""A networked daemon in a world of the tests' own, and sandboxes that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandboxd.client import NetworkRequest
from tests.daemon import Daemon
from tests.world.guest import Guest
from tests.world.world import World, missing, open_world

# What the shared sandbox may reach. Not on it: other.test, sub.allowed.test and the rest of the world's names.
ALLOWED = (
    "allowed.test", "second.test", "lan.test", "rebound.test", "*.rebound.test", "both.test", "git.test", "index.test",
    "*.wild.test",
)  # fmt: skip
ALLOWED_TCP = ("git.test:22", "db.test:5432")

POLICY = """
network:
  ceiling: open
  default:
    mode: allowlist
    allow: [allowed.test]
  may_allow: ["*"]
  may_allow_tcp: ["*"]
  private: [lan.test]
"""

Opener = Callable[..., Guest]


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    if lacking := missing():
        pytest.skip(lacking)
    with open_world() as opened:
        yield opened


@pytest.fixture(scope="session")
def networked(world: World, short_tmp: Path) -> Iterator[Daemon]:
    """One daemon in the world's host for the whole run."""
    with networked_daemon(world, short_tmp / "networked") as running:
        yield running
    assert running.leftovers() == []
    assert "Traceback" not in running.log.read_text(errors="replace"), running.log.read_text(errors="replace")
    assert world.host.run("ip", "netns", "list") == ""


def networked_daemon(world: World, directory: Path) -> Daemon:
    directory.mkdir()
    policy = directory / "policy.yaml"
    policy.write_text(POLICY)
    return Daemon(directory, prefix=world.host.prefix, flags=("--policy", str(policy)))


@pytest.fixture(scope="session")
def guest(networked: Daemon, world: World) -> Guest:
    """The sandbox that most tests share; who changes its policy puts it back with `allowed`."""
    return Guest(networked, world, NetworkRequest(mode="allowlist", allow=ALLOWED, allow_tcp=ALLOWED_TCP), "guest")


@pytest.fixture(scope="session")
def neighbour(networked: Daemon, world: World) -> Guest:
    """Another sandbox of the same daemon, in mode open but for one name."""
    return Guest(networked, world, NetworkRequest(mode="open", deny=("other.test",)), "neighbour")


@pytest.fixture
def opened(networked: Daemon, world: World) -> Iterator[Opener]:
    """Sandboxes of a test's own."""
    made: list[Guest] = []

    def open_one(network: NetworkRequest | None, name: str) -> Guest:
        made.append(Guest(networked, world, network, name))
        return made[-1]

    yield open_one
    for each in made:
        networked.client.delete(each.id)
