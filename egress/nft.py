"""Rule texts into the kernel, and counters out of it, with the program `nft`.

In: a text, and the name of a namespace or None for the one of the calling thread. Out: nothing, or NftError with
what nft said. Blocking: call from a thread. It knows no rule itself.
"""

from __future__ import annotations

import json
import subprocess

from egress.plan import NAMESPACES

TIMEOUT_S = 20.0


class NftError(Exception):
    """nft did not do it; the rules are what they were before."""


def apply(text: str, namespace: str | None = None) -> None:
    """All of `text` or nothing of it."""
    _run(namespace, ["nft", "-f", "-"], text)


def counters(namespace: str) -> dict[str, int]:
    """Packets counted so far, by the names of the counters."""
    listing = json.loads(_run(namespace, ["nft", "-j", "list", "counters"], ""))
    found = [entry["counter"] for entry in listing["nftables"] if "counter" in entry]
    return {counter["name"]: int(counter["packets"]) for counter in found}


def _run(namespace: str | None, argv: list[str], text: str) -> str:
    inside = [] if namespace is None else ["nsenter", f"--net={NAMESPACES}/{namespace}", "--"]
    try:
        done = subprocess.run(
            [*inside, *argv], input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise NftError(f"nft: {fault}") from None
    if done.returncode != 0:
        raise NftError(f"nft: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout
