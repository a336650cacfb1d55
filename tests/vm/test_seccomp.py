"""The filters of system calls, for both architectures: their numbers beside the kernel's own headers, and what they say
to each call, by running them as the kernel would (networking/filter.rst)."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxd.vm import seccomp, syscalls
from sandboxd.vm.arch import Arch

HEADERS = {
    Arch.X86_64: Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    Arch.ARM64: Path("/usr/include/asm-generic/unistd.h"),
}
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS, EAFNOSUPPORT = ERROR | 1, ERROR | 38, ERROR | 97
BEYOND = 600  # no call has such a number yet
THREAD = 0x00010F00  # CLONE_VM and others, of a thread
NEWUSER, NEWNET, NEWPID, NEWNS = 0x10000000, 0x40000000, 0x20000000, 0x00020000
FILE, DEVICE, PIPE, SETUID = 0o100644, 0o060644, 0o010644, 0o104755
PROGRAMS = [seccomp.program, seccomp.sharing_program, seccomp.jailing_program]


def verdict(program: bytes, arch: Arch, number: int, *arguments: int) -> int:
    """What the kernel does with a call."""
    given = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=iIQ6Q", number, seccomp.AUDIT_ARCH[arch], 0, *given)  # struct seccomp_data
    steps = list(struct.iter_unpack("=HBBI", program))
    at = word = 0
    while True:
        code, if_true, if_false, operand = steps[at]
        at += 1
        match code:
            case 0x20:
                (word,) = struct.unpack_from("=I", data, operand)
            case 0x54:
                word &= operand
            case 0x15:
                at += if_true if word == operand else if_false
            case 0x35:
                at += if_true if word >= operand else if_false
            case 0x45:
                at += if_true if word & operand else if_false
            case 0x06:
                return int(operand)
            case _:
                raise AssertionError(f"no such step: {code:#x}")


def call(arch: Arch, name: str) -> int:
    number = syscalls.number(name, arch)
    if number is None:
        pytest.skip(f"{arch.value} has no {name}")
    return number


@pytest.mark.parametrize("arch", Arch)
def test_the_numbers_are_those_of_the_kernels_header(arch: Arch) -> None:
    if not HEADERS[arch].is_file():
        pytest.skip(f"{HEADERS[arch]} is not installed: apt-get install linux-libc-dev")
    rows = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[arch].read_text())
    found = {name: int(number) for name, number in rows}
    assert len(found) > 250
    for name in syscalls.NUMBERS:
        number = syscalls.number(name, arch)
        # One that is younger than the header has its number everywhere.
        if number is None or number <= max(found.values()):
            assert found.get(name) == number, name


def test_a_young_call_has_one_number_everywhere() -> None:
    young = {name: numbers for name, numbers in syscalls.NUMBERS.items() if max(filter(None, numbers)) >= 424}
    assert all(on_x86_64 == on_arm64 for on_x86_64, on_arm64 in young.values())


@pytest.mark.parametrize("arch", Arch)
def test_what_is_refused_and_nothing_else(arch: Arch) -> None:
    program = seccomp.program(arch)
    refused = {syscalls.number(name, arch): EPERM for name in (*seccomp.REFUSED, *seccomp.OWNERS)} | {
        call(arch, "clone3"): ENOSYS, call(arch, "socket"): EAFNOSUPPORT, call(arch, "socketpair"): EAFNOSUPPORT,
    }  # fmt: skip
    said = {number: verdict(program, arch, number) for number in range(BEYOND)}
    assert {number: one for number, one in said.items() if one != ALLOW} == {
        number: error for number, error in refused.items() if number is not None
    }


# Named once more here: the list that the filters are made of could lose one, and nothing else would tell.
NEVER = (
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_open", "pidfd_getfd",
    "name_to_handle_at", "open_by_handle_at", "open_tree", "move_mount", "fsopen", "fsmount", "mount_setattr",
    "reboot", "swapon", "settimeofday", "clock_settime", "adjtimex", "clock_adjtime", "sethostname", "syslog", "iopl",
    "ioperm", "modify_ldt", "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load",
    "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "add_key",
    "request_key", "keyctl", "fanotify_init", "memfd_secret",
)  # fmt: skip


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("make", PROGRAMS)
def test_what_no_jail_may_do(make: Callable[[Arch], bytes], arch: Arch) -> None:
    program = make(arch)
    numbers = {name: number for name in NEVER if (number := syscalls.number(name, arch)) is not None}
    assert len(numbers) > 35
    assert [name for name, number in numbers.items() if verdict(program, arch, number) != EPERM] == []


@pytest.mark.parametrize("make", PROGRAMS)
def test_calls_of_another_architecture_end_the_process(make: Callable[[Arch], bytes]) -> None:
    for arch, other in ((Arch.X86_64, Arch.ARM64), (Arch.ARM64, Arch.X86_64)):
        assert verdict(make(arch), other, 0) == KILL
    assert verdict(make(Arch.X86_64), Arch.X86_64, seccomp.X32_BIT) == KILL


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("clone", (THREAD,), (ALLOW, ALLOW, ALLOW)),
        ("clone", (THREAD | NEWUSER,), (EPERM, EPERM, EPERM)),
        ("clone", (NEWNET,), (EPERM, EPERM, EPERM)),
        ("clone", (NEWPID | NEWNS,), (EPERM, EPERM, ALLOW)),
        ("clone3", (), (ENOSYS, ENOSYS, ENOSYS)),
        ("unshare", (0x200,), (EPERM, ALLOW, ALLOW)),  # CLONE_FS
        ("unshare", (NEWNS,), (EPERM, EPERM, ALLOW)),
        ("unshare", (NEWUSER,), (EPERM, EPERM, EPERM)),
        ("socket", (1,), (ALLOW, ALLOW, ALLOW)),
        ("socket", (40,), (EAFNOSUPPORT, EAFNOSUPPORT, EAFNOSUPPORT)),  # AF_VSOCK
        ("socketpair", (1,), (ALLOW, ALLOW, ALLOW)),
        ("socketpair", (2,), (EAFNOSUPPORT, EAFNOSUPPORT, EAFNOSUPPORT)),
        ("fcntl", (3, 1024), (EPERM, EPERM, EPERM)),  # F_SETLEASE
        ("fcntl", (3, 1), (ALLOW, ALLOW, ALLOW)),
        ("ioctl", (3, 0xAA00), (ALLOW, ALLOW, EPERM)),  # USERFAULTFD_IOC_NEW
        ("ioctl", (3, 0xAE80), (ALLOW, ALLOW, ALLOW)),  # KVM_RUN
        ("openat", (3, 0, 0o102, FILE), (ALLOW, ALLOW, ALLOW)),
        ("openat", (3, 0, 0o102, SETUID), (ALLOW, EPERM, ALLOW)),
        ("open", (0, 0o102, SETUID), (ALLOW, EPERM, ALLOW)),
        ("openat2", (), (ALLOW, EPERM, ALLOW)),
        ("mkdirat", (3, 0, 0o2755), (ALLOW, EPERM, ALLOW)),
        ("mknodat", (3, 0, PIPE), (EPERM, ALLOW, ALLOW)),
        ("mknodat", (3, 0, DEVICE), (EPERM, EPERM, ALLOW)),
        ("fchmod", (3, SETUID), (EPERM, EPERM, ALLOW)),
        ("fchmodat", (3, 0, FILE), (EPERM, ALLOW, ALLOW)),
        ("fchownat", (), (EPERM, ALLOW, ALLOW)),
        ("setresuid", (), (ALLOW, ERROR, ALLOW)),
        ("pivot_root", (), (EPERM, EPERM, ALLOW)),
        ("setns", (), (EPERM, EPERM, ALLOW)),
        ("bpf", (), (EPERM, EPERM, EPERM)),
    ],
)
def test_a_call_by_its_arguments(arch: Arch, name: str, arguments: tuple[int, ...], said: tuple[int, ...]) -> None:
    """`said` by a VMM's filter, that of what shares a directory, and that of the jailer."""
    number = call(arch, name)
    assert tuple(verdict(make(arch), arch, number, *arguments) for make in PROGRAMS) == said
