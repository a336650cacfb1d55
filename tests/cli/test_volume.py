"""`volume` and `run --volume`, against a daemon with stand-in machines."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import volume
from cli.agents import tools
from cli.agents.table import AGENTS
from sandboxd.client import Mount
from sandboxd.errors import SandboxError
from tests.cli.person import Person
from tests.sandboxd.conftest import why_not
from tests.sandboxd.rig import Rig


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="dmn-", dir="/tmp") as name, Rig(Path(name)) as running:
        yield running


@pytest.fixture
def person(rig: Rig, tmp_path: Path) -> Person:
    return Person(tmp_path, rig.socket)


@pytest.mark.parametrize(
    ("spec", "mount"),
    [
        ("cache:/data", Mount("cache", "/data", False)),
        ("cache:/data:rw", Mount("cache", "/data", False)),
        ("tools:/opt/tools:ro", Mount("tools", "/opt/tools", True)),
        ("BAD:/tmp", Mount("BAD", "/tmp", False)),
    ],
)
def test_what_is_asked_for(spec: str, mount: Mount) -> None:
    assert volume.given([spec]) == (mount,)


@pytest.mark.parametrize("spec", ["", "cache", "cache:", "cache:data", ":/data", "/host:/data", "a:/b:rx", "a:/b:ro:x"])
def test_what_is_no_mount(spec: str) -> None:
    with pytest.raises(SandboxError, match="NAME:/path"):
        volume.given([spec])


@pytest.mark.parametrize("name", [tools.volume(agent) for agent in AGENTS.values()])
def test_what_runs_start_an_agent_from_is_given_to_read_only(name: str) -> None:
    assert volume.given([f"{name}:/data:ro"]) == (Mount(name, "/data", True),)
    for spec in (f"{name}:/data", f"{name}:/data:rw"):
        with pytest.raises(SandboxError, match=":ro"):
            volume.given([spec])


def test_the_life_of_a_volume(person: Person) -> None:
    assert person.run("volume", "create", "--size", "16", "cache").stdout == b"cache\n"
    made = json.loads(person.run("volume", "create", "--json", "--size=8", "tools").stdout)
    assert (made["name"], made["size_mb"], made["attached_to"]) == ("tools", 8, "")
    done = person.run(
        "run", "-d", "--no-workspace", "--name", "user", "--volume", "cache:/data", "--volume=tools:/opt/t:ro",
        "--", "sleep", "60",
    )  # fmt: skip
    sandbox = done.stdout.decode().strip()
    assert sandbox.startswith("sbx_"), done.stderr
    (shown,) = [one for one in json.loads(person.run("list", "--json").stdout) if one["id"] == sandbox]
    assert shown["volumes"] == [
        {"name": "cache", "path": "/data", "read_only": False}, {"name": "tools", "path": "/opt/t", "read_only": True},
    ]  # fmt: skip
    lines = person.run("volume", "ls").stdout.decode().splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "MIB", "ATTACHED", "TO", "CREATED"]
    assert lines[1].split()[:3] == ["cache", "16", sandbox]
    assert json.loads(person.run("volume", "list", "--json").stdout)[1]["attached_to"] == sandbox
    busy = person.run("volume", "rm", "cache", "tools")
    assert busy.returncode == 1 and f"attached to {sandbox}" in busy.stderr.decode()
    assert busy.stderr.decode().endswith(f"; wait for it, or end it with: sandbox-cli kill {sandbox}\n")
    second = person.run("run", "--no-workspace", "--volume", "cache:/data:ro", "--", "true")
    assert second.returncode == 1 and "one writer or any number of readers" in second.stderr.decode()
    person.run("kill", "user")
    assert person.run("volume", "rm", "cache", "tools").stdout == b"cache\ntools\n"
    assert person.run("volume", "ls", "--json").stdout == b"[]\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("volume", "rm", "nothing"), "no such volume: nothing; see sandbox-cli volume ls"),
        (("volume", "create", "Bad_Name"), "a volume's name must be"),
        (("volume", "create", "--size", "4g", "x"), "--size 4g: not a number of MiB from 1 to 999999999"),
        (("volume",), "volume: "),
        (("run", "--volume", "data", "--", "ls"), "--volume data: it is NAME:/path"),
        (
            ("run", "--no-workspace", "--volume", "none:/data", "--", "ls"),
            "no volume named none: make it with: sandbox-cli volume create none",
        ),
        (("run", "--no-workspace", "--volume", "x:/etc", "--", "ls"), "nothing can be mounted at /etc"),
    ],
)
def test_what_is_wrong_is_one_line_that_says_what_to_do(person: Person, args: tuple[str, ...], said: str) -> None:
    done = person.run(*args)
    assert (done.returncode, done.stdout) == (1, b"")
    assert said in done.stderr.decode() and done.stderr.count(b"\n") == 1
