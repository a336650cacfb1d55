"""Hold a sandboxd against the specification of its API, with the sandboxes that
takes.

Usage:
  sandbox-cli conformance [--row=ROW]... [options]

Runs the conformance suite (pytest has to be installed): every row of it
passes, fails, or is skipped for a capability that the endpoint says it lacks.
It makes up to about fifteen small sandboxes and deletes them. Exits with 0
when nothing failed. More, and how to try another server: docs/conformance.md.

Options:
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address
  --row=ROW      this row only, C1 to C50; may be given again
  -h, --help     show this
"""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from typing import Any

from cli import context
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean


def main(args: dict[str, Any]) -> int:
    """Becomes pytest, so that signals and the exit code are its own."""
    suite = find_spec("conformance")
    if find_spec("pytest") is None or suite is None or not suite.submodule_search_locations:
        raise SandboxError(f"conformance needs pytest beside sandbox-cli: {sys.executable} -m pip install pytest")
    for row in args["--row"]:
        if not re.fullmatch(r"C([1-9]|[1-4][0-9]|50)", row):
            raise SandboxError(f"--row {clean(row)}: a row is C1 to C50")
    endpoint = context.choose(args["--context"])
    command = [sys.executable, "-m", "pytest", suite.submodule_search_locations[0]]
    where = endpoint.client.endpoint
    command += ["--endpoint", where.address]
    files = {
        "--token-file": where.token_file, "--ca": where.ca_file, "--cert": where.cert_file, "--key": where.key_file
    }
    command += [word for option, file in files.items() if file for word in (option, file)]
    command += [word for row in args["--row"] for word in ("--row", row)]
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606
