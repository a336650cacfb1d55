"""The jailer's command line, and the directory it makes a root of."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxd.vm import arch, jail, jailer, seccomp
from sandboxd.vm.jail import Limits
from sandboxd.vm.jailer import Cell, Tools

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "firecracker"
UID = 978_700
TOOLS = Tools(
    Path("/opt/fc/firecracker"),
    Path("/opt/fc/jailer"),
    jail.Tools(Path("/usr/bin/prlimit"), Path("/usr/bin/bwrap"), None),
)
CELL = Cell(
    TOOLS, "sbx_0123456789abcdef", UID, Path("/state/sandboxes/sbx_0123456789abcdef/jail"),
    Limits(3 << 30, 10 << 30, 256, 40), Path("/run/netns/sbx-0123456789ab-0123456789abcdef"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "cell"), [("network", CELL), ("no-network", replace(CELL, netns=None))])
def test_the_command_line(name: str, cell: Cell) -> None:
    path = GOLDEN / f"jailer-{name}.txt"
    said = "\n".join(jailer.argv(cell, ["enter"], 7, 8, ["--api-sock", "api.sock"])) + "\n"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(said)
    assert said == path.read_text()


def test_where_the_root_is() -> None:
    assert CELL.root == CELL.base / "firecracker" / "sbx-0123456789abcdef" / "root"


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    if os.geteuid() != 0:
        pytest.skip("only root may give files to other uids")
    return replace(CELL, base=tmp_path / "jail")


def opened(path: Path, flags: int = os.O_RDONLY) -> int:
    path.write_bytes(path.name.encode())
    return os.open(path, flags | os.O_CLOEXEC)


def test_files_lie_in_it_without_being_copied(tmp_path: Path, cell: Cell) -> None:
    image, scratch = opened(tmp_path / "image"), opened(tmp_path / "scratch", os.O_RDWR)
    os.chown(tmp_path / "image", UID - 1, UID - 1)
    jailer.fill(cell, [(image, "drive0", True), (scratch, "drive1", False)])
    read, written = (cell.root / "drive0").stat(), (cell.root / "drive1").stat()
    assert (read.st_ino, read.st_uid, read.st_gid, read.st_mode & 0o7777) == (os.fstat(image).st_ino, 0, 0, 0o444)
    assert (written.st_ino, written.st_uid, written.st_gid) == (os.fstat(scratch).st_ino, UID, UID)
    assert written.st_mode & 0o7777 == 0o600
    assert cell.base.stat().st_mode & 0o777 == 0o700
    for fd in (image, scratch):
        os.close(fd)


def test_what_is_opened_is_what_lies_there_whatever_its_name_is_now(tmp_path: Path, cell: Cell) -> None:
    image = opened(tmp_path / "image")
    (tmp_path / "image").rename(tmp_path / "other")
    (tmp_path / "image").write_text("another")
    jailer.fill(cell, [(image, "drive0", True)])
    assert (cell.root / "drive0").read_text() == "image"
    os.close(image)


def test_a_jail_that_is_there_is_not_filled_again(cell: Cell) -> None:
    jailer.fill(cell, [])
    with pytest.raises(FileExistsError):
        jailer.fill(cell, [])


def test_a_file_of_another_file_system_is_no_copy(cell: Cell) -> None:
    shm = Path("/dev/shm/sandboxd-test-jailer")
    if shm.parent.stat().st_dev == cell.base.parent.stat().st_dev:
        pytest.skip("/dev/shm is no file system of its own here")
    image = opened(shm)
    try:
        with pytest.raises(OSError, match="cross-device") as caught:
            jailer.fill(cell, [(image, "drive0", True)])
        assert "another file system" in jailer.reason(caught.value)
        assert "--assets-dir and --state-dir" in jailer.unfit(cell.base.parent, shm.parent)
    finally:
        os.close(image)
        shm.unlink()


@pytest.mark.parametrize("option", ["nodev", "noexec", "dev,exec"])
def test_where_a_jail_could_hold_no_device_or_program(tmp_path: Path, option: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    asks = "import sys; from sandboxd.vm import jailer; print(jailer.unfit(*[jailer.Path(sys.argv[1])] * 2))"
    script = 'mount -t tmpfs -o "$1" none "$2" && exec "$3" -c "$4" "$2"'
    said = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", option, tmp_path, sys.executable, asks],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert said == "\n" if "," in option else f"is mounted {option}, and a jail" in said


@pytest.mark.parametrize("twice", [False, True])
def test_images_in_a_mount_of_their_own_are_found_out(tmp_path: Path, twice: bool) -> None:
    """Of the same file system: the device's number is the same."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    for name in ("state", "assets"):
        (tmp_path / name).mkdir()
    asks = (
        "import sys; from sandboxd.vm import jailer; "
        "print(jailer.unfit(jailer.Path(sys.argv[1], 'state'), jailer.Path(sys.argv[1], 'assets')))"
    )
    mounting = 'mount --bind "$1/assets" "$1/assets" && ' if twice else ""
    said = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounting + 'exec "$2" -c "$3" "$1"', "sh", tmp_path, sys.executable, asks],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert ("must be on one file system, mounted once" in said) == twice
    assert (said == "\n") != twice
    assert [os.listdir(tmp_path / name) for name in ("state", "assets")] == [[], []]


def test_a_jail_is_taken_back_with_the_directories_in_it(cell: Cell) -> None:
    jailer.fill(cell, [])
    for name in ("dev", "dev/net", "run"):
        (cell.root / name).mkdir(mode=0o700)
    folders = [cell.root, *(cell.root / name for name in ("dev", "dev/net", "run"))]
    for folder in folders:
        os.chown(folder, UID, UID)
    root = os.open(cell.root, os.O_PATH)
    for _ in range(2):
        jailer.take_back(root)
        assert {(at.st_uid, at.st_gid, at.st_mode & 0o7777) for at in map(os.stat, folders)} == {(0, UID, 0o750)}
    os.close(root)


@pytest.mark.parametrize("name", ["dev", "dev/net", "run"])
def test_a_link_in_the_place_of_a_directory_is_not_taken_back(tmp_path: Path, cell: Cell, name: str) -> None:
    jailer.fill(cell, [])
    (tmp_path / "victim" / "net").mkdir(parents=True)
    for at in (tmp_path / "victim", tmp_path / "victim" / "net"):
        os.chown(at, UID, UID)
    for folder in ("dev", "dev/net", "run"):
        if folder == name:
            (cell.root / folder).symlink_to(tmp_path / "victim")
        elif not folder.startswith(f"{name}/"):
            (cell.root / folder).mkdir()
    root = os.open(cell.root, os.O_PATH)
    with pytest.raises(OSError, match="Not a directory"):
        jailer.take_back(root)
    os.close(root)
    assert (tmp_path / "victim").stat().st_uid == (tmp_path / "victim" / "net").stat().st_uid == UID


FILTERED = """
import ctypes, fcntl, os, sys
filter = sys.stdin.buffer.read()
code = ctypes.create_string_buffer(filter, len(filter))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(len(filter) // 8, ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
for request in (0xAA00, 0xAE00):
    try:
        fcntl.ioctl(os.open("/dev/null", os.O_RDWR), request)
    except OSError as error:
        print(error.errno)
"""


def test_the_jailers_userfaultfd_gives_nothing_and_other_devices_answer_for_themselves() -> None:
    said = subprocess.run(
        [sys.executable, "-c", FILTERED], input=seccomp.jailing_program(arch.here()), capture_output=True, check=True
    ).stdout
    assert list(map(int, said.split())) == [errno.EPERM, errno.ENOTTY]
