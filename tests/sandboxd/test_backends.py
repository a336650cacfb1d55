"""Which backend it is, by what was asked for, what is installed, its version, and whether KVM works."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from native import KvmAnswer, KvmState
from sandboxd import backends, fields
from sandboxd.assets.prepare import Assets
from sandboxd.backends import Asked, Chosen
from sandboxd.errors import BootFailed, SetupError
from sandboxd.vm import commands, firecracker, firecracker_versions, jailer, kvm, machine, processes
from sandboxd.vm.processes import Record

GOOD = "1.16.1"
WORKS = KvmAnswer(KvmState.OK, "it counted", 1, 0.1)
ABSENT = KvmAnswer(KvmState.ABSENT, "there is no /dev/kvm", 0, 0.0)


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked("auto", install(tmp_path, GOOD), "", "", tmp_path, tmp_path, "0123456789ab")


def install(directory: Path, version: str, jailer: str = "") -> str:
    """Programs that say which version they are, and nothing else. The jailer lies beside."""
    for name, said in (("firecracker", f"Firecracker v{version}"), ("jailer", f"Jailer v{jailer or version}")):
        path = directory / name
        path.write_text(f"#!/bin/sh\necho '{said}'\necho\necho 'exiting successfully exit_code=0'\n")
        path.chmod(0o755)
    return str(directory / "firecracker")


def qemu() -> commands.Tools:
    return commands.find_tools(Path(__file__).resolve().parents[2] / "build" / "sandbox-vsock", "0123456789ab")


def no_qemu() -> commands.Tools:
    raise SetupError("qemu-system-x86_64 is missing")


def choose(asked: Asked, answer: KvmAnswer = WORKS, find: Any = qemu) -> Chosen:
    return backends.choose(asked, find, range(0), lambda: answer, 0.1)


def settle(chosen: Chosen, fault: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """With a trial that ends in `fault`, or well where that is empty."""

    async def tried(*_: object) -> str:
        return fault

    monkeypatch.setattr(kvm, "attempt", tried)
    file = chosen._asked.state_dir / "file"
    file.write_bytes(b"")
    return anyio.run(chosen.settle, Assets(file, file, file, file, "key"), None)


def test_auto_takes_firecracker_where_it_is_good_and_kvm_works(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(asked)
    assert (chosen.name, chosen.allowed) == ("firecracker", "")
    assert "--backend qemu" in chosen.why_not_shared()
    said = settle(chosen, "", monkeypatch)
    assert said == f"firecracker {GOOD} (KVM: it counted, and our kernel booted)"


def test_a_machine_has_as_many_processors_as_its_vmm_gives_it(asked: Asked) -> None:
    assert choose(asked).max_cpus == firecracker.MAX_CPUS
    assert choose(asked, ABSENT).max_cpus == machine.MAX_CPUS


def test_no_sandbox_has_more_drives_than_firecracker_gives_a_machine() -> None:
    assert 3 + fields.MAX_MOUNTS <= firecracker.MAX_DRIVES


def test_auto_without_a_kvm_that_works_is_qemu_and_says_why(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(asked, ABSENT)
    assert chosen.name == "qemu"
    said = settle(chosen, "", monkeypatch)
    assert said == "qemu with tcg (software emulation: KVM is absent: there is no /dev/kvm); not firecracker either"


def test_auto_where_our_kernel_does_not_boot_is_qemu_and_says_why(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = choose(asked)
    said = settle(chosen, "our kernel said nothing in 10 s", monkeypatch)
    assert chosen.name == "qemu"
    assert said.startswith("qemu with tcg")
    reason = "KVM is present-but-unusable: our kernel said nothing in 10 s"
    assert said == f"qemu with tcg (software emulation: {reason}); not firecracker either"


def test_a_version_that_was_allowed_is_told_of_only_while_it_starts_machines(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Path(asked.firecracker).parent, "1.14.3")
    chosen = choose(replace(asked, allowed="1.14.3"))
    settle(chosen, "it said nothing", monkeypatch)
    assert (chosen.name, chosen.allowed) == ("qemu", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's machines are put into a jail by links")
@pytest.mark.parametrize("backend", ["auto", "firecracker"])
@pytest.mark.parametrize(
    ("fault", "said"), [(None, "must be on one file system"), (OSError(30, "Read-only"), "cannot be tried: .*only")]
)
def test_a_state_directory_where_no_jail_can_be_made(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, backend: str, fault: OSError | None, said: str
) -> None:
    def tried(*_: object) -> str:
        if fault is not None:
            raise fault
        return "images and state must be on one file system"

    monkeypatch.setattr(jailer, "unfit", tried)
    chosen = choose(replace(asked, backend=backend))
    if backend == "firecracker":
        with pytest.raises(SetupError, match=f"--backend firecracker cannot be used: .*{said}"):
            settle(chosen, "", monkeypatch)
    else:
        assert re.search(f"; not firecracker: .*{said}", settle(chosen, "", monkeypatch))
        assert chosen.name == "qemu"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's machines have a jailer")
def test_a_name_that_the_jailer_does_not_take(asked: Asked) -> None:
    renamed = Path(asked.firecracker).rename(asked.state_dir / "fc")
    with pytest.raises(SetupError, match=r"/fc: the jailer takes no program .*; rename it"):
        choose(replace(asked, backend="firecracker", firecracker=str(renamed)))


def test_what_two_vmms_did_with_our_kernel_is_remembered(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    said = settle(choose(asked), "it said nothing", monkeypatch)
    assert settle(choose(asked), "it was tried again", monkeypatch) == said


@pytest.mark.parametrize("fault", [BootFailed("making the machine's jail", None, b""), OSError(28, "no space left")])
def test_a_trial_that_came_to_nothing_is_made_again_the_next_time(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    async def fails(*_: object) -> str:
        raise fault

    file = asked.state_dir / "file"
    file.write_bytes(b"")
    monkeypatch.setattr(kvm, "attempt", fails)
    chosen = choose(asked)
    said = anyio.run(chosen.settle, Assets(file, file, file, file, "key"), None)
    assert chosen.name == "qemu"
    assert f"KVM could not be tried: {fault}); not firecracker either" in said
    assert settle(choose(asked), "", monkeypatch).startswith("firecracker")


def test_what_was_asked_for_and_does_not_boot_is_refused(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(replace(asked, backend="firecracker"))
    with pytest.raises(SetupError, match=r"--backend firecracker cannot be used: .*said nothing"):
        settle(chosen, "it said nothing", monkeypatch)


def test_firecracker_needs_no_qemu_and_auto_without_both_is_refused(asked: Asked) -> None:
    assert choose(asked, find=no_qemu).name == "firecracker"
    with pytest.raises(SetupError, match="qemu-system"):
        choose(asked, ABSENT, no_qemu)


def test_qemu_that_was_asked_for_asks_nobody_else(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(replace(asked, backend="qemu", firecracker="/nowhere/firecracker"), ABSENT)
    assert (chosen.name, chosen.silent) == ("qemu", False)
    assert "firecracker" not in settle(chosen, "", monkeypatch)


@pytest.mark.parametrize(
    ("version", "jailer", "part"),
    [
        ("1.14.3", "", "CVE-2026-5747"),
        ("1.15.0", "", "CVE-2026-5747"),
        ("1.16.0", "", "vsock device of a machine that was restored"),
        ("1.17.0-dev", "", "not a release"),
        (GOOD, "1.15.1", "they belong together"),
    ],
)
def test_a_version_that_is_not_taken(asked: Asked, version: str, jailer: str, part: str) -> None:
    if jailer and os.geteuid() != 0:
        pytest.skip("only root's machines have a jailer")
    install(Path(asked.firecracker).parent, version, jailer)
    with pytest.raises(SetupError, match=part):
        choose(replace(asked, backend="firecracker"))
    chosen = choose(asked)
    assert chosen.name == "qemu"
    assert part in chosen._why


@pytest.mark.parametrize(("said", "taken"), [("1.14.3", True), ("v1.14.3", True), ("1.14.2", False)])
def test_a_version_that_the_operator_allows(asked: Asked, said: str, taken: bool) -> None:
    install(Path(asked.firecracker).parent, "1.14.3")
    chosen = choose(replace(asked, allowed=said))
    assert (chosen.name == "firecracker") is taken
    assert ("CVE-2026-5747" in chosen.allowed) is taken
    assert chosen.allowed.startswith("Firecracker 1.14.3 is taken, as --allow-firecracker says: ") is taken


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"firecracker": "/nowhere/firecracker"}, "/nowhere/firecracker is no program"),
        ({"firecracker": "/bin/echo"}, "did not say which version"),
        ({"allowed": "the newest"}, "--allow-firecracker: a version is three numbers"),
    ],
)
def test_what_cannot_be_used_is_named(asked: Asked, changes: dict[str, Any], part: str) -> None:
    install(Path(asked.firecracker).parent, "1.14.3")
    with pytest.raises(SetupError, match=part):
        choose(replace(asked, backend="firecracker", **changes))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's machines have a jailer")
def test_a_program_that_may_not_be_run_is_told_apart_from_none(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firecracker_versions, "PLACES", f"{asked.state_dir}/none:{asked.state_dir}")
    for name in ("jailer", "firecracker"):
        path = asked.state_dir / name
        path.chmod(0o644)
        with pytest.raises(SetupError, match=f"{path} may not be run by this user: chmod 755 {path}"):
            choose(replace(asked, backend="firecracker", firecracker=""))
    (asked.state_dir / "firecracker").chmod(0o755)
    (asked.state_dir / "jailer").unlink()
    with pytest.raises(SetupError, match="jailer is not installed; put it in /usr/local/bin, or name it with --jailer"):
        choose(replace(asked, backend="firecracker", firecracker=""))


def test_where_it_is_not_installed_both_ways_are_named(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firecracker_versions, "PLACES", str(asked.state_dir / "empty"))
    with pytest.raises(SetupError, match=r"not installed; put it in /usr/local/bin, or name it with --firecracker"):
        choose(replace(asked, backend="firecracker", firecracker=""))


def test_a_machine_of_a_backend_that_is_gone_is_no_reason_to_end_it(asked: Asked, tmp_path: Path) -> None:
    own = processes.Process("Firecracker", os.getpid(), processes.start_ticks(os.getpid()))
    processes.write_record(tmp_path, Record("sbx_1", "/sandboxd/0123456789ab/sbx_1", (own,)))
    with pytest.raises(SetupError, match="sbx_1 runs under Firecracker, which this sandboxd does not find"):
        anyio.run(choose(replace(asked, backend="qemu")).adopt, tmp_path, "sbx_1")
    ended = replace(own, start_ticks=own.start_ticks - 1)
    processes.write_record(tmp_path, Record("sbx_1", "/sandboxd/0123456789ab/sbx_1", (ended,)))
    assert anyio.run(choose(replace(asked, backend="qemu")).adopt, tmp_path, "sbx_1") is None
