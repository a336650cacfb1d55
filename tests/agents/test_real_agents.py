"""Real agents do a real task: in a VM, under prod, with one name to reach, against models of the tests' own."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.agents import task
from tests.agents.model import Messages, Model, Responses
from tests.conftest import git
from tests.daemon import BIN, Daemon
from tests.world.world import World

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Case:
    """`key` is the variable that its vendor documents for work without a person, `words` are the agent's own."""

    agent: str
    host: str
    model: type[Model]
    key: str
    words: tuple[str, ...]


CASES = (
    Case(
        "claude", "api.anthropic.com", Messages, "ANTHROPIC_API_KEY",
        ("-p", task.PROMPT, "--dangerously-skip-permissions"),
    ),
    Case(
        "codex", "api.openai.com", Responses, "CODEX_API_KEY",
        ("exec", "--dangerously-bypass-approvals-and-sandbox", task.PROMPT),
    ),
)  # fmt: skip
KEY = "sk-of-the-tests-and-of-nobody-else"


@pytest.mark.parametrize("case", CASES, ids=[case.agent for case in CASES])
def test_it_reads_edits_tests_and_commits_and_the_work_comes_back(
    case: Case, daemon: Daemon, world: World, lacking: dict[str, str], tmp_path: Path
) -> None:
    if case.agent in lacking:
        pytest.skip(lacking[case.agent])
    repository, model = task.make(tmp_path / "project"), case.model()
    head = git(repository, "rev-parse", "HEAD").strip()
    world.origin.answers[case.host] = model
    world.origin.ledger.clear()
    ran = subprocess.run(
        [
            str(BIN / "sandbox-cli"), "agent", case.agent, "--profile", "prod", "--allow", case.host, "--name",
            case.agent, "--json", "--", *case.words,
        ],
        cwd=repository, env=environment(daemon, tmp_path) | {case.key: KEY}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}{model.story}"
    assert ran.stdout.strip() == task.DONE, model.story
    # What came back: one commit, on the ref that is the run's, and nothing else moved.
    refs = git(repository, "for-each-ref", "--format=%(refname)").split()
    assert refs == ["refs/heads/main", f"refs/sandbox/{case.agent}"]
    assert git(repository, "rev-parse", "main").strip() == head
    log = git(repository, "log", "--format=%s|%an|%P", f"main..refs/sandbox/{case.agent}").splitlines()
    assert log == [f"{task.MESSAGE}|sandbox|{head}"]
    assert git(repository, "diff", "--name-only", "main", f"refs/sandbox/{case.agent}").split() == ["calc.py"]
    assert git(repository, "show", f"refs/sandbox/{case.agent}:calc.py") == task.CORRECT
    assert git(repository, "status", "--porcelain") == ""
    # What the model was told: the real failure, the real file, the real success, an environment without a proxy.
    failure, content, _, success, _, proxies = model.last
    assert "AssertionError: -1 != 5" in failure and "/workspace/test_calc.py" in failure
    assert "return a - b" in content
    assert "Ran 1 test" in success and "OK" in success
    assert task.NO_PROXY in proxies
    # How it got there: by the one name that was allowed, over TLS, with the key; the agent was not downloaded.
    assert {(visit.sni, visit.port) for visit in world.origin.ledger.visits} == {(case.host, 443)}
    assert any(KEY in value for _, _, headers in model.asked for value in headers.values())
    names = daemon.client.egress(json.loads(ran.stderr.splitlines()[-1])["sandbox"]).names
    assert {one.name for one in names if one.decision == "allowed"} == {case.host}
    print(f"{case.agent} was refused:", sorted({one.name for one in names if one.decision == "denied"}))
    assert "installing" not in ran.stderr


def environment(daemon: Daemon, home: Path) -> dict[str, str]:
    """A person's who has never used it, at this daemon."""
    return {
        "PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", "SANDBOX_CONTEXT": f"unix://{daemon.socket}",
    }  # fmt: skip
