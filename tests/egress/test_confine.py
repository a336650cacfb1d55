"""What is left of a process's power after `confine`, tried by the process itself and read from the kernel."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import ROOT

Outcomes = dict[str, list[str]]


def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: only it has power to give up")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.egress.confined", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def attempts(kind: str, directory: Path) -> Outcomes:
    needs_root()
    done = run(kind, str(directory))
    assert done.returncode == 0, done.stderr
    outcomes: Outcomes = json.loads(done.stdout)
    return outcomes


@pytest.fixture(scope="module")
def egress(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return attempts("egress", tmp_path_factory.mktemp("egress"))


@pytest.fixture(scope="module")
def resolver(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return attempts("resolver", tmp_path_factory.mktemp("resolver"))


WORK = """
    accept connect and tune
    splice through a large pipe
    wait with epoll and events
    threads that come and go
    memory in large pieces
    append to the names file
    descriptors over a socket
    datagrams both ways
    a signal handler
    random bytes and clocks
    an error with its trace
    decide by a client hello
    answer a query
    speak with the daemon
    relay a connection
    a socket: TCP
    a socket: TCP over IPv6
    a socket: UDP
"""
LOST_TO_BOTH = """
    read a file of root
    read pythons own tree
    write a file
    start a process
    become root
    signal another process
    thread signal to another process
    listen on a port
    a socket: raw
    a socket: packet
    a socket: vsock
    a socket: netfilter
    set a limit
    an unlisted system call
"""
LOST_TO_EGRESS = """
    read a file
    list the root
    memory that runs
    memory made to run
    a socket: unix
    datagrams to an abstract socket
    a socket: route
    attach a filter to a socket
"""
LEFT_TO_THE_RESOLVER = """
    read a file
    list the root
    threads that come and go
    wait with epoll and events
    a socket: TCP
    a socket: TCP over IPv6
    a socket: UDP
    a socket: unix
    datagrams to an abstract socket
    a socket: route
"""
REFUSED = {"EPERM", "EACCES", "EROFS"}


def lines(text: str) -> list[str]:
    return textwrap.dedent(text).strip().splitlines()


@pytest.mark.parametrize("what", lines(WORK))
def test_egress_can_still(what: str, egress: Outcomes) -> None:
    assert egress[what] == ["ok", "ok"]


@pytest.mark.parametrize("what", lines(LOST_TO_BOTH) + lines(LOST_TO_EGRESS))
def test_egress_can_no_more(what: str, egress: Outcomes) -> None:
    before, after = egress[what]
    assert before == "ok", "the control: root can"
    assert after in REFUSED


@pytest.mark.parametrize("what", lines(LEFT_TO_THE_RESOLVER))
def test_the_resolver_can_still(what: str, resolver: Outcomes) -> None:
    assert resolver[what] == ["ok", "ok"]


@pytest.mark.parametrize("what", lines(LOST_TO_BOTH))
def test_the_resolver_can_no_more(what: str, resolver: Outcomes) -> None:
    before, after = resolver[what]
    assert before == "ok", "the control: root can"
    if what == "read pythons own tree" and after == "ok":
        pytest.skip("this Python is readable by everybody")
    assert after in REFUSED


FATAL = ["execve", "unshare", "setns", "mount", "ptrace", "bpf", "io_uring_setup", "x32", "int 0x80"]


@functools.cache
def fates(kind: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as directory:
        done = run(kind, directory, "fatal")
    assert done.returncode == 0, done.stderr
    exits: dict[str, int] = json.loads(done.stdout)
    return exits


@pytest.mark.parametrize("call", FATAL)
@pytest.mark.parametrize("kind", ["egress", "resolver"])
def test_what_only_an_intruder_does_ends_the_process(kind: str, call: str) -> None:
    needs_root()
    if call in ("x32", "int 0x80") and os.uname().machine != "x86_64":
        pytest.skip("calls of another kind exist on x86-64 only")
    if fates("nobody")[call] == -signal.SIGSEGV:
        pytest.skip("this kernel takes no 32-bit calls")
    assert fates("nobody")[call] == 0, "the control: it comes back"
    assert fates(kind)[call] == -signal.SIGSYS


HELD = """
import os, sys
from egress import confine
{prepare}
if sys.argv[1] == "egress":
    confine.egress({uid}, [{kept}], sys.argv[2])
else:
    confine.resolver({uid}, [{kept}])
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def held(kind: str, root: Path, prepare: str = "", uid: object = 3_070_003, kept: str = "") -> subprocess.Popen[str]:
    code = HELD.format(prepare=prepare, uid=uid, kept=kept)
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, kind, str(root)]
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    empty = tmp_path / "root"
    empty.mkdir(mode=0o555)
    yield empty


@pytest.mark.parametrize("kind", ["egress", "resolver"])
def test_what_the_kernel_says(kind: str, root: Path) -> None:
    needs_root()
    with held(kind, root, "extra = os.open('/etc', os.O_PATH); spare = [os.pipe() for _ in range(40)]") as process:
        assert process.stdout and process.stdin and process.stderr
        pid = process.stdout.readline().strip()
        assert pid, process.stderr.read()
        text = Path(f"/proc/{pid}/status").read_text()
        status = {name: value.split() for name, _, value in (line.partition(":") for line in text.splitlines())}
        assert status["Uid"] == status["Gid"] == ["3070003"] * 4
        assert status["Groups"] == []
        assert {status[f"Cap{name}"][0] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
        assert (status["NoNewPrivs"], status["Seccomp"]) == (["1"], ["2"])
        assert sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"]
        # Not dumpable: its files in /proc are root's, so another process of the same uid cannot look into it.
        assert os.stat(f"/proc/{pid}/mem").st_uid == 0
        if kind == "egress":
            assert os.readlink(f"/proc/{pid}/root") == os.readlink(f"/proc/{pid}/cwd") == str(root)
            assert os.listdir(f"/proc/{pid}/root") == []
        else:
            mounts = [line.split()[5].split(",") for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
            assert mounts and all({"ro", "nosuid", "nodev"} <= set(options) for options in mounts)
            assert os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")
        process.stdin.close()
        assert process.wait(10) == 0


THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"


@pytest.mark.parametrize(
    ("prepare", "uid", "kept", "why"),
    [
        pytest.param(THREAD, 1000, "", "2 threads", id="a thread"),
        pytest.param("", 0, "", "no uid", id="uid 0"),
        pytest.param("", -1, "", "no uid", id="no uid"),
        pytest.param("fd = os.open('/etc', os.O_PATH)", 1000, "fd", "a directory", id="a directory kept"),
        pytest.param("", 1000, "77", "not open", id="a descriptor that is not open"),
        pytest.param("os.setresuid(1000, 1000, 1000)", 1000, "", "only root", id="not root"),
    ],
)
@pytest.mark.parametrize("kind", ["egress", "resolver"])
def test_no_half_measures(kind: str, prepare: str, uid: int, kept: str, why: str, root: Path) -> None:
    needs_root()
    with held(kind, root, prepare, uid, kept) as process:
        said, error = process.communicate(timeout=30)
    assert (process.returncode, said) == (1, "")
    assert "NotConfined" in error and why in error


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        pytest.param(lambda root: (root / "file").touch(), "not empty", id="a file in it"),
        pytest.param(lambda root: root.chmod(0o777), "root alone", id="writable by others"),
        pytest.param(lambda root: os.chown(root, 3_070_003, 0), "root alone", id="somebody else's"),
        pytest.param(lambda root: (root.rename(root.parent / "x"), root.symlink_to("x")), "root alone", id="a link"),
    ],
)
def test_a_root_that_is_no_empty_directory_of_roots(spoil: object, why: str, root: Path) -> None:
    needs_root()
    assert callable(spoil)
    spoil(root)
    with held("egress", root) as process:
        said, error = process.communicate(timeout=30)
    assert (process.returncode, said) == (1, "")
    assert "NotConfined" in error and why in error


BUSY = """
for _ in range(4):
    threading.Thread(target=lambda: [time.sleep(0) for _ in iter(int, 1)], daemon=True).start()
"""


def test_threads_that_run_at_the_end_are_no_crash(root: Path) -> None:
    """glibc ends threads with a library that it loads then, and aborts where there is no file to load."""
    needs_root()
    code = HELD.format(prepare="import threading, time", uid=3_070_003, kept="").replace("sys.stdin.read()", BUSY)
    done = subprocess.run([sys.executable, "-c", code, "egress", str(root)], cwd=ROOT, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr
