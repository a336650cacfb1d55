"""The person's settings and the project's, and which of them are in force.

In: the environment, where the run starts, --config and --profile. Out: a `Config`, or an error that lists everything
that is wrong with a file. What is said later wins: the profile's own settings, the person's config.yaml, then either
the file named with --config or the project's .sandbox.yaml; flags come on top of that elsewhere. A project's file is
whatever the repository's authors wrote: it may only tighten (`cli.trust`). Each file is opened once and read once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli import place, profile
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

if TYPE_CHECKING:
    from cli.config_file import Layer

PROJECT_FILE = ".sandbox.yaml"
USER_FILE = "config.yaml"


@dataclass(frozen=True, slots=True)
class Secret:
    """Where a value comes from: exactly one of a host file, a command of the host, a variable of the host.

    `hosts` are the names it is meant for; empty where none were said.
    """

    name: str
    source: str  # "file", "command" or "env"
    value: str  # the path, the command line or the variable's name; never the secret itself
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Config:
    """The settings in force once all files are read; flags come on top.

    `mode` is none, allowlist, open or None where nothing says; `mirror` is the raw mapping, which cli.mirror reads.
    `origin` names, by field, the file that said it, and `notes` are for the person: neither is a setting.
    """

    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    env_allow: tuple[str, ...] = ()
    mode: str | None = None
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    allow_tcp: tuple[str, ...] = ()
    baseline: bool | None = None
    secrets: tuple[Secret, ...] = ()
    routing: tuple[str, ...] = ()
    providers: Mapping[str, str] = field(default_factory=dict)
    mirror: Mapping[str, object] = field(default_factory=dict)
    profile: str = profile.DEFAULT
    persist_auth: bool | None = None
    origin: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def directory(project: str | None) -> Path:
    """The one that --project names, else the current one. A shell leaves the ~ of `--project=~/x` to us."""
    return Path(os.path.expanduser(project or "."))


def load(environ: Mapping[str, str], start: Path, file: str | None = None, asked_profile: str | None = None) -> Config:
    """The settings for a run that is started in `start`; `file` is --config's, `asked_profile` --profile's."""
    if asked_profile is not None:
        profile.named(asked_profile, "--profile")
    start = _there(start)
    trusted = [_layer(path) for path in (_user(environ), _named(file)) if path is not None]
    wish = next((each.said["profile"] for each in reversed(trusted) if "profile" in each.said), profile.DEFAULT)
    found = None if file is not None else discover(start, Path(place.home(environ)))
    project = _project(found) if found else {}
    notes = _misnamed(found, start) if file is None else ()

    chosen = asked_profile or profile.stronger(wish, project.get("profile"))
    base = profile.PROFILES[chosen]
    config = Config(mode=base.mode, baseline=base.baseline, persist_auth=base.persist_auth, notes=notes)
    for each in trusted:
        config = _over(config, each)
    if found:
        from cli import config_file, trust

        trust.check(found, project, config, wish)
        config = _over(config, config_file.layer(found, project, trusted=False))
    return replace(config, profile=chosen)


def discover(start: Path, home: Path) -> Path | None:
    """The project's file nearest to `start`.

    Looked for upwards to the repository's top; outside one, to the home directory where `start` is inside it, and
    else in `start` alone: what somebody left in /tmp or / is nobody's project.
    """
    here = _there(start)
    above = [here, *here.parents]
    home = _there(home)
    top = next((each for each in above if os.path.lexists(each / ".git")), home if home in above else here)
    for each in above[: above.index(top) + 1]:
        if os.path.lexists(each / PROJECT_FILE):
            return each / PROJECT_FILE
    return None


def _there(start: Path) -> Path:
    """With its links followed. A working directory may be gone, and a link may lead to itself."""
    try:
        return start.resolve()
    except FileNotFoundError:
        raise SandboxError(f"{clean(str(start))}: this directory is gone: change to one that is there") from None
    except (OSError, RuntimeError):
        raise SandboxError(f"{clean(str(start))}: its links lead nowhere") from None


def user_file(environ: Mapping[str, str]) -> Path:
    """Where the person's own settings are."""
    return Path(place.config_dir(environ)) / USER_FILE


def _user(environ: Mapping[str, str]) -> Path | None:
    path = user_file(environ)
    return path if os.path.lexists(path) else None


def _named(file: str | None) -> Path | None:
    """A file that was asked for must be there."""
    if file is None:
        return None
    if not file:
        raise SandboxError("--config: its value is empty; name a file, or leave the flag out")
    path = Path(os.path.expanduser(file)).absolute()
    if not os.path.lexists(path):
        other = path.with_suffix(".yml" if path.suffix == ".yaml" else ".yaml")
        hint = f"; there is {clean(str(other))}" if other.exists() else ""
        raise SandboxError(f"--config {clean(file)}: no such file{hint}")
    return path


def _layer(path: Path) -> Layer:
    # It brings a YAML reader with it, which a run without any file need not wait for.
    from cli import config_file

    return config_file.layer(path, config_file.tree(path, trusted=True), trusted=True)


def _project(path: Path) -> Mapping[str, Any]:
    from cli import config_file

    return config_file.tree(path, trusted=False)


def _misnamed(found: Path | None, start: Path) -> tuple[str, ...]:
    """A demand that is not read because of its name would be missed in silence."""
    other = start / ".sandbox.yml"
    if found is None and os.path.lexists(other):
        return (f"{other} is not read: a project's settings are called {PROJECT_FILE}",)
    return ()


def _over(config: Config, layer: Layer) -> Config:
    """What `layer` says replaces what is there, but: maps are joined by name, and a denied name stays denied."""
    said: dict[str, Any] = dict(layer.said)
    named = {*said.get("env", ()), *said.get("env_allow", ()), *(one.name for one in said.get("secrets", ()))}
    # A name has one source: the one that was said last.
    env = {name: value for name, value in config.env.items() if name not in named}
    secrets = [one for one in config.secrets if one.name not in named]
    merged = {
        "env": env | said.pop("env", {}),
        "env_allow": said.pop("env_allow", tuple(name for name in config.env_allow if name not in named)),
        "secrets": tuple(sorted([*secrets, *said.pop("secrets", ())], key=lambda one: one.name)),
        "providers": {**config.providers, **said.pop("providers", {})},
        "deny": tuple(dict.fromkeys((*config.deny, *said.pop("deny", ())))),
        "notes": (*config.notes, *layer.notes),
        "origin": {**config.origin, **dict.fromkeys(layer.said, str(layer.path))},
    }
    said.pop("profile", None)
    return replace(config, **merged, **said)
