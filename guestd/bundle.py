"""A repository goes into the empty workspace as a git bundle, and commits come out as one.

guestd's own git does it, as the sandbox's user, in a namespace where the workspace is the sandbox's and the
programs are guestd's: nothing of the sandbox's image is executed. What a repository's own configuration makes
git do hurts the sandbox only; here it meets a deadline, a bounded error text, and an end with the connection.

In: the bundle's header is read here, its pack is streamed into `index-pack`, no copy of it lies on the
disk. A bundle of a shallow clone lacks parents; the commits that miss one become the boundary in
.git/shallow. Out: git's output is taken by guestd and kept, a little in memory, more in guestd's own spool:
root's reserve of the disk holds it when the sandbox has filled the rest.
"""

from __future__ import annotations

import os
import re
import select
import time

from guestd import files, linux, protocol
from guestd.group import Group
from guestd.place import WORKSPACE
from guestd.process import Refused, launch

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable
    from typing import Final

    from guestd.place import Place

_GIT_S: Final = 900.0               # one run of git, under emulation too
_STDERR_BYTES: Final = 2000         # the end of it is kept
_HEADER_BYTES: Final = 1 << 20
_MEMORY_BYTES: Final = 1 << 20      # of a bundle on its way out; more goes to the spool
_CHUNK_BYTES: Final = 256 << 10

_GIT: Final = (
    "git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "core.alternateRefsCommand=",
    "-c", "gc.auto=0", "-c", "maintenance.auto=false", "-c", "protocol.allow=never",
)
_ENV: Final = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/nonexistent",
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_PAGER": "cat",
    "GIT_COMMITTER_NAME": "sandbox",
    "GIT_COMMITTER_EMAIL": "sandbox@localhost",
}
_NOTHING_NEW: Final = b"Refusing to create empty bundle"
_OID: Final = {"sha1": re.compile(rb"[0-9a-f]{40}"), "sha256": re.compile(rb"[0-9a-f]{64}")}


# ---- the header of a bundle (pure)

class Header:
    """`refs` are (name, object id) in the bundle's order; `head` is the id of HEAD."""

    __slots__ = ("head", "object_format", "refs")

    def __init__(self, object_format: str, refs: tuple[tuple[bytes, bytes], ...], head: bytes) -> None:
        self.object_format = object_format
        self.refs = refs
        self.head = head


def parse_header(data: bytes) -> tuple[Header, bytes] | None:
    """The header and what follows it, None while it is not whole, Refused when it is none.

    gitformat-bundle(5): a signature, `@capability` lines (v3), `-prerequisite` lines, `id name` lines, an
    empty line. Prerequisites are not looked at: what is missing is found in the objects themselves.
"""
    end = data.find(b"\n\n", 0, _HEADER_BYTES)
    if end < 0:
        if len(data) >= _HEADER_BYTES:
            raise Refused("bad_request", "not a git bundle: its header does not end")
        if not b"# v2 git bundle\n".startswith(data[:16]) and not b"# v3 git bundle\n".startswith(data[:16]):
            raise Refused("bad_request", "not a git bundle")
        return None
    signature, *lines = data[:end].split(b"\n")
    if signature not in (b"# v2 git bundle", b"# v3 git bundle"):
        raise Refused("bad_request", "not a git bundle")
    object_format = "sha1"
    refs: list[tuple[bytes, bytes]] = []
    for line in lines:
        if line.startswith(b"@"):
            if line not in (b"@object-format=sha1", b"@object-format=sha256"):
                raise Refused("bad_request", "a bundle with a capability that is not served")
            object_format = line.rpartition(b"=")[2].decode()
        elif not line.startswith(b"-"):
            oid, blank, name = line.partition(b" ")
            if not blank or not name or not _OID[object_format].fullmatch(oid):
                raise Refused("bad_request", "a bundle whose header is damaged")
            refs.append((name, oid))
    head = dict(refs).get(b"HEAD")
    if head is None:
        raise Refused("bad_request", "a bundle without HEAD")
    return Header(object_format, tuple(refs), head), data[end + 2:]


def ref_updates(header: Header, branch: str) -> bytes:
    """Input for `update-ref --stdin -z`: HEAD becomes the branch, tags stay, other branches are origin's."""
    targets = {b"refs/heads/" + branch.encode(): header.head}
    for name, oid in header.refs:
        if name.startswith(b"refs/tags/"):
            targets.setdefault(name, oid)
        elif name.startswith(b"refs/heads/"):
            targets.setdefault(b"refs/remotes/origin/" + name.removeprefix(b"refs/heads/"), oid)
    return b"".join(b"create %b\0%b\0" % pair for pair in targets.items())


# ---- running git

class _Stdin:
    """What git is given to read: pieces from `more` until it answers b""."""

    __slots__ = ("_more", "_waiting")

    def __init__(self, more: Callable[[], bytes]) -> None:
        self._more = more
        self._waiting = memoryview(b"")

    def write(self, fd: int) -> bool:
        """Writes what the pipe takes; False when there is no more, or git reads no more."""
        try:
            if not self._waiting:
                self._waiting = memoryview(self._more())
            self._waiting = self._waiting[os.write(fd, self._waiting):] if self._waiting else self._waiting
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        if not self._waiting:
            self._waiting = memoryview(self._more())
        return bool(self._waiting)


def _git(
    place: Place, sock: socket.socket, arguments: Iterable[str], *,
    stdin: Callable[[], bytes] | None = None, stdout: Callable[[bytes], None] | None = None,
) -> tuple[int, bytes]:
    """Runs git in the workspace: (exit code, the end of its stderr).

    `stdin` is asked for pieces until b"", `stdout` is given what git writes. Whatever goes wrong, and when
    the host hangs up, git and all it started are killed; what it left behind is killed in any case.
"""
    group = Group(place.cgroup)
    ours: dict[str, int] = {}
    theirs: list[int] = []
    try:
        try:
            null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            theirs.append(null)
            child_in = child_out = null
            if stdin is not None:
                child_in, ours["stdin"] = os.pipe()
                theirs.append(child_in)
            if stdout is not None:
                ours["stdout"], child_out = os.pipe()
                theirs.append(child_out)
            ours["stderr"], child_err = os.pipe()
            theirs.append(child_err)
            for fd in ours.values():
                os.set_blocking(fd, False)
            pid = launch(
                place, place.git_namespace(), [*_GIT, *arguments], _ENV, WORKSPACE,
                (child_in, child_out, child_err), group,
            )
        finally:
            for fd in theirs:
                os.close(fd)
        try:
            ours["pid"] = os.pidfd_open(pid)
            tail = _converse(ours, sock, None if stdin is None else _Stdin(stdin), stdout)
        finally:
            group.kill()
            status = os.waitpid(pid, 0)[1]
        return os.waitstatus_to_exitcode(status), tail
    finally:
        for fd in ours.values():
            os.close(fd)
        group.close()


def _converse(
    fds: dict[str, int], sock: socket.socket, stdin: _Stdin | None,
    stdout: Callable[[bytes], None] | None,
) -> bytes:
    """Until git has exited; closes what it is done with. The end of stderr."""
    deadline = time.monotonic() + _GIT_S
    tail = b""
    exited = False
    while not exited:
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLRDHUP)
        for name, fd in fds.items():
            poll.register(fd, select.POLLOUT if name == "stdin" else select.POLLIN)
        events = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        if not events:
            raise Refused("internal", "git took too long")
        if sock.fileno() in events:
            raise ConnectionAbortedError("the host hung up")
        exited = fds["pid"] in events
        if stdin is not None and fds.get("stdin") in events and not stdin.write(fds["stdin"]):
            os.close(fds.pop("stdin"))
        for name in ("stdout", "stderr"):
            # What git wrote before it exited is in the pipe, and one read takes all a pipe holds.
            if fds.get(name) in events or (exited and name in fds):
                try:
                    data = os.read(fds[name], _CHUNK_BYTES)
                except BlockingIOError:
                    continue
                if not data:
                    os.close(fds.pop(name))
                elif name == "stderr":
                    tail = (tail + data)[-_STDERR_BYTES:]
                elif stdout is not None:
                    stdout(data)
    return tail


def _done(result: tuple[int, bytes], what: str) -> None:
    code, tail = result
    if code != 0:
        message = tail.decode("utf-8", "replace").strip()
        kind = "disk_full" if "No space left on device" in message else "bad_request"
        raise Refused(kind, f"{what}: {message or f'git ended with {code}'}")


# ---- in

class _Content:
    """The bytes of a bundle as they arrive, `size` of them and no more."""

    __slots__ = ("_left", "_sock")

    def __init__(self, sock: socket.socket, size: int) -> None:
        self._sock = sock
        self._left = size

    def more(self) -> bytes:
        """Some, b"" at the end."""
        if not self._left:
            return b""
        data = self._sock.recv(min(self._left, _CHUNK_BYTES))
        if not data:
            raise ConnectionAbortedError("the bundle ended early")
        self._left -= len(data)
        return data

    def skip(self) -> None:
        while self.more():
            pass


def _open_workspace(place: Place) -> int:
    return linux.open_in_root(place.root_fd, WORKSPACE.encode(), os.O_RDONLY | os.O_DIRECTORY)


def take_in(place: Place, branch: str, size: int, sock: socket.socket, received: bytes) -> None:
    """Serves bundle_in; `received` came right behind the request."""
    if len(received) > size:
        raise protocol.GuestProtocolFault("more bytes than were announced")
    with files.translated(WORKSPACE), files.as_user(place):
        workspace = _open_workspace(place)
        try:
            if os.listdir(workspace):
                raise Refused("not_empty", f"{WORKSPACE} is not empty")
        finally:
            os.close(workspace)
    sock.sendall(protocol.encode_ok())
    content = _Content(sock, size - len(received))
    try:
        _clone(place, branch, sock, content, received)
    except ConnectionError:
        _clear(place)
        raise
    except Refused:
        _clear(place)
        content.skip()      # or the answer would be lost with what nobody read
        raise
    sock.sendall(protocol.encode_ok())


def _clone(place: Place, branch: str, sock: socket.socket, content: _Content, received: bytes) -> None:
    parsed = parse_header(received)
    while parsed is None:
        piece = content.more()
        if not piece:
            raise Refused("bad_request", "not a git bundle: its header does not end")
        received += piece
        parsed = parse_header(received)
    header, pack = parsed
    pieces = iter([pack])

    def more() -> bytes:
        return next(pieces, b"") or content.more()

    _done(
        _git(place, sock, ["init", "-q", f"--object-format={header.object_format}", "-b", branch]),
        "the workspace",
    )
    _done(_git(place, sock, ["index-pack", "--stdin", "--fix-thin"], stdin=more), "the bundle's objects")
    content.skip()
    updates = iter([ref_updates(header, branch)])
    _done(_git(place, sock, ["update-ref", "--stdin", "-z"], stdin=lambda: next(updates, b"")), "its refs")
    if _git(place, sock, ["rev-list", "--count", "--all"], stdout=lambda _: None)[0] != 0:
        _mark_shallow(place, sock)
        walk = _git(place, sock, ["rev-list", "--count", "--all"], stdout=lambda _: None)
        _done(walk, "the bundle is incomplete")
    _done(_git(place, sock, ["reset", "--hard", "-q"]), "the working tree")


def _mark_shallow(place: Place, sock: socket.socket) -> None:
    """Writes .git/shallow: the commits that name a parent which is not there."""
    objects: list[bytes] = []
    _done(
        _git(
            place, sock,
            ["cat-file", "--batch-all-objects", "--unordered", "--batch-check=%(objecttype) %(objectname)"],
            stdout=objects.append,
        ),
        "the bundle's objects",
    )
    lines = b"".join(objects).split(b"\n")
    commits = {line.removeprefix(b"commit ") for line in lines if line.startswith(b"commit ")}
    listing = iter([b"\n".join(sorted(commits)) + b"\n"])
    walked: list[bytes] = []
    _done(
        _git(
            place, sock, ["rev-list", "--no-walk=unsorted", "--parents", "--stdin"],
            stdin=lambda: next(listing, b""), stdout=walked.append,
        ),
        "the bundle's commits",
    )
    boundary = [
        commit for commit, *parents in map(bytes.split, b"".join(walked).splitlines())
        if not commits.issuperset(parents)
    ]
    text = b"".join(commit + b"\n" for commit in boundary)
    with files.translated(WORKSPACE), files.as_user(place):
        files.replace(place.root_fd, f"{WORKSPACE}/.git/shallow", text)


def _clear(place: Place) -> None:
    """Empties the workspace after a failure, so that the next bundle finds it as this one did."""
    import shutil  # only here, and it takes a while to load

    with files.translated(WORKSPACE), files.as_user(place):
        workspace = _open_workspace(place)
        try:
            for name in os.listdir(workspace):
                try:
                    os.unlink(name, dir_fd=workspace)
                except IsADirectoryError:
                    shutil.rmtree(name, dir_fd=workspace)
        finally:
            os.close(workspace)


# ---- out

class _Spool:
    """A bundle on its way out: in memory while it is small, then in a file without a name."""

    __slots__ = ("_directory", "_fd", "_pieces", "size")

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._pieces: list[bytes] = []
        self._fd = -1
        self.size = 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        if self.size > protocol.MAX_BUNDLE_BYTES:
            raise Refused("too_large", "a bundle of more than 4 GiB")
        self._pieces.append(data)
        if self._fd >= 0 or self.size > _MEMORY_BYTES:
            with files.translated("the bundle"):
                if self._fd < 0:
                    self._fd = os.open(self._directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
                for piece in self._pieces:
                    files.write_all(self._fd, piece)
            self._pieces.clear()

    def send(self, sock: socket.socket) -> None:
        sock.sendall(protocol.encode_ok(size=self.size) + b"".join(self._pieces))
        if self._fd >= 0:
            files.send(sock, self._fd, self.size)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def give_out(place: Place, base: str, branch: str, sock: socket.socket) -> None:
    """Serves bundle_out."""
    spool = _Spool(place.spool)
    try:
        code, tail = _git(
            place, sock, ["bundle", "create", "--quiet", "-", f"{base}..{branch}"], stdout=spool.add
        )
        if code != 0 and _NOTHING_NEW in tail:
            raise Refused("nothing_new", f"no commits in {base}..{branch}")
        _done((code, tail), f"{base}..{branch}")
        spool.send(sock)
    finally:
        spool.close()
