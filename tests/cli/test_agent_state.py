"""`agent state` and `agent wait`: what is read in session files, what it means, and what a person sees of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cli.agents import conversation, states
from cli.agents.conversation import AGENT, TOOL, USER, Turn
from sandboxd.client import Client, Process
from tests.cli.person import PATIENCE_S, Person, at_terminal
from tests.conftest import git, make_repository
from tests.sandboxd.rig import Rig

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC).timestamp()
AT = "2026-11-30T12:00:00.000Z"
ENVIRONMENT = {"type": "input_text", "text": "<environment_context>"}


# What is read. The lines have the shape of those that the real programs wrote; most of their fields are left out.


def claude(kind: str, content: object, **more: object) -> dict[str, Any]:
    return {"type": kind, "timestamp": AT, "isSidechain": False, "message": {"role": kind, "content": content}, **more}


def codex(kind: str, **payload: object) -> dict[str, Any]:
    return {"timestamp": AT, "ordinal": 1, "type": kind, "payload": payload}


def response(kind: str, **payload: object) -> dict[str, Any]:
    return codex("response_item", type=kind, **payload)


def item(kind: str, text: str, block: str) -> dict[str, Any]:
    return codex("event_msg", type="item_completed", item={"type": kind, "content": [{"type": block, "text": text}]})


@pytest.mark.parametrize(
    ("line", "turn"),
    [
        pytest.param(claude("user", "List the files"), Turn(USER, "List the files", NOW), id="a prompt"),
        pytest.param(claude("assistant", [{"type": "text", "text": "I do."}]), Turn(AGENT, "I do.", NOW), id="a word"),
        pytest.param(
            claude("assistant", [{"type": "tool_use", "name": "Bash", "input": {"command": "ls"}}]),
            Turn(AGENT, "", NOW, ("Bash",)), id="a call",
        ),
        pytest.param(
            claude("assistant", [{"type": "tool_use", "name": "Edit", "input": {"file_path": "/workspace/a"}}]),
            Turn(AGENT, "", NOW, ("Edit",), ("/workspace/a",)), id="a call about a file",
        ),
        pytest.param(
            claude("assistant", [{"type": "tool_use", "name": 1, "input": {"path": [2]}}, {"type": "tool_use"}]),
            Turn(AGENT, "", NOW), id="a call with neither name nor file",
        ),
        pytest.param(
            claude("user", [{"type": "tool_result", "content": "f"}]), Turn(TOOL, "", NOW), id="its answer"
        ),
        pytest.param(
            claude("user", [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]),
            Turn(USER, "a\nb", NOW), id="a prompt in pieces",
        ),
        pytest.param(claude("user", "x", timestamp=None), Turn(USER, "x", None), id="no time"),
        pytest.param(claude("user", "x", timestamp=AT[:19]), Turn(USER, "x", None), id="a time without a zone"),
        pytest.param(claude("user", "x", timestamp=17), Turn(USER, "x", None), id="a number for a time"),
        pytest.param(claude("user", "x", timestamp="9" * 5000), Turn(USER, "x", None), id="an endless time"),
        pytest.param(
            claude("user", "x", timestamp="9999-12-31T23:59:59-00:01"), Turn(USER, "x", None), id="after the last year",
        ),
        pytest.param(
            claude("user", "x", timestamp="9999-12-31T23:59:59.999999Z"), Turn(USER, "x", None), id="rounded past it",
        ),
        pytest.param(
            claude("user", "x", timestamp="0001-01-01T00:00:00+23:59"), Turn(USER, "x", None), id="before the first",
        ),
        pytest.param(claude("user", {"a": 1}), Turn(USER, "", NOW), id="content of another type"),
        pytest.param(claude("user", "y" * 9000), Turn(USER, "y" * 7999 + "…", NOW), id="a long prompt is cut"),
        pytest.param(claude("user", "x", isSidechain=True), None, id="between agents"),
        pytest.param(claude("user", "x", isMeta=True), None, id="the program's own"),
        pytest.param({"type": "attachment", "attachment": {"type": "environment"}}, None, id="environment"),
        pytest.param({"type": "user", "message": "x"}, None, id="a message of another type"),
        pytest.param({"type": ["user"], "message": {}}, None, id="a type of another type"),
    ],
)  # fmt: skip
def test_a_line_of_claude_code(line: dict[str, Any], turn: Turn | None) -> None:
    assert conversation.claude(line) == turn


@pytest.mark.parametrize(
    ("line", "turn"),
    [
        pytest.param(item("UserMessage", "List", "text"), Turn(USER, "List", NOW), id="a prompt"),
        pytest.param(item("AgentMessage", "Done.", "Text"), Turn(AGENT, "Done.", NOW), id="a word"),
        pytest.param(response("custom_tool_call", name="exec"), Turn(AGENT, "", NOW, ("exec",)), id="a call"),
        pytest.param(response("custom_tool_call_output", output=[]), Turn(TOOL, "", NOW), id="its answer"),
        pytest.param(response("function_call", name="shell"), Turn(AGENT, "", NOW, ("shell",)), id="another call"),
        pytest.param(codex("event_msg", type="task_complete"), Turn(AGENT, "", NOW), id="the end"),
        pytest.param(codex("event_msg", type="turn_aborted"), Turn(AGENT, "", NOW), id="an interruption"),
        pytest.param(
            codex("event_msg", type="item_completed", item={"type": "CommandExecution", "parsed_cmd": [{"path": "a"}]}),
            Turn(TOOL, "", NOW, (), ("a",)), id="a command",
        ),
        pytest.param(item("Reasoning", "hm", "text"), None, id="another item"),
        pytest.param(response("message", role="user", content=[ENVIRONMENT]), None, id="the environment"),
        pytest.param(codex("session_meta", id="x", cwd="/workspace"), None, id="about the session"),
        pytest.param({"type": "event_msg", "payload": []}, None, id="a payload of another type"),
        pytest.param(codex("event_msg", type="item_completed", item=[]), None, id="an item of another type"),
        pytest.param(codex("event_msg", type="item_completed", item={"type": [1]}), None, id="a kind of another type"),
    ],
)  # fmt: skip
def test_a_line_of_codex(line: dict[str, Any], turn: Turn | None) -> None:
    assert conversation.codex(line) == turn


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 20])
def test_lines_are_the_same_however_they_come(size: int) -> None:
    long = b"x" * (conversation.LINE_BYTES + 1)
    data = b"a\n\nbc\n" + long + b"\nafter\nlast"
    if size < 7:
        data = data.replace(long, b"")
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    wanted = [line for line in data.split(b"\n") if len(line) <= conversation.LINE_BYTES]
    assert list(conversation.lines(pieces)) == wanted


# What it means


def process(exit_code: int | None = None, tty: bool = True) -> Process:
    return Process(1, tty, ("x",), "running" if exit_code is None else "exited", exit_code, "")


@pytest.mark.parametrize(
    ("turns", "tty", "state"),
    [
        pytest.param([], True, "unknown", id="nothing was said"),
        pytest.param([Turn(AGENT, "", NOW - 99), Turn(USER, "", NOW - 90)], True, "working", id="the user spoke last"),
        pytest.param([Turn(TOOL, "", NOW - 90)], True, "working", id="a tool answered last"),
        pytest.param([Turn(USER, "", None)], True, "working", id="the user spoke last, at no time"),
        pytest.param([Turn(AGENT, "", None)], True, "unknown", id="the agent spoke last, at no time"),
        pytest.param([Turn(AGENT, "", NOW - 29.9)], True, "working", id="the agent spoke just now"),
        pytest.param([Turn(AGENT, "", NOW + 3600)], True, "working", id="the agent spoke in the future"),
        pytest.param([Turn(AGENT, "", NOW - 30)], True, "blocked", id="it waits in its terminal"),
        pytest.param([Turn(AGENT, "", NOW - 30)], False, "idle", id="it has no terminal"),
        pytest.param([Turn(AGENT, "Is it blocked?", NOW - 30)], False, "idle", id="its words do not matter"),
    ],
)
def test_a_conversation_means(turns: list[Turn], tty: bool, state: str) -> None:
    assert states.of_conversation(turns, tty, NOW).state == state


@pytest.mark.parametrize(
    ("state", "said"),
    [("terminated", "stopped"), ("suspended", "suspended"), ("creating", "unknown"), ("stopped", "unknown")],
)
def test_a_sandbox_that_does_not_run_means(state: str, said: str) -> None:
    assert states.of_sandbox(state).state == said


@pytest.mark.parametrize(("ended", "said"), [(process(0), "done"), (process(3), "failed"), (None, "unknown")])
def test_a_process_that_does_not_run_means(ended: Process | None, said: str) -> None:
    assert states.of_process(ended).state == said


# As a person sees it: a daemon and a guest, an agent that is a script and keeps a session file


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("d"), "--network") as rig:
        yield rig


# `said WHO SECONDS-AGO` writes a line to the session file; `ask` says something, waits for an answer, and goes on.
AGENT_SCRIPT = r"""#!/bin/sh
dir=$HOME/.claude/projects/-workspace
mkdir -p $dir
said() {
    at=$(date -u -d "$2 seconds ago" +%Y-%m-%dT%H:%M:%S.000Z)
    printf '{"type":"%s","timestamp":"%s","message":{"content":"x"}}\n' $1 $at >>$dir/s.jsonl
}
said user 90
while read -r word; do
    case $word in
    ask) said assistant 60 ;;
    answer) said user 0 ;;
    leave) exit 0 ;;
    fail) exit 4 ;;
    esac
    echo "ok $word"
done
"""
HERE = "--env=PATH=/workspace/bin:/usr/bin:/bin"


@pytest.fixture
def person(rig: Rig, tmp_path: Path) -> Person:
    project = make_repository(tmp_path / "project")
    (project / "bin").mkdir()
    (project / "bin" / "claude").write_text(AGENT_SCRIPT)
    (project / "bin" / "claude").chmod(0o755)
    git(project, "add", ".")
    git(project, "commit", "-qm", "A scripted agent")
    return Person(project, rig.socket)


def state(person: Person, *refs: str) -> list[str]:
    done = person.run("agent", "state", "--json", *refs)
    assert done.returncode == 0, done.stderr
    return [row["state"] for row in json.loads(done.stdout)]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_an_agent_in_a_terminal_from_its_first_word_to_its_last(person: Person, rig: Rig) -> None:
    words = ("agent", "claude", "--name=asks", "--keep", "--no-bring-back", HERE)
    with at_terminal(person, *words) as terminal:
        until(lambda: person.run("agent", "state", "asks").returncode == 0)
        waited = person.run("agent", "wait", "asks", "--state=working", "--every=200ms", "--timeout=20s")
        assert (waited.returncode, waited.stdout) == (0, b"working\n"), waited.stderr
        terminal.type(b"ask\r")
        terminal.expect(b"ok ask")
        waited = person.run("agent", "wait", "--state=blocked", "--state=idle", "--timeout=20s", "asks")
        assert (waited.returncode, waited.stdout) == (0, b"blocked\n"), waited.stderr
        terminal.type(b"answer\r")
        terminal.expect(b"ok answer")
        assert state(person, "asks") == ["working"]
        late = person.run("agent", "wait", "asks", "--state=done", "--timeout=300ms", "--every=200ms")
        assert (late.returncode, late.stdout) == (2, b"")
        assert late.stderr == b"sandbox-cli: asks is working: the user spoke last\n"
        terminal.type(b"leave\r")
        assert terminal.wait() == 0
    waited = person.run("agent", "wait", "asks", "--state=done", "--json")
    assert json.loads(waited.stdout) == {"state": "done", "why": "it ended with exit code 0"}
    person.run("exec", "asks", "--", "false")
    assert state(person, "asks") == ["done"], "what runs in it later is not the agent"
    person.run("kill", "asks")
    assert state(person, "asks") == ["stopped"]
    gone = person.run("agent", "wait", "asks", "--state=done")
    assert (gone.returncode, gone.stderr) == (1, b"sandbox-cli: asks has ended\n")
    assert person.run("agent", "wait", "asks", "--state=stopped").returncode == 0


def test_without_a_terminal_and_among_others(person: Person, rig: Rig) -> None:
    client = Client(str(rig.socket))
    process = person.start("agent", "claude", "--name=idles", "--keep", "--no-bring-back", HERE)
    until(lambda: person.run("agent", "state", "idles").returncode == 0)
    other = person.run("run", "--detach", "--name=other", "--no-workspace", "--", "sleep", "60")
    assert other.returncode == 0, other.stderr
    assert process.stdin is not None
    process.stdin.write(b"ask\n")
    process.stdin.flush()
    person.run("agent", "wait", "idles", "--state=idle", "--timeout=20s", "--every=200ms")
    [row] = json.loads(person.run("agent", "state", "--json").stdout)
    assert (row["name"], row["agent"], row["state"]) == ("idles", "claude", "idle")
    assert row["why"].startswith("the agent spoke last, ")
    assert state(person, "other") == ["unknown"]
    table = person.run("agent", "state").stdout.decode().splitlines()
    assert [line.split() for line in table] == [
        ["SANDBOX", "NAME", "AGENT", "STATE"], [client.get("idles").id, "idles", "claude", "idle"]
    ]  # fmt: skip
    why = person.run("agent", "state", "--why", "other").stdout.decode()
    assert "no agent was started in it" in why
    process.stdin.write(b"fail\n")
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 4
    assert state(person, "idles") == ["failed"]
    person.run("kill", "idles", "other")
    assert b"idles" not in person.run("agent", "state").stdout


HOSTILE = r"""
dir=$HOME/.claude/projects/-workspace; mkdir -p $dir; cd $dir
line='{"type":"assistant","timestamp":"2020-01-01T00:00:00Z","message":{"content":"x"}}'
for n in 1 2 3 4 5 6 7 8 9; do echo "$line" >$n.jsonl; touch -d 2001-01-0$n $n.jsonl; done
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        pytest.param("", "idle", id="more sessions than are read"),
        # A byte that is no UTF-8 takes six in a request, which holds a MiB.
        pytest.param("n=$(head -c 240 /dev/zero | tr '\\0' '\\200'); "
                     "for i in $(seq 1000); do echo \"$line\" >$n$i.jsonl; done",
                     "idle", id="names that no request has room for"),
        pytest.param("rm *; ln -s /dev/zero a.jsonl; mkfifo b.jsonl; mkdir c.jsonl", "unknown", id="no files"),
        pytest.param("rm *; truncate -s 10G a.jsonl", "unknown", id="a file of holes"),
        pytest.param("rm *; head -c 9000000 /dev/zero >a.jsonl; echo >>a.jsonl; echo \"$line\" >>a.jsonl", "idle",
                     id="a line without end before a good one"),
        pytest.param("rm *; python3 -c 'print(\"[\" * 500000)' >a.jsonl", "unknown", id="nested without end"),
        pytest.param("rm *; head -c 100000 /dev/urandom >a.jsonl", "unknown", id="noise"),
        pytest.param("rm -r ../../projects; touch ../../projects", "unknown", id="a file for a directory"),
        pytest.param("rm -r ../../projects; ln -s / ../../projects", "unknown", id="a link out of it"),
    ],
)  # fmt: skip
def test_whatever_a_guest_leaves_as_its_session(rig: Rig, script: str, said: str) -> None:
    client = Client(str(rig.socket))
    ref = rig.create(labels={"agent": "claude"})
    client.start(ref, ["sleep", "60"])
    done = client.run(ref, ["sh", "-c", HOSTILE + script])
    assert done.exit_code == 0, done.stderr
    verdict = states.look(client, client.get(ref), time.time())
    assert verdict.state == said, verdict
    client.delete(ref)


def test_the_newest_of_many_sessions_is_read(rig: Rig) -> None:
    client = Client(str(rig.socket))
    ref = rig.create(labels={"agent": "claude"})
    client.start(ref, ["sleep", "60"])
    user = '{"type":"user","timestamp":"2026-01-01T00:00:00Z","message":{"content":"x"}}'
    client.run(ref, ["sh", "-c", f"{HOSTILE}echo '{user}' >0.jsonl"])
    assert states.look(client, client.get(ref), time.time()).state == "working"
    client.run(ref, ["touch", "-d", "2000-01-01", "/sandbox/home/.claude/projects/-workspace/0.jsonl"])
    assert states.look(client, client.get(ref), time.time()).state == "idle"
    client.delete(ref)


def test_codex_s_sessions_are_found_by_their_dates(rig: Rig) -> None:
    client = Client(str(rig.socket))
    ref = rig.create(labels={"agent": "codex"})
    client.start(ref, ["sleep", "60"])
    assert states.look(client, client.get(ref), time.time()).state == "unknown"
    top = "/sandbox/home/.codex/sessions"
    old, new = item("AgentMessage", "x", "Text"), item("UserMessage", "x", "text")
    for day in range(1, 10):
        client.write_file(ref, f"{top}/2026/11/0{day}/rollout-2026-11-0{day}T00.jsonl", json.dumps(old).encode())
    assert states.look(client, client.get(ref), NOW + 60).state == "idle"
    client.write_file(ref, f"{top}/2026/12/01/rollout-2026-12-01T00.jsonl", json.dumps(new).encode() + b"\n")
    assert states.look(client, client.get(ref), NOW + 60).state == "working"
    client.delete(ref)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("wait", "box"), "agent wait: an argument is missing"),
        (("wait", "box", "--state=waiting"), "--state waiting: it is one of working, blocked, idle,"),
        (("wait", "box", "--state=done", "--every=100ms"), "--every 100ms: at least 200ms"),
        (("wait", "box", "--state=done", "--timeout=soon"), "--timeout soon: not a length of time"),
        (("wait", "none", "--state=done"), "no such sandbox: none"),
        (("state", "none"), "no such sandbox: none"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(person: Person, words: tuple[str, ...], said: str) -> None:
    done = person.run("agent", *words)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert said in done.stderr.decode()
