"""docs/cli.md holds every command's usage as the command itself prints it; what other pages say to type is one."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
from docopt import DocoptExit, docopt

from cli import __main__ as top
from cli import config_file, run
from cli.agents import wrapper
from sandboxd import __main__ as daemon

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "cli.md"
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


PAGES = sorted({*(ROOT / "docs").glob("*.md"), ROOT / "README.md"} - {PAGE})
LINE = re.compile(r"^(?: {4,}|)(?:[$#] )?(?:sudo )?(sandbox-cli [^#\n]*?)(?: +#.*)?$", re.MULTILINE)
QUOTED = re.compile(r"`(sandbox-cli [^`]+)`")
TYPED = [(page.name, line) for page in PAGES for line in LINE.findall(page.read_text())]
TALKED_OF = [
    *((page.name, " ".join(words.split())) for page in PAGES for words in QUOTED.findall(page.read_text())),
    *(("DEAD", words) for said in config_file.DEAD.values() for words in re.findall("sandbox-cli .*", said)),
    *(("DEAD", f"sandbox-cli {words}") for said in config_file.DEAD.values()
      for words in re.findall("run --[a-z-]+", said)),
]  # fmt: skip


def command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command's name and what follows it."""
    name, rest = top.ALIASES.get(words[0], words[0]), list(words[1:])
    if rest and f"{name} {rest[0]}" in top.COMMANDS:
        name, rest = f"{name} {rest[0]}", rest[1:]
    return name, rest


def fits(line: str) -> bool:
    """Whether a command line is one that its command would take."""
    name, rest = command(shlex.split(line)[1:])
    if name not in top.COMMANDS:
        return False
    try:
        if name == "agent":
            run.parsed(wrapper.split(rest[1:], wrapper.flags(str(run.__doc__))).flags, [])
        else:
            docopt(str(MODULES[name].__doc__), argv=[*name.split(), *rest])
    except (DocoptExit, top.SandboxError):
        return False
    return True


@pytest.mark.parametrize(("page", "line"), TYPED, ids=[f"{page}: {line}" for page, line in TYPED])
def test_what_a_page_says_to_type_is_a_command_line_that_is_taken(page: str, line: str) -> None:
    assert fits(line), page


@pytest.mark.parametrize(("where", "words"), TALKED_OF, ids=[f"{where}: {words}" for where, words in TALKED_OF])
def test_a_command_that_is_talked_of_exists_with_its_flags(where: str, words: str) -> None:
    name, rest = command(re.sub(r"[,;].*", "", words).split()[1:])
    assert name in top.COMMANDS, where
    usage = str((run if name == "agent" else MODULES[name]).__doc__)
    assert [word for word in rest if word.startswith("--") and word not in re.findall("--[a-z-]+", usage)] == []


@pytest.mark.parametrize(
    "line", ["sandbox-cli agent wait fix", "sandbox-cli nope", "sandbox-cli run make", "sandbox-cli list --detach",
             "sandbox-cli agent claude --allow"],
)  # fmt: skip
def test_a_command_line_that_is_not_taken_would_be_seen(line: str) -> None:
    assert len(TYPED) > 20 and len(TALKED_OF) > 20
    assert not fits(line)


SOURCES = [path for top_dir in ("cli", "sandboxd", "egress", "guestd", "native")
           for pattern in ("*.py", "*.c", "*.h") for path in sorted((ROOT / top_dir).rglob(pattern))]  # fmt: skip
NAMED = sorted({name for path in SOURCES for name in re.findall(r"\btests/[\w/]+\.\w+", path.read_text())})


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_a_comment_names_is_there(name: str) -> None:
    assert (ROOT / name).is_file()
