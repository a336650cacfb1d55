"""Work on a sandbox while something is broken under it: what was acknowledged, and how long every caller waited.

Its callers write files, run commands and follow a process's output without pause, each in a thread. Every call ends
with an answer or an error; which of the two, and after how long, is kept. `settle` ends the work, `verify` looks for
what was acknowledged in the sandbox itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sandboxd.client import BadAnswer, Client, Unreachable
from sandboxd.errors import ApiError

BOUND_S = 150.0
"""For one call, however it ends: a guest is given up after a minute of silence, and test machines are busy."""
HOME = "/workspace"


@dataclass(frozen=True)
class Call:
    what: str
    took_s: float
    fault: str
    """Empty for an answer."""


class Work:
    """On one sandbox, from the moment it is entered."""

    def __init__(self, client: Callable[[], Client], sandbox: str, name: str) -> None:
        self.calls: list[Call] = []
        self.written: list[int] = []
        self._client, self._sandbox, self._name = client, sandbox, name
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Work:
        for act in (self._write, self._run, self._hold):
            self._threads.append(threading.Thread(target=self._repeat, args=(act,), daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def wait_busy(self) -> None:
        """Until each kind of call has been made."""
        deadline = time.monotonic() + BOUND_S
        while not (self.written and any(call.what == "_run" for call in self.calls)):
            assert time.monotonic() < deadline, self.calls
            time.sleep(0.05)

    def settle(self) -> None:
        """Ends the work. Every call has ended in bounded time, in one way or the other."""
        self._over.set()
        deadline = time.monotonic() + BOUND_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a caller hears nothing"
        slow = [call for call in self.calls if call.took_s > BOUND_S]
        assert not slow, slow

    def verify(self) -> None:
        """Everything that was acknowledged is in the sandbox, whole."""
        client = self._client()
        for number in self.written:
            assert client.read_file(self._sandbox, self._path(number)) == self._text(number)

    def _repeat(self, act: Callable[[Client], None]) -> None:
        while not self._over.is_set():
            started, fault = time.monotonic(), ""
            try:
                act(self._client())
            except (ApiError, Unreachable, BadAnswer, OSError) as error:
                fault = f"{type(error).__name__}: {error}"
                self._over.wait(0.2)
            self.calls.append(Call(act.__name__, time.monotonic() - started, fault))

    def _write(self, client: Client) -> None:
        number = len(self.written)
        client.write_file(self._sandbox, self._path(number), self._text(number))
        self.written.append(number)
        self._over.wait(0.05)

    def _run(self, client: Client) -> None:
        result = client.run(self._sandbox, ["sh", "-c", "head -c 100000 /dev/zero; echo end >&2"])
        assert len(result.stdout) == 100000 and result.stderr == b"end\n"

    def _hold(self, client: Client) -> None:
        """Still under way whenever something breaks."""
        client.run(self._sandbox, ["sleep", "3"])

    def _path(self, number: int) -> str:
        return f"{HOME}/{self._name}-{number}"

    def _text(self, number: int) -> bytes:
        return b"%d " % number * 2000
