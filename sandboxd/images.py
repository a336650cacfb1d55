"""Images of registries as this daemon has them: what each reference names, the drives made of them, what is under way.

    <images>/references/<hash>.json    what a reference named when the registry was last asked
    <images>/drives/<manifest>-N.erofs a read-only drive; several references may share one
    <images>/blobs/<digest>            layers as they came, to spare the next pull; the least used ones go first
    <images>/work-*                    an install under way; swept at the start

In: references that the policy permits. Out: drives, linked into a sandbox's own directory, so a drive is there as
long as anybody uses it, whatever becomes of its reference; and the state of each reference. Everything appears by one
rename, so a killed daemon leaves a whole image or none. One install of a reference runs at a time: whoever wants it
meanwhile waits for the same one. An installed image needs no registry, not even to be built again from its blobs.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from sandboxd.assets import oci
from sandboxd.assets.confined import Ids
from sandboxd.assets.manifest import Unusable
from sandboxd.assets.oci import NotThere, Registry, Resolved
from sandboxd.assets.reference import Reference, parse
from sandboxd.errors import Conflict, NotFound, Unavailable
from sandboxd.termsafe import clean

INSTALL_S = 3600.0
AT_ONCE = 2
"""Installs; the others wait their turn."""
MAX_JOBS = 100
"""Under way or waiting for their turn."""
ROOM_BYTES = 256 << 20
ROOM_S = 0.5
"""An install is given up before it takes the last of the disk: running sandboxes would get I/O errors."""
FULL = "the server's disk is full"
CACHE_BYTES = 4 << 30
"""Of blobs that are kept."""
MAX_FAULTS = 100

log = logging.getLogger("sandboxd")


@dataclass(frozen=True, slots=True)
class Record:
    """An installed reference. `bytes` is the drive's size."""

    image: str
    resolved: Resolved
    bytes: int
    installed_at: float


@dataclass(frozen=True, slots=True)
class Progress:
    """`phase` is pulling or building, `done` of `total` bytes of the layers as they came."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Status:
    """A reference as the API shows it. `state` is installed, installing or failed."""

    image: str
    state: str
    digest: str = ""
    bytes: int = 0
    installed_at: float = 0
    progress: Progress | None = None
    error: str = ""


class Job:
    """An install under way. `fault` is set before `done` where it failed."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.scope = anyio.CancelScope()
        self.progress: Progress | None = None
        self.fault: Unusable | None = None

    def tell(self, phase: str, done: int, total: int) -> None:
        self.progress = Progress(phase, done, total)


class Images:
    """One per daemon, used inside `async with`; leaving it stops what is under way and leaves nothing of it."""

    def __init__(self, place: Path, registry: Registry, ids: Ids, max_bytes: int) -> None:
        """`max_bytes` is what an image may be unpacked, and its layers before that."""
        self._references, self._drives, self._blobs = (place / name for name in ("references", "drives", "blobs"))
        self._place, self._registry, self._ids, self._max_bytes = place, registry, ids, max_bytes
        self._records: dict[str, Record] = {}
        self._jobs: dict[str, Job] = {}
        self._faults: dict[str, str] = {}
        self._building: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self._claimed: set[str] = set()
        self._turns = anyio.CapacityLimiter(AT_ONCE)
        self._tasks = anyio.create_task_group()

    async def __aenter__(self) -> Images:
        await anyio.to_thread.run_sync(self._take_stock)
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._watch_room)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    def all(self) -> list[Status]:
        """By name."""
        return [self.status(image) for image in sorted({*self._records, *self._jobs, *self._faults})]

    def status(self, image: str) -> Status:
        """Raises `NotFound`."""
        record, job, fault = self._records.get(image), self._jobs.get(image), self._faults.get(image, "")
        if record is None and job is None and not fault:
            raise NotFound("no such image here")
        state = "installing" if job else "installed" if record else "failed"
        shown = Status(image, state, progress=job.progress if job else None, error=fault)
        if record is None:
            return shown
        return replace(shown, digest=record.resolved.digest, bytes=record.bytes, installed_at=record.installed_at)

    def install(self, image: str) -> None:
        """Starts to fetch what the reference names now, or joins whoever does. What is installed stays usable
        meanwhile, and afterwards where this fails."""
        self._join(image, None)

    def prefetch(self, image: str) -> None:
        """Installs it in the background unless it is installed."""
        if image not in self._records:
            self.install(image)

    async def provide(self, image: str, target: Path) -> None:
        """Puts the image's drive at `target`, after installing it if need be. Raises `NotFound` and `Conflict`."""
        while not self._link(image, target):
            job = self._join(image, self._records.get(image))
            await job.done.wait()
            if job.fault is not None:
                kind = NotFound if isinstance(job.fault, NotThere) else Conflict
                raise kind(f"image {image}: {job.fault}")

    def delete(self, image: str) -> int:
        """Forgets an image that nobody uses; that is the caller's to know. Returns how many bytes are free again."""
        if image in self._jobs:
            raise Conflict(f"the image {image} is being installed")
        record, fault = self._records.pop(image, None), self._faults.pop(image, None)
        if record is None:
            if fault is None:
                raise NotFound("no such image here")
            return 0
        self._file(image).unlink(missing_ok=True)
        others = [other.resolved for other in self._records.values()]
        gone = [] if self._is_wanted(record.resolved) else [self._drive(record.resolved)]
        kept = {layer.digest for other in others for layer in other.layers}
        gone += [self._blob(layer.digest) for layer in record.resolved.layers if layer.digest not in kept]
        return sum(_removed(path) for path in gone)

    # -- installing

    def _join(self, image: str, known: Record | None) -> Job:
        """`known` is what shall be built again, without asking the registry what its name means by now."""
        if (job := self._jobs.get(image)) is None:
            if len(self._jobs) >= MAX_JOBS:
                raise Unavailable("too many images are being installed; try again later")
            job = self._jobs[image] = Job()
            self._tasks.start_soon(self._run, image, job, known)
        return job

    async def _run(self, image: str, job: Job, known: Record | None) -> None:
        started = time.monotonic()
        try:
            with job.scope:
                async with self._turns:
                    with anyio.fail_after(INSTALL_S):
                        record = await self._install(image, job, known)
            if not job.scope.cancelled_caught:
                self._faults.pop(image, None)
                log.info("image %s: installed, %s, %.1f s", image, record.resolved.manifest, time.monotonic() - started)
        except TimeoutError:
            job.fault = Unusable("it took more than an hour to install")
        except Unusable as fault:
            job.fault = type(fault)(clean(str(fault)))
        except OSError as fault:
            full = fault.errno in (errno.ENOSPC, errno.EDQUOT)
            log.error("image %s: %s", image, clean(str(fault)))
            job.fault = Unusable(FULL if full else "the server could not write it")
        except Exception:
            log.exception("image %s: installing it failed", image)
            job.fault = Unusable("installing it failed; the server's log says why")
        finally:
            if job.fault is not None:
                log.warning("image %s: not installed: %s", image, job.fault)
                self._faults[image] = str(job.fault)
                for oldest in list(self._faults)[:-MAX_FAULTS]:
                    del self._faults[oldest]
            del self._jobs[image]
            job.done.set()

    async def _install(self, image: str, job: Job, known: Record | None) -> Record:
        reference = parse(image)
        work = self._place / f"work-{secrets.token_hex(8)}"
        try:
            oci.workplace(work, self._ids)
            resolved = known.resolved if known else await self._registry.resolve(reference, work)
            if resolved.size_bytes > self._max_bytes:
                raise Unusable(f"its layers exceed {self._max_bytes >> 20} MiB, the largest disk there is here")
            lock = self._building.setdefault(resolved.drive, anyio.Lock())
            async with lock:
                # Until it has its record nobody may take the drive for one without an owner.
                self._claimed.add(resolved.drive)
                try:
                    size = self._whole(resolved) or await self._make(reference, resolved, work, job)
                    now = time.time()
                    record = replace(known, bytes=size) if known else Record(image, resolved, size, now)
                    await anyio.to_thread.run_sync(self._keep, record)
                    old, self._records[image] = self._records.get(image), record
                finally:
                    self._claimed.discard(resolved.drive)
                    if not self._is_wanted(resolved):
                        _removed(self._drive(resolved))
            if old is not None and not self._is_wanted(old.resolved):
                _removed(self._drive(old.resolved))
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(oci.remove, work)
        await anyio.to_thread.run_sync(self._prune)
        return record

    async def _make(self, reference: Reference, resolved: Resolved, work: Path, job: Job) -> int:
        await anyio.to_thread.run_sync(self._lend, resolved, work)
        if any(not (work / "blobs" / _name(layer.digest)).exists() for layer in resolved.layers):
            await self._registry.fetch(reference, resolved, work, job.tell)
        return await self._build(resolved, work, job)

    async def _build(self, resolved: Resolved, work: Path, job: Job) -> int:
        if self._ids.squash:
            log.warning(
                "every file of the image will be root's: this user has no subordinate ids (see /etc/subuid) to build "
                "with others"
            )
        try:
            made = await oci.build(resolved, work, self._ids, self._max_bytes, job.tell)
        except Unusable:
            # A blob that was kept may have been damaged meanwhile: the next try fetches it.
            for layer in resolved.layers:
                _removed(self._blob(layer.digest))
            raise
        return await anyio.to_thread.run_sync(self._publish, resolved, work, made)

    def _lend(self, resolved: Resolved, work: Path) -> None:
        for layer in resolved.layers:
            kept = self._blob(layer.digest)
            with suppress(OSError):
                if kept.lstat().st_size == layer.size_bytes:
                    os.utime(kept)
                    os.link(kept, work / "blobs" / kept.name, follow_symlinks=False)

    def _publish(self, resolved: Resolved, work: Path, made: Path) -> int:
        size = made.stat().st_size
        made.rename(self._drive(resolved))
        _flush(self._drives)
        for layer in resolved.layers:
            with suppress(FileExistsError):
                os.link(work / "blobs" / _name(layer.digest), self._blob(layer.digest), follow_symlinks=False)
        return size

    def _keep(self, record: Record) -> None:
        place = self._file(record.image)
        part = place.with_suffix(".part")
        with part.open("wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        part.rename(place)
        _flush(self._references)

    async def _watch_room(self) -> None:
        while True:
            await anyio.sleep(ROOM_S)
            disk = os.statvfs(self._place)
            if disk.f_bavail * disk.f_frsize < min(ROOM_BYTES, disk.f_blocks * disk.f_frsize // 20):
                for job in self._jobs.values():
                    job.fault = Unusable(FULL)
                    job.scope.cancel()

    # -- what is there

    def _take_stock(self) -> None:
        """Reads the records, and removes what a killed daemon left and what no record names."""
        for path in (self._place, self._references, self._drives, self._blobs):
            path.mkdir(mode=0o700, exist_ok=True)
        for left in self._place.glob("work-*"):
            oci.remove(left)
        for path in self._references.iterdir():
            if path.suffix != ".json":
                path.unlink()   # a record that had not got its name yet
                continue
            try:
                record = msgspec.json.decode(path.read_bytes(), type=Record)
            except (OSError, msgspec.DecodeError):
                log.warning("images/references/%s is not whole: it is removed", clean(path.name))
                path.unlink()
                continue
            self._records[record.image] = record
        wanted = {record.resolved.drive for record in self._records.values()}
        for path in self._drives.iterdir():
            if path.name not in wanted:
                log.info("images/drives/%s has no owner: it is removed", clean(path.name))
                path.unlink()
        self._prune()

    def _prune(self) -> None:
        found = []
        for path in self._blobs.iterdir():
            with suppress(FileNotFoundError):
                found.append((path.lstat().st_mtime, path.lstat().st_size, path))
        left = CACHE_BYTES
        for _, size, path in sorted(found, reverse=True):
            left -= size
            if left < 0:
                path.unlink(missing_ok=True)

    def _is_wanted(self, resolved: Resolved) -> bool:
        """Whether a reference has its drive, or is about to."""
        drives = {one.resolved.drive for one in self._records.values()}
        return resolved.drive in drives | self._claimed

    def _whole(self, resolved: Resolved) -> int:
        """The size of its drive, 0 where that is gone or was changed."""
        sizes = {one.bytes for one in self._records.values() if one.resolved.drive == resolved.drive}
        try:
            size = self._drive(resolved).lstat().st_size
        except OSError:
            return 0
        return size if size in sizes else 0

    def _link(self, image: str, target: Path) -> bool:
        record = self._records.get(image)
        if record is None or self._whole(record.resolved) != record.bytes:
            return False
        os.link(self._drive(record.resolved), target, follow_symlinks=False)
        return True

    def _file(self, image: str) -> Path:
        return self._references / f"{hashlib.sha256(image.encode()).hexdigest()[:32]}.json"

    def _drive(self, resolved: Resolved) -> Path:
        return self._drives / resolved.drive

    def _blob(self, digest: str) -> Path:
        return self._blobs / _name(digest)


def _name(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _removed(path: Path) -> int:
    try:
        size = path.lstat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    return size


def _flush(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
