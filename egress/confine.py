"""How `egress` and the resolver give up their power, in numbered stages.

In: a process that was started as root, has imported all it will ever need and has one thread. Out: the same
process with a uid of its own and nothing else, or `NotConfined`, after which it must end. Trusts its caller
and the kernel. Every stage is looked at again at the end, in what the kernel says about the process.

    egress                                       resolver
    1  one thread (what follows is per thread)   the same
    2  all descriptors but those named closed    the same
    3  an empty directory for a root             a mount namespace of its own, all of it read-only
    4  the bounding set emptied                  the same
    5  groups, gid, uid, all capability sets     the same
    6  no new privileges, not dumpable           the same
    7  system calls: an allow list               a wider one: NSS modules are whatever the host has
    8  looked at                                 the same

capabilities(7), credentials(7), mount_setattr(2), seccomp(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import prctl
from pyseccomp import ALLOW, EQ, ERRNO, KILL_PROCESS, MASKED_EQ, Arg, Attr, SyscallFilter, resolve_syscall

Rule = tuple[str, tuple[Arg, ...]]


class NotConfined(Exception):
    """A stage was not reached; the process holds power it must not have."""


def egress(uid: int, fds_kept: Iterable[int], root: str) -> None:
    """`root` is an empty directory of root's. Descriptors 0 to 2 stay open beside those named."""
    # glibc loads it when a thread is ended from outside, and aborts where there is no file to load.
    ctypes.CDLL("libgcc_s.so.1")
    with open("/proc/self/status", "rb", buffering=0) as status:
        _one_thread(status)
        _close_others({*fds_kept, status.fileno()})
        _enter_empty_root(root)
        _give_up_capabilities_and_ids(uid)
        _filter(_egress_rules())
        _verify(status, uid)


def resolver(uid: int, fds_kept: Iterable[int]) -> None:
    with open("/proc/self/status", "rb", buffering=0) as status:
        _one_thread(status)
        _close_others({*fds_kept, status.fileno()})
        _make_everything_read_only()
        _give_up_capabilities_and_ids(uid)
        _filter(_resolver_rules())
        _verify(status, uid)


# 1, 2: what could undo the rest


def _one_thread(status: BinaryIO) -> None:
    if os.geteuid() != 0:
        raise NotConfined("only root can give up what is given up here")
    if (threads := _fields(status)["Threads"]) != "1":
        raise NotConfined(f"{threads} threads are running, and a filter holds for one")


def _close_others(kept: set[int]) -> None:
    """A descriptor of a directory would lead out of any root, so none may stay."""
    edge = 0
    for fd in sorted(kept | {0, 1, 2}):
        if edge < fd:  # CPython's closerange(0, 0) closes all there are
            os.closerange(edge, fd)
        edge = fd + 1
        try:
            mode = os.fstat(fd).st_mode
        except OSError:
            if fd <= 2:
                continue
            raise NotConfined(f"descriptor {fd} is to be kept and is not open") from None
        if stat.S_ISDIR(mode):
            raise NotConfined(f"descriptor {fd} is a directory")
    os.closerange(edge, 2**31 - 1)  # beyond today's limit too: an earlier one may have been higher


# 3: what can be named


def _enter_empty_root(root: str) -> None:
    found = os.stat(root, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
        raise NotConfined(f"{root} must be a directory that root alone can write to")
    os.chdir(root)
    os.chroot(".")
    if os.listdir("/"):
        raise NotConfined(f"{root} is not empty")


_CLONE_NEWNS = 0x00020000
_MS_SLAVE = 1 << 19
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_RDONLY, _NOSUID, _NODEV = 1, 2, 4
_MOUNT_SETATTR = 442  # the same number on every architecture


def _make_everything_read_only() -> None:
    """As a slave of the host's mounts: what the host unmounts is not held back by us."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) < 0:
        raise NotConfined(f"unshare: {os.strerror(ctypes.get_errno())}")
    wanted = struct.pack("=4Q", _RDONLY | _NOSUID | _NODEV, 0, _MS_SLAVE, 0)  # struct mount_attr
    if libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, wanted, len(wanted)) < 0:
        raise NotConfined(f"mount_setattr: {os.strerror(ctypes.get_errno())}")
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        if "ro" not in line.split()[5].split(","):
            raise NotConfined(f"a mount stayed writable: {line}")


# 4, 5, 6: what the process may do


def _give_up_capabilities_and_ids(uid: int) -> None:
    if uid <= 0:
        raise NotConfined(f"{uid} is no uid to run as")
    prctl.capbset.limit()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # The change of uid left the inheritable set; the ambient set goes with it.
    for capabilities in (prctl.cap_effective, prctl.cap_permitted, prctl.cap_inheritable):
        capabilities.limit()
    prctl.set_no_new_privs(1)
    prctl.set_dumpable(0)
    if prctl.get_dumpable():
        raise NotConfined("the process can still be dumped and traced")


# 7: which system calls are left

# What Python with threads does in memory and time, whatever the program.
_PLAIN = """
    brk munmap mremap madvise futex get_robust_list set_robust_list rseq sched_yield sched_getaffinity getcpu
    clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time getrandom
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending sigaltstack restart_syscall exit exit_group
    getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getrlimit getrusage sysinfo uname
    read write readv writev lseek close dup dup2 dup3 fstat newfstatat pipe pipe2 eventfd2
    poll ppoll select pselect6 epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
    timerfd_create timerfd_settime timerfd_gettime
    connect bind getsockname getpeername getsockopt sendto recvfrom sendmsg recvmsg shutdown
"""
# No socketpair: half of one, of datagrams, can be connected to any abstract socket of the host.
_OF_EGRESS = "accept accept4 splice pwrite64 fsync fdatasync"
# An NSS module reads the host's files, and asks daemons of the host over their sockets.
_OF_RESOLVER = """
    open openat stat lstat statx access faccessat faccessat2 readlink readlinkat getdents64 getcwd
    statfs fstatfs pread64 fcntl ioctl flock sendmmsg recvmmsg setsockopt mprotect mmap socketpair
"""
# Calls that only somebody else's code would make.
_NEVER = """
    execve execveat ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp setns unshare chroot pivot_root mount
    umount2 open_tree move_mount fsopen fsmount mount_setattr open_by_handle_at mknod mknodat init_module finit_module
    delete_module kexec_load kexec_file_load bpf perf_event_open userfaultfd io_uring_setup io_uring_enter
    io_uring_register add_key request_key keyctl iopl ioperm modify_ldt reboot swapon swapoff
"""

_PROT_EXEC = 4
_CLONE_VM, _CLONE_THREAD = 0x100, 0x10000
# NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_CLONE_NEW = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_PR_SET_NAME, _PR_GET_NAME = 15, 16
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_STREAM, _DGRAM, _TYPE = 1, 2, 0xF
_TCP, _UDP = 6, 17
# F_GETFD F_SETFD F_GETFL F_SETFL, F_DUPFD_CLOEXEC F_SETPIPE_SZ F_GETPIPE_SZ
_FCNTL = (1, 2, 3, 4, 1030, 1031, 1032)
# TCGETS (isatty), TIOCOUTQ, FIONREAD, FIONBIO, FIOCLEX, SIOCOUTQNSD
_IOCTL = (0x5401, 0x5411, 0x541B, 0x5421, 0x5451, 0x894B)
# level: options. What the relay tunes its streams with; nothing that puts a program or another protocol on one.
_SETSOCKOPT = {
    1: (9, 13),  # SOL_SOCKET: KEEPALIVE, LINGER
    6: (1, 4, 5, 6),  # IPPROTO_TCP: NODELAY, KEEPIDLE, KEEPINTVL, KEEPCNT
}


def _common_rules() -> Iterator[Rule]:
    yield from ((name, ()) for name in _PLAIN.split())
    # Threads, and no processes. clone3 hides its flags behind a pointer; see `_filter`.
    thread = _CLONE_VM | _CLONE_THREAD
    yield "clone", (Arg(0, MASKED_EQ, thread | _CLONE_NEW, thread),)
    yield "tgkill", (Arg(0, EQ, os.getpid()),)
    yield "prlimit64", (Arg(0, EQ, 0), Arg(2, EQ, 0))  # reading its own
    yield from (("prctl", (Arg(0, EQ, option),)) for option in (_PR_SET_NAME, _PR_GET_NAME))


def _egress_rules() -> Iterator[Rule]:
    yield from _common_rules()
    yield from ((name, ()) for name in _OF_EGRESS.split())
    # Memory that was written is never run.
    yield "mmap", (Arg(2, MASKED_EQ, _PROT_EXEC, 0),)
    yield "mprotect", (Arg(2, MASKED_EQ, _PROT_EXEC, 0),)
    for family in (_INET, _INET6):
        for kind, protocol in ((_STREAM, 0), (_STREAM, _TCP), (_DGRAM, 0), (_DGRAM, _UDP)):
            yield "socket", (Arg(0, EQ, family), Arg(1, MASKED_EQ, _TYPE, kind), Arg(2, EQ, protocol))
    yield from (("fcntl", (Arg(1, EQ, command),)) for command in _FCNTL)
    yield from (("ioctl", (Arg(1, EQ, request),)) for request in _IOCTL)
    for level, options in _SETSOCKOPT.items():
        yield from (("setsockopt", (Arg(1, EQ, level), Arg(2, EQ, option))) for option in options)


def _resolver_rules() -> Iterator[Rule]:
    yield from _common_rules()
    yield from ((name, ()) for name in _OF_RESOLVER.split())
    yield from (("socket", (Arg(0, EQ, family),)) for family in (_UNIX, _INET, _INET6))
    yield "socket", (Arg(0, EQ, _NETLINK), Arg(2, EQ, 0))  # NETLINK_ROUTE: which addresses this host has


def _filter(rules: Iterator[Rule]) -> None:
    """Unlisted calls fail: a library that tries one goes another way. What only an intruder does ends the process."""
    if platform.machine() not in ("x86_64", "aarch64"):
        raise NotConfined(f"no system call filter for {platform.machine()}")
    filter_ = SyscallFilter(ERRNO(errno.EPERM))
    filter_.set_attr(Attr.ACT_BADARCH, KILL_PROCESS)  # 32-bit and x32 calls too
    filter_.set_attr(Attr.CTL_OPTIMIZE, 2)  # a tree, where the kernel's own cache does not answer
    for name, arguments in rules:
        _add(filter_, ALLOW, name, *arguments)
    for name in _NEVER.split():
        _add(filter_, KILL_PROCESS, name)
    # glibc takes it for an old kernel and calls clone, whose flags can be looked at.
    _add(filter_, ERRNO(errno.ENOSYS), "clone3")
    filter_.load()


def _add(filter_: SyscallFilter, action: int, name: str, *arguments: Arg) -> None:
    # Negative: not on this architecture, or younger than the library. The default holds for it.
    if (number := resolve_syscall(0, name)) >= 0:
        filter_.add_rule(action, number, *arguments)


# 8: what the kernel says


def _verify(status: BinaryIO, uid: int) -> None:
    """Through a descriptor that was opened before: the process cannot open anything by name any more."""
    seen = _fields(status)
    ids = " ".join([str(uid)] * 4)
    wanted = {"Uid": ids, "Gid": ids, "Groups": "", "Threads": "1", "NoNewPrivs": "1", "Seccomp": "2"}
    wanted |= {f"Cap{name}": "0" * 16 for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")}
    left = [f"{name} is {seen.get(name)!r}, not {value!r}" for name, value in wanted.items() if seen.get(name) != value]
    if left:
        raise NotConfined("; ".join(left))


def _fields(status: BinaryIO) -> dict[str, str]:
    status.seek(0)
    text = status.read(16384).decode(errors="replace")
    return {name: " ".join(value.split()) for name, _, value in (line.partition(":") for line in text.splitlines())}
