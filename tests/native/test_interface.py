"""native.h and its Python face say the same."""

from __future__ import annotations

import re
from pathlib import Path

import native
from native import _native

HEADER = (Path(native.__file__).parent / "native.h").read_text()


def enumerators(name: str) -> set[int]:
    body = re.search(rf"enum {name} \{{(.*?)\}};", HEADER, re.DOTALL)
    assert body
    return {int(value) for value in re.findall(r"= (\d+)", body.group(1))}


def test_the_header_is_plain_c_that_cffi_reads_as_it_is() -> None:
    assert not [line for line in HEADER.splitlines() if line.lstrip().startswith("#")]


def test_every_step_has_a_text_and_every_answer_a_meaning() -> None:
    assert set(native._HOSTPATH_STEPS) == enumerators("hostpath_step")
    assert set(native._HOSTPATH_REFUSALS) == enumerators("hostpath_verdict") - {_native.lib.HOSTPATH_ALLOWED}
    assert set(native._KVM_STEPS) == enumerators("kvm_probe_step")
    assert set(native._KVM_STATES) == enumerators("kvm_probe_state")
