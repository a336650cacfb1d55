"""The person's settings and the project's, and who may say what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


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

    `mode` is none, allowlist, open or None where no file says; `mirror` is the raw mapping, which cli.mirror
    reads.
    """

    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    env_allow: tuple[str, ...] = ()
    mode: str | None = None
    allow: tuple[str, ...] = ()
    baseline: bool | None = None
    secrets: tuple[Secret, ...] = ()
    routing: tuple[str, ...] = ()
    providers: Mapping[str, str] = field(default_factory=dict)
    mirror: Mapping[str, object] = field(default_factory=dict)
    profile: str | None = None
    persist_auth: bool | None = None


def directory(project: str | None) -> Path:
    """Where a project's settings are looked for from."""
    return Path(project) if project else Path(".")


def load(environ: Mapping[str, str], start: Path) -> Config:
    """The settings for a run that is started in `start`."""
    del environ, start
    return Config()
