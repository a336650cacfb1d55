"""Open a shell in a running sandbox: bash where the image has it, else sh.
Leaving it keeps the sandbox.

Usage:
  sandbox-cli shell [options] SANDBOX

Options:
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address
  -h, --help     show this
"""

from __future__ import annotations

from typing import Any

from cli import context, process, terminal
from sandboxd.errors import SandboxError

SHELL = ("sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash -l; exec sh -l")


def main(args: dict[str, Any]) -> int:
    if not terminal.is_ours():
        raise SandboxError("shell needs a terminal; without one use: sandbox-cli exec SANDBOX -- sh")
    client = context.choose(args["--context"]).client
    return process.start_and_follow(client, args["SANDBOX"], SHELL, None)
