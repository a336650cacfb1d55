"""A directory of tokens, one for each person: given and taken while the daemon runs."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandboxd.rig import Rig

ALICE, BOB, CAROL = "alice-has-this-token", "bob-has-another-one", "carol-came-later-on"


@pytest.fixture
def place(short_tmp: Path, tmp_path: Path) -> Path:
    place = short_tmp / f"tokens-{tmp_path.name[-20:]}-{time.monotonic_ns()}"
    (place / "tokens").mkdir(parents=True, mode=0o700)
    return place


@pytest.fixture
def rig(place: Path) -> Iterator[Rig]:
    give(place, "alice", ALICE)
    give(place, "bob", BOB)
    rig = Rig(place, "--token-dir", str(place / "tokens"))
    rig.start()
    yield rig
    rig.stop()


def give(place: Path, name: str, token: str, mode: int = 0o600) -> None:
    path = place / "tokens" / name
    path.write_text(token + "\n")
    path.chmod(mode)


def may(rig: Rig, token: str) -> bool:
    answer = rig.call("GET", "/v1/sandboxes", headers={"Authorization": f"Bearer {token}"})
    assert answer.status in (200, 401)
    return answer.status == 200


def reload(rig: Rig, line: str) -> None:
    """SIGHUP, until the daemon has said what became of it."""
    assert rig.process is not None
    before = rig.log.read_text().count(line)
    rig.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 20
    while rig.log.read_text().count(line) == before:
        assert time.monotonic() < deadline, rig.log.read_text()
        time.sleep(0.02)


def test_each_token_opens_and_no_other(rig: Rig) -> None:
    assert may(rig, ALICE) and may(rig, BOB)
    assert not may(rig, CAROL)
    assert not may(rig, f"{ALICE}x")
    assert rig.call("GET", "/v1/sandboxes").status == 401


def test_a_token_is_given_and_taken_while_the_daemon_runs(rig: Rig, place: Path) -> None:
    give(place, "carol", CAROL)
    (place / "tokens" / "bob").unlink()
    assert may(rig, BOB), "nothing changes before the daemon is told"
    reload(rig, "were read again")
    assert may(rig, ALICE) and may(rig, CAROL)
    assert not may(rig, BOB)


def test_without_any_token_nobody_gets_in(rig: Rig, place: Path) -> None:
    for path in (place / "tokens").iterdir():
        path.unlink()
    reload(rig, "were read again")
    assert not may(rig, ALICE)
    assert rig.call("GET", "/v1/sandboxes").status == 401
    assert rig.call("GET", "/v1/health").status == 200


@pytest.mark.parametrize("fault", ["open to others", "short", "a directory"])
def test_a_reload_that_finds_a_fault_changes_nothing(rig: Rig, place: Path, fault: str) -> None:
    (place / "tokens" / "bob").unlink()
    if fault == "a directory":
        (place / "tokens" / "bad").mkdir()
    else:
        give(place, "bad", "short" if fault == "short" else CAROL, 0o644 if fault == "open to others" else 0o600)
    reload(rig, "were not read again")
    assert may(rig, ALICE) and may(rig, BOB)


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o711])
def test_a_directory_open_to_others_is_refused(place: Path, mode: int) -> None:
    (place / "tokens").chmod(mode)
    rig = Rig(place, "--token-dir", str(place / "tokens"))
    with pytest.raises(AssertionError):
        rig.start()
    assert isinstance(rig.process, subprocess.Popen)
    assert rig.process.wait(20) != 0
    assert "closed to others (mode 0700)" in rig.log.read_text()
