"""End sandboxes: their processes stop, their disks are discarded. Stops at the
first failure.

Usage:
  sandbox-cli kill [options] SANDBOX...

Options:
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address
  -h, --help     show this
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cli import context, place, session, show, wording
from sandboxd.errors import ApiError, SandboxError

ENDED = "terminated"


def main(args: dict[str, Any]) -> int:
    client = context.choose(args["--context"]).client
    config = Path(place.config_dir())
    for ref in args["SANDBOX"]:
        try:
            sandbox = client.get(ref)
            client.delete(sandbox.id)
        except ApiError as error:
            raise SandboxError(wording.about(error.message, ref)) from None
        record = session.load(config, sandbox.id)
        session.forget(config, sandbox.id)
        if record and record.checkpoint:
            from cli.bringback import CHECKPOINTS  # loads what works on repositories

            show.note(f"the checkpoint of {record.checkpoint_at} stays: {CHECKPOINTS}/{sandbox.id}")
        if sandbox.state == ENDED:
            show.note(f"{ref} had already ended")
        show.line(ref)
    return 0
