"""Where built assets lie: complete, read-only, found by what they are made of.

    <assets>/<name>-<key>/           the files (0444) and manifest.json; appears by one rename
    <assets>/wanted/<name>-<request> a symlink to the directory above
    <assets>/.build-*                work in progress; swept by the next builder
    <assets>/.lock                   held (flock) by the one builder

Two hashes, because what a recipe asks for is known at once and what it gets is known only from the network. The
`request` covers the recipe's version, our own sources and the assets it is built from; the `key` covers also what
the request resolved to (package versions and digests). Looking something up needs the request alone.

A published file carries a fixed modification time. Size and time are compared on each look-up, digests when one of
them is wrong or when a builder checks everything, so a file that was cut, changed or deleted is built again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sandboxd.assets import rootspace
from sandboxd.assets.apt import Package
from sandboxd.errors import SetupError

STAMP_NS = 1_700_000_000 * 10**9
MANIFEST = "manifest.json"
KEY_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Asset:
    """A published asset."""

    name: str
    key: str
    directory: Path

    def file(self, name: str) -> Path:
        return self.directory / name


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one asset is made.

    `resolve` chooses the packages it will be made of (it may use the network) and `build` writes `files` into a
    directory from them. `sources` are texts and digests of our own; `after` names the assets it is built from.
    """

    name: str
    version: int
    files: tuple[str, ...]
    resolve: Callable[[Bench], Sequence[Package]]
    build: Callable[[Bench, Sequence[Package], Path], None]
    sources: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def request(self, made: Mapping[str, Asset]) -> str:
        return digest([self.name, str(self.version), *self.sources, *(made[name].key for name in self.after)])


@dataclass(frozen=True, slots=True)
class Bench:
    """A recipe's place of work.

    `scratch` is empty and the recipe's own, `shared` serves all recipes of one build; `made` is what is built already
    and `report` takes a percentage and a text for a person.
    """

    scratch: Path
    shared: Path
    made: Mapping[str, Asset]
    report: Callable[[int, str], None]


def digest(lines: Iterable[str]) -> str:
    """Sixteen hex digits over the lines; a line cannot run into the next one."""
    total = hashlib.sha256()
    for line in lines:
        raw = line.encode()
        total.update(b"%d:" % len(raw) + raw)
    return total.hexdigest()[:KEY_DIGITS]


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- looking up: no lock, no network, no digest ----


def find(assets_dir: Path, recipe: Recipe, made: Mapping[str, Asset]) -> Asset | None:
    """The published asset for this recipe, if it is there and its files look untouched."""
    asset = _linked(assets_dir, recipe, made)
    if asset is None:
        return None
    sizes = _manifest_sizes(asset, recipe)
    if sizes is None:
        return None
    for name, size_bytes in sizes.items():
        try:
            status = asset.file(name).lstat()
        except OSError:
            return None
        if status.st_size != size_bytes or status.st_mtime_ns != STAMP_NS:
            return None
    return asset


def _linked(assets_dir: Path, recipe: Recipe, made: Mapping[str, Asset]) -> Asset | None:
    try:
        target = os.readlink(_link(assets_dir, recipe, made))
    except OSError:
        return None
    folder = os.path.basename(target)
    name, _, key = folder.rpartition("-")
    if name != recipe.name or len(key) != KEY_DIGITS:
        return None
    return Asset(name, key, assets_dir / folder)


def _link(assets_dir: Path, recipe: Recipe, made: Mapping[str, Asset]) -> Path:
    return assets_dir / "wanted" / f"{recipe.name}-{recipe.request(made)}"


def _manifest(asset: Asset, recipe: Recipe) -> dict[str, tuple[int, str]] | None:
    """Size and SHA-256 of each file; None for a manifest that is missing, broken or of something else."""
    try:
        told = json.loads(asset.file(MANIFEST).read_bytes())
        rows = {name: (int(row["size"]), str(row["sha256"])) for name, row in told["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return rows if set(rows) == set(recipe.files) and told.get("key") == asset.key else None


def _manifest_sizes(asset: Asset, recipe: Recipe) -> dict[str, int] | None:
    rows = _manifest(asset, recipe)
    return None if rows is None else {name: size for name, (size, _) in rows.items()}


# ---- building: one builder at a time ----


@contextmanager
def builder(assets_dir: Path, waiting: Callable[[], None]) -> Iterator[Path]:
    """Hold the lock and yield a scratch directory; `waiting` is called once if somebody else has the lock.

    What a killed builder left is removed first.
    """
    try:
        assets_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        lock = os.open(assets_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SetupError(
            f"{assets_dir} lacks what this version starts from, and cannot be written: {error.strerror}. Let its owner "
            f"run this version's sandboxd prepare --assets-dir {assets_dir}, or choose another with --assets-dir"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        _sweep(assets_dir)
        (assets_dir / "wanted").mkdir(exist_ok=True)
        with _scratch(assets_dir) as shared:
            yield shared
    finally:
        os.close(lock)


def make(
    assets_dir: Path, recipe: Recipe, made: Mapping[str, Asset], shared: Path, report: Callable[[int, str], None]
) -> Asset:
    """Find or build; the caller is the builder. Digests are compared only of what looks touched."""
    asset = find(assets_dir, recipe, made) or _mended(assets_dir, recipe, made)
    if asset is not None:
        return asset
    with _scratch(assets_dir) as scratch:
        work = scratch / "work"
        out = scratch / "out"
        work.mkdir()
        out.mkdir()
        bench = Bench(work, shared, made, report)
        request = recipe.request(made)
        packages = recipe.resolve(bench)
        built_from = [package.line for package in packages]
        asset = Asset(recipe.name, key := digest([request, *built_from]), assets_dir / f"{recipe.name}-{key}")
        if not _whole(asset, recipe):
            recipe.build(bench, packages, out)
            _seal(out, recipe, asset.key, built_from)
            _replace(out, asset.directory, scratch)
        _point(_link(assets_dir, recipe, made), asset.directory.name)
    return asset


def _mended(assets_dir: Path, recipe: Recipe, made: Mapping[str, Asset]) -> Asset | None:
    asset = _linked(assets_dir, recipe, made)
    return asset if asset is not None and _whole(asset, recipe) else None


def _whole(asset: Asset, recipe: Recipe) -> bool:
    """Compare every digest; files that are right get their mode and time back (they may have been copied)."""
    rows = _manifest(asset, recipe)
    if rows is None:
        return False
    for name, (size_bytes, sha256) in rows.items():
        path = asset.file(name)
        if path.is_symlink() or not path.is_file() or path.stat().st_size != size_bytes:
            return False
        if file_digest(path) != sha256:
            return False
        path.chmod(0o444)
        os.utime(path, ns=(STAMP_NS, STAMP_NS))
    return True


def _seal(out: Path, recipe: Recipe, key: str, built_from: Sequence[str]) -> None:
    rows = {}
    for name in recipe.files:
        path = out / name
        rows[name] = {"size": path.stat().st_size, "sha256": file_digest(path)}
        path.chmod(0o444)
        os.utime(path, ns=(STAMP_NS, STAMP_NS))
        _flush(path)
    told = {"name": recipe.name, "key": key, "files": rows, "built_from": list(built_from)}
    manifest = out / MANIFEST
    manifest.write_text(json.dumps(told, indent=1) + "\n")
    manifest.chmod(0o444)
    _flush(manifest)
    out.chmod(0o755)


def _replace(new: Path, place: Path, scratch: Path) -> None:
    with suppress(FileNotFoundError):
        place.rename(scratch / "broken")
    new.rename(place)
    _flush(place.parent)


def _point(link: Path, folder: str) -> None:
    fresh = link.with_name(f".{link.name}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(Path("..") / folder)
    fresh.rename(link)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _scratch(assets_dir: Path) -> Iterator[Path]:
    scratch = Path(tempfile.mkdtemp(prefix=".build-", dir=assets_dir))
    scratch.chmod(0o755)  # apt, run by root, reads the network as a user of its own
    try:
        yield scratch
    finally:
        rootspace.remove(scratch)


def _sweep(assets_dir: Path) -> None:
    for left in assets_dir.glob(".build-*"):
        rootspace.remove(left)
