"""What travels between the person's repository and a sandbox, both ways as a git bundle.

Out goes `HEAD` and its history (`bundle_head`). Back comes a file a guest wrote, and `receive` makes
one thing of it: the ref `refs/sandbox/<name>` and the objects it needs; `receive_checkpoint` does the same for
`refs/sandbox/checkpoints/<sandbox>`. No branch, index, working tree,
HEAD or setting is touched, nothing is checked out, no submodule is entered. In order:

1. The header names exactly one ref, the expected one, in this repository's object format (`bundle`).
2. The pack's entries are walked within `Limits`, so a pack that inflates without end is refused unread
   (`pack`).
3. In a quarantine, a git directory of our own beside the objects with the repository's objects as
   alternates, `index-pack --strict` checks every object: damaged ones, missing ones, trees with `.git`
   in any spelling.
4. Commits it builds on are among those that were sent; everything from the new commit back to them is
   there.
5. The pack is moved into the repository, index last, and the ref is set in one step.

Killed between any two steps, the repository is whole and the ref old or new; what is left of the
quarantine is swept by the next call. A lock keeps two calls apart, and outlives a killed one until its
git has ended.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from cli import githard, pack
from cli.bundle import BundleError, Header, HeaderReader
from cli.githard import Bounds, GitError, Place
from cli.pack import Limits, PackError
from cli.repository import Repository
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

BRANCH = "refs/heads/sandbox"
REFS = "refs/sandbox"
CHECKPOINT = "refs/sandbox/checkpoint"
"""In a guest; here they are below CHECKPOINTS, by sandbox."""
CHECKPOINTS = f"{REFS}/checkpoints"
MIRRORED = f"{REFS}/mirror"
RESERVED = frozenset({"fleet", "checkpoints", "mirror"})
NAME_BYTES = 200
# git-check-ref-format(1), but for the rules on slashes, dots and `.lock`, which are about parts.
FORBIDDEN = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{")
SHORT = 12  # digits of a commit where a person reads it
LOCK = "tmp_sandbox.lock"  # git itself clears away what is named tmp_ once it is old
QUARANTINE = "tmp_objdir-sandbox-"
STALE_REF_LOCK_S = 10
DEFAULT = Limits()


class BringBackError(SandboxError):
    """The work could not be taken over; it is still in the sandbox."""


class BundleRefusedError(BringBackError):
    """What the sandbox returned is not taken; the message says what is wrong with it."""


class Expected(NamedTuple):
    """`ref` is the one the bundle has to bring, None for any; `becomes` what it is called here.

    With a `commit` that ref must be it, and the bundle must need nothing beside itself.
    """

    ref: str | None
    becomes: str
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """`commits` counts what is new since the base.

    `replaced` is the commit the ref named before, where the new one does not build on it.
    """

    ref: str
    commit: str
    commits: int
    replaced: str | None


def check_name(name: str, *, ours: bool = False) -> None:
    """A name under refs/sandbox/, possibly of several parts; raises BringBackError.

    Names that begin with a reserved word are `ours` alone to choose.
    """
    parts = name.split("/")
    wrong = None
    if not name or len(os.fsencode(name)) > NAME_BYTES:
        wrong = f"is empty or longer than {NAME_BYTES} bytes"
    elif parts[0].casefold() in RESERVED and not ours:
        wrong = "is reserved"
    elif name.startswith("-"):
        wrong = "starts with a dash"
    elif FORBIDDEN.search(name) or clean(name) != name:
        wrong = "holds a character that a ref or a terminal cannot take"
    elif any(not part or part.startswith(".") or part.endswith((".lock", ".")) for part in parts):
        wrong = "has a part that is empty, starts or ends with a dot, or ends with .lock"
    if wrong:
        raise BringBackError(f"the name '{clean(name)[:100]}' {wrong}")


def bundle_head(repo: Repository, limits: Limits = DEFAULT) -> tuple[IO[bytes], int]:
    """A bundle of HEAD as a file without a name, at its start, and its size in bytes."""
    file = tempfile.TemporaryFile(prefix="sandbox-")  # noqa: SIM115 - the caller's to close
    try:
        bounds = Bounds(time_s=limits.time_s, file_bytes=limits.bundle_bytes)
        githard.run(repo.place, "bundle", "create", "--quiet", "-", "HEAD", stdout=file, bounds=bounds)
        size = os.fstat(file.fileno()).st_size
        header = _header(file.fileno(), size)
        if header.ref != "HEAD" or header.commit != repo.head_commit:
            raise BringBackError(f"HEAD moved while it was being packed, from {repo.head_commit}: try again")
        file.seek(0)
        return file, size
    except (GitError, BundleError) as error:
        file.close()
        raise BringBackError(f"HEAD cannot be packed: {error}") from None
    except BaseException:
        file.close()
        raise


def receive(
    repo: Repository, bundle: IO[bytes] | Path, base: str, name: str, limits: Limits = DEFAULT
) -> Received:
    """Takes a returned bundle over as refs/sandbox/<name>; `base` is the commit that was sent.

    A person's own choice of a name is the caller's to check.
    """
    check_name(name, ours=True)
    return _take_over(repo, bundle, base, Expected(BRANCH, f"{REFS}/{name}"), limits)


def receive_checkpoint(
    repo: Repository, bundle: IO[bytes] | Path, base: str, sandbox: str, limits: Limits = DEFAULT
) -> Received:
    """Takes a bundle over whose one ref is the guest's checkpoint."""
    return _take_over(repo, bundle, base, Expected(CHECKPOINT, f"{CHECKPOINTS}/{sandbox}"), limits)


def receive_mirrored(
    repo: Repository, bundle: IO[bytes] | Path, root: str, commit: str, sandbox: str, limits: Limits = DEFAULT
) -> Received:
    """Takes over what a mirror gave: a bundle that needs nothing, whose one ref is `commit`, built on `root`.

    `root` is a first commit of this repository: what does not build on it is another one's.
    """
    expected = Expected(None, f"{MIRRORED}/{sandbox}", commit)
    return _take_over(repo, bundle, root, expected, limits)


@contextmanager
def returned(pieces: Iterable[bytes], limits: Limits = DEFAULT) -> Iterator[IO[bytes]]:
    """What a sandbox returns, as a file without a name, at its start; no more of it is written than may come back."""
    with tempfile.TemporaryFile(prefix="sandbox-") as file:
        size = 0
        for piece in pieces:
            size += len(piece)
            if size > limits.bundle_bytes:
                raise BundleRefusedError("the returned bundle is refused: it is too large")
            file.write(piece)
        file.flush()
        file.seek(0)
        yield file


def drop_checkpoint(repo: Repository, sandbox: str, commit: str) -> None:
    """Deletes a sandbox's checkpoint ref where it still names `commit`."""
    ref = f"{CHECKPOINTS}/{sandbox}"
    try:
        _check_plain(repo, ref)
        githard.run(repo.place, "update-ref", "--no-deref", "-d", ref, commit, bounds=Bounds(time_s=60))
    except GitError as error:
        raise BringBackError(f"{ref} cannot be removed: {error}") from None


def commit_of(repo: Repository, ref: str) -> str | None:
    """The commit a ref names, None where there is no such ref."""
    answer = githard.run(repo.place, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}", accept=(0, 1, 128))
    return answer.stdout.decode("ascii", "replace").strip() if answer.status == 0 else None


def _take_over(
    repo: Repository, bundle: IO[bytes] | Path, base: str, expected: Expected, limits: Limits
) -> Received:
    deadline = time.monotonic() + limits.time_s
    with _opened(bundle) as fd:
        try:
            header, scan = _read(repo, fd, expected, limits, deadline)
        except (BundleError, PackError) as error:
            raise BundleRefusedError(f"the returned bundle is refused: {error}") from None
        try:
            with _locked(repo.common_dir / "objects", deadline) as lock:
                return _Receiver(repo, limits, deadline, lock).take(fd, header, scan, base, expected)
        except OSError as error:
            where = clean(os.fsdecode(error.filename)) if error.filename else "the repository"
            raise BringBackError(f"{where}: {error.strerror}") from None


def _read(
    repo: Repository, fd: int, expected: Expected, limits: Limits, deadline: float
) -> tuple[Header, pack.Scan]:  # fmt: skip
    size = os.fstat(fd).st_size
    if size > limits.bundle_bytes:
        raise BundleError(f"it has {size} bytes; {limits.bundle_bytes} is the most")
    header = _header(fd, size)
    if expected.ref is not None and header.ref != expected.ref:
        raise BundleError(f"it brings the ref '{clean(header.ref)[:100]}', not {expected.ref}")
    if expected.commit is not None and header.commit != expected.commit:
        raise BundleError(f"it brings {header.commit}, not {expected.commit}")
    if expected.commit is not None and header.prerequisites:
        raise BundleError(f"it needs {header.prerequisites[0]}, which is not in it")
    if header.object_format != repo.object_format:
        raise BundleError(f"its objects are named by {header.object_format}, not {repo.object_format}")
    return header, pack.scan(fd, header.size_bytes, size, header.object_format, limits, deadline)


def _header(fd: int, size: int) -> Header:
    reader = HeaderReader()
    position = 0
    while position < size:
        data = os.pread(fd, 64 * 1024, position)
        if not data:
            break
        header = reader.feed(data)
        if header is not None:
            return header
        position += len(data)
    raise reader.end()


@contextmanager
def _opened(bundle: IO[bytes] | Path) -> Iterator[int]:
    if not isinstance(bundle, Path):
        yield bundle.fileno()
        return
    try:
        file = bundle.open("rb")
    except OSError as error:
        raise BringBackError(f"{clean(str(bundle))}: {error.strerror}") from None
    with file:
        yield file.fileno()


@contextmanager
def _locked(objects: Path, deadline: float) -> Iterator[int]:
    """One bring-back at a time for a repository. The file is gone afterwards, so who waited looks again."""
    path = objects / LOCK
    while True:
        fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(fd).st_ino:
                break
        except (BlockingIOError, FileNotFoundError):
            if time.monotonic() > deadline:
                os.close(fd)
                raise BringBackError("another bring-back is at work in this repository: try again") from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        time.sleep(0.05)
    try:
        yield fd
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
        os.close(fd)


class _Receiver:
    """Steps 3 to 5, under the lock."""

    def __init__(self, repo: Repository, limits: Limits, deadline: float, lock: int) -> None:
        self._repo = repo
        self._limits = limits
        self._deadline = deadline
        self._lock = lock
        self._objects = repo.common_dir / "objects"

    def take(self, fd: int, header: Header, scan: pack.Scan, base: str, expected: Expected) -> Received:
        self._check_base(base)
        self._sweep()
        with self._quarantine() as directory:
            place = Place(directory, None, self._repo.object_format, (self._objects,))
            try:
                self._index(place, fd, header, scan)
                self._check_connected(place, header, base)
                if expected.commit is not None and base not in self._firsts(place, header.commit):
                    raise PackError(f"it does not build on {base}, this repository's first commit")
                counted = self._git(place, "rev-list", "--count", header.commit, f"^{base}")
            except (GitError, PackError) as error:
                raise BundleRefusedError(f"the returned bundle is refused: {error}") from None
            self._move_in(directory)
            try:
                replaced = self._point(expected.becomes, header.commit)
            except GitError as error:
                raise BringBackError(f"{expected.becomes} cannot be set: {error}") from None
        return Received(expected.becomes, header.commit, int(counted), replaced)

    def _firsts(self, place: Place, commit: str) -> list[str]:
        return self._git(place, "rev-list", "--max-parents=0", commit).split()

    def _git(self, place: Place, command: str, *arguments: str, stdin: bytes | None = None) -> str:
        bounds = Bounds(time_s=max(1.0, self._deadline - time.monotonic()))
        fds = (self._lock,)
        return githard.run(
            place, command, *arguments, stdin=stdin, bounds=bounds, keep_fds=fds
        ).stdout.decode("ascii", "replace").strip()  # fmt: skip

    def _check_base(self, base: str) -> None:
        length = len(githard.EMPTY_TREE[self._repo.object_format])
        if not re.fullmatch(f"[0-9a-f]{{{length}}}", base):
            raise BringBackError(f"'{clean(base)[:100]}' is not a commit's full name")
        try:
            self._git(self._repo.place, "cat-file", "-e", f"{base}^{{commit}}")
        except GitError:
            raise BringBackError(
                f"{base}, the commit the sandbox started from, is no longer in this repository"
            ) from None

    def _sweep(self) -> None:
        """Removes what a killed call left: its quarantine, and a pack it moved but for the index."""
        for left in self._objects.glob(f"{QUARANTINE}*"):
            for index in left.glob("objects/pack/pack-*.idx"):
                moved = self._objects / "pack" / index.name
                if not index.with_suffix(".pack").exists() and not moved.exists():
                    for suffix in (".pack", ".rev"):
                        moved.with_suffix(suffix).unlink(missing_ok=True)
            shutil.rmtree(left, ignore_errors=True)

    @contextmanager
    def _quarantine(self) -> Iterator[Path]:
        """A git directory nobody else configures, on the file system of the objects."""
        directory = Path(tempfile.mkdtemp(prefix=QUARANTINE, dir=self._objects))
        try:
            for part in ("refs", "objects/info", "objects/pack"):
                (directory / part).mkdir(parents=True)
            (directory / "HEAD").write_text("ref: refs/heads/none\n")
            (directory / "config").write_text(self._configuration())
            shallow = self._repo.common_dir / "shallow"
            if shallow.exists():
                shutil.copyfile(shallow, directory / "shallow")
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _configuration(self) -> str:
        lines = ["[core]", "bare = true"]
        shared = githard.value_in(self._repo.common_dir / "config", "core.sharedRepository")
        if shared and re.fullmatch("[0-9A-Za-z]+", shared):
            lines.append(f"sharedRepository = {shared}")
        if self._repo.object_format == "sha1":
            return "\n".join([*lines, "repositoryFormatVersion = 0", ""])
        extension = f"objectFormat = {self._repo.object_format}"
        return "\n".join([*lines, "repositoryFormatVersion = 1", "[extensions]", extension, ""])

    def _index(self, place: Place, fd: int, header: Header, scan: pack.Scan) -> None:
        size = os.fstat(fd).st_size
        bounds = Bounds(
            time_s=max(1.0, self._deadline - time.monotonic()),
            file_bytes=2 * size + pack.GIB,  # what was announced, and bases from the repository
        )
        os.lseek(fd, header.size_bytes, os.SEEK_SET)
        with os.fdopen(os.dup(fd), "rb") as source:
            githard.run(
                place, "index-pack", "--stdin", "--fix-thin", "--strict", f"--max-input-size={size}",
                stdin=source, bounds=bounds, keep_fds=(self._lock,),
            )  # fmt: skip
        [index] = (place.git_dir / "objects/pack").glob("pack-*.idx")
        with index.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as names:
            if pack.offset_of(names, bytes.fromhex(header.commit), self._repo.object_format) < 0:
                raise PackError(f"the pack does not hold {header.commit}, which the bundle promises")
            depth = pack.deepest(scan, names, self._repo.object_format)
        if depth > self._limits.delta_depth:
            raise PackError(f"the pack has a chain of {depth} deltas; {self._limits.delta_depth} is the most")

    def _check_connected(self, place: Place, header: Header, base: str) -> None:
        names = (header.commit, *header.prerequisites)
        asked = "".join(f"{name}\n" for name in names).encode()
        answers = self._git(place, "cat-file", "--batch-check=%(objecttype)", stdin=asked).splitlines()
        for name, answer in zip(names, answers, strict=True):
            if answer != "commit" and name == header.commit:
                raise PackError(f"{header.ref} is a {answer}, not a commit")
            if answer != "commit":
                raise PackError(f"it builds on {name}, which is no commit of this repository")
        if header.prerequisites:
            asked = "".join(f"{name}\n" for name in (*header.prerequisites, f"^{base}")).encode()
            beyond = self._git(place, "rev-list", "--max-count=1", "--stdin", stdin=asked)
            if beyond:
                raise PackError(f"it builds on {beyond}, which the sandbox was not given")
        self._git(place, "rev-list", "--objects", "--quiet", header.commit, f"^{base}")

    def _move_in(self, directory: Path) -> None:
        """Moves the pack, the index last: until then git does not see it."""
        goal = self._objects / "pack"
        goal.mkdir(exist_ok=True)
        files = sorted((directory / "objects/pack").glob("pack-*"), key=lambda file: file.suffix == ".idx")
        if (goal / files[-1].name).exists():
            return  # the same objects came back before
        for file in files:
            os.rename(file, goal / file.name)
        descriptor = os.open(goal, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _point(self, ref: str, commit: str) -> str | None:
        """Sets the ref itself, never what it may be made to stand for; says what that unlinks."""
        _check_plain(self._repo, ref)
        place = self._repo.place
        bounds = Bounds(time_s=60)
        old = githard.run(place, "rev-parse", "--verify", "--quiet", ref, bounds=bounds, accept=(0, 1, 128))
        before = old.stdout.decode("ascii", "replace").strip() if old.status == 0 else None
        replaced = None
        if before is not None:
            lost = githard.run(
                place, "rev-list", "--max-count=1", before, f"^{commit}", bounds=bounds, accept=(0, 128)
            )  # fmt: skip
            replaced = before if lost.stdout else None
        lock = self._repo.common_dir / f"{ref}.lock"
        with suppress(FileNotFoundError, NotADirectoryError):
            if time.time() - lock.lstat().st_mtime > STALE_REF_LOCK_S:
                lock.unlink()  # a git that was killed; a live one holds it for milliseconds
        self._git(place, "update-ref", "--no-deref", "-m", "sandbox: brought back", ref, commit)
        return replaced


def _check_plain(repo: Repository, ref: str) -> None:
    """No directory on the way to the ref may be a link: it could lead among the branches. Nor may its log, to which
    git appends: it could lead anywhere."""
    parts = ref.removeprefix(f"{REFS}/").split("/")
    for start, names in ((REFS, parts[:-1]), (f"logs/{REFS}", parts)):
        path = repo.common_dir / start
        for part in ("", *names):
            path = path / part
            if path.is_symlink():
                raise BringBackError(f"{clean(str(path))} is a symbolic link: remove it first")
