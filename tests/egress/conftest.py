"""The whole path, for the modules that want it: one small internet, one pair of processes for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.egress.rig import Rig, open_rig
from tests.world.world import missing, open_world


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    if reason := missing():
        pytest.skip(reason)
    with open_world() as world, open_rig(world) as made:
        yield made
