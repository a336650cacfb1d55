"""The fuzzers' kept inputs: what they found once, and scripts that reach every part.

`make -C native/vsock fuzz` goes on from them.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

INPUTS = Path(__file__).parent / "inputs"
NATIVE = Path(__file__).resolve().parents[2] / "native/vsock"


@pytest.mark.parametrize("fuzzer", sorted(path.name for path in INPUTS.iterdir()))
def test_kept_inputs_raise_nothing(fuzzer: str, built: Path) -> None:
    if shutil.which("clang") is None:
        pytest.skip("clang, which has libFuzzer, is not installed")
    program = built / "fuzz" / fuzzer
    subprocess.run(["make", "-s", "-C", NATIVE, f"../../build/fuzz/{fuzzer}"], check=True)
    done = subprocess.run([program, *sorted(INPUTS.joinpath(fuzzer).iterdir())], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
