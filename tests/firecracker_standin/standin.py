"""For tests: a directory with a `firecracker` and a `jailer` in it, and a companion that serves them.

    with Standin(directory) as standin: …

By hand, until Ctrl-C or TERM: `python -m tests.firecracker_standin.standin DIRECTORY`. Everything that was started
through it ends with it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.firecracker_standin.companion import FAULTS

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "build" / "firecracker-standin"
LAUNCHER = """\
#!{python} -I
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.firecracker_standin.jailer import main
main(Path({directory!r}))
"""


class Standin:
    def __init__(self, directory: Path, version: str = "1.16.1") -> None:
        self.directory = directory
        self.firecracker = directory / "firecracker"
        self.jailer = directory / "jailer"
        self.companion = directory / "companion.sock"
        self.bwrap = directory / "bwrap"
        self._version = version
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Standin:
        self.directory.mkdir(exist_ok=True)
        self.directory.chmod(0o755)
        shutil.copy(SHIM, self.firecracker)
        self.jailer.write_text(
            LAUNCHER.format(python=sys.executable, root=str(ROOT), directory=str(self.directory.resolve()))
        )
        self.jailer.chmod(0o755)
        # In a jail without a jailer the companion has to be seen.
        self.bwrap.write_text(f'#!/bin/sh\nexec bwrap --ro-bind {self.companion.resolve()} /companion.sock "$@"\n')
        self.bwrap.chmod(0o755)
        self.be(self._version)
        with (self.directory / "companion.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.firecracker_standin.companion", str(self.directory)],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the companion did not come up: {self.log()}")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def be(self, version: str) -> None:
        """What `--version` says, and the API, from now on."""
        _replace(self.directory / "version", version)

    def fail(self, *faults: dict[str, Any]) -> None:
        """What goes wrong from now on, in every process: see `companion`. None: nothing does."""
        assert all(fault["do"] in FAULTS for fault in faults), faults
        _replace(self.directory / "faults.json", json.dumps(faults))

    def calls(self, id: str | None = None) -> Sequence[dict[str, Any]]:
        """What was asked over all APIs, or over that of one."""
        try:
            lines = (self.directory / "calls.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in lines]
        return [call for call in found if id in (None, call["id"])]

    def programs(self) -> Sequence[int]:
        """The processes of all guests that it runs."""
        assert self._process is not None
        pid = self._process.pid
        with suppress(FileNotFoundError):
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []

    def log(self) -> str:
        """What went wrong in the companion itself; empty is well."""
        return (self.directory / "companion.log").read_text(errors="replace")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    os.replace(temporary, path)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), Standin(Path(sys.argv[1]).resolve()):
        print("ready", flush=True)
        signal.pause()
