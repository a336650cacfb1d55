"""Commands in a real VM over the API: exact bytes and exact codes."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sandboxd.client import Attachment, Sandbox, exit_code, frame, resize
from sandboxd.errors import InvalidRequest
from tests.conftest import counts
from tests.daemon import Daemon

pytestmark = pytest.mark.vm


def python(code: str) -> list[str]:
    return ["python3", "-c", code]


def collect(attached: Attachment) -> tuple[bytes, bytes, int]:
    """Everything an attachment still brings: stdout, stderr, exit code."""
    streams = {b"o": bytearray(), b"E": bytearray()}
    for piece in attached.frames():
        if piece.kind == b"x":
            return bytes(streams[b"o"]), bytes(streams[b"E"]), exit_code(piece.payload)
        streams[piece.kind] += piece.payload
    raise AssertionError("the attachment ended without an exit code")


def test_thirty_commands_one_after_the_other(daemon: Daemon, shared: Sandbox) -> None:
    for number in range(counts(30, 500)):
        script = f"echo out {number}; echo err {number} >&2; exit {number % 7}"
        answer = daemon.client.run(shared.id, ["sh", "-c", script])
        assert (answer.stdout, answer.stderr) == (f"out {number}\n".encode(), f"err {number}\n".encode())
        assert answer.exit_code == number % 7 and not answer.truncated and not answer.timed_out


def test_eight_commands_at_once(daemon: Daemon, shared: Sandbox) -> None:
    def one(number: int) -> bytes:
        return daemon.client.run(shared.id, ["sh", "-c", f"sleep 0.5; echo {number}"]).stdout

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(8))) == [f"{number}\n".encode() for number in range(8)]


def test_mib_of_stdout_arrive_whole_through_attach(daemon: Daemon, shared: Sandbox) -> None:
    code = "import sys,hashlib;h=hashlib.sha256()\nb=bytes(range(256))*256\nfor i in range(1024):\n" \
           " c=i.to_bytes(4,'big')+b[4:];h.update(c);sys.stdout.buffer.write(c)\n" \
           "sys.stdout.flush();sys.stderr.write(h.hexdigest())"  # fmt: skip
    process = daemon.client.start(shared.id, python(code))
    with daemon.client.attach(shared.id, process.pid) as attached:
        out, err, code_ = collect(attached)
    assert len(out) == 64 << 20 and code_ == 0
    assert hashlib.sha256(out).hexdigest().encode() == err


def test_run_answers_the_first_8_mib_and_says_so(daemon: Daemon, shared: Sandbox) -> None:
    answer = daemon.client.run(shared.id, ["sh", "-c", "head -c 12582912 /dev/zero"])
    assert len(answer.stdout) == 8 << 20 and answer.truncated and answer.exit_code == 0


def test_binary_stdin_comes_back_byte_for_byte(daemon: Daemon, shared: Sandbox, seed: random.Random) -> None:
    data = seed.randbytes(512 * 1024)
    assert daemon.client.run(shared.id, ["cat"], stdin=data).stdout == data


def test_ten_mib_in_while_ten_mib_come_out(daemon: Daemon, shared: Sandbox, seed: random.Random) -> None:
    data = seed.randbytes(10 << 20)
    process = daemon.client.start(shared.id, ["cat"])
    with daemon.client.attach(shared.id, process.pid) as attached:

        def feed() -> None:
            for start in range(0, len(data), 1 << 16):
                attached.sock.sendall(frame(b"i", data[start : start + (1 << 16)]))
            attached.sock.sendall(frame(b"e"))

        feeder = threading.Thread(target=feed)
        feeder.start()
        out, _, code = collect(attached)
        feeder.join()
    assert hashlib.sha256(out).digest() == hashlib.sha256(data).digest() and code == 0


def test_a_process_that_ignores_term_still_dies_by_kill(daemon: Daemon, shared: Sandbox) -> None:
    process = daemon.client.start(shared.id, ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"])
    lines = daemon.client.output(shared.id, process.pid)
    assert next(lines).data == b"ready\n"
    daemon.client.signal(shared.id, process.pid, "TERM")
    time.sleep(0.5)
    assert daemon.client.process(shared.id, process.pid).state == "running"
    daemon.client.signal(shared.id, process.pid, "KILL")
    assert [piece.exit_code for piece in lines if piece.exit_code is not None] == [137]


def test_a_timeout_ends_even_what_left_the_process_group(daemon: Daemon, shared: Sandbox) -> None:
    mark = f"escapee-{os.getpid()}"
    started = time.monotonic()
    answer = daemon.client.run(
        shared.id, ["sh", "-c", f"setsid sh -c 'exec -a {mark} sleep 300' & sleep 300"], timeout_secs=1
    )
    assert answer.timed_out and answer.exit_code == -1 and time.monotonic() - started < 60
    left = daemon.client.run(shared.id, ["sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"])
    assert b"sleep 300" not in left.stdout


@pytest.mark.parametrize(("signal", "code"), [("TERM", 143), ("KILL", 137), ("SEGV", 139), ("INT", 130)])
def test_death_by_a_signal_is_128_and_its_number(daemon: Daemon, shared: Sandbox, signal: str, code: int) -> None:
    program = f"import os,signal;signal.signal(signal.SIGINT,signal.SIG_DFL);os.kill(os.getpid(),signal.SIG{signal})"
    assert daemon.client.run(shared.id, python(program)).exit_code == code


def test_a_terminal_has_its_size_at_once_and_feels_a_resize(daemon: Daemon, shared: Sandbox) -> None:
    process = daemon.client.start(
        shared.id, ["sh", "-c", "trap 'stty size' WINCH; stty size; while :; do sleep 0.1; done"], size=(43, 132)
    )
    with daemon.client.attach(shared.id, process.pid) as attached:
        seen = bytearray()
        for piece in attached.frames():
            seen += piece.payload
            if bytes(seen) == b"43 132\r\n":
                attached.sock.sendall(resize(50, 100))
            if b"50 100\r\n" in seen:
                break
    daemon.client.signal(shared.id, process.pid, "KILL")
    assert bytes(seen) == b"43 132\r\n50 100\r\n"


def test_ctrl_d_ends_a_terminals_input(daemon: Daemon, shared: Sandbox) -> None:
    process = daemon.client.start(shared.id, ["cat"], size=(24, 80))
    with daemon.client.attach(shared.id, process.pid) as attached:
        attached.sock.sendall(frame(b"i", b"hello\n") + frame(b"e"))
        out, _, code = collect(attached)
    assert out == b"hello\r\nhello\r\n" and code == 0


def test_a_character_cut_in_two_is_whole_at_the_end(daemon: Daemon, shared: Sandbox) -> None:
    code = "import os,time\nfor b in '─💡é'.encode():\n os.write(1,bytes([b]));time.sleep(0.02)\n"
    code += "os.write(1,b'\\xff\\xe2')"
    process = daemon.client.start(shared.id, python(code))
    pieces = list(daemon.client.output(shared.id, process.pid))
    assert b"".join(piece.data for piece in pieces) == "─💡é".encode() + b"\xff\xe2"
    assert pieces[-1].exit_code == 0


def test_the_last_bytes_of_a_fast_command_are_there(daemon: Daemon, shared: Sandbox) -> None:
    for _ in range(counts(10, 500)):
        answer = daemon.client.run(shared.id, ["sh", "-c", "head -c 70000 /dev/zero; echo end >&2"])
        assert len(answer.stdout) == 70_000 and answer.stderr == b"end\n"


def test_a_background_child_does_not_hold_the_answer_and_lives_on(daemon: Daemon, shared: Sandbox) -> None:
    started = time.monotonic()
    answer = daemon.client.run(shared.id, ["sh", "-c", "sleep 3333 & echo started $!"])
    assert answer.stdout.startswith(b"started ") and time.monotonic() - started < 60
    child = answer.stdout.split()[1].decode()
    alive = daemon.client.run(shared.id, ["sh", "-c", f"tr '\\0' ' ' < /proc/{child}/cmdline; kill {child}"])
    assert alive.stdout.startswith(b"sleep 3333")


@pytest.mark.parametrize(
    ("argv", "cwd", "says"),
    [
        (["/nonexistent"], None, "/nonexistent"),
        (["no-such-command"], None, "no-such-command"),
        (["true"], "/no/such/dir", "cwd"),
    ],
    ids=["absolute path", "by PATH", "missing cwd is not a missing command"],
)
def test_what_cannot_start_is_refused_by_name(
    daemon: Daemon, shared: Sandbox, argv: list[str], cwd: str | None, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        daemon.client.run(shared.id, argv, cwd=cwd)


def test_arguments_and_environment_arrive_as_given(daemon: Daemon, shared: Sandbox) -> None:
    argv = ["a b", "'\"`$(x)", "new\nline", "", "\udcff", "ü", "x" * 100_000]
    code = "import sys,os;w=map(os.fsencode,sys.argv[1:])\n"
    code += "sys.stdout.buffer.write(b'\\0'.join(w)+b'\\1'+os.environb[b'ODD'])"
    answer = daemon.client.run(shared.id, [*python(code), *argv], env={"ODD": "a=b\nc"})
    assert answer.stdout == b"\0".join(os.fsencode(word) for word in argv) + b"\1a=b\nc"


def test_processes_are_an_ordinary_user_with_a_kernel_of_their_own(daemon: Daemon, shared: Sandbox) -> None:
    answer = daemon.client.run(shared.id, ["sh", "-c", "id -u; id -un; echo $HOME; pwd; uname -r"])
    uid, user, home, cwd, kernel = answer.stdout.decode().split()
    assert (uid, user, home, cwd) == ("1001", "sandbox", "/sandbox/home", "/sandbox/home")
    assert kernel != os.uname().release


def test_eating_all_memory_ends_the_command_and_not_the_sandbox(daemon: Daemon, shared: Sandbox) -> None:
    answer = daemon.client.run(shared.id, python("b=[]\nwhile 1: b.append(bytearray(1<<22))"))
    assert answer.exit_code == 137
    assert daemon.client.run(shared.id, ["echo", "here"]).stdout == b"here\n"
