"""The system calls no program in a jail may make, as a BPF program for `bwrap --seccomp`.

Out: bytes, the same every time. It is a list of refusals, under QEMU's own `-sandbox` and not instead of it:
calls that lead out of the namespaces, that reach parts of the kernel a VMM has no use for, that hold up whoever
else opens a file it has, and sockets of every family but AF_UNIX. That last one matters: AF_VSOCK knows no network
namespace, so an empty one does not keep a jailed program from the host's own vsock listeners.

Numbers: arch/x86/entry/syscalls/syscall_64.tbl, linux/audit.h, linux/seccomp.h, linux/filter.h,
linux/sched.h.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

AUDIT_ARCH_X86_64 = 0xC000003E
X32_BIT = 0x40000000
AF_UNIX = 1
SYS_SOCKET, SYS_SOCKETPAIR = 41, 53
SYS_IOCTL = 16
SYS_CLONE = 56
SYS_FCNTL = 72
SYS_CLONE3 = 435
CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
# and NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWNET
CLONE_NEW = CLONE_NEWNS | CLONE_NEWPID | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x40000000

F_SETLEASE = 1024
USERFAULTFD_IOC_NEW = 0xAA00  # linux/userfaultfd.h

EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97

REFUSED: dict[str, int] = {
    # out of the namespaces, or a view of another process
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "process_madvise": 440, "kcmp": 312,
    "pidfd_open": 434, "pidfd_getfd": 438, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166,
    "pivot_root": 155, "chroot": 161, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431,
    "fsmount": 432, "fspick": 433, "mount_setattr": 442, "name_to_handle_at": 303, "open_by_handle_at": 304,
    "mknod": 133, "mknodat": 259, "statmount": 457, "listmount": 458, "open_tree_attr": 467,
    # the machine's own settings
    "reboot": 169, "swapon": 167, "swapoff": 168, "settimeofday": 164, "clock_settime": 227, "adjtimex": 159,
    "clock_adjtime": 305, "sethostname": 170, "setdomainname": 171, "acct": 163, "quotactl": 179,
    "quotactl_fd": 443, "syslog": 103, "vhangup": 153, "iopl": 172, "ioperm": 173, "modify_ldt": 154,
    "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
    # large parts of the kernel that a VMM has no use for
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "add_key": 248, "request_key": 249, "keyctl": 250, "fanotify_init": 300,
    "lookup_dcookie": 212, "memfd_secret": 447,
    # an image may be another machine's too, which is not started while somebody else has such a lock (`drives`)
    "flock": 73,
}  # fmt: skip

# A program that shares a directory: it starts with a chroot, and makes what a guest asks it to.
SHARES: frozenset[str] = frozenset({"chroot", "mknod", "mknodat", "unshare", "flock"})
# Firecracker's jailer, which builds a jail of its own; without root's capabilities none of these does anything.
JAILS: frozenset[str] = frozenset({"mount", "umount2", "pivot_root", "chroot", "mknod", "mknodat", "unshare", "setns"})
ATTRIBUTES: dict[str, int] = {
    # what is beside a file's content and mode: capabilities, labels
    "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
    "setxattrat": 463, "removexattrat": 466, "file_setattr": 469,
}  # fmt: skip
NOT_SHARED: dict[str, int] = ATTRIBUTES | {"openat2": 437}
# An ordinary user's VMM is the owner of its images, and so could change what it may only read.
OWNERS: dict[str, int] = ATTRIBUTES | {
    "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452, "chown": 92, "fchown": 93, "lchown": 94,
    "fchownat": 260, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280,
}  # fmt: skip
MODES: dict[str, tuple[int, int]] = {
    # (number, which argument is a mode)
    "open": (2, 2), "openat": (257, 3), "creat": (85, 1), "mkdir": (83, 1), "mkdirat": (258, 2),
    "mknod": (133, 1), "mknodat": (259, 2), "chmod": (90, 1), "fchmod": (91, 1), "fchmodat": (268, 2),
    "fchmodat2": (452, 2),
}  # fmt: skip
NODES = ("mknod", "mknodat")
AS_ONE_USER: dict[str, int] = {"setresuid": 117, "setresgid": 119, "setgroups": 116}
"""Done without being done: all that a guest makes belongs to one person, whoever in the guest made it."""
S_IFMT, S_IFREG, S_IFIFO, S_IFSOCK, S_ISUID_OR_S_ISGID = 0o170000, 0o100000, 0o010000, 0o140000, 0o6000  # linux/stat.h

_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; the low half of an argument
_ALLOW, _KILL = 0x7FFF0000, 0x80000000


def program() -> bytes:
    """struct sock_filter[], native byte order. Unknown architectures and x32 calls end the process."""
    return b"".join([*_ours_alone(), *_refusals(REFUSED | OWNERS), *_tail()])


def sharing_program() -> bytes:
    """The same, for a program that shares a directory: no file it makes can give anybody the rights of the person it
    belongs to (set-user-id, capabilities), or be a device."""
    refused = {name: number for name, number in REFUSED.items() if name not in SHARES} | NOT_SHARED
    steps = [*_ours_alone(), *_refusals(refused)]
    for name, (number, argument) in MODES.items():
        steps += _of_call(number, _mode_checks(argument, node=name in NODES))
    # Its threads have working directories of their own (CLONE_FS), and no namespaces.
    namespaces = [_step(_LOAD, _FIRST_ARGUMENT), _step(_IF_ANY_BIT, CLONE_NEW, 0, 1), _refuse(EPERM)]
    steps += _of_call(REFUSED["unshare"], namespaces)
    for number in AS_ONE_USER.values():
        steps += [_step(_IF_EQUAL, number, 0, 1), _refuse(0)]
    return b"".join([*steps, *_tail()])


def jailing_program() -> bytes:
    """For Firecracker's jailer and so for what it starts, which has a stricter filter of its own: namespaces of
    processes and mounts, and no other kind."""
    refused = {name: number for name, number in REFUSED.items() if name not in JAILS}
    others = CLONE_NEW & ~(CLONE_NEWNS | CLONE_NEWPID)
    namespaces = [_step(_LOAD, _FIRST_ARGUMENT), _step(_IF_ANY_BIT, others, 0, 1), _refuse(EPERM)]
    # Where the jailer sees that the host has /dev/userfaultfd (`jailer` hides it) it makes one in its jail, and that
    # gives what the call of that name gives, and faults of the kernel's own besides. Memory comes from a file here.
    faults = [_step(_LOAD, _FIRST_ARGUMENT + 8), _step(_IF_EQUAL, USERFAULTFD_IOC_NEW, 0, 1), _refuse(EPERM)]
    steps = [*_ours_alone(), *_refusals(refused), *_of_call(REFUSED["unshare"], namespaces)]
    return b"".join([*steps, *_of_call(SYS_IOCTL, faults), *_tail(others)])


def _ours_alone() -> list[bytes]:
    return [
        _step(_LOAD, _ARCH),
        _step(_IF_EQUAL, AUDIT_ARCH_X86_64, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_IF_AT_LEAST, X32_BIT, 0, 1),
        _step(_RETURN, _KILL),
    ]


def _refusals(calls: Mapping[str, int]) -> list[bytes]:
    steps = []
    for number in calls.values():
        steps += [_step(_IF_EQUAL, number, 0, 1), _refuse(EPERM)]
    return steps


def _of_call(number: int, steps: list[bytes]) -> list[bytes]:
    """`steps` for one call alone; the number is loaded again behind them."""
    return [_step(_IF_EQUAL, number, 0, len(steps) + 1), *steps, _step(_LOAD, _NUMBER)]


def _mode_checks(argument: int, *, node: bool) -> list[bytes]:
    steps = [
        _step(_LOAD, _FIRST_ARGUMENT + 8 * argument),
        _step(_IF_ANY_BIT, S_ISUID_OR_S_ISGID, 0, 1),
        _refuse(EPERM),
    ]
    if node:
        kinds = (0, S_IFREG, S_IFIFO, S_IFSOCK)
        steps += [_step(_AND, S_IFMT)]
        steps += [_step(_IF_EQUAL, kind, len(kinds) - at, 0) for at, kind in enumerate(kinds)]
        steps += [_refuse(EPERM)]
    return steps


def _tail(namespaces: int = CLONE_NEW) -> list[bytes]:
    return [
        # glibc takes ENOSYS for an old kernel and falls back to clone, whose flags can be looked at.
        _step(_IF_EQUAL, SYS_CLONE3, 0, 1), _refuse(ENOSYS),
        *_of_call(SYS_CLONE, [_step(_LOAD, _FIRST_ARGUMENT), _step(_IF_ANY_BIT, namespaces, 0, 1), _refuse(EPERM)]),
        # Held on a file, it keeps whoever opens that waiting.
        *_of_call(SYS_FCNTL, [_step(_LOAD, _FIRST_ARGUMENT + 8), _step(_IF_EQUAL, F_SETLEASE, 0, 1), _refuse(EPERM)]),
        # Both make a socket, and so load the code of a family into the kernel.
        _step(_IF_EQUAL, SYS_SOCKETPAIR, 1, 0),
        _step(_IF_EQUAL, SYS_SOCKET, 0, 2),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_IF_EQUAL, AF_UNIX, 0, 1),
        _step(_RETURN, _ALLOW),
        _refuse(EAFNOSUPPORT),
    ]  # fmt: skip


def _refuse(error: int) -> bytes:
    return _step(_RETURN, 0x00050000 | error)  # SECCOMP_RET_ERRNO


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
