"""The request guard (API §1.1): what is refused before any handler sees it, and in which order. Pure.

In: a request's head from anybody who could connect, a browser's page included. Out: its route, or the `ApiError` it is
answered with. Host and Origin come before the token, so that a page learns nothing of it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sandboxd.credentials import Tokens
from sandboxd.errors import (
    BodyTooLarge,
    ForbiddenOrigin,
    InvalidRequest,
    MediaTypeRefused,
    NotFound,
    Unauthorized,
)  # fmt: skip
from sandboxd.routes import table

_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?\Z")
_ORIGIN = re.compile(r"https?://(?P<host>[^/?#@\s]+)\Z")
_BEARER = re.compile(rb"(?i:bearer) +([\x21-\x7e]+)\Z")

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that has passed. `token` is which one it showed, None where none is asked for. The headers do not hold
    it any more."""

    route: table.Route
    path: dict[str, str]
    query: list[tuple[str, str]]
    headers: dict[bytes, bytes]
    token: int | None


def admit(
    method: str, target: str, headers: Headers, length: int | None, allowed_hosts: frozenset[str], tokens: Tokens
) -> Admitted:
    """`headers` have lower-case names; `length` is None where the body does not say it. Raises `ApiError`."""
    check_origin(target, headers, allowed_hosts)
    path, _, query = target.partition("?")
    found = table.match(method, path)
    token = None
    if tokens and not (found and found[0].name == "health"):
        token = check_token(headers, tokens)
    if found is None:
        raise NotFound("no such endpoint")
    route, segments = found
    given = dict(headers)
    given.pop(b"authorization", None)
    if length != 0:
        media_type = given.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
        if media_type != route.body.media_type:
            raise MediaTypeRefused(f"the body must be {route.body.media_type}")
    if length is not None and length > route.body.cap:
        raise too_large(route.body)
    return Admitted(route, segments, table.query(query), given, token)


def body_length(version: bytes, headers: Headers) -> int | None:
    """A body's announced length; None where it is chunked. Raises `InvalidRequest` where the head can be read in two
    ways: whoever stands between reads it in the other one (RFC 9112, 6.1 and 11.2)."""
    lengths = [value for name, value in headers if name == b"content-length"]
    if any(name == b"transfer-encoding" for name, _ in headers):
        if lengths:
            raise InvalidRequest("a request has Content-Length or Transfer-Encoding, not both")
        if version < b"1.1":
            raise InvalidRequest("Transfer-Encoding needs HTTP/1.1")
        return None
    return int(lengths[0]) if lengths else 0


def too_large(body: table.Body) -> InvalidRequest:
    kind = InvalidRequest if body is table.Body.JSON else BodyTooLarge
    return kind(f"the body is larger than {body.cap >> 20} MiB")


def check_origin(target: str, headers: Headers, allowed_hosts: frozenset[str]) -> None:
    """Steps 1 and 2. A page that had its name rebound to this machine has a foreign Host; another has an
    Origin."""
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
    if not target.startswith("/") or len(hosts) != 1 or not is_local(hosts[0], allowed_hosts):
        raise ForbiddenOrigin("the request is not addressed to this server")
    for origin in origins:
        parts = _ORIGIN.match(origin)
        if parts is None or parts["host"].lower() != hosts[0].lower():
            raise ForbiddenOrigin("requests of other origins are refused")


def is_local(host: str, allowed_hosts: frozenset[str]) -> bool:
    """Whether a Host header names this machine, or a name or address the operator allowed."""
    parts = _HOST.match(host)
    if parts is None:
        return False
    name = (parts["v6"] or parts["name"]).lower()
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return parts["v6"] is None and name in allowed_hosts
    return (address.version == 6) == (parts["v6"] is not None) and (
        address.is_loopback or str(address) in allowed_hosts
    )


def check_token(headers: Headers, tokens: Tokens) -> int:
    """Step 3: exactly one Authorization header, with one of the tokens."""
    given = [value for name, value in headers if name == b"authorization"]
    found = None
    if len(given) == 1 and (parts := _BEARER.match(given[0])):
        found = tokens.find(parts[1])
    if found is None:
        raise Unauthorized("this needs one of the server's tokens, in the header Authorization: Bearer TOKEN")
    return found
