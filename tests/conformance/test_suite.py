"""What the conformance suite is: a row each, and no word of ours in it."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

from conformance.conftest import ROW
from tests.conformance.live import SUITE

SOURCES = sorted(SUITE.glob("*.py"))
ROWS = [f"C{number}" for number in range(1, 51)]


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.FunctionDef)]


def test_every_row_has_exactly_one_test() -> None:
    tests = [one for path in SOURCES for one in functions(path) if one.name.startswith("test_")]
    firsts = [(ast.get_docstring(one) or "-").splitlines()[0] for one in tests]
    assert Counter(first for first in firsts if ROW.match(first)) == Counter(ROWS)


def test_the_suite_stands_on_the_standard_library_and_pytest_alone() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert not node.level and node.module, path
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                assert top in {"pytest", "conformance"} or top in sys.stdlib_module_names, f"{path.name}: {name}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"__import__", "exec", "eval"}, path


def test_the_suite_knows_no_image_of_ours() -> None:
    for path in SOURCES:
        assert "sandbox-base" not in path.read_text(), path
