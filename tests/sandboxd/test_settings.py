"""Flags, sockets, locks, uids: what a start refuses."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from docopt import docopt

from sandboxd import __main__ as program
from sandboxd import prometheus, uids
from sandboxd.address import TcpAddress, UnixAddress
from sandboxd.errors import SetupError, Unavailable
from sandboxd.lifecycle import MOVES, IllegalMove, State, move
from sandboxd.listening import listen_unix
from sandboxd.places import lock
from sandboxd.settings import NodeSettings, default_socket, default_state_dir, read
from sandboxd.uids import Uids, network_uids, overlapping
from tests.daemon import assets_dir
from tests.descriptors import few_left
from tests.sandboxd.rig import ROOT


def flags(*arguments: str) -> dict[str, object]:
    return dict(docopt(program.__doc__ or "", list(arguments)))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--listen", "/tmp/x.sock"], "write unix:///tmp/x.sock"),
        (["--listen", "tcp://127.0.0.1:1"], "write HOST:PORT"), (["--listen", "127.0.0.1"], "write HOST:PORT"),
        (["--listen", ":80"], "write HOST:PORT"), (["--listen", "127.0.0.1:65536"], "up to 65535"),
        (["--listen", "127.0.0.1:http"], "up to 65535"), (["--listen", "127.0.0.1:-1"], "up to 65535"),
        (["--listen", "build.test:80"], "an IP address or localhost"), (["--listen", "::1:80"], "brackets"),
        (["--listen", "[127.0.0.1]:80"], "brackets"), (["--listen", "127.1:80"], "an IP address or localhost"),
        (["--listen", "[::ffff:127.0.0.1]:80"], "write the IPv4 address 127.0.0.1"),
        (["--listen", "unix://relative"], "absolute"), (["--listen", "unix:///" + "x" * 103], "104"),
        (["--backend", "fake"], "auto, qemu or firecracker"),
        (["--backend", "qemu", "--jailer", "/opt/jailer"], "--jailer means nothing with --backend qemu"),
        (["--backend", "qemu", "--allow-firecracker", "1.16.0"], "--allow-firecracker means nothing"),
        (["--uid-base", "x"], "--uid-base"),
        (["--metrics-listen", "0.0.0.0:9464"], "--metrics-listen 0.0.0.0:9464: it must be a loopback address"),
        (["--metrics-listen", "192.0.2.1:9464"], "it must be a loopback address"),
        (["--metrics-listen", "[::]:9464"], "it must be a loopback address"),
        (["--metrics-listen", "host.test:9464"], "an IP address or localhost"),
        (["--metrics-listen", "127.0.0.1"], "--metrics-listen 127.0.0.1: write HOST:PORT"),
        *((["--node-id", id], "--node-id must be 1 to 31") for id in ("A", "a_b", "-a", "a" * 32, "a\n", "ü")),
        (["--node-label", "zone"], "--node-label 'zone': write KEY=VALUE"),
        (["--node-label", "Zone=a"], "--node-label: 'Zone' is not a label key"),
        (["--node-label", "zone=a\x1b"], "--node-label: the value of the label zone"),
        (["--node-label", "a=1", "--node-label", "a=2"], "--node-label 'a' stands twice"),
        *((["--capacity-cpus", n], "--capacity-cpus must be a number above 0") for n in ("0", "-1", "nan", "1e3")),
        (["--capacity-memory-mb", "1.5"], "--capacity-memory-mb must be a whole number above 0"),
        (["--capacity-disk-mb", "٣"], "--capacity-disk-mb must be a whole number above 0"),
    ],
)  # fmt: skip
def test_flags_that_are_refused(arguments: list[str], part: str) -> None:
    with pytest.raises(SetupError) as caught:
        read(flags(*arguments), {"HOME": "/home/alice"}, 1000)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "uid", "at", "state"),
    [
        ({}, 0, "/run/sandboxd/sandboxd.sock", "/var/lib/sandboxd"),
        (
            {"HOME": "/h", "XDG_RUNTIME_DIR": "/run/user/1", "XDG_DATA_HOME": "/d"}, 1,
            "/run/user/1/sandboxd.sock", "/d/sandboxd",
        ),
        ({"HOME": "/h"}, 1, "/h/.config/sandbox/sandboxd.sock", "/h/.local/share/sandboxd"),
        (
            {"HOME": "/h", "XDG_RUNTIME_DIR": "x", "XDG_DATA_HOME": ""}, 1,
            "/h/.config/sandbox/sandboxd.sock", "/h/.local/share/sandboxd",
        ),
    ],
)  # fmt: skip
def test_default_places(environment: dict[str, str], uid: int, at: str, state: str) -> None:
    assert str(default_socket(environment, uid)) == at
    assert str(default_state_dir(environment, uid)) == state
    settings = read(flags(), environment, uid)
    assert settings.transport.listen == (UnixAddress(Path(at)),) and settings.assets_dir == Path(state) / "assets"
    assert not settings.prepare_only and read(flags("prepare"), environment, uid).prepare_only


def test_the_flags_of_the_node() -> None:
    plain = read(flags(), {}, 0)
    assert plain.node == NodeSettings() and plain.metrics is None
    given = read(
        flags(
            "--node-id", "rack-7", "--node-label", "zone=a=b", "--node-label", "disk=", "--capacity-cpus", "7.5",
            "--capacity-memory-mb", "100", "--capacity-disk-mb", "200", "--metrics-listen", "localhost:0",
        ), {}, 0,
    )  # fmt: skip
    assert given.node == NodeSettings("rack-7", {"zone": "a=b", "disk": ""}, 7.5, 100, 200)
    assert given.metrics == TcpAddress("127.0.0.1", 0)
    assert read(flags("--metrics-listen", "[::1]:9464"), {}, 0).metrics == TcpAddress("::1", 9464)


def test_a_port_for_metrics_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SetupError, match=r"--metrics-listen 127.0.0.1:\d+ cannot be listened on: Address already"):
            prometheus.listen(TcpAddress("127.0.0.1", taken.getsockname()[1]))


def test_the_flags_of_the_network() -> None:
    plain = read(flags(), {"HOME": "/h"}, 1000)
    assert plain.policy is None and not plain.no_network
    given = read(flags("--policy", "p.yaml", "--no-network"), {"HOME": "/h"}, 1000)
    assert given.policy == Path.cwd() / "p.yaml" and given.no_network


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's daemon gives networks")
@pytest.mark.parametrize("flag", ["", "--no-network"])
def test_a_root_daemon_that_lacks_what_networks_need_says_so_and_the_way_out(tmp_path: Path, flag: str) -> None:
    # nft is looked for in the system's directories alone: here it is nowhere in them.
    script = f"""
import sys
from egress import nft
nft.DIRECTORIES = {str(tmp_path)!r}
from sandboxd.__main__ import main
main(sys.argv[1:])
"""
    command = [sys.executable, "-c", script, "--state-dir", str(tmp_path / "s"), "--listen", f"unix://{tmp_path}/s.s"]
    started = subprocess.Popen(
        [*command, "--assets-dir", str(assets_dir()), *([flag] if flag else [])],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert started.stderr is not None
    try:
        line = started.stderr.readline()
        if flag:
            assert "network ceiling none (--no-network)" in line
        else:
            said = (line + started.stderr.read()).splitlines()
            assert "the program nft is not installed" in [one.removeprefix("sandboxd: ") for one in said]
            assert said[-1] == "With --no-network no sandbox gets a network."
            assert started.wait(20) == 1
    finally:
        started.terminate()
        started.wait(20)
        started.stderr.close()


def test_a_start_that_fails_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        program.main(["--listen", "tcp://0.0.0.0:1"])
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("sandboxd: --listen tcp://0.0.0.0:1: write HOST:PORT") and said.count("\n") == 1


def test_the_socket_its_directory_and_its_stale_predecessor(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "s.sock"
    with listen_unix(path) as first:
        modes = [stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent, path.parent.parent)]
        assert modes == [0o600, 0o700, 0o700]
        with pytest.raises(SetupError, match="is in use: another program listens there"):
            listen_unix(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        assert first.fileno() >= 0
    with listen_unix(path):
        pass
    path.parent.chmod(0o777)
    with pytest.raises(SetupError, match="others could replace"):
        listen_unix(path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o777


def test_a_state_directory_of_others_is_refused_and_a_second_daemon_too(tmp_path: Path) -> None:
    held = lock(tmp_path / "state")
    with pytest.raises(SetupError, match="another sandboxd"):
        lock(tmp_path / "state")
    os.close(held)
    os.close(lock(tmp_path / "state"))
    (tmp_path / "state").chmod(0o770)
    with pytest.raises(SetupError, match="writable by nobody else"):
        lock(tmp_path / "state")
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError):
        lock(tmp_path / "file" / "state")


def test_lifecycle_has_no_way_back() -> None:
    assert MOVES.keys() == set(State)
    assert move(State.PENDING, State.RUNNING) is State.RUNNING
    for state in State:
        with pytest.raises(IllegalMove):
            move(State.TERMINATED, state)
        with pytest.raises(IllegalMove):
            move(state, State.PENDING)


@pytest.mark.parametrize(
    ("subuid", "owner"),
    [
        ("alice:100000:65536\n", None), ("alice:899000:1000\n", None), ("alice:899000:1001\nbob:1:1\n", "alice"),
        ("bob:904095:1\n", "bob"), ("bob:904096:65536\n", None), ("bob:0:4294967295", "bob"),
        ("garbage\na:b:c\n\n", None),
    ],
)  # fmt: skip
def test_who_has_the_uids(subuid: str, owner: str | None) -> None:
    assert overlapping(subuid, 900_000, 4096) == owner


def test_the_networks_uids_lie_behind_the_machines() -> None:
    assert network_uids(900_000) == (904_096, 904_097)
    for uid in network_uids(900_000):
        with pytest.raises(SetupError, match="bob"):
            Uids(900_000, Path("/nonexistent"), f"bob:{uid}:1\n")


def test_uids_are_claimed_once_and_given_back(tmp_path: Path) -> None:
    one, other = Uids(900_000, tmp_path / "l", ""), Uids(900_000, tmp_path / "l", "")
    claims = [one.claim(), other.claim(), one.claim()]
    assert len({claim.uid for claim in claims}) == 3
    assert other.reclaim(claims[0].uid) is None
    claims[0].close()
    again = other.reclaim(claims[0].uid)
    assert again is not None
    for claim in (again, *claims[1:]):
        claim.close()
    with pytest.raises(SetupError, match="--uid-base"):
        Uids(900_000, tmp_path / "l", "alice:900000:1\n")
    with pytest.raises(SetupError):
        Uids(0, tmp_path / "l", "")
    assert issubclass(Unavailable, Exception)


def test_a_uid_is_not_free_because_nobody_can_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = Uids(900_000, tmp_path / "l", "")
    monkeypatch.setattr(uids, "_pids", lambda: [str(os.getpid())])
    with few_left(0), pytest.raises(Unavailable, match="which uids are in use cannot be seen: Too many open files"):
        claims.claim()


def test_nobody_else_can_write_above_the_locks_of_uids(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Uids(900_000, tmp_path / "run" / "uids", "")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("run", "run/uids")] == [0o755, 0o700]
