"""Say what became of a name that a sandbox asked for, and what would allow it.

Usage:
  sandbox-cli why [options] ID

Every refusal has an ID: it stands in the answer to a plain HTTP request, in
sandboxd's log and in `egress`. What is printed last can be pasted.

Options:
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address
  --json         print the API's object
  -h, --help     show this
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from typing import Any

from cli import context, show
from cli.network import covers
from sandboxd.client import Client, Event, Network, Sandbox
from sandboxd.errors import ApiError, NotFound, SandboxError
from sandboxd.termsafe import clean

SEEN_IN = {
    "dns": "a query for its address",
    "tls": "a TLS handshake (the server name in the ClientHello)",
    "http": "an HTTP request",
    "connect": "a CONNECT request",
    "address": "a connection to its address",
}
DENIED = "egress.denied"


def main(args: dict[str, Any]) -> int:
    client = context.choose(args["--context"]).client
    try:
        event = client.event(args["ID"])
    except NotFound:
        raise SandboxError(
            f"no decision has the id {clean(args['ID'])}: it is another sandboxd's, or no longer kept"
        ) from None
    if args["--json"]:
        show.as_json(event._asdict())
        return 0
    for text in explained(event, _sandbox(client, event.sandbox), args["--context"]):
        sys.stdout.write(f"{text}\n")
    return 0


def explained(event: Event, sandbox: Sandbox | None, asked_context: str | None) -> Iterator[str]:
    """Lines fit for a terminal. `sandbox` is the one that asked, while it runs."""
    denied = event.type == DENIED
    times = "" if event.count <= 1 else f", {event.count} times"
    yield f"{clean(target(event.name, event.port))} was {'refused' if denied else 'allowed'}{times}"
    facts = {
        "sandbox": (sandbox.name if sandbox else "") or event.sandbox,
        "last at" if event.count > 1 else "at": event.time,
        "seen in": SEEN_IN.get(event.by, event.by),
        "rule": event.rule,
        "because": event.why,
    }
    if not denied:
        facts["bytes"] = f"{show.bytes_size(event.bytes_in)} in, {show.bytes_size(event.bytes_out)} out"
    for key, value in facts.items():
        if value:
            yield f"  {key:<9}{clean(value)}"
    if not denied:
        return
    if not event.remedy:
        yield "no flag allows it"
        return
    # The name in it is a guest's word, and this is meant to be pasted into a shell.
    flags = clean(" ".join(map(shlex.quote, event.remedy.split())))
    where = f" --context={clean(shlex.quote(asked_context))}" if asked_context else ""
    network = sandbox.network if sandbox is not None else None
    if network is not None and covers(network.deny, event.name):
        yield "this sandbox's deny list names it since, and beats what is allowed"
    elif network is not None and _allowed_now(event.remedy, network):
        yield "it is allowed in this sandbox since"
    elif sandbox is not None and sandbox.network.mode == "allowlist":
        yield "to allow it now, in this sandbox:"
        yield f"  sandbox-cli update{where} {flags} {clean(sandbox.name or sandbox.id)}"
    yield "to allow it in a run:"
    yield f"  sandbox-cli run{where} {flags} -- CMD"
    if event.by == "dns":
        yield "that is for the web; for another port:"
        yield f"  --allow-tcp {clean(shlex.quote(event.name))}:PORT"


def _allowed_now(remedy: str, network: Network) -> bool:
    flag, _, wanted = remedy.partition(" ")
    lists = {"--allow": network.allow or (), "--allow-tcp": network.allow_tcp}
    return network.mode == "open" or covers(lists.get(flag, ()), wanted)


def target(name: str, port: int) -> str:
    """What was asked for, as a person would write it; a query for a name has no port."""
    if not name:
        return f"what named no host, on port {port}," if port else "what named no host"
    return f"{name}:{port}" if port else name


def _sandbox(client: Client, ref: str) -> Sandbox | None:
    try:
        found = client.get(ref)
    except ApiError:
        return None
    return found if found.state == "running" else None
