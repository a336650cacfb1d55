"""Which sandboxd commands speak to: give addresses names, and choose one of them.

Usage:
  sandbox-cli context add [--token-file=FILE] [--ca=FILE] [--cert=FILE]
              [--key=FILE] NAME ENDPOINT
  sandbox-cli context (ls | list) [--json]
  sandbox-cli context use NAME
  sandbox-cli context rm NAME
  sandbox-cli context (-h | --help)

ENDPOINT is https://HOST:PORT, http://127.0.0.1:PORT or unix:///path. Of files
the absolute path is kept, never what is in them. `local` is built in: your own
sandboxd's socket, else root's. A command speaks to the context that --context
names, else SANDBOX_CONTEXT, else the one chosen with `use`. Removing that one
chooses `local` again.

Options:
  --token-file=FILE  holds the token, and only you may read it (over TCP one is
                     needed)
  --ca=FILE          who signs the server's certificate, if no authority of
                     this machine does (PEM)
  --cert=FILE        a client certificate, for a server that wants one (PEM)
  --key=FILE         its key
  --json             print objects
  -h, --help         show this
"""

from __future__ import annotations

import os
import sys
from typing import Any

from cli import context, contexts, show
from cli.contexts import LOCAL, Context, Contexts
from cli.place import config_dir
from sandboxd import endpoint
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

FLAGS = {"token_file": "--token-file", "ca_file": "--ca", "cert_file": "--cert", "key_file": "--key"}
HEAD = ("", "NAME", "ENDPOINT", "TOKEN FILE", "CA")


def main(args: dict[str, Any]) -> int:
    name = args["NAME"]
    if args["add"]:
        files = {key: args[option] for key, option in FLAGS.items() if args[option] is not None}
        return _add(name, checked(args["ENDPOINT"], files))
    if args["use"]:
        return _use(name)
    return _remove(name) if args["rm"] else _list(args["--json"])


def checked(address: str, files: dict[str, str]) -> Context:
    """Raises `SandboxError` where the address is none, or a file is not there or does not hold what it should."""
    found = {key: os.path.abspath(os.path.expanduser(file)) for key, file in files.items()}
    if address.startswith("unix://") and (stray := sorted(set(found) - {"token_file"})):
        raise SandboxError(f"{clean(address)}: {'a CA' if 'ca_file' in stray else 'a certificate'} is for https://")
    if not address.startswith(("unix:///", "http://", "https://")):
        raise SandboxError(f"{clean(address)}: not https://HOST:PORT, http://127.0.0.1:PORT or unix:///path")
    if "token_file" not in found and not address.startswith("unix:"):
        raise SandboxError(f"{clean(address)}: over TCP a token is needed; name its file with --token-file")
    one = endpoint.Endpoint.of(address, **found)
    if one.token_file:
        endpoint.read_token(one.token_file)
    if one.ca_file or one.cert_file:
        from sandboxd import tlsclient

        try:
            tlsclient.context(one.ca_file, one.cert_file, one.key_file)
        except OSError as fault:
            raise SandboxError(str(fault)) from None
    return Context(one.address, one.token_file, one.ca_file, one.cert_file, one.key_file)


def _add(name: str, one: Context) -> int:
    contexts.check_name(name)

    def step(now: Contexts) -> Contexts:
        if name in now.named:
            raise SandboxError(f"there is a context {name}: remove it first with: sandbox-cli context rm {name}")
        return now._replace(named={**now.named, name: one})

    contexts.change(config_dir(), step)
    show.line(name)
    show.note(f"make it the one that commands speak to with: sandbox-cli context use {name}")
    return 0


def _use(name: str) -> int:
    def step(now: Contexts) -> Contexts:
        if name != LOCAL:
            now.get(name)
        return now._replace(current=name)

    contexts.change(config_dir(), step)
    show.line(name)
    _note_environment()
    return 0


def _remove(name: str) -> int:
    if name == LOCAL:
        contexts.check_name(name)

    def step(now: Contexts) -> Contexts:
        now.get(name)
        left = {key: one for key, one in now.named.items() if key != name}
        return Contexts(left, now.current if now.current in left else LOCAL)

    was = contexts.load(config_dir()).current
    contexts.change(config_dir(), step)
    show.line(name)
    if was == name:
        show.note(f"commands speak to {LOCAL} now")
    return 0


def _list(as_json: bool) -> int:
    found = contexts.load(config_dir())
    own = context.local_sockets(os.geteuid(), os.environ)[0]
    rows = {LOCAL: Context(f"unix://{own}"), **found.named}
    if as_json:
        show.as_json(
            [{"name": name, "current": name == found.current, **one._asdict()} for name, one in rows.items()]
        )
        return 0
    lines = [
        ("*" if name == found.current else " ", name, one.address, one.token_file, one.ca_file)
        for name, one in rows.items()
    ]
    sys.stdout.write(show.table(HEAD, lines))
    _note_environment()
    return 0


def _note_environment() -> None:
    """What is chosen is not what is spoken to."""
    if over := os.environ.get("SANDBOX_CONTEXT"):
        show.note(f"SANDBOX_CONTEXT is set, and comes before it: {over}")
