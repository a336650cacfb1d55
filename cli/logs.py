"""Print what a process wrote from its start, and follow it to its end; its stderr
goes to stderr.

Usage:
  sandbox-cli logs [options] SANDBOX

Without --pid it is the first process that runs on a terminal, else the first
that runs, else the first. Exits with 0 when the process has ended, whatever
its own exit code.

Options:
  --pid=N        which process
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address
  -h, --help     show this
"""

from __future__ import annotations

import os
from typing import Any

from cli import context, process, show


def main(args: dict[str, Any]) -> int:
    client = context.choose(args["--context"]).client
    ref = args["SANDBOX"]
    one = process.find(client, ref, args["--pid"])
    for piece in client.output(ref, one.pid):
        if piece.dropped_bytes:
            show.note(f"{piece.dropped_bytes} bytes of {piece.stream} are not kept any more")
        view = memoryview(piece.data)
        while view:
            view = view[os.write(2 if piece.stream == "stderr" else 1, view) :]
    return 0
