"""What is told of a start that failed: what the programs said themselves."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from sandboxd.errors import BootFailed
from sandboxd.vm import firecracker_start
from sandboxd.vm.machine import Drive, MachineSpec
from tests.vm import starting

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the jailer needs root")


def test_the_last_line_of_a_jailer_that_fails_is_in_the_error_and_the_rest_in_its_console(tmp_path: Path) -> None:
    for name in ("firecracker", "jailer"):
        (tmp_path / name).write_text("#!/bin/sh\necho first words >&2\necho this host is too old >&2\nexit 3\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "version").write_text("1.16.1")
    for name in ("kernel", "initramfs", "scratch"):
        (tmp_path / name).write_bytes(bytes(4096))
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    drives = (Drive(tmp_path / "scratch", False),)
    spec = MachineSpec("box_1", 1, 256, tmp_path / "kernel", tmp_path / "initramfs", drives, own, 979_900)
    with pytest.raises(BootFailed, match=r"starting the jailer: .*: this host is too old \(") as caught:
        anyio.run(firecracker_start.start, spec, starting.firecracker_tools(f"w{os.getpid()}", tmp_path))
    assert caught.value.console_tail.splitlines() == [b"first words", b"this host is too old"]
    assert os.listdir(own) == []
