"""TLS of the API: versions, certificates of both sides, slow and broken handshakes, renewal."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sandboxd.conftest import why_not
from tests.sandboxd.pki import Authority
from tests.sandboxd.reach import TOKEN, Reach, ports, said_by, token_files, trusting
from tests.sandboxd.rig import Rig


@pytest.fixture
def mutual(place: Path) -> Iterator[Reach]:
    """A daemon that wants certificates of its clients; handshakes have a second."""
    if reason := why_not():
        pytest.skip(reason)
    authority, theirs = Authority(place, "authority"), Authority(place, "clients")
    cert, client = authority.issue("server"), theirs.issue("client")
    flags = ["--tls-cert", str(cert), "--tls-key", str(cert.with_suffix(".key")), "--client-ca", str(theirs.file)]
    rig = Rig(place, "--listen", "127.0.0.1:0", *token_files(place), *flags)
    rig.headers["Authorization"] = f"Bearer {TOKEN}"
    rig.knob("limits", '{"handshake_s": 1}')
    with rig:
        yield Reach(rig, "tls", trusting(authority.file, client))
    assert "CANARY" not in rig.log.read_text() and "a connection failed" not in rig.log.read_text()


def failures(rig: Rig) -> list[str]:
    return [line for line in rig.log.read_text().splitlines() if "no TLS with" in line]


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_what_is_spoken_and_with_whom(mutual: Reach, place: Path) -> None:
    assert mutual.context is not None
    assert mutual.call("GET", "/v1/sandboxes").status == 200
    said = mutual.raw(mutual.head("GET", "/v1/sandboxes", token=False))
    assert said.startswith(b"HTTP/1.1 401 "), "a certificate does not stand for a token"

    foreign = Authority(place, "foreign").issue("foreigner")
    for certificate in (None, foreign):
        without = replace(mutual, context=trusting(place / "authority.pem", certificate))
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            # Under TLS 1.3 a client learns it with its first read.
            assert without.raw(mutual.head("GET", "/v1/health")) == b""
            pytest.fail("a connection without the clients' certificate was ended politely")

    mutual.context.set_alpn_protocols(["h2", "http/1.1"])
    with mutual.connect() as sock:
        assert isinstance(sock, ssl.SSLSocket)
        assert (sock.version(), sock.selected_alpn_protocol(), sock.compression()) == ("TLSv1.3", "http/1.1", None)
        sock.sendall(mutual.head("GET", "/v1/health", "Connection: close"))
        assert said_by(sock).endswith(b'{"status":"ok"}')
        assert sock.session is None or not sock.session.has_ticket, "nobody comes back without his certificate"
    context = trusting(place / "authority.pem", place / "client.pem")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    older = replace(mutual, context=context)
    assert older.call("GET", "/v1/health").status == 200
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError, match="TLSV1_ALERT_PROTOCOL_VERSION"):
        older.connect()


def test_handshakes_that_are_slow_or_none_are_closed_and_told_of_once(mutual: Reach) -> None:
    before, port = mutual.rig.descriptors(), ports(mutual.rig)["127.0.0.1"]
    silent = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(200)]
    silent[0].sendall(b"\x16\x03\x01")
    plain, hello = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\x40\0"
    for data in (plain, bytes(4000), hello + bytes(5000)):
        with socket.create_connection(("127.0.0.1", port), 20) as sock:
            sock.sendall(data)
            said = said_by(sock)
            assert b"HTTP" not in said and len(said) < 100, "an alert at most"
    assert replace(mutual, source="127.0.0.2").call("GET", "/v1/sandboxes").status == 200
    started = time.monotonic()
    for sock in silent:
        assert said_by(sock) == b""
        sock.close()
    assert time.monotonic() - started < 15
    assert mutual.call("GET", "/v1/health").status == 200
    assert len(failures(mutual.rig)) == 1, "a line for an address and minute"
    elsewhere = replace(mutual, source="127.0.0.77", context=None)
    with elsewhere.connect() as sock:
        sock.sendall(b"no TLS")
        said_by(sock)
    deadline = time.monotonic() + 30
    while len(failures(mutual.rig)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "127.0.0.77" in failures(mutual.rig)[1]
    while mutual.rig.descriptors() > before + 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_connection_cut_without_a_notice_is_no_end_of_input(mutual: Reach) -> None:
    """Whoever can cut a connection could shorten a file with it, were that taken for its end."""
    box = mutual.rig.create(name="cut")
    path = f"/v1/sandboxes/{box}/files?path=/tmp/cut"
    with mutual.connect() as sock:
        fields = ("Content-Type: application/octet-stream", "Transfer-Encoding: chunked")
        sock.sendall(mutual.head("PUT", path, *fields) + b"5\r\nhello\r\n")
        socket.socket.shutdown(sock, socket.SHUT_WR)
        assert said_by(sock) == b""
    assert mutual.rig.call("GET", path).status == 404


def served(mutual: Reach) -> int:
    """The serial number of the certificate that a new connection is shown."""
    with mutual.connect() as sock:
        assert isinstance(sock, ssl.SSLSocket)
        return int(str((sock.getpeercert() or {})["serialNumber"]), 16)


def test_certificates_and_tokens_are_read_again_on_sighup(mutual: Reach, place: Path) -> None:
    def hangup(expect: str) -> None:
        said = mutual.rig.log.read_text().count(expect)
        assert mutual.rig.process is not None
        mutual.rig.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 20
        while mutual.rig.log.read_text().count(expect) == said:
            assert time.monotonic() < deadline, mutual.rig.log.read_text()
            time.sleep(0.05)

    again, kept = "files were read again", "were not read again, the earlier ones stay"
    first = served(mutual)
    with mutual.connect() as old:
        old.sendall(mutual.head("GET", "/v1/health"))
        assert old.recv(4096)
        (place / "server.pem").write_text("not any more")
        hangup(kept)
        assert served(mutual) == first
        renewed = Authority(place, "authority2")
        renewed.issue("server")
        hangup(again)
        old.sendall(mutual.head("GET", "/v1/sandboxes", "Connection: close"))
        assert said_by(old).startswith(b"HTTP/1.1 200 "), "a connection of before goes on"
    mutual = replace(mutual, context=trusting(renewed.file, place / "client.pem"))
    assert served(mutual) != first
    (place / "one").write_text("changed-0123456789-CANARY")
    (place / "two").chmod(0o644)
    hangup(kept)
    assert mutual.call("GET", "/v1/sandboxes").status == 200
    (place / "two").chmod(0o600)
    hangup(again)
    assert mutual.call("GET", "/v1/sandboxes").status == 401
    mutual.rig.headers["Authorization"] = "Bearer changed-0123456789-CANARY"
    assert mutual.rig.call("GET", "/v1/sandboxes").status == 200
