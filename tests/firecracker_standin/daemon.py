"""`sandboxd` as it is, on a host whose KVM is said to work: the programs it is given are the stand-ins.

    python -m tests.firecracker_standin.daemon FLAG…
"""

from __future__ import annotations

import logging
import os
import sys
from functools import partial

import anyio
from docopt import docopt

from native import KvmAnswer, KvmState
from sandboxd import __main__ as program
from sandboxd import assembly, settings
from sandboxd.errors import SandboxError

TRIAL_S = 120.0     # the guest is emulated


def works() -> KvmAnswer:
    return KvmAnswer(KvmState.OK, "a stand-in for tests says so", 1, 0.1)


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="sandboxd: %(message)s")
    given = settings.read(docopt(program.__doc__ or "", sys.argv[1:]), os.environ, os.geteuid())
    faults: list[BaseException] = []
    try:
        anyio.run(program.run, given, partial(assembly.parts, probe=works, trial_s=TRIAL_S))
    except* SandboxError as group:
        faults.extend(group.exceptions)
    for fault in faults:
        print(f"sandboxd: {fault}", file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
