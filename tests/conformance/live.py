"""The conformance suite against a `sandboxd` with real machines that is there for it alone.

    python -m tests.conformance.live [--firecracker] [ARGUMENT OF PYTEST...]

As root the daemon and the suite live in a host of the tests' own world, where `allowed.test` is a server and nothing
leads outside; as an ordinary user the daemon gives no sandbox a network. The policy is such that every row has
something to hold on to: a limit on lifetimes, short snapshot intervals, a list of names that may be allowed. With
`--firecracker` the machines run through that backend and the stand-ins for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.daemon import ROOT, Daemon, assets_dir
from tests.firecracker_standin.standin import Standin
from tests.world.world import missing, open_world

SUITE = ROOT / "conformance"
POLICY = """
network:
  ceiling: allowlist
  default: {mode: allowlist, allow: [allowed.test]}
  may_allow: ["*.test"]
limits:
  max_lifetime_secs: 3600
  min_snapshot_every_secs: 2
"""

# Without the plugins that happen to be installed beside pytest: the suite needs none, and they take seconds to load.
PLUGINS = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
ENVIRONMENT = os.environ | {PLUGINS: "1"}
FIRECRACKER = (sys.executable, "-m", "tests.firecracker_standin.daemon", "--backend", "firecracker")


@contextmanager
def daemon(directory: Path, *, firecracker: bool = False) -> Iterator[tuple[Daemon, tuple[str, ...]]]:
    """A daemon, and what a command line that is to be in its network begins with."""
    directory.mkdir(exist_ok=True)
    policy = directory / "policy.yaml"
    policy.write_text(POLICY)
    with ExitStack() as opened:
        prefix: tuple[str, ...] = ()
        if not missing():
            prefix = tuple(opened.enter_context(open_world()).host.prefix)
        flags: tuple[str, ...] = ("--policy", str(policy))
        if not firecracker:
            yield opened.enter_context(Daemon(directory, prefix=prefix, flags=flags)), prefix
            return
        standin = opened.enter_context(Standin(directory / "fc"))
        flags += ("--firecracker", str(standin.firecracker), "--jailer", str(standin.jailer))
        yield opened.enter_context(Daemon(directory, prefix=prefix, flags=flags, command=FIRECRACKER)), prefix


def suite(endpoint: str, *arguments: str) -> list[str]:
    """The command line of a run, as a person would type it."""
    return [sys.executable, "-m", "pytest", str(SUITE), "--endpoint", endpoint, *arguments]


def main(arguments: Sequence[str]) -> int:
    firecracker = "--firecracker" in arguments
    if firecracker and os.geteuid() != 0:
        # An ordinary user's jail shows the stand-in nothing of its companion.
        print("conformance-firecracker: let root run it: the stand-in for the jailer needs that", file=sys.stderr)
        return 1
    arguments = [argument for argument in arguments if argument != "--firecracker"]
    # On the images' file system: Firecracker's jails hold further names of them.
    beside = assets_dir().parent if firecracker and os.access(assets_dir().parent, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="sbx-", dir=beside) as directory,
        daemon(Path(directory) / "d", firecracker=firecracker) as (running, prefix),
    ):
        command = [*prefix, *suite(f"unix://{running.socket}", *arguments)]
        return subprocess.run(command, check=False, env=ENVIRONMENT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
