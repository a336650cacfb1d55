"""A hostile program in QEMU's place: what of the host can it see, open, reach or signal? As root's and as a user's."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from sandboxd.vm import child
from tests.vm import probing

ROOT = Path(__file__).resolve().parents[2]
USER = 4242  # no account of this machine
SETPRIV = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """One that every user may enter."""
    path = Path(tempfile.mkdtemp(prefix="sbx-jail-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def program(directory: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: apt-get install gcc libc6-dev")
    source = Path(__file__).with_name("probe.c")
    subprocess.run([compiler, "-std=gnu11", "-Wall", "-static", "-o", directory / "probe", source], check=True)
    return directory / "probe"


class Said:
    """What the probe said."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.text = text

    def all(self, name: str) -> list[str]:
        return [line.removeprefix(f"{name}: ") for line in self.lines if line.startswith(f"{name}: ")]

    def errno(self, name: str) -> int:
        (value,) = self.all(name)
        return int(value)


@pytest.fixture(scope="module")
def neighbours(directory: Path) -> Iterator[list[str]]:
    """Things of the host a hostile program would like: a file and a socket anyone may use, an abstract socket."""
    (directory / "secret").write_text("secret")
    (directory / "secret").chmod(0o666)
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as abstract:
        named.bind(str(directory / "socket"))
        named.listen(8)
        (directory / "socket").chmod(0o777)
        abstract.bind(f"\0sbx-jail-{os.getpid()}")
        abstract.listen(8)
        host = ["/etc/passwd", "/proc/self/status", "/proc/1/root/etc/passwd", "/sys/kernel", "/dev/null"]
        host += ["/dev/kvm", "/tmp", "/usr/bin/env", "/lib/../etc/passwd", "/run", str(ROOT)]
        own = [
            str(directory / "secret"),
            str(directory / "socket"),
            f"@sbx-jail-{os.getpid()}",
            f"%{os.getpid()}",
        ]
        yield [*host, *own]


@pytest.fixture(scope="module", params=["root", "user"])
def said(request: pytest.FixtureRequest, program: Path, neighbours: list[str]) -> Said:
    if os.geteuid() == 0 and request.param == "user":
        command = [*SETPRIV, sys.executable, "-m", "tests.vm.probing", str(program), *neighbours]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60, env={})
        if "Permission denied" in ran.stderr and "sandboxd" not in ran.stderr:
            pytest.skip(f"an ordinary user cannot run {sys.executable}")
        assert ran.returncode == 0, ran.stderr
        return Said(json.loads(ran.stdout))
    if os.geteuid() != 0 and request.param == "root":
        pytest.skip("needs root, to be given a uid of its own")
    return Said(anyio.run(probing.run, program, neighbours, []))


@pytest.fixture(scope="module")
def expected_uid(said: Said) -> int:
    return probing.UID if said.all("uid") == [str(probing.UID)] else USER if os.geteuid() == 0 else os.getuid()


def test_it_came_to_its_end(said: Said) -> None:
    assert "done" in said.lines, said.text
    assert "x32 call went through" not in said.lines


def test_it_has_one_uid_and_no_group(said: Said, expected_uid: int) -> None:
    assert said.all("uid") == [str(expected_uid)]
    assert said.all("gid") == [str(expected_uid)]
    assert said.all("groups") == ["0"]
    for step in ("setuid 0", "setgid 0", "setgroups"):
        assert said.errno(step) in (errno.EPERM, errno.EINVAL), step


def test_it_has_only_the_descriptors_it_was_given(said: Said) -> None:
    assert said.all("descriptor") == ["0", "1", "2"]


def test_it_has_nothing_of_the_hosts_environment_or_name(said: Said) -> None:
    assert sorted(said.all("environment")) == ["LD_LIBRARY_PATH=/lib", "PWD=/"]
    assert said.all("host") == ["vmm"]
    assert said.all("pid") == ["1"]


def test_it_sees_itself_and_what_root_needs_to_start_it(said: Said, program: Path) -> None:
    files = {path for path in said.all("sees") if not any(p.startswith(f"{path}/") for p in said.all("sees"))}
    own = {path for path in files if path.endswith("/probe")}
    others = files - own
    assert len(own) == 1
    if said.all("uid") == [str(probing.UID)]:
        assert others - {"/setpriv"}, "setpriv's libraries"
        assert all(path == "/setpriv" or path.startswith(("/lib/", "/lib64/")) for path in others), others
    else:
        assert others == set()
    assert said.all("writable") == []


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/proc/self/status", "/proc/1/root/etc/passwd", "/sys/kernel", "/dev/null", "/dev/kvm",
             "/tmp", "/usr/bin/env", "/lib/../etc/passwd", "/run", str(ROOT)],
)  # fmt: skip
def test_it_opens_nothing_of_the_host(said: Said, path: str) -> None:
    assert said.errno(f"open {path}") in (errno.ENOENT, errno.ENOTDIR)


def test_it_reaches_no_file_socket_or_process_of_another(said: Said, directory: Path) -> None:
    assert said.errno(f"open {directory / 'secret'}") == errno.ENOENT
    assert said.errno(f"connect {directory / 'socket'}") == errno.ENOENT
    assert said.errno("connect abstract") == errno.ECONNREFUSED
    assert said.errno("signal to the starter") == errno.ESRCH
    assert said.errno("signal to all") == errno.ESRCH
    assert said.errno("shared memory of the host") == errno.ENOENT


@pytest.mark.parametrize("step", ["create /file", "mkdir /directory"])
def test_its_root_is_read_only(said: Said, step: str) -> None:
    assert said.errno(step) in (errno.EROFS, errno.EACCES)


@pytest.mark.parametrize(
    "step", ["mknod", "chroot", "mount", "umount", "remount", "unshare user", "unshare mount", "unshare net",
             "clone user", "sethostname", "ptrace", "process_vm_readv", "pidfd_open", "bpf", "perf_event_open",
             "io_uring_setup", "userfaultfd", "keyctl", "open_by_handle_at"],
)  # fmt: skip
def test_the_filter_refuses(said: Said, step: str) -> None:
    assert said.errno(step) == errno.EPERM


def test_clone3_sends_the_c_library_to_clone(said: Said) -> None:
    assert said.errno("clone3") == errno.ENOSYS
    assert said.errno("fork") == 0


@pytest.mark.parametrize("family", ["inet", "inet6", "netlink", "packet", "vsock", "alg"])
def test_there_is_no_socket_but_a_unix_one(said: Said, family: str) -> None:
    assert said.errno(f"socket {family}") == errno.EAFNOSUPPORT
    assert said.errno("socket unix") == 0


def test_the_limits_hold(said: Said) -> None:
    assert said.errno("file within the limit") == 0
    assert said.errno("file over the limit") == errno.EFBIG
    assert said.errno("memory over the limit") == errno.ENOMEM


def test_what_nobody_reads_is_dropped_after_64_kib_and_holds_nobody_up() -> None:
    script = "i=0; while [ $i -lt 20000 ]; do echo 0123456789; i=$((i+1)); done"
    said = anyio.run(probing.run, Path("/bin/sh"), ["-c", script], [])
    assert said.startswith("0123456789\n0123456789\n")
    assert len(said) <= 65536


def test_a_program_that_cannot_start_is_seen_at_once(directory: Path) -> None:
    broken = directory / "broken"
    broken.write_bytes(b"\x7fELF but not really")
    broken.chmod(0o755)

    async def start() -> str:
        with anyio.fail_after(10):
            return await probing.run(Path("/bin/false"), [], [], ((broken, "/broken"),))

    assert anyio.run(start) == ""


def test_what_finds_no_descriptor_left_keeps_none() -> None:
    spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    os.close(spare)
    before, limits = os.listdir("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_NOFILE)
    for room in range(7):
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare + room, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                child.launch("none", lambda *_: ["/bin/true"], (), b"")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert os.listdir("/proc/self/fd") == before, room
