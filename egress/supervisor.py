"""The two processes of a daemon's egress: started, taken back, replaced, started again.

In: a state directory, an instance, two uids. Out: a `Session` with a living egress of our build, whenever there is
one. Both processes outlive the daemon and are found again through the control socket and by their marks, arguments
on their command lines that name the instance; only processes of root's or of their own uid count. A process that
does not answer, says something odd or is of another build is ended and replaced, and while there is none nothing
passes: its sockets are closed and the namespaces lead nowhere.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from egress.control import Event
from egress.session import CALL_S, Refused, Session, SessionLost

SOCKET = "control.sock"
START_S = 60.0
"""From start to the first answer. A second, on a machine that is not busy."""
END_S = 3.0
PING_S = 10.0
BACK_OFF_S = (0.0, 0.1, 0.5, 1.0)
"""Between the end of one and the start of the next, which itself takes most of a second."""
STEADY_S = 10.0
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Programs:
    """What is run; the mark follows, then for egress its build, for both the uid, for egress the empty root."""

    egress: tuple[str, ...] = (sys.executable, "-I", "-m", "egress")
    resolver: tuple[str, ...] = (sys.executable, "-I", "-m", "egress.resolver")


class Supervisor:
    """`restore` gives a new session what it does not know; until it returns nobody else gets the session."""

    def __init__(
        self,
        directory: Path,
        instance: str,
        uids: tuple[int, int],
        restore: Callable[[Session], Awaitable[None]],
        on_event: Callable[[Event], None],
        on_log: Callable[[str], None],
        programs: Programs,
    ) -> None:
        self._directory = directory
        self._egress_uid, self._resolver_uid = uids
        self._restore = restore
        self._on_event = on_event
        self._log = on_log
        self._programs = programs
        self._egress_mark = f"/sandboxd/{instance}/egress/egress"
        self._resolver_mark = f"/sandboxd/{instance}/egress/resolver"
        self._children: set[int] = set()
        self._session: Session | None = None
        self._changed = anyio.Event()

    async def session(self) -> Session:
        """The one with the living process; waits for it. The deadline is the caller's."""
        while (session := self.current) is None:
            await self._changed.wait()
        return session

    @property
    def current(self) -> Session | None:
        """None while there is no living process that has all it should."""
        return None if self._session is None or self._session.lost.is_set() else self._session

    async def run(self) -> None:
        """Until it is cancelled; the processes go on."""
        failures = 0
        while True:
            since = anyio.current_time()
            try:
                self._make_directory()
                found = self._connect()
                if found is not None:
                    await self._attend(found, CALL_S)
                else:
                    await self._attend(await self._start(), START_S)
                await self._clear()
            except OSError as fault:
                self._log(f"egress cannot be started: {fault}")
            failures = failures + 1 if anyio.current_time() - since < STEADY_S else 1
            await anyio.sleep(_back_off_s(failures))

    async def end(self) -> None:
        """Ends both processes, whoever started them. `run` must not be running any more."""
        await self._clear()

    async def _attend(self, connection: socket.socket, within_s: float) -> None:
        """From a connection to the end of what it stands for, or to the news that another is needed."""
        session = Session(connection, self._note)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.run)
            try:
                if await session.hello(within_s) != build():
                    self._log("egress is of another build: it is replaced")
                else:
                    tasks.start_soon(self._keep_resolver, session)
                    tasks.start_soon(_ping, session)
                    await self._restore(session)
                    self._publish(session)
                    await session.lost.wait()
                    self._log("egress has ended or no longer answers: it is started again")
            except (SessionLost, Refused) as fault:
                self._log(f"egress is started again: {fault}")
            finally:
                self._publish(None)
                tasks.cancel_scope.cancel()

    def _note(self, event: Event) -> None:
        """A full disk must not look like the end of egress."""
        try:
            self._on_event(event)
        except OSError as fault:
            self._log(f"an event of egress could not be kept: {fault}")

    def _publish(self, session: Session | None) -> None:
        self._session = session
        self._changed.set()
        self._changed = anyio.Event()

    async def _keep_resolver(self, session: Session) -> None:
        """One that ended is followed by another, and egress is told; what it was asked meanwhile is unresolved."""
        failures = 0
        with suppress(SessionLost):
            while True:
                since = anyio.current_time()
                try:
                    pidfd = await anyio.to_thread.run_sync(self._find_resolver)
                    if pidfd is None:
                        await self._start_resolver(session)
                        pidfd = await anyio.to_thread.run_sync(self._find_resolver)
                    if pidfd is not None:
                        await _ended(pidfd)
                    self._log("the resolver has ended: it is started again")
                except (OSError, Refused) as fault:
                    self._log(f"the resolver cannot be started: {fault}")
                self._reap()
                failures = failures + 1 if anyio.current_time() - since < STEADY_S else 1
                await anyio.sleep(_back_off_s(failures))

    def _find_resolver(self) -> int | None:
        found = list(marked(self._programs.resolver, self._resolver_mark, self._resolver_uid))
        for pidfd in found[1:]:
            os.close(pidfd)
        return found[0] if found else None

    async def _start_resolver(self, session: Session) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            self._spawn_resolver(theirs)
            await session.resolver(ours.fileno())

    def _spawn_resolver(self, end: socket.socket) -> None:
        argv = [*self._programs.resolver, self._resolver_mark, str(self._resolver_uid)]
        self._children.add(_spawn(argv, [end.fileno()], self._directory / "resolver.log"))

    async def _start(self) -> socket.socket:
        """Both, anew. What was left of earlier ones ends first."""
        await self._clear()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            with _address(self._directory) as address:
                listener.bind(address)
            listener.listen(4)
            argv = [
                *self._programs.egress, self._egress_mark, build(), str(self._egress_uid),
                str(self._directory / "root"),
            ]  # fmt: skip
            fds = [listener.fileno(), ours.fileno()]
            self._children.add(_spawn(argv, fds, self._directory / "egress.log"))
            self._spawn_resolver(theirs)
        connection = self._connect()
        if connection is None:
            raise OSError("its control socket does not listen")
        return connection

    def _connect(self) -> socket.socket | None:
        """To an egress that is there already."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            with _address(self._directory) as address:
                connection.connect(address)
            # The peer is whoever listened first: a daemon like this one, in a directory that is its own.
            _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid in (os.geteuid(), self._egress_uid):
                return connection
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            pass
        connection.close()
        return None

    def _make_directory(self) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        (self._directory / "root").mkdir(mode=0o755, exist_ok=True)

    async def _clear(self) -> None:
        """Ends every process with our marks."""
        await anyio.to_thread.run_sync(self._end_marked)
        self._reap()
        (self._directory / SOCKET).unlink(missing_ok=True)

    def _end_marked(self) -> None:
        held = [
            *marked(self._programs.egress, self._egress_mark, self._egress_uid),
            *marked(self._programs.resolver, self._resolver_mark, self._resolver_uid),
        ]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pidfd in held:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, number)
            deadline = time.monotonic() + END_S
            for pidfd in list(held):
                poller = select.poll()
                poller.register(pidfd, select.POLLIN)
                if poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    held.remove(pidfd)
                    os.close(pidfd)
        for pidfd in held:
            self._log("a process of egress does not end")
            os.close(pidfd)

    def _reap(self) -> None:
        for pid in list(self._children):
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    continue
            self._children.discard(pid)


def build() -> str:
    """What tells one version of the two programs from another: their sources, what is compiled, the interpreter."""
    digest = hashlib.sha256(sys.version.encode())
    for pattern in ("egress/*.py", "native/*.py", "native/*.so", "native/*.c", "native/*.h"):
        for path in sorted(_ROOT.glob(pattern)):
            digest.update(f"\0{path.name}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def marked(program: Sequence[str], mark: str, uid: int) -> Iterator[int]:
    """A pidfd of every process that `program` was started as with `mark`, and is root's (at first) or of `uid`."""
    wanted = [word.encode() for word in (*program, mark)]
    uids = {os.geteuid(), uid}
    for name in os.listdir("/proc"):
        if name.isdigit() and _is(int(name), wanted, uids):
            with suppress(ProcessLookupError):
                pidfd = os.pidfd_open(int(name))
                # Looked at again: only now the pid cannot become another's.
                if _is(int(name), wanted, uids):
                    yield pidfd
                else:
                    os.close(pidfd)


def _is(pid: int, wanted: list[bytes], uids: set[int]) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(65536).split(b"\0")
        return words[: len(wanted)] == wanted and _uids(pid) <= uids
    except OSError:
        return False


def _uids(pid: int) -> set[int]:
    """All of them: whoever starts a setuid program chooses its command line, and stays its real uid."""
    status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    line = next(line for line in status.splitlines() if line.startswith("Uid:"))
    return {int(uid) for uid in line.split()[1:]}


def _spawn(argv: Sequence[str], fds: Sequence[int], log: Path) -> int:
    """The program with `fds` as 3, 4, …, in a session of its own. What it says goes to `log`, from its start."""
    # Moved out of the way first: none may be overwritten before it is in its place.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in fds]
    try:
        how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), how, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            *((os.POSIX_SPAWN_DUP2, fd, 3 + position) for position, fd in enumerate(high)),
        ]
        return os.posix_spawn(argv[0], list(argv), {}, file_actions=actions, setsid=True, setsigmask=())
    finally:
        for fd in high:
            os.close(fd)


@contextmanager
def _address(directory: Path) -> Iterator[str]:
    """Of the control socket. Its path may be longer than an address can hold (unix(7): 108 bytes with the NUL)."""
    path = str(directory / SOCKET)
    if len(os.fsencode(path)) < 108:
        yield path
        return
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET}"
    finally:
        os.close(fd)


async def _ended(pidfd: int) -> None:
    """Closes it too."""
    try:
        await anyio.wait_readable(pidfd)
    finally:
        os.close(pidfd)


def _back_off_s(failures: int) -> float:
    return BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1]


async def _ping(session: Session) -> None:
    with suppress(SessionLost, Refused):
        while True:
            await anyio.sleep(PING_S)
            await session.ping()
