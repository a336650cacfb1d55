"""The layers of an image, checked and written again as plain ones. Run as a program, in a jail, by `oci`.

    python -I layers.py BLOBS LAYOUT < plan.json

In: BLOBS/<hex>, which a registry sent, and a plan of this daemon's: for each layer its digest, its size and the
digest of what it holds. Out: LAYOUT, an OCI image layout that holds nothing but directories,
files and links, for umoci; on stdout a line of JSON for each step of progress, the last one says what was written or
why it was refused. Trusts nothing it reads: every digest is compared, every name lies below the root, everything is
counted against a limit before it is written. Standard library only, since it is run without the rest of this package.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import posixpath
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

IDS = 65536
NOBODY = 65534
MAX_PATH = 4096                 # linux/limits.h PATH_MAX, NAME_MAX
MAX_NAME = 255
MAX_BELOW = 3072
MAX_DEPTH = 256
HEADERS_BYTES = 1 << 14
"""Of one entry at most, the longest of names in it."""
CHUNK = 1 << 20
BLOCK = 1 << 18
STEP_S = 0.2
MAGIC = ((b"\x1f\x8b", ["gzip", "-dc"]), (b"\x28\xb5\x2f\xfd", ["zstd", "-dcq", "--memory=128MB"]))
"""RFC 1952, RFC 8878."""
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
TAG = "image"


class Refusal(Exception):
    """The image cannot be used; the text is for a person."""


@dataclass(frozen=True, slots=True)
class Layer:
    """`digest` and `size_bytes` are the blob's, `diff_id` is the digest of what it decompresses to."""

    digest: str
    size_bytes: int
    diff_id: str


@dataclass(slots=True)
class Budget:
    """What all layers together may still hold."""

    entries: int
    bytes_left: int
    max_bytes: int
    taken: int = 0
    dropped: int = 0

    def take(self, size_bytes: int) -> None:
        self.entries -= 1
        self.taken += 1
        self.bytes_left -= size_bytes
        if self.entries < 0:
            raise Refusal("it holds too many files")
        self.need()

    def need(self) -> None:
        if self.bytes_left < 0:
            raise Refusal(f"unpacked it is larger than {self.max_bytes >> 20} MiB, the largest disk there is here")


def inside(name: str) -> str:
    """The name as one below the root: `..` leads no higher than the root, an absolute name starts there. `.` is the
    root itself."""
    path = posixpath.normpath("/" + name).lstrip("/")
    parts = os.fsencode(path).split(b"/")
    if len(os.fsencode(path)) > MAX_BELOW or len(parts) > MAX_DEPTH or max(map(len, parts)) > MAX_NAME:
        raise Refusal("it holds a name that is too long")
    if "\0" in path:
        raise Refusal("it holds a name with a NUL")
    return path or "."


def clean(entry: tarfile.TarInfo, squash: bool) -> tarfile.TarInfo | None:
    """The entry as it may be written: None for what is neither file, directory nor link.

    No program of it gains rights from its owner, and owners outside the image's 65536 ids are nobody. With `squash`
    everything is root's: there are no other ids to give.
    """
    fresh = tarfile.TarInfo(inside(entry.name))
    fresh.mode = entry.mode & (0o1777 if entry.isdir() else 0o777)
    ids = (entry.uid, entry.gid)
    fresh.uid, fresh.gid = (0 if squash else number if 0 <= number < IDS else NOBODY for number in ids)
    if entry.isreg():
        fresh.size = entry.size
    elif entry.isdir():
        fresh.type = tarfile.DIRTYPE
    elif entry.issym():
        fresh.type, fresh.linkname = tarfile.SYMTYPE, entry.linkname
        if not entry.linkname or "\0" in entry.linkname or len(os.fsencode(entry.linkname)) >= MAX_PATH:
            raise Refusal("it holds a link that leads to no name")
    elif entry.islnk():
        fresh.type, fresh.linkname = tarfile.LNKTYPE, inside(entry.linkname)
    else:
        return None
    return fresh


def rewrite(source: Hashed, out: Hashed, budget: Budget, squash: bool) -> None:
    """One layer's tar, entry by entry."""
    try:
        with (
            tarfile.open(fileobj=_stream(source), mode="r|", errorlevel=2, bufsize=BLOCK) as old,
            tarfile.open(fileobj=_stream(out), mode="w|", format=tarfile.GNU_FORMAT) as new,
        ):
            for entry in old:
                old.members = new.members = []      # type: ignore[attr-defined]  # tarfile keeps every one
                fresh = clean(entry, squash)
                if fresh is None:
                    budget.dropped += 1
                    budget.take(0)
                    continue
                budget.take(fresh.size)
                new.addfile(fresh, old.extractfile(entry) if fresh.size else None)
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as fault:
        raise Refusal(f"a layer is no tar archive that can be read: {fault}") from None
    except OSError as fault:
        # tarfile says so of an archive that ends in the middle of a file.
        if fault.errno is None:
            raise Refusal(f"a layer is no tar archive that can be read: {fault}") from None
        raise


class Hashed:
    """A stream whose bytes are counted and hashed as they pass."""

    def __init__(
        self, stream: IO[bytes], budget: Budget | None = None, on_read: Callable[[], None] = lambda: None
    ) -> None:
        self._stream, self._budget, self._on_read = stream, budget, on_read
        self.total = hashlib.sha256()
        self.size_bytes = 0

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(CHUNK if size < 0 else size)
        self._count(data)
        self._on_read()
        # Headers and what lies behind an archive's end are no file's bytes, and count nevertheless.
        budget = self._budget
        if budget is not None and self.size_bytes > budget.max_bytes + (budget.taken * HEADERS_BYTES) + CHUNK:
            raise Refusal(f"a layer decompresses to more than {budget.max_bytes >> 20} MiB")
        return data

    def write(self, data: Any) -> int:
        self._count(data)
        return self._stream.write(data)

    def _count(self, data: bytes) -> None:
        self.total.update(data)
        self.size_bytes += len(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self.total.hexdigest()}"


def _stream(hashed: Hashed) -> IO[bytes]:
    """tarfile's stream modes ask for nothing but `read` or `write`."""
    return cast("IO[bytes]", hashed)


@contextmanager
def decompressed(blob: IO[bytes]) -> Iterator[IO[bytes]]:
    head = blob.read(4)
    blob.seek(0)
    argv = next((argv for magic, argv in MAGIC if head.startswith(magic)), None)
    if argv is None:
        yield blob
        return
    program = subprocess.Popen(argv, stdin=blob, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert program.stdout is not None
    try:
        yield program.stdout
        if program.wait() != 0:
            raise Refusal("a layer cannot be decompressed")
    finally:
        program.kill()
        program.stdout.close()
        program.wait()


class Layout:
    """An OCI image layout as it grows. Format: the OCI image specification, 1.0."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._blobs = place / "blobs" / "sha256"
        self._blobs.mkdir(parents=True)
        self._layers: list[dict[str, object]] = []

    @contextmanager
    def layer(self) -> Iterator[Hashed]:
        part = self._blobs / "part"
        with part.open("wb") as file:
            out = Hashed(file)
            yield out
        digest = out.digest
        part.rename(self._blobs / digest.removeprefix("sha256:"))
        self._layers.append({"mediaType": LAYER_TYPE, "digest": digest, "size": out.size_bytes})

    def close(self) -> None:
        diff_ids = [layer["digest"] for layer in self._layers]
        rootfs = {"type": "layers", "diff_ids": diff_ids}
        config = self._add({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs, "history": []})
        manifest = self._add(
            {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": {"mediaType": CONFIG_TYPE, **config},
             "layers": self._layers}
        )  # fmt: skip
        named = {"mediaType": MANIFEST_TYPE, **manifest, "annotations": {"org.opencontainers.image.ref.name": TAG}}
        (self._place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
        (self._place / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))

    def _add(self, value: dict[str, object]) -> dict[str, object]:
        raw = json.dumps(value).encode()
        digest = hashlib.sha256(raw).hexdigest()
        (self._blobs / digest).write_bytes(raw)
        return {"digest": f"sha256:{digest}", "size": len(raw)}


def record(out: Hashed, env: dict[str, str]) -> None:
    """A layer of ours above the image's: what it asks of its processes' environment."""
    text = json.dumps({"env": env}, indent=1, sort_keys=True).encode() + b"\n"
    with tarfile.open(fileobj=_stream(out), mode="w|", format=tarfile.GNU_FORMAT) as new:
        for name, kind, mode, data in (
            ("etc/.wh.sandbox", tarfile.REGTYPE, 0o644, b""),
            ("etc/sandbox", tarfile.DIRTYPE, 0o755, b""),
            ("etc/sandbox/image.json", tarfile.REGTYPE, 0o644, text),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.size = kind, mode, len(data)
            new.addfile(info, io.BytesIO(data))


def rewrite_all(
    blobs: Path, place: Path, layers: list[Layer], env: dict[str, str], budget: Budget, squash: bool
) -> None:
    layout = Layout(place)
    done = 0
    for layer in layers:
        with (blobs / layer.digest.removeprefix("sha256:")).open("rb", buffering=0) as blob:
            found = hashlib.file_digest(blob, "sha256").hexdigest()
            if f"sha256:{found}" != layer.digest or blob.tell() != layer.size_bytes:
                raise Refusal("a layer is not what its digest says")
            blob.seek(0)
            meter = Meter(done, blob)
            with decompressed(blob) as plain, layout.layer() as out:
                source = Hashed(plain, budget, meter.tell)
                rewrite(source, out, budget, squash)
                while source.read(CHUNK):
                    pass
            if source.digest != layer.diff_id:
                raise Refusal("a layer does not hold what the image says it does")
        done += layer.size_bytes
        say(done=done)
    with layout.layer() as out:
        record(out, env)
    layout.close()


class Meter:
    """Says now and then how far the reading of a blob has come; the program that decompresses it shares its offset."""

    def __init__(self, before: int, blob: IO[bytes]) -> None:
        self._before, self._fd = before, blob.fileno()
        self._last = time.monotonic()

    def tell(self) -> None:
        if time.monotonic() - self._last > STEP_S:
            self._last = time.monotonic()
            say(done=self._before + os.lseek(self._fd, 0, os.SEEK_CUR))


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    blobs, place = map(Path, sys.argv[1:])
    plan = json.load(sys.stdin)
    budget = Budget(plan["max_entries"], plan["max_bytes"], plan["max_bytes"])
    try:
        rewrite_all(blobs, place, [Layer(**row) for row in plan["layers"]], plan["env"], budget, plan["squash"])
    except Refusal as no:
        say(refused=str(no))
    except MemoryError:
        say(refused="a layer's headers are too large")
    except OSError as fault:
        full = fault.errno in (errno.ENOSPC, errno.EDQUOT)
        why = f"its layers could not be written: {os.strerror(fault.errno or 0)}"
        say(refused="the server's disk is full" if full else why)
    else:
        used = budget.max_bytes - budget.bytes_left
        say(written={"bytes": used, "entries": budget.taken, "dropped": budget.dropped})


if __name__ == "__main__":
    main()
