"""Bundles in and out of a real guestd with real git: what arrives, what comes back, what is refused."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from guestd import bundle
from guestd.process import Refused
from tests.guestd.peer import Guest, eventually, git

COMMIT = (
    "cd /workspace && echo more > added && git add -A && git -c user.name=x -c user.email=x@y commit -qm more"
    " && git rev-parse HEAD"
)


def repository(path: Path, object_format: str = "sha1") -> Path:
    path.mkdir()
    git("init", "-q", "-b", "main", f"--object-format={object_format}", cwd=path)
    (path / "file").write_text("one\n")
    (path / "run.sh").write_text("#!/bin/sh\n")
    (path / "run.sh").chmod(0o755)
    (path / "link").symlink_to("file")
    git("add", "-A", cwd=path)
    git("commit", "-qm", "first", cwd=path)
    (path / "file").write_text("two\n")
    git("commit", "-qam", "second", cwd=path)
    return path


def bundled(path: Path, *what: str) -> bytes:
    return git("bundle", "create", "-q", "-", *(what or ("HEAD",)), cwd=path)


def head(path: Path) -> str:
    return git("rev-parse", "HEAD", cwd=path).decode().strip()


def come_back(guest: Guest, path: Path, base: str, branch: str = "sandbox") -> str:
    """Brings `base..branch` back into the repository; the commit."""
    answer, content = guest.bundle_out(base, branch)
    assert answer.ok, answer.message
    (path / "back.bundle").write_bytes(content)
    git("fetch", "-q", "back.bundle", f"refs/heads/{branch}:refs/sandbox/back", cwd=path)
    return git("rev-parse", "refs/sandbox/back", cwd=path).decode().strip()


def test_a_round_trip(fresh_guest: Guest, tmp_path: Path) -> None:
    source = repository(tmp_path / "source")
    assert fresh_guest.bundle_in(bundled(source)).ok
    got = fresh_guest.shell(
        "cd /workspace && git status --porcelain && git branch --show-current && cat file && stat -c %a run.sh"
        " && readlink link && git rev-list --count HEAD && stat -c '%u' .git .git/HEAD file && git fsck --strict"
    )
    assert got.stdout == b"sandbox\ntwo\n755\nfile\n2\n1001\n1001\n1001\n", got.stderr
    assert fresh_guest.bundle_out(head(source))[0].code == "nothing_new"
    commit = fresh_guest.shell(COMMIT).stdout.decode().strip()
    assert come_back(fresh_guest, source, head(source)) == commit
    assert come_back(fresh_guest, source, head(source)[:10]) == commit, "a second time, from a short name"


def test_the_workspace_must_be_empty(fresh_guest: Guest, tmp_path: Path) -> None:
    source = repository(tmp_path / "source")
    fresh_guest.put("/workspace/.hidden", b"")
    assert fresh_guest.bundle_in(bundled(source)).code == "not_empty"
    fresh_guest.ask("remove", path="/workspace/.hidden")
    assert fresh_guest.bundle_in(bundled(source), "feature/x.y").ok
    assert fresh_guest.run("git", "branch", "--show-current", cwd="/workspace").stdout == b"feature/x.y\n"
    assert fresh_guest.bundle_in(bundled(source)).code == "not_empty"


def test_a_detached_head(fresh_guest: Guest, tmp_path: Path) -> None:
    source = repository(tmp_path / "source")
    git("checkout", "-q", "HEAD~1", cwd=source)
    assert fresh_guest.bundle_in(bundled(source)).ok
    assert fresh_guest.run("cat", "/workspace/file").stdout == b"one\n"


def test_a_sha256_repository(fresh_guest: Guest, tmp_path: Path) -> None:
    source = repository(tmp_path / "source", "sha256")
    assert fresh_guest.bundle_in(bundled(source)).ok
    commit = fresh_guest.shell(COMMIT).stdout.decode().strip()
    assert len(commit) == 64
    assert come_back(fresh_guest, source, head(source)) == commit


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shallow_clone_makes_the_round_trip(fresh_guest: Guest, tmp_path: Path, depth: int) -> None:
    origin = repository(tmp_path / "origin")
    git("checkout", "-q", "-b", "side", "HEAD~1", cwd=origin)
    (origin / "side").write_text("side\n")
    git("add", "-A", cwd=origin)
    git("commit", "-qm", "side", cwd=origin)
    git("checkout", "-q", "main", cwd=origin)
    git("merge", "-q", "--no-edit", "side", cwd=origin)
    git("clone", "-q", f"--depth={depth}", origin.as_uri(), "shallow", cwd=tmp_path)
    shallow = tmp_path / "shallow"
    assert fresh_guest.bundle_in(bundled(shallow)).ok
    count = git("rev-list", "--count", "HEAD", cwd=shallow)
    got = fresh_guest.shell("cd /workspace && git rev-list --count HEAD && git status --porcelain && git fsck")
    assert (got.stdout, got.code) == (count, 0), got.stderr
    commit = fresh_guest.shell(COMMIT).stdout.decode().strip()
    assert come_back(fresh_guest, shallow, head(shallow)) == commit


def test_tags_and_other_branches_come_along(fresh_guest: Guest, tmp_path: Path) -> None:
    source = repository(tmp_path / "source")
    git("tag", "-a", "v1", "-m", "v1", "HEAD~1", cwd=source)
    git("branch", "other", "HEAD~1", cwd=source)
    assert fresh_guest.bundle_in(bundled(source, "HEAD", "--all")).ok
    got = fresh_guest.shell("cd /workspace && git describe && git for-each-ref --format='%(refname)'")
    assert got.stdout.startswith(b"v1-1-g")
    assert got.stdout.split()[1:] == [
        b"refs/heads/sandbox", b"refs/remotes/origin/main", b"refs/remotes/origin/other", b"refs/tags/v1",
    ]


def test_names_of_any_kind(fresh_guest: Guest, tmp_path: Path) -> None:
    source = repository(tmp_path / "source")
    names = [b"new\nline", b'quo"te', b"\xff\xfe", b"-dash", b" ", "ü€😀".encode(), b"a" * 255]
    for name in names:
        (Path(os.fsdecode(os.fsencode(source))) / os.fsdecode(name)).write_bytes(name)
    git("add", "-A", cwd=source)
    git("commit", "-qm", "names", cwd=source)
    assert fresh_guest.bundle_in(bundled(source)).ok
    got = fresh_guest.run("git", "ls-files", "-z", cwd="/workspace")
    assert set(names) <= set(got.stdout.split(b"\0"))
    assert fresh_guest.run("git", "status", "--porcelain", cwd="/workspace").stdout == b""


def test_filters_named_by_the_repository_do_nothing_on_the_way_in(fresh_guest: Guest, tmp_path: Path) -> None:
    source = repository(tmp_path / "source")
    (source / ".gitattributes").write_text("* filter=lfs diff=x merge=y\n")
    git("add", "-A", cwd=source)
    git("commit", "-qm", "attributes", cwd=source)
    assert fresh_guest.bundle_in(bundled(source)).ok
    assert fresh_guest.run("cat", "/workspace/file").stdout == b"two\n"


def hostile() -> dict[str, bytes]:
    good = b"# v2 git bundle\n" + b"0" * 40 + b" HEAD\n\n"
    return {
        "nothing": b"",
        "rubbish": os.urandom(5000),
        "a signature alone": b"# v2 git bundle\n",
        "a header without end": b"# v2 git bundle\n" + b"-" + b"0" * 40 + b"\n" * 0 + b" x" * 600_000,
        "no HEAD": b"# v2 git bundle\n" + b"0" * 40 + b" refs/heads/main\n\n",
        "a filter": b"# v3 git bundle\n@filter=blob:none\n" + b"0" * 40 + b" HEAD\n\n",
        "an object format that is none": b"# v3 git bundle\n@object-format=md5\n" + b"0" * 40 + b" HEAD\n\n",
        "an id that is none": b"# v2 git bundle\nxyz HEAD\n\n",
        "no pack": good,
        "a pack that is none": good + b"PACK" + os.urandom(2000),
    }


@pytest.mark.parametrize("name", list(hostile()))
def test_a_bundle_that_is_none_leaves_the_workspace_as_it_was(guest: Guest, name: str) -> None:
    answer = guest.bundle_in(hostile()[name])
    assert answer.code == "bad_request"
    assert answer.message
    assert guest.shell("ls -A /workspace").stdout == b""


def test_a_truncated_bundle_and_then_a_whole_one(fresh_guest: Guest, tmp_path: Path) -> None:
    whole = bundled(repository(tmp_path / "source"))
    for size in (10, 100, len(whole) - 1):
        assert fresh_guest.bundle_in(whole[:size]).code == "bad_request"
    assert fresh_guest.bundle_in(whole).ok


def test_a_ref_that_is_none_is_refused(fresh_guest: Guest, tmp_path: Path) -> None:
    whole = bundled(repository(tmp_path / "source"))
    oid = whole.split(b" HEAD\n")[0][-40:]
    for ref in (b"refs/tags/../../config", b"refs/tags/a b", b"refs/heads/-x\x7f"):
        bad = whole.replace(b"\n\n", b"\n" + oid + b" " + ref + b"\n\n", 1)
        assert fresh_guest.bundle_in(bad).code == "bad_request"
    assert fresh_guest.shell("ls -A /workspace").stdout == b""


def test_hanging_up_in_the_middle_leaves_the_workspace_empty(fresh_guest: Guest, tmp_path: Path) -> None:
    whole = bundled(repository(tmp_path / "source"))
    with fresh_guest.call("bundle_in", branch="sandbox", size=len(whole)) as call:
        assert call.answer().ok
        call.sock.sendall(whole[:-20])
        time.sleep(0.3)
    assert eventually(lambda: fresh_guest.shell("ls -A /workspace").stdout == b"")
    assert fresh_guest.bundle_in(whole).ok


@pytest.mark.parametrize(
    ("base", "branch"),
    [("0123456789abcdef", "sandbox"), ("no-such-branch", "sandbox"), ("sandbox", "no-such-branch")],
)
def test_what_git_refuses_to_give_out(fresh_guest: Guest, tmp_path: Path, base: str, branch: str) -> None:
    fresh_guest.bundle_in(bundled(repository(tmp_path / "source")))
    answer = fresh_guest.bundle_out(base, branch)[0]
    assert answer.code == "bad_request"
    assert answer.message


def test_nothing_to_give_out_without_a_repository(fresh_guest: Guest) -> None:
    assert fresh_guest.bundle_out("main")[0].code == "bad_request"


def test_a_large_bundle_goes_through_the_spool(fresh_guest: Guest, tmp_path: Path) -> None:
    source = repository(tmp_path / "source")
    assert fresh_guest.bundle_in(bundled(source)).ok
    fresh_guest.shell("head -c 5000000 /dev/urandom > /workspace/big")
    commit = fresh_guest.shell(COMMIT).stdout.decode().strip()
    assert come_back(fresh_guest, source, head(source)) == commit
    assert fresh_guest.shell("ls /tmp").stdout == b"", "nothing is left in the sandbox"


def test_a_hostile_configuration_neither_hangs_nor_bloats(fresh_guest: Guest, tmp_path: Path) -> None:
    source = repository(tmp_path / "source")
    assert fresh_guest.bundle_in(bundled(source)).ok
    commit = fresh_guest.shell(COMMIT).stdout.decode().strip()
    fresh_guest.shell(
        "cd /workspace && printf '#!/bin/sh\\nyes >&2\\n' > /tmp/evil && chmod 755 /tmp/evil"
        " && git config core.fsmonitor /tmp/evil && git config core.hooksPath /tmp"
        " && git config core.alternateRefsCommand /tmp/evil && git config core.pager /tmp/evil"
    )
    assert come_back(fresh_guest, source, head(source)) == commit


def test_a_git_that_hangs_ends_with_the_connection(fresh_guest: Guest) -> None:
    fresh_guest.shell("cd /workspace && git init -q && rm .git/config && mkfifo .git/config")
    call = fresh_guest.call("bundle_out", base="main", branch="sandbox")
    running = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'bundle [c]reate'"
    assert eventually(lambda: fresh_guest.shell(running).stdout.strip() != b"0")
    time.sleep(0.5)
    assert fresh_guest.shell(running).stdout.strip() != b"0", "it does not hang"
    call.sock.close()
    assert eventually(lambda: fresh_guest.shell(running).stdout.strip() == b"0")
    assert fresh_guest.run("true").code == 0


def test_a_configuration_that_floods_stderr_gives_a_short_message(fresh_guest: Guest) -> None:
    fresh_guest.shell(
        "cd /workspace && git init -q && python3 -c \"print('[a]\\n' + 'b\\n' * 10 + '[include]\\npath=x\\n'"
        " + '[' * 100000)\" >> .git/config"
    )
    answer = fresh_guest.bundle_out("main")[0]
    assert answer.code == "bad_request"
    assert len(answer.message) < 4096


# ---- the header, byte by byte

HEADERS = {
    "one ref": (b"# v2 git bundle\n" + b"a" * 40 + b" HEAD\n\nPACK", "sha1", b"a" * 40, b"PACK"),
    "prerequisites and a capability": (
        b"# v3 git bundle\n@object-format=sha256\n-" + b"b" * 64 + b" subject\n" + b"c" * 64 + b" HEAD\n\n",
        "sha256", b"c" * 64, b"",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_arrives_in_pieces(name: str) -> None:
    stream, object_format, commit, rest = HEADERS[name]
    for size in range(stream.index(b"\n\n") + 2):
        assert bundle.parse_header(stream[:size]) is None
    parsed = bundle.parse_header(stream)
    assert parsed is not None
    header, following = parsed
    assert (header.object_format, header.head, following) == (object_format, commit, rest)


@pytest.mark.parametrize("size", [1, 2, 16, 5000])
def test_rubbish_is_known_by_its_first_bytes(size: int) -> None:
    with pytest.raises(Refused):
        bundle.parse_header(b"GARBAGE!" * 1000)
    with pytest.raises(Refused):
        bundle.parse_header((b"x" * 5000)[:size])


