"""Real stub resolvers ask the DNS core, over UDP and TCP on loopback.

Runs under `unshare --mount --net` as root: `python -m tests.egress.stub_rig glibc|musl|c-ares <resolv.conf options>`.
Reads a name a line and answers `<addresses or "none"> <seconds> <queries the core saw meanwhile>`; `allow NAME` makes
a name an allowed one.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from egress import dns
from tests.egress import resolver_rig

PYTHON = """
import socket, sys
for line in sys.stdin:
    try:
        found = [entry[4][0] for entry in socket.getaddrinfo(line.strip(), 443, type=socket.SOCK_STREAM)]
    except socket.gaierror:
        found = []
    print(",".join(found) or "none", flush=True)
"""
C = r"""
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
int main(void) {
    char line[512], text[64];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
        if (getaddrinfo(line, "443", &hints, &found) == 0 && found->ai_family == AF_INET)
            puts(inet_ntop(AF_INET, &((struct sockaddr_in *)found->ai_addr)->sin_addr, text, sizeof text));
        else
            puts("none");
        fflush(stdout);
    }
}
"""
NODE = """
const { Resolver } = require("dns");
const names = require("readline").createInterface({ input: process.stdin });
const resolver = new Resolver();
names.on("line", (name) => resolver.resolve4(name, (error, found) => console.log(error ? "none" : found.join(","))));
"""


class Core:
    """The smallest server around the core: one decision, every name its own address."""

    def __init__(self) -> None:
        self.allowed = {"allowed.test": "198.18.0.1"}
        self.seen: list[str] = []
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 53))
        tcp = socket.create_server(("127.0.0.1", 53))
        threading.Thread(target=self._datagrams, args=(udp,), daemon=True).start()
        threading.Thread(target=self._connections, args=(tcp,), daemon=True).start()

    def answer(self, packet: bytes, over: str) -> bytes:
        found = dns.read(packet)
        if isinstance(found, dns.Question):
            self.seen.append(f"{found.shown.removesuffix('.')}/{over}")
            address = self.allowed.get(found.name or "")
            return dns.write(found, dns.Address(address) if address else dns.NoSuchName())
        return found.data if isinstance(found, dns.Reply) else b""

    def _datagrams(self, udp: socket.socket) -> None:
        while True:
            packet, asker = udp.recvfrom(4096)
            if answer := self.answer(packet, "udp"):
                udp.sendto(answer, asker)

    def _connections(self, tcp: socket.socket) -> None:
        while True:
            connection, _ = tcp.accept()
            threading.Thread(target=self._stream, args=(connection,), daemon=True).start()

    def _stream(self, connection: socket.socket) -> None:
        framer = dns.Framer()
        with connection:
            while data := connection.recv(4096):
                for packet in framer.feed(data):
                    connection.sendall(dns.framed(self.answer(packet, "tcp")))


def client(kind: str, directory: Path) -> list[str]:
    if kind == "glibc":
        return [sys.executable, "-u", "-c", PYTHON]
    if kind == "c-ares":
        return ["node", "-e", NODE]
    source = directory / "stub.c"
    source.write_text(C)
    subprocess.run(["musl-gcc", "-static", "-o", str(directory / "stub"), str(source)], check=True)
    return [str(directory / "stub")]


def main(kind: str, options: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        resolver_rig.arrange(directory, "nameserver 127.0.0.1\n" + options.replace(";", "\n") + "\n")
        core = Core()
        pipe = subprocess.PIPE
        with subprocess.Popen(client(kind, directory), stdin=pipe, stdout=pipe, text=True, bufsize=1) as asker:
            assert asker.stdin and asker.stdout
            for line in sys.stdin:
                if line.startswith("allow "):
                    core.allowed[line.split()[1]] = "198.18.0.2"
                    continue
                del core.seen[:]
                started = time.monotonic()
                asker.stdin.write(line)
                found = asker.stdout.readline().strip()
                print(found, time.monotonic() - started, ",".join(core.seen), flush=True)
            asker.stdin.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
