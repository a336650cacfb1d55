"""Where the relay is measured: a client, a host and an origin, each a namespace, joined by two wires.

The host redirects what the client dials by the address: one block for each way through (ours, every peer), so that
all of them pass the same wires and the same kernel rules and differ only in the process between. The ends are the C
program `peers/load.c`. The client and the origin never change between ways; every figure is one run of the client.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import ssl
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.world.spaces import Space, address, join

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = ROOT / "build" / "bench"
LOAD = BUILD / "load"
MITM = ROOT / "build" / "mitmproxy"
MITM_VERSION = "mitmproxy==11.0.2"

CLIENT, GATE = "172.16.0.2", "172.16.0.1"
HOST, NAME_SERVER = "45.90.7.1", "45.90.7.53"
ORIGINS = {"bulk": "45.90.7.2", "byte": "45.90.7.3", "hold": "45.90.7.4"}
NAMES = {f"{kind}.test": where for kind, where in ORIGINS.items()}

# The way through: its block of addresses (of which WIDTH are dialled) and the port its process listens on.
WAYS = {
    "ours": (1, 3128), "haproxy": (2, 3129), "haproxy-asking": (3, 3130), "nginx": (4, 3131), "mitmproxy": (5, 3132),
}  # fmt: skip
WIDTH = 8

# Tens of thousands of connections a minute: ports come back after a second, entries of connection tracking too. None is
# made from a port that a peer is going to listen on.
QUICK = """
net.ipv4.ip_local_port_range=10000 65535
net.ipv4.tcp_tw_reuse=1
net.ipv4.tcp_max_tw_buckets=262144
net.core.somaxconn=4096
"""
QUICK_TRACKING = """
net.netfilter.nf_conntrack_tcp_timeout_time_wait=1
net.netfilter.nf_conntrack_tcp_timeout_close=1
"""


@dataclass(frozen=True)
class Bulk:
    """`rate` in bytes a second; `cpu` in CPU seconds of the whole process for each GiB."""

    rate: float
    cpu: float


@dataclass(frozen=True)
class Rate:
    """`rate` in connections a second; times in seconds from the ClientHello to the first byte, or to the end."""

    rate: float
    p50: float
    p99: float
    failed: int


class Wire:
    """All of it, from start to `close`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.chmod(0o755)
        self._stack = ExitStack()
        self._idle = 0
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        self._stack.close()

    def _open(self) -> None:
        build_load()
        covers = {"resolv.conf": f"nameserver {NAME_SERVER}\n", "hosts": "127.0.0.1 localhost\n"}
        etc = {"client": {}, "host": covers, "origin": {}}
        spaces = [Space(self.directory / name, texts) for name, texts in etc.items()]
        for space in spaces:
            self._stack.callback(space.close)
        self.client, self.host, self.origin = spaces
        join(self.client, "eth0", self.host, "gate0")
        join(self.host, "up0", self.origin, "down0")
        address(self.client, "eth0", [f"{CLIENT}/30"])
        address(self.host, "gate0", [f"{GATE}/30"])
        address(self.host, "up0", [f"{HOST}/24"])
        address(self.origin, "down0", [f"{each}/24" for each in [*ORIGINS.values(), NAME_SERVER]])
        self.client.run("ip", "route", "add", "default", "via", GATE)
        for space in spaces:
            space.run("sysctl", "-q", "-p", "-", stdin=QUICK)
        self.host.run("nft", "-f", "-", stdin=_redirects())
        self.host.run("sysctl", "-q", "-p", "-", stdin=QUICK_TRACKING)
        self.serve(self.origin, "names", NAME_SERVER, *(f"{name}={where}" for name, where in NAMES.items()))
        for kind, where in ORIGINS.items():
            self.serve(self.origin, "origin", where, "443", kind)
        for name in [*NAMES, "denied.test"]:
            (self.directory / name).write_bytes(client_hello(name))

    def serve(self, space: Space, *arguments: str) -> None:
        self.started(space.start(str(LOAD), *arguments, stdin=subprocess.DEVNULL))

    def started(self, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """A process that ends with the wire."""
        self._stack.callback(process.wait, 10)
        self._stack.callback(process.kill)
        return process

    def add(self, close: Any) -> None:
        self._stack.callback(close)

    # Figures

    def bulk(self, way: str, pids: list[int], streams: int, span_ms: int) -> Bulk:
        before = sum(map(cpu_seconds, pids))
        told = self._client("bulk", *self._to(way, "bulk"), str(streams), str(span_ms))
        used = sum(map(cpu_seconds, pids)) - before
        return Bulk(told["bytes"] / told["seconds"], used / (told["bytes"] / 2**30))

    def rate(self, way: str, flight: int, span_ms: int, name: str = "byte") -> Rate:
        part = "refused" if name == "denied" else "rate"
        width = 1 if way == "direct" else WIDTH
        told = self._client(part, *self._to(way, name), str(flight), str(span_ms), str(width))
        done = told["done"]
        assert done > 0, f"no connection through {way} succeeded: {told}"
        return Rate(done / told["seconds"], told["p50_us"] / 1e6, told["p99_us"] / 1e6, told["failed"])

    def idle(self, way: str, count: int) -> subprocess.Popen[bytes]:
        """`count` connections that stay open until the process's input is closed."""
        command = [str(LOAD), "idle", *self._to(way, "hold"), str(count)]
        process = self.client.start(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("the idle connections did not come to be")
        return process

    def _to(self, way: str, name: str) -> tuple[str, str, str]:
        if way == "direct":
            return ORIGINS[name], "443", str(self.directory / f"{name}.test")
        return f"198.18.{WAYS[way][0]}.1", "443", str(self.directory / f"{name}.test")

    def _client(self, *arguments: str) -> dict[str, Any]:
        space = self.host if arguments[1] in ORIGINS.values() else self.client
        told = json.loads(space.run(str(LOAD), *arguments))
        assert isinstance(told, dict)
        return told

    # Peers

    def haproxy(self) -> list[int]:
        text = (HERE / "peers" / "haproxy.cfg").read_text().format(
            user=_account("haproxy"), group=_group("haproxy"), name_server=NAME_SERVER, **ORIGINS
        )
        return self._peer("haproxy", [3129, 3130], ["haproxy", "-db", "-f", self._write("haproxy.cfg", text)])

    def nginx(self) -> list[int]:
        text = (HERE / "peers" / "nginx.conf").read_text().format(
            user=_account("www-data"), modules="/usr/lib/nginx/modules", directory=self.directory, **ORIGINS
        )
        command = ["nginx", "-p", str(self.directory), "-e", "stderr", "-c", self._write("nginx.conf", text)]
        return self._peer("nginx", [3131], command)

    def mitmproxy(self) -> list[int]:
        if not (MITM / "bin" / "mitmdump").exists():
            subprocess.run([sys.executable, "-m", "venv", str(MITM)], check=True)
            subprocess.run([str(MITM / "bin" / "pip"), "install", "-q", MITM_VERSION], check=True)
        command = [str(MITM / "bin" / "mitmdump"), "-q", "--set", f"confdir={self.directory}/mitm"]
        command += ["--mode", "reverse:https://byte.test:443@3132", "-s", str(HERE / "peers" / "mitm.py")]
        return self._peer("mitmproxy", [3132], command)

    def _write(self, name: str, text: str) -> str:
        path = self.directory / name
        path.write_text(text)
        return str(path)

    def _peer(self, name: str, ports: list[int], command: list[str]) -> list[int]:
        """Starts a peer and waits for its ports; its processes."""
        log = self.directory / f"{name}.log"
        with log.open("wb") as out:
            process = self.host.start(
                *command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self._stack.callback(process.wait, 10)
        self._stack.callback(process.terminate)
        self.await_ports(ports, lambda: process.poll() is not None, log)
        return [process.pid, *children(process.pid)]

    def await_ports(self, ports: list[int], ended: Any, log: Path) -> None:
        deadline = time.monotonic() + 30
        while True:
            listening = self.host.run("ss", "-Hltn")
            if all(f":{port} " in listening for port in ports):
                return
            if ended() or time.monotonic() > deadline:
                raise RuntimeError(f"ports {ports} do not listen:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)


def build_load() -> None:
    source = HERE / "peers" / "load.c"
    if not LOAD.exists() or LOAD.stat().st_mtime < source.stat().st_mtime:
        BUILD.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cc", "-std=gnu11", "-O2", "-o", str(LOAD), str(source)], check=True)


def client_hello(name: str) -> bytes:
    """What this machine's OpenSSL says first to `name`."""
    context = ssl.create_default_context()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    stream = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with suppress(ssl.SSLWantReadError):
        stream.do_handshake()
    return outgoing.read()


def cpu_seconds(pid: int) -> float:
    """What a process with all its threads has used (proc(5): utime and stime)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def _redirects() -> str:
    """One rule for each way."""
    chain = "add table ip wire\nadd chain ip wire pre { type nat hook prerouting priority dstnat; }\n"
    rule = "add rule ip wire pre ip daddr 198.18.{}.0/24 tcp dport 443 redirect to :{}\n"
    return chain + "".join(rule.format(block, port) for block, port in WAYS.values())


def _account(name: str) -> str:
    try:
        return pwd.getpwnam(name).pw_name
    except KeyError:
        return "nobody"


def _group(name: str) -> str:
    try:
        return grp.getgrnam(name).gr_name
    except KeyError:
        return "nogroup"
