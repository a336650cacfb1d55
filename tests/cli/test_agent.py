"""Agents as commands: whose word is whose, what an agent is started with, and how it is found."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from cli import network, plan, run
from cli.agents import provider, start, wrapper
from cli.agents.table import AGENTS, Agent, Npm, named
from cli.config import Config
from sandboxd.answers import Capabilities, Network
from sandboxd.client import Client
from sandboxd.errors import SandboxError
from tests.cli.person import Done, Person
from tests.conftest import git, make_repository
from tests.sandboxd.rig import Rig

KNOWN = {"--keep": False, "--name": True, "--env": True}

# What an agent is in these tests: a program that shows its words and does a little work.
SCRIPTED = """#!/bin/sh
printf '%s\\n' "$0" "$@"
env | sort >seen-environment
exit "${LEAVE_WITH:-0}"
"""


# Whose word is whose


@pytest.mark.parametrize(
    ("words", "flags", "agents"),
    [
        pytest.param([], [], [], id="nothing"),
        pytest.param(["--keep", "-p", "x"], ["--keep"], ["-p", "x"], id="a switch, then the agent's short flag"),
        pytest.param(["--name", "n", "exec"], ["--name", "n"], ["exec"], id="a value behind its flag"),
        pytest.param(["--name=n", "exec"], ["--name=n"], ["exec"], id="a value in its flag"),
        pytest.param(["--name", "--keep", "x"], ["--name", "--keep"], ["x"], id="a value that looks like a flag"),
        pytest.param(["--model", "m", "--keep"], [], ["--model", "m", "--keep"], id="the agent's own long flag first"),
        pytest.param(["x", "--keep"], [], ["x", "--keep"], id="a flag of ours behind another word is the agent's"),
        pytest.param(["-e", "K=V"], [], ["-e", "K=V"], id="a short flag of ours is the agent's"),
        pytest.param(["--kee"], [], ["--kee"], id="half a flag of ours is the agent's"),
        pytest.param(["--keep", "--", "--keep"], ["--keep"], ["--keep"], id="everything behind -- is the agent's"),
        pytest.param(["--", "--", "-h"], [], ["--", "-h"], id="a second -- is the agent's"),
        pytest.param(["x", "--"], [], ["x", "--"], id="a -- behind another word is the agent's"),
        pytest.param(["-h"], [], ["-h"], id="the agent's help"),
        pytest.param(["", "--keep"], [], ["", "--keep"], id="an empty word is the agent's"),
        pytest.param(["--name=a=b", ""], ["--name=a=b"], [""], id="an equals sign in a value"),
        pytest.param(["--help=x"], [], ["--help=x"], id="a flag that only begins like help"),
    ],
)
def test_the_leading_flags_of_ours_are_ours(words: list[str], flags: list[str], agents: list[str]) -> None:
    assert wrapper.split(words, KNOWN) == wrapper.Words(tuple(flags), tuple(agents))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--name"], "--name needs a value"),
        (["--keep=1"], "--keep takes no value"),
    ],
)
def test_flags_of_ours_that_do_not_fit(words: list[str], said: str) -> None:
    with pytest.raises(SandboxError, match=f"^agent: {said}"):
        wrapper.split(words, KNOWN)


def test_help_of_the_sandbox_s_flags_is_asked_for_before_the_agent_s_words() -> None:
    assert wrapper.split(["--keep", "--help"], KNOWN).help
    assert wrapper.split(["x", "--help"], KNOWN) == wrapper.Words((), ("x", "--help"))
    assert wrapper.split(["--", "--help"], KNOWN) == wrapper.Words((), ("--help",))


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["--profle", "prod"], "--profile"), (["--name=a", "--profil=prod"], "--profile"),
        (["--no-baselines", "-p", "x"], "--no-baseline"), (["--", "--profle"], ""), (["-p", "x"], ""), ([], ""),
        (["--model", "x"], ""), (["--continue"], ""), (["--allowedTools", "x"], ""), (["--prompt", "x"], ""),
        (["--yolo"], ""), (["exec", "--profle"], ""), (["--dangerously-skip-permissions"], ""), (["--resume"], ""),
    ],
)  # fmt: skip
def test_a_flag_of_ours_that_is_mistyped_is_told(words: list[str], near: str) -> None:
    known = wrapper.flags(str(run.__doc__))
    assert wrapper.meant(words, wrapper.split(words, known), known) == near


def test_the_flags_are_those_of_run() -> None:
    flags = wrapper.flags(str(run.__doc__))
    arguments = run.parsed((), ("x",))
    assert set(flags) == {name for name in arguments if name.startswith("--")} - {"--", "--help"}
    for name, value in flags.items():
        plain = "-e" if name == "--env" else name
        assert isinstance(arguments.get(plain, arguments.get(name)), bool) is not value, name


# What an agent is started with


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("claude", ["-p", "fix it", "--dangerously-skip-permissions", "--model", "m"]),
        ("codex", ["exec", "fix it", "--model", "m"]),
        ("gemini", ["-p", "fix it", "--yolo", "--model", "m"]),
        ("opencode", ["run", "fix it", "--model", "m"]),
        ("cline", ["fix it", "--auto-approve", "true", "--model", "m"]),
    ],
)
def test_without_a_person(agent: str, words: list[str]) -> None:
    assert list(start.headless(named(agent), "fix it", ["--model", "m"])) == words


def test_five_agents_work_without_a_person_and_the_others_say_so() -> None:
    able = [name for name, agent in AGENTS.items() if agent.headless is not None]
    assert able == ["claude", "codex", "gemini", "opencode", "cline"]
    for name in set(AGENTS) - set(able):
        with pytest.raises(SandboxError, match=f"^{name} works in a terminal only"):
            start.headless(AGENTS[name], "x")


@pytest.mark.parametrize("prompt", ["", "  \n", "-p", "--help", "a\0b"])
def test_a_prompt_that_would_be_taken_for_something_else(prompt: str) -> None:
    with pytest.raises(SandboxError, match=r"^the prompt "):
        start.headless(named("claude"), prompt)


def test_every_agent_is_at_one_version_or_says_why_not() -> None:
    for agent in AGENTS.values():
        assert agent.source.version or getattr(agent.source, "unpinned", ""), agent.name
        assert not any(name.endswith(("_HOME", "_DIR", "_PATH", "_FILE")) for name in agent.env), "no paths of the host"


# How it is found, by the script itself: real shells, a directory in place of HOME, another in place of the volume


class Place:
    """A HOME, directories of PATH and a tools volume, each with or without the program."""

    def __init__(self, top: Path) -> None:
        self.home, self.first, self.second, self.tools = (top / name for name in ("home", "a", "b", "tools"))
        for path in (self.home, self.first, self.second, self.tools):
            path.mkdir()

    def put(self, directory: Path, says: str, mode: int = 0o755) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "prog").write_text(f"#!/bin/sh\necho {says}\necho \"$0\"\nprintf '<%s>' \"$@\"\n")
        (directory / "prog").chmod(mode)
        return directory

    def start(self, install: str, *words: str, shell: str = "sh", path: str = "") -> subprocess.CompletedProcess[str]:
        row = Agent("prog", "prog", Npm("prog", "1.2"))
        script, *rest = start.argv(row, words)[2:]
        script = script.replace(start.install_script(row), install).replace(start.TOOLS_PATH, str(self.tools))
        return subprocess.run(
            [shell, "-c", script, *rest], capture_output=True, text=True, check=False, cwd=self.first,
            env={"HOME": str(self.home), "PATH": path or f"{self.first}:{self.second}:/usr/bin:/bin"},
        )  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


SHELLS = ("sh", "bash")


def test_the_sandbox_s_own_comes_first_then_path_then_the_volume(place: Place) -> None:
    own, volume = place.home / ".local/bin", place.put(place.tools / ".local/bin", "volume")
    (place.tools / ".sandbox-ready").touch()
    for directory, says in ((volume, "volume"), (place.second, "path"), (place.first, "earlier"), (own, "own")):
        place.put(directory, says)
        assert place.start("false\n").stdout.splitlines()[:2] == [says, f"{directory}/prog"]


def test_a_volume_that_is_not_marked_as_whole_is_not_used(place: Place) -> None:
    place.put(place.tools / ".local/bin", "volume")
    done = place.start("false\n")
    assert (done.returncode, done.stdout) == (start.NOT_STARTED, "")
    assert done.stderr.splitlines()[0] == "sandbox: installing prog 1.2 into the sandbox"
    assert "prog 1.2 could not be installed" in done.stderr


def test_what_is_installed_is_started_and_says_nothing_on_stdout(place: Place) -> None:
    place.put(place.second / "new", "installed")
    install = f"echo noise; cat; mkdir -p $HOME/.local/bin && mv {place.second}/new/prog $HOME/.local/bin/\n"
    done = place.start(install, "a b")
    assert done.stdout == f"installed\n{place.home}/.local/bin/prog\n<a b>"
    assert done.stderr == "sandbox: installing prog 1.2 into the sandbox\nnoise\n"


def test_only_programs_in_absolute_directories_are_found(place: Place) -> None:
    place.put(place.first, "relative")
    place.put(place.second, "no program", mode=0o644)
    (place.home / "dir" / "prog").mkdir(parents=True)
    path = f".::{place.second}:{place.home}/dir:/usr/bin:/bin"
    assert place.start("false\n", path=path).returncode == start.NOT_STARTED


def test_path_is_only_added_to(place: Place) -> None:
    place.put(place.first, "x")
    (place.first / "prog").write_text("#!/bin/sh\necho $PATH\n")
    (place.tools / ".sandbox-ready").touch()
    before = f"{place.first}:/usr/bin:/bin"
    added = f"{place.home}/.local/bin:{place.tools}/.local/bin"
    assert place.start("false\n", path=before).stdout == f"{before}:{added}\n"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["$(touch owned)", "`id`", "; id", "a'b\"c", "*"], id="what a shell would run"),
        pytest.param(["", " ", "\n", "a\nb\n"], id="empty words and line ends"),
        pytest.param(["-c", "--", "-", "--help"], id="what looks like a shell's flag"),
        pytest.param(["ü\u202e", "\x1b[2J"], id="other text"),
        pytest.param(["x" * 100_000], id="a long prompt"),
    ],
)
def test_the_agent_s_words_are_passed_as_they_are(place: Place, shell: str, words: list[str]) -> None:
    place.put(place.first, "x")
    done = place.start("false\n", *words, shell=shell)
    assert done.stdout.split("\n", 2)[2] == "".join(f"<{word}>" for word in words)
    assert list(place.first.iterdir()) == [place.first / "prog"]


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_every_start_script_is_read_by_a_shell(agent: Agent) -> None:
    done = subprocess.run(
        ["sh", "-n", "-c", start.argv(agent, ())[2]], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# Its environment, labels and network


def planned(agent: str | None, *flags: str, **environ: str) -> plan.Plan:
    row = named(agent) if agent else None
    return plan.of(run.parsed(flags, ("x",)), Config(), environ, None, row)


def environment(asked: plan.Plan) -> dict[str, str]:
    return {name: value for name, value in (asked.create.env or {}).items() if not name.startswith("GIT_")}


def test_only_listed_variables_go_in_and_the_person_s_word_wins() -> None:
    here = {"ANTHROPIC_API_KEY": "k", "OPENAI_API_KEY": "o", "CODEX_HOME": "/h", "HOME": "/root", "AWS_SECRET": "s"}
    assert environment(planned("claude", **here)) == {"ANTHROPIC_API_KEY": "k"}
    assert environment(planned("codex", **here)) == {"OPENAI_API_KEY": "o"}
    assert environment(planned(None, **here)) == {}
    assert environment(planned("claude", "--env=ANTHROPIC_API_KEY=mine", **here)) == {"ANTHROPIC_API_KEY": "mine"}
    assert environment(planned("qwen")) == {"SANDBOX": "1", "NO_BROWSER": "1"}
    assert environment(planned("qwen", "--env=SANDBOX=0"))["SANDBOX"] == "0"


@pytest.mark.parametrize("agent", AGENTS)
def test_no_variable_that_is_a_path_of_this_machine_goes_in(agent: str) -> None:
    paths = ("_HOME", "_CONFIG", "_DIR", "_PATH", "_FILE", "_CREDENTIALS")
    assert [name for name in named(agent).env if name.endswith(paths)] == []


def test_the_label_says_which_agent_whatever_the_person_says() -> None:
    assert planned("claude", "--label=agent=x", "--label=a=b").create.labels == {"agent": "claude", "a": "b"}
    assert planned(None, "--label=a=b").create.labels == {"a": "b"}


def offer(default: str, ceiling: str = "open") -> Capabilities:
    allow = ("registry.test",) if default == "allowlist" else None
    return Capabilities("v1", "x", {}, {}, Network(default, allow), ceiling, ())


@pytest.mark.parametrize(
    ("flags", "default", "allow"),
    [
        pytest.param((), "allowlist", ["registry.test", "api.openai.com"], id="by itself"),
        pytest.param(("--allow=a.t",), "allowlist", ["registry.test", "a.t", "api.openai.com"], id="with another"),
        pytest.param(("--deny=b.test",), "allowlist", ["registry.test", "api.openai.com"], id="with a name denied"),
        pytest.param(("--no-baseline", "--allow=a.test"), "allowlist", ["a.test"], id="not where only names given are"),
        pytest.param((), "open", None, id="not where the default is wider"),
        pytest.param(("--network=open",), "allowlist", None, id="not where all is asked for"),
        pytest.param(("--network=none",), "allowlist", None, id="not where nothing is asked for"),
    ],
)
def test_its_provider_is_allowed(flags: tuple[str, ...], default: str, allow: list[str] | None) -> None:
    asked = planned("codex", *flags)
    request = network.of_run(asked.network, offer(default), asked.hosts)
    assert (list(request.allow) if request and request.allow is not None else None) == allow


@pytest.mark.parametrize(
    ("agent", "env", "allowed", "said"),
    [
        pytest.param("claude", {}, Network("allowlist", ("api.anthropic.com",)), "", id="it reaches its provider"),
        pytest.param("claude", {}, Network("allowlist", ("*.anthropic.com",)), "", id="below a name"),
        pytest.param("claude", {}, Network("open", None), "", id="it reaches everything"),
        pytest.param(
            "claude", {}, Network("allowlist", ("a.test",)), ": add --allow api.anthropic.com", id="it does not"
        ),
        pytest.param(
            "claude", {}, Network("none", None), ": use --network allowlist --allow api.anthropic.com",
            id="it reaches nothing, and naming a host beside none is refused",
        ),
        pytest.param(
            "claude", {}, Network("open", None, ("*.anthropic.com",)), ": it is denied, whatever is allowed",
            id="it is denied, and no flag allows it",
        ),
        pytest.param("goose", {}, Network("none", None), "", id="one with many providers"),
        pytest.param(
            "claude", {"ANTHROPIC_BASE_URL": "https://Models.test/v1"}, Network("allowlist", ("api.anthropic.com",)),
            "ANTHROPIC_BASE_URL sends claude to models.test, which this run may not reach: add --allow models.test",
            id="it is sent elsewhere",
        ),
        pytest.param(
            "claude", {"ANTHROPIC_BASE_URL": "http://models.test:8080"}, Network("allowlist", ("models.test",)),
            ": add --allow-tcp models.test:8080", id="to another port",
        ),
        pytest.param(
            "claude", {"ANTHROPIC_BASE_URL": "http://models.test:8080"}, Network("none", None),
            ": use --network allowlist --allow-tcp models.test:8080", id="to another port, without a network",
        ),
        pytest.param(
            "claude", {"ANTHROPIC_BASE_URL": "http://models.test:8080"}, Network("open", None, ("models.test",)),
            ": it is denied, whatever is allowed", id="to another port of a name that is denied",
        ),
        pytest.param(
            "claude", {"ANTHROPIC_BASE_URL": "https://models.test:443"}, Network("allowlist", ("models.test",)), "",
            id="elsewhere, and reaches it",
        ),
        pytest.param(
            "claude", {"ANTHROPIC_BASE_URL": "http://localhost:4000"}, Network("open", None),
            "in the sandbox that is the sandbox itself, not this machine", id="to this machine",
        ),
        pytest.param("claude", {"ANTHROPIC_BASE_URL": "http://["}, Network("open", None), "", id="to no address"),
    ],
)
def test_a_provider_that_is_not_reached_is_said(agent: str, env: dict[str, str], allowed: Network, said: str) -> None:
    notes = list(provider.unreached(named(agent), env, allowed))
    assert bool(notes) is bool(said) and all(note.endswith(said) for note in notes)


@pytest.mark.parametrize(("uid", "said"), [(1000, "as said above$"), (0, "sandboxd &$")])
def test_without_a_network_no_agent_is_started_and_how_to_get_one_is_said(
    uid: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SandboxError, match=f"its ceiling is none; .*{said}"):
        network.for_agents(offer("none", "none"), uid)
    told = capfd.readouterr().err
    assert all(len(line) <= 80 for line in told.splitlines()), told
    # What is to be pasted stands on lines of its own, as a shell reads it.
    commands = "".join(line for line in told.splitlines(keepends=True) if line.startswith("  "))
    assert bool(commands) is (uid != 0) and subprocess.run(["bash", "-n", "-c", commands], check=False).returncode == 0
    assert ("--listen 127.0.0.1:729" in commands) is (uid != 0)
    network.for_agents(offer("allowlist", "allowlist"), uid)


# As a person runs one: a real daemon and guest, the agent a program in the repository


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("d"), "--network") as rig:
        yield rig


@pytest.fixture
def person(rig: Rig, tmp_path: Path) -> Person:
    project = make_repository(tmp_path / "project")
    (project / "bin").mkdir()
    (project / "bin" / "claude").write_text(SCRIPTED)
    (project / "bin" / "claude").chmod(0o755)
    git(project, "add", ".")
    git(project, "commit", "-qm", "A scripted agent")
    return Person(tmp_path, rig.socket)


HERE = "--env=PATH=/workspace/bin:/usr/bin:/bin"


def agent(person: Person, *words: str, **env: str) -> Done:
    return person.run("agent", "claude", *words, cwd=person.home / "project", **env)


def test_an_agent_works_and_its_commits_come_back(person: Person, rig: Rig) -> None:
    words = ("-p", "do; it", "--name", "theirs", "--", "$HOME")
    done = agent(person, "--name=job", HERE, "--env=LEAVE_WITH=3", *words, ANTHROPIC_API_KEY="k", OPENAI_API_KEY="o")
    assert (done.returncode, done.stdout.decode().splitlines()) == (3, ["/workspace/bin/claude", *words]), done.stderr
    project = person.home / "project"
    seen = git(project, "show", "refs/sandbox/job:seen-environment")
    assert "ANTHROPIC_API_KEY=k\n" in seen and "OPENAI" not in seen
    [sandbox] = [one for one in Client(str(rig.socket)).sandboxes() if one.name == "job"]
    assert (sandbox.state, sandbox.labels["agent"]) == ("terminated", "claude")


def test_the_record_names_the_agent(person: Person, rig: Rig) -> None:
    done = agent(person, "--detach", "--json", HERE, "-p", "x")
    ref = json.loads(done.stdout)["sandbox"]
    record = json.loads((person.home / f".config/sandbox/sessions/{ref}.json").read_text())
    assert record["agent"] == "claude"
    person.run("kill", ref)


def test_a_daemon_without_a_network_is_refused_before_a_sandbox_exists(person: Person, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with Rig(tmp_path / "none") as without:
        done = Person(person.home, without.socket).run("agent", "claude", "-p", "x", cwd=person.home / "project")
        assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
        assert b"its ceiling is none; " in done.stderr
        assert without.call("GET", "/v1/sandboxes").json["sandboxes"] == []


def test_agents_are_listed(person: Person) -> None:
    table = person.run("agent", "ls").stdout.decode().splitlines()
    assert table[0].split("  ")[0] == "NAME"
    assert [line.split()[0] for line in table[1:]] == list(AGENTS)
    rows: list[dict[str, Any]] = json.loads(person.run("agent", "ls", "--json").stdout)
    assert rows[0] == {"name": "claude", "runs_unattended": True, "login_saved": False}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "which agent? see sandbox-cli agent ls"),
        (("aider",), "no agent 'aider'; there are claude, cline,"),
        (("claude", "--memory"), "agent: --memory needs a value"),
        (("claude", "--name", "a", "--name", "b"), "a flag is missing its value, or given twice"),
        (("claude", "--memory=4g"), "--memory 4g: not a number above 0"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(person: Person, words: tuple[str, ...], said: str) -> None:
    done = person.run("agent", *words)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert said in done.stderr.decode()


def test_help_of_a_wrapper_lists_the_sandbox_s_flags(person: Person) -> None:
    said = person.run("agent", "claude", "--help").stdout.decode()
    assert str(import_module("cli.agent").__doc__).strip() in said
    assert all(flag in said for flag in wrapper.flags(str(run.__doc__)))
