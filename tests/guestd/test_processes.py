"""Real processes through a real guestd: bytes, codes, terminals, and what is left when a connection ends."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from guestd import protocol
from tests.conftest import counts
from tests.guestd.peer import Call, Guest, Outcome, eventually

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def alive(guest: Guest, mark: str) -> bool:
    """Whether a process with this in its arguments runs in the machine (and is not this look at it)."""
    script = (
        "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f 2>/dev/null; echo; done | grep -v grep"
        f" | grep -c '^sleep {mark}'"
    )
    return guest.shell(script).stdout.strip() != b"0"


# ---- bytes and codes

def test_thirty_one_after_the_other(guest: Guest) -> None:
    for number in range(30):
        got = guest.run("sh", "-c", f"echo {number}; echo e{number} >&2; exit {number}")
        assert (got.stdout, got.stderr, got.code) == (b"%d\n" % number, b"e%d\n" % number, number)


def test_eight_at_once(guest: Guest) -> None:
    """Each waits for all the others."""

    def one(number: int) -> Outcome:
        meet = f"touch /tmp/met-{number}; until [ $(ls -d /tmp/met-* | wc -l) = 8 ]; do sleep 0.05; done"
        return guest.shell(f"{meet}; head -c 200000 /dev/zero | tr '\\0' {number}")

    with ThreadPoolExecutor(8) as pool:
        for number, got in enumerate(pool.map(one, range(8))):
            assert got.stdout == b"%d" % number * 200_000
    guest.shell("rm /tmp/met-*")


def test_sixty_four_megabytes(guest: Guest) -> None:
    script = "import hashlib,sys,random;r=random.Random(7);h=hashlib.sha256()\n" \
        "for _ in range(1024):\n d=r.randbytes(65536);h.update(d);sys.stdout.buffer.write(d)\n" \
        "sys.stderr.write(h.hexdigest())"
    got = guest.run("python3", "-c", script)
    assert len(got.stdout) == 64 << 20
    assert hashlib.sha256(got.stdout).hexdigest().encode() == got.stderr


def test_ten_megabytes_in_while_ten_come_out(guest: Guest) -> None:
    data = os.urandom(10 << 20)
    with guest.start("cat") as call:
        def send() -> None:
            for at in range(0, len(data), 1 << 17):
                call.send(protocol.encode_frame("i", data[at:at + (1 << 17)]))
            call.send(protocol.encode_frame("i"), protocol.encode_frame("e"))

        sender = threading.Thread(target=send)
        sender.start()
        got = call.outcome()
        sender.join()
    assert got.stdout == data
    assert got.code == 0


@pytest.mark.parametrize(
    ("argv", "stdin", "expected"),
    [
        pytest.param(["cat"], b"", b"", id="no input at all"),
        pytest.param(["cat"], b"hello", b"hello", id="a word"),
        pytest.param(["wc", "-c"], b"\0" * 300_000, b"300000\n", id="more than a pipe holds"),
        pytest.param(["true"], b"x" * 300_000, b"", id="input that nobody reads"),
    ],
)
def test_stdin_ends(guest: Guest, argv: list[str], stdin: bytes, expected: bytes) -> None:
    assert guest.run(*argv, stdin=stdin).stdout == expected


def test_stdin_frames_that_come_with_the_request_are_not_lost(guest: Guest) -> None:
    request = protocol.encode_request(protocol.Request("exec", argv=["cat"]))
    early = protocol.encode_frame("i", b"early") + protocol.encode_frame("e")
    with Call(guest.path, request + early) as call:
        assert call.answer().ok
        assert call.outcome().stdout == b"early"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0), ("exit 255", 255), ("kill -TERM $$", 143), ("kill -KILL $$", 137), ("kill -SEGV $$", 139),
        ("kill -HUP $$", 129), ("kill -INT $$", 130),
    ],
)
def test_exit_codes(guest: Guest, script: str, code: int) -> None:
    assert guest.shell(script).code == code


@pytest.mark.parametrize(("name", "code"), [("TERM", 143), ("KILL", 137), ("HUP", 129), ("INT", 130)])
def test_signals_from_the_host(guest: Guest, name: str, code: int) -> None:
    with guest.start("sleep", "60") as call:
        call.send(protocol.encode_signal(name))
        assert call.outcome().code == code


def test_a_signal_reaches_the_whole_process_group(guest: Guest) -> None:
    with guest.start("sh", "-c", "sleep 4711 & sleep 4711 & wait; wait") as call:
        assert eventually(lambda: alive(guest, "4711"))
        call.send(protocol.encode_signal("TERM"))
        assert call.outcome().code == 143
    assert eventually(lambda: not alive(guest, "4711"))


def test_a_process_that_ignores_term_ends_by_kill(guest: Guest) -> None:
    with guest.start("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done") as call:
        found = call.frames()
        assert next(found) == ("o", b"ready\n")
        call.send(protocol.encode_signal("TERM"))
        time.sleep(0.3)
        call.send(protocol.encode_signal("STOP"))       # not one of the four: ignored
        call.send(protocol.encode_signal("KILL"))
        assert list(found)[-1] == ("x", struct.pack(">i", 137))


def test_the_tail_of_a_fast_command(guest: Guest) -> None:
    for tty in (False, True):
        for _ in range(counts(50, 500)):
            got = guest.run("sh", "-c", "head -c 70000 /dev/zero | tr '\\0' x; printf END", tty=tty)
            assert len(got.stdout) == 70_003 and got.stdout.endswith(b"END")
            assert got.order.endswith("x")


def test_the_tail_reaches_a_slow_reader(guest: Guest) -> None:
    script = "import sys; sys.stdout.buffer.write(b'y' * 2_000_000)"
    with guest.start("python3", "-c", script) as call:
        time.sleep(1.0)         # far longer than the drain after an exit
        assert len(call.outcome().stdout) == 2_000_000


def test_a_background_child_keeps_the_pipe_and_lives(guest: Guest) -> None:
    got = guest.shell("(until [ -e /tmp/go-on ]; do echo tick; sleep 0.05; done; echo tick;"
                      " echo done > /tmp/ticked) & echo started")
    assert got.stdout.startswith(b"started\n") or b"started\n" in got.stdout
    assert got.code == 0
    guest.shell("sleep 0.3; touch /tmp/go-on")
    assert eventually(lambda: guest.get("/tmp/ticked")[0].ok), "it was killed by the pipe that nobody read"
    guest.shell("rm /tmp/ticked /tmp/go-on")


def test_a_background_server_survives_its_command(guest: Guest) -> None:
    script = "import socket,time;s=socket.socket();s.bind(('127.0.0.1',0));s.listen();" \
        "print(s.getsockname()[1],flush=True);c,_=s.accept();c.sendall(b'hi')"
    port = int(guest.shell(f'python3 -c "{script}" & sleep 0.3').stdout)
    with guest.call("dial", port=port) as call:
        assert call.answer().ok
        assert call.content(2) == b"hi"


def test_endless_output_waits_for_its_reader(guest: Guest) -> None:
    with guest.start("yes") as call:
        time.sleep(0.5)
        before = rss_kib()
        time.sleep(1.0)
        assert guest.run("echo", "quick").stdout == b"quick\n"
        assert rss_kib() - before < 2048
        call.send(protocol.encode_signal("KILL"))
        assert call.outcome().code == 137


def test_stdin_that_nobody_reads_does_not_pile_up(guest: Guest) -> None:
    with guest.start("sleep", "60") as call:
        before = rss_kib()
        call.sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            for _ in range(1000):
                call.send(protocol.encode_frame("i", b"x" * 65536))
        assert rss_kib() - before < 4096


def guestd_process() -> Path:
    """The guestd of this test run, seen from the host: the youngest one below this process."""
    def children(pid: int) -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    found, queue = [], [os.getpid()]
    while queue:
        pid = queue.pop(0)
        queue += children(pid)
        if b"--unix\0/run/guest/guestd.sock" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"-S\0")[-1]:
            found.append(pid)
    return Path(f"/proc/{found[-1]}")


def guestd_descriptors() -> int:
    return len(list((guestd_process() / "fd").iterdir()))


def rss_kib() -> int:
    return int(re.findall(r"VmRSS:\s+(\d+)", (guestd_process() / "status").read_text())[0])


# ---- arguments, environment, directories

def test_arguments_and_variables_arrive_byte_for_byte(guest: Guest) -> None:
    argv = ["a b", '"', "'", "$(x)", "line\nbreak", "", "\udcff\udc80", "ü€😀", "-e", "--", "\\", "\x1b[31m"]
    script = "import sys,os;sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode,sys.argv[1:])))"
    got = guest.run("python3", "-c", script, *argv)
    assert got.stdout.split(b"\0") == [os.fsencode(word) for word in argv]
    env = {"NEWLINE": "a\nb", "EQUALS": "=a=b", "EMPTY": "", "BYTES": "\udcff", "odd name!": "1",
           "LD_LIBRARY_PATH": "/nowhere"}
    got = guest.run("cat", "/proc/self/environ", env=env)
    found = dict(entry.split(b"=", 1) for entry in got.stdout.rstrip(b"\0").split(b"\0"))
    for name, value in env.items():
        assert found[os.fsencode(name)] == os.fsencode(value)


def test_two_hundred_kilobytes_of_arguments(guest: Guest) -> None:
    words = [f"{number:05d}" + "w" * 95 for number in range(2000)]
    got = guest.run("sh", "-c", 'printf "%s\\n" "$@" | sha256sum', "sh", *words)
    assert got.stdout.split()[0].decode() == hashlib.sha256("".join(f"{w}\n" for w in words).encode()).hexdigest()


def test_an_argument_longer_than_the_kernel_takes_says_so(guest: Guest) -> None:
    answer = guest.ask("exec", argv=["true", "x" * 200_000])
    assert answer.code == "too_large"


def test_what_a_process_finds_in_its_environment(guest: Guest) -> None:
    def env(**fields: object) -> dict[bytes, bytes]:
        got = guest.run("cat", "/proc/self/environ", **fields)
        return dict(entry.split(b"=", 1) for entry in got.stdout.rstrip(b"\r\n\0").split(b"\0") if entry)

    plain = {
        b"PATH": PATH.encode(), b"HOME": b"/sandbox/home", b"USER": b"sandbox", b"LANG": b"C.UTF-8",
        b"CONFIGURED": b"yes",
    }
    assert env() == plain
    assert env(env={"CONFIGURED": "no", "HOME": "/tmp"}) == {**plain, b"CONFIGURED": b"no", b"HOME": b"/tmp"}
    assert env(tty=True)[b"TERM"] == b"xterm-256color"
    assert env(tty=True, env={"TERM": "dumb"})[b"TERM"] == b"dumb"


def test_who_and_where_a_process_is(guest: Guest) -> None:
    got = guest.shell(
        "id -u; id -g; pwd; umask; ulimit -c; ps -o pid=,pgid=,sid= -p $$; cd /proc/$$; grep NoNewPrivs status;"
        " cat oom_score_adj; ls fd; grep SigIgn status; grep CapEff status"
    )
    lines = got.stdout.decode().split("\n")
    assert lines[:5] == ["1001", "1001", "/sandbox/home", "0022", "0"]
    assert len(set(lines[5].split())) == 1, "not its own session and process group"
    assert lines[6].split()[1] == "1"
    assert lines[7] == "0"
    assert set(lines[8:lines.index("SigIgn:\t0000000000000000")]) <= {"0", "1", "2", "10"}
    assert "CapEff:\t0000000000000000" in lines


def test_a_directory_of_ones_own(guest: Guest) -> None:
    assert guest.run("pwd", cwd="/tmp").stdout == b"/tmp\n"


@pytest.mark.parametrize(
    ("fields", "code", "word"),
    [
        pytest.param({"argv": ["no-such-command"]}, "no_such_command", "no-such-command", id="not on the PATH"),
        pytest.param({"argv": ["/no/such"]}, "no_such_command", "/no/such", id="no such file"),
        pytest.param({"argv": ["/etc/passwd"]}, "no_such_command", "Permission", id="not executable"),
        pytest.param({"argv": ["/etc"]}, "no_such_command", "/etc", id="a directory"),
        pytest.param({"argv": ["./relative"]}, "no_such_command", "./relative", id="not in the working directory"),
        pytest.param({"argv": ["true"], "cwd": "/no/where"}, "no_such_cwd", "/no/where", id="no such directory"),
        pytest.param({"argv": ["true"], "cwd": "/etc/passwd"}, "no_such_cwd", "/etc/passwd", id="a file as directory"),
        pytest.param({"argv": ["nope"], "cwd": "/no/where"}, "no_such_cwd", "/no/where", id="neither of both"),
        pytest.param({"argv": ["true"], "env": {"PATH": ""}}, "no_such_command", "true", id="an empty PATH"),
        pytest.param({"argv": ["true"], "env": {"PATH": "bin:."}, "cwd": "/usr"}, "no_such_command", "true",
                     id="a relative PATH"),
    ],
)
def test_what_cannot_start_says_why(guest: Guest, fields: dict[str, object], code: str, word: str) -> None:
    answer = guest.ask("exec", **fields)
    assert answer.code == code
    assert word in answer.message


def test_a_directory_without_permission_is_no_working_directory(guest: Guest) -> None:
    guest.shell("mkdir -p /tmp/closed && chmod 0 /tmp/closed")
    assert guest.ask("exec", argv=["true"], cwd="/tmp/closed").code == "no_such_cwd"
    guest.shell("rmdir /tmp/closed")


def test_the_command_is_sought_on_its_own_path(guest: Guest) -> None:
    guest.put("/tmp/bin/mine", b"#!/bin/sh\necho mine $1\n")
    guest.run("chmod", "755", "/tmp/bin/mine")
    assert guest.run("mine", "x", env={"PATH": "relative::/no:/tmp/bin"}).stdout == b"mine x\n"


# ---- terminals

def test_the_size_is_there_for_the_first_command(guest: Guest) -> None:
    assert guest.run("stty", "size", tty=True, rows=43, cols=132).stdout == b"43 132\r\n"


@pytest.mark.parametrize(("rows", "cols"), [(0, 0), (65535, 65535), (1, 0)])
def test_silly_sizes_are_survived(guest: Guest, rows: int, cols: int) -> None:
    assert guest.run("stty", "size", tty=True, rows=rows, cols=cols).stdout == b"%d %d\r\n" % (rows, cols)


@pytest.mark.parametrize("term", ["a\nb", "x" * 10_000, "../x", ""])
def test_silly_terminal_names_are_survived(guest: Guest, term: str) -> None:
    assert guest.run("printenv", "TERM", tty=True, env={"TERM": term}).code == 0


def test_a_resize_is_felt(guest: Guest) -> None:
    script = "trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.02; done"
    with guest.start("bash", "-c", script, tty=True, rows=10, cols=20) as call:
        found = call.frames()
        assert next(found) == ("o", b"ready\r\n")
        call.send(protocol.encode_resize(50, 90))
        assert b"".join(payload for kind, payload in found if kind == "o") == b"50 90\r\n"


def test_fifty_quick_resizes_end_at_the_last(guest: Guest) -> None:
    with guest.start("sh", "-c", "read line; stty size", tty=True) as call:
        for number in range(1, 51):
            call.send(protocol.encode_resize(number, number + 1))
        call.send(protocol.encode_frame("i", b"\n"))
        assert call.outcome().stdout.endswith(b"50 51\r\n")


def test_it_is_a_controlling_terminal(guest: Guest) -> None:
    got = guest.run("sh", "-c", "tty; ps -o tty= -p $$; echo hello > /dev/tty; test -t 0 -a -t 1 -a -t 2 && echo yes",
                    tty=True)
    lines = got.stdout.decode().split("\r\n")
    assert re.fullmatch(r"/dev/pts/\d+", lines[0])
    assert lines[1].strip() == lines[0].removeprefix("/dev/")
    assert lines[2:4] == ["hello", "yes"]
    assert got.stderr == b""


def test_interrupt_from_the_keyboard_ends_the_foreground(guest: Guest) -> None:
    with guest.start("bash", "-c", "sleep 60; echo no", tty=True) as call:
        time.sleep(0.3)
        call.send(protocol.encode_frame("i", b"\x03"))
        got = call.outcome()
        assert got.code == 130
        assert b"no" not in got.stdout


FOREGROUND = """
import os, signal, sys
ready, say = os.pipe()
child = os.fork()
if not child:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.write(say, b"x")
    signal.pause()
os.read(ready, 1)
os.tcsetpgrp(0, child)
print("ready", flush=True)
status = os.waitpid(child, 0)[1]
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
print("ended by", os.WTERMSIG(status))
"""


def test_the_int_signal_reaches_the_foreground_of_a_terminal(guest: Guest) -> None:
    with guest.start("python3", "-c", FOREGROUND, tty=True) as call:
        found = call.frames()
        assert next(found) == ("o", b"ready\r\n")
        call.send(protocol.encode_signal("INT"))
        assert b"ended by 2\r\n" in b"".join(payload for kind, payload in found if kind == "o")


def test_end_of_input_is_the_terminals_own_character(guest: Guest) -> None:
    with guest.start("cat", tty=True) as call:
        call.send(protocol.encode_frame("i", b"line\n"), protocol.encode_frame("e"))
        got = call.outcome()
    assert got.code == 0
    assert got.stdout == b"line\r\nline\r\n"


def test_characters_cut_in_two_arrive_whole(guest: Guest) -> None:
    text = "│€😀" * 20_000
    script = "import sys,time\nd=sys.stdin.buffer.read()\nw=sys.stdout.buffer\nw.write(d[:1]);w.flush()\n" \
        "time.sleep(.2);w.write(d[1:]);w.write(b'\\xff\\xe2\\x82');w.flush()"
    got = guest.run("python3", "-c", script, stdin=text.encode())
    assert got.stdout == text.encode() + b"\xff\xe2\x82"


# ---- connections that end

@pytest.mark.usefixtures("needs_cgroups")
def test_hanging_up_ends_a_child_that_left_the_process_group(guest: Guest) -> None:
    script = "setsid sh -c 'sleep 5151 & sleep 5151' & (setsid sleep 5151 &) ; echo ready; sleep 5151"
    call = guest.start("sh", "-c", script)
    assert next(call.frames()) == ("o", b"ready\n")
    assert eventually(lambda: alive(guest, "5151"))
    call.sock.close()
    assert eventually(lambda: not alive(guest, "5151"), 3)


@pytest.mark.usefixtures("needs_cgroups")
def test_kill_reaches_a_child_that_left_the_process_group(guest: Guest) -> None:
    with guest.start("sh", "-c", "(setsid sleep 6161 &); echo ready; sleep 6161") as call:
        found = call.frames()
        next(found)
        call.send(protocol.encode_signal("KILL"))
        assert list(found)[-1][0] == "x"
    assert eventually(lambda: not alive(guest, "6161"), 3)


def test_hanging_up_ends_the_process(guest: Guest) -> None:
    for half in (False, True):
        call = guest.start("sleep", "7171")
        assert eventually(lambda: alive(guest, "7171"))
        if half:
            call.sock.shutdown(socket.SHUT_WR)
        else:
            call.sock.close()
        assert eventually(lambda: not alive(guest, "7171"), 3)
        call.sock.close()


def test_hanging_up_is_noticed_behind_stdin_that_nobody_reads(guest: Guest) -> None:
    call = guest.start("sleep", "8181")
    call.sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        while True:
            call.send(protocol.encode_frame("i", b"x" * 65536))
    call.sock.close()
    assert eventually(lambda: not alive(guest, "8181"), 3)


@pytest.mark.parametrize(
    "rubbish", [b"\xff" * 100, b"o\0\0\0\x01x", b"i\xff\xff\xff\xff", b"r\0\0\0\x01\0"], ids=repr
)
def test_a_frame_that_is_none_ends_the_process(guest: Guest, rubbish: bytes) -> None:
    with guest.start("sleep", "9191") as call:
        call.send(rubbish)
        assert list(call.frames()) == []
    assert eventually(lambda: not alive(guest, "9191"), 3)


@pytest.mark.parametrize("line", [b"\n", b"{}\n", b"rubbish\n", b'{"op":"ping","op":"ping"}\n', b"x" * (1 << 20)])
def test_a_bad_request_gets_an_error_line(guest: Guest, line: bytes) -> None:
    with Call(guest.path, line) as call:
        assert call.answer().code in ("bad_request", "too_large")
        assert call.sock.recv(1) == b""


def test_descriptors_are_at_their_baseline_after_many_runs(guest: Guest) -> None:
    before = guestd_descriptors()
    for number in range(counts(200, 1000)):
        call = guest.start("sh", "-c", "echo x; sleep 0.01; cat", tty=number % 4 == 0)
        if number % 3:
            call.send(protocol.encode_signal("KILL"))
            call.outcome()
        call.sock.close()
    assert eventually(lambda: abs(guestd_descriptors() - before) <= 5)


# ---- kept processes

def test_a_kept_process_survives_its_connection_and_is_replayed(guest: Guest) -> None:
    call = guest.start("sh", "-c", "echo one; read x; echo two $x; exit 5", keep=True, session="replay")
    assert next(call.frames()) == ("o", b"one\n")
    call.sock.close()
    with guest.call("attach", session="replay") as again:
        assert again.answer().ok
        again.send(protocol.encode_frame("i", b"line\n"))
        got = again.outcome()
        assert (got.stdout, got.code) == (b"one\ntwo line\n", 5)
    with guest.call("attach", session="replay", offset_o=4) as late:
        assert late.answer().ok
        assert late.outcome().stdout == b"two line\n"
    (state,) = [one for one in guest.ask("sessions").sessions if one.session == "replay"]
    assert (state.running, state.exit_code, state.bytes_o, state.bytes_E) == (False, 5, 13, 0)
    assert guest.ask("forget", session="replay").ok
    assert guest.ask("forget", session="replay").code == "not_found"
    assert guest.ask("attach", session="replay").code == "not_found"


def test_many_may_watch_one_process(guest: Guest) -> None:
    with guest.start("sh", "-c", "read x; seq 1000; exit 3", keep=True, session="watched") as first:
        watchers = [guest.call("attach", session="watched") for _ in range(3)]
        assert all(watcher.answer().ok for watcher in watchers)
        watchers[0].send(protocol.encode_frame("i", b"go\n"))
        expected = b"".join(b"%d\n" % number for number in range(1, 1001))
        for call in (first, *watchers):
            got = call.outcome()
            assert (got.stdout, got.code) == (expected, 3)
            call.sock.close()
    guest.ask("forget", session="watched")


def test_a_name_is_used_once(guest: Guest) -> None:
    with guest.start("sleep", "60", keep=True, session="once") as call:
        assert guest.ask("exec", argv=["true"], keep=True, session="once").code == "bad_request"
        assert guest.ask("forget", session="once").code == "bad_request"
        call.send(protocol.encode_signal("KILL"))
        assert call.outcome().code == 137
    assert guest.ask("forget", session="once").ok
    assert guest.ask("exec", argv=["nope"], keep=True, session="once").code == "no_such_command"
    assert guest.ask("attach", session="once").code == "not_found"


def test_a_kept_process_waits_for_its_first_reader_and_for_no_other(guest: Guest) -> None:
    call = guest.start("sh", "-c", "head -c 3000000 /dev/zero; echo end >&2; sleep 60", keep=True, session="ahead")
    time.sleep(0.5)
    (state,) = [one for one in guest.ask("sessions").sessions if one.session == "ahead"]
    assert state.bytes_o < 1_500_000, "it ran ahead of who started it"
    call.sock.close()
    assert eventually(
        lambda: [one.bytes_o for one in guest.ask("sessions").sessions if one.session == "ahead"] == [3_000_000]
    )
    with guest.call("attach", session="ahead") as late:
        assert late.answer().ok
        late.send(protocol.encode_signal("KILL"))
        got = late.outcome()
    ((stream, lost),) = got.gaps
    assert stream == "o" and got.order.startswith("d")
    assert lost + len(got.stdout) == 3_000_000
    assert len(got.stdout) <= protocol.RING_BYTES
    assert got.stderr == b"end\n" and got.code == 137
    guest.ask("forget", session="ahead")


def test_an_offset_beyond_the_end_is_refused(guest: Guest) -> None:
    guest.start("true", keep=True, session="short").outcome()
    with guest.call("attach", session="short", offset_o=1) as call:
        assert call.answer().code == "bad_request"
    guest.ask("forget", session="short")


def test_signals_reach_a_kept_process_through_any_connection(guest: Guest) -> None:
    guest.start("sleep", "60", keep=True, session="signalled").sock.close()
    with guest.call("attach", session="signalled") as call:
        assert call.answer().ok
        call.send(protocol.encode_signal("TERM"))
        assert call.outcome().code == 143
    guest.ask("forget", session="signalled")


def test_stdin_that_waits_on_one_connection_holds_up_no_other(guest: Guest) -> None:
    with guest.start("sleep", "60", keep=True, session="full") as full:
        full.sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            for _ in range(1000):
                full.send(protocol.encode_frame("i", b"x" * 65536))
        full.sock.settimeout(60)
        with guest.call("attach", session="full") as other:
            assert other.answer().ok
            time.sleep(0.2)
            other.send(protocol.encode_frame("i", b"late\n"), protocol.encode_signal("TERM"))
            assert other.outcome().code == 143
    guest.ask("forget", session="full")


def test_stdin_of_two_connections_arrives_in_the_order_it_was_sent(guest: Guest) -> None:
    first = guest.start("sh", "-c", "sleep 0.5; cat", keep=True, session="two")
    with guest.call("attach", session="two") as second:
        assert second.answer().ok
        first.send(protocol.encode_frame("i", b"a" * 65536 + b"b" * 30000))
        time.sleep(0.1)
        second.send(protocol.encode_frame("i", b"c" * 70000), protocol.encode_frame("e"))
        got = second.outcome()
        assert got.stdout == b"a" * 65536 + b"b" * 30000 + b"c" * 70000 and got.code == 0
    first.sock.close()
    guest.ask("forget", session="two")


def test_kept_processes_are_counted(fresh_guest: Guest) -> None:
    for number in range(protocol.MAX_SESSIONS):
        fresh_guest.start("sleep", "60", keep=True, session=f"s{number}").sock.close()
    assert fresh_guest.ask("exec", argv=["true"], keep=True, session="more").code == "bad_request"
    with fresh_guest.call("attach", session="s5") as call:
        assert call.answer().ok
        call.send(protocol.encode_signal("KILL"))
        call.outcome()
    fresh_guest.start("true", keep=True, session="more").outcome()
    assert "s5" not in [one.session for one in fresh_guest.ask("sessions").sessions]


# ---- before and after configure

def test_only_ping_and_configure_before_configure(tmp_path: Path) -> None:
    from tests.guestd.peer import IDENTITY, machine

    with machine(tmp_path, configure=False) as guest:
        answer = guest.ask("ping")
        assert (answer.ok, answer.version, answer.configured) == (True, protocol.VERSION, False)
        assert guest.ask("exec", argv=["true"]).code == "bad_request"
        assert guest.ask("read", path="/etc/passwd").code == "bad_request"
        assert guest.ask("configure", **IDENTITY).ok
        assert guest.ask("ping").configured
        assert guest.ask("configure", **IDENTITY).code == "bad_request"


# ---- dial, sync

def test_dial_passes_bytes_and_half_close(guest: Guest) -> None:
    script = "import socket;s=socket.socket();s.bind(('127.0.0.1',0));s.listen()\n" \
        "print(s.getsockname()[1],flush=True);c,_=s.accept();d=b''\n" \
        "while p:=c.recv(65536): d+=p\nc.sendall(d[::-1]);c.close()"
    with guest.start("python3", "-c", script) as server:
        port = int(next(server.frames())[1])
        data = os.urandom(3 << 20)
        with guest.call("dial", port=port) as call:
            assert call.answer().ok
            call.sock.sendall(data)
            call.sock.shutdown(socket.SHUT_WR)
            assert call.content(len(data)) == data[::-1]
            assert call.sock.recv(1) == b""


def test_dial_finds_a_server_on_the_other_family(guest: Guest) -> None:
    script = "import socket;s=socket.socket(socket.AF_INET6);s.setsockopt(41,26,1);s.bind(('::1',0));s.listen()\n" \
        "print(s.getsockname()[1],flush=True);c,_=s.accept();c.sendall(b'six')"
    with guest.start("python3", "-c", script) as server:
        kind, payload = next(server.frames())
        if kind == "E":
            pytest.skip("no IPv6 on this host's loopback")
        with guest.call("dial", port=int(payload)) as call:
            assert call.answer().ok
            assert call.content(3) == b"six"


def test_dial_to_nobody(guest: Guest) -> None:
    assert guest.ask("dial", port=1).code == "not_found"


def test_sync(guest: Guest) -> None:
    assert guest.ask("sync").ok
    assert guest.ask("sync", final=True).ok
