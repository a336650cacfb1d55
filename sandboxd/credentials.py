"""What a client must show: bearer tokens, and TLS with its certificates.

In: the files that the flags name, which must be nobody else's. Out: digests to compare with, and an `ssl.SSLContext`.
A token is forgotten once its digest is taken; it is in no message, no `repr` and no log.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import ssl
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from sandboxd.errors import SetupError
from sandboxd.transport import Transport

MIN_TOKEN = 16
MAX_TOKEN_FILE = 4096
MAX_PEM = 1 << 20


class Tokens:
    """Any of them opens the API. True where one is asked for, even if there is none at the moment."""

    __slots__ = ("_digests", "_needed")

    def __init__(self, tokens: Iterable[bytes] = (), needed: bool = False) -> None:
        self._digests = tuple(dict.fromkeys(hashlib.sha256(token).digest() for token in tokens))
        self._needed = needed or bool(self._digests)

    def __bool__(self) -> bool:
        return self._needed

    def find(self, given: bytes) -> int | None:
        """Which one it is. Takes the same time whichever it is, or none."""
        digest = hashlib.sha256(given).digest()
        found = None
        for number, one in enumerate(self._digests):
            if hmac.compare_digest(one, digest):
                found = number
        return found


class Credentials:
    """Read at the start, and again by `reload`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.tokens, self.tls = _load(transport)

    def reload(self) -> None:
        """For connections made from now on. Raises `SetupError` and changes nothing where a file is not in order."""
        self.tokens, self.tls = _load(self._transport)


def _load(transport: Transport) -> tuple[Tokens, ssl.SSLContext | None]:
    files = [*transport.token_files, *(_entries(transport.token_dir) if transport.token_dir is not None else ())]
    tokens = Tokens([read_token(path) for path in files], transport.needs_token)
    if transport.tls_cert is None or transport.tls_key is None:
        return tokens, None
    return tokens, server_context(transport.tls_cert, transport.tls_key, transport.client_ca)


def _entries(directory: Path) -> list[Path]:
    """Every file of a directory that nobody else can write in; the names are for the operator."""
    named = f"--token-dir {directory}"
    try:
        info = directory.lstat()
        names = sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))
    except OSError as fault:
        raise SetupError(f"{named} cannot be read: {fault.strerror}") from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o077:
        raise SetupError(f"{named} must be a directory of this user's or root's, and closed to others (mode 0700)")
    return names


def read_token(path: Path) -> bytes:
    """The token in a file that only the daemon's user or root can read; blanks around it are not part of it."""
    named = f"--token-file {path}"
    fd = _open(named, path, os.O_NOFOLLOW)
    try:
        _must_be_private(named, path, fd)
        token = os.read(fd, MAX_TOKEN_FILE + 1).strip()
    except OSError as fault:
        raise SetupError(f"{named} cannot be read: {fault.strerror}") from None
    finally:
        os.close(fd)
    if len(token) < MIN_TOKEN:
        raise SetupError(f"{named}: the token must have at least {MIN_TOKEN} characters")
    if len(token) > MAX_TOKEN_FILE or not all(0x21 <= byte <= 0x7E for byte in token):
        raise SetupError(f"{named}: the token must be one word of printable ASCII characters")
    return token


def server_context(cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """TLS 1.2 or newer, HTTP/1.1 only; with `client_ca`, only for clients that have a certificate of it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # No resumption: who was let in by an earlier certificate file is asked again.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
    context.num_tickets = 0
    context.set_alpn_protocols(["http/1.1"])
    cert_fd = _open(f"--tls-cert {cert}", cert)
    try:
        key_fd = _open(f"--tls-key {key}", key)
        try:
            _must_be_private(f"--tls-key {key}", key, key_fd)
            _load_pair(context, cert, key, cert_fd, key_fd)
        finally:
            os.close(key_fd)
    finally:
        os.close(cert_fd)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_authority(context, client_ca)
    return context


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path, cert_fd: int, key_fd: int) -> None:
    def no_password() -> NoReturn:
        raise SetupError(f"--tls-key {key}: the key is encrypted; the daemon has nobody to ask for its password")

    try:
        # The descriptors: what was looked at is what is read.
        context.load_cert_chain(f"/proc/self/fd/{cert_fd}", f"/proc/self/fd/{key_fd}", no_password)
    except ssl.SSLError as fault:
        if fault.reason == "KEY_VALUES_MISMATCH":
            raise SetupError(f"--tls-key {key} is not the key of the certificate in {cert}") from None
        raise SetupError(
            f"--tls-cert {cert} and --tls-key {key} must hold a certificate and its private key as PEM "
            f"({fault.reason or 'not PEM'})"
        ) from None
    except OSError as fault:
        raise SetupError(f"--tls-cert {cert}, --tls-key {key}: {fault.strerror}") from None


def _load_authority(context: ssl.SSLContext, path: Path) -> None:
    fd = _open(f"--client-ca {path}", path)
    try:
        context.load_verify_locations(cafile=f"/proc/self/fd/{fd}")
        if not context.get_ca_certs():
            raise SetupError(f"--client-ca {path}: it holds no certificate of an authority")
    except ssl.SSLError as fault:
        raise SetupError(f"--client-ca {path} must hold certificates as PEM ({fault.reason or 'not PEM'})") from None
    except OSError as fault:
        raise SetupError(f"--client-ca {path} cannot be read: {fault.strerror}") from None
    finally:
        os.close(fd)


def _open(named: str, path: Path, flags: int = 0) -> int:
    """A regular file; a pipe would be waited for for ever."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | flags)
    except OSError as fault:
        link = flags & os.O_NOFOLLOW and path.is_symlink()
        why = "it is a symbolic link; name the file itself" if link else fault.strerror
        raise SetupError(f"{named} cannot be read: {why}") from None
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_PEM:
        os.close(fd)
        raise SetupError(f"{named} must be a regular file of a sensible size")
    return fd


def _must_be_private(named: str, path: Path, fd: int) -> None:
    info = os.fstat(fd)
    if info.st_uid not in (0, os.geteuid()):
        raise SetupError(f"{named} must belong to this user or to root")
    if info.st_mode & 0o077:
        raise SetupError(f"{named} is open to others (mode {stat.S_IMODE(info.st_mode):04o}): chmod 600 {path}")
