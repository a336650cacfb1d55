"""The flags that say how the API is reached, checked against each other. Pure.

In: what docopt found. Out: a frozen `Transport`, or `SetupError`: a port of the network needs a token, and TLS where
others can reach it. Nothing is opened here.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxd.address import Address, TcpAddress, parse
from sandboxd.errors import SetupError

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*\Z")


@dataclass(frozen=True, slots=True)
class Transport:
    """`allowed_hosts` are lower case; an IPv6 address among them has no brackets."""

    listen: tuple[Address, ...]
    token_files: tuple[Path, ...] = ()
    token_dir: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    allowed_hosts: frozenset[str] = frozenset()

    @property
    def needs_token(self) -> bool:
        """Also where the directory of tokens is empty for the moment: then nobody gets in."""
        return bool(self.token_files) or self.token_dir is not None


def read(listen: Sequence[str], flags: Mapping[str, Any]) -> Transport:
    """`listen` are the addresses, of which there is at least one."""
    transport = Transport(
        tuple(parse("--listen", text) for text in listen),
        tuple(Path(name).absolute() for name in flags["--token-file"]), _path(flags["--token-dir"]),
        _path(flags["--tls-cert"]), _path(flags["--tls-key"]), _path(flags["--client-ca"]),
        frozenset(_host(name) for name in flags["--allowed-host"]),
    )  # fmt: skip
    _check(transport)
    return transport


def _check(transport: Transport) -> None:
    if transport.tls_cert and not transport.tls_key:
        raise SetupError("--tls-cert needs --tls-key, the certificate's private key")
    if transport.tls_key and not transport.tls_cert:
        raise SetupError("--tls-key needs --tls-cert, the key's certificate")
    if transport.client_ca and not transport.tls_cert:
        raise SetupError("--client-ca needs --tls-cert and --tls-key: only TLS asks clients for a certificate")
    for address in transport.listen:
        if not isinstance(address, TcpAddress):
            continue
        if not transport.needs_token and address.loopback:
            raise SetupError(
                f"--listen {address} needs --token-file or --token-dir: any local user could reach this port. "
                "A unix socket is its owner's alone and needs no token: --listen unix:///path/to/sandboxd.sock"
            )
        if not transport.needs_token:
            raise SetupError(
                f"--listen {address} needs --token-file or --token-dir: whoever reaches this port could use the API"
            )
        if not address.loopback and not transport.tls_cert:
            raise SetupError(
                f"--listen {address} needs --tls-cert and --tls-key: it is reached over the network, "
                "where others could read the token"
            )


def _host(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not _NAME.match(name):
        raise SetupError(f"--allowed-host {name}: not the name of a host; write it without scheme and port")
    return name.lower()


def _path(name: str | None) -> Path | None:
    return Path(name).absolute() if name else None
