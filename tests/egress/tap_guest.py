"""A guest without a machine: a namespace with an eth0 whose frames go to and come from the sandbox's tap."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from pyroute2 import IPRoute, netns

from egress import link
from egress.plan import Plan

T = TypeVar("T")


class Guest:
    """`tap_fd` is the sandbox's tap, as a machine would be given it; it stays the caller's."""

    def __init__(self, plan: Plan, tap_fd: int) -> None:
        self._plan = plan
        self._tap = os.dup(tap_fd)
        self._namespace, self._own = link.alone(self._make)
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join()
        for fd in (self._tap, self._namespace, self._own, self._stop_read, self._stop_write):
            os.close(fd)

    def run(self, call: Callable[[], T]) -> T:
        """The result of `call`, made by the guest."""

        def enter() -> T:
            netns.setns(self._namespace, flags=0)
            return call()

        return link.alone(enter)

    def tcp(self, address: str, port: int, source_port: int = 0) -> str:
        """What came back, or how it failed."""
        return self.run(lambda: _tcp(address, port, source_port))

    def udp(self, address: str, port: int, data: bytes = b"hello") -> str:
        return self.run(lambda: _udp(address, port, data))

    def send_frame(self, frame: bytes) -> None:
        """Whatever it is, past the guest's own network stack."""

        def send() -> None:
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
                raw.bind(("eth0", 0))
                raw.send(frame)

        self.run(send)

    def _make(self) -> tuple[int, int]:
        link._unshare()
        own = link._tap("eth0")
        with IPRoute() as route:
            index = socket.if_nametoindex("eth0")
            route.link("set", index=index, address=self._plan.guest_mac, state="up")
            route.link("set", index=socket.if_nametoindex("lo"), state="up")
            route.addr("add", index=index, address=self._plan.guest_address, prefixlen=self._plan.prefix)
            route.route("add", dst="default", gateway=self._plan.host_address)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY), own

    def _pump(self) -> None:
        poller = select.poll()
        for fd in (self._tap, self._own, self._stop_read):
            poller.register(fd, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == self._stop_read:
                    return
                # A tap that is down or gone takes nothing: neither does a cable that is not plugged in.
                try:
                    frame = os.read(fd, 70_000)
                except BlockingIOError:
                    continue
                except OSError:
                    poller.unregister(fd)
                    continue
                with suppress(OSError):
                    os.write(self._own if fd == self._tap else self._tap, frame)


def _tcp(address: str, port: int, source_port: int) -> str:
    with socket.socket() as connection:
        connection.settimeout(2)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            connection.bind(("", source_port))
            connection.connect((address, port))
            return connection.recv(1000).decode()
        except OSError as fault:
            return type(fault).__name__


def _udp(address: str, port: int, data: bytes) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(2)
        try:
            sock.connect((address, port))
            sock.send(data)
            return sock.recv(70_000).decode()
        except OSError as fault:
            return type(fault).__name__
