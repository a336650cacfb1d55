"""Whether a name is allowed, and what counts as a name at all."""

from __future__ import annotations

import socket

import pytest

from egress.policy import (
    RULES,
    Allow,
    Ask,
    By,
    Decider,
    Deny,
    Mode,
    Policy,
    covers,
    normal,
    normal_tcp,
    remedy,
    unnamed,
    wire_name,
)


def decide(policy: Policy, name: str, port: int = 443, by: By = By.TLS) -> str:
    verdict = Decider(policy).decide(Ask(name, port, by))
    assert isinstance(verdict, Allow) or verdict.rule in RULES
    return verdict.rule


LISTED = Policy(
    Mode.ALLOWLIST,
    allow=("allowed.test", "*.wide.test"),
    deny=("bad.wide.test", "*.worse.wide.test"),
    allow_tcp=("git.test:22", "*.db.test:5432", "bad.wide.test:22"),
    private=("allowed.test",),
)


@pytest.mark.parametrize(
    ("name", "port", "rule"),
    [
        pytest.param("allowed.test", 443, "allow allowed.test", id="a listed name"),
        pytest.param("allowed.test", 80, "allow allowed.test", id="a listed name, plain"),
        pytest.param("a.wide.test", 443, "allow *.wide.test", id="below a wildcard"),
        pytest.param("a.b.c.wide.test", 443, "allow *.wide.test", id="far below a wildcard"),
        pytest.param("wide.test", 443, "not-listed", id="a wildcard's apex"),
        pytest.param("xwide.test", 443, "not-listed", id="a wildcard has a label boundary"),
        pytest.param("notallowed.test", 443, "not-listed", id="a name that ends like a listed one"),
        pytest.param("xallowed.test", 443, "not-listed", id="one letter more"),
        pytest.param("allowed.test.other.test", 443, "not-listed", id="a name that begins like a listed one"),
        pytest.param("sub.allowed.test", 443, "not-listed", id="a subdomain of a listed name"),
        pytest.param("bad.wide.test", 443, "deny-list", id="deny beats allow"),
        pytest.param("x.worse.wide.test", 443, "deny-list", id="a denied wildcard beats an allowed one"),
        pytest.param("worse.wide.test", 443, "allow *.wide.test", id="a denied wildcard's apex"),
        pytest.param("bad.wide.test", 22, "deny-list", id="deny is for every port"),
        pytest.param("git.test", 22, "allow_tcp git.test:22", id="a listed host and port"),
        pytest.param("git.test", 23, "port", id="a listed host, another port"),
        pytest.param("git.test", 443, "port", id="a host listed for another port only"),
        pytest.param("a.db.test", 5432, "allow_tcp *.db.test:5432", id="a wildcard with a port"),
        pytest.param("allowed.test", 22, "port", id="an allowed name, a port that is not"),
        pytest.param("other.test", 22, "not-listed", id="neither name nor port"),
        pytest.param("", 443, "no-name", id="no name"),
    ],
)
def test_an_allowlist_decides_by_the_name(name: str, port: int, rule: str) -> None:
    assert decide(LISTED, name, port) == rule


@pytest.mark.parametrize(
    ("policy", "name", "by", "rule"),
    [
        pytest.param(Policy(Mode.NONE), "allowed.test", By.TLS, "mode-none", id="none: a name"),
        pytest.param(Policy(Mode.NONE), "", By.ADDRESS, "mode-none", id="none: an address"),
        pytest.param(Policy(Mode.OPEN), "other.test", By.TLS, "mode open", id="open: any name"),
        pytest.param(Policy(Mode.OPEN), "", By.ADDRESS, "mode open", id="open: an address"),
        pytest.param(Policy(Mode.OPEN), "", By.TLS, "no-name", id="open: no name where one was looked for"),
        pytest.param(Policy(Mode.OPEN, deny=("x.test",)), "x.test", By.TLS, "deny-list", id="open: a denied name"),
        pytest.param(Policy(Mode.OPEN, deny=("x.test",)), "y.test", By.TLS, "mode open", id="open: another name"),
        pytest.param(Policy(Mode.OPEN, deny=("x.test",)), "", By.ADDRESS, "no-name", id="open, denials: an address"),
        pytest.param(LISTED, "", By.ADDRESS, "address", id="allowlist: an address"),
    ],
)
def test_the_mode_decides_first(policy: Policy, name: str, by: By, rule: str) -> None:
    assert decide(policy, name, 443, by) == rule


def test_only_names_listed_as_private_may_be_private() -> None:
    decider = Decider(LISTED)
    private = {name: decider.decide(Ask(name, 443, By.TLS)) for name in ("allowed.test", "a.wide.test")}
    assert private["allowed.test"] == Allow("allow allowed.test", True)
    assert private["a.wide.test"] == Allow("allow *.wide.test", False)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        pytest.param("sub.allowed.test", "subdomains are not implied", id="below a listed name"),
        pytest.param("wide.test", "names below wide.test only", id="the apex of a wildcard"),
    ],
)
def test_a_near_miss_says_what_missed(name: str, hint: str) -> None:
    verdict = Decider(LISTED).decide(Ask(name, 443, By.TLS))
    assert isinstance(verdict, Deny) and hint in verdict.why and name in verdict.why


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("allowed.test", "allow allowed.test"),
        ("git.test", "allow_tcp git.test:22"),
        ("x.db.test", "allow_tcp *.db.test:5432"),
        ("bad.wide.test", "deny-list"),
        ("other.test", "not-listed"),
    ],
)
def test_dns_answers_what_is_allowed_on_some_port(name: str, rule: str) -> None:
    assert Decider(LISTED).answers(name).rule == rule


def test_dns_in_the_other_modes() -> None:
    assert Decider(Policy(Mode.NONE)).answers("allowed.test").rule == "mode-none"
    assert Decider(Policy(Mode.OPEN, deny=("x.test",))).answers("x.test").rule == "deny-list"
    assert Decider(Policy(Mode.OPEN)).answers("x.test").rule == "mode open"


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        pytest.param("Allowed.Test", "allowed.test", id="case"),
        pytest.param("allowed.test.", "allowed.test", id="one trailing dot"),
        pytest.param("*.Wide.Test.", "*.wide.test", id="a wildcard"),
        pytest.param("bücher.test", "xn--bcher-kva.test", id="international"),
        pytest.param("*.BÜCHER.test.", "*.xn--bcher-kva.test", id="an international wildcard"),
        pytest.param("xn--bcher-kva.test", "xn--bcher-kva.test", id="international in its wire form"),
        pytest.param("b\u0430nk.test", "xn--bnk-6cd.test", id="a look-alike stays apart"),
        pytest.param("_srv.allowed.test", "_srv.allowed.test", id="an underscore"),
        pytest.param("localhost", "localhost", id="a single label"),
    ],
)
def test_a_policys_name_is_kept_in_one_form(typed: str, kept: str) -> None:
    assert normal(typed) == kept
    assert normal(kept) == kept


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        pytest.param("", "not a name", id="nothing"),
        pytest.param("*", "not a name", id="a bare star"),
        pytest.param("*.", "not a name", id="a star and a dot"),
        pytest.param("a.*.test", "wildcard", id="a star inside"),
        pytest.param("*a.test", "wildcard", id="a star in a label"),
        pytest.param("*.*.test", "wildcard", id="two stars"),
        pytest.param("https://a.test", "URL", id="a URL"),
        pytest.param("a.test/x", "URL", id="a path"),
        pytest.param("alice@a.test", "URL", id="a user name"),
        pytest.param("a.test:443", "port", id="a port"),
        pytest.param("127.0.0.1", "address", id="an IPv4 address"),
        pytest.param("2130706433", "address", id="an address as one number"),
        pytest.param("0x7f.1", "address", id="an address in parts"),
        pytest.param("0177.0.0.1", "address", id="an octal address"),
        pytest.param("a.0x7f", "address", id="a last label that is a number"),
        pytest.param("::1", "address", id="an IPv6 address"),
        pytest.param("[::1]", "address", id="one in brackets"),
        pytest.param("a..test", "not a host name", id="an empty label"),
        pytest.param("a.test..", "not a host name", id="two trailing dots"),
        pytest.param(".a.test", "not a host name", id="a leading dot"),
        pytest.param("a b.test", "blanks", id="a blank"),
        pytest.param("a.test\n", "control", id="a line end"),
        pytest.param("-a.test", "not a host name", id="a leading hyphen"),
        pytest.param("a" * 64 + ".test", "not a host name", id="a label of 64"),
        pytest.param(".".join(["a" * 60] * 5), "longer", id="a name of 304"),
        pytest.param("１２７.0.0.1", "address", id="an address in full-width digits"),
        pytest.param("a。。b.test", "international", id="empty labels by another dot"),
        pytest.param("\u2603\ufe0f\u0000.test", "control", id="control characters"),
    ],
)
def test_a_policys_name_is_refused_with_the_reason(typed: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        normal(typed)


def test_hosts_with_ports() -> None:
    assert normal_tcp("Git.Test.:22") == "git.test:22"
    assert normal_tcp("*.DB.test:5432") == "*.db.test:5432"
    for typed in ("git.test", "git.test:", "git.test:0", "git.test:65536", "git.test:022", "git.test:+2", ":22"):
        with pytest.raises(ValueError):
            normal_tcp(typed)
    for typed in ("10.0.0.1:22", "[::1]:22", "git.test:443", "git.test:80", "git.test:53", "*:22"):
        with pytest.raises(ValueError):
            normal_tcp(typed)


@pytest.mark.parametrize(
    ("pattern", "name", "covered"),
    [
        ("*", "a.test", True),
        ("*", "*.a.test", True),
        ("a.test", "a.test", True),
        ("a.test", "*.a.test", False),
        ("a.test", "b.a.test", False),
        ("*.a.test", "b.a.test", True),
        ("*.a.test", "a.test", False),
        ("*.a.test", "xa.test", False),
        ("*.a.test", "*.a.test", True),
        ("*.a.test", "*.b.a.test", True),
        ("*.b.a.test", "*.a.test", False),
        ("*.a.test", "*.xa.test", False),
    ],
)
def test_what_may_be_asked_for_is_no_broader_than_what_may_be_given(pattern: str, name: str, covered: bool) -> None:
    assert covers(pattern, name) is covered


NAMES = [
    pytest.param(b"allowed.test", "allowed.test", id="a name"),
    pytest.param(b"ALLOWED.test", "allowed.test", id="case"),
    pytest.param(b"allowed.test.", "allowed.test", id="one trailing dot"),
    pytest.param(b"_dmarc.allowed.test", "_dmarc.allowed.test", id="an underscore"),
    pytest.param(b"a", "a", id="one letter"),
    pytest.param(b"3.a.test", "3.a.test", id="a first label that is a number"),
    pytest.param(b"0x7f.test", "0x7f.test", id="a first label that looks like one"),
    pytest.param(b".".join([b"a" * 49] * 5) + b".ab.", ".".join(["a" * 49] * 5) + ".ab", id="253 and a dot"),
]
NO_NAMES = [
    pytest.param(b"", "no-name", id="nothing"),
    pytest.param(b".", "malformed", id="a dot"),
    pytest.param(b"allowed.test..", "malformed", id="two trailing dots"),
    pytest.param(b".allowed.test", "malformed", id="a leading dot"),
    pytest.param(b"allowed.test\0.other.test", "malformed", id="an embedded NUL"),
    pytest.param(b"allowed.test%00", "malformed", id="an escaped NUL"),
    pytest.param(b"*", "malformed", id="a star"),
    pytest.param(b"*.allowed.test", "malformed", id="a wildcard"),
    pytest.param("bücher.test".encode(), "malformed", id="raw UTF-8"),
    pytest.param(b"b\xfccher.test", "malformed", id="raw Latin-1"),
    pytest.param(b"a" * 300, "malformed", id="300 bytes"),
    pytest.param(b"a" * 64 + b".test", "malformed", id="a label of 64"),
    pytest.param(b"-a.test", "malformed", id="a leading hyphen"),
    pytest.param(b"allowed.test\n", "malformed", id="a line end"),
    pytest.param(b" allowed.test", "malformed", id="a blank"),
    pytest.param(b"alice@allowed.test", "malformed", id="a user name"),
    pytest.param(b"127.0.0.1", "address", id="an address"),
    pytest.param(b"127.0.0.1.", "address", id="an address with a dot"),
    pytest.param(b"127.1", "address", id="an address of two parts"),
    pytest.param(b"2130706433", "address", id="an address as one number"),
    pytest.param(b"0x7f000001", "address", id="one as a hexadecimal number"),
    pytest.param(b"0X7F.1", "address", id="one in mixed parts"),
    pytest.param(b"0177.0.0.1", "address", id="one in octal"),
    pytest.param(b"0x", "address", id="a number without digits"),
    pytest.param(b"allowed.127", "address", id="a last label that is a number"),
    pytest.param(b"[::1]", "address", id="IPv6 in brackets"),
    pytest.param(b"::1", "address", id="IPv6 without"),
    pytest.param(b"[::ffff:7f00:1]", "address", id="IPv4-mapped"),
    pytest.param(b"[allowed.test]", "address", id="a name in brackets"),
    pytest.param(b"fe80::1%eth0", "address", id="with a scope"),
]


@pytest.mark.parametrize(("raw", "name"), NAMES)
def test_names_on_the_wire(raw: bytes, name: str) -> None:
    assert wire_name(raw) == name


@pytest.mark.parametrize(("raw", "rule"), NO_NAMES)
def test_what_is_no_name_on_the_wire(raw: bytes, rule: str) -> None:
    assert wire_name(raw) is None
    assert unnamed(raw).rule == rule


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"45.90.7.2", "an address, 45.90.7.2, and"),
        (b"[::ffff:7f00:1]", "an address, [::ffff:7f00:1], and"),
        (b"fe80::1%eth0", "an address, fe80::1%eth0, and"),
        (b"[\x1b[2J]", "an address and"),
        (b"[" + b"1" * 200, "an address and"),
    ],
)
def test_an_address_is_named_where_it_can_be_shown(raw: bytes, shown: str) -> None:
    assert shown in unnamed(raw).why


@pytest.mark.parametrize("text", ["127.1", "2130706433", "0177.0.0.1", "0x7f000001", "0x7f.1", "1.2.3.0x4", "017"])
def test_nothing_that_the_c_library_reads_as_an_address_is_a_name(text: str) -> None:
    assert socket.inet_aton(text)       # it does
    assert wire_name(text.encode()) is None
    with pytest.raises(ValueError):
        normal(text)


def test_a_policy_goes_over_the_wire_and_back() -> None:
    assert Policy.from_json(LISTED.as_json()) == LISTED
    assert Policy.from_json({"mode": "open"}) == Policy(Mode.OPEN)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        pytest.param([], "policy", id="not an object"),
        pytest.param({}, "mode", id="no mode"),
        pytest.param({"mode": "ajar"}, "mode", id="a mode there is not"),
        pytest.param({"mode": ["open"]}, "mode", id="a mode of another type"),
        pytest.param({"mode": "open", "extra": 1}, "extra", id="an unknown field"),
        pytest.param({"mode": "open", "deny": "a.test"}, "deny", id="a string for a list"),
        pytest.param({"mode": "open", "deny": ["a.test", 3]}, r"deny\[1\]", id="a number for a name"),
        pytest.param({"mode": "allowlist", "allow": ["A.test"]}, r"allow\[0\].*normal form", id="another form"),
        pytest.param({"mode": "open", "deny": ["bücher.test"]}, r"deny\[0\].*normal form", id="an international name"),
        pytest.param({"mode": "allowlist", "allow": ["10.0.0.1"]}, r"allow\[0\]", id="an address"),
        pytest.param({"mode": "allowlist", "allow_tcp": ["a.test"]}, r"allow_tcp\[0\]", id="no port"),
        pytest.param({"mode": "allowlist", "private": ["*"]}, r"private\[0\]", id="a bare star"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused_with_its_path(value: object, path: str) -> None:
    with pytest.raises(ValueError, match=path):
        Policy.from_json(value)


def test_what_would_allow_it() -> None:
    assert remedy("not-listed", "other.test", 443) == "--allow other.test"
    assert remedy("port", "git.test", 22) == "--allow-tcp git.test:22"
    for rule in ("deny-list", "no-name", "address", "mode-none", "malformed", "private-address"):
        assert remedy(rule, "other.test", 443) == ""
    assert remedy("not-listed", "", 443) == ""
    assert remedy("not-listed", "other.test", 53) == ""
