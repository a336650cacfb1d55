"""A directory of this host as a sandbox's workspace, instead of a copy of the repository.

In: `--bind` and `--bind-read-only`. Out: what a create asks for, or an error before anything is asked of a server;
after the run, what it changed in the directory that this machine runs or obeys. The daemon decides by its own look at
the directory; this one is there so that what nobody gets is said in the flags' words, and only here HOME is known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cli import changed, gate, place, show, survey
from sandboxd.client import Bind, Capabilities, Client
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

WORKSPACE = "/workspace"
CAPABILITY = "bind_workspace"
# What says otherwise where the workspace comes from.
ELSEWHERE = ("--project", "--no-workspace", "--from-snapshot")


def given(args: Mapping[str, Any], environ: Mapping[str, str]) -> Bind | None:
    """What the flags ask for, as an absolute path, its links not followed. Raises on what no sandboxd would share."""
    path, read_only = args["--bind"], bool(args["--bind-read-only"])
    if path is None:
        if read_only:
            raise SandboxError("--bind-read-only goes with --bind DIR")
        return None
    for flag in ELSEWHERE:
        if args[flag]:
            raise SandboxError(f"--bind and {flag} both say what /workspace is: leave one out")
    if args["--checkpoint-every"] not in (None, "0"):
        raise SandboxError("--checkpoint-every: with --bind what the command makes is here already")
    # Not normalised: `..` behind a link is the link's, and the daemon's to follow.
    whole = os.path.join(os.getcwd(), os.path.expanduser(path)).removesuffix("/.") or "/"
    _check(whole, environ, read_only=read_only)
    return Bind(whole, read_only)


def check_endpoint(client: Client) -> None:
    """Raises where there is no need to ask: a server that is not on this machine."""
    if not client.endpoint.socket_path:
        raise SandboxError(
            f"--bind: {clean(client.path)} is reached over the network; only a sandboxd on a unix socket of this "
            "machine shares its directories"
        )


def check_offer(offer: Capabilities) -> None:
    """Raises where this server shares no directory."""
    if not offer.capabilities.get(CAPABILITY):
        why = offer.lacking.get(CAPABILITY) or "it takes `sandboxd --allow-bind` (policy: allow_bind: true)"
        raise SandboxError(f"--bind: this sandboxd shares no directories: {clean(why)}")


def notes(bind: Bind, *, detached: bool) -> Iterator[str]:
    """What the person should know before the command runs."""
    shown = clean(bind.host_path)
    if bind.read_only:
        yield f"/workspace is {shown}, only to be read: nothing comes back"
    else:
        yield f"/workspace is {shown} itself: what the command changes there is changed here, and nothing checks it"
        if detached:
            yield "nobody waits for its end, so what it changes there that this machine runs later will not be listed"


class Watch:
    """A directory that a run may change: what the host runs or obeys in it, from before to after."""

    def __init__(self, bind: Bind) -> None:
        self._directory = Path(os.path.realpath(bind.host_path))
        self._before = survey.snapshot(self._directory)

    def tell(self, *, running: bool) -> dict[str, Any]:
        """Says what differs now, and gives it as `--json` prints it. `running`: the sandbox can still change it."""
        review = changed.compare(self._before, survey.snapshot(self._directory))
        for line in changed.lines(review):
            show.note(line)
        if running:
            shown = clean(str(self._directory))
            show.note(f"the sandbox still runs, and what it changes in {shown} from now on is not told")
        return gate.as_json(review)


def _check(path: str, environ: Mapping[str, str], *, read_only: bool) -> None:
    # Here, since only a run that asks for it should load the extension.
    import native

    home = place.home(environ)
    try:
        with native.open_directory(path) as directory:
            native.check_directory(directory, path, home)
            # The daemon knows its own alone; in the person's a guest could name commands for the next run.
            with suppress(FileNotFoundError):
                native.check_apart(directory, path, place.config_dir(environ))
            owner = os.fstat(directory.fd).st_uid
    except native.DirectoryRefused as refused:
        raise SandboxError(f"--bind {clean(path)}: {refused.refusal.value}; name a project's directory") from None
    except OSError as fault:
        raise SandboxError(f"--bind {clean(path)}: {os.strerror(fault.errno or 0)}") from None
    except ValueError:
        raise SandboxError(f"--bind {clean(path)}: not a path") from None
    if os.geteuid() == 0 and owner != 0 and not read_only:
        raise SandboxError(
            f"--bind {clean(path)}: it belongs to uid {owner}, and what is made there would be root's; as its owner, "
            "start a sandboxd (`sandboxd --allow-bind`) and run this, or take --bind-read-only"
        )
