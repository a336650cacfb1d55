"""Five agents at once in five machines. The agent is a program on a tools volume, as an installed one would be."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.agents import start, tools
from cli.agents.table import AGENTS
from tests.conftest import git, make_repository
from tests.daemon import BIN, Daemon

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

PATIENCE_S = 600
NAMES = ("one", "two", "three", "four", "five")
WRONG = "four"
# It is told what to write, writes it, looks whether the tests are content, and commits either way.
PROGRAM = """#!/usr/bin/env python3
import subprocess, sys
assert sys.argv[1] == "exec", sys.argv
name, value = sys.argv[2].split("=")
with open(f"{name}.py", "w") as file:
    file.write(f"def answer():\\n    return {value}\\n")
done = subprocess.run([sys.executable, "-m", "unittest", f"test_{name}"])
subprocess.run(["git", "add", f"{name}.py"], check=True)
subprocess.run(["git", "commit", "-qm", f"Answer {name}"], check=True)
print(name, "tests ended with", done.returncode)
"""
TEST = """import unittest
import {name}
class Answer(unittest.TestCase):
    def test_answer(self):
        self.assertEqual({name}.answer(), {value})
"""


@pytest.fixture(scope="module")
def fleet_daemon(short_tmp: Path) -> Iterator[Daemon]:
    """It finds the agent's tools volume in its state directory, as if it had been installed there before."""
    if os.geteuid() != 0:
        pytest.skip("only a daemon that root starts gives sandboxes a network, which an agent needs")
    made = Daemon(short_tmp / "fleet")
    volumes, content = made.state / "volumes", short_tmp / "tools"
    volumes.mkdir(parents=True)
    program = content / start.BIN / "codex"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (content / start.READY).touch()
    made_of = ("mke2fs", "-q", "-t", "ext4", "-d", str(content), str(volumes / f"{tools.volume(AGENTS['codex'])}.ext4"))
    subprocess.run([*made_of, "32M"], check=True, capture_output=True)
    with made as running:
        yield running
    assert running.leftovers() == []
    assert "Traceback" not in running.log.read_text(errors="replace"), running.log.read_text(errors="replace")


def test_five_at_once_one_fails_its_verify_and_the_others_land(fleet_daemon: Daemon, tmp_path: Path) -> None:
    top = make_repository(tmp_path / "project")
    for number, name in enumerate(NAMES):
        (top / f"test_{name}.py").write_text(TEST.format(name=name, value=number))
    git(top, "add", ".")
    git(top, "commit", "-qm", "Tests")
    tasks = [
        {
            "branch": f"answers/{name}", "prompt": f"{name}={number + (name == WRONG)}",
            "verify": f"python3 -m unittest -q test_{name}",
        }
        for number, name in enumerate(NAMES)
    ]  # fmt: skip
    fleet = {"agent": "codex", "max_parallel": 5, "defaults": {"memory": "512m", "cpus": 1}, "tasks": tasks}
    (tmp_path / "fleet.yaml").write_text(json.dumps(fleet))
    environment = fleet_daemon.environment() | {
        "HOME": str(tmp_path), "GIT_AUTHOR_NAME": "alice", "GIT_AUTHOR_EMAIL": "alice@localhost",
        "GIT_COMMITTER_NAME": "alice", "GIT_COMMITTER_EMAIL": "alice@localhost", "XDG_CONFIG_HOME": "",
    }  # fmt: skip
    head = git(top, "rev-parse", "HEAD").strip()
    command = [str(BIN / "sandbox-cli"), "agent", "fleet"]
    began = time.monotonic()
    running = subprocess.Popen(
        [*command, "run", "-f", str(tmp_path / "fleet.yaml"), "--json"], cwd=top, env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    most = 0
    while running.poll() is None:
        assert time.monotonic() - began < PATIENCE_S, "it does not end"
        there = fleet_daemon.client.sandboxes(["agent=codex"])
        most = max(most, sum(one.state != "terminated" for one in there))
        time.sleep(0.5)
    out, err = (said.decode() for said in running.communicate())
    print(f"five machines at once took {time.monotonic() - began:.0f} s")
    assert running.returncode == 1, err
    told = {task["branch"]: task for task in json.loads(out)["tasks"]}
    logs = {branch: Path(task["log"]).read_text() for branch, task in told.items()}
    assert {branch: (task["state"], task["code"]) for branch, task in told.items()} == {
        f"answers/{name}": ("rejected", 90) if name == WRONG else ("verified", 0) for name in NAMES
    }, logs
    assert most == 5
    assert all("installing" not in log for log in logs.values())
    assert "four tests ended with 1" in logs["answers/four"] and "one tests ended with 0" in logs["answers/one"]
    sandboxes = {one.labels["fleet.branch"]: one for one in fleet_daemon.client.sandboxes(["agent=codex"])}
    assert {(one.memory_mb, one.cpus, one.state) for one in sandboxes.values()} == {(512, 1, "terminated")}
    # Nothing but refs of ours came of it.
    ours = [f"refs/sandbox/fleet/answers/{name}" for name in sorted(NAMES)]
    assert git(top, "for-each-ref", "--format=%(refname)").split() == ["refs/heads/main", *ours]
    assert git(top, "rev-parse", "HEAD").strip() == head and git(top, "status", "--porcelain") == ""
    assert "Answer two" in git(top, "log", "--format=%s", "refs/sandbox/fleet/answers/two")

    def land(*words: str) -> dict[str, list[dict[str, str]]]:
        landed = subprocess.run(
            [*command, "land", *words, "--json"], cwd=top, env=environment, capture_output=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert landed.returncode == 0, landed.stderr.decode()
        found: dict[str, list[dict[str, str]]] = json.loads(landed.stdout)
        return found

    landed = land("--all")
    assert [one["branch"] for one in landed["landed"]] == [f"answers/{name}" for name in NAMES if name != WRONG]
    assert landed["skipped"] == [
        {
            "branch": "answers/four",
            "reason": "it was rejected, its verify command failed; --unverified lands what came back all the same",
        }
    ]
    assert sorted(path.name for path in top.glob("*.py") if not path.name.startswith("test_")) == [
        "five.py", "one.py", "three.py", "two.py",
    ]  # fmt: skip
    assert git(top, "rev-list", "--count", "--merges", f"{head}..HEAD").strip() == "4"
    assert land("answers/four", "--unverified")["landed"][0]["branch"] == "answers/four"
    assert (top / "four.py").read_text() == "def answer():\n    return 4\n"
