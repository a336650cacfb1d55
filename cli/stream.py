"""A process in a sandbox joined to this process's stdin, stdout and stderr until it ends.

In: an attachment, whether it has a terminal, and what a signal means here. Out: its exit code, None if the
person detached, or `Lost` when the connection ended first. Bytes pass as they are; stdout and stderr stay
apart and in order; the end of our stdin is the end of its.

One loop, one `poll`. Nothing in it blocks: a reader of ours that is slow stops the stream (and in the end
the process), not the signals. Our stdout may be shared with other processes, so it stays in blocking mode
and is given at most PIPE_BUF bytes when it says it is ready (pipe(7)).

Signals while it runs, the process being ours (`OWNED`): INT and TERM go to it, the second and third time as
KILL, and after that it is given up; HUP goes to it. When it only is looked at (`WATCHED`) all of them
detach. With a terminal Ctrl-C and Ctrl-Z are bytes, and the process's own terminal makes signals of them.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from enum import Enum
from threading import Thread

from cli import terminal, wakeup
from cli.screen import Screen
from sandboxd.client import Attachment, Frame, exit_code, frame, resize
from sandboxd.errors import SandboxError

READ_BYTES = 64 * 1024
UPLOAD_LIMIT_BYTES = 256 * 1024
SHOW_LIMIT_BYTES = 1024 * 1024
HANGUP_GRACE_S = 3.0
LIMIT_STEP_S = 10.0
LONGEST_WAIT_S = 3600.0  # poll(2) takes an int of milliseconds
BACKGROUND_LOOK_S = 1.0
GIVE_UP_AFTER = 2


class Role(Enum):
    OWNED = "owned"
    WATCHED = "watched"


class Lost(SandboxError):
    """The connection ended before the process did."""


class Detached(Exception):
    """The person let go; the process runs on."""


def follow(
    attachment: Attachment, send_signal: Callable[[str], None], *, tty: bool, role: Role, limit_s: float | None = None
) -> int | None:
    """Join the streams until the process ends. `tty` asks for our terminal in raw mode.

    `send_signal` takes INT, TERM, KILL or HUP to the process by a way of its own, past input that waits. After
    `limit_s` a process of ours gets TERM, as if a person sent it, and so on every LIMIT_STEP_S until it is given up.
    """
    with ExitStack() as stack:
        stack.enter_context(attachment)
        caught = wakeup.ENDING + ((signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT) if tty else ())
        signals = stack.enter_context(wakeup.descriptor(caught))
        raw = stack.enter_context(terminal.Raw(0)) if tty else None
        joined = _Joined(attachment, send_signal, signals, raw, role, limit_s)
        try:
            return joined.run()
        except Detached:
            return None
        finally:
            joined.tidy()


class _Joined:
    def __init__(
        self,
        attachment: Attachment,
        send_signal: Callable[[str], None],
        wakeup: int,
        raw: terminal.Raw | None,
        role: Role,
        limit_s: float | None,
    ) -> None:
        self._send_signal = send_signal
        self._sock = attachment.sock
        self._sock.setblocking(False)
        self._decoder = attachment.decoder
        self._first = attachment.first
        self._wakeup = wakeup
        self._raw = raw
        self._owned = role is Role.OWNED
        self._screen = Screen() if raw else None
        self._upload = bytearray()
        self._shown: deque[tuple[int, memoryview]] = deque()
        self._shown_bytes = 0
        self._closed: set[int] = set()
        self._input_open = True
        self._exit: int | None = None
        self._lost = False
        self._asked_to_end = 0
        self._kill_at: float | None = None
        self._limit_at = None if limit_s is None else time.monotonic() + limit_s
        self._size = (0, 0)
        self._input_is_terminal = os.isatty(0)
        self._limits = {fd: _write_limit(fd) for fd in (1, 2)}

    def run(self) -> int:
        """Until the process has ended and all it wrote is written."""
        if self._raw:
            self._tell_size()
        self._take(self._first)
        while self._shown or (self._exit is None and not self._lost):
            poll = select.poll()
            for fd, events in self._interest().items():
                poll.register(fd, events)
            for fd, events in poll.poll(self._patience_ms()):
                self._serve(fd, events)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_at = None
                self._deliver("KILL")
            if self._limit_at is not None and time.monotonic() >= self._limit_at:
                self._limit_at = time.monotonic() + LIMIT_STEP_S
                self._signalled(signal.SIGTERM)
        if self._exit is None:
            raise Lost("the connection to sandboxd ended before the command did")
        return self._exit

    def tidy(self) -> None:
        """Give the screen back as it was before the program."""
        if self._screen and (undo := self._screen.undo()):
            with suppress(OSError):
                os.write(1, undo)

    def _interest(self) -> dict[int, int]:
        wanted = {self._wakeup: select.POLLIN}
        if self._exit is None and not self._lost:
            events = select.POLLIN if self._shown_bytes < SHOW_LIMIT_BYTES else 0
            wanted[self._sock.fileno()] = events | (select.POLLOUT if self._upload else 0)
            if self._input_open and len(self._upload) < UPLOAD_LIMIT_BYTES and self._may_read():
                wanted[0] = select.POLLIN
        if self._shown:
            wanted[self._shown[0][0]] = select.POLLOUT
        return wanted

    def _may_read(self) -> bool:
        """A job in the background that reads its terminal is stopped."""
        return not self._input_is_terminal or terminal.in_foreground(0)

    def _patience_ms(self) -> int | None:
        times = [at for at in (self._kill_at, self._limit_at) if at is not None]
        waits = [min(max(0.0, at - time.monotonic()), LONGEST_WAIT_S) for at in times]
        if self._input_open and not self._may_read():
            waits.append(BACKGROUND_LOOK_S)
        return int(min(waits) * 1000) + 1 if waits else None

    def _serve(self, fd: int, events: int) -> None:
        if fd == self._wakeup:
            with suppress(BlockingIOError):
                for number in os.read(fd, 256):
                    self._signalled(signal.Signals(number))
        elif fd == self._sock.fileno():
            if events & select.POLLOUT:
                self._flush()
            if events & ~select.POLLOUT:
                self._receive()
        elif fd == 0:
            self._read_input()
        elif self._shown and fd == self._shown[0][0]:
            self._show_some()

    # From the process

    def _receive(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self._lost = not data
        self._take(self._decoder.feed(data))

    def _take(self, frames: tuple[Frame, ...] | list[Frame]) -> None:
        for one in frames:
            if one.kind == b"o":
                self._show(1, one.payload)
            elif one.kind == b"E":
                self._show(2, one.payload)
            elif one.kind == b"x":
                self._exit = exit_code(one.payload)
                return

    def _show(self, fd: int, data: bytes) -> None:
        if self._screen:
            self._screen.feed(data)
        if data and fd not in self._closed:
            self._shown.append((fd, memoryview(data)))
            self._shown_bytes += len(data)

    def _show_some(self) -> None:
        fd, data = self._shown[0]
        try:
            wrote = os.write(fd, data[: self._limits[fd]])
        except BlockingIOError:
            return
        except OSError:
            self._output_gone(fd)
            return
        self._shown_bytes -= wrote
        if wrote < len(data):
            self._shown[0] = (fd, data[wrote:])
        else:
            self._shown.popleft()

    def _output_gone(self, fd: int) -> None:
        """Nobody reads `fd` any more. A process of ours learns it as from a terminal that went away."""
        self._closed.add(fd)
        self._shown = deque(one for one in self._shown if one[0] != fd)
        self._shown_bytes = sum(len(data) for _, data in self._shown)
        if fd != 1:
            return
        if not self._owned:
            raise Detached
        if self._exit is None:
            self._deliver("HUP")
            self._kill_at = time.monotonic() + HANGUP_GRACE_S

    # To the process

    def _read_input(self) -> None:
        try:
            data = os.read(0, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._send(frame(b"i", data))
        else:
            self._input_open = False
            if self._owned:
                self._send(frame(b"e"))

    def _send(self, data: bytes) -> None:
        self._upload += data
        self._flush()

    def _flush(self) -> None:
        try:
            sent = self._sock.send(self._upload[:READ_BYTES]) if self._upload else 0
        except BlockingIOError:
            return
        except ConnectionError:
            # What the process still said, its exit among it, may be waiting to be read.
            self._upload.clear()
            self._input_open = False
            return
        del self._upload[:sent]

    def _tell_size(self) -> None:
        now = terminal.size()
        if now != self._size:
            self._size = now
            self._send(resize(*now))

    # Signals

    def _signalled(self, number: signal.Signals) -> None:
        if number == signal.SIGWINCH:
            self._tell_size()
        elif number == signal.SIGTSTP:
            self._pause()
        elif number == signal.SIGCONT:
            self._resume()
        elif not self._owned:
            raise Detached
        elif self._exit is not None:
            self._shown.clear()
        elif number == signal.SIGHUP:
            self._deliver("HUP")
        elif self._asked_to_end > GIVE_UP_AFTER:
            raise Lost("sandboxd does not end the command")
        else:
            first = "INT" if number == signal.SIGINT else "TERM"
            self._deliver("KILL" if self._asked_to_end else first)
            self._asked_to_end += 1

    def _deliver(self, name: str) -> None:
        """In a thread: a daemon that is slow to answer holds up neither the output nor the next signal."""

        def send() -> None:
            with suppress(SandboxError):
                self._send_signal(name)

        Thread(target=send, daemon=True).start()

    def _pause(self) -> None:
        if self._raw:
            self._raw.leave()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _resume(self) -> None:
        if self._raw:
            self._raw.enter()
        self._size = (0, 0)
        self._tell_size()


def _write_limit(fd: int) -> int:
    """Bytes that can be given to `fd` at once, when it is ready, without waiting."""
    try:
        return READ_BYTES if stat.S_ISREG(os.fstat(fd).st_mode) else select.PIPE_BUF
    except OSError:
        return READ_BYTES

