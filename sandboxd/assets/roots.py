"""A look at an unpacked image, before it becomes a drive: whether a guest can make its root of it. Run as a program, in
a jail, by `oci`.

    python -I roots.py TREE

Out: nothing, or on stdout what is wrong, in a person's words. Links are followed as the guest will, never out of the
tree. An image may lack all of this: what is missing is made at boot, what is something else is in the way.
"""

from __future__ import annotations

import os
import stat
import sys

DIRECTORIES = ("proc", "sys", "dev", "run", "tmp", "etc", "workspace", "sandbox", "sandbox/home")
FILES = ("passwd", "group", "hostname", "hosts", "machine-id", "gitconfig", "resolv.conf")
MAX_LINKS = 40      # the kernel's, path_resolution(7)


class Nowhere(Exception):
    """A link that leads to nothing, or to itself."""


def follow(tree: str, path: str) -> str | None:
    """Where the path leads, as a path in the tree; None where nothing is there."""
    left = path.split("/")[::-1]
    done: list[str] = []
    links = 0
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        if part == "..":
            del done[-1:]
            continue
        try:
            mode = os.lstat(os.path.join(tree, *done, part)).st_mode
        except OSError:
            if links:
                raise Nowhere from None
            return None
        if not stat.S_ISLNK(mode):
            done.append(part)
            continue
        links += 1
        if links > MAX_LINKS:
            raise Nowhere
        target = os.readlink(os.path.join(tree, *done, part))
        if target.startswith("/"):
            done = []
        left += target.split("/")[::-1]
    return os.path.join(tree, *done)


def fault(tree: str) -> str:
    """Empty where a guest can start."""
    for path in DIRECTORIES:
        try:
            found = follow(tree, path)
        except Nowhere:
            return f"its /{path} is a link that leads nowhere"
        if found is not None and not os.path.isdir(found):
            return f"its /{path} is not a directory"
    for name in FILES:
        if os.path.isdir(os.path.join(follow(tree, "etc") or "", name)):
            return f"its /etc/{name} is a directory"
    return ""


if __name__ == "__main__":
    print(fault(sys.argv[1]))
