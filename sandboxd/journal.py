"""The writer of an audit log: one line after another, each in the chain, in files that are rotated.

In: bodies of lines. Out: files as `generations` and `chain` describe them, 0600 in a directory 0700. A line is in the
file whole or not at all when `append` returns or raises. Whatever was done to the files meanwhile (removed, put in
another's place, changed, cut), the next line goes on from the last one that was written, so that a check finds the
place. Safe against a kill between any two calls; a power cut may take the last lines, which a check then says.
One writer at a time: the daemon's lock on its state directory, and the lock on the head for files elsewhere.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sandboxd import chain
from sandboxd.chain import Link
from sandboxd.errors import SetupError
from sandboxd.generations import WRITE, Generations

MAX_BYTES = 8 << 20
RESERVE_BYTES = 256 << 10
"""Room on the disk that is held behind the last line, for the ends of what has begun."""
TORN = "audit.torn"
BEGINNING = b'{"seq":'
_KEEP_SIZE = 1      # FALLOC_FL_KEEP_SIZE, linux/falloc.h

log = logging.getLogger("sandboxd")
_libc = ctypes.CDLL(None, use_errno=True)


class Journal:
    """`begin` before anything else; `last` is the last line's place."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.files = Generations(path)
        self.last: Link | None = None
        self._max_bytes = max_bytes
        self._fd = self._head = -1
        self._size = self._reserved = 0

    def begin(self) -> None:
        """Checks the place. Raises `SetupError` where it cannot be an audit log's; what may pass is not looked at."""
        path = self.files.path
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _require_private(path.parent)
            self._lock()
            fd = os.open(path, WRITE) if path.exists() or path.is_symlink() else -1
        except OSError as fault:
            raise SetupError(f"the audit log {path} cannot be used: {fault.strerror}") from None
        if fd < 0:
            return
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise SetupError(f"the audit log {path} is not a file")
            if info.st_uid != os.geteuid() or info.st_mode & 0o077:
                raise SetupError(f"the audit log {path} must belong to this user alone: chmod 600 {path}")
            text, newline, _ = os.pread(fd, chain.MAX_LINE_BYTES, 0).partition(b"\n")
        finally:
            os.close(fd)
        first = chain.read(text + newline)
        ours = text.startswith(BEGINNING[: len(text)]) and (not newline or (first is not None and first.file))
        if not ours:
            raise SetupError(f"{path} holds something else than an audit log: name another file with --audit-log")

    def append(self, body: Mapping[str, Any]) -> None:
        """Raises OSError: then nothing of it is there."""
        self._ready()
        assert self.last is not None
        line, link = chain.line(self.last, body)
        if self._size + len(line) > self._max_bytes:
            self._rotate()
            line, link = chain.line(self.last, body)
        self._write(line, link)

    def reserve(self) -> None:
        """Makes sure that there is room for some lines. Raises OSError where there is none."""
        self._ready()
        wanted = self._size + RESERVE_BYTES
        if self._reserved < self._size + RESERVE_BYTES // 2:
            if _libc.fallocate(
                self._fd, _KEEP_SIZE, ctypes.c_longlong(self._size), ctypes.c_longlong(RESERVE_BYTES)
            ):
                number = ctypes.get_errno()
                if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise OSError(number, os.strerror(number))
            self._reserved = wanted

    def close(self) -> None:
        for fd in (self._fd, self._head):
            if fd >= 0:
                os.close(fd)
        self._fd = self._head = -1

    def _write(self, line: bytes, link: Link) -> None:
        try:
            written = os.write(self._fd, line)
            if written < len(line):
                os.ftruncate(self._fd, self._size)  # half a line would spoil the next one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._reserved = 0
            raise
        self._size += len(line)
        self._went_on(link)

    def _went_on(self, link: Link) -> None:
        self.last = link
        with suppress(OSError):     # it may be behind
            if self._head < 0 or os.fstat(self._head).st_nlink == 0:
                self._open_head()
            os.pwrite(self._head, chain.head_text(link), 0)

    def _open_head(self) -> None:
        if self._head >= 0:
            os.close(self._head)
            self._head = -1
        self._head = os.open(self.files.head, (WRITE & ~os.O_APPEND) | os.O_CREAT, 0o600)
        with suppress(BlockingIOError):
            fcntl.flock(self._head, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _lock(self) -> None:
        """Two daemons that share a log would spoil each other's chain. `SetupError` where another has it."""
        try:
            self._open_head()
            fcntl.flock(self._head, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise SetupError(f"another sandboxd writes the audit log {self.files.path}") from None
        except OSError as fault:
            log.warning("the audit log's head cannot be opened: %s", fault.strerror)

    def _ready(self) -> None:
        """The file is open, it still has its name, and nobody else wrote to it."""
        if self._fd >= 0:
            info = os.fstat(self._fd)
            with suppress(FileNotFoundError):
                named = os.stat(self.files.path, follow_symlinks=False)
                if os.path.samestat(named, info) and info.st_size == self._size:
                    return
            log.error("the audit log %s was changed by somebody else", self.files.path.name)
            os.close(self._fd)
            self._fd = -1
        self._open()

    def _open(self) -> None:
        """Takes the log up where it ends, or begins it."""
        self.files.path.parent.mkdir(mode=0o700, exist_ok=True)
        self.files.settle()
        try:
            fd = os.open(self.files.path, WRITE)
        except FileNotFoundError:
            self._begin_file()
            fd = os.open(self.files.path, WRITE)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                raise OSError(errno.EPERM, "it is not a file of ours")
            self._size, torn = self._cut_torn(fd)
            if not self._size:
                self.files.path.unlink()
                self._begin_file()
                os.close(fd)
                fd = os.open(self.files.path, WRITE)
                self._size = os.fstat(fd).st_size
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._reserved = fd, 0
        self._go_on_from(self.files.tail(self.files.path)[0])
        if torn:
            assert self.last is not None
            self._write(*chain.line(self.last, {"time": now(), "type": TORN, "bytes": torn}))
            log.warning("the audit log ended in the middle of a line, which is kept as %s", self.files.torn.name)

    def _cut_torn(self, fd: int) -> tuple[int, int]:
        """(size of what is whole, bytes that were cut off)."""
        _, end, torn = self.files.tail(self.files.path)
        if torn:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            aside = os.open(self.files.torn, flags, 0o600)
            try:
                os.write(aside, torn)
            finally:
                os.close(aside)
            os.ftruncate(fd, end)
        return end, len(torn)

    def _go_on_from(self, found: Link | None) -> None:
        """The next line follows the last one that was written, whatever the file says."""
        known = self.last or self.files.kept_head()
        if found is not None and (known is None or found.seq > known.seq):
            self._went_on(found)
            return
        if known is None:
            raise OSError(errno.EINVAL, "its last line cannot be read")
        if known != found:
            log.error("the audit log does not end with the line that was written last, number %d", known.seq)
        self._went_on(known)

    def _begin_file(self) -> None:
        """A new file with its first line takes the name; those that are there move up."""
        before = self.last or self.files.kept_head()
        there = self.files.newest_link()
        if before is None or (there is not None and there.seq > before.seq):
            before = there or chain.START
        line, link = chain.line(before, {"time": now(), "type": chain.FILE, "file": before.file + 1})
        fd = os.open(self.files.new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self.files.new.unlink()
            raise
        finally:
            os.close(fd)
        self.files.put_new()
        self._went_on(link)

    def _rotate(self) -> None:
        """Where a new file cannot be made, the old one may grow to twice its size."""
        try:
            self._begin_file()
        except OSError as fault:
            if self._size > 2 * self._max_bytes:
                raise
            log.warning("the audit log cannot be rotated: %s", fault.strerror)
            self._ready()
            return
        os.ftruncate(self._fd, self._size)  # gives back what was reserved behind its end
        os.close(self._fd)
        self._fd = os.open(self.files.path, WRITE)
        self._size, self._reserved = os.fstat(self._fd).st_size, 0


def now() -> str:
    """The time as a line says it."""
    return chain.stamp(time.time())


def _require_private(directory: Path) -> None:
    """Nobody but its owner and root may put another file in the log's place. Raises `SetupError`."""
    info = os.stat(directory)
    if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
        raise SetupError(f"others could replace the audit log: {directory} is not writable by this user alone")
