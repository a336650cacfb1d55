"""What a changed file says to run, for those files whose name alone does not tell: a link, a list of scripts.

In: contents before and after, None where there is no such file. Out: reasons, none where nothing changed that anyone
acts on. Contents are a guest's word: sizes are bounded by the caller, nothing is followed or resolved on disk, and a
file that cannot be read is itself a reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from cli import githard, show
from cli.executed import folded
from cli.githard import GitError
from sandboxd.termsafe import clean

NAMED = 5
SHOWN = 120
# Keys of package.json (npm's own page of it) that no program acts on.
IDLE_KEYS = frozenset({
    "name", "version", "description", "keywords", "author", "contributors", "maintainers", "license", "licenses",
    "homepage", "bugs", "repository", "funding", "files", "private", "engines", "os", "cpu", "main", "module", "types",
    "typings", "exports", "imports", "type", "sideEffects", "browserslist", "man", "directories", "publishConfig",
    "$schema", "readme",
})  # fmt: skip
DRIVER = re.compile(r"(?:^|\s)((filter|diff|merge)=(\S+))")
# gitattributes(5): git itself is these, so there is rarely a program set up for one. A filter is always a program.
BUILT_IN = {
    "diff": frozenset({
        "ada", "bash", "bibtex", "cpp", "csharp", "css", "default", "dts", "elixir", "fortran", "fountain", "golang",
        "html", "ini", "java", "kotlin", "markdown", "matlab", "objc", "pascal", "perl", "php", "python", "r", "ruby",
        "rust", "scheme", "tex",
    }),
    "merge": frozenset({"text", "binary", "union"}),
}  # fmt: skip
GIT_DIR = re.compile(r"\.git|git~[0-9]")


def package_json(old: bytes | None, new: bytes) -> list[str]:
    """npm runs `scripts`; other keys tell it or another tool what to install or to load."""
    after = _object(new)
    if after is None:
        return ["npm runs its scripts, and it cannot be read to see which"]
    before = _object(old) if old is not None else {}
    if before is None:
        before = {}
    scripts = _changed(before.get("scripts"), after.get("scripts"))
    keys = [key for key in _changed(before, after) if key != "scripts" and key not in IDLE_KEYS]
    reasons = []
    if scripts:
        reasons.append(f"npm runs its scripts: {some(scripts)}")
    if keys:
        reasons.append(f"npm or another tool obeys it: {some(keys)}")
    return reasons


def attributes(old: bytes | None, new: bytes) -> list[str]:
    """.gitattributes names drivers; which program a driver is, a setting says."""
    added = _lines(new) - _lines(old or b"")
    names = {
        found[1] for line in added for found in DRIVER.finditer(line) if found[3] not in BUILT_IN.get(found[2], ())
    }
    return [f"git runs the program that is set up for {some(sorted(names))}"] if names else []


def gitmodules(old: bytes | None, new: bytes) -> list[str]:
    """Where submodules come from, and how they are updated."""
    try:
        after = dict(githard.settings(new))
    except GitError as error:
        return [f"git cannot read it: {error.why}"]
    try:
        before = dict(githard.settings(old or b""))
    except GitError:
        before = {}
    reasons = []
    for name, value in after.items():
        if value == before.get(name):
            continue
        submodule, _, key = name.removeprefix("submodule.").rpartition(".")
        if key == "url":
            reasons.append(f"submodule {cut(submodule)} comes from {cut(value)}")
        elif key == "update":
            reasons.append(f"submodule {cut(submodule)} is updated by {cut(value)}")
    return reasons


def link(path: str, target: bytes | None) -> list[str]:
    """Where a symbolic link leads, judged without a file system.

    A target of the form `(../)*name/name` that stays below the top leads to a place in the tree whatever other links
    do, as long as they are of that form too; so any other form counts as one that leaves.
    """
    if target is None:
        return ["a link whose target is too long to look at"]
    text = target.decode("utf-8", "surrogateescape")
    if text.startswith("/") or re.match(r"[A-Za-z]:|\\", text):
        return [f"a link to {cut(text)}, outside the repository"]
    depth = path.count("/")
    below = False
    for part in text.replace("\\", "/").split("/"):
        if part in ("", "."):
            continue
        if part == "..":
            depth -= 1
            if below or depth < 0:
                return [f"a link to {cut(text)}, outside the repository"]
        else:
            below = True
            if GIT_DIR.fullmatch(folded(part)):
                return [f"a link to {cut(text)}, where git keeps its own files"]
    return []


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _changed(before: object, after: object) -> list[str]:
    """The keys of `after` whose values `before` has not."""
    if not isinstance(after, dict):
        return []
    known = before if isinstance(before, dict) else {}
    return [str(key) for key, value in after.items() if key not in known or known[key] != value]


def _lines(text: bytes) -> set[str]:
    return set(text.decode("utf-8", "replace").splitlines())


def some(names: Iterable[str]) -> str:
    """The first few names, each fit for a line."""
    return show.some([cut(name) for name in names], NAMED)


def cut(text: str) -> str:
    """Foreign text fit for a line, and not too long for it."""
    text = clean(text)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
