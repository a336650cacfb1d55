"""Versions of what a sandbox's walls are made of that are known to be bad, as data. Pure but for a package's changelog.

In: a program and its version. Out: the advisories that hold for it by its number. A distribution keeps the number and
mends the program, and says so in the package's changelog: `named_in` looks there. Only flaws that let a guest or a
repository run code on the host are listed, and of QEMU's only those in devices our machines have.
"""

from __future__ import annotations

import re
from typing import NamedTuple

Version = tuple[int, ...]

CHANGELOG_BYTES = 16 << 20


class Advisory(NamedTuple):
    """`since` is the first version that has the flaw; `fixed` the first without it, on each line of releases."""

    program: str
    id: str
    since: Version
    fixed: tuple[Version, ...]
    what: str
    source: str

    def holds(self, version: Version) -> bool:
        """Whether `version` has it by its number. A line of releases without a fix of its own never got one."""
        if version < self.since:
            return False
        line = version[:2]
        if any(line == fix[:2] and version >= fix for fix in self.fixed):
            return False
        return line <= max(fix[:2] for fix in self.fixed)


ADVISORIES = (
    Advisory(
        "git", "CVE-2022-41903", (0, 0),
        (
            (2, 30, 7), (2, 31, 6), (2, 32, 5), (2, 33, 6), (2, 34, 6), (2, 35, 6), (2, 36, 4), (2, 37, 5), (2, 38, 3),
            (2, 39, 1),
        ),
        "a repository's attributes run code when its log is shown or archived",
        "https://github.com/git/git/security/advisories/GHSA-475x-2q3q-hvwq",
    ),
    Advisory(
        "git", "CVE-2024-32002", (0, 0),
        ((2, 39, 4), (2, 40, 2), (2, 41, 1), (2, 42, 2), (2, 43, 4), (2, 44, 1), (2, 45, 1)),
        "a clone with submodules runs a hook of the repository's",
        "https://github.com/git/git/security/advisories/GHSA-8h77-4q3w-gfgv",
    ),
    Advisory(
        "git", "CVE-2024-32004", (0, 0),
        ((2, 39, 4), (2, 40, 2), (2, 41, 1), (2, 42, 2), (2, 43, 4), (2, 44, 1), (2, 45, 1)),
        "cloning somebody else's local repository runs what it says",
        "https://github.com/git/git/security/advisories/GHSA-xfc6-vwr8-r389",
    ),
    Advisory(
        "git", "CVE-2025-48384", (0, 0),
        ((2, 43, 7), (2, 44, 4), (2, 45, 4), (2, 46, 4), (2, 47, 3), (2, 48, 2), (2, 49, 1), (2, 50, 1)),
        "a clone with submodules runs a hook of the repository's",
        "https://github.com/git/git/security/advisories/GHSA-vwqx-4fm8-6qc9",
    ),
    Advisory(
        "qemu", "CVE-2021-3748", (0, 0), ((6, 1, 1), (6, 2, 0)),
        "a guest may run code in the VMM (virtio-net, memory used after it was freed)",
        "https://access.redhat.com/security/cve/cve-2021-3748",
    ),
    Advisory(
        "qemu", "CVE-2023-6693", (5, 1, 0), ((7, 2, 9), (8, 2, 1), (9, 0, 0)),
        "a guest may overflow a buffer of the VMM's (virtio-net)",
        "https://access.redhat.com/security/cve/cve-2023-6693",
    ),
)  # fmt: skip


def version_in(text: str) -> Version | None:
    """The first number with a point in what a program says of its version."""
    found = re.search(r"\d{1,6}(?:\.\d{1,6}){1,2}", text)
    return tuple(int(part) for part in found[0].split(".")) if found else None


def of(program: str, version: Version) -> list[Advisory]:
    """Those that hold for it by its number."""
    return [one for one in ADVISORIES if one.program == program and one.holds(version)]


def named_in(changelog: str, advisory: str) -> bool:
    """Whether a package's changelog (Debian Policy §12.7) names the advisory: its maintainers have mended it."""
    import gzip
    import zlib

    try:
        with gzip.open(changelog) as file:
            return re.search(rf"{advisory}(?!\d)".encode(), file.read(CHANGELOG_BYTES)) is not None
    except (OSError, EOFError, zlib.error):
        return False
