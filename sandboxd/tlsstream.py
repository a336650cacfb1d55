"""Bytes over TLS on a connected socket: `SocketStream`'s promises, kept through OpenSSL.

In: a socket that was just accepted. Out: a stream, once the handshake is done. The peer's close_notify is the end of
its direction and of nothing else: what is written after it still reaches it. A connection that ends without one was
cut, by whomever, and is broken. OpenSSL works on the socket itself, so no byte rests anywhere when a task is
cancelled.
"""

from __future__ import annotations

import contextlib
import socket
import ssl

import anyio

from sandboxd.socketstream import BrokenStreamError, SocketStream

ALERT_S = 1.0
ALERT_READS = 16
READ_BYTES = 4096
"""How long, and how much, a peer may still send after its handshake has failed."""


class HandshakeError(Exception):
    """Why there is no TLS connection; the text is OpenSSL's and holds nothing of the peer's."""


class TlsStream(SocketStream):
    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        self._tls = sock
        self._both_ended = False

    async def handshake(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._wait(anyio.wait_readable)
            except ssl.SSLWantWriteError:
                await self._wait(anyio.wait_writable)
            except ssl.SSLError as fault:
                if fault.reason:
                    await self._let_it_read()
                raise HandshakeError((fault.reason or "cut off").lower().replace("_", " ")) from None
            except OSError as fault:
                raise HandshakeError(fault.strerror or "cut off") from None
            else:
                return

    async def _let_it_read(self) -> None:
        """A peer that has sent its request already would get a reset in place of the alert that says what is wrong."""
        with contextlib.suppress(OSError), anyio.move_on_after(ALERT_S):
            # Of the class above, which knows nothing of TLS.
            socket.socket.shutdown(self._tls, socket.SHUT_WR)
            for _ in range(ALERT_READS):
                try:
                    if not socket.socket.recv(self._tls, READ_BYTES):
                        return
                except BlockingIOError:
                    await self._wait(anyio.wait_readable)

    async def receive(self, limit_bytes: int) -> bytes:
        while not self._both_ended:
            try:
                data = self._tls.recv(limit_bytes)
            except ssl.SSLWantReadError:
                await self._wait(anyio.wait_readable)
            except ssl.SSLWantWriteError:
                await self._wait(anyio.wait_writable)
            except ssl.SSLZeroReturnError:
                # What `recv` says for `b""` once our own close_notify is out.
                return b""
            except OSError:
                raise BrokenStreamError from None
            else:
                await self._yield(len(data))
                return data
        return b""

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._tls.send(view) :]
            except ssl.SSLWantWriteError:
                await self._wait_writable()
            except ssl.SSLWantReadError:
                await self._wait(anyio.wait_readable)
            except OSError:
                raise BrokenStreamError from None
        await self._yield(len(data))

    def send_eof(self) -> None:
        try:
            with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self._tls.unwrap()
                self._both_ended = True
            # Of the class above: SSLSocket's own would drop TLS, and what still comes would be read as it stands.
            socket.socket.shutdown(self._tls, socket.SHUT_WR)
        except (OSError, ValueError):
            raise BrokenStreamError from None


def wrap(sock: socket.socket, context: ssl.SSLContext) -> TlsStream:
    """Owns `sock` from here on. Raises `HandshakeError` where the peer is gone already."""
    try:
        return TlsStream(
            context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=False)
        )
    except (OSError, ValueError) as fault:
        sock.close()
        raise HandshakeError(str(getattr(fault, "strerror", "")) or "cut off") from None
