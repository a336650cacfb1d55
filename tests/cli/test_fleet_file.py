"""The fleet file: what it says, what it may not, and the names that follow from it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli import plan, run
from cli.agents.table import AGENTS
from cli.config import Config
from cli.fleet import file, plain, plans
from cli.fleet.file import FleetFileError, Task
from cli.plan import Packed, Plan
from sandboxd import wire

GOOD = b"""
agent: codex
max_parallel: 2
defaults:
  memory: 512m
  allow: [a.example]
tasks:
  - branch: one
    prompt: |
      Make the tests pass.
      Then stop.
  - branch: two/part
    prompt: x
    agent: claude
    args: [--model, large]
    memory: "0"
    cpus: 0.5
    allow: [b.example, a.example]
    verify: make test
"""


def parsed(text: bytes) -> tuple[file.Fleet, list[str]]:
    faults: list[str] = []
    return file.parse(text, faults), faults


def test_what_a_file_says() -> None:
    fleet, faults = parsed(GOOD)
    assert faults == []
    assert fleet == file.Fleet(
        max_parallel=2,
        tasks=(
            Task("one", "Make the tests pass.\nThen stop.\n", "codex", (), 512, 2.0, ("a.example",), False, None),
            Task(
                "two/part", "x", "claude", ("--model", "large"), None, 0.5, ("a.example", "b.example"), False,
                "make test",
            ),
        ),
    )  # fmt: skip


def test_what_it_leaves_unsaid() -> None:
    fleet, faults = parsed(b"agent: codex\ntasks: [{branch: a, prompt: x}]\n")
    assert (faults, fleet.max_parallel) == ([], file.PARALLEL)
    assert (fleet.tasks[0].memory_mb, fleet.tasks[0].cpus) == (4096, 2.0)
    lifted, faults = parsed(b'agent: codex\ndefaults: {memory: "0", cpus: 0}\ntasks: [{branch: a, prompt: x}]\n')
    assert (faults, lifted.tasks[0].memory_mb, lifted.tasks[0].cpus) == ([], None, None)


def test_a_tasks_timeout_comes_before_the_defaults_and_0_lifts_it() -> None:
    tasks = b"tasks: [{branch: a, prompt: x}, {branch: b, prompt: x, timeout: 90s}, {branch: c, prompt: x, timeout: 0}]"
    fleet, faults = parsed(b"agent: codex\ndefaults: {timeout: 1h30m}\n" + tasks)
    assert (faults, [one.timeout_s for one in fleet.tasks]) == ([], [5400.0, 90.0, None])
    assert a_plan(timeout_s=90.0).limit_s == 90.0


def task(**changes: object) -> bytes:
    return json.dumps({"agent": "codex", "tasks": [{"branch": "a", "prompt": "x"} | changes]}).encode()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        pytest.param(b"", "tasks: 1 to 500 are needed, and there are 0", id="nothing in it"),
        pytest.param(b"tasks: []", "tasks: 1 to 500 are needed", id="no task"),
        pytest.param(b"- a", "it must be a mapping", id="a list"),
        pytest.param(b"a: &x 1", "a: anchors and aliases are not read", id="an anchor"),
        pytest.param(b"agent: codex\nagent: claude", "agent: it stands twice", id="a key twice"),
        pytest.param(b"profile: dev\ntasks: []", "profile: it does not go into a fleet file: a pro", id="a profile"),
        pytest.param(task(image="x"), "tasks[0].image: it does not go into a fleet file: every", id="an image"),
        pytest.param(b"defaults: {cache: x}", "defaults.cache: it does not go into a fleet file: a", id="a cache"),
        pytest.param(task(extra=1), "tasks[0].extra: it is not known; known here: agent, allow,", id="an unknown key"),
        pytest.param(b"max_parallel: 0", "max_parallel: it must be a whole number from 1 to 64", id="none at once"),
        pytest.param(b"max_parallel: true", "max_parallel: it must be a whole number", id="a truth value for a number"),
        pytest.param(b"tasks: [{branch: a, prompt: x}]", "tasks[0].agent: it is missing here and at", id="no agent"),
        pytest.param(task(agent="goose"), "tasks[0].agent: goose works in a terminal only; these", id="a terminal one"),
        pytest.param(task(agent="\x1b[2J"), "tasks[0].agent: [2J is not known; these", id="an unknown agent"),
        pytest.param(task(prompt=""), "tasks[0].prompt: it is missing", id="an empty prompt"),
        pytest.param(task(prompt=" \n"), "tasks[0].prompt: the prompt is empty", id="a blank prompt"),
        pytest.param(task(prompt=5), "tasks[0].prompt: it must be text; a number goes in quotes", id="a number to do"),
        pytest.param(task(prompt="--help"), "tasks[0].prompt: the prompt begins with a dash", id="a flag for a prompt"),
        pytest.param(task(prompt="x" * 200_000), "tasks[0].prompt: no argument of a command can", id="a huge prompt"),
        pytest.param(task(verify="a\0b"), "tasks[0].verify: no argument of a command can hold it", id="a NUL to run"),
        pytest.param(task(args=["a", 1]), "tasks[0].args: it must be a list of texts", id="a number among arguments"),
        pytest.param(task(memory=512), "tasks[0].memory: it must be a size such as", id="a size without a unit"),
        pytest.param(task(memory="4t"), "tasks[0].memory: it must be a size such as", id="a unit that is none"),
        pytest.param(task(cpus=-1), "tasks[0].cpus: it must be a number such as 2 or 0.5", id="less than none"),
        pytest.param(task(cpus="nan"), "tasks[0].cpus: it must be a number such as 2 or 0.5", id="no number"),
        pytest.param(task(timeout=30), "tasks[0].timeout: it must be a length of time such as", id="no unit"),
        pytest.param(task(timeout="-1s"), "tasks[0].timeout: it must be a length of time", id="a time before now"),
        pytest.param(b"a" * (1 << 20) + b"b", "it is longer than 1024 KiB", id="a huge file"),
    ],
)
def test_each_fault_is_told_with_its_place(text: bytes, fault: str) -> None:
    _, faults = parsed(text)
    assert any(one.removeprefix("line 1: ").removeprefix("line 2: ").startswith(fault) for one in faults), faults


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("agent: nobody\nprofile: prod\ntasks:\n  - {prompt: x}\n  - {branch: b, prompt: x, hue: red}\n")
    with pytest.raises(FleetFileError) as caught:
        file.read(path)
    said = str(caught.value)
    assert "\n" not in said
    for place in ("profile:", "tasks[0].branch:", "tasks[0].agent:", "tasks[1].agent:", "tasks[1].hue:"):
        assert place in said


@pytest.mark.parametrize("kind", ["missing", "directory", "pipe"])
def test_what_is_no_file_is_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(FleetFileError):
        file.read(path)


@pytest.mark.parametrize(
    "branch",
    [
        "-x", "--upload-pack=x", "a..b", "../../heads/main", "a b", "a\x1b[2J", "a\u202eb", "x.lock", "a//b", "/a",
        "a/", ".a", "a~1", "a@{1}", "a\nb", "é" * 150,
    ],
)  # fmt: skip
def test_branches_that_are_no_ref_or_lie_are_refused(branch: str) -> None:
    _, faults = parsed(task(branch=branch))
    assert faults and faults[0].startswith("tasks[0].branch: '") and faults[0].isprintable()


@pytest.mark.parametrize("branch", ["HEAD", "main", "größe", "fleet", "a.b/c-d", "refs/heads/main", "@"])
def test_branches_that_are_refs_of_ours_whatever_they_are_called(branch: str) -> None:
    assert parsed(task(branch=branch))[1] == []


@pytest.mark.parametrize(
    ("branches", "fault"),
    [
        (("a", "b", "a"), "tasks[2].branch: tasks[0] has it already"),
        (("a/b", "a"), "tasks[0].branch: git has no room for it below a, the branch of tasks[1]"),
        (("a/b/c", "x", "a"), "tasks[0].branch: git has no room for it below a, the branch of tasks[2]"),
    ],
)
def test_branches_in_each_others_way(branches: tuple[str, ...], fault: str) -> None:
    tasks = [{"branch": branch, "prompt": "x"} for branch in branches]
    assert parsed(json.dumps({"agent": "codex", "tasks": tasks}).encode())[1] == [fault]


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.text(alphabet="agents: [{}]-\n'\"0&*!|", max_size=120).map(str.encode)))
def test_no_file_makes_it_stumble(text: bytes) -> None:
    fleet, faults = parsed(text)
    assert faults or fleet.tasks


@settings(max_examples=200, deadline=None)
@given(st.text(min_size=1, max_size=120))
def test_every_branch_has_a_sandbox_name_that_one_may_have(branch: str) -> None:
    assert re.fullmatch(wire.NAME, plans.sandbox_name(Path("/r"), branch))


def test_names_that_begin_alike_do_not_meet() -> None:
    long = "feature/a-very-long-name-that-goes-on-and-on-and-on"
    names = {
        plans.sandbox_name(repo, branch)
        for repo in (Path("/one"), Path("/two")) for branch in (long + "-1", long + "-2", "ä", "ö", "A", "a")
    }  # fmt: skip
    assert len(names) == 12
    assert plans.sandbox_name(Path("/one"), long + "-1").startswith("fleet-feature-a-very-long-name-that-goes-on-an")


def a_plan(**changes: object) -> Plan:
    work = Task("a", "do it", "codex", (), 512, 1.5, ("a.example",), False, "true")
    given_ = Task(**{each.name: changes.get(each.name, getattr(work, each.name)) for each in fields(Task)})
    packed = Packed("f" * 40, 7)
    return plans.of(given_, ["--keep"], Path("/r/.git"), Path("/r"), Config(), {"OPENAI_API_KEY": "k"}, "UTC", packed)


def test_a_task_is_the_plan_a_run_of_its_own_would_have() -> None:
    made = a_plan()
    words = [f"--name={made.create.name}", "--project=/r", "--keep", "--memory=512", "--cpus=1.5", "--allow=a.example"]
    by_hand = plan.of(
        run.parsed(words, made.command), Config(), {"OPENAI_API_KEY": "k"}, "UTC", AGENTS["codex"]
    )  # fmt: skip
    labels = {"agent": "codex", "fleet.branch": "a"}
    assert made.create == by_hand.create._replace(labels=labels)
    assert (made.branch, made.packed, made.keep) == ("fleet/a", Packed("f" * 40, 7), True)
    assert made.network == by_hand.network


def test_a_prompt_and_a_verify_command_are_arguments_of_their_own() -> None:
    nasty = "'; touch /tmp/x; $(x) `y` \n\""
    made = a_plan(prompt=nasty, verify=nasty)
    assert made.command[:5] == ("sh", "-c", plans.VERIFY, "fleet", nasty)
    assert nasty in made.command[5:] and all(nasty == word or nasty not in word for word in made.command)


def test_a_plan_travels_whole() -> None:
    made = a_plan()
    again = plain.load(Plan, json.loads(json.dumps(plain.dump(made))))
    assert again == made


@pytest.mark.parametrize(
    ("change", "said"),
    [({"keep": 1}, ".keep is of another"), ({"keep": None}, ".keep is"), ({"strange": 1}, ".strange is not known")],
)
def test_what_is_no_plan_is_not_taken_for_one(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        plain.load(Plan, plain.dump(a_plan()) | change)
