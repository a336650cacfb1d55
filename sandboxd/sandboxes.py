"""The sandboxes of this daemon: each with what belongs to it, found by id or name, and in use while somebody asks its
guest something.

In: records, names from clients, errors of guests. Out: `Live`s, and the API's errors. A name belongs to one sandbox
that has not ended; one that has is found by it as long as no other has taken it. What a guest says reaches a client
only as one clean line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import anyio.abc

from sandboxd.audit import Audit
from sandboxd.errors import ApiError, Conflict, GuestProtocolError, Internal, InvalidRequest, NotFound
from sandboxd.guest import Download, Guest, GuestGone, GuestRefused
from sandboxd.heartbeat import Heartbeat
from sandboxd.lifecycle import State
from sandboxd.places import Places
from sandboxd.pools import Waiting
from sandboxd.processes import Processes
from sandboxd.store import Mount, SandboxRecord, Store, Unreadable
from sandboxd.termsafe import first_line
from sandboxd.uids import Claim
from sandboxd.usage import Meter
from sandboxd.vm.machine import Machine
from sandboxd.volumes import Use

EXIT_NOTICE_S = 1.0
"""How long a lost connection waits for the news that the whole machine is gone."""
MAX_TERMINATED = 100
MESSAGE_CHARS = 500
REFUSALS: dict[str, type[ApiError]] = {
    "not_found": NotFound,
    "is_dir": InvalidRequest,
    "not_dir": InvalidRequest,
    "no_such_command": InvalidRequest,
    "no_such_cwd": InvalidRequest,
    "bad_request": InvalidRequest,
    "too_large": InvalidRequest,
    "not_empty": Conflict,
    "read_only": Conflict,
    "nothing_new": Conflict,
    "disk_full": Conflict,
    "bad_volume": Conflict,
    "internal": Internal,
}
"""The guest protocol's codes as the API's errors."""

log = logging.getLogger("sandboxd")


class Live:
    """A sandbox and what belongs to it. `machine` is there while it runs; `waited` is what it was claimed from."""

    def __init__(self, record: SandboxRecord, processes: Processes) -> None:
        self.record = record
        self.order = record.created_at, record.id
        self.encoded: tuple[SandboxRecord, bytes] | None = None
        """What a list says of it, and the record that was made from: made anew when that is another."""
        self.processes = processes
        self.machine: Machine | None = None
        self.claim: Claim | None = None
        self.changing = anyio.Lock()
        self.creating: anyio.CancelScope | None = None
        self.gone = anyio.Event()
        self.heartbeat = Heartbeat()
        self.waited: Waiting | None = None
        self.meter = Meter()
        self.requests = 0
        self.active_at = time.monotonic()

    @property
    def guest(self) -> Guest:
        assert self.machine is not None
        return Guest(self.machine.vsock_path, self.record.guest_version, self.heartbeat.waiters)

    @property
    def ended(self) -> bool:
        """By its record; `gone` is set when nothing of it runs any more."""
        return self.record.state is State.TERMINATED

    @property
    def age_s(self) -> float:
        record = self.record
        return boot_s() - record.created_boot_s if record.created_boot_s else time.time() - record.created_at

    def overdue(self) -> str:
        """Why its time is over; empty where it is not."""
        record = self.record
        if record.lifetime_secs and self.age_s >= record.lifetime_secs:
            return "lifetime"
        if self.requests or self.processes.running:
            self.active_at = time.monotonic()
        quiet = time.monotonic() - self.active_at
        timeout = record.idle_timeout_secs if record.state is State.RUNNING else 0
        return "idle" if timeout and quiet >= timeout else ""


class Held:
    """A guest's bytes on their way to a client; the sandbox is in use until they are closed."""

    def __init__(self, download: Download, using: AsyncExitStack) -> None:
        self.size = download.size
        self._download, self._using = download, using

    async def receive(self) -> bytes:
        return await self._download.receive()

    async def aclose(self) -> None:
        try:
            await self._download.aclose()
        finally:
            await self._using.aclose()


class Sandboxes:
    """All of one daemon's, those that have ended for a while. `left_alone` are of another version, which alone can
    read their records. What their processes do beside requests runs in `tasks`."""

    def __init__(self, places: Places, store: Store, audit: Audit, tasks: anyio.abc.TaskGroup) -> None:
        self.left_alone: list[Unreadable] = []
        self._places, self._store, self._audit, self._tasks = places, store, audit, tasks
        self._known: dict[str, Live] = {}

    def __iter__(self) -> Iterator[Live]:
        """A copy, so that one may be added or forgotten meanwhile."""
        return iter(list(self._known.values()))

    def add(self, record: SandboxRecord) -> Live:
        output = self._places.outputs / record.id
        live = Live(record, Processes(record.id, output, self._store, self._audit, self._tasks))
        self._known[record.id] = live
        return live

    def forget(self, live: Live) -> None:
        """One that never was, with its record."""
        del self._known[live.record.id]
        self._store.forget(live.record.id)

    def forget_old(self) -> None:
        """The oldest of those that have ended, with their output and disks."""
        ended = sorted((live for live in self if live.ended), key=lambda live: live.record.created_at, reverse=True)
        for live in ended[MAX_TERMINATED:]:
            if live.gone.is_set():
                live.processes.remove()
                self._places.disk(live.record.id).unlink(missing_ok=True)
                self.forget(live)

    def living(self) -> list[Live]:
        return [live for live in self if not live.ended]

    def volume_uses(self) -> list[Use]:
        """Until nothing of a sandbox runs any more, whatever its record says already."""
        uses = [Use(one.id, 0.0, Mount(name, "", False)) for one in self.left_alone for name in one.volumes]
        for live in self:
            if not live.gone.is_set():
                uses += [Use(live.record.id, live.record.created_at, mount) for mount in live.record.volumes]
        return uses

    def find(self, ref: str) -> Live:
        """By id or name, without touching it."""
        if ref in self._known:
            return self._known[ref]
        if any(ref in (one.id, one.name) for one in self.left_alone):
            raise Conflict("the sandbox belongs to another version of sandboxd: start that version to use it")
        named = [live for live in self if live.record.name == ref and ref]
        if not named:
            raise NotFound("no such sandbox")
        # The live one first, then the newest.
        return max(named, key=lambda one: (not one.ended, one.record.created_at))

    def touched(self, ref: str) -> Live:
        """Which is activity: its idle time begins anew."""
        live = self.find(ref)
        live.active_at = time.monotonic()
        return live

    def require_free(self, name: str) -> None:
        names = [live.record.name for live in self.living()]
        if name and name in (*names, *(one.name for one in self.left_alone)):
            raise Conflict(f"a sandbox named {name} exists")

    @asynccontextmanager
    async def using(self, ref: str) -> AsyncIterator[Live]:
        """A running sandbox, active as long as the block lasts; the guest's errors become the API's."""
        live = self.touched(ref)
        if live.record.state is not State.RUNNING:
            raise Conflict(f"the sandbox is {live.record.state.value}")
        live.requests += 1
        try:
            yield live
        except GuestRefused as no:
            raise refusal(no) from None
        except GuestProtocolError as fault:
            log.warning("%s: %s", live.record.id, fault)
            raise Internal("the sandbox broke the protocol") from None
        except GuestGone as fault:
            # The watcher may not have run yet: what counts is that the machine is gone, not what the record says.
            ended = live.machine is None
            if live.machine is not None:
                with anyio.move_on_after(EXIT_NOTICE_S):
                    await live.machine.wait_exit()
                    ended = True
            if ended or live.record.state is not State.RUNNING:
                raise Conflict("the sandbox has ended") from None
            log.warning("%s: %s", live.record.id, fault)
            raise Internal("the sandbox does not answer") from None
        finally:
            live.requests -= 1
            live.active_at = time.monotonic()

    async def hold(self, ref: str, ask: Callable[[Guest], Awaitable[Download]]) -> tuple[Live, Held]:
        """What a guest was asked for, with the sandbox in use beyond this call."""
        async with AsyncExitStack() as using:
            live = await using.enter_async_context(self.using(ref))
            download = await ask(live.guest)
            return live, Held(download, using.pop_all())


def refusal(no: GuestRefused) -> ApiError:
    if no.code == "internal":
        log.warning("a guest failed: %s", message(no))
        return Internal("the request failed inside the sandbox")
    text = message(no) or no.code.replace("_", " ")
    if no.code == "no_such_cwd" and "cwd" not in text:
        text = f"cwd: {text}"
    return REFUSALS[no.code](text)


def message(no: GuestRefused) -> str:
    """What the guest says of it, fit for a client."""
    return first_line(no.message)[:MESSAGE_CHARS]


def boot_s() -> float:
    """A clock that nobody sets, and that goes on while the host sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
