"""Removing trees that were made to be hard to remove."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd import trees

DEEP = 1200
"""Levels: more than Python recurses, with a path far longer than PATH_MAX, and more than there are descriptors."""

NOBODY = 65534


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 256), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def unprivileged(place: Path) -> Iterator[Path]:
    """A directory of a user who may not do everything, as whom the test runs."""
    if os.geteuid() != 0:
        yield place
        return
    os.chown(place, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    yield place
    os.seteuid(0)


def dig(top: Path, levels: int) -> None:
    """A file and a further directory at every level."""
    top.mkdir()
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(levels):
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        os.mkdir("aside", dir_fd=fd)
        os.mkdir("down", dir_fd=fd)
        below = os.open("down", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


def test_depth_costs_neither_stack_nor_descriptors(tmp_path: Path, few_descriptors: None) -> None:
    dig(tmp_path / "deep", DEEP)
    open_before = set(os.listdir("/proc/self/fd"))
    trees.remove(tmp_path / "deep")
    assert os.listdir(tmp_path) == []
    # Others' may have been closed meanwhile, when nothing referred to them any more.
    assert len(set(os.listdir("/proc/self/fd")) - open_before) <= 1


def test_a_wide_tree_with_everything_in_it_goes(tmp_path: Path) -> None:
    top = tmp_path / "wide"
    for outer in range(20):
        for inner in range(20):
            (top / f"{outer}" / f"{inner}").mkdir(parents=True)
            (top / f"{outer}" / f"{inner}" / "x").touch()
    os.mkfifo(top / "fifo")
    (top / "0" / os.fsdecode(b"\xff\n")).touch()
    trees.remove(top)
    assert not top.exists()


def test_links_are_removed_and_never_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    top = tmp_path / "top"
    (top / "below").mkdir(parents=True)
    for place in (top, top / "below"):
        (place / "out").symlink_to(kept)
        (place / "up").symlink_to("..")
        (place / "nowhere").symlink_to("/nonexistent")
    trees.remove(top)
    assert not top.exists()
    assert [path.name for path in kept.iterdir()] == ["file"]


def test_a_link_in_its_place_and_what_is_not_there_are_left(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "link").symlink_to("kept")
    trees.remove(tmp_path / "link")
    trees.remove(tmp_path / "missing")
    trees.remove(tmp_path / "kept" / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "link"]
    assert (tmp_path / "kept" / "file").exists()


def test_what_cannot_be_removed_stays_and_the_rest_goes(unprivileged: Path) -> None:
    top = unprivileged / "top"
    for name in ("a", "stuck", "z"):
        (top / name / "below").mkdir(parents=True)
    (top / "stuck").chmod(0o500)
    (top / "unreadable").mkdir()
    (top / "unreadable" / "file").touch()
    (top / "unreadable").chmod(0)
    trees.remove(top)
    assert sorted(path.name for path in top.iterdir()) == ["stuck", "unreadable"]
    for name in ("stuck", "unreadable"):
        (top / name).chmod(0o700)
    trees.remove(top)
    assert not top.exists()
