"""docs/cli.md holds every command's usage as the command itself prints it."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import pytest

from cli import __main__ as top
from sandboxd import __main__ as daemon

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
MARK = "<!-- From here on written by `GOLDEN=write pytest tests/cli/test_docs.py`. -->\n"


MODULES = {"sandbox-cli": top} | {name: import_module(path) for name, path in sorted(top.COMMANDS.items())}


def usages() -> str:
    return "".join(f"\n## {name}\n\n```\n{str(module.__doc__).strip()}\n```\n" for name, module in MODULES.items())


@pytest.mark.parametrize("name", [*MODULES, "sandboxd"])
def test_a_usage_text_fits_a_terminal_of_80_columns(name: str) -> None:
    text = str((MODULES | {"sandboxd": daemon})[name].__doc__)
    assert [line for line in text.splitlines() if len(line) > 79] == []


def test_the_command_line_page_is_what_the_commands_say() -> None:
    written, _, _ = PAGE.read_text().partition(MARK)
    page = written + MARK + usages()
    if os.environ.get("GOLDEN") == "write":
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "run GOLDEN=write pytest tests/cli/test_docs.py and look at the difference"
