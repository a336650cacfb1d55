"""List the agents that are known, and for which of them a login is saved.

Usage:
  sandbox-cli agent ls [--json]

Options:
  --json       print it as a list of objects
  -h, --help   show this
"""

from __future__ import annotations

import sys
from typing import Any

from cli import show
from cli.agents import login
from cli.agents.table import AGENTS

HEAD = ("NAME", "RUNS UNATTENDED", "LOGIN SAVED")


def main(args: dict[str, Any]) -> int:
    rows = [(agent.name, agent.headless is not None, login.saved(agent)) for agent in AGENTS.values()]
    if args["--json"]:
        show.as_json([{"name": name, "runs_unattended": able, "login_saved": has} for name, able, has in rows])
        return 0
    words = {True: "yes", False: "no"}
    sys.stdout.write(show.table(HEAD, [(name, words[able], words[has]) for name, able, has in rows]))
    return 0
