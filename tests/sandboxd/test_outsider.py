"""A client that nobody made from our sources: another language, the API's specification, nothing of ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.daemon import Daemon
from tests.sandboxd.rig import Rig

CLIENT = Path(__file__).with_name("outsider.pl")
STEPS = 10


def goes_through(socket: Path) -> None:
    done = subprocess.run(["perl", str(CLIENT), str(socket)], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{STEPS} steps passed\n"


def test_it_goes_through_the_api(own: Rig) -> None:
    own.call("DELETE", f"/v1/sandboxes/{own.create()}")     # the images are there
    goes_through(own.socket)


@pytest.mark.vm
def test_and_with_a_real_machine(daemon: Daemon) -> None:
    goes_through(daemon.socket)
