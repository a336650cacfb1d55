"""A directory of the host for a sandbox: who may have which.

In: a request's path and who is connected. Out: the open directory, or a refusal that no flag, policy or request
relaxes. It is looked up once, with the rights of the daemon's user, who is the only one that may ask; from there on
there is a descriptor, and what its name means later changes nothing. Refused are /, homes and what holds them, and
everything where the daemon keeps what it trusts: its state, its images, its configuration, its programs.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import native
from native import Directory, DirectoryRefused
from sandboxd.address import Peer, UnixPeer
from sandboxd.errors import InvalidRequest, Refused
from sandboxd.settings import Settings

FIELD = "bind.host_path"
_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")


@dataclass(frozen=True, slots=True)
class Kept:
    """What is never shared. `homes` and `holding`: they, and whatever holds them; `whole`: whatever is inside, too."""

    homes: tuple[Path, ...]
    holding: tuple[Path, ...]
    whole: tuple[Path, ...]


def kept(settings: Settings, environment: Mapping[str, str], programs: Path, prefix: Path | None) -> Kept:
    """The daemon's. `programs` is where its package is, `prefix` its Python environment where it has one of its own."""
    transport = settings.transport
    files = [settings.policy, settings.audit_log, transport.tls_cert, transport.tls_key, transport.client_ca]
    files += [one.path for one in transport.listen if hasattr(one, "path")]
    files += transport.token_files
    whole = [settings.state_dir, settings.assets_dir, settings.build_dir, programs, Path("/etc/sandboxd")]
    whole += [one for one in (prefix, transport.token_dir) if one is not None]
    home = environment.get("HOME", "")
    homes = [Path(home)] if home.startswith("/") else []
    with suppress(KeyError):
        homes.append(Path(pwd.getpwuid(os.geteuid()).pw_dir))
    config = environment.get("XDG_CONFIG_HOME", "")
    whole += [Path(config, "sandbox")] if config.startswith("/") else [one / ".config/sandbox" for one in homes]
    return Kept(tuple(homes), tuple(one.parent for one in files if one is not None), tuple(whole))


def open_directory(path: str, peer: Peer, kept: Kept) -> Directory:
    """The directory, the caller's to close. Blocking. Raises `Refused`; `InvalidRequest` where there is none."""
    if not isinstance(peer, UnixPeer) or peer.uid != os.geteuid():
        raise Refused(f"bind is for the user sandboxd runs as (uid {os.geteuid()}) alone: files must be that user's")
    try:
        directory = native.open_directory(path)
    except DirectoryRefused as fault:
        raise Refused(str(fault)) from None
    except (FileNotFoundError, NotADirectoryError) as fault:
        raise InvalidRequest(f"{FIELD} {path!r}: {os.strerror(fault.errno or 0)}") from None
    except OSError as fault:
        raise Refused(f"{FIELD} {path!r} cannot be opened: {os.strerror(fault.errno or 0)}") from None
    try:
        _check(directory, path, kept)
    except BaseException:
        os.close(directory.fd)
        raise
    return directory


def place(directory: Directory) -> str:
    """Where it was when it was opened, links resolved."""
    return os.fsencode(os.readlink(f"/proc/self/fd/{directory.fd}")).decode(errors="replace")


def _check(directory: Directory, path: str, kept: Kept) -> None:
    try:
        for home in kept.homes:
            _unless_absent(native.check_directory, directory, path, home)
        for one in kept.holding:
            _unless_absent(native.check_directory, directory, path, one)
        for one in kept.whole:
            _unless_absent(native.check_apart, directory, path, one)
        # What may be passed through is not yet one that may be read.
        os.close(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory.fd))
        below = mounts_below(directory.fd)
    except DirectoryRefused as fault:
        raise Refused(str(fault)) from None
    except OSError as fault:
        raise Refused(f"{FIELD} {path!r} cannot be looked at: {os.strerror(fault.errno or 0)}") from None
    if below:
        raise Refused(f"{path!r} is refused: something else is mounted below it, at {below[0]!r}")


def mounts_below(directory_fd: int) -> list[str]:
    """What is mounted below an open directory (proc_pid_mountinfo(5)); not what is mounted on it."""
    top = os.fsencode(os.readlink(f"/proc/self/fd/{directory_fd}")) + b"/"
    with open("/proc/self/mountinfo", "rb") as table:
        points = [_OCTAL.sub(lambda found: bytes([int(found[1], 8)]), line.split(b" ")[4]) for line in table]
    return [point.decode(errors="replace") for point in points if point.startswith(top)]


def _unless_absent(check: Callable[[Directory, str, Path], None], directory: Directory, path: str, place: Path) -> None:
    """What is not there holds nothing that could be reached."""
    with suppress(FileNotFoundError):
        check(directory, path, place)
