"""A directory of the host behind virtiofsd: what its jail has, and what a hostile guest's root can do through it.

No machine is booted: the requests come from `fuse_guest`, which speaks to virtiofsd as a guest's kernel does and is
kept from nothing. Where tests run as root the directory's owner is root, the worst case."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd.vm import jail, processes, virtiofs
from tests.conftest import counts
from tests.vm.fuse_guest import GID, MODE, UID, Sharing, instance_of

ROOT = Path(__file__).resolve().parents[2]
USER = 4242  # no account of this machine
DEADLINE_S = 20.0
ASKS = "from sandboxd.vm import jail, virtiofs; print(virtiofs.why_not(jail.find_tools(False), '{}', 1024))"
WHAT = ("test", "probe", "end", "rubbish", "race-0")


def why_not() -> str:
    try:
        return virtiofs.why_not(jail.find_tools(root=os.geteuid() == 0), instance_of("probe"), 1024)
    except Exception as fault:  # whatever is missing is the reason
        return str(fault)


@pytest.fixture(scope="module", autouse=True)
def virtiofsd() -> Iterator[None]:
    if reason := why_not():
        pytest.skip(reason)
    yield
    left = [what for what in WHAT if list(processes.marked(instance_of(what), {os.getuid()}))]
    assert left == []


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A directory to share, beside things that are not."""
    (tmp_path / "shared/sub").mkdir(parents=True)
    (tmp_path / "shared/there").write_text("there")
    (tmp_path / "secret").write_text("secret")
    return tmp_path


@pytest.fixture
def guest(top: Path) -> Iterator[Sharing]:
    with Sharing(top / "shared") as sharing:
        yield sharing.boot()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts, and looking into a jail, need root")


# -- what a guest's root can do


@pytest.mark.parametrize("uid", [0, 1001, 4242], ids=["root", "the sandbox's user", "anybody"])
def test_whatever_a_guest_makes_is_the_persons(guest: Sharing, top: Path, uid: int) -> None:
    assert guest.create(b"file", 0o640, uid=uid)[0] == 0
    assert guest.mkdir(b"directory", 0o750, uid=uid)[0] == 0
    assert guest.symlink(b"link", b"there", uid=uid)[0] == 0
    assert guest.mknod(b"pipe", stat.S_IFIFO | 0o600, uid=uid)[0] == 0
    assert guest.mknod(b"socket", stat.S_IFSOCK | 0o600, uid=uid)[0] == 0
    assert guest.mknod(b"plain", stat.S_IFREG | 0o600, uid=uid)[0] == 0
    for name in ("file", "directory", "link", "pipe", "socket", "plain"):
        made = os.lstat(top / "shared" / name)
        assert (made.st_uid, made.st_gid) == (os.getuid(), os.getgid()), name
    assert stat.S_IMODE(os.lstat(top / "shared/file").st_mode) == 0o640
    assert guest.lookup(b"file").uid == virtiofs.GUEST_UID


@pytest.mark.parametrize("bits", [0o4000, 0o2000, 0o6000], ids=["set-user-id", "set-group-id", "both"])
def test_no_file_gives_anybody_the_persons_rights(guest: Sharing, top: Path, bits: int) -> None:
    """Not when it is made, not afterwards, by no kind of request."""
    assert guest.create(b"file", bits | 0o755).error == errno.EPERM
    assert guest.mkdir(b"directory", bits | 0o755).error == errno.EPERM
    assert guest.mknod(b"plain", stat.S_IFREG | bits | 0o755).error == errno.EPERM
    there = guest.lookup(b"there")
    assert guest.setattr(there.node, MODE, mode=stat.S_IFREG | bits | 0o755) == errno.EPERM
    assert guest.setattr(there.node, MODE, mode=bits | 0o755) == errno.EPERM
    assert sorted(os.listdir(top / "shared")) == ["sub", "there"]
    assert not os.stat(top / "shared/there").st_mode & 0o6000
    # The same requests without the bit are done.
    assert guest.create(b"file", 0o755).error == 0
    assert guest.setattr(there.node, MODE, mode=0o755) == 0
    assert stat.S_IMODE(os.stat(top / "shared/there").st_mode) == 0o755


@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK], ids=["character", "block"])
def test_no_device_is_made(guest: Sharing, top: Path, kind: int) -> None:
    assert guest.mknod(b"device", kind | 0o666, os.makedev(1, 3)).error == errno.EPERM
    assert not (top / "shared/device").exists()


@pytest.mark.parametrize("name", [b"security.capability", b"user.x", b"trusted.x", b"system.posix_acl_access"])
def test_nothing_is_put_beside_a_file(guest: Sharing, top: Path, name: bytes) -> None:
    assert guest.setxattr(guest.lookup(b"there").node, name, b"\x01\x00\x00\x02" + bytes(16)) != 0
    assert os.listxattr(top / "shared/there") == []


@pytest.mark.parametrize("owner", [0, 1, 4242])
def test_no_file_is_given_away(guest: Sharing, top: Path, owner: int) -> None:
    assert guest.setattr(guest.lookup(b"there").node, UID | GID, owner=owner) != 0
    assert (top / "shared/there").stat().st_uid == os.getuid()


@pytest.mark.parametrize(
    "name",
    [b"../secret", b"..//secret", b"sub/../../secret", b"/etc/passwd", b"sub/x", b"/", b"./there"],
    ids=lambda name: name.decode(),
)
def test_a_name_is_one_step_and_no_path(guest: Sharing, top: Path, name: bytes) -> None:
    assert guest.lookup(name).error != 0
    assert guest.create(name, 0o644).error != 0
    assert guest.mkdir(name, 0o755).error != 0
    assert guest.symlink(name, b"x").error != 0
    assert (top / "secret").read_text() == "secret"
    assert sorted(os.listdir(top)) == ["secret", "shared"]


def test_above_the_directory_there_is_the_directory(guest: Sharing, top: Path) -> None:
    shared = (top / "shared").stat().st_ino
    up = guest.lookup(b"..")
    assert up.error != 0 or up.inode == shared
    below = guest.lookup(b"..", guest.lookup(b"sub").node)
    assert below.error != 0 or below.inode == shared
    assert guest.lookup(b"secret").error == errno.ENOENT


@pytest.mark.parametrize("target", ["/etc/passwd", "../secret", "sub/../../secret", "/proc/self/root/etc/passwd", "/"])
def test_a_link_is_a_text_that_nobody_follows(guest: Sharing, top: Path, target: str) -> None:
    """It is the guest's kernel that would, among its own files."""
    made = guest.symlink(b"link", target.encode())
    assert made.error == 0 and stat.S_ISLNK(made.mode)
    assert guest.open(made.node)[0] != 0
    assert guest.create(b"link", 0o644).error != 0
    assert guest.lookup(b"passwd", made.node).error == errno.ENOTDIR
    assert (top / "secret").read_text() == "secret"


def test_a_link_that_the_host_puts_in_place_of_a_file_is_not_followed(guest: Sharing, top: Path) -> None:
    node = guest.lookup(b"there").node
    (top / "shared/there").unlink()
    (top / "shared/there").symlink_to(top / "secret")
    assert guest.open(guest.lookup(b"there").node)[0] != 0
    error, handle = guest.open(node)
    assert error != 0 or guest.read(node, handle) == b"there"


def test_a_hard_link_leads_to_what_is_shared_alone(guest: Sharing, top: Path) -> None:
    assert guest.link(guest.lookup(b"there").node, b"again").error == 0
    assert (top / "shared/again").stat().st_ino == (top / "shared/there").stat().st_ino
    for node in (0, 4711, 2**63):
        assert guest.link(node, b"wild").error != 0


def test_what_the_host_changes_is_seen_soon(guest: Sharing, top: Path) -> None:
    (top / "shared/later").write_text("made on the host")
    node = guest.lookup(b"later").node
    error, handle = guest.open(node)
    assert error == 0 and guest.read(node, handle) == b"made on the host"
    (top / "shared/later").write_text("changed on the host")
    assert guest.read(node, handle) == b"changed on the host"


def test_only_to_be_read_nothing_is_changed_by_any_request(top: Path) -> None:
    with Sharing(top / "shared", read_only=True) as guest:
        there = guest.boot().lookup(b"there")
        error, handle = guest.open(there.node)
        assert error == 0 and guest.read(there.node, handle) == b"there"
        refused = [
            guest.create(b"new", 0o644).error, guest.mkdir(b"new", 0o755).error, guest.symlink(b"new", b"x").error,
            guest.mknod(b"new", stat.S_IFIFO | 0o600).error, guest.link(there.node, b"new").error,
            guest.open(there.node, os.O_RDWR)[0], guest.setattr(there.node, MODE, mode=0o777),
            guest.write(there.node, handle, b"x"),
        ]  # fmt: skip
        # Writing through a handle that was opened to be read: EBADF.
        assert refused == [errno.EROFS] * 7 + [errno.EBADF]
    assert sorted(os.listdir(top / "shared")) == ["sub", "there"]
    assert (top / "shared/there").read_text() == "there"


# -- what its jail has


def test_it_is_the_directory_that_was_opened_whatever_has_its_name(top: Path) -> None:
    """Swapped between the check and the start: by then there is only a descriptor."""
    held = os.open(top / "shared", os.O_PATH | os.O_DIRECTORY)
    (top / "shared").rename(top / "away")
    (top / "shared").symlink_to("/etc")
    try:
        with Sharing(held) as guest:
            assert guest.boot().lookup(b"there").error == 0
            assert guest.lookup(b"passwd").error == errno.ENOENT
    finally:
        os.close(held)


def test_it_is_that_directory_while_its_name_is_swapped_all_the_time(top: Path) -> None:
    (top / "evil").symlink_to("/etc")
    held = os.open(top / "shared", os.O_PATH | os.O_DIRECTORY)
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            os.rename(top / "shared", top / "other")
            os.rename(top / "evil", top / "shared")
            os.rename(top / "shared", top / "evil")
            os.rename(top / "other", top / "shared")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for turn in range(counts(5, 100)):
            with Sharing(held, what=f"race-{turn}") as guest:
                assert guest.boot().lookup(b"there").error == 0
                assert guest.lookup(b"passwd").error == errno.ENOENT
    finally:
        done.set()
        thread.join()
        os.close(held)


def mounts_of(pid: int) -> dict[str, list[str]]:
    lines = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    return {line[4]: line[5].split(",") for line in lines}


@needs_root
@pytest.mark.parametrize("read_only", [False, True], ids=["to be written to", "only to be read"])
def test_it_sees_that_directory_and_has_no_power(top: Path, read_only: bool) -> None:
    with Sharing(top / "shared", read_only=read_only) as guest:
        guest.boot()
        pid = guest.program
        assert sorted(os.listdir(f"/proc/{pid}/root")) == ["sub", "there"]
        mounts = mounts_of(pid)
        flags = next(options for point, options in mounts.items() if point in ("/", "/shared"))
        assert {"nosuid", "nodev"} <= set(flags) and ("ro" in flags) is read_only
        status = Path(f"/proc/{pid}/status").read_text()
        assert "\nNoNewPrivs:\t1\n" in status and "\nSeccomp:\t2\n" in status
        # In its map there is one person, so its capabilities are over that person's files alone.
        assert Path(f"/proc/{pid}/uid_map").read_text().split() == [str(virtiofs.GUEST_UID), str(os.getuid()), "1"]
        for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
            assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind
        held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        assert not [path for path in held if str(top) in path or path.startswith("/dev/kvm")], held


@needs_root
def test_what_is_mounted_below_is_not_uncovered_or_brought_along(top: Path) -> None:
    """In a mount namespace of the test's own: something mounted below after the start, before it, and over what was
    opened, which by its name would be shared instead."""
    script = f"""
set -e
mkdir -p {top}/shared/later {top}/beneath {top}/beneath/sub
mount --bind {top}/beneath {top}/beneath && mount --make-shared {top}/beneath
exec {sys.executable} - <<'END'
import os, subprocess, sys
from pathlib import Path
from tests.vm.fuse_guest import Sharing
top = Path({str(top)!r})
with Sharing(top / "beneath") as guest:
    guest.boot()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", top / "beneath/sub"], check=True)
    (top / "beneath/sub/of-the-mount").write_text("x")
    sub = guest.lookup(b"sub")
    print("after", sub.error, guest.lookup(b"of-the-mount", sub.node).error)
with Sharing(top / "beneath", what="below") as guest:
    print("before", guest.started())
held = os.open(top / "shared", os.O_PATH | os.O_DIRECTORY)
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", top / "shared"], check=True)
with Sharing(held, what="below") as guest:
    print("over", guest.started())
END
"""
    ran = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", script], cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    expected = [f"after 0 {errno.ENOENT}", "before False", "over False"]
    assert ran.stdout.splitlines() == expected, ran.stdout + ran.stderr


def test_it_ends_with_its_connection_and_leaves_nothing(top: Path) -> None:
    with Sharing(top / "shared", what="end") as guest:
        pid = guest.boot().program
        guest.vmm.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + DEADLINE_S
        while guest.child.exit_code() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert not Path(f"/proc/{pid}").exists()
    assert list(processes.marked(instance_of("end"), {os.getuid()})) == []


@pytest.mark.parametrize("request_", [b"", b"\xff" * 40, bytes(40)], ids=["nothing", "all ones", "zeros"])
def test_rubbish_ends_it_at_worst(top: Path, request_: bytes) -> None:
    with Sharing(top / "shared", what="rubbish") as guest:
        guest.vmm.sendall(request_ or b"\0")
        guest.vmm.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + DEADLINE_S
        while guest.child.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.02)
    assert sorted(os.listdir(top / "shared")) == ["sub", "there"]


# -- where it cannot be had


@needs_root
@pytest.mark.parametrize("groups", ["--clear-groups", "--groups=4243,4244"], ids=["alone", "with further groups"])
def test_an_ordinary_user_can_have_it(groups: str) -> None:
    code = ASKS.format(instance_of("user"))
    command = ["setpriv", f"--reuid={USER}", f"--regid={USER}", groups, sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60, env={})
    if "Permission denied" in ran.stderr and "sandboxd" not in ran.stderr:
        pytest.skip(f"an ordinary user cannot run {sys.executable}")
    assert (ran.stdout, ran.stderr) == ("\n", "")


def test_a_host_without_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtiofs, "PLACES", ("/nowhere/virtiofsd",))
    assert "apt-get install -y qemu-system-common" in virtiofs.why_not(jail.find_tools(False), "none", 1024)


@needs_root
def test_a_host_without_user_namespaces_says_so() -> None:
    """The limit is of a user namespace of the test's own, below which there can be none."""
    code = ASKS.format(instance_of("none"))
    script = f'echo 0 > /proc/sys/user/max_user_namespaces && exec {sys.executable} -c "{code}"'
    ran = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script], cwd=ROOT, capture_output=True,
        text=True, check=False, timeout=60,
    )  # fmt: skip
    assert "virtiofsd does not start in its jail: unshare" in ran.stdout, ran.stdout + ran.stderr
