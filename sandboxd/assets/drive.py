"""The file system of the read-only drives: EROFS, not compressed.

Built so that the same tree gives the same bytes: one time for every file, a fixed identifier, no extended attributes,
owners as they are in the tree.
"""

from __future__ import annotations

from pathlib import Path

EPOCH_S = 1_700_000_000
_UUID = "5a0db0c5-0000-4000-8000-5a4db0c50001"


def mkfs(tree: Path, image: Path) -> list[str]:
    return ["mkfs.erofs", "--quiet", f"-T{EPOCH_S}", f"-U{_UUID}", "-x-1", str(image), str(tree)]
