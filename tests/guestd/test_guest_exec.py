"""guest-exec on its own, built with the address and undefined-behaviour sanitizers: good blocks and bad ones."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from guestd import process
from tests.conftest import counts
from tests.guestd.peer import REPOSITORY, machine

FLAGS = ("-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fno-omit-frame-pointer")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
MAGIC = 0x31584547


@pytest.fixture(scope="module")
def helper() -> Path:
    """build/asan/guest-exec, made anew when its source is younger."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source = REPOSITORY / "native" / "guest_exec.c"
    target = REPOSITORY / "build" / "asan" / "guest-exec"
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        draft = target.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", *FLAGS, *SANITIZERS, "-o", draft, source], check=True)
        draft.rename(target)
    return target


def block(argv: Sequence[bytes], env: Sequence[bytes] = (), cwd: bytes = b"/", cgroup: bytes = b"") -> bytes:
    text = b"".join(word + b"\0" for word in (cgroup, cwd, *argv, *env))
    return struct.pack("=7I", MAGIC, 0, 0, 0, len(argv), len(env), len(text)) + text


def high(fd: int) -> int:
    """The same, at a number that putting descriptors in their places does not overwrite."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(fd)
    return moved


def run(helper: Path, content: bytes, env: dict[str, str] | None = None) -> tuple[bytes, tuple[int, int] | None, int]:
    """(stdout, (step, errno) of a failure, exit code)"""
    given = high(os.memfd_create("block"))
    os.pwrite(given, content, 0)
    null = high(os.open("/dev/null", os.O_RDWR))
    report_in, report_out = map(high, os.pipe())
    out_in, out_out = map(high, os.pipe())
    places = ((null, 0), (out_out, 1), (null, 2), (given, 3), (report_out, 4))
    pid = os.posix_spawn(
        helper, ["guest-exec"], {"ASAN_OPTIONS": "exitcode=99", **(env or {})},
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for fd, number in places],
    )
    for fd in (given, null, report_out, out_out):
        os.close(fd)
    with os.fdopen(report_in, "rb") as report, os.fdopen(out_in, "rb") as out:
        failure = report.read()
        stdout = out.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return stdout, struct.unpack("=2I", failure) if failure else None, code


def test_arguments_and_variables_are_the_commands(helper: Path) -> None:
    words = [b"", b"a b", b"\n", b"\xff", b"x" * 100_000, b"y" * 100_000]
    script = b"import os,sys;sys.stdout.buffer.write(b'|'.join(map(os.fsencode,sys.argv[1:]))+os.environb[b'E'])"
    argv = [b"python3", b"-c", script, *words]
    stdout, failure, code = run(helper, block(argv, [b"PATH=/nowhere:/usr/bin", b"E=a=b\n\xfe"]))
    assert (failure, code) == (None, 0)
    assert stdout == b"|".join(words) + b"a=b\n\xfe"


def test_nothing_of_its_own_environment_or_descriptors_is_left(helper: Path) -> None:
    stdout, failure, _ = run(helper, block([b"/usr/bin/env"]), {"SECRET": "s"})
    assert (stdout, failure) == (b"", None)
    stdout, _, _ = run(helper, block([b"/bin/sh", b"-c", b"echo /proc/self/fd/*"]))
    assert {int(path.rpartition(b"/")[2]) for path in stdout.split()} <= {0, 1, 2, 3}      # 3: the shell's own look


@pytest.mark.parametrize(
    ("content", "step", "error"),
    [
        pytest.param(block([b"/no/such"]), 10, errno.ENOENT, id="no such file"),
        pytest.param(block([b"nope"], [b"PATH=/usr/bin:/bin"]), 10, errno.ENOENT, id="not on the PATH"),
        pytest.param(block([b"sh"], [b"PATH="]), 10, errno.ENOENT, id="an empty PATH"),
        pytest.param(block([b"sh"]), 10, errno.ENOENT, id="no PATH"),
        pytest.param(block([b"sh"], [b"PATH=bin:.::usr/bin"]), 10, errno.ENOENT, id="relative entries only"),
        pytest.param(block([b"sh"], [b"PATHX=/bin", b"XPATH=/bin"]), 10, errno.ENOENT, id="names like PATH"),
        pytest.param(block([b"passwd"], [b"PATH=/etc:/nowhere"]), 10, errno.EACCES, id="not executable"),
        pytest.param(block([b"x" * 5000], [b"PATH=/bin"]), 10, errno.ENOENT, id="a name too long for a path"),
        pytest.param(block([b"sh"], [b"PATH=/" + b"x" * 5000]), 10, errno.ENOENT, id="a PATH entry too long"),
        pytest.param(block([b"/bin/sh", b"x" * 200_000]), 10, errno.E2BIG, id="an argument too long"),
        pytest.param(block([b"/bin/sh"], cwd=b"/no/where"), 9, errno.ENOENT, id="no such directory"),
        pytest.param(block([b"/bin/sh"], cwd=b""), 9, errno.ENOENT, id="no directory"),
        pytest.param(block([b"/bin/sh"], cwd=b"/etc/passwd"), 9, errno.ENOTDIR, id="a file as directory"),
        pytest.param(block([b"/bin/sh"], cgroup=b"/no/cgroup"), 3, errno.ENOENT, id="no such cgroup"),
    ],
)
def test_a_failure_names_its_step(helper: Path, content: bytes, step: int, error: int) -> None:
    assert run(helper, content) == (b"", (step, error), 126)
    assert process._STEPS[step]


def bad_blocks() -> dict[str, bytes]:
    good = block([b"/bin/echo", b"ran"], [b"A=1"])
    head, text = good[:28], good[28:]

    def sized(argc: int, envc: int, size: int, body: bytes = text) -> bytes:
        return struct.pack("=7I", MAGIC, 0, 0, 0, argc, envc, size) + body

    return {
        "nothing": b"",
        "half a head": head[:10],
        "a head alone": head,
        "a wrong magic": b"XXXX" + good[4:],
        "one byte short": good[:-1],
        "no NUL at the end": good[:-1] + b"x",
        "no strings": sized(1, 0, 0, b""),
        "a size beyond the limit": sized(2, 1, (8 << 20) + 1),
        "a size of four gigabytes": sized(2, 1, 0xFFFFFFFF),
        "no arguments": sized(0, 1, len(text)),
        "more arguments than strings": sized(9, 0, len(text)),
        "more variables than strings": sized(2, 9, len(text)),
        "counts that overflow": sized(0xFFFFFFFF, 2, len(text)),
        "both counts at their limit": sized(len(text), len(text), len(text)),
        "fewer than there are": sized(1, 0, len(text)),
        "an empty command": block([b"", b"x"]),
        "a cgroup alone": sized(1, 0, 1, b"\0"),
    }


@pytest.mark.parametrize("name", list(bad_blocks()))
def test_a_bad_block_is_refused(helper: Path, name: str) -> None:
    stdout, failure, code = run(helper, bad_blocks()[name])
    assert (stdout, code) == (b"", 126)
    assert failure in ((1, errno.EBADMSG), (1, errno.ENOMEM))


def test_damaged_blocks_never_upset_it(helper: Path, seed: random.Random) -> None:
    good = bytearray(block([b"/bin/true", b"a", b""], [b"A=1", b"PATH=/bin"]))
    for _ in range(counts(100, 5000)):
        bad = bytearray(good)
        for _ in range(seed.randrange(1, 4)):
            bad[seed.randrange(len(bad))] = seed.randrange(256)
        # No other flags: a damaged one would only say that a terminal or a namespace is missing.
        bad[4:8] = bytes(4)
        code = run(helper, bytes(bad[: seed.randrange(20, len(bad) + 1)]))[2]
        assert code != 99, bytes(bad)


def test_guestd_runs_with_it(helper: Path, tmp_path: Path) -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    with machine(tmp_path, helper=helper) as guest:
        assert guest.run("id", "-u").stdout == b"1001\n"
        assert guest.run("stty", "size", tty=True, rows=5, cols=7).stdout == b"5 7\r\n"
        assert guest.ask("exec", argv=["nope"]).code == "no_such_command"
