"""Say what this machine and its sandboxd can do, then try it with a small virtual machine.

Usage:
  sandbox-cli doctor [options]

Exits with 1 when no sandboxd answers, or the trial fails.

Options:
  --no-probe     start no virtual machine
  --context=C    which sandboxd: `local` or unix:///path
  --json         print one object, at the end
  -h, --help     show this
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from cli import context, githard, show
from cli.run import create
from cli.status import Status
from sandboxd.client import Capabilities, Client, Create
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean, first_line

VERSION_S = 10.0
PROGRAMS = {"qemu": "qemu-system-x86_64", "bubblewrap": "bwrap"}
PROBE = Create(labels={"doctor": "probe"}, idle_timeout_secs=300)
KEY_WIDTH = 16

Fact = tuple[str, str | list[str] | dict[str, int]]


def main(args: dict[str, Any]) -> int:
    report = _Report(quiet=args["--json"])
    for fact in host():
        report.add("host", fact)
    try:
        endpoint = context.choose(args["--context"])
        report.add("sandboxd", ("socket", endpoint.client.path))
        for fact in offer(endpoint.client.capabilities()):
            report.add("sandboxd", fact)
        if not args["--no-probe"]:
            for fact in probe(endpoint.client):
                report.add("probe", fact)
    except SandboxError as error:
        report.fail(str(error))
    return report.end()


class _Report:
    """Facts as they are found: lines at once, or one object at the end."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._found: dict[str, Any] = {}

    def add(self, part: str, fact: Fact) -> None:
        key, value = fact
        if not self._quiet:
            if part not in self._found:
                sys.stdout.write(f"{part}\n")
            sys.stdout.write(f"  {key.ljust(KEY_WIDTH)}{clean(_words(value))}\n")
            sys.stdout.flush()
        self._found.setdefault(part, {})[key] = value

    def fail(self, error: str) -> None:
        self._found["error"] = error
        if not self._quiet:
            sys.stdout.flush()
            show.note(error)

    def end(self) -> int:
        if self._quiet:
            show.as_json(self._found)
        return 1 if "error" in self._found else 0


def host() -> Iterator[Fact]:
    """What can be known without a daemon."""
    uid = os.geteuid()
    yield "user", "root" if uid == 0 else f"uid {uid}: sandboxes without a network"
    yield from kvm()
    for name, program in PROGRAMS.items():
        yield name, program_version(program)
    try:
        yield "git", ".".join(str(part) for part in githard.version())
    except SandboxError as error:
        yield "git", str(error)


def kvm() -> Iterator[Fact]:
    """Whether KVM really runs code here; without it QEMU emulates."""
    try:
        import native

        answer = native.kvm_probe()
    except (ImportError, OSError) as fault:
        yield "kvm", "unknown"
        yield "because", str(fault)
        return
    yield "kvm", answer.state.value
    yield "because", answer.reason
    if answer.state is not native.KvmState.OK:
        yield "so", "machines are emulated, several times slower"


def program_version(program: str) -> str:
    path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        return f"missing: {program} is not installed"
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=VERSION_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as fault:
        return f"{path}: {fault}"
    return first_line(done.stdout.decode(errors="replace")) or f"{path} does not say its version"


def offer(found: Capabilities) -> Iterator[Fact]:
    """What this sandboxd gives."""
    yield "backend", found.backend
    yield "api", found.api_version
    yield "capabilities", sorted(name for name, on in found.capabilities.items() if on)
    yield "limits", dict(sorted(found.limits.items()))
    yield "network default", found.network_default.mode
    if found.network_default.allow:
        yield "which allows", list(found.network_default.allow)
    yield "network ceiling", found.network_ceiling
    yield "may allow", list(found.network_may_allow)


def probe(client: Client) -> Iterator[Fact]:
    """Boot a machine, run a command in it, end it."""
    began = time.monotonic()
    with Status() as status:
        sandbox = create(client, PROBE, status)
        try:
            booted = time.monotonic()
            status.say("running a command in it")
            result = client.run(sandbox.id, ["uname", "-r"], timeout_secs=60)
            ran = time.monotonic()
        finally:
            client.delete(sandbox.id)
    if result.exit_code != 0:
        raise SandboxError(f"the trial machine's command ended with {result.exit_code}")
    yield "boot", f"{booted - began:.1f} s"
    yield "command", f"{ran - booted:.2f} s"
    yield "guest kernel", clean(result.stdout.decode(errors="replace"))
    yield "end", f"{time.monotonic() - ran:.1f} s"


def _words(value: str | list[str] | dict[str, int]) -> str:
    if isinstance(value, dict):
        value = [f"{key}={number}" for key, number in value.items()]
    return value if isinstance(value, str) else " ".join(value) or "none"
