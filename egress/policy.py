"""Whether a guest may reach a name: the one place that says yes.

In: a policy (from sandboxd, checked here, names in normal form) and an `Ask` (a name that stood on the wire, as
`wire_name` returned it, a port, and where the name was read). Out: `Allow` or `Deny`, with the rule that decided and
a sentence for a person. DNS and the proxy both ask here. Nothing is resolved, opened or remembered.

Names come in two ways and are held to two standards. A policy's names are typed by people: `normal` takes them in
any case, with one trailing dot, international, and explains what is wrong with the rest. A guest's names are bytes:
`wire_name` takes what a resolver would look up as a host name and nothing that could be read as an address, by
anybody's parser (inet_aton reads "2130706433", "0x7f.1" and "0177.1" as 127.0.0.1).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_NAME: Final = 253                   # RFC 1035 §3.1, as text without the trailing dot
WEB_PORTS: Final = (80, 443)            # decided by `allow`; every other port by `allow_tcp`
DNS_PORT: Final = 53                    # answered here, whoever was asked

_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_WIRE: Final = re.compile(_HOST.pattern.encode())
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_NUMBER_WIRE: Final = re.compile(rb"[0-9.]+|0x[0-9a-f.]*|(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)", re.IGNORECASE)
_SHOWN: Final = re.compile(rb"[0-9A-Za-z.:\[\]%_-]{1,64}")
_PORT: Final = re.compile(r"[1-9][0-9]{0,4}")


class Mode(Enum):
    NONE = "none"
    ALLOWLIST = "allowlist"
    OPEN = "open"


class By(Enum):
    """Where the name was read."""

    DNS = "dns"
    TLS = "tls"
    HTTP = "http"
    CONNECT = "connect"
    ADDRESS = "address"     # no name on the wire: the one the dialled address was given for, or none


@dataclass(frozen=True, slots=True)
class Ask:
    name: str               # normal form; "" where there is none
    port: int
    by: By


@dataclass(frozen=True, slots=True)
class Allow:
    rule: str               # "allow *.example.com", "allow_tcp example.com:22", "mode open"
    private: bool           # may resolve to private addresses


@dataclass(frozen=True, slots=True)
class Deny:
    rule: str               # one of RULES
    why: str                # one sentence for a person


RULES: Final = (
    "not-listed", "deny-list", "no-name", "address", "port", "mode-none", "not-redirected", "names-disagree",
    "malformed", "private-address", "unresolved", "too-many-names", "unreachable",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Policy:
    mode: Mode
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    allow_tcp: tuple[str, ...] = ()     # "host:port"
    private: tuple[str, ...] = ()       # may resolve to private addresses; the operator's alone

    def __post_init__(self) -> None:
        for field in ("allow", "deny", "allow_tcp", "private"):
            form = normal_tcp if field == "allow_tcp" else normal
            for position, entry in enumerate(getattr(self, field)):
                if not entry.isascii():         # never normal; and what would say so cannot be loaded when confined
                    raise ValueError(f"{field}[{position}]: {entry!r} is not in normal form")
                try:
                    right = form(entry)
                except ValueError as fault:
                    raise ValueError(f"{field}[{position}]: {fault}") from None
                if right != entry:
                    raise ValueError(f"{field}[{position}]: {entry!r} is not in normal form, which is {right!r}")

    def as_json(self) -> dict[str, object]:
        return {
            "mode": self.mode.value,
            "allow": list(self.allow),
            "deny": list(self.deny),
            "allow_tcp": list(self.allow_tcp),
            "private": list(self.private),
        }

    @classmethod
    def from_json(cls, value: object) -> Policy:
        if not isinstance(value, dict):
            raise ValueError("policy: not an object")
        if odd := sorted(str(key) for key in value if key not in cls.__slots__):
            raise ValueError(f"{odd[0]}: unknown")
        mode = value.get("mode")
        if not isinstance(mode, str) or mode not in (m.value for m in Mode):
            raise ValueError("mode: not none, allowlist or open")
        return cls(Mode(mode), *(_texts(value, key) for key in ("allow", "deny", "allow_tcp", "private")))


def _texts(value: Mapping[object, object], key: str) -> tuple[str, ...]:
    entries = value.get(key, [])
    if not isinstance(entries, list):
        raise ValueError(f"{key}: not a list")
    for position, entry in enumerate(entries):
        if not isinstance(entry, str):
            raise ValueError(f"{key}[{position}]: not a string")
    return tuple(entries)


class Decider:
    """A policy made ready for many questions."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._allow = _Names(policy.allow)
        self._deny = _Names(policy.deny)
        self._private = _Names(policy.private)
        hosts: dict[int, list[str]] = {}
        for entry in policy.allow_tcp:
            host, _, port = entry.rpartition(":")
            hosts.setdefault(int(port), []).append(host)
        self._tcp = {port: _Names(names) for port, names in hosts.items()}

    def decide(self, ask: Ask) -> Allow | Deny:
        name, port, mode = ask.name, ask.port, self.policy.mode
        if mode is Mode.NONE:
            return Deny("mode-none", "This sandbox has no network.")
        if not name:
            return self._nameless(ask)
        if entry := self._deny.covering(name):
            return Deny("deny-list", f"{name} is refused by the entry {entry} of the deny list.")
        private = self._private.covering(name) is not None
        if mode is Mode.OPEN:
            return Allow("mode open", private)
        if port in WEB_PORTS:
            entry = self._allow.covering(name)
            return Allow(f"allow {entry}", private) if entry else self._unlisted(name, port)
        names = self._tcp.get(port)
        entry = names.covering(name) if names else None
        return Allow(f"allow_tcp {entry}:{port}", private) if entry else self._unlisted(name, port)

    def answers(self, name: str) -> Allow | Deny:
        """Whether DNS gives the name an address: it is allowed on some port."""
        if self.policy.mode is Mode.ALLOWLIST and not self._allow.covering(name):
            for port in self._tcp:
                verdict = self.decide(Ask(name, port, By.DNS))
                if isinstance(verdict, Allow):
                    return verdict
        return self.decide(Ask(name, WEB_PORTS[-1], By.DNS))

    def _nameless(self, ask: Ask) -> Allow | Deny:
        if self.policy.mode is Mode.OPEN and ask.by is By.ADDRESS:
            if not self.policy.deny:
                return Allow("mode open", False)
            return Deny("no-name", "The connection names no host, so it cannot be held against the deny list.")
        if ask.by is By.ADDRESS:
            return Deny("address", "The connection was made to an address that was not given for any name.")
        return Deny("no-name", "The connection names no host, and only names are allowed.")

    def _unlisted(self, name: str, port: int) -> Deny:
        if port not in WEB_PORTS:
            if self._allow.covering(name) or any(names.covering(name) for names in self._tcp.values()):
                return Deny("port", f"{name} is allowed, but not on port {port}.")
            return Deny("not-listed", f"{name}:{port} is not in this sandbox's list of allowed hosts and ports.")
        why = f"{name} is not in this sandbox's list of allowed names."
        for parent in _parents(name):
            if parent in self._allow.exact:
                return Deny("not-listed", f"{why[:-1]}; {parent} is, but subdomains are not implied.")
        if name in self._allow.suffixes:
            return Deny("not-listed", f"{why[:-1]}; *.{name} is, but it covers the names below {name} only.")
        if any(names.covering(name) for names in self._tcp.values()):
            return Deny("port", f"{name} is allowed, but not on port {port}.")
        return Deny("not-listed", why)


class _Names:
    """Patterns, looked up by the name and its parents: as quick with thousands as with one."""

    def __init__(self, patterns: Iterable[str]) -> None:
        patterns = tuple(patterns)
        self.exact = frozenset(p for p in patterns if not p.startswith("*."))
        self.suffixes = frozenset(p[2:] for p in patterns if p.startswith("*."))

    def covering(self, name: str) -> str | None:
        if name in self.exact:
            return name
        if self.suffixes:
            for parent in _parents(name):
                if parent in self.suffixes:
                    return "*." + parent
        return None


def _parents(name: str) -> Iterable[str]:
    dot = name.find(".")
    while dot >= 0:
        name = name[dot + 1 :]
        yield name
        dot = name.find(".")


def covers(pattern: str, name: str) -> bool:
    """Whether a `may_allow` entry permits a requested one, which may be a wildcard itself."""
    if pattern == "*" or pattern == name:
        return True
    if not pattern.startswith("*."):
        return False
    # "*.a.test" lies within "*.test"; it does not lie within "*.b.a.test" and is not the name "a.test".
    return name.removeprefix("*.").endswith(pattern[1:])


def remedy(rule: str, name: str, port: int) -> str:
    """The command line's flag that would allow it; "" where no flag does."""
    if not name or port == DNS_PORT or rule not in ("not-listed", "port"):
        return ""
    return f"--allow {name}" if port in WEB_PORTS else f"--allow-tcp {name}:{port}"


def unnamed(raw: bytes) -> Deny:
    """Why a name on the wire, for which `wire_name` had none, is refused."""
    if not raw:
        return Deny("no-name", "The connection names no host, and only names are allowed.")
    bare = raw[:-1] if raw.endswith(b".") else raw
    if bare[:1] == b"[" or b":" in bare or _NUMBER_WIRE.fullmatch(bare):
        shown = f", {raw.decode('ascii')}," if _SHOWN.fullmatch(raw) else ""
        return Deny("address", f"The connection names an address{shown} and only names are allowed.")
    return Deny("malformed", "What stands where a host name belongs is not one.")


def wire_name(raw: bytes) -> str | None:
    if len(raw) > MAX_NAME + 1:
        return None
    name = raw.lower()
    if name.endswith(b"."):
        name = name[:-1]
    if len(name) > MAX_NAME or not _WIRE.fullmatch(name):
        return None
    text = name.decode("ascii")
    # A last label that is a number makes the whole an address to inet_aton and to browsers (WHATWG URL §3.5).
    return None if _NUMBER.fullmatch(text.rpartition(".")[2]) else text


def normal(text: str) -> str:
    """A policy's name in the form it is kept, shown and compared in. ValueError says what is wrong with it."""
    wildcard = text.startswith("*.")
    name = text[2:] if wildcard else text
    if not name or text == "*":
        raise ValueError(f"{text!r} is not a name")
    if "*" in name:
        raise ValueError(f"{text!r}: a wildcard is '*.' and a whole name behind it, nothing else")
    if "/" in name or "@" in name or "?" in name or "#" in name:
        raise ValueError(f"{text!r} looks like a URL; only the host name is wanted")
    if "[" in name or name.count(":") > 1:
        raise ValueError(f"{text!r} is an address; only names can be listed")
    if ":" in name:
        raise ValueError(f"{text!r} has a port; names are listed without one (other ports: allow_tcp)")
    if any(c.isspace() or not c.isprintable() for c in name):
        raise ValueError(f"{text!r} contains blanks or control characters")
    name = name.lower() if name.isascii() else _a_labels(text, name)
    name = name.removesuffix(".")
    if len(name) > MAX_NAME:
        raise ValueError(f"{text!r} is longer than {MAX_NAME} characters")
    if not _HOST.fullmatch(name):
        raise ValueError(f"{text!r} is not a host name: letters, digits, '-' and '_' in labels of 1 to 63 characters")
    if _NUMBER.fullmatch(name.rpartition(".")[2]):
        raise ValueError(f"{text!r} is an address, or would be taken for one; only names can be listed")
    return "*." + name if wildcard else name


def _a_labels(text: str, name: str) -> str:
    import idna  # here, because it costs 20 ms and 4 MB, and nearly no policy has an international name

    try:
        return idna.encode(name, uts46=True).decode("ascii")
    except idna.IDNAError as fault:
        raise ValueError(f"{text!r} is not an international name: {fault}") from None


def normal_tcp(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not _PORT.fullmatch(port) or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT with a port from 1 to 65535")
    if int(port) in WEB_PORTS:
        raise ValueError(f"{text!r}: ports 80 and 443 are decided by allow; list the name there")
    if int(port) == DNS_PORT:
        raise ValueError(f"{text!r}: a sandbox's questions to port 53 are answered here and go to nobody")
    return f"{normal(host)}:{port}"
