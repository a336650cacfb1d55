"""Pages of docs/ that promise name tests for it: they exist, no promise is without, and what is open is said."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UNPROTECTED = "What is not protected"


def sections(text: str) -> dict[str, str]:
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in text.split("\n## ")[1:]}


TEXT = (ROOT / "docs" / "security.md").read_text()
SECTIONS = sections(TEXT)
# Of other pages, those sections that are promises.
BESIDE = {"secrets": "What is protected", "agents": "What is held"}
PAGES = {page: (ROOT / "docs" / f"{page}.md").read_text() for page in BESIDE}
NAMED = sorted(set(re.findall(r"`((?:tests|conformance)/[\w/]+\.py(?:::\w+)?)`", TEXT + "".join(PAGES.values()))))
PROMISES = [
    " ".join(item.split())
    for body in (
        *(body for title, body in SECTIONS.items() if title != UNPROTECTED),
        *(sections(text)[BESIDE[page]] for page, text in PAGES.items()),
    )
    for item in re.split(r"^- ", body, flags=re.MULTILINE)[1:]
]  # fmt: skip


def names_in(path: Path) -> set[str]:
    return {
        node.name for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }  # fmt: skip


def test_the_document_was_read() -> None:
    assert len(PROMISES) > 25 and len(NAMED) > 40


@pytest.mark.parametrize("named", NAMED)
def test_a_named_test_exists(named: str) -> None:
    path, _, name = named.partition("::")
    assert (ROOT / path).is_file(), f"{path} is not there"
    found = names_in(ROOT / path)
    assert name in found if name else found or "test_imports" in path


@pytest.mark.parametrize("promise", PROMISES, ids=[promise[:60] for promise in PROMISES])
def test_a_promise_is_held_by_a_test_or_said_to_be_open(promise: str) -> None:
    held = "Held by `tests/" in promise
    open_ = re.search(r"\*\*not yet\*\*(:|, see above)", promise, re.IGNORECASE)
    assert held or open_, promise


@pytest.mark.parametrize("name", ["ProcessesDoNotRunAsRoot", "SandboxesCannotReachEachOther"])
def test_the_names_of_the_conformance_suite_stay(name: str) -> None:
    assert f"({name}, conformance)" in TEXT


SAID = ("Fronting inside TLS", "outer name", "What an allowed host does", "secret", "Side channels", "root on the host")


@pytest.mark.parametrize("word", SAID)
def test_what_is_not_protected_is_said_in_words(word: str) -> None:
    assert word in SECTIONS[UNPROTECTED]
