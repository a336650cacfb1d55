"""The jail every VMM and every device process runs in: prlimit, then bubblewrap, then (for root) setpriv.

In: which program, which files, which limits. Out: an argument list, built without looking at the machine, and
the libraries a program needs, found by asking the dynamic loader once.

Inside there is an empty read-only root with the program, its libraries and the files named for it; no /proc,
/sys, /dev, /tmp or /etc; namespaces of its own for processes, network, IPC, host name, cgroups and mounts; no
capability, no way to gain one, and the filter of `seccomp`. An ordinary user gets there through a user
namespace, which bubblewrap then closes for further ones. Root does not need one and must not have one: in a
map that holds root, the program would still be root outside. bubblewrap builds the jail as root, so files
below a 0700 directory can be bound, and setpriv inside it gives everything up for the machine's own uid and
gid before the program starts. The one exception is what shares a directory of a person's (`virtiofs`): what it makes
there must be that person's, root's too.

The path of the program inside the jail is the machine's mark (`marker`), so that whoever reads a process's
command line can tell whose it is, even when nobody lived to write a record.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandboxd.errors import SetupError
from sandboxd.vm.machine import is_name

MARK = "/sandboxd"
_LIBRARY = re.compile(r"\s*(\S+) => (/\S+) \(0x[0-9a-f]+\)")
_LOADER = re.compile(r"\s*(/\S+) \(0x[0-9a-f]+\)")


@dataclass(frozen=True, slots=True)
class Program:
    """An executable of the host and what it is linked with: (name in the jail, path on the host)."""

    path: Path
    libraries: tuple[tuple[str, Path], ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits, soft and hard alike. `processes` counts a uid's threads: only for a uid of its own."""

    address_space_bytes: int
    file_size_bytes: int
    open_files: int
    processes: int | None


@dataclass(frozen=True, slots=True)
class Tools:
    """The programs that build a jail. `setpriv` is needed by root alone."""

    prlimit: Path
    bwrap: Path
    setpriv: Program | None


@dataclass(frozen=True, slots=True)
class Jail:
    """One jail. `files`, `devices` and `writable` (files that may be written) are (path on the host, path inside);
    `home` is a directory that may be written, and where the program starts.

    `before` is a command that starts bubblewrap, in the control group of a machine.

    The rest is for a program that shares a directory: `before` then makes a user namespace too where it is root, and
    `inside` is the uid and gid that the program has in the jail's own one, with `capabilities` over what belongs to its
    user alone. `proc` shows it its own processes.
    """

    tools: Tools
    program: Program
    marker: str
    uid: int | None
    limits: Limits
    files: tuple[tuple[Path, str], ...]
    devices: tuple[tuple[Path, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    writable: tuple[tuple[Path, str], ...] = ()
    before: tuple[str, ...] = ()
    inside: int | None = None
    capabilities: tuple[str, ...] = ()
    proc: bool = False
    home: tuple[Path, str] | None = None


def marker(instance: str, id: str) -> str:
    """The directory of a machine's programs in their jails. `instance` tells state directories apart."""
    if not is_name(instance) or not is_name(id):
        raise ValueError(f"not names: {instance!r}, {id!r}")
    return f"{MARK}/{instance}/{id}"


def argv(jail: Jail, info_fd: int, seccomp_fd: int, arguments: Sequence[str]) -> list[str]:
    """The whole command. bubblewrap tells the program's pid on `info_fd`, and its filter is `seccomp_fd`."""
    inside = f"{jail.marker}/{jail.program.path.name}"
    setpriv = jail.tools.setpriv if jail.uid is not None else None
    if jail.uid is not None and setpriv is None:
        raise ValueError("a uid of its own needs setpriv")
    libraries = dict(jail.program.libraries) | dict(setpriv.libraries if setpriv else ())
    binds = [(jail.program.path, inside)]
    for name, path in sorted(libraries.items()):
        binds += [(path, name if name.startswith("/") else f"/lib/{name}")]
    binds += [(setpriv.path, "/setpriv")] if setpriv else []
    binds += list(jail.files)
    directories = _parents([target for _, target in (*binds, *jail.devices, *jail.writable)])

    command = [
        str(jail.tools.prlimit),
        "--core=0",
        f"--as={jail.limits.address_space_bytes}",
        f"--fsize={jail.limits.file_size_bytes}",
        f"--nofile={jail.limits.open_files}",
        "--memlock=0",
        "--msgqueue=0",
    ]
    if jail.limits.processes is not None:
        command += [f"--nproc={jail.limits.processes}"]
    command += [*jail.before, str(jail.tools.bwrap)]
    if jail.uid is None:
        command += ["--unshare-user", "--disable-userns"]
    if jail.inside is not None:
        command += ["--uid", str(jail.inside), "--gid", str(jail.inside)]
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup"]
    command += ["--as-pid-1", "--hostname", "vmm", "--chdir", jail.home[1] if jail.home else "/", "--clearenv"]
    for name, value in (("LD_LIBRARY_PATH", "/lib"), *jail.environment):
        command += ["--setenv", name, value]
    # Parents bubblewrap makes by itself are 0700: root's, and then closed to the machine's uid.
    for directory in directories:
        command += ["--perms", "0755", "--dir", directory]
    # First: others may lie in it.
    command += ["--bind", str(jail.home[0]), jail.home[1]] if jail.home else []
    for source, target in binds:
        command += ["--ro-bind", str(source), target]
    for source, target in jail.devices:
        command += ["--dev-bind", str(source), target]
    for source, target in jail.writable:
        command += ["--bind", str(source), target]
    if jail.proc:
        command += ["--proc", "/proc"]
    command += ["--remount-ro", "/", "--cap-drop", "ALL"]
    for capability in jail.capabilities:
        command += ["--cap-add", capability]
    if jail.uid is not None:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
    command += ["--seccomp", str(seccomp_fd), "--info-fd", str(info_fd), "--"]
    if jail.uid is not None:
        command += ["/setpriv", "--reuid", str(jail.uid), "--regid", str(jail.uid), "--clear-groups"]
        command += ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", "--"]
    return [*command, inside, *arguments]


def find_tools(root: bool) -> Tools:
    """Raises SetupError naming the packages when one is missing."""
    setpriv = find("setpriv", "util-linux") if root else None
    return Tools(
        prlimit=find("prlimit", "util-linux"),
        bwrap=find("bwrap", "bubblewrap"),
        setpriv=program(setpriv) if setpriv else None,
    )


def find(name: str, package: str) -> Path:
    """A program by its name, in the system's directories alone, whatever PATH says."""
    path = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin")
    if path is None:
        raise SetupError(f"{name} is missing; let root run: apt-get install -y {package}")
    return Path(path)


def program(path: Path, extra: Sequence[Path] = ()) -> Program:
    """`path`, with what it and `extra` (modules it loads) are linked with. Trusted: ldd runs their loader."""
    found: dict[str, Path] = {}
    for file in (path, *extra):
        found |= _libraries(file)
    return Program(path.resolve(), tuple(sorted(found.items())))


def _libraries(path: Path) -> dict[str, Path]:
    ldd = subprocess.run(
        [str(find("ldd", "libc-bin")), str(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={"LC_ALL": "C"},
    )
    if ldd.returncode != 0:
        if "not a dynamic executable" in ldd.stderr + ldd.stdout:
            return {}
        raise SetupError(f"the libraries of {path.name} could not be listed: {ldd.stderr.strip()[:200]}")
    found: dict[str, Path] = {}
    for line in ldd.stdout.splitlines():
        if "not found" in line:
            raise SetupError(f"{path.name} lacks a library: {line.strip()[:200]}")
        if linked := _LIBRARY.fullmatch(line):
            name, target = linked[1], linked[2]
            # A library named with a slash keeps its place: the loader will not search for it.
            found[name if name.startswith("/") else os.path.basename(name)] = Path(target).resolve()
        elif loader := _LOADER.fullmatch(line):
            found[loader[1]] = Path(loader[1]).resolve()
    return found


def _parents(paths: Sequence[str]) -> list[str]:
    found = {str(parent) for path in paths for parent in Path(path).parents}
    return sorted(found - {"/"})
