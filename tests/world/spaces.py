"""Namespaces of the tests' own, each held by one child process and gone with it, whatever becomes of the test.

A `Space` is a network and a mount namespace. In the mount namespace `/run` is new and files of `/etc` may be covered,
so that what runs inside sees another machine while this one's files stay as they are. Nothing has a name in the
machine's own `/run/netns`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000      # linux/sched.h
_libc = ctypes.CDLL(None, use_errno=True)

# $1 a directory whose files cover those of the same name in /etc; $2, if not empty, one that covers the authorities an
# administrator added (update-ca-certificates(8)). `cat` ends with the pipe that this process holds.
HOLD = """
mount --make-rprivate / &&
mount -t tmpfs -o mode=0755 tmpfs /run && mkdir -p /run/netns /run/sshd &&
for file in "$1"/*; do
    [ ! -e "$file" ] || mount --bind "$file" "/etc/${file##*/}" || exit 1
done &&
if [ -n "$2" ]; then mount --bind "$2" /usr/local/share/ca-certificates || exit 1; fi &&
ip link set lo up && echo ready && exec cat >/dev/null
"""


class Space:
    """One network namespace with a mount namespace of its own."""

    def __init__(self, directory: Path, etc: Mapping[str, str] | None = None, authority: Path | None = None) -> None:
        """`etc` are texts that cover files of /etc; `authority` is the one certificate the machine seems to trust."""
        covers = directory / "etc"
        covers.mkdir(parents=True, mode=0o755)
        for name, text in (etc or {}).items():
            (covers / name).write_text(text)
            if not Path("/etc", name).exists():
                raise RuntimeError(f"/etc/{name} is not there to be covered")
        self._covers = covers
        trusted = ""
        if authority is not None:
            trusted = str(directory / "authorities")
            Path(trusted).mkdir()
            shutil.copy(authority, Path(trusted, "world.crt"))
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", HOLD, "hold", str(covers), trusted],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            raise RuntimeError("no namespace could be made")
        self.pid = self._holder.pid
        self._net = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._net)
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.stdout.close()
        self._holder.wait(10)

    def cover(self, name: str, text: str) -> None:
        """Another text for a file of /etc that is covered already; the same inode, so that everybody inside sees it."""
        with (self._covers / name).open("r+") as file:
            file.truncate()
            file.write(text)

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command for it to run inside."""
        return ("nsenter", f"--target={self.pid}", "--net", "--mount", f"--wd={os.getcwd()}", "--")

    def run(self, *command: str, stdin: str = "", check: bool = True) -> str:
        done = subprocess.run(
            [*self.prefix, *command], input=stdin, capture_output=True, text=True, timeout=60, check=False
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def start(self, *command: str, **options: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*self.prefix, *command], **options)  # type: ignore[call-overload, no-any-return]

    def inside(self, make: Callable[[], T]) -> T:
        """What `make` returns in a thread of this namespace: a socket made there stays there."""
        return within(self._net, make)


def within(namespace_fd: int, make: Callable[[], T]) -> T:
    """Runs `make` in a thread that has entered the network namespace and ends afterwards."""
    results: list[T] = []
    faults: list[BaseException] = []

    def enter() -> None:
        try:
            if _libc.setns(namespace_fd, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            results.append(make())
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if faults:
        raise faults[0]
    return results[0]


def join(one: Space, name: str, other: Space, other_name: str) -> None:
    """A wire between two of them."""
    command = ["ip", "link", "add", "name", name, "netns", str(one.pid), "type", "veth"]
    command += ["peer", "name", other_name, "netns", str(other.pid)]
    subprocess.run(command, check=True, capture_output=True, timeout=20)


def address(space: Space, interface: str, addresses: Sequence[str]) -> None:
    """The addresses (with their prefix lengths) of an interface, which is brought up first."""
    lines = [f"link set {interface} up"]
    lines += [f"addr add {each} dev {interface}{' nodad' if ':' in each else ''}" for each in addresses]
    space.run("ip", "-batch", "-", stdin="\n".join(lines) + "\n")
