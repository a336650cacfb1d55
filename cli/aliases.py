"""The other names of a file in a tree with symbolic links: who changes what a link leads to, changes the link's file.

In: the links of a commit with their targets, which are a guest's word. Out: for a path, the names under which it can be
read too. Pure; nothing is opened, and links that lead out of the tree or in a circle lead nowhere here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

HOPS = 40  # what Linux follows (path_resolution(7))
NAMES = 16  # of one file; links in a circle would give it names without end
PATH_BYTES = 4096
STEPS = 500_000  # names gone through for all links together, which may be made to lead through millions


class Aliases:
    """`targets` are the links' own texts, by path. `unfollowed` says why not all of them are followed."""

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._targets = targets
        self._steps = STEPS
        self._links: dict[str, list[str]] = {}
        for link in targets:
            end = self._followed(link)
            if end is not None and end != link:
                self._links.setdefault(end, []).append(link)
        self.unfollowed = "its symbolic links lead through too many names" if self._steps < 0 else ""

    def ends(self) -> Collection[str]:
        """What the links lead to, whether it is there or not."""
        return self._links.keys()

    def of(self, path: str) -> Iterator[str]:
        """At most NAMES of them."""
        if not self._links:
            return
        names = [path]
        for name in names:
            end = len(name)
            while end >= 0:
                for link in self._links.get(name[:end], ()):
                    rest = name[end:] if end else f"/{name}"
                    other = link + rest
                    if other in names or len(other) > PATH_BYTES:
                        continue
                    names.append(other)
                    yield other
                    if len(names) > NAMES:
                        return
                end = name.rfind("/", 0, end) if "/" in name[:end] else (0 if end else -1)

    def _followed(self, link: str) -> str | None:
        """Where a link ends, as a path of the tree; "" is its top."""
        left = link.split("/")[::-1]
        at = ""
        hops = 0
        while left:
            self._steps -= 1
            part = left.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if not at:
                    return None
                at = at.rpartition("/")[0]
                continue
            here = f"{at}/{part}" if at else part
            if self._steps < 0 or len(here) > PATH_BYTES:
                return None
            target = self._targets.get(here)
            if target is None:
                at = here
                continue
            hops += 1
            if hops > HOPS or target.startswith("/"):
                return None
            left += target.split("/")[::-1]
        return at


NONE = Aliases({})
