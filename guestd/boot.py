"""Phase two of a boot: `configure` makes a sandbox out of a machine that has no identity yet.

guest-init has started guestd on its own drive and mounted what a kernel needs. Here, once, the drives
become the processes' root: the image below, the scratch drive above, in a mount namespace of their own in
which guestd's drive does not exist. Names, clock, entropy, network and the host's files come with the request;
of its environment the values stay here.

A guestd that is restarted finds STATE and everything mounted: it ends what ran and makes the namespace again.
"""

from __future__ import annotations

import binascii
import contextlib
import fcntl
import json
import os
import socket
import struct
import threading
import time

from guestd import files, linux
from guestd.linux import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_RDONLY, MS_REC, MS_REMOUNT
from guestd.place import BASE_ENV, CONTEXT, GID, HOME, UID, WORKSPACE, Place

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Final

    from guestd.protocol import Request

HELPER: Final = "/opt/sandbox/guest-exec"
STATE: Final = "/run/guestd.json"
CGROUPS: Final = "/sys/fs/cgroup"
CGROUP: Final = f"{CGROUPS}/sandbox"

_AUTHORITIES: Final = "/usr/local/share/ca-certificates/"
_TRUST: Final = "/etc/ssl/certs/ca-certificates.crt"

_IMAGE_DRIVE: Final = "/dev/vdb"
_SCRATCH_DRIVE: Final = "/dev/vdc"
_IMAGE: Final = "/run/image"
_SCRATCH: Final = "/run/scratch"
_ROOT: Final = "/run/root"
_GIT_ROOT: Final = "/run/git"

_WORKSPACE_TAG: Final = "workspace"     # of the virtio file system, given by the host
_IMAGE_KINDS: Final = ("erofs", "ext4")
_MS_NOATIME: Final = 1024               # linux/mount.h
_RESERVE_BYTES: Final = 48 << 20        # of memory: guestd's own and what it reads from its drive
_LEAST_BYTES: Final = 64 << 20
_END_S: Final = 5.0

# linux/random.h, linux/sockios.h, linux/if.h
_RNDADDENTROPY: Final = 0x40085203
_RNDRESEEDCRNG: Final = 0x5207
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP_RUNNING: Final = 0x41

_DEVICES: Final = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}     # of major 1
_DEVICE_LINKS: Final = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_GUESTD_TREES: Final = frozenset({"bin", "etc", "lib", "lib32", "lib64", "libx32", "sbin", "usr"})
"""Of guestd's own drive, where its git runs; /run is an empty one there, all else is the sandbox's."""

_GITCONFIG: Final = b"[user]\n\tname = sandbox\n\temail = sandbox@localhost\n[safe]\n\tdirectory = *\n"


def configure(request: Request) -> Place:
    """Carries out `configure` and answers where the sandbox's processes are."""
    time.clock_settime_ns(time.CLOCK_REALTIME, request.time_ns)
    _add_entropy(bytes.fromhex(request.entropy))
    socket.sethostname(request.hostname)
    _raise_loopback()
    _mount_root()
    _identify(request.hostname, request.machine_id)
    _write_files(request.files)
    if request.volumes:
        from guestd import volumes  # a machine without any does not wait for it

        volumes.mount(_ROOT, request.volumes)
    if request.bind is not None:
        _mount_workspace(request.bind["read_only"])
    if request.network is not None:
        _connect(request.network)
    _make_cgroup()
    env = {**BASE_ENV, **_image_env(), **request.env}
    with open(os.open(STATE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as state:
        json.dump(env, state)
    return _place(env)


def resume() -> Place | None:
    """The place as an earlier guestd of this machine left it, None before `configure`."""
    try:
        with open(STATE) as state:
            env = json.load(state)
    except FileNotFoundError:
        return None
    _end_leftovers()
    return _place(env)


def _end_leftovers() -> None:
    """Whatever an earlier guestd started: nobody holds its pipes any more, and its cgroups' names are wanted."""
    _set(f"{CGROUP}/cgroup.kill", "1")
    deadline = time.monotonic() + _END_S
    for name in os.listdir(CGROUP):
        while os.path.isdir(f"{CGROUP}/{name}") and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.rmdir(f"{CGROUP}/{name}")
                break
            time.sleep(0.01)


def _place(env: Mapping[str, str]) -> Place:
    namespace_fd, root_fd = _namespace(lambda: _pivot(_ROOT))
    git: list[int] = []
    lock = threading.Lock()

    def git_namespace() -> int:
        with lock:
            if not git:
                git.append(_namespace(_build_git_root)[0])
            return git[0]

    return Place(
        root_fd=root_fd, namespace_fd=namespace_fd, git_namespace=git_namespace, switch_identity=True,
        cgroup=CGROUP, helper=HELPER, spool=f"{_SCRATCH}/spool", env=env,
    )


# ---- identity

def _add_entropy(seed: bytes) -> None:
    """Credits all of it and makes the kernel use it at once."""
    fd = os.open("/dev/urandom", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _RNDADDENTROPY, struct.pack("ii", len(seed) * 8, len(seed)) + seed)
        fcntl.ioctl(fd, _RNDRESEEDCRNG)
    finally:
        os.close(fd)


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP_RUNNING))


def _identify(hostname: str, machine_id: str) -> None:
    root_fd = os.open(_ROOT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        shell = "/bin/bash" if _exists(root_fd, "/bin/bash") else "/bin/sh"
        passwd, group = accounts(
            files.content(root_fd, "/etc/passwd"), files.content(root_fd, "/etc/group"), shell
        )
        files.replace(root_fd, "/etc/passwd", passwd)
        files.replace(root_fd, "/etc/group", group)
        files.replace(root_fd, "/etc/hostname", hostname.encode() + b"\n")
        files.replace(root_fd, "/etc/hosts", hosts(hostname))
        files.replace(root_fd, "/etc/machine-id", machine_id.encode() + b"\n")
        if not _exists(root_fd, "/etc/gitconfig"):
            files.replace(root_fd, "/etc/gitconfig", _GITCONFIG)
        for path in (HOME, WORKSPACE, CONTEXT):
            fd = files.open_directory(root_fd, path)
            try:
                os.chown(f"/proc/self/fd/{fd}", UID, GID)
            finally:
                os.close(fd)
    finally:
        os.close(root_fd)


def _write_files(given: Sequence[Mapping[str, Any]]) -> None:
    """What the host wants in the sandbox, root's own, beneath its root whatever links the image has.

    Certificates for the image's list are added to it: update-ca-certificates(8) would take seconds.
    """
    root_fd = os.open(_ROOT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        trusted = b""
        for file in given:
            data = binascii.a2b_base64(file["data"])
            files.replace(root_fd, file["path"], data, file["mode"], keep_mode=False)
            if file["path"].startswith(_AUTHORITIES) and file["path"].endswith(".crt"):
                trusted += data.rstrip(b"\n") + b"\n"
        if trusted:
            files.replace(root_fd, _TRUST, files.content(root_fd, _TRUST) + trusted)
    finally:
        os.close(root_fd)


def _connect(network: Mapping[str, Any]) -> None:
    from guestd import link  # a machine without a network does not wait for it

    link.bring_up(network)
    root_fd = os.open(_ROOT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        files.replace(root_fd, "/etc/resolv.conf", link.resolv_conf(network["resolver"]))
    finally:
        os.close(root_fd)


def accounts(passwd: bytes, group: bytes, shell: str) -> tuple[bytes, bytes]:
    """/etc/passwd and /etc/group with the user `sandbox`; whoever had its name or number is gone."""
    user = f"sandbox:x:{UID}:{GID}:sandbox:{HOME}:{shell}\n".encode()
    return _without(passwd, str(UID)) + user, _without(group, str(GID)) + f"sandbox:x:{GID}:\n".encode()


def _without(table: bytes, number: str) -> bytes:
    kept = []
    for line in table.splitlines():
        fields = line.split(b":")
        if fields[0] != b"sandbox" and (len(fields) < 3 or fields[2] != number.encode()):
            kept.append(line + b"\n")
    return b"".join(kept)


def hosts(hostname: str) -> bytes:
    names = f"127.0.0.1\tlocalhost\n127.0.1.1\t{hostname}\n::1\tlocalhost ip6-localhost ip6-loopback\n"
    return names.encode()


def _image_env() -> dict[str, str]:
    """What the image asks for (its /etc/sandbox/image.json, "env"), HOME and USER excepted; a damaged file
    asks for nothing."""
    root_fd = os.open(_ROOT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        env = json.loads(files.content(root_fd, "/etc/sandbox/image.json") or b"{}")["env"]
        return {
            name: value for name, value in env.items()
            if type(value) is str and name not in ("", "HOME", "USER") and "=" not in name
            and "\0" not in name + value
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    finally:
        os.close(root_fd)


def _exists(root_fd: int, path: str) -> bool:
    try:
        os.close(linux.open_in_root(root_fd, path.encode(), os.O_PATH))
    except OSError:
        return False
    return True


# ---- mounts

def _mount_root() -> None:
    for path in (_IMAGE, _SCRATCH, _ROOT):
        os.makedirs(path, 0o700, exist_ok=True)
    _mount_image()
    linux.mount(_SCRATCH_DRIVE, _SCRATCH, "ext4", MS_NOSUID | MS_NODEV | _MS_NOATIME)
    for name, mode in (("upper", 0o755), ("work", 0o700), ("tmp", 0o1777), ("spool", 0o700)):
        os.makedirs(f"{_SCRATCH}/{name}", exist_ok=True)
        os.chmod(f"{_SCRATCH}/{name}", mode)
    layers = f"lowerdir={_IMAGE},upperdir={_SCRATCH}/upper,workdir={_SCRATCH}/work"
    linux.mount("overlay", _ROOT, "overlay", MS_NOSUID | MS_NODEV | _MS_NOATIME, layers)
    root_fd = os.open(_ROOT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        quiet = MS_NOSUID | MS_NODEV | MS_NOEXEC
        _mount_in(root_fd, "/proc", "proc", "proc", quiet)
        _mount_in(root_fd, "/sys", "sysfs", "sysfs", quiet | MS_RDONLY)
        _mount_in(root_fd, "/run", "tmpfs", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
        _mount_in(root_fd, "/tmp", f"{_SCRATCH}/tmp", "", MS_BIND)  # noqa: S108
        _mount_in(root_fd, "/dev", "tmpfs", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=256k")
        _fill_dev(root_fd)
    finally:
        os.close(root_fd)


def _mount_workspace(read_only: bool) -> None:
    """The host's directory. Whether it can be written to is the host's to say; here it is only told early."""
    root_fd = os.open(_ROOT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = MS_NOSUID | MS_NODEV | (MS_RDONLY if read_only else 0)
        _mount_in(root_fd, WORKSPACE, _WORKSPACE_TAG, "virtiofs", flags)
    finally:
        os.close(root_fd)


def _mount_image() -> None:
    for kind in _IMAGE_KINDS:
        try:
            linux.mount(_IMAGE_DRIVE, _IMAGE, kind, MS_RDONLY | MS_NOSUID | MS_NODEV)
        except OSError:
            if kind == _IMAGE_KINDS[-1]:
                raise
        else:
            return


def _mount_in(root_fd: int, path: str, source: str, kind: str, flags: int, data: str = "") -> None:
    """Mounts at a path in the root, made where it is missing; the image's links lead nowhere else."""
    fd = files.open_directory(root_fd, path)
    try:
        linux.mount(source, f"/proc/self/fd/{fd}", kind, flags, data)
    finally:
        os.close(fd)


def _fill_dev(root_fd: int) -> None:
    dev = files.open_directory(root_fd, "/dev")
    try:
        for name, minor in _DEVICES.items():
            _make_device(dev, name, os.makedev(1, minor))
        _make_device(dev, "tty", os.makedev(5, 0))
        for name, target in _DEVICE_LINKS.items():
            os.symlink(target, name, dir_fd=dev)
    finally:
        os.close(dev)
    terminals = "newinstance,ptmxmode=0666,mode=0620,gid=5"
    _mount_in(root_fd, "/dev/pts", "devpts", "devpts", MS_NOSUID | MS_NOEXEC, terminals)
    _mount_in(root_fd, "/dev/shm", "tmpfs", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")  # noqa: S108


def _make_device(dev: int, name: str, device: int) -> None:
    os.mknod(name, 0o020666, device, dir_fd=dev)        # S_IFCHR
    os.chmod(name, 0o666, dir_fd=dev)  # noqa: S103


def _namespace(build: Callable[[], None]) -> tuple[int, int]:
    """(namespace, its root): a new mount namespace, made into what it shall be by `build`.

    A thread of its own does it: its namespace, root and working directory end with it, guestd's stay.
    """
    result: list[int] = []
    failure: list[BaseException] = []

    def make() -> None:
        try:
            linux.unshare(linux.CLONE_NEWNS)
            linux.mount("none", "/", "", MS_REC | linux.MS_PRIVATE)
            result.append(os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
            build()
            result.append(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        except BaseException as why:    # carried to the thread that asked
            failure.append(why)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if failure:
        for fd in result:
            os.close(fd)
        raise failure[0]
    return result[0], result[1]


def _pivot(new_root: str) -> None:
    """pivot_root(2) with both names the same: the old root ends on top of the new one and is taken off it."""
    os.chdir(new_root)
    linux.pivot_root(".", ".")
    linux.unmount(".", linux.MNT_DETACH)
    os.chdir("/")


def _build_git_root() -> None:
    """guestd's own programs and libraries, and beside them whatever else the sandbox has at its top."""
    os.makedirs(_GIT_ROOT, exist_ok=True)
    linux.mount("tmpfs", _GIT_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=256k")
    for name in _GUESTD_TREES.intersection(os.listdir("/")):
        _graft("/", name, MS_RDONLY)
    for name in os.listdir(_ROOT):
        if name not in _GUESTD_TREES and name != "run":
            _graft(_ROOT, name, 0)
    os.mkdir(f"{_GIT_ROOT}/run")
    _pivot(_GIT_ROOT)


def _graft(top: str, name: str, flags: int) -> None:
    """Top's entry in the new root: a link as it is, a directory as a bind mount, anything else left out."""
    source, target = f"{top}/{name}", f"{_GIT_ROOT}/{name}"
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
    elif os.path.isdir(source):
        os.mkdir(target)
        linux.mount(source, target, "", MS_BIND | MS_REC)
        if flags:
            linux.mount("none", target, "", MS_BIND | MS_REMOUNT | MS_NOSUID | MS_NODEV | flags)


# ---- resources

def _make_cgroup() -> None:
    """One cgroup above all the sandbox's processes: together they leave guestd its memory and its process
    numbers."""
    # Moving a process into its cgroup waits for an RCU grace period unless the hierarchy favours such moves.
    with contextlib.suppress(OSError):
        linux.mount("none", CGROUPS, "", MS_REMOUNT | MS_NOSUID | MS_NODEV | MS_NOEXEC, "favordynmods")
    _set(f"{CGROUPS}/cgroup.subtree_control", "+memory +pids")
    os.mkdir(CGROUP)
    _set(f"{CGROUP}/memory.max", str(memory_limit(_number("/proc/meminfo", b"MemTotal:") * 1024)))
    _set(f"{CGROUP}/memory.oom.group", "0")
    _set(f"{CGROUP}/pids.max", str(_number("/proc/sys/kernel/threads-max", b"") * 3 // 4))


def memory_limit(total_bytes: int) -> int:
    return max(total_bytes - _RESERVE_BYTES, min(total_bytes, _LEAST_BYTES))


def _set(path: str, value: str) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(value.encode())


def _number(path: str, label: bytes) -> int:
    with open(path, "rb") as file:
        return int(file.read().partition(label)[2].split()[0]) if label else int(file.read())
