"""Version skew between this daemon and a guest that was started by another one.

In: an op of the guest protocol and the version the guest speaks. Out: whether it may be asked for, or a sentence for
the person who wanted it. A guest of this version or the one before is asked for all that its version has; any other
for what no version changes (`protocol.EVERY_VERSION`): processes are listed, followed and killed, and the work is
brought back. guestd is never replaced in a running sandbox, so its version is part of the sandbox's record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from guestd import protocol

OLDER = (
    "this sandbox was started by an older version of sandboxd and cannot do that; its processes can be listed and"
    " killed and its work brought back: start another sandbox to go on"
)
NEWER = (
    "this sandbox was started by a newer version of sandboxd and this one cannot do that; its processes can be listed"
    " and killed and its work brought back: start that version again to go on"
)


def refusal(
    op: str, fields: Iterable[str], guest: int, ours: int, since: Mapping[str, int]
) -> str | None:
    """Why a guest of version `guest` is not asked for `op` with these fields, or None."""
    if op in protocol.EVERY_VERSION or guest == ours:
        return None
    if guest > ours:
        return NEWER
    wanted = max(since.get(key, 1) for key in (op, *(f"{op}.{name}" for name in fields)))
    return OLDER if guest < ours - 1 or guest < wanted else None
