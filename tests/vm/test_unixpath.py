"""Sockets behind long paths, and what happens to the ones that were left behind."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd import unixpath


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    path = tmp_path / ("d" * 120) / ("e" * 120)
    path.mkdir(parents=True)
    return path


@pytest.fixture
def deep_fd(deep: Path) -> Iterator[int]:
    fd = os.open(deep, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_bind_and_connect_work_where_the_path_is_longer_than_sun_path(deep: Path, deep_fd: int) -> None:
    with unixpath.bind(deep_fd, "s") as listener, unixpath.connect_sync(deep / "s", timeout_s=5) as client:
        server, _ = listener.accept()
        with server:
            client.sendall(b"hello")
            assert server.recv(5) == b"hello"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_socket_is_born_private(deep: Path, deep_fd: int, umask: int) -> None:
    before = os.umask(umask)
    try:
        with unixpath.bind(deep_fd, "s"):
            assert stat.S_IMODE(os.stat(deep / "s").st_mode) == 0o600
    finally:
        os.umask(before)


def test_named_leaves_no_descriptor(deep: Path, deep_fd: int) -> None:
    with unixpath.bind(deep_fd, "s"):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            unixpath.connect_sync(deep / "s").close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_named_in_a_directory_takes_a_socket_of_it_and_follows_no_link(deep: Path, deep_fd: int) -> None:
    with unixpath.bind(deep_fd, "s"):
        with unixpath.named("s", deep_fd) as name, socket.socket(socket.AF_UNIX) as client:
            client.connect(name)
        (deep / "link").symlink_to("s")
        with pytest.raises(OSError, match="non-socket"), unixpath.named("link", deep_fd):
            pass
        for name in (str(deep / "s"), "../s", "..", ""):
            with pytest.raises(ValueError), unixpath.named(name, deep_fd):
                pass


def test_a_live_socket_is_refused_and_goes_on_listening(deep: Path, deep_fd: int) -> None:
    with unixpath.bind(deep_fd, "s"):
        inode = os.stat(deep / "s").st_ino
        with pytest.raises(unixpath.SocketInUseError):
            unixpath.bind(deep_fd, "s")
        assert not unixpath.remove_stale(deep_fd, "s")
        assert os.stat(deep / "s").st_ino == inode
        unixpath.connect_sync(deep / "s").close()
        assert os.listdir(deep) == ["s"]


def test_a_live_socket_with_a_full_backlog_is_not_taken_for_a_stale_one(deep: Path, deep_fd: int) -> None:
    with unixpath.bind(deep_fd, "s", backlog=0), unixpath.connect_sync(deep / "s"):
        assert not unixpath.remove_stale(deep_fd, "s")


def test_a_datagram_socket_is_not_taken_for_a_stale_one(deep: Path, deep_fd: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(f"/proc/self/fd/{deep_fd}/s")
        assert not unixpath.remove_stale(deep_fd, "s")


def test_a_stale_socket_is_replaced(deep: Path, deep_fd: int) -> None:
    unixpath.bind(deep_fd, "s").close()
    with pytest.raises(ConnectionRefusedError):
        unixpath.connect_sync(deep / "s")
    with unixpath.bind(deep_fd, "s"):
        unixpath.connect_sync(deep / "s").close()
    assert unixpath.remove_stale(deep_fd, "s")
    assert os.listdir(deep) == []
    assert unixpath.remove_stale(deep_fd, "s"), "a name that is free already counts as removed"


@pytest.mark.parametrize("kind", ["file", "directory", "link to a socket", "dangling link"])
def test_what_is_no_socket_is_left_alone(deep: Path, deep_fd: int, kind: str) -> None:
    if kind == "file":
        (deep / "s").write_bytes(b"kept")
    elif kind == "directory":
        (deep / "s").mkdir()
    elif kind == "link to a socket":
        unixpath.bind(deep_fd, "other").close()
        (deep / "s").symlink_to("other")
    else:
        (deep / "s").symlink_to("nowhere")
    before = sorted(os.listdir(deep))
    with pytest.raises(unixpath.SocketInUseError):
        unixpath.bind(deep_fd, "s")
    with pytest.raises(OSError) as refused:
        unixpath.connect_sync(deep / "s")
    assert refused.value.errno == errno.ENOTSOCK
    assert sorted(os.listdir(deep)) == before


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../s", "a\0b"])
def test_a_name_is_one_component(deep_fd: int, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a file"):
        unixpath.bind(deep_fd, name)


def test_a_missing_socket_says_so(deep: Path) -> None:
    with pytest.raises(FileNotFoundError):
        unixpath.connect_sync(deep / "s")
