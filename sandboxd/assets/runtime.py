"""The runtime drive: what guestd needs to run, and nothing that a sandboxed process sees.

Two assets. `interpreter` is Debian's Python and git without the parts guestd has no use for (`tree.tar`); `runtime`
is that tree with guestd and guest-exec in it as a drive (`runtime.erofs`). guestd changes more often than Debian does,
so the second is made from the first without a network.

Python finds its modules compiled: unchecked-hash .pyc files, so that a start compares nothing and compiles nothing.
They are compiled by the tree's own interpreter, in the tree, which also shows that its libraries are all there.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from sandboxd.assets import drive, rootspace, store
from sandboxd.assets.apt import Archive, Package
from sandboxd.assets.store import Bench, Recipe

PYTHON_META_PACKAGE = "python3-minimal"
PACKAGES = ("git", "libc-bin", "libc6", "libexpat1", "libffi8", "libpcre2-8-0", "python3-minimal", "zlib1g")

# Tests, tools, documentation, and extension modules whose libraries are not on the drive. Without OpenSSL, hashlib
# uses Python's own code, and importing it costs a tenth.
UNUSED = (
    "usr/share/doc", "usr/share/man", "usr/share/lintian", "usr/share/bug", "usr/share/python3", "usr/share/locale",
    "usr/share/gitweb", "usr/share/bash-completion", "usr/share/applications", "usr/share/pixmaps",
    "usr/share/binfmts", "usr/share/perl5", "usr/share/git-core/*", "usr/share/apport", "var", "etc/*",
    "usr/share/libc-bin", "usr/lib/binfmt.d",
    "usr/lib/x86_64-linux-gnu/libmvec.so*", "usr/lib/x86_64-linux-gnu/gconv", "usr/lib/x86_64-linux-gnu/audit",
    "usr/lib/valgrind",
    "usr/lib/python3*/ensurepip", "usr/lib/python3*/idlelib", "usr/lib/python3*/lib2to3",
    "usr/lib/python3*/distutils", "usr/lib/python3*/pydoc_data", "usr/lib/python3*/test", "usr/lib/python3*/unittest",
    "usr/lib/python3*/turtledemo", "usr/lib/python3*/venv", "usr/lib/python3*/sqlite3", "usr/lib/python3*/curses",
    "usr/lib/python3*/dbm", "usr/lib/python3*/sitecustomize.py", "usr/lib/python3*/config-*",
    *(
        f"usr/lib/python3*/lib-dynload/{name}.*"
        for name in (
            "_bz2", "_codecs_*", "_crypt", "_ctypes_test", "_curses*", "_dbm", "_hashlib", "_lzma",
            "_multibytecodec", "_sqlite3", "_ssl", "_test*", "_uuid", "_xx*", "audioop", "nis", "ossaudiodev",
            "readline", "xx*",
        )
    ),
)
PROGRAMS = ("git", "python3", "python3.*")

# -B, since modules that the compiler itself imports would else be compiled for comparison by time, and then kept.
COMPILE = "chroot tree /usr/bin/python3 -B -I -S -m compileall -q -f --invalidation-mode unchecked-hash"

# $1 tree.tar to write, the rest the packages. /lib and /bin are links before the packages are unpacked, as on any
# Debian system; tar keeps them.
UNPACK = r"""
out=$1; shift
umask 022
mkdir -p tree/usr/bin tree/usr/sbin tree/usr/lib tree/usr/lib64
for name in bin sbin lib lib64; do ln -s "usr/$name" "tree/$name"; done
for deb in "$@"; do
    dpkg-deb --fsys-tarfile "$deb" > data.tar
    tar -xf data.tar -C tree --keep-directory-symlink --no-same-permissions --numeric-owner
done
chroot tree /sbin/ldconfig -X
mv tree/etc/ld.so.cache .
cd tree
for pattern in @UNUSED@; do rm -rf $pattern; done
mv ../ld.so.cache etc/
rm -rf sbin usr/sbin
for program in usr/bin/*; do
    case ${program##*/} in @PROGRAMS@) ;; *) rm "$program" ;; esac
done
find usr/lib/git-core -mindepth 1 \( -type l -o -type d -name git-core \) -o -mindepth 1 -delete
ln -s ../../bin/git usr/lib/git-core/git
mkdir -p dev proc sys run tmp root opt/sandbox/lib usr/share/git-core/templates
printf '%s\n' root:x:0:0:root:/run:/ sandbox:x:1001:1001::/run:/ > etc/passwd
printf '%s\n' root:x:0: tty:x:5: sandbox:x:1001: > etc/group
cd ..
@COMPILE@ /usr/lib
tar --sort=name --mtime=@@EPOCH@ --numeric-owner --format=gnu -cf "$out" -C tree .
""".replace("@UNUSED@", " ".join(UNUSED)).replace("@PROGRAMS@", "|".join(PROGRAMS)).replace(
    "@EPOCH@", str(drive.EPOCH_S)
).replace("@COMPILE@", COMPILE)

# /opt/sandbox/guestd: a file and not a package directory, which would cost the import of runpy.
LAUNCHER = """\
import sys
sys.path.insert(0, "/opt/sandbox/lib")
from guestd.__main__ import main
sys.exit(main())
"""

# $1 tree.tar, $2 guestd's sources, $3 guest-exec, $4 the launcher, the rest writes the drive.
ASSEMBLE = r"""
umask 022
mkdir tree
tar -xf "$1" -C tree --numeric-owner
cp -R "$2" tree/opt/sandbox/lib/guestd
cp "$3" tree/opt/sandbox/guest-exec
cp "$4" tree/opt/sandbox/guestd
chown -R 0:0 tree/opt/sandbox
find tree/opt/sandbox -type d -exec chmod 755 {} + -o -type f -exec chmod 644 {} +
chmod 755 tree/opt/sandbox/guest-exec
@COMPILE@ /opt/sandbox
shift 4
"$@"
""".replace("@COMPILE@", COMPILE)


def interpreter(archive: Callable[[Bench], Archive]) -> Recipe:
    def resolve(bench: Bench) -> Sequence[Package]:
        return _packages(archive(bench))

    def build(bench: Bench, packages: Sequence[Package], out: Path) -> None:
        size_mib = sum(package.size_bytes for package in packages) / 2**20
        paths = archive(bench).download(
            packages, bench.scratch / "debs",
            lambda percent: bench.report(percent // 2, f"downloading {size_mib:.0f} MiB"),
        )
        bench.report(50, f"unpacking {len(paths)} packages")
        rootspace.shell(UNPACK, [out / "tree.tar", *paths], step="unpack Python and git", cwd=bench.scratch)

    return Recipe(
        name="interpreter", version=1, files=("tree.tar",), resolve=resolve, build=build,
        sources=(UNPACK, *PACKAGES),
    )


def recipe(guestd: Path, guest_exec: Path) -> Recipe:
    files = sorted(guestd.glob("*.py"))

    def build(bench: Bench, _packages: Sequence[Package], out: Path) -> None:
        image = out / "runtime.erofs"
        package = bench.scratch / "guestd"
        package.mkdir()
        for file in files:
            shutil.copyfile(file, package / file.name)
        launcher = bench.scratch / "launcher.py"
        launcher.write_text(LAUNCHER)
        tree = bench.made["interpreter"].file("tree.tar")
        arguments: list[str | Path] = [
            tree, package, guest_exec, launcher, *drive.mkfs(bench.scratch / "tree", image)
        ]
        bench.report(10, "writing the runtime drive")
        rootspace.shell(ASSEMBLE, arguments, step="write the runtime drive", cwd=bench.scratch)

    return Recipe(
        name="runtime", version=1, files=("runtime.erofs",), resolve=lambda bench: (), build=build,
        sources=(
            ASSEMBLE, LAUNCHER, *drive.mkfs(Path("tree"), Path("image")), store.file_digest(guest_exec),
            *(f"{file.name} {store.file_digest(file)}" for file in files),
        ),
        after=("interpreter",),
    )


def _packages(archive: Archive) -> list[Package]:
    """PACKAGES and the parts of whatever Python version the release has."""
    version = next(
        match.group(1)
        for name in archive.depends(PYTHON_META_PACKAGE)
        if (match := re.fullmatch(r"python(3\.\d+)-minimal", name))
    )
    parts = (f"python{version}-minimal", f"libpython{version}-minimal", f"libpython{version}-stdlib")
    return archive.exactly(sorted((*PACKAGES, *parts)))
