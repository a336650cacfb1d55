"""A sandbox's link, as numbers and names. Pure; everybody else takes them from here.

Every sandbox has a network namespace of its own, so the numbers are the same in all of them and only the
namespace's name tells them apart. It carries the daemon's instance: what a crash leaves is found by name, and
what belongs to somebody else is never taken for ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NAMESPACES = "/run/netns"
_PREFIX = "sbx-"
# With the id of the node in front where the daemon has one.
_OF_SANDBOX = r"(?:[a-z0-9][a-z0-9-]{0,30}_)?[0-9a-f]{16}"
_SANDBOX = re.compile(rf"sbx_({_OF_SANDBOX})")
_INSTANCE = re.compile(r"[0-9a-f]{12}")
_NAMESPACE = re.compile(rf"sbx-([0-9a-f]{{12}})-({_OF_SANDBOX})")


@dataclass(frozen=True, slots=True)
class Plan:
    """`interface` is the host's end of the link, the only interface of `namespace` that is up."""

    namespace: str
    interface: str = "tap0"
    mtu: int = 1500
    prefix: int = 30
    host_address: str = "172.16.0.1"
    host_mac: str = "06:00:ac:10:00:01"
    guest_address: str = "172.16.0.2"
    guest_mac: str = "06:00:ac:10:00:02"
    names: str = "198.18.0.0/15"
    """One address of these for each allowed name (RFC 2544 set them aside; they are on no network)."""
    proxy_port: int = 3128
    dns_port: int = 7353


def of(instance: str, sandbox_id: str) -> Plan:
    """Raises ValueError for what is not an instance or a sandbox's id."""
    match = _SANDBOX.fullmatch(sandbox_id)
    if match is None or _INSTANCE.fullmatch(instance) is None:
        raise ValueError(f"no network can be named after {instance!r} and {sandbox_id!r}")
    return Plan(f"{_PREFIX}{instance}-{match[1]}")


def sandbox_of(namespace: str, instance: str) -> str | None:
    """The id of the sandbox a namespace belongs to; None for one that is not `instance`'s."""
    match = _NAMESPACE.fullmatch(namespace)
    return f"sbx_{match[2]}" if match is not None and match[1] == instance else None
