"""Fixtures and probes shared by all tests."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd.client import Create, Sandbox
from tests.daemon import Daemon

SOAK = os.environ.get("SOAK") == "1"


def counts(quick: int, soak: int) -> int:
    """How often to repeat: `quick` in `make test`, `soak` in `make soak`."""
    return soak if SOAK else quick


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `soak` show nothing that a quicker one does not; they run in `make soak` alone."""
    if not SOAK:
        later = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]


@pytest.fixture(scope="session")
def seed() -> random.Random:
    """Randomness a failing run can be repeated with: SEED=n."""
    number = int(os.environ.get("SEED", random.SystemRandom().randrange(2**32)))
    print(f"\nSEED={number}")
    return random.Random(number)


@pytest.fixture(scope="session")
def short_tmp() -> Iterator[Path]:
    """A directory every user may enter, with a short name."""
    path = Path(tempfile.mkdtemp(prefix="sbx-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def daemon(short_tmp: Path) -> Iterator[Daemon]:
    """One daemon with real VMs for the whole run."""
    with Daemon(short_tmp / "daemon") as running:
        yield running
    assert running.leftovers() == []
    assert "Traceback" not in running.log.read_text(errors="replace"), running.log.read_text(errors="replace")


@pytest.fixture(scope="session")
def shared(daemon: Daemon) -> Sandbox:
    """One VM for the tests that leave nothing behind in it."""
    return daemon.client.create(Create(name="shared", memory_mb=768))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A small repository of the caller's, with one commit."""
    return make_repository(tmp_path / "project")


def make_repository(path: Path, *init: str) -> Path:
    path.mkdir(parents=True)
    git(path, "init", "-q", "-b", "main", *init)
    (path / "hello.txt").write_text("hello\n")
    git(path, "add", ".")
    git(path, "commit", "-q", "-m", "One")
    return path


def git(where: Path, *arguments: str, check: bool = True) -> str:
    """Plain git, as the person would type it; its own identity, nobody's configuration."""
    environment = {
        "PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_AUTHOR_NAME": "alice", "GIT_AUTHOR_EMAIL": "alice@localhost",
        "GIT_COMMITTER_NAME": "alice", "GIT_COMMITTER_EMAIL": "alice@localhost",
    }  # fmt: skip
    answer = subprocess.run(
        ["git", *arguments], cwd=where, env=environment, capture_output=True, check=False, timeout=120
    )
    if check and answer.returncode != 0:
        raise AssertionError(f"git {' '.join(arguments)}: {answer.stderr.decode(errors='replace')}")
    return answer.stdout.decode(errors="surrogateescape")
