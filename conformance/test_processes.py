"""Commands: run to their end, started and left, fed, signalled, followed and attached to."""

from __future__ import annotations

import base64
import time

from conformance import shape
from conformance.endpoint import Endpoint, frame
from conformance.estate import Sandbox

STREAM = "sbx-stream/1"


def test_a_run_answers_with_output_and_exit_code(box: Sandbox) -> None:
    """C9"""
    said = box.run("echo", "hello world")
    assert (said.stdout, said.stderr, said.exit_code) == (b"hello world\n", b"", 0)
    assert (said.truncated, said.timed_out) == (False, False)
    assert box.run("false").exit_code == 1


def test_a_run_is_given_its_stdin(box: Sandbox) -> None:
    """C10"""
    data = bytes(range(256)) * 16
    assert box.run("cat", stdin=data).stdout == data
    assert box.run("cat").stdout == b""


def test_a_run_that_takes_too_long_is_killed(box: Sandbox) -> None:
    """C11"""
    began = time.monotonic()
    said = box.run("sleep", "30", timeout_secs=1)
    assert (said.timed_out, said.exit_code) == (True, -1)
    assert time.monotonic() - began < 15
    shape.refused(box.call("POST", "/run", {"argv": ["true"], "timeout_secs": -1}), 400)


def test_a_command_that_is_not_there_or_not_named_is_refused(box: Sandbox) -> None:
    """C12"""
    for argv in (["no-such-command-anywhere"], ["/no/such/command"], [], [""], ["echo", "nul\0"]):
        for path in ("/run", "/processes"):
            shape.refused(box.call("POST", path, {"argv": argv}), 400)
    shape.refused(box.call("POST", "/run", {}), 400)


def test_a_command_starts_where_it_is_told(box: Sandbox) -> None:
    """C13"""
    assert box.run("pwd", cwd="/tmp").stdout == b"/tmp\n"
    shape.refused(box.call("POST", "/run", {"argv": ["pwd"], "cwd": "tmp"}), 400)
    message = shape.refused(box.call("POST", "/run", {"argv": ["pwd"], "cwd": "/no/such/directory"}), 400)
    assert "cwd" in message, message
    assert box.run("pwd").stdout == b"/sandbox/home\n"


def test_a_process_in_the_background_is_fed_and_ends_with_its_input(box: Sandbox, endpoint: Endpoint) -> None:
    """C14"""
    process = box.start("cat")
    body = shape.process(shape.ok(endpoint.call("GET", process)))
    assert (body["state"], body["exit_code"], body["argv"]) == ("running", None, ["cat"])
    assert "tty" not in body
    for line in (b"one\n", b"two\n"):
        shape.done(endpoint.call("POST", f"{process}/stdin", line))
    shape.done(endpoint.call("POST", f"{process}/stdin?close=1", b""))
    assert box.output(process) == (b"one\ntwo\n", b"", 0)
    body = shape.process(shape.ok(endpoint.call("GET", process)))
    assert (body["state"], body["exit_code"]) == ("exited", 0)
    listed = shape.ok(box.call("GET", "/processes"))["processes"]
    assert [one for one in listed if one["pid"] == body["pid"]] == [body]
    assert [one["pid"] for one in listed] == sorted(one["pid"] for one in listed)
    shape.refused(endpoint.call("POST", f"{process}/stdin", b"three\n"), 409)


def test_a_closed_stdin_takes_nothing_more(box: Sandbox, endpoint: Endpoint) -> None:
    process = box.start("sleep", "600")
    shape.done(endpoint.call("POST", f"{process}/stdin?close=1", b""))
    shape.refused(endpoint.call("POST", f"{process}/stdin", b"late"), 409)
    shape.done(endpoint.call("POST", f"{process}/signal", {"signal": "KILL"}))
    assert box.output(process)[2] == 137


def test_a_signal_ends_a_process_and_only_four_are_known(box: Sandbox, endpoint: Endpoint) -> None:
    """C15"""
    process = box.start("sleep", "600")
    for name in ("STOP", "SIGTERM", "term", "15", ""):
        shape.refused(endpoint.call("POST", f"{process}/signal", {"signal": name}), 400)
    shape.done(endpoint.call("POST", f"{process}/signal", {"signal": "TERM"}))
    assert box.output(process) == (b"", b"", 143)
    shape.done(endpoint.call("POST", f"{process}/signal", {"signal": "TERM"}))


def test_a_finished_process_is_followed_from_its_start_every_time(box: Sandbox) -> None:
    """C16"""
    process = box.start("echo", "said once")
    for _ in range(2):
        assert box.output(process) == (b"said once\n", b"", 0)


def test_an_unknown_process_is_not_found(box: Sandbox, endpoint: Endpoint) -> None:
    for pid in ("999999", "0", "-1", "one", "1x", "%31x"):
        for below in ("", "/output"):
            shape.refused(box.call("GET", f"/processes/{pid}{below}"), 404)


def test_detaching_stops_nothing_and_attaching_again_replays_all(box: Sandbox, endpoint: Endpoint) -> None:
    """C34"""
    process = box.start("cat")
    # The first line is sent in one piece with the request.
    with endpoint.upgrade(f"{process}/attach", STREAM, behind=frame(b"i", b"one\n")) as attached:
        assert attached.line.startswith("HTTP/1.1 101"), attached.line
        assert attached.headers["Upgrade"] == STREAM and attached.headers["Connection"].lower() == "upgrade"
        attached.until(b"o", b"one\n")
        attached.send(b"i", b"two\n")
        attached.until(b"o", b"two\n")
    assert shape.process(shape.ok(endpoint.call("GET", process)))["state"] == "running"
    with endpoint.upgrade(f"{process}/attach", STREAM) as attached:
        attached.send(b"i", b"three\n")
        attached.send(b"e")
        *said, last = attached.frames()
    assert {kind for kind, _ in said} == {b"o"}
    assert b"".join(data for _, data in said) == b"one\ntwo\nthree\n"
    assert last == (b"x", (0).to_bytes(4, "big", signed=True))
    with endpoint.upgrade(f"{process}/attach", STREAM) as attached:
        *said, last = attached.frames()
    assert b"".join(data for _, data in said) == b"one\ntwo\nthree\n" and last == (b"x", bytes(4))
    shape.refused(box.call("POST", "/run", {"argv": ["true"], "tty": True}), 400)


def test_standard_error_and_a_signal_are_frames_of_their_own(box: Sandbox, endpoint: Endpoint) -> None:
    process = box.start("cat", "/no/such/file", "-")
    with endpoint.upgrade(f"{process}/attach", STREAM) as attached:
        attached.until(b"E", b"/no/such/file")
        attached.send(b"s", b"STOP")
        attached.send(b"s", b"TERM")
        assert attached.frames()[-1] == (b"x", (143).to_bytes(4, "big", signed=True))


def test_a_terminal_has_one_stream_and_the_size_it_was_given(box: Sandbox, endpoint: Endpoint) -> None:
    body = shape.ok(box.call("POST", "/processes", {"argv": ["cat"], "tty": True, "rows": 40, "cols": 100}), 201)
    assert shape.process(body)["tty"] is True
    process = f"{box.path}/processes/{body['pid']}"
    with endpoint.upgrade(f"{process}/attach", STREAM) as attached:
        attached.send(b"r", (24).to_bytes(2, "big") + (80).to_bytes(2, "big"))
        attached.send(b"i", b"typed\n")
        attached.until(b"o", b"typed")
        attached.send(b"e")
        *said, last = attached.frames()
    assert {kind for kind, _ in said} <= {b"o"} and last == (b"x", bytes(4))


def test_attaching_needs_the_upgrade(box: Sandbox, endpoint: Endpoint) -> None:
    process = box.start("true")
    shape.refused(endpoint.call("GET", f"{process}/attach"), 400)
    for headers in (
        {"Connection": "Upgrade", "Upgrade": "websocket"}, {"Upgrade": STREAM}, {"Connection": "Upgrade"},
    ):  # fmt: skip
        shape.refused(endpoint.say(endpoint.head("GET", f"{process}/attach", headers)), 400)
    with endpoint.upgrade(f"{box.path}/processes/999999/attach", STREAM) as attached:
        shape.refused(attached.refusal(), 404)


def test_a_frame_over_a_mebibyte_closes_the_connection_and_stops_nothing(box: Sandbox, endpoint: Endpoint) -> None:
    process = box.start("cat")
    with endpoint.upgrade(f"{process}/attach", STREAM) as attached:
        attached.sock.sendall(b"i" + ((1 << 20) + 1).to_bytes(4, "big"))
        assert all(kind != b"x" for kind, _ in attached.frames())
    whole = bytes(1 << 20)
    with endpoint.upgrade(f"{process}/attach", STREAM) as attached:
        attached.send(b"i", whole)
        attached.send(b"e")
        *said, last = attached.frames()
    assert sum(len(data) for _, data in said) == len(whole) and last == (b"x", bytes(4))


def test_a_run_keeps_the_first_eight_mebibytes_and_says_that_it_cut(box: Sandbox) -> None:
    size = (8 << 20) + 1
    shape.done(box.write("/tmp/large", bytes(size)))
    said = box.run("cat", "/tmp/large")
    assert (len(said.stdout), said.truncated, said.exit_code) == (size - 1, True, 0)
    shape.done(box.remove("/tmp/large"))


def test_commands_do_not_run_as_root(box: Sandbox) -> None:
    """C43"""
    said = box.run("id", "-u")
    assert said.exit_code == 0 and said.stdout.strip().isdigit() and int(said.stdout) != 0


def test_a_run_in_base64_that_is_none_is_refused(box: Sandbox) -> None:
    for text in ("=", "a", "not base64!", base64.b64encode(b"x").decode() + "\n"):
        shape.refused(box.call("POST", "/run", {"argv": ["cat"], "stdin": text}), 400)
