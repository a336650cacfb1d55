"""Run the benchmarks and keep their figures.

Usage: run.py [--only NAME] [--short]

  --only NAME  run the benchmarks whose name holds NAME, and merge their figures into those already there
  --short      few rounds, for CI: the ratios are rough

The figures go to bench/out/latest.json in pytest-benchmark's format. Every benchmark's `extra_info` has `ours`,
`peer` (seconds, or bytes a second), `peer_name`, `ratio` (ours/peer) and `better` (`lower` or `higher`); ours and
the peer were measured alternately in this one run, since absolute times on a shared machine say little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from docopt import docopt

HERE = Path(__file__).resolve().parent
LATEST = HERE / "out" / "latest.json"


def merge(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The new report, with those benchmarks of the old one that did not run this time."""
    for entry in new["benchmarks"]:
        entry["name"] = entry["name"].removeprefix("test_")
    ran = {entry["name"] for entry in new["benchmarks"]}
    kept = [entry for entry in (old or {}).get("benchmarks", []) if entry["name"] not in ran]
    new["benchmarks"] = sorted([*kept, *new["benchmarks"]], key=lambda entry: str(entry["name"]))
    return new


def table(report: dict[str, Any]) -> str:
    rows = [("benchmark", "ours", "peer", "ratio", "better", "peer is")]
    for entry in report["benchmarks"]:
        info = entry["extra_info"]
        figures = [f"{info[key]:.4g}" for key in ("ours", "peer", "ratio")]
        rows.append((entry["name"], *figures, info["better"], info["peer_name"]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> int:
    arguments = docopt(__doc__)
    LATEST.parent.mkdir(exist_ok=True)
    environment = os.environ | ({"BENCH_SHORT": "1"} if arguments["--short"] else {})
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        out = Path(scratch) / "report.json"
        only = ["-k", arguments["--only"]] if arguments["--only"] else []
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-disable-gc"]
        command += ["--benchmark-quiet", f"--benchmark-json={out}", *only, str(HERE)]
        code = subprocess.run(command, cwd=HERE.parent, env=environment, check=False).returncode
        if code != 0:
            return code
        old = json.loads(LATEST.read_text()) if LATEST.exists() and only else None
        report = merge(old, json.loads(out.read_text()))
    partial = LATEST.with_suffix(".part")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(LATEST)
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
