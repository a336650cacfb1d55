"""What Firecracker is told, as texts under golden/firecracker (GOLDEN=write rewrites them). Each request is held
against the table of calls in the state it is sent in and, where FIRECRACKER_API names it, the official description."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from sandboxd.vm.arch import Arch
from sandboxd.vm.firecracker import (
    Names,
    Request,
    boot_args,
    drive,
    load_requests,
    requests,
    snapshot_requests,
    unsupported,
)
from sandboxd.vm.firecracker_calls import State, fault, find
from sandboxd.vm.firecracker_versions import Version
from sandboxd.vm.machine import Drive, MachineSpec, Rate, Share

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "firecracker"

OLD, LAST, NEW = Version((1, 14, 4)), Version((1, 15, 1)), Version((1, 16, 1))
SPEC = MachineSpec(
    id="secret-project-1",
    cpus=2,
    memory_mb=1024,
    kernel=Path("/assets/vmlinux"),
    initramfs=Path("/assets/initramfs"),
    drives=(
        Drive(Path("/a/runtime"), True),
        Drive(Path("/a/image"), True),
        Drive(Path("/s/scratch"), False),
        Drive(Path("/v/secret-volume"), True),
    ),
    directory=Path("/s/secret-project-1"),
    uid=900001,
)
NET_SPEC = replace(SPEC, tap_fd=16, mac="06:00:ac:10:00:02")
RATES = (Rate(), Rate(bytes_per_s=20 << 20), Rate(20 << 20, 500), Rate(ops_per_s=500))
LIMITED_SPEC = replace(
    SPEC, drives=tuple(replace(disk, rate=rate) for disk, rate in zip(SPEC.drives, RATES, strict=True))
)
X86 = Arch.X86_64
SEQUENCES: dict[str, tuple[Version, Sequence[Request]]] = {
    "boot": (NEW, requests(SPEC, NEW, X86, None)),
    "boot-with-network": (NEW, requests(NET_SPEC, NEW, X86, "tap0")),
    "boot-with-serial": (OLD, requests(SPEC, OLD, X86, None, serial=True)),
    "boot-with-limits": (NEW, requests(LIMITED_SPEC, NEW, X86, None)),
    "boot-on-arm64": (NEW, requests(SPEC, NEW, Arch.ARM64, None)),
    "boot-on-arm64-with-serial": (NEW, requests(SPEC, NEW, Arch.ARM64, None, serial=True)),
    "snapshot": (NEW, snapshot_requests(1024)),
    "load": (NEW, load_requests(NET_SPEC, NEW, "tap0", replaced=(2, 3))),
    "load-in-1.15": (LAST, load_requests(NET_SPEC, LAST, "tap0")),
    "load-with-limits": (NEW, load_requests(LIMITED_SPEC, NEW, None, replaced=(0, 2))),
    "load-without-network": (NEW, load_requests(SPEC, NEW, None)),
}


def text(sequence: Sequence[Request]) -> str:
    return "".join(f"{request.step} {json.dumps(request.body)} in {request.deadline_s:g} s\n" for request in sequence)


@pytest.mark.parametrize("name", SEQUENCES)
def test_the_requests_are_those_of_the_golden_text(name: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text(SEQUENCES[name][1]))
    assert text(SEQUENCES[name][1]) == path.read_text()


def test_every_golden_text_is_some_sequence() -> None:
    assert {path.stem for path in GOLDEN.iterdir() if not path.stem.startswith("jailer")} == set(SEQUENCES)


def state_after(request: Request, state: State) -> State:
    match request.body:
        case {"action_type": "InstanceStart"} | {"state": "Resumed"}:
            return State.RUNNING
        case {"state": "Paused"} | {"mem_backend": _}:
            return State.PAUSED
    return state


@pytest.mark.parametrize("name", SEQUENCES)
def test_each_request_is_one_that_the_table_takes_in_its_state(name: str) -> None:
    version, sequence = SEQUENCES[name]
    state = State.RUNNING if name == "snapshot" else State.NOT_STARTED
    configured = False
    for request in sequence:
        assert fault(request.method, request.path, request.body, state, version.number, configured) is None
        found = find(request.method, request.path)
        assert found is not None
        configured |= found[0].configures
        state = state_after(request, state)
    assert state is (State.PAUSED if name == "snapshot" else State.RUNNING)


@pytest.fixture(scope="module")
def official() -> dict[str, Any]:
    path = os.environ.get("FIRECRACKER_API")
    if not path:
        pytest.skip("FIRECRACKER_API does not name Firecracker's description of its API (firecracker.yaml)")
    loaded: dict[str, Any] = yaml.safe_load(Path(path).read_bytes())
    return loaded


def strict(definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The definitions, with each field that they do not name refused, as Firecracker refuses it."""
    found = copy.deepcopy(dict(definitions))
    for definition in found.values():
        if "properties" in definition:
            definition["additionalProperties"] = False
    # YAML 1.1 reads the log level `Off` as a truth value.
    found["Logger"]["properties"]["level"]["enum"] = [
        "Off" if level is False else level for level in found["Logger"]["properties"]["level"]["enum"]
    ]
    return found


@pytest.mark.parametrize("name", SEQUENCES)
def test_each_request_is_one_that_the_official_description_knows(official: dict[str, Any], name: str) -> None:
    definitions = strict(official["definitions"])
    for request in SEQUENCES[name][1]:
        found = find(request.method, request.path)
        assert found is not None
        parameters = official["paths"][found[0].path][request.method.lower()]["parameters"]
        (body,) = [parameter for parameter in parameters if parameter["in"] == "body"]
        validator = jsonschema_rs.Draft4Validator({**body["schema"], "definitions": definitions})
        validator.validate(request.body)
        assert not validator.is_valid({**(request.body or {}), "surprise": 1})


@pytest.mark.parametrize("name", SEQUENCES)
def test_nothing_of_a_sandbox_and_no_path_of_the_host_is_told(name: str) -> None:
    said = text(SEQUENCES[name][1])
    assert "secret" not in said and "900001" not in said
    for request in SEQUENCES[name][1]:
        for key, value in (request.body or {}).items():
            if key.endswith("_path") or key == "path_on_host":
                assert isinstance(value, str) and "/" not in value


def test_two_sandboxes_are_told_the_same() -> None:
    other = replace(SPEC, id="other", directory=Path("/other"), uid=900002)
    assert requests(other, NEW, X86, None) == requests(SPEC, NEW, X86, None)


def test_a_drive_is_as_writable_as_it_is_said_to_be() -> None:
    bodies = [request.body or {} for request in requests(SPEC, NEW, X86, None) if "drives" in request.path]
    assert [body["is_read_only"] for body in bodies] == [disk.read_only for disk in SPEC.drives]
    assert [body.get("cache_type") for body in bodies] == [None, None, "Writeback", None]
    assert not any(body["is_root_device"] for body in bodies)


def test_a_drive_is_limited_in_the_rate_that_it_has_and_a_restored_one_in_that_alone() -> None:
    limiters = [
        [(request.body or {}).get("rate_limiter") for request in SEQUENCES[name][1] if "drives" in request.path]
        for name in ("boot-with-limits", "load-with-limits")
    ]
    none = {"size": 0, "refill_time": 1000}
    much, many = {"size": 20 << 20, "refill_time": 1000}, {"size": 500, "refill_time": 1000}
    expected = [None, *({"bandwidth": bytes, "ops": ops} for bytes, ops in ((much, none), (much, many), (none, many)))]
    assert limiters == [expected, expected]


def test_a_machine_runs_last_of_all() -> None:
    assert requests(SPEC, NEW, X86, None)[-1].body == {"action_type": "InstanceStart"}
    assert load_requests(SPEC, NEW, None, replaced=(2,))[-1].body == {"state": "Resumed"}


def test_names_in_the_jail_are_single_and_apart() -> None:
    names = [*Names, *(drive(index) for index in range(16))]
    assert len(set(names)) == len(names)
    assert all("/" not in name for name in names)


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("serial", [False, True])
def test_the_kernel_has_a_console_only_when_it_is_asked_for(arch: Arch, serial: bool) -> None:
    words = boot_args(arch, serial).split()
    assert ("console=ttyS0" in words) == serial
    assert ("8250.nr_uarts=0" in words) != serial
    # Modules are loaded from the initramfs, which Firecracker's own command line would forbid.
    assert "nomodule" not in words


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (replace(SPEC, cpus=33), "at most 32 processors, not 33"),
        (replace(SPEC, drives=SPEC.drives[:1] * 17), "at most 16 drives, not 17"),
        (replace(SPEC, share=Share(5, False)), "cannot share a directory"),
    ],
)
def test_a_machine_that_firecracker_cannot_run_is_refused_with_the_reason(spec: MachineSpec, why: str) -> None:
    assert why in (unsupported(spec) or "")
    with pytest.raises(ValueError, match=why):
        requests(spec, NEW, X86, None)


def test_the_largest_machine_is_taken() -> None:
    assert unsupported(replace(SPEC, cpus=32, drives=SPEC.drives[:1] * 16)) is None


@pytest.mark.parametrize(("spec", "tap"), [(SPEC, "tap0"), (NET_SPEC, None)])
def test_an_interface_without_a_tap_and_a_tap_without_an_interface_are_refused(
    spec: MachineSpec, tap: str | None
) -> None:
    with pytest.raises(ValueError, match="a tap and a MAC"):
        requests(spec, NEW, X86, tap)
    with pytest.raises(ValueError, match="a tap and a MAC"):
        load_requests(spec, NEW, tap)


@pytest.mark.parametrize("index", [-1, 4])
def test_a_drive_that_is_not_there_cannot_be_replaced(index: int) -> None:
    with pytest.raises(ValueError, match="none of the machine's"):
        load_requests(SPEC, NEW, None, replaced=(index,))
