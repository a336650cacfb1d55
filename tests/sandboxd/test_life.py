"""Races, disconnects, restarts: what is left when anything stops anywhere."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandboxd.lifecycle import State
from sandboxd.limits import Limits
from sandboxd.store import Store
from tests.sandboxd.fake_daemon import ROOT, launch
from tests.sandboxd.rig import Rig

S = "/v1/sandboxes"


def until(what: str, check: Any, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.03)


def machines(rig: Rig) -> list[str]:
    """Machine processes of this daemon, whoever their parent is."""
    marker = os.fsencode(rig.state / "sandboxes")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker in command and b"fake_vmm.py" in command:
                found.append(entry.name)
    return found


def leftovers(rig: Rig) -> list[str]:
    return machines(rig) + [path.name for path in (rig.state / "sandboxes").iterdir()]


def test_twenty_creates_of_one_name(other: Rig) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: other.call("POST", S, {"name": "foo"}), range(20)))
    assert sorted(answer.status for answer in answers) == [201] + [409] * 19
    assert len(machines(other)) == 1
    assert other.run("foo", "echo", "usable").stdout == b"usable\n"


def test_delete_during_create(other: Rig) -> None:
    other.knob("boot_s", "0.15")
    with ThreadPoolExecutor(2) as pool:
        for moment in range(12):
            create = pool.submit(other.call, "POST", S, {"name": "born"})
            until("it is listed", lambda: other.call("GET", f"{S}/born").status == 200)
            time.sleep(moment * 0.04)
            assert other.call("DELETE", f"{S}/born").status == 204
            answer = create.result()
            assert (answer.status, answer.code) == (409, "conflict") if answer.status != 201 else True
            assert other.call("DELETE", f"{S}/born").status in (204, 404)
            assert leftovers(other) == []


def test_a_client_that_leaves_during_its_create(other: Rig) -> None:
    body = json.dumps({"name": "born"}).encode()
    for moment in range(8):
        # First before there is a machine, where it must never come to one; then anywhere, where it may just be done.
        slow = moment < 3
        other.knob("boot_s", "5" if slow else None)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(other.socket))
            head = b"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until("it is listed", lambda: other.call("GET", f"{S}/born").status == 200)
            time.sleep((moment - 3) * 0.06 if not slow else moment * 0.1)

        def gone(done_is_fine: bool = not slow) -> bool:
            if done_is_fine and other.call("GET", f"{S}/born").json.get("state") == "running":
                other.call("DELETE", f"{S}/born")
            return leftovers(other) == []

        until("it is gone", gone)
        assert other.call("GET", f"{S}/born").json.get("state") in (None, "terminated")


def test_a_client_that_leaves_during_its_run_takes_the_command_along(rig: Rig, box: str) -> None:
    body = json.dumps({"argv": ["sleep", "4242"]}).encode()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(rig.socket))
        head = f"POST {S}/{box}/run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until("it runs", lambda: rig.run(box, "pgrep", "-xf", "sleep 4242").exit_code == 0)
    until("it is gone", lambda: rig.run(box, "pgrep", "-xf", "sleep 4242").exit_code == 1)
    process = rig.call("GET", f"{S}/{box}/processes").json["processes"]
    assert [p["exit_code"] for p in process if p["argv"] == ["sleep", "4242"]] == [-1]


def test_a_command_outlives_the_client_that_started_it(rig: Rig, box: str) -> None:
    process = rig.start_process(box, "sh", "-c", "sleep 0.3; echo still here")
    assert rig.output(process)[0] == b"still here\n"


def test_a_machine_that_ends_by_itself_is_shown_terminated_and_its_disk_is_kept(other: Rig) -> None:
    sandbox = other.create(name="fragile")
    waiting = other.start_process(sandbox, "sleep", "60")
    (pid,) = machines(other)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(other.call, "POST", f"{S}/{sandbox}/run", {"argv": ["sleep", "60"]})
        until("it runs", lambda: len(other.call("GET", f"{S}/{sandbox}/processes").json["processes"]) == 2)
        os.kill(int(pid), signal.SIGKILL)
        assert run.result().code == "conflict"
    until("it is noticed", lambda: other.call("GET", f"{S}/{sandbox}").json["state"] == "terminated")
    assert other.output(waiting)[2] == -1
    until("it is cleared", lambda: leftovers(other) == [])
    assert [path.name for path in (other.state / "disks").iterdir()] == [f"{sandbox}.img"]
    assert "its machine ended by itself" in other.log.read_text()
    assert "\x1b" not in other.log.read_text()
    assert other.call("DELETE", f"{S}/{sandbox}").status == 204
    assert list((other.state / "disks").iterdir()) == []


def test_a_machine_that_is_not_seen_to_end_loses_its_network_and_its_disk_is_kept(other: Rig) -> None:
    other.knob("no_end", "0")
    fallen = other.create()
    (pid,) = machines(other)
    os.kill(int(pid), signal.SIGKILL)
    until("it is cleared", lambda: leftovers(other) == [])
    assert [path.name for path in (other.state / "disks").iterdir()] == [f"{fallen}.img"]
    asked = other.create()
    for sandbox in (fallen, asked):
        assert other.call("DELETE", f"{S}/{sandbox}").status == 204
        assert f"{sandbox}: a process did not end" in other.log.read_text()
    other.knob("no_end", str(errno.EMFILE))
    assert other.call("DELETE", f"{S}/{other.create()}").status == 204
    assert "Too many open files" in other.log.read_text()
    assert leftovers(other) == list((other.state / "disks").iterdir()) == []


def chunked(ref: str, pieces: int) -> bytes:
    """A file for /tmp/x of so many times 64 KiB, whose size is not said beforehand."""
    head = f"PUT {S}/{ref}/files?path=/tmp/x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += "Content-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head.encode() + (b"10000\r\n" + bytes(1 << 16) + b"\r\n") * pieces + b"0\r\n\r\n"


def test_a_body_of_unknown_size_for_what_does_not_run(other: Rig) -> None:
    ended = other.create()
    other.call("DELETE", f"{S}/{ended}")
    assert b" 409 " in other.raw(chunked(ended, 1))
    assert b" 404 " in other.raw(chunked("nobody", 1))


def test_a_daemon_without_descriptors_says_so_and_goes_on(place: Path) -> None:
    with Rig(place, prefix=("prlimit", "--nofile=40:40")) as own:
        refused = None
        for number in range(40):
            answer = own.call("POST", S, {"name": f"s{number}"})
            if answer.status != 201:
                refused = answer
                break
        assert refused is not None and refused.status == 503 and "no file descriptors" in refused.message
        assert own.call("DELETE", f"{S}/s1").status == 204
        assert own.run("s0", "true").exit_code == 0
        own.create(name="again")


def test_a_full_host_refuses_creates_and_ends_nothing(place: Path) -> None:
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "none", str(place)]).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        with Rig(place) as own:
            for name in ("one", "two"):
                own.create(name=name, disk_mb=64)
            filler = place / "filler"
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(1 << 16)):
                    pass
            for _ in range(20):
                assert own.run("one", "true").exit_code == 0
            assert own.call("POST", S, {"disk_mb": 64}).code == "conflict"
            for pieces in (1, 40):
                said = own.raw(chunked("one", pieces))
                assert b" 409 " in said and b"disk is full" in said
            assert own.call("DELETE", f"{S}/two").status == 204
            assert own.run("one", "true").exit_code == 0
            own.kill()
            own.start()
            assert [one["state"] for one in own.call("GET", S).json["sandboxes"]] == ["terminated", "running"]
            until("it is taken back", lambda: own.run("one", "echo", "here").exit_code == 0)
            filler.unlink()
            own.create(name="three", disk_mb=64)
            assert own.run("one", "echo", "here").stdout == b"here\n"
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_c30_c32_idle_and_lifetime(other: Rig) -> None:
    idle = other.create(name="idle", idle_timeout_secs=2)
    busy = other.create(name="busy", idle_timeout_secs=2)
    other.start_process(busy, "sleep", "60")
    short = other.create(name="short", lifetime_secs=5)
    other.start_process(short, "sleep", "60")
    said = other.call("GET", f"{S}/short").json
    assert said["lifetime_secs"] == 5 and said["expires_at"] > said["created_at"]

    def states() -> dict[str, str]:
        return {one["id"]: one["state"] for one in other.call("GET", S).json["sandboxes"]}

    until("idle and short end", lambda: states()[idle] == states()[short] == "terminated", 15)
    assert states()[busy] == "running"


def test_a_boot_that_fails_says_little_on_the_wire_and_all_in_the_log(other: Rig) -> None:
    other.knob("no_boot", "1")
    answer = other.call("POST", S, {"name": "no", "env": {"K": "CANARY"}})
    assert (answer.status, answer.code) == (500, "internal")
    assert "starting the VMM" in answer.message and str(other.state) not in answer.message
    log = other.log.read_text()
    assert "no root" in log and "\x1b" not in log and "\x07" not in log and "CANARY" not in log
    assert other.call("GET", f"{S}/no").status == 404 and leftovers(other) == []


def test_creates_wait_for_the_images_and_say_how_far_they_are(own: Rig) -> None:
    own.stop()
    own.knob("prepare_s", "1.5")
    own.start()
    until("it is under way", lambda: own.call("POST", S, {}).message.endswith("image, 42 %, 12 of 29 MiB"))
    answer = own.call("POST", S, {})
    assert (answer.status, answer.code) == (503, "unavailable")
    assert own.call("GET", S).status == 200
    until("it is ready", lambda: own.call("POST", S, {}).status == 201)


def test_a_daemon_that_is_told_to_stop_does_not_wait_for_its_images(own: Rig) -> None:
    own.stop()
    own.knob("prepare_s", "60")
    own.start()
    until("it is under way", lambda: "42 %" in own.call("POST", S, {}).message)
    own.stop()


@pytest.mark.parametrize("name", ["kernel", "initramfs", "runtime", "image"])
def test_an_asset_that_was_deleted_is_named_with_the_way_back(own: Rig, name: str) -> None:
    box = own.create(name="before")
    (own.state / "assets" / name).unlink()
    answer = own.call("POST", S, {})
    assert (answer.status, answer.code) == (409, "conflict")
    assert f"{name} is gone; restarting sandboxd" in answer.message and "/" not in answer.message
    assert own.run(box, "echo", "goes on").stdout == b"goes on\n"
    own.stop()
    own.start()
    own.create()
    assert own.run(box, "true").exit_code == 0


# -- restarts


def test_killed_and_started_again_everything_goes_on(own: Rig) -> None:
    env = {"TOKEN": "s3cr3t-CANARY"}
    first = own.create(name="first", env=env, labels={"a": "b"}, idle_timeout_secs=77)
    second = own.create(name="second")
    script = "echo start; while ! test -e /tmp/go; do sleep 0.05; done; echo end; cat; exit 7"
    process = own.start_process(first, "sh", "-c", script)
    done = own.start_process(first, "sh", "-c", "echo finished; exit 3")
    assert own.output(done) == (b"finished\n", b"", 3)
    record = own.call("GET", f"{S}/{first}").json
    with ThreadPoolExecutor(2) as pool:
        run = pool.submit(lambda: _swallow(own, f"{S}/{first}/run", {"argv": ["sleep", "60"]}))
        until("it runs", lambda: len(own.call("GET", f"{S}/{first}/processes").json["processes"]) == 3)
        before = machines(own)
        own.kill()
        run.result()
    assert own.socket.exists()
    with pytest.raises(ConnectionRefusedError):
        own.call("GET", "/v1/health")
    own.start()
    assert machines(own) == before
    assert own.call("GET", f"{S}/first").json == record
    assert own.call("GET", f"{S}/first/processes/3").json["exit_code"] == -1
    assert own.run("second", "echo", "hi").stdout == b"hi\n"
    assert own.run("first", "sh", "-c", "printenv TOKEN | wc -c; touch /tmp/go").stdout == b"14\n"
    assert own.call("POST", f"{process}/stdin?close=1", b"after the restart\n").status == 204
    assert own.output(process) == (b"start\nend\nafter the restart\n", b"", 7)
    assert own.output(done) == (b"finished\n", b"", 3)
    assert own.call("POST", S, {"name": "first"}).code == "conflict"
    assert own.start_process(first, "true").endswith("/processes/5")
    for path in own.state.rglob("*"):
        if path.is_file() and path.name != "scratch.img":
            assert b"CANARY" not in path.read_bytes(), path
    assert b"CANARY" not in own.log.read_bytes()
    for one in (first, second):
        assert own.call("DELETE", f"{S}/{one}").status == 204
    assert leftovers(own) == []


def test_killed_before_the_disk_of_an_ended_machine_was_put_aside_it_is_kept_all_the_same(own: Rig) -> None:
    fallen, ended = own.create(), own.create()
    own.kill()
    for pid in machines(own):
        os.kill(int(pid), signal.SIGKILL)
    with contextlib.closing(Store(own.state / "state.sqlite")) as store:
        for record in store.sandboxes()[0]:
            because = "machine" if record.id == fallen else "request"
            store.put(replace(record, state=State.TERMINATED, ended_because=because))
    own.start()
    assert leftovers(own) == []
    assert [path.name for path in (own.state / "disks").iterdir()] == [f"{fallen}.img"]
    assert own.call("DELETE", f"{S}/{fallen}").status == 204
    assert list((own.state / "disks").iterdir()) == []
    assert own.call("GET", f"{S}/{ended}").json["state"] == "terminated"


def _swallow(rig: Rig, path: str, body: Any) -> None:
    try:
        rig.call("POST", path, body)
    except (OSError, Exception):
        return


def test_output_that_came_while_nobody_listened_is_filled_in_from_the_guest(own: Rig) -> None:
    sandbox = own.create()
    script = "echo before; while ! test -e /tmp/go; do sleep 0.02; done; seq 20000; echo err >&2; sleep 0.2"
    process = own.start_process(sandbox, "sh", "-c", script)
    assert _said(own, process)
    assert own.run(sandbox, "sh", "-c", "(sleep 0.5; touch /tmp/go) >/dev/null 2>&1 &").exit_code == 0
    own.kill()
    time.sleep(1)
    own.start()
    expected = b"before\n" + b"".join(b"%d\n" % n for n in range(1, 20001))
    assert own.output(process) == (expected, b"err\n", 0)


def _said(rig: Rig, process: str) -> bool:
    connection = rig.connection()
    connection.request("GET", f"{process}/output")
    line = connection.getresponse().readline()
    connection.close()
    return b"YmVmb3JlCg" in line


def test_a_create_that_never_finished_is_ended(own: Rig) -> None:
    own.call("DELETE", f"{S}/{own.create()}")
    own.knob("boot_s", "0.2")
    with ThreadPoolExecutor(1) as pool:
        create = pool.submit(lambda: _swallow(own, S, {"name": "half"}))
        until("it is listed", lambda: own.call("GET", f"{S}/half").status == 200)
        until("it runs", lambda: machines(own))
        own.kill()
        create.result()
    own.knob("boot_s", None)
    own.start()
    assert own.call("GET", f"{S}/half").status == 404
    until("nothing is left", lambda: leftovers(own) == [])
    assert "its create never finished" in own.log.read_text()


def test_machines_without_a_record_and_records_without_a_machine(own: Rig) -> None:
    gone = own.create(name="gone")
    kept = own.create(name="kept")
    own.kill()
    for pid in machines(own):
        if gone in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(int(pid), signal.SIGKILL)
    stray = own.state / "sandboxes" / "sbx_0123456789abcdef"
    (stray / "deep").mkdir(parents=True)
    (stray / "deep" / "link").symlink_to("/etc")
    (own.state / "output" / "sbx_0123456789abcdef").mkdir(parents=True)
    own.start()
    assert own.call("GET", f"{S}/{gone}").json["state"] == "terminated"
    assert own.call("GET", f"{S}/{kept}").json["state"] == "running"
    assert not stray.exists() and not (own.state / "output" / "sbx_0123456789abcdef").exists()
    assert [path.name for path in (own.state / "disks").iterdir()] == [f"{gone}.img"]
    assert Path("/etc/hostname").exists()
    own.call("DELETE", f"{S}/{gone}")
    assert list((own.state / "disks").iterdir()) == []


def test_a_daemon_that_stops_leaves_its_sandboxes_unless_told_otherwise(place: Path) -> None:
    with Rig(place) as rig:
        sandbox = rig.create()
        rig.stop()
        assert len(machines(rig)) == 1 and not rig.socket.exists()
        rig.flags = ("--end-sandboxes",)
        rig.start()
        assert rig.run(sandbox, "echo", "back").stdout == b"back\n"
        rig.stop()
        assert leftovers(rig) == []


def test_nothing_of_the_state_is_open_to_others(place: Path) -> None:
    """Wherever the state directory is, and whatever the daemon was given as its umask."""
    (place / "state").mkdir(mode=0o755)
    with Rig(place, prefix=("sh", "-c", 'umask 0; exec "$@"', "sh")) as rig:
        sandbox = rig.create()
        rig.output(rig.start_process(sandbox, "sh", "-c", "echo out; echo err >&2"))
        assert rig.call("POST", "/v1/volumes", {"name": "v"}).status == 201
        outputs = [path for path in (rig.state / "output").rglob("*") if path.is_file()]
        assert len(outputs) == 2
        # What the stand-in takes for assets is none of ours; the rest of `sandboxes` lies behind a closed door.
        ours = [path for path in rig.state.iterdir() if path.name != "assets"]
        ours += (rig.state / "output").rglob("*")
        assert [str(path) for path in ours if path.stat().st_mode & 0o077] == []


def test_the_stand_in_too_ends_a_machine_that_nobody_wrote_down(own: Rig) -> None:
    own.kill()
    stray = own.state / "sandboxes" / "sbx_0000000000000000"
    stray.mkdir()
    launch(stray, None)
    (stray / "vm.json").unlink()
    own.start()
    until("it has ended", lambda: leftovers(own) == [])


def test_one_daemon_per_state_directory_and_per_socket(own: Rig) -> None:
    def another(state: Path, path: Path) -> str:
        command = [sys.executable, "-m", "tests.sandboxd.fake_daemon", str(state), str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
        assert done.returncode != 0
        return done.stderr

    assert "another sandboxd uses the state directory" in another(own.state, own.directory / "t.sock")
    assert "is in use: another program listens there" in another(own.directory / "state2", own.socket)
    precious = own.directory / "precious"
    precious.write_text("not a socket")
    assert "it is no socket" in another(own.directory / "state2", precious)
    assert precious.read_text() == "not a socket"
    assert own.call("GET", "/v1/health").status == 200


# -- much output, slow readers


def test_endless_output_with_a_reader_that_never_reads(other: Rig) -> None:
    sandbox = other.create()
    before = other.rss_kib()
    process = other.start_process(sandbox, "yes")
    with other.attach(process):
        connection = other.connection()
        connection.request("GET", f"{process}/output")
        connection.getresponse()
        time.sleep(2)
        assert other.run(sandbox, "echo", "responsive").stdout == b"responsive\n"
        assert other.rss_kib() - before < 16 << 10
        connection.close()
    output = other.state / "output" / sandbox
    spooled = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    assert spooled < 80 << 20
    other.call("POST", f"{process}/signal", {"signal": "KILL"})
    until("it ends", lambda: other.call("GET", process).json["exit_code"] == 137)


def test_a_replay_beyond_the_spool_starts_with_a_notice(other: Rig) -> None:
    sandbox = other.create()
    process = other.start_process(sandbox, "sh", "-c", "head -c 100000000 /dev/zero; echo end")
    until("it ends", lambda: other.call("GET", process).json["state"] == "exited", 60)
    connection = other.connection()
    connection.request("GET", f"{process}/output")
    first = json.loads(connection.getresponse().readline())
    connection.close()
    assert first["stream"] == "stdout" and 100000004 - (64 << 20) <= first["dropped"] < 100000004 - (56 << 20)
    with other.attach(process) as client:
        kind, text = client.frame() or (b"", b"")
        out, _, code = client.rest()
    assert kind == b"E" and b"%d bytes of earlier stdout" % first["dropped"] in text
    assert len(out) + first["dropped"] == 100000004 and out.endswith(b"\0end\n") and code == 0


def test_mib_pass_a_live_attach_whole(other: Rig) -> None:
    sandbox = other.create()
    process = other.start_process(sandbox, "sh", "-c", "read go; head -c 90000000 /dev/zero; echo end >&2")
    before = other.rss_kib()
    with other.attach(process) as client:
        client.send(b"i", b"\n")
        time.sleep(1)
        out, err, code = client.rest()
    assert (len(out), err, code) == (90000000, b"end\n", 0)
    assert other.rss_kib() - before < 16 << 10


def test_descriptors_and_tasks_after_many_sessions(other: Rig) -> None:
    sandbox = other.create()
    process = other.start_process(sandbox, "cat")
    other.run(sandbox, "true")
    before = other.descriptors()

    def session(number: int) -> None:
        if number % 3 == 0:
            client = other.attach(process)
            client.socket.close()
            client.file.close()
        elif number % 3 == 1:
            assert other.run(sandbox, "echo", str(number)).stdout == b"%d\n" % number
        else:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(other.socket))
                sock.sendall(b"POST /v1/sandboxes HTTP/1.1\r\nHost: localh")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(session, range(150)))
    until("they are closed", lambda: other.descriptors() <= before + 5)
    other.call("POST", f"{process}/signal", {"signal": "KILL"})


def test_too_many_connections_are_told_so(other: Rig) -> None:
    held = []
    try:
        for _ in range(Limits().connections_per_client + 8):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(other.socket))
            held.append(sock)
        until("it is full", lambda: b"\r\nretry-after: 1\r\n" in other.raw(b"", timeout=2))
    finally:
        for sock in held:
            sock.close()
    until("it is free", lambda: other.call("GET", "/v1/health").status == 200)


def test_slow_headers_are_cut(rig: Rig) -> None:
    assert rig.slow is not None
    rig.slow.join()
    assert rig.slow.said == b"" and 9 < rig.slow.took_s < 20


def test_a_state_directory_that_takes_no_more_ends_nothing(own: Rig) -> None:
    for name in ("a", "b"):
        own.create(name=name)
    ending = own.start_process("a", "cat")
    assert own.process is not None
    pid, kind = own.process.pid, resource.RLIMIT_FSIZE
    hard = resource.prlimit(pid, kind)[1]
    resource.prlimit(pid, kind, (0, hard))
    asked: list[tuple[str, str, Any]] = [
        ("POST", S, {"name": "c"}),
        ("POST", f"{S}/b/processes", {"argv": ["sleep", "4242"]}),
        ("PATCH", f"{S}/b", {"name": "z"}),
    ]
    for method, path, body in asked:
        answer = own.call(method, path, body)
        assert (answer.status, answer.message[:38]) == (500, "the state directory cannot be written:")
    assert own.call("GET", f"{S}/c").status == own.call("GET", f"{S}/z").status == 404
    assert own.run("b", "sh", "-c", "exit 3").exit_code == 3
    assert own.call("POST", f"{ending}/stdin?close=1", b"").status == 204
    until("its end is seen", lambda: own.call("GET", ending).json.get("exit_code") == 0)
    assert own.call("DELETE", f"{S}/a").status == 204
    assert len(machines(own)) == 1

    resource.prlimit(pid, kind, (hard, hard))
    until("what nobody was told of is ended", lambda: own.run("b", "pgrep", "-f", "sleep 4242").exit_code == 1)
    until("it can be written again", lambda: own.call("PATCH", f"{S}/b", {"name": "z"}).status == 200)

    def told() -> bool:
        """What was owed to the file is in it: each end that there was meanwhile."""
        with contextlib.closing(sqlite3.connect(f"file:{own.state}/state.sqlite?mode=ro", uri=True)) as file:
            ended = file.execute("SELECT count(*) FROM sandbox WHERE state = 'terminated'").fetchone()
            exits = [json.loads(record)["exit_code"] for (record,) in file.execute("SELECT record FROM process")]
        return ended == (1,) and exits != [] and None not in exits

    until("what was owed is written", told)
    own.kill()
    own.start()
    found = {one["name"]: one["state"] for one in own.call("GET", f"{S}").json["sandboxes"]}
    assert found == {"a": "terminated", "z": "running"}
    assert own.call("GET", ending).json["exit_code"] == 0


def test_a_client_that_leaves_while_its_process_starts_leaves_none(other: Rig) -> None:
    ref = other.create()
    body = json.dumps({"argv": ["sleep", "4243"]}).encode()
    for moment in range(20):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(other.socket))
            head = f"POST {S}/{ref}/processes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(moment * 0.002)

    def known() -> int:
        return sum(one["state"] == "running" for one in other.call("GET", f"{S}/{ref}/processes").json["processes"])

    def there() -> int:
        return len(other.run(ref, "pgrep", "-x", "sleep").stdout.split())

    until("what runs is what is known", lambda: there() == known())
