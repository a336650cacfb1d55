"""The other names of a file in a tree with symbolic links: who changes what a link leads to, changes the link's file.

In: the links of a commit with their targets, which are a guest's word. Out: for a path, the names under which it can be
read too. Pure; nothing is opened, and links that lead out of the tree or in a circle lead nowhere here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

HOPS = 40  # what Linux follows (path_resolution(7))
NAMES = 16  # of one file; links in a circle would give it names without end
PATH_BYTES = 4096


class Aliases:
    """`targets` are the links' own texts, by path."""

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._targets = targets
        self._links: dict[str, list[str]] = {}
        for link in targets:
            end = self._followed(link)
            if end is not None and end != link:
                self._links.setdefault(end, []).append(link)

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
        left = link.split("/")
        at: list[str] = []
        hops = 0
        while left:
            part = left.pop(0)
            if part in ("", "."):
                continue
            if part == "..":
                if not at:
                    return None
                at.pop()
                continue
            at.append(part)
            target = self._targets.get("/".join(at))
            if target is None:
                continue
            hops += 1
            if hops > HOPS or target.startswith("/"):
                return None
            at.pop()
            left = target.split("/") + left
        return "/".join(at)


NONE = Aliases({})
