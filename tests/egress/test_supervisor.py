"""The two processes: started, found again, replaced. A stand-in that keeps the real wire plays both."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from egress import supervisor
from egress.control import Event
from egress.session import Refused, Session, SessionLost
from egress.supervisor import Supervisor
from tests.egress.networked import ALLOWLIST, PROGRAMS, UIDS, new_instance, new_sandbox, pid_of

pytestmark = [pytest.mark.anyio, pytest.mark.root]

FIRST = new_sandbox()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Daemon:
    """What outlives one supervisor: the directory, and what was said."""

    directory: Path
    instance: str = field(default_factory=new_instance)
    events: list[Event] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    restored: int = 0
    serving: Supervisor | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Supervisor]:
        self.serving = self.supervisor()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.serving.run)
            yield self.serving
            tasks.cancel_scope.cancel()

    def supervisor(self) -> Supervisor:
        return Supervisor(
            self.directory, self.instance, UIDS, self.restore, self.events.append, self.log.append, PROGRAMS
        )

    async def restore(self, session: Session) -> None:
        self.restored += 1

    def pids(self, role: str) -> list[int]:
        """Of the processes with our mark."""
        program = PROGRAMS.egress if role == "egress" else PROGRAMS.resolver
        found = []
        for pidfd in supervisor.marked(program, f"/sandboxd/{self.instance}/egress/{role}", UIDS[0]):
            found.append(pid_of(pidfd))
            os.close(pidfd)
        return found

    def told(self) -> list[dict[str, Any]]:
        file = self.directory / "told.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    if os.geteuid() != 0:
        pytest.skip("needs root: processes of root's or of uids of their own are looked for")
    path = Path(tempfile.mkdtemp(prefix="sbx-egress-", dir="/tmp"))
    its = Daemon(path / "egress")
    yield its
    await its.supervisor().end()
    assert its.pids("egress") == its.pids("resolver") == []
    shutil.rmtree(path)


@asynccontextmanager
async def sockets(count: int = 4) -> AsyncIterator[list[int]]:
    """Descriptors that are as good as a sandbox's, for a process that only keeps them."""
    with socket.socket() as one, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as two, socket.socket() as three:
        one.listen()
        three.listen()
        names = os.open("/dev/null", os.O_RDWR)
        yield [one.fileno(), two.fileno(), three.fileno(), names][:count]
        os.close(names)


async def until(is_so: Callable[[], bool], timeout_s: float = 20.0) -> None:
    with anyio.fail_after(timeout_s):
        while not is_so():  # noqa: ASYNC110 (another process is looked at)
            await anyio.sleep(0.02)


async def test_both_are_started_each_in_a_session_of_its_own(daemon: Daemon) -> None:
    async with daemon.running() as its:
        await its.session()
        await until(lambda: len(daemon.pids("resolver")) == 1)
        [egress] = daemon.pids("egress")
        assert os.getsid(egress) == egress
        assert oct(daemon.directory.stat().st_mode & 0o777) == "0o700"
        assert os.listdir(daemon.directory / "root") == []


async def test_they_outlive_the_daemon_and_are_taken_back(daemon: Daemon) -> None:
    async with daemon.running() as its:
        await its.session()
        await until(lambda: len(daemon.pids("resolver")) == 1)
        before = daemon.pids("egress"), daemon.pids("resolver")
        async with sockets() as fds:
            await (await its.session()).add(FIRST, ALLOWLIST, fds)
    assert (daemon.pids("egress"), daemon.pids("resolver")) == before
    async with daemon.running() as its:
        session = await its.session()
        assert session.sandboxes == {FIRST}
        assert (daemon.pids("egress"), daemon.pids("resolver")) == before
        await session.remove(FIRST)
    assert [told["do"] for told in daemon.told()] == ["add", "remove"]


async def test_one_that_is_killed_is_started_again_and_given_what_it_should_have(daemon: Daemon) -> None:
    async with daemon.running() as its:
        seen = set()
        for turn in range(1, 5):
            session = await its.session()
            assert daemon.restored == turn
            [pid] = daemon.pids("egress")
            seen.add(pid)
            os.kill(pid, signal.SIGKILL)
            await session.lost.wait()
        await its.session()
        assert len(seen) == 4
        await until(lambda: len(daemon.pids("resolver")) == 1)


async def test_a_resolver_that_is_killed_is_followed_by_another_of_which_egress_is_told(daemon: Daemon) -> None:
    async with daemon.running() as its:
        await its.session()
        [egress] = daemon.pids("egress")
        await until(lambda: len(daemon.pids("resolver")) == 1)
        [before] = daemon.pids("resolver")
        os.kill(before, signal.SIGKILL)
        await until(lambda: daemon.pids("resolver") not in ([], [before]))
        await until(lambda: [told["do"] for told in daemon.told()] == ["resolver"])
        assert daemon.pids("egress") == [egress]
        # It was not taken for dead again: its end of the socket is in egress's hands.
        [now] = daemon.pids("resolver")
        await anyio.sleep(0.3)
        assert daemon.pids("resolver") == [now]


async def test_one_of_another_build_is_replaced(daemon: Daemon) -> None:
    async with daemon.running() as its:
        await its.session()
        before = daemon.pids("egress")
    (daemon.directory / "build").write_text("another")
    async with daemon.running() as its:
        await until(lambda: daemon.pids("egress") != before)
        (daemon.directory / "build").unlink()
        await its.session()
        assert daemon.pids("egress") != before
    assert any("another build" in line for line in daemon.log)


async def test_one_that_no_longer_answers_is_replaced(daemon: Daemon) -> None:
    async with daemon.running() as its:
        session = await its.session()
        [before] = daemon.pids("egress")
        os.kill(before, signal.SIGSTOP)
        with pytest.raises(SessionLost, match="in time"):
            await session.call("hello", within_s=0.3)
        with anyio.fail_after(20):
            await its.session()
        assert before not in daemon.pids("egress")


async def test_what_a_daemon_left_that_cannot_be_reached_is_ended_first(daemon: Daemon) -> None:
    async with daemon.running() as its:
        await its.session()
        before = daemon.pids("egress")
    (daemon.directory / "control.sock").unlink()
    async with daemon.running() as its:
        await its.session()
        assert len(daemon.pids("egress")) == 1
        assert daemon.pids("egress") != before


async def test_an_event_is_told_once_even_if_it_is_sent_twice(daemon: Daemon) -> None:
    async with daemon.running() as its, sockets() as fds:
        session = await its.session()
        port = _listening_port(fds[0])
        await session.add(FIRST, ALLOWLIST, fds)
        _knock(port)
        await until(lambda: len(daemon.events) == 1)
        await session.ping()
        assert daemon.events[0].sandbox == FIRST
    async with daemon.running() as its:
        # Acknowledged, so it is not sent to the next daemon.
        await (await its.session()).ping()
        _knock(port)
        await until(lambda: len(daemon.events) == 2)
        assert [event.number for event in daemon.events] == [1, 2]
        await (await its.session()).remove(FIRST)


async def test_an_event_that_cannot_be_kept_ends_nothing(daemon: Daemon) -> None:
    def full(event: Event) -> None:
        raise OSError(28, "no space left")

    its = Supervisor(daemon.directory, daemon.instance, UIDS, daemon.restore, full, daemon.log.append, PROGRAMS)
    async with anyio.create_task_group() as tasks, sockets() as fds:
        tasks.start_soon(its.run)
        session = await its.session()
        await session.add(FIRST, ALLOWLIST, fds)
        _knock(_listening_port(fds[0]))
        await until(lambda: any("no space left" in line for line in daemon.log))
        await session.ping()
        tasks.cancel_scope.cancel()


async def test_a_refusal_is_an_error_and_the_session_lives_on(daemon: Daemon) -> None:
    async with daemon.running() as its, sockets() as fds:
        session = await its.session()
        (daemon.directory / "refuse").touch()
        with pytest.raises(Refused, match="not today"):
            await session.add(FIRST, ALLOWLIST, fds)
        assert session.sandboxes == set()
        await session.ping()


async def test_many_calls_at_once_each_get_their_own_answer(daemon: Daemon) -> None:
    answers: dict[str, list[dict[str, Any]]] = {}

    async def ask(session: Session, id: str) -> None:
        answers[id] = await session.report(id)

    async with daemon.running() as its:
        session = await its.session()
        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(ask, session, new_sandbox())
    assert {id: rows[0]["name"] for id, rows in answers.items()} == {id: id for id in answers}
    assert len(answers) == 50


async def test_a_call_that_is_given_up_leaves_the_session_whole(daemon: Daemon) -> None:
    async with daemon.running() as its:
        session = await its.session()
        [pid] = daemon.pids("egress")
        os.kill(pid, signal.SIGSTOP)

        async def go_on() -> None:
            await anyio.sleep(0.5)
            os.kill(pid, signal.SIGCONT)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(go_on)
            with anyio.move_on_after(0.2) as scope:
                # More than the socket holds: half a frame has gone when the caller has had enough.
                await session.call("report", sandbox="x" * 3_000_000)
        assert scope.cancelled_caught
        await session.ping()
        assert daemon.pids("egress") == [pid]


async def test_processes_of_another_instance_are_left_alone(daemon: Daemon) -> None:
    other = Daemon(daemon.directory.with_name("other"))
    async with daemon.running() as its, other.running() as theirs:
        await its.session()
        await theirs.session()
        before = other.pids("egress")
        await daemon.supervisor().end()
        assert other.pids("egress") == before
    await other.supervisor().end()


def test_a_setuid_program_that_somebody_started_is_none_of_ours() -> None:
    program, mark = (sys.executable, "-I", "-c", "input()"), f"/sandboxd/{new_instance()}/egress/resolver"
    for real, ours in ((0, 1), (UIDS[1] + 1, 0)):
        with subprocess.Popen(
            [*program, mark], stdin=subprocess.PIPE, preexec_fn=functools.partial(os.setresuid, real, 0, 0)
        ) as process:
            found = list(supervisor.marked(program, mark, UIDS[1]))
            process.communicate(b"\n", timeout=10)
        assert len(found) == ours
        for pidfd in found:
            os.close(pidfd)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"\xff\xff\xff\xff", id="a frame without an end"),
        pytest.param(b"\0\0\0\x02[]", id="not an object"),
        pytest.param(b"\0\0\0\x02{}", id="neither answer nor event"),
        pytest.param(b'\0\0\0\x17{"event":{},"number":1}', id="an event without its keys"),
        pytest.param(b'\0\0\0\x40{"seq":1,', id="half a frame, then silence"),
        pytest.param(b"", id="the end"),
    ],
)
async def test_a_word_out_of_turn_ends_the_session(answer: bytes) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    session = Session(ours, lambda event: None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run)
        theirs.sendall(answer)
        if answer.startswith(b"\0\0\0\x40"):
            with pytest.raises(SessionLost, match="no answer in time"):
                await session.call("hello", within_s=0.2)
        else:
            if not answer:
                theirs.close()
            with pytest.raises(SessionLost):
                await session.hello(5)
        assert session.lost.is_set()
        tasks.cancel_scope.cancel()
    theirs.close()


def test_the_build_is_the_same_until_a_source_changes() -> None:
    assert supervisor.build() == supervisor.build()
    assert len(supervisor.build()) == 64


def _listening_port(fd: int) -> int:
    with socket.socket(fileno=os.dup(fd)) as listener:
        return int(listener.getsockname()[1])


def _knock(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.settimeout(5)
        connection.recv(100)
