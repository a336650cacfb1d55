"""What came back, kept in a bucket of an S3-compatible store too, and fetched
from there.

Usage:
  sandbox-cli mirror check [--config=FILE] [--json]
  sandbox-cli mirror (ls | list) [--config=FILE] [--project=DIR] [--json]
              [SANDBOX]
  sandbox-cli mirror push [--config=FILE] [--project=DIR] [--json] SANDBOX
  sandbox-cli mirror fetch [--config=FILE] [--project=DIR] [--json] OBJECT
  sandbox-cli mirror (-h | --help)

`check` lists the bucket, writes one small object and reads it back. `ls` shows
what the bucket holds of this repository. `push` uploads what came back from a
sandbox, by its id or the name below refs/sandbox/. Objects are called after
that name, such as a run's --name, and after the id where there is none.
`fetch` takes an object, or the last one that is called SANDBOX, into
refs/sandbox/mirror/SANDBOX; no branch is touched. Nothing is ever deleted from
the bucket. The settings are `mirror` in your config.yaml (docs/mirror.md);
with them, `run` and `bring-back` upload by themselves.

Options:
  --config=FILE   settings to use instead of the project's
  --project=DIR   the repository (default: the one around the current
                  directory)
  --json          print objects
  -h, --help      show this
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cli import bringback, bucket, config, gate, mirrored, place, repository, show
from cli.bringback import SHORT
from cli.bucket import Mirror, MirrorError
from cli.repository import Repository
from cli.s3 import Store
from cli.session import SANDBOX_ID
from sandboxd.termsafe import clean

HEAD = ("SANDBOX", "KIND", "TIME", "COMMIT", "SIZE")
FLEET = "fleet/"


def main(args: dict[str, Any]) -> int:
    project = config.directory(args["--project"])
    mirror = bucket.in_force(os.environ, project, args["--config"])
    if mirror is None:
        where = clean(str(config.user_file(os.environ)))
        raise MirrorError(f"no mirror is set up: write `mirror` into {where} (see docs/mirror.md)")
    store = Store(mirror, os.environ)
    if args["check"]:
        return _check(mirror, store, args["--json"])
    repo = repository.discover(project)
    if repo is None:
        raise MirrorError("not in a git repository: --project names one")
    if args["push"]:
        return _push(mirror, repo, args["SANDBOX"], args["--json"])
    if args["fetch"]:
        return _fetch(mirror, store, repo, args["OBJECT"], args["--json"])
    return _list(mirror, store, repo, args["SANDBOX"], args["--json"])


def _check(mirror: Mirror, store: Store, as_json: bool) -> int:
    mirrored.try_out(mirror, store)
    where = mirror.endpoint or f"Amazon S3, {mirror.region}"
    if as_json:
        shown = {key: value for key, value in asdict(mirror).items() if key != "config"}
        show.as_json(shown | {"written": True, "read": True})
        return 0
    show.line(f"bucket {mirror.bucket} at {where}: listed, written and read with {mirror.access_key_env}")
    show.line(f"objects begin with '{mirror.prefix}' and have {mirror.max_object_mb} MiB at most")
    show.line(f"uploaded: what comes back{' and checkpoints' if mirror.every_checkpoint else ''}")
    return 0


def _list(mirror: Mirror, store: Store, repo: Repository, sandbox: str | None, as_json: bool) -> int:
    if sandbox is not None and not SANDBOX_ID.fullmatch(sandbox):
        raise MirrorError(f"'{clean(sandbox)[:100]}' is neither a sandbox's name nor its id")
    found, strange = mirrored.objects(mirror, store, mirrored.first_commit(repo), sandbox or "")
    if strange:
        show.note(f"{strange} names in the bucket are not ones that sandbox-cli gives: passed over")
    if as_json:
        show.as_json([asdict(one) | {"time": one.shown_time, "size_bytes": size} for one, size in found])
        return 0
    rows = [(o.sandbox, o.kind, o.shown_time, o.commit[:SHORT], show.bytes_size(size)) for o, size in found]
    sys.stdout.write(show.table(HEAD, rows, whole=("SANDBOX",), drop=("SIZE",)))
    return 0


def _push(mirror: Mirror, repo: Repository, named: str, as_json: bool) -> int:
    settings = Path(place.config_dir())
    sandbox, name = _meant(settings, repo, named)
    ref = f"{bringback.REFS}/{name}"
    if bringback.commit_of(repo, ref) is None:
        raise MirrorError(
            f"{ref} is not in this repository: nothing has come back under that name; "
            "of a run that had a --name, what came back is under that one"
        )
    made = mirrored.upload(mirror, os.environ, settings, repo, sandbox, "bring-back", ref)
    if as_json:
        show.as_json(asdict(made) | {"time": made.shown_time})
    else:
        show.line(made.key)
    return 0


def _meant(settings: Path, repo: Repository, named: str) -> tuple[str, str]:
    """A sandbox, and the name below refs/sandbox/ of what came back from it."""
    if named.startswith(FLEET):
        from cli.fleet import state

        fleet = state.Store.of(str(settings), repo.common_dir).read()
        task = fleet.task(named.removeprefix(FLEET)) if fleet else None
        if task is None or not task.sandbox:
            raise MirrorError(f"the last fleet in this repository has no task {clean(named.removeprefix(FLEET))[:100]}")
        return task.sandbox, named
    record = mirrored.record_of(settings, repo, named) if SANDBOX_ID.fullmatch(named) else None
    name = record.brought or record.branch if record and record.sandbox == named else named
    bringback.check_name(name)
    return record.sandbox if record else named, name


def _fetch(mirror: Mirror, store: Store, repo: Repository, given: str, as_json: bool) -> int:
    settings = Path(place.config_dir())
    if "/" in given:
        wanted = bucket.read(mirror, given)
        if wanted is None:
            raise MirrorError(f"'{clean(given)[:200]}' is not the name of an object that sandbox-cli uploads")
        record = mirrored.record_of(settings, repo, wanted.sandbox)
    elif SANDBOX_ID.fullmatch(given):
        record = mirrored.record_of(settings, repo, given)
        wanted = mirrored.newest(mirror, store, mirrored.first_commit(repo), given, record)
    else:
        raise MirrorError(f"'{clean(given)[:100]}' is neither a sandbox's name or id nor an object's name")
    received, recorded = mirrored.fetch(mirror, store, repo, wanted, record)
    base = record.base if record else repo.head_commit
    review = gate.review(repo, base, received.commit)
    if as_json:
        show.as_json({"key": wanted.key, "recorded": recorded} | asdict(received) | gate.as_json(review))
    if not recorded:
        show.note("nothing here remembers this upload: that it is what came back, only the bucket says")
    show.note(f"fetched {received.commit} to {received.ref}")
    if received.replaced:
        show.note(f"it pointed to {received.replaced} before, which this does not build on")
    for line in gate.told(base, received.ref, review):
        show.note(line)
    return 0
