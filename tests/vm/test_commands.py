"""What QEMU, sandbox-vsock and their jails are told, as texts under golden/qemu (GOLDEN=write rewrites them)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxd.errors import SetupError
from sandboxd.vm import cgroups, commands, jail, virtiofs
from sandboxd.vm.commands import Accelerator, Descriptors, Tools
from sandboxd.vm.jail import Jail, Limits, Program
from sandboxd.vm.machine import Drive, MachineSpec, Rate, Share

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "qemu"

LIBC = ("libc.so.6", Path("/usr/lib/libc.so.6"))
LOADER = ("/lib64/ld-linux-x86-64.so.2", Path("/usr/lib/ld-linux.so.2"))
SPEC = MachineSpec(
    id="box-1",
    cpus=2,
    memory_mb=1024,
    kernel=Path("/assets/vmlinux"),
    initramfs=Path("/assets/initramfs"),
    drives=(Drive(Path("/a/runtime"), True), Drive(Path("/a/image"), True), Drive(Path("/s/scratch"), False)),
    directory=Path("/s"),
    uid=900001,
)
TOOLS = Tools(
    qemu=Program(Path("/usr/bin/qemu-system-x86_64"), (LOADER, LIBC, ("libz.so.1", Path("/usr/lib/libz.so.1")))),
    firmware=(Path("/usr/share/seabios/bios-256k.bin"), Path("/usr/share/qemu/pvh.bin")),
    modules=(Path("/usr/lib/qemu/accel-tcg-x86_64.so"),),
    vsock=Program(Path("/opt/sandbox-vsock"), (LOADER, LIBC)),
    jail=jail.Tools(
        prlimit=Path("/usr/bin/prlimit"),
        bwrap=Path("/usr/bin/bwrap"),
        setpriv=Program(Path("/usr/bin/setpriv"), (LOADER, LIBC, ("libcap-ng.so.0", Path("/usr/lib/cap-ng.so")))),
    ),
    accelerator=Accelerator.TCG,
    instance="i0",
    open_files=20000,
    groups=None,
)
NET_SPEC = replace(SPEC, tap_fd=16, mac="06:00:ac:10:00:02")
RATES = (Rate(bytes_per_s=20 << 20), Rate(ops_per_s=500), Rate(20 << 20, 500))
LIMITED_SPEC = replace(
    SPEC, drives=tuple(replace(disk, rate=rate) for disk, rate in zip(SPEC.drives, RATES, strict=True))
)
USER_SPEC = replace(SPEC, uid=None)
USER_TOOLS = replace(TOOLS, jail=replace(TOOLS.jail, setpriv=None))
KVM_TOOLS = replace(TOOLS, accelerator=Accelerator.KVM)
FDS = Descriptors(drives=(11, 12, 13), vhost=14, qmp=15)
SIZE = 10 << 30


def text(arguments: list[str]) -> str:
    """One option and its values a line, so that a difference is a line too."""
    lines: list[str] = []
    for argument in arguments:
        if argument.startswith("-") or not lines or not lines[-1].startswith("-"):
            lines.append(argument)
        else:
            lines[-1] += f" {argument}"
    return "\n".join(lines) + "\n"


def share_jail(*, read_only: bool) -> Jail:
    found = virtiofs.Tools(
        Program(Path("/usr/lib/qemu/virtiofsd"), (LOADER, LIBC)), Path("/usr/bin/unshare"), Path("/usr/bin/mount")
    )
    return virtiofs.prison(Share(9, read_only), 1024, jail.marker("i0", "box-1"), 4096, found, USER_TOOLS.jail)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("qemu-tcg", commands.argv(SPEC, Accelerator.TCG, FDS)),
        ("qemu-kvm", commands.argv(SPEC, Accelerator.KVM, FDS)),
        ("qemu-tcg-network", commands.argv(NET_SPEC, Accelerator.TCG, FDS)),
        ("qemu-tcg-limits", commands.argv(LIMITED_SPEC, Accelerator.TCG, FDS)),
        ("qemu-tcg-share", commands.argv(SPEC, Accelerator.TCG, replace(FDS, share=24))),
        ("virtiofsd", virtiofs.arguments(23)),
        ("jail-virtiofsd", jail.argv(share_jail(read_only=False), 31, 32, ["-f"])),
        ("jail-virtiofsd-read-only", jail.argv(share_jail(read_only=True), 31, 32, ["-f"])),
        ("sandbox-vsock", commands.device_argv(21, 22)),
        ("jail-qemu-root", jail.argv(commands.vmm_jail(SPEC, TOOLS, SIZE, None, ["enter"]), 31, 32, ["-qemu"])),
        ("jail-qemu-root-kvm", jail.argv(commands.vmm_jail(SPEC, KVM_TOOLS, SIZE, Path("/s/kvm")), 31, 32, ["-qemu"])),
        ("jail-qemu-user", jail.argv(commands.vmm_jail(USER_SPEC, USER_TOOLS, SIZE, None), 31, 32, ["-qemu"])),
        ("jail-vsock-root", jail.argv(commands.device_jail(SPEC, TOOLS), 31, 32, ["--vsock"])),
        ("jail-vsock-user", jail.argv(commands.device_jail(USER_SPEC, USER_TOOLS), 31, 32, ["--vsock"])),
    ],
)  # fmt: skip
def test_the_command_is_the_golden_one(name: str, arguments: list[str]) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text(arguments))
    assert text(arguments) == path.read_text()


def test_the_limits_of_all_its_programs_together() -> None:
    memory = (1024 + 512 + commands.CODE_BUFFER_MB) << 20
    assert commands.limits(SPEC, Accelerator.TCG) == cgroups.Limits(3, memory, 404)
    assert commands.limits(SPEC, Accelerator.KVM).memory_bytes == (1024 + 512) << 20


def test_nothing_of_the_sandbox_is_on_the_kernel_command_line() -> None:
    line = commands.kernel_command_line(Accelerator.KVM)
    assert SPEC.id not in line
    assert "mitigations" not in line, "mitigations are off only where no guest code runs on the processor"


def test_qemu_is_given_no_path_of_the_host() -> None:
    words = " ".join(commands.argv(SPEC, Accelerator.TCG, FDS))
    for path in (SPEC.kernel, SPEC.initramfs, SPEC.directory, *(drive.path for drive in SPEC.drives)):
        assert f"={path}" not in words
        assert f" {path} " not in words


def test_a_machine_without_a_tap_has_no_network_device() -> None:
    assert "net" not in " ".join(commands.argv(SPEC, Accelerator.TCG, FDS))
    assert "virtio-net" in " ".join(commands.argv(NET_SPEC, Accelerator.TCG, FDS))


def test_a_file_cannot_grow_beyond_the_larger_of_memory_and_drives() -> None:
    small, large = (commands.vmm_jail(SPEC, TOOLS, size, None).limits.file_size_bytes for size in (0, SIZE))
    assert (small, large) == (SPEC.memory_mb << 20, SIZE)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "a b", "-a", "a\n", "x" * 65, "é"])
def test_a_mark_is_made_of_plain_names_alone(name: str) -> None:
    with pytest.raises(ValueError, match="not names"):
        jail.marker("i0", name)
    with pytest.raises(ValueError, match="not names"):
        jail.marker(name, "box-1")
    with pytest.raises(ValueError, match="not an id"):
        replace(SPEC, id=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cpus": 0}, "cpus"),
        ({"cpus": 65}, "cpus"),
        ({"memory_mb": 1}, "memory_mb"),
        ({"uid": 0}, "root"),
        ({"uid": -1}, "root"),
        ({"tap_fd": 3}, "MAC"),
        ({"mac": "06:00:ac:10:00:02"}, "tap"),
        ({"tap_fd": 3, "mac": "01:00:5e:00:00:01"}, "of an interface"),
        ({"tap_fd": 3, "mac": "06:00:ac:10:00:02,x=y"}, "of an interface"),
        ({"tap_fd": 3, "mac": "06:00:AC:10:00:02"}, "of an interface"),
    ],
)
def test_a_spec_out_of_range_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [(0, None), (None, 0), (-1, 5)])
def test_a_drive_that_may_do_nothing_is_refused(rate: tuple[int | None, int | None]) -> None:
    with pytest.raises(ValueError, match="may do nothing"):
        Rate(*rate)


def test_a_uid_of_its_own_needs_setpriv() -> None:
    with pytest.raises(ValueError, match="setpriv"):
        jail.argv(commands.device_jail(SPEC, USER_TOOLS), 31, 32, [])


def test_a_program_brings_its_libraries_and_its_loader() -> None:
    found = jail.program(Path("/bin/sh"))
    names = [name for name, _ in found.libraries]
    assert "libc.so.6" in names
    assert any(name.startswith("/lib") and "ld-linux" in name for name in names)
    assert all(path.is_file() and path == path.resolve() for _, path in found.libraries)


def test_a_missing_program_is_named_with_its_package() -> None:
    with pytest.raises(SetupError, match="apt-get install -y some-package"):
        jail.find("no-such-program", "some-package")


def test_a_missing_vsock_program_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="make programs"):
        commands.find_tools(tmp_path / "sandbox-vsock", "i0")


def test_limits_are_in_the_command() -> None:
    limited = replace(commands.device_jail(SPEC, TOOLS), limits=Limits(1, 2, 3, 4))
    words = jail.argv(limited, 31, 32, [])
    assert {"--core=0", "--as=1", "--fsize=2", "--nofile=3", "--nproc=4"} <= set(words)


def test_a_host_that_allows_few_open_files_is_not_asked_for_more() -> None:
    tools = replace(TOOLS, open_files=100)
    assert commands.device_jail(SPEC, tools).limits.open_files == 100
    assert commands.vmm_jail(SPEC, tools, SIZE, None).limits.open_files == 100
