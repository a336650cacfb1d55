"""All assets of a sandbox, found or built: kernel, initramfs, runtime drive, base image.

`present` looks and is done in milliseconds; `prepare` builds what is missing, one builder at a time, and tells of its
progress. Only what is missing from the assets directory makes it use the network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandboxd.assets import apt, command, image, initramfs, kernel, rootspace, runtime, store
from sandboxd.assets.store import Asset, Bench, Recipe
from sandboxd.errors import SetupError

GUESTD = Path(__file__).resolve().parents[2] / "guestd"
PROGRAMS = ("apt-get", "chroot", "dpkg-deb", "lz4", "mkfs.erofs", "mmdebstrap", "tar", "unshare")


@dataclass(frozen=True, slots=True)
class Assets:
    """Published, read-only files; `key` names this combination of them."""

    kernel: Path
    initramfs: Path
    runtime: Path
    image: Path
    key: str


@dataclass(frozen=True, slots=True)
class Progress:
    """`phase` is the asset under way and `percent` how much of it is done; `detail` is for a person."""

    phase: str
    percent: int
    detail: str


Report = Callable[[Progress], None]


def present(assets_dir: Path, build_dir: Path, own_kernel: Path | None = None) -> Assets | None:
    """The assets for this version of the sources, or None if any is missing or damaged."""
    try:
        wanted = recipes(build_dir, own_kernel)
    except SetupError:
        return None
    made: dict[str, Asset] = {}
    for recipe in wanted:
        asset = store.find(assets_dir, recipe, made)
        if asset is None:
            return None
        made[recipe.name] = asset
    return _assets(made)


def prepare(assets_dir: Path, build_dir: Path, report: Report, own_kernel: Path | None = None) -> Assets:
    """Build what is missing and return all. `own_kernel` is taken in place of Debian's.

    Raises `SetupError` when this machine lacks something a person must install or allow, `BuildFailed` when a
    program failed (no network, a full disk).
    """
    wanted = recipes(build_dir, own_kernel)
    found = present(assets_dir, build_dir, own_kernel)
    if found is not None:
        return found
    command.require(PROGRAMS)
    rootspace.require(os.geteuid())
    return _assets(produce(assets_dir, wanted, report))


def produce(assets_dir: Path, wanted: Sequence[Recipe], report: Report) -> dict[str, Asset]:
    """Make each recipe's asset, in order, under the builder's lock."""

    def tell(phase: str) -> Callable[[int, str], None]:
        return lambda percent, detail: report(Progress(phase, max(0, min(100, percent)), detail))

    made: dict[str, Asset] = {}
    with store.builder(assets_dir, lambda: report(Progress("waiting", 0, "another builder is at work"))) as shared:
        for recipe in wanted:
            made[recipe.name] = store.make(assets_dir, recipe, made, shared, tell(recipe.name))
            size_mib = sum(made[recipe.name].file(name).stat().st_size for name in recipe.files) / 2**20
            report(Progress(recipe.name, 100, f"{size_mib:.1f} MiB"))
    return made


def recipes(build_dir: Path, own_kernel: Path | None = None) -> list[Recipe]:
    """In the order in which they build on each other."""
    guest_init, guest_exec = build_dir / "guest-init", build_dir / "guest-exec"
    for program in (guest_init, guest_exec):
        if not program.is_file():
            raise SetupError(f"{program} is missing. Run in the project's directory:\n  make build")
    archive = _archive()
    return [
        kernel.recipe(archive) if own_kernel is None else kernel.own(own_kernel),
        initramfs.recipe(guest_init),
        runtime.interpreter(archive),
        runtime.recipe(GUESTD, guest_exec),
        image.recipe(archive),
    ]


def _archive() -> Callable[[Bench], apt.Archive]:
    """The archive, opened by the first recipe of a build that asks for it; the lists are read once."""
    opened: dict[Path, apt.Archive] = {}

    def archive(bench: Bench) -> apt.Archive:
        if bench.shared not in opened:
            fresh = apt.Archive(bench.shared / "apt", apt.host_sources())
            fresh.update(lambda percent: bench.report(0, f"reading package lists, {percent} %"))
            opened[bench.shared] = fresh
        return opened[bench.shared]

    return archive


def _assets(made: dict[str, Asset]) -> Assets:
    return Assets(
        kernel=made["kernel"].file("vmlinux"),
        initramfs=made["initramfs"].file("initramfs.cpio"),
        runtime=made["runtime"].file("runtime.erofs"),
        image=made["image"].file("image.erofs"),
        key=store.digest(f"{name} {asset.key}" for name, asset in sorted(made.items())),
    )
