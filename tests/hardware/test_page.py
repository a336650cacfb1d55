"""docs/firecracker.md says what the code does: its versions, flags, parts and files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sandboxd import __main__ as daemon
from sandboxd.vm import firecracker, firecracker_versions
from sandboxd.vm.firecracker_versions import Feature, Known, Version
from tests.hardware import check

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "firecracker.md").read_text()


@pytest.mark.parametrize("row", firecracker_versions.KNOWN, ids=lambda row: f"{row.first}-{row.fixed}")
def test_each_refused_version_is_there_with_its_source(row: Known) -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("|") and row.source in line]
    assert any(str(Version(row.fixed)) in line for line in lines)
    assert all(word in "".join(lines) for word in re.findall(r"CVE-[0-9-]+", row.why))


def test_what_came_with_a_version() -> None:
    for feature in (Feature.NETWORK_OVERRIDES, Feature.VSOCK_OVERRIDE):
        assert f"before {Version(feature.value)}" in PAGE


def test_the_version_it_names_first_is_taken() -> None:
    (named,) = set(re.findall(r"firecracker-(v[0-9.]+)-x86_64", PAGE))
    assert firecracker_versions.fault(firecracker_versions.read(named)) is None


def test_its_flags_exist() -> None:
    usage = str(daemon.__doc__) + str(check.__doc__) + (ROOT / "sandboxd" / "vm" / "jailer.py").read_text()
    not_ours = {"--no-seccomp", "--seccomp-filter", "--bind"}
    assert set(re.findall(r"(--[a-z][a-z-]+)", PAGE)) - not_ours <= set(re.findall("--[a-z][a-z-]+", usage))


def test_parts_places_and_limits() -> None:
    assert re.findall(r"^\| `([a-z]+)` \|", PAGE, re.MULTILINE) == list(check.PARTS)
    assert all(f"`{place}`" in PAGE for place in firecracker_versions.PLACES.split(":"))
    assert f"More than {firecracker.MAX_CPUS} processors or {firecracker.MAX_DRIVES} drives" in PAGE
    assert "\ncheck-kvm:" in (ROOT / "Makefile").read_text()


def test_it_says_that_no_hardware_was_seen() -> None:
    for page in (PAGE, (ROOT / "README.md").read_text()):
        assert "has not been run on hardware yet" in " ".join(page.split())
