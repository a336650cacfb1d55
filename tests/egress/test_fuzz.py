"""The fuzzing targets, briefly: their seeds, changed seeds, and bytes out of the blue. `make fuzz` has more time."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import counts
from tests.egress.fuzz.__main__ import TARGETS, mutated


def target(name: str) -> ModuleType:
    return importlib.import_module(f"tests.egress.fuzz.{name}")


def test_every_target_is_found() -> None:
    assert {"client_hello", "http_head", "connection"} <= set(TARGETS)
    assert len(TARGETS) == len(list((Path(__file__).parent / "fuzz").glob("[a-z]*.py")))


@pytest.mark.parametrize("name", TARGETS)
def test_seeds(name: str) -> None:
    for seed in target(name).SEEDS:
        target(name).one(seed)


@pytest.mark.parametrize("name", TARGETS)
def test_changed_seeds(name: str) -> None:
    module = target(name)

    @settings(max_examples=counts(150, 20_000), deadline=None, database=None)
    @given(st.sampled_from(module.SEEDS), st.integers(0, 2**32))
    def holds(seed: bytes, number: int) -> None:
        module.one(mutated(seed, module.SEEDS, random.Random(number)))

    holds()


@pytest.mark.parametrize("name", TARGETS)
def test_bytes_out_of_the_blue(name: str) -> None:
    module = target(name)

    @settings(max_examples=counts(100, 5_000), deadline=None, database=None)
    @given(st.binary(max_size=600))
    def holds(data: bytes) -> None:
        module.one(data)

    holds()
