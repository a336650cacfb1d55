"""The API's client against recorded answers: what it sends, what it understands, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandboxd import answers, client, errors, streams
from sandboxd.client import (
    BadAnswer,
    Bind,
    Client,
    Create,
    Frame,
    FrameDecoder,
    Mount,
    NetworkRequest,
    Unreachable,
    frame,
)
from tests.cli.rawserver import ReadRequest, Split, Step, serving

SANDBOX = {
    "id": "sbx_0123456789abcdef",
    "name": "demo",
    "state": "running",
    "image": "sandbox-base",
    "cpus": 1,
    "memory_mb": 1024,
    "disk_mb": 10240,
    "env_names": ["TZ"],
    "network": {"mode": "allowlist", "allow": ["a.example"], "deny": ["b.example"]},
    "created_at": "2026-01-02T03:04:05Z",
    "idle_timeout_secs": 1800,
    "labels": {"k": "v"},
    "added_later": {"deep": [1, 2, 3]},
}
FEWEST = {"id": "sbx_0", "state": "pending", "network": {"mode": "none", "allow": None}}


def answer(status: int, body: Any) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def ask(tmp_path: Path, call: Callable[[Client], Any], *steps: Step) -> tuple[Any, bytes]:
    """The call's value and the bytes it sent."""
    with serving(tmp_path / "s", [ReadRequest(), *steps]) as server:
        value = call(Client(server.path))
    return value, bytes(server.seen[0])


def test_a_sandbox_in_full_and_with_the_fewest_fields(tmp_path: Path) -> None:
    body = {"sandboxes": [SANDBOX, FEWEST]}
    found, sent = ask(tmp_path, lambda c: c.sandboxes(["a=b c", "d=ü"]), answer(200, body))
    assert sent.startswith(b"GET /v1/sandboxes?label=a%3Db%20c&label=d%3D%C3%BC HTTP/1.1\r\nHost: localhost\r\n")
    full, fewest = found
    assert (full.id, full.name, full.memory_mb, full.labels) == ("sbx_0123456789abcdef", "demo", 1024, {"k": "v"})
    assert full.network == client.Network("allowlist", ("a.example",), ("b.example",))
    assert fewest.network == client.Network("none", None, ())
    assert (fewest.name, fewest.env_names, fewest.labels, fewest.cpus) == ("", (), {}, 0)


@pytest.mark.parametrize("body", [{}, {"sandboxes": None}, {"sandboxes": []}], ids=["absent", "null", "empty"])
def test_an_empty_list_in_three_spellings(tmp_path: Path, body: Any) -> None:
    assert ask(tmp_path, lambda c: c.sandboxes(), answer(200, body))[0] == []


@pytest.mark.parametrize(
    ("asked", "body"),
    [
        pytest.param(Create(), {}, id="nothing asked"),
        pytest.param(
            Create(name="n", cpus=0.5, memory_mb=256, env={"A": "b"}, network=NetworkRequest("none")),
            {"name": "n", "cpus": 0.5, "memory_mb": 256, "env": {"A": "b"}, "network": {"mode": "none"}},
            id="some",
        ),
        pytest.param(
            Create(network=NetworkRequest(deny=("x",))), {"network": {"deny": ["x"]}}, id="deny alone keeps the mode"
        ),
        pytest.param(
            Create(network=NetworkRequest(allow=())), {"network": {"allow": []}},
            id="an empty allow is not an absent one",
        ),
        pytest.param(
            Create(network=NetworkRequest(allow_tcp=("h:22",))), {"network": {"allow_tcp": ["h:22"]}}, id="another port"
        ),
    ],
)
def test_create_sends_what_was_asked_and_nothing_else(tmp_path: Path, asked: Create, body: dict[str, Any]) -> None:
    _, sent = ask(tmp_path, lambda c: c.create(asked), answer(201, SANDBOX))
    assert json.loads(sent.partition(b"\r\n\r\n")[2]) == body
    assert b"Content-Type: application/json\r\n" in sent


CODES = [
    (400, "invalid_request", errors.InvalidRequest),
    (401, "unauthorized", errors.Unauthorized),
    (403, "refused", errors.Refused),
    (403, "forbidden_origin", errors.ForbiddenOrigin),
    (404, "not_found", errors.NotFound),
    (409, "conflict", errors.Conflict),
    (413, "invalid_request", errors.BodyTooLarge),
    (415, "invalid_request", errors.MediaTypeRefused),
    (500, "internal", errors.Internal),
    (501, "unsupported", errors.Unsupported),
    (503, "unavailable", errors.Unavailable),
    (418, "a_code_of_tomorrow", errors.Internal),
]


@pytest.mark.parametrize(("status", "code", "kind"), CODES, ids=[f"{row[0]} {row[1]}" for row in CODES])
def test_a_code_raises_its_class(tmp_path: Path, status: int, code: str, kind: type[errors.ApiError]) -> None:
    body = {"error": {"code": code, "message": "why", "more": 1}}
    with pytest.raises(kind) as caught:
        ask(tmp_path, lambda c: c.get("demo"), answer(status, body))
    assert type(caught.value) is kind
    assert caught.value.message.startswith("why")
    assert ("SANDBOX_TOKEN_FILE" in caught.value.message) == (status == 401)


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(answer(200, b"not json"), id="not JSON"),
        pytest.param(answer(200, b"[]"), id="not an object"),
        pytest.param(answer(200, b"[" * 100_000), id="nested without end"),
        pytest.param(answer(200, {"sandboxes": {}}), id="an object for a list"),
        pytest.param(answer(200, {"sandboxes": ["x"]}), id="text for objects"),
        pytest.param(answer(200, {"sandboxes": [{"id": 5}]}), id="a number for text"),
        pytest.param(answer(200, {"sandboxes": [{"memory_mb": "5"}]}), id="text for a number"),
        pytest.param(answer(200, {"sandboxes": [{"labels": {"a": 1}}]}), id="a label that is no text"),
        pytest.param(answer(200, {"sandboxes": [{"network": []}]}), id="a list for an object"),
        pytest.param(answer(502, b"<html>proxy</html>"), id="somebody else's error page"),
        pytest.param(answer(404, {"error": "text"}), id="an error that is no object"),
    ],
)
def test_what_is_not_this_api_is_said_to_be_so(tmp_path: Path, reply: bytes) -> None:
    with pytest.raises(BadAnswer):
        ask(tmp_path, lambda c: c.sandboxes(), reply)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([], id="no answer"),
        pytest.param([b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{"], id="half an answer"),
        pytest.param([b"SSH-2.0\r\n\r\n"], id="another protocol"),
    ],
)
def test_a_server_that_goes_away(tmp_path: Path, steps: list[Step]) -> None:
    with pytest.raises(Unreachable):
        ask(tmp_path, lambda c: c.sandboxes(), *steps)


def test_no_server_at_all(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="No such file"):
        Client(str(tmp_path / "s")).health()


@pytest.mark.parametrize(
    ("fields", "stdout", "stderr"),
    [
        pytest.param({"stdout": "aGk=", "stderr": "/w=="}, b"hi", b"\xff", id="bytes"),
        pytest.param({"stdout": None, "stderr": ""}, b"", b"", id="null and empty are empty"),
        pytest.param({}, b"", b"", id="absent is empty"),
    ],
)
def test_run(tmp_path: Path, fields: dict[str, Any], stdout: bytes, stderr: bytes) -> None:
    body = {"exit_code": 3, "truncated": False, "timed_out": True} | fields
    result, sent = ask(
        tmp_path,
        lambda c: c.run("a b/c", ["x", "\udcff"], stdin=b"\0\xff", timeout_secs=5, cwd="/w", env={"A": "b"}),
        answer(200, body),
    )
    assert result == client.RunResult(3, stdout, stderr, False, True)
    assert sent.startswith(b"POST /v1/sandboxes/a%20b%2Fc/run HTTP/1.1\r\n")
    assert json.loads(sent.partition(b"\r\n\r\n")[2]) == {
        "argv": ["x", "\udcff"], "env": {"A": "b"}, "cwd": "/w", "stdin": "AP8=", "timeout_secs": 5,
    }  # fmt: skip


@pytest.mark.parametrize("data", ["aGk", "a", "a\nGk=", "ä"], ids=["no padding", "one", "a line end", "not ASCII"])
def test_bytes_that_are_not_base64_are_refused(tmp_path: Path, data: str) -> None:
    with pytest.raises(BadAnswer, match="not base64"):
        ask(tmp_path, lambda c: c.run("s", ["x"]), answer(200, {"stdout": data}))


def test_start_with_a_terminal_and_without(tmp_path: Path) -> None:
    process = {"pid": 4, "tty": True, "argv": ["sh"], "state": "running", "exit_code": None, "started_at": "t"}
    started, sent = ask(tmp_path, lambda c: c.start("s", ["sh"], size=(43, 132)), answer(201, process))
    assert started == client.Process(4, True, ("sh",), "running", None, "t")
    assert json.loads(sent.partition(b"\r\n\r\n")[2]) == {"argv": ["sh"], "tty": True, "rows": 43, "cols": 132}


def test_output_lines_however_they_are_cut(tmp_path: Path) -> None:
    lines = b'{"stream":"stdout","data":"aGk="}\n{"stream":"stderr","data":null,"dropped":7}\n{"exit_code":0}\n'
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    pieces, _ = ask(tmp_path, lambda c: list(c.output("s", 1)), Split(head + lines))
    assert pieces == [
        client.Output("stdout", b"hi", None),
        client.Output("stderr", b"", None, 7),
        client.Output("", b"", 0),
    ]


def test_files_and_directories(tmp_path: Path) -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n\0\1\2"
    data, sent = ask(tmp_path, lambda c: c.read_file("s", "/a b/\udcff"), raw)
    assert (data, sent.split(b" ")[1]) == (b"\0\1\2", b"/v1/sandboxes/s/files?path=%2Fa%20b%2F%FF")


def test_a_bundle_goes_up_with_its_length_and_comes_down_in_pieces(tmp_path: Path) -> None:
    _, sent = ask(
        tmp_path, lambda c: c.put_workspace("s", "sandbox", iter([b"ab", b"c"]), 3), b"HTTP/1.1 204 X\r\n\r\n"
    )
    assert b"Content-Length: 3\r\n" in sent
    assert b"Content-Type: application/octet-stream\r\n" in sent


def test_a_bundle_that_stops_is_never_a_short_one(tmp_path: Path) -> None:
    cut = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
    with pytest.raises(Unreachable):
        ask(tmp_path, lambda c: b"".join(c.get_workspace("s", "0" * 40, "sandbox")), cut)


SWITCH = b"HTTP/1.1 101 S\r\nConnection: Upgrade\r\nUpgrade: sbx-stream/1\r\n\r\n"
EXIT = frame(b"x", (143).to_bytes(4, "big"))


@pytest.mark.parametrize("split", [False, True], ids=["at once", "byte by byte"])
def test_attach_reads_frames_to_the_exit_code(tmp_path: Path, split: bool) -> None:
    wire = SWITCH + frame(b"o", b"out") + frame(b"?", b"new") + frame(b"E", b"err") + frame(b"o") + EXIT
    frames, _ = ask(
        tmp_path, lambda c: list(c.attach("s", 1).frames()), Split(wire) if split else wire
    )
    assert frames == [
        Frame(b"o", b"out"), Frame(b"?", b"new"), Frame(b"E", b"err"), Frame(b"o", b""), Frame(b"x", EXIT[5:]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wire", "kind", "said"),
    [
        pytest.param(SWITCH + frame(b"o", b"x"), BadAnswer, "before the process's exit", id="no exit"),
        pytest.param(SWITCH + b"o\xff\xff\xff\xff", BadAnswer, "larger than 1 MiB", id="a huge frame, early"),
        pytest.param(answer(409, {"error": {"code": "conflict", "message": "m"}}), errors.Conflict, "m", id="no"),
        pytest.param(answer(200, {}), BadAnswer, "something else", id="an answer that is no switch"),
    ],
)
def test_attach_that_goes_wrong(tmp_path: Path, wire: bytes, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        ask(tmp_path, lambda c: list(c.attach("s", 1).frames()), wire)


def test_frames_up_to_the_limit(tmp_path: Path) -> None:
    largest = bytes(streams.FRAME_LIMIT_BYTES)
    assert FrameDecoder().feed(frame(b"o", largest)) == [Frame(b"o", largest)]
    with pytest.raises(BadAnswer):
        FrameDecoder().feed(frame(b"o", largest + b"x"))
    with pytest.raises(BadAnswer, match="exit code"):
        client.exit_code(b"\0\0\0")
    assert client.exit_code(b"\xff\xff\xff\xff") == -1


def test_values_have_the_fields_of_the_wire() -> None:
    """The daemon's own types and these are two pieces of text that must agree."""
    wire = pytest.importorskip("sandboxd.wire")
    flat = {"Capabilities", "RunResult", "Output"}
    inside = {"Fault", "Failure", "Health", "Limits", "NetworkOffer", "Sandboxes", "Processes", "Volumes", "Images"}
    theirs = {
        name: kind for name, kind in vars(wire).items()
        if isinstance(kind, type) and issubclass(kind, wire.Answer) and kind is not wire.Answer
    }  # fmt: skip
    for name in theirs.keys() - inside - {"Entries", "OutputLine"}:
        assert hasattr(answers, name), f"the client has no {name}"
        if name not in flat:
            assert set(getattr(answers, name)._fields) == set(theirs[name].__struct_fields__), name
    assert set(client.RunResult._fields) == set(wire.RunResult.__struct_fields__)
    assert set(client.NetworkRequest._fields) == set(wire.NetworkRequest.__struct_fields__)
    shown = {*wire.Capabilities.__struct_fields__, *(f"network_{name}" for name in wire.NetworkOffer.__struct_fields__)}
    shown = {name.replace("network_registries", "registries") for name in shown}
    assert set(client.Capabilities._fields) == shown - {"network"}
    # All that a create can say.
    sent = Create(
        "n", "i", 1, 1, 1, 1, {"a": "b"}, {"c": "d"}, NetworkRequest("none"), (Mount("v", "/d", True),), 1, "s", 300, 1,
        Bind("/d", True),
    )  # fmt: skip
    assert set(sent.body()) == set(wire.CreateRequest.__struct_fields__)
