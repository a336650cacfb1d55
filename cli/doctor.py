"""Say what this machine and its sandboxd can do, then try it with small virtual
machines.

Usage:
  sandbox-cli doctor [options]

Facts come at once. Then a machine is started, and where sandboxes may have a
network a second one: the first reaches a name it was allowed, and must be
refused one it was not, a bare address, another resolver, UDP on port 443 and
the second machine. Each is said to have passed, been refused, or FAILED. Exits
with 1 when one FAILED, no sandboxd answers, there is no trial, or a run with
the profile that was asked for could not be had.

Options:
  --profile=P    dev or prod: whether a run with it can be had from this
                 sandboxd
  --no-probe     start no virtual machine
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address
  --json         print one object, at the end
  -h, --help     show this
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Thread
from typing import Any

from cli import context, facts, profile, show, trial
from cli.facts import Fact
from cli.running import create
from cli.status import Status
from sandboxd.client import Capabilities, Client, Create, Endpoint, Resources, Sandbox
from sandboxd.errors import NotFound, SandboxError
from sandboxd.termsafe import clean

PROBE = Create(labels={"doctor": "probe"}, idle_timeout_secs=300)
KEY_WIDTH = 16


def main(args: dict[str, Any]) -> int:
    report = Report(quiet=args["--json"])
    wanted = args["--profile"] and profile.named(args["--profile"], "--profile").name
    for fact in facts.host():
        report.add("host", fact)
    try:
        endpoint = context.choose(args["--context"])
        report.add("sandboxd", ("context", endpoint.name))
        for fact in link(endpoint.client.endpoint):
            report.add("sandboxd", fact)
        found = endpoint.client.capabilities()
        for fact in offer(found):
            report.add("sandboxd", fact)
        for fact in machine(endpoint.client):
            report.add("sandboxd", fact)
        if wanted:
            report.deliver(wanted, undeliverable(wanted, found))
        if not args["--no-probe"]:
            for part, fact in probe(endpoint.client, found):
                report.add(part, fact)
    except SandboxError as error:
        report.fail(str(error))
    return report.end()


class Report:
    """Facts as they are found: lines at once, or one object at the end."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self.found: dict[str, Any] = {}
        self._failed: list[str] = []
        self._undeliverable = ""

    def add(self, part: str, fact: Fact) -> None:
        key, value = fact
        if not self._quiet:
            if part not in self.found:
                sys.stdout.write(f"{part}\n")
            for number, line in enumerate(fitted(_lines(value))):
                sys.stdout.write(f"  {('' if number else key).ljust(KEY_WIDTH)}{line}\n")
            sys.stdout.flush()
        self.found.setdefault(part, {})[key] = value
        if isinstance(value, str) and value.startswith(trial.FAILED):
            self._failed.append(key)

    def deliver(self, wanted: str, lacks: list[str]) -> None:
        """A profile that was asked for, and why a run with it cannot be had."""
        self.add("sandboxd", (f"profile {wanted}", [f"CANNOT be had: {why}" for why in lacks] or "can be had"))
        if lacks:
            where = f'see "profile {wanted}" in "sandboxd"' if self._quiet else f"see above, profile {wanted}"
            self._undeliverable = f"no run with profile {wanted} can be had here: {where}"

    def fail(self, error: str) -> None:
        self.found["error"] = error
        if not self._quiet:
            sys.stdout.flush()
            show.note(error)

    def end(self) -> int:
        if self._failed and "error" not in self.found:
            self.fail(f"a sandbox's network is not what it should be: {', '.join(self._failed)}")
        elif self._undeliverable and "error" not in self.found:
            self.fail(self._undeliverable)
        if self._quiet:
            show.as_json(self.found)
        return 1 if "error" in self.found else 0


def link(endpoint: Endpoint) -> Iterator[Fact]:
    """How it is reached, and what it is shown."""
    if endpoint.socket_path:
        yield "socket", endpoint.socket_path
    else:
        yield "address", endpoint.address
        tls = "TLS" if endpoint.address.startswith("https://") else "no TLS: loopback of this machine"
        yield "transport", f"{tls}, with a certificate of ours" if endpoint.cert_file else tls
    yield "token", f"the one in {endpoint.token_file}" if endpoint.token_file else "none: the socket is its owner's"


def machine(client: Client) -> Iterator[Fact]:
    """What the machine it runs on has, what is left of that, and what waits there."""
    try:
        node = client.node()
    except NotFound:
        # A gateway in front of several.
        return
    yield "version", node.version
    yield "capacity", _amounts(node.capacity)
    yield "free", _amounts(node.free)
    yield "running", f"{node.running}"
    if node.cordoned:
        yield "cordoned", "it takes no new sandboxes"
    if node.pooled:
        yield "waiting", dict(sorted(node.pooled.items()))
    yield "its images", sorted(node.images)


def undeliverable(wanted: str, found: Capabilities) -> list[str]:
    """What this server lacks for an agent's run with a profile, each with what to do about it."""
    lacks = []
    if found.network_ceiling == "none":
        lacks.append("its network ceiling is none, so no agent reaches its provider: let root start a sandboxd")
    elif not found.capabilities.get("egress_allowlist"):
        lacks.append("it cannot hold sandboxes to names (egress_allowlist)")
    elif wanted == "prod" and not (found.network_may_allow or found.network_may_allow_tcp):
        lacks.append("its policy lets no run name hosts (may_allow), and prod reaches only those that a run names")
    if not found.capabilities.get("workspace_bundle"):
        lacks.append("it takes no repository (workspace_bundle)")
    return lacks


def _amounts(of: Resources) -> str:
    return f"{of.cpus:g} cpus, {of.memory_mb} MiB of memory, {of.disk_mb} MiB of disk"


def offer(found: Capabilities) -> Iterator[Fact]:
    """What this sandboxd gives."""
    yield "backend", found.backend
    yield "api", found.api_version
    yield "capabilities", sorted(name for name, on in found.capabilities.items() if on)
    if found.lacking:
        yield "without", [f"{name}: {why}" for name, why in sorted(found.lacking.items())]
    yield "limits", dict(sorted(found.limits.items()))
    yield "network default", found.network_default.mode
    if found.network_default.allow:
        yield "which allows", list(found.network_default.allow)
    yield "network ceiling", found.network_ceiling
    yield "may allow", list(found.network_may_allow)
    yield "on other ports", list(found.network_may_allow_tcp)


def probe(client: Client, found: Capabilities) -> Iterator[tuple[str, Fact]]:
    """Boot a machine, run a command in it, try its network beside a second one, end them."""
    with ExitStack() as machines:
        with Status() as status:
            status.say("looking for a name that can be reached")
            aim = trial.choose(found)
            asked, second = PROBE, None
            if isinstance(aim, trial.Target):
                asked = PROBE._replace(network=aim.request)
                beside = asked._replace(labels={"doctor": "neighbour"})
                second = machines.enter_context(Neighbour(client, beside))
            began = time.monotonic()
            sandbox = create(client, asked, status)
            machines.callback(client.delete, sandbox.id)
            booted = time.monotonic()
            status.say("running a command in it")
            result = client.run(sandbox.id, ["uname", "-r"], timeout_secs=60)
            ran = time.monotonic()
        if result.exit_code != 0:
            raise SandboxError(f"the trial machine's command ended with {result.exit_code}")
        yield "probe", ("boot", f"{booted - began:.1f} s")
        yield "probe", ("command", f"{ran - booted:.2f} s")
        yield "probe", ("guest kernel", clean(result.stdout.decode(errors="replace")))
        if isinstance(aim, str) or second is None:
            yield "network", ("trial", f"not tested: {aim}")
        else:
            with Status() as status:
                status.say("trying its network")
                tried = list(trial.run(client, sandbox, second.sandbox(), aim))
            for fact in tried:
                yield "network", fact
        ending = time.monotonic()
        machines.close()
    yield "end", ("took", f"{time.monotonic() - ending:.1f} s")


class _Silent(Status):
    """For who waits beside another, whose line it is."""

    def say(self, text: str) -> None:
        pass


class Neighbour:
    """A second machine that boots meanwhile, gone at the end of its block."""

    def __init__(self, client: Client, asked: Create) -> None:
        self._client, self._asked = client, asked
        self._found: Sandbox | str = "it could not be started"
        self._thread = Thread(target=self._create, daemon=True)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        found = self.sandbox()
        if isinstance(found, Sandbox):
            self._client.delete(found.id)

    def sandbox(self) -> Sandbox | str:
        """The machine, once it runs; or why there is none."""
        self._thread.join()
        return self._found

    def _create(self) -> None:
        try:
            self._found = create(self._client, self._asked, _Silent())
        except SandboxError as error:
            self._found = str(error)


def fitted(lines: list[str]) -> Iterator[str]:
    """Safe, and broken between words where the terminal ends."""
    width = show.columns()
    for line in map(clean, lines):
        room = len(line) if width is None else max(width - KEY_WIDTH - 2, KEY_WIDTH)
        yield from textwrap.wrap(line, room or 1, break_long_words=False, break_on_hyphens=False) or [""]


def _lines(value: str | list[str] | dict[str, int]) -> list[str]:
    """Words on a line; sentences on a line each."""
    if isinstance(value, dict):
        value = [f"{key}={number}" for key, number in value.items()]
    if isinstance(value, str):
        return [value]
    return value if any(" " in one for one in value) else [" ".join(value) or "none"]
