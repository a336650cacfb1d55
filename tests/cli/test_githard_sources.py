"""No source of the product starts git on the host but cli/githard.py.

Read from the syntax tree of Python and the text of C, so that a new call fails here before it can run.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("cli", "egress", "guestd", "native", "sandboxd")
ALLOWED = {
    "cli/githard.py": "the one place",
    "guestd/bundle.py": "runs inside the guest, with the guest's own git",
}
LIBRARIES = {"dulwich", "git", "gitdb", "pygit2", "pygit2_bindings"}
SPAWNS = re.compile(
    r"(run|Popen|call|check_call|check_output|getoutput|getstatusoutput|system|popen|which|exec[lv]p?e?|"
    r"spawn[lv]p?e?|posix_spawnp?|create_subprocess_(exec|shell)|open_process|run_process|subprocess_(exec|shell)|"
    r"start|spawn|launch|program)"
)
PROGRAM = re.compile(r"(.*/)?git(-[a-z-]+)?(\.exe)?", re.DOTALL)
KEPT = re.compile(r"(.*/(s?bin|git-core)/)?git(-[a-z-]+)?", re.DOTALL)
VERBS = {
    "add", "am", "apply", "archive", "bisect", "blame", "branch", "bundle", "cat-file", "checkout",
    "cherry-pick", "clean", "clone", "commit", "config", "describe", "diff", "fetch", "for-each-ref", "fsck",
    "gc", "grep", "hash-object", "init", "index-pack", "log", "ls-files", "ls-remote", "ls-tree", "merge",
    "mv", "notes", "pull", "push", "rebase", "reflog", "remote", "repack", "reset", "restore", "rev-list",
    "rev-parse", "rm", "show", "stash", "status", "submodule", "switch", "symbolic-ref", "tag",
    "update-index", "update-ref", "version", "worktree",
}  # fmt: skip
SHELL = re.compile(r"(.*[\s;&|(`])?(\S*/)?git\s.*", re.DOTALL)
IN_C = re.compile(r'"(?:[^"\s]*/)?git(?:-[a-z-]+)?(?:\s[^"]*)?"')


def text_of(node: ast.expr) -> str | None:
    """A literal, an f-string with its holes, bytes, the start of a sum."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bytes):
            return node.value.decode("latin-1")
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) or "\0" for value in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left)
    return None


def is_program(node: ast.expr) -> bool:
    text = text_of(node)
    return text is not None and PROGRAM.fullmatch(text) is not None


def is_argv(node: ast.List | ast.Tuple) -> bool:
    """git first and something that could be its command next: not a list of packages, not a pair of texts."""
    if not node.elts or not is_program(node.elts[0]):
        return False
    if len(node.elts) == 1:
        return isinstance(node, ast.List)
    text = text_of(node.elts[1])
    return not isinstance(node.elts[1], ast.Call) if text is None else text.startswith("-") or text in VERBS


def spawns(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return SPAWNS.fullmatch(name) is not None


def starts_of_git(source: str) -> list[int]:
    """The lines of a Python source on which git is named as a program, or a library that is git is imported."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            hit = any(alias.name.partition(".")[0] in LIBRARIES for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            private = node.module == "cli.githard" and any(alias.name.startswith("_") for alias in node.names)
            hit = private or (node.level == 0 and (node.module or "").partition(".")[0] in LIBRARIES)
        elif isinstance(node, ast.List | ast.Tuple):
            hit = is_argv(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            hit = node.value is not None and KEPT.fullmatch(text_of(node.value) or "") is not None
        elif isinstance(node, ast.Call):
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            hit = spawns(node) and any(
                is_program(value)
                or (isinstance(value, ast.List | ast.Tuple) and value.elts and is_program(value.elts[0]))
                or SHELL.fullmatch(text_of(value) or "") is not None for value in values
            )
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            if isinstance(owner, ast.Name) and owner.id == "githard" and isinstance(node.func, ast.Attribute):
                hit = node.func.attr.startswith("_") or node.func.attr in ("binary", "program")
        else:
            continue
        if hit:
            lines.append(node.lineno)
    return sorted(set(lines))


def starts_in_c(source: str) -> list[int]:
    without = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), source, flags=re.DOTALL)
    return [n for n, line in enumerate(without.splitlines(), 1) if IN_C.search(line.partition("//")[0])]


def product_sources() -> list[Path]:
    found = (path for package in PRODUCT for path in (ROOT / package).rglob("*") if path.suffix in (".py", ".c", ".h"))
    return sorted(path for path in found if not path.name.startswith("_native"))


@pytest.mark.parametrize("path", product_sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_git_is_started_in_one_place(path: Path) -> None:
    inside = str(path.relative_to(ROOT))
    find = starts_of_git if path.suffix == ".py" else starts_in_c
    lines = find(path.read_text())
    if inside in ALLOWED:
        assert lines, f"{inside} no longer starts git ({ALLOWED[inside]}): take it off the list"
        return
    assert not lines, f"{inside} starts git itself on line {lines[0]}: call cli.githard.run"


@pytest.mark.parametrize(
    "added",
    [
        "import subprocess\nsubprocess.run(['git', 'status'])",
        "import subprocess\nsubprocess.run(('git', 'status'), check=True)",
        "import subprocess\nsubprocess.check_output('git status', shell=True)",
        "import subprocess\nsubprocess.Popen(f'cd {x}; git log', shell=True)",
        "import subprocess as s\ns.Popen(['/usr/bin/git', *arguments])",
        "from subprocess import run\nrun([b'git', b'diff'])",
        "import subprocess\nGIT = 'git'\nsubprocess.run([GIT, 'status'])",
        "import subprocess\nsubprocess.run(['x'], executable='/usr/bin/git')",
        "import os\nos.system('git gc')",
        "import os\nos.execvp('git', argv)",
        "import os\nos.posix_spawn('/usr/bin/git', argv, {})",
        "import shutil\npath = shutil.which('git')",
        "import asyncio\nasyncio.create_subprocess_exec('git', 'status')",
        "import anyio\nanyio.run_process(['git', 'fetch'])",
        "argv = ['git'] + rest",
        "argv = ['git-upload-pack', path]",
        "import git\ngit.Repo('.')",
        "from dulwich.repo import Repo",
        "import pygit2",
        "from cli.githard import _start",
        "from cli import githard\ngithard._start(place)",
        "from cli import githard\nargv = [githard.binary(), 'status']",
    ],
)
def test_a_mutated_copy_is_caught(added: str) -> None:
    """The scan proves itself: real sources of ours are clean, and with one line more they are not."""
    for original in ("cli/bringback.py", "cli/repository.py"):
        source = (ROOT / original).read_text()
        assert starts_of_git(source) == []
        assert starts_of_git(f"{source}\n{added}\n"), added


@pytest.mark.parametrize(
    "line", ['execl("/usr/bin/git", "git", "status", NULL);', 'system("git status");', 'char *argv[] = {"git", 0};']
)
def test_a_mutated_copy_in_c_is_caught(line: str) -> None:
    source = 'int main(void) { /* "git" */\n  return 0; }\n'
    assert starts_in_c(source) == []
    assert starts_in_c(source.replace("return", f"{line} return")) == [2]


@pytest.mark.parametrize(
    "harmless",
    [
        "print('git merge refs/sandbox/demo')",
        "message = f'review with: git log {ref}'",
        "packages = ['ca-certificates', 'git', 'python3']",
        "packages = ('git', 'libc6')",
        "def facts():\n    yield 'git', str(version)",
        "mount = '/run/git'",
        "from cli import githard\ngithard.run(place, 'status')",
        "raise ValueError('git is missing')",
    ],
)
def test_talking_about_git_is_not_starting_it(harmless: str) -> None:
    assert starts_of_git(harmless) == []
