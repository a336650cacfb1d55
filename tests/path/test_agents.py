"""Agents in real machines, from the first word to the handing on: scripted programs take the places of real ones."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.cli.person import Person
from tests.conftest import git, make_repository
from tests.daemon import Daemon

pytestmark = pytest.mark.vm

PATIENCE_S = 240

# Keeps a session as Claude Code does, logs in, waits for a word, and gives up.
CLAUDE = r"""#!/bin/sh
echo "$0" "$@"
mkdir -p $HOME/.claude/projects/-workspace
line='{"type":"%s","timestamp":"2026-01-01T00:00:0%sZ","message":{"content":"%s"}}\n'
{ printf "$line" user 1 "$2"; printf "$line" assistant 2 "Which one?"; } >$HOME/.claude/projects/-workspace/s.jsonl
printf '{"userID": "u", "hooks": {}}' >$HOME/.claude.json
until [ -e /tmp/go ]; do sleep 0.2; done
exit 3
"""
CODEX = r"""#!/bin/sh
echo "$0" "$1"
cat /sandbox/context/HANDOFF.md >NOTES
"""


def test_an_agent_asks_gives_up_and_another_goes_on(networked: Daemon, tmp_path: Path) -> None:
    project = make_repository(tmp_path / "project")
    (project / "bin").mkdir()
    for name, text in (("claude", CLAUDE), ("codex", CODEX)):
        (project / "bin" / name).write_text(text)
        (project / "bin" / name).chmod(0o755)
    git(project, "add", ".")
    git(project, "commit", "-qm", "Scripted agents")
    person = Person(tmp_path, networked.socket)
    config = tmp_path / ".config/sandbox"
    config.mkdir(parents=True)
    (config / "config.yaml").write_text("providers: {claude: '', codex: ''}\n")
    canary = f"canary-{os.urandom(8).hex()}"
    # A volume of the person's own where the tools would be, so that nothing is installed.
    networked.client.create_volume("own", 64)
    place = ("--volume=own:/sandbox/tools", "--env=PATH=/workspace/bin:/usr/local/bin:/usr/bin:/bin")
    words = ("--name=route", "--memory=512", *place, "--fallback=codex", "--", "-p", canary)
    process = person.start("agent", "claude", *words, cwd=project)

    waiting = ("agent", "wait", "--state=idle", "--timeout=40s", "route")
    deadline = time.monotonic() + PATIENCE_S
    while (waited := person.run(*waiting)).returncode and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.5)
    assert (waited.returncode, waited.stdout) == (0, b"idle\n"), waited.stderr
    [row] = json.loads(person.run("agent", "state", "--json").stdout)
    assert (row["name"], row["agent"]) == ("route", "claude")
    person.run("exec", "route", "--", "touch", "/tmp/go")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err.decode()

    assert out.decode().splitlines() == [
        f"/workspace/bin/claude -p {canary}", "/workspace/bin/codex exec"
    ]  # fmt: skip
    told = git(project, "show", "refs/sandbox/route:NOTES")
    assert f"> {canary}\n" in told and "> Which one?\n" in told and "exit code 3" in told
    assert json.loads((config / "agents/claude/.claude.json").read_bytes()) == {"userID": "u"}
    ended = [one for one in networked.client.sandboxes() if one.name == "route"]
    assert sorted((one.labels["agent"], one.state) for one in ended) == [
        ("claude", "terminated"), ("codex", "terminated")
    ]  # fmt: skip
    assert canary not in networked.log.read_text(errors="replace")
    for path in (networked.state / "audit").rglob("*"):
        assert canary not in path.read_text(errors="replace")
    networked.client.delete_volume("own")
