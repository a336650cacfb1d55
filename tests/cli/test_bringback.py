"""What a sandbox returns is checked before it is believed, and lands in one ref or nowhere."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from cli import bringback, pack, repository
from cli.bringback import BringBackError, BundleRefusedError
from cli.pack import Limits
from cli.repository import Repository
from tests.cli.planted import objects as o
from tests.cli.planted import world as worlds
from tests.cli.planted.world import World, git, text
from tests.conftest import SOAK, counts

SANDBOX = b"refs/heads/sandbox"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("template"))


@pytest.fixture
def world(template: World, tmp_path: Path) -> World:
    return worlds.copy(template, tmp_path)


@pytest.fixture(scope="module")
def shared(template: World) -> tuple[World, Repository]:
    """For bundles that are refused: a refused one leaves nothing, which every test checks."""
    return template, found(template)


def found(world: World) -> Repository:
    repo = repository.discover(world.repo)
    assert repo is not None
    return repo


def everything(world: World) -> dict[str, bytes]:
    """Every file of the git directory."""
    files = (path for path in (world.repo / ".git").rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in files}


# Bundles as a hostile guest would write them. Each is built from the base commit and answers bytes.

BLOB = o.blob(b"hello\n")
TREE = o.tree((b"100644", b"f", BLOB.name))


def work(base: str, *entries: bytes, of: o.Object = TREE, heads: list[tuple[str, bytes]] | None = None) -> bytes:
    """A right bundle of one commit, unless told otherwise."""
    new = o.commit(of.name, base)
    body = o.pack(*(entries or (o.entry(BLOB), o.entry(of))), o.entry(new))
    return o.bundle(heads if heads is not None else [(new.name, SANDBOX)], body, (base,))


def name(base: str) -> str:
    return o.commit(TREE.name, base).name


def with_entry(entry_name: bytes, mode: bytes = b"100644") -> Callable[[str], bytes]:
    of = o.tree((mode, entry_name, BLOB.name))
    return lambda base: work(base, o.entry(BLOB), o.entry(of), of=of)


def modules(content: bytes) -> Callable[[str], bytes]:
    file = o.blob(content)
    of = o.tree((b"100644", b".gitmodules", file.name))
    return lambda base: work(base, o.entry(file), o.entry(of), of=of)


def offset_chain(depth: int) -> Callable[[str], bytes]:
    def make(base: str) -> bytes:
        entries, size = [o.entry(BLOB)], len(BLOB.data)
        for n in range(depth):
            entries.append(o.offset_delta(len(entries[-1]), o.append_delta(size, b"%d" % (n % 10))))
            size += 1
        return work(base, *entries, o.entry(TREE))

    return make


def name_chain(depth: int) -> Callable[[str], bytes]:
    def make(base: str) -> bytes:
        entries, last = [o.entry(BLOB)], BLOB
        for n in range(depth):
            more = b"%d" % (n % 10)
            entries.append(o.name_delta(last.name, o.append_delta(len(last.data), more)))
            last = o.blob(last.data + more)
        return work(base, *entries, o.entry(TREE))

    return make


def second_offset_to_nowhere(base: str) -> bytes:
    return work(base, o.entry(BLOB), o.offset_delta(5, o.append_delta(6, b"x")), o.entry(TREE))


def other_commit(base: str) -> bytes:
    """Promises a commit the pack does not hold."""
    return work(base, heads=[(base, SANDBOX)])


BAD = "0123456789" * 4
Case = tuple[Callable[[str], bytes], str]
HOSTILE: dict[str, Case] = {
    "nothing at all": (lambda base: b"", "the bundle is empty"),
    "garbage": (lambda base: os.urandom(5000), "not a git bundle|header"),
    "text": (lambda base: b"<html>\n", "not a git bundle: it starts with '<html>'"),
    "escapes in the first line": (lambda base: b"\x1b]0;evil\x07\xe2\x80\xae\n", "starts with ']0;evil'"),
    "another version": (lambda base: b"# v4 git bundle\n\n", "not a git bundle: it starts with '# v4"),
    "header cut off": (lambda base: work(base)[:60], "ends inside its header"),
    "header cut off in the ref": (lambda base: work(base)[:110], "ends inside its header"),
    "header only": (lambda base: o.bundle([(name(base), SANDBOX)], b"", (base,)), "the pack is cut off"),
    "no ref": (lambda base: work(base, heads=[]), "brings no ref"),
    "two refs": (
        lambda base: work(base, heads=[(name(base), SANDBOX), (name(base), b"refs/heads/main")]),
        "more than one ref: 'refs/heads/sandbox' and 'refs/heads/main'",
    ),
    "the same ref twice": (
        lambda base: work(base, heads=[(name(base), SANDBOX)] * 2), "more than one ref",
    ),
    "a million refs": (
        lambda base: work(base, heads=[(base, b"refs/heads/%07d" % n) for n in range(1_000_000)]),
        "more than one ref",
    ),
    "a million prerequisites": (
        lambda base: o.bundle([], b"", (base,) * 50_000), "header is larger than 1048576 bytes",
    ),
    "a line without end": (lambda base: b"# v2 git bundle\n" + b"a" * 10**7, "longer than 4096 bytes"),
    "another branch": (
        lambda base: work(base, heads=[(name(base), b"refs/heads/main")]),
        "brings the ref 'refs/heads/main', not refs/heads/sandbox",
    ),
    "HEAD": (lambda base: work(base, heads=[(name(base), b"HEAD")]), "brings the ref 'HEAD'"),
    "a tag": (lambda base: work(base, heads=[(name(base), b"refs/tags/sandbox")]), "'refs/tags/sandbox'"),
    "dots in the ref": (
        lambda base: work(base, heads=[(name(base), b"refs/heads/../../config")]), "'refs/heads/../../config'",
    ),
    "a ref that looks like an option": (
        lambda base: work(base, heads=[(name(base), b"--upload-pack=touch x")]), "'--upload-pack=touch x'",
    ),
    "a branch that looks like an option": (
        lambda base: work(base, heads=[(name(base), b"refs/heads/--force")]), "'refs/heads/--force'",
    ),
    "escapes in the ref": (
        lambda base: work(base, heads=[(name(base), b"refs/heads/\x1b[2Jx\xe2\x80\xaegnp\xff")]),
        r"'refs/heads/ \[2Jx gnp",
    ),
    "the right ref and a blank": (
        lambda base: work(base, heads=[(name(base), SANDBOX + b" ")]), "brings the ref",
    ),
    "the right ref and a carriage return": (
        lambda base: work(base, heads=[(name(base), SANDBOX + b"\r")]), "brings the ref",
    ),
    "a NUL in the ref": (lambda base: work(base, heads=[(name(base), SANDBOX + b"\0x")]), "cannot be read"),
    "no object name": (lambda base: work(base, heads=[("HEAD", SANDBOX)]), "no sha1 name"),
    "capital letters in the name": (
        lambda base: work(base, heads=[(name(base).upper(), SANDBOX)]), "no sha1 name",
    ),
    "a name of the other kind": (lambda base: work(base, heads=[("a" * 64, SANDBOX)]), "no sha1 name"),
    "a capability in version 2": (
        lambda base: b"# v2 git bundle\n@object-format=sha1\n\n", "something unknown: '@object-format=sha1'",
    ),
    "a filter": (lambda base: b"# v3 git bundle\n@filter=blob:none\n\n", "something unknown: '@filter=blob:none'"),
    "an unknown object format": (
        lambda base: b"# v3 git bundle\n@object-format=md5\n\n", "something unknown: '@object-format=md5'",
    ),
    "a capability too late": (
        lambda base: b"# v3 git bundle\n-" + base.encode() + b" x\n@object-format=sha1\n\n", "out of order",
    ),
    "the other object format": (
        lambda base: b"# v3 git bundle\n@object-format=sha256\n" + b"a" * 64 + b" refs/heads/sandbox\n\nPACK",
        "named by sha256, not sha1",
    ),
    # what it builds on
    "a prerequisite nobody has": (
        lambda base: o.bundle([(name(base), SANDBOX)], work(base).partition(b"\n\n")[2], (BAD,)),
        f"builds on {BAD}, which is no commit of this repository",
    ),
    "a prerequisite that is no commit": (
        lambda base: o.bundle(
            [(name(base), SANDBOX)], work(base).partition(b"\n\n")[2], (o.blob(b"b\n").name,)
        ),
        "which is no commit of this repository",
    ),
    "a commit of the repository itself": (other_commit, "does not hold .*, which the bundle promises"),
    "a tree for a head": (lambda base: work(base, heads=[(TREE.name, SANDBOX)]), "is a tree, not a commit"),
    "a blob for a head": (lambda base: work(base, heads=[(BLOB.name, SANDBOX)]), "is a blob, not a commit"),
    # objects
    "a missing blob": (lambda base: work(base, o.entry(TREE)), "index-pack"),
    "a missing tree": (lambda base: work(base, o.entry(BLOB)), "index-pack"),
    "a missing parent": (lambda base: o.bundle(
        [(o.commit(TREE.name, BAD).name, SANDBOX)],
        o.pack(o.entry(BLOB), o.entry(TREE), o.entry(o.commit(TREE.name, BAD))),
    ), "index-pack|rev-list"),
    "a commit without an author": (
        lambda base: o.bundle(
            [(o.Object("commit", b"tree %s\n\nx" % TREE.name.encode()).name, SANDBOX)],
            o.pack(o.entry(BLOB), o.entry(TREE), o.entry(o.Object("commit", b"tree %s\n\nx" % TREE.name.encode()))),
        ),
        "missingAuthor",
    ),
    **{
        f"a tree with {entry!r}": (with_entry(entry, mode), reason)
        for entry, mode, reason in (
            (b".git", b"100644", "hasDotgit"),
            (b".GIT", b"100644", "hasDotgit"),
            (b".gIt", b"120000", "hasDotgit"),
            (b".git ", b"100644", "hasDotgit"),
            (b".git.", b"100644", "hasDotgit"),
            (b"git~1", b"100644", "hasDotgit"),
            (b"GIT~1", b"100644", "hasDotgit"),
            (b".git::$INDEX_ALLOCATION", b"100644", "hasDotgit"),
            (b".g\xe2\x80\x8cit", b"100644", "hasDotgit"),
            (b"\xef\xbb\xbf.git", b"100644", "hasDotgit"),
            (b".gi\xe2\x81\xaat", b"100644", "hasDotgit"),
            (b"a\\.git", b"100644", "hasDotgit"),
            (b".", b"100644", "hasDot"),
            (b"..", b"100644", "hasDotdot"),
            (b"a/b", b"100644", "fullPathname"),
            (b"", b"100644", "empty filename"),
            (b".gitmodules", b"120000", "gitmodulesSymlink"),
        )
    },
    "a .git directory": (
        lambda base: work(
            base,
            *(o.entry(x) for x in (BLOB, TREE)),
            o.entry(o.tree((b"40000", b".git", TREE.name))),
            of=o.tree((b"40000", b".git", TREE.name)),
        ),
        "hasDotgit",
    ),
    "a submodule address that is an option": (
        modules(b'[submodule "x"]\n\tpath = x\n\turl = --upload-pack=touch\n'), "gitmodulesUrl",
    ),
    "a submodule path that is an option": (
        modules(b'[submodule "x"]\n\tpath = -x\n\turl = https://example.test\n'), "gitmodulesPath",
    ),
    "a submodule name that climbs": (
        modules(b'[submodule "../../x"]\n\tpath = x\n\turl = https://example.test\n'), "gitmodulesName",
    ),
    "a submodule that runs a program": (
        modules(b'[submodule "x"]\n\tpath = x\n\turl = https://example.test\n\tupdate = !touch x\n'),
        "gitmodulesUpdate",
    ),
    # the pack itself
    "not a pack": (lambda base: o.bundle([(name(base), SANDBOX)], b"JUNK" * 20, (base,)), "there is no pack"),
    "a pack cut off in its head": (lambda base: o.bundle([(name(base), SANDBOX)], b"PACK\0\0", (base,)), "cut off"),
    "a pack cut off before its checksum": (lambda base: work(base)[:-20], "cut off"),
    "a pack cut off in its checksum": (lambda base: work(base)[:-3], "cut off"),
    "a pack cut off in an object": (lambda base: work(base)[:-60], "cut off"),
    "a pack of another version": (
        lambda base: o.bundle([(name(base), SANDBOX)], o.pack(o.entry(BLOB), version=3), (base,)), "version 3",
    ),
    "an empty pack": (lambda base: o.bundle([(name(base), SANDBOX)], o.pack(), (base,)), "the pack is empty"),
    "more objects announced than there are": (
        lambda base: o.bundle([(name(base), SANDBOX)], o.pack(o.entry(BLOB), count=7), (base,)),
        "cut off|damaged|unknown",
    ),
    "4 billion objects": (
        lambda base: o.bundle([(name(base), SANDBOX)], o.pack(o.entry(BLOB), count=2**32 - 1), (base,)),
        "has 4294967295 objects; 2000000 is the most",
    ),
    "something behind the pack": (lambda base: work(base) + b"x", "1 bytes lie behind the pack"),
    "a wrong checksum": (lambda base: work(base)[:-1] + b"x", "index-pack"),
    "a damaged object": (
        lambda base: work(base, o.entry(BLOB)[:1] + b"\xff" * 20, o.entry(TREE)), "the pack is damaged",
    ),
    "an entry of type 5": (lambda base: work(base, o.head(5, 3) + b"xxx"), "unknown type 5"),
    "an entry of type 0": (lambda base: work(base, o.head(0, 3) + b"xxx"), "unknown type 0"),
    "a size without end": (lambda base: work(base, b"\xbf" + b"\xff" * 60), "size cannot be read"),
    "a delta on nothing": (second_offset_to_nowhere, "is no object of the pack"),
    "a delta on what the repository lacks": (
        lambda base: work(base, o.entry(BLOB), o.name_delta(BAD, o.append_delta(6, b"x")), o.entry(TREE)),
        "index-pack",
    ),
    "an object larger than it says": (
        lambda base: work(base, o.entry(BLOB, size=2), o.entry(TREE)), "larger than it says",
    ),
    "an object smaller than it says": (
        lambda base: work(base, o.entry(BLOB, size=9), o.entry(TREE)), "smaller than it says",
    ),
    "an object of 20 GB": (
        lambda base: work(base, o.entry(BLOB, size=20 * 10**9), o.entry(TREE)), "an object of 20000000000 bytes",
    ),
    "a delta that makes 20 GB": (
        lambda base: work(base, o.entry(BLOB), o.offset_delta(len(o.entry(BLOB)), o.varint(6) + o.varint(20 * 10**9))),
        "an object of 20000000000 bytes",
    ),
    "a delta without a size": (
        lambda base: work(base, o.entry(BLOB), o.offset_delta(len(o.entry(BLOB)), b"\xff")), "cannot be read",
    ),
    "a chain of 5,000 deltas": (offset_chain(5000), "a chain of more than 4095 deltas"),
    "a chain of 4,200 deltas by name": (name_chain(4200), "a chain of 4200 deltas"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case)
def test_a_hostile_bundle_is_refused_and_leaves_nothing(
    case: str, shared: tuple[World, Repository], tmp_path: Path
) -> None:
    world, repo = shared
    make, why = HOSTILE[case]
    before = everything(world)
    file = tmp_path / "bundle"
    file.write_bytes(make(repo.head_commit))
    began = time.monotonic()
    with pytest.raises(BundleRefusedError, match=why) as caught:
        bringback.receive(repo, file, repo.head_commit, "demo")
    assert time.monotonic() - began < 20
    assert str(caught.value).isprintable()
    assert everything(world) == before


def test_a_right_bundle_written_the_same_way_is_taken(world: World, tmp_path: Path) -> None:
    """The control for the table above."""
    repo = found(world)
    (tmp_path / "bundle").write_bytes(work(repo.head_commit))
    received = bringback.receive(repo, tmp_path / "bundle", repo.head_commit, "demo")
    assert received == bringback.Received("refs/sandbox/demo", name(repo.head_commit), 1, None)
    assert git(world.repo, "show", "refs/sandbox/demo:f") == b"hello\n"


@pytest.mark.parametrize("depth", [50, 4095])
@pytest.mark.parametrize("chain", [offset_chain, name_chain])
def test_a_chain_git_would_write_is_taken(
    depth: int, chain: Callable[[int], Callable[[str], bytes]], world: World, tmp_path: Path
) -> None:
    if depth > 50 and chain is offset_chain:
        depth = 4000
    repo = found(world)
    (tmp_path / "bundle").write_bytes(chain(depth)(repo.head_commit))
    assert bringback.receive(repo, tmp_path / "bundle", repo.head_commit, "demo").commits == 1


def test_a_commit_that_was_not_sent_cannot_be_built_on(world: World, tmp_path: Path) -> None:
    repo = found(world)
    side = text(world.repo, "rev-parse", "side")
    (tmp_path / "bundle").write_bytes(work(side))
    with pytest.raises(BundleRefusedError, match=f"builds on {side}, which the sandbox was not given"):
        bringback.receive(repo, tmp_path / "bundle", repo.head_commit, "demo")


def peak(world: World, file: Path, base: str) -> tuple[str, float, int]:
    """The refusal, seconds, and the most memory in KiB, in a process of its own."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from cli import bringback, pack, repository\n"
        "pack.INFLATED_FLOOR = int(sys.argv[4])\n"
        "repo = repository.discover(Path(sys.argv[1])); began = time.monotonic()\n"
        "try: bringback.receive(repo, Path(sys.argv[2]), sys.argv[3], 'demo')\n"
        "except bringback.BundleRefusedError as error: print(error)\n"
        "print(time.monotonic() - began)\n"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])\n"
    )
    # Of the gigabyte that any pack may inflate to, a sixteenth shows the same in a sixteenth of the time.
    floor = str(counts(pack.INFLATED_FLOOR // 16, pack.INFLATED_FLOOR))
    arguments = [sys.executable, "-c", code, str(world.repo), str(file), base, floor]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    why, seconds, most = done.stdout.splitlines()
    return why, float(seconds), int(most)


@pytest.mark.timeout(200)
def test_a_pack_that_inflates_without_end_is_bounded(world: World, tmp_path: Path) -> None:
    """3.2 MB that would become 3.2 GB, in pieces each of which is allowed."""
    repo = found(world)
    one = o.entry(o.blob(bytes(64 * 2**20)))
    (tmp_path / "bundle").write_bytes(work(repo.head_commit, *[one] * 50, o.entry(TREE)))
    assert (tmp_path / "bundle").stat().st_size < 4 * 10**6
    before = everything(world)
    why, seconds, most = peak(world, tmp_path / "bundle", repo.head_commit)
    print(f"refused after {seconds:.1f} s, {most} KiB")
    assert "inflates to more than" in why
    assert most < 60_000
    assert everything(world) == before


def test_deltas_that_expand_without_end_are_refused(world: World, tmp_path: Path) -> None:
    repo = found(world)
    big = o.entry(BLOB)
    delta = o.varint(6) + o.varint(10**9)
    entries = [big]
    for _ in range(80):
        entries.append(o.offset_delta(sum(map(len, entries)), delta))
    (tmp_path / "bundle").write_bytes(work(repo.head_commit, *entries))
    with pytest.raises(BundleRefusedError, match="objects are more than 68719476736 bytes"):
        bringback.receive(repo, tmp_path / "bundle", repo.head_commit, "demo")


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (Limits(bundle_bytes=100), "100 is the most"),
        (Limits(objects=2), "has 3 objects; 2 is the most"),
        (Limits(object_bytes=5), "an object of 6 bytes; 5 is the most"),
        (Limits(inflated_bytes=20), "inflates to more than 20 bytes"),
        (Limits(expanded_bytes=20), "objects are more than 20 bytes"),
        (Limits(time_s=-1), "took too long"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_every_limit_is_kept(limits: Limits, why: str, shared: tuple[World, Repository], tmp_path: Path) -> None:
    _, repo = shared
    (tmp_path / "bundle").write_bytes(work(repo.head_commit))
    with pytest.raises(BundleRefusedError, match=why):
        bringback.receive(repo, tmp_path / "bundle", repo.head_commit, "demo", limits)


def test_the_pack_reader_agrees_with_git_on_a_real_repository(tmp_path: Path) -> None:
    """Thousands of objects with deltas of both kinds: same number, same deepest chain."""
    repo = tmp_path / "r"
    git(tmp_path, "init", "-q", "-b", "main", str(repo))
    stream = []
    lines = [f"{k * k} is the text of line {k}\n" for k in range(200)]
    for n in range(300):
        lines[n * 7 % 200] = f"changed {n * n}\n"
        data = "".join(lines).encode()
        head = b"commit refs/heads/main\ncommitter a <a@example.test> %d +0000\ndata 1\nx\n" % (1_700_000_000 + n)
        stream.append(head + b"M 100644 inline f%d\ndata %d\n%s\n" % (n % 3, len(data), data))
    git(repo, "fast-import", "--quiet", stdin=b"".join(stream))
    for settings in ((), ("-c", "repack.useDeltaBaseOffset=false")):
        git(repo, *settings, "repack", "-adfq", "--depth=30", "--window=20")
        [file] = (repo / ".git/objects/pack").glob("*.pack")
        with file.open("rb") as stream_file:
            size = file.stat().st_size
            scan = pack.scan(stream_file.fileno(), 0, size, "sha1", Limits(), time.monotonic() + 60)
        report = git(repo, "verify-pack", "-v", str(file)).decode()
        chains = [int(line.split()[3].rstrip(":")) for line in report.splitlines() if line.startswith("chain")]
        assert bool(scan.named_bases) is bool(settings)
        assert scan.objects == int(git(repo, "rev-list", "--all", "--objects", "--count"))
        assert pack.deepest(scan, file.with_suffix(".idx").read_bytes(), "sha1") == max(chains) > 10


# What is taken, and what it may do.


def test_a_second_bring_back_replaces_the_first(world: World, tmp_path: Path) -> None:
    repo = found(world)
    first = bringback.receive(repo, world.returned, repo.head_commit, "demo")
    again = bringback.receive(repo, world.returned, repo.head_commit, "demo")
    assert again == first and again.replaced is None
    (tmp_path / "bundle").write_bytes(work(repo.head_commit))
    other = bringback.receive(repo, tmp_path / "bundle", repo.head_commit, "demo")
    assert other.replaced == first.commit != other.commit
    assert text(world.repo, "rev-parse", "refs/sandbox/demo") == other.commit
    git(world.repo, "cat-file", "-e", first.commit)


def test_work_comes_back_after_the_person_rewrote_their_branch(world: World) -> None:
    base = world.base()
    git(world.repo, "commit", "-qam", "amended", "--amend")
    git(world.repo, "reflog", "expire", "--expire=now", "--all")
    received = bringback.receive(found(world), world.returned, base, "demo")
    assert received.commits == 2
    assert text(world.repo, "rev-parse", "refs/sandbox/demo~2") == base


def test_a_base_that_is_gone_is_said(world: World) -> None:
    with pytest.raises(BringBackError, match=f"{BAD}, the commit the sandbox started from, is no longer in"):
        bringback.receive(found(world), world.returned, BAD, "demo")
    with pytest.raises(BringBackError, match="not a commit's full name"):
        bringback.receive(found(world), world.returned, "--all", "demo")


def test_a_ref_that_stands_for_a_branch_is_replaced_not_followed(world: World) -> None:
    repo = found(world)
    for planted in ("symbolic", "link"):
        ref = world.repo / ".git/refs/sandbox/demo"
        if planted == "symbolic":
            git(world.repo, "symbolic-ref", "refs/sandbox/demo", "refs/heads/main")
        else:
            ref.unlink()
            ref.symlink_to("../heads/main")
        received = bringback.receive(repo, world.returned, repo.head_commit, "demo")
        assert world.base() == repo.head_commit
        assert ref.read_text().strip() == received.commit


def test_a_linked_directory_among_the_refs_is_refused(world: World) -> None:
    repo = found(world)
    (world.repo / ".git/refs/sandbox").symlink_to("heads")
    with pytest.raises(BringBackError, match="symbolic link"):
        bringback.receive(repo, world.returned, repo.head_commit, "main")
    assert world.base() == repo.head_commit


@pytest.mark.parametrize("name", ["demo", "deep/demo"])
def test_a_linked_log_of_the_ref_is_refused(world: World, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    log = world.repo / ".git/logs/refs/sandbox" / name
    log.parent.mkdir(parents=True)
    log.symlink_to(victim)
    repo = found(world)
    with pytest.raises(BringBackError, match="symbolic link"):
        bringback.receive(repo, world.returned, repo.head_commit, name)
    assert victim.read_text() == "precious\n"


def test_a_name_in_the_way_of_another_is_said(world: World) -> None:
    repo = found(world)
    bringback.receive(repo, world.returned, repo.head_commit, "demo")
    with pytest.raises(BringBackError, match="refs/sandbox/demo/x cannot be set"):
        bringback.receive(repo, world.returned, repo.head_commit, "demo/x")


@pytest.mark.parametrize(
    "good", ["demo", "a/b", "HEAD", "fleetx", "a-b_c.d", "größe", "a@b", "@", "a.lockx", "x" * 200]
)
def test_names_that_are_taken(good: str) -> None:
    bringback.check_name(good)
    git(Path("/"), "check-ref-format", f"refs/sandbox/{good}")


@pytest.mark.parametrize(
    "bad",
    ["", "-x", "--all", "a b", "a..b", "../x", "a/../b",
     "a/./b", ".a", "a/.b", "a.", "a.lock", "a.lock/b", "a//b", "/a", "a/", "a~1", "a^", "a:b", "a?", "a*", "a[",
     "a\\b", "a@{1}", "a\nb", "a\x1bb", "a\u202eb", "a\x7f", "a\x00b", "x" * 201, "a\udcffb"],
)  # fmt: skip
def test_names_that_are_refused(bad: str, shared: tuple[World, Repository]) -> None:
    _, repo = shared
    with pytest.raises(BringBackError, match="the name '") as caught:
        bringback.receive(repo, Path("/nonexistent"), repo.head_commit, bad)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("reserved", ["fleet", "fleet/x", "Fleet", "checkpoints/1", "mirror"])
def test_names_that_are_ours_alone_to_choose(reserved: str) -> None:
    with pytest.raises(BringBackError, match="is reserved"):
        bringback.check_name(reserved)
    bringback.check_name(reserved, ours=True)


def test_nothing_a_returned_tree_holds_is_written_anywhere(world: World, tmp_path: Path) -> None:
    """Links out of the tree, a submodule and names made to mislead stay objects."""
    repo = found(world)
    link = o.blob(b"../../outside")
    of = o.tree(
        (b"160000", b"Sub", repo.head_commit),
        (b"120000", b"a\n\x1b[2Jb", link.name),
        (b"120000", b"docs", link.name),
        (b"120000", b"sub", link.name),
        (b"100644", b'x"y\xff', BLOB.name),
    )
    (tmp_path / "bundle").write_bytes(work(repo.head_commit, o.entry(link), o.entry(BLOB), o.entry(of), of=of))
    before = worlds.snapshot(world)
    bringback.receive(repo, tmp_path / "bundle", repo.head_commit, "demo")
    assert worlds.snapshot(world) == before
    assert not (tmp_path / "outside").exists()
    assert git(world.repo, "ls-tree", "-z", "--name-only", "refs/sandbox/demo").split(b"\0")[1] == b"a\n\x1b[2Jb"


def test_two_at_once_wait_for_each_other(world: World) -> None:
    code = (
        "import sys; from pathlib import Path; from cli import bringback, repository\n"
        "repo = repository.discover(Path(sys.argv[1]))\n"
        "bringback.receive(repo, Path(sys.argv[2]), repo.head_commit, sys.argv[3])\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(world.repo), str(world.returned), f"n{n}"], cwd=ROOT)
        for n in range(3)
    ]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    assert len(git(world.repo, "for-each-ref", "refs/sandbox").splitlines()) == 3
    assert leftovers(world) == []


def leftovers(world: World) -> list[str]:
    return sorted(path.name for path in (world.repo / ".git/objects").glob("tmp_*"))


def test_a_directory_nobody_may_write_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = found(world)
    objects = world.repo / ".git/objects"
    (objects / "pack").rmdir()
    (objects / "pack").write_text("")
    with pytest.raises(BringBackError, match="objects/pack: "):
        bringback.receive(repo, world.returned, repo.head_commit, "demo")


def test_what_a_killed_call_left_is_swept(world: World) -> None:
    repo = found(world)
    objects = world.repo / ".git/objects"
    left = objects / "tmp_objdir-sandbox-dead"
    (left / "objects/pack").mkdir(parents=True)
    (left / "objects/pack/pack-0123.idx").write_text("index")
    (objects / "pack").mkdir(exist_ok=True)
    for suffix in ("pack", "rev"):
        (objects / f"pack/pack-0123.{suffix}").write_text("moved, and then it was killed")
    (objects / "pack/pack-4567.pack").write_text("not ours")
    (objects / bringback.LOCK).touch()
    lock = world.repo / ".git/refs/sandbox/demo.lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (0, 0))
    bringback.receive(repo, world.returned, repo.head_commit, "demo")
    assert leftovers(world) == []
    assert not list((objects / "pack").glob("pack-0123.*"))
    assert (objects / "pack/pack-4567.pack").exists()


CHILD = (
    "import os, sys; from pathlib import Path; from cli import bringback, repository\n"
    "repo = repository.discover(Path(sys.argv[1])); print('go', flush=True)\n"
    "bringback.receive(repo, Path(sys.argv[2]), repo.head_commit, 'demo'); print('done', flush=True)\n"
)


def kill_family(child: subprocess.Popen[str], whole: bool) -> None:
    """The process alone, or git under it as well, as when a machine goes down."""
    family = []
    if whole:
        child.send_signal(signal.SIGSTOP)
        with suppress(FileNotFoundError):  # it has just ended by itself
            listed = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
            family = [int(pid) for pid in listed]
    child.kill()
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    child.wait()


@pytest.mark.timeout(1200 if SOAK else 120)
def test_killed_at_any_moment_the_repository_is_whole(template: World, tmp_path: Path) -> None:
    seed = int(os.environ.get("SEED", random.SystemRandom().randrange(2**32)))
    count = counts(10, 300)
    print(f"SEED={seed}")
    chance = random.Random(seed)
    world = worlds.copy(template, tmp_path)
    new = text(template.root / "guest", "rev-parse", "sandbox")
    before = worlds.snapshot(world)
    took = 0.25
    seen = {"absent": 0, "complete": 0, "finished": 0}
    for number in range(count):
        arguments = [sys.executable, "-c", CHILD, str(world.repo), str(world.returned)]
        with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "go\n"
            began = time.monotonic()
            if number == 0:
                assert child.stdout.readline() == "done\n"
                took = time.monotonic() - began
            else:
                time.sleep(chance.uniform(0, took))
            kill_family(child, whole=chance.random() < 0.5)
            finished = child.stdout.readline() == "done\n"
        git(world.repo, "fsck", "--strict", "--connectivity-only")
        ref = git(world.repo, "for-each-ref", "--format=%(objectname)", "refs/sandbox").decode().strip()
        assert ref in ("", new)
        if ref:
            git(world.repo, "rev-list", "--objects", "--quiet", ref)
        seen["finished" if finished else "complete" if ref else "absent"] += 1
        assert worlds.snapshot(world) == before
        # The next call works and leaves nothing behind; then from the start again.
        if number % 3 == 0 or SOAK:
            lock = world.repo / ".git/refs/sandbox/demo.lock"
            if lock.exists():
                os.utime(lock, (0, 0))
            repo = found(world)
            bringback.receive(repo, world.returned, repo.head_commit, "demo")
            assert leftovers(world) == []
            git(world.repo, "fsck", "--strict")
            git(world.repo, "update-ref", "-d", "refs/sandbox/demo")
            git(world.repo, "prune", "--expire=now")
            git(world.repo, "repack", "-adqn")
    print(seen)
    assert seen["absent"] or not SOAK
