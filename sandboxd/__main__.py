"""sandboxd: runs virtual machines for AI coding agents, behind one API.

Usage:
  sandboxd [--listen ADDRESS]... [--token-file FILE]...
           [--allowed-host NAME]... [--insecure-registry HOST:PORT]...
           [--node-label LABEL]... [options]
  sandboxd prepare [options]
  sandboxd --version
  sandboxd --help

`prepare` builds the kernel, the guest runtime and the base image, and stops.
Without it the daemon builds what is missing before it says ready. Sandboxes
outlive the daemon and are taken back when it starts again.

Options:
  --listen ADDRESS     where the API is: unix:///path or HOST:PORT; may stand
                       several times [root: unix:///run/sandboxd/sandboxd.sock;
                       others: in $XDG_RUNTIME_DIR or ~/.config/sandbox]
  --token-file FILE    holds a bearer token of at least 16 characters; with
                       several files each one's will do. HOST:PORT needs one
  --token-dir DIR      holds such files, one for each person; SIGHUP reads them
                       and the certificates again
  --tls-cert FILE      certificate chain, PEM; HOST:PORT needs it where HOST is
                       no loopback address
  --tls-key FILE       its private key, PEM
  --client-ca FILE     clients must have a certificate of this authority, and
                       still a token
  --allowed-host NAME  a name or address by which clients reach the API, beside
                       localhost; may stand several times
  --state-dir DIR      records, disks and output [root: /var/lib/sandboxd;
                       others: ~/.local/share/sandboxd]
  --assets-dir DIR     kernel and images; several daemons may share it [assets
                       in the state directory]
  --kernel FILE        the guests' kernel, vmlinux or bzImage, with what they
                       need built in [Debian's, with modules]
  --backend NAME       auto, qemu or firecracker [default: auto]: auto takes
                       Firecracker where it is installed and KVM works
  --firecracker PATH   that program [firecracker in /usr/local/bin, /usr/bin,
                       /usr/local/sbin or /usr/sbin]
  --jailer PATH        as root: the jailer of the same version [beside it]
  --allow-firecracker VERSION
                       take this version though it is known to have faults;
                       it is recorded in the audit log
  --end-sandboxes      end all sandboxes when the daemon stops
  --uid-base N         as root: the first of 4096 uids for virtual machines,
                       and two behind them [900000]
  --policy FILE        what sandboxes may have, as YAML [the built-in policy]
  --default-image REF  what sandboxes start from unless they say otherwise;
                       comes before the policy's
  --insecure-registry HOST:PORT
                       a registry that is spoken to without TLS; may be given
                       again
  --allow-bind         let the user it runs as share directories of this host
                       with sandboxes, as the policy's allow_bind
  --no-network         as root: give no sandbox a network
  --audit-log FILE     where what was done is recorded, or none
                       [audit/events.jsonl in the state directory]
  --audit-required     refuse what cannot be recorded there
  --metrics-listen HOST:PORT  serve /metrics for Prometheus there; loopback
                              only, since it asks for no credential
  --node-id ID         this machine's name; it becomes part of the ids of its
                       sandboxes
  --node-label LABEL   KEY=VALUE, told with the node; may be given again
  --capacity-cpus N    what the node says it has [all processors]
  --capacity-memory-mb N  likewise [all memory]
  --capacity-disk-mb N    likewise [the size of the state directory's file
                          system]
  --build-dir DIR      where the native programs are [build beside this
                       package, or libexec below the prefix]
  --version            print the version and exit
  --help               print this and exit
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import anyio
import anyio.to_thread
from docopt import DocoptExit, docopt

from sandboxd import assembly, notify
from sandboxd import node as nodes
from sandboxd import settings as flags
from sandboxd.address import TcpAddress, UnixAddress
from sandboxd.assembly import Parts
from sandboxd.assets import prepare
from sandboxd.assets.prepare import Assets
from sandboxd.audit import Audit
from sandboxd.credentials import Credentials
from sandboxd.errors import SandboxError, SetupError
from sandboxd.events import EventFile
from sandboxd.lifecycle import State
from sandboxd.listening import Listener, listening
from sandboxd.networks import Networks
from sandboxd.node import Node
from sandboxd.places import Places, lock
from sandboxd.policy import DEFAULT_IMAGE, Policy
from sandboxd.readiness import AssetsState, make_ready, print_progress
from sandboxd.restart import adopt
from sandboxd.serve import Server
from sandboxd.service import Service
from sandboxd.settings import Settings
from sandboxd.store import Store
from sandboxd.termsafe import clean
from sandboxd.uids import Uids
from sandboxd.vm import arch
from sandboxd.wire import API_VERSION

log = logging.getLogger("sandboxd")


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
        arch.require()
        settings = flags.read(given, os.environ, os.geteuid())
        if settings.prepare_only:
            prepare.prepare(settings.assets_dir, settings.build_dir, print_progress(), settings.kernel)
            log.info("the images are ready")
        else:
            anyio.run(run, settings, assembly.parts)
    except* SandboxError as group:
        faults.extend(_leaves(group))
    for fault in faults:
        print(f"sandboxd: {fault}", file=sys.stderr)
    if faults:
        sys.exit(1)


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
    policy, used, why = await assembly.permitted(settings, chosen)
    places = Places(settings.state_dir)
    assets = AssetsState()
    events = EventFile(settings.state_dir)
    async with AsyncExitStack() as parts:
        metrics = None if settings.metrics is None else parts.enter_context(_metrics(settings.metrics))
        audit = parts.enter_context(closing(assembly.audit(settings)))
        living = {record.id for record in store.sandboxes()[0] if record.state is not State.TERMINATED}
        await anyio.to_thread.run_sync(audit.recall, living)
        adopted, unreadable = await adopt(places, store, chosen.backend, audit)
        egress = await assembly.egress(settings, chosen, events, parts)
        networks = Networks(egress, policy, events)
        images = await parts.enter_async_context(assembly.images(settings, places, policy))
        node = _node(settings)
        service = Service(
            places, store, chosen.backend, policy, assets, uids, networks, used.files, images, audit, node,
            assembly.kept(settings),
        )  # fmt: skip
        await parts.enter_async_context(service)
        if policy.default_image != DEFAULT_IMAGE:
            images.prefetch(policy.default_image)
        await service.restore(adopted, unreadable)
        log.info(
            "version %s, API %s, listening on %s, token %s, backend %s, network ceiling %s (%s), image %s, "
            "audit log %s",
            _version(), API_VERSION, _where(listeners, credentials),
            "required" if credentials.tokens else "not required", chosen.backend.name, policy.ceiling, why,
            policy.default_image, settings.audit_log or "none",
        )  # fmt: skip
        _log_node(node, policy)
        build = partial(chosen.prepare, settings.assets_dir, settings.build_dir)
        settle = partial(_settled, chosen, audit)
        server = Server(service, credentials, settings.transport.allowed_hosts, chosen.limits)
        async with anyio.create_task_group() as tasks:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
                tasks.start_soon(server.run, listeners)
                if metrics is not None:
                    tasks.start_soon(_serve_metrics, metrics, service)
                tasks.start_soon(make_ready, assets, build, settle, uids)
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


async def _settled(chosen: Parts, audit: Audit, found: Assets, uid: int | None) -> str:
    """What starts machines, and a record of it where only the operator's word lets it."""
    said = await chosen.settle(found, uid)
    if allowed := chosen.allowed():
        log.warning("%s", clean(allowed))
        audit.record("backend.allowed", "", reason=allowed)
    return said


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
