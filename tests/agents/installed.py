"""Real agents for the tests, each installed once by the product itself and kept as its tools volume.

    python -m tests.agents.installed AGENT...

starts a daemon in this machine's own network, where the package registries are, lets `sandbox-cli agent` install each
agent as it does for anybody, and keeps the volume's file beside the assets. The volume's name stands for the version
and the way of installing, so another one of either is installed again; a daemon of the tests gets a copy in its state
directory. An emulated machine needs minutes for one, which is why it is not done anew for every run.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.agents import tools
from cli.agents.table import AGENTS, Agent, Npm
from tests.daemon import Daemon, assets_dir

INSTALL_S = 2400
ASK_S = 60


class NotHere(Exception):
    """An agent that cannot be had here; says why."""


def kept(agent: Agent) -> Path:
    """Where its volume is, or is to be."""
    return assets_dir().parent / "test-agents" / f"{tools.volume(agent)}.ext4"


def why_not(agent: Agent) -> str:
    """Why this version cannot be had from the registry that this machine uses, or an empty text."""
    source = agent.source
    if not isinstance(source, Npm):
        return f"{agent.name} is no package of the npm registry"
    npm = shutil.which("npm")
    if npm is None:
        return "this machine has no npm that would say which registry it uses"
    asked = subprocess.run([npm, "config", "get", "registry"], capture_output=True, text=True, timeout=60, check=False)
    address = f"{asked.stdout.strip().rstrip('/')}/{urllib.parse.quote(source.package, safe='@')}/{source.version}"
    try:
        with urllib.request.urlopen(address, timeout=ASK_S, context=ssl.create_default_context()) as answer:
            json.load(answer)
    except (OSError, ValueError) as fault:
        return f"{source.package} {source.version} cannot be had here: {fault}"
    return ""


def put(agent: Agent, state: Path) -> None:
    """A copy of its volume for a daemon that is not started yet. Raises `NotHere`, and RuntimeError where it could be
    had and was not installed."""
    if not kept(agent).exists():
        if why := why_not(agent):
            raise NotHere(why)
        raise RuntimeError(f"{agent.name} can be had and is not installed: make agents-test does that")
    volumes = state / "volumes"
    volumes.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "--sparse=always", str(kept(agent)), str(volumes / kept(agent).name)], check=True)


def install(agent: Agent) -> float:
    """By the product, from the real registry; seconds."""
    kept(agent).parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sbx-", dir="/tmp") as place:
        os.chmod(place, 0o755)
        daemon = Daemon(Path(place) / "daemon")
        with daemon:
            began = time.monotonic()
            ran = daemon.cli("agent", agent.name, "--no-workspace", "--", "--version", timeout_s=INSTALL_S)
            took = time.monotonic() - began
            if ran.returncode != 0 or b"could not be installed" in ran.stderr:
                raise RuntimeError(ran.stderr.decode(errors="replace"))
            print(f"{agent.name}: {ran.stdout.decode(errors='replace').strip()}")
        source = daemon.state / "volumes" / kept(agent).name
        unfinished = kept(agent).with_suffix(".new")
        subprocess.run(["cp", "--sparse=always", str(source), str(unfinished)], check=True)
        unfinished.rename(kept(agent))
    return took


@contextmanager
def alone() -> Iterator[None]:
    """No two of us at once."""
    directory = assets_dir().parent / "test-agents"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    if os.geteuid() != 0:
        print("real agents: not installed, since only a root sandboxd gives sandboxes a network")
        return 0
    with alone():
        for name in sys.argv[1:]:
            agent = AGENTS[name]
            if kept(agent).exists():
                continue
            if why := why_not(agent):
                print(f"real agents: {why}")
                continue
            print(f"real agents: installing {name}; minutes in an emulated machine", flush=True)
            print(f"real agents: {name} took {install(agent):.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
