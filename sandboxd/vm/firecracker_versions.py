"""Which versions of Firecracker are taken, and what came with which.

In: what `firecracker --version` printed. Out: a `Version`, why it is refused with the remedy, and whether it has
something. Each row names the page that it was read from. A fork has the faults of the version it calls itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

Number = tuple[int, int, int]

_VERSION = re.compile(r"v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})([-+][A-Za-z0-9.+-]{1,64})?", re.ASCII)
_PRINTED = re.compile(rf"(?:Firecracker|Jailer) ({_VERSION.pattern})", re.ASCII)
PLACES = "/usr/local/bin:/usr/bin:/usr/local/sbin:/usr/sbin"
"""Where Firecracker and its jailer are looked for, whatever PATH says."""
_RELEASES = "https://github.com/firecracker-microvm/firecracker/releases"


@dataclass(frozen=True, slots=True)
class Version:
    """`suffix` is empty for a release, else `-dev` and the like."""

    number: Number
    suffix: str = ""

    def __str__(self) -> str:
        return ".".join(map(str, self.number)) + self.suffix


@dataclass(frozen=True, slots=True)
class Known:
    """Versions from `first` on, before `fixed`, have the fault."""

    first: Number
    fixed: Number
    why: str
    source: str


_JAILER = "root's jailer follows a symbolic link and overwrites a file of the host (CVE-2026-1386)"
_JAILER_SOURCE = "https://github.com/firecracker-microvm/firecracker/security/advisories/GHSA-36j2-f825-qvgc"
_PCI = "the root user of a guest can write outside of the guest's memory (CVE-2026-5747)"
_PCI_SOURCE = "https://aws.amazon.com/security/security-bulletins/2026-015-aws"

KNOWN = (
    # The guest's kernel finds its devices through ACPI, and has no other way to.
    Known(
        (0, 0, 0), (1, 8, 0), "it describes no devices to a guest's kernel in ACPI tables",
        "https://github.com/firecracker-microvm/firecracker/pull/4428",
    ),
    Known((0, 0, 0), (1, 13, 2), _JAILER, _JAILER_SOURCE),
    Known((1, 14, 0), (1, 14, 1), _JAILER, _JAILER_SOURCE),
    # Only with --enable-pci, which is not used here; but a version with a known hole needs someone who says yes to it.
    Known((1, 13, 0), (1, 14, 4), _PCI, _PCI_SOURCE),
    Known((1, 15, 0), (1, 15, 1), _PCI, _PCI_SOURCE),
    Known(
        (1, 16, 0), (1, 16, 1), "the vsock device of a machine that was restored may be dead for good",
        "https://github.com/firecracker-microvm/firecracker/issues/5969",
    ),
)  # fmt: skip


class Feature(Enum):
    """What came with a version."""

    ENTROPY = (1, 4, 0)
    """https://github.com/firecracker-microvm/firecracker/blob/main/CHANGELOG.md: `PUT /entropy`"""
    NETWORK_OVERRIDES = (1, 12, 0)
    """https://github.com/firecracker-microvm/firecracker/pull/4731: another tap when a snapshot is loaded"""
    VSOCK_OVERRIDE = (1, 16, 0)
    """https://github.com/firecracker-microvm/firecracker/pull/5323: another socket when a snapshot is loaded"""


# After a bare pause and resume nothing on the host gets a connection to the guest any more. It came with 1.16.0
# (https://github.com/firecracker-microvm/firecracker/issues/6074); the mend, pull request 6100, is in what becomes
# 1.16.2 (https://github.com/firecracker-microvm/firecracker/pull/6182).
RESUME_BROKEN = ((1, 16, 0), (1, 16, 2))


def parse(printed: str) -> Version:
    """From the first line of what a program printed for `--version`. Raises ValueError."""
    first = printed.split("\n", 1)[0].strip()
    found = _PRINTED.fullmatch(first)
    if found is None:
        raise ValueError("it did not say which version of Firecracker it is")
    return read(found[1])


def read(text: str) -> Version:
    """From `1.16.1` or `v1.16.1`, as a person writes it. Raises ValueError."""
    found = _VERSION.fullmatch(text)
    if found is None:
        raise ValueError("a version is three numbers, such as 1.16.1")
    return Version((int(found[1]), int(found[2]), int(found[3])), found[4] or "")


def against(version: Version) -> str:
    """What is known against it; empty where nothing is."""
    known = _known(version.number)
    # What is not a release may have been built before the fix came in.
    if not known and version.suffix:
        return "it is not a release, and nobody can tell which faults it has"
    return "; ".join(f"{row.why}, see {row.source}" for row in known)


def fault(version: Version) -> str | None:
    """Why the version is refused, and what to do; None for one that is taken."""
    reasons = against(version)
    if not reasons:
        return None
    good = ", ".join(str(Version(number)) for number in sorted({row.fixed for row in KNOWN}) if not _known(number))
    return (
        f"Firecracker {version} is refused: {reasons}. Install a release without that "
        f"({good}, or a later one of these) from {_RELEASES}, or start sandboxd with --allow-firecracker {version}"
    )


def has(version: Version, feature: Feature) -> bool:
    return version.number >= feature.value


def resumes(version: Version) -> bool:
    """Whether the guest can still be reached after it was paused and resumed in the same VMM."""
    first, fixed = RESUME_BROKEN
    return not first <= version.number < fixed


def _known(number: Number) -> list[Known]:
    return [row for row in KNOWN if row.first <= number < row.fixed]
