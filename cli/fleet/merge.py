"""A merge into what is checked out, made by git as githard runs it: no hook, driver, filter, signature or editor.

In: a repository whose tracked files are as in HEAD, and a commit. Out: the merge commit, or the files in conflict, with
the merge left to the person; or an error, and then nothing was changed. A file that the person's own git would pass
through a filter on its way into the working tree (git-lfs, git-crypt) would be written unfiltered: `unfiltered` says
which, and such a merge is for git itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cli import githard, place
from cli.githard import Bounds, GitError
from cli.repository import LISTING, Repository
from sandboxd.errors import SandboxError

# A merge that is cut off leaves half a working tree, so its bounds are wide.
BOUNDS = Bounds(time_s=3600, cpu_s=3600)
# What branch.<name>.mergeOptions, merge.* and pull.* could say otherwise.
OPTIONS = (
    "--no-ff", "--commit", "--no-squash", "--strategy=ort", "--no-autostash", "--no-stat", "--no-log", "--no-signoff",
    "--no-rerere-autoupdate", "--cleanup=verbatim",
)  # fmt: skip
UNFINISHED = {
    "MERGE_HEAD": "merge", "CHERRY_PICK_HEAD": "cherry-pick", "REVERT_HEAD": "revert", "BISECT_LOG": "bisect",
    "rebase-merge": "rebase", "rebase-apply": "rebase",
}  # fmt: skip


class Merged(NamedTuple):
    """`commit` is the merge, "" where there are `conflicts`."""

    commit: str
    conflicts: tuple[str, ...] = ()


def unfinished(repo: Repository) -> str:
    """What the person is in the middle of, "" for nothing."""
    return next((what for name, what in UNFINISHED.items() if os.path.lexists(repo.git_dir / name)), "")


def unfiltered(repo: Repository, commit: str) -> tuple[str, str] | None:
    """A path that a merge of `commit` may write and the filter it would miss; None where there is none.

    Which attributes hold after a merge is not known before it, so any change of `.gitattributes` counts where a
    filter is configured at all. Without following renamed directories, which `merge` does not do, every path that it
    writes differs between HEAD and `commit`.
    """
    names = (*githard.config_names(repo.place), *githard.persons_names())
    filters = {name for name in map(_filter, names) if name}
    if not filters:
        return None
    listed = githard.run(
        repo.place, "diff", "--name-only", "-z", "--no-renames", "--diff-filter=d", "HEAD", commit, bounds=LISTING
    )  # fmt: skip
    paths = listed.stdout.split(b"\0")[:-1]
    for path in paths:
        if path.rpartition(b"/")[2].lower() == b".gitattributes":
            return os.fsdecode(path), os.fsdecode(min(filters))
    answer = githard.run(
        repo.place, "check-attr", "--cached", "--stdin", "-z", "filter", stdin=b"".join(path + b"\0" for path in paths),
        bounds=LISTING, settings=(("core.attributesFile", _persons_attributes()),),
    )  # fmt: skip
    fields = answer.stdout.split(b"\0")[:-1]
    for path, name in zip(fields[0::3], fields[2::3], strict=True):
        if name in filters:
            return os.fsdecode(path), os.fsdecode(name)
    return None


def merge(repo: Repository, commit: str, message: str, identity: Mapping[str, str]) -> Merged:
    """Raises SandboxError where git refuses, for a file in the way for instance."""
    settings = [("merge.directoryRenames", "false")]
    if repo.branch:
        settings.append((f"branch.{repo.branch}.mergeOptions", ""))
    with _undisturbed():
        try:
            done = githard.run(
                repo.place, "merge", *OPTIONS, "-m", message, commit, settings=settings, identity=identity,
                bounds=BOUNDS, accept=(0, 1),
            )  # fmt: skip
        except GitError as error:
            raise SandboxError(f"git refuses the merge: {error.why}") from None
    if done.status == 0:
        return Merged(head(repo))
    if not os.path.lexists(repo.git_dir / "MERGE_HEAD"):
        raise SandboxError(f"git refuses the merge: {done.message}")
    listed = githard.run(repo.place, "diff", "--name-only", "-z", "--diff-filter=U", bounds=LISTING)
    return Merged("", tuple(os.fsdecode(path) for path in listed.stdout.split(b"\0")[:-1]))


def head(repo: Repository) -> str:
    return githard.run(repo.place, "rev-parse", "--verify", "HEAD").stdout.decode("ascii").strip()


def _filter(name: bytes) -> bytes:
    """The filter that a setting makes run on the way into the working tree."""
    section, _, rest = name.partition(b".")
    subsection, _, key = rest.rpartition(b".")
    return subsection if section.lower() == b"filter" and key.lower() in (b"smudge", b"process") else b""


def _persons_attributes() -> str:
    """gitattributes(5): core.attributesFile, else $XDG_CONFIG_HOME/git/attributes."""
    named = githard.persons("core.attributesFile")
    if named:
        return os.path.expanduser(named[-1])
    return str(Path(place.base(os.environ, "XDG_CONFIG_HOME", ".config")) / "git" / "attributes")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C waits until git has finished with the working tree."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
