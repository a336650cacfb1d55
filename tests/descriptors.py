"""A process that has hardly a descriptor left, for what must not take that for an answer."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def few_left(number: int) -> Iterator[None]:
    """Inside, no more than `number` can be opened at a time; whatever opens another fails with EMFILE."""
    taken = [os.dup(2) for _ in range(number + 1)]
    for fd in taken:
        os.close(fd)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
