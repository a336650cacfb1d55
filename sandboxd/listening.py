"""Listening sockets, of both kinds.

In: addresses. Out: bound, non-blocking sockets for the length of a block, or `SetupError`. A unix socket is its owner's
from its first moment, takes the place of a stale one, and never that of anything else.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sandboxd import unixpath
from sandboxd.address import Address, TcpAddress, UnixAddress
from sandboxd.errors import SetupError


@dataclass(frozen=True, slots=True)
class Listener:
    """`address` has the port the kernel chose where 0 was asked for."""

    socket: socket.socket
    address: Address


@contextmanager
def listening(addresses: Iterable[Address]) -> Iterator[list[Listener]]:
    """All of them or, on `SetupError`, none. Afterwards the sockets' names are gone."""
    with ExitStack() as held:
        yield [held.enter_context(_held(address)) for address in addresses]


@contextmanager
def _held(address: Address) -> Iterator[Listener]:
    if isinstance(address, UnixAddress):
        with listen_unix(address.path) as sock:
            try:
                yield Listener(sock, address)
            finally:
                # While it still listens the name is surely ours.
                address.path.unlink(missing_ok=True)
    else:
        with listen_tcp(address) as sock:
            yield Listener(sock, TcpAddress(address.host, sock.getsockname()[1]))


def listen_tcp(address: TcpAddress, flag: str = "--listen") -> socket.socket:
    """`flag` is who asks, for the message."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            # An IPv4 address has a --listen of its own.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        found = socket.getaddrinfo(address.host, address.port, family, socket.SOCK_STREAM, flags=flags)
        sock.bind(found[0][4])
        sock.listen(unixpath.BACKLOG)
    except OSError as fault:
        sock.close()
        if fault.errno == errno.EADDRINUSE:
            raise SetupError(f"{flag} {address}: port {address.port} is in use by another program") from None
        if fault.errno == errno.EACCES:
            raise SetupError(f"{flag} {address}: only root may listen on port {address.port}") from None
        raise SetupError(f"{flag} {address}: it cannot be listened on: {fault.strerror}") from None
    return sock


def listen_unix(path: Path) -> socket.socket:
    """Made with mode 0600, a stale one replaced, a live one or another file left alone."""
    try:
        unixpath.make_private(path.parent)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as fault:
        raise SetupError(f"{path.parent} cannot be used for the socket: {fault.strerror}") from None
    try:
        info = os.fstat(directory)
        open_to_others = info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX
        if info.st_uid not in (0, os.geteuid()) or open_to_others:
            raise SetupError(f"others could replace the socket: {path.parent} is writable for them")
        return unixpath.bind(directory, path.name)
    except unixpath.SocketInUseError:
        if not path.is_socket():
            raise SetupError(f"{path} is in the way: it is no socket, and is left alone") from None
        raise SetupError(f"{path} is in use: another program listens there") from None
    except OSError as fault:
        raise SetupError(f"{path} cannot be listened on: {fault.strerror}") from None
    finally:
        os.close(directory)
