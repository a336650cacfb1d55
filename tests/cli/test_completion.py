"""The Tab key: what is offered, in the shells themselves, and that nothing a server says is run by one."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import pytest

from cli import candidates, completion
from cli.__main__ import COMMANDS
from tests.cli.person import Person
from tests.cli.rawserver import ReadRequest, serving

VALUES = {"SANDBOX": ["box", "bat"], "NAME": ["claude", "cline"], "use NAME": ["far"], "--network": ["none", "open"]}


def offered(*words: str) -> list[str]:
    return candidates.complete(words, completion.usages(), lambda kind: VALUES.get(kind, [])).words


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("li", ["list"]),
        ("snap", ["snapshot", "snapshot-schedule"]),
        ("--v", ["--version"]),
        ("bogus ", []),
        ("help au", ["audit"]),
        ("help audit ", []),
        ("list --l", ["--label"]),
        ("list --label=a --l", ["--label"]),
        ("kill b", ["box", "bat"]),
        ("kill box ", ["box", "bat"]),
        ("logs box ", []),
        ("logs --pid 1 b", ["box", "bat"]),
        ("tunnel ", ["box", "bat"]),
        ("tunnel box ", []),
        ("exec box -- l", []),
        ("run --net", ["--network"]),
        ("run --network ", ["none", "open"]),
        ("run --network=o", ["--network=open"]),
        ("run -e A=1 --k", ["--keep"]),
        ("run -- --k", []),
        ("context ", ["add", "ls", "list", "use", "rm"]),
        ("context use ", ["far"]),
        ("context use far ", []),
        ("context add n", []),
        ("volume r", ["rm"]),
        ("snapshot ", ["ls", "list", "rm", "box", "bat"]),
        ("snapshot-schedule --o", ["--off"]),
        ("agent cl", ["claude", "cline"]),
        ("agent l", ["ls"]),
        ("agent ls --j", ["--json"]),
        ("agent claude --net", ["--network"]),
        ("agent claude --keep --net", ["--network"]),
        ("agent claude -p --net", []),
        ("agent claude fix --net", []),
        ("agent claude --network ", ["none", "open"]),
    ],
)
def test_what_is_offered(line: str, some: list[str]) -> None:
    assert offered(*line.split(" ")) == some


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("", False), ("li", False), ("bogus ", False), ("logs ", False), ("logs box ", False), ("kill ", False),
        ("list --context ", False), ("run --name ", False), ("run --", False), ("tunnel box ", False),
        ("run --config ", True), ("run --config=", True), ("run --bind ", True), ("agent claude --project ", True),
        ("agent fleet run -f ", True), ("audit verify ", True), ("audit verify a ", True), ("exec box -- ", True),
        ("agent claude fix ", True),
    ],
)  # fmt: skip
def test_where_files_are_meant(line: str, files: bool) -> None:
    assert candidates.complete(line.split(" "), completion.usages(), lambda kind: []).files is files


def test_values_of_options_that_are_words_of_ours() -> None:
    assert completion.names(["agent", "claude", "--fallback"], "--fallback")[:2] == ["claude", "codex"]
    assert "goose" not in completion.names(["agent", "claude", "--fallback"], "--fallback")
    assert "blocked" in completion.names(["agent", "wait", "--state"], "--state")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_s_usage_is_understood(name: str) -> None:
    usage = str(import_module(COMMANDS[name]).__doc__)
    assert candidates.options(usage).all or name == "agent"
    slots = [slot for form in candidates.forms(usage, name) for slot in form]
    words = [word for slot in slots for word in slot if word != "..."]
    assert not [word for word in words if word.startswith(("-", "=", "|", ")")) or not word], words


@pytest.mark.parametrize(
    ("words", "as_typed"),
    [
        (["run", "--network", "=", "o"], ["run", "--network", "o"]),
        (["run", "--network", "="], ["run", "--network", ""]),
        (["run", "-e", "A", "=", "1"], ["run", "-e", "A", "=", "1"]),
        (["run", "--name", "", ""], ["run", "--name", "", ""]),
        ([""], [""]),
        ([], []),
    ],
)
def test_the_words_bash_makes(words: list[str], as_typed: list[str]) -> None:
    assert completion.joined(words) == as_typed


EVIL = ["$(touch PWNED)", "`touch PWNED`", "a;touch PWNED", "a b", "-rf", "a\x1b[2J", "a\nb", "a'b", "~root"]


def sandbox(name: str, state: str = "running") -> dict[str, object]:
    network = {"mode": "none", "allow": None}
    return {"id": "sbx_0123456789abcdef", "name": name, "state": state, "network": network}


def listing() -> list[object]:
    found = [sandbox("fix-tests"), sandbox("fix-docs"), sandbox("gone", "terminated"), sandbox(""), *map(sandbox, EVIL)]
    body = json.dumps({"sandboxes": found}).encode()
    return [ReadRequest(), b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)]


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    """With `sandbox-cli` in the path, and a sandboxd whose sandboxes have names of all kinds."""
    program = tmp_path / "bin" / "sandbox-cli"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; from cli.__main__ import main; '
                       f'sys.exit(main())" "$@"\n')  # fmt: skip
    program.chmod(0o755)
    with serving(tmp_path / "s", *[[], listing()] * 8):
        yield Person(tmp_path, tmp_path / "s")


def environment(person: Person) -> dict[str, str]:
    path = f"{person.home}/bin:{os.environ['PATH']}"
    return person.environment(PATH=path, LC_ALL="C.UTF-8")


def shell(person: Person, name: str, script: str) -> list[str]:
    where = shutil.which(name)
    if where is None:
        pytest.skip(f"{name} is not installed")
    quiet = {"bash": ["--norc", "--noprofile"], "fish": ["--no-config"]}[name]
    done = subprocess.run(
        [where, *quiet, "-c", script], env=environment(person), cwd=person.home, capture_output=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.stderr == b"", done.stderr
    assert not (person.home / "PWNED").exists()
    return done.stdout.decode().splitlines()


BASH = """
source <(sandbox-cli completion bash)
COMP_WORDS=(sandbox-cli {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
_sandbox_cli
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "some"),
    [("snap", ["snapshot", "snapshot-schedule"]), ("logs ''", ["fix-tests", "fix-docs", "sbx_0123456789abcdef"]),
     ("run --network = o", ["open"])],
    ids=["a command", "names of sandboxes, those that are plain words", "a value behind ="],
)  # fmt: skip
def test_in_bash(person: Person, words: str, some: list[str]) -> None:
    assert shell(person, "bash", BASH.format(words=words)) == some


@pytest.mark.parametrize(
    ("line", "some"),
    [("snap", ["snapshot", "snapshot-schedule"]), ("logs ", ["fix-docs", "fix-tests", "sbx_0123456789abcdef"]),
     ("run --network=o", ["--network=open"])],
    ids=["a command", "names of sandboxes, those that are plain words", "a value behind ="],
)  # fmt: skip
def test_in_fish(person: Person, line: str, some: list[str]) -> None:
    found = shell(person, "fish", f"sandbox-cli completion fish | source; complete -C 'sandbox-cli {line}'")
    assert sorted(one.partition("\t")[0] for one in found) == some


def typed(person: Person, argv: Sequence[str], keys: Sequence[tuple[bytes, bytes]]) -> bytes:
    """At a terminal: each of `keys` is typed once what stands before it has been shown."""
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(person.home)
        os.execvpe(argv[0], list(argv), environment(person))
    seen = b""
    try:
        deadline = time.monotonic() + 60
        for awaited, text in keys:
            while awaited not in seen:
                left = deadline - time.monotonic()
                assert left > 0 and select.select([master], [], [], left)[0], f"{awaited!r} was not shown: {seen!r}"
                seen += os.read(master, 65536)
            seen = seen[seen.index(awaited) + len(awaited) :]
            os.write(master, text)
    finally:
        os.close(master)
        os.waitpid(pid, 0)
    return seen


def test_in_zsh_with_the_tab_key(person: Person) -> None:
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("zsh is not installed")
    begin = b"PS1='ready> '; autoload -U compinit; compinit -D -u; source <(sandbox-cli completion zsh); echo be''gun\n"
    keys = [
        (b"", begin), (b"begun", b""), (b"ready> ", b"sandbox-cli conf\t"), (b"ormance", b"\x15"),
        (b"", b"sandbox-cli logs fix-t\t"), (b"ests", b"\x15exit\n"),
    ]  # fmt: skip
    typed(person, [zsh, "-f", "-i"], keys)
    assert not (person.home / "PWNED").exists()


INTERACTIVE = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}
BEGIN = {"bash": "", "zsh": "autoload -U compinit; compinit -D -u; "}


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_files_are_offered_where_they_are_meant_and_nowhere_else(person: Person, name: str) -> None:
    where = shutil.which(name)
    if where is None:
        pytest.skip(f"{name} is not installed")
    (person.home / "settings-of-mine.yaml").touch()
    begin = f"PS1='ready> '; {BEGIN[name]}source <(sandbox-cli completion {name}); echo be''gun\n"
    keys = [
        (b"", begin.encode()), (b"begun", b""), (b"ready> ", b"sandbox-cli tunnel fix-docs set\t"), (b"set", b"END\n"),
        (b"setEND: not a port", b""), (b"ready> ", b"sandbox-cli run --config set\t"),
        (b"tings-of-mine.yaml", b"\x15exit\n"),
    ]  # fmt: skip
    typed(person, [where, *INTERACTIVE[name]], keys)


def test_files_in_fish(person: Person) -> None:
    (person.home / "settings-of-mine.yaml").touch()
    source = "sandbox-cli completion fish | source; complete -C 'sandbox-cli "
    assert shell(person, "fish", f"{source}tunnel fix-docs set'") == []
    assert shell(person, "fish", f"{source}run --config set'") == ["settings-of-mine.yaml"]


def test_a_sandboxd_that_does_not_answer_costs_a_second(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen(8)
        began = time.monotonic()
        done = Person(tmp_path, tmp_path / "silent").run("completion", "words", "logs", "")
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
        assert time.monotonic() - began < 10
    assert Person(tmp_path, tmp_path / "none").run("completion", "words", "logs", "").stdout == b""


def test_contexts_are_those_that_are_kept(tmp_path: Path) -> None:
    person = Person(tmp_path, tmp_path / "none")
    person.run("context", "add", "far", "unix:///run/x.sock")
    assert person.run("completion", "words", "list", "--context", "").stdout == b"local\nfar\n"
    assert person.run("completion", "words", "context", "use", "f").stdout == b"far\n"


def test_a_shell_that_nobody_knows(tmp_path: Path) -> None:
    done = Person(tmp_path, tmp_path).run("completion", "tcsh")
    assert done.stderr.startswith(b"sandbox-cli: completion: say for which shell: bash, zsh, fish")
