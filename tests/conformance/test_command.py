"""`sandbox-cli conformance`, as a person runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.conformance.live import ENVIRONMENT, PLUGINS
from tests.daemon import BIN
from tests.sandboxd.rig import Rig


def test_the_command_runs_the_suite_against_its_context(tmp_path: Path, short_tmp: Path) -> None:
    directory = short_tmp / "conformance-command"
    directory.mkdir()
    with Rig(directory) as rig:
        ran = subprocess.run(
            [str(BIN / "sandbox-cli"), "conformance", "--context", f"unix://{rig.socket}", "--row", "C1",
             "--row", "C5"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path,
            env={name: ENVIRONMENT[name] for name in ("PATH", "HOME", PLUGINS) if name in ENVIRONMENT},
        )  # fmt: skip
    assert ran.returncode == 0 and "2 passed" in ran.stdout, ran.stdout + ran.stderr
