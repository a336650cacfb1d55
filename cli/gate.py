"""Of what came back: the files that something outside the sandbox will run or obey later, one line each.

In: a repository, the commit that was sent and the one that came back. Out: a `Review`, shown before anything says how
to merge. It refuses nothing; it says where to look first. Trees are compared by name and content as git stored them:
nothing is checked out, no filter, textconv or rename detection runs, and paths and contents are a guest's word.

`judge` is pure: raw entries in, findings and questions out. A question is a file whose contents decide; `review` reads
those, within bounds, and `answers` turns them into findings.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, NamedTuple

from cli import aliases, executed, gitconfig, githard, manifests
from cli.aliases import Aliases
from cli.bringback import SHORT
from cli.githard import Bounds, GitError
from cli.repository import Repository
from sandboxd.termsafe import clean

SHOWN_LINES = 20
SHOWN_NAME = 100
LISTED = 1000  # findings kept; the rest is counted
DIFF = Bounds(time_s=120, file_bytes=128 * 2**20)
JUDGE_S = 60.0  # paths can be made that take long to judge, and a small bundle has millions of them
PIECE = 1024 * 1024
QUESTIONS = 2000
LINKS = 2000
CONTENT_BYTES = 1024 * 1024
CONTENTS = Bounds(time_s=120, output_bytes=128 * 2**20)
LINK_BYTES = 4096  # PATH_MAX: a longer target makes no link

COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
LINK, SUBMODULE, PROGRAM = "120000", "160000", "100755"
READ_BY = {
    "package.json": manifests.package_json,
    ".gitattributes": manifests.attributes,
    ".gitmodules": manifests.gitmodules,
}
KIND_OF = {"package.json": "package", ".gitattributes": "git", ".gitmodules": "submodule"}
PROJECT_FILE = ".sandbox.yaml"
UNREAD = "its contents were not looked at"
BEFORE_MERGE = "before you merge, look at what would run or act outside the sandbox"


@dataclass(frozen=True, slots=True)
class Finding:
    """One file and why it matters. `path` holds undecodable bytes as surrogates, `kind` is one of executed.KINDS.

    `change` is added, changed or removed.
    """

    path: str
    change: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Review:
    """`more` counts findings beyond those listed; `unseen` says why there may be others, "" where all was looked at."""

    findings: tuple[Finding, ...] = ()
    more: int = 0
    unseen: str = ""


NOTHING = Review()


class Entry(NamedTuple):
    """One line of `git diff-tree --raw -z`."""

    old_mode: str
    new_mode: str
    old: str
    new: str
    path: str

    @property
    def change(self) -> str:
        if self.new_mode == "000000":
            return "removed"
        return "added" if self.old_mode == "000000" else "changed"


def review(repo: Repository, base: str, commit: str, bounds: Bounds = DIFF, judge_s: float = JUDGE_S) -> Review:
    """What `commit` changes since `base` that would run later. Never raises for what a guest can cause."""
    for name in (base, commit):
        if not COMMIT.fullmatch(name):
            return Review(unseen=f"'{clean(name)[:SHOWN_NAME]}' is not a commit's full name")
    try:
        named = gitconfig.inside(_settings(repo), str(repo.top), str(repo.common_dir))
        with tempfile.TemporaryFile(prefix="sandbox-") as raw:
            unseen = _diff(repo, base, commit, raw, bounds)
            raw.seek(0)
            others, unfollowed = _links(repo, commit, bounds)
            late: list[str] = []
            findings, questions = judge(_in_time(entries(raw), judge_s, late), named, others)
        if len(questions) > QUESTIONS:
            findings += [Finding(e.path, e.change, _kind(e), UNREAD) for e in questions[QUESTIONS:]]
            questions = questions[:QUESTIONS]
        found = findings + answers(questions, _contents(repo, questions))
    except GitError as error:
        return Review(unseen=str(error))
    return listed(found, "; ".join(filter(None, (unseen, *late, unfollowed))))


def listed(found: Iterable[Finding], unseen: str) -> Review:
    """What acts by itself first, cut to what anyone can read."""
    ordered = sorted(found, key=lambda finding: (executed.KINDS.index(finding.kind), finding.path))
    return Review(tuple(ordered[:LISTED]), max(0, len(ordered) - LISTED), unseen)


def lines(review: Review, heading: str = BEFORE_MERGE) -> list[str]:
    """What the person reads; nothing where there is nothing to say."""
    said = []
    total = len(review.findings) + review.more
    if total:
        said.append(f"{heading} ({total}):")
        said += [f"- {name(one.path)} ({one.change}): {one.reason}" for one in review.findings[:SHOWN_LINES]]
        if total > SHOWN_LINES:
            said.append(f"- and {total - SHOWN_LINES} more; --json lists them")
    if review.unseen:
        said.append(f"what would run outside the sandbox could not be listed whole: {review.unseen}")
    return said


def steps(base: str, ref: str) -> list[tuple[str, str]]:
    """The commands that look at what came back and take it, each with what it is for."""
    start, quoted = base[:SHORT], shlex.quote(ref)
    return [
        ("review", f"git log {start}..{quoted}"),
        ("or", f"git diff {start} {quoted}"),
        ("merge", f"git merge {quoted}"),
    ]


def told(base: str, ref: str, review: Review) -> list[str]:
    """What the person reads behind the news that something came back: the review before the merge."""
    *looks, merge = (f"{what}: {command}" for what, command in steps(base, ref))
    return [*looks, *lines(review), merge]


def as_json(review: Review) -> dict[str, Any]:
    """As `--json` prints it, to stand in a command's own object."""
    return {
        "executed": [asdict(finding) for finding in review.findings],
        "executed_more": review.more,
        "executed_unseen": review.unseen,
    }


def entries(raw: IO[bytes]) -> Iterator[Entry]:
    """`:old-mode new-mode old new status NUL path NUL`, again and again; ends where the listing was cut."""
    fields = _fields(raw)
    for head, path in zip(fields, fields, strict=False):
        words = head.decode("ascii", "replace").removeprefix(":").split(" ")
        if len(words) != 5:
            return
        old_mode, new_mode, old, new, _ = words
        yield Entry(old_mode, new_mode, old, new, os.fsdecode(path))


def _in_time(found: Iterable[Entry], time_s: float, late: list[str]) -> Iterator[Entry]:
    """Those that are asked for in time; where there were more, `late` gets a line."""
    end = time.monotonic() + time_s
    for entry in found:
        if time.monotonic() > end:
            late.append(f"judging its files took longer than {time_s:g} s")
            return
        yield entry


def judge(
    found: Iterable[Entry], named: Mapping[str, str], others: Aliases = aliases.NONE
) -> tuple[list[Finding], list[Entry]]:
    """By names and modes: findings, and the entries whose contents decide.

    `named` are paths, of files or directories, that a setting of git names, with the setting; `others` says under which
    names a file can be read too.
    """
    findings: list[Finding] = []
    questions: list[Entry] = []
    by_fold: dict[str, str] = {}
    for entry in found:
        path = entry.path
        if entry.new_mode == "000000":
            if tightens(path) and (gone := executed.fit(path)):
                findings.append(Finding(path, entry.change, *gone))
            continue
        reasons = [("name", reason) for reason in lies(path)]
        twin = by_fold.setdefault(executed.folded(path), path)
        if twin != path:
            reasons.append(("name", f"where letter case does not count it is the same file as {name(twin)}"))
        setting = setting_of(path, named)
        fit = executed.link_fit(path) if entry.new_mode == LINK else executed.fit(path)
        if setting:
            reasons.append(("git", f"git's setting {clean(setting)} names it"))
        if entry.new_mode == SUBMODULE:
            reasons.append(("submodule", f"the submodule is at {entry.new[:12]} now, which was made elsewhere"))
        elif entry.new_mode == LINK or last(path) in READ_BY:
            questions.append(entry)
        elif fit:
            reasons.append(fit)
        elif entry.new_mode == PROGRAM != entry.old_mode and not setting:
            reasons.append(("program", "it can be run as a program now"))
        if fit and entry.new_mode == LINK:
            reasons.append(fit)
        if not (fit or setting) and (led := _led_to(path, named, others)):
            reasons.append(led)
        findings += [Finding(path, entry.change, kind, reason) for kind, reason in reasons]
    return findings, questions


def _led_to(path: str, named: Mapping[str, str], others: Aliases) -> tuple[str, str] | None:
    """Who runs or obeys the file by another name of it."""
    for other in others.of(path):
        shown = name(other)
        if setting := setting_of(other, named):
            return "git", f"{shown} leads to it, and git's setting {clean(setting)} names that"
        if fit := executed.fit(other):
            return fit.kind, f"{shown} leads to it: {fit.reason}"
        if last(other) in KIND_OF:
            return KIND_OF[last(other)], f"{shown} leads to it"
    return None


def answers(questions: Sequence[Entry], contents: Mapping[str, bytes]) -> list[Finding]:
    """Findings from contents, by object name; what is not among them was too large or not there."""
    findings = []
    for entry in questions:
        new = contents.get(entry.new)
        old = contents.get(entry.old)
        if entry.new_mode == LINK:
            reasons = manifests.link(entry.path, new)
        elif new is None:
            reasons = [UNREAD]
        else:
            reasons = READ_BY[last(entry.path)](old, new)
        findings += [Finding(entry.path, entry.change, _kind(entry), reason) for reason in reasons]
    return findings


def _kind(entry: Entry) -> str:
    return "link" if entry.new_mode == LINK else KIND_OF[last(entry.path)]


def last(path: str) -> str:
    """The last part of a path, as a key of READ_BY."""
    return executed.folded(path).rpartition("/")[2]


def tightens(path: str) -> bool:
    """What is gone runs no more, but for a project's settings: without them the next run may do more."""
    return last(path) == PROJECT_FILE


def lies(path: str) -> list[str]:
    """What a name does to hide what it is."""
    if path.isascii() and executed.PLAIN.fullmatch(path) and "./" not in path and not path.endswith("."):
        return []
    if not path.isprintable():
        return ["its name holds characters that do not show"]
    if executed.folded(path) != unicodedata.normalize("NFC", path).casefold():
        return [f"some file systems take its name for {name(executed.folded(path))}"]
    return []


def setting_of(path: str, named: Mapping[str, str]) -> str | None:
    """The setting that names this path, or a directory above it."""
    while named and path:
        if path in named:
            return named[path]
        path = path.rpartition("/")[0]
    return None


def name(path: str) -> str:
    """A path fit for a line; of a long one its beginning and its end."""
    path = clean(path)
    half = SHOWN_NAME // 2
    return path if len(path) <= SHOWN_NAME else f"{path[:half]}…{path[-half:]}"


def _fields(raw: IO[bytes]) -> Iterator[bytes]:
    """What is ended by NUL; what is not ended is not given."""
    rest = b""
    while piece := raw.read(PIECE):
        *whole, rest = (rest + piece).split(b"\0")
        yield from whole


def _settings(repo: Repository) -> list[tuple[str, str]]:
    own = githard.in_force(repo.place)
    return own + [("core.hookspath", value) for value in githard.persons("core.hooksPath")]


def _diff(repo: Repository, base: str, commit: str, raw: IO[bytes], bounds: Bounds) -> str:
    """The listing into `raw`; what was said where it is not whole."""
    arguments = ("-r", "-z", "--raw", "--no-renames", "--no-abbrev", "--ignore-submodules=none", base, commit)
    try:
        githard.run(repo.place, "diff-tree", *arguments, stdout=raw, bounds=bounds)
    except GitError as error:
        return str(error)
    return ""


def _links(repo: Repository, commit: str, bounds: Bounds) -> tuple[Aliases, str]:
    """The links of a commit; and what was said where not all of them are followed."""
    named: dict[str, str] = {}
    unfollowed = ""
    with tempfile.TemporaryFile(prefix="sandbox-") as listing:
        try:
            githard.run(repo.place, "ls-tree", "-r", "-z", commit, stdout=listing, bounds=bounds)
        except GitError as error:
            unfollowed = str(error)
        listing.seek(0)
        for entry in _fields(listing):
            if entry.startswith(b"120000 "):
                head, _, path = entry.partition(b"\t")
                named[os.fsdecode(path)] = head.split(b" ")[2].decode("ascii", "replace")
    if len(named) > LINKS:
        unfollowed = f"it has {len(named)} symbolic links, and {LINKS} were followed"
    named = dict(list(named.items())[:LINKS])
    contents = _blobs(repo, dict.fromkeys(named.values(), LINK_BYTES))
    targets = {path: os.fsdecode(contents[name]) for path, name in named.items() if name in contents}
    others = Aliases(targets)
    return others, unfollowed or others.unfollowed


def _contents(repo: Repository, questions: Sequence[Entry]) -> dict[str, bytes]:
    """The blobs that decide, but for those that are too large."""
    wanted: dict[str, int] = {}
    for entry in questions:
        for mode, name in ((entry.old_mode, entry.old), (entry.new_mode, entry.new)):
            if mode[:2] in ("10", "12"):
                wanted[name] = LINK_BYTES if mode == LINK else CONTENT_BYTES
    return _blobs(repo, wanted)


def _blobs(repo: Repository, wanted: Mapping[str, int]) -> dict[str, bytes]:
    """Contents by name, of those that have no more than the bytes that stand with it."""
    if not wanted:
        return {}
    asked = "".join(f"{name}\n" for name in wanted).encode()
    told = githard.run(repo.place, "cat-file", "--batch-check=%(objectname) %(objecttype) %(objectsize)", stdin=asked)
    fits, total = [], 0
    for line in told.stdout.decode("ascii", "replace").splitlines():
        name, kind, *size = line.split(" ")
        if kind == "blob" and name in wanted and int(size[0]) <= wanted[name]:
            total += int(size[0]) + 100
            if total <= CONTENTS.output_bytes:
                fits.append(name)
    asked = "".join(f"{name}\n" for name in fits).encode()
    out = githard.run(repo.place, "cat-file", "--batch=%(objectsize)", stdin=asked, bounds=CONTENTS).stdout
    found, position = {}, 0
    for name in fits:
        end = out.index(b"\n", position)
        start = end + 1
        position = start + int(out[position:end])
        found[name] = out[start:position]
        position += 1
    return found
