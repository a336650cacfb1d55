"""The guest's kernel: Debian's cloud kernel as ELF, and the few of its modules that a sandbox needs.

Publishes `vmlinux` and `modules.cpio` (the modules under `modules/`, and `modules/order`, their names in loading
order, read by guest-init; a module that only some machines need has the virtio device it is for behind its name).
Dependencies come from the modules themselves (`depends=` in .modinfo): the package brings no modules.dep.
"""

from __future__ import annotations

import lzma
import re
import stat
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from sandboxd.assets import command, cpio, payload, store
from sandboxd.assets.apt import Archive, Package
from sandboxd.assets.store import Bench, Recipe
from sandboxd.errors import SetupError

META_PACKAGE = "linux-image-cloud-amd64"

# The buses of QEMU's and of Firecracker's devices (the kernel finds the latter through ACPI), block devices, the host's
# transport, the network, the drives' file system, the sandbox's root.
WANTED_MODULES = (
    "virtio_pci", "virtio_mmio", "virtio_blk", "vmw_vsock_virtio_transport", "virtio_net", "erofs", "overlay",
)  # fmt: skip

# Where the machine has such a device (its number in linux/virtio_ids.h, as sysfs writes it), and with what they need.
DEVICE_MODULES = (("virtiofs", "0x001a"), ("virtio_rng", "0x0004"))

# linux/module_signature.h: what a signed module ends with, behind a struct whose last word is the signature's length.
SIGNATURE_MARK = b"~Module signature appended~\n"
SIGNATURE_STRUCT_BYTES = 12


def recipe(archive: Callable[[Bench], Archive]) -> Recipe:
    def resolve(bench: Bench) -> Sequence[Package]:
        names = [name for name in archive(bench).depends(META_PACKAGE) if name.startswith("linux-image-")]
        return archive(bench).exactly(names[:1])

    def build(bench: Bench, packages: Sequence[Package], out: Path) -> None:
        size_mib = packages[0].size_bytes / 2**20
        (deb,) = archive(bench).download(
            packages, bench.scratch / "debs",
            lambda percent: bench.report(percent * 8 // 10, f"downloading {size_mib:.0f} MiB"),
        )
        image, modules = unpack(deb, bench.scratch)
        bench.report(80, f"unpacking a kernel of {len(image) / 2**20:.0f} MiB")
        (out / "vmlinux").write_bytes(payload.vmlinux(image))
        (out / "modules.cpio").write_bytes(modules_archive(modules, WANTED_MODULES, DEVICE_MODULES))

    return Recipe(
        name="kernel", version=3, files=("vmlinux", "modules.cpio"), resolve=resolve, build=build,
        sources=(META_PACKAGE, *WANTED_MODULES, *(" ".join(row) for row in DEVICE_MODULES)),
    )


def own(path: Path) -> Recipe:
    """The operator's kernel, ELF or bzImage, with its drivers built in: none of our modules would fit it. Raises
    SetupError where it cannot be read."""
    try:
        digest = store.file_digest(path)
    except OSError as fault:
        raise SetupError(f"--kernel {path}: {fault.strerror}") from None

    def build(bench: Bench, _packages: Sequence[Package], out: Path) -> None:
        image = path.read_bytes()
        try:
            (out / "vmlinux").write_bytes(image if payload.has_pvh_entry(image) else payload.vmlinux(image))
        except payload.NotAKernel as fault:
            raise SetupError(
                f"--kernel {path}: {fault}; it takes an x86 kernel with CONFIG_PVH, as vmlinux or bzImage"
            ) from None
        (out / "modules.cpio").write_bytes(modules_archive({}, ()))

    return Recipe(
        name="kernel", version=3, files=("vmlinux", "modules.cpio"), resolve=lambda bench: (), build=build,
        sources=("own", digest),
    )  # fmt: skip


def unpack(deb: Path, scratch: Path) -> tuple[bytes, dict[str, bytes]]:
    """The bzImage and all modules by name, read straight from the package."""
    tree = scratch / "data.tar"
    tree.write_bytes(command.run(["dpkg-deb", "--fsys-tarfile", deb], step="open the kernel package").stdout)
    image = b""
    modules: dict[str, bytes] = {}
    with tarfile.open(tree) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isreg() else None
            if file is None:
                continue
            base = member.name.rpartition("/")[2]
            if base.startswith("vmlinuz-"):
                image = file.read()
            elif match := re.fullmatch(r"(.+)\.ko(\.xz)?", base):
                name = match.group(1).replace("-", "_")
                modules[name] = lzma.decompress(file.read()) if match.group(2) else file.read()
    return image, modules


def modules_archive(
    modules: Mapping[str, bytes], wanted: Sequence[str], by_device: Sequence[tuple[str, str]] = ()
) -> bytes:
    """`by_device` are (module, virtio device): loaded, with what only they need, where the machine has the device."""
    names = loading_order(modules, wanted)
    lines = [f"{name}.ko\n" for name in names]
    for module, device in by_device:
        more = [name for name in loading_order(modules, (*wanted, module)) if name not in names]
        lines += [f"{name}.ko {device}\n" for name in more]
        names += more
    order = "".join(lines).encode()
    return cpio.archive(
        [
            cpio.Entry("modules", stat.S_IFDIR | 0o755),
            cpio.Entry("modules/order", stat.S_IFREG | 0o644, order),
            *(cpio.Entry(f"modules/{name}.ko", stat.S_IFREG | 0o644, unsigned(modules[name])) for name in names),
        ]
    )


def unsigned(module: bytes) -> bytes:
    """The module without its signature: apt has checked the package, and a guest under emulation would spend longer
    on checking each one again than on loading it."""
    if not module.endswith(SIGNATURE_MARK):
        return module
    end = len(module) - len(SIGNATURE_MARK)
    size = int.from_bytes(module[end - 4 : end], "big")
    if size > end - SIGNATURE_STRUCT_BYTES:
        raise ValueError("a module's signature is longer than the module")
    return module[: end - SIGNATURE_STRUCT_BYTES - size]


def loading_order(modules: Mapping[str, bytes], wanted: Iterable[str]) -> list[str]:
    """`wanted` and all they depend on, each after what it needs; a wanted module must exist."""
    order: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in order:
            return
        if name in path:
            raise ValueError(f"modules depend on each other in a circle: {' '.join((*path, name))}")
        if name not in modules:
            raise ValueError(f"the kernel package has no module {name}")
        for needed in dependencies(modules[name]):
            visit(needed, (*path, name))
        order.append(name)

    for name in wanted:
        visit(name, ())
    return order


def dependencies(module: bytes) -> list[str]:
    match = re.search(rb"\0depends=([^\0]*)\0", module)
    if match is None:
        raise ValueError("not a kernel module: it says nothing of its dependencies")
    return [name.replace("-", "_") for name in match.group(1).decode().split(",") if name]
