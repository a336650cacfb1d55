"""Tables in a terminal's width, and every value that is somebody else's word as one clean line."""

from __future__ import annotations

import http.server
import json
import re
import socketserver
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from cli import __main__ as top
from cli import show
from cli.__main__ import COMMANDS
from sandboxd.client import (
    AuditCheck,
    AuditEvent,
    Capabilities,
    Egress,
    EgressName,
    Event,
    Image,
    Network,
    Node,
    Sandbox,
    Snapshot,
    Volume,
)
from tests.cli.person import Person, at_terminal
from tests.sandboxd.conftest import why_not
from tests.sandboxd.rig import Rig

ID = "sbx_0123456789abcdef"
HEAD = ("ID", "NAME", "STATE", "IMAGE", "NETWORK", "CREATED", "LABELS")
LONG = (ID, "n" * 63, "running", "registry.test/" + "i" * 80, "allowlist (12)", "5m ago", "k=" + "v" * 8000)
WIDE = (ID, "東京" * 30, "running", "i", "none", "5m ago", "e\u0301" * 40)


@pytest.mark.parametrize("width", [200, 132, 100, 80, 66])
@pytest.mark.parametrize("row", [LONG, WIDE, ("x",) * 7], ids=["long", "wide characters and marks", "short"])
def test_a_row_is_a_line_that_fits(width: int, row: tuple[str, ...]) -> None:
    lines = show.table(HEAD, [row, row], whole=("ID",), width=width).splitlines()
    assert len(lines) == 3
    assert max(map(show.display_width, lines)) <= width
    assert lines[1].startswith(row[0] + " "), "an id is never cut"
    if row is LONG:
        assert lines[1].endswith("…") and show.display_width(lines[1]) > width - 5, "no more is cut than must be"
    else:
        assert ("…" in lines[1]) == (row is WIDE)


def test_a_terminal_too_narrow_for_anything_still_gets_a_row() -> None:
    line = show.table(HEAD, [LONG], whole=("ID",), width=10).splitlines()[1]
    assert line.startswith(ID) and line.count("…") == 6


def test_columns_are_left_out_before_cells_are_cut() -> None:
    head, row = ("A", "B", "C"), ("a" * 10, "b" * 10, "c" * 10)
    assert show.table(head, [row], drop=("B", "C"), width=22).splitlines()[1] == "a" * 10 + "  " + "c" * 10
    assert show.table(head, [row], drop=("B", "C"), width=9).splitlines()[1] == "a" * 8 + "…"


@pytest.mark.parametrize(
    ("text", "width", "fits"),
    [
        ("abc", 3, "abc"), ("abcd", 3, "ab…"), ("東京都", 5, "東京…"), ("東京都", 4, "東…"), ("東京", 4, "東京"),
        ("e\u0301e\u0301e\u0301", 2, "e\u0301…"), ("abc", 1, "…"),
    ],
    ids=["as it is", "cut", "wide ones", "half a wide one", "wide and whole", "a mark with its letter", "one column"],
)  # fmt: skip
def test_what_fits(text: str, width: int, fits: str) -> None:
    assert show.cut(text, width) == fits


def test_a_large_cell_takes_no_time() -> None:
    began = time.monotonic()
    show.table(HEAD, [(ID, "東" * 500_000, "", "", "", "", "x" * 1_000_000)], width=80)
    assert time.monotonic() - began < 10


HOSTILE = "a\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b31mb\nsandbox-cli: forged\r\u202egnp\u2066\u200b\x7f"
CLEAN = "a [2J ]52;c;ZXZpbA== 31mb sandbox-cli: forged gnp"
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069]")


def lie(kind: Any) -> Any:
    """A value of the type as the wire has it, with hostile text wherever there is text."""
    if kind is Capabilities:
        network = {"default": lie(Network), "ceiling": HOSTILE, "may_allow": [HOSTILE], "may_allow_tcp": [HOSTILE]}
        return {
            "api_version": HOSTILE, "backend": HOSTILE, "capabilities": {HOSTILE: True, "workspace_bundle": True},
            "limits": {HOSTILE: 1}, "network": network,
        }  # fmt: skip
    if isinstance(kind, type) and hasattr(kind, "_fields"):
        return {name: lie(form) for name, form in get_type_hints(kind).items()}
    origin, parts = get_origin(kind), get_args(kind)
    if origin is tuple:
        return [lie(parts[0])]
    if origin in (UnionType, Union):
        return lie(parts[0])
    if origin is not None:
        return {HOSTILE: lie(parts[1])}
    return {str: HOSTILE, bool: True, int: 1, float: 1.0}[kind]


BOX = "/v1/sandboxes/x"
ANSWERS: dict[str, Any] = {
    "/v1/sandboxes": {"sandboxes": [lie(Sandbox)] * 2},
    BOX: lie(Sandbox) | {"network": lie(Network) | {"mode": "allowlist"}},
    f"{BOX}/suspend": lie(Sandbox),
    f"{BOX}/resume": lie(Sandbox),
    f"{BOX}/snapshot-schedule": lie(Sandbox),
    f"{BOX}/snapshots": lie(Snapshot),
    f"{BOX}/egress": lie(Egress) | {
        "mode": "allowlist", "names": [lie(EgressName) | {"decision": "denied", "rule": "not-listed"}],
    },
    f"{BOX}/events": {"events": [lie(AuditEvent)], "truncated": True},
    f"{BOX}/processes": {"processes": []},
    "/v1/snapshots": {"snapshots": [lie(Snapshot)]},
    "/v1/events/x": lie(Event) | {"type": "egress.denied", "remedy": f"--allow {HOSTILE}"},
    "/v1/volumes": {"volumes": [lie(Volume)], **lie(Volume)},
    "/v1/images": {"images": [lie(Image)], **lie(Image)},
    "/v1/capabilities": lie(Capabilities),
    "/v1/node": lie(Node),
    "/v1/audit/verify": lie(AuditCheck),
}


class Liar(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A sandboxd that lies wherever it may put text; `refuses` lets it answer with errors alone."""

    daemon_threads = True
    refuses = False

    class RequestHandlerClass(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            # What is not in the table is a sandbox, named by the id that was just told.
            value, status = ANSWERS.get(self.path.partition("?")[0], ANSWERS[BOX]), 200
            if getattr(self.server, "refuses", False):
                value, status = {"error": {"code": "conflict", "message": HOSTILE}}, 409
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815

        def address_string(self) -> str:
            return "unix"

        def log_message(self, format: str, *args: Any) -> None:
            pass

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), self.RequestHandlerClass)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def liar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Liar]:
    monkeypatch.setenv("SANDBOX_CONTEXT", f"unix://{tmp_path}/s")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with Liar(tmp_path / "s") as server:
        yield server
        server.shutdown()


SHOWS = [
    "list", "egress x", "events x", "why x", "volume ls", "volume create n", "image ls", "snapshot ls", "snapshot x",
    "suspend x", "resume x", "snapshot-schedule --off x", "update --name n x", "doctor --no-probe", "audit verify",
    "kill x", "volume rm n", "image rm n",
]  # fmt: skip
NO_JSON = ("kill", "volume rm", "image rm")


@pytest.mark.parametrize("words", SHOWS)
def test_what_a_server_says_is_shown_as_clean_lines(
    liar: Liar, capfd: pytest.CaptureFixture[str], words: str
) -> None:
    top.main(words.split())
    out, err = capfd.readouterr()
    assert not CONTROL.search(out + err), repr(out + err)
    for line in (out + err).splitlines():
        assert not line.startswith("sandbox-cli: forged"), "a line of its own"
    assert "gnp" in out + err or words.startswith(NO_JSON), "nothing of it was shown: this proves nothing"
    if not words.startswith(NO_JSON):
        top.main([*words.split(), "--json"])
        out, err = capfd.readouterr()
        assert out.isascii() and not CONTROL.search(out + err)
        assert any(HOSTILE in text for text in strings([json.loads(one) for one in objects(out)])), "exact"


def objects(text: str) -> list[str]:
    """One object or list, or one on each line."""
    try:
        json.loads(text)
    except ValueError:
        return text.splitlines()
    return [text]


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, held in value.items():
            yield key
            yield from strings(held)
    elif isinstance(value, list):
        for held in value:
            yield from strings(held)


@pytest.mark.parametrize("words", SHOWS)
def test_an_error_of_a_server_is_one_clean_line(liar: Liar, capfd: pytest.CaptureFixture[str], words: str) -> None:
    liar.refuses = True
    assert top.main(words.split()) == 1
    out, err = capfd.readouterr()
    assert not CONTROL.search(out + err)
    if not words.startswith("doctor"):
        assert out == ""
    assert err == f"sandbox-cli: {CLEAN}\n"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_who_prints_a_table_prints_objects_too(name: str) -> None:
    module = import_module(COMMANDS[name])
    source = Path(str(module.__file__)).read_text()
    if "show.table(" in source or "show.as_json(" in source:
        assert "--json" in str(module.__doc__), f"{name} prints a table or an object, and has no --json"


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="shw-", dir="/tmp") as name, Rig(Path(name)) as running:
        labels = {f"label-{number}": "v" * 200 for number in range(4)}
        running.create(name="n" * 60, labels=labels)
        running.create(name="short")
        yield running


def test_a_profile_that_cannot_be_had_is_said_and_fails(rig: Rig, tmp_path: Path) -> None:
    person = Person(tmp_path, rig.socket)
    done = person.run("doctor", "--no-probe", "--profile", "prod")
    assert done.returncode == 1
    assert done.stderr == b"sandbox-cli: no run with profile prod can be had here: see above, profile prod\n"
    assert b"  profile prod    CANNOT be had: its network ceiling is none" in done.stdout
    found = json.loads(person.run("doctor", "--no-probe", "--profile", "prod", "--json").stdout)
    assert found["sandboxd"]["profile prod"][0].startswith("CANNOT be had: ")
    assert found["error"] == 'no run with profile prod can be had here: see "profile prod" in "sandboxd"'
    assert person.run("doctor", "--no-probe").returncode == 0
    assert b"--profile x: it is dev or prod" in person.run("doctor", "--profile", "x").stderr


def test_at_a_terminal_of_80_columns_a_sandbox_is_a_line(rig: Rig, tmp_path: Path) -> None:
    with at_terminal(Person(tmp_path, rig.socket), "list", cols=80) as terminal:
        assert terminal.wait() == 0
        deadline = time.monotonic() + 30
        # What was written last reaches the other end of a terminal a moment after its writer has ended.
        while terminal.seen.count(b"\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
            terminal.wait()
        lines = terminal.seen.decode().splitlines()
    assert [len(line) <= 80 for line in lines] == [True] * 3, lines
    assert [line[:20].strip() for line in lines[1:]] == [
        one["id"] for one in rig.call("GET", "/v1/sandboxes").json["sandboxes"]
    ]
    assert re.search(r"running .* \d+s ago", lines[1])
    piped = Person(tmp_path, rig.socket).run("list").stdout.decode()
    assert "n" * 60 in piped and "v" * 200 in piped and "…" not in piped, "whole where nobody looks"
