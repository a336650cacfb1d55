"""The task that the agents' tests give: a program with a fault, the test that finds it, and a model that knows the way.

The model is a script, but not a recording: each act follows from what the agent sent as the outcome of the acts before
it, and what is not as it should be ends the conversation with the reason. So an agent that reads nothing, edits nothing
or runs nothing does not get to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.conftest import git

PROMPT = "test_calc.py fails. Find out why, correct calc.py, run the test and commit what you changed."
MESSAGE = "add() adds"
DONE = "The test passes now: add() subtracted."
NO_PROXY = "none of them"
FILES = {
    ".gitignore": "__pycache__/\n",
    "calc.py": "def add(a, b):\n    return a - b\n",
    "test_calc.py": (
        "import unittest\n\nfrom calc import add\n\n\nclass Sums(unittest.TestCase):\n"
        "    def test_two_and_three(self):\n        self.assertEqual(add(2, 3), 5)\n\n\nunittest.main()\n"
    ),
}
CORRECT = "def add(a, b):\n    return a + b\n"


class Read(NamedTuple):
    path: str


class Edit(NamedTuple):
    path: str
    old: str
    new: str


class Shell(NamedTuple):
    command: str


class Say(NamedTuple):
    text: str


Act = Read | Edit | Shell | Say


def make(path: Path) -> Path:
    """The repository that the agent is to work on."""
    path.mkdir(parents=True)
    git(path, "init", "-q", "-b", "main")
    for name, text in FILES.items():
        (path / name).write_text(text)
    git(path, "add", ".")
    git(path, "commit", "-q", "-m", "A sum")
    return path


def act(outcomes: Sequence[str]) -> Act:
    """What the model wants next, after these outcomes of what it wanted before."""
    step = len(outcomes)
    if step == 0:
        return Shell("python3 test_calc.py")
    if step == 1:
        return Read("calc.py") if "-1 != 5" in outcomes[0] else _stop("the test's failure", outcomes)
    if step == 2:
        wrong = [line for line in outcomes[1].splitlines() if "return a - b" in line]
        return Edit("calc.py", "return a - b", "return a + b") if len(wrong) == 1 else _stop("the file", outcomes)
    if step == 3:
        return Shell("python3 test_calc.py")
    if step == 4:
        passes = "OK" in outcomes[3] and "Ran 1 test" in outcomes[3]
        return Shell(f"git commit -qam '{MESSAGE}' && git log --format=%s") if passes else _stop("success", outcomes)
    if step == 5:
        looking = f"env | grep -i _proxy || echo {NO_PROXY}"
        return Shell(looking) if outcomes[4].count(MESSAGE) == 1 else _stop("the log", outcomes)
    return Say(DONE) if step == 6 and NO_PROXY in outcomes[5] else _stop("no proxy", outcomes)


def _stop(wanted: str, outcomes: Sequence[str]) -> Say:
    return Say(f"STOPPED: {wanted} was to come, not {outcomes[-1]!r}")
