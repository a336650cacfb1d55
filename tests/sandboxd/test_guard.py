"""The request guard: what is refused before any handler, and in which order."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from sandboxd.guard import is_local
from tests.sandboxd.conftest import why_not
from tests.sandboxd.rig import Rig


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True), ("LOCALHOST:80", True), ("127.0.0.1", True), ("127.9.9.9:8080", True), ("[::1]", True),
        ("[::1]:7", True), ("evil.test", False), ("localhost.evil.test", False), ("127.0.0.1.evil.test", False),
        ("localhost.", False), ("localhost:", False), ("localhost:port", False), ("user@localhost", False),
        ("", False), ("0.0.0.0", False), ("::1", False), ("[::1", False), ("10.0.0.1", False),
        ("[::ffff:1.2.3.4]", False), ("localhost localhost", False), ("allowed.test", False), ("2130706433", False),
    ],
)  # fmt: skip
def test_which_hosts_are_this_machine(host: str, local: bool) -> None:
    assert is_local(host, frozenset()) is local


def test_an_operator_may_allow_a_name() -> None:
    assert is_local("Allowed.Test:9", frozenset({"allowed.test"}))


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code"),
    [
        pytest.param("GET", "/v1/health", {}, 200, "", id="health"),
        pytest.param("GET", "/v1/health", {"Host": "evil.test"}, 403, "forbidden_origin", id="a rebound name"),
        pytest.param("GET", "/nowhere", {"Host": "evil.test"}, 403, "forbidden_origin", id="host before route"),
        pytest.param("GET", "/v1/health", {"Origin": "null"}, 403, "forbidden_origin", id="origin null"),
        pytest.param(
            "GET", "/v1/health", {"Origin": "http://evil.test"}, 403, "forbidden_origin", id="a foreign origin"
        ),
        pytest.param("GET", "/v1/health", {"Origin": "http://localhost"}, 200, "", id="our own origin"),
        pytest.param(
            "GET", "/v1/health", {"Origin": "http://localhost:1"}, 403, "forbidden_origin", id="another port's origin"
        ),
        pytest.param(
            "GET", "/v1/sandboxes/x/processes/1/attach",
            {"Origin": "http://evil.test", "Upgrade": "sbx-stream/1", "Connection": "Upgrade"},
            403, "forbidden_origin", id="an upgrade of a foreign origin",
        ),
        pytest.param("GET", "http://localhost/v1/health", {}, 403, "forbidden_origin", id="an absolute target"),
        pytest.param(
            "OPTIONS", "/v1/sandboxes", {"Origin": "http://evil.test"}, 403, "forbidden_origin", id="preflight"
        ),
        pytest.param("GET", "/", {}, 404, "not_found", id="no such endpoint"),
        pytest.param("GET", "/v1/sandboxes/", {}, 404, "not_found", id="a trailing slash"),
        pytest.param("PUT", "/v1/sandboxes", {}, 404, "not_found", id="a method the route does not have"),
        pytest.param("GET", "/v1/whoami", {}, 404, "not_found", id="not a gateway"),
    ],
)  # fmt: skip
def test_table(rig: Rig, method: str, path: str, headers: dict[str, str], status: int, code: str) -> None:
    answer = rig.call(method, path, headers=headers)
    assert (answer.status, answer.json.get("error", {}).get("code", "")) == (status, code)


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        pytest.param(b"{}", "text/plain", 415, id="JSON as text"),
        pytest.param(b"{}", "", 415, id="no media type"),
        pytest.param(b"{}", "application/json-patch", 415, id="almost JSON"),
        pytest.param(b'{"nme":"x"}', "application/json; charset=utf-8", 400, id="a charset is fine, the field is not"),
        pytest.param(b"[]", "application/json", 400, id="not an object"),
        pytest.param(b'{"name":"a","name":"b"}', "application/json", 400, id="a key twice"),
        pytest.param(b'{"env":{"A":"1","A":"2"}}', "application/json", 400, id="a key twice inside"),
        pytest.param(b'{"cpus":NaN}', "application/json", 400, id="NaN"),
        pytest.param(b'{"cpus":"1"}', "application/json", 400, id="a number as text"),
        pytest.param(b'{"name":"\xff"}', "application/json", 400, id="not UTF-8"),
        pytest.param(b"{" * 5000, "application/json", 400, id="deep nonsense"),
        pytest.param(b'{"env":' * 20000, "application/json", 400, id="nested without end"),
        pytest.param(b"x" * (2 << 20), "application/json", 400, id="2 MiB of JSON"),
    ],
)
def test_bodies_that_are_refused(rig: Rig, body: bytes, kind: str, status: int) -> None:
    answer = rig.call("POST", "/v1/sandboxes", body, {"Content-Type": kind})
    assert (answer.status, answer.code) == (status, "invalid_request")


def test_raw_bodies_over_their_limit_are_413_declared_or_not(rig: Rig, box: str) -> None:
    path = f"/v1/sandboxes/{box}/files?path=/tmp/large"
    size = (64 << 20) + 1
    head = "PUT {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n{}\r\n\r\n"
    said = rig.raw(head.format(path, f"Content-Length: {size}").encode())
    assert said.startswith(b"HTTP/1.1 413 ") and b'"invalid_request"' in said
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(rig.socket))
        sock.sendall(head.format(path, "Transfer-Encoding: chunked").encode())
        chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
        for _ in range(65):
            sock.sendall(chunk)
        assert sock.recv(64).startswith(b"HTTP/1.1 413 ")
    assert rig.call("GET", path).status == 404


def test_bytes_that_are_no_request_get_one_answer_and_the_end(rig: Rig) -> None:
    for data, status in (
        (b"\x16\x03\x01 hello\r\n\r\n", b"400"),
        (b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nHost: evil.test\r\n\r\n", b"400"),
        (b"GET /v1/health HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 40000, b"431"),
        (b"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", b"400"),
    ):
        assert rig.raw(data).split(b" ")[1:2] == [status], data[:60]


def test_a_kept_connection_serves_several_requests_sent_at_once(rig: Rig) -> None:
    one = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert rig.raw(one + one + last).count(b'{"status":"ok"}') == 3


def test_expect_continue_is_answered_before_the_body_is_sent(rig: Rig, box: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(rig.socket))
        sock.sendall(
            f"PUT /v1/sandboxes/{box}/files?path=/tmp/later HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
            "Content-Type: application/octet-stream\r\nContent-Length: 5\r\n\r\n".encode()
        )
        assert sock.recv(100).startswith(b"HTTP/1.1 100 ")
        sock.sendall(b"later")
        assert sock.recv(100).startswith(b"HTTP/1.1 204 ")


def test_a_client_that_only_ends_its_direction_is_still_answered(rig: Rig, box: str) -> None:
    body = json.dumps({"argv": ["sh", "-c", "sleep 0.4; echo done"]}).encode()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(str(rig.socket))
        head = f"POST /v1/sandboxes/{box}/run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        sock.shutdown(socket.SHUT_WR)
        said = b""
        while piece := sock.recv(4096):
            said += piece
    assert b'"stdout":"ZG9uZQo="' in said


def test_the_socket_is_its_owners_alone(rig: Rig) -> None:
    assert rig.socket.stat().st_mode & 0o777 == 0o600
    assert rig.state.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in rig.state.glob("state.sqlite*"))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_who_is_not_its_owner_gets_nothing_even_where_the_modes_let_him(place: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    ask = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.settimeout(20)
s.connect(sys.argv[1])
if sys.argv[2] == "ask":
    s.sendall(b"GET /v1/health HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
print(s.recv(12))
"""
    with Rig(place) as rig:
        place.chmod(0o755)
        rig.socket.chmod(0o666)

        def asked(how: str, *become: str) -> str:
            command = [*become, "/usr/bin/python3", "-c", ask, str(rig.socket), how]
            return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout

        stranger = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        assert asked("hear", *stranger) == "b''\n"
        assert "HTTP" not in asked("ask", *stranger)
        assert asked("ask") == "b'HTTP/1.1 200'\n"


def test_answers_carry_nothing_a_browser_could_keep(rig: Rig) -> None:
    headers: dict[str, Any] = rig.call("GET", "/v1/capabilities").headers
    assert headers["cache-control"] == "no-store" and headers["content-type"] == "application/json"


def test_a_client_that_takes_its_time_to_close_is_no_fault(rig: Rig) -> None:
    before = rig.log.read_text().count("a connection failed")
    for _ in range(5):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(str(rig.socket))
            sock.sendall(b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            said = b""
            while piece := sock.recv(65536):
                said += piece
            assert said.endswith(b'{"status":"ok"}')
            time.sleep(0.1)
    assert rig.log.read_text().count("a connection failed") == before


def test_a_body_of_two_lengths_is_refused_and_nothing_after_it_is_a_request(rig: Rig, box: str) -> None:
    chunked, length = b"Transfer-Encoding: chunked", b"Content-Length: 3"
    for fields in (chunked + b"\r\n" + length, length + b"\r\n" + chunked):
        head = b"PUT /v1/sandboxes/box/files?path=/tmp/two HTTP/1.1\r\nHost: localhost\r\n"
        head += b"Content-Type: application/octet-stream\r\n" + fields + b"\r\n\r\n"
        said = rig.raw(head + b"5\r\nhello\r\n0\r\n\r\nGET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 400") and said.count(b"HTTP/1.1") == 1
    assert rig.call("GET", f"/v1/sandboxes/{box}/files?path=/tmp/two").status == 404
