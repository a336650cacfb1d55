"""Small recipes for tests of the store, and a builder as a process of its own that can be killed.

`python -m tests.assets.recipes ASSETS LOG SECONDS` makes them all once. Each build adds a line to LOG, then a program
(`sleep SECONDS`) runs as build programs do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sandboxd.assets import command
from sandboxd.assets.apt import Package
from sandboxd.assets.prepare import Progress, produce
from sandboxd.assets.store import Bench, Recipe

PACKAGE = Package("tiny", "1.0", "amd64", "00" * 32, 10)


def tiny(log: Path, *, seconds: str = "0", source: str = "a", package: Package = PACKAGE) -> list[Recipe]:
    """`base`, and `top` which is made from it."""

    def note(line: str) -> None:
        with log.open("a") as file:
            file.write(line + "\n")

    def resolve(bench: Bench) -> Sequence[Package]:
        note("resolve base")
        return [package]

    def build_base(bench: Bench, packages: Sequence[Package], out: Path) -> None:
        note("build base")
        bench.report(50, "half done")
        command.run(["sleep", seconds], step="sleep")
        (out / "one").write_text(source + packages[0].version)
        (out / "two").write_bytes(b"2" * 100_000)

    def build_top(bench: Bench, packages: Sequence[Package], out: Path) -> None:
        note("build top")
        (out / "top").write_text("top of " + bench.made["base"].file("one").read_text())

    return [
        Recipe("base", 1, ("one", "two"), resolve, build_base, sources=(source,)),
        Recipe("top", 1, ("top",), lambda bench: (), build_top, after=("base",)),
    ]


def quiet(_: Progress) -> None:
    pass


if __name__ == "__main__":
    produce(Path(sys.argv[1]), tiny(Path(sys.argv[2]), seconds=sys.argv[3]), quiet)
