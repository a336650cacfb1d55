"""What this daemon permits, and a request measured against it. Pure: values in, values or an error out.

`resolve` is the one place where a create is checked, in the order the API promises; `network` the one place
where a network policy is decided. A request is permitted as it stands or refused with the rule it broke,
never adjusted. What is allowed already is narrowed, by `narrowed` alone, when the operator's policy has become
stricter. Messages name names, never an environment's value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from egress import policy as egress
from sandboxd import fields, wire
from sandboxd.assets import reference
from sandboxd.errors import InvalidRequest, Refused, Unsupported
from sandboxd.store import Bind, Mount, Network
from sandboxd.wire import BindRequest, CreateRequest, NetworkRequest

DEFAULT_IMAGE = "sandbox-base"

CAPABILITIES = (
    "network_policy_update", "suspend", "memory_snapshot", "disk_snapshot", "egress_allowlist", "egress_open",
    "egress_tcp", "tunnel", "volumes", "metrics", "audit", "images", "workspace_bundle", "bind_workspace",
)  # fmt: skip
EGRESS = frozenset({"network_policy_update", "egress_allowlist", "egress_open", "egress_tcp"})
"""What a daemon has that can give a sandbox a network."""
WEB_PORT = 443
MODES = wire.MODES
BASELINE = (
    "api.anthropic.com", "api.openai.com", "codeload.github.com", "github.com", "objects.githubusercontent.com",
    "raw.githubusercontent.com",
)  # fmt: skip
"""Beside the registries that the host is configured to use."""

MIN_MEMORY_MB = 128
"""The guest's kernel and agent do not start in less."""
MIN_DISK_MB = 64
CENTURY_S = 100 * 365 * 86400
"""Where nothing else bounds a time: its end can still be written as a date."""


@dataclass(frozen=True, slots=True)
class Limits:
    max_cpus: int = 8
    max_memory_mb: int = 16384
    max_disk_mb: int = 102400
    max_idle_timeout_secs: int = 604800
    min_snapshot_every_secs: int = 300
    max_snapshot_keep: int = 5
    max_lifetime_secs: int = 0
    """0: no limit."""
    disk_mb_per_s: int | None = None
    """What each drive of a sandbox may carry, reads and writes together, in MiB; None: no limit."""
    disk_ops_per_s: int | None = None


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many machines of an image (empty: of the default one) wait for a create that wants the default size and
    network."""

    image: str
    size: int


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's decisions. The defaults of the network part are those of a daemon that has none to give.

    `may_allow_tcp` holds `*` or `HOST:PORT`; names covered by `private` may have addresses that are not public.
    """

    limits: Limits = field(default_factory=Limits)
    cpus: float = 1
    memory_mb: int = 1024
    disk_mb: int = 10240
    idle_timeout_secs: int = 1800
    default_image: str = DEFAULT_IMAGE
    images: tuple[str, ...] | None = None
    """The only ones that are permitted; None: any."""
    ceiling: str = "none"
    default_network: Network = field(default_factory=lambda: Network("none"))
    may_allow: tuple[str, ...] = ()
    may_allow_tcp: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    registries: tuple[str, ...] = ()
    """Those of the host's configuration, for whoever installs something and is to reach nothing else; what a request
    may have of them is decided like every other name."""
    registries_tcp: tuple[str, ...] = ()
    pools: tuple[PoolSize, ...] = ()
    allow_bind: bool = False
    """Whether directories of this host may be shared; they are where the capability is there, too."""
    capabilities: frozenset[str] = frozenset({"workspace_bundle", "tunnel", "metrics", "volumes"})
    lacking: Mapping[str, str] = field(default_factory=dict)
    """Why capabilities are not there, for whoever asks."""


def built_in(registries: Collection[str], services: Collection[str] = ()) -> Policy:
    """The policy of an operator who wrote none, on a host that uses these registries, some on a port of their own.
    They may be mirrors of the operator's own, so their addresses need not be public."""
    allow = tuple(sorted({*BASELINE, *registries}))
    return Policy(
        ceiling="allowlist", default_network=Network("allowlist", allow, (), tuple(sorted(services))),
        may_allow=("*",), may_allow_tcp=("*",), private=tuple(sorted(registries)),
        registries=tuple(sorted(registries)), registries_tcp=tuple(sorted(services)),
    )  # fmt: skip


def with_network(policy: Policy) -> Policy:
    return replace(policy, capabilities=policy.capabilities | EGRESS)


def with_images(policy: Policy) -> Policy:
    return replace(policy, capabilities=policy.capabilities | {"images"})


def with_cpus(policy: Policy, most: int) -> Policy:
    """No more processors for a sandbox than a machine can have here."""
    limits = replace(policy.limits, max_cpus=min(policy.limits.max_cpus, most))
    return replace(policy, limits=limits, cpus=min(policy.cpus, most))


def with_bind(policy: Policy) -> Policy:
    return replace(policy, capabilities=policy.capabilities | {"bind_workspace"})


def without(policy: Policy, capability: str, why: str) -> Policy:
    return replace(policy, lacking={**policy.lacking, capability: why})


def without_network(policy: Policy) -> Policy:
    """What is left of it where no sandbox can have a network."""
    return replace(
        policy, ceiling="none", default_network=Network("none"), may_allow=(), may_allow_tcp=(), private=(),
        registries=(), registries_tcp=(),
    )  # fmt: skip


def require(capability: str, policy: Policy) -> None:
    """Of what a server may be without. `Unsupported` where this one is."""
    if capability not in policy.capabilities:
        raise Unsupported(f"this endpoint does not have the capability {capability}")


def differences(asked: Policy, left: Policy) -> list[str]:
    """What a policy loses here, in words: a line for each key of the network part and of processors."""
    lost = []
    for key, had, has in (
        ("limits.max_cpus", f"{asked.limits.max_cpus}", f"{left.limits.max_cpus}"),
        ("defaults.cpus", f"{asked.cpus:g}", f"{left.cpus:g}"),
        ("network.ceiling", asked.ceiling, left.ceiling),
        ("network.default.mode", asked.default_network.mode, left.default_network.mode),
        ("network.may_allow", len(asked.may_allow), len(left.may_allow)),
        ("network.may_allow_tcp", len(asked.may_allow_tcp), len(left.may_allow_tcp)),
        ("network.private", len(asked.private), len(left.private)),
    ):
        if had != has:
            lost.append(f"{key} is {has} instead of {had}" if isinstance(had, str) else f"{key} has no effect")
    return lost


@dataclass(frozen=True, slots=True)
class Spec:
    """A create as it will be done. `env` holds values: it is handed to the guest and then forgotten."""

    name: str
    image: str
    cpus: float
    memory_mb: int
    disk_mb: int
    idle_timeout_secs: int
    lifetime_secs: int
    labels: dict[str, str]
    network: Network
    env: dict[str, str] = field(repr=False)
    volumes: tuple[Mount, ...] = ()
    bind: Bind | None = None


def resolve(request: CreateRequest, policy: Policy, *, local: bool = False) -> Spec:
    """Checks in the order of API §3.2, steps 2 to 11. `local` is a request that came over a unix socket."""
    limits = policy.limits
    if request.snapshot_id:
        raise Unsupported("this endpoint has no snapshots")
    name = fields.sandbox_name(request.name) if request.name else ""
    labels = fields.check_labels(request.labels or {})
    image = check_image(request.image or policy.default_image, policy)
    cpus = request.cpus or policy.cpus
    if not math.isfinite(cpus) or cpus < 0 or cpus > limits.max_cpus:
        raise InvalidRequest(f"cpus must be between 0 and {limits.max_cpus}")
    memory_mb = request.memory_mb or policy.memory_mb
    _within("memory_mb", memory_mb, MIN_MEMORY_MB, limits.max_memory_mb)
    disk_mb = request.disk_mb or policy.disk_mb
    _within("disk_mb", disk_mb, MIN_DISK_MB, limits.max_disk_mb)
    # The operator's default may be never, where a request may not ask for that.
    given = request.idle_timeout_secs
    idle = idle_timeout(given, limits) if given else policy.idle_timeout_secs
    lifetime = request.lifetime_secs or limits.max_lifetime_secs
    longest = limits.max_lifetime_secs or CENTURY_S
    if not 0 <= lifetime <= longest:
        raise InvalidRequest(f"lifetime_secs must be between 0 and {longest}")
    env = fields.check_env(request.env or {})
    decided = network(request.network, policy)
    bind = None if request.bind is None else _bind(request.bind, policy, local)
    if request.snapshot_every_secs or request.snapshot_keep:
        raise Unsupported("this endpoint has no snapshots")
    volumes = fields.mounts(request.volumes or ())
    return Spec(name, image, cpus, memory_mb, disk_mb, idle, lifetime, labels, decided, env, volumes, bind)


def _bind(asked: BindRequest, policy: Policy, local: bool) -> Bind:
    """Whoever may not have any is told so before the path is looked at."""
    if "bind_workspace" not in policy.capabilities:
        raise Refused("the server's policy does not allow bind")
    if not local:
        raise Refused("bind is for this machine's own people: over its unix socket, not over the network")
    return Bind(fields.host_path("bind.host_path", asked.host_path or ""), bool(asked.read_only))


def image_name(image: str) -> str:
    """Ours, or a reference to a registry's."""
    if not fields.IMAGE.match(image):
        raise InvalidRequest("image is not a valid reference")
    if image != DEFAULT_IMAGE:
        reference.parse(image)
    return image


def check_image(image: str, policy: Policy) -> str:
    image_name(image)
    if policy.images is not None and image not in policy.images:
        raise Refused("the server's policy does not permit this image (images in its policy)")
    if image != DEFAULT_IMAGE and "images" not in policy.capabilities:
        raise Unsupported(f"this endpoint does not have the capability images: the only image here is {DEFAULT_IMAGE}")
    return image


def network(request: NetworkRequest | None, policy: Policy) -> Network:
    """API §4. `InvalidRequest` where it is malformed, `Refused` where a rule forbids it."""
    default = policy.default_network
    if request is None:
        return default
    mode = default.mode if request.mode is None else request.mode
    if mode not in MODES:
        raise InvalidRequest(f"network.mode must be one of {', '.join(MODES)}")
    allow = None if request.allow is None else fields.hosts("network.allow", request.allow)
    allow_tcp = None if request.allow_tcp is None else fields.services("network.allow_tcp", request.allow_tcp)
    # The server's own refusals stay: a request may add to them.
    deny = tuple(sorted({*default.deny, *fields.hosts("network.deny", request.deny or ())}))
    for name, given in (("allow", allow), ("allow_tcp", allow_tcp)):
        if mode != "allowlist" and given:
            raise InvalidRequest(f"network.{name} has no meaning with mode {mode}")
    if MODES.index(mode) > MODES.index(policy.ceiling):
        raise Refused(f"network mode {mode} is above this server's ceiling, {policy.ceiling}")
    if mode == "none":
        return Network("none")
    if mode == "open":
        return Network("open", None, deny)
    if allow_tcp is None:
        # Whoever gives a list and knows of no other ports means that list and nothing beside it.
        allow_tcp = default.allow_tcp if allow is None else ()
    allow = (default.allow or ()) if allow is None else allow
    for host in allow:
        if not _any(egress.covers, _offered(policy), host):
            raise Refused(
                f"network.allow: {host} is neither on this server's default list nor among the names it may allow "
                "(network.may_allow in its policy)"
            )
    for service in allow_tcp:
        if not _any(covers_service, _offered_tcp(policy), service):
            raise Refused(
                f"network.allow_tcp: {service} is neither on this server's default list nor among what it may allow "
                "(network.may_allow_tcp in its policy)"
            )
    if not allow and not allow_tcp:
        raise Refused("network.allow: an allowlist that names nothing is refused; ask for mode none")
    return Network("allowlist", allow, deny, allow_tcp)


def narrowed(network: Network, policy: Policy) -> Network:
    """What is left of a sandbox's network under a policy that it was not made under: what both allow, else none."""
    default = policy.default_network
    if network.mode == "none" or policy.ceiling == "none":
        return Network("none")
    deny = tuple(sorted({*network.deny, *default.deny}))
    if network.mode == "open":
        if policy.ceiling == "open":
            return Network("open", None, deny)
        allow, allow_tcp = default.allow or (), default.allow_tcp
    else:
        allow = _both(egress.covers, network.allow or (), _offered(policy))
        allow_tcp = _both(covers_service, network.allow_tcp, _offered_tcp(policy))
    return Network("allowlist", allow, deny, allow_tcp) if allow or allow_tcp else Network("none")


def enforced(network: Network, policy: Policy) -> egress.Policy:
    """A sandbox's network as egress is told of it."""
    return egress.Policy(
        egress.Mode(network.mode), network.allow or (), network.deny, network.allow_tcp, policy.private
    )


def remedy(rule: str, by: str, name: str, port: int, policy: Policy) -> tuple[str, str]:
    """The command line's flag that would allow what was refused, or else none and why there is none."""
    # A query for a name has no port; what it leads to is nearly always the web.
    port = WEB_PORT if by == egress.By.DNS.value else port
    flag = egress.remedy(rule, name, port)
    if not flag:
        return "", NO_REMEDY.get(rule, "")
    if flag.startswith("--allow-tcp "):
        offered = _any(covers_service, _offered_tcp(policy), f"{name}:{port}")
    else:
        offered = _any(egress.covers, _offered(policy), name)
    return (flag, "") if offered else ("", "This server's policy does not let a sandbox be allowed this.")


NO_REMEDY = {
    "deny-list": "A name on the deny list is refused whatever else is allowed.",
    "no-name": "Only what says which name it wants can be allowed.",
    "address": "An address cannot be allowed, only a name.",
    "mode-none": "A sandbox made without a network cannot be given one; start another.",
    "not-redirected": "Nothing in a sandbox may talk to the proxy itself.",
    "names-disagree": "A request must name one host, the same everywhere.",
    "malformed": "What was sent cannot be read in one way only.",
    "private-address": (
        "Only the operator can let a name lead to addresses that are not public (network.private in the policy)."
    ),
    "unresolved": "The name is allowed, but the server found no address for it.",
    "unreachable": "The name is allowed, but none of its addresses could be reached.",
    "too-many-names": "A sandbox can use a limited number of names in its life; start another.",
    "too-many-refusals": "These refusals were too many to be told one by one.",
}
"""Why no flag helps, by the rule that refused."""


def covers_service(rule: str, service: str) -> bool:
    """Whether a rule permits a `HOST:PORT`, or a wildcard's no broader than itself."""
    if rule == "*":
        return True
    rule_host, _, rule_port = rule.rpartition(":")
    host, _, port = service.rpartition(":")
    return rule_port == port and egress.covers(rule_host, host)


def volume_size(size_mb: int | None, policy: Policy) -> int:
    """MiB; that of a sandbox's disk where none is given."""
    size = policy.disk_mb if size_mb is None else size_mb
    if not 1 <= size <= policy.limits.max_disk_mb:
        raise InvalidRequest(f"size_mb must be between 1 and {policy.limits.max_disk_mb}")
    return size


def idle_timeout(seconds: int, limits: Limits) -> int:
    least, most = (1, limits.max_idle_timeout_secs) if limits.max_idle_timeout_secs else (0, CENTURY_S)
    if not least <= seconds <= most:
        raise InvalidRequest(f"idle_timeout_secs must be between {least} and {most}")
    return seconds


def _offered(policy: Policy) -> tuple[str, ...]:
    return (*(policy.default_network.allow or ()), *policy.may_allow)


def _offered_tcp(policy: Policy) -> tuple[str, ...]:
    return (*policy.default_network.allow_tcp, *policy.may_allow_tcp)


def _any(covers: Callable[[str, str], bool], rules: Iterable[str], wanted: str) -> bool:
    return any(covers(rule, wanted) for rule in rules)


def _both(
    covers: Callable[[str, str], bool], allowed: tuple[str, ...], offered: tuple[str, ...]
) -> tuple[str, ...]:
    """What both lists cover: of two patterns that overlap, one covers the other."""
    kept: set[str] = set()
    for one in allowed:
        kept.update([one] if _any(covers, offered, one) else (other for other in offered if covers(one, other)))
    return tuple(sorted(kept))


def _within(field_name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequest(f"{field_name} must be between {least} and {most}, or 0 for the default")
