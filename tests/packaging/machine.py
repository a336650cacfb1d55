"""A Debian machine with systemd, made of packages, to try an installation in.

`image` builds its root file system once and keeps it beside the daemon's own assets, by content; `Machine` boots it
under QEMU with a second read-only drive at /mnt and reads what its `check` unit writes to the second serial port. The
root is writable, in memory. The machine has no network.
"""

from __future__ import annotations

import json
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sandboxd.assets import cpio, drive, kernel, prepare, rootspace, store
from sandboxd.assets.apt import Package
from sandboxd.assets.store import Bench, Recipe

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "dbus-user-session", "libpam-systemd", "kmod", "python3", "bubblewrap",
    "e2fsprogs", "git", "iproute2", "libseccomp2", "nftables", "procps", "qemu-system-x86", "util-linux",
)  # fmt: skip
MEMORY_MB = 3072

# $1 the directory of packages as a URI, $2 the packages, $3 the kernel's package, the rest writes the drive.
BUILD = r"""
umask 022
export TMPDIR="$PWD"
mmdebstrap --verbose --mode=root --format=directory --variant=apt --include="$2" --skip=check/empty \
    --aptopt='APT::Sandbox::User "root"' --dpkgopt=force-unsafe-io \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    unit-machine root "deb [trusted=yes] copy:$1 ./" >&2
dpkg-deb --fsys-tarfile "$3" | tar -x -C root --wildcards './lib/modules/*'
for modules in root/lib/modules/*; do chroot root depmod "${modules##*/}"; done
printf 'machine\n' > root/etc/hostname
printf '127.0.0.1 localhost\n127.0.1.1 machine\n::1 localhost\n' > root/etc/hosts
: > root/etc/machine-id
cat > root/etc/systemd/system/check.service <<'UNIT'
[Unit]
After=multi-user.target
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
ExecStartPre=/bin/mount -o ro /dev/vdb /mnt
ExecStart=/usr/bin/python3 /mnt/check.py
StandardOutput=file:/dev/ttyS1
StandardError=inherit
TimeoutStartSec=infinity
[Install]
WantedBy=default.target
UNIT
mkdir -p root/etc/systemd/system/default.target.wants
ln -s ../check.service root/etc/systemd/system/default.target.wants/check.service
ln -sf /lib/systemd/system/multi-user.target root/etc/systemd/system/default.target
for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service \
        fstrim.timer getty@tty1.service serial-getty@ttyS0.service systemd-timesyncd.service remote-fs.target \
        systemd-networkd.service; do
    ln -sf /dev/null root/etc/systemd/system/$unit
done
for user in alice bob; do chroot root useradd -m -s /bin/bash "$user"; done
rm -rf root/var/lib/apt/lists/* root/var/cache/apt/* root/etc/apt/sources.list.d/* root/etc/apt/apt.conf.d/99mmdebstrap
: > root/etc/apt/sources.list
shift 3
"$@"
"""


def recipes(build_dir: Path) -> list[Recipe]:
    archive = prepare._archive()

    def resolve(bench: Bench) -> Sequence[Package]:
        wanted = archive(bench).closure(["?essential", "apt", *PACKAGES])
        names = [name for name in archive(bench).depends(kernel.META_PACKAGE) if name.startswith("linux-image-")]
        return [*wanted, *archive(bench).exactly(names[:1])]

    def build(bench: Bench, packages: Sequence[Package], out: Path) -> None:
        repository = bench.scratch / "packages"
        files = archive(bench).download(packages, repository, lambda percent: bench.report(percent // 2, "downloading"))
        (repository / "Packages").write_text(archive(bench).control(packages))
        bench.report(50, "installing")
        image = next(path for path in files if path.name.startswith("linux-image"))
        arguments: list[str | Path] = [
            quote(str(repository)), ",".join(PACKAGES), image, *drive.mkfs(bench.scratch / "root", out / "root.erofs"),
        ]
        rootspace.shell(BUILD, arguments, step="build the machine", cwd=bench.scratch)

    machine = Recipe(
        name="unit-machine", version=1, files=("root.erofs",), resolve=resolve, build=build,
        sources=(BUILD, *PACKAGES),
    )
    return [kernel.recipe(archive), machine]


def build(assets: Path, build_dir: Path) -> tuple[Path, Path, Path]:
    """The kernel, its few modules as an archive, and the root file system."""
    made = prepare.produce(assets, recipes(build_dir), lambda progress: None)
    return made["kernel"].file("vmlinux"), made["kernel"].file("modules.cpio"), made["unit-machine"].file("root.erofs")


def initramfs(init: Path, modules: Path) -> bytes:
    console = cpio.Entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    program = cpio.Entry("init", stat.S_IFREG | 0o755, init.read_bytes())
    entries = [cpio.Entry("dev", stat.S_IFDIR | 0o755), console, program]
    return cpio.archive(entries) + modules.read_bytes()


def compile_init(into: Path) -> Path:
    program = into / "vm-init"
    source = ROOT / "tests" / "packaging" / "vm_init.c"
    subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-static", "-o", program, source], check=True)
    return program


class Machine:
    """A running machine; `reports` are the JSON lines its check wrote. Use it inside `with`."""

    def __init__(self, directory: Path, kernel: Path, initramfs: Path, root: Path, second: Path) -> None:
        self.console, self.said = directory / "console", directory / "said"
        self.said.touch()
        command = [
            "setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64",
            "-nodefaults", "-no-user-config", "-display", "none", "-machine", "pc",
            "-accel", "tcg,thread=multi", "-cpu", "Nehalem,+rdrand",
            "-smp", "2", "-m", str(MEMORY_MB),
            "-kernel", str(kernel), "-initrd", str(initramfs),
            "-append", "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check tsc=reliable cryptomgr.notests "
            "systemd.show_status=false systemd.log_target=console",
            "-chardev", f"file,id=console,path={self.console}", "-serial", "chardev:console",
            "-chardev", f"file,id=said,path={self.said}", "-serial", "chardev:said",
            "-no-reboot", "-nic", "none",
        ]  # fmt: skip
        for path in (root, second):
            command += ["-drive", f"if=virtio,format=raw,readonly=on,file={path}"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def reports(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        """Until the machine has switched itself off."""
        deadline = time.monotonic() + timeout_s
        with self.said.open("rb") as file:
            kept = b""
            while True:
                ended = self.process.poll() is not None
                data = file.read()
                kept += data
                *lines, kept = kept.split(b"\n")
                for line in lines:
                    if line.strip().startswith(b"{"):
                        yield json.loads(line)
                if ended and not data:
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the machine did not end:\n{self.tail()}")
                time.sleep(0.2)

    def tail(self) -> str:
        texts = (path.read_text(errors="replace")[-3000:] for path in (self.console, self.said) if path.exists())
        return "\n---\n".join(texts)


def wanted_assets(assets: Path, build_dir: Path) -> list[Path]:
    """The links and directories, below `assets`, that a daemon of these sources looks up."""
    made: dict[str, store.Asset] = {}
    found = []
    for recipe in prepare.recipes(build_dir):
        asset = store.find(assets, recipe, made)
        assert asset is not None, f"the asset {recipe.name} is not built: make assets"
        found += [assets / "wanted" / f"{recipe.name}-{recipe.request(made)}", asset.directory]
        made[recipe.name] = asset
    return found
