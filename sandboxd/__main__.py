"""sandboxd: runs virtual machines for AI coding agents, behind one API.

Usage:
  sandboxd [--listen ADDRESS]... [--token-file FILE]... [--allowed-host NAME]...
           [--insecure-registry HOST:PORT]... [--node-label LABEL]... [options]
  sandboxd prepare [options]
  sandboxd --version
  sandboxd --help

`prepare` builds the kernel, the guest runtime and the base image, and stops. Without it the daemon builds
what is missing before it says ready. Sandboxes outlive the daemon and are taken back when it starts again.

Options:
  --listen ADDRESS     where the API is: unix:///path or HOST:PORT; may stand several times
                       [root: unix:///run/sandboxd/sandboxd.sock; others: in $XDG_RUNTIME_DIR or
                       ~/.config/sandbox]
  --token-file FILE    holds a bearer token of at least 16 characters; with several files each one's will do.
                       HOST:PORT needs one
  --token-dir DIR      holds such files, one for each person; SIGHUP reads them and the certificates again
  --tls-cert FILE      certificate chain, PEM; HOST:PORT needs it where HOST is no loopback address
  --tls-key FILE       its private key, PEM
  --client-ca FILE     clients must have a certificate of this authority, and still a token
  --allowed-host NAME  a name or address by which clients reach the API, beside localhost; may stand several times
  --state-dir DIR      records, disks and output
                       [root: /var/lib/sandboxd; others: ~/.local/share/sandboxd]
  --assets-dir DIR     kernel and images; several daemons may share it [assets in the state directory]
  --backend NAME       auto or qemu [default: auto]
  --end-sandboxes      end all sandboxes when the daemon stops
  --uid-base N         as root: the first of 4096 uids for virtual machines, and two behind them [900000]
  --policy FILE        what sandboxes may have, as YAML [the built-in policy]
  --default-image REF  what sandboxes start from unless they say otherwise; comes before the policy's
  --insecure-registry HOST:PORT
                       a registry that is spoken to without TLS; may be given again
  --no-network         as root: give no sandbox a network
  --audit-log FILE     where what was done is recorded, or none [audit/events.jsonl in the state directory]
  --audit-required     refuse what cannot be recorded there
  --metrics-listen HOST:PORT  serve /metrics for Prometheus there; loopback only, since it asks for no credential
  --node-id ID         this machine's name; it becomes part of the ids of its sandboxes
  --node-label LABEL   KEY=VALUE, told with the node; may be given again
  --capacity-cpus N    what the node says it has [all processors]
  --capacity-memory-mb N  likewise [all memory]
  --capacity-disk-mb N    likewise [the size of the state directory's file system]
  --build-dir DIR      where the native programs are [build beside this package, or libexec below the prefix]
  --version            print the version and exit
  --help               print this and exit
"""

from __future__ import annotations

import hashlib
import logging
import os
import resource
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import anyio
import anyio.abc
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
from docopt import DocoptExit, docopt

from egress import network
from egress.control import Event
from sandboxd import node as nodes
from sandboxd import notify, policy_file, registries
from sandboxd import policy as rules
from sandboxd import settings as flags
from sandboxd.address import TcpAddress, UnixAddress
from sandboxd.adopt import adopt, lock
from sandboxd.assets import apt, confined, oci
from sandboxd.assets import prepare as building
from sandboxd.assets.prepare import Assets
from sandboxd.audit import Audit
from sandboxd.credentials import Credentials
from sandboxd.errors import ApiError, SandboxError, SetupError
from sandboxd.events import EventFile
from sandboxd.images import Images
from sandboxd.journal import Journal
from sandboxd.lifecycle import State
from sandboxd.limits import Limits
from sandboxd.listening import Listener, listening
from sandboxd.networks import Egress, Networks
from sandboxd.node import Node
from sandboxd.policy import Policy
from sandboxd.registries import Registries
from sandboxd.serve import Server
from sandboxd.service import AssetsState, Backend, Places, Service
from sandboxd.settings import Settings
from sandboxd.store import Store
from sandboxd.termsafe import clean
from sandboxd.uids import COUNT, Uids, image_uids, network_uids
from sandboxd.vm import kvm, qemu, recovery
from sandboxd.vm.commands import Accelerator, Tools, find_tools
from sandboxd.vm.machine import Machine, MachineSpec
from sandboxd.wire import API_VERSION

PREPARING_S = 600.0
"""How long a step of building the images may go on without a word."""

log = logging.getLogger("sandboxd")


class Qemu:
    """`vm.qemu` as the service's backend. Starts machines under TCG until `settle` has found a KVM that works."""

    name = "qemu"

    def __init__(self, tools: Tools, uids: range, state_dir: Path) -> None:
        self.tools, self.uids, self._state_dir = tools, uids, state_dir
        self._e2fsck = recovery.find_e2fsck()

    async def settle(self, assets: Assets, uid: int | None) -> str:
        """Tries KVM with our kernel; `uid` is the trial's. Returns which accelerator it is to be, and why."""
        choice = await kvm.choose(self.tools, assets.kernel, assets.initramfs, self._state_dir, uid)
        self.tools = replace(self.tools, accelerator=choice.accelerator)
        return f"qemu with {choice.accelerator.value} ({choice.reason})"

    async def start(self, spec: MachineSpec) -> Machine:
        return await qemu.start(spec, self.tools)

    async def adopt(self, directory: Path, sandbox_id: str) -> Machine | None:
        return await qemu.adopt(directory, sandbox_id)

    def sweep(self, sandboxes: Path, known: frozenset[str]) -> None:
        for ended in qemu.sweep(sandboxes, known, self.tools.instance, self.uids):
            log.info("%s: its machine had no record: it was ended", ended)

    async def recover(self, volume: Path, sandbox_id: str, uid: int | None) -> bool:
        return await recovery.recover(volume, sandbox_id, uid, self._e2fsck, self.tools.instance, self.tools.jail)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Exits 1 with one line where the daemon cannot start."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        given = docopt(__doc__ or "", words, version=_version())
    except DocoptExit:
        print(f"sandboxd: not understood: {clean(' '.join(words))}; see sandboxd --help", file=sys.stderr)
        sys.exit(1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="sandboxd: %(message)s")
    faults: list[BaseException] = []
    try:
        settings = flags.read(given, os.environ, os.geteuid())
        if settings.prepare_only:
            building.prepare(settings.assets_dir, settings.build_dir, _print_progress())
            log.info("the images are ready")
        else:
            anyio.run(run, settings, parts)
    except* SandboxError as group:
        faults.extend(_leaves(group))
    for fault in faults:
        print(f"sandboxd: {fault}", file=sys.stderr)
    if faults:
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the daemon is put together from: a backend, what it settles once the images are there (and says in one
    line), where images come from; what gives sandboxes a network, why none is given, and the host's registries; what
    clients may take of it."""

    backend: Backend
    settle: Callable[[Assets, int | None], Awaitable[str]]
    prepare: Callable[[Path, Path, building.Report], Assets]
    egress: Callable[[Callable[[Event], None]], AbstractAsyncContextManager[Egress]]
    no_network: str
    registries: Callable[[], Registries]
    limits: Limits = field(default_factory=Limits)


def parts(settings: Settings) -> Parts:
    tools = find_tools(settings.build_dir / "sandbox-vsock", instance(settings.state_dir), Accelerator.TCG)
    uids = range(settings.uid_base, settings.uid_base + COUNT) if os.geteuid() == 0 else range(0)
    backend = Qemu(tools, uids, settings.state_dir)
    own = instance(settings.state_dir)

    def egress(on_event: Callable[[Event], None]) -> network.Egress:
        proxy_uids = network_uids(settings.uid_base)
        return network.Egress(settings.state_dir, own, proxy_uids, on_event, lambda line: log.info("%s", clean(line)))

    return Parts(backend, backend.settle, building.prepare, egress, _no_network(settings), _registries)


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


async def run(settings: Settings, choose: Callable[[Settings], Parts]) -> None:
    """The daemon, from the lock to the last connection."""
    credentials = Credentials(settings.transport)
    held = lock(settings.state_dir)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        chosen = choose(settings)
        uids = Uids(settings.uid_base) if os.geteuid() == 0 else None
        with listening(settings.transport.listen) as listeners:
            store = Store(settings.state_dir / "state.sqlite")
            try:
                await _serve(settings, chosen, store, uids, listeners, credentials)
            finally:
                store.close()
    finally:
        os.close(held)


async def _serve(
    settings: Settings, chosen: Parts, store: Store, uids: Uids | None, listeners: Sequence[Listener],
    credentials: Credentials,
) -> None:  # fmt: skip
    policy, used, why = await _policy(settings, chosen)
    places = Places(settings.state_dir)
    assets = AssetsState()
    events = EventFile(settings.state_dir)
    async with AsyncExitStack() as parts:
        metrics = None if settings.metrics is None else parts.enter_context(_metrics(settings.metrics))
        audit = parts.enter_context(closing(_audit(settings)))
        living = {record.id for record in store.sandboxes()[0] if record.state is not State.TERMINATED}
        await anyio.to_thread.run_sync(audit.recall, living)
        adopted, unreadable = await adopt(places, store, chosen.backend, audit)
        egress = await _networks(settings, chosen, events, parts)
        networks = Networks(egress, policy, events)
        images = await parts.enter_async_context(_images(settings, places, policy))
        node = _node(settings)
        service = Service(
            places, store, chosen.backend, policy, assets, uids, networks, used.files, images, audit, node
        )
        await parts.enter_async_context(service)
        if policy.default_image != rules.DEFAULT_IMAGE:
            images.prefetch(policy.default_image)
        await service.restore([(one.record, one.machine) for one in adopted], unreadable)
        log.info(
            "version %s, API %s, listening on %s, token %s, backend %s, network ceiling %s (%s), image %s, "
            "audit log %s",
            _version(), API_VERSION, _where(listeners, credentials),
            "required" if credentials.tokens else "not required", chosen.backend.name, policy.ceiling, why,
            policy.default_image, settings.audit_log or "none",
        )  # fmt: skip
        _log_node(node, policy)
        server = Server(service, credentials, settings.transport.allowed_hosts, chosen.limits)
        async with anyio.create_task_group() as tasks:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
                tasks.start_soon(server.run, listeners)
                if metrics is not None:
                    tasks.start_soon(_serve_metrics, metrics, service)
                tasks.start_soon(_prepare, settings, chosen, assets, uids)
                async for number in signals:
                    if number != signal.SIGHUP:
                        break
                    _reload(credentials)
                log.info("stopping")
                notify.stopping()
                await server.stop()
                await service.pools.close()
                if settings.end_sandboxes:
                    await service.end_all()
                # Its processes outlive us for the sandboxes that do.
                if egress is not None and not networks.in_use:
                    await egress.end()
                tasks.cancel_scope.cancel()


def _where(listeners: Sequence[Listener], credentials: Credentials) -> str:
    scheme = "http" if credentials.tls is None else "https"
    return ", ".join(
        str(one.address) if isinstance(one.address, UnixAddress) else f"{scheme}://{one.address}" for one in listeners
    )


def _reload(credentials: Credentials) -> None:
    """On SIGHUP: certificates are renewed, and tokens given and taken."""
    try:
        credentials.reload()
        log.info("the token and certificate files were read again")
    except SetupError as fault:
        log.error("the token and certificate files were not read again, the earlier ones stay: %s", clean(str(fault)))
def _node(settings: Settings) -> Node:
    given = settings.node
    capacity = nodes.capacity((given.cpus, given.memory_mb, given.disk_mb), settings.state_dir)
    return Node(given.id, _version(), given.labels, capacity)


def _log_node(node: Node, policy: Policy) -> None:
    has = node.capacity
    log.info(
        "node %s: %g cpus, %d MiB of memory, %d MiB of disk", node.id or "(no id)", has.cpus, has.memory_mb, has.disk_mb
    )
    for pool in policy.pools:
        log.info("pool of %s: %d machines wait for a create", pool.image or policy.default_image, pool.size)


def _metrics(address: TcpAddress) -> socket.socket:
    # Here, since only a daemon that is asked for them needs the library.
    from sandboxd import prometheus

    listener = prometheus.listen(address)
    log.info("metrics at http://%s/metrics", TcpAddress(*listener.getsockname()[:2]))
    return listener


async def _serve_metrics(listener: socket.socket, service: Service) -> None:
    from sandboxd import prometheus

    await prometheus.serve(listener, prometheus.Exposition(service))


def _audit(settings: Settings) -> Audit:
    if settings.audit_log is None:
        return Audit(None)
    journal = Journal(settings.audit_log)
    journal.begin()
    return Audit(journal, settings.audit_required)


async def _policy(settings: Settings, chosen: Parts) -> tuple[Policy, Registries, str]:
    """What is permitted here, the registries it was made with, and why the ceiling is what it is."""
    used = Registries() if chosen.no_network else await anyio.to_thread.run_sync(chosen.registries)
    policy = rules.built_in(used.names, used.services)
    if settings.policy is not None:
        policy = policy_file.read(settings.policy, policy)
    if settings.default_image:
        policy = replace(policy, default_image=settings.default_image)
    if lacking := oci.missing():
        log.warning("no images of registries here; let root run: %s", lacking)
    else:
        policy = rules.with_images(policy)
    for what, image in (("default image", policy.default_image), *(("pool of", one.image) for one in policy.pools)):
        try:
            rules.check_image(image or policy.default_image, policy)
        except ApiError as fault:
            raise SetupError(f"the {what} {clean(image)} cannot be used: {fault}") from None
    if settings.audit_log is not None:
        policy = replace(policy, capabilities=policy.capabilities | {"audit"})
    if chosen.no_network:
        left = rules.without_network(policy)
        if settings.policy is not None and (lost := rules.differences(policy, left)):
            log.warning("policy %s: %s: %s", settings.policy, "; ".join(lost), chosen.no_network)
        return left, used, chosen.no_network
    return rules.with_network(policy), used, f"policy {settings.policy}" if settings.policy else "built-in policy"


def _images(settings: Settings, places: Places, policy: Policy) -> Images:
    ids = confined.ids(os.geteuid(), image_uids(settings.uid_base).start)
    registry = oci.Registry(ids, settings.insecure_registries, rules.RESERVED_ENV, os.environ)
    return Images(places.images, registry, ids, policy.limits.max_disk_mb << 20)


async def _networks(
    settings: Settings, chosen: Parts, events: EventFile, held: AsyncExitStack
) -> Egress | None:
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


async def _prepare(settings: Settings, chosen: Parts, assets: AssetsState, uids: Uids | None) -> None:
    """Builds what is missing, in a thread, while the API already answers; then settles the backend."""
    show = _print_progress()

    def report(progress: building.Progress) -> None:
        assets.report(progress)
        show(progress)
        notify.status(f"{progress.phase}: {progress.percent} % {progress.detail}")
        notify.starting(PREPARING_S)

    found = await _in_daemon_thread(lambda: chosen.prepare(settings.assets_dir, settings.build_dir, report))
    with ExitStack() as borrowed:
        uid = None if uids is None else borrowed.enter_context(closing(uids.claim())).uid
        log.info("backend %s", clean(await chosen.settle(found, uid)))
    assets.ready(found)
    log.info("ready")
    notify.ready()


async def _in_daemon_thread(call: Callable[[], Assets]) -> Assets:
    """`call` in a thread the interpreter does not wait for at its end, as it would for one of anyio's: a build can
    last minutes, and a killed one leaves nothing."""
    outcome: list[Assets | BaseException] = []
    done = anyio.Event()
    token = anyio.lowlevel.current_token()

    def work() -> None:
        try:
            outcome.append(call())
        except BaseException as fault:
            outcome.append(fault)
        with suppress(anyio.RunFinishedError):
            anyio.from_thread.run_sync(done.set, token=token)

    threading.Thread(target=work, name="build", daemon=True).start()
    await done.wait()
    match outcome[0]:
        case BaseException() as fault:
            raise fault
        case found:
            return found


def instance(state_dir: Path) -> str:
    """What marks this daemon's machines among those of others on the host."""
    return hashlib.sha256(os.fsencode(os.path.realpath(state_dir))).hexdigest()[:12]


def _print_progress() -> building.Report:
    """Progress on stderr, a line per step of ten percent."""
    last: list[tuple[str, int]] = []

    def show(progress: building.Progress) -> None:
        step = (progress.phase, progress.percent // 10)
        if step not in last:
            last[:] = [step]
            log.info("%s: %d %% %s", clean(progress.phase), progress.percent, clean(progress.detail))

    return show


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for fault in group.exceptions:
        found.extend(_leaves(fault) if isinstance(fault, BaseExceptionGroup) else [fault])
    return found


def _version() -> str:
    try:
        return version("sandbox-cli")
    except PackageNotFoundError:
        return "unknown (run from the sources)"


if __name__ == "__main__":
    main()
