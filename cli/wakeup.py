"""Signals that become bytes on a descriptor, so that whoever waits for input waits for them too (signal(7))."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def descriptor(caught: Sequence[signal.Signals]) -> Iterator[int]:
    """Yields the numbers of arrived signals, one byte each; within the block none of `caught` has another effect."""
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = {number: signal.signal(number, lambda *_: None) for number in caught}
    old = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield read
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)
