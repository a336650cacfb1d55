"""The world itself: what the other tests take as given is shown to work, and to leave nothing behind."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.world import world as place
from tests.world.origin import Query, quiet
from tests.world.world import World, missing, open_world

KILLED = """
import time
from tests.world.world import open_world
with open_world() as world:
    print(world.directory, flush=True)
    time.sleep(60)
"""

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_world() as opened:
        yield opened


def test_https_by_name_with_the_own_authority(world: World) -> None:
    with quiet(world.origin) as ledger:
        said = world.host.run("curl", "-sS", "--cacert", str(world.ca), "https://allowed.test/word")
    assert said == "hello from allowed.test\n"
    assert [(visit.address, visit.port, visit.sni, visit.line) for visit in ledger.visits] == [
        (place.PUBLIC, 443, "allowed.test", "GET /word")
    ]


def test_answers_of_the_name_server_change_and_are_written_down(world: World) -> None:
    ask = ("getent", "ahostsv4", "moving.test")
    assert world.host.run(*ask, check=False) == ""
    with quiet(world.origin) as ledger:
        world.names.set("moving.test", place.PUBLIC_2)
        assert world.host.run(*ask).startswith(place.PUBLIC_2)
    assert Query("moving.test", "A", False) in ledger.queries
    world.names.drop("moving.test")
    assert world.host.run(*ask, check=False) == ""


@pytest.mark.parametrize("address", [place.OUTSIDE_RESOLVER, place.METADATA, place.PUBLIC_6, place.LAN])
def test_whatever_leaves_the_host_arrives_somewhere(world: World, address: str) -> None:
    def dial() -> bytes:
        with socket.create_connection((address, place.SINK), 5) as stream:
            return stream.recv(64)

    with quiet(world.origin) as ledger, world.uplink() as capture:
        assert world.host.inside(dial) == b"sink\n"
    assert [visit.address for visit in ledger.visits] == [address]
    assert {packet.protocol for packet in capture.outgoing(address, place.SINK)} == {"tcp"}


def test_the_outside_resolver_answers_over_udp_from_the_address_asked(world: World) -> None:
    from dnslib import DNSRecord

    def ask() -> bytes:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stream:
            stream.settimeout(5)
            stream.connect((place.OUTSIDE_RESOLVER, 53))
            stream.send(DNSRecord.question("allowed.test").pack())
            return stream.recv(4096)

    assert str(DNSRecord.parse(world.host.inside(ask)).a.rdata) == place.PUBLIC


@pytest.mark.parametrize("url", ["https://git.test/world.git", "ssh://git@git.test/~/world.git"])
def test_git_over_https_and_ssh(world: World, tmp_path: Path, url: str) -> None:
    key = f"ssh -i {world.ssh_key} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    world.host.run(
        "env", f"GIT_SSL_CAINFO={world.ca}", f"GIT_SSH_COMMAND={key}", "GIT_CONFIG_GLOBAL=/dev/null",
        "git", "clone", "-q", url, str(tmp_path / "clone"),
    )  # fmt: skip
    assert (tmp_path / "clone" / "word.txt").read_text() == "from the repository\n"


def test_pip_npm_and_apt_take_their_parcels(world: World, tmp_path: Path) -> None:
    pip = ["env", *(f"--unset={name}" for name in ("PIP_FIND_LINKS", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"))]
    pip += [f"PIP_CERT={world.ca}", "PIP_CONFIG_FILE=/dev/null"]
    pip += [sys.executable, "-m", "pip", "download", "-q", "--retries=0", "--no-cache-dir", "-d", str(tmp_path)]
    world.host.run(*pip, "--index-url", "https://index.test/simple/", "worldparcel")
    assert (tmp_path / "worldparcel-1.0-py3-none-any.whl").exists()
    curl = ("curl", "-sS", "--cacert", str(world.ca))
    assert "worldparcel-1.0.0.tgz" in world.host.run(*curl, "https://npm.test/worldparcel")
    assert "Package: worldparcel" in world.host.run("curl", "-sS", "http://deb.test/Packages")


def test_nothing_of_it_stays_behind() -> None:
    with open_world() as opened:
        directory, pids = opened.directory, {opened.host.pid, opened.outside.pid}
        assert pids <= _processes()
    assert not directory.exists()
    assert not pids & _processes()
    # Its alone: other tests mount and unmount meanwhile.
    assert str(directory) not in Path("/proc/self/mounts").read_text()
    assert _started(str(directory)) == []


def test_a_world_whose_test_was_killed_goes_with_it() -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, cwd=root) as test:
        assert test.stdout is not None
        directory = test.stdout.readline().decode().strip()
        assert _started(directory), "the servers and the namespaces' holders"
        test.kill()
    deadline = time.monotonic() + 30
    while (left := _started(directory)) and time.monotonic() < deadline:
        time.sleep(0.05)
    shutil.rmtree(directory)
    assert left == []


def _started(directory: str) -> list[int]:
    return [pid for pid in _processes() if directory in _command(pid)]


def _processes() -> set[int]:
    return {int(entry.name) for entry in Path("/proc").glob("[0-9]*")}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
