"""Which sandboxd a command speaks to.

In: `--context`, else `SANDBOX_CONTEXT`, else the context that was chosen with `context use`. `local` is the person's
own socket, then root's; another name is looked up in `contexts`; else it is an address, for which `SANDBOX_TOKEN_FILE`,
`SANDBOX_CA_FILE`, `SANDBOX_CERT_FILE` and `SANDBOX_KEY_FILE` name files, and where those are not set the context that
has this address: so the address in the record of a run is enough to find its sandboxd from another shell.

Out: an `Endpoint` with a `Client` for a socket that answered a connection and is served by the person or by root, or
for a network address; or an error that says why there is none and how to start one. A daemon that was started a moment
ago can be waited for. A named context's token goes to its own address only; the environment's is not sent there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cli import contexts, place, show
from cli.contexts import LOCAL, Context
from cli.place import config_dir
from sandboxd import endpoint, unixhttp
from sandboxd.client import Client
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

ROOT_SOCKET = "/run/sandboxd/sandboxd.sock"
CONNECT_S = 10.0
STARTING_S = 5.0
SAY_AFTER_S = 1.0
ASK_AGAIN_S = 0.1


class Endpoint(NamedTuple):
    """`name` is the context as it was asked for, `note` what a person should know about the choice."""

    name: str
    client: Client
    note: str


class Refusal(NamedTuple):
    """Why a socket cannot be used. `absent`: nothing answers there (yet); `denied`: not to us."""

    why: str
    absent: bool = False
    denied: bool = False


class _Nobody(SandboxError):
    """No sandboxd answers, and one that is starting would."""


def local_sockets(uid: int, environ: Mapping[str, str]) -> list[str]:
    """Where a sandboxd listens by default: the person's own first, then root's."""
    if uid == 0:
        return [ROOT_SOCKET]
    own = place.base(environ, "XDG_RUNTIME_DIR", ".config/sandbox")
    return [os.path.join(own, "sandboxd.sock"), ROOT_SOCKET]


def choose(asked: str | None, patience_s: float = 0.0) -> Endpoint:
    """Find the endpoint, without a request. A socket where nothing answers is asked again for `patience_s`."""
    began = time.monotonic()
    said = False
    while True:
        try:
            return _choose(asked)
        except _Nobody as nobody:
            waited = time.monotonic() - began
            if waited >= patience_s:
                raise SandboxError(str(nobody)) from None
        if waited >= SAY_AFTER_S and not said:
            show.note("waiting for a sandboxd")
            said = True
        time.sleep(ASK_AGAIN_S)


def _choose(asked: str | None) -> Endpoint:
    name = asked or os.environ.get("SANDBOX_CONTEXT") or contexts.load(config_dir()).current
    if name == LOCAL:
        return _local()
    if "://" not in name:
        return _reach(name, contexts.load(config_dir()).get(name))
    if not name.startswith(("unix:///", "http://", "https://")):
        raise SandboxError(
            f"context {clean(name)}: neither a context's name nor unix:///path/to/sandboxd.sock, "
            "http://127.0.0.1:PORT or https://HOST:PORT"
        )
    return _reach(name, _of_address(name))


def _of_address(address: str) -> Context:
    files = {key: os.environ.get(f"SANDBOX_{key.upper()}", "") for key in contexts.FILES}
    if not files["token_file"] and (known := contexts.load(config_dir()).at(address.rstrip("/"))):
        return known
    return Context(address, **files)


def _reach(name: str, one: Context) -> Endpoint:
    """The files are looked at now, so that what is wrong with them is said before anything is tried."""
    if one.address.startswith("unix:///"):
        path = one.address.removeprefix("unix://")
        if no := _refusal(path, by_name=True):
            kind = _Nobody if no.absent else SandboxError
            whose = "" if "://" in name else f" (context {clean(name)})"
            raise kind(f"no sandboxd at {clean(path)}{whose}: {no.why}")
        return Endpoint(name, Client(_named(name, endpoint.Endpoint.of(one.address, token_file=one.token_file))), "")
    if not one.token_file:
        raise SandboxError(
            f"context {clean(name)}: SANDBOX_TOKEN_FILE must name the file that holds the token, or a context with "
            "this address: sandbox-cli context add --token-file FILE NAME ENDPOINT"
        )
    endpoint.read_token(one.token_file)
    found = endpoint.Endpoint.of(
        one.address, token_file=one.token_file, ca_file=one.ca_file, cert_file=one.cert_file, key_file=one.key_file
    )
    return Endpoint(name, Client(_named(name, found)), "")


def _named(name: str, found: endpoint.Endpoint) -> endpoint.Endpoint:
    """Who chose a context a while ago is told which one it is."""
    return found if "://" in name else found._replace(name=name)


def _client(path: str) -> Client:
    """A daemon that has tokens wants one on its unix socket, too."""
    token_file = os.environ.get("SANDBOX_TOKEN_FILE", "")
    return Client(endpoint.Endpoint.of(f"unix://{path}", token_file=token_file))


def _local() -> Endpoint:
    refused: list[tuple[str, Refusal]] = []
    for path in local_sockets(os.geteuid(), os.environ):
        no = _refusal(path, by_name=False)
        if no is None:
            note = f"using root's sandboxd at {path} ({refused[0][0]}: {refused[0][1].why})" if refused else ""
            return Endpoint("local", _client(path), note)
        refused.append((path, no))
    kind = _Nobody if refused[0][1].absent else SandboxError
    raise kind(nobody(refused, os.geteuid()))


def nobody(refused: Sequence[tuple[str, Refusal]], uid: int) -> str:
    """What to say when none of the sockets can be used."""
    parts = [f"no sandboxd is running: start {'it' if uid == 0 else 'yours'} with 'sandboxd &'"]
    for path, no in refused:
        if path == ROOT_SOCKET and no.denied:
            parts.append("root's is running, but only root may use it")
        elif not no.absent:
            parts.append(f"{path}: {no.why}")
    return "; ".join(parts)


def _refusal(path: str, *, by_name: bool) -> Refusal | None:
    """Root may name somebody else's socket."""
    try:
        with unixhttp.connect(path, CONNECT_S) as sock:
            served_by = unixhttp.peer_uid(sock)
    except (OSError, ValueError) as fault:  # the latter: no path can be what a file of ours says
        why = getattr(fault, "strerror", "") or str(fault)
        absent = isinstance(fault, FileNotFoundError | ConnectionRefusedError)
        return Refusal(why, absent, isinstance(fault, PermissionError))
    own = os.geteuid()
    if served_by in (0, own) or (own == 0 and by_name):
        return None
    return Refusal(f"it is served by uid {served_by}, who is neither you nor root")
