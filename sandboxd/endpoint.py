"""Where a sandboxd is, and how one connects to it: a unix socket, `http://` on loopback, `https://`.

In: an address and the names of files. Out: connected sockets and the headers of a request. The token is read from its
file for each request and kept nowhere; nothing here shows it. What only an address of the network needs is
imported where there is one: `sandbox-cli` on a unix socket starts quickly.
"""

from __future__ import annotations

import os
import socket
import stat
from typing import NamedTuple

from sandboxd import unixhttp
from sandboxd.errors import SetupError

TOKEN_LIMIT_BYTES = 4096


class Endpoint(NamedTuple):
    """`address` is `unix:///path`, `http://host:port` or `https://host:port`. Make one with `of`.

    `name` is what a person calls it, for errors.
    """

    address: str
    host: str = ""
    port: int = 0
    token_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    name: str = ""

    @classmethod
    def of(
        cls, address: str, *, token_file: str = "", ca_file: str = "", cert_file: str = "", key_file: str = ""
    ) -> Endpoint:
        """Raises `SetupError` where the address is none or a file does not fit it."""
        if address.startswith("unix:///"):
            return cls(address, token_file=token_file)
        from urllib.parse import urlsplit

        try:
            parts = urlsplit(address)
            host, port = parts.hostname or "", parts.port
            host.encode("idna")  # as getaddrinfo is going to, with a UnicodeError that nobody expects there
        except ValueError:
            host, port = "", None
        if not host or port is None or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
            raise SetupError(f"{address}: not unix:///path, http://127.0.0.1:PORT or https://HOST:PORT")
        if parts.scheme == "http":
            if not _is_loopback(host):
                raise SetupError(f"{address}: without TLS only this machine itself; use https://")
            if ca_file or cert_file or key_file:
                raise SetupError(f"{address}: certificates are for https://")
        elif parts.scheme != "https":
            raise SetupError(f"{address}: not unix:///path, http://127.0.0.1:PORT or https://HOST:PORT")
        if not token_file:
            raise SetupError(f"{address}: over TCP a token is needed; name the file that holds it")
        if bool(cert_file) != bool(key_file):
            raise SetupError(f"{address}: a client certificate and its key go together")
        shown = f"[{host}]" if ":" in host else host
        return cls(f"{parts.scheme}://{shown}:{port}", host, port, token_file, ca_file, cert_file, key_file)

    @classmethod
    def of_socket(cls, path: str) -> Endpoint:
        return cls(f"unix://{path}")

    @property
    def socket_path(self) -> str:
        """Of a unix socket; empty for the others."""
        return self.address.removeprefix("unix://") if self.address.startswith("unix://") else ""

    @property
    def shown(self) -> str:
        """The address as an error says it, with its name where it has one."""
        where = self.socket_path or self.address
        return f"{where} (context {self.name})" if self.name else where

    def connect(self, timeout_s: float | None) -> socket.socket:
        """A connected socket. Raises OSError, with what is wrong with a certificate as its text."""
        if path := self.socket_path:
            return unixhttp.connect(path, timeout_s)
        sock = socket.create_connection((self.host, self.port), timeout_s)
        if self.address.startswith("http://"):
            return sock
        from sandboxd import tlsclient

        try:
            return tlsclient.wrap(sock, self.host, self.ca_file, self.cert_file, self.key_file)
        except BaseException:
            sock.close()
            raise

    def headers(self) -> dict[str, str]:
        """Those of every request."""
        host = "localhost" if self.socket_path else self.address.partition("://")[2]
        fields = {"Host": host}
        if self.token_file:
            fields["Authorization"] = f"Bearer {read_token(self.token_file)}"
        return fields

    def token_remedy(self) -> str:
        """What to do about a token that was refused."""
        if self.token_file:
            return f"the one in {self.token_file} is none of them"
        return "no token file was named (sandbox-cli: SANDBOX_TOKEN_FILE)"


def read_token(path: str) -> str:
    """Raises `SetupError` for a file that others may read, or that holds no token."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as fault:
        raise SetupError(f"the token file {path}: {fault.strerror}") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise SetupError(f"the token file {path} is not a regular file")
        if info.st_mode & 0o077:
            raise SetupError(f"others may read the token file: chmod 600 {path}")
        held = os.read(fd, TOKEN_LIMIT_BYTES)
    finally:
        os.close(fd)
    token = held.strip().decode("latin-1")
    if not token or any(not "!" <= char <= "~" for char in token):
        raise SetupError(f"the token file {path} holds no token: one line of printable characters without blanks")
    return token


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    from ipaddress import ip_address

    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
