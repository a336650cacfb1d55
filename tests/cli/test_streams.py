"""Commands in a sandbox at pipes: bytes, codes, signals, and what happens when somebody goes away."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import stream
from sandboxd.streams import Attachment, FrameDecoder
from tests.cli.person import COMMAND, PATIENCE_S, Person
from tests.sandboxd.rig import Rig


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("d")) as rig:
        yield rig


@pytest.fixture(scope="module")
def person(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Person:
    return Person(tmp_path_factory.mktemp("home"), rig.socket)


@pytest.fixture(scope="module")
def box(rig: Rig) -> str:
    return rig.create(name="box")


def sh(script: str) -> tuple[str, ...]:
    return ("--", "sh", "-c", script)


def line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_streams_stay_apart_and_the_code_is_the_commands(person: Person, box: str) -> None:
    done = person.run("exec", box, *sh("echo out; echo err >&2; pwd; exit 7"))
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n/sandbox/home\n", b"err\n")


def test_a_working_directory(person: Person, box: str) -> None:
    assert person.run("exec", "-w", "/tmp", box, "--", "pwd").stdout == b"/tmp\n"
    missing = person.run("exec", "--workdir=/no/such", box, "--", "pwd")
    assert missing.returncode == 1
    assert b"/no/such" in missing.stderr


def test_arguments_arrive_whole(person: Person, box: str) -> None:
    words = ["--", "-la", "a b", "", "new\nline", "ü", "$(x)", "--json"]
    done = person.run("exec", box, "--", "printf", r"%s\0", *words)
    assert done.stdout == b"".join(word.encode() + b"\0" for word in words)


def test_binary_input_comes_back_and_its_end_is_an_end(person: Person, box: str) -> None:
    data = random.Random(5).randbytes(3_000_000)
    done = person.run("exec", box, "--", "cat", stdin=data)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == data


def test_no_input_at_all(person: Person, box: str) -> None:
    process = person.start("exec", box, *sh("cat; echo end"), stdin=subprocess.DEVNULL)
    assert process.communicate(timeout=30)[0] == b"end\n"


def test_a_closed_stdin(person: Person, box: str) -> None:
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "exec", box, "--", "cat"]
    done = subprocess.run(command, env=person.environment(), capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, b"")


def test_a_command_that_is_not_there(person: Person, box: str) -> None:
    done = person.run("exec", box, "--", "no-such-command")
    assert done.returncode == 1
    assert done.stderr.startswith(b"sandbox-cli: ")
    assert b"no-such-command" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["Ctrl-C", "TERM", "HUP"],
)
def test_a_signal_is_the_commands(person: Person, box: str, sent: signal.Signals, code: int) -> None:
    process = person.start("exec", box, *sh("echo ready; exec sleep 60"))
    assert line(process) == b"ready\n"
    process.send_signal(sent)
    assert process.wait(PATIENCE_S) == code


def test_the_second_ctrl_c_kills(person: Person, box: str) -> None:
    process = person.start("exec", box, *sh("trap 'echo no' INT; echo ready; while :; do sleep 0.05; done"))
    assert line(process) == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert line(process) == b"no\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 137


def test_ctrl_c_passes_input_that_nobody_reads(person: Person, box: str, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(8 << 20))
    with (tmp_path / "big").open("rb") as big:
        process = person.start("exec", box, *sh("echo ready; exec sleep 60"), stdin=big.fileno())
        assert line(process) == b"ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130


def test_a_reader_that_goes_away_ends_the_command(person: Person, box: str) -> None:
    process = person.start("exec", box, *sh("yes; echo ended >&2"))
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(PATIENCE_S) != 0


def test_a_reader_that_stops_reading_stops_no_signal(person: Person, box: str) -> None:
    process = person.start("exec", box, *sh("exec yes"))
    assert process.stdout is not None
    process.stdout.read(10)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.stdout.read()
    assert process.wait(PATIENCE_S) == 130


def test_logs_from_the_start_and_to_the_end(person: Person, box: str) -> None:
    script = "echo a; echo b >&2; sleep 0.5; echo c"
    started = person.run("run", "-d", "--no-workspace", "--name", "logged", *sh(script))
    assert started.returncode == 0, started.stderr
    done = person.run("logs", "logged")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"a\nc\n", b"b\n")
    again = person.run("logs", "logged", "--pid=1")
    assert again.stdout == b"a\nc\n"
    assert person.run("kill", "logged").stdout == b"logged\n"
    assert person.run("logs", "logged").stdout == b"a\nc\n", "an ended sandbox's output is still there"


@pytest.mark.parametrize("pid", ["7", "x", "-1"])
def test_a_process_that_is_not_there(person: Person, box: str, pid: str) -> None:
    done = person.run("logs", box, f"--pid=9{pid}")
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1


def test_attach_lets_go_at_ctrl_c_and_the_process_runs_on(person: Person) -> None:
    script = "echo start; while [ ! -e go ]; do sleep 0.05; done; read line; echo got $line; exit 5"
    person.run("run", "-d", "--no-workspace", "--name", "att", *sh(script))
    process = person.start("attach", "att")
    assert line(process) == b"start\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0
    assert process.stderr is not None
    assert b"detached from process 1" in process.stderr.read()
    assert person.run("exec", "att", "--", "touch", "go").returncode == 0
    again = person.run("attach", "att")
    assert (again.returncode, again.stdout) == (5, b"start\ngot\n")
    person.run("kill", "att")


def test_a_command_outlives_a_killed_cli_and_can_be_joined_again(person: Person, box: str) -> None:
    process = person.start("exec", box, *sh("echo ready; while [ ! -e /tmp/go ]; do sleep 0.05; done; exit 9"))
    assert line(process) == b"ready\n"
    process.kill()
    process.wait()
    person.run("exec", box, "--", "touch", "/tmp/go")
    listed = json.loads(person.run("list", "--json").stdout)
    assert [one["state"] for one in listed if one["name"] == "box"] == ["running"]


def test_a_daemon_that_is_killed_is_said_and_the_output_so_far_shown(
    person: Person, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Rig(tmp_path_factory.mktemp("k")) as rig:
        someone = Person(person.home, rig.socket)
        ref = rig.create()
        process = someone.start("exec", ref, *sh("echo ready; sleep 60"))
        assert line(process) == b"ready\n"
        rig.kill()
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert err == b"sandbox-cli: the connection to sandboxd ended before the command did\n"


def test_nothing_is_left_open(person: Person, box: str, rig: Rig) -> None:
    person.run("exec", box, "--", "true")
    before = rig.descriptors()
    for _ in range(5):
        person.run("exec", box, "--", "true")
        person.run("list")
    deadline = time.monotonic() + PATIENCE_S
    while rig.descriptors() > before + 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert rig.descriptors() <= before + 2


def test_names_that_lie_are_shown_clean(person: Person, rig: Rig) -> None:
    rig.create(name="lies", labels={"k": "a\u202egnp"})
    done = person.run("list", "--label", "k=a\u202egnp")
    assert b"k=a gnp" in done.stdout
    as_json = person.run("list", "--json", "--label", "k=a\u202egnp")
    assert json.loads(as_json.stdout)[0]["labels"] == {"k": "a\u202egnp"}
    as_json.stdout.decode("ascii")


@pytest.mark.parametrize("args", [("exec", "no-such", "--", "true"), ("kill", "no-such"), ("attach", "no\x1b[2J")])
def test_a_sandbox_that_is_not_there(person: Person, rig: Rig, args: tuple[str, ...]) -> None:
    done = person.run(*args)
    assert done.returncode == 1
    assert done.stderr.startswith(b"sandbox-cli: ")
    assert b"\x1b" not in done.stderr


def test_output_beyond_a_closed_pipe_is_no_traceback(person: Person, rig: Rig) -> None:
    read, write = os.pipe()
    os.close(read)
    process = person.start("list", stdout=write)
    os.close(write)
    assert process.wait(PATIENCE_S) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""


def test_a_command_that_obeys_nothing_is_given_up_after_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers at the other end, as where a guest does not."""
    monkeypatch.setattr(stream, "LIMIT_STEP_S", 0.1)
    ours, theirs = socket.socketpair()
    sent: list[str] = []
    with theirs, pytest.raises(stream.Lost, match="does not end the command"):
        stream.follow(Attachment(ours, FrameDecoder(), ()), sent.append, tty=False, role=stream.Role.OWNED, limit_s=0.1)
    assert sent == ["TERM", "KILL", "KILL"]
