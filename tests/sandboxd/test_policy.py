"""What a request may ask, decided without a daemon: names, networks, paths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from egress import policy as egress
from sandboxd import fields
from sandboxd.errors import ApiError, InvalidRequest, Refused
from sandboxd.policy import (
    BASELINE,
    NO_REMEDY,
    Limits,
    Policy,
    built_in,
    differences,
    enforced,
    narrowed,
    network,
    remedy,
    resolve,
    with_cpus,
    with_network,
    without_network,
)
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
        "", ".", "*", "*.", "a..b", "-a.test", "a-.test", "a.test/", "a.test:443", "1.2.3.4", "1",
        "0x7f.1.", "2130706433", "*.*.test", "a.*.test", "**.test", "http://a.test", "user@a.test",
        "a" * 64 + ".test", ".".join(["a" * 60] * 5), "a" * 100_000, "a.test..", "[::1]", "*.1.2", "a\n", "\ud800.test",
    ],
)  # fmt: skip
def test_what_is_no_host_name(text: str) -> None:
    for name in ("allow", "deny"):
        with pytest.raises(InvalidRequest) as caught:
            network(NetworkRequest(**{name: (text,)}), OPEN)
        message = caught.value.message
        assert message.startswith(f"network.{name}: ") and len(message) < 500 and "\n" not in message


@pytest.mark.parametrize(
    "text", ["a.test", "a.test:0", "a.test:65536", "a.test:ssh", "a.test:443", "a.test:53", ":22", "1.2.3.4:22", "*:22"]
)
def test_what_is_no_host_and_port(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^network\.allow_tcp: "):
        network(NetworkRequest(allow_tcp=(text,)), OPEN)


def test_names_are_kept_in_one_form() -> None:
    asked = NetworkRequest(allow=("B\u00fccher.Test.", "xn--bcher-kva.test", "*.A.test"), allow_tcp=("A.Test:22",))
    rules = replace(OPEN, may_allow_tcp=("*",))
    assert network(asked, rules) == Network("allowlist", ("*.a.test", "xn--bcher-kva.test"), (), ("a.test:22",))


SSH = Policy(
    ceiling="open", default_network=Network("allowlist", ("a.test",), ("bad.test",), ("git.test:22",)),
    may_allow=("*.wide.test",), may_allow_tcp=("*.wide.test:5432", "one.test:22"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        pytest.param({}, Network("allowlist", ("a.test",), ("bad.test",), ("git.test:22",)), id="the default"),
        pytest.param(
            {"deny": ("x.test",)}, Network("allowlist", ("a.test",), ("bad.test", "x.test"), ("git.test:22",)),
            id="the server's own refusals stay",
        ),
        pytest.param(
            {"mode": "open", "deny": ("x.test",)}, Network("open", None, ("bad.test", "x.test")),
            id="and with open as well",
        ),
        pytest.param(
            {"allow_tcp": ("One.test:22", "db.wide.test:5432")},
            Network("allowlist", ("a.test",), ("bad.test",), ("db.wide.test:5432", "one.test:22")),
            id="a given list replaces",
        ),
        pytest.param(
            {"allow": (), "allow_tcp": ("git.test:22",)}, Network("allowlist", (), ("bad.test",), ("git.test:22",)),
            id="ports alone are an allowlist",
        ),
        pytest.param({"allow_tcp": ()}, Network("allowlist", ("a.test",), ("bad.test",)), id="an empty list is empty"),
        pytest.param({"allow": (), "allow_tcp": ()}, Refused, id="nothing at all"),
        pytest.param(
            {"allow": ("x.wide.test",)}, Network("allowlist", ("x.wide.test",), ("bad.test",)),
            id="names alone leave no other ports",
        ),
        pytest.param({"allow": ()}, Refused, id="no names, and nothing said of ports"),
        pytest.param({"allow_tcp": ("one.test:23",)}, Refused, id="another port"),
        pytest.param({"allow_tcp": ("*.test:5432",)}, Refused, id="a broader wildcard"),
        pytest.param({"allow_tcp": ("wide.test:5432",)}, Refused, id="the apex of a wildcard"),
        pytest.param({"mode": "open", "allow_tcp": ("git.test:22",)}, InvalidRequest, id="ports with open"),
        pytest.param({"mode": "none", "allow_tcp": ("git.test:22",)}, InvalidRequest, id="ports with none"),
    ],
)  # fmt: skip
def test_other_ports(asked: dict[str, Any], expected: Network | type[ApiError]) -> None:
    if isinstance(expected, Network):
        assert network(NetworkRequest(**asked), SSH) == expected
    else:
        with pytest.raises(expected):
            network(NetworkRequest(**asked), SSH)


def test_a_refusal_names_the_rule() -> None:
    with pytest.raises(Refused, match=r"x\.test is neither .* \(network\.may_allow in its policy\)"):
        network(NetworkRequest(allow=("x.test",)), SSH)
    with pytest.raises(Refused, match=r"x\.test:1 is neither .* \(network\.may_allow_tcp in its policy\)"):
        network(NetworkRequest(allow_tcp=("x.test:1",)), SSH)


ONLY = replace(WIDE, default_network=Network("allowlist", ("a.test",), ("bad.test",), ("git.test:22",)))


@pytest.mark.parametrize(
    ("had", "rules", "left"),
    [
        pytest.param(Network("none"), OPEN, Network("none"), id="none stays none"),
        pytest.param(Network("allowlist", ("a.test",)), OPEN, Network("allowlist", ("a.test",)), id="still permitted"),
        pytest.param(Network("allowlist", ("a.test",)), Policy(), Network("none"), id="no network any more"),
        pytest.param(Network("open"), Policy(), Network("none"), id="nor for open"),
        pytest.param(Network("open", None, ("x.test",)), OPEN, Network("open", None, ("x.test",)), id="open stays"),
        pytest.param(
            Network("open", None, ("x.test",)), ONLY,
            Network("allowlist", ("a.test",), ("bad.test", "x.test"), ("git.test:22",)),
            id="open under a ceiling becomes the default, less what it denied",
        ),
        pytest.param(
            Network("allowlist", ("a.test", "gone.test", "x.wide.test"), (), ("git.test:22", "gone.test:22")), ONLY,
            Network("allowlist", ("a.test", "x.wide.test"), ("bad.test",), ("git.test:22",)),
            id="names that are no longer offered go",
        ),
        pytest.param(
            Network("allowlist", ("*.test",)), ONLY,
            Network("allowlist", ("*.wide.test", "a.test", "exact.test"), ("bad.test",)),
            id="a wildcard shrinks to what is offered below it",
        ),
        pytest.param(
            Network("allowlist", ("*.test",)), OPEN, Network("allowlist", ("*.test",)), id="and stays as it is below *"
        ),
        pytest.param(Network("allowlist", ("gone.test",)), ONLY, Network("none"), id="nothing left is none"),
    ],
)  # fmt: skip
def test_what_a_stricter_policy_leaves(had: Network, rules: Policy, left: Network) -> None:
    assert narrowed(had, rules) == left
    assert narrowed(left, rules) == left


@pytest.mark.parametrize(
    ("rule", "by", "name", "port", "flag"),
    [
        ("not-listed", "tls", "x.wide.test", 443, "--allow x.wide.test"),
        ("not-listed", "dns", "x.wide.test", 0, "--allow x.wide.test"),
        ("not-listed", "dns", "x.wide.test", 53, "--allow x.wide.test"),
        ("port", "address", "db.wide.test", 5432, "--allow-tcp db.wide.test:5432"),
        ("not-listed", "tls", "other.test", 443, ""),
        ("not-listed", "address", "db.wide.test", 5433, ""),
        ("deny-list", "tls", "x.wide.test", 443, ""),
        ("address", "tls", "", 443, ""),
        ("private-address", "http", "a.test", 80, ""),
        ("something new", "http", "a.test", 80, ""),
    ],
)
def test_what_would_allow_it_or_why_nothing_can(rule: str, by: str, name: str, port: int, flag: str) -> None:
    found, why = remedy(rule, by, name, port, SSH)
    assert found == flag
    assert bool(why) == (not flag and rule != "something new")


def test_every_rule_that_no_flag_helps_against_says_why() -> None:
    assert set(egress.RULES) - {"not-listed", "port"} <= NO_REMEDY.keys()


def test_a_sandboxs_network_is_what_egress_is_told() -> None:
    told = enforced(Network("allowlist", ("a.test",), ("b.test",), ("c.test:22",)), replace(SSH, private=("p.test",)))
    assert told == egress.Policy(egress.Mode.ALLOWLIST, ("a.test",), ("b.test",), ("c.test:22",), ("p.test",))
    assert enforced(Network("open", None, ("b.test",)), SSH) == egress.Policy(egress.Mode.OPEN, (), ("b.test",))
    assert enforced(Network("none"), SSH) == egress.Policy(egress.Mode.NONE)


def test_the_built_in_policy_and_what_is_left_without_a_network() -> None:
    policy = with_network(built_in(["registry.test"]))
    assert policy.ceiling == policy.default_network.mode == "allowlist"
    assert {"registry.test", *BASELINE} == set(policy.default_network.allow or ())
    assert (policy.may_allow, policy.may_allow_tcp, policy.private) == (("*",), ("*",), ("registry.test",))
    assert policy.capabilities >= {"egress_allowlist", "egress_open", "egress_tcp", "network_policy_update"}
    assert without_network(built_in(["registry.test"], ["other.test:8443"])) == Policy()


@pytest.mark.parametrize(
    ("most", "lost"),
    [
        (64, []),
        (48, ["limits.max_cpus is 48 instead of 64"]),
        (32, ["limits.max_cpus is 32 instead of 64", "defaults.cpus is 32 instead of 40"]),
    ],
)
def test_what_is_left_where_a_machine_has_fewer_processors(most: int, lost: list[str]) -> None:
    asked = replace(built_in([]), limits=Limits(max_cpus=64), cpus=40)
    left = with_cpus(asked, most)
    assert differences(asked, left) == lost
    assert resolve(CreateRequest(), left).cpus == min(40, most)
    with pytest.raises(InvalidRequest, match=f"cpus must be between 0 and {most}"):
        resolve(CreateRequest(cpus=most + 0.5), left)


def test_the_registries_are_said_apart_from_the_names_that_are_allowed() -> None:
    policy = built_in(["b.test", "a.test"], ["c.test:8443"])
    assert (policy.registries, policy.registries_tcp) == (("a.test", "b.test"), ("c.test:8443",))


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [("/", "/"), ("//", "/"), ("/a//b/./c/", "/a/b/c"), ("/ü", "/ü"), ("/..a/b..", "/..a/b.."), ("/\udcff", "/\udcff")],
)
def test_guest_paths(text: str, cleaned: str) -> None:
    assert fields.guest_path("path", text) == cleaned


@pytest.mark.parametrize("text", ["sandbox/checkpoint", "a", "A.b-c_d/e", "1" * 200])
def test_branches(text: str) -> None:
    assert fields.branch("branch", text) == text


@pytest.mark.parametrize(
    "text", ["", "-a", "/a", "a//b", "a..b", "a.lock", "a/", "a.", "a b", "a" * 201, "a\n", "@{-1}"]
)
def test_what_is_no_branch(text: str) -> None:
    with pytest.raises(InvalidRequest):
        fields.branch("branch", text)


@pytest.mark.parametrize("value", ["a\x00b", "\ud800"])
def test_an_environment_value_is_in_no_message(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        fields.check_env({"NAME": f"CANARY{value}"})
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
