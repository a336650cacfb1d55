"""Volumes in real machines: what one sandbox wrote the next one reads, whatever ended in between."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandboxd.client import Create, Mount, Sandbox, Unreachable
from sandboxd.errors import Conflict
from tests.conftest import counts
from tests.daemon import Daemon

pytestmark = pytest.mark.vm

MEMORY_MB = 384


@pytest.fixture(scope="module")
def own(short_tmp: Path) -> Iterator[Daemon]:
    """A daemon that these tests may kill."""
    with Daemon(short_tmp / "volumes") as running:
        running.client.create_volume("data", 64)
        running.client.create_volume("other", 2)
        yield running
    assert running.leftovers() == []
    assert "Traceback" not in running.log.read_text(errors="replace"), running.log.read_text(errors="replace")


def boot(daemon: Daemon, *mounts: Mount) -> Sandbox:
    return daemon.client.create(Create(memory_mb=MEMORY_MB, volumes=mounts))


def shell(daemon: Daemon, sandbox: Sandbox, script: str) -> str:
    result = daemon.client.run(sandbox.id, ["sh", "-c", script])
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode()


def attached(daemon: Daemon) -> dict[str, str]:
    return {one.name: one.attached_to for one in daemon.client.volumes()}


def lockable(daemon: Daemon, name: str, how: int) -> bool:
    with (daemon.state / "volumes" / f"{name}.ext4").open("rb") as file:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def superblock(daemon: Daemon, name: str) -> str:
    path = daemon.state / "volumes" / f"{name}.ext4"
    return subprocess.run(["/usr/sbin/dumpe2fs", "-h", path], capture_output=True, text=True, check=True).stdout


WRITE = """
set -e
stat -c '%u %g %a' /data /sandbox/home/deep/in/cache
stat -c '%u' /sandbox/home/deep
echo kept > /data/file; mkdir /data/d; ln -s ../file /data/d/link; echo kept > /sandbox/home/deep/in/cache/file
cp /bin/true /data/true && chmod 4755 /data/true
mv /sandbox/home/deep /sandbox/home/moved
"""

READ = """
cat /data/file /data/log /elsewhere/file; stat -c %s /data/acknowledged; cat /data/d/link
for target in /data/new /data/file /data/d/new; do (echo x > $target) 2>/dev/null && echo "wrote $target"; done
rm /data/file 2>/dev/null && echo removed
chmod 777 /data/file 2>/dev/null && echo changed
cat /sys/block/vdd/ro /sys/block/vde/ro
grep -E ' /(data|elsewhere) ' /proc/self/mounts | cut -d' ' -f2-4
dd if=/dev/zero of=/dev/vdd count=1 2>/dev/null && echo "wrote the drive"
true
"""


def test_what_a_writer_leaves_readers_find_and_cannot_change(own: Daemon) -> None:
    """C45, C47, and a daemon that is killed while the volume is attached."""
    client = own.client
    writer = boot(own, Mount("data", "/data"), Mount("other", "/sandbox/home/deep/in/cache"))
    assert shell(own, writer, WRITE).splitlines() == ["1001 1001 755", "1001 1001 755", "1001"]
    own.kill()
    own.start()
    assert attached(own) == {"data": writer.id, "other": writer.id}
    assert not lockable(own, "data", fcntl.LOCK_SH), "the machine itself holds it, whatever becomes of the records"
    with pytest.raises(Conflict, match=r"one writer or any number of readers"):
        boot(own, Mount("data", "/data", True))
    # Written a moment before the end, and still being written to.
    client.start(writer.id, ["sh", "-c", "while :; do echo line; done > /data/busy"])
    shell(own, writer, "echo last > /data/log")
    client.write_file(writer.id, "/data/acknowledged", bytes(3 << 20))
    client.delete(writer.id)
    assert attached(own) == {"data": "", "other": ""}
    for name in ("data", "other"):
        assert "needs_recovery" not in superblock(own, name)

    def reader(_: int) -> Sandbox:
        return boot(own, Mount("data", "/data", True), Mount("other", "/elsewhere", True))

    with ThreadPoolExecutor(2) as pool:
        readers = list(pool.map(reader, range(counts(2, 5))))
    assert lockable(own, "data", fcntl.LOCK_SH) and not lockable(own, "data", fcntl.LOCK_EX)
    assert attached(own)["data"] == min((one.created_at, one.id) for one in readers)[1]
    for one in readers:
        said = shell(own, one, READ).splitlines()
        assert said[:5] == ["kept", "last", "kept", str(3 << 20), "kept"]
        assert said[5:] == [
            "1", "1", "/data ext4 ro,nosuid,nodev,noatime", "/elsewhere ext4 ro,nosuid,nodev,noatime",
        ]  # fmt: skip
        with pytest.raises(Conflict, match="Read-only file system"):
            client.write_file(one.id, "/data/new", b"x")
        with pytest.raises(Conflict, match="Read-only file system"):
            client.remove_file(one.id, "/data/file")
    with pytest.raises(Conflict):
        client.delete_volume("data")
    assert "volume data: its last writer" not in own.log.read_text()
    for one in readers:
        client.delete(one.id)


def test_what_was_synced_outlives_a_vmm_that_is_killed(own: Daemon) -> None:
    writer = boot(own, Mount("data", "/data"))
    shell(own, writer, "echo synced > /data/synced && sync /data/synced && echo perhaps > /data/perhaps")
    for pid in vmms(writer.id):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while own.client.get(writer.id).state == "running" or attached(own)["data"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "needs_recovery" in superblock(own, "data"), "its journal was not in use"
    reader = boot(own, Mount("data", "/data", True))
    assert shell(own, reader, "cat /data/synced") == "synced\n"
    assert "volume data: its last writer ended without notice" in own.log.read_text()
    assert "needs_recovery" not in superblock(own, "data")
    file = (own.state / "volumes" / "data.ext4").stat()
    assert (file.st_uid, file.st_mode & 0o777) == (os.geteuid(), 0o600)
    own.client.delete(reader.id)
    own.client.delete(writer.id)


def test_an_end_that_a_killed_daemon_began_is_finished_with_the_volumes_whole(own: Daemon) -> None:
    writer = boot(own, Mount("data", "/data"))
    shell(own, writer, "echo unsynced > /data/unsynced")
    (pid,) = (pid for pid in vmms(writer.id) if len(os.listdir(f"/proc/{pid}/task")) > 1)
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(own.client.delete, writer.id)
        deadline = time.monotonic() + 20
        while own.client.get(writer.id).state == "running":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        own.kill()
        with pytest.raises(Unreachable):
            ending.result()
    os.kill(pid, signal.SIGCONT)
    own.start()
    assert attached(own)["data"] == ""
    assert "needs_recovery" not in superblock(own, "data")
    command = ["/usr/sbin/debugfs", "-R", "cat /unsynced", str(own.state / "volumes" / "data.ext4")]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"unsynced\n"
    assert own.leftovers() == []


def test_a_volume_with_nothing_to_mount_is_said_to_be(own: Daemon) -> None:
    own.client.create_volume("broken", 2)
    (own.state / "volumes" / "broken.ext4").write_bytes(b"\xff" * (2 << 20))
    with pytest.raises(Conflict, match=r"a volume could not be mounted at /data: "):
        boot(own, Mount("broken", "/data"))
    with pytest.raises(Conflict, match=r"attach it for writing to save what is in it, or delete it"):
        boot(own, Mount("broken", "/data", True))
    own.client.delete_volume("broken")


def vmms(sandbox_id: str) -> list[int]:
    """Processes of the sandbox's QEMU."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(sandbox_id) in command.partition(b"\0")[0] and b"qemu" in command.partition(b"\0")[0]:
            found.append(int(process.name))
    assert found
    return found
