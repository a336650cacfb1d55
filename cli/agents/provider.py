"""Whether an agent's run reaches its provider, wherever the person's own variables say that is.

In: a row of the table, the sandbox's environment, its network. Out: a line for the person for each host that is not
reached. Nothing is allowed here: a variable may come from a project's own file, and opens no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cli.agents.table import Agent
from cli.network import covers
from sandboxd.termsafe import clean

if TYPE_CHECKING:
    from sandboxd.client import Network

WEB_PORTS = {"http": 80, "https": 443}


def unreached(agent: Agent, env: Mapping[str, str], network: Network) -> Iterator[str]:
    """Notes, in the words of the flags that would help."""
    elsewhere = False
    for name in agent.env:
        host, port = _address(env.get(name, ""))
        if not host:
            continue
        elsewhere = True
        if host in ("localhost", "::1") or host.startswith("127."):
            yield f"{name} sends {agent.name} to {host}: in the sandbox that is the sandbox itself, not this machine"
        elif port in WEB_PORTS.values() and not _open(network, host, network.allow or ()):
            yield f"{name} sends {agent.name} to {host}, {_remedy(network, '--allow', host)}"
        elif port not in WEB_PORTS.values() and not _open(network, f"{host}:{port}", network.allow_tcp):
            service = f"{host}:{port}"
            yield f"{name} sends {agent.name} to {service}, {_remedy(network, '--allow-tcp', service)}"
    for host in () if elsewhere else agent.hosts:
        if not _open(network, host, network.allow or ()):
            yield f"{agent.name} works with {host}, {_remedy(network, '--allow', host)}"


def _remedy(network: Network, flag: str, what: str) -> str:
    """A flag that names it is refused beside `none`, and changes nothing where the name is denied."""
    if covers(network.deny, what.partition(":")[0]):
        return "which this run may not reach: it is denied, whatever is allowed"
    mode = "--network allowlist " if network.mode == "none" else ""
    return f"which this run may not reach: {'use' if mode else 'add'} {mode}{flag} {what}"


def _address(value: str) -> tuple[str, int]:
    """Host and port of a web address; empty for anything else."""
    try:
        parts = urlsplit(value)
        host, port = clean((parts.hostname or "").lower().removesuffix(".")), parts.port
    except ValueError:
        return "", 0
    if parts.scheme not in WEB_PORTS or not host:
        return "", 0
    return host, port or WEB_PORTS[parts.scheme]


def _open(network: Network, what: str, allowed: tuple[str, ...]) -> bool:
    if network.mode == "none" or covers(network.deny, what.partition(":")[0]):
        return False
    return network.mode == "open" or covers(allowed, what)
