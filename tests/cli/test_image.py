"""`image` and `run --image`, against a daemon with stand-in machines and a real registry."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import registry
from tests.cli.person import Person
from tests.registry import Entry, Registry, tar
from tests.sandboxd.conftest import why_not
from tests.sandboxd.rig import Rig


@pytest.fixture(scope="module")
def store() -> Iterator[Registry]:
    if reason := why_not() or registry.why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="reg-", dir="/tmp") as name:
        running = Registry(Path(name))
        yield running
        running.close()


@pytest.fixture
def person(store: Registry, tmp_path: Path) -> Iterator[Person]:
    with (
        tempfile.TemporaryDirectory(prefix="dmn-", dir="/tmp") as name,
        Rig(Path(name), "--insecure-registry", store.name) as rig,
    ):
        rig.create(name="other")
        yield Person(tmp_path, rig.socket)


def test_the_life_of_an_image(person: Person, store: Registry) -> None:
    digest = store.push("t/cli", "v1", tar(Entry("bin/x", b"y")))
    image = f"{store.name}/t/cli:v1"
    assert person.run("image", "pull", image).stdout.decode() == f"{image}\n"
    listed = {one["image"]: one for one in json.loads(person.run("image", "ls", "--json").stdout)}
    assert (listed[image]["state"], listed[image]["digest"]) == ("installed", digest)
    assert listed["sandbox-base"]["default"]
    table = person.run("image", "ls").stdout.decode().splitlines()
    assert table[0].split()[:3] == ["IMAGE", "STATE", "SIZE"] and any(digest[:19] in line for line in table)

    sandbox = person.run("run", "-d", "--no-workspace", "--image", image, "--", "sleep", "60").stdout.decode().strip()
    refused = person.run("image", "rm", image)
    assert refused.returncode == 1 and b"in use by a sandbox" in refused.stderr
    person.run("kill", sandbox)
    assert b"freed" in person.run("image", "rm", image).stdout
    gone = person.run("image", "rm", image)
    assert gone.returncode == 1 and b"no such image" in gone.stderr


def test_a_pull_that_fails_says_why(person: Person, store: Registry) -> None:
    done = person.run("image", "pull", f"{store.name}/t/none:v1")
    assert done.returncode == 1 and b"the registry does not have it" in done.stderr
    assert person.run("image", "pull", "--no-wait", f"{store.name}/t/none:v1").returncode == 0
    short = person.run("image", "pull", "debian:12")
    assert short.returncode == 1 and b"name the registry" in short.stderr
