"""Values that go into a sandbox and nowhere else: where they come from, and what can be said about one by looking.

In: `Secret`s, which name sources. Out: values, held by this process alone until the server has them, and notes that
name secrets and never show one. What is plainly wrong with a source is said before anything is started; a value is
fetched only when a sandbox is about to be made. No process started here gets a value: not in its arguments, not in its
environment. Nothing is written.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import resource
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cli import show
from cli.config import Secret
from cli.network import covers
from sandboxd.client import Network
from sandboxd.errors import SandboxError
from sandboxd.termsafe import clean

MAX_BYTES = 128 << 10  # MAX_ARG_STRLEN of linux/binfmts.h: no process gets a longer variable
DAY_S = 24 * 3600
FOREVER_S = 1e15
SHOWN = 5
# GitHub's, GitLab's, Anthropic's and Slack's documented prefixes; of these only ghs_ (an installation's) lasts an hour.
SHORT = ("ghs_",)
LONG = ("github_pat_", "ghp_", "gho_", "glpat-", "sk-ant-", "xoxb-", "xoxp-")


class Values(NamedTuple):
    """By variable; and what the person should know of them."""

    env: Mapping[str, str]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Values({', '.join(self.env)})"


def guard() -> None:
    """From here on this process is worth reading: no core file of it, and nobody else's eyes in its /proc (proc(5))."""
    import prctl

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl.set_dumpable(0)


def check(secrets: Iterable[Secret], environ: Mapping[str, str]) -> None:
    """Raises where a variable or file is not there. Nothing is run, and no value is read."""
    for one in secrets:
        if one.source == "env" and one.value not in environ:
            raise SandboxError(f"secret {one.name}: {one.value} is not set here: export it first")
        if one.source == "file":
            os.close(_opened(one))


def fetch(secrets: Iterable[Secret], environ: Mapping[str, str], now_s: float | None = None) -> Values:
    """The values, in the order of names. Raises SandboxError at the first that cannot be had."""
    env: dict[str, str] = {}
    notes = []
    for one in sorted(secrets, key=lambda each: each.name):
        raw, who = _read(one) if one.source == "file" else (_raw(one, environ), "")
        env[one.name] = _text(one, raw)
        if who:
            notes.append(f"secret {one.name}: {one.value} can be read by {who}: chmod 600 {one.value}")
        if lasting := long_lived(env[one.name], time.time() if now_s is None else now_s):
            notes.append(f"secret {one.name} looks long-lived ({lasting}): a short one is worth less to a thief")
    return Values(env, tuple(notes))


def long_lived(value: str, now_s: float) -> str:
    """What shows that a value lasts; "" where nothing does, which proves nothing."""
    claims = _jwt(value)
    if claims is not None:
        expires = claims.get("exp")
        if isinstance(expires, bool) or not isinstance(expires, int | float):
            return "a JWT that does not expire"
        if expires <= now_s + DAY_S:
            return ""
        # Compared before it is calculated with: an integer may be larger than any float.
        days = (expires - now_s) / DAY_S if expires < FOREVER_S else math.inf
        return f"a JWT that expires in {days:.0f} days" if days < 1e6 else "a JWT that does not expire in our time"
    if value.startswith(SHORT):
        return ""
    return next((f"it starts with {prefix}" for prefix in LONG if value.startswith(prefix)), "")


def reach(secrets: Iterable[Secret], network: Network) -> tuple[str, ...]:
    """A note for each secret that is meant for some hosts, of a sandbox that may reach others too."""
    notes = []
    for one in secrets:
        more = beyond(one.hosts, network) if one.hosts else ()
        if more:
            meant, others = ", ".join(one.hosts), show.some(more, SHOWN)
            notes.append(f"secret {one.name} is meant for {meant}; this sandbox may also reach {others}")
    return tuple(notes)


def beyond(hosts: Sequence[str], network: Network) -> tuple[str, ...]:
    """What a sandbox may reach that is not among `hosts`."""
    if network.mode == "open":
        return ("any public host",)
    if network.mode != "allowlist":
        return ()
    names = dict.fromkeys((*(network.allow or ()), *network.allow_tcp))
    open_ = [name for name in names if not covers(network.deny, name.partition(":")[0])]
    return tuple(name for name in open_ if not covers(hosts, name.partition(":")[0]))


def _jwt(value: str) -> Mapping[str, object] | None:
    """The claims of a JSON Web Token (RFC 7519); None if it is none. Its signature is nothing to us."""
    parts = value.split(".")
    if len(parts) != 3:
        return None
    try:
        header, claims = (json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))) for part in parts[:2])
    except (binascii.Error, ValueError, RecursionError):
        return None
    return claims if isinstance(claims, dict) and isinstance(header, dict) else None


# -- where they come from


def _raw(one: Secret, environ: Mapping[str, str]) -> bytes:
    if one.source == "env":
        if one.value not in environ:
            raise SandboxError(f"secret {one.name}: {one.value} is not set here: export it first")
        return os.fsencode(environ[one.value])
    return _said(one)


def _read(one: Secret) -> tuple[bytes, str]:
    """What is in its file, and who else can read that: both of the file that was opened, whatever has its name now."""
    with os.fdopen(_opened(one), "rb") as file:
        return file.read(MAX_BYTES + 1), _others(os.fstat(file.fileno()))


def _opened(one: Secret) -> int:
    """A descriptor of its file. A link is followed: the person named it, and mounted secrets are links."""
    try:
        fd = os.open(one.value, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as fault:
        raise SandboxError(f"secret {one.name}: {clean(one.value)} cannot be read: {fault.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SandboxError(f"secret {one.name}: {clean(one.value)} is not a regular file")
    return fd


def _said(one: Secret) -> bytes:
    """What its command prints. It has no stdin, which is the run's; it may ask on the terminal, and complain there."""
    import subprocess

    command = ["/bin/sh", "-c", one.value]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.read(MAX_BYTES + 1)
            if len(said) <= MAX_BYTES and process.wait() != 0:
                how = f"exit code {process.returncode}" if process.returncode > 0 else f"signal {-process.returncode}"
                raise SandboxError(f"secret {one.name}: its command failed ({how})")
        finally:
            process.kill()
    return said


def _text(one: Secret, raw: bytes) -> str:
    """Messages name the secret; an error of decoding would show some of it."""
    if len(raw) > MAX_BYTES:
        raise SandboxError(f"secret {one.name}: it is longer than {MAX_BYTES >> 10} KiB")
    try:
        text = raw.decode().strip()
    except UnicodeDecodeError:
        raise SandboxError(f"secret {one.name}: it is not UTF-8 text: encode it, as base64 for instance") from None
    if "\0" in text:
        raise SandboxError(f"secret {one.name}: it holds a NUL: encode it, as base64 for instance")
    if not text:
        raise SandboxError(f"secret {one.name}: its {one.source} gives nothing")
    return text


def _others(info: os.stat_result) -> str:
    if info.st_uid != os.geteuid() or not info.st_mode & 0o044:
        return ""
    return "everybody here" if info.st_mode & 0o004 else "its group"
