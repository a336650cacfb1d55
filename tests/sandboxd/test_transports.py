"""The same API by every transport: a unix socket with a token, TCP, TLS. Raw bytes, so that nothing is polite."""

from __future__ import annotations

import json
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sandboxd.conftest import why_not
from tests.sandboxd.pki import Authority
from tests.sandboxd.reach import SECOND, TOKEN, Reach, end_direction, ports, said_by, token_files, trusting
from tests.sandboxd.rig import Rig, frame


@pytest.fixture(scope="module")
def reaches() -> Iterator[dict[str, Reach]]:
    """Two daemons, since TLS is on for every port or for none. `box` is a sandbox on each."""
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="dmn-", dir="/tmp") as one, tempfile.TemporaryDirectory(
        prefix="dmn-", dir="/tmp"
    ) as two:
        plain, secret = Path(one), Path(two)
        authority = Authority(secret, "authority")
        cert = authority.issue("server")
        tls = ["--tls-cert", str(cert), "--tls-key", str(cert.with_suffix(".key"))]
        everywhere = ["--listen", "127.0.0.1:0", "--listen", "[::1]:0", "--allowed-host", "Build.Test"]
        rigs = [Rig(plain, *everywhere, *token_files(plain)), Rig(secret, *everywhere, *token_files(secret), *tls)]
        for rig in rigs:
            rig.headers["Authorization"] = f"Bearer {TOKEN}"
        with rigs[0], rigs[1]:
            for rig in rigs:
                rig.create(name="box")
            context = trusting(authority.file)
            yield {
                "unix": Reach(rigs[0], "unix"), "tcp": Reach(rigs[0], "tcp"), "tls": Reach(rigs[1], "tls", context),
            }  # fmt: skip
        for rig in rigs:
            assert "CANARY" not in rig.log.read_text(), "a token is in the log"


@pytest.fixture(params=["unix", "tcp", "tls"])
def reach(request: pytest.FixtureRequest, reaches: dict[str, Reach]) -> Reach:
    return reaches[request.param]


def test_every_address_is_named_at_the_start_and_the_token_nowhere(reaches: dict[str, Reach]) -> None:
    for name, scheme in (("tcp", "http"), ("tls", "https")):
        rig = reaches[name].rig
        line = next(line for line in rig.log.read_text().splitlines() if "listening on" in line)
        assert f"unix://{rig.socket}, {scheme}://127.0.0.1:" in line and f", {scheme}://[::1]:" in line
        assert "token required" in line and "API v1" in line and "network ceiling none" in line
        assert rig.process is not None
        assert b"CANARY" not in Path(f"/proc/{rig.process.pid}/cmdline").read_bytes()
        v6 = replace(reaches[name], host="[::1]")
        assert v6.call("GET", "/v1/sandboxes/box").json["name"] == "box"


GET = "GET /v1/capabilities HTTP/1.1\r\n"
LOCAL = "Host: localhost\r\n"
AUTH = f"Authorization: Bearer {TOKEN}\r\n"


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        pytest.param(GET + LOCAL + AUTH, 200, "", id="all in order"),
        pytest.param(GET + "Host: BUILD.test:1\r\n" + AUTH, 200, "", id="a name that is allowed"),
        pytest.param(GET + "Host: [::1]:9\r\n" + AUTH, 200, "", id="an address of this machine"),
        pytest.param(GET + "Host: evil.test:1\r\n" + AUTH, 403, "forbidden_origin", id="a rebound name"),
        pytest.param(GET + "Host: localhost.evil.test\r\n" + AUTH, 403, "forbidden_origin", id="a longer name"),
        pytest.param(GET + "Host: 127.0.0.1.evil.test\r\n" + AUTH, 403, "forbidden_origin", id="an address as a label"),
        pytest.param(GET + "Host: x.build.test\r\n" + AUTH, 403, "forbidden_origin", id="below an allowed name"),
        pytest.param(GET + LOCAL + "Host: evil.test\r\n" + AUTH, 400, "invalid_request", id="two Host lines"),
        pytest.param(GET + LOCAL + LOCAL + AUTH, 400, "invalid_request", id="the same Host twice"),
        pytest.param(GET + AUTH, 400, "invalid_request", id="no Host"),
        pytest.param(
            "GET http://localhost/v1/health HTTP/1.1\r\n" + LOCAL + AUTH, 403, "forbidden_origin",
            id="an absolute target",
        ),
        pytest.param("CONNECT localhost:80 HTTP/1.1\r\n" + LOCAL + AUTH, 403, "forbidden_origin", id="a proxy request"),
        pytest.param("OPTIONS * HTTP/1.1\r\n" + LOCAL + AUTH, 403, "forbidden_origin", id="no path at all"),
        pytest.param(GET + LOCAL + "Origin: null\r\n" + AUTH, 403, "forbidden_origin", id="origin null"),
        pytest.param(GET + LOCAL + "Origin: http://evil.test\r\n" + AUTH, 403, "forbidden_origin", id="foreign origin"),
        pytest.param(GET + LOCAL + "Origin: https://localhost\r\n" + AUTH, 200, "", id="our own origin"),
        pytest.param(
            GET + LOCAL + "Origin: http://localhost\r\nOrigin: http://evil.test\r\n" + AUTH, 403, "forbidden_origin",
            id="two origins",
        ),
        pytest.param(
            "OPTIONS /v1/sandboxes HTTP/1.1\r\n" + LOCAL + "Origin: http://evil.test\r\n", 403, "forbidden_origin",
            id="preflight",
        ),
        pytest.param(
            "GET /v1/sandboxes/box/processes/1/attach HTTP/1.1\r\n" + LOCAL
            + "Origin: http://evil.test\r\nConnection: Upgrade\r\nUpgrade: sbx-stream/1\r\n" + AUTH,
            403, "forbidden_origin", id="an upgrade from a page",
        ),
        pytest.param(
            GET + LOCAL + AUTH + "Connection: Upgrade\r\nUpgrade: websocket\r\n", 200, "", id="an upgrade nobody takes"
        ),
        pytest.param("GET /v1/health HTTP/1.1\r\n" + LOCAL, 200, "", id="health needs no token"),
        pytest.param("GET /v1/health HTTP/1.1\r\nHost: evil.test\r\n", 403, "forbidden_origin", id="and a right Host"),
        pytest.param(
            "GET /v1/health HTTP/1.1\r\n" + LOCAL + "Origin: http://evil.test\r\n", 403, "forbidden_origin",
            id="and a right Origin",
        ),
        pytest.param("POST /v1/health HTTP/1.1\r\n" + LOCAL, 401, "unauthorized", id="only to be asked"),
        pytest.param(GET + LOCAL, 401, "unauthorized", id="no token"),
        pytest.param("GET /nowhere HTTP/1.1\r\n" + LOCAL, 401, "unauthorized", id="no token before no route"),
        pytest.param("GET /openapi HTTP/1.1\r\n" + LOCAL + AUTH, 404, "not_found", id="no such route"),
        pytest.param(GET + "Host: evil.test\r\n", 403, "forbidden_origin", id="no token before a wrong Host"),
        pytest.param(GET + LOCAL + AUTH[:-3] + "\r\n", 401, "unauthorized", id="a token cut short"),
        pytest.param(GET + LOCAL + AUTH[:-2] + "x\r\n", 401, "unauthorized", id="a token with more"),
        pytest.param(GET + LOCAL + AUTH + AUTH, 401, "unauthorized", id="the token twice"),
        pytest.param(
            GET + LOCAL + "Authorization: Bearer wrong\r\n" + AUTH, 401, "unauthorized", id="a wrong one before"
        ),
        pytest.param(GET + LOCAL + f"Authorization: {TOKEN}\r\n", 401, "unauthorized", id="no scheme"),
        pytest.param(GET + LOCAL + f"Authorization: Basic {TOKEN}\r\n", 401, "unauthorized", id="another scheme"),
        pytest.param(GET + LOCAL + f"Authorization: bEARER   {TOKEN} \r\n", 200, "", id="blanks, and another case"),
        pytest.param(GET + LOCAL + f"authorization: Bearer {SECOND}\r\n", 200, "", id="the other token"),
        pytest.param(
            f"GET /v1/capabilities?token={TOKEN}&access_token={TOKEN} HTTP/1.1\r\n" + LOCAL, 401, "unauthorized",
            id="a token in the address",
        ),
        pytest.param(GET + LOCAL + f"Cookie: token={TOKEN}\r\n", 401, "unauthorized", id="a token in a cookie"),
        pytest.param(
            "POST /v1/sandboxes HTTP/1.1\r\n" + LOCAL + "Content-Type: text/plain\r\nContent-Length: 2\r\n", 401,
            "unauthorized", id="no token before a wrong type",
        ),
        pytest.param(
            "POST /v1/sandboxes HTTP/1.1\r\n" + LOCAL + AUTH
            + "Content-Type: text/plain\r\nContent-Length: 9999999\r\n",
            415, "invalid_request", id="a wrong type before too much",
        ),
        pytest.param(
            "POST /v1/sandboxes HTTP/1.1\r\n" + LOCAL + AUTH
            + "Content-Type: application/json\r\nContent-Length: 2097152\r\n",
            400, "invalid_request", id="too much JSON",
        ),
    ],
)  # fmt: skip
def test_who_gets_through(reach: Reach, head: str, status: int, code: str) -> None:
    with reach.connect() as sock:
        sock.sendall(head.encode() + b"\r\n")
        # Nothing waits for a body: all of this is decided by the head.
        said = b""
        while b"}" not in said.partition(b"\r\n\r\n")[2]:
            piece = sock.recv(65536)
            assert piece, said
            said += piece
    top, _, body = said.partition(b"\r\n\r\n")
    assert int(top.split(b" ")[1]) == status, said
    assert code in body.decode() and (b"www-authenticate: Bearer" in top) == (status == 401)
    assert b"CANARY" not in said


HEAD = f"POST /v1/sandboxes/box/processes HTTP/1.1\r\n{LOCAL}{AUTH}Content-Type: application/json\r\n"
INNER = f"GET /v1/sandboxes HTTP/1.1\r\n{LOCAL}{AUTH}\r\n"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param("Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n", id="two lengths"),
        pytest.param("Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", id="two lengths, turned"),
        pytest.param("Content-Length: 0\r\nContent-Length: 9\r\n\r\n", id="two that differ"),
        pytest.param("Content-Length: 0, 9\r\n\r\n", id="two in one"),
        pytest.param("Content-Length: +0\r\n\r\n", id="a sign"),
        pytest.param("Content-Length: 0x0\r\n\r\n", id="not decimal"),
        pytest.param("Content-Length: -1\r\n\r\n", id="less than nothing"),
        pytest.param("Content-Length: " + "9" * 30 + "\r\n\r\n", id="more than there is"),
        pytest.param("Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", id="another coding"),
        pytest.param("Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", id="a coding after chunked"),
        pytest.param("Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", id="no coding"),
        pytest.param("Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", id="a blank before the colon"),
        pytest.param("Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n", id="a chunk size that is none"),
        pytest.param("Transfer-Encoding: chunked\r\n\r\n-0\r\n\r\n", id="a chunk size with a sign"),
        pytest.param("Transfer-Encoding: chunked\r\n\r\n" + "0" * 40 + "\r\n\r\n", id="a chunk size that goes on"),
        pytest.param("Transfer-Encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n", id="a chunk without its end"),
        pytest.param("X-A: b\r\n Content-Length: 0\r\n\r\n", id="a folded header"),
        pytest.param("X-A: b\n\tTransfer-Encoding: chunked\n\n", id="a folded header with bare ends"),
        pytest.param("X-A: \0\r\n\r\n", id="NUL in a header"),
        pytest.param("X A: b\r\n\r\n", id="a blank in a name"),
        pytest.param("".join(f"X-{n}: {n}\r\n" for n in range(120)) + "\r\n", id="too many headers"),
        pytest.param("X: " + "y" * 40_000 + "\r\n\r\n", id="too large a header"),
    ],
)
def test_one_answer_and_never_a_request_out_of_a_body(reach: Reach, data: str) -> None:
    said = reach.raw((HEAD + data + INNER).encode())
    assert said.startswith(b"HTTP/1.1 4") or said.startswith(b"HTTP/1.1 501 "), said
    assert said.count(b"HTTP/1.1 ") == 1 and b'"sandboxes"' not in said and b"CANARY" not in said


def test_requests_sent_at_once_are_answered_in_order_and_none_twice(reach: Reach) -> None:
    body = b'{"argv":["true"]}'
    post = (HEAD + f"Content-Length: {len(body)}\r\n\r\n").encode() + body
    said = reach.raw(post + INNER.encode() + reach.head("GET", "/v1/health", "Connection: close"))
    statuses = [line.split(b" ")[1] for line in said.split(b"\r\n") if b"HTTP/1.1 " in line[:40] or b"}HTTP" in line]
    assert said.count(b"HTTP/1.1 ") == 3 and statuses[0] == b"201"
    assert said.index(b'"argv"') < said.index(b'"sandboxes"') < said.index(b'"status":"ok"')


def test_old_http_gets_no_chunks_and_no_second_chance(reach: Reach) -> None:
    old = GET.replace("1.1", "1.0") + LOCAL + AUTH
    assert reach.raw(old.encode() + b"\r\n").startswith(b"HTTP/1.1 200 ")
    said = reach.raw(old.encode() + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + INNER.encode())
    assert said.startswith(b"HTTP/1.1 400 ") and said.count(b"HTTP/1.1 ") == 1


def test_bytes_behind_an_upgrade_are_the_processs_and_none_is_lost(reach: Reach) -> None:
    process = reach.rig.start_process("box", "sh", "-c", "cat; sleep 0.3; echo late")
    early = frame(b"i", b"early\n") * 1000 + frame(b"e")
    with reach.attach(process, early) as client:
        assert client.status == "HTTP/1.1 101", client.status
        end_direction(client.socket)
        out, _, code = client.rest()
    assert (out, code) == (b"early\n" * 1000 + b"late\n", 0)


def test_input_that_ends_late_still_gets_all_output(reach: Reach) -> None:
    process = reach.rig.start_process("box", "sh", "-c", "cat; head -c 3000000 /dev/zero; echo end")
    with reach.attach(process) as client:
        sent = bytes(range(256)) * 4096
        for offset in range(0, len(sent), 65536):
            client.send(b"i", sent[offset : offset + 65536])
        client.send(b"e")
        end_direction(client.socket)
        out, _, code = client.rest()
    assert code == 0 and out == sent + bytes(3_000_000) + b"end\n"


def test_a_tunnel_carries_each_directions_end(reach: Reach) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        port = server.getsockname()[1]

        def answer() -> None:
            other, _ = server.accept()
            with other:
                said = said_by(other)
                time.sleep(0.3)
                other.sendall(b"got %d; " % len(said) + said[-6:])

        thread = threading.Thread(target=answer)
        thread.start()
        with reach.connect() as sock:
            upgrade = ("Connection: Upgrade", "Upgrade: sbx-tunnel/1")
            sock.sendall(reach.head("GET", f"/v1/sandboxes/box/tunnel?port={port}", *upgrade) + b"early;")
            sock.sendall(bytes(500_000) + b"last!;")
            end_direction(sock)
            said = said_by(sock)
        thread.join()
    head, _, rest = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ") and rest == b"got 500012; last!;"


def test_a_client_that_only_ends_its_direction_gets_its_answer(reach: Reach) -> None:
    body = json.dumps({"argv": ["sh", "-c", "sleep 0.5; echo done"]}).encode()
    with reach.connect() as sock:
        fields = ("Content-Type: application/json", f"Content-Length: {len(body)}")
        sock.sendall(reach.head("POST", "/v1/sandboxes/box/run", *fields) + body)
        end_direction(sock)
        said = said_by(sock)
    assert b'"stdout":"ZG9uZQo="' in said
    assert said.count(b"HTTP/1.1 100 ") == (0 if reach.kind == "unix" else 1), "the question whether it is still there"


@pytest.mark.parametrize("ahead", [0, 100_000], ids=["quiet", "talking"])
def test_a_client_that_leaves_ends_what_it_asked_for(reach: Reach, ahead: int) -> None:
    """One that had sent more ahead than anybody read, too."""
    mark = f"sleep-{reach.kind}-{ahead}"
    body = json.dumps({"argv": ["sh", "-c", f"echo $$ > /tmp/{mark}; exec sleep 300"]}).encode()
    sock = reach.connect()
    fields = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    sock.sendall(reach.head("POST", "/v1/sandboxes/box/run", *fields) + body)
    file = f"/v1/sandboxes/box/files?path=/tmp/{mark}"
    until(lambda: reach.call("GET", file).body.endswith(b"\n"))
    pid = int(reach.call("GET", file).body)
    sock.sendall(b"x" * ahead)
    if isinstance(sock, ssl.SSLSocket):
        end_direction(sock)         # politely: close_notify, then the end of the connection
    sock.close()
    until(lambda: reach.rig.run("box", "test", "-d", f"/proc/{pid}").exit_code == 1)


def test_garbage_ends_its_connection_and_nothing_else(reach: Reach) -> None:
    before = reach.rig.descriptors()
    for data in (b"\0" * 5000, b"\x16\x03\x01\x02\0\x01\0" * 300, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n" * 9000):
        said = reach.raw(data)
        assert said.startswith(b"HTTP/1.1 4") or not said
    assert reach.call("GET", "/v1/health").status == 200
    until(lambda: reach.rig.descriptors() <= before + 2)


def test_the_token_is_asked_for_on_the_unix_socket_too(reaches: dict[str, Reach]) -> None:
    reach = reaches["unix"]
    assert reach.rig.call("GET", "/v1/sandboxes", headers={"Authorization": "Bearer wrong"}).status == 401
    assert len(ports(reach.rig)) == 2


def until(check: object, timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    assert callable(check)
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)
