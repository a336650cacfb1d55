"""A server's errors in the words of the command line.

In: an error's message and what the person called things. Out: a message that names them, flags instead of fields,
and says what to do. A message that is not known here passes as it is.
"""

from __future__ import annotations

import re

LIMITS = {
    "cpus": ("--cpus", ""),
    "memory_mb": ("--memory", " (MiB)"),
    "disk_mb": ("--disk", " (MiB)"),
    "idle_timeout_secs": ("--idle", " (seconds)"),
}
_LIMIT = re.compile(r"(\w+) (must be .*\d)(?:, or 0 for the default)?")
_EXISTS = re.compile(r"a sandbox named (\S+) exists")
FIELDS = {
    "network.mode": "--network",
    "network.allow": "--allow",
    "network.allow_tcp": "--allow-tcp",
    "network.deny": "--deny",
}
_NO_VOLUME = re.compile(r"no such volume: (\S+)")
_ATTACHED = re.compile(r"the volume \S+ is attached to (\S+?)(?: for (?:reading|writing);.*)?")
_FIELD = re.compile(r"(network\.[a-z_]+)(?=[: \[])")
GETTING_READY = "sandboxd is getting ready"
"""What a 503 begins with that ends by itself; the others may take for ever."""
CAPABILITIES = {
    "suspend": "suspend sandboxes",
    "memory_snapshot": "take snapshots",
    "disk_snapshot": "take snapshots",
    "network_policy_update": "change a sandbox's network",
    "volumes": "keep volumes",
    "images": "fetch images",
    "workspace_bundle": "take a repository",
    "bind_workspace": "share a directory of this machine",
    "tunnel": "tunnel",
    "audit": "show what was done",
}
_LACKS = re.compile(r"this endpoint does not have the capability (\w+)(?=$|:)")
NO_SANDBOX = "no such sandbox"
NO_PROCESS = "no such process"
ENDED = ("the sandbox is terminated", "the sandbox has ended")


def about(message: str, ref: str, pid: str | None = None) -> str:
    """For a request that named the sandbox `ref`, and perhaps a process of it."""
    if message == NO_SANDBOX:
        return f"no such sandbox: {ref}; see sandbox-cli list"
    if message == NO_PROCESS and pid is not None:
        return f"no such process {pid} in {ref}"
    if message in ENDED:
        return f"{ref} has ended"
    return plain(message)


def plain(message: str) -> str:
    """For any request: capabilities and fields in the words of the command line."""
    if (lacks := _LACKS.match(message)) and lacks[1] in CAPABILITIES:
        said = CAPABILITIES[lacks[1]] + message[lacks.end() :]
        return f"this sandboxd cannot {said} (what it can: sandbox-cli doctor)"
    limit = _LIMIT.fullmatch(message)
    if limit and limit[1] in LIMITS:
        flag, unit = LIMITS[limit[1]]
        # 0 means never, and only where the server has no longest time.
        never = "; this sandboxd lets none idle for ever" if flag == "--idle" and "between 1 " in limit[2] else ""
        return f"{flag} {limit[2]}{unit}{never}"
    return _in_flags(message)


def of_create(message: str) -> str:
    """For a request to make a sandbox."""
    if exists := _EXISTS.fullmatch(message):
        name = exists[1]
        return f"a sandbox named {name} is running: choose another --name, or end it with: sandbox-cli kill {name}"
    if missing := _NO_VOLUME.fullmatch(message):
        return f"no volume named {missing[1]}: make it with: sandbox-cli volume create {missing[1]}"
    if _ATTACHED.fullmatch(message):
        return of_volume(message)
    return plain(message)


def of_volume(message: str) -> str:
    """For a request that wants a volume which somebody has."""
    attached = _ATTACHED.fullmatch(message)
    return f"{message}; wait for it, or end it with: sandbox-cli kill {attached[1]}" if attached else message


def _in_flags(message: str) -> str:
    """A message that begins with a field of the request begins with the flag instead."""
    field = _FIELD.match(message)
    if not field:
        return message
    rest = message[field.end() :].replace("(other ports: allow_tcp)", "(other ports: --allow-tcp HOST:PORT)")
    return FIELDS.get(field[1], field[1]) + rest.replace("are decided by allow;", "are decided by --allow;")
