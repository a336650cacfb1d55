"""Images from registries: asked for by skopeo, their layers checked and written again by `layers`, unpacked by umoci,
packed by mkfs.erofs. Each is a program in a jail (`confined`).

In: a reference. Out: what it names now (`Resolved`), the blobs of its layers, and a drive made from them. Pulls are
anonymous. What decides (which manifest, which digests, which sizes) is decided here, from bytes that were compared
with their digest; a program in a jail that was taken over can give another file system to whoever asked for its
image, and nothing else.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from sandboxd.assets import confined, drive, layers, manifest, rootspace
from sandboxd.assets.confined import Ids, Limits
from sandboxd.assets.layers import Layer
from sandboxd.assets.manifest import Unusable
from sandboxd.assets.reference import Reference

RECIPE = 1
"""Part of every drive's name: raised when the same image shall be built into something else."""
MAX_ENTRIES = 1_000_000
ASK_S = 120.0
STALL_S = 120.0
"""Without a byte of a layer."""
WORK_S = 3600.0
SLACK_BYTES = 16 << 20
"""What is pulled beside the layers: the configuration, the manifest."""
PROGRAMS = {"skopeo": "skopeo", "umoci": "umoci", "mkfs.erofs": "erofs-utils", "bwrap": "bubblewrap",
            "zstd": "zstd"}  # fmt: skip
"""And the packages they come from."""
BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
HOST_FILES = ("resolv.conf", "hosts", "nsswitch.conf", "containers/registries.conf", "containers/registries.conf.d")
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
SPACE = 4 << 30
"""Address space of the programs: Go's runtime reserves far more than it uses."""
LAYERS_SPACE = 1 << 30
NOISE = re.compile(r'.*?\bmsg=("(?:[^"\\]|\\.)*"|\S+)')
PREFIX = re.compile(r'.*?"?docker://[^" ]*"?: ')
COLOURS = re.compile(r"\x1b\[[0-9;]*m|[•⨯]")
MISSING = ("manifest unknown", "name unknown", "not found", "NAME_UNKNOWN", "MANIFEST_UNKNOWN")
DENIED = ("unauthorized", "denied", "authentication required")

Meter = Callable[[str, int, int], None]
"""phase, bytes done, bytes in all"""


class NotThere(Unusable):
    """The registry has no such image, or none for everybody."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a reference named when the registry was last asked. `digest` is what the reference itself named (an index
    perhaps), `manifest` the manifest's for this machine, `layers` from the lowest on."""

    digest: str
    manifest: str
    layers: tuple[Layer, ...]
    env: dict[str, str]

    @property
    def size_bytes(self) -> int:
        return sum(layer.size_bytes for layer in self.layers)

    @property
    def drive(self) -> str:
        """The name of the drive's file."""
        return f"{self.manifest.removeprefix('sha256:')}-{RECIPE}.erofs"


def missing() -> str:
    """The command that brings what is lacking here; empty where nothing is."""
    lacking = sorted({package for name, package in PROGRAMS.items() if _which(name) is None})
    return f"apt-get install -y --no-install-recommends {' '.join(lacking)}" if lacking else ""


def _which(name: str) -> str | None:
    return shutil.which(name, path="/usr/bin:/usr/sbin:/bin:/sbin")


class Registry:
    """Registries as this daemon may use them: `insecure` are those (HOST:PORT) that may be spoken to without TLS."""

    def __init__(
        self, ids: Ids, insecure: Collection[str], reserved: Collection[str], environment: Mapping[str, str]
    ) -> None:
        self._ids, self._insecure, self._reserved = ids, frozenset(insecure), frozenset(reserved)
        self._environment = environment
        self.stall_s = STALL_S
        self._architecture = manifest.ARCHITECTURES.get(platform.machine(), platform.machine())

    async def resolve(self, reference: Reference, work: Path) -> Resolved:
        """Asks the registry. Every answer is compared with its digest."""
        self._host_files(work)
        raw = await self._inspect(reference, reference.wanted, work)
        if reference.digest:
            manifest.check(raw, reference.digest)
        digest = manifest.digest_of(raw)
        found = manifest.read(raw, self._architecture)
        if isinstance(found, str):
            raw = await self._inspect(reference, reference.by_digest(found), work)
            manifest.check(raw, found)
            found = manifest.read(raw, self._architecture)
        if isinstance(found, str):
            raise Unusable("its index leads to another index, which is not supported")
        raw = await self._inspect(reference, reference.by_digest(found.digest), work, "--config")
        manifest.check(raw, found.config.digest)
        config = manifest.read_config(raw, found, self._architecture, self._reserved)
        rows = zip(found.layers, config.diff_ids, strict=True)
        plan = tuple(Layer(blob.digest, blob.size_bytes, diff_id) for blob, diff_id in rows)
        return Resolved(digest, found.digest, plan, config.env)

    async def fetch(self, reference: Reference, image: Resolved, work: Path, tell: Meter) -> None:
        """Puts the blobs that are not there yet into work/blobs, each named by its digest."""
        self._host_files(work)
        blobs = work / confined.OWN / "pulled" / "blobs" / "sha256"
        limits = Limits(SPACE, max(layer.size_bytes for layer in image.layers) + (8 << 20), WORK_S)
        words = ["skopeo", "copy", "--quiet", "--insecure-policy", "--src-no-creds", "--retry-times", "2"]
        words += [f"--src-tls-verify={self._verified(reference)}", "--dest-oci-accept-uncompressed-layers"]
        words += [f"docker://{reference.by_digest(image.manifest)}", "oci:pulled:image"]
        ended: confined.Ended | Unusable | None = None

        async def watch() -> Unusable:
            before, since = -1, anyio.current_time()
            while True:
                done = await anyio.to_thread.run_sync(_size_of, blobs)
                tell("pulling", min(image.size_bytes, done), image.size_bytes)
                if done > image.size_bytes + SLACK_BYTES:
                    return Unusable("the registry sends more than its manifest names")
                if done != before:
                    before, since = done, anyio.current_time()
                elif anyio.current_time() - since > self.stall_s:
                    return Unusable(f"the registry has sent nothing for {self.stall_s:.0f} s")
                await anyio.sleep(0.2)

        async with anyio.create_task_group() as tasks:

            async def first(of: Callable[[], Awaitable[confined.Ended | Unusable]]) -> None:
                nonlocal ended
                ended = await of()
                tasks.cancel_scope.cancel()

            tasks.start_soon(first, watch)
            tasks.start_soon(first, lambda: self._skopeo(words, work, limits))
        assert ended is not None
        _said(ended, "pulled")
        await anyio.to_thread.run_sync(_collect, image, blobs, work / "blobs")
        tell("pulling", image.size_bytes, image.size_bytes)

    async def _inspect(self, reference: Reference, name: str, work: Path, *flags: str) -> bytes:
        words = ["skopeo", "inspect", "--raw", "--no-creds", *flags]
        words += [f"--tls-verify={self._verified(reference)}", f"docker://{name}"]
        return _said(await self._skopeo(words, work, Limits(SPACE, 64 << 20, ASK_S)), "asked for")

    async def _skopeo(self, words: list[str], work: Path, limits: Limits) -> confined.Ended | Unusable:
        """What came of it; why it came to nothing is a value, for callers that do something else meanwhile."""
        environment = {name: self._environment[name] for name in PROXIES if name in self._environment}
        environment["SSL_CERT_FILE"] = "/etc/ca.crt"
        try:
            return await confined.run(
                work, words, ids=self._ids, limits=limits, network=True, environment=environment,
                files=[("etc", "/etc")],
            )  # fmt: skip
        except TimeoutError:
            return Unusable("the registry took too long")
        except OverflowError:
            return Unusable("its manifest is too large")

    def _verified(self, reference: Reference) -> str:
        return "false" if reference.registry in self._insecure else "true"

    def _host_files(self, work: Path) -> None:
        """What a program needs to find registries and to know them, as the daemon sees it."""
        etc = work / "etc"
        if etc.exists():
            return
        (etc / "containers").mkdir(parents=True)
        bundle = self._environment.get("SSL_CERT_FILE") or next((path for path in BUNDLES if os.path.exists(path)), "")
        if bundle:
            shutil.copyfile(bundle, etc / "ca.crt")
        for name in HOST_FILES:
            source = Path("/etc") / name
            if source.is_dir():
                shutil.copytree(source, etc / name, symlinks=False)
            elif source.exists():
                shutil.copyfile(source, etc / name)
        for directory, _, names in os.walk(etc):
            os.chmod(directory, 0o755)  # noqa: S103
            for name in names:
                os.chmod(os.path.join(directory, name), 0o644)


def _said(ended: confined.Ended | Unusable, what: str) -> bytes:
    if isinstance(ended, Unusable):
        raise ended
    if ended.code != 0:
        raise _fault(ended.stderr, what)
    return ended.stdout


def workplace(work: Path, ids: Ids) -> None:
    """A directory of ours, with one in it where the programs may write: what they wrote is never written through."""
    for path, mode in ((work, 0o755), (work / "blobs", 0o755), (work / confined.OWN, 0o700)):
        path.mkdir()
        path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(work / confined.OWN, ids.first, ids.first)


async def build(image: Resolved, work: Path, ids: Ids, max_bytes: int, tell: Meter) -> Path:
    """The drive, in `work`, from the blobs there. Raises `Unusable`."""
    limits = Limits(SPACE, 2 * max_bytes + (1 << 30), WORK_S)
    plan = {
        "layers": [asdict(layer) for layer in image.layers], "env": image.env, "max_entries": MAX_ENTRIES,
        "max_bytes": max_bytes, "squash": ids.squash,
    }  # fmt: skip
    tell("building", 0, image.size_bytes)
    await anyio.to_thread.run_sync(_programs, work)
    said: list[dict[str, Any]] = []

    def heard(line: bytes) -> None:
        try:
            message = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            message = {}
        if isinstance(done := message.get("done"), int):
            tell("building", min(done, image.size_bytes), image.size_bytes)
        else:
            said.append(message)

    words = ["python3", "-I", "../layers.py", "../blobs", "layout"]
    own = Limits(LAYERS_SPACE, limits.file_size_bytes, WORK_S)
    ended = await _step(work, words, ids, own, stdin=msgspec.json.encode(plan), on_line=heard)
    if said and isinstance(refused := said[-1].get("refused"), str):
        raise Unusable(refused)
    if ended.code != 0 or not said or "written" not in said[-1]:
        raise _fault(ended.stderr, "read")
    steps = (
        (["umoci", "raw", "unpack", "--image", f"layout:{layers.TAG}", "rootfs"], "unpacked"),
        (["python3", "-I", "../roots.py", "rootfs"], "looked at"),
        (drive.mkfs(Path("rootfs"), Path("image.erofs")), "written as a drive"),
    )
    for words, what in steps:
        ended = await _step(work, words, ids, limits)
        if ended.code != 0:
            raise _fault(ended.stderr, what)
        if what == "looked at" and (wrong := ended.stdout.decode(errors="replace").strip()):
            raise Unusable(wrong[:300])
    return await anyio.to_thread.run_sync(_taken, work / confined.OWN / "image.erofs")


def _programs(work: Path) -> None:
    """Ours, where the jail sees them."""
    for name in ("layers.py", "roots.py"):
        shutil.copyfile(Path(__file__).with_name(name), work / name)
        (work / name).chmod(0o444)


async def _step(work: Path, words: list[str], ids: Ids, limits: Limits, **more: Any) -> confined.Ended:
    try:
        return await confined.run(work, words, ids=ids, limits=limits, **more)
    except TimeoutError:
        raise Unusable("it took too long to be unpacked") from None
    except OverflowError:
        raise Unusable("the program that reads its layers was disturbed by them") from None


def _taken(path: Path) -> Path:
    """A file that a jailed program made, as the daemon's own and nobody's to change."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        raise Unusable("the program that writes drives wrote none") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise Unusable("the program that writes drives wrote none")
        os.fchown(fd, os.geteuid(), os.getegid())
        os.fchmod(fd, 0o444)
        os.fsync(fd)
    finally:
        os.close(fd)
    return path


def _collect(image: Resolved, source: Path, blobs: Path) -> None:
    if any(path.is_symlink() for path in (source, source.parent, source.parent.parent)):
        raise Unusable("the program that pulls images was disturbed")
    for layer in image.layers:
        name = layer.digest.removeprefix("sha256:")
        if (blobs / name).exists():
            continue
        status = (source / name).lstat() if (source / name).exists() else None
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != layer.size_bytes:
            raise Unusable("the registry did not send all of its layers as its manifest names them")
        os.link(source / name, blobs / name, follow_symlinks=False)
        os.chown(blobs / name, os.geteuid(), os.getegid())
        os.chmod(blobs / name, 0o444)


def _size_of(directory: Path) -> int:
    """Bytes of the files that are there, whole or on their way."""
    total = 0
    for path in (directory, directory.parent.parent):
        try:
            with os.scandir(path) as entries:
                total += sum(entry.stat(follow_symlinks=False).st_size for entry in entries if entry.is_file())
        except OSError:
            continue
    return total


def _fault(stderr: str, what: str) -> Unusable:
    """What a program said, in one line, and whose fault that is."""
    text = COLOURS.sub("", stderr).strip()
    line = text.splitlines()[-1] if text else "no reason was given"
    if told := NOISE.match(line):
        line = told[1].strip('"').replace('\\"', '"').replace("\\\\", "\\")
    line = PREFIX.sub("", line)
    if any(word in line for word in DENIED):
        return NotThere("the registry does not give it to everybody, and credentials are not supported")
    if any(word in line for word in MISSING):
        return NotThere("the registry does not have it")
    if "no space left" in text or "ENOSPC" in text:
        return Unusable("the server's disk is full")
    return Unusable(f"it could not be {what}: {line.strip()[:300]}")


def remove(work: Path) -> None:
    rootspace.remove(work)
