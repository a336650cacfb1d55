"""Named volumes: one ext4 file each, which outlives every sandbox.

In: names and sizes that were checked, and who uses which volume at the moment, as the sandboxes' own records have
it. Out: records, drives for machines, and `Conflict` or `NotFound`. A volume has one writer or any number of readers;
`claim` answers without waiting, so whoever asks it and registers at once has what it granted.

The files are the guests'. Where a machine left one in the middle of something, its journal must be replayed before a
reader, whose drive cannot be written, can mount it: `recover` does that in a jail. A writer's kernel does it by itself.

Every file appears and disappears under a name of its own, by rename; what a killed daemon left of either is removed
at the next start. A file with a volume's name and without a record is somebody's data, and gets a record.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from sandboxd import ext4
from sandboxd.errors import Conflict, Internal, NotFound
from sandboxd.store import Mount, Store, VolumeRecord

SUFFIX = ".ext4"
TEMPORARY = re.compile(r"\.(?:new|gone)-[0-9a-f]{16}\Z")
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}\.ext4\Z")
OWNER = 1001
"""Uid and gid of the user in the sandbox, to whom a volume's root directory belongs."""

log = logging.getLogger("sandboxd")

Recover = Callable[[Path, str, int | None], Awaitable[bool]]
"""Replays a volume's journal, in the name of a sandbox and with the uid of its machine; False where it fails."""


@dataclass(frozen=True, slots=True)
class Use:
    """A sandbox that has a volume, or is about to."""

    sandbox: str
    since: float
    mount: Mount


class Volumes:
    """All of one daemon's. Made under the lock of the state directory."""

    def __init__(self, store: Store, directory: Path, recover: Recover) -> None:
        self._store, self._directory, self._recover = store, directory, recover
        self._making: set[str] = set()
        self._recovering: dict[str, anyio.Lock] = {}
        directory.mkdir(mode=0o700, exist_ok=True)
        self._records = self._settle({record.name: record for record in store.volumes()})

    def all(self) -> list[VolumeRecord]:
        """By name."""
        return [self._records[name] for name in sorted(self._records)]

    async def create(self, name: str, size_mb: int) -> VolumeRecord:
        if name in self._records or name in self._making:
            raise Conflict(f"a volume named {name} exists")
        self._making.add(name)
        draft = self._directory / f".new-{secrets.token_hex(8)}"
        try:
            await ext4.make(draft, size_mb, "volume", OWNER, "the volume")
            record = VolumeRecord(name, size_mb, time.time())
            # No wait from here on: it is there with its record, or not at all.
            draft.rename(self._path(name))
            try:
                self._store.put_volume(record)
            except Internal:
                self._path(name).unlink()
                raise
            self._records[name] = record
        finally:
            self._making.discard(name)
            draft.unlink(missing_ok=True)
        log.info("volume %s: made, %d MiB", name, size_mb)
        return record

    async def delete(self, name: str, uses: Iterable[Use]) -> None:
        if name not in self._records:
            raise NotFound("no such volume")
        if (user := holder(name, uses)) is not None:
            raise Conflict(f"the volume {name} is attached to {user}")
        gone = self._directory / f".gone-{secrets.token_hex(8)}"
        self._store.forget_volume(name)
        del self._records[name]
        self._recovering.pop(name, None)
        try:
            self._path(name).rename(gone)
        except FileNotFoundError:
            return
        log.info("volume %s: deleted", name)
        # Freeing the blocks of a large file takes a while.
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(gone.unlink)

    def require(self, mounts: Iterable[Mount]) -> None:
        """Raises `NotFound` where one of them is not there."""
        for mount in mounts:
            if mount.name not in self._records:
                raise NotFound(f"no such volume: {mount.name}")

    def claim(self, mounts: Sequence[Mount], uses: Iterable[Use]) -> None:
        """Raises where one of them is not there or not free; the caller registers its use before it waits."""
        self.require(mounts)
        taken = tuple(uses)
        for mount in mounts:
            if not self._path(mount.name).is_file():
                raise Conflict(f"the server's file of the volume {mount.name} is gone; delete the volume")
            for use in taken:
                if use.mount.name == mount.name and not (mount.read_only and use.mount.read_only):
                    how = "for reading" if use.mount.read_only else "for writing"
                    raise Conflict(
                        f"the volume {mount.name} is attached to {use.sandbox} {how}; a volume has one writer or any "
                        "number of readers"
                    )

    async def ready(self, mounts: Iterable[Mount], sandbox_id: str, uid: int | None) -> tuple[Path, ...]:
        """The files of claimed volumes, in order, each fit to be mounted as it was asked for."""
        paths = []
        for mount in mounts:
            path = self._path(mount.name)
            if mount.read_only:
                # Of several readers the first one does it; nobody else has the file open before that.
                async with self._recovering.setdefault(mount.name, anyio.Lock()):
                    await self._make_readable(mount.name, path, sandbox_id, uid)
            paths.append(path)
        return tuple(paths)

    async def _make_readable(self, name: str, path: Path, sandbox_id: str, uid: int | None) -> None:
        if ext4.is_clean(path):
            return
        log.info("volume %s: its last writer ended without notice; its journal is replayed", name)
        try:
            if uid is not None:
                os.chown(path, uid, uid)
            # A machine under Firecracker that was to read it alone left it so that nobody can write.
            os.chmod(path, 0o600)
            done = await self._recover(path, sandbox_id, uid)
        finally:
            if uid is not None:
                os.chown(path, 0, 0)
        if not done or not ext4.is_clean(path):
            raise Conflict(
                f"the volume {name} was left by a machine that ended without notice, and its file system could not be "
                "brought in order; attach it for writing to save what is in it, or delete it"
            )

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}{SUFFIX}"

    def _settle(self, records: dict[str, VolumeRecord]) -> dict[str, VolumeRecord]:
        """Makes files and records agree, as a daemon that was killed, or whose records were lost, left them."""
        present = set()
        for entry in list(os.scandir(self._directory)):
            if TEMPORARY.match(entry.name):
                os.unlink(entry.path)
            elif NAME.match(entry.name) and entry.is_file(follow_symlinks=False):
                present.add(entry.name.removesuffix(SUFFIX))
                # A recovery that was cut off had given it to its jail.
                os.chown(entry.path, os.geteuid(), os.getegid())
            else:
                log.warning("volumes/%s is no volume; it is left alone", ascii(entry.name))
        for name in records.keys() - present:
            log.warning("volume %s: its file is gone, and its record goes too", name)
            self._store.forget_volume(name)
        for name in present - records.keys():
            info = self._path(name).stat()
            log.warning("volume %s: found without a record; it gets one", name)
            records[name] = VolumeRecord(name, max(1, info.st_size >> 20), info.st_ctime)
            self._store.put_volume(records[name])
        return {name: records[name] for name in present}


def holder(name: str, uses: Iterable[Use]) -> str | None:
    """The id of the sandbox that writes to a volume, or of the first one that reads it."""
    having = sorted((use.since, use.sandbox) for use in uses if use.mount.name == name)
    return having[0][1] if having else None
