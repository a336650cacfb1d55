"""Secrets: where values come from, what is said about one, and that none is shown or handed on here."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli import secrets
from cli.config import Secret
from cli.secrets import Values, beyond, long_lived, reach
from sandboxd import fields
from sandboxd.client import Client, Network
from sandboxd.envnames import RESERVED_ENV
from sandboxd.errors import SandboxError
from tests.cli.person import COMMAND, PATIENCE_S, ROOT, Done, Person
from tests.conftest import make_repository
from tests.sandboxd.rig import Rig

CANARY = "s3cr3t-CANARY"
NOW = 1_800_000_000
NOWHERE = Path("/etc/passwd/no.sock")  # not one that may appear in a moment, and is waited for


# -- what a value shows of itself


def jwt(**claims: object) -> str:
    parts = [json.dumps({"alg": "none"}).encode(), json.dumps(claims).encode(), b"signature"]
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        pytest.param(jwt(sub="x"), "a JWT that does not expire", id="a JWT without an end"),
        pytest.param(jwt(exp="soon"), "a JWT that does not expire", id="a JWT whose end is no number"),
        pytest.param(jwt(exp=NOW + 24 * 3600 + 1), "a JWT that expires in 1 days", id="a JWT for more than a day"),
        pytest.param(jwt(exp=NOW + 90 * 24 * 3600), "a JWT that expires in 90 days", id="a JWT for months"),
        pytest.param(jwt(exp=1e300), "a JWT that does not expire in our time", id="a JWT for ever"),
        pytest.param(jwt(exp=10**400), "a JWT that does not expire in our time", id="a JWT whose end no float holds"),
        pytest.param(jwt(exp=-(10**400)), "", id="a JWT that expired before all time"),
        pytest.param(jwt(exp=float("nan")), "a JWT that does not expire in our time", id="a JWT whose end is NaN"),
        pytest.param(jwt(exp=NOW + 24 * 3600), "", id="a JWT for a day"),
        pytest.param(jwt(exp=NOW - 1), "", id="a JWT that has expired"),
        pytest.param("sk-ant-" + jwt(exp=NOW + 60).removeprefix("ey"), "it starts with sk-ant-", id="no JWT after all"),
        pytest.param("ghs_x", "", id="GitHub's for an hour"),
        *(pytest.param(f"{prefix}x", f"it starts with {prefix}", id=f"a {prefix} one") for prefix in secrets.LONG),
        pytest.param("x-ghp_", "", id="the prefix elsewhere"),
        pytest.param("a.b.c", "", id="three parts of something else"),
        pytest.param("..", "", id="three empty parts"),
        pytest.param(f"{'W1td' * 9000}.{'W1td' * 9000}.x", "", id="three long parts"),
        pytest.param(base64.b64encode(b"[" * 99999).decode() + "." + "e30.x", "", id="JSON that is too deep"),
        pytest.param("ä.ö.ü", "", id="parts that are not base64"),
        pytest.param("", "", id="nothing"),
    ],
)
def test_what_shows_that_a_value_lasts(value: str, said: str) -> None:
    assert long_lived(value, NOW) == said


def listed(*allow: str, deny: tuple[str, ...] = (), tcp: tuple[str, ...] = ()) -> Network:
    return Network("allowlist", allow, deny, tcp)


@pytest.mark.parametrize(
    ("hosts", "network", "more"),
    [
        pytest.param(("a.test",), listed("a.test"), (), id="just that host"),
        pytest.param(("a.test",), listed("a.test", "b.test"), ("b.test",), id="another"),
        pytest.param(("a.test",), Network("none", None), (), id="no network"),
        pytest.param(("a.test",), Network("open", None), ("any public host",), id="all of the world"),
        pytest.param(("*.a.test",), listed("x.a.test", "*.y.a.test", "*.a.test"), (), id="what a pattern stands for"),
        pytest.param(("*.a.test",), listed("a.test"), ("a.test",), id="a pattern does not stand for its own name"),
        pytest.param(("x.a.test",), listed("*.a.test"), ("*.a.test",), id="a pattern around it is more"),
        pytest.param(("a.test",), listed("evila.test"), ("evila.test",), id="a name that ends alike"),
        pytest.param(("a.test",), listed("a.test", tcp=("a.test:22", "b.test:22")), ("b.test:22",), id="other ports"),
        pytest.param(("a.test",), listed("a.test", "b.test", deny=("b.test",)), (), id="another that is denied"),
        pytest.param(("a.test",), listed("*.b.test", deny=("x.b.test",)), ("*.b.test",), id="only some of it denied"),
    ],
)
def test_what_is_reached_beyond_its_hosts(hosts: tuple[str, ...], network: Network, more: tuple[str, ...]) -> None:
    assert beyond(hosts, network) == more


def test_the_extra_hosts_are_named_and_a_long_list_is_counted() -> None:
    meant = (Secret("T", "env", "T", ("a.test",)), Secret("ANY", "env", "T"))
    [note] = reach(meant, listed("a.test", *(f"h{number}.test" for number in range(9))))
    assert note == (
        "secret T is meant for a.test; this sandbox may also reach h0.test, h1.test, h2.test, h3.test, h4.test "
        "and 4 more"
    )


# -- where values come from

FILE = Secret("A", "file", "")


def fetched(one: Secret, environ: dict[str, str] | None = None) -> Values:
    return secrets.fetch([one], environ or {}, NOW)


def file(tmp_path: Path, content: bytes, mode: int = 0o600) -> Secret:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(mode)
    return Secret("A", "file", str(path))


@pytest.mark.parametrize(
    ("content", "value"),
    [
        pytest.param(b"token\n", "token", id="trimmed"),
        pytest.param(b"\n two\nlines \r\n", "two\nlines", id="lines inside stay"),
        pytest.param("sch\u00f6n".encode(), "sch\u00f6n", id="UTF-8"),
        pytest.param(b"x" * (128 << 10), "x" * (128 << 10), id="as long as a variable may be"),
    ],
)
@pytest.mark.parametrize("source", ["file", "command", "env"])
def test_a_value_is_the_same_from_everywhere(tmp_path: Path, source: str, content: bytes, value: str) -> None:
    there = file(tmp_path, content)
    made = {
        "file": there, "command": Secret("A", "command", f"cat '{there.value}'"), "env": Secret("A", "env", "HERE"),
    }[source]  # fmt: skip
    assert secrets.fetch([made], {"HERE": os.fsdecode(content)}, NOW) == ({"A": value}, ())


@pytest.mark.parametrize(
    ("one", "said"),
    [
        pytest.param(Secret("A", "env", "MISSING"), "secret A: MISSING is not set here", id="no variable"),
        pytest.param(Secret("A", "file", "/none/\x1bx"), "secret A: /none/ x cannot be read: No such", id="no file"),
        pytest.param(Secret("A", "file", "/"), "secret A: / is not a regular file", id="a directory"),
        pytest.param(Secret("A", "file", "/dev/zero"), "secret A: /dev/zero is not a regular file", id="a device"),
        pytest.param(Secret("A", "command", f"echo {CANARY}; exit 3"), "command failed (exit code 3)", id="a failure"),
        pytest.param(Secret("A", "command", "kill -9 $$"), "its command failed (signal 9)", id="a killed command"),
        pytest.param(Secret("A", "command", "true"), "secret A: its command gives nothing", id="nothing printed"),
        pytest.param(Secret("A", "command", "yes"), "secret A: it is longer than 128 KiB", id="output without end"),
        pytest.param(Secret("A", "command", f"printf '{CANARY}\\0x'"), "secret A: it holds a NUL", id="a NUL"),
        pytest.param(Secret("A", "command", f"printf '{CANARY}\\377'"), "secret A: it is not UTF-8", id="other bytes"),
    ],
)
def test_a_value_that_cannot_be_had(one: Secret, said: str) -> None:
    with pytest.raises(SandboxError) as refused:
        fetched(one)
    assert said in str(refused.value)
    assert "CANARY" not in str(refused.value) and refused.value.__cause__ is None


def test_what_is_not_there_is_seen_before_anything_is_fetched(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with pytest.raises(SandboxError, match="MISSING is not set here"):
        secrets.check([Secret("A", "command", f"touch {ran}"), Secret("B", "env", "MISSING")], {})
    with pytest.raises(SandboxError, match="cannot be read"):
        secrets.check([Secret("A", "command", f"touch {ran}"), Secret("B", "file", str(ran))], {})
    assert not ran.exists()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SandboxError, match="not a regular file"):
        fetched(Secret("A", "file", str(tmp_path / "pipe")))


def test_values_are_fetched_in_the_order_of_names_and_the_first_failure_is_the_last(tmp_path: Path) -> None:
    log = tmp_path / "log"
    made = [Secret(name, "command", f"echo {name} | tee -a {log}") for name in "CAB"]
    assert list(secrets.fetch(made, {}, NOW).env) == ["A", "B", "C"]
    made[2] = Secret("B", "command", "false")
    with pytest.raises(SandboxError):
        secrets.fetch(made, {}, NOW)
    assert log.read_text().split() == ["A", "B", "C", "A"]


def test_a_command_has_no_stdin_and_its_complaints_are_seen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert fetched(Secret("A", "command", "cat; echo Touch your key >&2; echo v")).env == {"A": "v"}
    assert capfd.readouterr().err == "Touch your key\n"


def test_a_file_that_others_can_read_is_pointed_at(tmp_path: Path) -> None:
    for mode, who in ((0o640, "its group"), (0o644, "everybody here")):
        one = file(tmp_path, b"x", mode)
        assert fetched(one).notes == (f"secret A: {one.value} can be read by {who}: chmod 600 {one.value}",)
    assert fetched(file(tmp_path, b"x", 0o600)).notes == ()


def test_what_is_pointed_at_is_the_file_that_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = file(tmp_path, b"x", 0o644)
    opened = secrets._opened

    def replaced(one: Secret) -> int:
        fd = opened(one)
        Path(one.value).unlink()
        file(tmp_path, b"y", 0o600)
        return fd

    monkeypatch.setattr(secrets, "_opened", replaced)
    found = fetched(one)
    assert found.env == {"A": "x"} and "can be read by everybody here" in found.notes[0]


def test_what_is_noted_never_holds_the_value(tmp_path: Path) -> None:
    values = fetched(file(tmp_path, b"ghp_" + CANARY.encode()))
    assert values.env == {"A": f"ghp_{CANARY}"}
    assert values.notes == ("secret A looks long-lived (it starts with ghp_): a short one is worth less to a thief",)
    assert "CANARY" not in repr(values)


def test_the_reserved_names_are_the_server_s() -> None:
    assert fields.RESERVED_ENV is RESERVED_ENV and "LD_PRELOAD" in RESERVED_ENV


# -- in a run


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("d")) as rig:
        yield rig


@pytest.fixture
def person(rig: Rig, tmp_path: Path) -> Person:
    (tmp_path / ".config" / "sandbox").mkdir(parents=True)
    return Person(tmp_path, rig.socket)


def says(person: Person, text: str) -> None:
    path = person.home / ".config" / "sandbox" / "config.yaml"
    path.write_text(text)
    path.chmod(0o600)


def shows(person: Person, *flags: str, names: str = "A B C D E", **env: str) -> Done:
    script = f"for name in {names}; do eval echo \\$$name; done"
    return person.run("run", "--no-workspace", *flags, "--", "sh", "-c", script, **env)


def test_every_source_arrives_and_the_nearer_word_wins(person: Person) -> None:
    (person.home / "token").write_text(" from-file\n")
    (person.home / "token").chmod(0o600)
    says(person, "secrets: {A: {file: ../../token}, B: {command: 'echo from-command'}, C: {env: HERE}}\n"
                 "env: {D: from-config}\nenv_allow: [E, GONE]\n")  # fmt: skip
    done = shows(person, HERE="from-env", E="forwarded", D="not this")
    assert done.stdout.decode().split() == ["from-file", "from-command", "from-env", "from-config", "forwarded"]
    assert done.stderr == b""
    done = shows(person, "-e", "A=flag", "-e", "D=flag", "-e", "E", HERE="x", E="forwarded")
    assert done.stdout.decode().split() == ["flag", "from-command", "x", "flag", "forwarded"]
    assert done.stderr == b"sandbox-cli: secret A is not fetched: the run has A already\n"


def test_what_a_flag_stands_for_is_not_fetched(person: Person) -> None:
    says(person, "secrets: {A: {command: 'touch fetched; echo x'}, B: {file: absent}}")
    done = shows(person, "-e", "A=1", "-e", "B=2", names="A B")
    assert done.stdout.split() == [b"1", b"2"]
    assert not (person.home / "fetched").exists()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{file: absent}", "secret T: {home}/.config/sandbox/absent cannot be read: No such file or directory"),
        ("{env: ABSENT}", "secret T: ABSENT is not set here: export it first"),
        ("{command: 'exit 9'}", "secret T: its command failed (exit code 9)"),
    ],
)
def test_a_secret_that_cannot_be_had_leaves_nothing_behind(
    person: Person, rig: Rig, source: str, said: str
) -> None:
    before = rig.call("GET", "/v1/sandboxes").json
    says(person, f"secrets: {{T: {source}}}")
    done = shows(person)
    assert (done.returncode, done.stderr.decode()) == (1, f"sandbox-cli: {said.format(home=person.home)}\n")
    assert rig.call("GET", "/v1/sandboxes").json == before


def test_what_is_missing_is_told_before_a_server_is_asked(tmp_path: Path) -> None:
    (tmp_path / ".config" / "sandbox").mkdir(parents=True)
    person = Person(tmp_path, NOWHERE)
    says(person, "secrets: {A: {command: 'touch fetched; echo x'}, B: {env: ABSENT}}")
    assert b"secret B: ABSENT is not set here" in shows(person).stderr
    assert b"no sandboxd at" in shows(person, ABSENT="x").stderr
    assert not (tmp_path / "fetched").exists()


def test_a_run_says_what_is_known_of_its_secrets(person: Person) -> None:
    says(person, "secrets: {A: {command: 'echo ghp_x', hosts: [api.github.com]}}")
    done = shows(person, names="A")
    assert done.stdout == b"ghp_x\n"
    assert b"secret A looks long-lived (it starts with ghp_)" in done.stderr


def test_a_crash_of_ours_shows_no_value(person: Person) -> None:
    """A bug is planted where the values are at hand."""
    says(person, f"secrets: {{A: {{command: 'printf s3cr3t; echo -CANARY'}}}}\nenv: {{B: {CANARY}}}")
    bug = (
        "import sys; from cli import running; from cli.__main__ import main\n"
        "def create(client, wanted, status): assert wanted.env['A'] == wanted.env['B']; return 1 // 0\n"
        "running.create = create; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", bug, "run", "--no-workspace", "-e", f"C={CANARY}", "--", "true"],
        env=person.environment(), capture_output=True, check=False,
    )  # fmt: skip
    assert b"ZeroDivisionError" in done.stderr, "it got there, with the value"
    assert b"CANARY" not in done.stderr + done.stdout


@pytest.mark.parametrize("secret", [True, False], ids=["who holds a secret leaves none", "who holds none leaves one"])
def test_a_core_file(tmp_path: Path, secret: bool) -> None:
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    if pattern.startswith("|") or "/" in pattern:
        pytest.skip(f"core files go elsewhere here: {pattern.strip()}")
    guard = "from cli import secrets; secrets.guard();" if secret else ""
    code = f"import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (1 << 30, -1)); {guard} os.abort()"
    environment = {"PYTHONPATH": str(ROOT)}
    child = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=False)
    assert child.returncode == -signal.SIGABRT
    assert bool(list(tmp_path.glob("core*"))) is not secret


def until(what: str, holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_who_holds_a_secret_cannot_be_looked_into(person: Person, rig: Rig) -> None:
    """Files of /proc of a process that is not dumpable are root's: nobody of the same uid reads its memory."""
    says(person, "secrets: {A: {command: echo x}}")
    process = person.start("run", "--no-workspace", "--name=held", "--", "sleep", "60")
    try:
        until("it runs", lambda: any(one.name == "held" for one in Client(str(rig.socket)).sandboxes()))
        [line] = [line for line in proc(process.pid, "limits").splitlines() if line.startswith(b"Max core")]
        assert line.split()[-3:-1] == [b"0", b"0"]
        if os.geteuid() != 0:
            assert Path(f"/proc/{process.pid}/environ").stat().st_uid == 0
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    person.run("kill", "held")


def proc(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


@pytest.mark.parametrize(
    ("boots", "script", "said"),
    [
        pytest.param(False, "true", b"did not start", id="the machine does not start"),
        pytest.param(True, "", b"/none", id="the command is not there"),
        pytest.param(True, "test $A = $B || echo no; rm -rf .git; exit 1", b"could not be brought", id="no way back"),
    ],
)
def test_where_a_run_fails_nothing_tells_the_value(
    person: Person, rig: Rig, boots: bool, script: str, said: bytes
) -> None:
    """With the daemon's log at its most talkative. The names are told."""
    make_repository(person.home / "project")
    says(person, f"secrets: {{A: {{command: 'printf s3cr3t-; echo CANARY'}}}}\nenv: {{B: {CANARY}}}")
    command = ("sh", "-c", script) if script else ("/none",)
    rig.knob("no_boot", None if boots else "1")
    done = person.run("run", "--name=fails", "--", *command, cwd=person.home / "project")
    rig.knob("no_boot", None)
    assert done.returncode != 0 and said in done.stderr, done.stderr
    assert done.stdout == b""
    person.run("kill", "fails")
    remembered = {
        str(path): path.read_bytes() for top in (rig.state, person.home) for path in top.rglob("*")
        if path.is_file() and path.suffix != ".img"
    } | {"log": rig.log.read_bytes(), "stderr": done.stderr}  # fmt: skip
    told = [name for name, content in remembered.items() if CANARY.encode() in content]
    assert told == [str(person.home / ".config/sandbox/config.yaml")]


def test_git_gets_nothing_of_it(person: Person, tmp_path: Path) -> None:
    """Every process that a run starts here is looked at: the environment and arguments it began with."""
    make_repository(person.home / "project")
    says(person, f"secrets: {{A: {{command: 'printf s3cr3t-; echo CANARY'}}, B: {{env: B}}}}\nenv: {{C: {CANARY}}}")
    log = tmp_path / "trace"
    strace = "/usr/bin/strace"
    if not os.access(strace, os.X_OK):
        pytest.skip("no strace here")
    done = subprocess.run(
        [strace, "-f", "-v", "-s", "100000", "-e", "trace=execve", "-o", str(log), *COMMAND, "run", "--", "sh", "-c",
         "echo $A > x"],
        cwd=person.home / "project", env=person.environment(B=CANARY), capture_output=True, check=False, timeout=120,
    )  # fmt: skip
    assert b"brought back 1 commit" in done.stderr, done.stderr
    started = [line for line in log.read_text().splitlines() if "execve(" in line]
    ours = [line for line in started if '/git"' in line or '"git"' in line]
    assert len(ours) > 3
    assert not [line for line in ours if "CANARY" in line]
