"""Starts that are refused, each with its own message: no socket, no state directory, nothing is left."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from sandboxd import __main__ as program
from sandboxd.credentials import Tokens, read_token
from sandboxd.errors import SetupError
from tests.sandboxd.pki import Authority
from tests.sandboxd.rig import ROOT

TOKEN = "0123456789abcdef"
TCP = ["--listen", "127.0.0.1:0"]
TLS = ["--tls-cert", "{d}/server.pem", "--tls-key", "{d}/server.key"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files in and out of order, by name."""
    directory = tmp_path_factory.mktemp("files")
    authority = Authority(directory, "authority")
    for name in ("server", "other"):
        authority.issue(name)
    secret = serialization.load_pem_private_key((directory / "server.key").read_bytes(), None)
    encrypted = secret.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    texts: dict[str, bytes] = {
        "token": f"\n {TOKEN}\t\n".encode(), "short": TOKEN[1:].encode(), "empty": b"", "blank": b"0123456 89abcdef",
        "binary": b"0123456789abcde\x80", "two": f"{TOKEN}\n{TOKEN}\n".encode(), "long": b"x" * 5000,
        "encrypted": encrypted, "nonsense": b"-----BEGIN NONSENSE-----\nAAAA\n", "huge": bytes(2 << 20),
    }  # fmt: skip
    for name, text in texts.items():
        (directory / name).touch(mode=0o600)
        (directory / name).write_bytes(text)
    for name, mode in (("group", 0o640), ("world", 0o604), ("writable", 0o620), ("executable", 0o610)):
        (directory / name).write_text(TOKEN)
        (directory / name).chmod(mode)
    (directory / "open.key").write_bytes((directory / "server.key").read_bytes())
    (directory / "open.key").chmod(0o644)
    (directory / "link").symlink_to(directory / "token")
    os.mkfifo(directory / "pipe", 0o600)
    return directory


REFUSED = [
    pytest.param([*TCP], r"any local user could reach this port.*unix:///", id="loopback without a token"),
    pytest.param(["--listen", "[::1]:0"], r"any local user could reach this port", id="loopback of IPv6"),
    pytest.param(["--listen", "localhost:0"], r"any local user could reach this port", id="localhost"),
    pytest.param(
        ["--listen", "192.0.2.1:0"], r"needs --token-file or --token-dir: whoever reaches",
        id="an address of the network",
    ),
    pytest.param(
        ["--listen", "unix:///{d}/s.sock", *TCP], r"any local user", id="a port without a token beside a unix socket"
    ),
    *(
        pytest.param(
            ["--listen", f"{host}:0", "--token-file", "{d}/token"], r"needs --tls-cert and --tls-key.*read the token",
            id=f"{host} without TLS",
        )
        for host in ("0.0.0.0", "[::]", "192.0.2.1", "[2001:db8::1]", "169.254.1.1")
    ),
    pytest.param([*TCP, "--token-file", "{d}/token", "--tls-cert", "{d}/server.pem"], r"--tls-cert needs --tls-key",
                 id="a certificate without its key"),
    pytest.param([*TCP, "--token-file", "{d}/token", "--tls-key", "{d}/server.key"], r"--tls-key needs --tls-cert",
                 id="a key without its certificate"),
    pytest.param(["--client-ca", "{d}/authority.pem"], r"--client-ca needs --tls-cert and --tls-key",
                 id="a clients' authority without TLS"),
    pytest.param(["--allowed-host", "http://build.test"], r"--allowed-host http://build.test: not the name of a host",
                 id="an allowed URL"),
    *(
        pytest.param(["--allowed-host", host], r"not the name of a host", id=f"the allowed host {host!r}")
        for host in ("", "build.test:80", "*.build.test", "-build.test", "build..test", "a b", "x" * 64, "büild.test")
    ),
    *(
        pytest.param(["--token-file", f"{{d}}/{name}"], why, id=f"a token file: {name}")
        for name, why in (
            ("short", "at least 16 characters"), ("empty", "at least 16 characters"), ("blank", "one word of"),
            ("binary", "one word of printable"), ("two", "one word of printable"), ("long", "one word of printable"),
            ("group", r"open to others \(mode 0640\): chmod 600"), ("world", r"\(mode 0604\)"),
            ("writable", r"\(mode 0620\)"), ("executable", r"\(mode 0610\)"), ("link", "it is a symbolic link"),
            ("pipe", "must be a regular file"), ("", "must be a regular file"), ("missing", "No such file"),
            ("huge", "a sensible size"),
        )
    ),
    pytest.param(["--token-file", "{d}/token", "--token-file", "{d}/short"], "short: .*at least 16",
                 id="the second token file of two"),
    pytest.param(["--tls-cert", "{d}/missing", "--tls-key", "{d}/server.key"], "--tls-cert .*No such file",
                 id="no certificate there"),
    pytest.param(["--tls-cert", "{d}/server.pem", "--tls-key", "{d}/missing"], "--tls-key .*No such file",
                 id="no key there"),
    pytest.param(["--tls-cert", "{d}/nonsense", "--tls-key", "{d}/server.key"], "must hold a certificate",
                 id="a certificate that is none"),
    pytest.param(["--tls-cert", "{d}/server.pem", "--tls-key", "{d}/nonsense"], "must hold a certificate",
                 id="a key that is none"),
    pytest.param(["--tls-cert", "{d}/server.pem", "--tls-key", "{d}/empty"], "must hold a certificate",
                 id="no key in it"),
    pytest.param(["--tls-cert", "{d}/server.pem", "--tls-key", "{d}/other.key"], "is not the key of the certificate",
                 id="the key of another certificate"),
    pytest.param(["--tls-cert", "{d}/server.pem", "--tls-key", "{d}/encrypted"], "the key is encrypted",
                 id="a key with a password"),
    pytest.param(["--tls-cert", "{d}/server.pem", "--tls-key", "{d}/open.key"], r"open to others \(mode 0644\)",
                 id="a key others can read"),
    pytest.param([*TLS, "--client-ca", "{d}/missing"], "--client-ca .*No such file", id="no authority there"),
    pytest.param([*TLS, "--client-ca", "{d}/nonsense"], "--client-ca .*must hold certificates", id="no certificates"),
    pytest.param([*TLS, "--client-ca", "{d}/server.pem"], "no certificate of an authority", id="not an authority's"),
]


@pytest.mark.parametrize(("arguments", "why"), REFUSED)
def test_a_start_is_refused(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    before = {(sock, os.readlink(f"/proc/self/fd/{sock}")) for sock in descriptors()}
    given = [argument.replace("{d}", str(files)) for argument in arguments]
    with pytest.raises(SystemExit) as caught:
        program.main([*given, "--state-dir", str(tmp_path / "state")])
    said = capsys.readouterr().err
    assert caught.value.code == 1 and said.startswith("sandboxd: --") and said.count("\n") == 1
    assert re.search(why, said), said
    assert not any(secret in said for secret in (TOKEN[1:], "0123456 89abcdef", "x" * 65))
    assert not (tmp_path / "state").exists() and not (files / "s.sock").exists()
    assert {(sock, os.readlink(f"/proc/self/fd/{sock}")) for sock in descriptors()} <= before


def descriptors() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue
        found.append(int(name))
    return found


def test_a_token_file_of_somebody_else(files: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a file away")
    path = files / "foreign"
    path.touch(mode=0o600)
    path.write_text(TOKEN)
    os.chown(path, 1234, 1234)
    with pytest.raises(SetupError, match="must belong to this user or to root"):
        read_token(path)


def test_the_same_token_twice_and_blanks_around_it_are_fine(files: Path) -> None:
    token = read_token(files / "token")
    assert token == TOKEN.encode()
    tokens = Tokens([token, token, b"another-0123456789"])
    assert (tokens.find(token), tokens.find(b"another-0123456789"), tokens.find(b"")) == (0, 1, None)
    assert not Tokens() and Tokens().find(b"") is None
    assert TOKEN not in repr(tokens) and TOKEN not in repr(vars(type(tokens)))


@pytest.mark.parametrize("words", [["prepare"], []])
def test_a_processor_whose_machines_it_does_not_run(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(SystemExit, match="1"):
        program.main([*words, "--state-dir", "/dev/null/nowhere"])
    said = capfd.readouterr().err
    assert "for x86_64, and this machine is aarch64; docs/firecracker.md says" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("taken", "why"),
    [
        (lambda place: (f"127.0.0.1:{held_port(place)}"), r"port \d+ is in use by another program"),
        (lambda place: f"unix://{held_file(place)}", "is in the way: it is no socket, and is left alone"),
        (lambda place: f"unix://{place}/{'x' * 104}", "must be shorter than 104 bytes"),
    ],
    ids=["a port", "a file", "a long path"],
)
def test_an_address_that_is_taken_opens_none_of_the_others(
    files: Path, place: Path, taken: Callable[[Path], str], why: str
) -> None:
    first = place / "first.sock"
    command = [
        sys.executable, "-m", "sandboxd", "--no-network", "--state-dir", str(place / "state"), "--token-file",
        str(files / "token"), "--listen", f"unix://{first}", "--listen", taken(place),
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    HELD.clear()
    assert ended.returncode == 1 and re.search(why, ended.stderr), ended.stderr
    assert ended.stderr.count("\n") == 1 and not first.exists()
    assert not (place / "file").exists() or (place / "file").read_text() == "mine"


HELD: list[socket.socket] = []


def held_port(_: Path) -> int:
    sock = socket.create_server(("127.0.0.1", 0))
    HELD.append(sock)
    port = sock.getsockname()[1]
    assert isinstance(port, int)
    return port


def held_file(place: Path) -> Path:
    (place / "file").write_text("mine")
    return place / "file"
