"""The two lists of pinned packages: what is installed runs with what the tests ran with."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def pins(name: str) -> dict[str, str]:
    """Each requirement with its hashes."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if match := re.match(r"([A-Za-z0-9._-]+==\S+)\s+(.*)", line.split("#")[0]):
            found[match[1]] = " ".join(sorted(match[2].split()))
    return found


def test_what_is_installed_is_pinned_as_what_was_tested() -> None:
    run, all_of_it = pins("requirements-run.lock"), pins("requirements.lock")
    assert run
    remedy = "regenerate requirements-run.lock with pip-compile, as requirements.lock without --extra dev"
    assert run.items() <= all_of_it.items(), remedy


def test_every_dependency_is_in_the_list_for_installing() -> None:
    names = {requirement.partition("==")[0].lower().replace("_", "-") for requirement in pins("requirements-run.lock")}
    text = (ROOT / "pyproject.toml").read_text()
    wanted = re.findall(r'"([A-Za-z0-9._-]+)', text[text.index("dependencies = [") : text.index("[project.optional")])
    assert {name.lower().replace("_", "-") for name in wanted} <= names
