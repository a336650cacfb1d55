"""Contexts: what is kept and how, what is refused, and that commands reach the sandboxd that was chosen."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli import __main__ as top
from cli import context, contexts
from cli.contexts import Context, Contexts
from cli.place import config_dir
from sandboxd.errors import SandboxError
from tests.cli.person import COMMAND, Person
from tests.cli.rawserver import ReadRequest, serving
from tests.sandboxd.conftest import why_not
from tests.sandboxd.pki import Authority
from tests.sandboxd.reach import TOKEN, ports, token_files
from tests.sandboxd.rig import Rig


@pytest.fixture
def person(tmp_path: Path) -> Person:
    return Person(tmp_path, tmp_path / "none.sock")


def kept(person: Person) -> Path:
    return person.home / ".config" / "sandbox" / "contexts.json"


def keep(person: Person, text: str, mode: int = 0o600) -> Path:
    path = kept(person)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def token(person: Person, name: str = "token", mode: int = 0o600) -> Path:
    path = person.home / name
    path.write_text("secret-CANARY\n")
    path.chmod(mode)
    return path


def said(done: subprocess.CompletedProcess[bytes]) -> str:
    """The one line of an error."""
    assert (done.returncode, done.stdout) == (1, b"")
    line = done.stderr.decode()
    assert line.startswith("sandbox-cli: ") and line.count("\n") == 1, line
    return line


def test_a_context_from_its_making_to_its_end(person: Person) -> None:
    token(person)
    done = person.run("context", "add", "build", "https://build.test:8443/", "--token-file", "token")
    assert done.returncode == 0, done.stderr
    assert json.loads(kept(person).read_bytes()) == {
        "current": "local",
        "contexts": {"build": {"address": "https://build.test:8443", "token_file": f"{person.home}/token"}},
    }
    assert person.run("context", "add", "here", "unix:///run/x.sock").returncode == 0
    assert person.run("context", "use", "build").stdout == b"build\n"
    lines = person.run("context", "ls", SANDBOX_CONTEXT="").stdout.decode().splitlines()
    own = context.ROOT_SOCKET if os.geteuid() == 0 else f"{kept(person).parent}/sandboxd.sock"
    assert [line.split()[:2] for line in lines[1:]] == [
        ["local", f"unix://{own}"],
        ["*", "build"],
        ["here", "unix:///run/x.sock"],
    ]
    rows = json.loads(person.run("context", "ls", "--json").stdout)
    assert [(row["name"], row["current"]) for row in rows] == [("local", False), ("build", True), ("here", False)]
    done = person.run("context", "rm", "build")
    assert done.stderr == b"sandbox-cli: commands speak to local now\n"
    assert json.loads(kept(person).read_bytes())["current"] == "local"
    assert json.loads(person.run("context", "ls", "--json").stdout)[0]["current"] is True
    assert b"CANARY" not in kept(person).read_bytes()


def test_it_is_for_nobody_else_and_leaves_nothing_beside_it(person: Person) -> None:
    old = os.umask(0)
    try:
        assert person.run("context", "add", "a", "unix:///run/x.sock").returncode == 0
    finally:
        os.umask(old)
    for path, mode in ((kept(person), 0o600), (kept(person).parent, 0o700), (kept(person).parent.parent, 0o700)):
        assert stat.S_IMODE(path.stat().st_mode) == mode, path
    assert os.listdir(kept(person).parent) == ["contexts.json"]


REFUSED = [
    (("add", "local", "unix:///x"), "local is built in"),
    (("rm", "local"), "local is built in"),
    (("add", "a b", "unix:///x"), "a b is no context's name"),
    (("add", "a/b", "unix:///x"), "a/b is no context's name"),
    (("add", "https://x", "unix:///x"), "is no context's name"),
    (("add", "a\u202eb", "unix:///x"), "a b is no context's name"),
    (("add", "", "unix:///x"), "nothing is no context's name"),
    (("add", "x" * 65, "unix:///x"), "is no context's name"),
    (("add", "c", "tcp://x:1"), "tcp://x:1: not https://HOST:PORT"),
    (("add", "c", "unix://relative"), "unix://relative: not https://HOST:PORT"),
    (("add", "c", "http://192.0.2.1:80", "--token-file", "token"), "without TLS only this machine itself"),
    (("add", "c", "https://h", "--token-file", "token"), "not unix:///path, http://127.0.0.1:PORT or"),
    (("add", "c", "https://a..b:1", "--token-file", "token"), "https://a..b:1: not unix:///path, http://127.0.0.1:PORT"),
    (("add", "c", f"https://{'a' * 70}.test:1", "--token-file", "token"), "not unix:///path, http://127.0.0.1:PORT or"),
    (("add", "c", "https://u:p@h:1", "--token-file", "token"), "not unix:///path, http://127.0.0.1:PORT or"),
    (("add", "c", "https://h:1"), "over TCP a token is needed; name its file with --token-file"),
    (("add", "c", "https://h:1", "--token-file", "none"), "/none: No such file or directory"),
    (("add", "c", "https://h:1", "--token-file", "open"), "others may read the token file: chmod 600"),
    (("add", "c", "https://h:1", "--token-file", "token", "--ca", "none"), "/none: No such file or directory"),
    (("add", "c", "https://h:1", "--token-file", "token", "--ca", "token"), "no certificate in it (PEM)"),
    (("add", "c", "https://h:1", "--token-file", "token", "--cert", "token"), "and its key go together"),
    (("add", "c", "https://h:1", "--token-file", "token", "--cert", "token", "--key", "token"), "they do not fit"),
    (("add", "c", "unix:///x", "--ca", "token"), "unix:///x: a CA is for https://"),
    (("use", "c"), "no context c; there are local (see sandbox-cli context ls)"),
    (("rm", "c"), "no context c; there are local"),
    (("show",), "context: say what to do: add, ls, use, rm; see"),
    (("add", "c"), "given twice: sandbox-cli context add"),
]


@pytest.mark.parametrize(("args", "why"), REFUSED, ids=[" ".join(args)[:60] for args, _ in REFUSED])
def test_what_is_refused_is_one_line_and_nothing_is_kept(
    person: Person, args: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    token(person)
    token(person, "open", 0o644)
    monkeypatch.chdir(person.home)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(person.home / ".config"))
    code = top.main(["context", *args])
    out, err = capfd.readouterr()
    assert (code, out) == (1, "")
    assert why in err and err.count("\n") == 1
    assert not kept(person).exists()


def test_a_name_that_is_taken_keeps_what_it_has(person: Person) -> None:
    assert person.run("context", "add", "a", "unix:///one").returncode == 0
    assert "remove it first with: sandbox-cli context rm a" in said(person.run("context", "add", "a", "unix:///two"))
    assert b"unix:///one" in kept(person).read_bytes()


DAMAGED = {
    "not JSON": "{",
    "a list": "[]",
    "nested too deeply": "[" * 100_000,
    "an unknown key": '{"other": 1}',
    "an unknown field": '{"contexts": {"a": {"address": "unix:///x", "token": "t"}}}',
    "no address": '{"contexts": {"a": {}}}',
    "a number for a path": '{"contexts": {"a": {"address": "unix:///x", "ca_file": 1}}}',
    "a current one that is not there": '{"current": "b", "contexts": {}}',
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "contexts.json").write_text(text)
    (tmp_path / "contexts.json").chmod(0o600)
    with pytest.raises(SandboxError, match=r"contexts.json cannot be understood \("):
        contexts.load(str(tmp_path))


@pytest.mark.parametrize("args", [("ls",), ("add", "n", "unix:///x"), ("use", "local"), ("rm", "a")], ids=" ".join)
def test_a_damaged_file_is_said_and_not_replaced(person: Person, args: tuple[str, ...]) -> None:
    path = keep(person, "{")
    assert f"{path} cannot be understood (" in said(person.run("context", *args))
    assert path.read_text() == "{"


def test_who_names_a_socket_needs_no_file_of_ours(person: Person) -> None:
    keep(person, "{")
    assert "cannot be understood" in said(person.run("list", SANDBOX_CONTEXT=""))
    assert "no sandboxd" in said(person.run("list", SANDBOX_CONTEXT="local"))


def test_what_others_may_have_written_is_not_used(person: Person) -> None:
    text = '{"contexts": {"a": {"address": "unix:///x"}}}'
    keep(person, text, 0o666)
    assert "others may write to" in said(person.run("context", "ls"))
    kept(person).chmod(0o600)
    assert person.run("context", "ls").returncode == 0


@pytest.mark.parametrize("args", [("ls",), ("add", "n", "unix:///x")], ids=" ".join)
def test_a_link_is_not_followed(person: Person, args: tuple[str, ...]) -> None:
    keep(person, "{}").rename(person.home / "elsewhere")
    kept(person).symlink_to(person.home / "elsewhere")
    assert "it is a link, and is not followed" in said(person.run("context", *args))
    assert (person.home / "elsewhere").read_text() == "{}"


@pytest.mark.parametrize("what", ["a FIFO", "a directory", "a file without end"])
def test_what_is_no_file_of_ours_ends_it_at_once(person: Person, what: str) -> None:
    kept(person).parent.mkdir(parents=True)
    if what == "a FIFO":
        os.mkfifo(kept(person))
    elif what == "a directory":
        kept(person).mkdir()
    else:
        with kept(person).open("w") as file:
            file.truncate(1 << 40)
        kept(person).chmod(0o600)
    said(person.run("context", "ls"))


def test_many_at_once_lose_nothing(person: Person) -> None:
    names = [f"c{number}" for number in range(8)]
    running = [
        subprocess.Popen(
            [*COMMAND, "context", "add", name, f"unix:///{name}"], env=person.environment(), stdout=subprocess.DEVNULL
        )
        for name in names
    ]
    assert [one.wait(60) for one in running] == [0] * len(names)
    assert sorted(json.loads(kept(person).read_bytes())["contexts"]) == names


def test_text_and_back() -> None:
    held = Contexts({"a": Context("unix:///x"), "b\u00e9": Context("https://h:1", "/t", "/c", "/d", "/k")}, "b\u00e9")
    assert contexts.parse(json.loads(contexts.text(held))) == held
    assert contexts.text(held).isascii()


def test_a_context_s_own_files_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's token is some other server's."""
    for name in ("mine", "other"):
        (tmp_path / name).write_text(f"{name}\n")
        (tmp_path / name).chmod(0o600)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("SANDBOX_TOKEN_FILE", str(tmp_path / "other"))
    monkeypatch.delenv("SANDBOX_CONTEXT", raising=False)
    mine = Context("http://127.0.0.1:9", str(tmp_path / "mine"))
    contexts.change(config_dir(), lambda _: Contexts({"m": mine}, "m"))

    def files(asked: str | None) -> str:
        return context.choose(asked).client.endpoint.token_file

    assert files(None) == files("m") == str(tmp_path / "mine")
    assert files("http://127.0.0.1:9") == str(tmp_path / "other"), "who names an address names its files"
    monkeypatch.delenv("SANDBOX_TOKEN_FILE")
    assert files("http://127.0.0.1:9") == files("http://127.0.0.1:9/") == str(tmp_path / "mine")
    with pytest.raises(SandboxError, match="SANDBOX_TOKEN_FILE must name"):
        files("http://127.0.0.1:10")
    (tmp_path / "mine").unlink()
    with pytest.raises(SandboxError, match=r"the token file .*mine: No such file"):
        files(None)


def test_an_error_names_the_context_that_was_chosen(person: Person) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    token(person)
    for name, address, more in (
        ("sock", "unix:///no/such", []), ("port", f"http://127.0.0.1:{port}", ["--token-file=token"])
    ):
        assert person.run("context", "add", name, address, *more).returncode == 0
        assert person.run("context", "use", name).returncode == 0
        line = said(person.run("list", SANDBOX_CONTEXT=""))
        assert f"{address.removeprefix('unix://')} (context {name}): " in line
    assert "(context" not in said(person.run("list", "--context", "unix:///no/such"))


def test_a_socket_behind_a_long_path(person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the 107 bytes of a socket's address (unix(7))."""
    deep = person.home / ("d" * 120) / "s"
    deep.parent.mkdir()
    monkeypatch.chdir(deep.parent)
    answer = b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"sandboxes":[]}'
    with serving(Path("s"), [], [ReadRequest(), answer]):
        done = person.run("list", "--json", "--context", f"unix://{deep}")
    assert (done.returncode, done.stdout) == (0, b"[]\n"), done.stderr


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ctx-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def mutual(place: Path) -> Iterator[Rig]:
    """A daemon on a port, with TLS, that wants a client's certificate and a token."""
    if reason := why_not():
        pytest.skip(reason)
    authority, theirs = Authority(place, "authority"), Authority(place, "clients")
    cert = authority.issue("server")
    theirs.issue("client")
    flags = ["--tls-cert", str(cert), "--tls-key", str(cert.with_suffix(".key")), "--client-ca", str(theirs.file)]
    rig = Rig(place, "--listen", "127.0.0.1:0", *token_files(place), *flags)
    rig.headers["Authorization"] = f"Bearer {TOKEN}"
    with rig:
        yield rig


def test_over_tls_by_name_by_choice_and_by_the_address_in_a_record(mutual: Rig, tmp_path: Path) -> None:
    place, person = mutual.directory, Person(tmp_path, tmp_path / "none.sock")
    port = ports(mutual)["127.0.0.1"]
    files = [f"--token-file={place}/one", f"--ca={place}/authority.pem"]
    files += [f"--cert={place}/client.pem", f"--key={place}/client.key"]
    done = person.run("context", "add", "far", f"https://localhost:{port}", *files)
    assert done.returncode == 0, done.stderr
    box = mutual.create(name="tls-box")

    def listed(*args: str, **env: str) -> list[str]:
        done = person.run("list", "--json", *args, **env)
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return [one["id"] for one in found]

    assert listed("--context", "far") == listed("--context", f"https://localhost:{port}") == [box]
    assert listed(SANDBOX_CONTEXT="far") == [box]
    assert "no sandboxd" in said(person.run("list", "--context", "local", SANDBOX_CONTEXT="far"))
    assert person.run("context", "use", "far").returncode == 0
    assert listed(SANDBOX_CONTEXT="") == [box]
    # Without the CA, without the certificate: this side refuses, then that one.
    for name, some in (("no-ca", [files[0], *files[2:]]), ("no-cert", files[:2])):
        assert person.run("context", "add", name, f"https://localhost:{port}", *some).returncode == 0
    assert "its certificate is not trusted" in said(person.run("list", "--context", "no-ca"))
    assert "the server wants a client certificate" in said(person.run("list", "--context", "no-cert"))
    (place / "one").write_text("of-somebody-else-0123\n")
    assert f"the one in {place}/one is none of them" in said(person.run("list", "--context", "far"))
