"""Volumes: drives behind the sandbox's own that outlive it, mounted where the host says.

Each is mounted once at a place of guestd's own, which no process sees, and from there bound into the sandbox's root;
so whatever the sandbox does to the directories above, guestd still finds the file system when it is to be left in
order.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os

from guestd import files, linux
from guestd.linux import FIFREEZE, MS_BIND, MS_NODEV, MS_NOSUID, MS_RDONLY
from guestd.place import GID, UID
from guestd.process import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Final

_MOUNTS: Final = "/run/volumes"
_FIRST_DRIVE: Final = "d"       # /dev/vdd: behind runtime, image and scratch
_MS_NOATIME: Final = 1024       # linux/mount.h


def mount(root: str, volumes: Sequence[Mapping[str, Any]]) -> None:
    """Mounts them below `root`, in order; directories that are missing are made, and no link leads out of it. Raises
    `Refused` "bad_volume" naming the path of one that cannot be mounted."""
    os.mkdir(_MOUNTS, 0o700)
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for index, volume in enumerate(volumes):
            place = f"{_MOUNTS}/{index}"
            os.mkdir(place, 0o700)
            flags = MS_NOSUID | MS_NODEV | _MS_NOATIME | (MS_RDONLY if volume["read_only"] else 0)
            try:
                linux.mount(f"/dev/vd{chr(ord(_FIRST_DRIVE) + index)}", place, "ext4", flags)
                _bind(place, root_fd, volume["path"])
            except OSError as why:
                raise Refused("bad_volume", f"{volume['path']}: {why.strerror}") from None
    finally:
        os.close(root_fd)


def _bind(place: str, root_fd: int, path: str) -> None:
    fd = _directory(root_fd, path)
    try:
        linux.mount(place, f"/proc/self/fd/{fd}", "", MS_BIND)
    finally:
        os.close(fd)


def _directory(root_fd: int, path: str) -> int:
    """What is missing becomes the user's in a directory of the user's, and root's elsewhere."""
    linux.set_file_identity(UID, GID)
    try:
        return files.open_directory(root_fd, path)
    except PermissionError:
        pass
    finally:
        linux.set_file_identity(0, 0)
    return files.open_directory(root_fd, path)


def freeze() -> None:
    """Writes everything out and leaves each file system as if it were unmounted. Whoever still writes waits for ever:
    the machine is about to end."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(_MOUNTS):
            fd = os.open(f"{_MOUNTS}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.ioctl(fd, FIFREEZE, 0)
            except OSError as why:
                if why.errno != errno.EBUSY:        # frozen already
                    raise
            finally:
                os.close(fd)
