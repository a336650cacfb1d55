"""The same job for an ordinary user, and what a root daemon does to keep sandboxes apart."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd.client import Create, NetworkRequest, Sandbox
from sandboxd.errors import Refused
from tests.conftest import git, make_repository
from tests.daemon import BIN, Daemon

pytestmark = [pytest.mark.vm, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")]

UID = 61234     # nobody's account: no passwd entry, no subordinate ids


@pytest.fixture
def users_daemon(short_tmp: Path) -> Iterator[Daemon]:
    directory = short_tmp / "user"
    directory.mkdir()
    os.chown(directory, UID, UID)
    prefix = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "env", f"HOME={directory}")
    tried = subprocess.run([*prefix, str(BIN / "sandboxd"), "--version"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"an ordinary user cannot start sandboxd from here: {tried.stderr.decode(errors='replace')[:200]}")
    with Daemon(directory, prefix=prefix) as running:
        yield running
    assert running.leftovers() == []


def test_an_ordinary_user_can_do_all_of_it(users_daemon: Daemon) -> None:
    top = make_repository(users_daemon.directory / "project")
    for path in [top, *top.rglob("*")]:
        os.chown(path, UID, UID)
    ran = subprocess.run(
        ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "env", f"HOME={users_daemon.directory}",
         str(BIN / "sandbox-cli"), "run", "--memory", "512", "--name", "mine", "--", "sh", "-c", "id -u; echo x > x"],
        env=users_daemon.environment(), cwd=top, stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr.decode()
    assert ran.stdout == b"1001\n"
    assert git(top, "-c", f"safe.directory={top}", "show", "refs/sandbox/mine:x") == "x\n"
    says_it_has_no_network(users_daemon)
    owners = {path.lstat().st_uid for path in users_daemon.state.rglob("*")}
    assert owners == {UID}


def says_it_has_no_network(daemon: Daemon) -> None:
    """At its start, in its capabilities, in doctor and to whoever asks for one; and no guest has an interface."""
    said = daemon.log.read_text()
    assert "network ceiling none (only a root sandboxd can give sandboxes a network)" in said, said
    offer = daemon.client.capabilities()
    assert (offer.network_ceiling, offer.network_default.mode) == ("none", "none")
    assert not [name for name, on in offer.capabilities.items() if on and name.startswith(("egress", "network"))]
    doctor = daemon.cli("doctor", "--no-probe").stdout.decode()
    assert "network ceiling none" in " ".join(doctor.split())
    for flags in (("--allow", "a.test"), ("--network", "allowlist"), ("--network", "open")):
        refused = daemon.cli("run", "--no-workspace", *flags, "--", "true")
        assert refused.returncode == 1 and b"a sandboxd that root starts does" in refused.stderr, refused.stderr
    with pytest.raises(Refused):
        daemon.client.create(Create(network=NetworkRequest("allowlist", allow=("a.test",))))
    made = daemon.client.create(Create(memory_mb=512))
    assert daemon.client.run(made.id, ["ls", "/sys/class/net"]).stdout == b"lo\n"
    daemon.client.delete(made.id)


def test_roots_vmms_each_run_under_a_uid_of_their_own(daemon: Daemon, shared: Sandbox) -> None:
    made = daemon.client.create(Create(memory_mb=512))
    uids = []
    for sandbox in (shared, made):
        mine = set()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_bytes()
                status = (entry / "status").read_text()
            except OSError:
                continue
            # The programs themselves; the jail's outer process stays root's and only waits for them.
            if command.startswith(b"/sandboxd/") and sandbox.id.encode() in command:
                mine.update(int(word) for word in status.split("Uid:")[1].split("\n")[0].split())
        uids.append(mine)
    for mine in uids:
        assert mine and 0 not in mine, "no process of a sandbox is root"
        for uid in mine:
            with pytest.raises(KeyError):
                pwd.getpwuid(uid)
    assert uids[0].isdisjoint(uids[1])
    daemon.client.delete(made.id)
