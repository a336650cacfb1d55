"""doctor's trial of the network: two small machines, one that tries to leave and one that listens for it.

In: a client and what the server offers. Out: facts, each "passed", "refused", "FAILED" or "not tested", with how. A
refusal counts only if it came at once and said no; that the same link does carry what it may is shown by a name of
the server's own list, which this machine can reach too. What the machines say is a guest's word.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from sandboxd.client import Capabilities, Client, NetworkRequest, Sandbox
from sandboxd.errors import SandboxError

LOOK_S = 5.0
TRIAL_S = 120.0
WEB_PORTS = (443, 80)
NEIGHBOUR_PORT = 7070
# RFC 5737's and RFC 2606's: nobody's addresses, and names that everybody may use as an example.
NOBODY, NOBODYS_RESOLVER = "192.0.2.1", "192.0.2.53"
EXAMPLES = ("example.com", "example.org")
CHECKS = ("allowed name", "denied name", "raw address", "outside DNS", "UDP/443")
OTHER = "another sandbox"
FAILED = "FAILED"

Fact = tuple[str, str]


class Target(NamedTuple):
    """What to try. `allowed` is empty where no name of the server's list can be reached from here."""

    request: NetworkRequest
    allowed: str
    port: int
    denied: str
    address: str
    resolver: str

    def plan(self) -> str:
        """As the trial machine reads it."""
        plan = {"denied": self.denied, "address": self.address, "resolver": self.resolver}
        if self.allowed:
            plan |= {"allowed": self.allowed, "port": str(self.port)}
        return json.dumps(plan | {"neighbour": str(NEIGHBOUR_PORT)})


def choose(offer: Capabilities) -> Target | str:
    """What can be tried with this server; or why nothing can."""
    if offer.network_ceiling == "none" or not offer.capabilities.get("egress_allowlist"):
        return "this sandboxd gives sandboxes no network"
    names = [name for name in offer.network_default.allow or () if not name.startswith("*")]
    found = reachable(names)
    if not names and "*" not in offer.network_may_allow:
        return "this sandboxd's list has no name to try"
    return target(names, found, nameservers(Path("/etc/resolv.conf")))


def target(names: Sequence[str], found: Mapping[str, tuple[int, str]], resolvers: Sequence[str]) -> Target:
    """`found`: which of `names` can be reached from here, on which port and at which address."""
    open_here = [name for name in names if name in found]
    allowed = open_here[0] if open_here else ""
    named = allowed or (names[0] if names else EXAMPLES[0])
    denied = next(name for name in (*open_here[1:], *EXAMPLES) if name != named)
    port, address = found.get(allowed, (443, NOBODY))
    return Target(
        NetworkRequest("allowlist", allow=(named,), allow_tcp=()), allowed, port, denied, address,
        resolvers[0] if resolvers else NOBODYS_RESOLVER,
    )  # fmt: skip


def reachable(names: Sequence[str], ports: Sequence[int] = WEB_PORTS) -> dict[str, tuple[int, str]]:
    """All are tried at once; who does not answer within LOOK_S is left out."""
    found: dict[str, tuple[int, str]] = {}

    def look(name: str) -> None:
        for port in ports:
            try:
                with socket.create_connection((name, port), LOOK_S / 2) as sock:
                    found[name] = port, str(sock.getpeername()[0])
                return
            except OSError:
                continue

    deadline = time.monotonic() + LOOK_S
    threads = [Thread(target=look, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    # A guest has no IPv6: what is only there it cannot be shown.
    return {name: (port, address) for name, (port, address) in found.copy().items() if ":" not in address}


def nameservers(path: Path) -> list[str]:
    """This machine's own, by IPv4 and not on itself."""
    try:
        words = [line.split() for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        return []
    named = [word[1] for word in words if len(word) > 1 and word[0] == "nameserver"]
    return [address for address in named if ":" not in address and not address.startswith("127.")]


def run(client: Client, first: Sandbox, second: Sandbox | str, aim: Target) -> Iterator[Fact]:
    """`first` has the network that `aim` asks for; `second` is its neighbour, or why there is none."""
    source = Path(__file__).with_name("attempts.py").read_text()
    listener = _listening(client, second, source) if isinstance(second, Sandbox) else 0
    command = ["python3", "-I", "-c", source, "leave", aim.plan()]
    result = client.run(first.id, command, timeout_secs=TRIAL_S)
    found = outcomes(result.stdout)
    for check in CHECKS:
        text = verdict(check, found.get(check), aim)
        if check == CHECKS[0] and text.startswith(FAILED):
            text += _refused_by(client, first, aim.allowed)
        yield check, text
    if not isinstance(second, Sandbox):
        yield OTHER, f"not tested: {second}"
        return
    client.write_stdin(second.id, listener, b"", close=True)
    written = b"".join(one.data for one in client.output(second.id, listener) if one.stream == "stdout")
    yield OTHER, verdict(OTHER, outcomes(written.rpartition(b"ready\n")[2]).get(OTHER), aim)


def outcomes(written: bytes) -> dict[str, tuple[str, str]]:
    """A trial machine's last line, as far as it is one."""
    try:
        found: Any = json.loads(written.strip().rpartition(b"\n")[2])
        return {str(check): (str(way), str(how)[:200]) for check, (way, how) in found.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def verdict(check: str, outcome: tuple[str, str] | None, aim: Target) -> str:
    way, how = outcome or ("", "the trial machine did not say")
    if check == "allowed name":
        if not aim.allowed:
            return "not tested: no name of the server's list can be reached from this machine"
        return f"passed: {aim.allowed}, {how}" if way == "open" else f"{FAILED}: {aim.allowed}: {how}"
    about = f"{aim.denied}: " if check == "denied name" else ""
    return f"refused: {about}{how}" if way == "refused" else f"{FAILED}: {about}{how}"


def _listening(client: Client, second: Sandbox, source: str) -> int:
    process = client.start(second.id, ["python3", "-I", "-c", source, "listen", str(NEIGHBOUR_PORT)])
    written = b""
    for one in client.output(second.id, process.pid):
        written += one.data
        if b"ready\n" in written:
            return process.pid
    raise SandboxError("the second trial machine does not listen")


def _refused_by(client: Client, sandbox: Sandbox, name: str) -> str:
    """Which decision stands behind it, for the person to look up."""
    for one in client.egress(sandbox.id).names:
        if one.name == name and one.decision == "denied":
            return f" ({one.rule}; sandbox-cli why {one.id})"
    return ""
