"""What a run left in its workspace, made one branch: everything staged and committed on `sandbox`, in the
guest.

In: a client, a sandbox, the commit the run started from. Out: `Gathered`, what a person should hear about
it. The work is one shell script that the guest runs with the image's own git: hooks and signing off, a
neutral identity, the person's or the agent's settings beyond the repository's own not read. It touches
`refs/heads/sandbox` and HEAD's branch, nothing else. What it prints is a guest's word: bounded, parsed,
shown through termsafe, and believed only where a lie would cost nobody but the guest.

Where HEAD is when the agent stopped, and what becomes of `sandbox`:
- on it, or ahead of it: it is HEAD. A merge that was under way is concluded as it stands.
- behind it, with nothing changed: it stays.
- beside it (a rebase that stopped, another branch): a commit joins both, so that neither is lost. Its tree is
HEAD's, except in the middle of a rebase, where it is the branch's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from cli import show
from sandboxd.client import Client
from sandboxd.errors import InvalidRequest, SandboxError
from sandboxd.termsafe import clean

BRANCH = "sandbox"
WORKSPACE = "/workspace"
SHOWN_NAMES = 5
TIMEOUT_S = 900.0
MESSAGE = "Work left uncommitted in the sandbox"
JOINED = "What was checked out when the sandbox ended, joined with its branch"

# Exit codes of the script; git's own never reach them.
NO_GIT, NO_REPOSITORY, FAILED = 41, 42, 43
DISK_FULL = re.compile("no space left on device|disk quota exceeded", re.IGNORECASE)

# The guest's own git, without anybody's settings but the repository's, and without what those could start.
PREAMBLE = r"""
command -v git >/dev/null 2>&1 || exit 41
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES
unset GIT_NAMESPACE GIT_AUTHOR_DATE GIT_COMMITTER_DATE
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null GIT_TERMINAL_PROMPT=0 GIT_EDITOR=true LC_ALL=C
export GIT_AUTHOR_NAME=sandbox GIT_AUTHOR_EMAIL=sandbox@localhost
export GIT_COMMITTER_NAME=sandbox GIT_COMMITTER_EMAIL=sandbox@localhost
g() { git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c commit.gpgSign=false -c gc.auto=0 \
    -c core.safecrlf=false -c advice.addEmbeddedRepo=false -c safe.directory='*' "$@"; }
say() { printf '%s\0' "$*"; }
[ -e .git ] && [ "$(g rev-parse --is-inside-work-tree 2>/dev/null)" = true ] || exit 42
"""

# $1 is the base commit, $2 and $3 the messages. Records go to stdout, `word value`, each ended by NUL; after
# the word `ignored` only names follow.
SCRIPT = PREAMBLE + r"""
base=$1

for word in MERGE_HEAD:merge CHERRY_PICK_HEAD:cherry-pick REVERT_HEAD:revert BISECT_LOG:bisect \
    rebase-merge:rebase rebase-apply:rebase; do
    [ -e "$(g rev-parse --git-path "${word%%:*}")" ] && say "unfinished ${word##*:}"
done
rebasing=
for name in rebase-merge rebase-apply; do [ -e "$(g rev-parse --git-path $name)" ] && rebasing=1; done

if ! said=$(g add -A 2>&1); then
    lock=$(g rev-parse --git-path index.lock)
    if [ -e "$lock" ]; then sleep 1; rm -f "$lock"; fi
    if ! said=$(g add -A --ignore-errors 2>&1); then
        case $said in *"o space left"*|*"uota exceeded"*) printf '%s\n' "$said" >&2; exit 43;; esac
        say "unreadable $(printf '%s\n' "$said" | grep -v '^hint:' | tail -n 3)"
    fi
fi

if ! g rev-parse -q --verify HEAD >/dev/null || ! g diff --cached --quiet HEAD -- \
    || [ -e "$(g rev-parse --git-path MERGE_HEAD)" ]; then
    if [ -n "$(g ls-files | head -c 1)" ] || g rev-parse -q --verify HEAD >/dev/null; then
        g commit -q --no-verify --allow-empty -m "$2" || exit 43
        say committed
    fi
fi

nothing_new() { g merge-base --is-ancestor refs/heads/sandbox "$base" 2>/dev/null && say nothing_new; }
head=$(g rev-parse -q --verify HEAD) || { say empty; nothing_new; exit 0; }
tip=$(g rev-parse -q --verify refs/heads/sandbox) || tip=
if [ "$head" != "$tip" ]; then
    if [ -z "$tip" ] || [ "$tip" = "$base" ] || g merge-base --is-ancestor "$tip" "$head"; then
        g update-ref refs/heads/sandbox "$head" || exit 43
        say "moved $(g rev-parse --symbolic-full-name --abbrev-ref HEAD)"
    elif ! g merge-base --is-ancestor "$head" "$tip"; then
        tree="$head^{tree}"; [ -n "$rebasing" ] && tree="$tip^{tree}"
        joined=$(g commit-tree -p "$tip" -p "$head" -m "$3" "$tree") || exit 43
        g update-ref refs/heads/sandbox "$joined" || exit 43
        say "joined $(g rev-parse --symbolic-full-name --abbrev-ref HEAD)"
    fi
fi

g for-each-ref --format='%(refname)' --no-merged=refs/heads/sandbox refs/heads | head -n 50 \
    | while read -r ref; do say "branch ${ref#refs/heads/}"; done
stashes=$(g rev-list --walk-reflogs --count refs/stash 2>/dev/null) && say "stashes $stashes"
g diff --raw -z --no-renames "$base" refs/heads/sandbox 2>/dev/null | tr '\0' '\n' \
    | sed -n '/^:[0-7]* 160000 /{n;p;}' | head -n 50 \
    | while IFS= read -r path; do say "repository $path"; done
nothing_new
say ignored
g ls-files -z --others --ignored --exclude-standard --directory | head -c 100000
exit 0
"""


class Gathered(NamedTuple):
    """`notes` are lines for the person; `left` those of work that would be lost with the sandbox. `nothing_new`: the
    branch holds no commit beyond the base."""

    notes: tuple[str, ...]
    left: tuple[str, ...]
    nothing_new: bool = False


class GatherError(SandboxError):
    """The work could not be committed; it is still in the sandbox."""


def gather(client: Client, sandbox: str, base: str) -> Gathered:
    """Commit what is there on `sandbox`; raises `GatherError` with what the guest's git said."""
    return read(in_workspace(client, sandbox, SCRIPT, [base, MESSAGE, JOINED], "the work", TIMEOUT_S))


def in_workspace(
    client: Client, sandbox: str, script: str, arguments: Sequence[str], what: str, timeout_s: float
) -> bytes:
    """What a shell script that begins with PREAMBLE prints in the guest's workspace; `what` is what it commits."""
    argv = ["sh", "-c", script, "sh", *arguments]
    try:
        result = client.run(sandbox, argv, cwd=WORKSPACE, timeout_secs=timeout_s)
    except InvalidRequest as error:
        raise GatherError(f"{what} cannot be committed: {error.message}") from None
    if result.timed_out:
        raise GatherError(f"committing {what} took more than {timeout_s:.0f} s")
    said = result.stderr.decode(errors="replace")
    if DISK_FULL.search(said):
        raise GatherError(f"the sandbox's disk is full: {what} can be committed once there is room")
    if result.exit_code == NO_GIT:
        raise GatherError(f"the image has no git, so {what} cannot be committed: use an image with git")
    if result.exit_code == NO_REPOSITORY:
        raise GatherError(f"{WORKSPACE} in the sandbox is no git repository any more")
    if result.exit_code != 0:
        raise GatherError(f"{what} cannot be committed: {clean(said)[-300:] or f'exit {result.exit_code}'}")
    return result.stdout


def read(output: bytes) -> Gathered:
    """The script's records as what to tell the person."""
    head, mark, tail = output.partition(b"ignored\0")
    notes: list[str] = []
    left: list[str] = []
    branches: list[str] = []
    repositories: list[str] = []
    nothing_new = False
    for record in head.decode(errors="replace").split("\0"):
        word, _, value = record.partition(" ")
        value = clean(value)
        if word == "committed":
            notes.append("changes that were not committed are now, in a commit of their own")
        elif word == "empty":
            notes.append("the workspace holds no file and no commit")
        elif word == "unfinished":
            notes.append(f"an unfinished {value} was left; it comes back as it stood")
        elif word == "unreadable":
            left.append(f"files git could not read: {value}")
        elif word == "moved":
            notes.append(f"the work is on {_where(value)}; that is what comes back")
        elif word == "joined":
            notes.append(f"{_where(value)} and the branch {BRANCH} had both moved; a commit joins them")
        elif word == "branch":
            branches.append(value)
        elif word == "stashes":
            left.append(f"stashes: {value}")
        elif word == "repository":
            repositories.append(value)
        elif word == "nothing_new":
            nothing_new = True
    if branches:
        left.append(f"other branches: {show.some(branches, SHOWN_NAMES)}")
    if repositories:
        left.append(f"the contents of repositories inside the workspace: {show.some(repositories, SHOWN_NAMES)}")
    ignored = [clean(name) for name in tail.decode(errors="replace").split("\0") if name] if mark else []
    if ignored:
        notes.append(f"ignored files stay behind: {show.some(ignored, SHOWN_NAMES)}")
    return Gathered(tuple(notes), tuple(left), nothing_new)


def _where(name: str) -> str:
    return "a detached HEAD" if name in ("", "HEAD") else f"the branch {name}"
