"""What needs no build: lists, refusals, and what was built already on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxd.assets import prepare, store
from sandboxd.assets.prepare import Assets
from sandboxd.errors import SetupError

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"


@pytest.fixture
def build_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "build"
    directory.mkdir()
    for name in ("guest-init", "guest-exec"):
        (directory / name).write_bytes(name.encode())
    return directory


def test_each_recipe_comes_after_what_it_is_built_from(build_dir: Path) -> None:
    seen: set[str] = set()
    for recipe in prepare.recipes(build_dir):
        assert set(recipe.after) <= seen
        seen.add(recipe.name)
    assert seen == {"kernel", "initramfs", "interpreter", "runtime", "image"}


@pytest.mark.parametrize(("program", "touched"), [("guest-init", "initramfs"), ("guest-exec", "runtime")])
def test_a_new_program_asks_for_a_new_asset_and_no_other(program: str, touched: str, build_dir: Path) -> None:
    before = {recipe.name: recipe.sources for recipe in prepare.recipes(build_dir)}
    (build_dir / program).write_bytes(b"new")
    after = {recipe.name: recipe.sources for recipe in prepare.recipes(build_dir)}
    assert {name for name in before if before[name] != after[name]} == {touched}


@pytest.mark.parametrize("program", ["guest-init", "guest-exec"])
def test_a_program_that_is_not_compiled_is_named(program: str, build_dir: Path) -> None:
    (build_dir / program).unlink()
    assert prepare.present(build_dir / "assets", build_dir) is None
    with pytest.raises(SetupError, match=rf"(?s){program} is missing.*make "):
        prepare.prepare(build_dir / "assets", build_dir, lambda progress: None)


@pytest.mark.parametrize("program", ["guest-init", "guest-exec"])
def test_where_a_clone_is_makes_no_difference_to_its_assets(program: str) -> None:
    if not (BUILD / program).exists():
        pytest.skip(f"build/{program} is not compiled; `make` does it")
    assert bytes(ROOT) not in (BUILD / program).read_bytes()


def test_nothing_is_present_in_a_new_directory_and_none_is_made(build_dir: Path, tmp_path: Path) -> None:
    assert prepare.present(tmp_path / "assets", build_dir) is None
    assert not (tmp_path / "assets").exists()


# ---- the real ones, built by this run's set-up ----


def built() -> tuple[Path, Assets]:
    directory = Path(os.environ.get("SANDBOX_TEST_ASSETS", "/var/lib/sandboxd/assets"))
    assets = prepare.present(directory, BUILD) if (BUILD / "guest-init").is_file() else None
    if assets is None:
        pytest.skip(f"no assets for these sources in {directory}; `make assets` builds them")
    return directory, assets


def test_files_are_for_everybody_to_read_and_nobody_to_write() -> None:
    _, assets = built()
    for path in (assets.kernel, assets.initramfs, assets.runtime, assets.image):
        assert path.stat().st_mode & 0o7777 == 0o444


def test_manifests_name_the_packages_and_no_archive() -> None:
    _, assets = built()
    for path in (assets.kernel, assets.image):
        told = json.loads((path.parent / store.MANIFEST).read_text())
        assert any(line.startswith(("linux-image-", "git ")) for line in told["built_from"])
        assert "://" not in json.dumps(told)


def inode(image: Path, path: str) -> str:
    return subprocess.run(
        ["dump.erofs", f"--path={path}", str(image)], capture_output=True, check=True, text=True
    ).stdout


@pytest.mark.parametrize(
    ("path", "owner", "mode"),
    [
        ("/workspace", 1001, "0755"),
        ("/sandbox/home", 1001, "0755"),
        ("/etc/sandbox/image.json", 0, "0644"),
        ("/usr/bin/git", 0, "0755"),
        ("/usr/bin/python3.11", 0, "0755"),
        ("/usr/bin/rg", 0, "0755"),
        ("/usr/local/bin/node", 0, "0755"),
        ("/etc/shadow", 0, "0640"),
    ],
)
def test_the_image_keeps_owners_and_modes(path: str, owner: int, mode: str) -> None:
    _, assets = built()
    told = inode(assets.image, path)
    assert re.search(rf"Uid: {owner} ", told), told
    assert re.search(rf"Access: {mode}/", told), told


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take the network away from a process without more")
def test_without_a_network_guestds_drive_is_built_again_byte_for_byte(tmp_path: Path) -> None:
    directory, assets = built()
    copy = tmp_path / "assets"
    shutil.copytree(directory / "wanted", copy / "wanted", symlinks=True)
    for path in directory.glob("*-*"):
        if path.parent == directory and path.name.rpartition("-")[0] in ("kernel", "interpreter", "image"):
            shutil.copytree(path, copy / path.name, copy_function=link_or_copy)
    told = subprocess.run(
        [
            "unshare", "--net", sys.executable, "-c",
            "import sys; from pathlib import Path; from sandboxd.assets.prepare import prepare\n"
            "print(prepare(Path(sys.argv[1]), Path(sys.argv[2]), lambda progress: None).key)",
            str(copy), str(BUILD),
        ],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )
    assert told.stdout.strip() == assets.key
    again = prepare.present(copy, BUILD)
    assert again is not None
    assert again.runtime.read_bytes() == assets.runtime.read_bytes()
    assert again.initramfs.read_bytes() == assets.initramfs.read_bytes()
