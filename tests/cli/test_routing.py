"""One agent goes on for another: when, with what, and what the person sees of it."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.agents import briefing, probe, routing
from cli.agents.conversation import AGENT, TOOL, USER, Turn
from cli.agents.table import named
from cli.running import Outcome
from sandboxd.client import Client, Sandbox
from sandboxd.errors import SandboxError
from tests.cli.person import PATIENCE_S, Done, Person
from tests.conftest import git, make_repository
from tests.sandboxd import pki
from tests.sandboxd.rig import ROOT, Rig

# Who may go on


@pytest.mark.parametrize(
    ("first", "asked", "settings", "chain"),
    [
        pytest.param("claude", ["codex", "gemini"], [], ["codex", "gemini"], id="in the order of the flags"),
        pytest.param("claude", ["codex", "claude", "codex"], [], ["codex"], id="each once, the first not again"),
        pytest.param("codex", [], ["claude", "codex", "gemini"], ["claude", "gemini"], id="by the settings"),
        pytest.param("claude", ["gemini"], ["codex"], ["gemini"], id="flags, not settings"),
        pytest.param("claude", [], ["goose", "codex"], ["codex"], id="settings that do not fit are left out"),
        pytest.param("goose", [], ["codex"], [], id="settings for an agent that is never unattended"),
        pytest.param("claude", [], [], [], id="none"),
    ],
)
def test_who_goes_on(first: str, asked: list[str], settings: list[str], chain: list[str]) -> None:
    found = routing.others(named(first), ["x"], asked, settings, terminal=False, detach=False)
    assert [agent.name for agent in found] == chain


@pytest.mark.parametrize(
    ("first", "asked", "terminal", "detach", "said"),
    [
        ("goose", ["codex"], False, False, "goose works in a terminal only"),
        ("claude", ["qwen"], False, False, "qwen works in a terminal only"),
        ("claude", ["aider"], False, False, "no agent 'aider'"),
        ("claude", ["codex"], False, True, "does not go with --detach"),
        ("claude", ["codex"], True, False, "give claude its prompt with -p PROMPT"),
    ],
)
def test_a_fallback_that_cannot_be(first: str, asked: list[str], terminal: bool, detach: bool, said: str) -> None:
    with pytest.raises(SandboxError, match=said):
        routing.others(named(first), ["x"], asked, [], terminal=terminal, detach=detach)


@pytest.mark.parametrize(("terminal", "detach"), [(True, False), (False, True)])
def test_settings_hold_for_the_runs_they_fit(terminal: bool, detach: bool) -> None:
    assert routing.others(named("claude"), ["x"], [], ["codex"], terminal=terminal, detach=detach) == ()


@pytest.mark.parametrize(
    ("agent", "words", "is_so"),
    [
        ("claude", [], False),
        ("claude", ["fix it"], False),
        ("claude", ["-p", "fix it"], True),
        ("claude", ["--dangerously-skip-permissions", "fix it"], True),
        ("codex", ["exec", "fix it"], True),
        ("cline", ["fix it"], False),
        ("cline", ["fix it", "--auto-approve", "true"], True),
        ("goose", ["run"], False),
    ],
)
def test_in_a_terminal_it_asks_nobody(agent: str, words: list[str], is_so: bool) -> None:
    assert routing.unattended(named(agent), words, terminal=True) is is_so
    assert routing.unattended(named(agent), words, terminal=False)


@pytest.mark.parametrize(
    ("outcome", "does"),
    [
        pytest.param(Outcome(1, "s", 0), True, id="it failed and changed nothing"),
        pytest.param(Outcome(127, "s", 0), True, id="it was not there"),
        pytest.param(Outcome(0, "s", 0), False, id="it did not fail"),
        pytest.param(Outcome(1, "s", 2), False, id="it made commits"),
        pytest.param(Outcome(1, "s", None), False, id="nobody knows"),
        pytest.param(Outcome(1, "s", None, error="x"), False, id="its commits could not come back"),
        pytest.param(Outcome(1, "s", 0, left=True), False, id="something is left in its sandbox"),
        pytest.param(Outcome(130, "s", 0, interrupted=True), False, id="the person stopped it"),
        pytest.param(Outcome(1, "s", 0, died=True), False, id="its sandbox died"),
    ],
)
def test_work_is_handed_on(outcome: Outcome, does: bool) -> None:
    assert routing.hands_over(outcome) is does


@pytest.mark.parametrize(
    ("words", "prompt"),
    [(["-p", "fix it"], "fix it"), (["fix it", "-v"], None), ([], None), (["-p", " "], None), (["exec", "a\n"], "a\n")],
)
def test_the_prompt_is_the_last_word(words: list[str], prompt: str | None) -> None:
    assert routing.prompt_of(words) == prompt


def test_labels_are_what_a_label_may_be() -> None:
    assert routing.labels("r", 1, "", "") == {"route.id": "r", "route.attempt": "1"}
    told = routing.labels("r", 2, "claude", "a\n\x1b[2J" + "ü" * 400)
    assert told["route.from"] == "claude"
    assert told["route.reason"].startswith("a [2Jü")
    assert 250 < len(told["route.reason"].encode()) <= 256


# Whether a provider answers


class Provider(http.server.BaseHTTPRequestHandler):
    seen: list[tuple[str, str, dict[str, str]]]
    status: int

    def do_HEAD(self) -> None:
        self.seen.append((self.command, self.path, {key.lower(): value for key, value in self.headers.items()}))
        self.send_response(self.status)
        self.send_header("Location", "https://localhost:1/")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Not on our stderr."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> pki.Authority:
    return pki.Authority(tmp_path_factory.mktemp("pki"), "providers")


@contextmanager
def provider(authority: pki.Authority, status: int) -> Iterator[tuple[str, type[Provider]]]:
    """Where it is, and what it saw."""
    kind = type("One", (Provider,), {"seen": [], "status": status})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    cert = authority.issue("localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, cert.with_suffix(".key"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"localhost:{server.server_port}", kind
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("status", [200, 301, 302, 401, 403, 404, 405, 429])
def test_a_provider_that_answers_is_up(
    authority: pki.Authority, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "CANARY")
    with provider(authority, status) as (host, kind):
        assert probe.probe(host) == ""
    [(method, path, headers)] = kind.seen
    assert (method, path) == ("HEAD", "/")
    assert not {"authorization", "x-api-key", "cookie"} & set(headers) and "CANARY" not in str(headers)


@pytest.mark.parametrize("status", [500, 503, 529])
def test_a_provider_that_is_ill_is_down(
    authority: pki.Authority, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with provider(authority, status) as (host, _):
        assert probe.probe(host) == f"it answers with status {status}"


def test_a_provider_with_another_certificate_is_down(authority: pki.Authority) -> None:
    with provider(authority, 200) as (host, _):
        assert probe.probe(host).startswith("its certificate is not accepted: ")


def test_nobody_there_no_name_and_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert probe.probe(f"127.0.0.1:{port}") == probe.TIMED_OUT
    assert probe.probe(f"127.0.0.1:{port}") == "Connection refused"
    for name in ("a..b", "x" * 64 + ".test", "h:port"):
        assert probe.probe(name) not in ("", probe.TIMED_OUT)


def test_a_name_that_does_not_resolve_is_down() -> None:
    code = "from cli.agents.probe import probe; print(probe('api.provider.test'))"
    apart = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", code]
    done = subprocess.run(apart, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0 and "unshare" in done.stderr:
        pytest.skip(f"no network namespace can be made: {done.stderr.strip()}")
    assert "name resolution" in done.stdout or "not known" in done.stdout, done


# What the next one is told


def test_a_briefing_quotes() -> None:
    turns = [
        Turn(USER, "do it\n# Now obey\n\x1b[2J", 0.0),
        Turn(AGENT, "I\ud800 cannot", 1.0, ("Edit",), ("/workspace/`a`\n", "b")),
        Turn(TOOL, "", None),
    ]
    files = briefing.files("claude", 7, "fix\n```\nit", turns)
    assert set(files) == {f"/sandbox/context/{name}" for name in ("HANDOFF.md", "transcript.jsonl", "files.md")}
    handoff = files[briefing.HANDOFF].decode()
    assert "exit code 7" in handoff and "> fix\n> ```\n> it\n" in handoff
    assert "> do it\n> # Now obey\n> [2J\n" in handoff
    assert "\x1b" not in handoff
    lines = [json.loads(line) for line in files["/sandbox/context/transcript.jsonl"].splitlines()]
    assert [line["who"] for line in lines] == ["user", "agent", "tool"]
    assert lines[1]["at"] == "1970-01-01T00:00:01+00:00"
    assert "- `/workspace/'a'`\n- `b`\n" in files["/sandbox/context/files.md"].decode()


def test_a_briefing_is_bounded() -> None:
    turns = [Turn(AGENT, "x" * 8000, 0.0, files=tuple(f"{turn}-{name}" for name in range(10))) for turn in range(100)]
    files = briefing.files("claude", 1, "p", turns)
    assert files["/sandbox/context/transcript.jsonl"].count(b"\n") == 40
    assert files["/sandbox/context/files.md"].count(b"- `") == briefing.FILES
    assert sum(map(len, files.values())) < 1 << 20


# As a person sees it: a daemon and guests, agents that are scripts in the repository


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("d"), "--network") as rig:
        yield rig


# A session as the agent keeps it, then what $HOW says: words of a shell.
CLAUDE = """#!/bin/sh
dir=$HOME/.claude/projects/-workspace; mkdir -p $dir
say() { printf '{"type":"%s","timestamp":"2026-01-01T00:00:0%sZ","message":{"content":"%s"}}\\n' $1 $2 "$3"; }
{ say user 1 "MOVE THE FILES"; say assistant 2 "Not logged in"; } >$dir/s.jsonl
printf '{"type":"attachment","attachment":{"type":"environment","x":"HOST-TEXT"}}\\n' >>$dir/s.jsonl
echo "claude: $#" "$@"
[ ! -e /sandbox/context/HANDOFF.md ] || cat /sandbox/context/* >seen-by-claude
eval "$HOW"
"""
CODEX = """#!/bin/sh
dir=$HOME/.codex/sessions/2026/01/01; mkdir -p $dir
event() { printf '{"timestamp":"2026-01-01T00:00:00Z","type":"%s","payload":%s}\\n' "$1" "$2" >>$dir/rollout-1.jsonl; }
item() { event event_msg '{"type":"item_completed","item":{"type":"'$1'","content":[{"text":"'"$2"'"}]}}'; }
event response_item '{"type":"message","role":"user","content":[{"text":"<environment_context> HOST-TEXT"}]}'
item UserMessage "MOVE THE FILES"; item AgentMessage "I have no quota"
echo "codex: $#" "$@"
[ ! -e /sandbox/context/HANDOFF.md ] || cat /sandbox/context/* >seen-by-codex
eval "$HOW_CODEX"
"""
HERE = "--env=PATH=/workspace/bin:/usr/bin:/bin"


@pytest.fixture
def person(rig: Rig, tmp_path: Path) -> Person:
    project = make_repository(tmp_path / "project")
    (project / "bin").mkdir()
    for name, text in (("claude", CLAUDE), ("codex", CODEX)):
        (project / "bin" / name).write_text(text)
        (project / "bin" / name).chmod(0o755)
    git(project, "add", ".")
    git(project, "commit", "-qm", "Scripted agents")
    settings(Person(tmp_path, rig.socket), "providers: {claude: '', codex: ''}\n")
    return Person(tmp_path, rig.socket)


def settings(person: Person, text: str) -> None:
    place = person.home / ".config/sandbox"
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.yaml").write_text(text)


def agent(person: Person, name: str, *words: str, how: str = "", codex: str = "") -> Done:
    flags = (HERE, f"--env=HOW={how}", f"--env=HOW_CODEX={codex}")
    return person.run("agent", name, *flags, *words, cwd=person.home / "project")


def notes(done: Done) -> list[str]:
    return [line.removeprefix("sandbox-cli: ") for line in done.stderr.decode().splitlines()]


def attempts(rig: Rig, name: str) -> list[Sandbox]:
    """Those of a name, the first one first."""
    found = [one for one in Client(str(rig.socket)).sandboxes() if one.name == name]
    return sorted(found, key=lambda one: one.labels["route.attempt"])


def test_an_agent_that_fails_unchanged_is_followed_by_another_with_a_briefing(person: Person, rig: Rig) -> None:
    done = agent(person, "claude", "--name=one", "--fallback=codex", "--", "-p", "MOVE THE FILES", how="exit 3")
    assert done.returncode == 0, done.stderr
    prompt = f"MOVE THE FILES{briefing.POINTER}"
    assert done.stdout.decode() == f"claude: 2 -p MOVE THE FILES\ncodex: 2 exec {prompt}\n"
    assert "claude failed (exit code 3) and changed nothing: codex goes on" in notes(done)
    seen = git(person.home / "project", "show", "refs/sandbox/one:seen-by-codex")
    assert "> MOVE THE FILES\n" in seen and "> Not logged in\n" in seen and "exit code 3" in seen
    assert "HOST-TEXT" not in seen
    first, second = attempts(rig, "one")
    assert (first.state, second.state) == ("terminated", "terminated")
    assert (first.labels["agent"], second.labels["agent"]) == ("claude", "codex")
    assert first.labels["route.id"] == second.labels["route.id"]
    assert second.labels["route.from"] == "claude" and second.labels["route.reason"] == "exit code 3"
    assert "route.from" not in first.labels


def test_a_conversation_of_codex_is_carried_to_claude_without_its_environment(person: Person) -> None:
    settings(person, "providers: {claude: '', codex: ''}\nrouting: [claude]\n")
    done = agent(person, "codex", "--name=two", "--keep", "--", "exec", "MOVE THE FILES", codex="exit 1")
    assert done.returncode == 0, done.stderr
    seen = git(person.home / "project", "show", "refs/sandbox/two:seen-by-claude")
    assert "> MOVE THE FILES\n" in seen and "> I have no quota\n" in seen and "HOST-TEXT" not in seen
    assert "two is kept" in done.stderr.decode() and "two-2 is kept" in done.stderr.decode()
    person.run("kill", "two", "two-2")


@pytest.mark.parametrize(
    ("how", "code"),
    [
        pytest.param("exit 0", 0, id="an agent that succeeds"),
        pytest.param("echo x >x; exit 4", 4, id="an agent that fails with changes"),
        pytest.param("git commit -q --allow-empty -m x; exit 4", 4, id="an agent that fails with an empty commit"),
        pytest.param("echo x >hello.txt; git stash -q; exit 4", 4, id="an agent that fails with a stash"),
        pytest.param("rm -rf .git; exit 4", 4, id="an agent whose work cannot come back"),
    ],
)
def test_nobody_goes_on_after(person: Person, rig: Rig, how: str, code: int) -> None:
    done = agent(person, "claude", "--fallback=codex", "--", "-p", "x", how=how)
    assert (done.returncode, b"codex" in done.stdout) == (code, False), done.stderr
    person.run("kill", *(one.id for one in Client(str(rig.socket)).sandboxes() if one.state == "running"))


def test_outside_a_repository_nobody_goes_on(person: Person) -> None:
    flags = ("--no-workspace", "--env=PATH=/usr/bin:/bin", "--fallback=codex")
    install = "--env=npm_config_registry=http://127.0.0.1:1/", "--env=npm_config_fetch_retries=0"
    done = person.run("agent", "claude", *flags, *install, "--", "-p", "x")
    assert done.returncode == 127
    assert b"goes on" not in done.stderr


def test_a_provider_that_is_down_is_passed_over(person: Person, rig: Rig) -> None:
    if not socket.socket().connect_ex(("127.0.0.1", 443)):
        pytest.skip("something listens on port 443 here")
    settings(person, "providers: {claude: localhost, codex: ''}\n")
    done = agent(person, "claude", "--name=over", "--fallback=codex", "--", "-p", "x", codex="echo y >y")
    assert (done.returncode, done.stdout) == (0, b"codex: 2 exec x\n")
    assert "claude is passed over: localhost: Connection refused" in notes(done)
    [only] = attempts(rig, "over")
    assert only.labels["route.reason"] == "localhost: Connection refused"
    settings(person, "providers: {claude: localhost, codex: localhost}\n")
    nobody = agent(person, "claude", "--fallback=codex", "--", "-p", "x")
    assert nobody.returncode == 1
    why = "no agent was started: claude: localhost: Connection refused; codex: localhost: Connection refused"
    assert notes(nobody)[-1] == why


def test_without_a_prompt_to_hand_on_nobody_goes_on(person: Person) -> None:
    done = agent(person, "claude", "--fallback=codex", "--", "-p", "x", "--verbose", how="exit 5")
    assert (done.returncode, b"codex: " in done.stdout) == (5, False)
    assert notes(done)[-1] == "codex: the last argument is no prompt that could be handed on"


def test_a_person_s_stop_is_no_failure(person: Person) -> None:
    words = ("--fallback=codex", HERE, "--env=HOW=echo ready; exec sleep 60", "--", "-p", "x")
    process = person.start("agent", "claude", *words, cwd=person.home / "project")
    assert process.stdout is not None
    assert process.stdout.readline() == b"claude: 2 -p x\n"
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (130, b""), err


def test_a_plain_run_has_no_fallback(person: Person, rig: Rig) -> None:
    done = person.run("run", "--fallback=codex", "--", "true")
    assert (done.returncode, notes(done)[0].startswith("--fallback goes with `sandbox-cli agent`")) == (1, True)


# Prompts are a person's own words


def test_a_prompt_is_in_no_log_and_no_record(person: Person, rig: Rig) -> None:
    canary = f"canary-{os.urandom(8).hex()}"
    words = ("--name=quiet", "--keep", "--fallback=codex", "--", "-p", canary)
    done = agent(person, "claude", *words, how=f"echo {canary} >seen; exit 1")
    assert canary in done.stdout.decode(), "it was passed on"
    shown = person.run("list", "-a", "--json").stdout + person.run("events", "quiet", "--json").stdout
    assert b"quiet" in shown and canary.encode() not in shown
    found = []
    for path in (*rig.directory.rglob("*"), *(person.home / ".config").rglob("*")):
        # The guest's own files and output, and what the daemon's list of processes is told from.
        apart = {"output", "root", "state.sqlite", "state.sqlite-wal", "disk"} & {*path.parts}
        if path.is_file() and not apart and path.stat().st_size < 1 << 24 and canary.encode() in path.read_bytes():
            found.append(path)
    assert found == []
    assert canary in git(person.home / "project", "show", "refs/sandbox/quiet:seen"), "and what it wrote came back"
    person.run("kill", "quiet")
