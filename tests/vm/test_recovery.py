"""e2fsck in its jail: what it brings in order, what it refuses, and that nothing of it stays."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from sandboxd.ext4 import is_clean, make
from sandboxd.vm import jail, processes, recovery

INSTANCE = f"test-recovery-{os.getpid()}"
ID = "sbx_0123456789abcdef"
UID = 4243 if os.geteuid() == 0 else None  # no account of this machine


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A file system that its machine had open for writing when it was cut off."""
    path = tmp_path / "volume.ext4"
    anyio.run(make, path, 64, "volume", 1001, "the volume")
    with path.open("r+b") as file:
        file.seek(1024 + 0x60)  # s_feature_incompat
        (flags,) = struct.unpack("<I", file.read(4))
        file.seek(1024 + 0x60)
        file.write(struct.pack("<I", flags | 4))
    # With the superblock's checksum right again.
    subprocess.run(["/usr/sbin/debugfs", "-w", "-R", "ssv mtime now", str(path)], check=True, capture_output=True)
    if UID is not None:
        os.chown(path, UID, UID)
    yield path
    assert list(processes.marked(INSTANCE, {os.getuid(), *([] if UID is None else [UID])})) == []


def recover(path: Path, deadline_s: float = recovery.DEADLINE_S) -> bool:
    e2fsck, tools = recovery.find_e2fsck(), jail.find_tools(os.geteuid() == 0)
    return anyio.run(recovery.recover, path, ID, UID, e2fsck, INSTANCE, tools, deadline_s)


def test_a_journal_is_replayed(volume: Path) -> None:
    assert not is_clean(volume)
    assert recover(volume)
    assert is_clean(volume)
    assert recover(volume), "again, and there is nothing to do"


@pytest.mark.parametrize(
    ("at", "content"),
    [
        pytest.param(0, bytes(64 << 20), id="zeros"),
        pytest.param(0, b"\xff" * 8192, id="no superblock"),
        pytest.param(1024 + 0x04, b"\xff" * 4, id="more blocks than it has"),
        pytest.param(1024 + 0x18, b"\xff" * 4, id="blocks of an impossible size"),
        pytest.param(1024 + 0x5C, b"\xff" * 12, id="features nobody has"),
        pytest.param(1024 + 0xE0, struct.pack("<I", 2), id="a journal that is a directory"),
    ],
)
def test_what_is_no_sound_file_system_is_no_harm(volume: Path, at: int, content: bytes) -> None:
    with volume.open("r+b") as file:
        file.seek(at)
        file.write(content)
    fine = recover(volume) and is_clean(volume)
    assert volume.stat().st_size == 64 << 20
    assert stat.S_IMODE(volume.stat().st_mode) == 0o600
    if fine:
        checked = subprocess.run(["/usr/sbin/e2fsck", "-fn", volume], capture_output=True, check=False)
        assert checked.returncode == 0, checked.stdout


def test_one_that_takes_too_long_is_ended(volume: Path) -> None:
    assert not recover(volume, deadline_s=0)


def test_a_client_that_leaves_ends_it(volume: Path) -> None:
    async def leave() -> None:
        e2fsck, tools = recovery.find_e2fsck(), jail.find_tools(os.geteuid() == 0)
        with anyio.move_on_after(0.01):
            await recovery.recover(volume, ID, UID, e2fsck, INSTANCE, tools)

    anyio.run(leave)


def test_a_file_that_its_uid_may_not_open_is_refused(volume: Path) -> None:
    if UID is None:
        pytest.skip("only root has uids to give")
    os.chown(volume, 0, 0)
    assert not recover(volume)
    assert not is_clean(volume)


def test_the_jail_has_the_one_file_and_the_limits() -> None:
    tools = jail.Tools(Path("/prlimit"), Path("/bwrap"), None)
    cell = recovery.prison(
        Path("/state/v.ext4"), 64 << 20, ID, None, jail.Program(Path("/sbin/e2fsck"), ()), "abc", tools
    )
    argv = jail.argv(cell, 3, 4, ["-p", "/volume"])
    assert [argv[at + 1 : at + 3] for at, word in enumerate(argv) if word == "--bind"] == [["/state/v.ext4", "/volume"]]
    assert "--dev-bind" not in argv
    assert {"--fsize=67108864", "--as=1073741824", "--nofile=32", "--unshare-net", "--unshare-pid"} <= set(argv)
    assert argv[-3:] == [f"/sandboxd/abc/{ID}/e2fsck", "-p", "/volume"]
