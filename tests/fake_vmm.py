"""A process that stands for a VMM in tests: its wire is the real one, and behind it runs the real guestd.

    python tests/fake_vmm.py --listen PATH --root DIR [--helper GUEST_EXEC] [--workspace DIR [--read-only]]

binds a unix socket at PATH that takes `CONNECT 5000\\n` and answers `OK n\\n`, as the vsock device of a
real machine does, and prints `ready` once guestd answers. There is no VM: guestd runs in a bubblewrap
container that has the host's programs read-only and its own /workspace, /sandbox, /tmp and process
numbers, with what it writes in DIR (`--workspace`: another directory for /workspace). As root, commands run
there as uid 1001, each in a cgroup where the host has a version 2 hierarchy; as an ordinary user everything
is uid 1001 of a user namespace. TERM, or the death of this process, ends all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PORT = 5000
GREETING_BYTES = 32
GREETING_S = 2.0
UID = 1001
SMALL_BYTES = 8 << 20       # a disk that is soon full, at /run/small
CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
LAUNCHER = "import sys; sys.path.insert(0, {!r}); from guestd.__main__ import main; main()"


def cgroup_hierarchy() -> Path | None:
    """A version 2 hierarchy in which this process may make groups, or None."""
    for path in CGROUPS:
        if (path / "cgroup.procs").exists() and os.access(path / "cgroup.procs", os.W_OK):
            return path
    return None


def make_cgroup(hierarchy: Path) -> Path:
    """A group for this process's machine; those that a killed one left are removed first."""
    for old in hierarchy.glob("sandbox-fake-*"):
        if not Path(f"/proc/{old.name.rpartition('-')[2]}").exists():
            remove_cgroup(old)
    path = hierarchy / f"sandbox-fake-{os.getpid()}"
    path.mkdir()
    return path


def remove_cgroup(path: Path) -> None:
    for _ in range(50):
        if not path.exists():       # another one found it left behind, too
            return
        with contextlib.suppress(OSError):
            for child in path.iterdir():
                if child.is_dir():
                    child.rmdir()
            path.rmdir()
            return
        time.sleep(0.02)


def container(
    root: Path, helper: Path, cgroup: Path | None, workspace: Path | None = None, *, read_only: bool = False
) -> list[str]:
    """The command line that runs guestd in its container."""
    argv = ["bwrap", "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    if os.geteuid() == 0:
        argv += ["--cap-add", "ALL"]
    else:
        argv += ["--unshare-user", "--uid", str(UID), "--gid", str(UID)]
    ours = {"proc", "dev", "sys", "run", "tmp", "workspace", "sandbox"}
    for entry in sorted(Path("/").iterdir()):
        if entry.is_symlink():
            argv += ["--symlink", os.readlink(entry), str(entry)]
        elif entry.is_dir() and entry.name not in ours:
            argv += ["--ro-bind", str(entry), str(entry)]
    argv += [
        "--proc", "/proc",
        "--dev", "/dev",
        "--tmpfs", "/dev/shm",
        "--perms", "0755", "--dir", "/sandbox",
        "--perms", "0755", "--dir", "/run",
        "--perms", "1777", "--size", str(SMALL_BYTES), "--tmpfs", "/run/small",
        "--bind", str(root / "run"), "/run/guest",
        "--bind", str(root / "tmp"), "/tmp",
        "--ro-bind" if read_only else "--bind", str(workspace or root / "workspace"), "/workspace",
        "--bind", str(root / "home"), "/sandbox/home",
        "--bind", str(root / "context"), "/sandbox/context",
        "--ro-bind", str(REPOSITORY), "/run/sandbox",
        "--ro-bind", str(helper), "/run/guest-exec",
        "--chmod", "1777", "/dev/shm",
    ]
    if cgroup is not None:
        argv += ["--bind", str(cgroup), "/sys/fs/cgroup"]
    argv += [
        "--clearenv", "--chdir", "/", "--",
        os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", LAUNCHER.format("/run/sandbox"),
        "--unix", "/run/guest/guestd.sock",
        "--helper", "/run/guest-exec",
        "--spool", "/run/guest",
    ]
    return argv + (["--cgroup", "/sys/fs/cgroup"] if cgroup is not None else [])


def make_root(root: Path) -> None:
    for name, mode in (("run", 0o700), ("tmp", 0o1777), ("workspace", 0o755), ("home", 0o755), ("context", 0o755)):
        path = root / name
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)
        if os.geteuid() == 0 and name in ("workspace", "home", "context"):
            os.chown(path, UID, UID)
    (root / "run" / "guestd.sock").unlink(missing_ok=True)


class Guest:
    """Where guestd listens. Its directory is held open, so that a long path does not matter."""

    def __init__(self, root: Path) -> None:
        self._directory = os.open(root / "run", os.O_PATH | os.O_DIRECTORY)

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(f"/proc/self/fd/{self._directory}/guestd.sock")
        except OSError:
            sock.close()
            raise
        return sock


def greet(client: socket.socket, guest: Guest) -> socket.socket | None:
    """Reads CONNECT and answers OK: the guest's end, or None when the connection is to be closed."""
    client.settimeout(GREETING_S)
    line = b""
    while not line.endswith(b"\n"):
        piece = client.recv(1)      # not a byte of the request that follows
        if not piece or len(line) >= GREETING_BYTES:
            return None
        line += piece
    if line != b"CONNECT %d\n" % PORT:
        return None
    server = guest.connect()
    client.settimeout(None)
    client.sendall(b"OK %d\n" % (1 << 30))
    return server


def copy(source: socket.socket, target: socket.socket, *, may_vanish: bool) -> None:
    """One direction until its end, which is passed on. A target that takes no more ends the source too. A source
    that `may_vanish` and has closed altogether ends the target, even while that takes nothing."""
    try:
        while data := source.recv(256 << 10):
            left = memoryview(data)
            while left:
                try:
                    left = left[target.send(left, socket.MSG_DONTWAIT):]
                except BlockingIOError:
                    waiting = select.poll()
                    waiting.register(target, select.POLLOUT)
                    if may_vanish:
                        waiting.register(source, 0)     # hang-up and error only
                    if source.fileno() in dict(waiting.poll()):
                        target.shutdown(socket.SHUT_RDWR)
                        return
    except OSError:
        with contextlib.suppress(OSError):
            source.shutdown(socket.SHUT_RD)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def carry(client: socket.socket, guest: Guest) -> None:
    with client:
        try:
            server = greet(client, guest)
        except OSError:
            return
        if server is None:
            return
        with server:
            back = threading.Thread(target=copy, args=(server, client), kwargs={"may_vanish": False}, daemon=True)
            back.start()
            copy(client, server, may_vanish=True)
            back.join()


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)
    listener.listen(128)
    return listener


def serve(listener: socket.socket, guest: Guest) -> None:
    while True:
        client, _ = listener.accept()
        threading.Thread(target=carry, args=(client, guest), daemon=True).start()


def await_guest(guest: Guest, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            guest.connect().close()
            return
        except OSError:
            if child.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"fake_vmm: guestd did not come up (exit {child.poll()})")
            time.sleep(0.02)


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--listen", type=Path, required=True)
    flags.add_argument("--root", type=Path, required=True)
    flags.add_argument("--helper", type=Path, default=REPOSITORY / "build" / "guest-exec")
    flags.add_argument("--workspace", type=Path)
    flags.add_argument("--read-only", action="store_true")
    given = flags.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if shutil.which("bwrap") is None:
        sys.exit("fake_vmm: bubblewrap is not installed")
    make_root(given.root)
    hierarchy = cgroup_hierarchy()
    cgroup = None if hierarchy is None else make_cgroup(hierarchy)
    listener = listen(given.listen)
    command = container(given.root, given.helper, cgroup, given.workspace, read_only=given.read_only)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        guest = Guest(given.root)
        threading.Thread(target=serve, args=(listener, guest), daemon=True).start()
        await_guest(guest, child)
        print("ready", flush=True)
        sys.exit(child.wait())
    finally:
        given.listen.unlink(missing_ok=True)
        child.kill()
        child.wait()
        if cgroup is not None:
            remove_cgroup(cgroup)


if __name__ == "__main__":
    main()
