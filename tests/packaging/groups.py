"""Runs as root in the machine, with the installation's Python: control groups of version 2, as the daemon makes them.

Prints what was seen as JSON: the version, the files of a group, and how three programs in it fared.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from sandboxd.vm import cgroups

LIMITS = cgroups.Limits(cpus=0.5, memory_bytes=64 << 20, processes=16)
PATIENCE_S = 60.0

FORKS = """
import os, sys, time
for made in range(64):
    try:
        if os.fork() == 0:
            time.sleep(60)
    except BlockingIOError:
        sys.exit(made)
"""


def main() -> None:
    hierarchy = cgroups.usable()
    group = hierarchy.group("units", "one")
    group.make(LIMITS)
    (directory,) = group.directories
    seen: dict[str, object] = {
        "version": hierarchy.version,
        "lacking": sorted(name for name in cgroups.files(2, LIMITS) if not (directory / name).exists()),
        "files": {name: (directory / name).read_text().strip() for name in cgroups.files(2, LIMITS)},
    }
    with subprocess.Popen([*group.entering(), "sleep", "infinity"]) as child:
        deadline = time.monotonic() + PATIENCE_S
        while group.pids() != {child.pid} and time.monotonic() < deadline:
            time.sleep(0.05)
        seen["entered"] = group.holds(child.pid)
        seen["ended"] = group.end()
        seen["killed"] = child.wait(PATIENCE_S)
    seen["forks"] = subprocess.run([*group.entering(), sys.executable, "-c", FORKS], check=False).returncode
    seen["emptied"] = group.end()
    hog = [*group.entering(), sys.executable, "-c", "bytearray(256 << 20)"]
    seen["hog"] = subprocess.run(hog, check=False).returncode
    seen["removed"] = group.remove()
    seen["left"] = sorted(hierarchy.ids("units") | hierarchy.ids("trial"))
    print(json.dumps(seen))


main()
