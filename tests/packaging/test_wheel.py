"""What `make install` puts on a machine: the packages and the programs, and nothing that stands in for Firecracker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"cli", "conformance", "egress", "guestd", "native", "sandboxd"}


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel, without the compiled module: the compiler takes longer than all the rest."""
    place = tmp_path_factory.mktemp("wheel")
    # Everything that a build leaves goes there: the clone's own build/ is what other tests run from.
    (place / ".pydistutils.cfg").write_text(
        f"[build]\nbuild_base={place}/base\nbuild_lib={place}/lib\n[egg_info]\negg_base={place}\n"
        f"[bdist_wheel]\nskip_build=1\nbdist_dir={place}/tree\ndist_dir={place}/out\n"
    )
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "bdist_wheel"], cwd=ROOT, stdin=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(place)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = (place / "out").iterdir()
    with ZipFile(wheel) as file:
        return file.namelist()


def test_a_wheel_holds_the_packages_alone(held: list[str]) -> None:
    tops = {name.partition("/")[0] for name in held}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert {"sandboxd/__main__.py", "guestd/__main__.py", "native/native.h"} <= set(held)


def test_a_wheel_holds_no_test_and_no_stand_in(held: list[str]) -> None:
    assert [name for name in held if name.startswith("test") or "standin" in name.lower()] == []


def test_the_programs_that_are_installed() -> None:
    asked = ["make", "-s", "--eval", "programs-are: ; @echo $(notdir $(PROGRAMS))", "programs-are"]
    said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["sandbox-vsock", "guest-init", "guest-exec"]


def test_make_says_what_it_does_not_run_on_before_it_installs_anything(tmp_path: Path) -> None:
    (tmp_path / "uname").write_text("#!/bin/sh\necho aarch64\n")
    (tmp_path / "uname").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["make", "-s", "apt"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stdout == (
        "sandbox-cli's virtual machines are for x86_64, and this machine is aarch64; "
        "docs/firecracker.md says what is missing for arm64\n"
    )
