"""Bring the commits of a run's sandbox into refs/sandbox/NAME of the repository
it came from, once more.

Usage:
  sandbox-cli bring-back [options] SANDBOX

What is not committed in the sandbox is committed there first. No branch, index
or working tree of the repository is touched. Works as long as the sandbox
runs.

Options:
  --name=NAME    the name below refs/sandbox/ (default: the one the run was
                 given, else the sandbox's id)
  --config=FILE  settings to use instead of the project's, for the mirror
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address (default: the one of the run)
  --json         print the result as an object
  -h, --help     show this
"""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cli import bringback, bucket, checkpoint, context, gate, place, repository, session, show
from cli.bringback import Received
from cli.bucket import Mirror
from cli.gate import Review
from cli.gather import BRANCH, Gathered, gather
from cli.repository import Repository
from cli.session import Session
from cli.status import Status
from sandboxd.client import Client
from sandboxd.errors import Conflict, NotFound, SandboxError
from sandboxd.termsafe import clean


def main(args: dict[str, Any]) -> int:
    config = Path(place.config_dir())
    record = session.load(config, args["SANDBOX"]) if session.SANDBOX_ID.fullmatch(args["SANDBOX"]) else None
    endpoint = context.choose(args["--context"] or (record.context if record else None))
    try:
        sandbox = endpoint.client.get(args["SANDBOX"])
    except NotFound:
        if record and record.context == endpoint.client.endpoint.address:
            raise SandboxError(_over(config, args["SANDBOX"], "", record)) from None
        raise
    record = record or session.load(config, sandbox.id)
    if sandbox.state == "terminated":
        raise SandboxError(_over(config, args["SANDBOX"], sandbox.name or sandbox.id, record))
    record, repo = recorded(config, sandbox.id, args["SANDBOX"])
    if args["--name"]:
        bringback.check_name(args["--name"])
    name = args["--name"] or record.branch
    gathered, received = collect(endpoint.client, sandbox.id, repo, record.base, name)
    remember(config, sandbox.id, received)
    review = gate.review(repo, record.base, received.commit) if received else Review()
    if args["--json"]:
        show.as_json(result(received, review))
    tell(gathered, received, record.base, review)
    if received:
        try:
            mirror = bucket.in_force(os.environ, Path(record.repo), args["--config"])
        except SandboxError as error:
            show.note(f"not mirrored: {error}")
        else:
            if mirror:
                to_mirror(mirror, config, repo, sandbox.id, received)
    return 0


def recorded(config: Path, sandbox: str, ref: str) -> tuple[Session, Repository]:
    """The record of a sandbox, and the repository it is of; raises where there is none."""
    record = session.load(config, sandbox)
    if record is None:
        raise SandboxError(f"no run from this account put a repository into {clean(ref)}")
    repo = repository.discover(Path(record.repo))
    if repo is None:
        raise SandboxError(f"there is no repository at {clean(record.repo)} any more")
    return record, repo


def _over(config: Path, ref: str, name: str, record: Session | None) -> str:
    """What there is to say of a sandbox that is gone. Its record goes too, once there is nothing in it to find."""
    if record and not record.checkpoint:
        session.forget(config, record.sandbox)
    return ended(ref, name, record)


def ended(ref: str, name: str, record: Session | None) -> str:
    """Why nothing more comes of it, and where to look for what came. A record that is gone was done with."""
    if record and record.checkpoint and not record.done:
        return f"{ref} has ended; {checkpoint.where(record)}: sandbox-cli recover"
    if record and not record.brought:
        return f"{ref} has ended, and nothing had been brought back from it"
    where = f"{bringback.REFS}/{record.brought if record else name}"
    return f"{ref} has ended; what it brought back{'' if record else ', if anything,'} is {where}"


def collect(
    client: Client, sandbox: str, repo: Repository, base: str, name: str
) -> tuple[Gathered, Received | None]:
    """Commit in the guest, fetch the bundle, check and take it; None when there is nothing new."""
    gathered = gather(client, sandbox, base)
    try:
        with bringback.returned(client.get_workspace(sandbox, base, BRANCH)) as bundle:
            return gathered, bringback.receive(repo, bundle, base, name)
    except Conflict:
        # So is a sandbox answered that ended just now, or whose disk is full: then the work is not "nothing".
        if gathered.nothing_new:
            return gathered, None
        raise


def remember(config: Path, sandbox: str, received: Received | None) -> Session | None:
    """Writes into the record that it was asked for, and as what something came back."""
    came: dict[str, Any] = {"brought": received.ref.removeprefix(f"{bringback.REFS}/")} if received else {}
    return session.update(config, sandbox, brought_back=True, **came)


def to_mirror(mirror: Mirror, config: Path, repo: Repository, sandbox: str, received: Received) -> None:
    """What came back goes to the person's mirror too; that it does not is said, and no more."""
    from cli import mirrored  # loads the client of the store

    with Status() as status:
        status.say(f"uploading to the bucket {mirror.bucket}")
        done, said = mirrored.after(mirror, os.environ, config, repo, sandbox, "bring-back", received.ref)
    show.note(said)
    if not done:
        name = received.ref.removeprefix(f"{bringback.REFS}/")
        show.note(f"try again with: sandbox-cli mirror push{mirror.named} {shlex.quote(name)}")


def tell(gathered: Gathered, received: Received | None, base: str, review: Review) -> None:
    """What came back, how to look at it, and what of it would run later."""
    for note in gathered.notes:
        show.note(note)
    if received is None:
        show.note("no new commits: nothing to bring back")
        return
    many = "1 commit" if received.commits == 1 else f"{received.commits} commits"
    show.note(f"brought back {many} to {received.ref}")
    if received.replaced:
        show.note(f"it pointed to {received.replaced} before, which the new commits do not build on")
        kept = shlex.quote(f"{received.ref.removeprefix(bringback.REFS + '/')}-before")
        show.note(f"the former work is kept nowhere else: git branch {kept} {received.replaced}")
    for line in gate.told(base, received.ref, review):
        show.note(line)


def result(received: Received | None, review: Review) -> dict[str, Any]:
    """As JSON prints it; nulls when there was nothing new."""
    nothing = {"ref": None, "commit": None, "commits": 0, "replaced": None}
    return (asdict(received) if received else nothing) | gate.as_json(review)
