"""The audit log of a daemon: what is in it, what never is, and what happens where it cannot be written."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from sandboxd.generations import Generations, lines
from sandboxd.journal import Journal, now
from tests.conftest import counts
from tests.sandboxd.conftest import why_not
from tests.sandboxd.rig import Rig
from tests.sandboxd.test_life import machines, until

S = "/v1/sandboxes"
CANARY = "s3cr3t-CANARY"
COMMON = {"time", "type", "sandbox"}

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")


def events(rig: Rig, ref: str) -> list[dict[str, Any]]:
    answer = rig.call("GET", f"{S}/{ref}/events")
    assert answer.status == 200, answer.body
    found: list[dict[str, Any]] = answer.json["events"]
    return found


def written(log: Path) -> list[dict[str, Any]]:
    with Generations(log).opened() as opened:
        return [json.loads(line) for _, file in opened.files for line in lines(file)]


def log_of(rig: Rig) -> Path:
    return rig.state / "audit" / "events.jsonl"


def holds(rig: Rig) -> dict[str, Any]:
    answer: dict[str, Any] = rig.call("GET", "/v1/audit/verify").json
    assert answer["ok"], answer
    return answer


def without(event: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in {"time", "sandbox", *names}}


def test_what_is_recorded(own: Rig) -> None:
    box = own.create(name="one", labels={"a": "b"}, env={"API_TOKEN": CANARY})
    own.run(box, "false", env={"OTHER": CANARY})
    own.run(box, "sh", "-c", f"echo {CANARY}; exit 3", cwd="/tmp")
    own.call("PUT", f"{S}/{box}/files?path=/tmp//f", b"12345")
    assert own.call("GET", f"{S}/{box}/files?path=/tmp/f").body == b"12345"
    own.call("PUT", f"{S}/{box}/files?path=/tmp/empty", b"")
    own.call("DELETE", f"{S}/{box}/files?path=/tmp/f")
    assert own.call("GET", f"{S}/{box}/files?path=/tmp/f").status == 404
    own.call("GET", f"{S}/{box}/dirs?path=/tmp")
    own.call("PATCH", f"{S}/one", {"name": "two", "labels": {}})
    own.call("PATCH", f"{S}/two", {"idle_timeout_secs": 77, "name": "two"})
    process = own.start_process(box, "sleep", "60")
    own.call("POST", f"{process}/signal", {"signal": "TERM"})
    until("it has ended", lambda: own.call("GET", process).json["exit_code"] is not None)
    own.call("DELETE", f"{S}/{box}")
    found = events(own, box)
    assert all(event["sandbox"] == box and event["time"].endswith("Z") for event in found)
    digest = hashlib.sha256(f"-c\0echo {CANARY}; exit 3\0".encode()).hexdigest()
    sleep = hashlib.sha256(b"60\0").hexdigest()
    assert [without(event, "duration_ms") for event in found] == [
        {
            "type": "sandbox.created", "name": "one", "image": "sandbox-base", "labels": {"a": "b"},
            "network": {"mode": "none", "allow": None}, "env_names": ["API_TOKEN"],
        },
        {"type": "process.started", "pid": 1, "program": "false", "cwd": "/sandbox/home", "env_names": ["OTHER"]},
        {"type": "process.exited", "pid": 1, "exit_code": 1},
        {
            "type": "process.started", "pid": 2, "program": "sh", "arg_count": 2, "args_sha256": digest,
            "cwd": "/tmp",
        },
        {"type": "process.exited", "pid": 2, "exit_code": 3},
        {"type": "file.written", "path": "/tmp/f", "bytes": 5},
        {"type": "file.read", "path": "/tmp/f", "bytes": 5},
        {"type": "file.written", "path": "/tmp/empty", "bytes": 0},
        {"type": "file.removed", "path": "/tmp/f"},
        {"type": "sandbox.updated", "name": "two", "labels": {}},
        {"type": "sandbox.updated", "idle_timeout_secs": 77},
        {
            "type": "process.started", "pid": 3, "program": "sleep", "arg_count": 1, "args_sha256": sleep,
            "cwd": "/sandbox/home",
        },
        {"type": "process.exited", "pid": 3, "exit_code": 143},
        {"type": "sandbox.terminated", "reason": "request"},
    ]  # fmt: skip
    assert all(event["duration_ms"] >= 0 for event in found if event["type"] == "process.exited")
    assert events(own, "two") == found, "by its name as long as it is remembered"
    for path in (own.state / "audit").iterdir():
        assert CANARY.encode() not in path.read_bytes()
        assert path.stat().st_mode & 0o777 == 0o600
    assert holds(own)["lines"] == len(found) + 1
    own.stop()
    for path in own.state.glob("state.sqlite*"):
        path.unlink()
    own.start()
    assert events(own, box) == found, "by its id when it is forgotten"
    assert own.call("GET", f"{S}/two/events").status == 404
    assert own.call("GET", f"{S}/sbx_0123456789abcdef/events").status == 404


def test_an_argument_is_a_hash(rig: Rig, box: str) -> None:
    assert rig.run(box, "echo", "-n", CANARY).stdout == CANARY.encode()
    started = [event for event in events(rig, box) if event["type"] == "process.started"][-1]
    assert started["arg_count"] == 2
    assert started["args_sha256"] == hashlib.sha256(f"-n\0{CANARY}\0".encode()).hexdigest()


def test_reading_is_no_activity(own: Rig) -> None:
    box = own.create(idle_timeout_secs=3)
    deadline = time.monotonic() + 30
    while events(own, box)[-1]["type"] != "sandbox.terminated":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert events(own, box)[-1]["reason"] == "idle"


def test_lines_that_nobody_can_forge(rig: Rig) -> None:
    box = rig.create()
    for name in ("a%0A%7B%22seq%22:1%7D", "%1B%5D0;t%07", "%22,%22type%22:%22x", "%80%FF", "x" * 200):
        assert rig.call("PUT", f"{S}/{box}/files?path=/tmp/{name}", b"1").status == 204
    assert rig.call("POST", f"{S}/{box}/run", {"argv": ["no\nsuch\x1b[31m", "\udc80"]}).status == 400
    rig.run(box, "true", "\udc80\udcff")
    paths = [event["path"] for event in events(rig, box) if event["type"] == "file.written"]
    assert paths[:4] == ['/tmp/a\n{"seq":1}', "/tmp/\x1b]0;t\x07", '/tmp/","type":"x', "/tmp/\udc80\udcff"]
    started = [event for event in events(rig, box) if event["type"] == "process.started"]
    assert [event["args_sha256"] for event in started] == [hashlib.sha256(b"\x80\xff\0").hexdigest()]
    raw = log_of(rig).read_bytes()
    assert raw.isascii() and b"\x1b" not in raw
    holds(rig)
    rig.call("DELETE", f"{S}/{box}")


def test_no_log(place: Path) -> None:
    with Rig(place, "--audit-log", "none") as rig:
        box = rig.create()
        assert rig.call("GET", "/v1/capabilities").json["capabilities"]["audit"] is False
        for path in (f"{S}/{box}/events", "/v1/audit/verify"):
            answer = rig.call("GET", path)
            assert (answer.status, answer.code) == (501, "unsupported")
        assert not log_of(rig).exists()


def test_a_vmm_that_the_operator_allowed(place: Path) -> None:
    rig = Rig(place)
    rig.knob("allowed", "Firecracker 1.14.3 is taken, as --allow-firecracker says: it has a fault\x1b[31m")
    with rig:
        rig.create()        # then it has settled
        found = [line for line in written(log_of(rig)) if line["type"] == "backend.allowed"]
        assert [line["reason"].partition("\x1b")[0] for line in found] == [
            "Firecracker 1.14.3 is taken, as --allow-firecracker says: it has a fault"
        ]
        assert "WARNING Firecracker 1.14.3 is taken" in rig.log.read_text()
        assert "\x1b" not in rig.log.read_text()
        holds(rig)


def test_a_vmm_that_was_allowed_and_came_to_nothing_is_not_recorded(place: Path) -> None:
    rig = Rig(place)
    rig.knob("allowed", "Firecracker 1.14.3 is taken")
    rig.knob("falls_back", "yes")
    with rig:
        rig.create()        # then it has settled
        assert "backend.allowed" not in log_of(rig).read_text()
        assert "1.14.3" not in rig.log.read_text()


def test_a_log_elsewhere(place: Path) -> None:
    (place / "logs").mkdir(mode=0o700)
    with Rig(place, "--audit-log", str(place / "logs" / "it")) as rig:
        assert rig.call("GET", "/v1/capabilities").json["capabilities"]["audit"] is True
        box = rig.create()
        assert [event["type"] for event in events(rig, box)] == ["sandbox.created"]
        assert len(written(place / "logs" / "it")) == 2


@contextmanager
def unwritable(log: Path) -> Iterator[None]:
    """A directory has its name: not even root can write it."""
    aside = log.with_name("aside")
    log.rename(aside)
    log.mkdir()
    yield
    log.rmdir()
    aside.rename(log)


def test_requests_go_through_and_the_loss_is_told(own: Rig) -> None:
    box = own.create()
    with unwritable(log_of(own)):
        for _ in range(3):
            own.run(box, "true")
        assert own.call("GET", f"{S}/{box}/events").code == "unavailable"
    until("it is written again", lambda: written(log_of(own))[-1]["type"] == "audit.lost")
    assert written(log_of(own))[-1]["count"] == 6
    # The log says so once the line is there, so a moment after it.
    until("the loss is told", lambda: "6 events are not in it" in own.log.read_text())
    assert own.log.read_text().count("the audit log cannot be written") == 1
    own.run(box, "true")
    assert [event["type"] for event in events(own, box)] == ["sandbox.created", "process.started", "process.exited"]
    holds(own)


def test_what_cannot_be_recorded_is_refused(place: Path) -> None:
    with Rig(place, "--audit-required") as rig:
        box = rig.create(name="here")
        process = rig.start_process(box, "sh", "-c", "while [ ! -e /tmp/go ]; do sleep 0.05; done; exit 7")
        doomed = rig.create()
        rig.call("PUT", f"{S}/{box}/files?path=/tmp/kept", b"1")
        with unwritable(log_of(rig)):
            refused = [
                ("POST", S, {}), ("PATCH", f"{S}/{box}", {"name": "other"}),
                ("POST", f"{S}/{box}/run", {"argv": ["true"]}),
                ("POST", f"{S}/{box}/processes", {"argv": ["touch", "/tmp/go"]}),
                ("PUT", f"{S}/{box}/files?path=/tmp/go", b""), ("GET", f"{S}/{box}/files?path=/tmp/kept", None),
                ("DELETE", f"{S}/{box}/files?path=/tmp/kept", None),
                ("GET", f"{S}/{box}/workspace/bundle?base=main&branch=sandbox", None),
                ("POST", f"{S}/{box}/workspace?branch=main", b"x"),
            ]  # fmt: skip
            for method, path, body in refused:
                answer = rig.call(method, path, body)
                assert (answer.status, answer.code) == (503, "unavailable"), (method, path, answer.body)
                assert "free disk space or repair the log" in answer.json["error"]["message"]
            upgrade = {"Connection": "Upgrade", "Upgrade": "sbx-tunnel/1"}
            assert rig.call("GET", f"{S}/{box}/tunnel?port=1", headers=upgrade).status == 503
            # What has begun may end, and nobody is kept from ending it.
            rig.call("POST", f"{process}/signal", {"signal": "TERM"})
            until("it has ended", lambda: rig.call("GET", process).json["exit_code"] == 143)
            assert rig.call("DELETE", f"{S}/{doomed}").status == 204
            assert len(rig.call("GET", S).json["sandboxes"]) == 2
        until("it waits no more", lambda: written(log_of(rig))[-1]["sandbox"] == doomed)
        assert rig.call("GET", f"{S}/{box}/files?path=/tmp/kept").body == b"1", "nothing has happened"
        assert rig.call("GET", f"{S}/{box}").json["name"] == "here"
        assert [event["type"] for event in events(rig, box)] == [
            "sandbox.created", "process.started", "file.written", "process.exited", "file.read",
        ]  # fmt: skip
        assert without(events(rig, doomed)[-1]) == {"type": "sandbox.terminated", "reason": "request"}
        assert "audit.lost" not in [line["type"] for line in written(log_of(rig))]
        holds(rig)


@pytest.fixture
def full_disk(place: Path) -> Iterator[tuple[Rig, Path]]:
    """A daemon whose audit log is on a disk of 1 MiB, which nobody else sees mounted; and that disk."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    disk = place / "disk"
    disk.mkdir(mode=0o700)
    mount = f"mount -t tmpfs -o size=1m,mode=700 none {disk} && exec \"$@\""
    prefix = ("unshare", "-m", "sh", "-c", mount, "sh")
    with Rig(place, "--audit-required", "--audit-log", str(disk / "log"), prefix=prefix) as rig:
        assert rig.process is not None
        yield rig, Path(f"/proc/{rig.process.pid}/root{disk}")


def test_a_full_disk(full_disk: tuple[Rig, Path]) -> None:
    """What has begun finds the room that was kept for it; nothing new begins."""
    rig, disk = full_disk
    box = rig.create()
    running = [rig.start_process(box, "sh", "-c", "while [ ! -e /tmp/go ]; do sleep 0.05; done") for _ in range(5)]
    with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    for process in running:
        rig.call("POST", f"{process}/signal", {"signal": "KILL"})
    until("they have ended", lambda: all(rig.call("GET", one).json["exit_code"] == 137 for one in running))
    assert Counter(line["type"] for line in written(disk / "log")) == {
        "audit.file": 1, "sandbox.created": 1, "process.started": 5, "process.exited": 5
    }  # fmt: skip
    # A write that the room was too small for would have to be refused: fill that, too.
    while rig.call("POST", f"{S}/{box}/run", {"argv": ["true"]}).status == 200:
        pass
    assert rig.call("POST", f"{S}/{box}/run", {"argv": ["true"]}).code == "unavailable"
    (disk / "filler").unlink()
    assert rig.run(box, "true").exit_code == 0
    types = Counter(line["type"] for line in written(disk / "log"))
    assert types["process.started"] == types["process.exited"] and not types["audit.lost"]
    holds(rig)


def test_files_that_are_removed_while_it_runs(own: Rig) -> None:
    box = own.create()
    for path in (own.state / "audit").iterdir():
        path.unlink()
    (own.state / "audit").rmdir()
    own.run(box, "true")
    assert [event["type"] for event in events(own, box)] == ["process.started", "process.exited"], "it goes on"
    answer = own.call("GET", "/v1/audit/verify").json
    assert not answer["ok"] and "file 1 is missing" in answer["fault"]


def test_what_is_cut_off_is_found_while_it_runs(own: Rig) -> None:
    box = own.create()
    own.run(box, "true")
    whole = holds(own)
    lines_left = log_of(own).read_bytes().splitlines(keepends=True)[:-1]
    log_of(own).write_bytes(b"".join(lines_left))
    log_of(own).with_name("events.jsonl.head").unlink()
    answer = own.call("GET", "/v1/audit/verify").json
    assert answer["fault"] == "events.jsonl: the end is missing: 1 lines after number 3"
    assert whole["lines"] == 4


def test_a_torn_line_of_a_crash(own: Rig) -> None:
    box = own.create()
    own.kill()
    with log_of(own).open("ab") as log:
        log.write(b'{"seq":3,')
    own.start()
    own.run(box, "true")
    assert [line["type"] for line in written(log_of(own))][-3:] == ["audit.torn", "process.started", "process.exited"]
    holds(own)


def test_a_machine_that_ends_by_itself(own: Rig) -> None:
    watched, unwatched = own.create(), own.create()

    def machine(box: str) -> int:
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in machines(own)}
        return next(int(pid) for pid, command in commands.items() if box.encode() in command)

    os.kill(machine(watched), signal.SIGKILL)
    until("it is told", lambda: events(own, watched)[-1]["type"] == "sandbox.terminated")
    own.kill()
    os.kill(machine(unwatched), signal.SIGKILL)
    for _ in range(2):
        own.start()
        for box in (watched, unwatched):
            ends = [event for event in events(own, box) if event["type"] == "sandbox.terminated"]
            assert [event["reason"] for event in ends] == ["machine"]
        own.kill()
    own.start()
    holds(own)


def test_killed_under_a_stream_of_short_processes(place: Path, seed: random.Random) -> None:
    """Each process that was started has one line that says so, and one for its end; whatever else there is, too."""
    with Rig(place) as rig:
        box = rig.create()
        answered: set[int] = set()
        stop = threading.Event()

        def stream(number: int) -> None:
            while not stop.is_set():
                with suppress(OSError, ValueError, AssertionError, http.client.HTTPException):
                    if number % 2:
                        rig.call("POST", f"{S}/{box}/run", {"argv": ["true"]}, timeout=20)
                    else:
                        answered.add(int(rig.start_process(box, "true").rsplit("/", 1)[1]))

        threads = [threading.Thread(target=stream, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(counts(4, 100)):
                time.sleep(seed.uniform(0.1, 0.6))
                rig.kill()
                rig.start()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        until(
            "all have ended",
            lambda: all(p["state"] == "exited" for p in rig.call("GET", f"{S}/{box}/processes").json["processes"]), 60,
        )  # fmt: skip
        found = [line for line in written(log_of(rig)) if line.get("sandbox") == box]
        started = Counter(line["pid"] for line in found if line["type"] == "process.started")
        exited = Counter(line["pid"] for line in found if line["type"] == "process.exited")
        assert set(started.values()) == {1} and set(exited.values()) == {1}
        assert started.keys() == exited.keys()
        assert answered <= started.keys()
        assert [line["type"] for line in found].count("sandbox.created") == 1
        holds(rig)


def test_an_end_that_was_recorded_is_carried_out(own: Rig) -> None:
    """A daemon killed between the line and the record: nobody is told twice, and it does not live on."""
    box = own.create()
    own.kill()
    journal = Journal(log_of(own))
    journal.begin()
    journal.append({"time": now(), "type": "sandbox.terminated", "sandbox": box, "reason": "request"})
    journal.close()
    own.start()
    until("it has ended", lambda: own.call("GET", f"{S}/{box}").json["state"] == "terminated")
    until("nothing runs", lambda: machines(own) == [])
    assert [event["type"] for event in events(own, box)] == ["sandbox.created", "sandbox.terminated"]


def test_a_daemon_that_may_not_have_its_log_does_not_start(place: Path) -> None:
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    command = [sys.executable, "-m", "sandboxd", "--listen", f"unix://{place}/s", "--state-dir", str(place / "state")]
    for flags, said in (
        (("--audit-log", str(place / "open" / "log")), "others could replace the audit log"),
        (("--audit-log", "none", "--audit-required"), "--audit-required needs an audit log"),
    ):
        done = subprocess.run([*command, *flags], capture_output=True, timeout=60, check=False)
        assert done.returncode == 1 and said in done.stderr.decode(), done.stderr
