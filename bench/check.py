"""Compare the last figures with their floors.

Usage: check.py [--factor F]

  --factor F  how much worse than its floor a ratio may be [default: 1]

Reads bench/out/latest.json and bench/pins.toml. Exits with 1 when a ratio is worse than its floor times F, or when
a pinned benchmark has no figure.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from docopt import docopt

HERE = Path(__file__).resolve().parent


def verdict(name: str, pin: dict[str, Any], info: dict[str, Any] | None, factor: float) -> tuple[bool, str]:
    """Whether a benchmark holds its floor, and the line that says so."""
    if info is None:
        return False, f"{name}: no figure in bench/out/latest.json, run `make bench`"
    ratio, floor = float(info["ratio"]), float(pin["ratio"])
    holds = ratio <= floor * factor if info["better"] == "lower" else ratio >= floor / factor
    sign = "≤" if info["better"] == "lower" else "≥"
    allowed = floor * factor if info["better"] == "lower" else floor / factor
    return holds, f"{name}: ratio {ratio:.3g} {sign} {allowed:.3g} {'holds' if holds else 'DOES NOT HOLD'}"


def main() -> int:
    factor = float(docopt(__doc__)["--factor"])
    pins = tomllib.loads((HERE / "pins.toml").read_text())
    latest = HERE / "out" / "latest.json"
    report = json.loads(latest.read_text()) if latest.exists() else {"benchmarks": []}
    found = {entry["name"]: entry["extra_info"] for entry in report["benchmarks"]}
    verdicts = [verdict(name, pin, found.get(name), factor) for name, pin in sorted(pins.items())]
    for _, line in verdicts:
        print(line)
    return 0 if all(holds for holds, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
