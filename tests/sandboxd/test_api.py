"""The API as its clients see it: the conformance rows C1–C28, C34, C40, C43, C48 that apply, over the real socket."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxd.rig import Rig, frame

S = "/v1/sandboxes"


# -- C1 to C8: sandboxes


def test_c1_capabilities(rig: Rig) -> None:
    said = rig.call("GET", "/v1/capabilities").json
    assert said["api_version"] == "v1" and said["backend"]
    assert all(isinstance(value, bool) for value in said["capabilities"].values())
    assert {"network_policy_update", "suspend", "memory_snapshot", "audit"} <= said["capabilities"].keys()
    assert said["capabilities"]["workspace_bundle"] is True
    assert said["limits"] == {
        "max_cpus": 8, "max_memory_mb": 16384, "max_disk_mb": 102400, "max_idle_timeout_secs": 604800,
        "min_snapshot_every_secs": 300, "max_snapshot_keep": 5, "max_lifetime_secs": 0,
    }  # fmt: skip
    assert said["network"] == {"default": {"mode": "none", "allow": None}, "ceiling": "none", "may_allow": []}


def test_c2_c3_c4_the_life_of_a_name(rig: Rig) -> None:
    first = rig.call("POST", S, {"name": "life", "labels": {"k": "v"}}).json
    assert first.keys() == {
        "id", "name", "state", "image", "cpus", "memory_mb", "disk_mb", "network", "created_at",
        "idle_timeout_secs", "labels",
    }  # fmt: skip
    assert first["state"] == "running" and first["id"].startswith("sbx_") and len(first["id"]) == 20
    assert first["network"] == {"mode": "none", "allow": None} and first["created_at"].endswith("Z")
    assert (first["cpus"], first["memory_mb"], first["disk_mb"]) == (1, 1024, 10240)
    assert rig.call("GET", f"{S}/life").json == rig.call("GET", f"{S}/{first['id']}").json == first
    assert rig.call("GET", S).json["sandboxes"][0] == first
    assert rig.call("POST", S, {"name": "life"}).code == "conflict"
    assert [rig.call("DELETE", f"{S}/life").status for _ in range(2)] == [204, 204]
    assert rig.call("GET", f"{S}/life").json["state"] == "terminated"
    second = rig.create(name="life")
    assert second != first["id"] and rig.call("GET", f"{S}/life").json["id"] == second
    assert rig.call("DELETE", f"{S}/{second}").status == 204
    assert not list((rig.state / "sandboxes").glob(f"{second}*"))


@pytest.mark.parametrize("name", ["Upper", "has space", "sbx_lookslikeanid", "-lead", "a" * 64, "ü", "a/b", "a\n"])
def test_c5_names(rig: Rig, name: str) -> None:
    assert rig.call("POST", S, {"name": name}).code == "invalid_request"


def test_c6_unknown_ones(rig: Rig) -> None:
    assert rig.call("GET", f"{S}/nobody").code == "not_found"
    assert rig.call("POST", f"{S}/sbx_{'0' * 16}/run", {"argv": ["true"]}).code == "not_found"
    assert rig.call("DELETE", f"{S}/nobody").code == "not_found"
    assert rig.call("GET", f"{S}/%2e%2e").code == "not_found"


def test_c7_environment_values_go_in_and_never_out(rig: Rig, box: str) -> None:
    said = rig.call("GET", f"{S}/{box}")
    assert said.json["env_names"] == ["API_TOKEN"] and b"CANARY" not in said.body
    digest = hashlib.sha256(b"s3cr3t-CANARY\n").hexdigest().encode()
    assert rig.run(box, "sh", "-c", "printenv API_TOKEN | sha256sum").stdout.startswith(digest)
    assert b"CANARY" not in rig.log.read_bytes()
    # The stand-in machine's disks hold nothing; they are sparse and large.
    for path in rig.state.rglob("*"):
        if path.is_file() and path.name != "scratch.img":
            assert b"CANARY" not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        pytest.param({"env": {"LD_PRELOAD": "x"}}, 403, "refused", id="a reserved name"),
        pytest.param({"env": {" BASH_ENV ": "x"}}, 403, "refused", id="a reserved name with blanks"),
        pytest.param({"env": {"1A": "x"}}, 400, "invalid_request", id="a bad name"),
        pytest.param({"env": {"A": "a\0b"}}, 400, "invalid_request", id="a NUL"),
        pytest.param({"cpus": -1}, 400, "invalid_request", id="negative cpus"),
        pytest.param({"cpus": 9}, 400, "invalid_request", id="too many cpus"),
        pytest.param({"memory_mb": 16385}, 400, "invalid_request", id="too much memory"),
        pytest.param({"memory_mb": 1}, 400, "invalid_request", id="memory nothing boots in"),
        pytest.param({"disk_mb": -5}, 400, "invalid_request", id="a negative disk"),
        pytest.param({"idle_timeout_secs": 604801}, 400, "invalid_request", id="idle above the limit (C31)"),
        pytest.param({"idle_timeout_secs": -1}, 400, "invalid_request", id="negative idle"),
        pytest.param({"lifetime_secs": -1}, 400, "invalid_request", id="negative lifetime"),
        pytest.param({"image": "-x"}, 400, "invalid_request", id="an image like a flag"),
        pytest.param({"image": "debian:12"}, 400, "invalid_request", id="an image of no registry"),
        pytest.param({"snapshot_id": "snp_0"}, 501, "unsupported", id="no snapshots"),
        pytest.param({"snapshot_every_secs": 300}, 501, "unsupported", id="no schedules"),
        pytest.param({"bind": {"host_path": "/"}}, 403, "refused", id="no bind (C49)"),
        pytest.param({"bind": {"host_path": "relative"}}, 403, "refused", id="no bind at all"),
        pytest.param({"network": {"mode": "open"}}, 403, "refused", id="open above the ceiling (C23)"),
        pytest.param({"network": {"mode": "wide-open"}}, 400, "invalid_request", id="no such mode (C23)"),
        pytest.param({"network": {"mode": "allowlist", "allow": []}}, 403, "refused", id="an empty list (C24)"),
        pytest.param({"network": {"deny": ["http://x.test/"]}}, 400, "invalid_request", id="a URL denied (C25)"),
        pytest.param({"network": {"deny": ["1.2.3.4"]}}, 400, "invalid_request", id="an address denied"),
        pytest.param(
            {"network": {"mode": "allowlist", "allow": ["x.test"]}}, 403, "refused", id="a name not allowed (C26)"
        ),
        pytest.param({"network": {"allow": ["x.test"]}}, 400, "invalid_request", id="allow with none"),
        pytest.param({"labels": {"Bad": "x"}}, 400, "invalid_request", id="a bad label key (C40)"),
        pytest.param({"labels": {"k": "a\u009bb"}}, 400, "invalid_request", id="C1 in a label (C40)"),
        pytest.param({"labels": {"k": "x" * 257}}, 400, "invalid_request", id="a long label"),
        pytest.param({"labels": {f"k{n}": "" for n in range(33)}}, 400, "invalid_request", id="33 labels"),
        pytest.param({"unknown": 1}, 400, "invalid_request", id="an unknown field"),
        pytest.param({"network": {"mode": "none", "proxy": 1}}, 400, "invalid_request", id="an unknown field inside"),
    ],
)
def test_creates_that_are_refused(rig: Rig, fields: dict[str, Any], status: int, code: str) -> None:
    answer = rig.call("POST", S, fields)
    assert (answer.status, answer.code) == (status, code), answer.message
    assert "CANARY" not in answer.message


def test_c22_c23_null_is_absent_and_none_is_none(rig: Rig) -> None:
    null = {"name": None, "env": None, "network": {"mode": "none", "allow": None, "deny": ["A.test."]}, "labels": None}
    said = rig.call("POST", S, null).json
    assert said["network"] == {"mode": "none", "allow": None} and "name" not in said and "labels" not in said
    rig.call("DELETE", f"{S}/{said['id']}")


# -- C9 to C16: processes


def test_c9_c10_output_code_and_stdin(rig: Rig, box: str) -> None:
    ran = rig.run(box, "echo", "hello", "world")
    assert (ran.stdout, ran.stderr, ran.exit_code, ran.truncated, ran.timed_out) == (
        b"hello world\n", b"", 0, False, False,
    )  # fmt: skip
    assert rig.run(box, "false").exit_code == 1
    assert rig.run(box, "cat", stdin=bytes(range(256))).stdout == bytes(range(256))
    assert rig.run(box, "cat").stdout == b""


def test_c11_a_timeout_kills_and_keeps_what_came(rig: Rig, box: str) -> None:
    before = time.monotonic()
    ran = rig.run(box, "sh", "-c", "echo early; trap '' TERM; sleep 30", timeout_secs=1)
    assert (ran.timed_out, ran.exit_code, ran.stdout) == (True, -1, b"early\n")
    assert time.monotonic() - before < 25


@pytest.mark.parametrize(
    ("body", "part"),
    [
        pytest.param({"argv": ["no-such-command"]}, "no-such-command", id="unknown command"),
        pytest.param({}, "argv", id="no argv"),
        pytest.param({"argv": []}, "argv", id="empty argv"),
        pytest.param({"argv": [""]}, "argv", id="empty command"),
        pytest.param({"argv": ["echo", "a\0b"]}, "argv[1]", id="a NUL"),
        pytest.param({"argv": ["echo", "\ud800"]}, "argv[1]", id="half a surrogate pair"),
        pytest.param({"argv": "echo"}, "argv", id="argv as text"),
        pytest.param({"argv": ["pwd"], "cwd": "tmp"}, "cwd", id="a relative cwd (C13)"),
        pytest.param({"argv": ["pwd"], "cwd": "/no/such/dir"}, "cwd", id="a missing cwd (C13)"),
        pytest.param({"argv": ["pwd"], "cwd": "/tmp/../etc"}, "cwd", id="a cwd with dots"),
        pytest.param({"argv": ["true"], "tty": True}, "terminal", id="run with a tty (C34)"),
        pytest.param({"argv": ["true"], "timeout_secs": -1}, "timeout_secs", id="a negative timeout"),
        pytest.param({"argv": ["true"], "stdin": "%%%"}, "stdin", id="stdin that is no base64"),
    ],
)
def test_c12_c13_runs_that_are_400(rig: Rig, box: str, body: dict[str, Any], part: str) -> None:
    answer = rig.call("POST", f"{S}/{box}/run", body)
    assert (answer.status, answer.code) == (400, "invalid_request")
    assert part in answer.message


def test_c8_reserved_names_of_a_run(rig: Rig, box: str) -> None:
    assert rig.call("POST", f"{S}/{box}/run", {"argv": ["true"], "env": {"BASH_ENV": "x"}}).code == "refused"


def test_c13_where_a_command_runs(rig: Rig, box: str) -> None:
    assert rig.run(box, "pwd", cwd="/tmp/").stdout == b"/tmp\n"
    assert rig.run(box, "pwd").stdout == b"/sandbox/home\n"


def test_c14_stdin_in_pieces(rig: Rig, box: str) -> None:
    cat = rig.start_process(box, "cat")
    for piece, close in ((b"one\n", ""), (b"two\n", "?close=1")):
        assert rig.call("POST", f"{cat}/stdin{close}", piece).status == 204
    assert rig.output(cat) == (b"one\ntwo\n", b"", 0)
    assert rig.call("POST", f"{cat}/stdin", b"late").code == "conflict"
    listed = rig.call("GET", f"{S}/{box}/processes").json["processes"]
    assert [p for p in listed if cat.endswith(f"/{p['pid']}")] == [rig.call("GET", cat).json]
    assert rig.call("GET", cat).json == {
        "pid": int(cat.rpartition("/")[2]), "argv": ["cat"], "state": "exited", "exit_code": 0,
        "started_at": rig.call("GET", cat).json["started_at"],
    }  # fmt: skip


def test_stdin_that_is_closed_stays_closed(rig: Rig, box: str) -> None:
    process = rig.start_process(box, "sleep", "5")
    assert rig.call("POST", f"{process}/stdin?close=1", b"").status == 204
    assert rig.call("POST", f"{process}/stdin", b"x").code == "conflict"
    assert rig.call("POST", f"{process}/signal", {"signal": "KILL"}).status == 204


@pytest.mark.parametrize(("name", "code"), [("TERM", 143), ("INT", 130), ("HUP", 129), ("KILL", 137)])
def test_c15_signals(rig: Rig, box: str, name: str, code: int) -> None:
    process = rig.start_process(box, "sleep", "30")
    assert rig.call("POST", f"{process}/signal", {"signal": name}).status == 204
    assert rig.output(process) == (b"", b"", code)
    assert rig.call("POST", f"{process}/signal", {"signal": name}).status == 204


def test_c15_other_signals_and_other_pids(rig: Rig, box: str) -> None:
    process = rig.start_process(box, "true")
    assert rig.call("POST", f"{process}/signal", {"signal": "STOP"}).status == 400
    for pid in ("0", "999999", "x", "-1", "1e0", "9" * 40, "\u0661"):
        path = f"{S}/{box}/processes/{pid.encode().hex() if not pid.isascii() else pid}"
        assert rig.call("GET", path).code == "not_found"


def test_a_signal_reaches_a_process_that_does_not_read_its_stdin(rig: Rig, box: str) -> None:
    process = rig.start_process(box, "sleep", "60")
    with rig.attach(process) as client:
        client.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            for _ in range(100):
                client.send(b"i", bytes(1 << 20))
        assert rig.call("POST", f"{process}/signal", {"signal": "TERM"}).status == 204
    assert rig.output(process) == (b"", b"", 143)


def test_signals_and_sizes_of_a_second_attach_do_not_wait_for_the_stdin_of_the_first(rig: Rig, box: str) -> None:
    script = "stty raw -echo; trap 'stty size' WINCH; echo ready; while :; do sleep 0.1; done"
    process = rig.start_process(box, "sh", "-c", script, tty=True, rows=24, cols=80)
    with rig.attach(process) as first, rig.attach(process) as second:
        assert second.frame() == (b"o", b"ready\n")
        first.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            for _ in range(100):
                first.send(b"i", bytes(1 << 20))
        second.send(b"r", bytes([0, 43, 0, 132]))
        assert second.frame() == (b"o", b"43 132\n")
        second.send(b"s", b"KILL")
        assert second.rest()[2] == 137


def test_c16_c34_the_same_output_however_often_it_is_asked_for(rig: Rig, box: str) -> None:
    process = rig.start_process(box, "sh", "-c", "read line; echo out $line; echo err >&2; exit 5")
    with rig.attach(process) as client:
        assert (client.status, client.headers) == (
            "HTTP/1.1 101", {"connection": "Upgrade", "upgrade": "sbx-stream/1"},
        )  # fmt: skip
    assert rig.call("GET", process).json["state"] == "running"
    with rig.attach(process, early=frame(b"i", b"early\n")) as client:
        client.socket.shutdown(socket.SHUT_WR)
        assert client.rest() == (b"out early\n", b"err\n", 5)
    for _ in range(2):
        assert rig.output(process) == (b"out early\n", b"err\n", 5)
        with rig.attach(process) as client:
            assert client.rest() == (b"out early\n", b"err\n", 5)
    assert rig.call("GET", f"{process}/attach").status == 400
    assert rig.call("GET", f"{process}/attach", headers={"Upgrade": "websocket", "Connection": "upgrade"}).status == 400


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"i\xff\xff\xff\xff", id="a frame of 4 GiB"),
        pytest.param(b"i\x00\x10\x00\x01", id="a frame one byte too long"),
        pytest.param(b"o\x00\x00\x00\x00", id="a frame of the other direction"),
        pytest.param(b"r\x00\x00\x00\x03abc", id="a size of three bytes"),
    ],
)
def test_broken_framing_ends_the_attach_and_not_the_process(rig: Rig, box: str, data: bytes) -> None:
    process = rig.start_process(box, "sleep", "60")
    with rig.attach(process, early=data) as client:
        assert client.rest() == (b"", b"", None)
    assert rig.call("GET", process).json["state"] == "running"
    rig.call("POST", f"{process}/signal", {"signal": "KILL"})


def test_a_terminal(rig: Rig, box: str) -> None:
    process = rig.start_process(box, "sh", "-c", "stty size; read x; stty size; cat", tty=True, rows=43, cols=132)
    assert rig.call("GET", process).json["tty"] is True
    with rig.attach(process) as client:
        assert client.frame() == (b"o", b"43 132\r\n")
        client.send(b"r", bytes([0, 24, 0, 80]))
        client.send(b"s", b"WINCH")
        client.send(b"i", b"\n")
        client.send(b"i", b"abc")
        client.send(b"e")
        client.send(b"e")
        out, err, code = client.rest()
    assert b"24 80\r\n" in out and b"abc" in out and (err, code) == (b"", 0)


@pytest.mark.parametrize(("rows", "cols"), [(-1, 0), (70000, 1), (1, 1 << 40)])
def test_silly_terminal_sizes_are_400(rig: Rig, box: str, rows: int, cols: int) -> None:
    body = {"argv": ["true"], "tty": True, "rows": rows, "cols": cols}
    assert rig.call("POST", f"{S}/{box}/processes", body).status == 400


def test_arguments_arrive_as_given(rig: Rig, box: str) -> None:
    arguments = ["a b", "'\"$(x)`", "new\nline", "", "é\u4e2d\U0001f600", "\udcff\udc80", "--", "-n"]
    arguments += ["x" * 100_000, "y" * 100_000]
    ran = rig.run(box, "printf", "%s|", *arguments, env={"X": "a=b\nc"})
    assert ran.stdout == b"".join(a.encode(errors="surrogateescape") + b"|" for a in arguments)
    listed = rig.call("GET", f"{S}/{box}/processes").json["processes"][-1]["argv"]
    assert listed == ["printf", "%s|", *arguments]
    assert rig.run(box, "sh", "-c", 'printf %s "$X"', env={"X": "a=b\nc"}).stdout == b"a=b\nc"
    too_long = rig.call("POST", f"{S}/{box}/run", {"argv": ["echo", "x" * (1 << 20)]})
    assert too_long.status == 400


def test_a_run_keeps_the_first_8_mib_of_each_stream(rig: Rig, box: str) -> None:
    ran = rig.run(box, "sh", "-c", "head -c 9000000 /dev/zero; head -c 1000 /dev/zero >&2; echo end >&2")
    assert ran.truncated and ran.stdout == bytes(8 << 20) and ran.stderr == bytes(1000) + b"end\n"
    assert ran.exit_code == 0
    assert not rig.run(box, "head", "-c", str(8 << 20), "/dev/zero").truncated


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 65535, 65536, 65537, 196609])
def test_output_of_any_size_is_base64_without_seams(rig: Rig, box: str, size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert rig.call("PUT", f"{S}/{box}/files?path=/tmp/d", data).status == 204
    ran = rig.run(box, "sh", "-c", "cat /tmp/d; cat /tmp/d >&2")
    assert ran.stdout == ran.stderr == data


def test_a_background_child_does_not_hold_the_run(rig: Rig, box: str) -> None:
    before = time.monotonic()
    assert rig.run(box, "sh", "-c", "sleep 20 & echo started").stdout == b"started\n"
    assert time.monotonic() - before < 15


def test_eight_at_once(rig: Rig, box: str) -> None:
    processes = [rig.start_process(box, "sh", "-c", f"sleep 0.2; echo {n}") for n in range(8)]
    assert [rig.output(process)[0] for process in processes] == [b"%d\n" % n for n in range(8)]


def test_not_root(rig: Rig, box: str) -> None:
    assert rig.run(box, "id", "-u").stdout == b"1001\n"


# -- C17 to C20: files


def test_c17_c18_files(rig: Rig, box: str) -> None:
    data = random.Random(1).randbytes(300_000)
    base = f"{S}/{box}/files?path=/sandbox/home"
    assert rig.call("PUT", f"{base}/new/deep/b.bin", data).status == 204
    read = rig.call("GET", f"{base}/new/deep/b.bin")
    assert (read.status, read.body) == (200, data)
    assert read.headers["content-type"] == "application/octet-stream"
    assert read.headers["content-length"] == str(len(data))
    assert rig.run(box, "cat", "/sandbox/home/new/deep/b.bin").stdout == data
    assert rig.run(box, "cat", "b.bin", cwd="/sandbox/home/new/deep").stdout == data
    rig.run(box, "sh", "-c", "cd new; ln -s /etc link; mkfifo pipe; : > empty; : > $(printf 'caf\\351')")
    assert rig.call("GET", f"{S}/{box}/dirs?path=/sandbox/home/new").json == {
        "entries": [
            {"name": "caf\udce9", "type": "file", "size": 0},
            {"name": "deep", "type": "dir", "size": 0},
            {"name": "empty", "type": "file", "size": 0},
            {"name": "link", "type": "symlink", "size": 0},
            {"name": "pipe", "type": "other", "size": 0},
        ]
    }
    assert rig.call("GET", f"{base}/new/caf%E9").body == b""
    assert rig.call("DELETE", f"{base}/new").code == "conflict"  # C19
    assert rig.call("DELETE", f"{base}/new/deep/b.bin").status == 204
    assert rig.call("GET", f"{base}/new/deep/b.bin").code == "not_found"
    assert rig.call("DELETE", f"{base}/new/deep").status == 204


@pytest.mark.parametrize("path", ["relative/path", "/workspace/../etc/passwd", "/a/../../b", "", "/a%00b", ".."])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_c20_paths(rig: Rig, box: str, path: str, method: str) -> None:
    answer = rig.call(method, f"{S}/{box}/files?path={path}", b"x" if method == "PUT" else None)
    assert (answer.status, answer.code) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "files?path=/tmp", 400), ("GET", "files?path=/tmp/none", 404), ("PUT", "files?path=/tmp", 400),
        ("PUT", "files?path=/etc/hostname/x", 400), ("GET", "dirs?path=/etc/hostname", 400),
        ("GET", "dirs?path=/none", 404), ("DELETE", "files?path=/none", 404),
        ("GET", "files?path=/tmp&path=/etc", 400), ("GET", "files", 400),
    ],
)  # fmt: skip
def test_what_files_answer(rig: Rig, box: str, method: str, path: str, status: int) -> None:
    assert rig.call(method, f"{S}/{box}/{path}", b"x" if method == "PUT" else None).status == status


def test_a_body_that_does_not_say_its_size(rig: Rig, box: str) -> None:
    connection = rig.connection()
    pieces = [b"a" * 100_000, b"b"]
    headers = {"Content-Type": "application/octet-stream", "Transfer-Encoding": "chunked"}
    connection.request(
        "PUT", f"{S}/{box}/files?path=/tmp/chunked", iter(pieces), headers=headers, encode_chunked=True
    )
    assert connection.getresponse().status == 204
    connection.close()
    assert rig.call("GET", f"{S}/{box}/files?path=/tmp/chunked").body == b"".join(pieces)


# -- C21, C27, C28, C40


def test_c21_c28_what_a_terminated_sandbox_still_answers(rig: Rig) -> None:
    sandbox = rig.create(name="short")
    process = rig.start_process(sandbox, "echo", "kept")
    assert rig.output(process)[0] == b"kept\n"
    sleeper = rig.start_process(sandbox, "sleep", "60")
    rig.call("DELETE", f"{S}/{sandbox}")
    for method, path, body in (
        ("POST", "run", {"argv": ["true"]}), ("PUT", "files?path=/tmp/x", b"x"), ("GET", "files?path=/tmp/x", None),
        ("POST", "processes", {"argv": ["true"]}), ("PATCH", "", {"name": "x"}), ("GET", "dirs?path=/", None),
        ("POST", "workspace?branch=b", b"x"),
    ):  # fmt: skip
        answer = rig.call(method, f"{S}/{sandbox}/{path}" if path else f"{S}/{sandbox}", body)
        assert (answer.status, answer.code) == (409, "conflict"), path
    assert rig.output(process) == (b"kept\n", b"", 0)
    assert rig.output(sleeper) == (b"", b"", -1)
    assert len(rig.call("GET", f"{S}/{sandbox}/processes").json["processes"]) == 2


def test_c27_networks_do_not_change_here(rig: Rig, box: str) -> None:
    assert rig.call("PATCH", f"{S}/{box}", {"network": {"mode": "none"}}).code == "unsupported"
    assert rig.call("GET", f"{S}/{box}").json["network"] == {"mode": "none", "allow": None}


def test_c28_changes(rig: Rig) -> None:
    sandbox = rig.create(name="before", labels={"a": "1"})
    other = rig.create(name="other")
    path = f"{S}/{sandbox}"
    assert rig.call("PATCH", path, {"name": "after"}).json["name"] == "after"
    assert rig.call("GET", f"{S}/before").status == 404
    assert rig.call("PATCH", path, {"labels": {"b": "2", "c": "=x"}}).json["labels"] == {"b": "2", "c": "=x"}
    found = rig.call("GET", f"{S}?label=b=2&label=c=%3Dx").json["sandboxes"]
    assert [one["id"] for one in found] == [sandbox]
    assert rig.call("GET", f"{S}?label=b=2&label=c=no").json["sandboxes"] == []
    assert [rig.call("GET", f"{S}?label={bad}").status for bad in ("b", "B=1", "b=%01")] == [400, 400, 400]
    assert rig.call("PATCH", path, {"name": "other", "labels": {}}).code == "conflict"
    for bad in ({}, {"name": "Bad"}, {"idle_timeout_secs": 604801}, {"idle_timeout_secs": 0}, {"x": 1}):
        assert rig.call("PATCH", path, bad | {"labels": {}} if bad and "x" not in bad else bad).status == 400
    assert rig.call("GET", path).json["labels"] == {"b": "2", "c": "=x"}
    assert rig.call("PATCH", path, {"idle_timeout_secs": 120}).json["idle_timeout_secs"] == 120
    cleared = rig.call("PATCH", path, {"name": "", "labels": {}}).json
    assert "name" not in cleared and "labels" not in cleared
    for one in (sandbox, other):
        rig.call("DELETE", f"{S}/{one}")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "suspend", None), ("POST", "resume", None), ("POST", "snapshots", None),
        ("PUT", "snapshot-schedule", {"every_secs": 300}),
    ],
)  # fmt: skip
def test_what_this_endpoint_lacks_is_501(rig: Rig, box: str, method: str, path: str, body: Any) -> None:
    assert rig.call(method, f"{S}/{box}/{path}", body).code == "unsupported"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/snapshots"), ("DELETE", "/v1/snapshots/snp_0"),
    ],
)  # fmt: skip
def test_other_endpoints_are_501_too(rig: Rig, method: str, path: str) -> None:
    assert (rig.call(method, path).status, rig.call(method, path).code) == (501, "unsupported")


# -- C48: the workspace


def test_c48_a_bundle_in_and_a_bundle_out(rig: Rig, tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q", "-b", "main")
    (tmp_path / "f").write_text("1\n")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    base = git("rev-parse", "HEAD")
    git("bundle", "create", "-q", str(tmp_path / "in"), "HEAD")
    sandbox = rig.create(name="git")
    path = f"{S}/{sandbox}/workspace"
    for branch in ("", "a..b", "-x", "a.lock", "a//b"):
        assert rig.call("POST", f"{path}?branch={branch}", b"x").code == "invalid_request"
    bad = rig.call("POST", f"{path}?branch=sandbox", b"not a bundle")
    assert (bad.status, bad.code) == (400, "invalid_request") and "\n" not in bad.message
    assert rig.call("POST", f"{path}?branch=sandbox", (tmp_path / "in").read_bytes()).status == 204
    assert rig.call("POST", f"{path}?branch=sandbox", (tmp_path / "in").read_bytes()).status == 409
    assert rig.call("GET", f"{path}/bundle?base={base}&branch=sandbox").code == "conflict"
    commit = "echo 2 >> f; git add f; git -c user.name=g -c user.email=g@g commit -qm two; git rev-parse HEAD"
    new = rig.run(sandbox, "sh", "-c", commit, cwd="/workspace").stdout.decode().strip()
    out = rig.call("GET", f"{path}/bundle?base={base}&branch=sandbox")
    assert (out.status, out.headers["content-type"]) == (200, "application/octet-stream")
    (tmp_path / "out").write_bytes(out.body)
    assert git("bundle", "list-heads", str(tmp_path / "out")) == f"{new} refs/heads/sandbox"
    for query in ("base=a..b&branch=sandbox", f"base={base}&branch=--x", f"base={base}&branch=none", "base=&branch="):
        assert rig.call("GET", f"{path}/bundle?{query}").status == 400
    rig.call("DELETE", f"{S}/{sandbox}")


# -- the tunnel (C39) and the life of a process's readers


def test_c39_a_tunnel_to_the_guests_loopback(rig: Rig, box: str) -> None:
    with socket.socket() as listener:
        # The stand-in guest shares this host's loopback.
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(str(rig.socket))
            head = f"GET {S}/{box}/tunnel?port={port} HTTP/1.1\r\nHost: localhost\r\n"
            client.sendall(head.encode() + b"Connection: upgrade\r\nUpgrade: sbx-tunnel/1\r\n\r\nearly ")
            served, _ = listener.accept()
            with served:
                client.sendall(b"and late")
                client.shutdown(socket.SHUT_WR)
                request = b""
                while piece := served.recv(100):
                    request += piece
                served.sendall(b"reply after the end")
            said = b""
            while piece := client.recv(1000):
                said += piece
    assert request == b"early and late"
    assert said.startswith(b"HTTP/1.1 101 ") and said.endswith(b"\r\n\r\nreply after the end")


@pytest.mark.parametrize(
    ("port", "headers", "status"),
    [
        ("80", {}, 400), ("0", None, 400), ("65536", None, 400), ("x", None, 400), ("", None, 400), ("1", None, 404),
    ],
)  # fmt: skip
def test_tunnels_that_are_refused(
    rig: Rig, box: str, port: str, headers: dict[str, str] | None, status: int
) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "sbx-tunnel/1"}
    given = upgrade if headers is None else headers
    assert rig.call("GET", f"{S}/{box}/tunnel?port={port}", headers=given).status == status


def test_output_is_followed_as_it_comes(rig: Rig, box: str) -> None:
    process = rig.start_process(box, "sh", "-c", "echo one; read x; echo two")
    connection = rig.connection()
    connection.request("GET", f"{process}/output")
    response = connection.getresponse()
    assert response.headers["content-type"] == "application/x-ndjson"
    assert json.loads(response.readline()) == {"stream": "stdout", "data": base64.b64encode(b"one\n").decode()}
    rig.call("POST", f"{process}/stdin", b"\n")
    assert json.loads(response.readline()) == {"stream": "stdout", "data": base64.b64encode(b"two\n").decode()}
    assert json.loads(response.readline()) == {"exit_code": 0}
    assert response.readline() == b""
    connection.close()
