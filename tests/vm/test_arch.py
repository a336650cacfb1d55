"""Which processors there are programs and filters for."""

from __future__ import annotations

import platform

import pytest

from sandboxd.errors import SetupError
from sandboxd.vm import arch
from sandboxd.vm.arch import Arch


@pytest.mark.parametrize("known", Arch)
def test_a_program_is_confined_by_the_filter_of_its_own_processor(
    known: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(platform, "machine", lambda: known.value)
    assert arch.here() is known


def test_one_without_a_filter_confines_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(SetupError, match="on riscv64: there is no filter of system calls"):
        arch.here()


def test_guests_are_of_x86_64_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    arch.require()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(SetupError, match="this machine is aarch64"):
        arch.require()
