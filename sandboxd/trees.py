"""Removing a directory with all that is in it, whatever somebody hostile has put there.

In: a path whose parents are ours. Links are removed, never followed. Depth costs neither stack nor descriptors: one
directory is open at a time, names are relative to it, and the way back up is checked. What cannot be removed stays,
and so do the directories above it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class _Level:
    """A directory on the way down: its name in the one above, which it is, and what is left to be emptied in it."""

    name: str
    inode: tuple[int, int]
    left: list[str]


def remove(directory: Path) -> None:
    """Never raises OSError. Blocking."""
    with suppress(OSError):
        _empty(os.open(directory, _DIRECTORY))
        os.rmdir(directory)


def _empty(fd: int) -> None:
    """Closes `fd`."""
    try:
        levels = [_Level("", _inode(fd), _thin_out(fd))]
        while True:
            level = levels[-1]
            if level.left:
                name = level.left.pop()
                with suppress(OSError):
                    below = os.open(name, _DIRECTORY, dir_fd=fd)
                    os.close(fd)
                    fd = below
                    levels.append(_Level(name, _inode(fd), _thin_out(fd)))
            elif len(levels) == 1:
                return
            else:
                above = os.open("..", _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = above
                levels.pop()
                if _inode(fd) != levels[-1].inode:
                    return      # somebody moves it about: what is above it now may be anybody's
                with suppress(OSError):
                    os.rmdir(level.name, dir_fd=fd)
    finally:
        os.close(fd)


def _thin_out(fd: int) -> list[str]:
    """Removes what is no directory, and the empty directories. Returns the names of the others."""
    found: list[tuple[str, bool]] = []
    with suppress(OSError), os.scandir(fd) as entries:
        found.extend((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    left = []
    for name, is_directory in found:
        try:
            if is_directory:
                os.rmdir(name, dir_fd=fd)
            else:
                os.unlink(name, dir_fd=fd)
        except OSError:
            if is_directory:
                left.append(name)
    return left


def _inode(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino
