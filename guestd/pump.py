"""Moves bytes between one process and the connections that watch it; one thread per process does it all.

The rules are `session`'s, the process is `process`'s; here is the poll loop. What a process may pile up in
guestd is bounded: 64 KiB a stream ahead of the connection that started it, the rings of a kept one, and of each
connection 64 KiB and one frame of stdin. A connection that ends takes the process with it, everything it started
included, unless the process is kept.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import termios
import threading
import time
from collections import deque

from guestd import protocol
from guestd.session import Feed, Session

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Final

    from guestd.process import Process

_READ_BYTES: Final = protocol.CHUNK_BYTES
_STDIN_BYTES: Final = protocol.CHUNK_BYTES      # no more is read from a connection while this much of it waits
_GONE: Final = select.POLLHUP | select.POLLERR | select.POLLRDHUP
_OUT_OF_MEMORY: Final = b"sandbox: out of memory\n"


class Link:
    """A connection in the loop: its socket, its place in the output, what is on its way out.

    `received` are frames that came right behind the request, `stdin_bytes` what waits for the process to read it.
    """

    __slots__ = ("decoder", "feed", "gone", "out", "received", "sock", "stdin_bytes")

    def __init__(self, sock: socket.socket, feed: Feed, received: bytes) -> None:
        self.sock = sock
        self.feed = feed
        self.received = received
        self.decoder = protocol.FrameDecoder(protocol.TO_GUEST)
        self.out = memoryview(b"")
        self.gone = False
        self.stdin_bytes = 0

    def flush(self) -> None:
        """Sends what the socket takes now."""
        try:
            while self.out:
                self.out = self.out[self.sock.send(self.out):]
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True


class Pump:
    """One process and its connections. `attach` may be called from any thread; whom it answers True runs
    `run`."""

    __slots__ = (
        "_incoming", "_kept", "_links", "_lock", "_process", "_running", "_stdin", "_stdin_ended", "_wake",
        "session",
    )

    def __init__(self, process: Process, *, kept: bool) -> None:
        self.session = Session(protocol.RING_BYTES if kept else 0)
        self._kept = kept
        self._process: Process | None = process
        self._links: list[Link] = []
        self._incoming: list[Link] = []
        self._lock = threading.Lock()
        self._running = False
        self._stdin: deque[tuple[Link, bytearray]] = deque()
        self._stdin_ended = False
        self._wake = -1
        if "E" not in process.outputs:
            self.session.closed("E")

    def attach(self, link: Link) -> bool:
        """Hands over a connection. True: nobody runs the loop, so the caller must."""
        with self._lock:
            self._incoming.append(link)
            if self._running:
                os.eventfd_write(self._wake, 1)
                return False
            self._running = True
            if self._kept:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return True

    def run(self) -> None:
        """Until the process is over and every connection has its exit code or has left."""
        try:
            while True:
                self._adopt()
                self._deliver()
                if self._process is None and not self._links and self._stop():
                    return
                if self._process is not None or self._links:
                    self._wait()
        except BaseException:
            self._abandon()
            raise

    def _stop(self) -> bool:
        with self._lock:
            if self._incoming:
                return False
            self._running = False
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1
            return True

    def _abandon(self) -> None:
        """A fault of ours: the process and its connections end."""
        for link in self._links:
            link.sock.close()
        self._links.clear()
        if self._process is not None:
            self._kill()
        self._stop()

    # ---- connections

    def _adopt(self) -> None:
        with self._lock:
            incoming, self._incoming = self._incoming, []
        for link in incoming:
            try:
                link.sock.setblocking(False)
                self.session.add(link.feed)
            except protocol.GuestProtocolFault as fault:
                with contextlib.suppress(OSError):
                    link.sock.send(protocol.encode_error(fault.code, str(fault)))
                link.sock.close()
                continue
            self._links.append(link)
            link.out = memoryview(protocol.encode_ok())
            self._input(link, link.received)

    def _deliver(self) -> None:
        """Sends what can be sent; lets go of who has everything or has left."""
        session = self.session
        if self._process is not None and session.over:
            self._retire()
        for link in list(self._links):
            while not link.gone:
                if not link.out:
                    frames = session.take(link.feed)
                    if not frames:
                        break
                    link.out = memoryview(b"".join(frames))
                link.flush()
                if link.out:
                    break
            if link.gone or (link.feed.done and not link.out):
                self._leave(link)

    def _leave(self, link: Link) -> None:
        self._links.remove(link)
        self.session.remove(link.feed)
        link.sock.close()
        if self._process is not None and not self._kept:
            self._kill()

    def _input(self, link: Link, data: bytes) -> None:
        try:
            frames = link.decoder.feed(data)
        except protocol.GuestProtocolFault:
            link.gone = True
            return
        process = self._process
        if process is None:
            return
        for kind, payload in frames:
            if kind == protocol.STDIN:
                if payload and not self._stdin_ended:
                    self._queue_stdin(link, payload)
            elif kind == protocol.STDIN_END:
                if process.master_fd >= 0:
                    self._queue_stdin(link, process.end_of_file_character())
                else:
                    self._stdin_ended = True
            elif kind == protocol.SIGNAL:
                name = protocol.decode_signal(payload)
                if name is not None and self.session.exit_code is None:
                    process.signal(name)
            else:
                process.resize(*protocol.decode_resize(payload))
        self._write_stdin()

    # ---- the process

    def _queue_stdin(self, link: Link, data: bytes) -> None:
        if self._stdin and self._stdin[-1][0] is link:
            self._stdin[-1][1].extend(data)
        else:
            self._stdin.append((link, bytearray(data)))
        link.stdin_bytes += len(data)

    def _drop_stdin(self) -> None:
        for link, _ in self._stdin:
            link.stdin_bytes = 0
        self._stdin.clear()

    def _write_stdin(self) -> None:
        process = self._process
        if process is None or process.stdin_fd < 0:
            self._drop_stdin()
            return
        try:
            while self._stdin:
                link, data = self._stdin[0]
                with memoryview(data) as waiting:
                    written = os.write(process.stdin_fd, waiting[:_READ_BYTES])
                del data[:written]
                link.stdin_bytes -= written
                if not data:
                    self._stdin.popleft()
        except BlockingIOError:
            return
        except OSError:             # it reads no more: the rest goes nowhere, as in any pipe
            self._drop_stdin()
            process.close_stdin()
            return
        if self._stdin_ended:
            process.close_stdin()

    def _read(self, process: Process, stream: str) -> None:
        fd = process.outputs[stream]
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:             # a terminal whose other side nobody holds any more says EIO
            data = b""
        if data:
            self.session.output(stream, data)
        else:
            self.session.closed(stream)

    def _exited(self, process: Process) -> None:
        code = process.reap()
        waiting = {}
        if process.master_fd < 0:
            for stream, fd in process.outputs.items():
                count = array.array("i", [0])
                fcntl.ioctl(fd, termios.FIONREAD, count)
                waiting[stream] = count[0]
        self.session.exited(code, time.monotonic(), waiting)

    def _retire(self) -> None:
        """The process is over. Streams that a child holds open are read on, into nothing, so that it
        lives."""
        process = self._process
        assert process is not None and self.session.exit_code is not None
        if process.out_of_memory(self.session.exit_code):
            if process.master_fd < 0:
                self.session.output("E", _OUT_OF_MEMORY)
            else:
                self.session.output("o", _OUT_OF_MEMORY.replace(b"\n", b"\r\n"))
        self._process = None
        process.close_stdin()
        os.close(process.pidfd)
        for stream, fd in process.outputs.items():
            if self.session.still_open(stream):
                _drain.adopt(fd)
            else:
                os.close(fd)
        process.group.close()

    def _kill(self) -> None:
        """Ends everything the process started; nobody is there to be told."""
        process, self._process = self._process, None
        assert process is not None
        process.kill()
        if self.session.exit_code is None:
            process.reap()
        process.close_stdin()
        os.close(process.pidfd)
        for fd in process.outputs.values():
            os.close(fd)
        process.group.close()

    # ---- waiting

    def _wait(self) -> None:
        session, process = self.session, self._process
        poll = select.poll()
        links = {link.sock.fileno(): link for link in self._links}
        blocked = False
        for fd, link in links.items():
            mask = select.POLLRDHUP
            if link.out:
                mask |= select.POLLOUT
                blocked = blocked or link.feed.pinned
            if link.stdin_bytes < _STDIN_BYTES:
                mask |= select.POLLIN
            poll.register(fd, mask)
        masks: dict[int, int] = {}
        if process is not None:
            for stream, fd in process.outputs.items():
                if session.wants(stream):
                    masks[fd] = select.POLLIN
            if self._stdin and process.stdin_fd >= 0:
                masks[process.stdin_fd] = masks.get(process.stdin_fd, 0) | select.POLLOUT
            if session.exit_code is None:
                masks[process.pidfd] = select.POLLIN
        if self._wake >= 0:
            masks[self._wake] = select.POLLIN
        for fd, mask in masks.items():
            poll.register(fd, mask)
        deadline = session.deadline_s()
        if deadline is None:
            events = poll.poll()
        else:
            began = time.monotonic()
            events = poll.poll(max(0, int((deadline - began) * 1000) + 1))
            if blocked:
                session.waited(time.monotonic() - began)
        for fd, event in events:
            if fd in links:
                self._heard(links[fd], event)
            elif fd == self._wake:
                os.eventfd_read(self._wake)
            elif process is None or process is not self._process:
                continue
            elif fd == process.pidfd:
                self._exited(process)
            else:
                if fd == process.stdin_fd and event & select.POLLOUT:
                    self._write_stdin()
                elif fd == process.stdin_fd and fd not in process.outputs.values():
                    self._drop_stdin()
                    process.close_stdin()
                for stream, output in process.outputs.items():
                    if fd == output and event & ~select.POLLOUT:
                        self._read(process, stream)
        if deadline is not None:
            session.tick(time.monotonic())

    def _heard(self, link: Link, event: int) -> None:
        if event & select.POLLIN:
            try:
                data = link.sock.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                self._input(link, data)
            else:
                link.gone = True
        elif event & _GONE:
            link.gone = True


class _Drain:
    """Reads streams that outlived their process, into nothing, until they end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[int] = []
        self._wake = -1

    def adopt(self, fd: int) -> None:
        with self._lock:
            self._waiting.append(fd)
            if self._wake < 0:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                threading.Thread(target=self._run, name="drain", daemon=True).start()
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake:
                    os.eventfd_read(fd)
                    with self._lock:
                        arrived, self._waiting = self._waiting, []
                    for new in arrived:
                        poll.register(new, select.POLLIN)
                elif self._ended(fd):
                    poll.unregister(fd)
                    os.close(fd)

    @staticmethod
    def _ended(fd: int) -> bool:
        try:
            return not os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            return True


_drain: Final = _Drain()
