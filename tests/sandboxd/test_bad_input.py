"""Every route of the table against input that is wrong: a refusal with a code, at once, and nothing done.

The cases come from the route table and the wire's types, so a new route or field is tried without a new test.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import pytest

from sandboxd import wire
from sandboxd.routes.table import ROUTES, SWITCH, Body, Route
from tests.sandboxd.rig import Rig

PATIENCE_S = 20.0
HUGE = "1" + "0" * 5000
DEEP = 100_000
MANY = 100_000


class Said(NamedTuple):
    status: int
    body: bytes

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


class Case(NamedTuple):
    """A body and what it is."""

    name: str
    body: bytes


def ask(rig: Rig, method: str, target: bytes | str, body: bytes = b"", *fields: str) -> Said:
    """One request as bytes, whatever is in it."""
    target = target.encode() if isinstance(target, str) else target
    lines = ["Host: localhost", "Connection: close", *fields]
    if body or method in ("POST", "PUT", "PATCH"):
        lines.append(f"Content-Length: {len(body)}")
    head = method.encode() + b" " + target + b" HTTP/1.1\r\n" + "\r\n".join([*lines, "", ""]).encode()
    return exchange(rig, head + body)


def exchange(rig: Rig, data: bytes) -> Said:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(rig.socket))
        with suppress(BrokenPipeError, ConnectionResetError):   # refused before it was all sent: the answer is there
            sock.sendall(data)
        came = b""
        while piece := sock.recv(1 << 16):
            came += piece
    head, _, body = came.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), (data[:200], came[:200])
    return Said(int(head.split(b" ")[1]), body)


def refused(said: Said, what: object, *codes: str) -> None:
    assert 400 <= said.status < 500, (what, said)
    assert said.code in (codes or (said.code,)), (what, said)


def declined(said: Said, what: object) -> None:
    """Refused, or not there at all on this endpoint."""
    if said.status != 501:
        refused(said, what)
    else:
        assert said.code == "unsupported", (what, said)


@pytest.fixture(scope="module")
def bad(rig: Rig, box: str) -> Iterator[Rig]:
    """The daemon, seen to be as it was when all is over."""
    rig.start_process(box, "true")
    before, process = things(rig), rig.process
    yield rig
    assert rig.process is process and process is not None and process.poll() is None
    assert things(rig) == before


def things(rig: Rig) -> list[object]:
    """What a request could have made or ended."""
    found: list[object] = [
        [one["id"], one.get("name"), one["state"], one.get("labels"), one["idle_timeout_secs"]]
        for one in rig.call("GET", "/v1/sandboxes").json["sandboxes"]
    ]
    for path in ("/v1/volumes", "/v1/images"):
        answer = rig.call("GET", path)
        found.append(answer.json if answer.status == 200 else answer.code)
    return found


def at(route: Route, ref: str = "box", pid: str = "1") -> str:
    """The route's path in a sandbox that is there; what it would end or delete is not."""
    gone = route.method == "DELETE" or route.name in ("suspend", "resume", "snapshot", "event")
    return route.path.replace("{ref}", "no-such" if gone and "{pid}" not in route.path else ref).replace("{pid}", pid)


def media(route: Route) -> str:
    return f"Content-Type: {route.body.media_type}"


NO_JSON = [
    Case("half an object", b'{"a": '),
    Case("two objects", b"{}{}"),
    Case("something behind it", b"{} x"),
    Case("a list", b"[]"),
    Case("a text", b'"x"'),
    Case("a number", b"1"),
    Case("null", b"null"),
    Case("true", b"true"),
    Case("not a number", b'{"a": NaN}'),
    Case("infinity", b'{"a": -Infinity}'),
    Case("the infinite alone", b"Infinity"),
    Case("a number of too many digits", f'{{"a": {HUGE}}}'.encode()),
    Case("a number beyond a float", b'{"a": 1e999}'),
    Case("a hexadecimal number", b'{"a": 0x10}'),
    Case("a number with a plus", b'{"a": +1}'),
    Case("a number with a zero before", b'{"a": 01}'),
    Case("single quotes", b"{'a': 1}"),
    Case("a comma too many", b'{"a": 1,}'),
    Case("a comment", b'{"a": 1 /* x */}'),
    Case("NUL", b"\0"),
    Case("NUL inside", b'{"a\0": 1}'),
    Case("NUL behind", b"{}\0"),
    Case("no UTF-8", b'{"\xff": 1}'),
    Case("an overlong UTF-8 sequence", b'{"\xc0\xaf": 1}'),
    Case("a surrogate in UTF-8", b'{"\xed\xa0\x80": 1}'),
    Case("a byte order mark", b"\xef\xbb\xbf{}"),
    Case("UTF-16", "{}".encode("utf-16")),
    Case("UTF-32", "{}".encode("utf-32-le")),
    Case("lone surrogates", b'{"\\ud800": "\\udfff"}'),
    Case("a bad escape", b'{"\\x41": 1}'),
    Case("half an escape", b'{"\\u12": 1}'),
    Case("a line break in a text", b'{"a\n": 1}'),
    Case("a key twice", b'{"a": 1, "a": 1}'),
    Case("a key twice, spelt in two ways", b'{"a": 1, "\\u0061": 2}'),
    Case("a key twice, deeper", b'{"a": {"b": 1, "b": 1}}'),
    Case("an unknown field", b'{"no_such_field": 1}'),
    Case("the prototype", b'{"__proto__": {}, "constructor": {}}'),
    Case("an empty field name", b'{"": 1}'),
    Case("many unknown fields", json.dumps({f"f{n}": n for n in range(10_000)}).encode()),
    Case("lists in lists", b"[" * DEEP),
    Case("closed lists in lists", b"[" * DEEP + b"]" * DEEP),
    Case("objects in objects", b'{"a":' * DEEP),
    Case("lists in a field", b'{"a":' + b"[" * DEEP),
    Case("blanks alone", b" \r\n\t "),
    Case("a form", b"a=1&b=2"),
    Case("as long as can be", b'{"a":"' + b"x" * (wire.JSON_CAP - 8) + b'"}'),
    Case("one byte too long", b'{"a":"' + b"x" * (wire.JSON_CAP - 7) + b'"}'),
]
"""No type of ours takes any of these."""

VALUES: tuple[Any, ...] = (
    True, 0, -1, 1, 1.5, 2**31, 2**63, 2**64, 10**300, 1e308, "", "x", "\0", "\ud800", "é" * 300, "x" * 10_000, [], [1],
    [None], [[]], ["\0"], ["x"] * 1000, {}, {"a": 1}, {"": ""}, {"A": None}, {"a\0": "b"}, {"no_such_field": 1},
    [{"no_such_field": 1}], {"mode": 1}, {"mode": "x"}, {"allow": ["\0"]}, {"allow": [""]}, {"deny": ["*"]},
    {"allow_tcp": ["h:0"]}, {"allow_tcp": ["h:99999999999999999999"]},
)  # fmt: skip
"""Tried as the value of every field; what a field may hold is left out of the cases by `_wrong`."""


def field_cases(kind: type[wire.Request]) -> Iterator[Case]:
    """Each field with each value that is not its type, and with numbers that only text can hold."""
    for field in kind.__struct_fields__:
        for value in VALUES:
            if _wrong(kind, field, value):
                yield Case(f"{field}: {str(value)[:40]!r}", json.dumps({field: value}).encode())
        for text in ("1e999", "-1e999", HUGE, "-" + HUGE, "NaN", "1.0000000000000000000000001", "1e400"):
            yield Case(f"{field}: {text[:20]}", f'{{"{field}": {text}, "no_such_field": 0}}'.encode())
        nested = f'{{"{field}": {{"mode": "none", "mode": "none"}}}}'
        yield Case(f"{field}: a key twice in it", nested.encode())
    for field in kind.__struct_fields__:
        yield Case(f"{field}: null, and nothing else right", json.dumps({field: None, "no_such_field": 0}).encode())


def _wrong(kind: type[wire.Request], field: str, value: Any) -> bool:
    try:
        msgspec.convert({field: value}, kind)
    except (msgspec.ValidationError, UnicodeEncodeError):
        return True
    return False


def ids(route: Route) -> str:
    return route.name


JSON_ROUTES = [route for route in ROUTES if route.body is Body.JSON]
RAW_ROUTES = [route for route in ROUTES if route.body is not Body.JSON]
TAKING = [route for route in ROUTES if route.request is not None]


@pytest.mark.parametrize("route", JSON_ROUTES, ids=ids)
def test_a_body_that_is_not_the_routes_json(bad: Rig, route: Route) -> None:
    for case in NO_JSON:
        said = ask(bad, route.method, at(route), case.body, media(route))
        assert (said.status, said.code) == (400, "invalid_request"), (case.name, said)


@pytest.mark.parametrize("route", TAKING, ids=ids)
def test_a_field_of_the_wrong_type(bad: Rig, route: Route) -> None:
    assert route.request is not None
    cases = list(field_cases(route.request))
    assert len(cases) > 10 * len(route.request.__struct_fields__)
    for case in cases:
        said = ask(bad, route.method, at(route), case.body, media(route))
        assert (said.status, said.code) == (400, "invalid_request"), (case.name, said)


OUT_OF_RANGE: dict[str, list[dict[str, Any]]] = {
    "create": [
        *({"name": name} for name in ("A", "a_b", "-a", "a" * 64, "a\n", "é", "\0", "a b", "\ud800")),
        *({"image": image} for image in ("-x", "a b", "a\0", "x" * 256, "é", "a\n")),
        *({key: n} for key in ("cpus", "memory_mb", "disk_mb", "idle_timeout_secs") for n in (-1, 2**53 - 1, 10**30)),
        *({"cpus": value} for value in (1e300, 10**300, -0.5)),
        *({"lifetime_secs": value} for value in (-1, 2**53 - 1, 10**300)),
        *({"env": env} for env in ({"": "x"}, {"1A": "x"}, {"A-B": "x"}, {"A": "\0"}, {"A\n": "x"}, {"A": "\ud800"})),
        *({"env": {name: "x"}} for name in ("LD_PRELOAD", " ENV ", "BASH_ENV")),
        *({"labels": {key: "x"}} for key in ("", "A", "a b", "-a", "a" * 64, "a\n")),
        *({"labels": {"a": value}} for value in ("\0", "\n", "\x7f", "\x9f", "x" * 257, "é" * 129, "\ud800")),
        {"labels": {f"k{n}": "" for n in range(33)}},
        {"labels": {f"k{n}": "" for n in range(40_000)}},
        *({"network": {"mode": mode}} for mode in ("", "all", "NONE", "none\0", "allowlist", "open")),
        *(
            {"network": {"mode": "allowlist", "allow": [name]}}
            for name in ("*", "", "a..b", "-a", "10.0.0.1", "\0", "é" * 99)
        ),
        {"network": {"mode": "none", "allow": ["a.example"]}},
        {"network": {"mode": "allowlist", "allow": ["a.example"] * 50_000}},
        {"network": {"mode": "allowlist", "allow": []}},
        {"bind": {"host_path": "/"}}, {"bind": {}},
        {"volumes": [{"name": "no-such", "path": "/x"}] * 9, "name": "v"},
        {"volumes": [{}]}, {"volumes": [{"name": "../x", "path": "/../etc"}]},
    ],
    "update": [
        {}, {"name": "A"}, {"name": "a\0"}, {"labels": {"A": ""}}, {"idle_timeout_secs": 0}, {"idle_timeout_secs": -1},
        {"idle_timeout_secs": 10**300}, {"network": {"mode": "open"}}, {"network": {}, "name": "-"},
    ],
    "run": [
        {}, {"argv": []}, {"argv": [""]}, {"argv": ["\0"]}, {"argv": ["true", "a\0"]}, {"argv": ["true"], "tty": True},
        {"argv": ["true"], "timeout_secs": -1}, {"argv": ["true"], "timeout_secs": -1e300},
        {"argv": ["true"], "timeout_secs": 10**300},
        {"argv": ["true"], "stdin": "%"}, {"argv": ["true"], "stdin": "é"}, {"argv": ["true"], "stdin": "QQ"},
        {"argv": ["true"], "env": {"LD_PRELOAD": "x"}}, {"argv": ["true"], "env": {"a b": "x"}},
        {"argv": ["true"], "cwd": "relative"}, {"argv": ["true"], "cwd": "/../x"}, {"argv": ["true"], "cwd": "/\0"},
        {"argv": ["no-such-command"] * MANY},
    ],
    "start": [
        {}, {"argv": []}, {"argv": ["\ud800"]}, {"argv": ["true"], "rows": -1, "tty": True},
        {"argv": ["true"], "rows": 2**16, "tty": True}, {"argv": ["true"], "cols": 10**300, "tty": True},
        {"argv": ["true"], "stdin": "QUE="}, {"argv": ["true"], "timeout_secs": 1},
    ],
    "signal": [{}, {"signal": ""}, {"signal": "term"}, {"signal": "9"}, {"signal": "KILL\0"}, {"signal": "STOP"}],
    "create_volume": [
        {}, {"name": ""}, {"name": "A"}, {"name": "../x"}, {"name": "a\0"}, {"name": "v", "size_mb": -1},
        {"name": "v", "size_mb": 10**300},
    ],
    "install_image": [{}, {"image": ""}, {"image": "-x"}, {"image": "a b"}, {"image": "\0"}, {"image": "x" * 300}],
    "cordon": [{}, {"cordoned": None}],
    "snapshot_schedule": [{"every_secs": -1}],
}  # fmt: skip
"""Of the right types and still wrong, by route."""


@pytest.mark.parametrize("route", TAKING, ids=ids)
def test_values_out_of_range(bad: Rig, route: Route) -> None:
    assert OUT_OF_RANGE[route.name], "a route that takes fields has values that are wrong"
    for body in OUT_OF_RANGE[route.name]:
        said = ask(bad, route.method, at(route), json.dumps(body).encode(), media(route))
        declined(said, str(body)[:200])


@pytest.mark.parametrize("route", RAW_ROUTES, ids=ids)
def test_a_raw_body_that_is_too_long_or_of_another_type(bad: Rig, route: Route) -> None:
    path = at(route) + "?" + "&".join(f"{one.name}=/x" for one in route.query)
    for given in ("Content-Type: application/json", "Content-Type: text/plain", "X-Nothing: 1", "Content-Type:"):
        assert ask(bad, route.method, path, b"{}", given).status == 415, given
    head = f"{route.method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{media(route)}\r\n"
    said = exchange(bad, f"{head}Content-Length: {route.body.cap + 1}\r\n\r\n".encode())
    assert (said.status, said.code) == (413, "invalid_request")
    for length in ("-1", "1e3", "0x10", "9" * 40, "1, 2", "", "+1"):
        said = exchange(bad, f"{head}Content-Length: {length}\r\n\r\n".encode())
        refused(said, length, "invalid_request")


BAD_VALUES = (
    "%00", "/%00", "/a%00b", "%ff", "%", "%zz", "%u1234", "/" + "x" * 20_000, "%0a", "-", "..", "/..", "A=%00",
)  # fmt: skip


@pytest.mark.parametrize("route", [route for route in ROUTES if route.query], ids=ids)
def test_a_query_that_is_wrong(bad: Rig, route: Route) -> None:
    upgrade = (f"Upgrade: {route.protocol}",) if route.status == SWITCH else ()
    required = [one.name for one in route.query if one.required]
    good = {"path": "/tmp", "branch": "b", "base": "a" * 40, "port": "9", "image": "x", "close": "0", "label": "a=b"}
    for one in route.query:
        rest = "".join(f"&{other}={good[other]}" for other in required if other != one.name)
        for value in BAD_VALUES:
            said = ask(bad, route.method, f"{at(route)}?{one.name}={value}{rest}", b"", *upgrade)
            if one.required or "%00" in value:
                declined(said, value)
            assert said.status < 500 or said.code == "unsupported", (value, said)
        if not one.repeated:
            twice = f"{one.name}={good[one.name]}&{one.name}={good[one.name]}{rest}"
            declined(ask(bad, route.method, f"{at(route)}?{twice}", b"", *upgrade), twice)
    for text in ("", "?", "?=", "?&&&", "?" + "a=b&" * 5000, "?%00=%00", "?path", "?port=", "?a=b?c=d"):
        said = ask(bad, route.method, f"{at(route)}{text}", b"", *upgrade)
        assert said.status < 500 or said.code == "unsupported", (text[:40], said)
        if required:
            declined(said, text[:40])


SEGMENTS = (
    "%00", "%ff", "%", "%zz", "..", "%2e%2e", ".", "a%2Fb", "%2F", "*", "%20", "%0d%0a", "x" * 10_000, "%F0%9F%92%A9",
    "sbx_", "sbx_zzzz", "box%00", "-", "~", "'", '"', ";", "null",
)  # fmt: skip
PIDS = ("0", "-1", "1.5", "1e0", "%00", "%D9%A1", "9" * 30, "9" * 5000, "x", "+1", "%201", "1%00", "0x1", "00", "1_0")


@pytest.mark.parametrize("route", [route for route in ROUTES if "{" in route.path], ids=ids)
def test_a_path_that_names_nothing(bad: Rig, route: Route) -> None:
    body = b"{}" if route.request is not None else b""
    given = media(route)
    good = "&".join(f"{one.name}={'b' if one.name != 'path' else '/x'}" for one in route.query if one.required)
    for segment in SEGMENTS:
        path = at(route, segment).replace("no-such", segment)
        declined(ask(bad, route.method, f"{path}?{good}", body, given), segment)
    for pid in PIDS if "{pid}" in route.path else ():
        refused(ask(bad, route.method, at(route, "box", pid), body, given), pid, "not_found", "invalid_request")


METHODS = ("OPTIONS", "TRACE", "CONNECT", "FOO", "get", "Post", "G\u00c9T", "PROPFIND", "GET/")


@pytest.mark.parametrize("path", sorted({route.path for route in ROUTES}))
def test_a_method_that_the_path_does_not_have(bad: Rig, path: str) -> None:
    target = path.replace("{ref}", "box").replace("{pid}", "1")
    has = {route.method for route in ROUTES if route.path == path}
    for method in (*METHODS, *({"GET", "POST", "PUT", "PATCH", "DELETE"} - has)):
        refused(ask(bad, method, target), method, "not_found", "invalid_request", "forbidden_origin")
    said = ask(bad, "HEAD", target)
    assert (said.status, said.body) == (404, b"")


TARGETS = (
    "", "*", "v1/health", "//v1/health", "/v1/health/", "/V1/health", "/v1/../v1/health", "/v1/%68ealth",
    "/v1/health%00", "http://localhost/v1/health", "/v1/health#x", "/v1\\health", "/v1/sandboxes//", "/" * 1000,
    "/v1/" + "a/" * 5000, "/v1/whoami", "/v1/sandboxes/box/", "/v1/sandboxes/box/processes/", "/v1/health;x=1",
)  # fmt: skip


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[:30] or "empty")
def test_a_target_that_is_no_path_of_the_api(bad: Rig, target: str) -> None:
    refused(ask(bad, "GET", target), target, "not_found", "invalid_request", "forbidden_origin")


def test_what_is_just_right_is_taken(bad: Rig) -> None:
    """The other side of the border, so that no test above passes because everything is refused."""
    given = "Content-Type: application/json"
    full = b" " * (wire.JSON_CAP - 2) + b"{}"
    assert ask(bad, "GET", "/v1/capabilities", full, given).status == 200
    assert ask(bad, "GET", "/v1/capabilities", b" " + full, given).status == 400
    run = {"argv": ["true"], "timeout_secs": -0.0, "env": {"A": "\udc80"}}
    assert ask(bad, "POST", "/v1/sandboxes/box/run", json.dumps(run).encode(), given).status == 200
