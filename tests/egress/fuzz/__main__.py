"""`python tests/egress/fuzz SECONDS [NAME…]`: each target that long, with atheris where it is installed.

A target is a module beside this one: SEEDS, and `one(data)`, which raises where something is wrong. Without atheris
the seeds are changed at random, which finds less.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent

TARGETS = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))


def guided(name: str, seconds: int) -> None:
    import atheris  # type: ignore[import-not-found,unused-ignore]

    with atheris.instrument_imports(include=["egress"]):
        target = importlib.import_module(f"tests.egress.fuzz.{name}")
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.SEEDS):
            Path(corpus, str(number)).write_bytes(seed)
        atheris.Setup(
            [name, corpus, f"-max_total_time={seconds}", "-print_final_stats=1", f"-artifact_prefix={HERE}/{name}-"],
            target.one,
        )
        atheris.Fuzz()


def mutated(data: bytes, seeds: list[bytes], chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at, count = chance.randint(0, len(changed)), chance.randint(1, 8)
        match chance.randrange(5):
            case 0:
                changed[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del changed[at : at + count]
            case 2:
                changed[at:at] = changed[at : at + count * 8]
            case 3:
                changed[at:at] = chance.choice((b"\0", b"\r", b"\n", b"\r\n", b" ", b"\t", b":", b".", b"\xff\xff"))
            case _:
                other = chance.choice(seeds)
                start = chance.randint(0, len(other))
                changed[at:at] = other[start : start + count * 8]
    return bytes(changed)


def blind(name: str, seconds: int) -> None:
    target = importlib.import_module(f"tests.egress.fuzz.{name}")
    seed = random.SystemRandom().randrange(1 << 32)
    chance, end, count = random.Random(seed), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        data = mutated(chance.choice(target.SEEDS), target.SEEDS, chance)
        try:
            target.one(data)
        except BaseException:
            print(f"{name}: a finding (seed {seed}, number {count}): {data.hex()}")
            raise
        count += 1
    print(f"{name}: {count} inputs in {seconds} s, no finding")


def main(seconds: int, names: list[str]) -> int:
    run: Callable[[str, int], None] = guided if importlib.util.find_spec("atheris") else blind
    failed = []
    for name in names or TARGETS:
        # A child each: atheris ends its process.
        child = multiprocessing.get_context("fork").Process(target=run, args=(name, seconds))
        child.start()
        child.join()
        if child.exitcode:
            failed.append(name)
    if failed:
        print("findings in:", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path[0] = str(HERE.parents[2])
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
