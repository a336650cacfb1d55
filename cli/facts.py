"""What can be known of this machine without a daemon and without a virtual machine, for `doctor`.

In: programs' own words, /proc, nftables' rules. Out: pairs of a name and a value. Nothing here changes anything, and
what cannot be found out is said to be so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from cli import advisories, githard, place
from cli.advisories import Version
from sandboxd.errors import SandboxError
from sandboxd.termsafe import first_line
from sandboxd.vm import firecracker_versions

Value = str | list[str] | dict[str, int]
Fact = tuple[str, Value]

VERSION_S = 10.0
SYSTEM_DIRECTORIES = "/usr/bin:/bin:/usr/sbin:/sbin"
LOW_DISK_BYTES = 5 << 30
IMAGE_PROGRAMS = {"skopeo": "skopeo", "umoci": "umoci", "mkfs.erofs": "erofs-utils", "zstd": "zstd"}
"""What images of registries need, and the packages it is in."""
PACKAGES = {"git": "git", "qemu": "qemu-system-x86"}
"""Whose changelog says what a distribution mended."""


def host() -> Iterator[Fact]:
    """All of it, the cheap first."""
    uid = os.geteuid()
    yield "user", "root" if uid == 0 else f"uid {uid}: sandboxes without a network"
    yield from kvm()
    yield from program("qemu", "qemu-system-x86_64")
    yield from firecracker()
    yield from program("bubblewrap", "bwrap")
    yield from program("nftables", "nft")
    yield "images", image_programs()
    try:
        version = githard.version()
        yield "git", ".".join(map(str, version))
        found = (os.path.join(directory, "git") for directory in githard.SEARCH)
        yield from known("git", version, next(filter(os.path.isfile, found), ""))
    except SandboxError as error:
        yield "git", str(error)
    yield from forwarding(uid)
    yield "state dir", disk(state_dir(uid, os.environ))


def kvm() -> Iterator[Fact]:
    """Whether KVM really runs code here; without it QEMU emulates."""
    try:
        import native

        answer = native.kvm_probe()
    except (ImportError, OSError) as fault:
        yield "kvm", "unknown"
        yield "because", str(fault)
        return
    yield "kvm", answer.state.value
    yield "because", answer.reason
    if answer.state is not native.KvmState.OK:
        yield "so", "machines are emulated, several times slower"
    if answer.remedy:
        yield "to change that", answer.remedy


def search(path: str) -> str:
    """Where programs are looked for: never in the working directory, which may be a repository with a `bwrap` in it."""
    return ":".join([*(one for one in path.split(":") if os.path.isabs(one)), SYSTEM_DIRECTORIES])


def program(name: str, command: str) -> Iterator[Fact]:
    """Its version in its own words, and what is known to be bad about it."""
    path = shutil.which(command, path=search(os.environ.get("PATH", "")))
    if path is None:
        yield name, f"missing: {command} is not installed"
        return
    said = program_version(path)
    yield name, said
    if version := advisories.version_in(said):
        yield from known(name, version, path)


def firecracker() -> Iterator[Fact]:
    """Its version, and why sandboxd would not take it, where none is named to that."""
    places = firecracker_versions.PLACES
    path = shutil.which("firecracker", path=places)
    if path is None:
        yield "firecracker", f"none in {places}: QEMU runs machines"
        return
    said = program_version(path)
    yield "firecracker", said
    try:
        fault = firecracker_versions.fault(firecracker_versions.parse(said))
    except ValueError as why:
        fault = f"{path}: {why}"
    if fault is not None:
        yield "firecracker is BAD", [fault]
    elif os.geteuid() == 0 and (fault := without_jailer(path, said)):
        yield "firecracker is not used", [fault]


def without_jailer(path: str, said: str) -> str:
    """Why root's sandboxd cannot start the Firecracker at `path`, which says its version; empty where it can."""
    beside = os.path.join(os.path.dirname(os.path.realpath(path)), "jailer")
    found = beside if os.path.isfile(beside) else shutil.which("jailer", path=firecracker_versions.PLACES)
    if found is None:
        return "there is no jailer beside it, and root's sandboxd starts it by that alone: install that of its release"
    its = program_version(found)
    with suppress(ValueError):
        if firecracker_versions.parse(its) == firecracker_versions.parse(said):
            return ""
    return f"{found} says: {its}; it and Firecracker belong together: install both of one release"


def program_version(path: str) -> str:
    """The first line of what it says of itself."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, timeout=VERSION_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as fault:
        return f"{path}: {fault}"
    return first_line(done.stdout.decode(errors="replace")) or f"{path} does not say its version"


def known(name: str, version: Version, path: str, docs: str = "/usr/share/doc") -> Iterator[Fact]:
    """What is known to be bad about this version; of a package's program, whether its maintainers have mended it."""
    package = PACKAGES.get(name) if path.startswith(("/usr/bin/", "/bin/")) else None
    changelog = f"{docs}/{package}/changelog.Debian.gz"
    bad, mended = [], []
    for one in advisories.of(name, version):
        if package and advisories.named_in(changelog, one.id):
            mended.append(one.id)
        else:
            fix = " or ".join(".".join(map(str, fix)) for fix in one.fixed[-2:])
            unless = f", unless {package}'s changelog is only not here" if package and not _there(changelog) else ""
            bad.append(f"{one.id}: {one.what}; mended in {fix}{unless} ({one.source})")
    if bad:
        yield f"{name} is BAD", bad
    if mended:
        yield f"{name} mended", f"{', '.join(mended)}: by the distribution, as its changelog says"


def _there(path: str) -> bool:
    return os.access(path, os.R_OK)


def image_programs() -> str:
    path = "/usr/bin:/usr/sbin:/bin:/sbin"
    lacking = sorted(package for name, package in IMAGE_PROGRAMS.items() if shutil.which(name, path=path) is None)
    if not lacking:
        return "sandbox-base and those of registries"
    return f"sandbox-base alone; for others let root run: apt-get install -y {' '.join(lacking)}"


class Chain(NamedTuple):
    """A chain of nftables' that hangs on a hook of the kernel's and drops what no rule accepts."""

    family: str
    table: str
    name: str
    hook: str
    whose: str


def forwarding(uid: int) -> Iterator[Fact]:
    """Sandboxes need none: their connections are made anew by a process of this machine. What another firewall drops
    on its way out is another matter."""
    try:
        with open("/proc/sys/net/ipv4/ip_forward", encoding="ascii") as file:
            on = file.read().strip() == "1"
        yield "forwarding", f"{'on' if on else 'off'}; sandboxes do not use it"
    except OSError as fault:
        yield "forwarding", f"unknown: {fault.strerror}"
    if uid != 0:
        yield "firewall", "not looked at: only root may list its rules"
        return
    nft = shutil.which("nft", path=search(os.environ.get("PATH", "")))
    if nft is None:
        yield "firewall", "not looked at: nft is not installed"
        return
    try:
        done = subprocess.run([nft, "-j", "list", "chains"], capture_output=True, timeout=VERSION_S, check=False)
        chains = dropping(json.loads(done.stdout))
    except (OSError, subprocess.TimeoutExpired, ValueError) as fault:
        yield "firewall", f"unknown: {fault}"
        return
    yield "firewall", [said(chain) for chain in chains] or "no chain that drops what is forwarded or sent"


def dropping(ruleset: object) -> list[Chain]:
    """From `nft -j list chains` (libnftables-json(5)). Raises ValueError for what is not that."""
    if not isinstance(ruleset, dict) or not isinstance(ruleset.get("nftables"), list):
        raise ValueError("nft's answer is not a ruleset")
    chains = [one["chain"] for one in ruleset["nftables"] if isinstance(one, dict) and "chain" in one]
    names = {str(chain.get("name")) for chain in chains}
    tables = {str(chain.get("table")) for chain in chains}
    whose = ""
    for owner, sign in (
        ("docker", any(name.startswith("DOCKER") for name in names)),
        ("ufw", any(name.startswith("ufw") for name in names)),
        ("firewalld", "firewalld" in tables),
    ):
        whose = whose or (owner if sign else "")
    return [
        Chain(str(chain["family"]), str(chain["table"]), str(chain["name"]), str(chain["hook"]), whose)
        for chain in chains
        if chain.get("policy") == "drop" and chain.get("hook") in ("forward", "output")
    ]


def said(chain: Chain) -> str:
    """The chain as nft names it, and what it means for sandboxes."""
    owner = f" ({chain.whose}'s)" if chain.whose else ""
    means = (
        "sandboxes do not need it" if chain.hook == "forward" else "names can be reached only where its rules accept it"
    )
    return f"{chain.family} {chain.table} {chain.name}{owner} drops what is {PASSES[chain.hook]}: {means}"


PASSES = {"forward": "forwarded", "output": "sent"}


def state_dir(uid: int, environ: Mapping[str, str]) -> str:
    """Where a sandboxd of this person keeps disks by default."""
    if uid == 0:
        return "/var/lib/sandboxd"
    return os.path.join(place.base(environ, "XDG_DATA_HOME", ".local/share"), "sandboxd")


def disk(path: str) -> str:
    """What is free there, or where it would be made."""
    place = path
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    try:
        room = os.statvfs(place)
    except OSError as fault:
        return f"{path}: {fault.strerror}"
    free = room.f_bavail * room.f_frsize
    low = "; LOW: images alone take some" if free < LOW_DISK_BYTES else ""
    return f"{path}: {free / (1 << 30):.1f} GiB free{low}"
