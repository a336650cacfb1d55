"""The namespace of a sandbox, its tap, and the sockets made in it.

In: a plan. Out: descriptors, and OSError or LinkError when the kernel says no. Blocking: call from a thread. What
must happen inside a namespace happens in a thread that does nothing else and ends: no thread comes back from a
namespace, so none is ever used in the wrong one. A plan is enough to delete what it names, after a crash too. The
only module that imports pyroute2, and not before it is needed (a third of a second).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from egress import plan as plans
from egress.plan import NAMESPACES, Plan

T = TypeVar("T")

CLONE_NEWNET = 0x40000000  # sched.h
TUNSETIFF, TUNSETPERSIST, TUNSETOWNER = 0x400454CA, 0x400454CB, 0x400454CC  # linux/if_tun.h
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR, IFF_TUN_EXCL = 0x0002, 0x1000, 0x4000, 0x8000
NUD_PERMANENT = 0x80  # linux/neighbour.h
BACKLOG = 4096

# A new namespace takes some of these from the host's, so none is left to chance. `ip_forward` comes first: writing
# it resets others.
_BEFORE = (
    ("net/ipv4/ip_forward", "0"),
    ("net/ipv6/conf/all/disable_ipv6", "1"),
    ("net/ipv6/conf/default/disable_ipv6", "1"),
    # Refusals are answered at once and to all, up to the ruleset's own limit.
    ("net/ipv4/icmp_ratemask", "0"),
    ("net/ipv4/tcp_syncookies", "1"),
    ("net/ipv4/ipfrag_low_thresh", "196608"),
    ("net/ipv4/ipfrag_high_thresh", "262144"),
    *(
        (f"net/ipv4/conf/{scope}/{name}", value)
        for scope in ("all", "default")
        for name, value in (
            ("rp_filter", "1"),
            ("accept_redirects", "0"),
            ("send_redirects", "0"),
            ("accept_source_route", "0"),
            ("accept_local", "0"),
            ("route_localnet", "0"),
            ("proxy_arp", "0"),
            ("arp_accept", "0"),
            ("arp_ignore", "1"),
        )
    ),
)
# These exist once rules need connection tracking. A connection the kernel has forgotten is answered with RST, not
# taken up again; one it knows is not cut for a sequence number; half-open ones go soon.
_AFTER = (
    ("net/netfilter/nf_conntrack_tcp_loose", "0"),
    ("net/netfilter/nf_conntrack_tcp_be_liberal", "1"),
    ("net/netfilter/nf_conntrack_tcp_timeout_syn_sent", "10"),
    ("net/netfilter/nf_conntrack_tcp_timeout_syn_recv", "10"),
    ("net/netfilter/nf_conntrack_tcp_timeout_time_wait", "10"),
    ("net/netfilter/nf_conntrack_udp_timeout", "10"),
    ("net/netfilter/nf_conntrack_udp_timeout_stream", "10"),
)

# Two threads at once would mount the directory of namespaces twice.
_naming = threading.Lock()


class LinkError(Exception):
    """It cannot be used as it is: somebody else's, or half gone."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """Made in the namespace, non-blocking; they hold it in being until they are closed."""

    proxy: int
    dns_udp: int
    dns_tcp: int

    def close(self) -> None:
        for fd in (self.proxy, self.dns_udp, self.dns_tcp):
            os.close(fd)


def make(plan: Plan) -> int:
    """The namespace with the tap in it, down, no rules yet. Returns the tap's descriptor: the tap lasts as long as
    it. Raises LinkError where the name is taken; whoever has it keeps it."""
    tap = alone(lambda: _make(plan))
    try:
        inside(plan, lambda: _set(_BEFORE))
    except BaseException:
        os.close(tap)
        delete(plan)
        raise
    return tap


def give(tap: int, uid: int) -> None:
    """From now on `uid` can open it by its name, without any capability, and it stays when nobody has it open."""
    fcntl.ioctl(tap, TUNSETOWNER, uid)
    fcntl.ioctl(tap, TUNSETPERSIST, 1)


def settle(plan: Plan) -> None:
    """What can be set only once the rules are there."""
    inside(plan, lambda: _set(_AFTER))


def bring_up(plan: Plan) -> None:
    """Address, link, neighbour. The rules must be there."""
    inside(plan, lambda: _bring_up(plan))


def take_down(plan: Plan) -> None:
    """From now on nothing passes. Raises LinkError where there is no link any more."""
    inside(plan, lambda: _take_down(plan))


def sockets(plan: Plan) -> Sockets:
    return inside(plan, lambda: _sockets(plan))


def exists(plan: Plan) -> bool:
    """Whether namespace and tap are there. A tap goes with the machine that holds it."""
    try:
        return inside(plan, lambda: plan.interface in (name for _, name in socket.if_nameindex()))
    except OSError:
        return False


def traffic(plans: Mapping[str, Plan]) -> dict[str, tuple[int, int]]:
    """Bytes to and from the guest by the host's end of each link, of those that are there. One thread visits all the
    namespaces, and ends."""

    def visit() -> dict[str, tuple[int, int]]:
        found = {}
        for key, plan in plans.items():
            with suppress(OSError):
                _enter(plan)
                if (counted := _counted(plan)) is not None:
                    found[key] = counted
        return found

    return alone(visit)


def delete(plan: Plan) -> None:
    """Whatever is there of it, in any state. The tap goes even where a machine still holds it."""
    with suppress(OSError):
        inside(plan, lambda: _delete_interface(plan))
    from pyroute2 import netns

    with suppress(FileNotFoundError):
        netns.remove(plan.namespace)


def sandboxes(instance: str) -> list[str]:
    """Whose namespaces there are, of this instance alone."""
    try:
        names = os.listdir(NAMESPACES)
    except FileNotFoundError:
        return []
    return [id for id in (plans.sandbox_of(name, instance) for name in sorted(names)) if id is not None]


def try_out(plan: Plan, load: Callable[[], None]) -> None:
    """The whole link in a namespace without a name, with the rules that `load` loads. Nothing of it stays."""

    def attempt() -> None:
        _unshare()
        tap = _tap(plan.interface)
        try:
            _set(_BEFORE)
            load()
            _set(_AFTER)
            _bring_up(plan)
        finally:
            os.close(tap)

    alone(attempt)


def inside(plan: Plan, call: Callable[[], T]) -> T:
    """The result of `call`, made in the namespace."""

    def enter() -> T:
        _enter(plan)
        return call()

    return alone(enter)


def _enter(plan: Plan) -> None:
    """This thread, for good."""
    from pyroute2 import netns

    fd = os.open(f"{NAMESPACES}/{plan.namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        netns.setns(fd, flags=0)
    finally:
        os.close(fd)


def alone(call: Callable[[], T]) -> T:
    """The result of `call` from a thread of its own that nobody uses afterwards."""
    results: list[T] = []
    faults: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=work, name="namespace", daemon=True)
    thread.start()
    thread.join()
    if faults:
        raise faults[0]
    return results[0]


def _make(plan: Plan) -> int:
    from pyroute2 import netns

    _unshare()
    with _naming:
        try:
            netns.attach(plan.namespace, "thread-self")
        except FileExistsError:
            raise LinkError(f"a namespace named {plan.namespace} is there already") from None
        except BaseException:
            with suppress(OSError):
                netns.remove(plan.namespace)
            raise
    try:
        return _tap(plan.interface)
    except BaseException:
        netns.remove(plan.namespace)
        raise


def _unshare() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"a network namespace cannot be made: {os.strerror(number)}")


def _tap(name: str) -> int:
    """A new one in this thread's namespace: the kernel opens an existing one without a word unless told not to."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | IFF_TUN_EXCL
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _counted(plan: Plan) -> tuple[int, int] | None:
    """Of this thread's namespace (proc_pid_net(5), dev): what a tap receives, the guest has sent."""
    with open("/proc/thread-self/net/dev", "rb") as file:
        for line in file:
            name, _, counters = line.partition(b":")
            if name.strip() == plan.interface.encode():
                fields = counters.split()
                return int(fields[8]), int(fields[0])
    return None


def _set(values: tuple[tuple[str, str], ...]) -> None:
    for name, value in values:
        # `/proc/sys/net` shows the namespace of the thread that opens it. Without IPv6 in the kernel there is none.
        if name.startswith("net/ipv6/") and not Path("/proc/sys/net/ipv6").exists():
            continue
        Path("/proc/sys", name).write_text(value)


@contextmanager
def _route() -> Iterator[Any]:
    """Netlink in this thread's namespace."""
    from pyroute2 import IPRoute, NetlinkError

    try:
        with IPRoute() as route:
            yield route
    except NetlinkError as fault:
        raise LinkError(f"the kernel refuses: {fault}") from None


def _bring_up(plan: Plan) -> None:
    index = _index(plan)
    with _route() as route:
        route.link("set", index=index, address=plan.host_mac, mtu=plan.mtu)
        route.addr("add", index=index, address=plan.host_address, prefixlen=plan.prefix)
        route.link("set", index=index, state="up")
        # The guest is never asked who it is, so it cannot say it is somebody else.
        route.neigh("add", dst=plan.guest_address, lladdr=plan.guest_mac, ifindex=index, state=NUD_PERMANENT)


def _take_down(plan: Plan) -> None:
    index = _index(plan)
    with _route() as route:
        route.link("set", index=index, state="down")


def _delete_interface(plan: Plan) -> None:
    with suppress(LinkError), _route() as route:
        route.link("del", index=_index(plan))


def _index(plan: Plan) -> int:
    try:
        return socket.if_nametoindex(plan.interface)
    except OSError:
        raise LinkError(f"{plan.interface} is gone from {plan.namespace}") from None


def _sockets(plan: Plan) -> Sockets:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_STREAM) as proxy,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as dns_udp,
        socket.socket(socket.AF_INET, socket.SOCK_STREAM) as dns_tcp,
    ):
        proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        dns_tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        proxy.bind((plan.host_address, plan.proxy_port))
        dns_udp.bind((plan.host_address, plan.dns_port))
        dns_tcp.bind((plan.host_address, plan.dns_port))
        for each in (proxy, dns_udp, dns_tcp):
            each.setblocking(False)
        proxy.listen(BACKLOG)
        dns_tcp.listen(BACKLOG)
        return Sockets(proxy.detach(), dns_udp.detach(), dns_tcp.detach())
