"""The files of an audit log: where they are, how they are opened as one, and the steps of a rotation.

In: the path of the newest file. Beside it are five older ones (`.1` the youngest), `.head` (the last line's hash),
`.torn` (what a crash left of a line) and, while a new file is begun, `.new`. Files are opened without following a link.
Readers need no lock: a set that changed while it was opened is opened again.

A rotation, killed anywhere, is finished by the next `settle`: the new file is whole, with its first line, before
anything is moved; then each file moves up one place, the oldest first, so that there is one free place and it only
moves down; then the new file gets the name. It is finished or undone by whether its first line follows from the last.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sandboxd import chain
from sandboxd.chain import Line, Link

GENERATIONS = 5
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
WRITE = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
OPENINGS = 100


@dataclass(frozen=True, slots=True)
class Opened:
    """The files of a log by name, the oldest first. `kept` is how many there must be once older ones were dropped: one
    less in the middle of a rotation."""

    files: list[tuple[str, BinaryIO]]
    kept: int


class Generations:
    """`path` is the newest file's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.new = path.with_name(f"{path.name}.new")
        self.head = path.with_name(f"{path.name}.head")
        self.torn = path.with_name(f"{path.name}.torn")

    def place(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    @contextmanager
    def opened(self) -> Iterator[Opened]:
        """Those that are there. Raises OSError for one that cannot be read."""
        for _ in range(OPENINGS):
            files = self._open_all()
            try:
                # Looked at before the names are compared: while they are the same, a free place means a rotation.
                kept = GENERATIONS if self.new.exists() else GENERATIONS + 1
                if self._same(files):
                    yield Opened([(path.name, file) for path, file in reversed(files)], kept)
                    return
            finally:
                for _, file in files:
                    file.close()
        raise OSError("the files of the audit log change all the time")

    def kept_head(self) -> Link | None:
        with suppress(OSError):
            fd = os.open(self.head, READ)
            try:
                return chain.read_head(os.read(fd, 256))
            finally:
                os.close(fd)
        return None

    def settle(self) -> None:
        """Finishes a rotation that was begun, or undoes it."""
        first = self._first_line(self.new)
        if first is None:
            self.new.unlink(missing_ok=True)
            return
        newest = next((place for number in range(GENERATIONS + 1) if (place := self.place(number)).exists()), None)
        last = chain.START if newest is None else self.tail(newest)[0]
        if newest is not None and (last is None or last.hash != first.prev):
            self.new.unlink()
            return
        self.put_new()

    def put_new(self) -> None:
        """Moves every file up a place, and the new one to the first. The oldest of a full set is gone then."""
        free = next((number for number in range(GENERATIONS + 1) if not self.place(number).exists()), GENERATIONS)
        for number in range(free, 0, -1):
            os.rename(self.place(number - 1), self.place(number))
        os.rename(self.new, self.path)

    def newest_link(self) -> Link | None:
        """Of the last line there is, in whichever file."""
        for number in range(GENERATIONS + 1):
            with suppress(OSError):
                link, _, _ = self.tail(self.place(number))
                if link is not None:
                    return link
        return None

    def tail(self, path: Path) -> tuple[Link | None, int, bytes]:
        """(last whole line's place, where it ends, what stands after it). None where no line can be read."""
        fd = os.open(path, READ)
        try:
            size = os.fstat(fd).st_size
            start = max(0, size - 2 * chain.MAX_LINE_BYTES)
            data = os.pread(fd, size - start, start)
        finally:
            os.close(fd)
        whole, newline, torn = data.rpartition(b"\n")
        end = size - len(torn)
        first = self._first_line(path)
        found = chain.read(whole.rpartition(b"\n")[2] + newline)
        link = None if found is None or first is None else Link(found.seq, first.file, found.hash)
        return link, end, torn

    def _first_line(self, path: Path) -> Line | None:
        """None where there is no such file, or it does not begin as ours do."""
        try:
            fd = os.open(path, READ)
        except FileNotFoundError:
            return None
        try:
            text, newline, _ = os.read(fd, chain.MAX_LINE_BYTES).partition(b"\n")
        finally:
            os.close(fd)
        found = chain.read(text + newline)
        return found if found is not None and found.file else None

    def _open_all(self) -> list[tuple[Path, BinaryIO]]:
        files: list[tuple[Path, BinaryIO]] = []
        try:
            # The newest first: what moves on meanwhile is met twice rather than missed.
            for number in range(GENERATIONS + 1):
                path = self.place(number)
                with suppress(FileNotFoundError):
                    files.append((path, open_file(path)))
        except BaseException:
            for _, file in files:
                file.close()
            raise
        return files

    def _same(self, files: list[tuple[Path, BinaryIO]]) -> bool:
        """Whether each file still has the name it was opened by, and no other one came."""
        there = [path for number in range(GENERATIONS + 1) if (path := self.place(number)).exists()]
        if there != [path for path, _ in files]:
            return False
        try:
            return all(os.path.samestat(os.stat(path), os.fstat(file.fileno())) for path, file in files)
        except FileNotFoundError:
            return False


def open_file(path: Path) -> BinaryIO:
    """For reading. OSError for a link, and for anything but a file."""
    fd = os.open(path, READ)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path.name} is not a file")
        return os.fdopen(fd, "rb", buffering=1 << 20)
    except BaseException:
        with suppress(OSError):
            os.close(fd)
        raise


def lines(file: BinaryIO) -> Iterator[bytes]:
    """With their newlines, none longer than a line of ours may be."""
    while raw := file.readline(chain.MAX_LINE_BYTES):
        yield raw
