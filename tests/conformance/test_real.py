"""The suite against the product itself: with real machines as root and as an ordinary user, and over TLS."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from sandboxd.assembly import instance
from sandboxd.vm import cgroups
from tests.conformance.live import ENVIRONMENT, daemon, suite
from tests.daemon import Daemon, assets_dir
from tests.firecracker_standin import fixtures
from tests.path.test_users import UID
from tests.sandboxd.pki import Authority
from tests.sandboxd.reach import TOKEN, ports, token_files
from tests.sandboxd.rig import Rig

# What this version of the daemon does not have; everything else must run.
LACKING = ("memory_snapshot", "suspend")
UNNETWORKED = "egress_allowlist"
LIMIT_S = 1500


def passes(command: Sequence[str], *lacking: str) -> None:
    ran = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=LIMIT_S,
        env=ENVIRONMENT,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    print(ran.stdout)
    for line in re.findall(r"^SKIPPED .*$", ran.stdout, re.MULTILINE):
        assert any(f"the capability {name}" in line for name in (*LACKING, *lacking)), line


def left_clean(running: Daemon) -> None:
    assert running.leftovers() == []
    assert "Traceback" not in running.log.read_text(errors="replace"), running.log.read_text(errors="replace")


@pytest.mark.vm
@pytest.mark.timeout(LIMIT_S + 120)
def test_the_daemon_conforms(short_tmp: Path) -> None:
    with daemon(short_tmp / "conformance") as (running, prefix):
        passes([*prefix, *suite(f"unix://{running.socket}", "-q")], *(() if prefix else (UNNETWORKED,)))
    left_clean(running)


@pytest.mark.vm
@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="the jailer needs root")
@pytest.mark.timeout(LIMIT_S + 120)
def test_the_daemon_conforms_through_firecracker() -> None:
    """As `make conformance-firecracker` does, with the stand-ins."""
    fixtures.need()
    # On the images' file system: jails hold further names of them.
    with tempfile.TemporaryDirectory(prefix="sbx-", dir=assets_dir().parent) as directory:
        with daemon(Path(directory) / "d", firecracker=True) as (running, prefix):
            passes([*prefix, *suite(f"unix://{running.socket}", "-q")], *(() if prefix else (UNNETWORKED,)))
            assert running.client.capabilities().backend == "firecracker"
        left_clean(running)
        assert cgroups.find().ids(instance(running.state)) == set()


@pytest.mark.vm
@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
@pytest.mark.timeout(LIMIT_S + 120)
def test_an_ordinary_users_daemon_conforms(short_tmp: Path) -> None:
    directory = short_tmp / "user-conformance"
    directory.mkdir()
    os.chown(directory, UID, UID)
    prefix = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "env", f"HOME={directory}")
    with Daemon(directory, prefix=prefix) as running:
        passes([*prefix, *suite(f"unix://{running.socket}", "-q")], UNNETWORKED, "network_policy_update")
    left_clean(running)


@pytest.mark.soak
@pytest.mark.timeout(LIMIT_S + 120)
def test_the_daemon_conforms_over_tls_with_a_token(short_tmp: Path) -> None:
    """With stand-in machines, which have the host's loopback: what is about networks is left out."""
    directory = short_tmp / "tls-conformance"
    directory.mkdir()
    authority = Authority(directory, "authority")
    certificate = authority.issue("server")
    tls = ("--tls-cert", str(certificate), "--tls-key", str(certificate.with_suffix(".key")))
    with Rig(directory, "--listen", "127.0.0.1:0", *token_files(directory), *tls) as rig:
        rig.headers = {"Authorization": f"Bearer {TOKEN}"}
        endpoint = f"https://127.0.0.1:{ports(rig)['127.0.0.1']}"
        passes(
            suite(
                endpoint, "-q", "--token-file", str(directory / "one"), "--ca", str(authority.file),
                "-k", "not test_hostile_guest and not listens_in_another and not leads_to_the_guest and not volume",
            ),
            UNNETWORKED, "network_policy_update",
        )  # fmt: skip
