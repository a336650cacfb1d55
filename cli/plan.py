"""What a run is asked to be: flags, settings and environment folded into one value, checked as far as this side can.

In: docopt's arguments of `run` (an agent's run has the same ones), the settings in force, the environment. Out: a
`Plan`, a plain value from which the run follows, or an error in the flags' words. Nothing is asked of a server here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cli import bind, bucket, checkpoint, identity, network, profile, repository, secrets, snapshot, templates, volume
from cli.agents.table import Agent
from cli.bucket import Mirror
from cli.config import Config, Secret, directory
from cli.githard import NOBODY, NOWHERE, Place
from sandboxd.client import Create
from sandboxd.envnames import ENV_NAME, RESERVED_ENV
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

ZONE = re.compile(r"[A-Za-z0-9_+-]+(?:/[A-Za-z0-9_+-]+)*")


class Packed(NamedTuple):
    """A commit of the repository that was HEAD, and a descriptor of the bundle that was made of it."""

    commit: str
    descriptor: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A run as it was asked for, checked as far as this side can.

    `branch` is the name below refs/sandbox/ that its commits come back as; None for the sandbox's name, else its id.
    `hosts` are names that an allowlist gets beside what was asked for: those the agent cannot work without, and none
    where only names that were given are to be allowed.
    `secrets` are fetched when the sandbox is made; `persist_auth` says whether an agent's login may be kept; `notes`
    are for the person once the run really happens. `packed` goes into the sandbox instead of what HEAD is now.
    `checkpoint_every_s` is 0 for never, None where it was not said. `files` are put into the sandbox, by their paths
    there, before the command starts. `mirror` gets what comes back.
    """

    command: tuple[str, ...]
    create: Create
    network: network.Wanted
    project: Path | None
    workspace: bool
    bring_back: bool
    keep: bool
    detach: bool
    context: str | None
    json: bool
    unset: tuple[str, ...] = ()
    agent: Agent | None = None
    hosts: tuple[str, ...] = ()
    branch: str | None = None
    secrets: tuple[Secret, ...] = ()
    profile: str = profile.DEFAULT
    persist_auth: bool = True
    notes: tuple[str, ...] = ()
    packed: Packed | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    checkpoint_every_s: float | None = None
    mirror: Mirror | None = None
    limit_s: float | None = None

    @property
    def snapshots(self) -> bool:
        """Whether it needs a server that has them."""
        return self.create.snapshot_id is not None or self.create.snapshot_every_secs is not None


def of(
    args: Mapping[str, Any], settings: Config, environ: Mapping[str, str], zone: str | None, agent: Agent | None = None
) -> Plan:
    """From arguments to a plan; raises on what can be seen to be wrong from here."""
    # A variable of a shell that is not set: without this, `--bind "$DIR"` would share the current directory.
    if empty := next((flag for flag, value in args.items() if value == ""), None):
        raise SandboxError(f"{empty}: its value is empty; give one, or leave the flag out")
    given = environment(args["--env"], environ)
    checkpoint_every_s = checkpoint.every(args["--checkpoint-every"])
    if checkpoint_every_s and args["--detach"]:
        raise SandboxError(
            "--checkpoint-every: nobody would take them of a detached run; use attach --checkpoint-every"
        )
    unset = tuple(name for name in args["--env"] if "=" not in name and name not in environ)
    # An agent's own variables and the flags are the person's word of the moment, files are of some time before.
    given = (agent_environment(agent, environ) if agent else {}) | given
    wanted = network.over(network.wanted(args), _network(settings), settings.origin.get("mode", ""))
    persist_auth = settings.persist_auth is not False and not args["--no-persist-auth"]
    flagged = {"mode"} if args["--network"] else set()
    origin = {key: file for key, file in settings.origin.items() if key not in flagged}
    profile.check(settings.profile, wanted, persist_auth, origin)
    needed = tuple(one for one in settings.secrets if one.name not in given)
    secrets.check(needed, environ)
    size = templates.named(args["--template"]) if args["--template"] else None
    create = Create(
        name=args["--name"],
        image=args["--image"] or (None if args["--from-snapshot"] else settings.image),
        cpus=_number("--cpus", args["--cpus"], float) or (size and size.vcpus),
        memory_mb=_number("--memory", args["--memory"], int) or (size and size.memory_mb),
        disk_mb=_number("--disk", args["--disk"], int) or (size and size.disk_mb) or None,
        idle_timeout_secs=_number("--idle", args["--idle"], int),
        env={**_identity(args, environ)} | ({"TZ": zone} if zone else {}) | _from_files(settings, environ) | given,
        labels=_labels(args["--label"]) | ({"agent": agent.name} if agent else {}),
        volumes=volume.given(args["--volume"]),
        **snapshots(args),
        bind=bind.given(args, environ),
    )
    return Plan(
        command=tuple(args["CMD"]),
        create=create,
        network=wanted,
        project=directory(args["--project"]) if args["--project"] else None,
        workspace=not (args["--no-workspace"] or create.snapshot_id or create.bind),
        bring_back=not args["--no-bring-back"],
        keep=args["--keep"],
        detach=args["--detach"],
        context=args["--context"],
        json=args["--json"],
        unset=unset,
        agent=agent,
        hosts=agent.hosts if agent and wanted.baseline else (),
        secrets=needed,
        profile=settings.profile,
        persist_auth=persist_auth,
        mirror=bucket.said(settings, args["--config"]),
        notes=(*settings.notes, *_beaten(settings, given)),
        checkpoint_every_s=checkpoint_every_s,
    )


def snapshots(args: Mapping[str, Any]) -> dict[str, Any]:
    """Of a `Create`: what it starts from, and how often one is taken of it."""
    start, every, keep = args["--from-snapshot"], args["--snapshot-every"], args["--snapshot-keep"]
    if start and args["--project"]:
        raise SandboxError("--project: a snapshot has files of its own, and takes no repository")
    if keep and not every:
        raise SandboxError("--snapshot-keep goes with --snapshot-every")
    return {
        "snapshot_id": snapshot.check_id(start) if start else None,
        "snapshot_every_secs": snapshot.interval("--snapshot-every", every) if every else None,
        "snapshot_keep": snapshot.kept("--snapshot-keep", keep),
    }


def _from_files(settings: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that settings give or forward; their secrets are not fetched yet."""
    forwarded = {name: environ[name] for name in settings.env_allow if name in environ}
    return {**settings.env, **forwarded}


def _beaten(settings: Config, given: Mapping[str, str]) -> tuple[str, ...]:
    names = [one.name for one in settings.secrets if one.name in given]
    return tuple(f"secret {name} is not fetched: the run has {name} already" for name in names)


def _network(settings: Config) -> network.Wanted:
    return network.Wanted(
        mode=settings.mode, allow=settings.allow, deny=settings.deny, allow_tcp=settings.allow_tcp,
        baseline=settings.baseline is not False,
    )  # fmt: skip


def _identity(args: Mapping[str, Any], environ: Mapping[str, str]) -> Mapping[str, str]:
    """Whose name commits in the sandbox bear: nobody's, or with --git the person's as git has it here."""
    if not args["--git"]:
        return NOBODY
    found = repository.locate(directory(args["--project"]))
    return identity.of(Place(found.git_dir, found.top) if found else NOWHERE, environ)


def environment(given: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """`-e` values: K=V as it is, K with the value it has here, nothing for a K that is not set."""
    found: dict[str, str] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not ENV_NAME.fullmatch(name):
            raise SandboxError(f"-e {clean(name)}: not a variable's name")
        if name in RESERVED_ENV:
            raise SandboxError(f"-e {name}: the name is reserved; set it in the command: env {name}=... CMD")
        if equals:
            found[name] = value
        elif name in environ:
            found[name] = environ[name]
    return found


def agent_environment(agent: Agent, environ: Mapping[str, str]) -> dict[str, str]:
    """What an agent gets of the person's environment, and what it always gets."""
    return {name: environ[name] for name in agent.env if name in environ} | dict(agent.forced)


def _number(flag: str, text: str | None, kind: type[int] | type[float]) -> Any:
    if text is None:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e9:
        raise SandboxError(f"{flag} {clean(text)}: not a number above 0")
    return value


def _labels(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SandboxError(f"--label {clean(pair)}: it is KEY=VALUE")
        found[key] = value
    return found


def zone() -> str | None:
    """The name of this machine's time zone, where it has one."""
    try:
        _, found, name = os.readlink("/etc/localtime").partition("zoneinfo/")
    except OSError:
        return None
    return name if found and ZONE.fullmatch(name) else None
