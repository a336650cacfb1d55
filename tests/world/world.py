"""A small internet: the namespace of a host with a wire to the namespace of everybody else.

In the host's namespace a real `sandboxd` runs; the other holds every server a guest could want, the addresses anybody
would try, and the default route, so that whatever gets out arrives somewhere and is written down. The addresses: a
public block that only these namespaces know, a private network, and well-known ones outside (a resolver, the metadata
service).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.world import authority, parcels
from tests.world.capture import Capture
from tests.world.origin import Names, Origin, git, tree
from tests.world.spaces import Space, address, join

HOST, LAN_HOST = "45.90.7.1", "10.77.0.1"           # the host's own addresses
PUBLIC, PUBLIC_2, LAN = "45.90.7.2", "45.90.7.3", "10.77.0.2"
NAME_SERVER = "45.90.7.53"
OUTSIDE_RESOLVER, METADATA = "8.8.8.8", "169.254.169.254"
PUBLIC_6, HOST_6 = "2a0e:7::2", "2a0e:7::1"
DEAD = "45.90.7.99"                                 # nobody has it: packets to it end in silence

SSH, DATABASE, SINK = 22, 5432, 9000

NAMES: dict[str, list[str]] = {
    "allowed.test": [PUBLIC], "other.test": [PUBLIC], "sub.allowed.test": [PUBLIC], "www.wild.test": [PUBLIC],
    "second.test": [PUBLIC_2], "lan.test": [LAN], "git.test": [PUBLIC], "index.test": [PUBLIC], "files.test": [PUBLIC],
    "npm.test": [PUBLIC], "deb.test": [PUBLIC], "db.test": [PUBLIC], "rebound.test": [PUBLIC],
    "both.test": [PUBLIC_6, PUBLIC], "deaf.test": [DEAD],
    # The models that agents talk to: here they are the tests' own, under the names the agents know.
    "api.anthropic.com": [PUBLIC], "api.openai.com": [PUBLIC],
}  # fmt: skip


class World:
    """Both namespaces and every server, from `open_world`."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.names = Names(NAMES)
        self.ca, chain = authority.issue(directory / "authority", NAMES)
        hosts = "127.0.0.1 localhost\n"
        etc = {"resolv.conf": f"nameserver {NAME_SERVER}\n", "hosts": hosts}
        self.host = Space(directory / "host", etc, self.ca)
        stack.callback(self.host.close)
        self.outside = Space(directory / "outside", _accounts(directory / "parcels" / "git"))
        stack.callback(self.outside.close)
        join(self.host, "up0", self.outside, "down0")
        address(self.host, "up0", [f"{HOST}/24", f"{LAN_HOST}/24", f"{HOST_6}/64"])
        everybody = [PUBLIC, PUBLIC_2, LAN, NAME_SERVER, OUTSIDE_RESOLVER, METADATA, PUBLIC_6]
        lengths = {OUTSIDE_RESOLVER: 32, METADATA: 32, PUBLIC_6: 64}
        address(self.outside, "down0", [f"{each}/{lengths.get(each, 24)}" for each in everybody])
        self.host.run("ip", "route", "add", "default", "via", PUBLIC)
        self.host.run("ip", "-6", "route", "add", "default", "via", PUBLIC_6)
        self.origin = Origin(self.outside, everybody, self.names, chain)
        stack.callback(self.origin.close)
        self.origin.serve_names()
        self.origin.serve_http(80, tls=False)
        self.origin.serve_http(443, tls=True)
        for port in (DATABASE, SINK, 853, 8080):
            self.origin.serve_sink(port)
        self._parcels(directory / "parcels")
        self.ssh_key = self._ssh(directory / "ssh", stack)

    def _parcels(self, top: Path) -> None:
        parcels.wheel(top / "pip", "https://files.test")
        parcels.npm(top / "npm", "https://npm.test")
        parcels.apt(top / "apt")
        parcels.repository(top / "git")
        self.origin.answers |= {
            "index.test": tree(top / "pip" / "index"), "files.test": tree(top / "pip" / "files"),
            "npm.test": tree(top / "npm"), "deb.test": tree(top / "apt"), "git.test": git(top / "git"),
        }  # fmt: skip

    def _ssh(self, directory: Path, stack: ExitStack) -> Path:
        """An OpenSSH server for the repositories; the path of the key that it lets in."""
        directory.mkdir()
        for name in ("host", "user"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)]
            subprocess.run(command, check=True, capture_output=True)
        top = self.directory / "parcels" / "git"
        (directory / "sshd_config").write_text(
            f"Port {SSH}\nHostKey {directory}/host\nAuthorizedKeysFile {directory}/user.pub\nStrictModes no\n"
            "UsePAM no\nPasswordAuthentication no\nPidFile none\nLogLevel ERROR\nPermitUserRC no\n"
            'SetEnv GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0=*\n'
            f'ForceCommand cd {top} && exec git-shell -c "$SSH_ORIGINAL_COMMAND"\n'
        )
        log = (directory / "log").open("wb")
        stack.callback(log.close)
        server = self.outside.start(
            "setpriv", "--pdeathsig", "KILL", "/usr/sbin/sshd", "-D", "-e", "-f", str(directory / "sshd_config"),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        stack.callback(server.wait, 10)
        stack.callback(server.terminate)
        deadline = time.monotonic() + 30
        while f":{SSH} " not in self.outside.run("ss", "-Hltn"):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"sshd did not come up: {(directory / 'log').read_text()}")
            time.sleep(0.05)
        return directory / "user"

    def uplink(self) -> Capture:
        """Sees every packet that leaves the host."""
        return Capture(self.host.inside, "up0", (HOST, LAN_HOST, HOST_6))


@contextmanager
def open_world() -> Iterator[World]:
    directory = Path(tempfile.mkdtemp(prefix="world-", dir="/tmp"))
    directory.chmod(0o755)
    try:
        with ExitStack() as stack:
            yield World(directory, stack)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _accounts(home: Path) -> dict[str, str]:
    """What sshd looks up; nobody of the machine's own."""
    return {
        "passwd": "root:x:0:0::/root:/bin/sh\nsshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n"
                  f"git:x:4100:4100::{home}:/bin/sh\nnobody:x:65534:65534::/:/usr/sbin/nologin\n",
        "group": "root:x:0:\nnogroup:x:65534:\ngit:x:4100:\n",
        "shadow": "root:*:19000::::::\ngit:*:19000::::::\nsshd:*:19000::::::\n",
    }  # fmt: skip


def missing() -> str:
    """Why no world can be made here, or an empty text."""
    if os.geteuid() != 0:
        return "needs root to make namespaces"
    programs = ("unshare", "nsenter", "setpriv", "ip", "ssh-keygen", "ss", "dpkg-deb", "git")
    absent = [program for program in programs if shutil.which(program) is None]
    if not Path("/usr/sbin/sshd").exists():
        absent.append("/usr/sbin/sshd")
    if absent:
        return f"needs {', '.join(absent)}"
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"no namespace: {tried.stderr.decode(errors='replace').strip()}"
