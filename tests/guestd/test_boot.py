"""What `configure` makes: its pure parts as tables, the rest seen from inside a real machine."""

from __future__ import annotations

import time

import pytest

from guestd import boot
from sandboxd.client import Sandbox
from tests.daemon import Daemon

USER = b"sandbox:x:1001:1001:sandbox:/sandbox/home:/bin/bash\n"
GROUP = b"sandbox:x:1001:\n"


@pytest.mark.parametrize(
    ("passwd", "group", "kept_users", "kept_groups"),
    [
        pytest.param(b"", b"", b"", b"", id="an image without accounts"),
        pytest.param(b"root:x:0:0::/root:/bin/sh\n", b"root:x:0:\n", b"root:x:0:0::/root:/bin/sh\n", b"root:x:0:\n",
                     id="others stay"),
        pytest.param(b"sandbox:x:5:5::/:/bin/sh\n", b"sandbox:x:5:\n", b"", b"", id="the name was taken"),
        pytest.param(b"bob:x:1001:1001::/:/bin/sh\n", b"bob:x:1001:bob\n", b"", b"", id="the number was taken"),
        pytest.param(b"a:x:1:1::/:/x", b"a:x:1:", b"a:x:1:1::/:/x\n", b"a:x:1:\n", id="no newline at the end"),
        pytest.param(b"\n#x\na:x:11001:1001::/:\n", b"#x\n", b"\n#x\na:x:11001:1001::/:\n", b"#x\n",
                     id="lines of other kinds"),
        pytest.param(b"\xff:x:7:7::/:/x\n", b"", b"\xff:x:7:7::/:/x\n", b"", id="bytes that are no text"),
    ],
)
def test_the_user_is_there_and_alone_with_its_number(
    passwd: bytes, group: bytes, kept_users: bytes, kept_groups: bytes
) -> None:
    assert boot.accounts(passwd, group, "/bin/bash") == (kept_users + USER, kept_groups + GROUP)


@pytest.mark.parametrize(
    ("total_mib", "limit_mib"), [(64, 64), (96, 64), (256, 208), (4096, 4048)]
)
def test_guestd_keeps_some_memory_to_itself(total_mib: int, limit_mib: int) -> None:
    assert boot.memory_limit(total_mib << 20) == limit_mib << 20


def test_hosts() -> None:
    assert boot.hosts("sandbox-1").splitlines()[:2] == [b"127.0.0.1\tlocalhost", b"127.0.1.1\tsandbox-1"]


# ---- seen from inside

INSIDE = """
hostname; cat /etc/hostname; cat /etc/machine-id; date +%s
ls -d /opt/sandbox /run/image /run/scratch /run/root 2>/dev/null | wc -l
cat /sys/class/net/lo/operstate; getent hosts localhost | wc -l
ls /dev | tr '\\n' ' '; echo
cat /proc/self/oom_score_adj
for p in /proc/[0-9]*; do
    tr '\\0' ' ' < $p/cmdline | grep -q '^/usr/bin/python3 .*opt/sandbox/guestd' && cat $p/oom_score_adj
done 2>/dev/null
stat -c '%u %a' /workspace /sandbox/home /tmp /run | tr '\\n' ' '; echo
echo 1 > /etc/passwd; mknod /tmp/device b 8 0; echo x > /sys/kernel/profiling; true
git config user.name
""".strip()


@pytest.mark.vm
def test_a_configured_machine_from_inside(daemon: Daemon, shared: Sandbox) -> None:
    before = time.time()
    result = daemon.client.run(shared.id, ["sh", "-c", INSIDE])
    lines = result.stdout.decode().splitlines()
    assert lines[0] == lines[1]
    assert len(lines[2]) == 32 and set(lines[2]) != {"0"}
    assert before - 5 < int(lines[3]) < time.time() + 5
    assert lines[4] == "0", "guestd's drive and the layers are not to be seen"
    assert lines[5] in ("up", "unknown")
    assert int(lines[6]) >= 1
    assert lines[7].split() == [
        "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero",
    ]
    assert lines[8] == "0"
    assert lines[9] == "-1000"
    assert lines[10].strip() == "1001 755 1001 755 0 1777 0 755"
    assert lines[11] == "sandbox"
    refused = result.stderr.decode().splitlines()
    assert [line.rpartition(": ")[2] for line in refused] == [
        "Permission denied", "Operation not permitted", "Read-only file system",
    ]
