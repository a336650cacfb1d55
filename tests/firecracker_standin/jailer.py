"""jailer, the stand-in: the real one's command line, held to it strictly, and the steps it takes, in its order.

Where what it starts is the `firecracker` beside it, that needs its companion outside: a connection to it is then the
one descriptor that is passed on beside the standard ones. `standin.py` installs this as an executable.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shutil
import socket
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

COMPANION_FD = 3
DEFAULT_OPEN_FILES = 2048
DEVICES = {"/dev/net/tun": (10, 200), "/dev/kvm": (10, 232), "/dev/urandom": (1, 9)}
FOLDERS = ("/", "/dev", "/dev/net", "/run")
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWNET, CLONE_NEWPID = 0x20000, 0x40000000, 0x20000000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

# name: whether it takes a value, and whether it may come more than once
ARGUMENTS = {
    "id": (True, False), "exec-file": (True, False), "uid": (True, False), "gid": (True, False),
    "chroot-base-dir": (True, False), "netns": (True, False), "daemonize": (False, False),
    "new-pid-ns": (False, False), "cgroup": (True, True), "resource-limit": (True, True),
    "cgroup-version": (True, False), "parent-cgroup": (True, False),
}  # fmt: skip
REQUIRED = ("id", "exec-file", "uid", "gid")

_libc = ctypes.CDLL(None, use_errno=True)


class JailerError(Exception):
    """The text is the real one's where a test could meet it."""


@dataclass(frozen=True)
class Jail:
    id: str
    exec_file: Path
    root: Path
    uid: int
    gid: int
    netns: str | None
    daemonize: bool
    new_pid_ns: bool
    cgroup_version: int
    parent_cgroup: str
    cgroups: tuple[tuple[str, str], ...]
    limits: Mapping[int, int]
    arguments: tuple[str, ...]


def parse(words: Sequence[str]) -> Jail:
    """Looks at the paths that are named, and changes nothing."""
    words, extra = _split(words)
    given = _values(words)
    for name in REQUIRED:
        if name not in given:
            raise JailerError(f"Failed to parse arguments: Argument '{name}' required, but not found.")
    one = {name: values[0] for name, values in given.items()}
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", one["id"], re.ASCII):
        raise JailerError(f"Invalid instance ID: {one['id']}")
    exec_file = _canonical(one["exec-file"])
    if not exec_file.is_file():
        raise JailerError(f"{exec_file} is not a file")
    if "firecracker" not in exec_file.name:
        raise JailerError(
            'Invalid filename. The filename of `--exec-file` option must contain "firecracker": ' + exec_file.name
        )
    base = _canonical(one.get("chroot-base-dir", "/srv/jailer"))
    if not base.is_dir():
        raise JailerError(f"{base} is not a directory")
    parent = one.get("parent-cgroup", exec_file.name)
    if parent.startswith("/") or {".", ".."} & set(parent.split("/")):
        raise JailerError("Parent cgroup path is invalid. Path should not be absolute or contain '..' or '.'")
    version = one.get("cgroup-version", "1")
    if version not in ("1", "2"):
        raise JailerError(f"{version} is an invalid cgroup version specifier")
    return Jail(
        id=one["id"],
        exec_file=exec_file,
        root=base / exec_file.name / one["id"] / "root",
        uid=_number("uid", one["uid"]),
        gid=_number("gid", one["gid"]),
        netns=one.get("netns"),
        daemonize="daemonize" in given,
        new_pid_ns="new-pid-ns" in given,
        cgroup_version=int(version),
        parent_cgroup=parent,
        cgroups=tuple(_cgroup(text) for text in given.get("cgroup", [])),
        limits={resource.RLIMIT_NOFILE: DEFAULT_OPEN_FILES} | dict(_limit(t) for t in given.get("resource-limit", [])),
        arguments=tuple(extra),
    )


def misbehave(installed: Path, jail: Jail) -> None:
    """What a test asks for with the path "jailer", half-way through: `hang`, or an end."""
    try:
        faults = json.loads((installed / "faults.json").read_bytes())
    except FileNotFoundError:
        return
    for fault in faults:
        if fault.get("path") == "jailer" and fault.get("id", jail.id) == jail.id:
            while fault["do"] == "hang":
                time.sleep(60)
            raise JailerError("the test wants no jail")


def run(jail: Jail, installed: Path, started: tuple[int, int]) -> NoReturn:
    companion = None
    if jail.exec_file.parent == installed:
        companion = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        companion.connect(str(installed / "companion.sock"))
    jail.root.mkdir(parents=True, exist_ok=True)
    shutil.copy(jail.exec_file, jail.root / jail.exec_file.name)
    misbehave(installed, jail)
    if jail.netns is not None:
        fd = os.open(jail.netns, os.O_RDONLY | os.O_CLOEXEC)
        _call("setns", fd, CLONE_NEWNET)
        os.close(fd)
    for kind, value in jail.limits.items():
        resource.setrlimit(kind, (value, value))
    _join_cgroups(jail)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC) if jail.daemonize else None
    devices = DEVICES | _userfaultfd()
    _change_root(jail.root)
    for folder in FOLDERS:
        os.makedirs(folder, exist_ok=True)
        os.chmod(folder, 0o700)
        os.chown(folder, jail.uid, jail.gid)
    for path, (major, minor) in devices.items():
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(major, minor))
        os.chown(path, jail.uid, jail.gid)
    if null is not None:
        _daemonize(null)
    executable = f"/{jail.exec_file.name}"
    pid = 0
    if jail.new_pid_ns:
        # As the real one does it: a filter may know one way into a namespace and not the other.
        pid = _call("syscall", SYS_CLONE[os.uname().machine], CLONE_NEWPID, None, None, None, None)
    if pid or not jail.new_pid_ns:
        with open(f"{executable}.pid", "x") as file:
            file.write(str(pid or os.getpid()))
    if pid:
        os._exit(0)
    command = [executable, "--id", jail.id, "--start-time-us", str(started[0]), "--start-time-cpu-us", "0"]
    command += ["--parent-cpu-time-us", str(time.process_time_ns() // 1000 - started[1]), *jail.arguments]
    os.setgroups([])
    os.setgid(jail.gid)
    os.setuid(jail.uid)
    if companion is not None:
        os.dup2(companion.fileno(), COMPANION_FD)
        os.set_inheritable(COMPANION_FD, True)
    _close_all_but(2 if companion is None else COMPANION_FD)
    os.execve(executable, command, {})


def main(installed: Path) -> None:
    """`installed`: where the companion listens."""
    _close_all_but(2)
    os.environ.clear()
    started = (time.monotonic_ns() // 1000, time.process_time_ns() // 1000)
    if "--version" in _split(sys.argv[1:])[0]:
        print((installed / "version").read_text().strip().join(("Jailer v", "\n")))
        return
    try:
        run(parse(sys.argv[1:]), installed, started)
    except (JailerError, OSError) as error:
        sys.exit(f"Jailer error: {error}")


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    if "--" in words:
        at = list(words).index("--")
        return words[:at], words[at + 1 :]
    return words, ()


def _values(words: Sequence[str]) -> dict[str, list[str]]:
    given: dict[str, list[str]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name = word.removeprefix("--")
        if not word.startswith("--") or name not in ARGUMENTS:
            raise JailerError(
                f"Failed to parse arguments: Found argument '{name}' which wasn't expected, or isn't valid in this "
                "context."
            )
        takes_value, repeats = ARGUMENTS[name]
        if name in given and not repeats:
            raise JailerError(f"Failed to parse arguments: The argument '{name}' was provided more than once.")
        if takes_value and (not rest or rest[0].startswith("--")):
            raise JailerError(
                f"Failed to parse arguments: The argument '{name}' requires a value, but none was supplied."
            )
        given.setdefault(name, []).append(rest.pop(0) if takes_value else "")
    return given


def _canonical(path: str) -> Path:
    try:
        return Path(path).resolve(strict=True)
    except OSError as error:
        raise JailerError(f"Failed to canonicalize path {path}: {error.strerror} (os error {error.errno})") from None


def _number(what: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text, re.ASCII) or int(text) >= 1 << 32:
        raise JailerError(f"Invalid {what}: {text}")
    return int(text)


def _cgroup(text: str) -> tuple[str, str]:
    file, sign, value = text.partition("=")
    if not sign or not value or "=" in value:
        raise JailerError(f"Invalid format for cgroups: {text}")
    if "." not in file or file.startswith("/") or {".", ".."} & set(file.split("/")):
        raise JailerError(f"Cgroup invalid file: {text}")
    return file, value


def _limit(text: str) -> tuple[int, int]:
    name, sign, value = text.partition("=")
    if not sign:
        raise JailerError(f"Invalid format for resources limits: {text}")
    kinds = {"no-file": resource.RLIMIT_NOFILE, "fsize": resource.RLIMIT_FSIZE}
    if not re.fullmatch(r"[0-9]+", value, re.ASCII):
        raise JailerError(f"Invalid limit value for resource: {value}: invalid digit found in string")
    if name not in kinds:
        raise JailerError(f"Invalid resource argument: {name}")
    return kinds[name], int(value)


def _mounts(kind: str) -> list[tuple[Path, list[str]]]:
    rows = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [(Path(row[1]), row[3].split(",")) for row in rows if row[2] == kind]


def _join_cgroups(jail: Jail) -> None:
    """All values first, then the process itself: a cpuset takes none before it has its processors."""
    joined = []
    if jail.cgroup_version == 2:
        mounts = _mounts("cgroup2")
        if not mounts:
            raise JailerError("Hierarchy not found: No hierarchy found for this cgroup version.")
        top = mounts[0][0]
        parent = top / jail.parent_cgroup
        if not jail.cgroups:
            if parent.exists():
                (parent / "cgroup.procs").write_text(str(os.getpid()))
            return
        available = (top / "cgroup.controllers").read_text().split()
        for file, value in jail.cgroups:
            controller = file.split(".")[0]
            if controller not in available:
                raise JailerError(f"Controller {controller} is unavailable")
            group = parent / jail.id
            group.mkdir(parents=True, exist_ok=True)
            for above in [top, *reversed([p for p in (parent, *parent.parents) if top in p.parents])]:
                (above / "cgroup.subtree_control").write_text(f"+{controller}\n")
            (group / file).write_text(f"{value}\n")
            joined.append(group / "cgroup.procs")
    else:
        for file, value in jail.cgroups:
            controller = file.split(".")[0]
            found = [mount for mount, options in _mounts("cgroup") if controller in options]
            if not found:
                raise JailerError(f"Controller {controller} is unavailable")
            group = found[0] / jail.parent_cgroup / jail.id
            group.mkdir(parents=True, exist_ok=True)
            _inherit(group, file, len(Path(jail.parent_cgroup).parts))
            (group / file).write_text(f"{value}\n")
            joined.append(group / "tasks")
    for tasks in joined:
        tasks.write_text(f"{os.getpid()}\n")


def _inherit(group: Path, file: str, depth: int) -> None:
    """A new v1 group's files may be empty; then they take what the group above has."""
    above = group.parent / file
    if not above.read_text().strip() and depth > 0:
        _inherit(group.parent, file, depth - 1)
    value = above.read_text().strip()
    if not value:
        raise JailerError(f"Failed to inherit cgroups configurations from file {file} in path {group}")
    (group / file).write_text(f"{value}\n")


def _userfaultfd() -> dict[str, tuple[int, int]]:
    """A device that the kernel gave a number of its choice, where there is one and /proc/misc can be read."""
    try:
        rows = [line.split(" ") for line in Path("/proc/misc").read_text().splitlines()]
    except OSError:
        return {}
    return {f"/dev/{row[1]}": (10, int(row[0])) for row in rows if row[1:] == ["userfaultfd"]}


def _change_root(root: Path) -> None:
    _call("unshare", CLONE_NEWNS)
    _call("mount", None, b"/", None, MS_SLAVE | MS_REC, None)
    name = os.fsencode(root)
    _call("mount", name, name, None, MS_BIND | MS_REC, None)
    os.chdir(root)
    os.mkdir("old_root", 0o600)
    _call("syscall", SYS_PIVOT_ROOT[os.uname().machine], b".", b"old_root")
    os.chdir("/")
    _call("umount2", b"old_root", MNT_DETACH)
    os.rmdir("old_root")


def _daemonize(null: int) -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    for fd in range(3):
        os.dup2(null, fd)


def _close_all_but(last: int) -> None:
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))


def _call(name: str, *arguments: object) -> int:
    ctypes.set_errno(0)
    result: int = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
