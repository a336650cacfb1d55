"""What the daemon is put together from, by its flags, the operator's policy and what this host has.

In: settings, files of the operator's and of the host's. Out: the parts, made and not started yet, and `SetupError` with
what is missing. The stand-ins of tests come in through `Parts`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import anyio.to_thread

from egress import network
from egress.control import Event
from native import KvmAnswer, kvm_probe
from sandboxd import backends, bind, envnames, policy_file, registries
from sandboxd import policy as rules
from sandboxd.assets import apt, confined, oci, prepare
from sandboxd.assets.prepare import Assets, Report
from sandboxd.audit import Audit
from sandboxd.backends import Asked
from sandboxd.errors import ApiError, SetupError
from sandboxd.events import EventFile
from sandboxd.images import Images
from sandboxd.journal import Journal
from sandboxd.limits import Limits
from sandboxd.networks import Egress
from sandboxd.places import Places
from sandboxd.policy import Policy
from sandboxd.registries import Registries
from sandboxd.settings import Settings
from sandboxd.termsafe import clean
from sandboxd.uids import COUNT, image_uids, network_uids
from sandboxd.vm import kvm
from sandboxd.vm.commands import Accelerator, find_tools
from sandboxd.vm.machine import MAX_CPUS, Backend

log = logging.getLogger("sandboxd")


@dataclass(frozen=True, slots=True)
class Parts:
    """What the daemon is put together from: a backend, what it settles once the images are there (and says in one
    line), where images come from; what gives sandboxes a network, why none is given, and the host's registries; what
    clients may take of it; why no directory of this host can be shared, empty where one can; the most processors that a
    machine can have; and, once settled, what is known against the VMM's version, where the operator allowed it."""

    backend: Backend
    settle: Callable[[Assets, int | None], Awaitable[str]]
    prepare: Callable[[Path, Path, Report], Assets]
    egress: Callable[[Callable[[Event], None]], AbstractAsyncContextManager[Egress]]
    no_network: str
    registries: Callable[[], Registries]
    limits: Limits = field(default_factory=Limits)
    no_bind: Callable[[], str] = lambda: ""
    max_cpus: int = MAX_CPUS
    allowed: Callable[[], str] = lambda: ""


def parts(
    settings: Settings, probe: Callable[[], KvmAnswer] = kvm_probe, trial_s: float = kvm.TRIAL_S
) -> Parts:  # fmt: skip
    """`probe` asks whether KVM runs code, and `trial_s` is how long our kernel may take under it."""
    own = instance(settings.state_dir)
    uids = range(settings.uid_base, settings.uid_base + COUNT) if os.geteuid() == 0 else range(0)
    asked = Asked(
        settings.backend, settings.firecracker, settings.jailer, settings.allow_firecracker, settings.state_dir,
        settings.assets_dir, own,
    )  # fmt: skip
    vsock = settings.build_dir / "sandbox-vsock"
    backend = backends.choose(asked, lambda: find_tools(vsock, own, Accelerator.TCG), uids, probe, trial_s)

    def start_egress(on_event: Callable[[Event], None]) -> network.Egress:
        proxy_uids = network_uids(settings.uid_base)
        return network.Egress(settings.state_dir, own, proxy_uids, on_event, lambda line: log.info("%s", clean(line)))

    build = partial(prepare.prepare, own_kernel=settings.kernel)
    return Parts(
        backend, backend.settle, build, start_egress, _no_network(settings), _registries,
        no_bind=backend.why_not_shared, max_cpus=backend.max_cpus, allowed=lambda: backend.allowed,
    )  # fmt: skip


def _no_network(settings: Settings) -> str:
    """Why no sandbox can have a network here; empty where one can."""
    if os.geteuid() != 0:
        return "only a root sandboxd can give sandboxes a network"
    if settings.no_network:
        return "--no-network"
    if lacking := network.missing():
        raise SetupError("".join(f"{line}\n" for line in lacking) + "With --no-network no sandbox gets a network.")
    return ""


def _registries() -> Registries:
    try:
        sources = [(source.uri, source.suite) for source in apt.host_sources()]
    except SetupError:
        sources = []        # `prepare` says so where it matters
    return registries.read(sources, os.environ)


def kept(settings: Settings) -> bind.Kept:
    """What is never shared with a sandbox."""
    prefix = None if sys.prefix == sys.base_prefix else Path(sys.prefix)
    return bind.kept(settings, os.environ, Path(__file__).parent, prefix)


def instance(state_dir: Path) -> str:
    """What marks this daemon's machines among those of others on the host."""
    return hashlib.sha256(os.fsencode(os.path.realpath(state_dir))).hexdigest()[:12]


async def permitted(settings: Settings, chosen: Parts) -> tuple[Policy, Registries, str]:
    """What is permitted here, the registries it was made with, and why the ceiling is what it is."""
    used = Registries() if chosen.no_network else await anyio.to_thread.run_sync(chosen.registries)
    policy = rules.built_in(used.names, used.services)
    if settings.policy is not None:
        policy = policy_file.read(settings.policy, policy)
    if settings.default_image:
        policy = replace(policy, default_image=settings.default_image)
    if lacking := oci.missing():
        log.warning("no images of registries here; let root run: %s", lacking)
        policy = rules.without(policy, "images", f"let root run: {lacking}")
    else:
        policy = rules.with_images(policy)
    for what, image in (("default image", policy.default_image), *(("pool of", one.image) for one in policy.pools)):
        try:
            rules.check_image(image or policy.default_image, policy)
        except ApiError as fault:
            raise SetupError(f"the {what} {clean(image)} cannot be used: {fault}") from None
    # Before the backend has settled: where that ends with qemu, less than it could give is permitted, and never more.
    fewer = rules.with_cpus(policy, chosen.max_cpus)
    if lost := rules.differences(policy, fewer):
        why_not = f"{chosen.backend.name} gives a machine no more processors; with --backend qemu it can have them"
        log.warning("policy %s: %s: %s", settings.policy, "; ".join(lost), why_not)
    policy = fewer
    if policy.allow_bind or settings.allow_bind:
        why_not = await anyio.to_thread.run_sync(chosen.no_bind)
        if why_not:
            why_not = clean(why_not)
            log.warning("allow_bind has no effect, no directory can be shared here: %s", why_not)
            policy = rules.without(policy, "bind_workspace", f"no directory can be shared here: {why_not}")
        else:
            policy = rules.with_bind(policy)
            log.info("directories of this host can be shared with sandboxes, by uid %d alone", os.geteuid())
    else:
        other = "--backend qemu " if chosen.backend.name == "firecracker" else ""
        takes = f"it takes `sandboxd {other}--allow-bind` (policy: allow_bind: true)"
        policy = rules.without(policy, "bind_workspace", takes)
    if settings.audit_log is not None:
        policy = replace(policy, capabilities=policy.capabilities | {"audit"})
    if chosen.no_network:
        left = rules.without_network(policy)
        if settings.policy is not None and (lost := rules.differences(policy, left)):
            log.warning("policy %s: %s: %s", settings.policy, "; ".join(lost), chosen.no_network)
        left = rules.without(left, "egress_allowlist", chosen.no_network)
        return left, used, chosen.no_network
    return rules.with_network(policy), used, f"policy {settings.policy}" if settings.policy else "built-in policy"


def images(settings: Settings, places: Places, policy: Policy) -> Images:
    ids = confined.ids(os.geteuid(), image_uids(settings.uid_base).start)
    registry = oci.Registry(ids, settings.insecure_registries, envnames.RESERVED_ENV, os.environ)
    return Images(places.images, registry, ids, policy.limits.max_disk_mb << 20)


async def egress(settings: Settings, chosen: Parts, events: EventFile, held: AsyncExitStack) -> Egress | None:
    """What gives sandboxes a network, until `held` is left. Where none is given, what an earlier daemon gave ends."""
    if not chosen.no_network:
        return await held.enter_async_context(chosen.egress(events.add))
    left = settings.state_dir / "egress"
    if left.exists() and os.geteuid() == 0:
        async with chosen.egress(events.add) as earlier:
            await earlier.sweep(())
            await earlier.end()
        shutil.rmtree(left)
    return None


def audit(settings: Settings) -> Audit:
    if settings.audit_log is None:
        return Audit(None)
    journal = Journal(settings.audit_log)
    journal.begin()
    return Audit(journal, settings.audit_required)
