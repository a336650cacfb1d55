"""A sandbox's network from its opening to its end, with a guest in front and a stand-in for egress behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from dnslib import DNSRecord

from egress import link, network, nft, plan, supervisor
from egress.control import Event
from egress.network import Egress, EgressError, GuestNetwork
from egress.policy import Policy
from egress.supervisor import Programs
from tests.conftest import counts
from tests.egress.networked import (
    ALLOWLIST,
    NONE,
    OPEN,
    PROGRAMS,
    UIDS,
    need_networks,
    new_instance,
    new_sandbox,
    pid_of,
)
from tests.egress.tap_guest import Guest

pytestmark = [pytest.mark.anyio, pytest.mark.root]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Daemon:
    """What stays when a daemon goes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.instance = new_instance()
        self.events: list[Event] = []
        self.log: list[str] = []

    def egress(self) -> Egress:
        return Egress(self.directory, self.instance, UIDS, self.events.append, self.log.append, PROGRAMS)

    def names(self, sandbox: str) -> Path:
        return self.directory / f"{sandbox}.names"

    def plan(self, sandbox: str) -> plan.Plan:
        return plan.of(self.instance, sandbox)

    @asynccontextmanager
    async def opened(self, its: Egress, sandbox: str, policy: Policy = ALLOWLIST) -> AsyncIterator[Guest]:
        """With a guest that has the tap, as a machine would."""
        made = await its.open(sandbox, policy, self.names(sandbox))
        guest = Guest(self.plan(sandbox), made.tap_fd)
        made.close_tap()
        try:
            yield guest
        finally:
            await anyio.to_thread.run_sync(guest.close)
            await its.close(sandbox)

    def told(self) -> list[dict[str, Any]]:
        file = self.directory / "egress" / "told.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def kill(self) -> None:
        program, mark = PROGRAMS.egress, f"/sandboxd/{self.instance}/egress/egress"
        for pidfd in supervisor.marked(program, mark, UIDS[0]):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    need_networks()
    path = Path(tempfile.mkdtemp(prefix="sbx-egress-", dir="/tmp"))
    its = Daemon(path)
    yield its
    async with its.egress() as last:
        left = await last.sweep([])
        await last.end()
    assert link.sandboxes(its.instance) == []
    assert left == []
    shutil.rmtree(path)


async def tcp(guest: Guest, address: str, port: int) -> str:
    return await anyio.to_thread.run_sync(guest.tcp, address, port)


async def udp(guest: Guest, address: str, port: int) -> str:
    return await anyio.to_thread.run_sync(guest.udp, address, port)


async def until(is_so: Callable[[], bool], timeout_s: float = 20.0) -> None:
    with anyio.fail_after(timeout_s):
        while not is_so():  # noqa: ASYNC110 (another process is looked at)
            await anyio.sleep(0.02)


def test_nft_is_the_systems_own_whatever_path_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_networks()
    ran = tmp_path / "ran"
    for name in nft.PROGRAMS:
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {ran}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for path in ("", ".", str(tmp_path)):
        monkeypatch.setenv("PATH", path)
        assert network.missing() == []
        nft.apply("list tables\n")
    assert not ran.exists()


def test_nft_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nft, "DIRECTORIES", "/nonexistent")
    assert network.missing()[:2] == ["the program nft is not installed", "the program nsenter is not installed"]
    with pytest.raises(nft.NftError, match="nft is not installed"):
        nft.apply("")


def test_nothing_is_missing_where_these_tests_run() -> None:
    need_networks()
    assert network.missing() == []


async def test_from_the_tap_to_egress_and_back(daemon: Daemon) -> None:
    sandbox = new_sandbox()
    async with daemon.egress() as its, daemon.opened(its, sandbox) as guest:
        assert await tcp(guest, "203.0.113.5", 443) == "203.0.113.5:443 allowlist"
        assert await udp(guest, "172.16.0.1", 53) == "re:hello"
        assert await tcp(guest, "203.0.113.5", 22) == "ConnectionRefusedError"
        assert daemon.told()[0]["policy"] == ALLOWLIST.as_json()
        await until(lambda: [event.sandbox for event in daemon.events] == [sandbox])
        assert await its.report(sandbox) == [{"id": "abc", "name": sandbox}]
        assert daemon.names(sandbox).read_text().startswith("added by")
        assert oct(daemon.names(sandbox).stat().st_mode & 0o777) == "0o600"


async def test_what_the_guest_is_told(daemon: Daemon) -> None:
    sandbox = new_sandbox()
    async with daemon.egress() as its:
        made = await its.open(sandbox, ALLOWLIST, daemon.names(sandbox))
        assert made.guest == GuestNetwork("172.16.0.2/30", "172.16.0.1", "172.16.0.1", "06:00:ac:10:00:02", 1500)
        made.close_tap()
        await its.close(sandbox)
        await its.close(sandbox)
        assert await its.report(sandbox) == []


async def test_two_sandboxes_have_the_same_addresses_and_never_meet(daemon: Daemon) -> None:
    one, other = new_sandbox(), new_sandbox()
    async with (
        daemon.egress() as its,
        daemon.opened(its, one) as first,
        daemon.opened(its, other, OPEN) as second,
    ):
        assert await tcp(first, "203.0.113.5", 443) == "203.0.113.5:443 allowlist"
        assert await tcp(second, "203.0.113.5", 443) == "203.0.113.5:443 open"
        assert {event.sandbox for event in daemon.events} <= {one, other}


async def test_an_update_reaches_rules_and_egress(daemon: Daemon) -> None:
    sandbox = new_sandbox()
    async with daemon.egress() as its, daemon.opened(its, sandbox) as guest:
        assert await tcp(guest, "203.0.113.5", 22) == "ConnectionRefusedError"
        await its.update(sandbox, OPEN)
        assert await tcp(guest, "203.0.113.5", 22) == "203.0.113.5:22 open"
        await its.update(sandbox, ALLOWLIST)
        assert await tcp(guest, "203.0.113.5", 22) == "ConnectionRefusedError"
        assert await tcp(guest, "203.0.113.5", 443) == "203.0.113.5:443 allowlist"


async def test_none_takes_the_link_down_and_there_is_no_way_back(daemon: Daemon) -> None:
    sandbox = new_sandbox()
    async with daemon.egress() as its, daemon.opened(its, sandbox, OPEN) as guest:
        assert await tcp(guest, "203.0.113.5", 443) == "203.0.113.5:443 open"
        await its.update(sandbox, NONE)
        assert await tcp(guest, "203.0.113.5", 443) in ("TimeoutError", "OSError")
        assert daemon.told()[-1]["policy"] == NONE.as_json()
        with pytest.raises(EgressError, match="given up its network"):
            await its.update(sandbox, ALLOWLIST)
        await its.update(sandbox, NONE)


async def test_a_sandbox_without_a_network_is_not_opened(daemon: Daemon) -> None:
    async with daemon.egress() as its:
        with pytest.raises(ValueError, match="has no link"):
            await its.open(new_sandbox(), NONE, daemon.directory / "names")
        with pytest.raises(EgressError, match="has no network"):
            await its.update(new_sandbox(), ALLOWLIST)


def no_names(daemon: Daemon, sandbox: str) -> None:
    daemon.names(sandbox).mkdir()


def egress_refuses(daemon: Daemon, sandbox: str) -> None:
    (daemon.directory / "egress").mkdir(exist_ok=True)
    (daemon.directory / "egress" / "refuse").touch()


@pytest.mark.parametrize(
    ("spoil", "step"),
    [(no_names, "the names"), (egress_refuses, "not today")],
    ids=["names that cannot be opened", "egress refuses"],
)
async def test_an_open_that_fails_leaves_nothing(
    daemon: Daemon, spoil: Callable[[Daemon, str], None], step: str
) -> None:
    sandbox = new_sandbox()
    before = len(os.listdir("/proc/self/fd"))
    async with daemon.egress() as its:
        await its.sweep([])
        spoil(daemon, sandbox)
        with pytest.raises(EgressError, match=step):
            await its.open(sandbox, ALLOWLIST, daemon.names(sandbox))
        assert link.sandboxes(daemon.instance) == []
        # Nothing is remembered of it either: the same sandbox can be tried again.
        with suppress(OSError):
            daemon.names(sandbox).rmdir()
        (daemon.directory / "egress" / "refuse").unlink(missing_ok=True)
        async with daemon.opened(its, sandbox) as guest:
            assert await tcp(guest, "203.0.113.5", 443) == "203.0.113.5:443 allowlist"
    assert len(os.listdir("/proc/self/fd")) <= before + 2


async def test_a_namespace_of_that_name_that_is_somebody_elses_stays(daemon: Daemon) -> None:
    sandbox = new_sandbox()
    await anyio.run_process(["ip", "netns", "add", daemon.plan(sandbox).namespace])
    path = f"{plan.NAMESPACES}/{daemon.plan(sandbox).namespace}"
    before = os.stat(path).st_ino
    async with daemon.egress() as its:
        with pytest.raises(EgressError, match="is there already"):
            await its.open(sandbox, ALLOWLIST, daemon.names(sandbox))
        assert os.stat(path).st_ino == before
    await anyio.run_process(["ip", "netns", "del", daemon.plan(sandbox).namespace])


async def test_a_killed_egress_comes_back_with_the_newest_policies(daemon: Daemon) -> None:
    sandbox, other = new_sandbox(), new_sandbox()
    async with (
        daemon.egress() as its,
        daemon.opened(its, sandbox) as guest,
        daemon.opened(its, other, OPEN) as second,
    ):
        await its.update(sandbox, OPEN)
        for turn in range(counts(3, 50)):
            daemon.kill()
            # Until it is back nothing answers; then the same does.
            policy = ALLOWLIST if turn % 2 == 0 else OPEN
            await its.update(sandbox, policy)
            assert await tcp(guest, "203.0.113.5", 443) == f"203.0.113.5:443 {policy.mode.value}"
            assert await tcp(second, "203.0.113.5", 22) == "203.0.113.5:22 open"
        assert daemon.names(sandbox).read_text().count("added by") == counts(4, 51)


async def test_while_egress_is_gone_connections_are_refused_at_once(daemon: Daemon) -> None:
    sandbox = new_sandbox()
    async with daemon.egress() as its, daemon.opened(its, sandbox) as guest:
        assert await tcp(guest, "203.0.113.5", 443) == "203.0.113.5:443 allowlist"
        daemon.kill()
        assert await tcp(guest, "203.0.113.5", 443) in (
            "ConnectionRefusedError", "ConnectionResetError", "203.0.113.5:443 allowlist"
        )  # fmt: skip
        assert await tcp(guest, "203.0.113.5", 22) == "ConnectionRefusedError"


async def test_after_a_restart_it_is_taken_back_with_the_policy_of_then(daemon: Daemon) -> None:
    sandbox = new_sandbox()
    async with daemon.egress() as its:
        made = await its.open(sandbox, OPEN, daemon.names(sandbox))
    guest = Guest(daemon.plan(sandbox), made.tap_fd)
    made.close_tap()
    # While no daemon runs it goes on.
    assert await tcp(guest, "203.0.113.5", 22) == "203.0.113.5:22 open"
    async with daemon.egress() as its:
        assert await its.adopt(sandbox, ALLOWLIST, daemon.names(sandbox))
        assert await its.sweep([sandbox]) == []
        assert await tcp(guest, "203.0.113.5", 22) == "ConnectionRefusedError"
        assert await tcp(guest, "203.0.113.5", 443) == "203.0.113.5:443 allowlist"
        assert [told["do"] for told in daemon.told()].count("add") == 1
        assert daemon.told()[-1]["policy"] == ALLOWLIST.as_json()
    # Egress died too meanwhile, and somebody flushed the rules.
    daemon.kill()
    link.inside(daemon.plan(sandbox), lambda: nft.apply("flush ruleset"))
    async with daemon.egress() as its:
        assert await its.adopt(sandbox, OPEN, daemon.names(sandbox))
        assert await tcp(guest, "203.0.113.5", 22) == "203.0.113.5:22 open"
        assert await its.adopt(sandbox, NONE, daemon.names(sandbox))
        assert await tcp(guest, "203.0.113.5", 22) in ("TimeoutError", "OSError")
        await anyio.to_thread.run_sync(guest.close)
        await its.close(sandbox)
        assert not await its.adopt(sandbox, OPEN, daemon.names(sandbox))


async def test_what_belongs_to_nobody_is_swept_and_what_is_somebody_elses_is_not(daemon: Daemon) -> None:
    kept, lost, foreign = new_sandbox(), new_sandbox(), plan.of(new_instance(), new_sandbox())
    taps = [link.make(foreign)]
    try:
        async with daemon.egress() as its:
            for sandbox in (kept, lost):
                taps.append((await its.open(sandbox, ALLOWLIST, daemon.names(sandbox))).tap_fd)
        # A daemon that was killed while it made another one.
        half = new_sandbox()
        taps.append(link.make(daemon.plan(half)))
        async with daemon.egress() as its:
            assert await its.sweep([kept]) == sorted([lost, half])
            assert link.sandboxes(daemon.instance) == [kept]
            assert link.exists(foreign)
            assert daemon.told()[-1] | {"seq": 0, "pid": 0} == {"do": "remove", "sandbox": lost, "seq": 0, "pid": 0}
            await its.close(kept)
    finally:
        link.delete(foreign)
        for tap in taps:
            os.close(tap)


async def test_sixteen_at_once_and_nothing_is_left(daemon: Daemon) -> None:
    async with daemon.egress() as its:
        for _ in range(counts(2, 5)):
            taps: dict[str, int] = {}

            async def open_one(sandbox: str, taps: dict[str, int] = taps) -> None:
                taps[sandbox] = (await its.open(sandbox, ALLOWLIST, daemon.names(sandbox))).tap_fd

            async with anyio.create_task_group() as tasks:
                for _ in range(16):
                    tasks.start_soon(open_one, new_sandbox())
            assert link.sandboxes(daemon.instance) == sorted(taps)
            async with anyio.create_task_group() as tasks:
                for sandbox in taps:
                    tasks.start_soon(its.close, sandbox)
            for tap in taps.values():
                os.close(tap)
            assert link.sandboxes(daemon.instance) == []


def question(name: str) -> bytes:
    return bytes(DNSRecord.question(name).pack())


def resolve(guest: Guest, name: str) -> tuple[int, list[str]]:
    """The status of the answer and the addresses in it."""

    def ask() -> DNSRecord:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(5)
            sock.connect(("172.16.0.1", 53))
            sock.send(question(name))
            return DNSRecord.parse(sock.recv(4096))

    answer = guest.run(ask)
    return answer.header.rcode, [str(record.rdata) for record in answer.rr]


def http(guest: Guest, host: str) -> str:
    """The first line that comes back on port 80."""

    def ask() -> str:
        with socket.create_connection(("203.0.113.5", 80), 5) as connection:
            connection.settimeout(10)
            connection.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            return connection.recv(4096).decode().partition("\r\n")[0]

    return guest.run(ask)


async def test_with_the_real_processes(daemon: Daemon) -> None:
    """Names are answered and refused, by processes that hold no power, again after they were killed."""
    real, sandbox = Programs(), new_sandbox()
    mark = f"/sandboxd/{daemon.instance}/egress/egress"
    own = Egress(daemon.directory, daemon.instance, UIDS, daemon.events.append, daemon.log.append, real)
    try:
        async with own, daemon.opened(own, sandbox) as guest:
            found = await anyio.to_thread.run_sync(resolve, guest, "allowed.test")
            assert found == (0, ["198.18.0.1"])
            assert await anyio.to_thread.run_sync(resolve, guest, "other.test") == (3, [])
            assert await anyio.to_thread.run_sync(http, guest, "other.test") == "HTTP/1.1 403 Forbidden"
            await until(lambda: {event.name for event in daemon.events} == {"other.test"})
            assert {row["name"] for row in await own.report(sandbox)} == {"other.test"}
            await own.update(sandbox, Policy(ALLOWLIST.mode, allow=("other.test",)))
            assert await anyio.to_thread.run_sync(resolve, guest, "other.test") == (0, ["198.18.0.2"])
            assert await anyio.to_thread.run_sync(resolve, guest, "allowed.test") == (3, [])
            for pidfd in supervisor.marked(real.egress, mark, UIDS[0]):
                assert os.stat(f"/proc/{pid_of(pidfd)}").st_uid == UIDS[0]
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)
            await own.update(sandbox, Policy(ALLOWLIST.mode, allow=("allowed.test", "other.test")))
            assert await anyio.to_thread.run_sync(resolve, guest, "other.test") == (0, ["198.18.0.2"])
            assert await anyio.to_thread.run_sync(resolve, guest, "allowed.test") == found
    finally:
        async with own:
            await own.end()
    assert list(supervisor.marked(real.egress, mark, UIDS[0])) == []


async def test_an_open_that_is_given_up_leaves_nothing(daemon: Daemon) -> None:
    async with daemon.egress() as its:
        await its.sweep([])
        given_up = 0
        for after_ms in (1, 5, 10, 15, 20, 30):
            sandbox = new_sandbox()
            with anyio.move_on_after(after_ms / 1000) as scope:
                os.close((await its.open(sandbox, ALLOWLIST, daemon.names(sandbox))).tap_fd)
            if scope.cancelled_caught:
                given_up += 1
            else:
                await its.close(sandbox)
            assert link.sandboxes(daemon.instance) == []
        assert given_up > 1
