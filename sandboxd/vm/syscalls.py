"""Numbers of system calls, for those that a filter names.

Sources: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux 6.17, which arm64 uses
as it is. From 424 on a call has one number everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from sandboxd.vm.arch import Arch

NUMBERS: Mapping[str, tuple[int, int | None]] = {
    # on x86_64, on arm64; None: arm64 has no such call
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280), "chmod": (90, None),
    "chown": (92, None), "chroot": (161, 51), "clock_adjtime": (305, 266), "clock_settime": (227, 112),
    "clone": (56, 220), "clone3": (435, 435), "creat": (85, None), "delete_module": (176, 106),
    "fanotify_init": (300, 262), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "fchown": (93, 55), "fchownat": (260, 54), "fcntl": (72, 25), "file_setattr": (469, 469),
    "finit_module": (313, 273), "flock": (73, 32), "fremovexattr": (199, 16), "fsconfig": (431, 431),
    "fsetxattr": (190, 7), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433), "futimesat": (261, None),
    "init_module": (175, 105), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425), "ioctl": (16, 29), "ioperm": (173, None), "iopl": (172, None), "kcmp": (312, 272),
    "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219), "lchown": (94, None),
    "listmount": (458, 458), "lookup_dcookie": (212, 18), "lremovexattr": (198, 15), "lsetxattr": (189, 6),
    "memfd_secret": (447, 447), "mkdir": (83, None), "mkdirat": (258, 34), "mknod": (133, None), "mknodat": (259, 33),
    "modify_ldt": (154, None), "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429),
    "name_to_handle_at": (303, 264), "open": (2, None), "open_by_handle_at": (304, 265), "open_tree": (428, 428),
    "open_tree_attr": (467, 467), "openat": (257, 56), "openat2": (437, 437), "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438), "pidfd_open": (434, 434), "pivot_root": (155, 41), "process_madvise": (440, 440),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "reboot": (169, 142), "removexattr": (197, 14), "removexattrat": (466, 466),
    "request_key": (249, 218), "setdomainname": (171, 162), "setgroups": (116, 159), "sethostname": (170, 161),
    "setns": (308, 268), "setresgid": (119, 149), "setresuid": (117, 147), "settimeofday": (164, 170),
    "setxattr": (188, 5), "setxattrat": (463, 463), "socket": (41, 198), "socketpair": (53, 199),
    "statmount": (457, 457), "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116), "umount2": (166, 39),
    "unshare": (272, 97), "userfaultfd": (323, 282), "utime": (132, None), "utimensat": (280, 88),
    "utimes": (235, None), "vhangup": (153, 58),
}  # fmt: skip


def number(name: str, arch: Arch) -> int | None:
    """None for a call that the architecture does not have. Raises KeyError for one that is not in the table."""
    on_x86_64, on_arm64 = NUMBERS[name]
    return on_x86_64 if arch is Arch.X86_64 else on_arm64
