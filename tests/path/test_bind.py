"""A directory of the host as the workspace of a real machine: what a person and an agent do in it, and what goes
wrong. What a hostile guest can do: tests/vm/test_virtiofs.py; who may have which: tests/sandboxd/test_bind.py."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sandboxd.client import Bind, Create, Sandbox
from sandboxd.errors import NotFound, SandboxError
from sandboxd.vm import jail, virtiofs
from tests.conftest import git, make_repository
from tests.daemon import BIN, Daemon

pytestmark = pytest.mark.vm

MEMORY_MB = 384
USER = 61235  # nobody's account
PATIENCE_S = 120.0


@pytest.fixture(scope="module", autouse=True)
def virtiofsd() -> None:
    if reason := virtiofs.why_not(jail.find_tools(root=os.geteuid() == 0), f"probe-{os.getpid()}", 1024):
        pytest.skip(reason)


@pytest.fixture(scope="module")
def own(short_tmp: Path) -> Iterator[Daemon]:
    """A daemon that these tests may kill."""
    with Daemon(short_tmp / "bind-vm", flags=("--allow-bind", "--no-network")) as running:
        yield running
    assert running.leftovers() == []
    assert "Traceback" not in running.log.read_text(errors="replace"), running.log.read_text(errors="replace")


@pytest.fixture(scope="module")
def project(short_tmp: Path) -> Path:
    return make_repository(short_tmp / "bind-project")


@pytest.fixture(scope="module")
def writer(own: Daemon, project: Path) -> Sandbox:
    """The sandbox most tests share."""
    return own.client.create(Create(memory_mb=MEMORY_MB, bind=Bind(str(project))))


def shell(daemon: Daemon, sandbox: Sandbox, script: str) -> tuple[int, str]:
    ran = daemon.client.run(sandbox.id, ["sh", "-c", script], cwd="/workspace")
    return ran.exit_code, (ran.stdout + ran.stderr).decode()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def virtiofsd_of(sandbox_id: str) -> int:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            program = (entry / "cmdline").read_bytes().split(b"\0")[0]
            if program.startswith(b"/sandboxd/") and program.endswith(f"/{sandbox_id}/virtiofsd".encode()):
                found.append(int(entry.name))
    (pid,) = found
    return pid


def owners(top: Path) -> set[tuple[int, int]]:
    return {(entry.lstat().st_uid, entry.lstat().st_gid) for entry in (top, *top.rglob("*"))}


def test_a_person_and_an_agent_work_in_one_directory(own: Daemon, writer: Sandbox, project: Path) -> None:
    """Each sees what the other does, with git and without, and all of it stays the person's."""
    script = "id -u; cat hello.txt; echo by-the-agent >> hello.txt; mkdir -p src; echo x > src/x; ln -s src/x link; "
    script += "git add -A; git commit -qm Agent; git status --porcelain; git log --format=%s"
    assert shell(own, writer, script) == (0, "1001\nhello\nAgent\nOne\n")
    assert owners(project) == {(os.getuid(), os.getgid())}
    assert git(project, "log", "--format=%s").split() == ["Agent", "One"]
    assert git(project, "fsck", "--strict") == "" and git(project, "status", "--porcelain") == ""
    # And back: the person edits and commits, and the agent goes on from there.
    (project / "src/x").write_text("by the person\n")
    git(project, "commit", "-qam", "Person")
    assert shell(own, writer, "cat src/x; git log -1 --format=%s") == (0, "by the person\nPerson\n")


def test_what_programs_do_with_files_works(own: Daemon, writer: Sandbox, project: Path) -> None:
    (project / "work").mkdir()
    script = """set -e; cd work
for i in $(seq 300); do echo $i > f$i; done; ls | wc -l; cat f* | sort -n | tail -1
mv f1 g1; rm f2; truncate -s 1000000 sparse; stat -c %s sparse; chmod 640 f3; stat -c %a f3; touch -d @86400 f4
stat -c %Y f4; ln f5 hard; echo appended >> hard; tail -1 f5
python3 - <<'END'
import fcntl, mmap, os, socket, sqlite3, tempfile
with open('map', 'wb+') as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096); memory[:5] = b'bytes'; memory.flush(); memory.close()
    fcntl.flock(file, fcntl.LOCK_EX)
print(open('map', 'rb').read(5))
made = sqlite3.connect('data.db'); made.execute('pragma journal_mode=wal'); made.execute('create table t (x)')
made.execute('insert into t values (1)'); made.commit(); print(made.execute('select * from t').fetchone()); made.close()
server = socket.socket(socket.AF_UNIX); server.bind('sock'); server.listen()
socket.socket(socket.AF_UNIX).connect('sock')
with tempfile.NamedTemporaryFile(dir='.') as file: file.write(b'x')
END"""
    code, said = shell(own, writer, script)
    expected = ["300", "300", "1000000", "640", "86400", "appended", "b'bytes'", "(1,)"]
    assert (code, said.split()) == (0, expected), said
    work = project / "work"
    assert not (work / "f2").exists() and (work / "g1").read_text() == "1\n"
    assert (work / "f3").stat().st_mode & 0o777 == 0o640 and (work / "f4").stat().st_mtime == 86400
    assert owners(work) == {(os.getuid(), os.getgid())}
    shutil.rmtree(work)


def test_nothing_it_makes_is_more_than_a_file(own: Daemon, writer: Sandbox, project: Path) -> None:
    code, said = shell(own, writer, "cp /bin/sh sh && chmod 4755 sh; chmod 2755 sh; stat -c %a sh; mknod dev c 1 3")
    assert code == 1 and "755\n" in said and said.count("Operation not permitted") >= 3, said
    assert not (project / "sh").stat().st_mode & 0o6000 and not (project / "dev").exists()


def test_a_link_leads_somewhere_in_the_guest_alone(own: Daemon, writer: Sandbox, project: Path) -> None:
    script = "ln -sf /etc/hostname away; cat away; ln -sfn ../../../.. up; ls up/ | tr '\\n' ' '"
    code, said = shell(own, writer, script)
    assert code == 0 and said.splitlines()[0] == writer.id.replace("_", "-"), said
    assert "sandbox" in said.splitlines()[1].split()
    assert os.readlink(project / "away") == "/etc/hostname"


def test_what_it_is_is_told(own: Daemon, writer: Sandbox, project: Path) -> None:
    assert writer.bind == Bind(str(project))
    created = next(one for one in own.client.events(writer.id).events if one.type == "sandbox.created")
    assert created.bind == Bind(str(project))


def test_it_goes_on_when_the_daemon_is_killed(own: Daemon, writer: Sandbox, project: Path) -> None:
    assert shell(own, writer, "echo before > before")[0] == 0
    own.kill()
    own.start()
    assert shell(own, writer, "cat before; echo after > after") == (0, "before\n")
    assert (project / "after").read_text() == "after\n"
    assert own.client.get(writer.id).bind == Bind(str(project))


def test_only_to_be_read_it_stays_as_it_is_and_a_machine_ends_with_its_virtiofsd(own: Daemon, project: Path) -> None:
    (project / "kept").write_text("kept\n")
    before = sorted(os.listdir(project))
    reader = own.client.create(Create(memory_mb=MEMORY_MB, bind=Bind(str(project), read_only=True)))
    code, said = shell(own, reader, "cat kept; echo x > kept; rm -f kept; mkdir new; touch new; git log -1 --format=%s")
    assert code == 0 and said.startswith("kept\n") and said.count("Read-only file system") == 4, said
    assert sorted(os.listdir(project)) == before and (project / "kept").read_text() == "kept\n"
    # The end of virtiofsd is the machine's: what waits for it in the guest could not be ended otherwise.
    os.kill(virtiofsd_of(reader.id), signal.SIGKILL)
    until(lambda: own.client.get(reader.id).state == "terminated")
    assert f"{reader.id}: of its machine, this ended: virtiofsd" in own.log.read_text(errors="replace")
    ended = own.client.events(reader.id).events[-1]
    assert (ended.type, ended.reason) == ("sandbox.terminated", "machine")
    own.client.delete(reader.id)
    assert not [line for line in own.leftovers() if reader.id in line]


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system needs root to be mounted")
def test_a_full_disk_and_a_directory_that_goes_away_are_errors_in_the_guest(own: Daemon, short_tmp: Path) -> None:
    small = short_tmp / "bind-small"
    (small / "project").mkdir(parents=True)
    script = f'mount -t tmpfs -o size=1m,mode=755 tmpfs {small} && mkdir {small}/project && exec "$@"'
    place = Daemon(
        short_tmp / "bind-full", prefix=("unshare", "-m", "sh", "-c", script, "sh"),
        flags=("--allow-bind", "--no-network"),
    )  # fmt: skip
    with place as running:
        made = running.client.create(Create(memory_mb=MEMORY_MB, bind=Bind(str(small / "project"))))
        _, said = shell(running, made, "head -c 4000000 /dev/zero > big; rm big; echo x > x; cat x")
        assert said.startswith("x\n") and "No space left on device" in said, said
        # In the daemon's mount namespace, where it is.
        assert running.process is not None
        inside = ["nsenter", "-t", str(running.process.pid), "-m", "rm", "-r", str(small / "project")]
        subprocess.run(inside, check=True)
        code, said = shell(running, made, "sleep 2; cat x; echo y > y || cd / && echo alive")
        assert (code, said.startswith("alive\n")) == (0, True), said
        assert "cat: x: No such file" in said and "cannot create y" in said, said
        running.client.delete(made.id)
        assert running.leftovers() == []
    assert own.client.capabilities().capabilities["bind_workspace"]


def test_deleted_nothing_of_it_is_left_but_the_directory(own: Daemon, writer: Sandbox, project: Path) -> None:
    own.client.delete(writer.id)
    assert not [line for line in own.leftovers() if writer.id in line]
    assert (project / "hello.txt").exists()
    with pytest.raises((NotFound, SandboxError)):
        own.client.run(writer.id, ["true"])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
def test_an_ordinary_users_run_from_end_to_end(short_tmp: Path) -> None:
    """Of a sandboxd of their own, with the command line: the files are theirs, and they commit them afterwards."""
    directory = short_tmp / "bind-user"
    directory.mkdir()
    top = make_repository(directory / "home/project")
    for path in (directory, directory / "home", top, *top.rglob("*")):
        os.chown(path, USER, USER)
    ids = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "env", f"HOME={directory}/home")
    tried = subprocess.run([*ids, str(BIN / "sandboxd"), "--version"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"an ordinary user cannot start sandboxd from here: {tried.stderr.decode(errors='replace')[:200]}")
    with Daemon(directory, prefix=ids, flags=("--allow-bind",)) as running:
        script = "id -u; git add -A; echo y > made; printf '[core]\\n\\tsshCommand = ./evil\\n' >> .git/config"
        command = [*ids, str(BIN / "sandbox-cli"), "run", "--bind=.", "--memory=384", "--", "sh", "-c", script]
        ran = subprocess.run(command, env=running.environment(), cwd=top, capture_output=True, check=False, timeout=300)
        assert (ran.returncode, ran.stdout) == (0, b"1001\n"), ran.stderr.decode()
        assert "core.sshcommand" in ran.stderr.decode().lower()
        assert owners(top) == {(USER, USER)}
        commit = [*ids, "git", "-C", str(top), "-c", "user.name=p", "-c", "user.email=p@localhost"]
        subprocess.run([*commit, "add", "-A"], check=True)
        subprocess.run([*commit, "commit", "-qm", "Mine"], check=True)
        # Root is not this sandboxd's user.
        refused = running.cli("run", "--bind=.", "--bind-read-only", "--", "true", cwd=top)
        assert refused.returncode == 1 and f"uid {USER}".encode() in refused.stderr, refused.stderr
        assert running.leftovers() == []
