"""Sizes with a name: what is saved is checked whole, and what is typed comes before it."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from docopt import docopt

from cli import templates
from cli.config import Config
from cli.plan import of as plan_of
from sandboxd.errors import SandboxError
from tests.cli.person import Person

GPU = {"name": "wide", "vcpus": 12, "memory_mb": 4096, "disk_mb": 9000, "description": "for \x1b[31mme"}


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    directory = tmp_path / ".config" / "sandbox"
    directory.mkdir(parents=True)
    return directory / "studio.json"


def save(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
    path.chmod(0o600)


def sizes(*flags: str) -> dict[str, Any]:
    args = docopt(str(import_module("cli.run").__doc__), argv=["run", *flags, "--", "x"])
    body = plan_of(args, Config(), {}, None).create.body()
    return {key: value for key, value in body.items() if key in ("cpus", "memory_mb", "disk_mb")}


def test_both_kinds_are_listed(settings: Path, tmp_path: Path) -> None:
    save(settings, {"templates": [GPU], "deny": ["not ours to read"]})
    done = Person(tmp_path, tmp_path / "none").run("template", "ls")
    lines = done.stdout.decode().splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "micro", "small", "medium", "large", "xlarge", "wide"]
    assert lines[-1].split()[1:] == ["12", "4096", "MiB", "9000", "MiB", "saved", "for", "[31mme"]
    assert lines[1].split()[1:7] == ["1", "512", "MiB", "default", "built", "in"]
    rows = json.loads(Person(tmp_path, tmp_path / "none").run("template", "ls", "--json").stdout)
    assert rows[-1] == GPU | {"source": "saved"}


@pytest.mark.parametrize(
    ("flags", "wire"),
    [
        pytest.param((), {}, id="none: all is the server's"),
        pytest.param(("--template=small",), {"cpus": 1, "memory_mb": 1024}, id="one without a disk"),
        pytest.param(("--template=wide",), {"cpus": 12, "memory_mb": 4096, "disk_mb": 9000}, id="one that was saved"),
        pytest.param(
            ("--template=wide", "--cpus=0.5"), {"cpus": 0.5, "memory_mb": 4096, "disk_mb": 9000}, id="other cpus"
        ),
        pytest.param(
            ("--template=wide", "--memory=99", "--disk=98"), {"cpus": 12, "memory_mb": 99, "disk_mb": 98}, id="all else"
        ),
    ],
)
def test_what_is_typed_comes_first(settings: Path, flags: tuple[str, ...], wire: dict[str, Any]) -> None:
    save(settings, {"templates": [GPU]})
    assert sizes(*flags) == wire


def test_an_unknown_one_is_said_with_those_there_are(settings: Path) -> None:
    save(settings, {"templates": [GPU]})
    with pytest.raises(SandboxError, match="no template huge; there are micro, small, medium, large, xlarge, wide"):
        sizes("--template=huge")


WRONG: list[tuple[str, object, str]] = [
    ("a list", [], "not an object with a list of templates"),
    ("templates are no list", {"templates": {}}, "not an object with a list of templates"),
    ("an entry is none", {"templates": [1]}, "template 1: not an object"),
    ("an unknown field", {"templates": [GPU, GPU | {"name": "b", "gpu": 1}]}, "template 2: unknown gpu"),
    ("a long name", {"templates": [GPU | {"name": "a" * 33}]}, "template 1: its name is 1 to 32 of"),
    ("a name with capitals", {"templates": [GPU | {"name": "Wide"}]}, "template 1: its name is 1 to 32 of"),
    ("no name", {"templates": [{"vcpus": 1, "memory_mb": 128}]}, "template 1: its name is 1 to 32 of"),
    ("one of ours", {"templates": [GPU | {"name": "small"}]}, "template 1: small is there already, or built in"),
    ("twice", {"templates": [GPU, GPU]}, "template 2: wide is there already"),
    ("half a processor", {"templates": [GPU | {"vcpus": 0.5}]}, "vcpus is no whole number, from 1 to 256"),
    ("a true processor", {"templates": [GPU | {"vcpus": True}]}, "vcpus is no whole number, from 1 to 256"),
    ("none", {"templates": [GPU | {"vcpus": 0}]}, "vcpus is no whole number, from 1 to 256"),
    ("too many", {"templates": [GPU | {"vcpus": 257}]}, "vcpus is no whole number, from 1 to 256"),
    ("little memory", {"templates": [GPU | {"memory_mb": 127}]}, "memory_mb is no whole number, from 128 to 1048576"),
    ("no memory", {"templates": [{"name": "a", "vcpus": 1}]}, "memory_mb is no whole number"),
    ("a small disk", {"templates": [GPU | {"disk_mb": 255}]}, "disk_mb is no whole number, 0 or from 256 to"),
    ("a long description", {"templates": [GPU | {"description": "x" * 257}]}, "its description is no text of at most"),
    ("101 of them", {"templates": [GPU | {"name": f"t{n}"} for n in range(101)]}, "101 templates, and there may be"),
]


@pytest.mark.parametrize(("value", "said"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_file_with_a_fault_is_refused_whole(settings: Path, value: object, said: str) -> None:
    save(settings, value)
    with pytest.raises(SandboxError, match=f"studio.json: .*{said}"):
        templates.every()
    assert sizes("--cpus=1") == {"cpus": 1.0}, "nobody asked for a template"


def test_a_hundred_are_taken(settings: Path) -> None:
    save(settings, {"templates": [GPU | {"name": f"t{n}", "disk_mb": 0} for n in range(100)]})
    assert len(templates.every()) == 105


def test_a_link_and_what_others_can_write_are_not_read(settings: Path, tmp_path: Path) -> None:
    save(tmp_path / "elsewhere", {"templates": [GPU]})
    settings.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SandboxError, match="it is a link, and is not followed"):
        templates.every()
    settings.unlink()
    save(settings, {"templates": [GPU]})
    settings.chmod(0o666)
    with pytest.raises(SandboxError, match="others may write to"):
        templates.every()
