"""What network a person asks for, in flags, and what that is on the wire.

In: the flags of `run` and `update`, and what the server offers. Out: a `NetworkRequest`, or an error in the flags'
words. A list that is given replaces the server's, so the server's own names are put in front of the person's unless
--no-baseline says otherwise. Whether a name may be allowed is the server's decision, not looked at here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cli import show
from sandboxd.client import Capabilities, Network, NetworkRequest
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

MODES = {"none": "none", "allowlist": "allowlist", "open": "open", "default": "open"}
_SERVICE = re.compile(r"[^:/\s]+:([0-9]{1,5})")
NO_NETWORK = (
    "this sandboxd gives sandboxes no network (its ceiling is none; see sandbox-cli doctor): "
    "a sandboxd that root starts does, unless --no-network or its policy forbids it"
)

_NO_AGENT = "an agent needs a network, and this sandboxd gives sandboxes none: its ceiling is none"
_ROOT = "start one without --no-network, under a policy that permits one: sandboxd &"
_OTHERS = "use root's, as said above"
_HOW = "to start one that gives a network, and use it in this shell:"
# On a port that only root may listen on: else whoever does while it is down is sent the token.
_COMMANDS = """\
    (umask 077; head -c 24 /dev/urandom | base64 > ~/.sandbox-token)
    sudo install -m 600 ~/.sandbox-token /etc/sandbox-token
    sudo "$(command -v sandboxd)" --listen 127.0.0.1:729 \\
         --token-file /etc/sandbox-token &
    export SANDBOX_CONTEXT=http://127.0.0.1:729
    export SANDBOX_TOKEN_FILE=~/.sandbox-token
"""


class Wanted(NamedTuple):
    """The flags, checked as far as this side can. `mode` is None where none was named."""

    mode: str | None = None
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    allow_tcp: tuple[str, ...] = ()
    baseline: bool = True

    @property
    def nothing(self) -> bool:
        return self == Wanted()


def wanted(args: Mapping[str, Any]) -> Wanted:
    """From --network, --allow, --deny, --allow-tcp and --no-baseline."""
    given = args["--network"]
    if given is not None and given not in MODES:
        raise SandboxError(f"--network {clean(given)}: it is none, allowlist or open")
    mode = MODES[given] if given else None
    for service in args["--allow-tcp"]:
        if not is_service(service):
            raise SandboxError(f"--allow-tcp {clean(service)}: it is HOST:PORT, with a port from 1 to 65535")
    if mode in ("none", "open"):
        for flag in ("--allow", "--allow-tcp", "--no-baseline"):
            if args[flag]:
                raise SandboxError(f"{flag} goes with --network allowlist, not with {clean(str(given))}")
    return Wanted(
        mode=mode, allow=tuple(args["--allow"]), deny=tuple(args["--deny"]), allow_tcp=tuple(args["--allow-tcp"]),
        baseline=not args["--no-baseline"],
    )  # fmt: skip


def is_service(text: str) -> bool:
    """Whether it is HOST:PORT."""
    port = _SERVICE.fullmatch(text)
    return port is not None and 0 < int(port[1]) < 65536


def covers(patterns: Iterable[str], name: str) -> bool:
    """Whether one of `patterns` (NAME, `*.NAME` or HOST:PORT) holds for all of `name`, which may be one itself."""
    return any(name == one or (one.startswith("*.") and name.endswith(one[1:]) and name != one[1:]) for one in patterns)


def over(flags: Wanted, settings: Wanted, file: str = "") -> Wanted:
    """The settings of files with the flags on top; `file` is the one that said the mode.

    Names are added to, and naming one means an allowlist, but no name opens what a file closed altogether.
    """
    names = bool(flags.allow or flags.allow_tcp or not flags.baseline)
    mode = flags.mode or settings.mode
    if flags.mode is None and names and mode == "none":
        raise SandboxError(f"{clean(file)}: network.mode is none, so naming hosts opens none: add --network allowlist")
    if flags.mode is None and names and mode == "open":
        mode = "allowlist"
    if mode == "none":
        return Wanted(mode="none")
    deny = _joined(settings.deny, flags.deny)
    if mode == "open":
        return Wanted(mode="open", deny=deny)
    return Wanted(
        mode=mode, allow=_joined(settings.allow, flags.allow), deny=deny,
        allow_tcp=_joined(settings.allow_tcp, flags.allow_tcp), baseline=settings.baseline and flags.baseline,
    )  # fmt: skip


def of_run(asked: Wanted, offer: Capabilities, also: Sequence[str] = ()) -> NetworkRequest | None:
    """For a sandbox to be made; None leaves it to the server. `also` are names that its program needs: they are added
    to an allowlist, whoever it comes from, and change nothing else."""
    if also and asked.mode != "none" and (asked.mode or offer.network_default.mode) == "allowlist":
        asked = asked._replace(allow=_joined(asked.allow, also))
    if asked.nothing:
        return None
    if asked.mode == "none":
        return NetworkRequest(mode="none")
    deny = asked.deny or None
    if asked == Wanted(deny=asked.deny):
        # Where there is no network, nothing is reached that could be denied.
        return None if offer.network_ceiling == "none" else NetworkRequest(deny=deny)
    if offer.network_ceiling == "none":
        raise SandboxError(NO_NETWORK)
    if asked.mode == "open":
        return NetworkRequest(mode="open", deny=deny)
    default = offer.network_default
    base = (default.allow or (), default.allow_tcp) if asked.baseline else ((), ())
    allow, allow_tcp = _joined(base[0], asked.allow), _joined(base[1], asked.allow_tcp)
    if not allow and not allow_tcp:
        why = "this sandboxd's own list is empty" if asked.baseline else "--no-baseline leaves the server's names out"
        raise SandboxError(f"the allowlist has no name in it: {why}; name hosts with --allow, or use --network none")
    return NetworkRequest(mode="allowlist", allow=allow, deny=deny, allow_tcp=allow_tcp)


def for_agents(offer: Capabilities, uid: int) -> None:
    """Raises where no agent could work, with what to do about it: commands are lines of their own, to be pasted."""
    if offer.network_ceiling == "none":
        if uid:
            show.note(_HOW)
            show.error(_COMMANDS)
        raise SandboxError(f"{_NO_AGENT}; {_OTHERS if uid else _ROOT}")


def of_update(asked: Wanted, now: Network, offer: Capabilities) -> NetworkRequest | None:
    """For a sandbox whose network is `now`. Lists are added to, unless the flags say where to start from."""
    if asked.mode is not None or not asked.baseline or asked.nothing:
        return of_run(asked, offer)
    if offer.network_ceiling == "none":
        raise SandboxError(NO_NETWORK)
    if now.mode == "open" and (asked.allow or asked.allow_tcp):
        raise SandboxError("its network is open: --allow narrows it only with --network allowlist")
    if now.mode == "open":
        return NetworkRequest(mode="open", deny=_joined(now.deny, asked.deny))
    # From none there is no way back: that is the server's to say.
    return NetworkRequest(
        mode="allowlist", allow=_joined(now.allow or (), asked.allow), deny=_joined(now.deny, asked.deny),
        allow_tcp=_joined(now.allow_tcp, asked.allow_tcp),
    )  # fmt: skip


def _joined(present: Sequence[str], more: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*present, *more)))
