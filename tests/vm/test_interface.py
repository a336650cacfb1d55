"""A machine with a network interface: a tap in a namespace of the test's own, and at its other end the guest's eth0."""

from __future__ import annotations

import base64
import fcntl
import os
import secrets
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import anyio
import pytest

from guestd import linux, protocol
from sandboxd.assets import prepare, store
from sandboxd.errors import SetupError
from sandboxd.guest import Guest
from sandboxd.vm import processes, qemu
from tests.daemon import assets_dir
from tests.vm import starting
from tests.vm.starting import BOOT_S, BUILD, FIRST_UID, spec

pytestmark = [pytest.mark.vm, pytest.mark.root]

T = TypeVar("T")
INSTANCE = f"n{os.getpid()}"
UIDS = range(FIRST_UID, FIRST_UID + 16)
CLONE_NEWNET = 0x40000000  # linux/sched.h
# linux/if_tun.h
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
MAC = "06:00:ac:10:00:02"
HOST, GUEST, PORT = "172.16.0.1", "172.16.0.2", 3128
NETWORK = {"address": f"{GUEST}/30", "gateway": HOST, "resolver": HOST, "mtu": 1400}
FILES = [
    {"path": "/etc/pip.conf", "mode": 0o644, "data": base64.b64encode(b"[global]\n").decode()},
    {"path": "/etc/new/deep/secret", "mode": 0o600, "data": base64.b64encode(b"x").decode()},
    {"path": "/etc/hostname", "mode": 0o640, "data": ""},
]
SENT_BYTES = 8 << 20
SCRIPT = """
cat /sys/class/net/eth0/address /sys/class/net/eth0/mtu /sys/class/net/eth0/operstate
ls /sys/class/net | tr '\\n' ' '; echo
grep -c eth0 /proc/net/if_inet6
awk '$1 == "eth0" {print $2, $3, $8}' /proc/net/route
cat /etc/resolv.conf /etc/pip.conf
stat -c '%U:%G %a %s' /etc/pip.conf /etc/new/deep/secret /etc/hostname
exec 3<>/dev/tcp/172.16.0.1/3128
head -c 8388608 /dev/zero >&3
head -c 5 <&3
""".strip()


class Link:
    """A namespace with a tap in it, as far as a machine can tell the same as a sandbox's."""

    def __init__(self) -> None:
        self.name = f"sbx-test-{secrets.token_hex(4)}"
        subprocess.run(["ip", "netns", "add", self.name], check=True, timeout=10)
        self.tap_fd = self.inside(open_tap)
        for words in (f"addr add {HOST}/30 dev tap0", "link set tap0 up", "link set lo up"):
            subprocess.run(["ip", "-n", self.name, *words.split()], check=True, timeout=10)

    def inside(self, act: Callable[[], T]) -> T:
        """`act` in a thread whose namespace this is, which ends with it."""
        results: list[T] = []

        def run() -> None:
            fd = os.open(f"/run/netns/{self.name}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                linux.enter(fd, CLONE_NEWNET)
                results.append(act())
            finally:
                os.close(fd)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return results[0]

    def carrier(self) -> str:
        shown = subprocess.run(["ip", "-n", self.name, "-br", "link", "show", "tap0"], capture_output=True, timeout=10)
        return shown.stdout.decode()

    def remove(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], check=True, timeout=10)


def open_tap() -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"tap0", IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    return fd


def listener() -> socket.socket:
    return socket.create_server((HOST, PORT))


@pytest.fixture
def link() -> Iterator[Link]:
    if os.geteuid() != 0:
        pytest.skip("a network namespace with a tap is root's to make")
    if shutil.which("ip") is None or not os.path.exists("/dev/net/tun"):
        pytest.skip("no iproute2, or no /dev/net/tun")
    made = Link()
    yield made
    made.remove()


@pytest.fixture
def directory() -> Iterator[Path]:
    if shutil.which("qemu-system-x86_64") is None or not (BUILD / "sandbox-vsock").is_file():
        pytest.skip("no QEMU, or no build/sandbox-vsock: make programs")
    made: dict[str, store.Asset] = {}
    try:
        for recipe in prepare.recipes(BUILD):
            asset = store.find(assets_dir(), recipe, made)
            if asset is None:
                pytest.skip(f"no {recipe.name} in {assets_dir()}: make assets")
            made[recipe.name] = asset
    except SetupError as error:
        pytest.skip(str(error))
    path = Path(tempfile.mkdtemp(prefix="sbx-if-", dir="/tmp"))
    path.chmod(0o755)
    names = {"kernel": "vmlinux", "initramfs": "initramfs.cpio", "runtime": "runtime.erofs", "image": "image.erofs"}
    for name, file in names.items():
        (path / name).symlink_to(made[name].file(file))
    yield path
    assert list(processes.marked(INSTANCE, {os.getuid(), *UIDS})) == []
    shutil.rmtree(path)


async def shell(guest: Guest, script: str) -> tuple[int, str]:
    """Exit code and all that was written."""
    session = await guest.execute(True, argv=["bash", "-c", script])
    written, code = b"", -1
    while frames := await session.receive():
        for kind, payload in frames:
            if kind in "oE":
                written += payload
            elif kind == "x":
                code = int.from_bytes(payload, "big", signed=True)
    session.close()
    return code, written.decode()


def test_the_guest_s_interface_reaches_the_host_s_side_of_its_link_and_ends_with_the_machine(
    directory: Path, link: Link
) -> None:
    described = spec(directory, "net", tap_fd=link.tap_fd, mac=MAC, memory_mb=512)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-F", str(directory / "net" / "scratch")], check=True, timeout=60)
    received: list[bytes] = []

    def take(server: socket.socket) -> None:
        connection, peer = server.accept()
        total = 0
        while total < SENT_BYTES and (data := connection.recv(1 << 20)):
            total += len(data)
        connection.sendall(b"taken")
        connection.close()
        received.append(f"{peer[0]} {total}".encode())

    async def main() -> None:
        machine = await qemu.start(described, starting.tools(INSTANCE))
        # The machine has its own copy; while it lives, so does the tap.
        os.close(link.tap_fd)
        try:
            guest = Guest(machine.vsock_path, protocol.VERSION)
            await guest.wait_ready(BOOT_S)
            assert "LOWER_UP" in link.carrier()
            identity = {
                "hostname": "net", "machine_id": secrets.token_hex(16), "entropy": secrets.token_hex(32),
                "time_ns": time.time_ns(),
            }  # fmt: skip
            async with guest.request(BOOT_S, "configure", network=NETWORK, files=FILES, **identity):
                pass
            with link.inside(listener) as server:
                server.settimeout(BOOT_S)
                thread = threading.Thread(target=take, args=(server,))
                thread.start()
                with anyio.fail_after(BOOT_S):
                    code, seen = await shell(guest, SCRIPT)
                await anyio.to_thread.run_sync(thread.join)
        finally:
            await machine.terminate()
        assert (code, seen.splitlines()) == (0, [
            MAC, "1400", "up", "eth0 lo ", "0",
            "00000000 010010AC 00000000", "000010AC 00000000 FCFFFFFF",
            f"nameserver {HOST}", "[global]",
            "root:root 644 9", "root:root 600 1", "root:root 640 0",
            "taken",
        ])  # fmt: skip
        assert received == [f"{GUEST} {SENT_BYTES}".encode()]

    anyio.run(main)
    assert link.carrier() == "", "nobody holds the tap any more"
