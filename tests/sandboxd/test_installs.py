"""Installs of images that meet each other, a full disk or a killed daemon; the registry is a stand-in."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec
import pytest

from sandboxd import images
from sandboxd.assets.confined import Ids
from sandboxd.assets.layers import Layer
from sandboxd.assets.oci import Registry, Resolved
from sandboxd.errors import Conflict, NotFound, Unavailable
from sandboxd.images import Images, Record

DIGEST = f"sha256:{'1' * 64}"
ONE = Resolved(DIGEST, DIGEST, (Layer(f"sha256:{'2' * 64}", 10, f"sha256:{'3' * 64}"),), {})
A, B = "registry.example/t/a:v1", "registry.example/t/b:v1"


class StandIn:
    """Every name is the same image, once `free` is set."""

    def __init__(self) -> None:
        self.free = anyio.Event()

    async def resolve(self, *_: Any) -> Resolved:
        await self.free.wait()
        return ONE


def with_images(place: Path, act: Callable[[Images, StandIn], Awaitable[None]]) -> None:
    async def run() -> None:
        registry = StandIn()
        ids = Ids(os.geteuid(), 1)
        async with Images(place, cast("Registry", registry), ids, 1 << 30) as found:
            await act(found, registry)

    place.mkdir(exist_ok=True)
    anyio.run(run)


def installed(place: Path, image: str, suffix: str = "json") -> None:
    """As a daemon leaves it."""
    for name in ("references", "drives", "blobs"):
        (place / name).mkdir(parents=True, exist_ok=True)
    (place / "drives" / ONE.drive).write_bytes(b"x" * 100)
    name = f"{hashlib.sha256(image.encode()).hexdigest()[:32]}.{suffix}"
    (place / "references" / name).write_bytes(msgspec.json.encode(Record(image, ONE, 100, 1.0)))


async def settled(found: Images, image: str) -> images.Status:
    with anyio.fail_after(20):
        while (status := found.status(image)).state == "installing":  # noqa: ASYNC110
            await anyio.sleep(0.01)
    return status


def test_a_drive_is_not_deleted_under_an_install_that_shares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the other reference is deleted meanwhile."""
    place = tmp_path / "images"
    installed(place, A)
    keep = Images._keep

    def delete_first(self: Images, record: Record) -> None:
        anyio.from_thread.run_sync(self.delete, A)
        keep(self, record)

    async def act(found: Images, registry: StandIn) -> None:
        registry.free.set()
        monkeypatch.setattr(Images, "_keep", delete_first)
        found.install(B)
        assert (await settled(found, B)).state == "installed"
        with pytest.raises(NotFound):
            found.status(A)
        monkeypatch.setattr(Images, "_keep", keep)
        await found.provide(B, tmp_path / "linked")
        assert (tmp_path / "linked").stat().st_size == 100
        assert found.delete(B) == 100 and not list((place / "drives").iterdir())

    with_images(place, act)


def test_a_record_that_had_no_name_yet_when_the_daemon_was_killed_is_none(tmp_path: Path) -> None:
    place = tmp_path / "images"
    installed(place, A, "part")

    async def act(found: Images, _: StandIn) -> None:
        assert found.all() == []
        assert not list((place / "references").iterdir()) and not list((place / "drives").iterdir())

    with_images(place, act)


def test_a_disk_that_fills_up_ends_installs_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "images"
    real = os.statvfs

    def little(path: Any) -> os.statvfs_result:
        fields = list(real(path))
        fields[4] = 1           # f_bavail
        return os.statvfs_result(fields)

    async def act(found: Images, registry: StandIn) -> None:
        found.install(A)
        await anyio.sleep(0.1)
        assert found.status(A).state == "installing"
        monkeypatch.setattr(images.os, "statvfs", little)
        status = await settled(found, A)
        assert (status.state, status.error) == ("failed", "the server's disk is full")
        assert not list(place.glob("work-*"))
        with pytest.raises(Conflict, match="disk is full"):
            await found.provide(A, tmp_path / "linked")

    with_images(place, act)


def test_there_are_only_so_many_installs_at_once(tmp_path: Path) -> None:
    async def act(found: Images, _: StandIn) -> None:
        for number in range(images.MAX_JOBS):
            found.install(f"registry.example/t/x:{number}")
        with pytest.raises(Unavailable, match="too many images"):
            found.install(A)
        with pytest.raises(Unavailable, match="too many images"):
            await found.provide(A, tmp_path / "linked")
        found.install("registry.example/t/x:0")

    with_images(tmp_path / "images", act)
