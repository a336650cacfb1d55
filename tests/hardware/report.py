"""What a check of real hardware found, as text. Pure.

In: facts, results, pytest's own report (JUnit XML), what /proc says of a process. Out: one report that a person can
send, and the results in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from xml.etree import ElementTree

from sandboxd.termsafe import clean

WHY_CHARACTERS = 600
# What a root directory of a host has, and the VMM's must not.
HOSTS_OWN = {"bin", "boot", "etc", "home", "proc", "root", "sbin", "sys", "tmp", "usr", "var"}


class Outcome(Enum):
    PASS = "pass"
    FAIL = "FAIL"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Result:
    """Of one check. `why` is the reason of a failure or a skip, or what was measured."""

    name: str
    outcome: Outcome
    why: str = ""
    seconds: float | None = None


def text(facts: Mapping[str, str], results: Sequence[Result]) -> str:
    """One line for each fact and each result, and what it comes to."""
    width = max(map(len, facts), default=0)
    lines = ["Firecracker on hardware, checked by `make check-kvm` of sandbox-cli", ""]
    lines += [f"{name.ljust(width)}  {_line(value)}" for name, value in facts.items()]
    lines.append("")
    for result in results:
        took = "" if result.seconds is None else f"{result.seconds:.2f} s"
        why = f": {_line(result.why)}" if result.why else ""
        lines.append(f"{result.outcome.value}  {took:>9}  {_line(result.name)}{why}")
    counts = Counter(result.outcome for result in results)
    lines += ["", ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome)]
    return "\n".join(lines) + "\n"


def good(results: Sequence[Result]) -> bool:
    return bool(results) and all(result.outcome is not Outcome.FAIL for result in results)


def of_pytest(part: str, xml: str) -> list[Result]:
    """One result for each test. Raises ValueError where it is no report of pytest's."""
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError:
        raise ValueError("pytest left no report") from None
    found = []
    for case in root.iter("testcase"):
        outcome, why = Outcome.PASS, ""
        for kind, meaning in (("failure", Outcome.FAIL), ("error", Outcome.FAIL), ("skipped", Outcome.SKIP)):
            if (said := case.find(kind)) is not None:
                outcome, why = meaning, said.get("message", "")
        found.append(Result(f"{part}: {case.get('name', '')}", outcome, why, float(case.get("time", 0))))
    return found


def ratio(ours: float, bare: float, rounds: int) -> str:
    return (
        f"create to the end of a first command {ours:.3f} s, Firecracker by itself with the same kernel to its init "
        f"{bare:.3f} s, medians of {rounds}; ratio {ours / bare:.2f}"
    )


def unconfined(
    threads: Sequence[str], spaces: Mapping[str, str], ours: Mapping[str, str], root: Sequence[str], as_root: bool
) -> list[str]:
    """What a VMM's process has that it must not have. In: /proc/PID/status of each of its threads, the links of
    /proc/PID/ns and of our own, the names in its root directory. Under root it has a uid of its own and the namespace
    of users is root's."""
    faults = []
    for status in threads:
        fields = {name: value.split() for name, _, value in (line.partition(":") for line in status.splitlines())}
        if as_root and (len({*fields["Uid"], *fields["Gid"]}) != 1 or fields["Uid"][0] == "0"):
            faults.append(f"its uids are {' '.join(fields['Uid'])} and its gids {' '.join(fields['Gid'])}")
        held = [name for name in ("CapInh", "CapPrm", "CapEff", "CapAmb") if int(fields[name][0], 16)]
        faults += [f"it has capabilities ({name} {fields[name][0]})" for name in held]
        if fields["NoNewPrivs"] != ["1"]:
            faults.append("it can gain privileges (NoNewPrivs is not 1)")
        if fields["Seccomp"] != ["2"]:
            faults.append("no filter of system calls is on")
        # Since Linux 5.9. One is the jail's, the other Firecracker's own.
        elif int(fields.get("Seccomp_filters", ["2"])[0]) < 2:
            faults.append("Firecracker's own filter of system calls is not on")
    shared = [name for name in ("mnt", "pid", "net", "ipc", "uts") if spaces[name] == ours[name]]
    faults += [f"it is in the host's namespace ({name})" for name in shared]
    if seen := HOSTS_OWN & set(root):
        faults.append(f"its root directory has {', '.join(sorted(seen))}")
    return list(dict.fromkeys(faults))


def processor(cpuinfo: str) -> str:
    """From /proc/cpuinfo: which model, how many, and whether it is itself a guest's."""
    fields = [tuple(part.strip() for part in line.split(":", 1)) for line in cpuinfo.splitlines() if ":" in line]
    first = dict(reversed([pair for pair in fields if len(pair) == 2]))
    count = sum(1 for name, *_ in fields if name == "processor")
    model = first.get("model name") or f"implementer {first.get('CPU implementer')} part {first.get('CPU part')}"
    flags = first.get("flags", "").split()
    kind = "vmx" if "vmx" in flags else "svm" if "svm" in flags else "neither vmx nor svm"
    nested = "; this machine is itself a guest" if "hypervisor" in flags else ""
    microcode = f"; microcode {first['microcode']}" if "microcode" in first else ""
    return f"{model}, {count} of them; {kind}{microcode}{nested}"


def _line(value: str) -> str:
    value = clean(" ".join(value.split()))
    if len(value) <= WHY_CHARACTERS:
        return value
    # What went wrong stands first where a test says it, and last where a log does.
    return f"{value[: WHY_CHARACTERS // 3]} … {value[-WHY_CHARACTERS * 2 // 3 :]}"
