"""The stand-ins of tests are called as Firecracker and its jailer are: taken where they are named, and never found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sandboxd import backends
from sandboxd.backends import Asked
from sandboxd.errors import SetupError
from sandboxd.vm import firecracker_versions


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    for name, said in (("firecracker", "Firecracker"), ("jailer", "Jailer")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{said} v1.16.1'\n")
        (tmp_path / name).chmod(0o755)
    return Asked("firecracker", "", "", "", tmp_path, tmp_path, "0123456789ab")


def test_path_and_the_working_directory_are_not_looked_at(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.find_firecracker(replace(asked, firecracker=str(asked.state_dir / "firecracker")))
    monkeypatch.setenv("PATH", f"{asked.state_dir}:.")
    monkeypatch.chdir(asked.state_dir)
    try:
        found = backends.find_firecracker(asked).jailer
    except SetupError:
        return  # there is none in the system's directories, and no good one
    assert asked.state_dir not in (found.firecracker.parent, found.jailer.parent)


def test_the_places_are_the_systems_own() -> None:
    places = [Path(place) for place in firecracker_versions.PLACES.split(":")]
    assert all(place.is_absolute() and place.is_relative_to("/usr") for place in places)
