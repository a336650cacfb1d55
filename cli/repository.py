"""The person's repository: found, judged, and described before anything is made of it.

In: the directory a command was started in. Out: a `Repository` naming every directory git will be told
to use, or None outside a repository, or a RepositoryError that says what is wrong and what to do.

Nothing is believed because git would believe it. The `.git` entry is looked for here, so a bare
repository buried in a tree is never entered; a `.git` file must be pointed back at by the directory it
names; and owners are compared before git reads a single setting. What git is then asked, it is asked
through githard. Nothing is written, the index included.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cli import githard, show
from cli.githard import Bounds, GitError, Place
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

LISTING = Bounds(time_s=300, output_bytes=512 * 2**20)
NAMED = 3  # paths named in a note before "and N more"
POINTER_BYTES = 4096 + 32  # PATH_MAX and the word before it


class RepositoryError(SandboxError):
    """This repository is not used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Repository:
    """`git_dir` is this worktree's own, `common_dir` the one all worktrees share; all paths are resolved.

    `branch` is None when HEAD is detached. `dirty` says that tracked files differ from HEAD. `notes` are
    lines for the person about what will not be in the sandbox.
    """

    top: Path
    git_dir: Path
    common_dir: Path
    object_format: str
    head_commit: str
    branch: str | None
    shallow: bool
    dirty: bool
    notes: tuple[str, ...]

    @property
    def place(self) -> Place:
        return Place(self.git_dir, self.top, self.object_format)


@dataclass(frozen=True, slots=True)
class Found:
    """The directories, with nothing read from them yet but pointers."""

    top: Path
    entry: Path  # top/.git
    git_dir: Path
    common_dir: Path


def discover(start: Path) -> Repository | None:
    """The repository whose working tree holds `start`."""
    found = locate(start)
    if found is None:
        return None
    _check_pointers(found)
    check_owner(found, os.geteuid(), _owner)
    try:
        return _describe(found)
    except GitError as error:
        raise RepositoryError(f"{shown(found.top)}: {error}") from None


def locate(start: Path) -> Found | None:
    """Walks up one file system as git does: `.git` first, then whether the directory is a bare repository."""
    try:
        directory = Path(os.path.realpath(start, strict=True))
        device = directory.stat().st_dev
        for candidate in (directory, *directory.parents):
            if candidate.stat().st_dev != device:
                return None
            found = _at(candidate)
            if found is not None:
                return found
            if _is_git_dir(candidate):
                raise RepositoryError(
                    f"{shown(candidate)} is a bare repository or the inside of one: start from a working tree"
                )
    except OSError as error:
        raise RepositoryError(f"{shown(start)}: {error.strerror}") from None
    return None


def check_owner(found: Found, euid: int, owner_of: Callable[[Path], int]) -> None:
    """Root works in root's repositories only; others also where their own safe.directory says so.

    `owner_of` is asked for the uid of the four paths.
    """
    for path in (found.top, found.entry, found.git_dir, found.common_dir):
        owner = owner_of(path)
        if owner == euid:
            continue
        name = _user(owner)
        if euid == 0:
            raise RepositoryError(
                f"{shown(path)} belongs to {name}, and root does not work in other people's repositories: "
                f"run it as {name} (sudo -u {name.replace('uid ', '#')} -H sandbox-cli ...)"
            )
        if not _declared_safe(found.top):
            raise RepositoryError(
                f"{shown(path)} belongs to {name}: if you trust it, run "
                f"git config --global --add safe.directory '{shown(found.top)}'"
            )


def shown(path: Path) -> str:
    """A path fit for a message."""
    return clean(str(path))


def _at(directory: Path) -> Found | None:
    entry = directory / ".git"
    try:
        mode = entry.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISDIR(mode):
        if not _is_git_dir(entry):
            return None  # git passes over it too
        if (entry / "commondir").exists():
            raise RepositoryError(f"{shown(entry)} holds a commondir file, as only a linked worktree's may")
        return Found(directory, entry, entry, entry)
    if stat.S_ISREG(mode):
        target = _pointer(entry, b"gitdir: ")
    elif stat.S_ISLNK(mode):
        target = entry
    else:
        raise RepositoryError(f"{shown(entry)} is neither a directory nor a file")
    git_dir = Path(os.path.realpath(target))
    if not (git_dir / "HEAD").is_file():
        raise RepositoryError(f"{shown(entry)} points to {shown(git_dir)}, which is not a git directory")
    common_dir = git_dir
    if (git_dir / "commondir").exists():
        common_dir = Path(os.path.realpath(_pointer(git_dir / "commondir", b"")))
    return Found(directory, entry, git_dir, common_dir)


def _is_git_dir(directory: Path) -> bool:
    head = directory / "HEAD"
    if not (head.is_file() or head.is_symlink()):
        return False
    return (directory / "objects").is_dir() and (directory / "refs").is_dir()


def _pointer(file: Path, word: bytes) -> Path:
    """The path a one-line file holds, relative to the file's own directory."""
    if not file.is_file():
        raise RepositoryError(f"{shown(file)} is not a file git would write")  # a FIFO would be waited for
    with file.open("rb") as stream:
        text = stream.read(POINTER_BYTES)
    if not text.startswith(word) or len(text) == POINTER_BYTES or b"\0" in text:
        raise RepositoryError(f"{shown(file)} is not a file git would write")
    return file.parent / os.fsdecode(text[len(word) :].rstrip(b"\r\n"))


def _check_pointers(found: Found) -> None:
    """A `.git` that leads elsewhere is only followed when that place says it belongs here."""
    if found.git_dir == found.entry:
        return
    if found.common_dir != found.git_dir:
        home = found.common_dir / "worktrees" / found.git_dir.name
        back = found.git_dir / "gitdir"
        if _same(home, found.git_dir) and back.is_file() and _same(_pointer(back, b""), found.entry):
            return
        remedy = "if you moved it, run git worktree repair"
    else:
        for name in ("config", "config.worktree"):
            file = found.git_dir / name
            tree = githard.value_in(file, "core.worktree") if file.is_file() else None
            if tree is not None and _same(found.git_dir / tree, found.top):
                return
        remedy = "start from the repository it was made from"
    raise RepositoryError(
        f"{shown(found.entry)} leads to {shown(found.git_dir)}, which does not point back to it: {remedy}"
    )


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _owner(path: Path) -> int:
    return path.lstat().st_uid


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _declared_safe(top: Path) -> bool:
    safe: set[str] = set()
    for value in githard.persons("safe.directory"):
        if value == "":
            safe.clear()  # git-config(1): an empty value empties the list
        safe.add(value)
    return "*" in safe or str(top) in safe


def _describe(found: Found) -> Repository:
    place = Place(found.git_dir, found.top)
    objects = found.common_dir / "objects"
    if githard.is_promisor(githard.config_names(place)) or any((objects / "pack").glob("*.promisor")):
        raise RepositoryError(
            f"{shown(found.top)} is a partial clone: objects it lacks would have to be fetched while the "
            "sandbox is made. Clone it again without --filter"
        )
    facts = githard.run(place, "rev-parse", "--show-object-format", "--is-shallow-repository").stdout.split()
    place = Place(found.git_dir, found.top, facts[0].decode())
    head = githard.run(place, "rev-parse", "--verify", "--quiet", "HEAD^{commit}", accept=(0, 1, 128))
    if head.status:
        named = githard.run(place, "rev-parse", "--verify", "--quiet", "HEAD", accept=(0, 1, 128))
        if named.stdout:
            raise RepositoryError(f"{shown(found.top)}: the commit HEAD names is not there: run git fsck")
        raise RepositoryError(f"{shown(found.top)} has no commit yet: make one first (git commit)")
    commit = head.stdout.decode().strip()
    branch = githard.run(place, "symbolic-ref", "--quiet", "--short", "HEAD", accept=(0, 1))
    dirty = githard.run(place, "status", "--porcelain", "-z", "--untracked-files=no", bounds=LISTING)
    shallow = facts[1] == b"true"
    return Repository(
        top=found.top,
        git_dir=found.git_dir,
        common_dir=found.common_dir,
        object_format=place.object_format,
        head_commit=commit,
        branch=os.fsdecode(branch.stdout.removesuffix(b"\n")) if branch.status == 0 else None,
        shallow=shallow,
        dirty=bool(dirty.stdout),
        notes=(
            *(("this is a shallow clone: the sandbox gets the commits that are here",) if shallow else ()),
            *_not_carried(place, commit),
        ),
    )


def _not_carried(place: Place, commit: str) -> list[str]:
    """Submodules, and files that a filter would turn into something else, with the names of the first few."""
    notes = []
    listing = githard.run(place, "ls-tree", "-r", "-z", commit, bounds=LISTING).stdout
    entries = [entry.partition(b"\t") for entry in listing.split(b"\0")[:-1]]
    submodules = [path for meta, _, path in entries if meta.startswith(b"160000 ")]
    if submodules:
        notes.append(f"submodules are not carried, their directories will be empty: {_some(submodules)}")
    attributes = [
        meta.split(b" ")[2]
        for meta, _, path in entries
        if path.rpartition(b"/")[2] == b".gitattributes" and meta.startswith(b"100")
    ]
    if attributes and _mentions_filter(place, attributes):
        filtered = _filtered(place, [path for _, _, path in entries])
        counts = Counter(name for name, _ in filtered)
        for name in sorted(counts):
            paths = [path for filter_name, path in filtered if filter_name == name]
            what = "git-lfs pointers instead of files" if name == b"lfs" else "files as stored, unfiltered"
            notes.append(f"filter {_text(name)} does not run, the sandbox gets {what}: {_some(paths)}")
    return notes


def _mentions_filter(place: Place, blobs: Iterable[bytes]) -> bool:
    wanted = b"".join(blob + b"\n" for blob in blobs)
    return b"filter=" in githard.run(place, "cat-file", "--batch", stdin=wanted, bounds=LISTING).stdout


def _filtered(place: Place, paths: list[bytes]) -> list[tuple[bytes, bytes]]:
    """(filter, path) of every path that names one; check-attr starts nothing, it only answers."""
    asked = b"".join(path + b"\0" for path in paths)
    arguments = ("--cached", "--stdin", "-z", "filter")
    answer = githard.run(place, "check-attr", *arguments, stdin=asked, bounds=LISTING)
    fields = answer.stdout.split(b"\0")[:-1]
    rows = zip(fields[0::3], fields[2::3], strict=True)
    return [(value, path) for path, value in rows if value not in (b"unspecified", b"unset", b"set")]


def _some(paths: list[bytes]) -> str:
    return show.some([_text(path) for path in paths], NAMED)


def _text(raw: bytes) -> str:
    return clean(raw.decode("utf-8", "replace"))[:200]
