"""A secret's way from the person's machine into a real sandbox: looked for everywhere else on the host."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sandboxd.assembly import instance
from tests.cli.person import COMMAND, Person
from tests.conftest import git, make_repository
from tests.daemon import Daemon
from tests.sandboxd.rig import UnixConnection

pytestmark = pytest.mark.vm

PATIENCE_S = 180
PIECE = 1 << 20
GIVEN = ("file", "command", "env", "flag", "config")
KINDS = (*GIVEN, "disk")  # the last is what the guest writes to its own disk, which shows that one is looked through
NAME = {kind: f"CANARY_{kind.upper()}" for kind in GIVEN}
HEAD = "s3cr3t-canary-"
VALUE = {kind: f"{HEAD}{hashlib.sha256(os.urandom(16)).hexdigest()[:16]}-{kind}" for kind in KINDS}
SUM = f"for name in {' '.join(NAME.values())}; do printenv $name; done | sha256sum"
SUMMED = hashlib.sha256("".join(VALUE[kind] + "\n" for kind in GIVEN).encode()).hexdigest()
GUEST = (
    f"echo {base64.b64encode(VALUE['disk'].encode()).decode()} | base64 -d > ~/written; sync; "
    f"{SUM}; cat /proc/cmdline; echo ready; exec sleep 600"
)


def kinds_in(content: bytes) -> set[str]:
    return {kind for kind in KINDS if VALUE[kind].encode() in content}


def processes() -> dict[int, set[str]]:
    """By process, whoever's: the values in its arguments or the environment it was started with."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                content = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue  # it has ended
            if kinds := kinds_in(content):
                found[int(entry.name)] = kinds
    return found


def files(*tops: Path) -> dict[str, set[str]]:
    """By file: the values in it."""
    found = {}
    for top in tops:
        for path in top.rglob("*"):
            if path.is_file() and not path.is_symlink() and (kinds := in_file(path)):
                found[str(path)] = kinds
    return found


def in_file(path: Path) -> set[str]:
    """Disks of machines are looked through too, without their holes (lseek(2))."""
    kinds: set[str] = set()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return kinds
    try:
        end = 0
        while True:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
            for offset in range(start, end, PIECE):
                kinds |= kinds_in(os.pread(fd, PIECE + len(max(VALUE.values(), key=len)), offset))
    except OSError as fault:
        if fault.errno != errno.ENXIO:  # no data behind this
            raise
        return kinds
    finally:
        os.close(fd)


def machines(daemon: Daemon) -> dict[int, bytes]:
    """The command lines of this daemon's machines and what belongs to them."""
    mark, found = f"/sandboxd/{instance(daemon.state)}/".encode(), {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if mark in (command := (entry / "cmdline").read_bytes()):
                    found[int(entry.name)] = command
    return found


def answers(daemon: Daemon, name: str) -> bytes:
    """What the API says of a sandbox, byte for byte."""
    said = b""
    for path in ("", f"/{name}", f"/{name}/processes", f"/{name}/processes/1", f"/{name}/events", f"/{name}/metrics"):
        connection = UnixConnection(daemon.socket)
        connection.request("GET", f"/v1/sandboxes{path}")
        said += connection.getresponse().read()
        connection.close()
    return said


@pytest.fixture
def person(daemon: Daemon, tmp_path: Path) -> Person:
    make_repository(tmp_path / "project")
    vault = tmp_path / "vault"
    vault.mkdir()
    for kind in ("file", "command"):
        (vault / kind).write_text(VALUE[kind] + "\n")
        (vault / kind).chmod(0o600)
    config = tmp_path / ".config" / "sandbox" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(
        f"secrets:\n  {NAME['file']}: {{file: {vault}/file, hosts: [api.secret.test]}}\n"
        f"  {NAME['command']}: {{command: 'cat {vault}/command'}}\n  {NAME['env']}: {{env: ELSEWHERE}}\n"
        f"env: {{{NAME['config']}: {VALUE['config']}}}\n"
    )
    config.chmod(0o600)
    return Person(tmp_path, daemon.socket)


@pytest.fixture
def bystander() -> Iterator[int]:
    """Shows that a value in arguments or in an environment is found."""
    child = subprocess.Popen(
        [sys.executable, "-c", "input()", VALUE["config"]], env={"X": VALUE["env"]}, stdin=subprocess.PIPE
    )
    yield child.pid
    child.communicate(b"\n")


def test_a_value_is_in_the_sandbox_and_nowhere_else(
    daemon: Daemon, person: Person, bystander: int, tmp_path: Path
) -> None:
    mine = {
        str(tmp_path / "vault/file"): {"file"}, str(tmp_path / "vault/command"): {"command"},
        str(tmp_path / ".config/sandbox/config.yaml"): {"config"},
    }  # fmt: skip
    flags = ("--memory", "512", "--keep", "--name", "keeps-it", "-e", f"{NAME['flag']}={VALUE['flag']}")
    process = subprocess.Popen(
        [*COMMAND, "run", *flags, "--", "sh", "-c", GUEST], cwd=person.home / "project",
        env=person.environment(ELSEWHERE=VALUE["env"]),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = [process.stdout.readline().decode() for _ in range(3)]
        assert said[2] == "ready\n", process.communicate()
        assert said[0].split()[0] == SUMMED, "the sandbox has them all"
        assert HEAD not in said[1] and "=" in said[1], "the kernel's command line has none"

        # While it runs: only the command line itself has what its caller put into its arguments and its environment.
        assert processes() == {bystander: {"env", "config"}, process.pid: {"flag", "env"}}
        found = files(tmp_path, daemon.directory)
        [disk] = set(found) - set(mine)
        assert disk.startswith(str(daemon.state / "sandboxes"))
        assert found == mine | {disk: {"disk"}}
    finally:
        process.terminate()
        out, err = process.communicate(timeout=PATIENCE_S)
    assert HEAD.encode() not in out + err, err
    network = daemon.client.get("keeps-it").network
    meant = b"secret CANARY_FILE is meant for api.secret.test; this sandbox may also reach"
    assert (meant in err) is (network.mode != "none")

    # What outlives the run has none: the machine, the daemon, their records and logs, what they answer.
    assert processes() == {bystander: {"env", "config"}}
    running = machines(daemon)
    assert any(b"qemu" in command for command in running.values()), "the machine is among what was looked at"
    for pid in (*running, daemon.process.pid if daemon.process else 0):
        [line] = [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "core file" in line]
        assert line.split()[-3:-1] == ["0", "0"], f"{running.get(pid)!r} may leave a core file, with what is in memory"
    told = answers(daemon, "keeps-it") + person.run("list", "--json").stdout
    assert HEAD.encode() not in told
    assert all(name.encode() in told for name in NAME.values()), "names are told"
    daemon.kill()
    daemon.start()
    again = daemon.client.run("keeps-it", ["sh", "-c", SUM]).stdout.decode()
    assert again.split()[0] == SUMMED, "a sandbox that is taken back keeps them"
    assert processes() == {bystander: {"env", "config"}}
    assert files(tmp_path, daemon.directory) == mine | {disk: {"disk"}}

    assert person.run("kill", "keeps-it").returncode == 0
    assert files(tmp_path, daemon.directory) == mine
    assert HEAD.encode() not in person.run("events", "keeps-it", "--json").stdout
    assert HEAD not in git(person.home / "project", "log", "--all", "-p")
