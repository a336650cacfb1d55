"""Rule texts into the kernel, and counters out of it, with the program `nft`.

In: a text, and the name of a namespace or None for the one of the calling thread. Out: nothing, or NftError with
what nft said. Blocking: call from a thread. It knows no rule itself.
"""

from __future__ import annotations

import json
import shutil
import subprocess

from egress.plan import NAMESPACES

TIMEOUT_S = 20.0
PROGRAMS = ("nft", "nsenter")
DIRECTORIES = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
"""Where programs are looked for, whatever PATH says: this runs as root."""


class NftError(Exception):
    """nft did not do it; the rules are what they were before."""


def apply(text: str, namespace: str | None = None) -> None:
    """All of `text` or nothing of it."""
    _run(namespace, ["-f", "-"], text)


def counters(namespace: str) -> dict[str, int]:
    """Packets counted so far, by the names of the counters."""
    listing = json.loads(_run(namespace, ["-j", "list", "counters"], ""))
    found = [entry["counter"] for entry in listing["nftables"] if "counter" in entry]
    return {counter["name"]: int(counter["packets"]) for counter in found}


def missing() -> list[str]:
    return [name for name in PROGRAMS if _which(name) is None]


def _which(name: str) -> str | None:
    return shutil.which(name, path=DIRECTORIES)


def _program(name: str) -> str:
    if path := _which(name):
        return path
    raise NftError(f"{name} is not installed")


def _run(namespace: str | None, arguments: list[str], text: str) -> str:
    inside = [] if namespace is None else [_program("nsenter"), f"--net={NAMESPACES}/{namespace}", "--"]
    argv = [*inside, _program("nft"), *arguments]
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise NftError(f"nft: {fault}") from None
    if done.returncode != 0:
        raise NftError(f"nft: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout
