"""The check of real hardware: what it says where there is none to check, and its report, from made-up results."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from native import KvmAnswer, KvmState
from sandboxd import backends
from sandboxd.backends import Asked
from tests.daemon import assets_dir
from tests.firecracker_standin.real import programs
from tests.hardware import check, report
from tests.hardware.report import Outcome, Result

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "hardware.txt"


def test_the_report() -> None:
    facts = {"date": "2026-11-30 09:00 UTC", "firecracker": "1.16.1", "kernel": "6.1.0-57-amd64 x86_64"}
    results = [
        Result("KVM", Outcome.PASS, "100,000,000 turns", 0.0312),
        Result("boot", Outcome.PASS, report.ratio(0.41, 0.2, 5), 0.41),
        Result("fork", Outcome.SKIP, "no such test"),
        Result("conformance: test_a", Outcome.FAIL, "a \x1b[31mred\x1b[0m line\nand another", 61.5),
        Result("escape: test_b", Outcome.FAIL, "x" * 5000),
    ]
    said = report.text(facts, results)
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(said)
    assert said == GOLDEN.read_text()
    assert all(character.isprintable() or character == "\n" for character in said)


@pytest.mark.parametrize(
    ("outcomes", "good"),
    [([], False), ([Outcome.PASS, Outcome.SKIP], True), ([Outcome.PASS, Outcome.FAIL], False)],
    ids=["nothing was checked", "nothing failed", "something failed"],
)
def test_whether_it_is_good(outcomes: list[Outcome], good: bool) -> None:
    assert report.good([Result("x", outcome) for outcome in outcomes]) is good


XML = """<?xml version="1.0"?><testsuites><testsuite name="pytest">
<testcase classname="c" name="test_a" time="1.5"/>
<testcase classname="c" name="test_b[x]" time="0.1"><failure message="assert 1 == 2">long</failure></testcase>
<testcase classname="c" name="test_c" time="0"><error message="failed on setup">long</error></testcase>
<testcase classname="c" name="test_d" time="0"><skipped type="pytest.skip" message="no root">l</skipped></testcase>
</testsuite></testsuites>"""


def test_what_pytest_says_is_taken_over() -> None:
    assert report.of_pytest("escape", XML) == [
        Result("escape: test_a", Outcome.PASS, "", 1.5),
        Result("escape: test_b[x]", Outcome.FAIL, "assert 1 == 2", 0.1),
        Result("escape: test_c", Outcome.FAIL, "failed on setup", 0.0),
        Result("escape: test_d", Outcome.SKIP, "no root", 0.0),
    ]


@pytest.mark.parametrize("xml", ["", "<testsuites>"])
def test_a_run_without_a_report_is_no_success(xml: str) -> None:
    with pytest.raises(ValueError, match="no report"):
        report.of_pytest("escape", xml)


STATUS = """Name:\tfc_vcpu 0
Uid:\t900001\t900001\t900001\t900001
Gid:\t900001\t900001\t900001\t900001
CapInh:\t0000000000000000
CapPrm:\t0000000000000000
CapEff:\t0000000000000000
CapBnd:\t000001ffffffffff
CapAmb:\t0000000000000000
NoNewPrivs:\t1
Seccomp:\t2
Seccomp_filters:\t2
"""
OURS = {name: f"{name}:[1]" for name in ("mnt", "pid", "net", "ipc", "uts", "user")}
OWN = {name: f"{name}:[2]" for name in OURS}
ROOT = ["api.sock", "dev", "drive0", "firecracker", "kernel", "v.sock"]


@pytest.mark.parametrize("status", [STATUS, STATUS.replace("Seccomp_filters:\t2\n", "")], ids=["now", "before 5.9"])
def test_a_vmm_as_it_is_to_be(status: str) -> None:
    assert report.unconfined([STATUS, status], OWN, OURS, ROOT, as_root=True) == []


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("Uid:\t900001\t900001", "Uid:\t900001\t0", "its uids are 900001 0"),
        ("900001", "0", "its uids are 0 0"),
        ("Gid:\t900001", "Gid:\t0", "its gids 0"),
        ("CapPrm:\t0000000000000000", "CapPrm:\t0000000000000002", "CapPrm"),
        ("NoNewPrivs:\t1", "NoNewPrivs:\t0", "gain privileges"),
        ("Seccomp:\t2", "Seccomp:\t0", "no filter of system calls"),
        ("Seccomp_filters:\t2", "Seccomp_filters:\t1", "Firecracker's own filter"),
    ],
)
def test_a_thread_that_can_more_is_told_of(before: str, after: str, why: str) -> None:
    (said,) = report.unconfined([STATUS, STATUS.replace(before, after)], OWN, OURS, ROOT, as_root=True)
    assert why in said


def test_what_is_the_hosts_is_told_of() -> None:
    said = report.unconfined([STATUS], OWN | {"net": OURS["net"]}, OURS, [*ROOT, "etc", "proc"], as_root=True)
    assert said == ["it is in the host's namespace (net)", "its root directory has etc, proc"]


CPUINFO = """processor\t: 0
model name\t: Some Processor 9000
microcode\t: 0x2b
flags\t\t: fpu vmx hypervisor

processor\t: 1
model name\t: Some Processor 9000
flags\t\t: fpu vmx hypervisor
"""


def test_the_processor() -> None:
    assert report.processor(CPUINFO) == (
        "Some Processor 9000, 2 of them; vmx; microcode 0x2b; this machine is itself a guest"
    )
    assert report.processor("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd0c\n") == (
        "implementer 0x41 part 0xd0c, 1 of them; neither vmx nor svm"
    )


@pytest.mark.parametrize("state", [state for state in KvmState if state is not KvmState.OK])
def test_without_a_kvm_that_works_nothing_is_run(state: KvmState, capfd: pytest.CaptureFixture[str]) -> None:
    assert check.main([], lambda: KvmAnswer(state, "the very reason", 0, 0.0)) == 1
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == f"check-kvm: KVM is {state.value}: the very reason; nothing was run\n"


@pytest.mark.parametrize("words", [["--only", "nothing"], ["--rounds", "0"], ["--rounds", "many"]])
def test_what_is_not_understood(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert check.main(words, lambda: KvmAnswer(KvmState.OK, "", 0, 0.0)) == 1
    assert "--only is one of boot, confinement, fork, conformance, escape" in capfd.readouterr().err


def test_without_firecracker_nothing_is_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--firecracker", str(tmp_path / "none")]
    assert check.main(words, lambda: KvmAnswer(KvmState.OK, "", 0, 0.0)) == 1
    said = capfd.readouterr()
    assert said.out == "" and "name the one you have with --firecracker; nothing was run" in said.err


def test_a_part_that_goes_wrong_does_not_cost_the_report() -> None:
    def act() -> list[Result]:
        raise RuntimeError("sandboxd did not come up")

    (result,) = check._attempt("boot", act)
    assert result.outcome is Outcome.FAIL and "sandboxd did not come up" in result.why


def test_a_log_is_cut_where_it_says_least() -> None:
    said = report.text({}, [Result("boot", Outcome.FAIL, f"came to nothing {'x' * 4000} it ended")])
    (line,) = [line for line in said.splitlines() if "boot" in line]
    assert "boot: came to nothing x" in line and line.endswith("x it ended") and len(line) < 650


def here(directory: Path) -> check.Here:
    """With a Firecracker that says which version it is, and nothing after that."""
    for name, said in (("firecracker", "Firecracker"), ("jailer", "Jailer")):
        does = f"case $1 in --version) echo {said} v1.16.1;; *) exec sleep 60;; esac"
        (directory / name).write_text(f"#!/bin/sh\n{does}\n")
        (directory / name).chmod(0o755)
    asked = Asked("firecracker", str(directory / "firecracker"), "", "", directory, directory, "check")
    return check.Here(backends.find_firecracker(asked), (), directory, 1)


def test_a_firecracker_that_hangs_does_not_hang_the_check(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    with pytest.raises(RuntimeError, match="Firecracker by itself did not boot"):
        check._bare(here(tmp_path), nothing, nothing, nothing, 0.1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's machines are put into a jail by links")
def test_a_place_where_no_jail_can_be_made_is_a_result_of_its_own(tmp_path: Path) -> None:
    (bad,) = check._place(replace(here(tmp_path), directory=tmp_path / "gone"))
    assert bad.outcome is Outcome.FAIL and f"{tmp_path}/gone" in bad.why


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="the jailer needs root")
def test_a_boot_is_timed_and_its_vmm_looked_at_with_the_stand_ins() -> None:
    with tempfile.TemporaryDirectory(prefix="kvm-", dir=assets_dir().parent) as name, programs(Path(name)) as standin:
        Path(name).chmod(0o755)
        asked = Asked("firecracker", str(standin.firecracker), str(standin.jailer), "", Path(name), Path(name), "check")
        flags = ("--backend", "firecracker", "--firecracker", asked.firecracker, "--jailer", asked.jailer)
        command = (sys.executable, "-m", "tests.firecracker_standin.daemon")
        here = check.Here(backends.find_firecracker(asked), flags, Path(name), 1, command)
        (boot,), (confinement,) = check.PARTS["boot"](here), check.PARTS["confinement"](here)
    assert boot.outcome is Outcome.PASS and "ratio" in boot.why
    # The stand-in has no filter of its own, which is seen; the rest is the jailer's work and ours.
    assert confinement.why.startswith("Firecracker's own filter of system calls is not on; 1 threads"), confinement
