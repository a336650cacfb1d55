"""Take part in a process of a sandbox: its output from the start, and our input.

Usage:
  sandbox-cli attach [options] SANDBOX

Without --pid it is the first process that runs on a terminal, else the first
that runs, else the first. A process on a terminal gets this one, Ctrl-C
included; closing the window detaches. Otherwise Ctrl-C detaches. Detaching
leaves the process running. Exits with the process's code when it ends, 0 after
detaching.

Options:
  --pid=N        which process
  --checkpoint-every=D
                 bring what is in the sandbox's workspace back every 30s, 5m,
                 1h while attached, as `run` does
  --config=FILE  settings to use instead of the project's, for the mirror of
                 what is brought back
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address
  -h, --help     show this
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from cli import context, place, process, show
from cli.stream import Role
from sandboxd.client import Client

if TYPE_CHECKING:
    from cli.checkpoint import Checkpoints


def main(args: dict[str, Any]) -> int:
    given = args["--checkpoint-every"]
    client = context.choose(args["--context"]).client
    ref = args["SANDBOX"]
    with checkpoints(client, ref, given, args["--config"]) if given else nullcontext() as taken:
        one = process.find(client, ref, args["--pid"])
        code = process.follow(client, ref, one, role=Role.WATCHED)
    if taken:
        for note in taken.told():
            show.note(note)
    if code is None:
        show.note(f"detached from process {one.pid} of {ref}, which runs on")
        return 0
    return code


def checkpoints(
    client: Client, ref: str, given: str, file: str | None
) -> AbstractContextManager[Checkpoints | None]:
    """For the run that put a repository into `ref`; raises where there was none."""
    from pathlib import Path

    from cli import bucket, checkpoint, collect

    every_s = checkpoint.every(given)
    if not every_s:
        return nullcontext()
    config = Path(place.config_dir())
    record, repo = collect.recorded(config, client.get(ref).id, ref)
    mirror = bucket.in_force(os.environ, Path(record.repo), file)
    return checkpoint.Checkpoints(client, config, record, repo, every_s, mirror)
