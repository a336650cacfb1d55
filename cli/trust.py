"""What a repository's own settings may do to the person who runs something in it: tighten, and nothing else.

In: a project's file as a tree, and the settings in force without it. Out: nothing, or an error that lists every
key that would loosen, or choose for the person, with the three ways to have it all the same. A key without a rule is
refused.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cli import profile
from cli.config import Config
from cli.network import MODES
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

Rule = Callable[[Any, Config, str], bool]


def _never(value: Any, config: Config, wish: str) -> bool:
    return False


def _always(value: Any, config: Config, wish: str) -> bool:
    return True


def _mode(value: Any, config: Config, wish: str) -> bool:
    """No weaker than what is in force. A word that is no mode loosens nothing and is a fault of its own."""
    strength = {"open": 0, "allowlist": 1, None: 1, "none": 2}
    asked = MODES.get(value) if isinstance(value, str) else None
    return asked is None or strength[asked] >= strength[config.mode]


def _profile(value: Any, config: Config, wish: str) -> bool:
    ranks = list(profile.PROFILES)
    return value not in ranks or ranks.index(value) >= ranks.index(wish)


def _false(setting: str) -> Rule:
    return lambda value, config, wish: value is not True or getattr(config, setting) is not False


# Every key that is read, by what a project may do with it; tests/cli/test_config.py holds it to be complete.
LIVE: Mapping[str, Rule] = {
    "image": _never,
    "env": _never,
    "env_allow": _never,
    "network.mode": _mode,
    "network.allow": _never,
    "network.allow_tcp": _never,
    "network.deny": _always,  # only ever adds
    "network.baseline": _false("baseline"),
    "secrets": _never,
    "routing": _never,
    "providers": _never,
    "mirror": _never,
    "profile": _profile,
    "persist_auth": _false("persist_auth"),
}
# Keys of old that would have loosened. The others of that kind are named as what they are: not read.
DEAD = ("cache.paths", "home", "mounts", "ports", "security", "snapshot", "user", "workdir")


def check(path: Path, tree: Mapping[str, Any], config: Config, wish: str) -> None:
    """Raises for a project's `tree` that says more.

    `config` is in force without the project; `wish` is the profile the person chose by a file, or the default.
    """
    refused = []
    for key in (*LIVE, *DEAD):
        said, value = _at(tree, key)
        if said and not LIVE.get(key, _never)(value, config, wish):
            refused.append(key)
    if refused:
        file = clean(str(path))
        raise SandboxError(
            f"{file}: a project may only tighten a run; refused: {', '.join(sorted(refused))}. To have them all the "
            f"same, put them into your own config.yaml, use flags, or trust the file with --config {shlex.quote(file)}"
        )


def _at(tree: Mapping[str, Any], key: str) -> tuple[bool, Any]:
    """Whether something stands at a key, and what."""
    value: Any = tree
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, value
