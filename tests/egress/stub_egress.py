"""A stand-in for egress while its supervision is tested: the real control framing, the real descriptors, no decision.

It answers a connection with where it was going and the policy's mode, a DNS datagram with `re:` and the datagram, and
notes what it was told in `told.jsonl` beside the control socket. A file `build` there makes it say another build, one
named `refuse` refuses every sandbox. As resolver (`resolver` first) it waits for its peer to go.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from egress import control

SO_ORIGINAL_DST = 80


class Stub:
    def __init__(self, directory: Path, build: str) -> None:
        self.directory, self.build = directory, build
        self.sandboxes: dict[str, dict[str, Any]] = {}
        self.sockets: dict[str, list[socket.socket]] = {}
        self.wait = selectors.DefaultSelector()
        self.listener = socket.socket(fileno=3)
        self.resolver = socket.socket(fileno=4)
        self.peer: socket.socket | None = None
        self.inbox = control.Inbox()
        self.events = control.Unacked()
        self.acked = 0
        self.wait.register(self.listener, selectors.EVENT_READ, self.accept)

    def serve(self) -> None:
        while True:
            for key, _ in self.wait.select():
                key.data()

    def accept(self) -> None:
        if self.peer is not None:
            self.wait.unregister(self.peer)
            self.peer.close()
        self.peer, _ = self.listener.accept()
        self.inbox = control.Inbox()
        self.wait.register(self.peer, selectors.EVENT_READ, self.read)
        for event in self.events.after(0, 100):
            control.send(self.peer, {"event": event.as_json(), "number": event.number})

    def read(self) -> None:
        assert self.peer is not None
        try:
            frames = self.inbox.read(self.peer)
        except (EOFError, OSError):
            self.wait.unregister(self.peer)
            self.peer.close()
            self.peer = None
            return
        for frame in frames:
            try:
                answer = {"ok": True, **self.do(frame.body, list(frame.fds))}
            except ValueError as fault:
                answer = {"error": str(fault)}
            control.send(self.peer, {"seq": frame.body["seq"], **answer})

    def do(self, body: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if body["do"] not in ("hello", "ack"):
            with open(self.directory / "told.jsonl", "a") as file:
                file.write(json.dumps({"pid": os.getpid(), **body}) + "\n")
        sandbox = body.get("sandbox", "")
        match body["do"]:
            case "hello":
                override = self.directory / "build"
                build = override.read_text() if override.exists() else self.build
                return {"build": build, "pid": os.getpid(), "sandboxes": list(self.sandboxes), "events": 0}
            case "add":
                if (self.directory / "refuse").exists():
                    for fd in fds:
                        os.close(fd)
                    raise ValueError("not today")
                self.add(sandbox, body["policy"], fds)
            case "update":
                self.sandboxes[sandbox]["policy"] = body["policy"]
            case "remove":
                for each in self.sockets.pop(sandbox):
                    self.wait.unregister(each)
                    each.close()
                del self.sandboxes[sandbox]
            case "report":
                return {"names": [{"id": "abc", "name": sandbox}]}
            case "resolver":
                self.resolver.close()
                self.resolver = socket.socket(fileno=fds[0])
            case "ack":
                self.acked = body["through"]
                self.events.ack(body["through"], 0.0)
        return {}

    def add(self, sandbox: str, policy: dict[str, Any], fds: list[int]) -> None:
        proxy, dns, dns_tcp = (socket.socket(fileno=fd) for fd in fds[:3])
        os.write(fds[3], f"added by {os.getpid()}\n".encode())
        os.close(fds[3])
        self.sandboxes[sandbox] = {"policy": policy}
        self.sockets[sandbox] = [proxy, dns, dns_tcp]
        self.wait.register(proxy, selectors.EVENT_READ, lambda: self.connection(sandbox, proxy))
        self.wait.register(dns, selectors.EVENT_READ, lambda: self.datagram(dns))
        self.wait.register(dns_tcp, selectors.EVENT_READ, lambda: self.connection(sandbox, dns_tcp))

    def connection(self, sandbox: str, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            try:
                target = connection.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
            except OSError:
                target = bytes(16)
            port, address = struct.unpack(">2xH4s8x", target)
            mode = self.sandboxes[sandbox]["policy"]["mode"]
            connection.sendall(f"{socket.inet_ntoa(address)}:{port} {mode}".encode())
        self.tell(sandbox, port)

    def datagram(self, dns: socket.socket) -> None:
        data, sender = dns.recvfrom(65536)
        dns.sendto(b"re:" + data, sender)

    def tell(self, sandbox: str, port: int) -> None:
        event = control.Event(0, 1.0, control.ALLOWED, sandbox, "aaaaaaaa", "name.test", port, "", "", "", 1, 0, 0, 1)
        self.events.add(event)
        if self.peer is not None:
            newest = self.events.after(self.events.last - 1, 1)[0]
            control.send(self.peer, {"event": newest.as_json(), "number": newest.number})


if __name__ == "__main__":
    if sys.argv[1] == "resolver":
        socket.socket(fileno=3).recv(1)
    else:
        _, _, _mark, build, _uid, root = sys.argv
        Stub(Path(root).parent, build).serve()
