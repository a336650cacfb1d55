"""A VMM that was taken over, in each backend's jail, as root's and as an ordinary user's; a line for each attempt.

Whatever it does with its own names, sockets and disks, the host's side then looks at, adopts, ends and removes, and
nothing outside of the jail is followed or touched.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from sandboxd.vm import cgroups, processes, seccomp, syscalls
from tests.firecracker_standin import real
from tests.firecracker_standin.standin import LAUNCHER
from tests.vm import attacking
from tests.vm.attacking import UID, Plan, Result

ROOT = Path(__file__).resolve().parents[2]
USER = 4242  # no account of this machine
SETPRIV = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
INSTANCE = f"a{os.getpid()}"
KINDS = ["firecracker-root", "firecracker-user", "qemu-root", "qemu-user"]

# arch/x86/entry/syscalls/syscall_64.tbl
NUMBERS = {name: number for name, (number, _) in syscalls.NUMBERS.items()} | {
    "socket": 41, "socketpair": 53, "clone": 56, "kill": 62, "flock": 73, "ftruncate": 77, "rename": 82, "unlink": 87,
    "fchmod": 91, "chown": 92, "fchown": 93, "setuid": 105, "setgid": 106, "setgroups": 116, "setresuid": 117,
    "prctl": 157, "mmap": 9, "shmget": 29, "symlink": 88, "link": 86, "chmod": 90, "fchmodat": 268,
    "sched_setscheduler": 144, "setpriority": 141, "utimensat": 280, "fsetxattr": 190, "rt_sigqueueinfo": 129,
    "creat": 85, "mkdir": 83, "fcntl": 72, "pwrite": 18,
    "fallocate": 285, "clone3": 435, "tgkill": 234, "ioprio_set": 251,
}  # fmt: skip
CLONE_NEW = {
    "mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000, "pid": 0x20000000,
    "net": 0x40000000, "time": 0x80,
}  # fmt: skip
FAMILIES = {"inet": 2, "inet6": 10, "netlink": 16, "packet": 17, "tipc": 30, "alg": 38, "vsock": 40, "xdp": 44}
TOP = "{top}"  # where the host's own things lie


def call(name: str, *arguments: object) -> str:
    """A line for attack.c; a text among the arguments is passed as one, and a word that begins with `$` as is."""
    words = [a.removeprefix("$") if str(a).startswith("$") else f'"{a}' if isinstance(a, str) else a for a in arguments]
    return " ".join(str(word) for word in ("call", name, NUMBERS[name], *words))


EPERM, ESRCH, ENOENT = (str(number) for number in (errno.EPERM, errno.ESRCH, errno.ENOENT))
NOTHING = (ENOENT, str(errno.ENOTDIR))
NO_NODE = (EPERM, str(errno.EACCES))  # by what it is, and by where it would be
READ_ONLY = tuple(str(n) for n in (errno.EPERM, errno.EACCES, errno.EROFS, errno.EBADF, errno.EINVAL, errno.EXDEV))

# What it tries, and what it may hear. The one thing that it never may is 0.
ATTEMPTS: list[tuple[str, Collection[str]]] = [
    # files of the host
    *((f"open {path}", NOTHING) for path in (
        "/etc/shadow", "/etc/passwd", "/../../../../etc/passwd", "/proc/self/status", "/proc/1/root/etc/passwd",
        "/proc/self/exe", "/proc/self/fd/0", "/sys/kernel", "/sys/fs/cgroup/cgroup.procs", "/dev/null", "/dev/mem",
        "/dev/sda", "/dev/vda", "/dev/vsock", "/dev/userfaultfd", "/tmp", "/run/lock", "/home", "/root", "/usr/bin/env",
        f"{TOP}/secret", f"{TOP}/treasure/gold", f"{TOP}/other/scratch", f"{TOP}/other/own", str(ROOT),
    )),
    (call("open_by_handle_at", -100, "$buffer", 0), (EPERM,)),
    # sockets of the host
    (f"connect {TOP}/socket", NOTHING),
    ("connect /run/docker.sock", NOTHING),
    ("connect /run/systemd/private", NOTHING),
    ("abstract {abstract}", (str(errno.ECONNREFUSED),)),
    *((call("socket", family, kind, 0), (str(errno.EAFNOSUPPORT),)) for family in FAMILIES.values() for kind in (1, 3)),
    *((call("socketpair", family, kind, 0, "$buffer"), (str(errno.EAFNOSUPPORT),))
      for family in FAMILIES.values() for kind in (1, 2, 5)),
    # other processes
    *((call("kill", pid, 0), (ESRCH,)) for pid in ("$-1", 2, 3, 4, 10, 100, "${starter}", "${other}")),
    (call("rt_sigqueueinfo", "${starter}", 9, "$buffer"), (ESRCH, EPERM)),
    (call("tgkill", "${starter}", "${starter}", 9), (ESRCH,)),
    *((call("ptrace", 16, pid), (EPERM,)) for pid in (1, "${starter}")),
    (call("process_vm_readv", "${starter}", "$buffer", 1, "$buffer", 1), (EPERM,)),
    (call("process_vm_writev", "${starter}", "$buffer", 1, "$buffer", 1), (EPERM,)),
    (call("shmget", 0x5B0C, 0, 0), (ENOENT,)),
    # mounts and roots
    (call("mount", "none", "/", "tmpfs", 0, 0), (EPERM,)),
    (call("mount", "none", "/", "proc", 0, 0), (EPERM,)),
    (call("mount", "none", "/", "cgroup2", 0, 0), (EPERM,)),
    (call("mount", "/", "/", "none", 0x1000, 0), (EPERM,)),
    (call("mount", "none", "/", "none", 0x1020, 0), (EPERM,)),
    (call("umount2", "/dev", 2), (EPERM,)),
    (call("umount2", "/", 2), (EPERM,)),
    (call("pivot_root", ".", "."), (EPERM,)),
    (call("chroot", "/"), (EPERM,)),
    ("leave-root", (EPERM,)),
    # power
    (call("setuid", 0), (EPERM, str(errno.EINVAL))),
    (call("setgid", 0), (EPERM, str(errno.EINVAL))),
    (call("setresuid", 0, 0, 0), (EPERM, str(errno.EINVAL))),
    (call("setgroups", 1, "$buffer"), (EPERM,)),
    ("get-capabilities", (EPERM,)),
    (call("prctl", 47, 2, 21), (EPERM,)),  # PR_CAP_AMBIENT_RAISE of CAP_SYS_ADMIN
    (call("sched_setscheduler", 0, 1, "$buffer"), (EPERM, str(errno.EINVAL))),
    (call("setpriority", 0, 0, "$-20"), (EPERM, str(errno.EACCES))),
    (call("ioprio_set", 1, 0, 0x2000), (EPERM,)),
    # devices
    *((call("mknod", "disk", stat.S_IFBLK | 0o600, os.makedev(major, 0)), NO_NODE) for major in (8, 253, 254, 259)),
    (call("mknod", "mem", stat.S_IFCHR | 0o600, os.makedev(1, 1)), NO_NODE),
    (call("mknod", "vsock", stat.S_IFCHR | 0o600, os.makedev(10, 258)), NO_NODE),
    ("make-tap", (EPERM, ENOENT)),
    # namespaces
    *((call("unshare", flag), (EPERM,)) for flag in CLONE_NEW.values()),
    *((call("clone", flag | 17, 0, 0, 0, 0), (EPERM,)) for name, flag in CLONE_NEW.items() if name != "time"),
    (call("clone3", "$buffer", 88), (str(errno.ENOSYS),)),
    (call("setns", 0, 0), (EPERM, str(errno.EINVAL))),
    # parts of the kernel it has no use for; other ways into the kernel end it
    *((call(name), (EPERM,)) for name in seccomp.REFUSED if name not in seccomp.JAILS),
    ("x32 39", ("signal 31",)),
    ("i386 20", ("signal 31",)),
    # its read-only drive
    ("map-image", (str(errno.EACCES),)),
    (call("pwrite", "$image", "x", 1, 0), (str(errno.EBADF),)),
    (call("ftruncate", "$image", 0), READ_ONLY),
    (call("fallocate", "$image", 3, 0, 4096), READ_ONLY),
    (call("fchmod", "$image", 0o666), READ_ONLY),
    (call("fchown", "$image", UID, UID), READ_ONLY),
    (call("utimensat", "$image", 0, 0, 0), READ_ONLY),
    (call("fsetxattr", "$image", "user.x", "y", 1, 0), (*READ_ONLY, str(errno.EOPNOTSUPP))),
    (call("fcntl", "$image", 1024, 1), (str(errno.EACCES), str(errno.EAGAIN), EPERM)),  # F_SETLEASE, F_WRLCK
    (call("flock", "$image", 6), (EPERM,)),
    *((line, (*READ_ONLY, ENOENT)) for name in ("drive0", "kernel", "initramfs", "/kernel", "/initramfs") for line in (
        f"write {name}", call("chmod", name, 0o777), call("chown", name, UID, UID), call("link", name, "linked"),
    )),
    # more than it was given
    (call("ftruncate", "$scratch", 1 << 40), (str(errno.EFBIG),)),
    (call("mmap", 0, 1 << 40, 1, 0x22, "$-1"), (str(errno.ENOMEM),)),
    *((f"raise-limit {limit}", (EPERM,))
      for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_NOFILE)),
]  # fmt: skip
# Only where the jailer made its root: an ordinary user's VMM may write to the directory that it starts in.
OF_A_JAILER: list[tuple[str, Collection[str]]] = [
    *((line, (str(errno.EACCES),)) for folder in ("", "dev/", "dev/net/", "run/") for line in (
        call("creat", f"/{folder}more", 0o600), call("mkdir", f"/{folder}more", 0o700),
        call("symlink", "/kernel", f"/{folder}more"), call("link", "/metrics", f"/{folder}more"),
        call("rename", "/log", f"/{folder}more"),
    )),
    *((line, (EPERM,)) for folder in ("/", "/dev", "/dev/net", "/run") for line in (
        call("chmod", folder, 0o777), call("chown", folder, UID, UID),
    )),
    (call("unlink", "/kernel"), (str(errno.EACCES),)),
]  # fmt: skip
# Only where there is a control group.
OF_A_GROUP: list[tuple[str, Collection[str]]] = [
    ("processes 600", (str(errno.EAGAIN),)),
    ("memory 1800", ("signal 9", str(errno.ENOMEM))),
]

SOCKETS = ("api.sock", "v.sock", "companion.sock")
FILES = ("log", "metrics", "drive0", "drive1", "kernel", "initramfs", "firecracker", "firecracker.pid", "memory")
DIRECTORIES = ("dev", "run")


def swaps() -> list[str]:
    """Each name in its root becomes a link to something of the host; its own files are linked more than once."""
    lines = [call("link", "drive1", "drive9"), call("chmod", "drive1", 0o4777), call("symlink", "/", "whole")]
    for name in SOCKETS:
        lines += [call("unlink", name), call("symlink", f"{TOP}/socket", name)]
    for name in FILES:
        lines += [call("unlink", name), call("symlink", f"{TOP}/secret", name)]
    for name in DIRECTORIES:
        lines += [call("rename", name, f"old-{name}"), call("symlink", f"{TOP}/treasure", name)]
    return lines


@dataclass
class Attacked:
    kind: str
    result: Result
    said: dict[str, str]
    top: Path
    uid: int
    untouched: bool


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    """One that every user may enter, on the disk that the machines are on."""
    path = Path(tempfile.mkdtemp(prefix="attack-", dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def program(top: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install gcc libc6-dev")
    source = Path(__file__).with_name("attack.c")
    built = top / "firecracker"
    subprocess.run([compiler, "-std=gnu11", "-Wall", "-Wextra", "-O1", "-static", "-o", built, source], check=True)
    return built


@pytest.fixture(scope="module")
def launcher(top: Path) -> Path:
    """The jailer: the real one where there is one. The stand-in finds no companion beside this program, and gives it
    nothing."""
    if real.given():
        return Path(os.environ[real.JAILER])
    path = top / "place" / "jailer"
    path.parent.mkdir()
    path.write_text(LAUNCHER.format(python=sys.executable, root=str(ROOT), directory=str(path.parent)))
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def host(top: Path) -> Iterator[dict[str, str]]:
    """What a hostile program would like of the host; its rights are such that only the jail stands between."""
    (top / "treasure").mkdir()
    (top / "other").mkdir()
    for name in ("secret", "treasure/gold", "other/scratch"):
        (top / name).write_text("gold")
        (top / name).chmod(0o666)
    for name in ("treasure", "other"):
        (top / name).chmod(0o777)
    other = subprocess.Popen(["sleep", "300"])
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as abstract:
        for sock, address in ((named, str(top / "socket")), (abstract, f"\0attack-{os.getpid()}")):
            sock.bind(address)
            sock.listen(8)
            sock.setblocking(False)
        (top / "socket").chmod(0o777)
        yield {
            "top": str(top), "abstract": f"attack-{os.getpid()}", "starter": str(os.getpid()), "other": str(other.pid)
        }  # fmt: skip
        for sock in (named, abstract):
            with pytest.raises(BlockingIOError):
                sock.accept()
    assert other.poll() is None
    other.kill()
    other.wait()


def seen(top: Path) -> list[tuple[object, ...]]:
    """All that there is to see of the host's things."""
    found = []
    for path in (top / "secret", top / "socket", *sorted((top / "treasure").rglob("*")), *(top / "other").rglob("*")):
        info = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
        found.append((path, info.st_mode, info.st_uid, info.st_nlink, info.st_mtime_ns, info.st_ino, content))
    return found


def attempts(kind: str) -> list[tuple[str, Collection[str]]]:
    jailed = OF_A_JAILER if kind == "firecracker-root" else []
    return [*ATTEMPTS, *jailed, *(OF_A_GROUP if kind.endswith("root") else [])]


def filled(line: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        line = line.replace("{" + name + "}", value)
    return line


@pytest.fixture(scope="module", params=KINDS)
def attacked(
    request: pytest.FixtureRequest, top: Path, program: Path, launcher: Path, host: dict[str, str]
) -> Iterator[Attacked]:
    backend, _, who = request.param.partition("-")
    if os.geteuid() != 0 and who == "root":
        pytest.skip("needs root, to be given a uid of its own")
    if backend == "qemu" and shutil.which("qemu-system-x86_64") is None:
        pytest.skip("no QEMU: apt-get install qemu-system-x86")
    lines = [line for line, _ in attempts(request.param)]
    plan = Plan(["who", "walk", *(filled(line, host) for line in lines)], [filled(line, host) for line in swaps()])
    before = seen(top)
    directory = top / request.param
    directory.mkdir(mode=0o700)
    if os.geteuid() == 0 and who == "user":
        os.chown(directory, USER, USER)
        command = [*SETPRIV, sys.executable, "-m", "tests.vm.attacking", backend, directory, program, INSTANCE]
        ran = subprocess.run(
            command, cwd=ROOT, input=json.dumps(vars(plan)), capture_output=True, text=True, timeout=60, check=False
        )
        if "Permission denied" in ran.stderr and "sandboxd" not in ran.stderr:
            pytest.skip(f"an ordinary user cannot run {sys.executable}")
        assert ran.returncode == 0, ran.stderr
        result, uid = Result(**json.loads(ran.stdout)), USER
    else:
        result = anyio.run(attacking.run, backend, directory, program, launcher, INSTANCE, plan)
        uid = UID if who == "root" else os.getuid()
    said = dict(line.rpartition(": ")[::2] for line in result.attempts)
    yield Attacked(request.param, result, said, top, uid, seen(top) == before)
    assert list(processes.marked(INSTANCE, {os.getuid(), UID, USER})) == []
    if os.geteuid() == 0:
        assert cgroups.find().ids(INSTANCE) == set()


def test_it_gets_nowhere(attacked: Attacked, host: dict[str, str]) -> None:
    heard = [(line, attacked.said.get(filled(line, host)), right) for line, right in attempts(attacked.kind)]
    assert [(line, said) for line, said, right in heard if said not in right] == []


def test_it_is_nobody_and_holds_nothing(attacked: Attacked) -> None:
    assert all_said(attacked.result.attempts, "who") == [f"{attacked.uid} {attacked.uid} 0"]
    status = attacked.result.status
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {str(attacked.uid)}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    of_the_jail = {"PWD", "LD_LIBRARY_PATH", "QEMU_MODULE_DIR"}
    assert {line.partition("=")[0] for line in all_said(attacked.result.attempts, "environment")} <= of_the_jail
    descriptors = {int(line) for line in all_said(attacked.result.attempts, "descriptor")}
    # Firecracker's are those that it opened itself. QEMU has its drives, its device, its monitor and who speaks to it.
    assert len(descriptors) == 3 + 2 + (3 if attacked.kind.startswith("qemu") else 1)


def test_it_sees_its_own_files_alone(attacked: Attacked) -> None:
    sees = set(all_said(attacked.result.attempts, "sees"))
    writable = set(all_said(attacked.result.attempts, "writable"))
    if attacked.kind == "firecracker-root":
        names = "drive0 drive1 kernel initramfs firecracker firecracker.pid log metrics api.sock"
        assert sees == {f"/{name}" for name in (*names.split(), "dev/kvm", "dev/net/tun", "dev/urandom")}
        assert writable == {f"/{name}" for name in (
            "log", "metrics", "api.sock", "dev/kvm", "dev/net/tun", "dev/urandom",
        )}  # fmt: skip
    elif attacked.kind == "firecracker-user":
        assert {path for path in sees if path.startswith("/vm/")} == {
            f"/vm/{name}" for name in ("drive0", "drive1", "kernel", "initramfs", "log", "metrics", "api.sock")
        }
        assert {path for path in writable if path.count("/") > 1} <= {
            f"/vm/{name}" for name in ("drive1", "log", "metrics", "api.sock")
        } | {"/dev/kvm"}
        assert ("/dev/kvm" in sees) == Path("/dev/kvm").exists()
    else:
        known = ("/lib/", "/lib64/", "/firmware/", "/modules/", "/sandboxd/")
        assert all(path.startswith(known) or path in ("/setpriv", "/kernel", "/initramfs") for path in sees)
        assert writable == set()


def test_the_hosts_side_follows_nothing_of_it_and_leaves_nothing(attacked: Attacked) -> None:
    assert attacked.untouched
    swapped = [line for line in attacked.result.swaps if line.startswith("call symlink") and line.endswith(": 0")]
    if attacked.kind == "firecracker-user":
        assert len(swapped) >= 6, "a jail whose names it can change; else this test says little"
        assert attacked.result.reached == {"vsock": "refused", "api": "refused", "snapshot": "refused"}
    else:
        assert swapped == []
    if attacked.kind == "firecracker-root":
        assert attacked.result.reached == {"vsock": "refused", "api": "connected", "snapshot": "refused"}
    assert attacked.result.adopted, "one that cannot be asked whether its guest runs, too"
    assert attacked.result.console_s < 1.0, "whoever talks without end is not listened to without end"
    assert attacked.result.left == []
    scratch = (attacked.top / attacked.kind / "scratch").stat()
    if attacked.kind.startswith("firecracker"):
        assert (scratch.st_nlink, stat.S_IMODE(scratch.st_mode) & 0o7000) == (1, 0)
    image = (attacked.top / attacked.kind / "image").read_bytes()
    assert image == bytes(len(image))


def all_said(lines: list[str], name: str) -> list[str]:
    return [line.removeprefix(f"{name}: ") for line in lines if line.startswith(f"{name}: ")]
