"""Firecracker's jailer: its command line as a value, and the directory it makes a root of.

In: a `MachineSpec`, open files. Out: an argument list, built without looking at the machine, and a directory in which
kernel, initramfs and drives lie as further names of the files they are: nothing is copied, so all must be on one file
system. What the VMM may only read belongs to root and nobody may write to it; what it may write belongs to its uid.
The jailer (docs/jailer.md of Firecracker) then makes the devices, a root of that directory and a namespace of
processes, and gives up all power. Around it stands bubblewrap, for what the jailer leaves as it finds it: the
namespaces of IPC, of the host name and, without `netns`, of the network, no-new-privs, and a filter of system calls.

The VMM owns the root's directory and those in it until it has made its sockets there. `take_back` then makes them
root's, before a guest runs: a VMM that was broken into fills no disk with files, and puts nothing in the place of a
name. All the same nothing there is opened by name but its sockets, and these as `unixpath.named` does it: it may have
been broken into by a snapshot that it loaded.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sandboxd.vm import jail
from sandboxd.vm.jail import Limits

DIRECTORY = "jail"
FOLDERS = (".", "dev", "dev/net", "run")
"""The jailer makes these the VMM's own (FOLDER_HIERARCHY in env.rs of its source); each after the one it is in."""
FIRECRACKER = "firecracker"


@dataclass(frozen=True, slots=True)
class Tools:
    """The programs of this host. Their versions belong together."""

    firecracker: Path
    jailer: Path
    jail: jail.Tools


@dataclass(frozen=True, slots=True)
class Cell:
    """One jail. `netns` is a named network namespace; without one it gets an empty one of its own."""

    tools: Tools
    id: str
    uid: int
    base: Path
    limits: Limits
    netns: Path | None

    @property
    def root(self) -> Path:
        """What is / for the VMM."""
        return self.base / self.tools.firecracker.name / jailed_id(self.id) / "root"


def jailed_id(id: str) -> str:
    """The jailer takes letters, digits and `-` alone. Two ids that become one are in directories of their own."""
    return id.replace("_", "-")


def argv(cell: Cell, group: Sequence[str], info_fd: int, seccomp_fd: int, arguments: Sequence[str]) -> list[str]:
    """The whole command, Firecracker's own `arguments` at its end. `group` is the command that enters its group."""
    limits = cell.limits
    command = [
        *group,
        str(cell.tools.jail.prlimit),
        "--core=0",
        f"--as={limits.address_space_bytes}",
        "--memlock=0",
        "--msgqueue=0",
    ]
    if limits.processes is not None:
        command += [f"--nproc={limits.processes}"]
    command += [str(cell.tools.jail.bwrap), "--dev-bind", "/", "/", "--unshare-ipc", "--unshare-uts"]
    command += ["--hostname", "vmm", "--chdir", "/", "--clearenv", "--cap-add", "ALL"]
    # There the jailer looks whether it can give its VMM /dev/userfaultfd, the device of a call that `seccomp` refuses.
    command += ["--ro-bind", "/dev/null", "/proc/misc"]
    if cell.netns is None:
        command += ["--unshare-net"]
    command += ["--seccomp", str(seccomp_fd), "--info-fd", str(info_fd), "--"]
    command += [
        str(cell.tools.jailer),
        "--id", jailed_id(cell.id),
        "--exec-file", str(cell.tools.firecracker),
        "--uid", str(cell.uid),
        "--gid", str(cell.uid),
        "--chroot-base-dir", str(cell.base),
    ]  # fmt: skip
    if cell.netns is not None:
        command += ["--netns", str(cell.netns)]
    command += ["--new-pid-ns"]
    command += ["--resource-limit", f"fsize={limits.file_size_bytes}"]
    command += ["--resource-limit", f"no-file={limits.open_files}"]
    return [*command, "--", *arguments]


def fill(cell: Cell, files: Sequence[tuple[int, str, bool]]) -> None:
    """Makes the directory with (open file, name, read-only) in it. Raises OSError; EXDEV where a file is on another
    file system than the directory."""
    for part in (cell.base, cell.root.parent.parent, cell.root.parent, cell.root):
        part.mkdir(mode=0o700)
    with ExitStack() as held:
        root = os.open(cell.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        held.callback(os.close, root)
        for fd, name, read_only in files:
            # Of the file whatever names it: who it belonged to before, an earlier machine's uid say, has no more of it.
            os.fchown(fd, *((0, 0) if read_only else (cell.uid, cell.uid)))
            os.fchmod(fd, 0o444 if read_only else 0o600)
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=root, follow_symlinks=True)


def take_back(root: int) -> None:
    """The directories of the jail that is open as `root` become root's; the VMM reads them by its group. May be done
    again. Raises OSError."""
    for folder in FOLDERS:
        # The one it is in is root's by now, so nobody puts a link there any more; one that is there fails.
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
        try:
            os.fchown(fd, 0, -1)
            os.fchmod(fd, 0o750)
        finally:
            os.close(fd)


def unfit(state_dir: Path, assets_dir: Path) -> str:
    """Why no jail can be made in the state directory; empty where one can. Raises OSError. Blocking."""
    # Tried, since two mounts of one file system have one number, and no link leads from one to the other.
    with tempfile.NamedTemporaryFile(dir=assets_dir) as file, tempfile.TemporaryDirectory(dir=state_dir) as place:
        try:
            os.link(file.name, Path(place, "link"))
        except OSError as fault:
            if fault.errno != errno.EXDEV:
                raise
            return (
                f"with Firecracker the images ({assets_dir}) and the state directory ({state_dir}) must be on one file "
                "system, mounted once: put --assets-dir and --state-dir on the same one"
            )
    flags = os.statvfs(state_dir).f_flag
    for bit, option, holds in ((os.ST_NODEV, "nodev", "device files"), (os.ST_NOEXEC, "noexec", "a program")):
        if flags & bit:
            return (
                f"the file system of the state directory ({state_dir}) is mounted {option}, and a jail of Firecracker "
                f"holds {holds}: put --state-dir and --assets-dir on another one"
            )
    return ""


def reason(fault: OSError) -> str:
    """Of `fill`, for a message."""
    if fault.errno == errno.EXDEV:
        return "it is on another file system than the state directory"
    return fault.strerror or "it failed"
