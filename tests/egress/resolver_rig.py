"""The resolver process among a name server, a hosts file and a search list of its own.

Runs under `unshare --mount --net` as root: nothing of the machine's settings is touched, nothing leaves. Reads one
JSON object a line, answers one a line:
    {"ask": [names]}       → {"answers": {name: answer}, "queries": [[name, type] the name server saw meanwhile]}
    {"zone": {name: [addresses]}}                   → {}
    {"hold": name}         → {}; its look-up is begun, and the name server keeps its answer back
    {"release": name}      → {"answer": answer}
    {"status": true}       → {"status": {/proc/<pid>/status}, "writable": [mounts], "fds": [open ones]}
With `hidden` as its argument, the directories Python was loaded from are closed to everybody but root.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from dnslib import AAAA, QTYPE, RR, A, DNSRecord

UID = 3_070_001
HOSTS = "127.0.0.1 localhost\n192.0.2.7 printed.test\n192.0.2.8 bare\n"
RESOLV = "nameserver 127.0.0.1\nsearch corp.test\noptions timeout:2 attempts:1 ndots:5\n"
# What `python -m egress.resolver` does, with its own tree closed in between.
HIDDEN = """
import os, sys
from egress import resolver
for directory in sys.argv[1].split(":"):
    os.chmod(directory, 0o700)
sys.exit(resolver.main(sys.argv[2:]))
"""


class NameServer:
    def __init__(self) -> None:
        self.zone: dict[str, list[str]] = {}
        self.seen: list[list[str]] = []
        self.held: dict[str, threading.Event] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            packet, asker = self._socket.recvfrom(4096)
            threading.Thread(target=self._answer, args=(packet, asker), daemon=True).start()

    def _answer(self, packet: bytes, asker: tuple[str, int]) -> None:
        query = DNSRecord.parse(packet)
        name = str(query.q.qname).removesuffix(".")
        self.seen.append([name, QTYPE[query.q.qtype]])
        if held := self.held.get(name):
            held.wait(30)
        reply = query.reply()
        if name not in self.zone:
            reply.header.rcode = 3
        for address in self.zone.get(name, []):
            kind, data = (QTYPE.AAAA, AAAA(address)) if ":" in address else (QTYPE.A, A(address))
            if kind == query.q.qtype:
                reply.add_answer(RR(query.q.qname, kind, ttl=600, rdata=data))
        self._socket.sendto(reply.pack(), asker)


def arrange(directory: Path, resolv: str = RESOLV) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    settings = {"hosts": HOSTS, "resolv.conf": resolv, "nsswitch.conf": "hosts: files dns\npasswd: files\n"}
    for name, text in settings.items():
        mine = directory / name
        mine.write_text(text)
        mine.chmod(0o644)
        subprocess.run(["mount", "--bind", str(mine), str(Path("/etc", name).resolve())], check=True)


def start(theirs: socket.socket, hidden: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I"]
    if hidden:
        # A tmpfs of another mode would hide the tree; an overlay keeps it there, for root alone.
        trees = [str(Path(os.__file__).parent), str(Path(sys.executable).parent.parent), str(Path.cwd())]
        for tree in trees:
            over = tempfile.mkdtemp(dir="/run/lay")
            for part in ("upper", "work"):
                Path(over, part).mkdir()
            options = f"lowerdir={tree},upperdir={over}/upper,workdir={over}/work"
            subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, tree], check=True)
        command += ["-c", HIDDEN, ":".join(trees)]
    else:
        command += ["-m", "egress.resolver"]
    number = theirs.detach()
    os.dup2(number, 3, inheritable=True)
    if number != 3:
        os.close(number)
    return subprocess.Popen([*command, "/sandboxd/test/egress/resolver", str(UID)], pass_fds=(3,))


def ask(egress: socket.socket, server: NameServer, names: list[str]) -> dict[str, object]:
    del server.seen[:]
    for number, name in enumerate(names):
        egress.send(f"{number} {name}".encode())
    answers = {}
    for _ in names:
        number, _, answer = egress.recv(4096).decode().partition(" ")
        answers[names[int(number)]] = answer
    return {"answers": answers, "queries": server.seen[:]}


def status(pid: int) -> dict[str, object]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mounts = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return {
        "status": {name: value.strip() for name, _, value in (line.partition(":") for line in lines)},
        "writable": [line for line in mounts if "ro" not in line.split()[5].split(",")],
        "fds": sorted(int(fd) for fd in os.listdir(f"/proc/{pid}/fd")),
    }


def main() -> None:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    Path("/run/lay").mkdir()
    arrange(Path("/run/lay"))
    egress, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = egress.detach()
    egress = socket.socket(fileno=fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 10))  # 3 is the child's
    os.close(number)
    egress.settimeout(20)
    process = start(theirs, "hidden" in sys.argv)
    os.close(3)
    server = NameServer()
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, object] = {}
        match order:
            case {"ask": names}:
                answer = ask(egress, server, names)
            case {"zone": zone}:
                server.zone |= zone
            case {"hold": name}:
                server.held[name] = threading.Event()
                egress.send(f"999 {name}".encode())
            case {"release": name}:
                server.held.pop(name).set()
                answer = {"answer": egress.recv(4096).decode()}
            case {"status": _}:
                answer = status(process.pid)
        print(json.dumps(answer), flush=True)
    egress.close()
    sys.exit(process.wait(10))


if __name__ == "__main__":
    main()
