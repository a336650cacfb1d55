"""A sandbox's network, as one thing to open and close.

In: a sandbox's id, its policy, the file of its names. Out: a `Link`, whose tap goes to the machine. Everything it
needs is made in order and undone in reverse: namespace, tap, rules, link, sockets, and egress told. Rules and egress
each let through what their own policy says and a packet needs both, so in whatever order a change reaches them,
nothing passes that both policies forbid. What egress should know is kept here; an egress that starts anew gets it
again, with sockets made anew in the same namespaces.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import anyio
import anyio.abc
import anyio.to_thread

from egress import link, nft, plan, ruleset
from egress.control import Event
from egress.link import LinkError
from egress.nft import NftError
from egress.plan import Plan
from egress.policy import Mode, Policy
from egress.session import EgressError as EgressError
from egress.session import Session, SessionLost
from egress.supervisor import Programs, Supervisor

T = TypeVar("T")

SETTLE_S = 45.0
"""For an egress that is being started anew, with every sandbox of the daemon before this one."""
_WIDTH = {Mode.NONE: 0, Mode.ALLOWLIST: 1, Mode.OPEN: 2}


@dataclass(frozen=True, slots=True)
class GuestNetwork:
    """What the guest is told about its end of the link."""

    address: str
    gateway: str
    resolver: str
    mac: str
    mtu: int


@dataclass(slots=True)
class Link:
    """The tap lasts as long as somebody has it open: the machine, once it has been given the descriptor. A machine that
    opens it by its name, in its namespace, is given it with `leave_tap`; then it lasts as long as the namespace."""

    tap_fd: int
    guest: GuestNetwork
    name: str
    namespace: Path
    _open: bool = True

    def leave_tap(self, uid: int) -> None:
        """To whoever runs as `uid`, and to nobody else. Raises OSError."""
        if self._open:
            link.give(self.tap_fd, uid)
            self.close_tap()

    def close_tap(self) -> None:
        """Ours, once the machine has its own. Idempotent."""
        if self._open:
            self._open = False
            os.close(self.tap_fd)


@dataclass(slots=True)
class _Sandbox:
    plan: Plan
    policy: Policy
    names: Path
    changing: anyio.Lock = field(default_factory=anyio.Lock)


class Egress:
    """The networks of one daemon, whose processes outlive it. Use: `async with`."""

    def __init__(
        self,
        state_dir: Path,
        instance: str,
        uids: tuple[int, int],
        on_event: Callable[[Event], None],
        on_log: Callable[[str], None],
        programs: Programs | None = None,
    ) -> None:
        self._instance = instance
        self._log = on_log
        self._sandboxes: dict[str, _Sandbox] = {}
        self._untold: set[str] = set()
        self._supervisor = Supervisor(
            state_dir / "egress", instance, uids, self._restore, on_event, on_log, programs or Programs()
        )
        self._tasks: anyio.abc.TaskGroup | None = None

    async def __aenter__(self) -> Egress:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._supervisor.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        if isinstance(error, Exception):
            # As it is, not in a group: nothing here has anything to do with it.
            await self._tasks.__aexit__(None, None, None)
            return None
        return await self._tasks.__aexit__(kind, error, trace)

    async def open(self, sandbox_id: str, policy: Policy, names: Path) -> Link:
        """Raises EgressError, with nothing left behind. The tap is the caller's to close."""
        if policy.mode is Mode.NONE:
            raise ValueError("a sandbox without a network has no link")
        its = plan.of(self._instance, sandbox_id)
        if sandbox_id in self._sandboxes:
            raise EgressError(f"{sandbox_id} has a network already")
        sandbox = _Sandbox(its, policy, names)
        async with sandbox.changing, AsyncExitStack() as undo:
            tap = await _step("the namespace", link.make, its)
            # Not earlier: until here the name may be somebody else's.
            undo.push_async_callback(self._undo, sandbox_id, its)
            undo.callback(os.close, tap)
            await self._load(sandbox, policy.mode)
            await _step("the link", link.bring_up, its)
            self._sandboxes[sandbox_id] = sandbox
            await self._tell(sandbox_id, sandbox)
            undo.pop_all()
        return Link(tap, _guest(its), its.interface, Path(plan.NAMESPACES, its.namespace))

    async def adopt(self, sandbox_id: str, policy: Policy, names: Path) -> bool:
        """For a sandbox of an earlier daemon: the same network with `policy`. False where there is none any more."""
        its = plan.of(self._instance, sandbox_id)
        if not await anyio.to_thread.run_sync(link.exists, its):
            return False
        sandbox = self._sandboxes.setdefault(sandbox_id, _Sandbox(its, policy, names))
        async with sandbox.changing:
            sandbox.policy = policy
            if policy.mode is Mode.NONE:
                await _step("the link", link.take_down, its)
            await self._load(sandbox, policy.mode)
            await self._tell(sandbox_id, sandbox)
        return True

    async def update(self, sandbox_id: str, policy: Policy) -> None:
        """In force when it returns; what the new policy forbids is cut. Raises EgressError, and then the policy is
        the one before, or a tighter one."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None:
            raise EgressError(f"{sandbox_id} has no network")
        # Half a change is none of the two policies: what was begun is finished, or taken back.
        with anyio.CancelScope(shield=True):
            async with sandbox.changing:
                await self._change(sandbox_id, sandbox, policy)

    async def close(self, sandbox_id: str) -> None:
        """Whatever is there of it. Also for one that was never opened."""
        its = plan.of(self._instance, sandbox_id)
        sandbox = self._sandboxes.get(sandbox_id)
        with anyio.CancelScope(shield=True):
            if sandbox is None:
                await self._undo(sandbox_id, its)
                return
            async with sandbox.changing:
                await self._undo(sandbox_id, its)

    async def report(self, sandbox_id: str) -> list[dict[str, Any]]:
        """Rows of `control.ROW`. Empty for a sandbox without a network."""
        if sandbox_id not in self._sandboxes:
            return []
        return await self._with_session("the report", lambda session: session.report(sandbox_id))

    async def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes to and from each guest, by the host's end of its link; none for a link that is gone."""
        plans = {sandbox_id: sandbox.plan for sandbox_id, sandbox in self._sandboxes.items()}
        return await _step("the counters", link.traffic, plans) if plans else {}

    async def sweep(self, known: Collection[str]) -> list[str]:
        """Removes what belongs to no sandbox of `known`, and says whose it was. Other instances' is left alone."""
        left = set(await anyio.to_thread.run_sync(link.sandboxes, self._instance))
        with suppress(EgressError):
            left |= await self._with_session("the sandboxes", _known)
        swept = sorted(left - set(known))
        for sandbox_id in swept:
            await self.close(sandbox_id)
        return swept

    async def end(self) -> None:
        """Ends the processes. Networks that are still open lead nowhere from then on."""
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await self._supervisor.end()

    async def _change(self, sandbox_id: str, sandbox: _Sandbox, policy: Policy) -> None:
        before = sandbox.policy
        if before.mode is Mode.NONE and policy.mode is not Mode.NONE:
            raise EgressError(f"{sandbox_id} has given up its network and cannot have it back")
        if policy.mode is Mode.NONE:
            await _step("the link", link.take_down, sandbox.plan)
        wider = _WIDTH[policy.mode] > _WIDTH[before.mode]
        try:
            if not wider:
                await self._load(sandbox, policy.mode)
            sandbox.policy = policy
            await self._tell(sandbox_id, sandbox)
            if wider:
                await self._load(sandbox, policy.mode)
        except EgressError:
            if policy.mode is not Mode.NONE:
                sandbox.policy = before
            raise

    async def _load(self, sandbox: _Sandbox, mode: Mode) -> None:
        await _step("the rules", nft.apply, ruleset.text(sandbox.plan, mode), sandbox.plan.namespace)
        await _step("the rules", link.settle, sandbox.plan)

    async def _tell(self, sandbox_id: str, sandbox: _Sandbox) -> None:
        await self._with_session("egress", lambda session: _give(session, sandbox_id, sandbox))

    async def _restore(self, session: Session) -> None:
        for sandbox_id in self._untold & session.sandboxes:
            await session.remove(sandbox_id)
        self._untold.clear()
        for sandbox_id, sandbox in list(self._sandboxes.items()):
            if self._sandboxes.get(sandbox_id) is sandbox and sandbox_id not in session.sandboxes:
                try:
                    await _give(session, sandbox_id, sandbox)
                except EgressError as fault:
                    self._log(f"{sandbox_id} has no network until it is changed or closed: {fault}")

    async def _undo(self, sandbox_id: str, its: Plan) -> None:
        """The reverse of `open`. The namespace goes even if egress cannot be told, and with it every way in."""
        with anyio.CancelScope(shield=True):
            self._sandboxes.pop(sandbox_id, None)
            session = self._supervisor.current
            try:
                if session is None:
                    raise SessionLost
                await session.remove(sandbox_id)
            except SessionLost:
                self._untold.add(sandbox_id)
            await _step("the namespace", link.delete, its)

    async def _with_session(self, step: str, call: Callable[[Session], Awaitable[T]]) -> T:
        """Again with the next process where one goes away meanwhile."""
        with anyio.move_on_after(SETTLE_S):
            while True:
                try:
                    return await call(await self._supervisor.session())
                except SessionLost:
                    continue
        raise EgressError(f"{step}: egress does not run")


async def _give(session: Session, sandbox_id: str, sandbox: _Sandbox) -> None:
    """Raises EgressError or SessionLost."""
    if sandbox_id in session.sandboxes:
        await session.update(sandbox_id, sandbox.policy)
        return
    made = await _step("the sockets", link.sockets, sandbox.plan)
    try:
        names = await _step("the names", _open_names, sandbox.names)
        try:
            await session.add(sandbox_id, sandbox.policy, [made.proxy, made.dns_udp, made.dns_tcp, names])
        finally:
            os.close(names)
    finally:
        made.close()


def missing() -> list[str]:
    """What a root daemon lacks for networks, as sentences: found by making one and letting go of it. Blocking."""
    lacks = [f"the program {name} is not installed" for name in nft.missing()]
    if not Path("/dev/net/tun").exists():
        lacks.append("/dev/net/tun is not there: the kernel lacks tun")
    if lacks:
        return lacks
    trial = plan.of("0" * 12, f"sbx_{'0' * 16}")
    try:
        link.try_out(trial, lambda: nft.apply(ruleset.text(trial, Mode.ALLOWLIST)))
    except (OSError, LinkError, NftError) as fault:
        return [f"no network can be made for a sandbox: {fault}"]
    return []


async def _known(session: Session) -> set[str]:
    return set(session.sandboxes)


def _open_names(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _guest(its: Plan) -> GuestNetwork:
    return GuestNetwork(f"{its.guest_address}/{its.prefix}", its.host_address, its.host_address, its.guest_mac, its.mtu)


async def _step(name: str, call: Callable[..., T], *arguments: object) -> T:
    """`call` in a thread, its failure as an EgressError that names the step."""
    try:
        return await anyio.to_thread.run_sync(call, *arguments)
    except (OSError, LinkError, NftError) as fault:
        raise EgressError(f"{name}: {fault}") from None
