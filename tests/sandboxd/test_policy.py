"""What a request may ask, decided without a daemon: names, networks, paths."""

from __future__ import annotations

from typing import Any

import pytest

from sandboxd import policy
from sandboxd.errors import ApiError, InvalidRequest, Refused
from sandboxd.policy import Policy, covers, host_name, network, resolve
from sandboxd.store import Network
from sandboxd.wire import CreateRequest, NetworkRequest, decode

WIDE = Policy(
    ceiling="allowlist",
    default_network=Network("allowlist", ("a.test", "github.com")),
    may_allow=("*.wide.test", "exact.test"),
)
OPEN = Policy(ceiling="open", default_network=Network("allowlist", ("a.test",)), may_allow=("*",))


@pytest.mark.parametrize(
    ("rules", "asked", "expected"),
    [
        pytest.param(WIDE, None, Network("allowlist", ("a.test", "github.com")), id="absent is the default"),
        pytest.param(WIDE, {}, Network("allowlist", ("a.test", "github.com")), id="empty is the default"),
        pytest.param(WIDE, {"mode": "none"}, Network("none"), id="none is always fine"),
        pytest.param(WIDE, {"mode": "none", "deny": ["x.test"]}, Network("none"), id="deny under none is dropped"),
        pytest.param(
            WIDE, {"deny": ["Gist.GitHub.com.", "gist.github.com"]},
            Network("allowlist", ("a.test", "github.com"), ("gist.github.com",)), id="deny once, normalised (C25)",
        ),
        pytest.param(WIDE, {"allow": ["A.test."]}, Network("allowlist", ("a.test",)), id="a given list replaces"),
        pytest.param(WIDE, {"allow": ["exact.test"]}, Network("allowlist", ("exact.test",)), id="inside may_allow"),
        pytest.param(WIDE, {"allow": ["x.y.wide.test"]}, Network("allowlist", ("x.y.wide.test",)), id="any depth"),
        pytest.param(WIDE, {"allow": ["*.y.wide.test"]}, Network("allowlist", ("*.y.wide.test",)), id="narrower *"),
        pytest.param(WIDE, {"allow": ["wide.test"]}, Refused, id="a wildcard never means its apex"),
        pytest.param(WIDE, {"allow": ["*.test"]}, Refused, id="a broader wildcard"),
        pytest.param(WIDE, {"allow": ["*.exact.test"]}, Refused, id="a wildcard below an exact name"),
        pytest.param(WIDE, {"allow": ["other.test"]}, Refused, id="outside may_allow (C26)"),
        pytest.param(WIDE, {"allow": []}, Refused, id="an allowlist of nothing (C24)"),
        pytest.param(WIDE, {"mode": "open"}, Refused, id="above the ceiling (C23)"),
        pytest.param(WIDE, {"mode": "wide-open"}, InvalidRequest, id="no such mode (C23)"),
        pytest.param(WIDE, {"mode": "none", "allow": ["a.test"]}, InvalidRequest, id="allow under none"),
        pytest.param(WIDE, {"deny": ["https://x.test"]}, InvalidRequest, id="a URL (C25)"),
        pytest.param(OPEN, {"mode": "open", "deny": ["b.test"]}, Network("open", None, ("b.test",)), id="open"),
        pytest.param(OPEN, {"mode": "open", "allow": ["b.test"]}, InvalidRequest, id="allow under open"),
        pytest.param(OPEN, {"allow": ["*.b.test"]}, Network("allowlist", ("*.b.test",)), id="* permits wildcards"),
        pytest.param(Policy(), {"mode": "allowlist", "allow": ["x.test"]}, Refused, id="no egress at all"),
    ],
)  # fmt: skip
def test_networks(rules: Policy, asked: dict[str, Any] | None, expected: Network | type[ApiError]) -> None:
    request = None if asked is None else NetworkRequest(
        mode=asked.get("mode"),
        allow=tuple(asked["allow"]) if "allow" in asked else None,
        deny=tuple(asked["deny"]) if "deny" in asked else None,
    )  # fmt: skip
    if isinstance(expected, Network):
        assert network(request, rules) == expected
    else:
        with pytest.raises(expected):
            network(request, rules)


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "*", "*.", "a..b", "-a.test", "a-.test", "a_b.test", "a.test/", "a.test:443", "1.2.3.4", "1",
        "0x7f.1.", "*.*.test", "a.*.test", "**.test", "ä.test",
        "a" * 64 + ".test", ".".join(["a" * 60] * 5), "a.test..", "[::1]",
        "*.1.2", "a\n",
    ],
)  # fmt: skip
def test_what_is_no_host_name(text: str) -> None:
    if text == "0x7f.1.":
        assert host_name(text) == "0x7f.1"
        return
    with pytest.raises(InvalidRequest):
        host_name(text)


def test_what_covers_what() -> None:
    assert covers("*", "*.anything.test")
    assert covers("*.a.test", "*.a.test")
    assert not covers("*.a.test", "xa.test")
    assert not covers("a.test", "b.a.test")


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [("/", "/"), ("//", "/"), ("/a//b/./c/", "/a/b/c"), ("/ü", "/ü"), ("/..a/b..", "/..a/b.."), ("/\udcff", "/\udcff")],
)
def test_guest_paths(text: str, cleaned: str) -> None:
    assert policy.guest_path("path", text) == cleaned


@pytest.mark.parametrize("text", ["sandbox/checkpoint", "a", "A.b-c_d/e", "1" * 200])
def test_branches(text: str) -> None:
    assert policy.branch("branch", text) == text


@pytest.mark.parametrize(
    "text", ["", "-a", "/a", "a//b", "a..b", "a.lock", "a/", "a.", "a b", "a" * 201, "a\n", "@{-1}"]
)
def test_what_is_no_branch(text: str) -> None:
    with pytest.raises(InvalidRequest):
        policy.branch("branch", text)


@pytest.mark.parametrize("value", ["a\x00b", "\ud800"])
def test_an_environment_value_is_in_no_message(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        policy.check_env({"NAME": f"CANARY{value}"})
    assert "CANARY" not in str(caught.value) and "NAME" in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"env": {"A": 12345}}', b'{"env": {"A": "CANARY", "A": "CANARY"}}', b'{"env": {"A": "CANARY"',
        b'{"env": {"A": "CANARY"}, "x": 1}', b'{"env": ["CANARY"]}', b'{"env": {"A": "CANARY\\ud800"}}',
        b'"CANARY"', b"CANARY",
    ],
)  # fmt: skip
def test_a_body_that_is_refused_is_not_quoted(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve(decode(body, CreateRequest), Policy())
    assert "CANARY" not in str(caught.value)


def test_a_spec_does_not_show_its_values() -> None:
    spec = resolve(CreateRequest(env={"A": "CANARY"}), Policy())
    assert spec.env == {"A": "CANARY"} and "CANARY" not in repr(spec)


def test_defaults() -> None:
    spec = resolve(CreateRequest(cpus=0, memory_mb=0, disk_mb=0, idle_timeout_secs=0), Policy())
    assert (spec.cpus, spec.memory_mb, spec.disk_mb, spec.idle_timeout_secs) == (1, 1024, 10240, 1800)
