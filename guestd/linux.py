"""System calls that Python 3.11 does not offer, through ctypes: nothing here decides anything.

Every function raises OSError with the errno of the call. Numbers are those of x86-64 and their kernel
headers.
"""

from __future__ import annotations

import ctypes
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

# linux/openat2.h, asm/unistd_64.h
_SYS_OPENAT2: Final = 437
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_IN_ROOT: Final = 0x10
_OPEN_HOW: Final = struct.Struct("QQQ")

# linux/mount.h
MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_REMOUNT: Final = 32
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2

# linux/fs.h
FIFREEZE: Final = 0xC0045877

# linux/sched.h
CLONE_NEWNS: Final = 0x00020000

# asm/unistd_64.h
_SYS_PIVOT_ROOT: Final = 155

_libc: Final = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, path: bytes | None = None) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), path)
    return result


def open_in_root(root_fd: int, path: bytes, flags: int, mode: int = 0) -> int:
    """openat2 with RESOLVE_IN_ROOT: absolute links and `..` stop at `root_fd`, /proc's magic links are
    refused."""
    how = _OPEN_HOW.pack(flags | os.O_CLOEXEC, mode, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    size = ctypes.c_size_t(len(how))
    name = ctypes.c_char_p(path)
    return _checked(_libc.syscall(ctypes.c_long(_SYS_OPENAT2), root_fd, name, how, size), path)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _checked(
        _libc.mount(
            os.fsencode(source), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags),
            data.encode() or None,
        ),
        os.fsencode(target),
    )


def unmount(target: str, flags: int) -> None:
    _checked(_libc.umount2(os.fsencode(target), flags), os.fsencode(target))


def unshare(flags: int) -> None:
    """For the calling thread only."""
    _checked(_libc.unshare(flags))


def enter(namespace_fd: int, flags: int) -> None:
    """setns, for the calling thread only; of a mount namespace, root and working directory become its
    root."""
    _checked(_libc.setns(namespace_fd, flags))


def pivot_root(new_root: str, old_root: str) -> None:
    new, old = os.fsencode(new_root), os.fsencode(old_root)
    _checked(_libc.syscall(ctypes.c_long(_SYS_PIVOT_ROOT), ctypes.c_char_p(new), ctypes.c_char_p(old)), new)


def set_file_identity(uid: int, gid: int) -> None:
    """The calling thread's identity towards file systems; its capabilities over files go and come with uid 0.

    The group first: with the user goes the right to set it. The calls report no error, so the result is
    read back.
"""
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)
    nobody = ctypes.c_uint(-1)
    if _libc.setfsgid(nobody) != gid or _libc.setfsuid(nobody) != uid:
        raise PermissionError("the identity towards file systems did not change")
