"""What programs of the host would run or obey below a directory, as it is now.

Looked at: every git directory below (also a bare one, whose settings git obeys when it is entered), with its settings,
what they include, hooks, attributes, alternates and what is left to do of a rebase; files by the table in `executed`;
links that leave the directory; programs. A directory of installed packages counts as one thing.

A guest wrote what is read here, and may still be writing. All of it is read through `beneath`, counts and sizes are
bounded, and git reads settings from the bytes that were compared, never from the file.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cli import beneath, executed, gate, gitconfig, githard, manifests, repository
from cli.aliases import Aliases
from cli.executed import folded
from cli.githard import GitError, Place
from cli.repository import RepositoryError
from sandboxd.termsafe import clean

ENTRIES = 300_000
DEPTH = 64
CONFIGS = 200
INCLUDES = 5
CONFIG_BYTES = 256 * 1024
CONTENT_BYTES = 64 * 1024  # kept where a change is told by what a file says
KEPT_BYTES = 64 * 2**20  # of all contents that are kept: a file of any size costs a guest nothing
READ_BYTES = 2 * 2**30  # of all files that are read to be told apart
LINKS = 2000
PACKAGES = frozenset({"node_modules", "bower_components", ".venv", "venv", "__pypackages__", ".tox", ".nox"})
INSTALLED = "installed packages; what loads them runs them"
HOOK = "git runs it"
LED = "git reads and writes what it leads to"
SEPARATE = frozenset({"hooks", "modules", "worktrees"})  # of a git directory: looked at for themselves
OBJECTS = re.compile("[0-9a-f]{2}")
ELSEWHERE = "git works in another directory"
# Files of a git directory, beside its settings and hooks: gitrepository-layout(5), git-rebase(1).
GIT_FILES = {
    "commondir": "git takes its settings and objects from there",
    "info/attributes": "names the programs git runs on files",
    "objects/info/alternates": "git takes objects from there too",
    "rebase-merge/git-rebase-todo": "git rebase --continue runs its commands",
    "sequencer/todo": "git cherry-pick --continue obeys it",
}


class Seen(NamedTuple):
    """`mark` differs whenever the file does; `content` is kept where the change is told by what it says."""

    kind: str
    reason: str
    mark: str
    content: bytes | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All paths are relative to the directory. `settings` has, for each file, its settings in order or why not."""

    seen: Mapping[str, Seen] = field(default_factory=dict)
    settings: Mapping[str, tuple[tuple[str, str], ...] | str] = field(default_factory=dict)
    unseen: str = ""


class Frame(NamedTuple):
    """The repository a path lies in: its own path there is `put` and what follows `cut`. `named` are paths that its
    settings name, relative to the directory."""

    cut: str
    put: str
    named: Mapping[str, str]

    def within(self, path: str) -> str:
        return self.put + path[len(self.cut) :]


def snapshot(directory: Path, entries: int = ENTRIES) -> Snapshot:
    """Looks at no more than `entries` files; what could not be looked at is said in `unseen`. Never raises."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        return Snapshot(unseen=f"{clean(str(directory))}: {error.strerror}")
    try:
        survey = _Survey(fd, os.path.realpath(directory), entries, _around(directory))
        survey.everything()
    finally:
        os.close(fd)
    return Snapshot(survey.seen, survey.settings, "; ".join(survey.unseen))


class _Survey:
    def __init__(self, fd: int, root: str, entries: int, around: Frame) -> None:
        self.seen: dict[str, Seen] = {}
        self.settings: dict[str, tuple[tuple[str, str], ...] | str] = {}
        self.unseen: dict[str, None] = {}
        self._fd = fd
        self._root = root
        self._entries = self._left = entries
        self._read = READ_BYTES
        self._kept = KEPT_BYTES
        self._device = os.fstat(fd).st_dev
        self._frames = {"": around}
        self._links: dict[str, str] = {}
        self._obeyed: dict[str, tuple[str, str]] = {}  # links that something obeys, with the kind and the reason
        self._walked: set[str] = set()
        self._git_dirs: set[str] = set()

    def everything(self) -> None:
        try:
            self.directory(self._fd, "", self._frames[""], 0)
            self._left = self._entries
            self._led_to()
        except OSError as error:  # no more descriptors, for instance
            self._miss(f"it could not be looked at to the end: {error.strerror}")

    def directory(self, fd: int, path: str, frame: Frame, depth: int) -> None:
        found = self._list(fd, path)
        names = {folded(name) for name in found}
        if "head" in names and ({"objects", "refs"} <= names or "commondir" in names):
            # And on: anybody can make any directory look like one.
            frame = frame._replace(named={**frame.named, **self._git_dir(fd, path, depth)})
            self._frames[path] = frame
            self._git_dirs.add(path)
        for name, status in found.items():
            if folded(name) == ".git":
                named = self._dot_git(fd, name, _join(path, name), status)
                frame = Frame(f"{path}/", "", named) if path else frame._replace(named={**frame.named, **named})
                self._frames[path] = frame
        above, _, own = path.rpartition("/")
        stored = own == "objects" and above in self._git_dirs
        for name, status in found.items():
            here = _join(path, name)
            if folded(name) == ".git" or (stored and OBJECTS.fullmatch(name)):
                continue
            if not stat.S_ISDIR(status.st_mode):
                self._file(fd, name, here, frame, status)
            elif name in PACKAGES:
                digest = hashlib.sha256()
                for line in self._below(fd, name, here, depth):
                    digest.update(line)
                self.seen[here] = Seen("package", INSTALLED, digest.hexdigest())
            else:
                with self._opened(fd, name, here, depth) as child:
                    if child is not None:
                        self.directory(child, here, frame, depth + 1)

    def _file(self, fd: int, name: str, path: str, frame: Frame, status: os.stat_result) -> None:
        if path in self.seen or path in self.settings:
            return  # as git's own it is known already
        within = frame.within(path)
        fit = executed.link_fit(within) if stat.S_ISLNK(status.st_mode) else executed.fit(within)
        setting = gate.setting_of(path, frame.named)
        if stat.S_ISLNK(status.st_mode):
            target = self._link(fd, name, path)
            reasons = manifests.link(within, os.fsencode(target))
            named = ("git", f"git's setting {clean(setting)} names it") if setting is not None else None
            if kept := ("link", reasons[0]) if reasons else named or fit:
                self.seen[path] = Seen(*kept, f"link {target}")
            if obeyed := named or executed.fit(within):
                self._obeyed[path] = obeyed
        elif not stat.S_ISREG(status.st_mode):
            return
        elif setting is not None:
            self._mark(fd, name, path, "git", f"git's setting {clean(setting)} names it", status)
        elif gate.last(path) in gate.READ_BY:
            content = beneath.content(fd, name, min(CONTENT_BYTES, self._kept))
            self._kept -= len(content or b"")
            mark = self._fingerprint(fd, name, status)
            self.seen[path] = Seen(gate.KIND_OF[gate.last(path)], gate.UNREAD, mark, content)
        elif fit is not None:
            self._mark(fd, name, path, fit.kind, fit.reason, status)
        elif lies := gate.lies(path):
            self.seen[path] = Seen("name", lies[0], "")
        elif status.st_mode & 0o111 and not name.endswith(".sample"):  # of a hook, which git makes
            self.seen[path] = Seen("program", "it can be run as a program now", "")

    def _mark(self, fd: int, name: str, path: str, kind: str, reason: str, status: os.stat_result) -> None:
        if stat.S_ISLNK(status.st_mode):
            self.seen[path] = Seen(kind, reason, f"link {self._link(fd, name, path)}")
            self._obeyed[path] = kind, reason
        elif stat.S_ISREG(status.st_mode):
            self.seen[path] = Seen(kind, reason, self._fingerprint(fd, name, status))

    def _link(self, fd: int, name: str, path: str) -> str:
        """Where it leads; whose target changes is looked at later."""
        target = beneath.target(fd, name)
        if len(self._links) < LINKS:
            self._links[path] = target
        else:
            self._miss(f"there are more than {LINKS} symbolic links")
        return target

    def _fingerprint(self, fd: int, name: str, status: os.stat_result) -> str:
        if self._read <= 0:
            self._miss("there is more to read than is read; files are told apart by their sizes and times")
        found = beneath.fingerprint(fd, name, status, min(beneath.HASHED_BYTES, max(self._read, -1)))
        self._read -= min(status.st_size, beneath.HASHED_BYTES)
        return found

    def _led_to(self) -> None:
        """Files that run or are obeyed by the name of a link: who changes what it leads to changes what is run."""
        others = Aliases(self._links)
        if others.unfollowed:
            self._miss(others.unfollowed)
        for end in others.ends():
            if not end:
                self._led_below(self._fd, "", others, 0)
                continue
            with beneath.reached(self._fd, end) as (parent, last, status):
                if status is not None and stat.S_ISREG(status.st_mode):
                    self._led(parent, last, end, others, status)
                elif status is not None:
                    with self._opened(parent, last, end, end.count("/") + 1) as child:
                        if child is not None:
                            self._led_below(child, end, others, end.count("/") + 1)

    def _led_below(self, fd: int, path: str, others: Aliases, depth: int) -> None:
        if path in self._walked:
            return
        self._walked.add(path)
        for name, status in self._list(fd, path).items():
            here = _join(path, name)
            if stat.S_ISREG(status.st_mode):
                self._led(fd, name, here, others, status)
            elif stat.S_ISDIR(status.st_mode) and folded(name) != ".git" and name not in PACKAGES:
                with self._opened(fd, name, here, depth) as child:
                    if child is not None:
                        self._led_below(child, here, others, depth + 1)

    def _led(self, fd: int, name: str, path: str, others: Aliases, status: os.stat_result) -> None:
        if path in self.seen and self.seen[path].mark:
            return
        for other in others.of(path):
            frame = self._frames[next(one for one in (*_above(other), "") if one in self._frames)]
            setting = gate.setting_of(other, frame.named)
            found = ("git", f"git's setting {clean(setting)} names it") if setting else None
            found = found or executed.fit(frame.within(other))
            found = found or next((self._obeyed[one] for one in (other, *_above(other)) if one in self._obeyed), None)
            if found is None and gate.last(other) in gate.KIND_OF:
                found = gate.KIND_OF[gate.last(other)], "a program reads it there"
            if found is not None:
                self._mark(fd, name, path, found[0], f"{gate.name(other)} leads to it: {found[1]}", status)
                return

    def _dot_git(self, fd: int, name: str, path: str, status: os.stat_result) -> dict[str, str]:
        """Looks at a `.git`; gives what its settings name."""
        self._mark(fd, name, path, "git", ELSEWHERE, status)
        with self._opened(fd, name, path, 0) as child:
            return self._git_dir(child, path, 0) if child is not None else {}

    def _git_dir(self, fd: int, path: str, depth: int) -> dict[str, str]:
        settings: list[tuple[str, str]] = []
        for name in ("config", "config.worktree"):
            settings += self._config(fd, name, _join(path, name), 0)
        for name, reason in GIT_FILES.items():
            with beneath.reached(fd, name) as (parent, last, status):
                if status is not None:
                    self._mark(parent, last, _join(path, name), "git", reason, status)
        self._all(fd, "hooks", _join(path, "hooks"), "hook", HOOK, depth)
        for name in ("remotes", "branches"):
            self._all(fd, name, _join(path, name), "git", "git fetches from where it says", depth)
        self._own_links(fd, path, depth)
        for group in ("modules", "worktrees"):
            self._nested(fd, group, _join(path, group), depth)
        top = os.path.dirname(path) if folded(os.path.basename(path)) == ".git" else path
        named = gitconfig.inside(settings, self._absolute(top), self._absolute(path))
        return {_join(top, name): setting for name, setting in named.items()}

    def _own_links(self, fd: int, path: str, depth: int) -> None:
        """Links among git's own files: it writes to what they lead to, whatever that is."""
        for name, status in self._list(fd, path).items():
            here = _join(path, name)
            if stat.S_ISLNK(status.st_mode):
                if here not in self.seen and here not in self.settings:
                    self._mark(fd, name, here, "git", LED, status)
            elif stat.S_ISDIR(status.st_mode) and name not in SEPARATE and not OBJECTS.fullmatch(name):
                with self._opened(fd, name, here, depth) as child:
                    if child is not None:
                        self._own_links(child, here, depth + 1)

    def _nested(self, fd: int, name: str, path: str, depth: int) -> None:
        """The git directories of submodules, whose names may hold slashes, and of linked worktrees."""
        with self._opened(fd, name, path, depth) as child:
            if child is None:
                return
            for inner, status in self._list(child, path).items():
                here = _join(path, inner)
                if stat.S_ISLNK(status.st_mode):
                    self._mark(child, inner, here, "git", ELSEWHERE, status)
                    continue
                with beneath.reached(child, f"{inner}/HEAD") as (parent, _, head):
                    if head is not None:
                        self._git_dir(parent, here, depth + 1)
                if head is None:
                    self._nested(child, inner, here, depth + 1)

    def _config(self, fd: int, name: str, path: str, included: int) -> list[tuple[str, str]]:
        """The settings of one file, and of those below the directory that it includes."""
        with beneath.reached(fd, name) as (parent, last, status):
            if status is None or path in self.settings:
                return []
            if stat.S_ISLNK(status.st_mode):
                self.settings[path] = f"it is a link to {manifests.cut(self._link(parent, last, path))}"
                self._obeyed[path] = "git", "git takes its settings from there"
                return []
            text = beneath.content(parent, last, CONFIG_BYTES)
        if text is None:
            self.settings[path] = "it is no file, or too large"
            return []
        if len(self.settings) >= CONFIGS:
            self._miss(f"there are more than {CONFIGS} files of git's settings")
            return []
        try:
            settings = githard.settings(text)
        except GitError as error:
            self.settings[path] = error.why
            return []
        self.settings[path] = tuple(settings)
        for key, value in list(settings):
            if key.startswith(("include.", "includeif.")) and key.endswith(".path") and included < INCLUDES:
                start = os.path.dirname(self._absolute(path))
                place = os.path.normpath(os.path.join(start, os.path.expanduser(value)))
                if place.startswith(f"{self._root}/"):
                    inner = place[len(self._root) + 1 :]
                    settings += self._config(self._fd, inner, inner, included + 1)
        return settings

    def _all(self, fd: int, name: str, path: str, kind: str, reason: str, depth: int) -> None:
        """Every file of one directory, or the link that stands for it."""
        with beneath.reached(fd, name) as (parent, last, status):
            if status is not None and stat.S_ISLNK(status.st_mode):
                self._mark(parent, last, path, kind, reason, status)
        with self._opened(fd, name, path, depth) as child:
            if child is not None:
                for inner, status in self._list(child, path).items():
                    if not inner.endswith(".sample"):
                        self._mark(child, inner, _join(path, inner), kind, reason, status)

    def _below(self, fd: int, name: str, path: str, depth: int) -> Iterator[bytes]:
        """A line for everything in a directory, from which a change of any file is told."""
        with self._opened(fd, name, path, depth) as child:
            if child is None:
                return
            for inner, status in self._list(child, path).items():
                is_directory = stat.S_ISDIR(status.st_mode)
                mark = "" if is_directory else f"{status.st_size} {status.st_ctime_ns}"
                yield os.fsencode(f"{path}/{inner}\0{status.st_mode} {mark}\0")
                if is_directory:
                    yield from self._below(child, inner, _join(path, inner), depth + 1)

    def _list(self, fd: int, path: str) -> dict[str, os.stat_result]:
        found = {}
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    self._left -= 1
                    if self._left < 0:
                        self._miss("there are more files than are looked at")
                        break
                    with suppress(FileNotFoundError):
                        found[entry.name] = entry.stat(follow_symlinks=False)
        except OSError as error:
            self._miss(f"{manifests.cut(path)}: {error.strerror}")
        return dict(sorted(found.items()))

    @contextmanager
    def _opened(self, fd: int, name: str, path: str, depth: int) -> Iterator[int | None]:
        """A directory below; None where it is none, on another file system, or too deep."""
        if depth >= DEPTH:
            self._miss(f"{manifests.cut(path)} lies too deep")
            yield None
            return
        with ExitStack() as held:
            child = None
            try:
                child = held.enter_context(beneath.opened(fd, name))
            except OSError as error:
                self._miss(f"{manifests.cut(path)}: {error.strerror}")
            yield child if child is not None and os.fstat(child).st_dev == self._device else None

    def _absolute(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _miss(self, why: str) -> None:
        if len(self.unseen) < 3:
            self.unseen[why] = None


def _around(directory: Path) -> Frame:
    """The repository that the directory lies in, whose settings may name files below it."""
    try:
        found = repository.locate(directory)
        if found is None:
            return Frame("", "", {})
        own = found.git_dir == Path(os.path.realpath(directory)) / ".git"  # then the survey reads its settings itself
        settings = [] if own else githard.in_force(Place(found.git_dir, found.top))
        settings += [("core.hookspath", value) for value in githard.persons("core.hooksPath")]
    except (GitError, RepositoryError):
        return Frame("", "", {})
    prefix = os.path.relpath(os.path.realpath(directory), found.top)
    prefix = "" if prefix == "." else f"{prefix}/"
    named = gitconfig.inside(settings, str(found.top), str(found.common_dir))
    return Frame("", prefix, {path[len(prefix) :]: key for path, key in named.items() if path.startswith(prefix)})


def _above(path: str) -> Iterator[str]:
    """The directories that a path lies in, from the inside out, without the top."""
    while path := path.rpartition("/")[0]:
        yield path


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
