"""Run a command in a running sandbox, with this terminal, stdin, stdout and
stderr. Exits with its code.

Usage:
  sandbox-cli exec [options] SANDBOX -- CMD...

Ctrl-C goes to the command; the second time the command is killed.

Options:
  -w DIR, --workdir=DIR   where to start it (default: /sandbox/home)
  --context=C             which sandboxd: the name of a context (see
                          `context`), or an address
  -h, --help              show this
"""

from __future__ import annotations

from typing import Any

from cli import context, process


def main(args: dict[str, Any]) -> int:
    client = context.choose(args["--context"]).client
    return process.start_and_follow(client, args["SANDBOX"], args["CMD"], args["--workdir"])
