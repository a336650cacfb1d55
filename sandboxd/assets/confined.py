"""Programs that read what a registry sent, run where they can do no harm.

In: a command, its work directory, limits. Out: its exit code and output. Inside there is the host's /usr, read-only,
an empty /tmp, /dev/null and the work directory as /work, of which it may write in `own` alone; no network unless it
is asked for, no /proc, namespaces of its own. There the program is root of a user namespace, with the capabilities
that unpacking needs, and outside it is nobody: under root the namespace's 65536 ids are uids of the daemon's that
nothing else has; for an ordinary user they are that user and its subordinate ids (/etc/subuid), or the user alone
where there are none.

Everything in the jail ends with the command, however that ends, and with the daemon.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc

from sandboxd.assets import rootspace

IDS = 65536
INFO_BYTES = 4096
OUTPUT_BYTES = 8 << 20
TAIL_BYTES = 4096
TMP = "/tmp"  # noqa: S108
"""The jail's own."""
TMP_BYTES = 64 << 20
OWN = "own"
CAPABILITIES = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_SETGID", "CAP_SETUID")
PLACE = "/mnt"
"""Where root shows the work directory to the jail's builder, in a mount namespace of its own: the builder cannot come
through the state directory, which is root's alone."""


@dataclass(frozen=True, slots=True)
class Ids:
    """Whose the programs are outside, by the first uid; `count` of them follow each other there. `others` is where
    the uids and the gids from 1 on are, when they do not follow the first."""

    first: int
    count: int
    others: tuple[int, int] | None = None

    @property
    def squash(self) -> bool:
        """Whether root is the only id there is."""
        return self.count == 1


@dataclass(frozen=True, slots=True)
class Limits:
    address_space_bytes: int
    file_size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    stdout: bytes
    stderr: str


def ids(uid: int, first: int | None) -> Ids:
    """What this daemon has: `first` is root's choice."""
    if uid == 0:
        assert first is not None
        return Ids(first, IDS)
    name = rootspace.account(uid)
    uids, gids = (rootspace.largest(rootspace.read(Path(path)), name, uid) for path in ("/etc/subuid", "/etc/subgid"))
    if min(uids[1], gids[1]) < IDS - 1 or shutil.which("newuidmap") is None:
        return Ids(uid, 1)
    return Ids(uid, IDS, (uids[0], gids[0]))


def argv(
    work: Path, program: Sequence[str], *, root: bool, ids: Ids, limits: Limits, network: bool, info_fd: int,
    block_fd: int, alive_fd: int, files: Sequence[tuple[str, str]],
) -> list[str]:  # fmt: skip
    """The whole command, which leads a process group. bubblewrap tells the jail's pid on `info_fd` and waits for its
    ids on `block_fd`; all of it is killed at the end of `alive_fd`; `files` are (below the work directory, in the
    jail). The environment is inherited and not named here, where everybody could
    read it: a proxy's address may hold a password."""
    place = PLACE if root else str(work)
    # bubblewrap ties itself to us only when it has begun, and what it has forked by then waits for it for ever. The
    # watch keeps nothing open that somebody waits to see closed. Not sh: its descriptors have one digit.
    closed = f"{info_fd}>&- {block_fd}<&- {alive_fd}<&-"
    watch = f'(read -r _; kill -KILL 0) <&{alive_fd} >/dev/null 2>&1 {closed} & exec "$@" {alive_fd}<&-'
    made = ["/bin/bash", "-c", watch, "bash"]
    if root:
        # Before bubblewrap: it must not be root itself, or root would need a place in the jail's map of ids.
        made += ["unshare", "--mount", "--propagation", "private", "--", "/bin/sh", "-euc"]
        made += [f'mount --bind "$1" {PLACE}; shift; exec "$@"', "sh", str(work)]
        made += ["setpriv", "--reuid", str(ids.first), "--regid", str(ids.first), "--clear-groups"]
        made += ["--inh-caps=-all", "--"]
    made += ["prlimit", "--core=0", f"--as={limits.address_space_bytes}", f"--fsize={limits.file_size_bytes}"]
    made += ["--nofile=1024", "--memlock=0", "--msgqueue=0", "--"]
    made += ["bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup"]
    if not network:
        made += ["--unshare-net"]
    made += ["--die-with-parent", "--new-session", "--hostname", "build"]
    made += ["--setenv", "PATH", "/usr/bin:/usr/sbin", "--setenv", "HOME", TMP]
    made += ["--info-fd", str(info_fd), "--userns-block-fd", str(block_fd), "--cap-drop", "ALL"]
    for capability in () if network else CAPABILITIES:
        made += ["--cap-add", capability]
    made += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64", "sbin"):
        made += ["--symlink", f"usr/{name}", f"/{name}"]
    made += ["--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", TMP, "--perms", "0755", "--dir", "/dev"]
    made += ["--dev-bind", "/dev/null", "/dev/null", "--ro-bind", place, "/work"]
    made += ["--bind", f"{place}/{OWN}", f"/work/{OWN}"]
    for source, target in files:
        made += ["--ro-bind", f"{place}/{source}", target]
    return [*made, "--remount-ro", "/", "--chdir", f"/work/{OWN}", "--", *program]


async def run(
    work: Path, program: Sequence[str], *, ids: Ids, limits: Limits, network: bool = False, stdin: bytes = b"",
    environment: Mapping[str, str] | None = None, files: Sequence[tuple[str, str]] = (),
    on_line: Callable[[bytes], None] | None = None,
) -> Ended:  # fmt: skip
    """The program to its end. Its stdout goes to `on_line` by lines, or is returned; of its stderr the end is kept.
    Raises `TimeoutError`, and `OverflowError` where it says more than any program here has to; nothing of it runs
    then."""
    info, told = os.pipe()
    waits, go = os.pipe()
    alive, ours = os.pipe()
    words = argv(
        work, program, root=os.geteuid() == 0, ids=ids, limits=limits, network=network, info_fd=told,
        block_fd=waits, alive_fd=alive, files=files,
    )  # fmt: skip
    outside = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", **(environment or {})}
    try:
        try:
            theirs = (told, waits, alive)
            process = await anyio.open_process(words, env=outside, pass_fds=theirs, start_new_session=True)
        finally:
            os.close(told)
            os.close(waits)
            os.close(alive)
        jail = -1
        try:
            with anyio.fail_after(limits.seconds):
                if pid := await _pid(info):
                    jail = os.pidfd_open(pid)
                    await _give_ids(pid, ids)
                    os.write(go, b"x")
                return await _talk(process, stdin, on_line)
        finally:
            with anyio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                await process.aclose()
                if jail >= 0:
                    await _end(jail)
    finally:
        os.close(info)
        os.close(go)
        os.close(ours)


async def _pid(info: int) -> int:
    """Of the jail's first process, with which all of it ends; 0 where bubblewrap says on stderr why there is none."""
    told = b""
    while not told.rstrip().endswith(b"}"):
        await anyio.wait_readable(info)
        piece = os.read(info, INFO_BYTES)
        if not piece:
            return 0
        told += piece
    return int(json.loads(told)["child-pid"])


async def _end(jail: int) -> None:
    """Until nothing of it runs any more. bubblewrap's end does not wait for that."""
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(jail, signal.SIGKILL)
        await anyio.wait_readable(jail)
    finally:
        os.close(jail)


async def _give_ids(pid: int, ids: Ids) -> None:
    """Writes the map of the user namespace that bubblewrap has made and waits in (user_namespaces(7))."""
    if ids.others is not None:
        owners = (os.geteuid(), os.getegid())
        for program, own, first in zip(("newuidmap", "newgidmap"), owners, ids.others, strict=True):
            await anyio.run_process([program, str(pid), "0", str(own), "1", "1", str(first), str(IDS - 1)])
        return
    _write_map(pid, ids)


def _write_map(pid: int, ids: Ids) -> None:
    group = ids.first if os.geteuid() == 0 else os.getegid()
    if os.geteuid() != 0:
        Path(f"/proc/{pid}/setgroups").write_text("deny")
    Path(f"/proc/{pid}/uid_map").write_text(f"0 {ids.first} {ids.count}")
    Path(f"/proc/{pid}/gid_map").write_text(f"0 {group} {ids.count}")


async def _talk(process: anyio.abc.Process, stdin: bytes, on_line: Callable[[bytes], None] | None) -> Ended:
    out, tail = bytearray(), bytearray()

    async def feed() -> None:
        assert process.stdin is not None
        # It may end without having read everything: its exit code says why.
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await process.stdin.send(stdin)
            await process.stdin.aclose()

    async def read_errors() -> None:
        assert process.stderr is not None
        async for piece in process.stderr:
            tail.extend(piece)
            del tail[:-TAIL_BYTES]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed)
        tasks.start_soon(read_errors)
        assert process.stdout is not None
        async for piece in process.stdout:
            out.extend(piece)
            if on_line is not None:
                *lines, rest = bytes(out).split(b"\n")
                out[:] = rest
                for line in lines:
                    on_line(line)
            if len(out) > OUTPUT_BYTES:
                process.kill()
                break
        code = await process.wait()
    if len(out) > OUTPUT_BYTES:
        raise OverflowError
    return Ended(code, bytes(out), tail.decode(errors="replace"))
