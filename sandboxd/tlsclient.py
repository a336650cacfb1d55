"""A TLS connection as a plain socket: what is written into it comes out encrypted, and the reverse.

In: a connected TCP socket, a host name, files. Out: one end of a socket pair; a thread carries bytes between the
other end and the network. So whoever reads, polls and half-closes a unix socket does the same with this one:
`shutdown(SHUT_WR)` becomes close_notify, the peer's close_notify the end of what is read. A connection that breaks off
ends what is read, too: HTTP's lengths and a stream's last frame tell the whole from a part. But where the server says
that it does not take our certificate, which TLS 1.3 tells after the handshake, reading raises an error that says so.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from errno import EACCES
from threading import Thread

READ_BYTES = 64 << 10
UNTRUSTED = frozenset({2, 18, 19, 20, 21})
"""X509_V_ERR_* of a chain that ends at nobody we know; more certificates may help against these alone."""


def wrap(sock: socket.socket, host: str, ca_file: str, cert_file: str, key_file: str) -> socket.socket:
    """Shakes hands within the socket's timeout. Raises OSError that says what is wrong with the certificate."""
    tls = context(ca_file, cert_file, key_file)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    held = tls.wrap_bio(incoming, outgoing, server_hostname=host)
    try:
        while True:
            try:
                held.do_handshake()
                break
            except ssl.SSLWantReadError:
                sock.sendall(outgoing.read())
                data = sock.recv(READ_BYTES)
                if not data:
                    raise ConnectionError("the server ended the connection during the TLS handshake") from None
                incoming.write(data)
        sock.sendall(outgoing.read())
    except ssl.SSLCertVerificationError as fault:
        remedy = "the CA file must name who signs it" if ca_file else "give its CA file (context add --ca)"
        remedy = f"; {remedy}" if fault.verify_code in UNTRUSTED else ""
        raise ConnectionError(
            f"its certificate is not trusted: {fault.verify_message.rstrip('.')}{remedy}"
        ) from None
    except ssl.SSLError as fault:
        raise ConnectionError(refusal(fault, bool(cert_file)) or _no_tls(fault)) from None
    left, theirs = socket.socketpair()
    ours = _Ours(left, bool(cert_file))
    ours.settimeout(sock.gettimeout())
    Thread(target=_Carrier(sock, held, incoming, outgoing, theirs, ours).run, name="tls", daemon=True).start()
    return ours


def refusal(fault: ssl.SSLError, given: bool) -> str:
    """What the server has against our certificate, "" where the fault is another."""
    reason = fault.reason or ""
    if "ALERT" not in reason or not any(word in reason for word in ("CERTIFICATE", "UNKNOWN_CA")):
        return ""
    if not given:
        return "the server wants a client certificate: name one, and its key"
    said = reason.partition("ALERT_")[2].lower().replace("_", " ")
    return f"the server does not take our client certificate ({said})"


def _no_tls(fault: ssl.SSLError) -> str:
    if fault.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return "no TLS: it answered with something else"
    return f"no TLS: {fault.reason or fault}"


def context(ca_file: str, cert_file: str, key_file: str) -> ssl.SSLContext:
    """Raises OSError naming the file."""
    try:
        made = ssl.create_default_context(cafile=ca_file or None)
    except ssl.SSLError:
        raise OSError(f"the CA file {ca_file}: no certificate in it (PEM)") from None
    except OSError as fault:
        raise OSError(f"the CA file {ca_file}: {fault.strerror}") from None
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
    if cert_file:
        try:
            made.load_cert_chain(cert_file, key_file, password=_no_password)
        except (OSError, ValueError) as fault:
            said = getattr(fault, "strerror", None)
            if said is None or isinstance(fault, ssl.SSLError):
                said = "they do not fit together, are not PEM, or the key has a password"
            raise OSError(f"the client certificate {cert_file} with {key_file}: {said}") from None
    return made


def _no_password() -> bytes:
    raise ValueError("a key with a password cannot be used")


class _Ours(socket.socket):
    """The reader's end. `fault` is set before the other end is closed."""

    fault: ssl.SSLError | None = None

    def __init__(self, sock: socket.socket, certified: bool) -> None:
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self._certified = certified

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = b""
        try:
            data = super().recv(size, flags)
        except ConnectionError:
            # The other end was closed with some of our request unread.
            if self.fault is None:
                raise
        if not data and self.fault is not None and (said := refusal(self.fault, self._certified)):
            raise PermissionError(EACCES, said)
        return data


class _Carrier:
    """One thread, one poll. Each direction holds at most one piece, so a slow side holds the other back."""

    def __init__(
        self, wire: socket.socket, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO,
        plain: socket.socket, reader: _Ours,
    ) -> None:  # fmt: skip
        self._wire, self._tls, self._plain, self._reader = wire, tls, plain, reader
        self._incoming, self._outgoing = incoming, outgoing
        self._to_wire = self._to_plain = b""
        self._plain_ended = self._wire_ended = self._said = False

    def run(self) -> None:
        with self._wire, self._plain:
            self._wire.setblocking(False)
            self._plain.setblocking(False)
            # Whoever holds the other end learns of it by the end of what is read.
            try:
                self._decrypt()
                while not self._done():
                    self._say_goodbye()
                    self._turn()
            except ssl.SSLError as fault:
                self._reader.fault = fault
            except OSError:
                pass

    def _done(self) -> bool:
        """The peer said its last word and we handed it on: nothing that is still sent would be heard."""
        return self._wire_ended and not self._to_plain

    def _turn(self) -> None:
        wire_events = (select.POLLOUT if self._to_wire else 0) | (0 if self._to_plain else select.POLLIN)
        may_read = not self._plain_ended and not self._to_wire
        plain_events = (select.POLLOUT if self._to_plain else 0) | (select.POLLIN if may_read else 0)
        poll = select.poll()
        poll.register(self._wire, wire_events)
        # One that has hung up would wake the poll for ever while what it left is still on its way out.
        if plain_events or self._plain_ended:
            poll.register(self._plain, plain_events)
        for fd, events in poll.poll():
            if fd == self._wire.fileno():
                self._serve_wire(events)
            else:
                self._serve_plain(events)

    def _serve_wire(self, events: int) -> None:
        if events & select.POLLOUT and self._to_wire:
            self._to_wire = self._to_wire[self._wire.send(self._to_wire) :]
        if events & ~select.POLLOUT and not self._to_plain:
            data = _none_yet(lambda: self._wire.recv(READ_BYTES))
            if data is not None:
                if data:
                    self._incoming.write(data)
                else:
                    self._incoming.write_eof()
                self._decrypt()

    def _serve_plain(self, events: int) -> None:
        if events & select.POLLOUT and self._to_plain:
            self._to_plain = self._to_plain[self._plain.send(self._to_plain) :]
            if not self._to_plain:
                self._decrypt()
        if self._plain_ended and events & select.POLLHUP:
            raise ConnectionResetError("nobody reads any more")
        if events & ~select.POLLOUT and not self._to_wire and not self._plain_ended:
            data = _none_yet(lambda: self._plain.recv(READ_BYTES))
            if data:
                self._tls.write(data)
                self._to_wire += self._outgoing.read()
            elif data is not None:
                self._plain_ended = True

    def _say_goodbye(self) -> None:
        """Sends close_notify once, where nothing that came before it is still unread: OpenSSL would drop that."""
        unread = self._to_plain or self._incoming.pending or self._tls.pending()
        if not self._plain_ended or self._said or unread:
            return
        self._said = True
        with suppress(ssl.SSLWantReadError):
            self._tls.unwrap()
        self._to_wire += self._outgoing.read()

    def _decrypt(self) -> None:
        try:
            self._to_plain = self._tls.read(READ_BYTES)
            ended = not self._to_plain
        except ssl.SSLWantReadError:
            ended = False
        except ssl.SSLZeroReturnError:
            ended = True
        self._to_wire += self._outgoing.read()
        if ended:
            self._wire_ended = True


def _none_yet(call: Callable[[], bytes]) -> bytes | None:
    try:
        return call()
    except BlockingIOError:
        return None
