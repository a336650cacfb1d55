"""The system calls no program in a jail may make, as a BPF program for `bwrap --seccomp`.

In: an architecture. Out: bytes, the same every time. It is a list of refusals, under QEMU's own `-sandbox` and not
instead of it: calls that lead out of the namespaces, that reach parts of the kernel a VMM has no use for, that hold up
whoever else opens a file it has, and sockets of every family but AF_UNIX. That last one matters: AF_VSOCK knows no
network namespace, so an empty one does not keep a jailed program from the host's own vsock listeners.

Calls are refused by name; one that an architecture does not have needs no refusal there. Numbers: `syscalls`,
linux/audit.h, linux/seccomp.h, linux/filter.h, linux/sched.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from sandboxd.vm import syscalls
from sandboxd.vm.arch import Arch

AUDIT_ARCH = {Arch.X86_64: 0xC000003E, Arch.ARM64: 0xC00000B7}
X32_BIT = 0x40000000
AF_UNIX = 1
CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
# and NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWNET
CLONE_NEW = CLONE_NEWNS | CLONE_NEWPID | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x40000000

F_SETLEASE = 1024
USERFAULTFD_IOC_NEW = 0xAA00  # linux/userfaultfd.h

EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97

REFUSED: tuple[str, ...] = (
    # out of the namespaces, or a view of another process
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_open", "pidfd_getfd",
    "unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "fsopen", "fsconfig",
    "fsmount", "fspick", "mount_setattr", "name_to_handle_at", "open_by_handle_at", "mknod", "mknodat", "statmount",
    "listmount", "open_tree_attr",
    # the machine's own settings
    "reboot", "swapon", "swapoff", "settimeofday", "clock_settime", "adjtimex", "clock_adjtime", "sethostname",
    "setdomainname", "acct", "quotactl", "quotactl_fd", "syslog", "vhangup", "iopl", "ioperm", "modify_ldt",
    "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load",
    # large parts of the kernel that a VMM has no use for
    "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "add_key",
    "request_key", "keyctl", "fanotify_init", "lookup_dcookie", "memfd_secret",
    # an image may be another machine's too, which is not started while somebody else has such a lock (`drives`)
    "flock",
)  # fmt: skip

# A program that shares a directory: it starts with a chroot, and makes what a guest asks it to.
SHARES: frozenset[str] = frozenset({"chroot", "mknod", "mknodat", "unshare", "flock"})
# Firecracker's jailer, which builds a jail of its own; without root's capabilities none of these does anything.
JAILS: frozenset[str] = frozenset({"mount", "umount2", "pivot_root", "chroot", "mknod", "mknodat", "unshare", "setns"})
ATTRIBUTES: tuple[str, ...] = (
    # what is beside a file's content and mode: capabilities, labels
    "setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr", "setxattrat", "removexattrat",
    "file_setattr",
)  # fmt: skip
NOT_SHARED: tuple[str, ...] = (*ATTRIBUTES, "openat2")
# An ordinary user's VMM is the owner of its images, and so could change what it may only read.
OWNERS: tuple[str, ...] = (
    *ATTRIBUTES,
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "utime", "utimes",
    "futimesat", "utimensat",
)  # fmt: skip
MODES: dict[str, int] = {
    # which argument is a mode
    "open": 2, "openat": 3, "creat": 1, "mkdir": 1, "mkdirat": 2, "mknod": 1, "mknodat": 2, "chmod": 1, "fchmod": 1,
    "fchmodat": 2, "fchmodat2": 2,
}  # fmt: skip
NODES = ("mknod", "mknodat")
AS_ONE_USER = ("setresuid", "setresgid", "setgroups")
"""Done without being done: all that a guest makes belongs to one person, whoever in the guest made it."""
S_IFMT, S_IFREG, S_IFIFO, S_IFSOCK, S_ISUID_OR_S_ISGID = 0o170000, 0o100000, 0o010000, 0o140000, 0o6000  # linux/stat.h

_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; the low half of an argument
_ALLOW, _KILL = 0x7FFF0000, 0x80000000


def program(arch: Arch) -> bytes:
    """struct sock_filter[], native byte order. Other architectures and x32 calls end the process."""
    return b"".join([*_ours_alone(arch), *_refusals(arch, (*REFUSED, *OWNERS)), *_tail(arch)])


def sharing_program(arch: Arch) -> bytes:
    """The same, for a program that shares a directory: no file it makes can give anybody the rights of the person it
    belongs to (set-user-id, capabilities), or be a device."""
    refused = (*(name for name in REFUSED if name not in SHARES), *NOT_SHARED)
    steps = [*_ours_alone(arch), *_refusals(arch, refused)]
    for name, argument in MODES.items():
        steps += _of_call(arch, name, _mode_checks(argument, node=name in NODES))
    # Its threads have working directories of their own (CLONE_FS), and no namespaces.
    namespaces = [_step(_LOAD, _FIRST_ARGUMENT), _step(_IF_ANY_BIT, CLONE_NEW, 0, 1), _refuse(EPERM)]
    steps += _of_call(arch, "unshare", namespaces)
    steps += _refusals(arch, AS_ONE_USER, 0)
    return b"".join([*steps, *_tail(arch)])


def jailing_program(arch: Arch) -> bytes:
    """For Firecracker's jailer and so for what it starts, which has a stricter filter of its own: namespaces of
    processes and mounts, and no other kind."""
    refused = (name for name in REFUSED if name not in JAILS)
    others = CLONE_NEW & ~(CLONE_NEWNS | CLONE_NEWPID)
    namespaces = [_step(_LOAD, _FIRST_ARGUMENT), _step(_IF_ANY_BIT, others, 0, 1), _refuse(EPERM)]
    # Where the jailer sees that the host has /dev/userfaultfd (`jailer` hides it) it makes one in its jail, and that
    # gives what the call of that name gives, and faults of the kernel's own besides. Memory comes from a file here.
    faults = [_step(_LOAD, _FIRST_ARGUMENT + 8), _step(_IF_EQUAL, USERFAULTFD_IOC_NEW, 0, 1), _refuse(EPERM)]
    steps = [*_ours_alone(arch), *_refusals(arch, refused), *_of_call(arch, "unshare", namespaces)]
    return b"".join([*steps, *_of_call(arch, "ioctl", faults), *_tail(arch, others)])


def _ours_alone(arch: Arch) -> list[bytes]:
    steps = [
        _step(_LOAD, _ARCH),
        _step(_IF_EQUAL, AUDIT_ARCH[arch], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
    ]
    if arch is Arch.X86_64:
        steps += [_step(_IF_AT_LEAST, X32_BIT, 0, 1), _step(_RETURN, _KILL)]
    return steps


def _refusals(arch: Arch, names: Iterable[str], error: int = EPERM) -> list[bytes]:
    steps = []
    for name in names:
        if (number := syscalls.number(name, arch)) is not None:
            steps += [_step(_IF_EQUAL, number, 0, 1), _refuse(error)]
    return steps


def _of_call(arch: Arch, name: str, steps: list[bytes]) -> list[bytes]:
    """`steps` for one call alone; the number is loaded again behind them."""
    if (number := syscalls.number(name, arch)) is None:
        return []
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


def _tail(arch: Arch, namespaces: int = CLONE_NEW) -> list[bytes]:
    new = [_step(_LOAD, _FIRST_ARGUMENT), _step(_IF_ANY_BIT, namespaces, 0, 1), _refuse(EPERM)]
    lease = [_step(_LOAD, _FIRST_ARGUMENT + 8), _step(_IF_EQUAL, F_SETLEASE, 0, 1), _refuse(EPERM)]
    other_family = [_step(_LOAD, _FIRST_ARGUMENT), _step(_IF_EQUAL, AF_UNIX, 1, 0), _refuse(EAFNOSUPPORT)]
    return [
        # glibc takes ENOSYS for an old kernel and falls back to clone, whose flags can be looked at.
        *_refusals(arch, ["clone3"], ENOSYS),
        *_of_call(arch, "clone", new),
        # Held on a file, it keeps whoever opens that waiting.
        *_of_call(arch, "fcntl", lease),
        # Both make a socket, and so load the code of a family into the kernel.
        *_of_call(arch, "socketpair", other_family),
        *_of_call(arch, "socket", other_family),
        _step(_RETURN, _ALLOW),
    ]  # fmt: skip


def _refuse(error: int) -> bytes:
    return _step(_RETURN, 0x00050000 | error)  # SECCOMP_RET_ERRNO


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
