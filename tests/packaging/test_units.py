"""The installation and its systemd units, in a Debian machine that has nothing else.

Emulated, a daemon's start takes a minute there: this is `make units`, and part of `make soak`. A sandbox within the
machine, emulated twice, does not boot in the time a boot has; a process in the unit's control group stands for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sandboxd.assets import drive
from tests.daemon import assets_dir
from tests.packaging import machine

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.vm,
    pytest.mark.soak,
    pytest.mark.skipif(os.geteuid() != 0, reason="installs as root, into a mount namespace"),
    pytest.mark.timeout(3600),
]


def install(into: Path) -> None:
    """`make install` below /mnt, which is a directory of the test's here and a drive in the machine."""
    script = 'mount --bind "$1" /mnt && exec make -s install PREFIX=/mnt/sandbox-cli CONFIG="$1/etc"'
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-euc", script, "sh", str(into)],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    place = tmp_path_factory.mktemp("units")
    tree = place / "tree"
    (tree / "assets" / "wanted").mkdir(parents=True)
    install(tree)
    for path in machine.wanted_assets(assets_dir(), ROOT / "build"):
        target = tree / "assets" / path.relative_to(assets_dir())
        if path.is_symlink():
            target.symlink_to(os.readlink(path))
        else:
            shutil.copytree(path, target, copy_function=shutil.copy2)
    for name in ("check.py", "groups.py"):
        shutil.copy(ROOT / "tests" / "packaging" / name, tree / name)
    kernel, modules, root = machine.build(assets_dir(), ROOT / "build")
    subprocess.run(keep_times(drive.mkfs(tree, place / "tree.erofs")), check=True, stdout=subprocess.DEVNULL)
    initramfs = place / "initramfs"
    initramfs.write_bytes(machine.initramfs(machine.compile_init(place), modules))
    with machine.Machine(place, kernel, initramfs, root, place / "tree.erofs") as running:
        said = list(running.reports(3400))
        assert said and said[-1]["step"] == "end", f"{said[-1:]}\n{running.tail()}"
    shutil.rmtree(place)
    return {report["step"]: report for report in said}


def keep_times(command: list[str]) -> list[str]:
    """Assets are looked up by their files' times."""
    return [word for word in command if not word.startswith("-T")]


STEPS = [
    "control groups of version 2 hold",
    "the unit has no fault",
    "it starts",
    "it said ready",
    "its directories are private",
    "root uses it through the socket",
    "others do not",
    "alice uses it over TCP with a token",
    "bob uses it over TCP with a token",
    "bob cannot read alice's token",
    "without a token nobody is let in",
    "no user can take such a port",
    "a reload takes a removed token away",
    "a process is in the unit's control group",
    "a killed daemon is started again",
    "a process outlives the kill",
    "it stops",
    "a process outlives the stop",
    "a user's unit starts",
    "its user uses it",
    "another user does not",
    "it stops for its user",
]


@pytest.mark.parametrize("step", STEPS)
def test_the_units(reports: dict[str, dict[str, Any]], step: str) -> None:
    assert reports[step]["ok"], reports[step]
