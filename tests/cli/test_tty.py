"""A program in a sandbox on the person's terminal: its size, its keys, and the terminal given back whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxd.client import Client, frame
from tests.cli.person import Person, Terminal, at_terminal
from tests.cli.rawserver import Read, ReadRequest, serving
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


def test_the_first_size_resizes_and_the_last_one(person: Person, box: str) -> None:
    script = "stty size; trap 'echo felt $(stty size)' WINCH; echo ready; while :; do sleep 0.05; done"
    with at_terminal(person, "exec", box, *sh(script)) as terminal:
        terminal.expect(b"43 132\r\n")
        terminal.expect(b"ready\r\n")
        for rows in range(20, 30):
            terminal.resize(rows, 100)
        terminal.expect(b"felt 29 100\r\n")
        terminal.type(b"\x03")
        assert terminal.wait() == 130
        assert terminal.is_as_before()


@pytest.mark.parametrize(
    ("rows", "cols", "shown"), [(0, 0, b"24 80"), (65535, 65535, b"4096 4096"), (1, 1, b"1 1")], ids=str
)
def test_silly_sizes(person: Person, box: str, rows: int, cols: int, shown: bytes) -> None:
    with at_terminal(person, "exec", box, "--", "stty", "size", rows=rows, cols=cols) as terminal:
        assert terminal.wait() == 0
        assert shown + b"\r\n" in terminal.seen


def test_keys_are_bytes_and_the_remote_terminal_makes_signals_of_them(person: Person, box: str) -> None:
    with at_terminal(person, "exec", box, *sh("trap 'echo int' INT; echo ready; cat; read x; echo [$x]")) as terminal:
        terminal.expect(b"ready\r\n")
        assert terminal.is_raw()
        terminal.type("ü\r".encode())
        terminal.expect("ü\r\nü\r\n".encode())
        terminal.type(b"\x03")
        terminal.expect(b"int\r\n")
        terminal.type(b"last\r")
        terminal.expect(b"[last]")
        assert terminal.wait() == 0
        assert terminal.is_as_before()


def test_the_terminal_s_name_goes_along(person: Person, box: str) -> None:
    with at_terminal(person, "exec", box, *sh("echo [$TERM]")) as terminal:
        assert terminal.wait() == 0
        assert b"[xterm]" in terminal.seen


def test_a_shell(person: Person, box: str) -> None:
    with at_terminal(person, "shell", box) as terminal:
        terminal.type(b"echo $((6*7)); exit 3\r")
        terminal.expect(b"42\r\n")
        assert terminal.wait() == 3
        assert terminal.is_as_before()
    done = person.run("shell", box)
    assert done.returncode == 1
    assert b"needs a terminal" in done.stderr


LEFT_ON = r"printf '\033[?1049h\033[?1000h\033[?2004h\033[?25l'; echo ready; "
UNDONE = b"\x1b[?25h\x1b[?1000l\x1b[?2004l\x1b[?1049l"


@contextlib.contextmanager
def full_screen(person: Person, ref: str, then: str = "exec sleep 60") -> Iterator[Terminal]:
    with at_terminal(person, "exec", ref, *sh(LEFT_ON + then)) as terminal:
        terminal.expect(b"ready\r\n")
        yield terminal
        assert terminal.is_as_before()
        assert UNDONE in terminal.seen


def test_given_back_when_the_program_dies(person: Person, box: str) -> None:
    with full_screen(person, box, then="kill -9 $$") as terminal:
        assert terminal.wait() == 137


def test_given_back_when_the_cli_is_ended(person: Person, box: str) -> None:
    with full_screen(person, box) as terminal:
        terminal.process.terminate()
        assert terminal.wait() == 143


def test_given_back_when_the_cli_is_ended_and_the_program_ignores_it(person: Person, box: str) -> None:
    with full_screen(person, box, then="trap '' TERM; while :; do sleep 0.05; done") as terminal:
        terminal.process.terminate()
        time.sleep(0.3)
        assert terminal.process.poll() is None
        terminal.process.terminate()
        assert terminal.wait() == 137


def test_given_back_when_the_machine_or_the_daemon_goes(
    person: Person, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Rig(tmp_path_factory.mktemp("k")) as rig:
        someone, ref = Person(person.home, rig.socket), rig.create()
        with full_screen(someone, ref) as terminal:
            rig.call("DELETE", f"/v1/sandboxes/{ref}")
            assert terminal.wait() == 1
            assert b"ended before the command did" in terminal.seen
        ref = rig.create()
        with full_screen(someone, ref) as terminal:
            rig.kill()
            assert terminal.wait() == 1
            assert b"sandbox-cli: the connection to sandboxd ended before the command did\r\n" in terminal.seen


def test_given_back_while_stopped_and_taken_again(person: Person, box: str) -> None:
    script = "stty size; trap 'echo felt $(stty size)' WINCH; while :; do sleep 0.05; done"
    with at_terminal(person, "exec", box, *sh(script)) as terminal:
        terminal.expect(b"43 132\r\n")
        terminal.until(raw=True)
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.until(raw=False)
        assert terminal.is_as_before()
        os.waitpid(terminal.process.pid, os.WUNTRACED)
        terminal.resize(20, 90)
        terminal.process.send_signal(signal.SIGCONT)
        terminal.until(raw=True)
        terminal.expect(b"felt 20 90\r\n")
        terminal.type(b"\x03")
        assert terminal.wait() == 130
        assert terminal.is_as_before()


def test_a_window_that_closes_ends_the_command(person: Person, box: str, rig: Rig) -> None:
    with at_terminal(person, "exec", box, *sh("echo ready; exec sleep 61")) as terminal:
        terminal.expect(b"ready\r\n")
        os.close(terminal.master)
        os.close(terminal.slave)
        assert terminal.process.wait(20) == 129


def test_attach_on_a_terminal_and_a_window_that_closes_detaches(person: Person, rig: Rig, box: str) -> None:
    client = Client(str(rig.socket))
    process = client.start(box, ["sh", "-c", "echo ready; read x; stty size; read y"], size=(10, 20))
    with at_terminal(person, "attach", box, "--pid", str(process.pid)) as terminal:
        terminal.expect(b"ready\r\n")
        terminal.type(b"go\r")
        terminal.expect(b"43 132\r\n")
        os.close(terminal.master)
        os.close(terminal.slave)
        terminal.process.wait(20)
    assert client.process(box, process.pid).state == "running"
    client.signal(box, process.pid, "KILL")


@pytest.mark.parametrize("stream", [0, 1], ids=["stdin is a pipe", "stdout is a pipe"])
def test_without_a_whole_terminal_there_is_none(person: Person, box: str, stream: int) -> None:
    read, write = os.pipe()
    ends = {"stdin": read} if stream == 0 else {"stdout": write}
    process = person.start("exec", box, *sh("tty || echo none >&2"), **ends)
    os.close(read)
    os.close(write)
    _, err = process.communicate(timeout=20)
    assert b"none" in err


def test_a_process_without_a_terminal_never_makes_ours_raw(person: Person, rig: Rig, box: str) -> None:
    client = Client(str(rig.socket))
    process = client.start(box, ["sh", "-c", "echo ready; exec sleep 60"])
    with at_terminal(person, "attach", box, "--pid", str(process.pid)) as terminal:
        terminal.expect(b"ready")
        assert terminal.is_as_before()
        terminal.type(b"\x03")
        assert terminal.wait() == 0
    assert client.process(box, process.pid).state == "running"
    client.signal(box, process.pid, "KILL")


def test_given_back_when_the_server_sends_rubbish(person: Person, tmp_path: Path) -> None:
    started = b'{"pid":1,"tty":true,"argv":["x"],"state":"running","exit_code":null,"started_at":""}'
    first = b"HTTP/1.1 201 C\r\nContent-Length: %d\r\n\r\n%b" % (len(started), started)
    switch = b"HTTP/1.1 101 S\r\nConnection: Upgrade\r\nUpgrade: sbx-stream/1\r\n\r\n"
    rubbish = [ReadRequest(), switch + frame(b"o", b"ready\r\n"), Read(10**6 * 0 + 200), b"o\xff\xff\xff\xff"]
    with serving(tmp_path / "s", [], [ReadRequest(), first], rubbish) as server:
        someone = Person(person.home, Path(server.path))
        with at_terminal(someone, "exec", "x", "--", "x") as terminal:
            terminal.expect(b"ready\r\n")
            terminal.until(raw=True)
            terminal.type(b"x" * 200)
            assert terminal.wait() == 1
            assert terminal.is_as_before()
            assert b"larger than 1 MiB" in terminal.seen
