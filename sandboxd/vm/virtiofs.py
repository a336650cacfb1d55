"""A directory of the host in a machine: virtiofsd in a jail of its own, between the guest and the directory.

In: an open directory, checked by whoever opened it. Out: a jail and arguments; `why_not` alone looks at the machine.
virtiofsd answers a guest's file operations and is hostile from then on. It sees its libraries and that one directory,
without what is mounted below it, and nothing else; what it makes belongs to the daemon's user, who is the person that
asked (nobody else may). The ways to more than a plain file are closed by `seccomp.sharing_program`: no set-user-id or
set-group-id bit, no capability of a file, no device. Read-only is a property of the mount the jail has.

The directory is taken by its descriptor. bubblewrap takes names, so before it there is a user and mount namespace in
which the working directory, which follows into it, is mounted at a place of its own: whatever the name means by then.
A directory below which something else is mounted cannot be mounted alone there (the kernel would have to uncover what
is beneath), and mounts made later on the host do not come in, since nothing is propagated.

virtiofsd (Debian's qemu-system-common, 7.2: in C) must find a listening socket and capabilities; in the map of its
user namespace there is one person, 1001 inside, so its capabilities reach that person's files and no others.
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sandboxd.errors import SetupError
from sandboxd.vm import arch, child, jail, processes, seccomp
from sandboxd.vm.child import Child
from sandboxd.vm.jail import Jail, Limits, Program
from sandboxd.vm.machine import Share

ROLE = "virtiofsd"
TAG = "workspace"
GUEST_UID = 1001
"""The user of a sandbox's processes: the person's files are that user's in there."""
PLACES = ("/usr/lib/qemu/virtiofsd",)
PLACE = "/mnt"  # of the namespace before the jail, for the directory
INSIDE = "/shared"
OPEN_FILES = 262_144  # one for each file the guest knows of
ANY_SIZE = 1 << 62  # of files: the person's quota and disk are the limit
CAPABILITIES = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_SETGID", "CAP_SETUID", "CAP_MKNOD",
    "CAP_SETFCAP", "CAP_SETPCAP", "CAP_SYS_CHROOT",
)  # fmt: skip
"""What virtiofsd will not start without. Over the files of one person; for CAP_MKNOD and mounts that is nothing."""
PROBE_S = 20.0
PROBE_ID = "share-probe"
_GET_FEATURES = struct.pack("=III", 1, 1, 0)  # vhost-user: request, flags (version 1), size
_ANSWERED = struct.pack("=II", 1, 5)  # the same, with the reply bit


@dataclass(frozen=True, slots=True)
class Tools:
    """The programs of this host that it takes, beside those of every jail."""

    virtiofsd: Program
    unshare: Path
    mount: Path


def find_tools() -> Tools:
    """Raises SetupError naming the package when one is missing."""
    found = next((Path(place) for place in PLACES if Path(place).is_file()), None)
    if found is None:
        raise SetupError(
            "QEMU's virtiofsd (7.2, /usr/lib/qemu/virtiofsd) is missing; on Debian 12 let root run: apt-get install -y "
            "qemu-system-common"
        )
    return Tools(jail.program(found), jail.find("unshare", "util-linux"), jail.find("mount", "mount"))


def prison(
    share: Share, memory_mb: int, marker: str, open_files: int, tools: Tools, jail_tools: jail.Tools,
    entering: Sequence[str] = (),
) -> Jail:  # fmt: skip
    """The jail. It is the daemon's user's, root's too: what the guest makes must be that user's. `entering` is the
    command that enters the machine's group."""
    mounted = ((Path(PLACE), INSIDE),)
    return Jail(
        tools=jail_tools,
        program=tools.virtiofsd,
        marker=marker,
        uid=None,
        limits=Limits((memory_mb << 20) + (2 << 30), ANY_SIZE, min(OPEN_FILES, open_files), None),
        files=mounted if share.read_only else (),
        writable=() if share.read_only else mounted,
        before=(
            *entering,
            str(tools.unshare), "--user", "--map-root-user", "--mount", "--propagation", "private", "--",
            # By the working directory itself: --no-canonicalize keeps mount(8) from looking up its name.
            "/bin/sh", "-euc", f'"$1" --no-mtab --no-canonicalize --bind . {PLACE}; shift; cd /; exec "$@"',
            "sh", str(tools.mount),
        ),
        inside=GUEST_UID,
        capabilities=CAPABILITIES,
        proc=True,
    )  # fmt: skip


def arguments(listen_fd: int) -> list[str]:
    """virtiofsd's. The guest asks anew for every attribute: with a size of a second ago it would read a file that the
    host has just changed only in part."""
    return [
        f"--fd={listen_fd}",
        "-f",
        "--rlimit-nofile=0",  # as many as the jail has
        "--thread-pool-size=0",
        "-o", f"source={INSIDE}",
        "-o", "sandbox=chroot",
        "-o", "cache=auto,timeout=0",
        "-o", "no_xattr",
        "-o", "log_level=warn",
    ]  # fmt: skip


def start(share: Share, prison: Jail, listener: socket.socket) -> Child:
    """Raises OSError where not even its jail's first program can be started."""
    fd = listener.fileno()
    # The directory itself: the name of a descriptor leads to what it holds.
    place = f"/proc/self/fd/{share.directory_fd}"
    return child.spawn(ROLE, prison, arguments(fd), (fd,), filter=seccomp.sharing_program(arch.here()), directory=place)


@contextmanager
def connection(directory: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """(a listening socket in whose queue there is one connection, its other end): virtiofsd takes no connected one.
    `directory` is the daemon's alone, and the name is gone at once."""
    with ExitStack() as held:
        dir_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        held.callback(os.close, dir_fd)
        name = f"/proc/self/fd/{dir_fd}/share.sock"
        listener = held.enter_context(socket.socket(socket.AF_UNIX))
        ours = held.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(name)
        try:
            listener.listen(1)
            ours.connect(name)
        finally:
            os.unlink(name)
        yield listener, ours


def why_not(jail_tools: jail.Tools, instance: str, open_files: int) -> str:
    """Why no directory can be shared here: one is, with nobody, and virtiofsd asked something. Empty where it answers.
    Blocking, some 0.1 s."""
    try:
        tools = find_tools()
    except SetupError as fault:
        return str(fault)
    with tempfile.TemporaryDirectory(prefix="sandboxd-share-") as made, ExitStack() as held:
        directory = os.open(made, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        held.callback(os.close, directory)
        share = Share(directory, read_only=True)
        cell = prison(share, 0, jail.marker(instance, PROBE_ID), open_files, tools, jail_tools)
        try:
            listener, ours = held.enter_context(connection(Path(made)))
            started = start(share, cell, listener)
        except OSError as fault:
            return f"virtiofsd could not be started: {fault.strerror}"
        listener.close()
        answer = b""
        with suppress(OSError), ours:
            ours.settimeout(PROBE_S)
            ours.sendall(_GET_FEATURES)
            answer = ours.recv(20, socket.MSG_WAITALL)
        # It ends by itself once nobody is connected; where it does not, it is found by its mark.
        processes.end_marked(instance, lambda id: id == PROBE_ID, {os.getuid()})
        said = [line for line in started.errors().decode("ascii", "replace").splitlines() if line.strip()]
        started.close()
        if answer.startswith(_ANSWERED):
            return ""
        last = "".join(c if " " <= c <= "~" else "?" for c in said[-1])[:200] if said else "it said nothing"
        return f"virtiofsd does not start in its jail: {last}"
