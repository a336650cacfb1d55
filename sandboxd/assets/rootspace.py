"""A place where we are root, for programs that unpack and pack root file systems.

For root it is mount, process and network namespaces of its own; for an ordinary user also a user namespace in which
the user is root and the user's subordinate ids (/etc/subuid) are everybody else. Both see the same owners, so both
build the same bytes. The programs have no network and end together with us.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sandboxd import trees
from sandboxd.assets import command
from sandboxd.errors import SetupError

IDS_NEEDED = 65536


def enter(argv: Sequence[str | Path], uid: int) -> list[str]:
    """`argv` as root of namespaces of its own."""
    user = [] if uid == 0 else ["--user", "--map-root-user", "--map-auto"]
    return [
        "unshare", *user, "--mount", "--pid", "--net", "--fork", "--kill-child", "--", *(str(word) for word in argv)
    ]


def shell(
    script: str,
    arguments: Sequence[str | Path],
    *,
    step: str,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Run a shell script there, with `arguments` as $1, $2, ... and stopping at the first failure."""
    argv = enter(["/bin/sh", "-eu", "-c", script, "sh", *arguments], os.geteuid())
    command.run(argv, step=step, cwd=cwd, env=env, on_line=on_line)


def remove(directory: Path) -> None:
    """Remove a tree, whoever owns what is in it; nothing outside is followed."""
    trees.remove(directory)
    if directory.exists():
        argv = enter(["rm", "-rf", "--one-file-system", "--", directory], os.geteuid())
        command.run(argv, step="remove an unfinished build")


def require(uid: int, etc: Path = Path("/etc")) -> None:
    """`SetupError` with the commands root must run once, if this user has no subordinate ids to build with."""
    if uid == 0:
        return
    command.require(["newuidmap", "newgidmap", "unshare"])
    name = account(uid)
    lacking = [
        (option, path)
        for option, path in (("--add-subuids", etc / "subuid"), ("--add-subgids", etc / "subgid"))
        if granted(read(path), name, uid) < IDS_NEEDED
    ]
    if lacking:
        options = " ".join(f"{option} {free_range(read(path))}" for option, path in lacking)
        raise SetupError(
            f"The user {name} has no subordinate ids, which building the base image without root needs. "
            f"Run as root, once:\n  usermod {options} {name}"
        )
    try:
        command.run(enter(["true"], uid), step="make a user namespace")
    except command.BuildFailed as failure:
        raise SetupError(
            f"This kernel lets an ordinary user make no user namespace ({failure.tail or 'refused'}), which "
            "building the base image without root needs. Run as root, once:\n"
            "  sysctl -w user.max_user_namespaces=15000\n"
            "and, where the kernel has these switches:\n"
            "  sysctl -w kernel.unprivileged_userns_clone=1\n"
            "  sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        ) from failure


def account(uid: int) -> str:
    """The user's name, or the number of one without an account."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def granted(table: str, name: str, uid: int) -> int:
    """The size of the largest range /etc/subuid (or subgid) gives to a user, by name or by number."""
    return largest(table, name, uid)[1]


def largest(table: str, name: str, uid: int) -> tuple[int, int]:
    """(first id, how many) of that range; (0, 0) where there is none."""
    ranges = [(first, count) for owner, first, count in _rows(table) if owner in (name, str(uid))]
    return max(ranges, key=lambda row: row[1], default=(0, 0))


def free_range(table: str) -> str:
    """`first-last` of the next range that nobody has, on the grid that useradd uses."""
    end = max((first + count for _, first, count in _rows(table)), default=100_000)
    first = max(100_000, 100_000 + -(-(end - 100_000) // IDS_NEEDED) * IDS_NEEDED)
    return f"{first}-{first + IDS_NEEDED - 1}"


def _rows(table: str) -> list[tuple[str, int, int]]:
    rows = []
    for line in table.splitlines():
        parts = line.strip().split(":")
        if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
            rows.append((parts[0], int(parts[1]), int(parts[2])))
    return rows


def read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
