"""The stand-ins for Firecracker and its jailer: they keep the real ones' wire, command lines and steps."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandboxd import unixpath
from sandboxd.assets import prepare, store
from sandboxd.errors import SetupError
from sandboxd.vm import firecracker, firecracker_versions
from sandboxd.vm.arch import Arch
from sandboxd.vm.firecracker import Request
from sandboxd.vm.firecracker_calls import State
from sandboxd.vm.machine import Drive, MachineSpec
from tests.daemon import assets_dir
from tests.firecracker_standin import jailer
from tests.firecracker_standin.fixtures import enterable, programs
from tests.firecracker_standin.standin import Standin
from tests.vm.starting import BUILD

FIRST_UID = 979_000
DRIVE = {"drive_id": "drive0", "is_root_device": False, "is_read_only": True, "path_on_host": "drive0"}
LOAD = {"snapshot_path": "state", "mem_backend": {"backend_type": "File", "backend_path": "memory"}}
VERSION = firecracker_versions.parse("Firecracker v1.16.1")
BEFORE = "The requested operation is not supported before starting the microVM."
AFTER = "The requested operation is not supported after starting the microVM."
NUMBERS = itertools.count()
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to build a jail as the jailer does")


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    with enterable("fcs-", "/tmp") as path:
        yield path


@pytest.fixture(scope="module")
def standin(top: Path) -> Iterator[Standin]:
    with programs(top / "fc") as running:
        yield running
        assert until(lambda: not running.programs())


@pytest.fixture
def place(top: Path) -> Iterator[Path]:
    """A directory with a short name, for one process's sockets."""
    path = top / f"p{next(NUMBERS)}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def until(done: Callable[[], object], timeout_s: float = 20) -> bool:
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def call(api: Path, method: str, path: str, body: object = None, timeout_s: float = 60) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = unixpath.connect_sync(api, timeout_s)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else None
    finally:
        connection.close()


def answers(path: Path) -> bool:
    """Somebody listens: the name alone is there a moment earlier."""
    try:
        unixpath.connect_sync(path, 20).close()
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    return True


@contextmanager
def process(standin: Standin, place: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """One outside of any jail; its API is at `place`/api.sock."""
    command = [standin.firecracker, "--id", place.name, "--api-sock", "api.sock", *arguments]
    with (place / "out").open("wb") as out:
        running = subprocess.Popen(command, cwd=place, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        assert until(lambda: answers(place / "api.sock") or running.poll() is not None)
        yield running
    finally:
        running.kill()
        running.wait()


# The command line.


def test_its_version_is_what_the_test_wants(standin: Standin) -> None:
    try:
        for version in ("1.14.3", "1.16.1"):
            standin.be(version)
            said = subprocess.run([standin.firecracker, "--version"], capture_output=True, text=True, check=True)
            assert said.stdout.splitlines()[:2] == [f"Firecracker v{version}", ""]
            assert "Firecracker exiting successfully. exit_code=0" in said.stdout
            said = subprocess.run([standin.jailer, "--version"], capture_output=True, text=True, check=True)
            assert said.stdout.strip() == f"Jailer v{version}"
    finally:
        standin.be("1.16.1")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--api-socket", "x"], "'api-socket' which wasn't expected"),
        (["api.sock"], "'api.sock' which wasn't expected"),
        (["--id=x"], "'id=x' which wasn't expected"),
        (["--api-sock"], "'api-sock' requires a value"),
        (["--api-sock", "--no-seccomp"], "'api-sock' requires a value"),
        (["--api-sock", "a", "--api-sock", "b"], "'api-sock' was provided more than once"),
        (["--no-api"], "'config-file' required"),
        (["--no-seccomp", "--seccomp-filter", "x"], "cannot be used together"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_refused(standin: Standin, arguments: list[str], why: str) -> None:
    said = subprocess.run([standin.firecracker, *arguments], capture_output=True, text=True, check=False)
    assert said.returncode == 153
    assert why in said.stdout and said.stderr.startswith("Error: ParseArguments(")


@pytest.mark.parametrize("id", ["", "under_score", "a/b", "x" * 65])
def test_an_id_is_letters_digits_and_dashes(standin: Standin, id: str) -> None:
    said = subprocess.run([standin.firecracker, "--id", id], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stderr) == (134, "Invalid instance ID\n")


# The API, with no guest.


def test_every_call_before_the_start(standin: Standin, place: Path) -> None:
    for name in ("kernel", "initramfs", "drive0"):
        (place / name).write_bytes(b"x" * 512)
    with process(standin, place):
        api = place / "api.sock"

        def put(path: str, body: object) -> tuple[int, Any]:
            return call(api, "PUT", path, body)

        state = {"id": place.name, "state": "Not started", "vmm_version": "1.16.1", "app_name": "Firecracker"}
        assert call(api, "GET", "/") == (200, state)
        assert call(api, "GET", "/version") == (200, {"firecracker_version": "1.16.1"})
        for path, body in (
            ("/logger", {"log_path": "log"}),
            ("/metrics", {"metrics_path": "metrics"}),
            ("/machine-config", {"vcpu_count": 2, "mem_size_mib": 256}),
            ("/boot-source", {"kernel_image_path": "kernel", "initrd_path": "initramfs", "boot_args": "quiet"}),
            ("/drives/drive0", DRIVE),
            ("/drives/drive0", DRIVE | {"is_read_only": False}),
            ("/vsock", {"guest_cid": 3, "uds_path": "v.sock"}),
            ("/entropy", {}),
            ("/serial", {"serial_out_path": "console"}),
        ):
            assert put(path, body) == (204, None), path
        status, seen = call(api, "GET", "/vm/config")
        assert status == 200
        assert seen["drives"] == [DRIVE | {"is_read_only": False}]
        assert (seen["machine-config"]["vcpu_count"], seen["vsock"]["uds_path"]) == (2, "v.sock")
        assert {path.name for path in place.iterdir()} >= {"log", "metrics", "console", "v.sock"}
        assert b"received a Put request" in (place / "log").read_bytes()

        refused(
            api,
            ("PATCH", "/vm", {"state": "Paused"}, BEFORE),
            ("PATCH", "/drives/drive0", {"drive_id": "drive0", "path_on_host": "drive0"}, BEFORE),
            ("PUT", "/snapshot/create", {"snapshot_path": "s", "mem_file_path": "m"}, BEFORE),
            ("PUT", "/actions", {"action_type": "SendCtrlAltDel"}, BEFORE),
            ("PUT", "/actions", {"action_type": "Halt"}, "action_type"),
            ("PUT", "/drives/drive1", DRIVE, "path and of the body differ"),
            ("PUT", "/drives/drive0", DRIVE | {"discard": True}, "unknown field discard"),
            ("PUT", "/drives/drive0", DRIVE | {"path_on_host": "missing"}, "No such file or directory (os error 2)"),
            ("PUT", "/drives/drive0", {"drive_id": "drive0"}, "missing field"),
            ("PUT", "/boot-source", {"kernel_image_path": "missing"}, "kernel file cannot be opened: No such file"),
            ("PUT", "/vsock", {"guest_cid": 3, "uds_path": "api.sock"}, "Address already in use (os error 98)"),
            ("PUT", "/network-interfaces/eth0", {"iface_id": "eth0", "host_dev_name": "x" * 20}, "Open tap device"),
            ("PUT", "/nothing", {}, "Invalid request method and/or path: PUT /nothing."),
            ("DELETE", "/vsock", None, "Invalid request method and/or path: DELETE /vsock."),
            ("PUT", "/snapshot/load", LOAD, "not allowed after configuring boot-specific resources"),
        )
    assert [entry["outcome"] for entry in standin.calls(place.name)] == [200, 200, *[204] * 9, 200, *[400] * 15]


def test_a_start_without_a_kernel_is_refused(standin: Standin, place: Path) -> None:
    with process(standin, place):
        status, answer = call(place / "api.sock", "PUT", "/actions", {"action_type": "InstanceStart"})
        assert (status, answer["fault_message"]) == (
            400, "Start microvm error: Cannot start microvm without kernel configuration.",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"\x16\x03\x01\x02\x00", b""),
        (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"HTTP/1.1 200 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n",
        ),
        (b"PUT /entropy HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n{", b"HTTP/1.1 400 "),
        (b"PUT /x HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n" + b" " * 60000, b"HTTP/1.1 400 "),
        (b"what is this\r\n\r\n", b"HTTP/1.1 400 "),
    ],
    ids=["no HTTP at all", "a request", "no JSON", "too much", "no request"],
)
def test_bytes_on_the_api_socket(standin: Standin, place: Path, sent: bytes, answer: bytes) -> None:
    with process(standin, place), unixpath.connect_sync(place / "api.sock", 10) as sock:
        sock.sendall(sent)
        if not answer:
            sock.shutdown(socket.SHUT_WR)
        assert sock.recv(4096).startswith(answer)


def test_a_snapshot_that_is_none_ends_the_process(standin: Standin, place: Path) -> None:
    (place / "state").write_text("{}")
    with process(standin, place) as running:
        status, answer = call(place / "api.sock", "PUT", "/snapshot/load", LOAD)
        assert status == 400 and "Failed to restore from snapshot" in answer["fault_message"]
        assert running.wait(10) == 1


def test_a_configuration_file_with_a_fault_ends_the_process(standin: Standin, place: Path) -> None:
    (place / "config").write_text(json.dumps({"vsock": {"guest_cid": 1, "uds_path": "v"}}))
    with process(standin, place, "--config-file", "config", "--no-api") as running:
        assert running.wait(10) == 1
    assert b"guest_cid is out of range" in (place / "out").read_bytes()


# Faults on demand.


@pytest.fixture
def faulty(standin: Standin) -> Iterator[Standin]:
    yield standin
    standin.fail()


def test_a_refusal_comes_at_the_call_that_is_meant_and_at_no_other(faulty: Standin, place: Path) -> None:
    faulty.fail({"do": "refuse", "call": 2}, {"do": "refuse", "path": "/vsock"}, {"do": "refuse", "id": "another"})
    with process(faulty, place):
        api = place / "api.sock"
        assert [call(api, "GET", "/")[0] for _ in range(3)] == [200, 400, 200]
        assert call(api, "PUT", "/entropy", {})[0] == 204
        assert call(api, "PUT", "/vsock", {"guest_cid": 3, "uds_path": "v.sock"})[0] == 400
        assert not (place / "v.sock").exists()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("hang", TimeoutError), ("half", TimeoutError), ("die", http.client.RemoteDisconnected),
        ("garbage", http.client.BadStatusLine), ("headers", http.client.HTTPException),
    ],
)  # fmt: skip
def test_a_fault_is_what_it_is_called(faulty: Standin, place: Path, kind: str, error: type[Exception]) -> None:
    faulty.fail({"do": kind, "method": "GET", "path": "/version"})
    with process(faulty, place) as running:
        with pytest.raises(error):
            call(place / "api.sock", "GET", "/version", timeout_s=0.3)
        if kind == "die":
            assert running.wait(10) == 139
        else:
            assert running.poll() is None


@pytest.mark.parametrize(
    ("kind", "least"), [("continues", b"HTTP/1.1 100 Continue\r\n\r\n"), ("large", b"HTTP/1.1 200 ")]
)
def test_a_flood_goes_on_for_as_long_as_somebody_reads(faulty: Standin, place: Path, kind: str, least: bytes) -> None:
    faulty.fail({"do": kind})
    with process(faulty, place), unixpath.connect_sync(place / "api.sock", 10) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        got = b""
        while len(got) < 4 << 20:
            got += sock.recv(1 << 20)
        assert got.startswith(least)


@pytest.mark.parametrize("kind", ["hang", "die"])
def test_a_process_that_never_gets_to_its_api(faulty: Standin, place: Path, kind: str) -> None:
    faulty.fail({"do": kind, "call": 0})
    running = subprocess.Popen([faulty.firecracker, "--api-sock", "api.sock"], cwd=place, stdout=subprocess.DEVNULL)
    try:
        if kind == "die":
            assert running.wait(10) == 1
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                running.wait(0.3)
        assert not (place / "api.sock").exists()
    finally:
        running.kill()
        running.wait()


def test_shim_and_companion_end_together(top: Path, place: Path) -> None:
    with Standin(top / "short") as standin, process(standin, place) as running:
        (place / "kernel").write_bytes(b"not a kernel")
        assert call(place / "api.sock", "PUT", "/boot-source", {"kernel_image_path": "kernel"}) == (204, None)
        with unixpath.connect_sync(place / "api.sock", 10) as sock:
            running.kill()
            assert sock.recv(1) == b""
        (place / "again").mkdir()
        with process(standin, place / "again") as another:
            standin.stop()
            assert another.wait(10) == 1


def test_under_bubblewrap_the_companion_is_a_socket_in_its_root(standin: Standin, place: Path) -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap: apt-get install bubblewrap")
    jail = [
        str(standin.bwrap), "--unshare-all", "--die-with-parent", "--ro-bind", str(standin.firecracker), "/firecracker",
        "--bind", str(place), "/work", "--chdir", "/work",
    ]  # fmt: skip
    with subprocess.Popen([*jail, "/firecracker", "--id", "wrapped", "--api-sock", "api.sock"]) as running:
        try:
            assert until(lambda: answers(place / "api.sock") or running.poll() is not None)
            assert call(place / "api.sock", "GET", "/")[1]["id"] == "wrapped"
        finally:
            running.kill()


# The jailer.


def words(standin: Standin, base: Path, **changes: str | None) -> list[str]:
    values = {
        "id": "vm-1", "exec-file": str(standin.firecracker), "uid": str(FIRST_UID), "gid": str(FIRST_UID),
        "chroot-base-dir": str(base),
    } | {name.replace("_", "-"): value for name, value in changes.items()}  # fmt: skip
    return [word for name, value in values.items() if value is not None for word in (f"--{name}", value)]


def test_what_the_jailer_is_told(standin: Standin, place: Path) -> None:
    command = words(standin, place, netns="/proc/self/ns/net", parent_cgroup="a/b", cgroup_version="2")
    command += ["--cgroup", "pids.max=64", "--cgroup", "cpu.max=100000 100000", "--resource-limit", "fsize=1024"]
    jail = jailer.parse([*command, "--new-pid-ns", "--", "--api-sock", "api.sock", "--no-such"])
    assert jail.root == place / "firecracker" / "vm-1" / "root"
    assert jail.cgroups == (("pids.max", "64"), ("cpu.max", "100000 100000"))
    assert sorted(jail.limits.values()) == [1024, 2048]
    assert jail.arguments == ("--api-sock", "api.sock", "--no-such"), "not its business"


@pytest.mark.parametrize(
    ("changes", "extra", "why"),
    [
        ({"id": None}, [], "Argument 'id' required"),
        ({"uid": None}, [], "Argument 'uid' required"),
        ({"id": "vm_1"}, [], "Invalid instance ID"),
        ({"id": "x" * 65}, [], "Invalid instance ID"),
        ({"uid": "-1"}, [], "Invalid uid: -1"),
        ({"gid": "root"}, [], "Invalid gid: root"),
        ({"exec_file": "/nonexistent"}, [], "Failed to canonicalize path /nonexistent"),
        ({"exec_file": "/bin/true"}, [], 'must contain "firecracker"'),
        ({"exec_file": "/bin"}, [], "is not a file"),
        ({"chroot_base_dir": "/bin/true"}, [], "is not a directory"),
        ({"parent_cgroup": "../up"}, [], "Parent cgroup path is invalid"),
        ({"cgroup_version": "3"}, [], "3 is an invalid cgroup version"),
        ({}, ["--cgroup", "pids.max"], "Invalid format for cgroups: pids.max"),
        ({}, ["--cgroup", "pids=1"], "Cgroup invalid file"),
        ({}, ["--cgroup", "../pids.max=1"], "Cgroup invalid file"),
        ({}, ["--resource-limit", "nproc=1"], "Invalid resource argument: nproc"),
        ({}, ["--resource-limit", "fsize=1G"], "Invalid limit value for resource"),
        ({}, ["--id", "two"], "'id' was provided more than once"),
        ({}, ["--id=two"], "Found argument 'id=two'"),
        ({}, ["--api-sock", "x"], "Found argument 'api-sock'"),
        ({}, ["--netns"], "'netns' requires a value"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_command_line_of_the_jailer(
    standin: Standin, place: Path, changes: dict[str, str | None], extra: list[str], why: str
) -> None:
    with pytest.raises(jailer.JailerError, match=re.escape(why)):
        jailer.parse([*words(standin, place, **changes), *extra])
    assert list(place.iterdir()) == []


def test_the_jailer_says_what_is_wrong_and_does_nothing(standin: Standin, place: Path) -> None:
    said = subprocess.run([standin.jailer, *words(standin, place, id="vm_1")], capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (1, "Jailer error: Invalid instance ID: vm_1\n")
    assert list(place.iterdir()) == []


@root
def test_another_program_in_the_jail_gets_no_descriptor(standin: Standin, place: Path) -> None:
    (place / "jails").mkdir()
    other = place / "other-firecracker"
    shutil.copy(standin.firecracker, other)
    said = subprocess.run(
        [standin.jailer, *words(standin, place / "jails", exec_file=str(other))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 1 and "no companion as descriptor 3" in said.stderr


@root
@pytest.mark.parametrize("kind", ["die", "hang"])
def test_a_jailer_that_fails_half_way(faulty: Standin, place: Path, kind: str) -> None:
    faulty.fail({"do": kind, "path": "jailer"})
    command = [faulty.jailer, *words(faulty, place)]
    if kind == "die":
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (said.returncode, said.stderr) == (1, "Jailer error: the test wants no jail\n")
    else:
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(command, timeout=1, check=False)
    assert (place / "firecracker" / "vm-1" / "root" / "firecracker").exists()


@dataclass
class Jailed:
    """A stand-in in a jail: where its root is, and its number outside."""

    root: Path
    pid: int

    @property
    def api(self) -> Path:
        return self.root / "api.sock"

    def status(self) -> dict[str, str]:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        assert until(lambda: not Path(f"/proc/{self.pid}/root/api.sock").exists())


def jail(standin: Standin, base: Path, number: int, files: dict[str, Path], *extra: str) -> Jailed:
    """`files` come into the jail by link, or as a copy from another file system."""
    root = base / "firecracker" / f"vm-{number}" / "root"
    root.mkdir(parents=True)
    for name, source in files.items():
        try:
            os.link(source, root / name)
        except OSError:
            shutil.copy(source, root / name)
    uid = str(FIRST_UID + number)
    command = [*words(standin, base, id=f"vm-{number}", uid=uid, gid=uid), "--new-pid-ns", *extra]
    with (base / f"out-{number}").open("wb") as out:
        subprocess.run(
            [standin.jailer, *command, "--", "--api-sock", "api.sock"], env={"SECRET": "x"}, stdout=out, stderr=out,
            stdin=subprocess.DEVNULL, check=True, timeout=60,
        )  # fmt: skip
    jailed = Jailed(root, int((root / "firecracker.pid").read_text()))
    assert until(lambda: answers(jailed.api))
    return jailed


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    """A network namespace that holds a tap for the first machine's uid."""
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        pytest.skip("needs root and /dev/net/tun, to make a tap")
    script = f"ip tuntap add tap0 mode tap user {FIRST_UID} vnet_hdr && ip link set tap0 up && echo made && exec cat"
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "made\n"
        yield f"/proc/{holder.pid}/ns/net"
    finally:
        holder.communicate()


@pytest.fixture(scope="module")
def assets() -> dict[str, Path]:
    try:
        recipes = prepare.recipes(BUILD)
    except SetupError as error:
        pytest.skip(str(error))
    made: dict[str, store.Asset] = {}
    files = {"kernel": "vmlinux", "initramfs": "initramfs.cpio", "runtime": "runtime.erofs"}
    for recipe in recipes:
        asset = store.find(assets_dir(), recipe, made)
        if asset is None and recipe.name in files:
            pytest.skip(f"no {recipe.name} in {assets_dir()}: make assets")
        if asset is not None:
            made[recipe.name] = asset
    return {name: made[name].file(file) for name, file in files.items()}


def groups() -> tuple[str, list[Path]]:
    """The version of the control groups that limit processes here, and the hierarchies."""
    rows = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    for row in rows:
        if row[2] == "cgroup2" and "pids" in Path(row[1], "cgroup.controllers").read_text().split():
            return "2", [Path(row[1])]
    return "1", [Path(row[1]) for row in rows if row[2] == "cgroup" and "pids" in row[3].split(",")]


@contextmanager
def parent_group() -> Iterator[tuple[list[str], list[Path]]]:
    """Arguments that put a process below a group of this test's, and where it is then."""
    version, tops = groups()
    if not tops:
        pytest.skip("no control groups that limit processes")
    name = f"fcs-{os.getpid()}"
    try:
        yield ["--cgroup-version", version, "--parent-cgroup", name, "--cgroup", "pids.max=8"], [t / name for t in tops]
    finally:
        for group in (top / name for top in tops):
            assert until(lambda group=group: not any(p.read_text() for p in group.glob("*/cgroup.procs")))  # type: ignore[misc]
            for each in (*group.glob("*/"), group):
                each.rmdir()


@root
def test_what_is_jailed(standin: Standin, place: Path, namespace: str) -> None:
    with parent_group() as (arguments, where):
        place.chmod(0o755)
        jailed = jail(standin, place, 0, {}, "--netns", namespace, *arguments, "--resource-limit", "no-file=64")
        try:
            seen = jailed.status()
            assert set(seen["Uid"].split()) == set(seen["Gid"].split()) == {str(FIRST_UID)}
            assert seen["Groups"].split() == []
            assert seen["NSpid"].split() == [str(jailed.pid), "1"]
            assert {seen[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
            assert seen["NoNewPrivs"] == "1"
            proc = Path(f"/proc/{jailed.pid}")
            assert os.readlink(proc / "ns/net") == os.readlink(namespace)
            assert os.readlink(proc / "ns/mnt") != os.readlink("/proc/self/ns/mnt")
            assert proc.joinpath("environ").read_bytes() == b""
            line = proc.joinpath("cmdline").read_bytes().split(b"\0")
            assert line[:3] == [b"/firecracker", b"--id", b"vm-0"]
            assert line[3::2] == [
                b"--start-time-us",
                b"--start-time-cpu-us",
                b"--parent-cpu-time-us",
                b"--api-sock",
                b"",
            ]
            assert sorted(os.listdir(proc / "fd")) == ["0", "1", "2", "3"]
            assert "Max open files            64                   64" in proc.joinpath("limits").read_text()
            assert sorted(os.listdir(proc / "root")) == ["api.sock", "dev", "firecracker", "firecracker.pid", "run"]
            assert (jailed.root.stat().st_uid, jailed.root.stat().st_mode & 0o7777) == (FIRST_UID, 0o700)
            tun = (jailed.root / "dev/net/tun").stat()
            assert (tun.st_uid, os.major(tun.st_rdev), os.minor(tun.st_rdev)) == (FIRST_UID, 10, 200)
            for group in where:
                assert (group / "vm-0/pids.max").read_text() == "8\n"
                assert str(jailed.pid) in (group / "vm-0/cgroup.procs").read_text().split()

            status, answer = call(jailed.api, "PUT", "/drives/drive0", DRIVE | {"path_on_host": "/etc/passwd"})
            assert status == 400 and "No such file" in answer["fault_message"]
            body = {"iface_id": "eth0", "host_dev_name": "tap0"}
            assert call(jailed.api, "PUT", "/network-interfaces/eth0", body) == (204, None)
            status, answer = call(
                jailed.api, "PUT", "/network-interfaces/eth1", {"iface_id": "eth1", "host_dev_name": "tap1"}
            )
            assert status == 400 and "Operation not permitted (os error 1)" in answer["fault_message"]
        finally:
            jailed.kill()


# A guest.


def ping(vsock: Path, timeout_s: float = 120) -> bytes:
    """guestd's answer, however long it takes to come up."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with unixpath.connect_sync(vsock, 20) as sock, suppress(OSError):
            sock.sendall(b"CONNECT 5000\n")
            if sock.recv(64).startswith(b"OK "):
                sock.sendall(b'{"op":"ping"}\n')
                if answer := sock.recv(4096):
                    return answer
        time.sleep(0.1)
    return b""


def state(api: Path) -> str:
    return str(call(api, "GET", "/")[1]["state"])


def test_a_jailed_guest_boots_pauses_is_saved_and_restored(
    standin: Standin, top: Path, namespace: str, assets: dict[str, Path]
) -> None:
    """One boot for all that needs a guest."""
    if shutil.which("qemu-system-x86_64") is None or not (BUILD / "sandbox-vsock").is_file():
        pytest.skip("no QEMU, or no build/sandbox-vsock: make programs")
    base = top / "jails"
    base.mkdir()
    files = {"kernel": assets["kernel"], "initramfs": assets["initramfs"], "drive0": assets["runtime"]}
    first = jail(standin, base, 0, files, "--netns", namespace)
    scratch = first.root / "drive1"
    with scratch.open("wb") as file:
        file.truncate(16 << 20)
    os.chown(scratch, FIRST_UID, FIRST_UID)
    for name in ("log", "metrics"):
        os.mkfifo(first.root / name)
        os.chown(first.root / name, FIRST_UID, FIRST_UID)
    spec = MachineSpec(
        id="vm_0", cpus=1, memory_mb=256, kernel=Path("kernel"), initramfs=Path("initramfs"), directory=base,
        drives=(Drive(Path("drive0"), True), Drive(Path("drive1"), False)), uid=FIRST_UID, tap_fd=0,
        mac="06:00:00:00:00:01",
    )  # fmt: skip
    send(first.api, firecracker.requests(spec, VERSION, Arch.X86_64, "tap0", serial=True))
    assert state(first.api) == State.RUNNING.value
    assert b'"ok":true' in ping(first.root / "v.sock").replace(b" ", b"")
    assert (first.root / "v.sock").stat().st_uid == FIRST_UID
    assert b"guest-init: runtime" in (base / "out-0").read_bytes(), "the console is its standard output"
    assert len(standin.programs()) == 2

    saving = {"snapshot_path": "snapshot", "mem_file_path": "memory"}
    refused(first.api, *LATE, ("PUT", "/snapshot/create", saving, "unavailable while running"))
    send(first.api, firecracker.snapshot_requests(spec.memory_mb))
    assert (state(first.api), (first.root / "memory").stat().st_uid) == (State.PAUSED.value, FIRST_UID)
    refused(first.api, *LATE)
    assert call(first.api, "PATCH", "/vm", {"state": "Resumed"}) == (204, None)
    assert b'"ok":true' in ping(first.root / "v.sock").replace(b" ", b"")

    bigger = base / "bigger"
    with bigger.open("wb") as file:
        file.truncate(32 << 20)
    bigger.chmod(0o666)
    files |= {name: first.root / name for name in ("snapshot", "memory", "drive1")} | {"bigger": bigger}
    second = jail(standin, base, 1, files)
    for name in ("snapshot", "memory", "drive1"):
        os.chown(second.root / name, FIRST_UID + 1, FIRST_UID + 1)
    status, answer = call(second.api, "PUT", "/snapshot/load", LOAD | {"snapshot_path": "snapshot"})
    assert status == 400 and "tap0" in answer["fault_message"], "its namespace has no such tap"
    assert call(first.api, "PUT", "/actions", {"action_type": "SendCtrlAltDel"}) == (204, None)
    ended = lambda: b"exit_code=0" in (base / "out-0").read_bytes()  # noqa: E731
    assert until(ended, 60), "a guest that resets itself ends its process"
    assert until(lambda: not standin.programs(), 10)

    third = jail(standin, base, 2, {name: second.root / name for name in files}, "--netns", namespace)
    for name in ("snapshot", "memory", "drive1"):
        os.chown(third.root / name, FIRST_UID + 2, FIRST_UID + 2)
    give_tap(namespace, FIRST_UID + 2)
    os.rename(third.root / "drive1", third.root / "before")
    os.rename(third.root / "bigger", third.root / "drive1")
    send(third.api, firecracker.load_requests(spec, VERSION, "tap9", [1]))
    assert b'"ok":true' in ping(third.root / "v.sock").replace(b" ", b"")
    patch = {"drive_id": "drive1", "path_on_host": "before"}
    assert call(third.api, "PATCH", "/drives/drive1", patch) == (204, None), "in a guest that runs"
    assert b'"ok":true' in ping(third.root / "v.sock").replace(b" ", b"")
    standin.fail({"do": "deaf", "path": "/vm", "id": "vm-2"})
    assert call(third.api, "PATCH", "/vm", {"state": "Resumed"}) == (204, None)
    standin.fail()
    with unixpath.connect_sync(third.root / "v.sock", 0.3) as sock, pytest.raises(TimeoutError):
        sock.sendall(b"CONNECT 5000\n")
        sock.recv(64)

    third.kill()
    assert until(lambda: not standin.programs(), 10), "a guest ends with its process"


LATE = (
    ("PUT", "/logger", {"level": "Info"}, AFTER),
    ("PUT", "/machine-config", {"vcpu_count": 1, "mem_size_mib": 256}, AFTER),
    ("PUT", "/boot-source", {"kernel_image_path": "kernel"}, AFTER),
    ("PUT", "/drives/drive0", DRIVE, AFTER),
    ("PUT", "/network-interfaces/eth0", {"iface_id": "eth0", "host_dev_name": "tap0"}, AFTER),
    ("PUT", "/vsock", {"guest_cid": 3, "uds_path": "v2.sock"}, AFTER),
    ("PUT", "/entropy", {}, AFTER),
    ("PUT", "/actions", {"action_type": "InstanceStart"}, AFTER),
    ("PUT", "/snapshot/load", LOAD, AFTER),
)


def refused(api: Path, *calls: tuple[str, str, object, str]) -> None:
    for method, path, body, why in calls:
        status, answer = call(api, method, path, body)
        assert status == 400 and why in answer["fault_message"], (path, answer)


def send(api: Path, requests: Sequence[Request]) -> None:
    for request in requests:
        status, answer = call(api, request.method, request.path, request.body)
        assert status == 204, (request.step, answer)


def give_tap(namespace: str, uid: int) -> None:
    inside: Sequence[str] = ["nsenter", f"--net={namespace}"]
    make = f"ip tuntap add tap9 mode tap user {uid} vnet_hdr && ip link set tap9 up"
    subprocess.run([*inside, "sh", "-c", make], check=True, timeout=20)
