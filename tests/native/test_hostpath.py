"""hostpath through its Python face. The C tests (test_hostpath.c) cover older kernels and odd mounts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

import native
from native import DirectoryRefused, Refusal

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("top/homes/u/work", "top/homes/v", "else/project", "locked/inside", "bound", "around/b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "file").write_text("")
    (tmp_path / "to-home").symlink_to("top/homes/u")
    (tmp_path / "to-parent").symlink_to("top/homes")
    (tmp_path / "to-root").symlink_to("/")
    (tmp_path / "to-proc-root").symlink_to("/proc/self/root")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


def open_fds() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


@contextmanager
def without_power() -> Iterator[None]:
    """An ordinary user's rights for what is called inside."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


REFUSED = {
    "the root": ("/", Refusal.ROOT),
    "the root with slashes": ("///", Refusal.ROOT),
    "the root by dots": ("/usr/..", Refusal.ROOT),
    "a link to the root": ("{}/to-root", Refusal.ROOT),
    "home": ("{}/top/homes/u", Refusal.HOME),
    "home with trailing slashes": ("{}/top/homes/u//", Refusal.HOME),
    "home by dots": ("{}/top/homes/v/../u/.", Refusal.HOME),
    "a link to home": ("{}/to-home", Refusal.HOME),
    "home's parent": ("{}/top/homes", Refusal.ANCESTOR_OF_HOME),
    "home's grandparent": ("{}/top", Refusal.ANCESTOR_OF_HOME),
    "a link to home's parent": ("{}/to-parent", Refusal.ANCESTOR_OF_HOME),
    "a distant ancestor": ("{}", Refusal.ANCESTOR_OF_HOME),
    "/proc/self/root": ("/proc/self/root", Refusal.PROC_LINK),
    "home through /proc/self/root": ("/proc/self/root{}/top/homes/u", Refusal.PROC_LINK),
    "another directory through /proc/self/root": ("/proc/self/root{}/else", Refusal.PROC_LINK),
    "a link to /proc/self/root": ("{}/to-proc-root", Refusal.PROC_LINK),
    "/proc/self/cwd": ("/proc/self/cwd", Refusal.PROC_LINK),
    "a descriptor": ("/dev/fd/0", Refusal.PROC_LINK),
}


@pytest.mark.parametrize("home", ["{}/top/homes/u", "{}/to-home", "{}/top/homes/u/"])
@pytest.mark.parametrize(("path", "refusal"), REFUSED.values(), ids=REFUSED)
def test_refuses(tree: Path, path: str, refusal: Refusal, home: str) -> None:
    before = open_fds()
    with pytest.raises(DirectoryRefused) as caught:
        native.check_host_directory(path.format(tree), home.format(tree))
    assert caught.value.refusal is refusal
    assert str(caught.value) == f"{path.format(tree)!r} is refused: it is {refusal.value}"
    assert open_fds() == before


@pytest.mark.parametrize("name", ["top/homes/u/work", "top/homes/v", "else", "else/project", "top/../else/"])
def test_allows(tree: Path, name: str) -> None:
    before = open_fds()
    with native.check_host_directory(tree / name, tree / "top/homes/u") as directory:
        status = os.stat(tree / name)
        assert (directory.device, directory.inode) == (status.st_dev, status.st_ino)
        assert os.path.samestat(os.fstat(directory.fd), status)
        assert not os.get_inheritable(directory.fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.listdir(directory.fd)  # O_PATH: a name for it, no right to it
    assert open_fds() == before


FAILS = {
    "nothing there": ("nowhere", FileNotFoundError),
    "a broken link": ("broken", FileNotFoundError),
    "another case": ("ELSE", FileNotFoundError),
    "a file": ("file", NotADirectoryError),
    "below a file": ("file/x", NotADirectoryError),
    "links in a circle": ("loop", OSError),
    "a name too long": ("x" * 300, OSError),
    "a path too long": ("x/" * 3000, OSError),
}


@pytest.mark.parametrize(("name", "error"), FAILS.values(), ids=FAILS)
def test_says_what_failed(tree: Path, name: str, error: type[OSError]) -> None:
    before = open_fds()
    with pytest.raises(OSError, match=r"\(opening the directory\)") as caught:
        native.check_host_directory(os.path.join(tree, name), tree / "top/homes/u")
    assert type(caught.value) is error
    assert caught.value.filename == os.path.join(tree, name)
    assert open_fds() == before


@pytest.mark.parametrize(("home", "error"), [("nowhere", FileNotFoundError), ("file", NotADirectoryError)])
def test_a_home_that_cannot_be_compared_allows_nothing(tree: Path, home: str, error: type[OSError]) -> None:
    before = open_fds()
    with pytest.raises(error, match=r"\(opening the home directory\)") as caught:
        native.check_host_directory(tree / "else", tree / home)
    assert caught.value.filename == str(tree / home)
    assert open_fds() == before


def test_needs_the_right_to_reach_it(tree: Path) -> None:
    (tree / "locked").chmod(0)
    with without_power(), pytest.raises(PermissionError, match=r"\(opening the directory\)"):
        native.open_directory(tree / "locked/inside")
    (tree / "locked").chmod(0o700)


@pytest.mark.parametrize("path", ["", b""])
def test_the_empty_path_is_nothing(path: str | bytes) -> None:
    with pytest.raises(FileNotFoundError):
        native.open_directory(path)


@pytest.mark.parametrize("path", ["/tmp\0/x", b"/tmp\0", "\0"])
def test_a_null_byte_is_not_cut_off(path: str | bytes) -> None:
    with pytest.raises(ValueError, match="null byte"):
        native.open_directory(path)
    with native.open_directory("/") as root, pytest.raises(ValueError, match="null byte"):
        native.check_directory(root, "/", path)


def test_names_are_bytes_of_any_kind(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff\n"
    os.mkdir(name)
    with native.open_directory(name) as directory:
        assert directory.inode == os.stat(name).st_ino
    with pytest.raises(DirectoryRefused, match=r"\\udcff\\n"):
        native.check_host_directory(os.fsdecode(name), name)


def test_what_was_opened_stays_when_the_name_moves_on(tree: Path) -> None:
    with native.open_directory(tree / "else") as directory:
        (tree / "else").rename(tree / "moved")
        (tree / "else").symlink_to("top/homes/u")
        native.check_directory(directory, tree / "else", tree / "top/homes/u")
        assert directory.inode == (tree / "moved").stat().st_ino


def test_a_home_moved_above_is_found(tree: Path) -> None:
    with native.open_directory(tree / "else/project") as directory:
        (tree / "top/homes/u").rename(tree / "else/project/u")
        with pytest.raises(DirectoryRefused) as caught:
            native.check_directory(directory, "project", tree / "else/project/u")
    assert caught.value.refusal is Refusal.ANCESTOR_OF_HOME


def test_takes_no_time_to_speak_of(tree: Path) -> None:
    started = time.process_time()
    for _ in range(100):
        with native.check_host_directory(tree / "else", tree / "top/homes/u"):
            pass
    assert time.process_time() - started < 2  # 0.03 s on an idle machine


@cache
def private_mounts() -> list[str] | str:
    """The command that starts a process with a mount namespace of its own, or why there is none."""
    command = ["unshare", "-m", "--propagation", "private"]
    if os.geteuid() != 0:
        command.insert(1, "-Ur")
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    probe = subprocess.run([*command, "mount", "--bind", "/tmp", "/tmp"], capture_output=True, text=True)
    return command if probe.returncode == 0 else f"no private mounts here: {probe.stderr.strip()}"


ASK = """
import sys, native
try:
    native.check_host_directory(sys.argv[1], sys.argv[2])
    print("ALLOWED")
except native.DirectoryRefused as refused:
    print(refused.refusal.name)
"""

MOUNTED = {
    "home bound elsewhere": ("mount --bind top/homes/u bound", "bound", "top/homes/u", "HOME"),
    "home by the name it is bound to": ("mount --bind top/homes/u bound", "top/homes/u", "bound", "HOME"),
    "below home bound elsewhere": ("mount --bind top/homes/u bound", "bound/work", "top/homes/u", "ALLOWED"),
    "home's parent bound elsewhere": (
        "mount --bind top/homes bound", "bound", "top/homes/u", "ANCESTOR_OF_HOME"
    ),
    "home's grandparent bound elsewhere": (
        "mount --bind top bound", "bound", "top/homes/u", "ANCESTOR_OF_HOME"
    ),
    "below home's grandparent bound elsewhere": (
        "mount --bind top bound", "bound/homes", "top/homes/u", "ANCESTOR_OF_HOME"
    ),
    # /data/homes bound on /home: home's parents are /home and /, and /data holds it all the same
    "where home was bound from": ("mount --bind top/homes bound", "top", "bound/u", "ANCESTOR_OF_HOME"),
    "a directory into which home is bound": (
        "mount --bind top/homes/u around/b", "around", "top/homes/u", "ANCESTOR_OF_HOME"
    ),
    "the root bound elsewhere": ("mount --rbind / bound", "bound", "top/homes/u", "ROOT"),
    "home in another spelling": (
        "mkdir top/HOMES; mount --bind top/homes top/HOMES", "top/HOMES/u", "top/homes/u", "HOME"
    ),
    "a fresh file system": ("mount -t tmpfs none bound", "bound", "top/homes/u", "ALLOWED"),
    "above the mount that holds home": (
        "mount -t tmpfs none top/homes; mkdir top/homes/u", "top", "top/homes/u", "ANCESTOR_OF_HOME"
    ),
}


@pytest.mark.parametrize(("mounts", "path", "home", "answer"), MOUNTED.values(), ids=MOUNTED)
def test_mounts(tree: Path, mounts: str, path: str, home: str, answer: str) -> None:
    command = private_mounts()
    if isinstance(command, str):
        pytest.skip(command)
    script = f'set -e; {mounts}; exec "$0" -c "$1" "$2/{path}" "$2/{home}"'
    done = subprocess.run(
        [*command, "sh", "-c", script, sys.executable, ASK, str(tree)],
        cwd=tree, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True,
    )
    assert (done.stdout.strip(), done.stderr) == (answer, "")
