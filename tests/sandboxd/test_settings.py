"""Flags, sockets, locks, uids, the store: what a start refuses and what it remembers."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from docopt import docopt

from sandboxd import __main__ as program
from sandboxd.adopt import lock
from sandboxd.errors import Internal, SetupError, Unavailable
from sandboxd.lifecycle import MOVES, IllegalMove, State, move
from sandboxd.settings import default_socket, default_state_dir, read
from sandboxd.store import Network, ProcessRecord, SandboxRecord, Store
from sandboxd.uids import Uids, network_uids, overlapping
from tests.daemon import assets_dir
from tests.sandboxd.rig import ROOT


def flags(*arguments: str) -> dict[str, object]:
    return dict(docopt(program.__doc__ or "", list(arguments)))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--listen", "/tmp/x.sock"], "write unix:///tmp/x.sock"),
        (["--listen", "127.0.0.1:80"], "TCP is not built yet"), (["--listen", "tcp://x"], "TCP is not built yet"),
        (["--listen", "unix://relative"], "absolute"), (["--listen", "unix:///" + "x" * 103], "104"),
        (["--backend", "firecracker"], "not built yet"), (["--backend", "fake"], "auto or qemu"),
        (["--uid-base", "x"], "--uid-base"),
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
    assert str(settings.socket) == at and settings.assets_dir == Path(state) / "assets"
    assert not settings.prepare_only and read(flags("prepare"), environment, uid).prepare_only


def test_the_flags_of_the_network() -> None:
    plain = read(flags(), {"HOME": "/h"}, 1000)
    assert plain.policy is None and not plain.no_network
    given = read(flags("--policy", "p.yaml", "--no-network"), {"HOME": "/h"}, 1000)
    assert given.policy == Path.cwd() / "p.yaml" and given.no_network


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's daemon gives networks")
@pytest.mark.parametrize("flag", ["", "--no-network"])
def test_a_root_daemon_that_lacks_what_networks_need_says_so_and_the_way_out(tmp_path: Path, flag: str) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for directory in ("/usr/bin", "/usr/sbin"):
        for entry in os.scandir(directory):
            if entry.name != "nft" and not (programs / entry.name).exists():
                (programs / entry.name).symlink_to(entry.path)
    command = [sys.executable, "-m", "sandboxd", "--state-dir", str(tmp_path / "s"), "--listen", f"unix://{tmp_path}/s.s"]
    started = subprocess.Popen(
        [*command, "--assets-dir", str(assets_dir()), *([flag] if flag else [])],
        env={"PATH": str(programs)}, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert started.stderr is not None
    try:
        line = started.stderr.readline()
        if flag:
            assert "network ceiling none (--no-network)" in line
        else:
            assert line == "sandboxd: the program nft is not installed\n"
            assert started.stderr.read() == "With --no-network no sandbox gets a network.\n"
            assert started.wait(20) == 1
    finally:
        started.terminate()
        started.wait(20)
        started.stderr.close()


def test_a_start_that_fails_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        program.main(["--listen", "0.0.0.0:1"])
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("sandboxd: --listen 0.0.0.0:1: TCP is not built yet") and said.count("\n") == 1


def test_the_socket_its_directory_and_its_stale_predecessor(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "s.sock"
    with program.listen(path) as first:
        modes = [stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent, path.parent.parent)]
        assert modes == [0o600, 0o700, 0o700]
        with pytest.raises(SetupError, match="another sandboxd answers there"):
            program.listen(path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        assert first.fileno() >= 0
    with program.listen(path):
        pass
    path.parent.chmod(0o777)
    with pytest.raises(SetupError, match="others could replace"):
        program.listen(path)
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


def test_nobody_else_can_write_above_the_locks_of_uids(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Uids(900_000, tmp_path / "run" / "uids", "")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("run", "run/uids")] == [0o755, 0o700]


def test_what_is_owed_is_written_once_there_is_room(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.sqlite")
    records = [
        SandboxRecord(f"sbx_{n}", "", State.RUNNING, "i", 1, 1, 2, (), Network("none"), float(n), 3) for n in range(3)
    ]
    for record in records:
        store.put(record)
        store.put_process(ProcessRecord(record.id, 1, ("a",), False, "s", 2.5))
    store._db.execute("PRAGMA query_only = ON")
    with pytest.raises(Internal, match="cannot be written"):
        store.put(replace(records[0], name="new"))
    ended = replace(records[0], state=State.TERMINATED)
    store.put_done(ended)
    done = ProcessRecord("sbx_0", 1, ("a",), False, "s", 2.5, 0)
    store.note_process(done)
    store.note_process(ProcessRecord("sbx_1", 1, ("a",), False, "s", 2.5, 0))
    store.forget("sbx_1")
    store.forget_process("sbx_2", 1)
    store.catch_up()
    assert store.sandboxes() == records
    store._db.execute("PRAGMA query_only = OFF")
    store.catch_up()
    assert store.sandboxes() == [ended, records[2]]
    assert (store.processes("sbx_0"), store.processes("sbx_2")) == ([done], [])
    assert store._owed == {}


def test_records_that_are_none_are_said(tmp_path: Path) -> None:
    (tmp_path / "state.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(SetupError, match="cannot be used"):
        Store(tmp_path / "state.sqlite")


def test_the_store_gives_back_what_it_was_given(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.sqlite")
    record = SandboxRecord(
        "sbx_1", "n", State.RUNNING, "i", 1.5, 1, 2, ("A",), Network("allowlist", ("a",), ("b",), ("c:22",)), 1.25,
        3, 4, {"k": "ü"}, 900_001, "",
    )  # fmt: skip
    plain = SandboxRecord("sbx_2", "", State.PENDING, "i", 1, 1, 2, (), Network("none"), 1.0, 3)
    process = ProcessRecord("sbx_1", 1, ("a", "\udcff"), True, "s", 2.5)
    for one in (record, plain):
        store.put(one)
    store.put_process(process)
    store.put_process(ProcessRecord("sbx_1", 2, ("b",), False, "", 2.5, -1))
    store.close()
    store = Store(tmp_path / "state.sqlite")
    assert store.sandboxes() == [plain, record]
    (text,) = store._db.execute("SELECT record FROM sandbox WHERE id = 'sbx_2'").fetchone()
    old = json.loads(text)
    del old["network"]["allow_tcp"]
    store._db.execute("UPDATE sandbox SET record = ? WHERE id = 'sbx_2'", (json.dumps(old),))
    assert store.sandboxes() == [plain, record], "as an earlier version wrote it"
    assert store.processes("sbx_1") == [process, ProcessRecord("sbx_1", 2, ("b",), False, "", 2.5, -1)]
    store.forget_process("sbx_1", 1)
    store.forget("sbx_1")
    assert store.processes("sbx_1") == [] and store.sandboxes() == [plain]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())
    store._db.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(SetupError, match="another version"):
        Store(tmp_path / "state.sqlite")
