"""What is taken back after a restart, from a guest that goes away in the middle of being asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from guestd import protocol
from sandboxd.audit import Audit
from sandboxd.guest import GuestGone, Session
from sandboxd.lifecycle import State
from sandboxd.processes import Processes
from sandboxd.store import Network, ProcessRecord, SandboxRecord, Store


class Leaving:
    """Knows the sandbox's process and a stray one; is gone when it is first asked about the stray one."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def sessions(self) -> tuple[protocol.SessionState, ...]:
        return tuple(protocol.SessionState(name, True, None, 0, 0) for name in ("mine", "stray"))

    async def attach(self, session: str, *_: int, frame: bytes = b"") -> Session:
        self.asked.append(session)
        raise GuestGone("gone")

    async def forget(self, session: str) -> None:
        raise AssertionError(session)


def test_no_process_is_followed_twice(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.sqlite")
    store.put(SandboxRecord("sbx_1", "", State.RUNNING, "i", 1, 1, 2, (), Network("none"), 1.0, 3))
    store.put_process(ProcessRecord("sbx_1", 1, ("a",), False, "mine", 2.5))
    guest = Leaving()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            processes = Processes("sbx_1", tmp_path / "output", store, Audit(None), tasks)
            for _ in range(3):
                with pytest.raises(GuestGone):
                    await processes.take_back(cast(Any, guest))
            await anyio.sleep(0.05)
            assert guest.asked == ["stray"] * 3
            tasks.cancel_scope.cancel()

    anyio.run(main)
