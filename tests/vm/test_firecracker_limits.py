"""What the control group of a machine under Firecracker lets all of its VMM use."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandboxd.vm import firecracker_start
from sandboxd.vm.cgroups import Limits
from sandboxd.vm.machine import MachineSpec


@pytest.mark.parametrize(
    ("cpus", "memory_mb", "limits"),
    [(1, 256, Limits(2, 512 << 20, 51)), (8, 16384, Limits(9, (16384 + 256) << 20, 58))],
)
def test_a_vmm_has_what_its_guest_has_and_a_bounded_rest(cpus: int, memory_mb: int, limits: Limits) -> None:
    spec = MachineSpec("box_1", cpus, memory_mb, Path("kernel"), Path("initramfs"), (), Path("own"), 1)
    assert firecracker_start.limits(spec) == limits
