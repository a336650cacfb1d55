"""Whose name a commit of the person's bears, found as git finds it (git-commit-tree(1), "Commit Information").

In: a repository and the environment. Out: the variables that tell git, or an error with the remedy. Names and addresses
are texts, also where the repository's own settings give them: they start nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from cli import githard
from cli.githard import Place
from sandboxd.errors import SandboxError

PARTS = {"NAME": "user.name", "EMAIL": "user.email"}


def of(place: Place, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment first, then the repository's settings, then the person's."""
    found: dict[str, str] = {}
    for part, key in PARTS.items():
        said = _setting(place, key) or (environ.get("EMAIL", "") if part == "EMAIL" else "")
        for role in ("AUTHOR", "COMMITTER"):
            found[f"GIT_{role}_{part}"] = environ.get(f"GIT_{role}_{part}") or said
    if "" in found.values():
        raise SandboxError(
            "git does not know who you are: git config --global user.name NAME, and user.email ADDRESS"
        )
    return found


def _setting(place: Place, key: str) -> str:
    inside = place.git_dir != githard.NOWHERE.git_dir
    own = githard.run(place, "config", "-z", "--get", key, accept=(0, 1)).stdout if inside else b""
    said = [os.fsdecode(own.removesuffix(b"\0")), *reversed(githard.persons(key))]
    return next((one for one in said if one.strip()), "")
