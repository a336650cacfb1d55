"""Which sandboxd a command speaks to.

In: `--context`, else `SANDBOX_CONTEXT`, else `local`: the person's own socket, then root's. Out: an
`Endpoint` with a `Client` for a socket that answered a connection and is served by the person or by root;
or an error that says what was tried and how to start one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from sandboxd import unixhttp
from sandboxd.client import Client
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

ROOT_SOCKET = "/run/sandboxd/sandboxd.sock"
CONNECT_S = 10.0


class Endpoint(NamedTuple):
    """`name` is the context as it was asked for, `note` what a person should know about the choice."""

    name: str
    client: Client
    note: str


def config_dir() -> str:
    """`$XDG_CONFIG_HOME/sandbox`, else `~/.config/sandbox`."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.config"), "sandbox")


def local_sockets(uid: int, environ: Mapping[str, str]) -> list[str]:
    """Where a sandboxd listens by default: the person's own first, then root's."""
    if uid == 0:
        return [ROOT_SOCKET]
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    own = runtime if os.path.isabs(runtime) else os.path.expanduser("~/.config/sandbox")
    return [os.path.join(own, "sandboxd.sock"), ROOT_SOCKET]


def choose(asked: str | None) -> Endpoint:
    """Find the endpoint, without a request."""
    name = asked or os.environ.get("SANDBOX_CONTEXT") or "local"
    if name == "local":
        return _local()
    if not name.startswith("unix:///"):
        raise SandboxError(
            f"context {clean(name)}: this version knows `local` and `unix:///path/to/sandboxd.sock` only"
        )
    path = name.removeprefix("unix://")
    if why := _refusal(path, by_name=True):
        raise SandboxError(f"no sandboxd at {clean(path)}: {why}")
    return Endpoint(name, Client(path), "")


def _local() -> Endpoint:
    tried: list[str] = []
    for path in local_sockets(os.geteuid(), os.environ):
        why = _refusal(path, by_name=False)
        if not why:
            note = f"using root's sandboxd at {path} ({tried[0]})" if tried else ""
            return Endpoint("local", Client(path), note)
        tried.append(f"{path}: {why}")
    how = "`sandboxd &`" if os.geteuid() == 0 else "`sandboxd &` (or root's, which every command tries next)"
    raise SandboxError(f"no sandboxd is running: {'; '.join(tried)}; start one with {how}")


def _refusal(path: str, *, by_name: bool) -> str:
    """Why this socket cannot be used; empty when it can. Root may name somebody else's socket."""
    try:
        with unixhttp.connect(path, CONNECT_S) as sock:
            served_by = unixhttp.peer_uid(sock)
    except OSError as fault:
        return fault.strerror or str(fault)
    own = os.geteuid()
    if served_by in (0, own) or (own == 0 and by_name):
        return ""
    return f"it is served by uid {served_by}, who is neither you nor root"
