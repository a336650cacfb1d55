"""Two people on one machine: both through root's daemon with a token each, and each with a daemon of their own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.daemon import BIN
from tests.sandboxd.rig import Rig

ALICE, BOB = 61301, 61302       # nobody's accounts
UNPRIVILEGED_PORTS = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two people")


@dataclass(frozen=True)
class Person:
    uid: int
    home: Path

    @property
    def token(self) -> Path:
        return self.home / "token"

    def cli(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.prefix, "env", "-i", f"HOME={self.home}", "PATH=/usr/bin:/bin",
             *(f"{name}={value}" for name, value in environment.items()), str(BIN / "sandbox-cli"), *arguments],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    @property
    def prefix(self) -> list[str]:
        return ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]


@pytest.fixture
def people(short_tmp: Path) -> tuple[Person, Person]:
    place = short_tmp / f"people-{time.monotonic_ns()}"
    place.mkdir()
    found = []
    for name, uid in (("alice", ALICE), ("bob", BOB)):
        home = place / name
        home.mkdir(mode=0o700)
        token = home / "token"
        token.write_text(f"{name}-{'x' * 32}\n")
        token.chmod(0o600)
        for path in (home, token):
            os.chown(path, uid, uid)
        found.append(Person(uid, home))
    tried = found[0].cli("version")
    if tried.returncode:
        pytest.skip(f"other users cannot start programs from here: {tried.stderr[:200]}")
    return found[0], found[1]


@pytest.fixture
def shared(people: tuple[Person, Person], short_tmp: Path) -> Iterator[str]:
    """The address of root's daemon; every person's token is in its directory."""
    place = short_tmp / f"root-{time.monotonic_ns()}"
    tokens = place / "tokens"
    tokens.mkdir(parents=True, mode=0o700)
    for person in people:
        own = tokens / person.home.name
        own.write_bytes(person.token.read_bytes())
        own.chmod(0o600)
    rig = Rig(place, "--listen", "127.0.0.1:0", "--token-dir", str(tokens))
    rig.start()
    said = next(line for line in rig.log.read_text().splitlines() if "listening on" in line)
    yield next(word.strip(",") for word in said.split() if word.startswith("http://"))
    rig.stop()


def test_each_uses_roots_daemon_with_a_token_that_the_other_cannot_read(
    people: tuple[Person, Person], shared: str
) -> None:
    alice, bob = people
    for person in people:
        listed = person.cli("list", SANDBOX_CONTEXT=shared, SANDBOX_TOKEN_FILE=str(person.token))
        assert listed.returncode == 0, listed.stderr
    borrowed = bob.cli("list", SANDBOX_CONTEXT=shared, SANDBOX_TOKEN_FILE=str(alice.token))
    assert borrowed.returncode == 1 and "Permission denied" in borrowed.stderr
    none = bob.cli("list", SANDBOX_CONTEXT=shared)
    assert none.returncode == 1 and "SANDBOX_TOKEN_FILE" in none.stderr


def test_a_token_that_others_can_read_is_not_used(people: tuple[Person, Person], shared: str) -> None:
    alice, _ = people
    alice.token.chmod(0o644)
    listed = alice.cli("list", SANDBOX_CONTEXT=shared, SANDBOX_TOKEN_FILE=str(alice.token))
    assert listed.returncode == 1 and "chmod 600" in listed.stderr, listed.stderr


def test_neither_can_use_the_others_daemon(people: tuple[Person, Person]) -> None:
    """Whatever the modes of directories: a socket is its owner's and root's."""
    alice, bob = people
    with_own = []
    for person in people:
        (person.home / "knobs").mkdir()
        os.chown(person.home / "knobs", person.uid, person.uid)
        sock = person.home / "s.sock"
        process = subprocess.Popen(
            [*person.prefix, BIN / "python", "-m", "tests.sandboxd.fake_daemon", person.home / "state", sock],
            cwd=Path(__file__).resolve().parents[2], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=(person.home / "log").open("wb"),
        )  # fmt: skip
        with_own.append(process)
    try:
        for person, process in zip(people, with_own, strict=True):
            until_it_answers(person, process)
        bob.home.chmod(0o755)
        (bob.home / "s.sock").chmod(0o666)
        refused = alice.cli("list", SANDBOX_CONTEXT=f"unix://{bob.home}/s.sock")
        assert refused.returncode == 1, refused.stdout
        assert str(BOB) in refused.stderr or "refused" in refused.stderr or "denied" in refused.stderr
    finally:
        for process in with_own:
            process.terminate()
            process.wait(20)


def until_it_answers(person: Person, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while person.cli("list", SANDBOX_CONTEXT=f"unix://{person.home}/s.sock").returncode:
        if process.poll() is not None:
            log = (person.home / "log").read_text()
            if "Permission" in log or "No module" in log:
                pytest.skip(f"other users cannot start programs from here: {log[-200:]}")
            raise AssertionError(log)
        assert time.monotonic() < deadline, (person.home / "log").read_text()
        time.sleep(0.2)


def test_no_person_can_wait_for_tokens_on_a_port_below_1024(people: tuple[Person, Person]) -> None:
    if int(UNPRIVILEGED_PORTS.read_text()) < 1024:
        pytest.skip(f"{UNPRIVILEGED_PORTS} lets every user have ports below 1024 here")
    bind = "import socket; socket.socket().bind(('127.0.0.1', 729))"
    tried = subprocess.run(
        [*people[1].prefix, "/usr/bin/python3", "-c", bind], capture_output=True, text=True, check=False
    )
    assert "PermissionError" in tried.stderr
