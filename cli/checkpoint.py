"""Checkpoints: the guest's working tree as a commit in the person's repository, while the command still works on it.

In: a client, the record of a session, its repository. Out: `refs/sandbox/checkpoints/<sandbox>`, and the record that
names its commit. In the guest a shell script writes the tree through an index of its own, a copy of the agent's, so
the agent's index, HEAD and branches stay as they are; the commit goes to the guest's `refs/sandbox/checkpoint`. Its
parents are HEAD and, where HEAD has left it, the branch that is to come back. What is as it was at the last checkpoint
is not fetched. What is fetched is checked like everything that comes back (`bringback`).

`Checkpoints` takes one after each interval, in a thread beside an attached stream: it says nothing, and remembers the
last failure only until the next success.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from types import TracebackType

from cli import bringback, duration, gather, session
from cli.bucket import Mirror
from cli.gather import GatherError
from cli.repository import Repository
from cli.session import Session
from sandboxd.client import Client
from sandboxd.errors import ApiError, SandboxError
from sandboxd.termsafe import clean

DEFAULT_S = 300.0
SHORTEST_S = 1.0
TIMEOUT_S = 120.0
WAIT_S = 3.0
"""For a checkpoint that is under way when the command ends. What comes back then makes it superfluous."""
BRANCH = "sandbox/checkpoint"
MESSAGE = "Checkpoint of the sandbox's working tree"

# $1 is the base commit, $2 the last checkpoint the host has or "", $3 the message. Records as in `gather`.
# `cp -p`: git tells by the index file's time which entries it has to look at again. Files may come and go while
# `add` reads them, and some may never be readable; what can be read is worth having.
SCRIPT = gather.PREAMBLE + r"""
base=$1 known=$2
dir=$(g rev-parse --absolute-git-dir) || exit 43
find "$dir" -maxdepth 1 -name 'sandbox-checkpoint.*' -mmin +10 -delete 2>/dev/null
index=$(mktemp "$dir/sandbox-checkpoint.XXXXXX") || exit 43
trap 'rm -f "$index" "$index.lock"' EXIT
agents=$(g rev-parse --git-path index)
if [ -e "$agents" ]; then cp -p "$agents" "$index" || exit 43; else rm -f "$index"; fi
export GIT_INDEX_FILE="$index"
if ! said=$(g add -A --ignore-errors 2>&1); then
    case $said in *"o space left"*|*"uota exceeded"*) printf '%s\n' "$said" >&2; exit 43;; esac
    say "unreadable $(printf '%s\n' "$said" | grep -v '^hint:' | tail -n 3)"
fi
tree=$(g write-tree) || exit 43

tip=$(g rev-parse -q --verify 'refs/heads/sandbox^{commit}') || tip=
head=$(g rev-parse -q --verify 'HEAD^{commit}') || head=${tip:-$base}
state="$tree $head"
set -- "$3" -p "$head"
if [ -n "$tip" ] && [ "$tip" != "$head" ] && ! g merge-base --is-ancestor "$tip" "$head"; then
    state="$state $tip"
    set -- "$@" -p "$tip"
fi
last=$(g rev-parse -q --verify 'refs/sandbox/checkpoint^{commit}') || last=
if [ -n "$last" ] && [ "$(g log -1 --no-show-signature --format='%T %P' "$last")" = "$state" ]; then
    if [ "$last" = "$known" ]; then say unchanged; else say "taken $last"; fi
    exit 0
fi
[ "$state" = "$(g rev-parse "$base^{tree}") $base" ] && [ -z "$known" ] && { say unchanged; exit 0; }
message=$1; shift
commit=$(g commit-tree "$@" -m "$message" "$tree") || exit 43
g update-ref refs/sandbox/checkpoint "$commit" || exit 43
say "taken $commit"
"""


class CheckpointError(SandboxError):
    """No checkpoint was taken; the sandbox and the last one are as they were."""


def every(given: str | None) -> float | None:
    """Seconds between two checkpoints, 0 for never; None where nothing was given."""
    if given is None:
        return None
    wanted = duration.seconds("--checkpoint-every", given)
    if 0 < wanted < SHORTEST_S:
        raise SandboxError(f"--checkpoint-every {clean(given)}: at least {SHORTEST_S:.0f}s, or 0 for never")
    return wanted


def where(record: Session) -> str:
    """A note about the checkpoint of a record that has one."""
    return f"the checkpoint of {record.checkpoint_at} is {bringback.CHECKPOINTS}/{record.sandbox}"


def take(
    client: Client, config: Path, record: Session, repo: Repository, superfluous: Callable[[], bool] = lambda: False
) -> Session:
    """One checkpoint; the record as it is then. Raises SandboxError where there could be none.

    `superfluous` is asked before anything is written here.
    """
    script = [record.base, record.checkpoint, MESSAGE]
    said = gather.in_workspace(client, record.sandbox, SCRIPT, script, "a checkpoint", TIMEOUT_S)
    if not is_new(said, record.checkpoint != ""):
        return record
    pieces = client.get_workspace(record.sandbox, record.base, BRANCH)
    with bringback.returned(takewhile(lambda _: not superfluous(), pieces)) as bundle:
        if superfluous():
            return record
        received = bringback.receive_checkpoint(repo, bundle, record.base, record.sandbox)
    now = session.now()
    changed = session.update(config, record.sandbox, checkpoint=received.commit, checkpoint_at=now)
    if changed is None:
        raise CheckpointError("the run's record is gone: it was forgotten, or its sandbox was ended")
    return changed


def is_new(said: bytes, any_before: bool) -> bool:
    """What the script printed; a guest's word, and believed only as to whether it is worth asking for more."""
    words = {word: value for word, _, value in (record.partition(b" ") for record in said.split(b"\0"))}
    if b"taken" in words:
        return True
    if b"unchanged" not in words:
        raise GatherError("the sandbox's git did not say whether a checkpoint was taken")
    if b"unreadable" in words and not any_before:
        raise GatherError(f"git could not read what is new: {clean(words[b'unreadable'].decode(errors='replace'))}")
    return False


class Checkpoints:
    """Taken one after another while the block lasts; `fault` afterwards is a failure that no success followed."""

    def __init__(
        self, client: Client, config: Path, record: Session, repo: Repository, every_s: float,
        mirror: Mirror | None = None,
    ) -> None:  # fmt: skip
        self.record = record
        self.fault = ""
        self._client = client
        self._config = config
        self._repo = repo
        self._every_s = every_s
        self._mirror = mirror if mirror and mirror.every_checkpoint else None
        self._unmirrored = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Checkpoints:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(WAIT_S)

    def told(self) -> Sequence[str]:
        """What the person should hear, afterwards."""
        unmirrored = (f"the last checkpoint: {self._unmirrored}",) if self._unmirrored else ()
        if not self.fault:
            return unmirrored
        last = f"the last one is of {self.record.checkpoint_at}" if self.record.checkpoint else "there is none"
        return (f"the last checkpoint failed: {self.fault}; {last}", *unmirrored)

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            before = self.record.checkpoint
            try:
                self.record = take(self._client, self._config, self.record, self._repo, self._over.is_set)
                self.fault = ""
                if self._mirror and self.record.checkpoint != before:
                    self._upload(self._mirror)
            except ApiError as error:
                self._failed(error.message)
            except (SandboxError, OSError) as error:
                self._failed(str(error))

    def _upload(self, mirror: Mirror) -> None:
        from cli import mirrored  # loads the client of the store

        ref = f"{bringback.CHECKPOINTS}/{self.record.sandbox}"
        sandbox = self.record.sandbox
        done, said = mirrored.after(mirror, os.environ, self._config, self._repo, sandbox, "checkpoint", ref)
        self._unmirrored = "" if done else said

    def _failed(self, why: str) -> None:
        """What fails because the run has just ended is no failure."""
        if not self._over.is_set():
            self.fault = clean(why)
