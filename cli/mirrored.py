"""What is kept in a mirror: commits that came back, each as a bundle with its whole history, and taken back from there.

In: a `Mirror`, a repository, a commit of it or the name of an object. Out: an object in the bucket, or
`refs/sandbox/mirror/<sandbox>`. What is uploaded needs nothing but itself. What is fetched is checked like everything
that comes back (`bringback`), and must be the commit its name states, built on this repository's first commit.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from cli import bringback, bucket, githard, session
from cli.bringback import Received
from cli.bucket import KINDS, Mirror, MirrorError, Object
from cli.bundle import BundleError, HeaderReader
from cli.githard import Bounds, GitError
from cli.repository import Repository
from cli.s3 import Store
from cli.session import SANDBOX_ID, Session
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

PIECE_BYTES = 64 * 1024
CHECK = "sandbox-mirror-check"
CHECK_BYTES = b"Written by sandbox-cli mirror check.\n"


def after(
    mirror: Mirror, environ: Mapping[str, str], config: Path, repo: Repository, sandbox: str, kind: str, ref: str
) -> tuple[bool, str]:
    """Uploads what `ref` names: whether it could, and a line that says so. A run does not fail for it."""
    try:
        return True, f"mirrored: {upload(mirror, environ, config, repo, sandbox, kind, ref).key}"
    except SandboxError as error:
        return False, f"not mirrored: {error}"


def upload(
    mirror: Mirror, environ: Mapping[str, str], config: Path, repo: Repository, sandbox: str, kind: str, ref: str
) -> Object:
    """Puts the commit that `ref` names, with its whole history, into the bucket, and its name into the record."""
    store = Store(mirror, environ)
    record = session.load(config, sandbox)
    came_as = ref.removeprefix(f"{bringback.REFS}/") if kind == "bring-back" else record.branch if record else ""
    # The name a person knows it by, as far as one can stand in an object's name: a run with and a push by it are one.
    called = came_as if SANDBOX_ID.fullmatch(came_as) else sandbox
    with _bundle(mirror, repo, ref) as (file, size, commit):
        made = bucket.name(mirror, first_commit(repo), called, kind, commit, time.time())
        store.put(made.key, file, size)
    if record is not None:
        session.update(config, sandbox, more_mirrored=made.key)
    return made


def record_of(config: Path, repo: Repository, called: str) -> Session | None:
    """Of the sandbox that objects are called after: by its id, else the last one of this repository that came back, or
    is to, by that name."""
    if record := session.load(config, called):
        return record
    mine = [one for one in session.every(config)[0] if one.repo == str(repo.top)]
    return next((one for one in reversed(mine) if one.sandbox and called in (one.brought, one.branch)), None)


def first_commit(repo: Repository) -> str:
    """By which the repository is known in a mirror: the smallest of the commits that HEAD's history begins with."""
    if repo.shallow:
        raise MirrorError("a shallow clone does not know how its history begins: git fetch --unshallow")
    try:
        return min(githard.run(repo.place, "rev-list", "--max-parents=0", "HEAD").stdout.decode().split())
    except GitError as error:
        raise MirrorError(f"the history of HEAD cannot be read: {error}") from None


def objects(mirror: Mirror, store: Store, root: str, sandbox: str = "") -> tuple[list[tuple[Object, int]], int]:
    """Of one repository, and one sandbox if it is named, oldest first, with sizes; and how many names were not ours."""
    prefix = f"{mirror.prefix}{root[: bucket.REPOSITORY_DIGITS]}/{f'{sandbox}/' if sandbox else ''}"
    found, strange = [], 0
    for one in store.list(prefix):
        made = bucket.read(mirror, one.key)
        if made is None or not one.key.startswith(prefix):
            strange += 1
        else:
            found.append((made, one.size_bytes))
    return sorted(found, key=lambda pair: (pair[0].time, -KINDS.index(pair[0].kind), pair[0].key)), strange


def newest(mirror: Mirror, store: Store, root: str, sandbox: str, record: Session | None) -> Object:
    """What was uploaded last for a sandbox: from the record where there is one, else as the bucket tells it."""
    known = [bucket.read(mirror, key) for key in record.mirrored] if record else []
    mine = [one for one in known if one is not None]
    if mine:
        return max(mine, key=lambda one: one.time)
    listed, _ = objects(mirror, store, root, sandbox)
    if not listed:
        holds = f"the bucket {mirror.bucket} holds nothing of {clean(sandbox)} and this repository"
        raise MirrorError(f"{holds}; see sandbox-cli mirror ls")
    return listed[-1][0]


def fetch(
    mirror: Mirror, store: Store, repo: Repository, wanted: Object, record: Session | None
) -> tuple[Received, bool]:
    """Takes an object over as refs/sandbox/mirror/<sandbox>, and says whether a record here knows of it.

    Raises MirrorError or BringBackError, and then nothing is changed.
    """
    root = first_commit(repo)
    if wanted.repository != root[: bucket.REPOSITORY_DIGITS]:
        raise MirrorError(f"{wanted.key} is of another repository: this one's begin with {root[:16]}/")
    recorded = _recorded(mirror, wanted, record)
    with tempfile.TemporaryFile(prefix="sandbox-") as file:
        store.get(wanted.key, file, mirror.most_bytes)
        file.flush()
        file.seek(0)
        limits = replace(bringback.DEFAULT, bundle_bytes=mirror.most_bytes)
        return bringback.receive_mirrored(repo, file, root, wanted.commit, wanted.sandbox, limits), recorded


def try_out(mirror: Mirror, store: Store) -> None:
    """Lists, writes one small object, always the same, and reads it back; raises MirrorError at what fails."""
    store.list(f"{mirror.prefix}{CHECK}")
    key = f"{mirror.prefix}{CHECK}"
    store.put(key, CHECK_BYTES, len(CHECK_BYTES))
    with tempfile.TemporaryFile(prefix="sandbox-") as file:
        store.get(key, file, len(CHECK_BYTES))
        file.seek(0)
        if file.read() != CHECK_BYTES:
            raise MirrorError(f"the bucket {mirror.bucket} gives back other bytes than were put there")


def _recorded(mirror: Mirror, wanted: Object, record: Session | None) -> bool:
    if record is None or not record.mirrored:
        return False
    if wanted.key in record.mirrored:
        return True
    for key in record.mirrored:
        known = bucket.read(mirror, key)
        if known and (known.kind, known.time) == (wanted.kind, wanted.time):
            raise MirrorError(f"{wanted.key} is not what was uploaded then: {known.commit}")
    return False


@contextmanager
def _bundle(mirror: Mirror, repo: Repository, ref: str) -> Iterator[tuple[IO[bytes], int, str]]:
    """A file with the bundle, its size, and the commit in it."""
    with tempfile.TemporaryFile(prefix="sandbox-") as file:
        try:
            bounds = Bounds(time_s=bringback.DEFAULT.time_s, file_bytes=mirror.most_bytes)
            githard.run(repo.place, "bundle", "create", "--quiet", "-", ref, stdout=file, bounds=bounds)
            size = os.fstat(file.fileno()).st_size
            file.seek(0)
            header = HeaderReader().feed(file.read(PIECE_BYTES))
        except (GitError, BundleError) as error:
            raise MirrorError(f"{ref} cannot be packed (max_object_mb is {mirror.max_object_mb}): {error}") from None
        if header is None or header.ref != ref or header.prerequisites:
            raise MirrorError(f"{ref} cannot be packed so that it stands for itself")
        file.seek(0)
        yield file, size, header.commit
