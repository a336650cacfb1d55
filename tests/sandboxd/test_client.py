"""The public client against a daemon, over each transport; and the examples of docs/client.md, run as they stand."""

from __future__ import annotations

import json
import re
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from sandboxd import openapi
from sandboxd.client import Client, Create, Endpoint, NetworkRequest, Unreachable, frame
from sandboxd.errors import InvalidRequest, NotFound, SandboxError, SetupError, Unauthorized
from tests.sandboxd.conftest import why_not
from tests.sandboxd.pki import Authority
from tests.sandboxd.reach import TOKEN, ports, token_files
from tests.sandboxd.rig import Rig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=["unix", "http", "https"])
def endpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="dmn-", dir="/tmp") as name:
        place = Path(name)
        flags, given = token_files(place), {"token_file": str(place / "one")}
        if request.param != "unix":
            flags += ["--listen", "127.0.0.1:0"]
        if request.param == "https":
            authority, theirs = Authority(place, "authority"), Authority(place, "clients")
            cert, own = authority.issue("server"), theirs.issue("client")
            flags += ["--tls-cert", str(cert), "--tls-key", str(cert.with_suffix(".key"))]
            flags += ["--client-ca", str(theirs.file)]
            given |= {"ca_file": str(authority.file), "cert_file": str(own), "key_file": str(own.with_suffix(".key"))}
        rig = Rig(place, *flags)
        rig.headers["Authorization"] = f"Bearer {TOKEN}"
        with rig:
            address = f"unix://{rig.socket}"
            if request.param != "unix":
                address = f"{request.param}://127.0.0.1:{ports(rig)['127.0.0.1']}"
            rig.create(name="box")
            yield Endpoint.of(address, **given)
        assert "CANARY" not in rig.log.read_text()


@pytest.fixture
def client(endpoint: Endpoint) -> Client:
    return Client(endpoint)


def test_large_bodies_both_ways(client: Client) -> None:
    data = bytes(range(256)) * 20_000
    client.write_file("box", "/tmp/client-test", data)
    assert client.read_file("box", "/tmp/client-test") == data
    client.remove_file("box", "/tmp/client-test")
    assert client.run("box", ["cat"], stdin=b"x" * 100_000).stdout == b"x" * 100_000


def test_a_process_joined_and_ended(client: Client) -> None:
    process = client.start("box", ["sh", "-c", "cat; exit 3"])
    with client.attach("box", process.pid) as joined:
        joined.sock.sendall(frame(b"i", b"hello") + frame(b"e"))
        frames = list(joined.frames())
    assert b"".join(one.payload for one in frames if one.kind == b"o") == b"hello"
    assert frames[-1].payload == b"\0\0\0\3"
    assert next(one.data for one in client.output("box", process.pid)) == b"hello"


def test_a_tunnel_and_its_half_close(client: Client) -> None:
    size = 3_000_000
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard = bytearray()

        def serve() -> None:
            served, _ = listener.accept()
            with served:
                while piece := served.recv(65536):
                    heard.extend(piece)
                served.sendall(b"reply after the end" + bytes(size))

        server = Thread(target=serve, daemon=True)
        server.start()
        with client.tunnel("box", listener.getsockname()[1]) as tunnel:
            tunnel.sendall(bytes(size))
            tunnel.end()
            said = bytearray()
            while piece := tunnel.recv():
                said.extend(piece)
        server.join(20)
    assert len(heard) == size
    assert said == b"reply after the end" + bytes(size)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(NotFound):
            client.tunnel("box", unused.getsockname()[1])


def test_it_may_be_used_from_several_threads(client: Client) -> None:
    found: list[int] = []

    def work() -> None:
        found.extend(client.run("box", ["true"]).exit_code for _ in range(3))

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [0] * 12


def test_the_rest_of_what_a_node_answers(client: Client) -> None:
    assert client.openapi() == json.loads(openapi.document())
    assert client.capabilities().api_version == "v1"
    (box,) = [one for one in client.sandboxes() if one.name == "box"]
    with pytest.raises(InvalidRequest):
        client.create(Create(name="-"))
    short = client.create(Create(lifetime_secs=600))
    client.delete(short.id)
    assert short.lifetime_secs == 600 and short.expires_at > short.created_at
    with pytest.raises(InvalidRequest, match="lifetime_secs"):
        client.create(Create(lifetime_secs=-1))
    assert client.update("box", labels={"a": "b"}).labels == {"a": "b"}
    assert client.egress(box.id).mode == "none"
    offered = client.capabilities().capabilities
    if offered.get("volumes"):
        client.create_volume("v", 64)
        assert [volume.name for volume in client.volumes()] == ["v"]
        client.delete_volume("v")
    if offered.get("images"):
        assert any(image.default for image in client.images())
    if offered.get("metrics"):
        assert client.metrics("box").interval_secs > 0
    if offered.get("audit"):
        assert client.events(box.id).events[0].type == "sandbox.created"
        assert client.verify_audit().ok
    assert client.cordon(True).cordoned and not client.cordon(False).cordoned
    assert client.node().running >= 1


def test_a_token_that_is_wrong_or_missing(endpoint: Endpoint, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.touch(mode=0o600)
    wrong.write_text("not-the-token-of-anyone-SECRET")
    with pytest.raises(Unauthorized, match=re.escape(str(wrong))) as caught:
        Client(endpoint._replace(token_file=str(wrong))).sandboxes()
    shown = "".join(traceback.format_exception(caught.value)) + repr(endpoint) + repr(Client(endpoint))
    assert "SECRET" not in shown and "CANARY" not in shown
    wrong.chmod(0o640)
    with pytest.raises(SetupError, match="chmod 600"):
        Client(endpoint._replace(token_file=str(wrong))).sandboxes()


def test_certificates_that_do_not_fit(endpoint: Endpoint, tmp_path: Path) -> None:
    if not endpoint.ca_file:
        pytest.skip("no TLS on this transport")
    with pytest.raises(Unreachable, match="not trusted") as caught:
        Client(endpoint._replace(ca_file=endpoint.cert_file)).sandboxes()
    assert "\n" not in str(caught.value)
    assert "CA file" in str(caught.value)
    # What the client sends meanwhile must not cost it the server's alert: many times, since it is a race.
    for _ in range(20):
        with pytest.raises(Unreachable, match="wants a client certificate"):
            Client(endpoint._replace(cert_file="", key_file="")).sandboxes()
    foreign = Authority(tmp_path, "foreign").issue("foreigner")
    for _ in range(20):
        with pytest.raises(Unreachable, match="does not take our client certificate"):
            stranger = endpoint._replace(cert_file=str(foreign), key_file=str(foreign.with_suffix(".key")))
            Client(stranger).sandboxes()
    with pytest.raises(Unreachable, match="do not fit together"):
        Client(endpoint._replace(key_file=str(foreign.with_suffix(".key")))).sandboxes()
    with pytest.raises(Unreachable, match=r"the CA file .* no certificate in it"):
        Client(endpoint._replace(ca_file=endpoint.token_file)).sandboxes()
    with pytest.raises(Unreachable, match="the CA file"):
        Client(endpoint._replace(ca_file="/nonexistent")).sandboxes()
    with pytest.raises(Unreachable, match="no TLS"), socket.create_server(("127.0.0.1", 0)) as plain:
        Thread(target=lambda: plain.accept()[0].sendall(b"HTTP/1.1 400 no\r\n\r\n"), daemon=True).start()
        Client(endpoint._replace(port=plain.getsockname()[1])).sandboxes()


def test_nobody_there(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("0123456789abcdef")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unreachable, match="Connection refused; nothing listens there"):
        Client(Endpoint.of(f"http://127.0.0.1:{port}", token_file=str(token))).sandboxes()


def test_a_port_that_ends_the_connection_may_want_tls(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("0123456789abcdef")
    with socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        with pytest.raises(Unreachable, match=r"is that port https://\?|Connection reset"):
            Client(Endpoint.of(f"http://127.0.0.1:{server.getsockname()[1]}", token_file=str(token))).sandboxes()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://192.0.2.1:80", "use https"), ("http://example.com:80", "use https"), ("https://h", "not unix"),
        ("https://h:1/v1", "not unix"), ("https://h:1?x", "not unix"), ("https://u:p@h:1", "not unix"),
        ("ftp://h:1", "not unix"), ("https://h:99999", "not unix"), ("https://[::1", "not unix"), ("", "not unix"),
        ("unix://relative", "not unix"), ("https://h:1", "a token is needed"),
    ],
)  # fmt: skip
def test_an_address_that_is_none(address: str, said: str) -> None:
    with pytest.raises(SandboxError, match=said):
        Endpoint.of(address)


def test_the_examples_of_the_page(rig: Rig) -> None:
    """One after the other, in one namespace, as a reader would type them."""
    names: dict[str, object] = {"SOCKET": str(rig.socket)}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "client.md").read_text(), re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        exec(compile(block, "docs/client.md", "exec"), names)
    assert NetworkRequest("none") == names["nothing"] and sys.version_info >= (3, 11)
