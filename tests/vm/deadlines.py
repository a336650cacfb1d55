"""A call of Firecracker's API that is not answered fails a test soon; the calls around it keep their time, since a busy
machine can be slow to answer any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sandboxd.vm import firecracker
from sandboxd.vm.firecracker import Request

SOON_S = 0.3


def soon(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """For `step`, a method and a path, wherever it is among the calls of a boot, a snapshot or its restore."""
    for name in ("requests", "snapshot_requests", "load_requests"):
        monkeypatch.setattr(firecracker, name, _hurried(getattr(firecracker, name), step))


def _hurried(calls: Callable[..., tuple[Request, ...]], step: str) -> Callable[..., tuple[Request, ...]]:
    def found(*asked: object) -> tuple[Request, ...]:
        return tuple(replace(call, deadline_s=SOON_S) if call.step == step else call for call in calls(*asked))

    return found
