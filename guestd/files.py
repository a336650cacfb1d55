"""File operations, as the sandbox's user within the sandbox's root.

A path from the host is opened by openat2 beneath the root: no link and no race leads outside. Every operation
runs with the user's identity towards file systems, so it can do what the user can and no more. Only regular
files are read or replaced: devices, FIFOs and sockets are refused before they are opened. Errors leave as
`Refused` with a code of the protocol.

`read` and `write` keep the connection's order: answer, bytes, for a write a second answer.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat

from guestd import linux, protocol
from guestd.place import GID, UID
from guestd.process import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from typing import Final

    from guestd.place import Place

_BUFFER_BYTES: Final = 256 << 10
_WHOLE_BYTES: Final = 1 << 20       # files up to this size are read before the answer, so that it is exact

_CODES: Final = {
    errno.ENOENT: "not_found",
    errno.EISDIR: "is_dir",
    errno.ENOTDIR: "not_dir",
    errno.ENOTEMPTY: "not_empty",
    errno.EROFS: "read_only",
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EACCES: "bad_request",
    errno.EPERM: "bad_request",
    errno.ELOOP: "bad_request",
    errno.EXDEV: "bad_request",
    errno.ENAMETOOLONG: "bad_request",
    errno.EINVAL: "bad_request",
    errno.EBUSY: "bad_request",
    errno.EFBIG: "too_large",
}


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """OSError of the body as Refused."""
    try:
        yield
    except OSError as why:
        if isinstance(why, ConnectionError):
            raise
        code = _CODES.get(why.errno or 0, "internal")
        raise Refused(code, f"{path}: {why.strerror}") from None


@contextlib.contextmanager
def as_user(place: Place) -> Iterator[None]:
    """The calling thread acts as the user towards file systems."""
    if not place.switch_identity:
        yield
        return
    linux.set_file_identity(UID, GID)
    try:
        yield
    finally:
        linux.set_file_identity(0, 0)


def _open(root_fd: int, path: str, flags: int) -> int:
    return linux.open_in_root(root_fd, os.fsencode(path), flags)


def _split(path: str) -> tuple[str, str]:
    """(parent, name); the name is never empty."""
    parent, _, name = path.rstrip("/").rpartition("/")
    if name in ("", "."):
        raise Refused("bad_request", f"{path}: not a name that can be written or removed")
    return parent or "/", name


# ---- read

def _open_regular(root_fd: int, path: str) -> tuple[int, os.stat_result]:
    # O_PATH opens nothing yet: what is behind the name is known before a device or a FIFO could notice.
    handle = _open(root_fd, path, os.O_PATH)
    try:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise Refused("is_dir", f"{path}: is a directory")
        if not stat.S_ISREG(status.st_mode):
            raise Refused("bad_request", f"{path}: not a regular file")
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return os.open(f"/proc/self/fd/{handle}", flags), status
    finally:
        os.close(handle)


def _read_all(fd: int, size: int) -> bytes:
    """Up to `size` bytes; all there is where the file says 0, as everything in /proc does."""
    pieces = []
    left = size or protocol.MAX_FILE_BYTES + 1
    while left and (piece := os.read(fd, min(left, _BUFFER_BYTES))):
        left -= len(piece)
        pieces.append(piece)
    if not left and not size:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return b"".join(pieces)


def read(place: Place, path: str, sock: socket.socket) -> None:
    with translated(path):
        with as_user(place):
            fd, status = _open_regular(place.root_fd, path)
        try:
            if status.st_size > protocol.MAX_FILE_BYTES:
                raise Refused("too_large", f"{path}: longer than 64 MiB")
            content = None
            if status.st_size <= _WHOLE_BYTES:
                try:
                    content = _read_all(fd, status.st_size)
                except BlockingIOError:
                    raise Refused("bad_request", f"{path}: not a file that ends") from None
            if content is not None:
                sock.sendall(protocol.encode_ok(size=len(content)) + content)
                return
            sock.sendall(protocol.encode_ok(size=status.st_size))
            send(sock, fd, status.st_size)
        finally:
            os.close(fd)


def send(sock: socket.socket, fd: int, size: int) -> None:
    """Exactly `size` bytes; a file that became shorter meanwhile breaks the connection, which tells the
    host."""
    at = 0
    while at < size:
        sent = os.sendfile(sock.fileno(), fd, at, min(size - at, 1 << 20))
        if sent == 0:
            raise ConnectionAbortedError("the file became shorter")
        at += sent


# ---- write

def open_directory(root_fd: int, path: str) -> int:
    """An O_PATH descriptor of a directory, made with those above it where they are missing."""
    try:
        return _open(root_fd, path, os.O_PATH | os.O_DIRECTORY)
    except FileNotFoundError:
        pass
    at = _open(root_fd, "/", os.O_PATH | os.O_DIRECTORY)
    prefix = ""
    try:
        for name in path.split("/"):
            if not name:
                continue
            prefix += "/" + name
            try:
                below = _open(root_fd, prefix, os.O_PATH | os.O_DIRECTORY)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=at)
                below = _open(root_fd, prefix, os.O_PATH | os.O_DIRECTORY)
            os.close(at)
            at = below
    except BaseException:
        os.close(at)
        raise
    return at


class Replacement:
    """A file written beside the one it replaces, which takes its place when it is whole."""

    def __init__(
        self, root_fd: int, path: str, size: int, mode: int = 0o644, *, keep_mode: bool = True
    ) -> None:
        parent, self._name = _split(path)
        self._directory = open_directory(root_fd, parent)
        self._draft = f".{os.urandom(8).hex()}.partial"
        self.fd = -1
        try:
            # Special bits do not survive: what they promised was of the old content.
            present = self._present_mode(path)
            mode = (keep_mode and present) or mode
            self.fd = os.open(
                self._draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600,
                dir_fd=self._directory,
            )
            os.fchmod(self.fd, mode)
            if size:
                os.posix_fallocate(self.fd, 0, size)
        except BaseException:
            self.discard()
            raise

    def _present_mode(self, path: str) -> int:
        try:
            status = os.stat(self._name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return 0
        if stat.S_ISDIR(status.st_mode):
            raise Refused("is_dir", f"{path}: is a directory")
        if stat.S_ISLNK(status.st_mode):
            return 0
        if not stat.S_ISREG(status.st_mode):
            raise Refused("bad_request", f"{path}: not a regular file")
        return status.st_mode & 0o777

    def publish(self) -> None:
        os.rename(self._draft, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        os.close(self.fd)
        os.close(self._directory)

    def discard(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._draft, dir_fd=self._directory)
        os.close(self._directory)


def write(place: Place, path: str, size: int, sock: socket.socket, received: bytes) -> None:
    """`received` are bytes of the content that came right behind the request."""
    with translated(path), as_user(place):
        replacement = Replacement(place.root_fd, path, size)
        try:
            sock.sendall(protocol.encode_ok())
            _receive(sock, replacement.fd, size, received)
            replacement.publish()
        except BaseException:
            replacement.discard()
            raise
    sock.sendall(protocol.encode_ok())


def _receive(sock: socket.socket, fd: int, size: int, received: bytes) -> None:
    if len(received) > size:
        raise protocol.GuestProtocolFault("more bytes than were announced")
    write_all(fd, received)
    left = size - len(received)
    buffer = memoryview(bytearray(min(left, _BUFFER_BYTES)))
    while left:
        count = sock.recv_into(buffer[:left])
        if not count:
            raise ConnectionAbortedError("the content ended early")
        write_all(fd, buffer[:count])
        left -= count


def write_all(fd: int, data: bytes | memoryview) -> None:
    with memoryview(data) as left:
        at = 0
        while at < len(left):
            at += os.write(fd, left[at:])


def replace(root_fd: int, path: str, content: bytes, mode: int = 0o644, *, keep_mode: bool = True) -> None:
    """Writes a whole file, as whoever the thread acts as; `keep_mode`: as the file it replaces had it."""
    replacement = Replacement(root_fd, path, len(content), mode, keep_mode=keep_mode)
    try:
        write_all(replacement.fd, content)
        replacement.publish()
    except BaseException:
        replacement.discard()
        raise


def content(root_fd: int, path: str) -> bytes:
    """A whole file, as whoever the thread acts as; b"" where there is none."""
    try:
        fd, status = _open_regular(root_fd, path)
    except FileNotFoundError:
        return b""
    try:
        return _read_all(fd, status.st_size)
    finally:
        os.close(fd)


# ---- remove, list

def remove(place: Place, path: str) -> None:
    parent, name = _split(path)
    with translated(path), as_user(place):
        directory = _open(place.root_fd, parent, os.O_PATH | os.O_DIRECTORY)
        try:
            try:
                os.unlink(name, dir_fd=directory)
            except IsADirectoryError:
                os.rmdir(name, dir_fd=directory)
        finally:
            os.close(directory)


def _kind(entry: os.DirEntry[bytes]) -> str:
    if entry.is_symlink():
        return "symlink"
    if entry.is_dir(follow_symlinks=False):
        return "dir"
    return "file" if entry.is_file(follow_symlinks=False) else "other"


def listing(place: Place, path: str) -> bytes:
    """JSON {"entries": [{"name", "type", "size"}]}, sorted by name; size is 0 for all but files."""
    found: list[tuple[bytes, str, int]] = []
    total = 0
    with translated(path), as_user(place):
        fd = _open(place.root_fd, path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    name = os.fsencode(entry.name)
                    kind = _kind(entry)     # type: ignore[arg-type]
                    size = 0
                    if kind == "file":
                        with contextlib.suppress(FileNotFoundError):
                            size = entry.stat(follow_symlinks=False).st_size
                    total += len(name) + 40
                    if total > protocol.MAX_LISTING_BYTES:
                        raise Refused("too_large", f"{path}: too many entries")
                    found.append((name, kind, size))
        finally:
            os.close(fd)
    found.sort()
    entries_json = [{"name": os.fsdecode(name), "type": kind, "size": size} for name, kind, size in found]
    text = json.dumps({"entries": entries_json}, ensure_ascii=False, separators=(",", ":"))
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) > protocol.MAX_LISTING_BYTES:
        raise Refused("too_large", f"{path}: too many entries")
    return encoded
