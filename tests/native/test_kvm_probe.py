"""The KVM probe inside a Python process: its answers, its deadline, and what it leaves as it was."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

import native
from native import KvmState

DEVICE = "/dev/kvm"
ENDLESS = 2**64 - 1


def why_no_guest_runs() -> str | None:
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"no guest runs here: {error}"
    return None


needs_device = pytest.mark.skipif(why_no_guest_runs() is not None, reason=why_no_guest_runs() or "")


def processor_can_virtualise() -> bool:
    return bool({"vmx", "svm"} & set(Path("/proc/cpuinfo").read_text().split()))


@needs_device
@pytest.mark.skipif(processor_can_virtualise(), reason="the processor of this machine can virtualise")
def test_kvm_without_a_processor_that_can_is_present_but_unusable() -> None:
    answer = native.kvm_probe()
    assert answer.state is KvmState.PRESENT_BUT_UNUSABLE
    assert answer.reason.startswith(f"/dev/kvm ran {answer.turns:,} of 100,000,000 turns of a loop in 1.0")
    assert 0 < answer.turns < native.KVM_TURNS
    assert answer.elapsed_s >= 1.0


@needs_device
def test_the_guest_itself_is_sound() -> None:
    answer = native.kvm_probe(turns=1000, deadline_ms=10_000)
    assert (answer.state, answer.turns) == (KvmState.OK, 1000)
    assert answer.reason.startswith("/dev/kvm ran 1,000 turns of a loop in ")


@pytest.mark.parametrize(
    ("device", "state", "reason"),
    [
        ("/nonexistent", KvmState.ABSENT, "/nonexistent: opening the device: No such file or directory"),
        ("/dev/null/x", KvmState.ABSENT, "/dev/null/x: opening the device: Not a directory"),
        (
            "/dev/null", KvmState.PRESENT_BUT_UNUSABLE,
            "/dev/null: asking for its version: Inappropriate ioctl for device",
        ),
        ("/etc", KvmState.PRESENT_BUT_UNUSABLE, "/etc: opening the device: Is a directory"),
    ],
)
def test_answers_for_what_is_not_kvm(device: str, state: KvmState, reason: str) -> None:
    answer = native.kvm_probe(device)
    assert (answer.state, answer.reason) == (state, reason)


def test_no_access(tmp_path: Path) -> None:
    device = tmp_path / "kvm"
    device.touch(mode=0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        answer = native.kvm_probe(device)
    finally:
        if root:
            os.seteuid(0)
    assert (answer.state, answer.reason) == (
        KvmState.NO_ACCESS, f"{device}: opening the device: Permission denied"
    )


@pytest.mark.parametrize(("turns", "deadline_ms"), [(0, 1000), (1000, 0)])
def test_no_turns_and_no_time_are_errors(turns: int, deadline_ms: int) -> None:
    with pytest.raises(OSError, match=r"Invalid argument \(probing KVM: starting the timer\)"):
        native.kvm_probe(turns=turns, deadline_ms=deadline_ms)


@needs_device
def test_no_descriptor_is_no_answer_about_kvm() -> None:
    taken = [os.open("/dev/null", os.O_RDONLY)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        while True:
            try:
                taken.append(os.dup(taken[0]))
            except OSError:
                break
        with pytest.raises(OSError, match=r"Too many open files \(probing KVM: opening the device\)"):
            native.kvm_probe()
        os.close(taken.pop())
        with pytest.raises(OSError, match=r"Too many open files \(probing KVM: creating a VM\)"):
            native.kvm_probe()
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def process_state() -> tuple[object, ...]:
    timers = Path("/proc/self/timers")  # some kernels are built without it
    return (
        sorted(os.listdir("/proc/self/fd")),
        os.listdir("/proc/self/task"),
        timers.read_text() if timers.exists() else "",
        signal.pthread_sigmask(signal.SIG_BLOCK, []),
        signal.sigpending(),
        [signal.getsignal(number) for number in signal.valid_signals()],
    )


@needs_device
def test_an_endless_guest_leaves_descriptors_threads_and_signals_alone() -> None:
    before = process_state()
    for _ in range(3):
        assert native.kvm_probe(turns=ENDLESS, deadline_ms=30).state is KvmState.PRESENT_BUT_UNUSABLE
    assert process_state() == before


@needs_device
def test_signals_of_the_process_arrive_and_do_not_end_the_run() -> None:
    heard: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        started = time.monotonic()
        answer = native.kvm_probe(turns=ENDLESS, deadline_ms=200)
        took_s = time.monotonic() - started
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert heard
    assert answer.turns > 0
    assert took_s >= 0.2


@needs_device
def test_other_threads_run_meanwhile() -> None:
    answers: list[native.KvmAnswer] = []
    threads = [
        threading.Thread(target=lambda: answers.append(native.kvm_probe(turns=ENDLESS, deadline_ms=300)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    ticks = 0
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.01)
        ticks += 1
    assert ticks > 5
    assert [answer.state for answer in answers] == [KvmState.PRESENT_BUT_UNUSABLE] * 2
