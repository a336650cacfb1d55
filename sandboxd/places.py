"""The state directory: who holds it, where each thing is in it, and whether there is room for more.

In: its path, ids of sandboxes. Out: paths, which need not exist. Nobody else can write to it; what a sandbox's machine
has put into its own directory there is hostile.
"""

from __future__ import annotations

import fcntl
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from sandboxd.errors import Conflict, SetupError
from sandboxd.unixpath import make_private

MIN_FREE_MB = 256
"""No sandbox is created with less free on the state directory's file system, unless its whole disk is smaller."""

log = logging.getLogger("sandboxd")


@dataclass(frozen=True, slots=True)
class Places:
    """The state directory, laid out."""

    state: Path

    @property
    def sandboxes(self) -> Path:
        return self.state / "sandboxes"

    def machine(self, sandbox_id: str) -> Path:
        return self.sandboxes / sandbox_id

    def scratch(self, sandbox_id: str) -> Path:
        return self.machine(sandbox_id) / "scratch.img"

    def names(self, sandbox_id: str) -> Path:
        """Which address each name was given in this sandbox."""
        return self.machine(sandbox_id) / "names"

    @property
    def volumes(self) -> Path:
        return self.state / "volumes"

    @property
    def images(self) -> Path:
        return self.state / "images"

    def drive(self, sandbox_id: str) -> Path:
        """The drive of its image, when that is a registry's."""
        return self.machine(sandbox_id) / "image.erofs"

    @property
    def outputs(self) -> Path:
        return self.state / "output"

    @property
    def disks(self) -> Path:
        """Disks of machines that ended by themselves."""
        return self.state / "disks"

    def disk(self, sandbox_id: str) -> Path:
        return self.disks / f"{sandbox_id}.img"

    def require_room(self, disk_mb: int) -> None:
        """Disks are sparse and may promise more than there is; on a host that is all but full a new one is of no
        use to anybody."""
        room = os.statvfs(self.state)
        free_mb = room.f_bavail * room.f_frsize >> 20
        if free_mb < min(disk_mb, MIN_FREE_MB):
            raise Conflict(f"the server's disk is full: only {free_mb} MiB are free")

    def put_aside(self, sandbox_id: str) -> None:
        """Keeps the disk of a machine that nobody asked to end."""
        self.disks.mkdir(mode=0o700, exist_ok=True)
        try:
            self.scratch(sandbox_id).rename(self.disk(sandbox_id))
        except FileNotFoundError:
            return
        log.info("%s: its disk is kept as disks/%s.img until the sandbox is deleted", sandbox_id, sandbox_id)


def lock(state_dir: Path) -> int:
    """Makes the state directory if need be and holds it until the descriptor is closed. `SetupError`
    otherwise."""
    try:
        make_private(state_dir)
        directory = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            info = os.fstat(directory)
            if info.st_uid != os.geteuid() or info.st_mode & 0o022:
                raise SetupError(f"{state_dir} must belong to this user and be writable by nobody else")
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open("lock", flags, 0o600, dir_fd=directory)
        finally:
            os.close(directory)
    except OSError as fault:
        raise SetupError(f"the state directory {state_dir} cannot be used: {fault.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise SetupError(f"another sandboxd uses the state directory {state_dir}") from None
    return fd
