"""Take part in a process of a sandbox: its output from the start, and our input.

Usage:
  sandbox-cli attach [options] SANDBOX

Without --pid it is the first process that runs on a terminal, else the first that runs, else the first. A
process on a terminal gets this one, Ctrl-C included; closing the window detaches. Otherwise Ctrl-C detaches.
Detaching leaves the process running. Exits with the process's code when it ends, 0 after detaching.

Options:
  --pid=N        which process
  --context=C    which sandboxd: the name of a context (see `context`), or an address
  -h, --help     show this
"""

from __future__ import annotations

from typing import Any

from cli import context, process, show
from cli.stream import Role


def main(args: dict[str, Any]) -> int:
    client = context.choose(args["--context"]).client
    ref = args["SANDBOX"]
    one = process.find(client, ref, args["--pid"])
    code = process.follow(client, ref, one, role=Role.WATCHED)
    if code is None:
        show.note(f"detached from process {one.pid} of {ref}, which runs on")
        return 0
    return code
