"""Connections that became streams: a process's, in frames (API v1 §6), and a tunnel's bytes.

In: a connected socket, and what came right behind the answer that switched it. Out: frames, or bytes both ways.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import NamedTuple

from sandboxd import unixhttp
from sandboxd.answers import BadAnswer

FRAME_LIMIT_BYTES = 1 << 20


class Frame(NamedTuple):
    """One message of an attach stream: its type letter and its payload (API v1 §6)."""

    kind: bytes
    payload: bytes


class FrameDecoder:
    """Bytes of an attach stream to frames, however they are cut."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now; a payload above 1 MiB raises `BadAnswer`."""
        self._kept += data
        frames: list[Frame] = []
        at = 0
        while len(self._kept) - at >= 5:
            size = int.from_bytes(self._kept[at + 1 : at + 5], "big")
            if size > FRAME_LIMIT_BYTES:
                raise BadAnswer("sandboxd sent a frame larger than 1 MiB")
            if len(self._kept) - at < 5 + size:
                break
            frames.append(Frame(bytes(self._kept[at : at + 1]), bytes(self._kept[at + 5 : at + 5 + size])))
            at += 5 + size
        del self._kept[:at]
        return frames


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    return kind + len(payload).to_bytes(4, "big") + payload


def resize(rows: int, cols: int) -> bytes:
    """The frame that tells a terminal's size."""
    return frame(b"r", rows.to_bytes(2, "big") + cols.to_bytes(2, "big"))


class Attachment(NamedTuple):
    """A process's live streams: a connected socket, and the decoder that already holds what came early."""

    sock: socket.socket
    decoder: FrameDecoder
    first: tuple[Frame, ...]

    def frames(self) -> Iterator[Frame]:
        """Frames until the exit code has come; `BadAnswer` if the connection ends before."""
        pending = list(self.first)
        while True:
            for one in pending:
                yield one
                if one.kind == b"x":
                    return
            data = self.sock.recv(unixhttp.READ_BYTES)
            if not data:
                raise BadAnswer("sandboxd ended the stream before the process's exit")
            pending = self.decoder.feed(data)

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def exit_code(payload: bytes) -> int:
    """The exit code an `x` frame carries."""
    if len(payload) != 4:
        raise BadAnswer("sandboxd sent a malformed exit code")
    return int.from_bytes(payload, "big", signed=True)


class Tunnel:
    """A TCP connection to a port of the guest's loopback address. As a context manager it closes at the end."""

    def __init__(self, sock: socket.socket, early: bytes) -> None:
        self.sock = sock
        self._early = early

    def recv(self, size: int = unixhttp.READ_BYTES) -> bytes:
        """Between one and `size` bytes; none once the guest's side has ended."""
        if self._early:
            data, self._early = self._early[:size], self._early[size:]
            return data
        return self.sock.recv(size)

    def sendall(self, data: bytes) -> None:
        self.sock.sendall(data)

    def end(self) -> None:
        """No more from us; what the guest still sends is read on."""
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Tunnel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
