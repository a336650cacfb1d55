from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxd.assets import command, store
from sandboxd.assets.apt import Package
from sandboxd.assets.prepare import Progress, produce
from sandboxd.assets.store import Asset, Recipe
from sandboxd.errors import SetupError
from tests.assets.recipes import quiet, tiny

ROOT = Path(__file__).resolve().parents[2]


def look(assets: Path, wanted: list[Recipe]) -> dict[str, Asset]:
    made: dict[str, Asset] = {}
    for recipe in wanted:
        asset = store.find(assets, recipe, made)
        if asset is None:
            break
        made[recipe.name] = asset
    return made


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def unfinished(assets: Path) -> list[str]:
    return [path.name for path in assets.glob(".build-*")]


def test_nothing_is_found_before_and_all_after(tmp_path: Path) -> None:
    assets, log = tmp_path / "assets", tmp_path / "log"
    assert look(assets, tiny(log)) == {}
    assert not assets.exists()
    made = produce(assets, tiny(log), quiet)
    assert look(assets, tiny(log)) == made
    assert made["top"].file("top").read_text() == "top of a1.0"
    assert lines(log) == ["resolve base", "build base", "build top"]


def test_a_second_run_asks_nobody(tmp_path: Path) -> None:
    assets, log = tmp_path / "assets", tmp_path / "log"
    first = produce(assets, tiny(log), quiet)
    log.unlink()
    assert produce(assets, tiny(log), quiet) == first
    assert lines(log) == []


def test_a_directory_of_somebody_elses_that_lacks_something_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assets = tmp_path / "file" / "assets"
    with pytest.raises(SetupError, match=rf"(?s)^{assets} lacks .*sandboxd prepare --assets-dir {assets}, or choose"):
        produce(assets, tiny(tmp_path / "log"), quiet)


def test_published_files_are_read_only_and_nothing_else_is_left(tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    made = produce(assets, tiny(tmp_path / "log"), quiet)
    for asset in made.values():
        assert asset.directory.stat().st_mode & 0o7777 == 0o755
        assert {path.stat().st_mode & 0o7777 for path in asset.directory.iterdir()} == {0o444}
    assert sorted(path.name for path in assets.iterdir()) == sorted(
        [".lock", "wanted", *(asset.directory.name for asset in made.values())]
    )


def lose(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-2])


def change(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(b"X" + path.read_bytes()[1:])


def link_elsewhere(path: Path) -> None:
    copy = path.with_name("copy")
    path.rename(copy)
    path.symlink_to(copy)


def empty(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [lose, cut, change, link_elsewhere, empty])
@pytest.mark.parametrize("name", ["one", "manifest.json"])
def test_a_damaged_file_is_noticed_and_built_again(damage: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    assets, log = tmp_path / "assets", tmp_path / "log"
    first = produce(assets, tiny(log), quiet)
    before = first["base"].file("one").read_bytes()
    damage(first["base"].file(name))
    if name == "one" or damage is not link_elsewhere:
        assert look(assets, tiny(log)) == {}
    assert produce(assets, tiny(log), quiet) == first
    assert first["base"].file("one").read_bytes() == before
    assert unfinished(assets) == []


@pytest.mark.parametrize(
    "manifest",
    [
        b"[]", b"{}", b'{"files": {}}', b'{"files": {"one": 1, "two": 2}}', b"\xff", b"null",
        b'{"key": "x", "files": {"one": {"size": 4, "sha256": "x"}, "two": {"size": 100000, "sha256": "x"}}}',
    ],
    ids=repr,
)
def test_a_manifest_of_something_else_is_no_asset(manifest: bytes, tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    made = produce(assets, tiny(tmp_path / "log"), quiet)
    path = made["base"].file("manifest.json")
    path.chmod(0o644)
    path.write_bytes(manifest)
    assert look(assets, tiny(tmp_path / "log")) == {}


def test_a_copied_directory_is_compared_by_digest_and_not_built_again(tmp_path: Path) -> None:
    assets, log = tmp_path / "assets", tmp_path / "log"
    first = produce(assets, tiny(log), quiet)
    for asset in first.values():
        for path in asset.directory.iterdir():
            os.utime(path)
    log.unlink()
    assert look(assets, tiny(log)) == {}
    assert produce(assets, tiny(log), quiet) == first
    assert lines(log) == []
    assert look(assets, tiny(log)) == first


def test_without_its_link_an_asset_is_found_by_what_it_is_made_of(tmp_path: Path) -> None:
    assets, log = tmp_path / "assets", tmp_path / "log"
    first = produce(assets, tiny(log), quiet)
    for link in (assets / "wanted").iterdir():
        link.unlink()
    log.unlink()
    assert produce(assets, tiny(log), quiet) == first
    assert lines(log) == ["resolve base"]


@pytest.mark.parametrize("target", ["../top-0000000000000000", "../base-1", "../../etc/passwd", "base", "/"], ids=repr)
def test_a_link_to_something_else_leads_nowhere(target: str, tmp_path: Path) -> None:
    assets, log = tmp_path / "assets", tmp_path / "log"
    first = produce(assets, tiny(log), quiet)
    for link in (assets / "wanted").glob("base-*"):
        link.unlink()
        link.symlink_to(target)
    assert look(assets, tiny(log)) == {}
    assert produce(assets, tiny(log), quiet) == first


def test_other_sources_and_other_packages_are_other_assets(tmp_path: Path) -> None:
    assets, log = tmp_path / "assets", tmp_path / "log"
    newer = Package("tiny", "1.1", "amd64", "11" * 32, 10)
    keys = {
        made["top"].key
        for made in (
            produce(assets, tiny(log), quiet),
            produce(assets, tiny(log, source="b"), quiet),
            produce(assets, tiny(log, source="c", package=newer), quiet),
        )
    }
    assert len(keys) == 3
    assert len(look(assets, tiny(log))) == 2, "the first ones are still there"


def test_a_digest_keeps_lines_apart() -> None:
    assert len({store.digest(lines) for lines in (["ab"], ["a", "b"], ["a", "", "b"], ["b", "a"], [])}) == 5


def test_a_build_that_fails_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    assets, log = tmp_path / "assets", tmp_path / "log"
    with pytest.raises(command.BuildFailed, match="sleep"):
        produce(assets, tiny(log, seconds="no number"), quiet)
    assert unfinished(assets) == []
    assert look(assets, tiny(log)) == {}
    assert set(produce(assets, tiny(log), quiet)) == {"base", "top"}


def test_progress_names_the_asset_and_ends_at_a_hundred(tmp_path: Path) -> None:
    told: list[Progress] = []
    produce(tmp_path / "assets", tiny(tmp_path / "log"), told.append)
    assert told == [
        Progress("base", 50, "half done"), Progress("base", 100, "0.1 MiB"), Progress("top", 100, "0.0 MiB")
    ]


def test_a_place_that_cannot_be_written_is_a_setup_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="file"):
        produce(tmp_path / "file" / "assets", tiny(tmp_path / "log"), quiet)


def start(assets: Path, log: Path, seconds: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "tests.assets.recipes", str(assets), str(log), seconds]
    return subprocess.Popen(argv, cwd=ROOT)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def sleeping(seconds: str) -> bool:
    """Is a process `sleep <seconds>` at work?"""
    wanted = f"sleep\0{seconds}\0".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == wanted:
                return True
        except OSError:
            continue
    return False


def test_two_at_once_build_once(tmp_path: Path) -> None:
    assets, log = tmp_path / "assets", tmp_path / "log"
    builders = [start(assets, log, "0.5") for _ in range(3)]
    assert [builder.wait(60) for builder in builders] == [0, 0, 0]
    assert lines(log) == ["resolve base", "build base", "build top"]


def test_who_waits_is_told_that_somebody_builds(tmp_path: Path) -> None:
    assets, log = tmp_path / "assets", tmp_path / "log"
    told: list[Progress] = []
    first = start(assets, log, "1")
    wait_for(lambda: "build base" in lines(log))
    produce(assets, tiny(log), told.append)
    assert told[0] == Progress("waiting", 0, "another builder is at work")
    assert first.wait(60) == 0


def test_a_killed_build_takes_its_programs_along_and_its_rest_is_swept(tmp_path: Path) -> None:
    assets, log = tmp_path / "assets", tmp_path / "log"
    seconds = f"77.{os.getpid()}"
    builder = start(assets, log, seconds)
    wait_for(lambda: sleeping(seconds))
    assert unfinished(assets) != []
    builder.send_signal(signal.SIGKILL)
    builder.wait(60)
    wait_for(lambda: not sleeping(seconds))
    assert look(assets, tiny(log)) == {}
    assert set(produce(assets, tiny(log), quiet)) == {"base", "top"}
    assert unfinished(assets) == []
