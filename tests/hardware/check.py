"""Check Firecracker and its jailer on this machine's hardware, and print a report to send us.

Usage:
  check.py [options]

It takes a quarter of an hour, installs nothing and leaves nothing running.
Where KVM does not work it says why, runs nothing and exits 1. Run it as root
for the jailer, and once more as an ordinary user for the jail without it.

Options:
  --firecracker PATH  the program [firecracker in /usr/local/bin or /usr/bin]
  --jailer PATH       as root: the jailer of the same version [beside it]
  --allow-firecracker VERSION  take this version though it is known to be bad
  --rounds N          how often a boot is timed [default: 5]
  --only PART         boot, confinement, fork, conformance or escape
  --help              print this and exit

The report goes to stdout, what is going on to stderr. Exit code 0: nothing
failed.
"""

from __future__ import annotations

import io
import json
import os
import platform
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from docopt import docopt

from native import KvmAnswer, KvmState, kvm_probe
from sandboxd import backends
from sandboxd.assets.prepare import present
from sandboxd.backends import Asked
from sandboxd.client import Create
from sandboxd.errors import SandboxError
from sandboxd.places import Places
from sandboxd.vm import firecracker, firecracker_machine, processes
from tests.conformance import live
from tests.daemon import BIN, ROOT, Daemon, assets_dir
from tests.firecracker_standin import real
from tests.hardware import report
from tests.hardware.report import Outcome, Result
from tests.world.world import missing, open_world

WEAKNESSES = Path("/sys/devices/system/cpu/vulnerabilities")
BOOT_S = 60.0
SUITE_S = 3600.0
MEMORY_MB = 512
PLACE = "a place for jails"
QEMU = "the same kernel under QEMU"
FIRST_LINE = b"guest-init: start"
# Tests that elsewhere use the stand-ins.
WITH_REAL = {"fork": "tests/vm/test_firecracker_snapshot.py", "escape": "tests/vm/test_vmm_attack.py"}


@dataclass(frozen=True, slots=True)
class Here:
    """What is checked: the programs, the flags that name them to a daemon, where files may be put."""

    tools: firecracker_machine.Tools
    flags: tuple[str, ...]
    directory: Path
    rounds: int
    command: tuple[str, ...] = (str(BIN / "sandboxd"),)

    def daemon(self, name: str, *flags: str, prefix: tuple[str, ...] = ()) -> Daemon:
        return Daemon(self.directory / name, prefix=prefix, flags=(*self.flags, *flags), command=self.command)


def main(arguments: Sequence[str], probe: Callable[[], KvmAnswer] = kvm_probe) -> int:
    given = docopt(__doc__ or "", list(arguments))
    wanted = [name for name in PARTS if given["--only"] in (None, name)]
    if not wanted or not (given["--rounds"].isdecimal() and int(given["--rounds"])):
        print(f"check-kvm: --only is one of {', '.join(PARTS)}, and --rounds a number", file=sys.stderr)
        return 1
    answer = probe()
    if answer.state is not KvmState.OK:
        print(f"check-kvm: KVM is {answer.state.value}: {answer.reason}; nothing was run", file=sys.stderr)
        return 1
    paths = {name: given[f"--{name}"] or "" for name in ("firecracker", "jailer", "allow-firecracker")}
    (named, jailer, allowed), nowhere = paths.values(), Path("/nonexistent")
    try:
        tools = backends.find_firecracker(Asked("firecracker", named, jailer, allowed, nowhere, nowhere, "check"))
    except SandboxError as fault:
        print(f"check-kvm: {fault}; nothing was run", file=sys.stderr)
        return 1
    _say("the kernel and the image")
    prepare = [str(BIN / "sandboxd"), "prepare", "--assets-dir", str(assets_dir())]
    if subprocess.run(prepare, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode != 0:
        return 1
    flags = ["--backend", "firecracker"]
    for option, value in paths.items():
        flags += [f"--{option}", value] if value else []
    # First: whatever becomes of the rest, the report begins with them.
    facts = _facts(tools)
    with tempfile.TemporaryDirectory(prefix="kvm-", dir=real.place()) as directory:
        Path(directory).chmod(0o755)
        here = Here(tools, tuple(flags), Path(directory), int(given["--rounds"]))
        results = [Result("KVM", Outcome.PASS, answer.reason, answer.elapsed_s)]
        results += [*_attempt(PLACE, partial(_place, here)), *_attempt(QEMU, partial(_qemu, here))]
        for part in wanted:
            results += _attempt(part, partial(PARTS[part], here))
        print(report.text(facts, results), end="")
    return 0 if report.good(results) else 1


def _attempt(name: str, act: Callable[[], list[Result]]) -> list[Result]:
    """A part that goes wrong in any way is a result: it must not cost the report."""
    _say(name)
    begun = time.monotonic()
    try:
        return act()
    except Exception as fault:
        return [Result(name, Outcome.FAIL, f"{type(fault).__name__}: {fault}", time.monotonic() - begun)]


def _place(here: Here) -> list[Result]:
    """Where it is none for a jail, all that is Firecracker's fails below, each in words of its own."""
    why = backends.unfit(here.directory, assets_dir())
    return [Result(PLACE, Outcome.FAIL if why else Outcome.PASS, why or str(here.directory.parent))]


def _qemu(here: Here) -> list[Result]:
    """Tells a host's fault from one of this backend."""
    begun = time.monotonic()
    with Daemon(here.directory / "qemu", flags=("--backend", "qemu", "--no-network")) as daemon:
        said = next(line for line in daemon.log.read_text().splitlines() if ": backend qemu with" in line)
    outcome = Outcome.PASS if "qemu with kvm" in said else Outcome.FAIL
    return [Result(QEMU, outcome, said, time.monotonic() - begun)]


def _boot(here: Here) -> list[Result]:
    assets = present(assets_dir(), ROOT / "build")
    assert assets is not None
    ours, bare = [], []
    with here.daemon("boot") as daemon:
        for _ in range(here.rounds):
            bare.append(_bare(here, assets.kernel, assets.initramfs, assets.runtime))
            begun = time.perf_counter()
            sandbox = daemon.client.create(Create(memory_mb=MEMORY_MB))
            assert daemon.client.run(sandbox.id, ["true"]).exit_code == 0
            ours.append(time.perf_counter() - begun)
            daemon.client.delete(sandbox.id)
    measured = report.ratio(statistics.median(ours), statistics.median(bare), here.rounds)
    return [Result("boot", Outcome.PASS, measured, statistics.median(ours))]


def _bare(here: Here, kernel: Path, initramfs: Path, runtime: Path, timeout_s: float = BOOT_S) -> float:
    """Firecracker by itself, nothing confined, to guest-init's first line; seconds."""
    drive = {"drive_id": "runtime", "path_on_host": str(runtime), "is_root_device": False, "is_read_only": True}
    told = here.directory / "bare.json"
    told.write_text(json.dumps({
        "machine-config": {"vcpu_count": 1, "mem_size_mib": MEMORY_MB},
        "boot-source": {
            "kernel_image_path": str(kernel), "initrd_path": str(initramfs),
            "boot_args": firecracker.boot_args(here.tools.arch, serial=True),
        },
        "drives": [drive],
    }))  # fmt: skip
    command = [str(here.tools.jailer.firecracker), "--no-api", "--config-file", str(told)]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as vmm:
        assert isinstance(vmm.stdout, io.BufferedReader)
        seen = b""
        try:
            while FIRST_LINE not in seen:
                left_s = max(0.0, begun + timeout_s - time.perf_counter())
                # One that hangs says nothing, and must not hang this too.
                piece = vmm.stdout.read1(4096) if select.select([vmm.stdout], [], [], left_s)[0] else b""
                if not piece:
                    raise RuntimeError(f"Firecracker by itself did not boot: {seen[-500:].decode(errors='replace')}")
                seen += piece
            return time.perf_counter() - begun
        finally:
            vmm.kill()


def _confinement(here: Here) -> list[Result]:
    """What the kernel says of the VMM of a sandbox that runs."""
    begun = time.monotonic()
    with here.daemon("confinement") as daemon:
        sandbox = daemon.client.create(Create(memory_mb=MEMORY_MB))
        record = processes.read_record(Places(daemon.state).machine(sandbox.id))
        assert record is not None
        (pid,) = {process.pid for process in record.processes if process.role == firecracker_machine.VMM}
        proc = Path(f"/proc/{pid}")
        threads = [(task / "status").read_text() for task in (proc / "task").iterdir()]
        spaces, ours = ({entry.name: os.readlink(entry) for entry in (one / "ns").iterdir()}
                        for one in (proc, Path("/proc/self")))  # fmt: skip
        root = sorted(os.listdir(proc / "root"))
        group = (proc / "cgroup").read_text().split()
    faults = report.unconfined(threads, spaces, ours, root, os.geteuid() == 0)
    took = time.monotonic() - begun
    seen = f"{len(threads)} threads; in its root directory: {' '.join(root)}; control groups {' '.join(group)}"
    if faults:
        return [Result("confinement", Outcome.FAIL, "; ".join([*faults, seen]), took)]
    return [Result("confinement", Outcome.PASS, seen, took)]


def _conformance(here: Here) -> list[Result]:
    directory = here.directory / "conformance"
    directory.mkdir()
    policy = directory / "policy.yaml"
    policy.write_text(live.POLICY)
    with ExitStack() as opened:
        prefix: tuple[str, ...] = () if missing() else tuple(opened.enter_context(open_world()).host.prefix)
        daemon = opened.enter_context(here.daemon("conformance", "--policy", str(policy), prefix=prefix))
        return _pytest(here, "conformance", [*prefix, *live.suite(f"unix://{daemon.socket}")], {})


def _with_real(part: str) -> Callable[[Here], list[Result]]:
    """Tests that use the stand-ins elsewhere, with the real programs in their place."""

    def act(here: Here) -> list[Result]:
        tests = ROOT / WITH_REAL[part]
        if os.geteuid() != 0:
            return [Result(part, Outcome.SKIP, "the jailer needs root")]
        text = tests.read_text() if tests.is_file() else ""
        # Else they would pass with the stand-ins, and say nothing of this machine.
        if "real.given()" not in text and "real.programs(" not in text:
            return [Result(part, Outcome.SKIP, f"{WITH_REAL[part]} does not take the real programs in this version")]
        programs = here.tools.jailer
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tests)]
        return _pytest(
            here, part, command, {real.FIRECRACKER: str(programs.firecracker), real.JAILER: str(programs.jailer)}
        )

    return act


def _pytest(here: Here, part: str, command: Sequence[str], environment: dict[str, str]) -> list[Result]:
    out = here.directory / f"{part}.xml"
    subprocess.run(
        [*command, "-q", f"--junitxml={out}"], cwd=ROOT, env=os.environ | environment, stdin=subprocess.DEVNULL,
        stdout=sys.stderr, timeout=SUITE_S, check=False,
    )  # fmt: skip
    found = report.of_pytest(part, out.read_text() if out.exists() else "")
    return found or [Result(part, Outcome.FAIL, "pytest ran no test")]


PARTS: dict[str, Callable[[Here], list[Result]]] = {
    "boot": _boot,
    "confinement": _confinement,
    "fork": _with_real("fork"),
    "conformance": _conformance,
    "escape": _with_real("escape"),
}


def _facts(tools: firecracker_machine.Tools) -> dict[str, str]:
    commit = _said(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])
    groups = f"version {tools.groups.version}" if tools.groups is not None else "not used by an ordinary user"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "sandbox-cli": f"{_said([str(BIN / 'sandboxd'), '--version'])}, commit {commit}",
        "firecracker": str(tools.version),
        "run as": "root, with the jailer" if os.geteuid() == 0 else "an ordinary user, with bubblewrap",
        "kernel": f"{platform.release()} {platform.machine()}",
        "system": _read("/etc/os-release").partition("PRETTY_NAME=")[2].partition("\n")[0].strip('"'),
        "processor": report.processor(_read("/proc/cpuinfo")),
        "memory": _read("/proc/meminfo").partition("\n")[0].partition(":")[2].strip(),
        "control groups": groups,
        "smt": _read("/sys/devices/system/cpu/smt/control"),
        "ksm": _read("/sys/kernel/mm/ksm/run"),
        "swaps": str(max(0, len(_read("/proc/swaps").splitlines()) - 1)),
        "kvm nested": _read("/sys/module/kvm_intel/parameters/nested") + _read("/sys/module/kvm_amd/parameters/nested"),
        **{f"cpu: {path.name}": _read(str(path)) for path in sorted(WEAKNESSES.glob("*"))},
        "qemu": _said(["qemu-system-x86_64", "--version"]),
        "bubblewrap": _said(["bwrap", "--version"]),
    }  # fmt: skip


def _said(command: Sequence[str]) -> str:
    if shutil.which(command[0]) is None:
        return "not installed"
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
    return run.stdout.partition("\n")[0] if run.returncode == 0 else "unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _say(part: str) -> None:
    print(f"check-kvm: {part}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
