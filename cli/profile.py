"""Profiles: what a run starts from, and what the run as it will be must keep to.

`dev` is for one's own machine; `prod` is a promise that is checked once every file and flag is folded in: only hosts
that were named can be reached, or none, and no login is kept. What a server permits stays the server's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

if TYPE_CHECKING:
    from cli.network import Wanted

DEFAULT = "dev"


class Profile(NamedTuple):
    """The lowest layer of settings: each is what holds where no file and no flag says otherwise."""

    name: str
    mode: str | None
    baseline: bool
    persist_auth: bool


# From the weakest to the strictest.
PROFILES = {
    each.name: each
    for each in (
        Profile("dev", mode=None, baseline=True, persist_auth=True),
        Profile("prod", mode="allowlist", baseline=False, persist_auth=False),
    )
}


def named(name: str, where: str) -> Profile:
    """Raises with the names there are; `where` is the flag or key that said it."""
    if name not in PROFILES:
        raise SandboxError(f"{where} {clean(name)}: it is {' or '.join(PROFILES)}")
    return PROFILES[name]


def stronger(wish: str, demand: object) -> str:
    """A project's demand may raise the person's choice. One that nobody knows here raises nothing."""
    ranks = list(PROFILES)
    return demand if isinstance(demand, str) and demand in ranks[ranks.index(wish) :] else wish


def check(name: str, wanted: Wanted, persist_auth: bool, origin: Mapping[str, str]) -> None:
    """Raises with everything in the run that `prod` does not permit. `origin` names files by setting."""
    if name != "prod":
        return

    def by(setting: str) -> str:
        return f" (from {clean(origin[setting])})" if setting in origin else ""

    faults = []
    if wanted.mode not in ("allowlist", "none"):
        faults.append(f"network {wanted.mode}{by('mode')}: use --network allowlist or --network none")
    if wanted.mode == "allowlist" and wanted.baseline:
        faults.append(f"the server's own names{by('baseline')}: add --no-baseline and name hosts with --allow")
    elif wanted.mode == "allowlist" and not wanted.allow and not wanted.allow_tcp:
        faults.append("an allowlist that names no host: name those it needs with --allow, or use --network none")
    if persist_auth:
        faults.append(f"keeping logins{by('persist_auth')}: add --no-persist-auth")
    if faults:
        raise SandboxError(f"profile {name}{by('profile')} does not permit {'; nor '.join(faults)}")
